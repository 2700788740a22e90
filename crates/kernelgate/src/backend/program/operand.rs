//! Arguments of a program's launches, written before their memory is allocated.

use kernelgate_cuda::TensorWithTmaBoxes;

/// An address in a memory region of a program, resolved when the program is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionPointer {
    /// Number of the memory region that the pointer points into.
    pub(super) region_index: usize,
    /// Distance from the beginning of the region, in bytes.
    pub(super) offset_bytes: usize,
    /// Number of bytes to subtract from the offset; the result may be before the region.
    pub(super) bytes_subtracted_from_offset: usize,
}

impl RegionPointer {
    /// Returns the pointer moved forward by `bytes`.
    pub const fn offset_by(self, bytes: usize) -> Self {
        Self { offset_bytes: self.offset_bytes + bytes, ..self }
    }

    /// Returns the pointer moved back by `bytes`, possibly before its region, for a tensor whose
    /// first elements are neither stored nor read.
    pub const fn moved_back_by(self, bytes: usize) -> Self {
        Self { bytes_subtracted_from_offset: self.bytes_subtracted_from_offset + bytes, ..self }
    }

    /// Resolves the device address, given the address `base` of the pointer's region.
    pub(super) const fn resolve_address(self, base: u64) -> u64 {
        base.wrapping_add(self.offset_bytes as u64)
            .wrapping_sub(self.bytes_subtracted_from_offset as u64)
    }
}

/// An argument of a kernel launch in a program.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LaunchArgument {
    /// An argument that is an address in a memory region.
    Pointer(RegionPointer),
    /// A null pointer.
    Null,
    /// A tensor map (TMA descriptor) of the tensor at a pointer, with which the kernel copies
    /// boxes.
    TmaTensorMap(RegionPointer, TensorWithTmaBoxes),
    /// Argument of C type `int`.
    I32(i32),
    /// Argument of C type `long long`.
    I64(i64),
    /// Argument of C type `float`.
    F32(f32),
}

/// A null pointer.
pub const NULL: LaunchArgument = LaunchArgument::Null;

/// Converts a size to the argument of an `int` parameter.
pub const fn int_operand(extent: usize) -> LaunchArgument {
    LaunchArgument::I32(extent as i32)
}

/// Converts a size to the argument of a `long long` parameter.
pub const fn long_operand(extent: usize) -> LaunchArgument {
    LaunchArgument::I64(extent as i64)
}

/// Makes a tensor map (TMA descriptor) of the tensor at a pointer, for a `TensorMap` parameter
/// (`common/tensor_copy.cuh`). Loading the program fails if TMA cannot copy such a tensor.
pub const fn tensor_map_operand(
    pointer: RegionPointer,
    boxes: TensorWithTmaBoxes,
) -> LaunchArgument {
    LaunchArgument::TmaTensorMap(pointer, boxes)
}

/// Converts sizes to the arguments of `int` parameters.
pub fn int_operands<const N: usize>(extents: [usize; N]) -> [LaunchArgument; N] {
    extents.map(int_operand)
}

impl From<RegionPointer> for LaunchArgument {
    fn from(pointer: RegionPointer) -> Self {
        Self::Pointer(pointer)
    }
}

impl From<i32> for LaunchArgument {
    fn from(value: i32) -> Self {
        Self::I32(value)
    }
}

impl From<i64> for LaunchArgument {
    fn from(value: i64) -> Self {
        Self::I64(value)
    }
}

impl From<f32> for LaunchArgument {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

/// Arguments of a launch in the order of the kernel's parameters: operands, pointers, region names
/// (for the region's address), or numbers of the parameter's type. Arrays, vectors and tuples stand
/// for several arguments.
pub trait LaunchArgumentList {
    /// Appends the arguments to `operands`; the closure `region` returns a pointer to the region
    /// with a name.
    fn append_launch_arguments_to(
        self,
        region: &dyn Fn(&str) -> RegionPointer,
        operands: &mut Vec<LaunchArgument>,
    );
}

impl LaunchArgumentList for &str {
    fn append_launch_arguments_to(
        self,
        region: &dyn Fn(&str) -> RegionPointer,
        operands: &mut Vec<LaunchArgument>,
    ) {
        operands.push(region(self).into());
    }
}

impl LaunchArgumentList for &String {
    fn append_launch_arguments_to(
        self,
        region: &dyn Fn(&str) -> RegionPointer,
        operands: &mut Vec<LaunchArgument>,
    ) {
        self.as_str().append_launch_arguments_to(region, operands);
    }
}

macro_rules! single_arguments {
    ($($type:ty),*) => {$(
        impl LaunchArgumentList for $type {
            fn append_launch_arguments_to(self, _: &dyn Fn(&str) -> RegionPointer, operands: &mut Vec<LaunchArgument>) {
                operands.push(self.into());
            }
        }
    )*};
}
single_arguments!(LaunchArgument, RegionPointer, i32, i64, f32);

impl<T: LaunchArgumentList, const N: usize> LaunchArgumentList for [T; N] {
    fn append_launch_arguments_to(
        self,
        region: &dyn Fn(&str) -> RegionPointer,
        operands: &mut Vec<LaunchArgument>,
    ) {
        self.into_iter().for_each(|each| each.append_launch_arguments_to(region, operands));
    }
}

impl<T: LaunchArgumentList> LaunchArgumentList for Vec<T> {
    fn append_launch_arguments_to(
        self,
        region: &dyn Fn(&str) -> RegionPointer,
        operands: &mut Vec<LaunchArgument>,
    ) {
        self.into_iter().for_each(|each| each.append_launch_arguments_to(region, operands));
    }
}

macro_rules! tuple_arguments {
    ($first:ident $($rest:ident)*) => {
        impl<$first: LaunchArgumentList, $($rest: LaunchArgumentList),*> LaunchArgumentList for ($first, $($rest,)*) {
            #[allow(non_snake_case)]
            fn append_launch_arguments_to(self, region: &dyn Fn(&str) -> RegionPointer, operands: &mut Vec<LaunchArgument>) {
                let ($first, $($rest,)*) = self;
                $first.append_launch_arguments_to(region, operands);
                $($rest.append_launch_arguments_to(region, operands);)*
            }
        }
        tuple_arguments!($($rest)*);
    };
    () => {
        impl LaunchArgumentList for () {
            fn append_launch_arguments_to(self, _: &dyn Fn(&str) -> RegionPointer, _: &mut Vec<LaunchArgument>) {}
        }
    };
}
tuple_arguments!(A B C D E F G H I J);
