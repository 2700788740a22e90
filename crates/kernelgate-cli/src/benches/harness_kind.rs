//! Finds out which harness a bench executable uses, without running it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use regex::bytes::Regex;

use kernelgate::gpu_time;
use kernelgate::protocol;

/// Kind of harness that a bench executable uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BenchHarnessKind {
    /// The executable uses kernelgate's harness, which also uses Criterion.
    Ours,
    /// Uses Criterion alone.
    Criterion,
    /// Uses divan.
    Divan,
    /// The executable uses the compiler's own harness for `#[bench]` and tests.
    Libtest,
    /// The executable uses a harness that kernelgate does not know.
    Unknown,
}

impl BenchHarnessKind {
    /// Describes the harness for use in a sentence.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Ours => "it uses kernelgate",
            Self::Criterion => "it uses Criterion alone",
            Self::Divan => "it uses divan, neither kernelgate nor Criterion",
            Self::Libtest => "it uses libtest, neither kernelgate nor Criterion",
            Self::Unknown => "it uses neither kernelgate nor Criterion",
        }
    }
}

/// Texts that the executables of each harness contain, the best evidence first: the first text that
/// is found decides.
const EXECUTABLE_MARKS: [(&str, BenchHarnessKind); 5] = [
    (protocol::BENCH_MARK, BenchHarnessKind::Ours),
    // The executable uses Criterion's own `main`, with times of a GPU stream.
    (gpu_time::CRITERION_MAIN_MARK, BenchHarnessKind::Criterion),
    // Criterion 0.5 to 0.8 has this text in its help, so an executable with it uses Criterion.
    ("This executable is a Criterion.rs benchmark.", BenchHarnessKind::Criterion),
    ("DIVAN_SAMPLE_COUNT", BenchHarnessKind::Divan),
    ("RUST_TEST_THREADS", BenchHarnessKind::Libtest),
];
/// First bytes of a script; a script is not a bench executable, even if its text has the mark.
const SCRIPT_START: &[u8] = b"#!";
/// Number of bytes of the file that are searched at once.
const SEARCHED_PIECE_BYTES: usize = 1 << 20;

/// Determines the kind of harness of the executable in a file. Only regular files are read: opening
/// a FIFO would wait for its writer, and a device may react.
pub fn harness_kind_of_file(path: &Path) -> io::Result<BenchHarnessKind> {
    if !std::fs::metadata(path)?.is_file() {
        return Ok(BenchHarnessKind::Unknown);
    }
    search_for_mark(File::open(path)?, SEARCHED_PIECE_BYTES)
}

/// Searches part by part, because executables may be hundreds of megabytes.
fn search_for_mark(mut from: impl Read, piece: usize) -> io::Result<BenchHarnessKind> {
    let any = EXECUTABLE_MARKS.map(|(mark, _)| regex::escape(mark)).join("|");
    let any = Regex::new(&any).expect("an escaped text is a regular expression");
    // A mark may cross the border between two parts, so the parts overlap.
    let overlap = EXECUTABLE_MARKS.iter().map(|(mark, _)| mark.len()).max().unwrap_or(1) - 1;
    let mut held = Vec::with_capacity(overlap + piece);
    let (mut first, mut best) = (true, EXECUTABLE_MARKS.len());
    let kind = |best: usize| {
        EXECUTABLE_MARKS.get(best).map_or(BenchHarnessKind::Unknown, |(_, kind)| *kind)
    };
    loop {
        let read = from.by_ref().take(piece as u64).read_to_end(&mut held)?;
        if read == 0 || best == 0 || (first && held.starts_with(SCRIPT_START)) {
            return Ok(kind(best));
        }
        for hit in any.find_iter(&held) {
            let of_hit =
                EXECUTABLE_MARKS.iter().position(|(mark, _)| mark.as_bytes() == hit.as_bytes());
            best = of_hit.map_or(best, |of_hit| of_hit.min(best));
        }
        first = false;
        held.drain(..held.len().saturating_sub(overlap));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_harness_mark_of_an_executable_is_found_at_any_offset_and_not_in_scripts() {
        for (mark, kind) in EXECUTABLE_MARKS {
            for before in 0..100 {
                let text = [&vec![b'x'; before][..], mark.as_bytes(), &[0; 7]].concat();
                assert_eq!(
                    search_for_mark(&text[..], 32).unwrap(),
                    kind,
                    "{mark} after {before} bytes"
                );
                let cut = &text[..before + mark.len() - 1];
                assert_eq!(
                    search_for_mark(cut, 32).unwrap(),
                    BenchHarnessKind::Unknown,
                    "{mark} cut after {before}"
                );
            }
            let script = format!("#!/bin/sh\nexport {mark}=1\n");
            assert_eq!(search_for_mark(script.as_bytes(), 32).unwrap(), BenchHarnessKind::Unknown);
        }
        assert_eq!(search_for_mark(&b""[..], 32).unwrap(), BenchHarnessKind::Unknown);
        // A bench of this harness also contains Criterion's mark, and may contain libtest's.
        let all = EXECUTABLE_MARKS.map(|(mark, _)| mark);
        let from = [
            BenchHarnessKind::Ours,
            BenchHarnessKind::Criterion,
            BenchHarnessKind::Criterion,
            BenchHarnessKind::Divan,
        ];
        for (from, kind) in from.into_iter().enumerate() {
            let (forth, mut back) = (all[from..].join("\0"), all[from..].to_vec());
            back.reverse();
            for text in [forth, back.join("\0")] {
                assert_eq!(search_for_mark(text.as_bytes(), 32).unwrap(), kind);
            }
        }
    }

    #[test]
    fn only_regular_files_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for path in [&fifo, folder.path(), Path::new("/dev/null")] {
            assert_eq!(
                harness_kind_of_file(path).unwrap(),
                BenchHarnessKind::Unknown,
                "{}",
                path.display()
            );
        }
        assert!(harness_kind_of_file(&folder.path().join("none")).is_err());
    }
}
