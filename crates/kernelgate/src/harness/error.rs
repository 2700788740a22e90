//! The reason why a bench binary stopped.

use std::path::PathBuf;

use crate::backend::BackendError;
use crate::harness::panic_guard::CaughtPanic;
use crate::record::RecordFileError;
use crate::record::provenance::InvalidCommit;
use crate::record::store::StoreError;
use crate::workload::AxisError;
use kernelgate_cuda::driver::device::DeviceError;

/// The reason why a bench binary stopped.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// The value of a flag is out of its range.
    #[error("{flag} takes {range}")]
    FlagValue {
        /// The flag.
        flag: &'static str,
        /// Values that it takes.
        range: &'static str,
    },
    /// A baseline is to be saved by a run that adds delays.
    #[error("--save-baseline takes no run with {flag}")]
    DelayedBaseline {
        /// The flag that adds the missing cases, with its environment variable.
        flag: &'static str,
    },
    /// The process has a request of the program, but is not a bench.
    #[error("KERNELGATE_REQUEST is for processes that `kernelgate` runs: unset it")]
    RequestOutsideBench,
    /// Charts are to be drawn by gnuplot, which is missing.
    #[error("--plotting-backend gnuplot: gnuplot is not installed")]
    NoGnuplot,
    /// The session's name is not a plain file name.
    #[error("KERNELGATE_SESSION=`{session}` is no plain file name")]
    SessionName {
        /// The name.
        session: String,
    },
    /// An earlier invocation has a session of the same name.
    #[error(
        "KERNELGATE_SESSION={session}: an earlier run of that name is in {}: choose another name, \
         or remove it", .path.display()
    )]
    SessionTaken {
        /// The name.
        session: String,
        /// Path of the record of the earlier run with that session name.
        path: PathBuf,
    },
    /// The variable `KERNELGATE_COMMIT` is not a commit id.
    #[error(transparent)]
    Commit(#[from] InvalidCommit),
    /// The filter is not a regular expression.
    #[error("filter `{filter}` is not a regular expression: {problem}")]
    Filter {
        /// The filter.
        filter: String,
        /// Its fault.
        problem: String,
    },
    /// The filter of the command line matches no case.
    #[error("no case matches `{}`; {}", shorten_for_message(.filter), filter_suggestion(.suggestions))]
    NoMatch {
        /// The filter.
        filter: String,
        /// Case ids that are similar to the filter.
        suggestions: Vec<String>,
    },
    /// The command line names an axis that no workload has.
    #[error("no workload has an axis `{axis}`; axes are {}", .axes.join(", "))]
    UnknownAxis {
        /// The axis.
        axis: String,
        /// Names of the axes of all workloads.
        axes: Vec<&'static str>,
    },
    /// Error: the command line gives an axis a value that the axis does not take.
    #[error(transparent)]
    Axis(#[from] AxisError),
    /// Error: no case has the combination of axis values that the command line gives.
    #[error(
        "no case has the axes {} together; `kernelgate list` shows the axes of each workload",
        .axes.join(" ")
    )]
    NoCombination {
        /// `axis=value,value` each.
        axes: Vec<String>,
    },
    /// A name of a bench, workload, axis or implementation cannot stand in an id.
    #[error("{of} {problem}")]
    Name {
        /// The thing that has the name: "the bench's name", "gemm/f32: the axis".
        of: String,
        /// The invalid name and what is wrong with it.
        problem: String,
    },
    /// Two cases of the bench have the same id.
    #[error("two cases have the id {case}")]
    SameId {
        /// The id.
        case: String,
    },
    /// A workload declares work that cannot be.
    #[error("{case}: declared work: {problem}")]
    Work {
        /// Id of the problem.
        case: String,
        /// Its fault.
        problem: String,
    },
    /// A workload refuses a point that its own selection names.
    #[error("{case}: {problem}")]
    Problem {
        /// Id of the problem.
        case: String,
        /// The workload's reason.
        problem: AxisError,
    },
    /// Error: none of the cases that the user named can run here.
    #[error("nothing of what was asked for can run here: {case}: {reason}")]
    NothingRuns {
        /// The first of them.
        case: String,
        /// Why it is skipped.
        reason: String,
    },
    /// No GPU of this machine can be used.
    #[error("no GPU to run on: {0}")]
    NoGpu(DeviceError),
    /// Criterion has no baseline of this name.
    #[error(
        "Criterion has no baseline `{name}` of {case}: save one with --save-baseline {name}, or \
         narrow the filter"
    )]
    NoCriterionBaseline {
        /// Name of the baseline.
        name: String,
        /// The case.
        case: String,
    },
    /// A file of Criterion's baseline is broken.
    #[error(
        "Criterion's baseline `{name}` of {case} is broken ({}: {problem}): remove it, or save it \
         again", .path.display()
    )]
    BrokenCriterionBaseline {
        /// Name of the baseline.
        name: String,
        /// The case.
        case: String,
        /// The file.
        path: PathBuf,
        /// Its fault.
        problem: String,
    },
    /// Interrupts cannot be watched.
    #[error("failed to watch for Ctrl-C: {0}")]
    Interrupts(Box<dyn std::error::Error + Send + Sync>),
    /// The harness panicked.
    #[error("internal error, please report it: {0}")]
    Panic(CaughtPanic),
    /// The device failed before the first case.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A record or baseline that cannot be read or written.
    #[error(transparent)]
    File(#[from] RecordFileError),
    /// The run is recorded, but not in the baseline that was asked for.
    #[error(
        "{cause}: the run is kept, and `kernelgate baseline add {name} --session \
         {session}` adds it"
    )]
    Unsaved {
        /// Why not.
        cause: Box<RecordFileError>,
        /// The baseline.
        name: String,
        /// Name of the session folder that holds the run's record.
        session: String,
    },
    /// A baseline file cannot be used, or a baseline name is invalid.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Longest text that is compared with ids, and shown: comparing costs the product of both lengths,
/// and no mistyped id is longer.
pub const MAX_COMPARED_TEXT_CHARACTERS: usize = 200;

/// Returns a text, cut if it is too long for a message.
pub fn shorten_for_message(text: &str) -> String {
    match text.char_indices().nth(MAX_COMPARED_TEXT_CHARACTERS) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

/// Suggests what to try after a filter that matches no case.
fn filter_suggestion(suggestions: &[String]) -> String {
    match suggestions {
        [] => "`--list` shows the cases".to_owned(),
        close => format!("did you mean {}?", close.join(" or ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_filter_is_cut_between_its_characters() {
        let (filter, suggestions) = ("é".repeat(1000), Vec::new());
        let message = HarnessError::NoMatch { filter, suggestions }.to_string();
        let cut = format!("`{}… (2000 bytes)`", "é".repeat(MAX_COMPARED_TEXT_CHARACTERS));
        assert_eq!(message, format!("no case matches {cut}; `--list` shows the cases"));
    }
}
