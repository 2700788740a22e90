//! Errors of comparisons: fields hold the facts, and sentences are made when an error is printed.

use std::path::{Path, PathBuf};

use kernelgate::exit::ExitReason;
use kernelgate::record::RecordFileError;

use crate::benches::cargo::BuildError;
use crate::benches::package::no_package_message;
use crate::benches::versions::VersionQueryError;
use crate::gate::paired::Arm;
use crate::gate::rules::rules_file::RulesError;

/// The reason why a comparison of two builds fails.
#[derive(Debug, thiserror::Error)]
pub enum CompareError {
    /// Error: a record file cannot be read or written.
    #[error(transparent)]
    File(#[from] RecordFileError),
    /// A file or folder of the comparison cannot be used.
    #[error("failed to {action} {}: {cause}", path.display())]
    Io {
        /// The failed action: "write".
        action: String,
        path: PathBuf,
        cause: std::io::Error,
    },
    /// The working tree cannot be copied into the object store.
    #[error("failed to {action}: {cause}")]
    Snapshot { action: &'static str, cause: std::io::Error },
    /// Error: the folder has no Cargo package to compare.
    #[error("{}", no_package_message(.0))]
    NoPackage(PathBuf),
    /// Git does not start.
    #[error("failed to run git: {0}")]
    NoGit(std::io::Error),
    /// A git command failed.
    #[error("failed to {action}: git: {message}")]
    Git {
        /// Purpose of the git command: "list refs".
        action: String,
        message: String,
    },
    /// Error: the git repository does not have the named revision.
    #[error(
        "no revision `{name}` in {}{}{}", top.display(), similar_names_hint(similar, branches),
        if *shallow { SHALLOW_CLONE_ADVICE } else { "" }
    )]
    NoRevision {
        name: String,
        top: PathBuf,
        /// Names of revisions that are similar to the requested one, best first.
        similar: Vec<String>,
        branches: Vec<String>,
        shallow: bool,
    },
    /// The bad end of a search is not after its good end.
    #[error("{0} and {1} are one commit")]
    OneCommit(String, String),
    /// The bad end of a search is on another line of history than its good end.
    #[error(
        "{bad} does not descend from {good}: a search needs the good commit before the bad one"
    )]
    NotDescended { good: String, bad: String },
    /// Error: another process runs a comparison in the folder.
    #[error("another comparison runs in {}: wait for it", .0.display())]
    Busy(PathBuf),
    /// A path of `--leave-out` is missing, or tracked by git.
    #[error("--leave-out {}: {why}", path.display())]
    LeaveOut {
        path: PathBuf,
        /// The reason, as a fragment of a sentence.
        why: &'static str,
    },
    /// Error: the repository of a submodule is not on this machine.
    #[error(
        "submodule {0} of {revision} is not on this machine: `git submodule update --init \
         --recursive -- {0}` gets it in a work tree of that revision", path.display()
    )]
    NoSubmodule { path: PathBuf, revision: String },
    #[error(
        "submodule {0}: its commit {1} of {revision} is not on this machine: `git -C {0} fetch \
         origin {commit}` gets it", path.display(), commit.get(..8).unwrap_or_default()
    )]
    NoSubmoduleCommit { path: PathBuf, commit: String, revision: String },
    /// Error: a build left a symbolic link in a checkout.
    #[error("{} is a link: remove {} and repeat the command", link.display(), checkout.display())]
    Link { link: PathBuf, checkout: PathBuf },
    /// Error: a revision does not contain the package.
    #[error("{side} {label} has no {}", manifest.display())]
    NoManifest {
        side: Arm,
        label: String,
        /// Path of the manifest, relative to the repository's root.
        manifest: PathBuf,
    },
    /// Error: the benches of a revision cannot be built.
    #[error("{side} {label} {cause}{}", build_failure_advice(cause, notes, slot))]
    NotBuilt { side: Arm, label: String, cause: BuildError, notes: Vec<String>, slot: PathBuf },
    /// Two packages of a workspace have a bench of one name.
    #[error(
        "{side} {label}: the packages in {} and {} both have a bench `{bench}`: compare in the \
         folder of one of them", packages[0], packages[1]
    )]
    OneBenchTwice { side: Arm, label: String, bench: String, packages: [String; 2] },
    /// Error: the folder contains no bench executable.
    #[error("no bench executable in {0}")]
    NoExecutable(String),
    /// Error: neither build has a requested bench.
    #[error("--bench {bench}: neither side has it; there are {}", known.join(", "))]
    NoBench { bench: String, known: Vec<String> },
    /// Error: a bench did not state its protocol version.
    #[error(
        "{side}: bench `{bench}` cannot be asked for the protocol that it speaks: {cause}{}",
        if matches!(cause, VersionQueryError::TimedOut(_)) { " (--wait sets this)" } else { "" }
    )]
    NoProtocol { side: String, bench: String, cause: VersionQueryError },
    /// The first bench has no case to compare; the text is its own message.
    #[error("{0}")]
    NothingSelected(String),
    /// Error: no bench has any of the requested cases.
    #[error("no bench that can be driven has a case that was asked for")]
    NoCase,
    /// No bench was verified.
    #[error("no bench got to its end")]
    NothingVerified,
    /// No case has a time that a calibration can use.
    #[error("no case here takes long enough, or short enough, to calibrate with: name some")]
    NothingToCalibrate,
    /// Error: a process of a calibration's comparison failed.
    #[error("bench `{bench}` broke: {reason}")]
    Broken {
        bench: String,
        /// The reason, as a fragment of a sentence.
        reason: String,
    },
    /// The trials of an interrupted comparison do not fit its plan.
    #[error(
        "--resume: {} does not fit this comparison: {why}; leave --resume out to start anew",
        path.display()
    )]
    TrialsDoNotFit {
        path: PathBuf,
        /// The reason, as a fragment of a sentence.
        why: String,
    },
    /// Error: the interrupted comparison or calibration had other settings.
    #[error(
        "--resume: the interrupted {what} was another: {differs} differs; repeat its command to go \
         on, or leave --resume out to start anew"
    )]
    ResumesAnother {
        /// "comparison" or "search".
        what: &'static str,
        differs: String,
    },
    /// Error: the interrupted calibration had other settings.
    #[error(
        "--resume: {} was measured with another {differs}; without --resume it is replaced",
        path.display()
    )]
    CalibratesAnother { path: PathBuf, differs: String },
    /// Two parts of a calibration differ, as a fragment of a sentence.
    #[error("--resume: {0}")]
    Unmergeable(String),
    /// Error: `kernelgate.toml` of one side cannot be used.
    #[error(transparent)]
    Rules(#[from] RulesError),
    /// Ctrl-C cannot be watched.
    #[error("failed to watch for Ctrl-C: {0}")]
    Interrupt(ctrlc::Error),
    /// A side differs in a way that forbids the comparison.
    #[error("refused: {field} of {side} is `{found}`, this kernelgate needs `{needed}`")]
    Refused { field: String, side: String, found: String, needed: String },
    /// An executable was replaced or overwritten while it was compared.
    #[error(
        "refused: {} changed while it was compared (hash {installed} when it was installed, now \
         {found}): its times belong to unknown code; run the comparison again without --resume",
        path.display()
    )]
    Changed {
        path: PathBuf,
        installed: String,
        /// Current content hash of the executable, or "missing".
        found: String,
    },
}

impl CompareError {
    /// Returns the exit code of a comparison that ended with this error.
    pub const fn exit(&self) -> ExitReason {
        match self {
            Self::Refused { .. } | Self::Changed { .. } => ExitReason::Refused,
            _ => ExitReason::Usage,
        }
    }

    /// Returns whether the error means that a revision has no executables: it does not build, or
    /// lacks the package.
    pub const fn is_unbuildable(&self) -> bool {
        matches!(
            self,
            Self::NoManifest { .. } | Self::NotBuilt { cause: BuildError::Failed(_), .. }
        )
    }

    /// Makes an error of a cause, for `map_err`.
    pub(super) fn io<'a>(
        action: &'a str,
        path: &'a Path,
    ) -> impl Fn(std::io::Error) -> Self + Copy + use<'a> {
        move |cause| Self::Io { action: action.to_owned(), path: path.to_owned(), cause }
    }
}

/// Advice for a clone that lacks a revision because its history was cut off.
const SHALLOW_CLONE_ADVICE: &str = "; this clone is shallow, so older commits and other branches are not in it: \
                       `git fetch --unshallow` gets them, in CI `fetch-depth: 0` of the checkout \
                       (GIT_DEPTH: 0 on GitLab)";

/// The similar names, else the branches that the repository has.
fn similar_names_hint(similar: &[String], branches: &[String]) -> String {
    const MAX_NAMED_BRANCHES: usize = 5;
    let more = branches.len().saturating_sub(MAX_NAMED_BRANCHES);
    match (similar, branches) {
        ([_, ..], _) => format!("; did you mean {}?", similar.join(" or ")),
        ([], []) => String::new(),
        _ if more > 0 => {
            format!(
                "; its branches are {} and {more} more",
                branches[..MAX_NAMED_BRANCHES].join(", ")
            )
        }
        _ => format!("; its branches are {}", branches.join(", ")),
    }
}

/// Advice after a failed build: the flag of a time limit, the files that the checkout lacks, and
/// why a path out of the repository is not found.
fn build_failure_advice(cause: &BuildError, notes: &[String], slot: &Path) -> String {
    let flag = match cause {
        BuildError::TimedOut(_) => " (--build-wait sets this)",
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
