//! Reads the user's git repository without changing it: neither index, work tree, branches, stash
//! nor object store. The module `git` makes no checkouts and snapshots of the sources; `checkout`
//! and `snapshot` do.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::benches::package::is_in_a_cargo_package;
use crate::commands;
use crate::compare::CompareError;
use kernelgate::record::provenance::GIT_ARGUMENTS_AGAINST_HOOKS;

/// The user's git repository, which contains the compared package.
#[derive(Debug, Clone)]
pub struct GitRepository {
    /// Root folder of the repository's working tree.
    pub work_tree_root: PathBuf,
    /// The package's folder, relative to the root of the working tree.
    pub package_path_in_tree: PathBuf,
    /// Paths of the folders that contain the repository's git objects.
    pub git_object_folders: Vec<PathBuf>,
    /// Paths of the `modules` folders in which git keeps the repositories of submodules.
    pub submodule_repository_folders: Vec<PathBuf>,
    /// "sha1" or "sha256".
    pub git_object_format: String,
}

/// A git commit, with the name by which the user named it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedGitRevision {
    /// The revision as the user named it: "main", "HEAD~1", "working tree".
    pub revision_name: String,
    /// Full id of the commit.
    pub full_commit_id: String,
}

impl NamedGitRevision {
    /// Returns the name and the short commit id of the revision: "main (1a2b3c4d)".
    pub fn name_and_short_commit(&self) -> String {
        format!(
            "{} ({})",
            self.revision_name,
            self.full_commit_id.get(..8).unwrap_or(&self.full_commit_id)
        )
    }
}

/// Returns a git command for a folder, without the `GIT_*` variables that a git hook sets, and with
/// hooks disabled.
pub fn isolated_git(folder: &Path) -> Command {
    let mut command = Command::new("git");
    // The user's git hooks and file-system monitor are disabled, because kernelgate's git commands
    // work on copies of the index.
    command.args(GIT_ARGUMENTS_AGAINST_HOOKS);
    command.arg("-C").arg(folder);
    for name in [
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
        "GIT_COMMON_DIR",
    ] {
        command.env_remove(name);
    }
    command
}

/// Runs a git command and returns its exit status and output.
pub fn run_git_and_return_output(command: &mut Command) -> Result<Output, CompareError> {
    commands::print_command_if_verbose(command);
    command.output().map_err(CompareError::GitDoesNotStart)
}

/// Runs a git command, and returns its standard output; a failure of the command is an error with
/// git's last message.
pub fn run_git_or_fail(command: &mut Command, action: &str) -> Result<String, CompareError> {
    let output = run_git_and_return_output(command)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let messages = String::from_utf8_lossy(&output.stderr);
    let message = messages
        .trim()
        .lines()
        .last()
        .unwrap_or("no message")
        .trim_start_matches("fatal: ")
        .to_owned();
    Err(CompareError::GitCommandFailed {
        git_command_purpose: action.to_owned(),
        git_error_message: message,
    })
}

impl GitRepository {
    /// Opens the git repository that contains a package's folder; if the folder belongs to no
    /// package, the error says so first.
    pub fn open_around_package(folder: &Path) -> Result<GitRepository, CompareError> {
        Self::open_around_folder(folder).map_err(|error| match is_in_a_cargo_package(folder) {
            true => error,
            false => CompareError::NotInCargoPackage(folder.to_owned()),
        })
    }

    /// Opens the git repository that contains a folder.
    pub fn open_around_folder(package: &Path) -> Result<GitRepository, CompareError> {
        let ask = |arguments: &[&str]| {
            run_git_or_fail(
                isolated_git(package).arg("rev-parse").args(arguments),
                "find the repository of this package",
            )
        };
        let at = |relative: String| package.join(relative).canonicalize();
        // A linked git worktree has submodule repositories of its own, or uses those of the main
        // worktree.
        let kept = [ask(&["--git-dir"])?, ask(&["--git-common-dir"])?];
        let modules = kept.map(|kept| at(kept).map(|kept| kept.join("modules")));
        Ok(Self {
            work_tree_root: ask(&["--show-toplevel"])?.into(),
            package_path_in_tree: ask(&["--show-prefix"])?.into(),
            git_object_folders: at(ask(&["--git-path", "objects"])?).into_iter().collect(),
            submodule_repository_folders: modules.into_iter().flatten().collect(),
            git_object_format: ask(&["--show-object-format"])?,
        })
    }

    /// Finds the commit that a revision's name such as `main` or `HEAD~1` refers to.
    pub fn resolve_revision(&self, name: &str) -> Result<NamedGitRevision, CompareError> {
        let object = format!("{name}^{{commit}}");
        let found = run_git_and_return_output(isolated_git(&self.work_tree_root).args([
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            &object,
        ]))?;
        let commit = String::from_utf8_lossy(&found.stdout).trim().to_owned();
        if found.status.success() && !commit.is_empty() {
            return Ok(NamedGitRevision { revision_name: name.to_owned(), full_commit_id: commit });
        }
        let refs = run_git_or_fail(
            isolated_git(&self.work_tree_root).args(["for-each-ref", "--format=%(refname:short)"]),
            "list refs",
        )
        .unwrap_or_default();
        let heads = ["for-each-ref", "--format=%(refname:short)", "refs/heads"];
        let branches =
            run_git_or_fail(isolated_git(&self.work_tree_root).args(heads), "list branches")
                .unwrap_or_default();
        Err(CompareError::UnknownRevision {
            revision_name: name.to_owned(),
            repository_root: self.work_tree_root.clone(),
            similar_revisions: similar_revision_names(name, refs.lines()),
            repository_branches: branches.lines().map(str::to_owned).collect(),
            clone_is_shallow: self.is_shallow_clone(),
        })
    }

    /// Returns whether the git clone is shallow, that is, its history is cut off.
    fn is_shallow_clone(&self) -> bool {
        run_git_or_fail(
            isolated_git(&self.work_tree_root).args(["rev-parse", "--is-shallow-repository"]),
            "ask",
        )
        .is_ok_and(|answer| answer == "true")
    }
}

/// Returns up to three revision names that are most similar to an unknown name, best first.
fn similar_revision_names<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut scored: Vec<(f64, &str)> =
        names.map(|other| (strsim::normalized_damerau_levenshtein(name, other), other)).collect();
    scored.retain(|(score, other)| *score >= 0.5 || other.ends_with(name));
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(3).map(|(_, name)| name.to_owned()).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Test helper: runs git with a user name and an e-mail address, and allows it to clone
    /// submodules from local folders.
    pub fn run_test_git(folder: &Path, arguments: &[&str]) -> String {
        let set = ["user.name=a", "user.email=a@b", "protocol.file.allow=always"];
        let mut command = isolated_git(folder);
        for value in set {
            command.args(["-c", value]);
        }
        run_git_or_fail(command.args(arguments), "test").unwrap()
    }

    /// Makes a test repository with one commit on `main`, which contains the file `a`.
    pub fn test_repository() -> (tempfile::TempDir, GitRepository) {
        let folder = tempfile::tempdir().unwrap();
        run_test_git(folder.path(), &["init", "--quiet", "--initial-branch=main"]);
        std::fs::write(folder.path().join("a"), "1").unwrap();
        std::fs::write(folder.path().join(".gitignore"), "ignored\n").unwrap();
        run_test_git(folder.path(), &["add", "."]);
        run_test_git(folder.path(), &["commit", "--quiet", "-m", "first"]);
        let repository = GitRepository::open_around_folder(folder.path()).unwrap();
        (folder, repository)
    }

    #[test]
    fn an_unknown_revision_is_reported_with_similar_names() {
        let (folder, repository) = test_repository();
        let hidden = |text: String| text.replace(folder.path().to_str().unwrap(), "FOLDER");
        let message = repository.resolve_revision("mian").unwrap_err().to_string();
        insta::assert_snapshot!(hidden(message), @"no revision `mian` in FOLDER; did you mean main?");
        assert!(repository.resolve_revision("--help").is_err());
        let message = repository.resolve_revision("v9.9").unwrap_err().to_string();
        insta::assert_snapshot!(hidden(message), @"no revision `v9.9` in FOLDER; its branches are main");
    }

    #[test]
    fn a_shallow_clone_is_reported_with_the_command_that_completes_it() {
        let (folder, repository) = test_repository();
        run_test_git(folder.path(), &["commit", "--quiet", "--allow-empty", "-m", "second"]);
        assert!(
            !repository.resolve_revision("HEAD~7").unwrap_err().to_string().contains("shallow")
        );
        let clone = tempfile::tempdir().unwrap();
        let url = format!("file://{}", folder.path().display());
        run_test_git(clone.path(), &["clone", "--quiet", "--depth=1", &url, "."]);
        let shallow = GitRepository::open_around_folder(clone.path()).unwrap();
        assert!(shallow.resolve_revision("HEAD").is_ok());
        let message = shallow.resolve_revision("HEAD~1").unwrap_err().to_string();
        let message = message.replace(clone.path().to_str().unwrap(), "FOLDER");
        insta::assert_snapshot!(message, @"no revision `HEAD~1` in FOLDER; its branches are main; this clone is shallow, so older commits and other branches are not in it: `git fetch --unshallow` gets them, in CI `fetch-depth: 0` of the checkout (GIT_DEPTH: 0 on GitLab)");
    }
}
