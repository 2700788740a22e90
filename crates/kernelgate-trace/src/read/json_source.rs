//! Reads the bytes of a JSON file, decompresses gzip, and stops at size limits.

use std::fs::File;
use std::io::{BufRead, BufReader, Error, ErrorKind, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

/// Reading stops if this many bytes contain no quotation mark, because no name, number or nesting
/// of a trace is that long.
const MAX_JSON_BYTES_WITHOUT_QUOTE: usize = 16 << 20;
/// Decompressed size in bytes that is always allowed, at any compression ratio.
const ALWAYS_ALLOWED_DECOMPRESSED_BYTES: u64 = 1 << 30;
/// Maximum ratio of decompressed to compressed bytes, for files that decompress to more than 1 GiB.
/// Traces usually decompress to 10 to 40 times their compressed size.
const MAX_DECOMPRESSION_RATIO: u64 = 200;

/// Opens a file.
pub(super) fn open_plain_or_gzip_json(path: &Path) -> std::io::Result<SizeLimitedReader> {
    let file = File::open(path)?;
    let packed_size = file.metadata()?.len();
    let mut file = BufReader::with_capacity(1 << 16, file);
    let packed = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    let (inner, limit): (Box<dyn Read>, u64) = if packed {
        let limit = packed_size
            .saturating_mul(MAX_DECOMPRESSION_RATIO)
            .max(ALWAYS_ALLOWED_DECOMPRESSED_BYTES);
        (Box::new(MultiGzDecoder::new(file)), limit)
    } else {
        (Box::new(file), u64::MAX)
    };
    Ok(SizeLimitedReader {
        inner,
        max_decompressed_bytes: limit,
        decompressed_bytes_read: 0,
        bytes_since_last_quote: 0,
    })
}

/// Returns the first decompressed bytes of a gzip file; fewer bytes if the file is damaged.
pub(super) fn first_decompressed_bytes(path: &Path, bytes: u64) -> std::io::Result<Vec<u8>> {
    let mut head = Vec::new();
    // An error is ignored here, because reading the whole file meets the same error.
    let _ = open_plain_or_gzip_json(path)?.take(bytes).read_to_end(&mut head);
    Ok(head)
}

/// A reader that fails if the file decompresses too far, or contains a value that is too long for a
/// trace.
pub(super) struct SizeLimitedReader {
    inner: Box<dyn Read>,
    max_decompressed_bytes: u64,
    decompressed_bytes_read: u64,
    /// Number of bytes read since the last quotation mark.
    bytes_since_last_quote: usize,
}

impl Read for SizeLimitedReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.decompressed_bytes_read += count as u64;
        let bytes = &buffer[..count];
        self.bytes_since_last_quote = match bytes.iter().rposition(|&byte| byte == b'"') {
            Some(last) => count - last,
            None => self.bytes_since_last_quote + count,
        };
        if self.decompressed_bytes_read > self.max_decompressed_bytes {
            return Err(Error::new(
                ErrorKind::FileTooLarge,
                format!(
                    "unpacked it is more than {MAX_DECOMPRESSION_RATIO} times as large as the file"
                ),
            ));
        }
        if self.bytes_since_last_quote > MAX_JSON_BYTES_WITHOUT_QUOTE {
            return Err(Error::new(
                ErrorKind::FileTooLarge,
                format!(
                    "a value or nesting of more than {} MiB",
                    MAX_JSON_BYTES_WITHOUT_QUOTE >> 20
                ),
            ));
        }
        Ok(count)
    }
}
