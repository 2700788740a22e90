//! Arguments of kernels.

use crate::driver::memory::buffer::Buffer;

/// An argument of a kernel, by value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
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
}

impl Argument {
    /// Size of the parameter that it is for.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Address(_) | Self::I64(_) | Self::U64(_) => 8,
            Self::I32(_) | Self::U32(_) | Self::F32(_) => 4,
        }
    }
}

/// Whether there is an argument of the right size, bytes, for each parameter of a kernel.
///
/// # Errors
/// The first difference, a fragment.
pub(crate) fn check(
    given: impl ExactSizeIterator<Item = usize>,
    expected: &[usize],
) -> Result<(), String> {
    if given.len() != expected.len() {
        let (given, takes) = (given.len(), expected.len());
        return Err(format!("takes {takes} arguments, {given} were given"));
    }
    match given.zip(expected).enumerate().find(|(_, (given, bytes))| given != *bytes) {
        Some((index, (given, bytes))) => {
            Err(format!("argument {index} has {given} bytes, the parameter {bytes}"))
        }
        None => Ok(()),
    }
}

impl From<&Buffer> for Argument {
    fn from(buffer: &Buffer) -> Self {
        Self::Address(buffer.address())
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl From<i32> for Argument {
    fn from(value: i32) -> Self {
        Self::I32(value)
    }
}

impl From<i64> for Argument {
    fn from(value: i64) -> Self {
        Self::I64(value)
    }
}
