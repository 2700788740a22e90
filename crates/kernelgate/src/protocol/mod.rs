//! What the program asks of a bench executable and what it gets: one request in a file, one
//! response in a file.
//!
//! The program starts the executable with [`VARIABLE`] naming the request; which cases it is about
//! is said by the same flags and variables as in `cargo bench`. An executable answers the question
//! [`QUESTION`] with the versions that it speaks. Version 1 knew one request, the trial request of
//! a comparison, under a variable of its own ([`crate::record::trial_request`]); it is still
//! understood, so that a pull request may upgrade kernelgate.

mod recording;
mod request;
mod response;

pub use recording::{CaseRecording, RecordedPart, RecordedStages};
pub use request::{Action, Part, Repetitions, Request};
pub use response::{
    CaseStatus, ListedCase, ListedProblem, ListedRow, Listing, PeerProgram, ProfiledCase,
    ResourcesReport, Response, ResponseBody, TimingReport, VerifiedCase,
};

/// Names the request's file, or asks [`QUESTION`].
pub const VARIABLE: &str = "KERNELGATE_REQUEST";

/// Value of [`VARIABLE`] that asks only which versions an executable speaks.
pub const QUESTION: &str = "protocol";

/// Oldest and newest version that this library speaks. The files of version 3 are those of version
/// 2; who speaks it heeds [`TrialRequest::first`](crate::record::TrialRequest::first).
pub const VERSIONS: (u64, u64) = (1, 3);

/// Version of the files of request and response.
const FILES: u64 = 2;

/// Begins the line with the versions.
const PREFIX: &str = "kernelgate protocol ";

/// What an executable says when asked: the oldest and the newest version that it speaks, on a line
/// of its own.
pub fn answer() -> String {
    format!("{PREFIX}{}-{}", VERSIONS.0, VERSIONS.1)
}

/// The versions in an answer, oldest and newest; none where it is not one.
pub fn parse_answer(text: &str) -> Option<(u64, u64)> {
    let (oldest, newest) =
        text.lines().find_map(|line| line.strip_prefix(PREFIX))?.trim().split_once('-')?;
    let versions = (oldest.parse().ok()?, newest.parse().ok()?);
    (1..=versions.1).contains(&versions.0).then_some(versions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_understood_and_other_text_is_none() {
        assert_eq!(
            parse_answer(&format!("noise\n{}\nkernelgate trial protocol 1\n", answer())),
            Some(VERSIONS)
        );
        assert_eq!(parse_answer("kernelgate protocol 2-7"), Some((2, 7)));
        for other in [
            "",
            "kernelgate trial protocol 1",
            "kernelgate protocol 3",
            "kernelgate protocol 4-2",
            "kernelgate protocol a-b",
        ] {
            assert_eq!(parse_answer(other), None, "{other}");
        }
    }
}
