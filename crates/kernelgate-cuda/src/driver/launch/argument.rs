//! Kernel arguments, which are passed by value.

use std::ffi::c_void;
use std::ops::Deref;

use crate::driver::memory::buffer::DeviceBuffer;

/// Bytes as aligned as any parameter asks for: a tensor map (`CUtensorMap`) for 64.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C, align(64))]
struct ArgumentBytes([u8; 64]);

/// A kernel argument that is a struct of any size, as its bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct StructArgumentBytes {
    stored: Vec<ArgumentBytes>,
    size: usize,
}

/// A kernel argument, passed by value.
#[derive(Debug, Clone, PartialEq)]
pub enum KernelArgument {
    /// Device address, or 0 for a null pointer.
    Address(u64),
    /// `int`.
    I32(i32),
    /// `long long`.
    I64(i64),
    /// `unsigned int`.
    U32(u32),
    /// `unsigned long long`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// A struct as its bytes, of any size.
    Struct(StructArgumentBytes),
}

impl KernelArgument {
    /// A struct as its bytes, such as a tensor map that the driver encoded.
    pub fn bytes(bytes: &[u8]) -> KernelArgument {
        let mut stored = vec![ArgumentBytes([0; 64]); bytes.len().div_ceil(64).max(1)];
        for (chunk, from) in stored.iter_mut().zip(bytes.chunks(64)) {
            chunk.0[..from.len()].copy_from_slice(from);
        }
        Self::Struct(StructArgumentBytes { stored, size: bytes.len() })
    }

    /// Size of the kernel parameter that this argument is for, bytes.
    pub const fn argument_bytes(&self) -> usize {
        match self {
            Self::Address(_) | Self::I64(_) | Self::U64(_) => 8,
            Self::I32(_) | Self::U32(_) | Self::F32(_) => 4,
            Self::Struct(bytes) => bytes.size,
        }
    }

    /// Pointer to the bytes of the argument.
    pub(crate) fn pointer(&self) -> *mut c_void {
        match self {
            Self::Address(value) | Self::U64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::I32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::I64(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::U32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::F32(value) => std::ptr::from_ref(value).cast_mut().cast(),
            Self::Struct(bytes) => bytes.stored.as_ptr().cast_mut().cast(),
        }
    }
}

/// Checks that there is an argument of the right size, bytes, for each parameter of a kernel.
///
/// # Errors
/// Compares given and expected sizes of arguments; returns a phrase about the first difference.
pub(crate) fn check(given: &[KernelArgument], expected: &[usize]) -> Result<(), String> {
    if given.len() != expected.len() {
        let (given, takes) = (given.len(), expected.len());
        return Err(format!("takes {takes} arguments, {given} were given"));
    }
    let mut sizes = given.iter().map(KernelArgument::argument_bytes).zip(expected).enumerate();
    match sizes.find(|(_, (given, bytes))| given != *bytes) {
        Some((index, (given, bytes))) => {
            Err(format!("argument {index} has {given} bytes, the parameter {bytes}"))
        }
        None => Ok(()),
    }
}

impl From<&DeviceBuffer> for KernelArgument {
    fn from(buffer: &DeviceBuffer) -> Self {
        Self::Address(buffer.address())
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

/// Arguments of a launch in the order of the kernel's parameters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Arguments(Vec<KernelArgument>);

impl Arguments {
    /// An empty list.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Appends a device address to the arguments.
    pub fn address(self, address: u64) -> Self {
        self.with(KernelArgument::Address(address))
    }

    /// Appends a number, or a struct without padding, to the arguments.
    pub fn value<T: bytemuck::NoUninit>(self, value: T) -> Self {
        self.bytes(bytemuck::bytes_of(&value))
    }

    /// Appends a struct as its bytes, such as a tensor map that the driver encoded.
    pub fn bytes(self, bytes: &[u8]) -> Self {
        self.with(KernelArgument::bytes(bytes))
    }

    fn with(mut self, argument: KernelArgument) -> Self {
        self.0.push(argument);
        self
    }
}

impl Deref for Arguments {
    type Target = [KernelArgument];

    fn deref(&self) -> &[KernelArgument] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_arguments_are_checked_by_number_and_size() {
        let arguments = Arguments::new().address(8).value(1.5f32).bytes(&[7; 128]);
        assert_eq!(check(&arguments, &[8, 4, 128]), Ok(()));
        assert_eq!(check(&arguments, &[8, 4]).unwrap_err(), "takes 2 arguments, 3 were given");
        assert_eq!(
            check(&arguments, &[8, 8, 128]).unwrap_err(),
            "argument 1 has 4 bytes, the parameter 8"
        );
        let KernelArgument::Struct(map) = &arguments[2] else { panic!("{arguments:?}") };
        assert_eq!((map.stored[1].0, arguments[2].pointer() as usize % 64), ([7; 64], 0));
        assert_eq!(check(&Arguments::new().bytes(&[]), &[0]), Ok(()));
    }
}
