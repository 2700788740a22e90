//! The kernels whose speed is the memory's: read, write and copy a buffer.

use super::source;
use crate::BackendError;
use crate::{Argument, Buffer, Device, Kernel, LaunchShape};

/// A buffer and the kernels that pass over its first bytes.
pub struct Passes {
    read: Kernel,
    write: Kernel,
    copy: Kernel,
    buffer: Buffer,
    guard: Buffer,
}

/// Bytes that a thread moves at once.
const PACKET: u64 = 16;

impl Passes {
    /// Compiles the kernels and fills a buffer of that many bytes with `pattern` over and over (random numbers: zeros are faster).
    ///
    /// # Errors
    /// When a kernel does not compile or memory is short.
    pub fn new(device: &Device, bytes: usize, pattern: &[u8]) -> Result<Self, BackendError> {
        let kernel = |file| device.kernel(&source(file).build(&[]), &format!("measure_{file}"));
        Ok(Self {
            read: kernel("read_bandwidth")?,
            write: kernel("write_bandwidth")?,
            copy: kernel("copy_bandwidth")?,
            buffer: device.repeat(pattern, bytes)?,
            guard: device.upload(&[0; 4])?,
        })
    }

    /// Reads that many bytes.
    ///
    /// # Errors
    /// When the launch is refused, or the buffer is smaller.
    pub fn read(&self, bytes: u64) -> Result<(), BackendError> {
        let packets = self.packets(bytes)?;
        let arguments = [
            Argument::from(&self.buffer),
            Argument::I64(packets),
            // The kernel writes its sum where it equals this, so that the loads cannot be left out.
            Argument::U32(0xdead_beef),
            Argument::from(&self.guard),
        ];
        self.read.launch(LaunchShape::covering(packets as usize, 1024, 8)?, &arguments)
    }

    /// Writes that many bytes.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn write(&self, bytes: u64) -> Result<(), BackendError> {
        let packets = self.packets(bytes)?;
        let arguments = [Argument::from(&self.buffer), Argument::I64(packets), Argument::U32(0x9e37_79b9)];
        self.write.launch(LaunchShape::covering(packets as usize, 256, 1)?, &arguments)
    }

    /// Reads the first half of that many bytes and writes them to the second.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn copy(&self, bytes: u64) -> Result<(), BackendError> {
        let packets = self.packets(bytes)? / 2;
        let target = Argument::Address(self.buffer.address() + packets as u64 * PACKET);
        let arguments = [target, Argument::from(&self.buffer), Argument::I64(packets)];
        self.copy.launch(LaunchShape::covering(packets as usize, 128, 1)?, &arguments)
    }

    fn packets(&self, bytes: u64) -> Result<i64, BackendError> {
        if bytes > self.buffer.bytes() as u64 {
            return Err(BackendError::Launch(format!("a pass over {bytes} bytes of a buffer of {}", self.buffer.bytes())));
        }
        Ok((bytes / PACKET) as i64)
    }
}
