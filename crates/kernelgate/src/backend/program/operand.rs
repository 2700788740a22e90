//! Arguments of launches before their memory is allocated.

use kernelgate_cuda::TensorBoxes;

/// An address in a region of a program, known when the program is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pointer {
    /// Number of the memory region that the pointer points into.
    pub(super) region: usize,
    /// Distance from the region's beginning, bytes.
    pub(super) offset: usize,
    /// Bytes that the address lies before the offset.
    pub(super) skipped: usize,
}

impl Pointer {
    /// A pointer that lies further by `bytes`.
    pub const fn offset_by(self, bytes: usize) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }

    /// The address `bytes` before this one, which may lie before the region: for a tensor whose
    /// first elements are neither held nor read.
    pub const fn address_before(self, bytes: usize) -> Self {
        Self { skipped: self.skipped + bytes, ..self }
    }

    /// The address, if its region begins at `base`.
    pub(super) const fn resolve_address(self, base: u64) -> u64 {
        base.wrapping_add(self.offset as u64).wrapping_sub(self.skipped as u64)
    }
}

/// An argument of a kernel launch in a program.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Operand {
    /// An argument that is an address in a memory region.
    Pointer(Pointer),
    /// A null pointer.
    Null,
    /// A map of the tensor at an address, by which the kernel copies boxes.
    Boxes(Pointer, TensorBoxes),
    /// `int`.
    I32(i32),
    /// `long long`.
    I64(i64),
    /// `float`.
    F32(f32),
}

/// A null pointer.
pub const NULL: Operand = Operand::Null;

/// An extent as the argument of an `int` parameter.
pub const fn int(extent: usize) -> Operand {
    Operand::I32(extent as i32)
}

/// An extent as the argument of a `long long` parameter.
pub const fn long_operand(extent: usize) -> Operand {
    Operand::I64(extent as i64)
}

/// A map of the tensor at an address, for a `TensorMap` parameter (`common/tensor_copy.cuh`). Loading
/// the program fails if no copy engine reads such a tensor.
pub const fn tensor_boxes(pointer: Pointer, boxes: TensorBoxes) -> Operand {
    Operand::Boxes(pointer, boxes)
}

/// Extents for `int` parameters.
pub fn int_operands<const N: usize>(extents: [usize; N]) -> [Operand; N] {
    extents.map(int)
}

impl From<Pointer> for Operand {
    fn from(pointer: Pointer) -> Self {
        Self::Pointer(pointer)
    }
}

impl From<i32> for Operand {
    fn from(value: i32) -> Self {
        Self::I32(value)
    }
}

impl From<i64> for Operand {
    fn from(value: i64) -> Self {
        Self::I64(value)
    }
}

impl From<f32> for Operand {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

/// Arguments of a launch in the order of the kernel's parameters: an operand, a pointer, the name
/// of a region for its start address, or a number of the parameter's own type. Arrays, vectors and
/// tuples hold several operands.
pub trait Operands {
    /// Appends the operands; `region` finds the beginning of a region.
    fn append(self, region: &dyn Fn(&str) -> Pointer, operands: &mut Vec<Operand>);
}

impl Operands for &str {
    fn append(self, region: &dyn Fn(&str) -> Pointer, operands: &mut Vec<Operand>) {
        operands.push(region(self).into());
    }
}

impl Operands for &String {
    fn append(self, region: &dyn Fn(&str) -> Pointer, operands: &mut Vec<Operand>) {
        self.as_str().append(region, operands);
    }
}

macro_rules! single_arguments {
    ($($type:ty),*) => {$(
        impl Operands for $type {
            fn append(self, _: &dyn Fn(&str) -> Pointer, operands: &mut Vec<Operand>) {
                operands.push(self.into());
            }
        }
    )*};
}
single_arguments!(Operand, Pointer, i32, i64, f32);

impl<T: Operands, const N: usize> Operands for [T; N] {
    fn append(self, region: &dyn Fn(&str) -> Pointer, operands: &mut Vec<Operand>) {
        self.into_iter().for_each(|each| each.append(region, operands));
    }
}

impl<T: Operands> Operands for Vec<T> {
    fn append(self, region: &dyn Fn(&str) -> Pointer, operands: &mut Vec<Operand>) {
        self.into_iter().for_each(|each| each.append(region, operands));
    }
}

macro_rules! tuple_arguments {
    ($first:ident $($rest:ident)*) => {
        impl<$first: Operands, $($rest: Operands),*> Operands for ($first, $($rest,)*) {
            #[allow(non_snake_case)]
            fn append(self, region: &dyn Fn(&str) -> Pointer, operands: &mut Vec<Operand>) {
                let ($first, $($rest,)*) = self;
                $first.append(region, operands);
                $($rest.append(region, operands);)*
            }
        }
        tuple_arguments!($($rest)*);
    };
    () => {
        impl Operands for () {
            fn append(self, _: &dyn Fn(&str) -> Pointer, _: &mut Vec<Operand>) {}
        }
    };
}
tuple_arguments!(A B C D E F G H I J);
