//! Identity of the measured code: its commit, and whether tracked files differed from the commit.

use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::process::{nonempty_variable, target_folder_of_program};
use crate::record::files::text::on_one_line;

/// Which code was measured.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Provenance {
    /// Commit of the measured package; absent outside a git checkout.
    pub commit: Option<String>,
    /// Whether tracked files differed from that commit, other than committed baselines: of the
    /// benches of a session the first writes them while the others have not begun.
    pub dirty: bool,
}

/// Arguments of git that list changed files.
const GIT_STATUS_ARGUMENTS: [&str; 6] =
    ["status", "--porcelain", "--untracked-files=no", "--", ":/", BASELINES_PATHSPEC];
/// Path of committed baselines of every package of the workspace: a change of theirs is not a
/// change of the code.
const BASELINES_PATHSPEC: &str = ":(top,exclude,glob)**/baselines/*/*.json";

/// The variable `KERNELGATE_COMMIT` is not a commit id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "KERNELGATE_COMMIT=`{commit}` is no commit: 7 to 64 hexadecimal digits, and +changes where \
     tracked files differed from it"
)]
pub struct InvalidCommit {
    /// Value of the variable, on one line.
    pub commit: String,
}

impl Provenance {
    /// Asks git for the commit of a folder, and whether tracked files were changed.
    /// `KERNELGATE_COMMIT` replaces the answer for a binary that runs away from its repository
    /// (`COMMIT`, or `COMMIT+changes` when tracked files differed).
    pub fn detect_from_git(root: &Path) -> Self {
        if let Some(given) =
            nonempty_variable("KERNELGATE_COMMIT").and_then(|it| it.into_string().ok())
        {
            return Self::from_text(&given);
        }
        Self {
            commit: git(root, &["rev-parse", "HEAD"]),
            dirty: git(root, &GIT_STATUS_ARGUMENTS).is_some_and(|changes| !changes.is_empty()),
        }
    }

    /// Number of commits from this one to the commit that a repository has checked out; `None` if
    /// git does not know one of them or this commit id is malformed. The id may come from a file,
    /// so it is never passed as an option of git.
    pub fn commits_behind(&self, root: &Path) -> Option<u64> {
        let commit = self.commit.as_deref().filter(|commit| is_hash(commit))?;
        let range = format!("{commit}..HEAD");
        git(root, &["rev-list", "--count", "--end-of-options", &range, "--"])?.parse().ok()
    }

    /// Code of a process that a person or a script started, and whether `KERNELGATE_COMMIT` states
    /// the commit. A commit that `KERNELGATE_COMMIT` states must be a commit id. Git is asked only
    /// about an executable that cargo started, or that lies in cargo's target folder.
    ///
    /// # Errors
    /// Fails if `KERNELGATE_COMMIT` is not a commit id.
    pub fn detect_for_process(root: &Path) -> Result<(Self, bool), InvalidCommit> {
        let Some(given) = nonempty_variable("KERNELGATE_COMMIT") else {
            let by_cargo = nonempty_variable("CARGO_MANIFEST_DIR").is_some();
            let here = by_cargo || target_folder_of_program().is_some();
            return Ok((if here { Self::detect_from_git(root) } else { Self::default() }, false));
        };
        let given = given.to_string_lossy();
        if !is_commit(given.strip_suffix("+changes").unwrap_or(&given)) {
            return Err(InvalidCommit { commit: on_one_line(&given) });
        }
        Ok((Self::from_text(&given), true))
    }

    fn from_text(given: &str) -> Provenance {
        // Cleaned to one line, because a record that cannot be read again would be lost.
        let given = on_one_line(given);
        let commit = given.strip_suffix("+changes");
        Self { commit: Some(commit.unwrap_or(&given).to_owned()), dirty: commit.is_some() }
    }

    /// Returns whether this is the unchanged code of the commit whose id begins with
    /// `first_digits`. Changed code belongs to no commit, and neither does a record whose commit is
    /// a word or too short.
    pub fn is_of(&self, first_digits: &str) -> bool {
        let commit = self.commit.as_deref().filter(|commit| is_commit(commit) && !self.dirty);
        is_commit(first_digits) && commit.is_some_and(|commit| commit.starts_with(first_digits))
    }

    /// Short text of the commit for tables: "1a2b3c4d", or "1a2b3c4d+changes" if files were
    /// changed.
    pub fn short_commit(&self) -> String {
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

/// Returns whether a text names a commit: its whole hash, or enough digits to be unambiguous.
pub fn is_commit(text: &str) -> bool {
    text.len() >= 7 && is_hash(text)
}

/// Returns whether the text can only be a commit hash, whole or shortened. A record's commit may
/// also be a word, as `KERNELGATE_COMMIT` gave it; git would take some words for options.
fn is_hash(commit: &str) -> bool {
    (4..=64).contains(&commit.len()) && commit.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Arguments of git with which it runs neither hooks nor the file watcher of a repository.
pub const WITHOUT_HOOKS: [&str; 4] =
    ["-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"];

/// Output of git in a folder; `None` if git fails.
fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    // Git is run without taking locks in the repository.
    command.arg("--no-optional-locks").args(WITHOUT_HOOKS).arg("-C").arg(folder).args(arguments);
    let output = command.output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_from_the_environment_variable_is_accepted() {
        let given =
            |text| (Provenance::from_text(text).short_commit(), Provenance::from_text(text).dirty);
        assert_eq!(given("1a2b3c4d5e"), ("1a2b3c4d".to_owned(), false));
        assert_eq!(given("1a2b3c4d5e+changes"), ("1a2b3c4d+changes".to_owned(), true));
        assert_eq!(given("1a2b\u{1b}[2J+changes\n"), ("1a2b+changes".to_owned(), true));
    }

    #[test]
    fn a_commit_is_recognised_only_by_its_first_digits() {
        let is_of = |commit: &str, digits: &str| Provenance::from_text(commit).is_of(digits);
        let whole = "951c29400d11223344556677889900aabbccddee";
        assert!(is_of(whole, "951c294") && is_of(whole, whole) && is_of("951c2940", "951c294"));
        for commit in ["9", "", "951c29", "951c294zz; rm -rf", "2af5b7400", "951c294+changes"] {
            assert!(!is_of(commit, "951c294"), "{commit}");
        }
        // The commit in the file is longer than the record's.
        assert!(!is_of("951c2940", whole) && !is_of(whole, "951c29") && !is_of(whole, ""));
        assert!(!Provenance::default().is_of("951c294"));
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
        let at = |arguments: &[&str]| git(folder.path(), arguments).unwrap();
        at(&["init", "--quiet"]);
        at(&["add", "."]);
        at(&["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first"]);
        saved.iter().chain([&of_the_top]).for_each(|file| write(file, "2"));
        assert!(!Provenance::detect_from_git(&package).dirty);
        for file in code {
            write(file, "2");
            assert!(Provenance::detect_from_git(&package).dirty, "{file}");
            write(file, "1");
        }
        assert!(!Provenance::detect_from_git(&package).dirty);
    }

    #[test]
    fn a_commit_that_begins_with_a_dash_is_not_passed_to_git_as_an_option() {
        let folder = tempfile::tempdir().unwrap();
        let at = |arguments: &[&str]| git(folder.path(), arguments).unwrap();
        at(&["init", "--quiet"]);
        for message in ["first", "second"] {
            let who = ["-c", "user.name=a", "-c", "user.email=a@b"];
            at(&[&who[..], &["commit", "--quiet", "--allow-empty", "-m", message]].concat());
        }
        let behind = |commit: &str| Provenance::from_text(commit).commits_behind(folder.path());
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
