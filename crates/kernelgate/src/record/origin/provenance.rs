//! Identifies the measured code: its git commit, and whether tracked files differed from the
//! commit.

use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::process::{cargo_target_folder_of_program, nonempty_environment_variable};
use crate::record::files::text::join_lines_with_spaces;

/// Commit of the measured code, and whether files differed from it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CommitAndChanges {
    /// Commit of the measured package; absent outside of a git checkout.
    pub commit: Option<String>,
    /// Whether tracked files, except committed baselines, differed from the commit; baselines do
    /// not count because the first bench of a session writes them.
    pub dirty: bool,
}

/// Arguments with which git lists the changed tracked files except baselines.
const GIT_ARGUMENTS_FOR_CHANGED_FILES: [&str; 6] =
    ["status", "--porcelain", "--untracked-files=no", "--", ":/", PATHSPEC_EXCLUDING_BASELINES];
/// Excludes the committed baselines of every package of the workspace, because a changed baseline
/// does not change the code.
const PATHSPEC_EXCLUDING_BASELINES: &str = ":(top,exclude,glob)**/baselines/*/*.json";

/// The environment variable `KERNELGATE_COMMIT` does not contain a commit id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "KERNELGATE_COMMIT=`{commit}` is no commit: 7 to 64 hexadecimal digits, and +changes where \
     tracked files differed from it"
)]
pub struct InvalidCommitVariable {
    /// Value of `KERNELGATE_COMMIT`, on one line.
    pub commit: String,
}

impl CommitAndChanges {
    /// Asks git for the commit checked out in a folder, and whether tracked files were changed. The
    /// variable `KERNELGATE_COMMIT` replaces git's answer for a binary that was copied away from
    /// its repository (`COMMIT`, or `COMMIT+changes` if tracked files differed).
    pub fn from_git_or_variable(root: &Path) -> Self {
        if let Some(given) =
            nonempty_environment_variable("KERNELGATE_COMMIT").and_then(|it| it.into_string().ok())
        {
            return Self::from_variable_text(&given);
        }
        Self::from_git(root)
    }

    /// Asks git for the commit checked out in a folder, and whether tracked files were changed.
    fn from_git(root: &Path) -> Self {
        Self {
            commit: output_of_git_without_hooks(root, &["rev-parse", "HEAD"]),
            dirty: output_of_git_without_hooks(root, &GIT_ARGUMENTS_FOR_CHANGED_FILES)
                .is_some_and(|changes| !changes.is_empty()),
        }
    }

    /// Returns the number of commits from this commit to the one that a repository has checked out;
    /// `None` if git does not know this commit or its id is malformed. The commit id may come from
    /// a file, so it is never passed to git where git would accept an option.
    pub fn commits_behind_checkout(&self, root: &Path) -> Option<u64> {
        let commit = self.commit.as_deref().filter(|commit| is_commit_hash_text(commit))?;
        let range = format!("{commit}..HEAD");
        output_of_git_without_hooks(
            root,
            &["rev-list", "--count", "--end-of-options", &range, "--"],
        )?
        .parse()
        .ok()
    }

    /// Returns the code of a process that a person or a script started, and whether
    /// `KERNELGATE_COMMIT` states the commit. A value of `KERNELGATE_COMMIT` must be a commit id.
    /// Without `KERNELGATE_COMMIT`, git is asked for the commit, but only if cargo started this
    /// process or the executable is in cargo's target folder.
    ///
    /// # Errors
    /// Fails if `KERNELGATE_COMMIT` is not a commit id.
    pub fn commit_and_changes_of_started_process(
        root: &Path,
    ) -> Result<(Self, bool), InvalidCommitVariable> {
        let Some(given) = nonempty_environment_variable("KERNELGATE_COMMIT") else {
            let by_cargo = nonempty_environment_variable("CARGO_MANIFEST_DIR").is_some();
            let here = by_cargo || cargo_target_folder_of_program().is_some();
            return Ok((
                if here { Self::from_git_or_variable(root) } else { Self::default() },
                false,
            ));
        };
        let given = given.to_string_lossy();
        if !is_unambiguous_commit_id(given.strip_suffix("+changes").unwrap_or(&given)) {
            return Err(InvalidCommitVariable { commit: join_lines_with_spaces(&given) });
        }
        Ok((Self::from_variable_text(&given), true))
    }

    fn from_variable_text(given: &str) -> CommitAndChanges {
        // The text is reduced to one line, because a record with line breaks in it could not be
        // read again.
        let given = join_lines_with_spaces(given);
        let commit = given.strip_suffix("+changes");
        Self { commit: Some(commit.unwrap_or(&given).to_owned()), dirty: commit.is_some() }
    }

    /// Returns whether this is the unchanged code of the commit whose id begins with
    /// `first_digits`. Returns false if files were changed, or if the recorded commit is too short
    /// or not a commit id.
    pub fn is_clean_commit_beginning_with(&self, first_digits: &str) -> bool {
        let commit =
            self.commit.as_deref().filter(|commit| is_unambiguous_commit_id(commit) && !self.dirty);
        is_unambiguous_commit_id(first_digits)
            && commit.is_some_and(|commit| commit.starts_with(first_digits))
    }

    /// Returns a short text of the commit for tables: "1a2b3c4d", or "1a2b3c4d+changes" if tracked
    /// files were changed.
    pub fn short_commit_with_changes_mark(&self) -> String {
        match &self.commit {
            Some(commit) => format!(
                "{}{}",
                commit.get(..8).unwrap_or(commit),
                if self.dirty { "+changes" } else { "" }
            ),
            None => "no commit".to_owned(),
        }
    }
}

/// Returns whether a text is a commit id: the whole hash, or at least 7 of its digits.
pub fn is_unambiguous_commit_id(text: &str) -> bool {
    text.len() >= 7 && is_commit_hash_text(text)
}

/// Returns whether a text consists of 4 to 64 hexadecimal digits, as a whole or shortened commit
/// hash. A recorded commit may be another word, taken from `KERNELGATE_COMMIT`, and git would take
/// some words for options.
fn is_commit_hash_text(commit: &str) -> bool {
    (4..=64).contains(&commit.len()) && commit.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Arguments that prevent git from running a repository's hooks and file watcher.
pub const GIT_ARGUMENTS_AGAINST_HOOKS: [&str; 4] =
    ["-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"];

/// Runs git in a folder, without hooks, and returns its output; `None` if git fails.
fn output_of_git_without_hooks(folder: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    // Git takes no optional locks in the repository, so it does not disturb other git processes.
    command
        .arg("--no-optional-locks")
        .args(GIT_ARGUMENTS_AGAINST_HOOKS)
        .arg("-C")
        .arg(folder)
        .args(arguments);
    let output = command.output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_from_the_environment_variable_is_accepted() {
        let given = |text| {
            (
                CommitAndChanges::from_variable_text(text).short_commit_with_changes_mark(),
                CommitAndChanges::from_variable_text(text).dirty,
            )
        };
        assert_eq!(given("1a2b3c4d5e"), ("1a2b3c4d".to_owned(), false));
        assert_eq!(given("1a2b3c4d5e+changes"), ("1a2b3c4d+changes".to_owned(), true));
        assert_eq!(given("1a2b\u{1b}[2J+changes\n"), ("1a2b+changes".to_owned(), true));
    }

    #[test]
    fn a_commit_is_recognised_only_by_its_first_digits() {
        let is_of = |commit: &str, digits: &str| {
            CommitAndChanges::from_variable_text(commit).is_clean_commit_beginning_with(digits)
        };
        let whole = "951c29400d11223344556677889900aabbccddee";
        assert!(is_of(whole, "951c294") && is_of(whole, whole) && is_of("951c2940", "951c294"));
        for commit in ["9", "", "951c29", "951c294zz; rm -rf", "2af5b7400", "951c294+changes"] {
            assert!(!is_of(commit, "951c294"), "{commit}");
        }
        // A commit id does not match if it has more digits than the recorded commit id.
        assert!(!is_of("951c2940", whole) && !is_of(whole, "951c29") && !is_of(whole, ""));
        assert!(!CommitAndChanges::default().is_clean_commit_beginning_with("951c294"));
    }

    #[test]
    fn a_changed_baseline_file_does_not_count_as_changed_code() {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("package");
        let write = |file: &str, text: &str| {
            let path = folder.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let code = ["package/src.rs", "beside.rs", "baselines.rs", "package/baselines/kernel.cu"];
        let saved = ["package/baselines/h200/main.json", "member/baselines/h200/main.json"];
        let of_the_top = "baselines/h200/main.json";
        code.iter().chain(&saved).chain([&of_the_top]).for_each(|file| write(file, "1"));
        let at =
            |arguments: &[&str]| output_of_git_without_hooks(folder.path(), arguments).unwrap();
        at(&["init", "--quiet"]);
        at(&["add", "."]);
        at(&["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first"]);
        saved.iter().chain([&of_the_top]).for_each(|file| write(file, "2"));
        assert!(!CommitAndChanges::from_git(&package).dirty);
        for file in code {
            write(file, "2");
            assert!(CommitAndChanges::from_git(&package).dirty, "{file}");
            write(file, "1");
        }
        assert!(!CommitAndChanges::from_git(&package).dirty);
    }

    #[test]
    fn a_commit_beginning_with_a_dash_is_no_option_of_git() {
        let folder = tempfile::tempdir().unwrap();
        let at =
            |arguments: &[&str]| output_of_git_without_hooks(folder.path(), arguments).unwrap();
        at(&["init", "--quiet"]);
        for message in ["first", "second"] {
            let who = ["-c", "user.name=a", "-c", "user.email=a@b"];
            at(&[&who[..], &["commit", "--quiet", "--allow-empty", "-m", message]].concat());
        }
        let behind = |commit: &str| {
            CommitAndChanges::from_variable_text(commit).commits_behind_checkout(folder.path())
        };
        let first = at(&["rev-parse", "HEAD~1"]);
        assert_eq!((behind(&first), behind(&first[..10])), (Some(1), Some(1)));
        let victim = folder.path().join("victim..HEAD");
        std::fs::write(&victim, "precious").unwrap();
        let option = format!("--output={}", folder.path().join("victim").display());
        for word in [option.as_str(), "--all", "HEAD~1", "prebuilt-base", "", "HEAD", "123"] {
            assert_eq!(behind(word), None, "{word}");
        }
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    }
}
