//! Kernel arguments, which are passed by value, and checks of their number and sizes.

use std::ffi::c_void;
use std::ops::Deref;

use crate::driver::memory::buffer::DeviceBuffer;

/// 64 bytes with the largest alignment that a kernel parameter may need, 64 for a tensor map
/// (`CUtensorMap`).
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C, align(64))]
struct AlignedArgumentChunk([u8; 64]);

/// The bytes of a kernel argument that is a struct of any size.
#[derive(Debug, Clone, PartialEq)]
pub struct BytesOfStructArgument {
    aligned_chunks: Vec<AlignedArgumentChunk>,
    size_bytes: usize,
}

/// A kernel argument, which is passed by value: an address, a number or a struct.
#[derive(Debug, Clone, PartialEq)]
pub enum KernelArgument {
    /// An address in device memory, or 0 for a null pointer.
    DeviceAddress(u64),
    /// Argument of C type `int`.
    I32(i32),
    /// Argument of C type `long long`.
    I64(i64),
    /// `unsigned int`.
    U32(u32),
    /// `unsigned long long`.
    U64(u64),
    /// Argument of C type `float`.
    F32(f32),
    /// The bytes of a struct of any size.
    Struct(BytesOfStructArgument),
}

impl KernelArgument {
    /// Makes a kernel argument from the bytes of a struct, such as a tensor map that the driver
    /// encoded.
    pub fn from_struct_bytes(bytes: &[u8]) -> KernelArgument {
        let mut stored = vec![AlignedArgumentChunk([0; 64]); bytes.len().div_ceil(64).max(1)];
        for (chunk, from) in stored.iter_mut().zip(bytes.chunks(64)) {
            chunk.0[..from.len()].copy_from_slice(from);
        }
        Self::Struct(BytesOfStructArgument { aligned_chunks: stored, size_bytes: bytes.len() })
    }

    /// Size in bytes of the argument, which must equal the size of the kernel's parameter.
    pub const fn size_in_bytes(&self) -> usize {
        match self {
            Self::DeviceAddress(_) | Self::I64(_) | Self::U64(_) => 8,
            Self::I32(_) | Self::U32(_) | Self::F32(_) => 4,
            Self::Struct(bytes) => bytes.size_bytes,
        }
    }

    /// Pointer to the bytes of the argument, for the driver's launch function.
    pub(crate) fn pointer_to_value(&self) -> *mut c_void {
        match self {
            Self::DeviceAddress(value) | Self::U64(value) => {
                std::ptr::from_ref(value).cast_mut().cast()
            }
            Self::I32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::I64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::Struct(bytes) => bytes.aligned_chunks.as_ptr().cast_mut().cast(),
        }
    }
}

/// Checks that the number and sizes in bytes of the given arguments are those of a kernel's
/// parameters.
///
/// # Errors
/// Returns a phrase about the first difference between the given and the expected sizes.
pub(crate) fn check_argument_sizes(
    given: &[KernelArgument],
    expected: &[usize],
) -> Result<(), String> {
    if given.len() != expected.len() {
        let (given, takes) = (given.len(), expected.len());
        return Err(format!("takes {takes} arguments, {given} were given"));
    }
    let mut sizes = given.iter().map(KernelArgument::size_in_bytes).zip(expected).enumerate();
    match sizes.find(|(_, (given, bytes))| given != *bytes) {
        Some((index, (given, bytes))) => {
            Err(format!("argument {index} has {given} bytes, the parameter {bytes}"))
        }
        None => Ok(()),
    }
}

impl From<&DeviceBuffer> for KernelArgument {
    fn from(buffer: &DeviceBuffer) -> Self {
        Self::DeviceAddress(buffer.device_address())
    }
}

impl From<f32> for KernelArgument {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl From<i32> for KernelArgument {
    fn from(value: i32) -> Self {
        Self::I32(value)
    }
}

impl From<i64> for KernelArgument {
    fn from(value: i64) -> Self {
        Self::I64(value)
    }
}

/// Arguments of a kernel launch, in the order of the kernel's parameters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KernelArgumentList(Vec<KernelArgument>);

impl KernelArgumentList {
    /// An empty list.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Appends an address of device memory to the kernel arguments.
    pub fn with_address(self, address: u64) -> Self {
        self.with_argument(KernelArgument::DeviceAddress(address))
    }

    /// Appends a number, or a struct without padding, to the kernel arguments.
    pub fn with_value<T: bytemuck::NoUninit>(self, value: T) -> Self {
        self.with_struct_bytes(bytemuck::bytes_of(&value))
    }

    /// Appends a struct, given as its bytes, to the kernel arguments, such as a tensor map that the
    /// driver encoded.
    pub fn with_struct_bytes(self, bytes: &[u8]) -> Self {
        self.with_argument(KernelArgument::from_struct_bytes(bytes))
    }

    fn with_argument(mut self, argument: KernelArgument) -> Self {
        self.0.push(argument);
        self
    }
}

impl Deref for KernelArgumentList {
    type Target = [KernelArgument];

    fn deref(&self) -> &[KernelArgument] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_must_match_the_parameters_in_number_and_size() {
        let arguments = KernelArgumentList::new()
            .with_address(8)
            .with_value(1.5f32)
            .with_struct_bytes(&[7; 128]);
        assert_eq!(check_argument_sizes(&arguments, &[8, 4, 128]), Ok(()));
        assert_eq!(
            check_argument_sizes(&arguments, &[8, 4]).unwrap_err(),
            "takes 2 arguments, 3 were given"
        );
        assert_eq!(
            check_argument_sizes(&arguments, &[8, 8, 128]).unwrap_err(),
            "argument 1 has 4 bytes, the parameter 8"
        );
        let KernelArgument::Struct(map) = &arguments[2] else { panic!("{arguments:?}") };
        assert_eq!(
            (map.aligned_chunks[1].0, arguments[2].pointer_to_value() as usize % 64),
            ([7; 64], 0)
        );
        assert_eq!(
            check_argument_sizes(&KernelArgumentList::new().with_struct_bytes(&[]), &[0]),
            Ok(())
        );
    }
}
