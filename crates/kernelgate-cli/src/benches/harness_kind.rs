//! Finds which harness a bench executable uses (kernelgate, Criterion, libtest) by a search for
//! known texts in its file, without running it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use regex::bytes::Regex;

use kernelgate::gpu_time;
use kernelgate::protocol;

/// The harness with which a bench executable was built: kernelgate, Criterion, libtest, Divan or
/// unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BenchHarnessKind {
    /// The executable uses kernelgate's harness, which is built on Criterion.
    Kernelgate,
    /// Uses Criterion alone.
    CriterionOnly,
    /// Uses divan.
    Divan,
    /// The executable uses libtest, the compiler's own harness for `#[bench]` and tests.
    Libtest,
    /// The executable uses a harness that kernelgate does not recognise.
    UnknownHarness,
}

impl BenchHarnessKind {
    /// Describes which harness a bench uses, as a fragment for an error message.
    pub const fn harness_description(self) -> &'static str {
        match self {
            Self::Kernelgate => "it uses kernelgate",
            Self::CriterionOnly => "it uses Criterion alone",
            Self::Divan => "it uses divan, neither kernelgate nor Criterion",
            Self::Libtest => "it uses libtest, neither kernelgate nor Criterion",
            Self::UnknownHarness => "it uses neither kernelgate nor Criterion",
        }
    }
}

/// Texts that executables of each harness contain, in order of precedence: the first text of this
/// list that the file contains decides the harness.
const HARNESS_MARK_TEXTS: [(&str, BenchHarnessKind); 5] = [
    (protocol::BENCH_EXECUTABLE_MARK, BenchHarnessKind::Kernelgate),
    // The executable has Criterion's own `main`, but uses kernelgate to time a GPU stream.
    (gpu_time::MARK_OF_CRITERION_BENCH_EXECUTABLE, BenchHarnessKind::CriterionOnly),
    // The help text of Criterion 0.5 to 0.8 contains this mark text, so an executable with the mark
    // text uses Criterion.
    ("This executable is a Criterion.rs benchmark.", BenchHarnessKind::CriterionOnly),
    ("DIVAN_SAMPLE_COUNT", BenchHarnessKind::Divan),
    ("RUST_TEST_THREADS", BenchHarnessKind::Libtest),
];
/// First bytes of a script file (`#!`); a script counts as no bench executable, even if its text
/// contains a harness's mark.
const SCRIPT_FIRST_BYTES: &[u8] = b"#!";
/// Number of bytes of the executable file that the search for harness marks reads at once.
const MARK_SEARCH_PIECE_BYTES: usize = 1 << 20;

/// Determines which harness an executable file uses, by the marks in its bytes. Only regular files
/// are opened to determine the harness: opening a FIFO would wait for its writer, and opening a
/// device may have effects.
pub fn harness_kind_of_file(path: &Path) -> io::Result<BenchHarnessKind> {
    if !std::fs::metadata(path)?.is_file() {
        return Ok(BenchHarnessKind::UnknownHarness);
    }
    search_for_harness_mark(File::open(path)?, MARK_SEARCH_PIECE_BYTES)
}

/// Searches for harness marks piece by piece, because bench executables may be hundreds of
/// megabytes long.
fn search_for_harness_mark(mut from: impl Read, piece: usize) -> io::Result<BenchHarnessKind> {
    let any = HARNESS_MARK_TEXTS.map(|(mark, _)| regex::escape(mark)).join("|");
    let any = Regex::new(&any).expect("an escaped text is a regular expression");
    // A harness mark may cross the border between two pieces of the file, so neighbouring pieces
    // overlap.
    let overlap = HARNESS_MARK_TEXTS.iter().map(|(mark, _)| mark.len()).max().unwrap_or(1) - 1;
    let mut held = Vec::with_capacity(overlap + piece);
    let (mut first, mut best) = (true, HARNESS_MARK_TEXTS.len());
    let kind = |best: usize| {
        HARNESS_MARK_TEXTS.get(best).map_or(BenchHarnessKind::UnknownHarness, |(_, kind)| *kind)
    };
    loop {
        let read = from.by_ref().take(piece as u64).read_to_end(&mut held)?;
        if read == 0 || best == 0 || (first && held.starts_with(SCRIPT_FIRST_BYTES)) {
            return Ok(kind(best));
        }
        for hit in any.find_iter(&held) {
            let of_hit =
                HARNESS_MARK_TEXTS.iter().position(|(mark, _)| mark.as_bytes() == hit.as_bytes());
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
    fn a_harness_mark_is_found_at_any_offset_but_not_in_scripts() {
        for (mark, kind) in HARNESS_MARK_TEXTS {
            for before in 0..100 {
                let text = [&vec![b'x'; before][..], mark.as_bytes(), &[0; 7]].concat();
                assert_eq!(
                    search_for_harness_mark(&text[..], 32).unwrap(),
                    kind,
                    "{mark} after {before} bytes"
                );
                let cut = &text[..before + mark.len() - 1];
                assert_eq!(
                    search_for_harness_mark(cut, 32).unwrap(),
                    BenchHarnessKind::UnknownHarness,
                    "{mark} cut after {before}"
                );
            }
            let script = format!("#!/bin/sh\nexport {mark}=1\n");
            assert_eq!(
                search_for_harness_mark(script.as_bytes(), 32).unwrap(),
                BenchHarnessKind::UnknownHarness
            );
        }
        assert_eq!(
            search_for_harness_mark(&b""[..], 32).unwrap(),
            BenchHarnessKind::UnknownHarness
        );
        // An executable with kernelgate's harness also contains Criterion's mark, and may contain
        // libtest's.
        let all = HARNESS_MARK_TEXTS.map(|(mark, _)| mark);
        let from = [
            BenchHarnessKind::Kernelgate,
            BenchHarnessKind::CriterionOnly,
            BenchHarnessKind::CriterionOnly,
            BenchHarnessKind::Divan,
        ];
        for (from, kind) in from.into_iter().enumerate() {
            let (forth, mut back) = (all[from..].join("\0"), all[from..].to_vec());
            back.reverse();
            for text in [forth, back.join("\0")] {
                assert_eq!(search_for_harness_mark(text.as_bytes(), 32).unwrap(), kind);
            }
        }
    }

    #[test]
    fn only_regular_files_are_searched_for_harness_marks() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for path in [&fifo, folder.path(), Path::new("/dev/null")] {
            assert_eq!(
                harness_kind_of_file(path).unwrap(),
                BenchHarnessKind::UnknownHarness,
                "{}",
                path.display()
            );
        }
        assert!(harness_kind_of_file(&folder.path().join("none")).is_err());
    }
}
