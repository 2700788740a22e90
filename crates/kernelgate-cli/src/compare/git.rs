//! Revisions of the user's repository, read and checked out elsewhere. Nothing of the repository is
//! changed: not its index, work tree, branches, stash or object store.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::CompareError;

/// The repository that holds the package.
#[derive(Debug, Clone)]
pub struct Repository {
    /// Root of its work tree.
    pub top: PathBuf,
    /// The package's folder in it, relative.
    pub package: PathBuf,
    objects: PathBuf,
    object_format: String,
}

/// A commit, and what the user called it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revision {
    /// "main", "HEAD~1", "working tree".
    pub name: String,
    /// Full id.
    pub commit: String,
}

impl Revision {
    /// "main (1a2b3c4d)".
    pub fn label(&self) -> String {
        format!("{} ({})", self.name, self.commit.get(..8).unwrap_or(&self.commit))
    }
}

/// Git in a folder, deaf to what a hook around this program set.
fn git(folder: &Path) -> Command {
    let mut command = Command::new("git");
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

fn output(command: &mut Command) -> Result<Output, CompareError> {
    command.output().map_err(|cause| CompareError::Usage(format!("failed to run git: {cause}")))
}

/// Standard output of a git command that must succeed.
fn run(command: &mut Command, action: &str) -> Result<String, CompareError> {
    let output = output(command)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said =
        said.trim().lines().last().unwrap_or("no message").trim_start_matches("fatal: ").to_owned();
    Err(CompareError::Usage(format!("failed to {action}: git: {said}")))
}

impl Repository {
    /// The repository around a package's folder.
    ///
    /// # Errors
    /// When there is none.
    pub fn around(package: &Path) -> Result<Self, CompareError> {
        let ask = |arguments: &[&str]| {
            run(
                git(package).arg("rev-parse").args(arguments),
                "find the repository of this package",
            )
        };
        Ok(Self {
            top: ask(&["--show-toplevel"])?.into(),
            package: ask(&["--show-prefix"])?.into(),
            objects: package
                .join(ask(&["--git-path", "objects"])?)
                .canonicalize()
                .unwrap_or_default(),
            object_format: ask(&["--show-object-format"])?,
        })
    }

    /// The commit that a name stands for.
    ///
    /// # Errors
    /// When there is none: the error says which names are similar.
    pub fn resolve(&self, name: &str) -> Result<Revision, CompareError> {
        let wanted = format!("{name}^{{commit}}");
        let found = output(git(&self.top).args([
            "rev-parse",
            "--verify",
            "--quiet",
            "--end-of-options",
            &wanted,
        ]))?;
        let commit = String::from_utf8_lossy(&found.stdout).trim().to_owned();
        if found.status.success() && !commit.is_empty() {
            return Ok(Revision { name: name.to_owned(), commit });
        }
        let refs =
            run(git(&self.top).args(["for-each-ref", "--format=%(refname:short)"]), "list refs")
                .unwrap_or_default();
        let similar = similar(name, refs.lines());
        let hint = if similar.is_empty() {
            String::new()
        } else {
            format!("; did you mean {}?", similar.join(" or "))
        };
        Err(CompareError::Usage(format!("no revision `{name}` in {}{hint}", self.top.display())))
    }

    /// The work tree as a commit: tracked changes and new files that are not ignored. Its objects
    /// go to `objects`, of a checkout.
    ///
    /// The same content gives the same commit. `without` (the target folder) is left out even where
    /// it is not ignored.
    ///
    /// # Errors
    /// When git cannot read the work tree.
    pub fn snapshot(&self, objects: &Path, without: &Path) -> Result<Revision, CompareError> {
        let head = self.resolve("HEAD")?;
        let action = "snapshot the working tree";
        let io =
            |cause: std::io::Error| CompareError::Usage(format!("failed to {action}: {cause}"));
        let folder = tempfile::tempdir().map_err(io)?;
        let index = folder.path().join("index");
        let own = run(git(&self.top).args(["rev-parse", "--git-path", "index"]), action)?;
        // A copy saves reading every file again; without one everything is read.
        let _ = std::fs::copy(self.top.join(own), &index);
        let plumbing = || {
            let mut command = git(&self.top);
            command.env("GIT_INDEX_FILE", &index).env("GIT_OBJECT_DIRECTORY", objects);
            command.env("GIT_ALTERNATE_OBJECT_DIRECTORIES", &self.objects);
            for who in ["AUTHOR", "COMMITTER"] {
                command
                    .env(format!("GIT_{who}_NAME"), "kernelgate")
                    .env(format!("GIT_{who}_EMAIL"), "kernelgate@localhost");
                command.env(format!("GIT_{who}_DATE"), "2000-01-01T00:00:00Z");
            }
            command
        };
        let mut add = plumbing();
        add.args(["-c", "core.safecrlf=false", "add", "--all", "--", "."]);
        let top = self.top.canonicalize().unwrap_or_else(|_| self.top.clone());
        let excluded = without
            .canonicalize()
            .ok()
            .and_then(|path| path.strip_prefix(&top).map(Path::to_owned).ok());
        // Where it is ignored already, as most are, git takes an exclusion by name for a mistake.
        let ignored = |path: &PathBuf| {
            let asked = git(&self.top).args(["check-ignore", "--quiet", "--"]).arg(path).status();
            asked.is_ok_and(|status| status.success())
        };
        if let Some(path) = excluded.filter(|path| !ignored(path)) {
            add.arg(format!(":(exclude,literal){}", path.display()));
        }
        run(&mut add, action)?;
        let tree = run(plumbing().arg("write-tree"), action)?;
        if tree == run(git(&self.top).args(["rev-parse", "HEAD^{tree}"]), action)? {
            return Ok(Revision {
                name: "working tree, no changes".to_owned(),
                commit: head.commit,
            });
        }
        let commit = run(
            plumbing().args(["commit-tree", &tree, "-p", &head.commit, "-m", "working tree"]),
            action,
        )?;
        Ok(Revision { name: "working tree".to_owned(), commit })
    }

    /// A checkout that shares the repository's objects, made where there is none; returns its
    /// object folder.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn checkout_folder(&self, folder: &Path) -> Result<PathBuf, CompareError> {
        let objects = folder.join(".git/objects");
        let io = |cause| CompareError::io("make a checkout in", folder, &cause);
        if !objects.is_dir() {
            std::fs::create_dir_all(folder).map_err(io)?;
            let format = format!("--object-format={}", self.object_format);
            run(git(folder).args(["init", "--quiet", &format]), "make a checkout")?;
        }
        std::fs::create_dir_all(objects.join("info")).map_err(io)?;
        std::fs::write(objects.join("info/alternates"), format!("{}\n", self.objects.display()))
            .map_err(io)?;
        // Left by a git that was killed; this program holds the comparison's lock.
        let _ = std::fs::remove_file(folder.join(".git/index.lock"));
        Ok(objects)
    }

    /// Puts a revision into a checkout: files that are the same stay untouched, so that cargo
    /// builds only what differs.
    ///
    /// # Errors
    /// When git fails.
    pub fn check_out(&self, revision: &Revision, folder: &Path) -> Result<(), CompareError> {
        let action = format!("check out {}", revision.label());
        run(
            git(folder).args(["checkout", "--quiet", "--detach", "--force", &revision.commit]),
            &action,
        )?;
        run(git(folder).args(["clean", "-ffdxq", "-e", "Cargo.lock"]), &action)?;
        // A lock file that is not committed: both sides get the one that the user builds with.
        for lock in [Path::new("Cargo.lock").to_owned(), self.package.join("Cargo.lock")] {
            let tracked =
                run(git(folder).args(["ls-files", "--", &lock.to_string_lossy()]), &action)?;
            if tracked.is_empty() && self.top.join(&lock).is_file() {
                let copied = std::fs::copy(self.top.join(&lock), folder.join(&lock));
                copied.map_err(|cause| CompareError::io("write", &folder.join(&lock), &cause))?;
            }
        }
        Ok(())
    }
}

/// The names most like one that does not exist, best first.
fn similar<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut scored: Vec<(f64, &str)> =
        names.map(|other| (strsim::normalized_damerau_levenshtein(name, other), other)).collect();
    scored.retain(|(score, other)| *score >= 0.5 || other.ends_with(name));
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(3).map(|(_, name)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository() -> (tempfile::TempDir, Repository) {
        let folder = tempfile::tempdir().unwrap();
        let at = |arguments: &[&str]| run(git(folder.path()).args(arguments), "test").unwrap();
        at(&["init", "--quiet", "--initial-branch=main"]);
        std::fs::write(folder.path().join("a"), "1").unwrap();
        std::fs::write(folder.path().join(".gitignore"), "ignored\n").unwrap();
        at(&["add", "."]);
        at(&["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first"]);
        let repository = Repository::around(folder.path()).unwrap();
        (folder, repository)
    }

    #[test]
    fn a_snapshot_holds_changes_and_new_files_and_touches_nothing() {
        let (folder, repository) = repository();
        let elsewhere = tempfile::tempdir().unwrap();
        let objects = repository.checkout_folder(elsewhere.path()).unwrap();
        let target = folder.path().join("target");
        let clean = repository.snapshot(&objects, &target).unwrap();
        assert_eq!(clean.commit, repository.resolve("main").unwrap().commit);
        std::fs::write(folder.path().join("a"), "2").unwrap();
        std::fs::create_dir(&target).unwrap();
        for name in ["new", "ignored", "target/built"] {
            std::fs::write(folder.path().join(name), "x").unwrap();
        }
        let status = || run(git(folder.path()).args(["status", "--porcelain"]), "test").unwrap();
        let (before, count) = (status(), std::fs::read_dir(&repository.objects).unwrap().count());
        let changed = repository.snapshot(&objects, &target).unwrap();
        assert_eq!(
            repository.snapshot(&objects, &target).unwrap(),
            changed,
            "the same content is the same commit"
        );
        assert_eq!(
            (status(), std::fs::read_dir(&repository.objects).unwrap().count()),
            (before, count)
        );
        assert!(
            repository.resolve(&changed.commit).is_err(),
            "its objects are not in the repository"
        );
        repository.check_out(&changed, elsewhere.path()).unwrap();
        assert_eq!(std::fs::read_to_string(elsewhere.path().join("a")).unwrap(), "2");
        assert!(
            elsewhere.path().join("new").exists() && !elsewhere.path().join("ignored").exists()
        );
        assert!(!elsewhere.path().join("target").exists());
        repository.check_out(&clean, elsewhere.path()).unwrap();
        assert!(!elsewhere.path().join("new").exists());

        // As in nearly every package.
        std::fs::write(folder.path().join(".gitignore"), "/target\nignored\n").unwrap();
        let usual = repository.snapshot(&objects, &target).unwrap();
        repository.check_out(&usual, elsewhere.path()).unwrap();
        assert!(elsewhere.path().join("new").exists() && !elsewhere.path().join("target").exists());
    }

    #[test]
    fn a_revision_that_is_not_there_is_named_with_similar_ones() {
        let (_folder, repository) = repository();
        let message = repository.resolve("mian").unwrap_err().to_string();
        assert!(
            message.contains("no revision `mian`") && message.contains("did you mean main?"),
            "{message}"
        );
        assert!(repository.resolve("--help").is_err());
    }
}
