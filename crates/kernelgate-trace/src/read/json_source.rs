//! Bytes of a JSON file, unpacked where it is packed, within limits.

use std::fs::File;
use std::io::{BufRead, BufReader, Error, ErrorKind, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

/// Number of bytes without a quotation mark after which the file is not a trace: no name, number or
/// nesting is that long.
const MAX_BYTES_WITHOUT_QUOTE: usize = 16 << 20;
/// Number of unpacked bytes that are allowed at any compression ratio.
const ALWAYS_ALLOWED_BYTES: u64 = 1 << 30;
/// Largest number of unpacked bytes for a packed byte, beyond the bytes that are always allowed.
/// Traces unpack to 10 to 40 times their size.
const MAX_UNPACKED_RATIO: u64 = 200;

/// Opens a file.
pub(super) fn open_json(path: &Path) -> std::io::Result<LimitedReader> {
    let file = File::open(path)?;
    let packed_size = file.metadata()?.len();
    let mut file = BufReader::with_capacity(1 << 16, file);
    let packed = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    let (inner, limit): (Box<dyn Read>, u64) = if packed {
        let limit = packed_size.saturating_mul(MAX_UNPACKED_RATIO).max(ALWAYS_ALLOWED_BYTES);
        (Box::new(MultiGzDecoder::new(file)), limit)
    } else {
        (Box::new(file), u64::MAX)
    };
    Ok(LimitedReader { inner, limit, read: 0, token: 0 })
}

/// The first unpacked bytes of a packed file; fewer if the file is damaged.
pub(super) fn first_unpacked_bytes(path: &Path, bytes: u64) -> std::io::Result<Vec<u8>> {
    let mut head = Vec::new();
    // The reader of the whole file finds the error again.
    let _ = open_json(path)?.take(bytes).read_to_end(&mut head);
    Ok(head)
}

/// A reader that gives up on what cannot be a trace.
pub(super) struct LimitedReader {
    inner: Box<dyn Read>,
    limit: u64,
    read: u64,
    /// Number of bytes since the last quotation mark.
    token: usize,
}

impl Read for LimitedReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.read += count as u64;
        let bytes = &buffer[..count];
        self.token = match bytes.iter().rposition(|&byte| byte == b'"') {
            Some(last) => count - last,
            None => self.token + count,
        };
        if self.read > self.limit {
            return Err(Error::new(
                ErrorKind::FileTooLarge,
                format!("unpacked it is more than {MAX_UNPACKED_RATIO} times as large as the file"),
            ));
        }
        if self.token > MAX_BYTES_WITHOUT_QUOTE {
            return Err(Error::new(
                ErrorKind::FileTooLarge,
                format!("a value or nesting of more than {} MiB", MAX_BYTES_WITHOUT_QUOTE >> 20),
            ));
        }
        Ok(count)
    }
}
