//! Whether a file is a bench executable of this harness, told without running it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use regex::bytes::Regex;

use kernelgate::record::trial_request;

/// What executables built before there was [`trial_request::MARK`] have in common: the name of a
/// variable.
const EARLIER: &str = "KERNELGATE_SESSION";
/// Begins a script, which is no bench executable, whatever it mentions.
const SCRIPT: &[u8] = b"#!";
/// Bytes that are searched at a time.
const PIECE: usize = 1 << 20;

/// Whether the file holds the mark. What is no regular file holds none, and is not opened: to open
/// a FIFO is to wait for who writes into it, and a device may act on it.
///
/// # Errors
/// When it cannot be read.
pub fn is_in(path: &Path) -> io::Result<bool> {
    if !std::fs::metadata(path)?.is_file() {
        return Ok(false);
    }
    holds(File::open(path)?, PIECE)
}

/// Searches piece by piece: executables may be hundreds of megabytes.
fn holds(mut from: impl Read, piece: usize) -> io::Result<bool> {
    let either = format!("{}|{}", regex::escape(trial_request::MARK), regex::escape(EARLIER));
    let mark = Regex::new(&either).expect("an escaped text is a regular expression");
    // A mark may lie across the end of a piece.
    let overlap = trial_request::MARK.len().max(EARLIER.len()) - 1;
    let mut held = Vec::with_capacity(overlap + piece);
    let mut first = true;
    loop {
        let read = from.by_ref().take(piece as u64).read_to_end(&mut held)?;
        if read == 0 || (first && held.starts_with(SCRIPT)) {
            return Ok(false);
        }
        if mark.is_match(&held) {
            return Ok(true);
        }
        first = false;
        held.drain(..held.len().saturating_sub(overlap));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_found_wherever_it_lies_and_not_in_scripts() {
        for mark in [trial_request::MARK, EARLIER] {
            for before in 0..100 {
                let text = [&vec![b'x'; before][..], mark.as_bytes(), &[0; 7]].concat();
                assert!(holds(&text[..], 32).unwrap(), "{mark} after {before} bytes");
                let cut = &text[..before + mark.len() - 1];
                assert!(!holds(cut, 32).unwrap(), "{mark} cut after {before} bytes");
            }
            let script = format!("#!/bin/sh\nexport {mark}=1\n");
            assert!(!holds(script.as_bytes(), 32).unwrap());
        }
        assert!(!holds(&b""[..], 32).unwrap());
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for path in [&fifo, folder.path(), Path::new("/dev/null")] {
            assert!(!is_in(path).unwrap(), "{}", path.display());
        }
        assert!(is_in(&folder.path().join("none")).is_err());
    }
}
