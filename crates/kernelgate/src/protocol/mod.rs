//! Defines the files by which the program `kernelgate` and a bench executable communicate: one
//! request file, one response file.
//!
//! The program starts the executable with the path of the request file in
//! [`REQUEST_PATH_VARIABLE`]; the flags and variables of `cargo bench` select cases. If the
//! variable contains [`PROTOCOL_VERSION_QUESTION`], an executable prints its protocol versions, so
//! base and head may use different kernelgate releases.
//!
//! A kernelgate release that only adds an optional field to these files keeps the protocol version.
//! A release that changes a meaning, or adds a field that readers must not drop, raises the
//! version; readers refuse files of newer versions.

mod recording;
mod request;
mod response;

pub use recording::{CuptiCaseRecording, KernelStageCycles, RecordedNetworkPart};
pub use request::{
    BenchRequestFile, LaunchesToRecord, RequestedBenchAction, TimingAccuracyReportPart,
};
pub use response::{
    BenchCaseStatus, BenchListResponse, BenchResponseFile, CaseProfileResponse,
    CaseVerificationResponse, KernelResourcesReport, ListedBenchCase, ListedImplementation,
    ListedWorkload, PythonPeerProgram, ResponseToBenchAction, TimingAccuracyReport,
};

/// Environment variable that contains the path of the request file, or the text
/// [`PROTOCOL_VERSION_QUESTION`].
pub const REQUEST_PATH_VARIABLE: &str = "KERNELGATE_REQUEST";

/// Value of [`REQUEST_PATH_VARIABLE`] that asks a bench executable to print only its protocol
/// versions.
pub const PROTOCOL_VERSION_QUESTION: &str = "protocol";

/// Oldest and newest version of kernelgate's bench protocol that this library supports.
pub const SUPPORTED_PROTOCOL_VERSIONS: (u64, u64) = (1, 1);

/// Beginning of the output line in which a bench executable states its protocol versions.
const PROTOCOL_VERSION_LINE_PREFIX: &str = "kernelgate-protocol ";

/// Bytes in every bench executable, by which the program `kernelgate` recognises the executable
/// without running it. The NUL bytes ensure that scripts and other text files do not contain these
/// bytes.
pub const BENCH_EXECUTABLE_MARK: &str = "\0kernelgate bench executable\0";

/// Uses [`BENCH_EXECUTABLE_MARK`], so that compiler and linker do not remove it from the
/// executable.
pub fn keep_bench_mark_in_executable() {
    // Passing the mark's pointer through `black_box` prevents the compiler from removing the mark.
    std::hint::black_box(BENCH_EXECUTABLE_MARK.as_ptr());
}

/// Returns the newest protocol version that both this library and an executable with these versions
/// support; `None` if no version is common.
pub fn newest_common_protocol_version((oldest, newest): (u64, u64)) -> Option<u64> {
    let version = newest.min(SUPPORTED_PROTOCOL_VERSIONS.1);
    (version >= oldest.max(SUPPORTED_PROTOCOL_VERSIONS.0)).then_some(version)
}

/// Returns the answer to [`PROTOCOL_VERSION_QUESTION`]: a line with the oldest and the newest
/// supported protocol version.
pub fn protocol_version_answer_line() -> String {
    format!(
        "{PROTOCOL_VERSION_LINE_PREFIX}{}-{}",
        SUPPORTED_PROTOCOL_VERSIONS.0, SUPPORTED_PROTOCOL_VERSIONS.1
    )
}

/// Returns the oldest and the newest protocol version in an executable's answer; `None` for any
/// other text.
pub fn parse_protocol_version_answer(text: &str) -> Option<(u64, u64)> {
    let (oldest, newest) = text
        .lines()
        .find_map(|line| line.strip_prefix(PROTOCOL_VERSION_LINE_PREFIX))?
        .trim()
        .split_once('-')?;
    let versions = (oldest.parse().ok()?, newest.parse().ok()?);
    (1..=versions.1).contains(&versions.0).then_some(versions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protocol_version_answer_is_parsed_and_other_text_refused() {
        assert_eq!(
            parse_protocol_version_answer(&format!(
                "noise\n{}\nmore noise\n",
                protocol_version_answer_line()
            )),
            Some(SUPPORTED_PROTOCOL_VERSIONS)
        );
        assert_eq!(parse_protocol_version_answer("kernelgate-protocol 2-7"), Some((2, 7)));
        for other in [
            "",
            "kernelgate protocol 1-3",
            "kernelgate trial protocol 1",
            "kernelgate-protocol 3",
            "kernelgate-protocol 4-2",
            "kernelgate-protocol a-b",
        ] {
            assert_eq!(parse_protocol_version_answer(other), None, "{other}");
        }
    }

    #[test]
    fn the_newest_common_protocol_version_is_used() {
        let newest = SUPPORTED_PROTOCOL_VERSIONS.1;
        assert_eq!(newest_common_protocol_version((1, newest)), Some(newest));
        assert_eq!(newest_common_protocol_version((1, newest + 5)), Some(newest));
        assert_eq!(newest_common_protocol_version((newest + 1, newest + 5)), None);
    }

    /// Defines request files of protocol version 2, as a later kernelgate release might write them.
    mod protocol_version_2 {
        use serde::{Deserialize, Serialize};

        use crate::record::file::RecordFileType;

        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        pub struct RequestFileOfVersion2 {
            #[serde(rename = "response")]
            pub response_path: std::path::PathBuf,
            pub action: serde_json::Value,
            /// A field of the request that version 1 of kernelgate's bench protocol lacks.
            #[serde(default)]
            pub priority: u32,
        }

        impl RecordFileType for RequestFileOfVersion2 {
            const SCHEMA: &'static str = "kernelgate-request";
            const SCHEMA_VERSION: u64 = 2;
            const FILE_KIND: &'static str = "request";

            fn check_record_plausible(&self) -> Result<(), String> {
                Ok(())
            }
        }
    }

    #[test]
    fn protocol_version_1_and_a_later_version_read_each_others_files() {
        use crate::record::file;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("request.json");
        let request = BenchRequestFile {
            response_path: "/r".into(),
            action: RequestedBenchAction::ListCases,
        };
        file::write_record_atomically(&path, &request).unwrap();
        // A later program with a version-1 bench, and the reverse: both sides write version 1,
        // which the later side reads with default values.
        let later: protocol_version_2::RequestFileOfVersion2 = file::read_record(&path).unwrap();
        assert_eq!((later.priority, later.action.clone()), (0, "list".into()));
        // A newer bench executable writes a version-1 response with a field that version-1 readers
        // ignore.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replacen('{', "{\n  \"priority\": 7,", 1)).unwrap();
        assert_eq!(file::read_record::<BenchRequestFile>(&path).unwrap(), request);
        assert_eq!(
            file::read_record::<protocol_version_2::RequestFileOfVersion2>(&path).unwrap().priority,
            7
        );
        // A version-1 program that reads and writes the response drops a field that it does not
        // know, so such a field must not change the meaning of others. A field that changes the
        // meaning of others raises the protocol version, and older readers refuse the file.
        file::write_record_atomically(
            &path,
            &file::read_record::<BenchRequestFile>(&path).unwrap(),
        )
        .unwrap();
        assert_eq!(
            file::read_record::<protocol_version_2::RequestFileOfVersion2>(&path).unwrap().priority,
            0
        );
        file::write_record_atomically(
            &path,
            &protocol_version_2::RequestFileOfVersion2 { priority: 7, ..later },
        )
        .unwrap();
        let refused = file::read_record::<BenchRequestFile>(&path).unwrap_err().to_string();
        let reason = "written by a newer kernelgate (schema 2, this one reads up to 1)";
        assert_eq!(refused, format!("failed to read {}: {reason}", path.display()));
    }
}
