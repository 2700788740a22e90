//! Errors of a comparison of two builds: the variants store facts, and the messages are formatted
//! only when an error is printed.

use std::path::{Path, PathBuf};

use kernelgate::exit::ProcessExitReason;
use kernelgate::record::RecordFileError;

use crate::benches::cargo::CargoBuildError;
use crate::benches::package::not_in_a_package_message;
use crate::benches::versions::ProtocolVersionQueryError;
use crate::gate::paired::ComparedArm;
use crate::gate::rules::rules_file::RulesFileError;

/// The reason why a comparison, bisection or calibration of builds fails.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// Error: a record file of the comparison cannot be read or written.
    #[error(transparent)]
    RecordFile(#[from] RecordFileError),
    /// Error: a file or folder of the comparison cannot be read, written or created.
    #[error("failed to {failed_action} {}: {cause}", inaccessible_path.display())]
    Io {
        /// Action on the file or folder that failed: "write".
        failed_action: String,
        inaccessible_path: PathBuf,
        cause: std::io::Error,
    },
    /// Error: a file operation fails while the uncommitted working tree is stored as git objects.
    #[error("failed to {action}: {cause}")]
    Snapshot { action: &'static str, cause: std::io::Error },
    /// Error: the folder belongs to no Cargo package, so there is nothing to compare.
    #[error("{}", not_in_a_package_message(.0))]
    NotInCargoPackage(PathBuf),
    /// Error: the program git cannot be started.
    #[error("failed to run git: {0}")]
    GitDoesNotStart(std::io::Error),
    /// Error: a git command failed.
    #[error("failed to {git_command_purpose}: git: {git_error_message}")]
    GitCommandFailed {
        /// Purpose of the failed git command, for the message: "list refs".
        git_command_purpose: String,
        git_error_message: String,
    },
    /// Error: the user's git repository has no revision of the requested name.
    #[error(
        "no revision `{revision_name}` in {}{}{}", repository_root.display(), revision_suggestions_text(similar_revisions, repository_branches),
        if *clone_is_shallow { SHALLOW_CLONE_ADVICE } else { "" }
    )]
    UnknownRevision {
        revision_name: String,
        repository_root: PathBuf,
        /// Names of existing revisions that are similar to the unknown one, best first.
        similar_revisions: Vec<String>,
        repository_branches: Vec<String>,
        clone_is_shallow: bool,
    },
    /// Error: the good and the bad end of a bisection are the same commit.
    #[error("{0} and {1} are one commit")]
    GoodAndBadAreOneCommit(String, String),
    /// Error: the bad end of a bisection does not descend from its good end.
    #[error(
        "{bad} does not descend from {good}: a search needs the good commit before the bad one"
    )]
    BadNotDescendedFromGood { good: String, bad: String },
    /// Error: another process runs a comparison in the same folder.
    #[error("another comparison runs in {}: wait for it", .0.display())]
    ComparisonFolderBusy(PathBuf),
    /// Error: a path of `--leave-out` does not exist, or is tracked by git.
    #[error("--leave-out {}: {why_trials_do_not_fit}", path_to_exclude.display())]
    CannotExcludePath {
        path_to_exclude: PathBuf,
        /// The reason why the path cannot be excluded, as a fragment of a sentence.
        why_trials_do_not_fit: &'static str,
    },
    /// Error: no clone of a submodule's repository exists on this machine.
    #[error(
        "submodule {0} of {revision} is not on this machine: `git submodule update --init \
         --recursive -- {0}` gets it in a work tree of that revision", path.display()
    )]
    SubmoduleNotOnThisMachine { path: PathBuf, revision: String },
    #[error(
        "submodule {0}: its commit {1} of {revision} is not on this machine: `git -C {0} fetch \
         origin {commit}` gets it", path.display(), commit.get(..8).unwrap_or_default()
    )]
    SubmoduleCommitNotOnThisMachine { path: PathBuf, commit: String, revision: String },
    /// Error: a build left a symbolic link in a checkout, at a path where kernelgate would write.
    #[error("{} is a link: remove {} and repeat the command", link.display(), checkout.display())]
    LinkInCheckout { link: PathBuf, checkout: PathBuf },
    /// Error: a compared revision does not contain the package's `Cargo.toml`.
    #[error("{side} {revision_label} has no {}", missing_manifest.display())]
    NoCargoManifestInRevision {
        side: ComparedArm,
        revision_label: String,
        /// Path of the missing `Cargo.toml`, relative to the repository's root.
        missing_manifest: PathBuf,
    },
    /// Error: cargo cannot build the benches of a revision.
    #[error(
        "{side} {revision_label} {cause}{}",
        build_failure_advice(cause, missing_file_notes, slot_folder)
    )]
    BenchBuildFailed {
        side: ComparedArm,
        revision_label: String,
        cause: CargoBuildError,
        missing_file_notes: Vec<String>,
        slot_folder: PathBuf,
    },
    /// Error: two packages of a workspace have a bench of the same name.
    #[error(
        "{side} {label}: the packages in {} and {} both have a bench `{bench_name}`: compare in the \
         folder of one of them", packages[0], packages[1]
    )]
    BenchNameInTwoPackages {
        side: ComparedArm,
        label: String,
        bench_name: String,
        packages: [String; 2],
    },
    /// Error: the given folder contains no bench executable.
    #[error("no bench executable in {0}")]
    NoBenchExecutableInFolder(String),
    /// Error: neither the base nor the head has a bench that `--bench` names.
    #[error("--bench {bench}: neither side has it; there are {}", known.join(", "))]
    UnknownBench { bench: String, known: Vec<String> },
    /// Error: a bench did not answer which versions of kernelgate's bench protocol it speaks.
    #[error(
        "{side}: bench `{bench}` cannot be asked for the protocol that it speaks: {cause}{}",
        if matches!(cause, ProtocolVersionQueryError::NoAnswerInTime(_)) { " (--wait sets this)" } else { "" }
    )]
    NoBenchProtocol { side: String, bench: String, cause: ProtocolVersionQueryError },
    /// Error: the first bench has none of the requested cases; the text is the bench's own message.
    #[error("{0}")]
    BenchHasNoRequestedCase(String),
    /// Error: no usable bench has any of the requested cases.
    #[error("no bench that can be driven has a case that was asked for")]
    NoRequestedCase,
    /// Error: no bench executable was verified.
    #[error("no bench got to its end")]
    NoBenchVerified,
    /// Error: no case takes a time that a calibration can use: all are too short or too long.
    #[error("no case here takes long enough, or short enough, to calibrate with: name some")]
    NoCaseToCalibrate,
    /// Error: a bench process of a calibration failed.
    #[error("bench `{bench}` broke: {failure_reason}")]
    CalibrationBenchFailed {
        bench: String,
        /// The reason why the bench process failed, as a fragment of a sentence.
        failure_reason: String,
    },
    /// Error: the saved trials of the interrupted comparison do not fit the plan of the comparison
    /// that resumes it.
    #[error(
        "--resume: {} does not fit this comparison: {why_trials_do_not_fit}; leave --resume out to start anew",
        trials_file.display()
    )]
    SavedTrialsDoNotFit {
        trials_file: PathBuf,
        /// The reason why the saved trials do not fit, as a fragment of a sentence.
        why_trials_do_not_fit: String,
    },
    /// Error: the interrupted comparison or bisection had other settings than the command that
    /// resumes it.
    #[error(
        "--resume: the interrupted {what} was another: {differing_fact} differs; repeat its command to go \
         on, or leave --resume out to start anew"
    )]
    SavedStateOfOtherRequest {
        /// "comparison" or "search".
        what: &'static str,
        differing_fact: String,
    },
    /// Error: the interrupted calibration had other settings than the command that resumes it.
    #[error(
        "--resume: {} was measured with another {differs}; without --resume it is replaced",
        path.display()
    )]
    SavedCalibrationOfOtherRequest { path: PathBuf, differs: String },
    /// Error: the interrupted calibration cannot be merged with the new one; the text states what
    /// differs.
    #[error("--resume: {0}")]
    UnmergeableCalibration(String),
    /// Error: Error: `kernelgate.toml` of one side (base or head) cannot be read or is invalid.
    #[error(transparent)]
    RulesFile(#[from] RulesFileError),
    /// Error: the program cannot install a handler for Ctrl-C.
    #[error("failed to watch for Ctrl-C: {0}")]
    InterruptHandler(ctrlc::Error),
    /// Error: a side (base or head) speaks no version of kernelgate's bench protocol that this
    /// program supports.
    #[error("refused: {field} of {side} is `{found}`, this kernelgate needs `{needed}`")]
    UnsupportedProtocolVersion { field: String, side: String, found: String, needed: String },
    /// Error: a bench executable was replaced or overwritten after it was copied for the
    /// comparison.
    #[error(
        "refused: {} changed while it was compared (hash {installed_hash} when it was installed, now \
         {found_hash}): its times belong to unknown code; run the comparison again without --resume",
        changed_executable.display()
    )]
    ExecutableChanged {
        changed_executable: PathBuf,
        installed_hash: String,
        /// Content hash that the executable has now, or "missing".
        found_hash: String,
    },
}

impl CompareError {
    /// Returns the exit reason of the program if a comparison ended with this error.
    pub const fn exit_reason(&self) -> ProcessExitReason {
        match self {
            Self::UnsupportedProtocolVersion { .. } | Self::ExecutableChanged { .. } => {
                ProcessExitReason::ResultsNotComparable
            }
            _ => ProcessExitReason::InvalidUsageOrInput,
        }
    }

    /// Returns whether the error means that a revision cannot provide bench executables: it does
    /// not build, or lacks the package.
    pub const fn is_unbuildable_revision(&self) -> bool {
        matches!(
            self,
            Self::NoCargoManifestInRevision { .. }
                | Self::BenchBuildFailed { cause: CargoBuildError::BuildFailed(_), .. }
        )
    }

    /// Returns a closure for `map_err` that turns an I/O error into a [`CompareError`] with action
    /// and path.
    pub(super) fn file_error<'a>(
        action: &'a str,
        path_to_exclude: &'a Path,
    ) -> impl Fn(std::io::Error) -> Self + Copy + use<'a> {
        move |cause| Self::Io {
            failed_action: action.to_owned(),
            inaccessible_path: path_to_exclude.to_owned(),
            cause,
        }
    }
}

/// Advice in the error message for a shallow git clone, whose cut-off history lacks the requested
/// revision.
const SHALLOW_CLONE_ADVICE: &str = "; this clone is shallow, so older commits and other branches are not in it: \
                       `git fetch --unshallow` gets them, in CI `fetch-depth: 0` of the checkout \
                       (GIT_DEPTH: 0 on GitLab)";

/// Returns the message part that suggests similar revision names, or lists the repository's
/// branches if no name is similar.
fn revision_suggestions_text(similar: &[String], branches: &[String]) -> String {
    const MAX_LISTED_BRANCHES: usize = 5;
    let more = branches.len().saturating_sub(MAX_LISTED_BRANCHES);
    match (similar, branches) {
        ([_, ..], _) => format!("; did you mean {}?", similar.join(" or ")),
        ([], []) => String::new(),
        _ if more > 0 => {
            format!(
                "; its branches are {} and {more} more",
                branches[..MAX_LISTED_BRANCHES].join(", ")
            )
        }
        _ => format!("; its branches are {}", branches.join(", ")),
    }
}

/// Advice after a failed build: the flag that sets the build's timeout, notes about missing files,
/// and why files outside the repository are not found.
fn build_failure_advice(cause: &CargoBuildError, notes: &[String], slot: &Path) -> String {
    let flag = match cause {
        CargoBuildError::BuildTimedOut(_) => " (--build-wait sets this)",
        _ => "",
    };
    let notes: String = notes.iter().map(|note| format!("\n{note}")).collect();
    let text = cause.to_string();
    let missing = ["No such file", "failed to read", "couldn't read"];
    let in_slot =
        missing.iter().any(|it| text.contains(it)) && text.contains(&*slot.to_string_lossy());
    let reach = "\nnote: sides are built from copies of the repository; relative paths that lead \
                 out of it by more than two folders, and untracked files that git ignores, are not \
                 found there. An absolute path works";
    format!("{flag}{notes}{}", if in_slot { reach } else { "" })
}
