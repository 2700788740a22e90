//! Reads the user's repository. Nothing in the user's repository is changed: not its index, work
//! tree, branches, stash or object store. This module does not copy files for builds; `checkout`
//! and `snapshot` do.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::benches::package::has_manifest;
use crate::commands;
use crate::compare::CompareError;
use kernelgate::record::provenance::WITHOUT_HOOKS;

/// The git repository that contains the user's package.
#[derive(Debug, Clone)]
pub struct GitRepository {
    /// Root folder of the working tree.
    pub top: PathBuf,
    /// The package's folder, relative to the repository's root.
    pub package: PathBuf,
    /// Folders that hold the git objects of the repository.
    pub objects: Vec<PathBuf>,
    /// Folders in which git keeps the repositories of its submodules, by name.
    pub modules: Vec<PathBuf>,
    /// "sha1" or "sha256".
    pub object_format: String,
}

/// A git commit, with the name by which the user gave it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GitRevision {
    /// The revision as the user names it: "main", "HEAD~1", "working tree".
    pub name: String,
    /// Full id.
    pub commit: String,
}

impl GitRevision {
    /// Returns name and commit of the revision: "main (1a2b3c4d)".
    pub fn label(&self) -> String {
        format!("{} ({})", self.name, self.commit.get(..8).unwrap_or(&self.commit))
    }
}

/// Git in a folder, without the variables that a git hook sets for programs that it runs.
pub fn git(folder: &Path) -> Command {
    let mut command = Command::new("git");
    // The user's git hooks and file watcher do not run for copies of the index.
    command.args(WITHOUT_HOOKS);
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

/// Runs a git command.
pub fn output(command: &mut Command) -> Result<Output, CompareError> {
    commands::print_command(command);
    command.output().map_err(CompareError::NoGit)
}

/// Runs a git command that must succeed, and returns its standard output.
pub fn run_git(command: &mut Command, action: &str) -> Result<String, CompareError> {
    let output = output(command)?;
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
    Err(CompareError::Git { action: action.to_owned(), message })
}

impl GitRepository {
    /// The repository around a package's folder; the error names a missing package first.
    pub fn around_package(folder: &Path) -> Result<GitRepository, CompareError> {
        Self::around(folder).map_err(|error| match has_manifest(folder) {
            true => error,
            false => CompareError::NoPackage(folder.to_owned()),
        })
    }

    /// Opens the git repository around a folder.
    pub fn around(package: &Path) -> Result<GitRepository, CompareError> {
        let ask = |arguments: &[&str]| {
            run_git(
                git(package).arg("rev-parse").args(arguments),
                "find the repository of this package",
            )
        };
        let at = |relative: String| package.join(relative).canonicalize();
        // A linked working tree has its own submodule repositories, or uses those of the main
        // working tree.
        let kept = [ask(&["--git-dir"])?, ask(&["--git-common-dir"])?];
        let modules = kept.map(|kept| at(kept).map(|kept| kept.join("modules")));
        Ok(Self {
            top: ask(&["--show-toplevel"])?.into(),
            package: ask(&["--show-prefix"])?.into(),
            objects: at(ask(&["--git-path", "objects"])?).into_iter().collect(),
            modules: modules.into_iter().flatten().collect(),
            object_format: ask(&["--show-object-format"])?,
        })
    }

    /// Finds the commit that a revision's name refers to.
    pub fn resolve(&self, name: &str) -> Result<GitRevision, CompareError> {
        let object = format!("{name}^{{commit}}");
        let found = output(git(&self.top).args([
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            &object,
        ]))?;
        let commit = String::from_utf8_lossy(&found.stdout).trim().to_owned();
        if found.status.success() && !commit.is_empty() {
            return Ok(GitRevision { name: name.to_owned(), commit });
        }
        let refs = run_git(
            git(&self.top).args(["for-each-ref", "--format=%(refname:short)"]),
            "list refs",
        )
        .unwrap_or_default();
        let heads = ["for-each-ref", "--format=%(refname:short)", "refs/heads"];
        let branches = run_git(git(&self.top).args(heads), "list branches").unwrap_or_default();
        Err(CompareError::NoRevision {
            name: name.to_owned(),
            top: self.top.clone(),
            similar: similar_names(name, refs.lines()),
            branches: branches.lines().map(str::to_owned).collect(),
            shallow: self.is_shallow(),
        })
    }

    /// Returns whether the clone is shallow: its history is cut off.
    fn is_shallow(&self) -> bool {
        run_git(git(&self.top).args(["rev-parse", "--is-shallow-repository"]), "ask")
            .is_ok_and(|answer| answer == "true")
    }
}

/// Returns the names of revisions most similar to an unknown name, best first.
fn similar_names<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut scored: Vec<(f64, &str)> =
        names.map(|other| (strsim::normalized_damerau_levenshtein(name, other), other)).collect();
    scored.retain(|(score, other)| *score >= 0.5 || other.ends_with(name));
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(3).map(|(_, name)| name.to_owned()).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Runs git with a user name and an address; `protocol.file.allow` lets it clone submodules
    /// from folders.
    pub fn at(folder: &Path, arguments: &[&str]) -> String {
        let set = ["user.name=a", "user.email=a@b", "protocol.file.allow=always"];
        let mut command = git(folder);
        for value in set {
            command.args(["-c", value]);
        }
        run_git(command.args(arguments), "test").unwrap()
    }

    /// A repository with the file `a` in one commit on `main`.
    pub fn test_repository() -> (tempfile::TempDir, GitRepository) {
        let folder = tempfile::tempdir().unwrap();
        at(folder.path(), &["init", "--quiet", "--initial-branch=main"]);
        std::fs::write(folder.path().join("a"), "1").unwrap();
        std::fs::write(folder.path().join(".gitignore"), "ignored\n").unwrap();
        at(folder.path(), &["add", "."]);
        at(folder.path(), &["commit", "--quiet", "-m", "first"]);
        let repository = GitRepository::around(folder.path()).unwrap();
        (folder, repository)
    }

    #[test]
    fn an_unknown_revision_is_reported_with_similar_names() {
        let (folder, repository) = test_repository();
        let hidden = |text: String| text.replace(folder.path().to_str().unwrap(), "FOLDER");
        let message = repository.resolve("mian").unwrap_err().to_string();
        insta::assert_snapshot!(hidden(message), @"no revision `mian` in FOLDER; did you mean main?");
        assert!(repository.resolve("--help").is_err());
        let message = repository.resolve("v9.9").unwrap_err().to_string();
        insta::assert_snapshot!(hidden(message), @"no revision `v9.9` in FOLDER; its branches are main");
    }

    #[test]
    fn a_shallow_clone_is_reported_with_the_command_that_completes_it() {
        let (folder, repository) = test_repository();
        at(folder.path(), &["commit", "--quiet", "--allow-empty", "-m", "second"]);
        assert!(!repository.resolve("HEAD~7").unwrap_err().to_string().contains("shallow"));
        let clone = tempfile::tempdir().unwrap();
        let url = format!("file://{}", folder.path().display());
        at(clone.path(), &["clone", "--quiet", "--depth=1", &url, "."]);
        let shallow = GitRepository::around(clone.path()).unwrap();
        assert!(shallow.resolve("HEAD").is_ok());
        let message = shallow.resolve("HEAD~1").unwrap_err().to_string();
        let message = message.replace(clone.path().to_str().unwrap(), "FOLDER");
        insta::assert_snapshot!(message, @"no revision `HEAD~1` in FOLDER; its branches are main; this clone is shallow, so older commits and other branches are not in it: `git fetch --unshallow` gets them, in CI `fetch-depth: 0` of the checkout (GIT_DEPTH: 0 on GitLab)");
    }
}
