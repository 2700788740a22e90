//! A copy of the user's sources at one revision, submodules included, which shares the objects of
//! the user's repository.

use std::path::{Path, PathBuf};

use super::git::{GitRepository, GitRevision, git, output, run_git};
use super::leftover_files;
use super::submodules::{self, Gitlink};
use crate::compare::CompareError;

/// Name of a branch that never exists: `HEAD` points to it while objects of an earlier snapshot are
/// removed.
const NONEXISTENT_BRANCH: &str = "refs/heads/kernelgate-nothing";
/// Folder below `.git` with the objects of a snapshot, which the user's repository lacks.
const SNAPSHOT_STORE: &str = "kernelgate";

pub struct SnapshotCheckout {
    folder: PathBuf,
    source: GitRepository,
}

impl SnapshotCheckout {
    /// Makes a checkout if it is missing; objects of an earlier snapshot are removed.
    pub fn open_or_create(
        source: &GitRepository,
        folder: &Path,
    ) -> Result<SnapshotCheckout, CompareError> {
        let checkout = Self { folder: folder.to_owned(), source: source.clone() };
        let store = checkout.object_folder();
        leftover_files::remove_path(&store).map_err(CompareError::io("remove", &store))?;
        checkout.create_checkout()?;
        Ok(checkout)
    }

    pub fn object_folder(&self) -> PathBuf {
        self.folder.join(".git").join(SNAPSHOT_STORE)
    }

    fn create_checkout(&self) -> Result<(), CompareError> {
        let (folder, action) = (&self.folder, "make a checkout");
        let io = CompareError::io("make a checkout in", folder);
        std::fs::create_dir_all(folder).map_err(io)?;
        // The command `git init` also runs in an existing checkout: if the checkout were damaged,
        // git would use the repository around it.
        let format = format!("--object-format={}", self.source.object_format);
        run_git(git(folder).args(["init", "--quiet", &format]), action)?;
        let info = folder.join(".git/objects/info");
        std::fs::create_dir_all(&info).map_err(io)?;
        let shared = self.source.objects.iter().map(|objects| objects.display().to_string());
        // The path is relative, because the checkout is moved while it is built.
        let own = self.object_folder().is_dir().then(|| format!("../{SNAPSHOT_STORE}/objects"));
        let alternates: Vec<String> = shared.chain(own).collect();
        let list = info.join("alternates");
        leftover_files::remove_path(&list).map_err(io)?;
        std::fs::write(list, alternates.join("\n") + "\n").map_err(io)?;
        run_git(git(folder).args(["symbolic-ref", "HEAD", NONEXISTENT_BRANCH]), action)?;
        // A git process that was killed leaves its lock file; removing it is safe, because this
        // program holds the comparison's lock.
        let _ = leftover_files::remove_path(&folder.join(".git/index.lock"));
        Ok(())
    }

    /// Puts the files of a revision into the checkout; unchanged files keep their times, so that
    /// cargo rebuilds only what differs. Returns notes about submodules that stay empty, as in the
    /// user's working tree.
    pub fn check_out(&self, revision: &GitRevision) -> Result<Vec<String>, CompareError> {
        let notes = self.fill(revision)?;
        let (folder, source) = (&self.folder, &self.source);
        // Both checkouts get the uncommitted `Cargo.lock` with which the user builds.
        for lock in [Path::new("Cargo.lock").to_owned(), source.package.join("Cargo.lock")] {
            let action = format!("check out {}", revision.label());
            let tracked =
                run_git(git(folder).args(["ls-files", "--", &lock.to_string_lossy()]), &action)?;
            if tracked.is_empty() && source.top.join(&lock).is_file() {
                let copied = std::fs::copy(source.top.join(&lock), folder.join(&lock));
                copied.map_err(CompareError::io("write", &folder.join(&lock)))?;
            }
        }
        Ok(notes)
    }

    fn fill(&self, revision: &GitRevision) -> Result<Vec<String>, CompareError> {
        self.create_checkout()?;
        let (folder, commit) = (&self.folder, &revision.commit);
        let action = format!("check out {}", revision.label());
        let links = submodules::submodules_in_commit(folder, commit)?;
        // Git keeps the folder of a removed submodule, and then cannot create a file at its path.
        for before in submodules::submodules_in_index(git(folder))? {
            if !links.iter().any(|link| link.path == before.path) {
                self.remove(&before.path)?;
            }
        }
        run_git(git(folder).args(["checkout", "--quiet", "--detach", "--force", commit]), &action)?;
        run_git(git(folder).args(["clean", "-ffdxq", "-e", "Cargo.lock"]), &action)?;
        let names = match links.is_empty() {
            true => Default::default(),
            false => submodules::submodule_names(folder, commit),
        };
        let mut notes = Vec::new();
        for link in &links {
            let source = submodules::source(&self.source, &link.path, names.get(&link.path));
            notes.extend(self.fill_submodule(source, link, revision)?);
        }
        Ok(notes)
    }

    fn fill_submodule(
        &self,
        source: GitRepository,
        link: &Gitlink,
        revision: &GitRevision,
    ) -> Result<Vec<String>, CompareError> {
        let (label, path) = (revision.label(), link.path.display());
        if source.objects.is_empty() {
            // An earlier comparison may have left a link at this path.
            self.remove(&link.path)?;
            let get = format!("`git submodule update --init --recursive -- {path}` gets it");
            if source.top.is_dir() {
                return Ok(vec![format!(
                    "submodule {path} of {label} stays empty, as it is in the working tree; {get}"
                )]);
            }
            return Err(CompareError::NoSubmodule { path: link.path.clone(), revision: label });
        }
        let below = Self { folder: self.checked_path_inside(&link.path)?, source };
        let (new, kept) =
            (self.object_folder().join("submodules").join(&link.path), below.object_folder());
        let io = CompareError::io("write", &kept);
        leftover_files::remove_path(&kept).map_err(io)?;
        if new.exists() {
            std::fs::create_dir_all(kept.parent().unwrap_or(&kept)).map_err(io)?;
            std::fs::rename(&new, &kept).map_err(io)?;
        }
        below.create_checkout()?;
        let object = format!("{}^{{commit}}", link.commit);
        if !output(git(&below.folder).args(["cat-file", "-e", &object]))?.status.success() {
            let (path, commit) = (link.path.clone(), link.commit.clone());
            return Err(CompareError::NoSubmoduleCommit { path, commit, revision: label });
        }
        let name = format!("submodule {path} of {label}");
        below.fill(&GitRevision { name, commit: link.commit.clone() })
    }

    fn remove(&self, path: &Path) -> Result<(), CompareError> {
        let gone = self.checked_path_inside(path)?;
        match std::fs::remove_dir_all(&gone) {
            Err(cause) if gone.exists() => Err(CompareError::io("remove", &gone)(cause)),
            _ => Ok(()),
        }
    }

    /// Converts a relative path to a path below the checkout, and refuses any other. The path is
    /// refused if a link, which a build may have left, leads elsewhere.
    fn checked_path_inside(&self, path: &Path) -> Result<PathBuf, CompareError> {
        let whole = self.folder.join(path);
        let below = path.ancestors().filter(|part| part.components().next().is_some());
        for part in below.map(|part| self.folder.join(part)) {
            if part.is_symlink() {
                return Err(CompareError::Link { link: part, checkout: self.folder.clone() });
            }
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::super::git::tests::{at, test_repository};
    use super::super::snapshot::{SnapshotOptions, take_working_snapshot};
    use super::*;

    fn write(folder: &Path, name: &str, text: &str) {
        std::fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
        std::fs::write(folder.join(name), text).unwrap();
    }

    fn take_snapshot(of: &GitRepository, checkout: &SnapshotCheckout) -> GitRevision {
        let options = SnapshotOptions { target: Path::new("/none"), leave_out: &[], say: &|_| () };
        take_working_snapshot(of, checkout, options).unwrap()
    }

    /// Makes a repository with the submodule `deps/outer`, which has the submodule `inner`; each
    /// has a file `a`.
    fn nested_repository() -> (Vec<tempfile::TempDir>, GitRepository) {
        let (inner, _) = test_repository();
        let (outer, _) = test_repository();
        let (top, of) = test_repository();
        let add = |to: &tempfile::TempDir, from: &tempfile::TempDir, path: &str| {
            let url = from.path().to_str().unwrap();
            at(to.path(), &["submodule", "--quiet", "add", "--name", "a name", url, path]);
            at(to.path(), &["commit", "--quiet", "-m", "submodule"]);
        };
        add(&outer, &inner, "inner");
        add(&top, &outer, "deps/outer");
        at(top.path(), &["submodule", "--quiet", "update", "--init", "--recursive"]);
        (vec![top, outer, inner], of)
    }

    #[test]
    fn submodules_are_checked_out_at_their_recorded_commits() {
        let (folders, repository) = nested_repository();
        let top = folders[0].path();
        let elsewhere = tempfile::tempdir().unwrap();
        let read = |name: &str| std::fs::read_to_string(elsewhere.path().join(name)).ok();
        let first = repository.resolve("HEAD").unwrap();
        let before = repository.resolve("HEAD~1").unwrap();
        // The test makes a commit in this clone of the submodule only, and a commit of the
        // repository that records it.
        write(&top.join("deps/outer"), "a", "2");
        at(&top.join("deps/outer"), &["commit", "--quiet", "-am", "second"]);
        at(top, &["commit", "--quiet", "-am", "second"]);
        let second = repository.resolve("HEAD").unwrap();
        let checkout = SnapshotCheckout::open_or_create(&repository, elsewhere.path()).unwrap();
        for (revision, a) in [(&first, "1"), (&second, "2"), (&first, "1")] {
            assert_eq!(checkout.check_out(revision).unwrap(), [""; 0]);
            assert_eq!(read("deps/outer/a").as_deref(), Some(a));
            assert_eq!(read("deps/outer/inner/a").as_deref(), Some("1"));
        }
        // The work tree is missing; git's own copy is used.
        std::fs::remove_dir_all(top.join("deps/outer")).unwrap();
        checkout.check_out(&second).unwrap();
        assert_eq!(read("deps/outer/inner/a").as_deref(), Some("1"));
        // The earlier revision has no submodule at this path; in the next revision a file takes the
        // submodule's place.
        checkout.check_out(&before).unwrap();
        assert_eq!(read("deps/outer/a"), None);
        checkout.check_out(&second).unwrap();
        at(top, &["rm", "--quiet", "--cached", "deps/outer"]);
        write(top, "deps/outer", "a file");
        checkout.check_out(&take_snapshot(&repository, &checkout)).unwrap();
        assert_eq!(read("deps/outer").as_deref(), Some("a file"));
    }

    #[test]
    fn changes_in_a_submodule_belong_to_the_working_tree_snapshot() {
        let (folders, repository) = nested_repository();
        let top = folders[0].path();
        let elsewhere = tempfile::tempdir().unwrap();
        let read = |name: &str| std::fs::read_to_string(elsewhere.path().join(name)).unwrap();
        let open = || SnapshotCheckout::open_or_create(&repository, elsewhere.path()).unwrap();
        assert_eq!(take_snapshot(&repository, &open()).name, "working tree, no changes");
        write(top, "deps/outer/a", "edited");
        write(top, "deps/outer/inner/new", "new");
        let status = || at(&top.join("deps/outer"), &["status", "--porcelain"]);
        let before = status();
        let checkout = open();
        let changed = take_snapshot(&repository, &checkout);
        assert_eq!(take_snapshot(&repository, &checkout), changed);
        assert_eq!(
            changed.name,
            "working tree, with changes in submodules deps/outer, deps/outer/inner"
        );
        checkout.check_out(&changed).unwrap();
        assert_eq!(
            (read("deps/outer/a"), read("deps/outer/inner/new")),
            ("edited".into(), "new".into())
        );
        assert_eq!(status(), before, "nothing of the user's is changed");
        // The next comparison no longer finds the earlier snapshot, whose checkout must do no harm.
        write(top, "deps/outer/a", "edited again");
        let checkout = open();
        checkout.check_out(&take_snapshot(&repository, &checkout)).unwrap();
        assert_eq!(read("deps/outer/a"), "edited again");
        let head = repository.resolve("HEAD").unwrap();
        let checkout = open();
        checkout.check_out(&head).unwrap();
        assert_eq!(read("deps/outer/a"), "1");
        assert!(!elsewhere.path().join("deps/outer/inner/new").exists());
    }

    #[test]
    fn a_missing_submodule_is_reported_with_the_command_that_fetches_it() {
        let (folders, _) = nested_repository();
        let url = folders[0].path().to_str().unwrap();
        let clone = tempfile::tempdir().unwrap();
        at(clone.path(), &["clone", "--quiet", url, "."]);
        let (repository, elsewhere) =
            (GitRepository::around(clone.path()).unwrap(), tempfile::tempdir().unwrap());
        let checkout = SnapshotCheckout::open_or_create(&repository, elsewhere.path()).unwrap();
        let head = repository.resolve("HEAD").unwrap();
        // The submodule is empty in the user's work tree too, which may be intended.
        let notes = checkout.check_out(&head).unwrap().concat();
        let hidden = |text: String| text.replace(&head.commit[..8], "HASH");
        insta::assert_snapshot!(hidden(notes), @"submodule deps/outer of HEAD (HASH) stays empty, as it is in the working tree; `git submodule update --init --recursive -- deps/outer` gets it");
        assert!(!elsewhere.path().join("deps/outer").exists());
        std::fs::remove_dir(clone.path().join("deps/outer")).unwrap();
        let message = checkout.check_out(&head).unwrap_err().to_string();
        insta::assert_snapshot!(hidden(message), @"submodule deps/outer of HEAD (HASH) is not on this machine: `git submodule update --init --recursive -- deps/outer` gets it in a work tree of that revision");

        // The submodule's repository is on this machine, but the recorded commit is missing.
        at(clone.path(), &["submodule", "--quiet", "update", "--init"]);
        let commit = "1".repeat(40);
        let entry = format!("160000,{commit},deps/outer");
        at(clone.path(), &["update-index", "--cacheinfo", &entry]);
        at(clone.path(), &["commit", "--quiet", "-m", "elsewhere"]);
        let head = repository.resolve("HEAD").unwrap();
        let message = checkout.check_out(&head).unwrap_err().to_string();
        let message = message.replace(&commit, "COMMIT").replace(&head.commit[..8], "HASH");
        insta::assert_snapshot!(message, @"submodule deps/outer: its commit 11111111 of HEAD (HASH) is not on this machine: `git -C deps/outer fetch origin COMMIT` gets it");
    }
}
