//! Protocol between the program and a bench executable: one request in a file, one response in a
//! file.
//!
//! The program starts the executable with [`REQUEST_VARIABLE`] naming the request; the same flags
//! and variables as in `cargo bench` select cases. An executable answers the argument
//! [`VERSION_QUESTION`] with its protocol versions, so that the two sides of a comparison may use
//! different releases.
//!
//! A release that adds an optional field keeps the version. A release that changes a meaning, or
//! adds a field that must survive, raises it: readers reject a file of a newer version, and so
//! never write one back without its unknown fields.

mod recording;
mod request;
mod response;

pub use recording::{CaseRecording, RecordedPart, RecordedStages};
pub use request::{BenchRequest, RecordedLaunches, RequestedAction, TimingReportPart};
pub use response::{
    BenchListing, BenchResponse, BenchResponseBody, CaseStatus, ListedCase, ListedProblem,
    ListedRow, PeerProgram, ProfiledCase, ResourcesReport, TimingMethodReport, VerifiedCase,
};

/// Environment variable with the path of the request's file, or with [`VERSION_QUESTION`].
pub const REQUEST_VARIABLE: &str = "KERNELGATE_REQUEST";

/// Value of [`REQUEST_VARIABLE`] that asks only which versions an executable speaks.
pub const VERSION_QUESTION: &str = "protocol";

/// Oldest and newest version of the protocol that this library supports.
pub const SUPPORTED_VERSIONS: (u64, u64) = (1, 1);

/// Text at the beginning of the line that states the protocol versions.
const VERSION_LINE_PREFIX: &str = "kernelgate-protocol ";

/// A text in the file of every bench executable, by which the program `kernelgate` recognises it
/// without running it. The NUL bytes ensure that scripts and other text files do not contain this
/// mark.
pub const BENCH_MARK: &str = "\0kernelgate bench executable\0";

/// Makes sure that the compiler and the linker leave [`BENCH_MARK`] in the executable.
pub fn keep_executable_mark() {
    // Reading the mark through its pointer keeps the compiler from removing it.
    std::hint::black_box(BENCH_MARK.as_ptr());
}

/// Returns the newest protocol version that this library and an executable with these versions both
/// support.
pub fn newest_common_version((oldest, newest): (u64, u64)) -> Option<u64> {
    let version = newest.min(SUPPORTED_VERSIONS.1);
    (version >= oldest.max(SUPPORTED_VERSIONS.0)).then_some(version)
}

/// Response to [`VERSION_QUESTION`]: the oldest and the newest supported version, on a line of its
/// own.
pub fn version_answer() -> String {
    format!("{VERSION_LINE_PREFIX}{}-{}", SUPPORTED_VERSIONS.0, SUPPORTED_VERSIONS.1)
}

/// Versions in an answer, oldest and newest; `None` if the text is not an answer.
pub fn parse_version_answer(text: &str) -> Option<(u64, u64)> {
    let (oldest, newest) = text
        .lines()
        .find_map(|line| line.strip_prefix(VERSION_LINE_PREFIX))?
        .trim()
        .split_once('-')?;
    let versions = (oldest.parse().ok()?, newest.parse().ok()?);
    (1..=versions.1).contains(&versions.0).then_some(versions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_answer_is_parsed_and_other_text_is_rejected() {
        assert_eq!(
            parse_version_answer(&format!("noise\n{}\nmore noise\n", version_answer())),
            Some(SUPPORTED_VERSIONS)
        );
        assert_eq!(parse_version_answer("kernelgate-protocol 2-7"), Some((2, 7)));
        for other in [
            "",
            "kernelgate protocol 1-3",
            "kernelgate trial protocol 1",
            "kernelgate-protocol 3",
            "kernelgate-protocol 4-2",
            "kernelgate-protocol a-b",
        ] {
            assert_eq!(parse_version_answer(other), None, "{other}");
        }
    }

    #[test]
    fn the_newest_common_protocol_version_is_used() {
        let newest = SUPPORTED_VERSIONS.1;
        assert_eq!(newest_common_version((1, newest)), Some(newest));
        assert_eq!(newest_common_version((1, newest + 5)), Some(newest));
        assert_eq!(newest_common_version((newest + 1, newest + 5)), None);
    }

    /// Defines version 2 of the protocol files, as a later release may write them.
    mod next {
        use serde::{Deserialize, Serialize};

        use crate::record::file::RecordType;

        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        pub struct RequestFile {
            pub response: std::path::PathBuf,
            pub action: serde_json::Value,
            /// A field that version 1 of the protocol lacks.
            #[serde(default)]
            pub priority: u32,
        }

        impl RecordType for RequestFile {
            const SCHEMA: &'static str = "kernelgate-request";
            const SCHEMA_VERSION: u64 = 2;
            const FILE_KIND: &'static str = "request";

            fn validate(&self) -> Result<(), String> {
                Ok(())
            }
        }
    }

    #[test]
    fn protocol_version_1_and_a_later_version_read_each_others_files() {
        use crate::record::file;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("request.json");
        let request = BenchRequest { response: "/r".into(), action: RequestedAction::List };
        file::write(&path, &request).unwrap();
        // The later program and the bench of version 1, and the other way round: both write
        // version 1, which the later one reads with its defaults.
        let later: next::RequestFile = file::read(&path).unwrap();
        assert_eq!((later.priority, later.action.clone()), (0, "list".into()));
        // A newer executable writes version 1 with a field that version 1 ignores.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replacen('{', "{\n  \"priority\": 7,", 1)).unwrap();
        assert_eq!(file::read::<BenchRequest>(&path).unwrap(), request);
        assert_eq!(file::read::<next::RequestFile>(&path).unwrap().priority, 7);
        // A version 1 that reads and writes it drops the field: it must not carry a meaning that
        // others rely on. A field that changes the meaning raises the version, and older readers
        // refuse it.
        file::write(&path, &file::read::<BenchRequest>(&path).unwrap()).unwrap();
        assert_eq!(file::read::<next::RequestFile>(&path).unwrap().priority, 0);
        file::write(&path, &next::RequestFile { priority: 7, ..later }).unwrap();
        let refused = file::read::<BenchRequest>(&path).unwrap_err().to_string();
        let reason = "written by a newer kernelgate (schema 2, this one reads up to 1)";
        assert_eq!(refused, format!("failed to read {}: {reason}", path.display()));
    }
}
