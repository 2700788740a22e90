//! Events of a file that is not valid JSON: PyTorch writes some strings as they are, with control
//! characters and bare quotation marks. Each element of an array is read by itself.

use std::io::{self, Read};

/// Bytes that are read at once.
const BLOCK: usize = 1 << 18;

/// Hands out each object that is an element of an array, with all behind it up to the next.
pub(super) fn elements(mut source: impl Read, mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let mut buffer: Vec<u8> = Vec::new();
    let mut scan = Scan::default();
    loop {
        let before = buffer.len();
        buffer.resize(before + BLOCK, 0);
        let count = source.read(&mut buffer[before..])?;
        buffer.truncate(before + count);
        for at in before..buffer.len() {
            if let Some(start) = scan.next(buffer[at], at)
                && let Some(open) = scan.open.replace(start)
            {
                each(&buffer[open..start]);
            }
        }
        if count == 0 {
            scan.open.iter().for_each(|&open| each(&buffer[open..]));
            return Ok(());
        }
        // The open element stays, or a brace that may open one.
        let kept = scan.open.or(scan.brace).unwrap_or(buffer.len());
        scan.open = scan.open.map(|open| open - kept);
        scan.brace = scan.brace.map(|brace| brace - kept);
        buffer.drain(..kept);
    }
}

/// Where elements begin.
#[derive(Default)]
struct Scan {
    /// The last byte that is not white space.
    last: u8,
    /// A brace behind a comma or an opening bracket.
    brace: Option<usize>,
    /// The element that was not handed out yet.
    open: Option<usize>,
}

impl Scan {
    /// The next byte; where an element begins, if that byte shows it.
    fn next(&mut self, byte: u8, at: usize) -> Option<usize> {
        if byte.is_ascii_whitespace() {
            return None;
        }
        let start = self.brace.take().filter(|_| byte == b'"');
        if byte == b'{' && matches!(self.last, b',' | b'[') {
            self.brace = Some(at);
        }
        self.last = byte;
        start
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A reader that hands out few bytes at a time.
    struct Slow<'a>(&'a [u8]);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.0.len().min(3).min(buffer.len());
            buffer[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    #[test]
    fn events_are_found_across_blocks_and_behind_broken_strings() {
        let text = b"{\"traceEvents\": [\n {\"ph\": 1}, { \"ph\": \"a\"b\x01{\"}, {\n\"ph\": 3, \
                     \"args\": {\"x\": {}}}]}";
        for slow in [false, true] {
            let mut found: Vec<String> = Vec::new();
            let each = |event: &[u8]| {
                let text = String::from_utf8_lossy(event);
                found.push(text.split_whitespace().collect());
            };
            match slow {
                true => elements(Slow(text), each).unwrap(),
                false => elements(&text[..], each).unwrap(),
            }
            assert_eq!(found[0], "{\"ph\":1},");
            assert!(found[1].starts_with("{\"ph\":\"a\"b"), "{found:?}");
            assert_eq!(found[2], "{\"ph\":3,\"args\":{\"x\":{}}}]}");
            assert_eq!(found.len(), 3);
        }
    }
}
