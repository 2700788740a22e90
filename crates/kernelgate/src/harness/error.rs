//! The error with which a bench executable stops.

use std::path::PathBuf;

use crate::backend::BackendError;
use crate::harness::panic_guard::CaughtPanicMessage;
use crate::record::RecordFileError;
use crate::record::provenance::InvalidCommitVariable;
use crate::record::store::RecordLookupError;
use crate::workload::AxisError;
use kernelgate_cuda::driver::device::GpuUnusableError;

/// The error with which a bench executable stops.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// The value of a flag is outside its range.
    #[error("{flag} takes {range}")]
    FlagValue {
        /// The flag.
        flag: &'static str,
        /// Values that it takes.
        range: &'static str,
    },
    /// A run with artificial delays must not save a baseline.
    #[error("--save-baseline takes no run with {flag}")]
    DelayedBaseline {
        /// The flag that adds the delays, with its environment variable.
        flag: &'static str,
    },
    /// The environment contains a request of the program `kernelgate`, but the process is not a
    /// bench run.
    #[error("KERNELGATE_REQUEST is for processes that `kernelgate` runs: unset it")]
    RequestOutsideBench,
    /// Gnuplot was requested for charts, but it is not installed.
    #[error("--plotting-backend gnuplot: gnuplot is not installed")]
    NoGnuplot,
    /// The session name is not a plain file name.
    #[error("KERNELGATE_SESSION=`{session}` is no plain file name")]
    SessionName {
        /// The session name that caused the error.
        session: String,
    },
    /// An earlier invocation has used the same session name.
    #[error(
        "KERNELGATE_SESSION={session}: an earlier run of that name is in {}: choose another name, \
         or remove it", .path.display()
    )]
    SessionTaken {
        /// The session name that caused the error.
        session: String,
        /// Path of the record that the earlier invocation wrote.
        path: PathBuf,
    },
    /// The environment variable `KERNELGATE_COMMIT` is not a commit id.
    #[error(transparent)]
    Commit(#[from] InvalidCommitVariable),
    /// The filter is not a regular expression.
    #[error("filter `{filter}` is not a regular expression: {problem}")]
    Filter {
        /// The case filter that caused the error.
        filter: String,
        /// Fault of the value, as a fragment of a sentence.
        problem: String,
    },
    /// The filter on the command line matches no case.
    #[error("no case matches `{}`; {}", shorten_for_message(.filter), suggestion_after_unmatched_filter(.suggestions))]
    NoMatch {
        /// The case filter that caused the error.
        filter: String,
        /// Case ids that are similar to the filter.
        suggestions: Vec<String>,
    },
    /// The command line sets an axis that no workload has.
    #[error("no workload has an axis `{axis}`; axes are {}", .axes.join(", "))]
    UnknownAxis {
        /// Name of the axis that caused the error.
        axis: String,
        /// Names of the axes of all workloads.
        axes: Vec<&'static str>,
    },
    /// The command line gives an axis a value that the axis does not accept.
    #[error(transparent)]
    Axis(#[from] AxisError),
    /// No case has the combination of axis values that the command line gives.
    #[error(
        "no case has the axes {} together; `kernelgate list` shows the axes of each workload",
        .axes.join(" ")
    )]
    NoCombination {
        /// `axis=value,value` each.
        axes: Vec<String>,
    },
    /// The name of a bench, workload, axis or implementation contains characters that a case id
    /// must not contain.
    #[error("{of} {problem}")]
    Name {
        /// The named thing: "the bench's name", "gemm/f32: the axis".
        of: String,
        /// The invalid name, and why it is invalid.
        problem: String,
    },
    /// Two cases of the bench have the same id.
    #[error("two cases have the id {case}")]
    SameId {
        /// The id.
        case: String,
    },
    /// A workload declares impossible work, such as a number of operations that overflows.
    #[error("{case}: declared work: {problem}")]
    Work {
        /// Id of the problem.
        case: String,
        /// Fault of the value, as a fragment of a sentence.
        problem: String,
    },
    /// A workload rejects axis values that its own default selection contains.
    #[error("{case}: {problem}")]
    Problem {
        /// Id of the problem.
        case: String,
        /// The workload's reason.
        problem: AxisError,
    },
    /// None of the cases that the user named can run on this machine.
    #[error("nothing of what was asked for can run here: {case}: {reason}")]
    NothingRuns {
        /// The first of them.
        case: String,
        /// Why it is skipped.
        reason: String,
    },
    /// No GPU of this machine is usable.
    #[error("no GPU to run on: {0}")]
    NoGpu(GpuUnusableError),
    /// Criterion's store has no baseline of this name for a case.
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
    /// A file of Criterion's baseline is invalid.
    #[error(
        "Criterion's baseline `{name}` of {case} is broken ({}: {problem}): remove it, or save it \
         again", .path.display()
    )]
    BrokenCriterionBaseline {
        /// Name of the baseline.
        name: String,
        /// The case.
        case: String,
        /// Path of the file that caused the error.
        path: PathBuf,
        /// Fault of the value, as a fragment of a sentence.
        problem: String,
    },
    /// Interrupts cannot be watched.
    #[error("failed to watch for Ctrl-C: {0}")]
    Interrupts(Box<dyn std::error::Error + Send + Sync>),
    /// The harness panicked.
    #[error("internal error, please report it: {0}")]
    Panic(CaughtPanicMessage),
    /// The GPU failed before the first case.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A record or baseline file could not be read or written.
    #[error(transparent)]
    File(#[from] RecordFileError),
    /// The run was recorded, but could not be saved as the requested baseline.
    #[error(
        "{cause}: the run is kept, and `kernelgate baseline add {name} --session \
         {session}` adds it"
    )]
    Unsaved {
        /// Why not.
        cause: Box<RecordFileError>,
        /// The baseline.
        name: String,
        /// Name of the session folder that contains the run's record.
        session: String,
    },
    /// A baseline file is unusable, or a baseline name is invalid.
    #[error(transparent)]
    Store(#[from] RecordLookupError),
}

/// Maximum length of a filter that is compared with case ids and shown in messages; comparing costs
/// the product of both lengths.
pub const MAX_COMPARED_FILTER_CHARACTERS: usize = 200;

/// Shortens a text to 200 characters for an error message, and adds its length in bytes.
pub fn shorten_for_message(text: &str) -> String {
    match text.char_indices().nth(MAX_COMPARED_FILTER_CHARACTERS) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

/// Suggests similar case ids, or `--list`, after a filter that matches no case.
fn suggestion_after_unmatched_filter(suggestions: &[String]) -> String {
    match suggestions {
        [] => "`--list` shows the cases".to_owned(),
        close => format!("did you mean {}?", close.join(" or ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_filter_is_cut_between_characters() {
        let (filter, suggestions) = ("é".repeat(1000), Vec::new());
        let message = HarnessError::NoMatch { filter, suggestions }.to_string();
        let cut = format!("`{}… (2000 bytes)`", "é".repeat(MAX_COMPARED_FILTER_CHARACTERS));
        assert_eq!(message, format!("no case matches {cut}; `--list` shows the cases"));
    }
}
