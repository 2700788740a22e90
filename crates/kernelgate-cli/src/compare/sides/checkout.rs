//! A checkout of the user's repository at one revision, submodules included, which reads git
//! objects from the user's repository instead of copying them.

use std::path::{Path, PathBuf};

use super::git::{
    GitRepository, NamedGitRevision, isolated_git, run_git_and_return_output, run_git_or_fail,
};
use super::leftover_files;
use super::submodules::{self, SubmoduleEntry};
use crate::compare::CompareError;

/// Name of a branch that never exists: the checkout's `HEAD` points to this branch, so that git
/// does not read a removed snapshot's commit.
const NONEXISTENT_HEAD_BRANCH: &str = "refs/heads/kernelgate-nothing";
/// Folder below `.git` of the checkout that stores the git objects of a working-tree snapshot,
/// which the user's repository lacks.
const SNAPSHOT_OBJECTS_FOLDER: &str = "kernelgate";

pub struct SideCheckout {
    checkout_folder: PathBuf,
    source_repository: GitRepository,
}

impl SideCheckout {
    /// Opens the checkout or creates it if it is missing, and removes the git objects of an earlier
    /// snapshot.
    pub fn open_or_create_checkout(
        source: &GitRepository,
        folder: &Path,
    ) -> Result<SideCheckout, CompareError> {
        let checkout =
            Self { checkout_folder: folder.to_owned(), source_repository: source.clone() };
        let store = checkout.snapshot_object_folder();
        leftover_files::remove_file_or_folder_if_present(&store)
            .map_err(CompareError::file_error("remove", &store))?;
        checkout.initialise_git_repository()?;
        Ok(checkout)
    }

    pub fn snapshot_object_folder(&self) -> PathBuf {
        self.checkout_folder.join(".git").join(SNAPSHOT_OBJECTS_FOLDER)
    }

    fn initialise_git_repository(&self) -> Result<(), CompareError> {
        let (folder, action) = (&self.checkout_folder, "make a checkout");
        let io = CompareError::file_error("make a checkout in", folder);
        std::fs::create_dir_all(folder).map_err(io)?;
        // `git init` also runs in an existing checkout, because in a damaged checkout git would
        // silently use the user's repository around it.
        let format = format!("--object-format={}", self.source_repository.git_object_format);
        run_git_or_fail(isolated_git(folder).args(["init", "--quiet", &format]), action)?;
        let info = folder.join(".git/objects/info");
        std::fs::create_dir_all(&info).map_err(io)?;
        let shared = self
            .source_repository
            .git_object_folders
            .iter()
            .map(|objects| objects.display().to_string());
        // The path to the snapshot's objects is relative, because the checkout is moved to the slot
        // while it is built.
        let own = self
            .snapshot_object_folder()
            .is_dir()
            .then(|| format!("../{SNAPSHOT_OBJECTS_FOLDER}/objects"));
        let alternates: Vec<String> = shared.chain(own).collect();
        let list = info.join("alternates");
        leftover_files::remove_file_or_folder_if_present(&list).map_err(io)?;
        std::fs::write(list, alternates.join("\n") + "\n").map_err(io)?;
        run_git_or_fail(
            isolated_git(folder).args(["symbolic-ref", "HEAD", NONEXISTENT_HEAD_BRANCH]),
            action,
        )?;
        // A killed git process leaves its lock file `index.lock`; removing it is safe, because this
        // program holds the lock of the comparison's folder.
        let _ = leftover_files::remove_file_or_folder_if_present(&folder.join(".git/index.lock"));
        Ok(())
    }

    /// Checks out the files of a revision; unchanged files keep their modification times, so that
    /// cargo rebuilds only what differs. Returns notes about submodules that stay empty because
    /// they are empty in the user's working tree.
    pub fn check_out_revision(
        &self,
        revision: &NamedGitRevision,
    ) -> Result<Vec<String>, CompareError> {
        let notes = self.check_out_with_submodules(revision)?;
        let (folder, source) = (&self.checkout_folder, &self.source_repository);
        // If git does not track `Cargo.lock`, the user's current `Cargo.lock` is copied into the
        // checkouts of both sides.
        for lock in
            [Path::new("Cargo.lock").to_owned(), source.package_path_in_tree.join("Cargo.lock")]
        {
            let action = format!("check out {}", revision.name_and_short_commit());
            let tracked = run_git_or_fail(
                isolated_git(folder).args(["ls-files", "--", &lock.to_string_lossy()]),
                &action,
            )?;
            if tracked.is_empty() && source.work_tree_root.join(&lock).is_file() {
                let copied = std::fs::copy(source.work_tree_root.join(&lock), folder.join(&lock));
                copied.map_err(CompareError::file_error("write", &folder.join(&lock)))?;
            }
        }
        Ok(notes)
    }

    fn check_out_with_submodules(
        &self,
        revision: &NamedGitRevision,
    ) -> Result<Vec<String>, CompareError> {
        self.initialise_git_repository()?;
        let (folder, commit) = (&self.checkout_folder, &revision.full_commit_id);
        let action = format!("check out {}", revision.name_and_short_commit());
        let links = submodules::submodules_in_commit(folder, commit)?;
        // Git would keep the folder of a removed submodule and then fail to create a file at its
        // path, so kernelgate removes the folder first.
        for before in submodules::submodules_in_index(isolated_git(folder))? {
            if !links.iter().any(|link| link.submodule_path == before.submodule_path) {
                self.remove_folder_inside_checkout(&before.submodule_path)?;
            }
        }
        run_git_or_fail(
            isolated_git(folder).args(["checkout", "--quiet", "--detach", "--force", commit]),
            &action,
        )?;
        run_git_or_fail(
            isolated_git(folder).args(["clean", "-ffdxq", "-e", "Cargo.lock"]),
            &action,
        )?;
        let names = match links.is_empty() {
            true => Default::default(),
            false => submodules::submodule_names_by_path(folder, commit),
        };
        let mut notes = Vec::new();
        for link in &links {
            let source = submodules::local_repository_of_submodule(
                &self.source_repository,
                &link.submodule_path,
                names.get(&link.submodule_path),
            );
            notes.extend(self.check_out_submodule(source, link, revision)?);
        }
        Ok(notes)
    }

    fn check_out_submodule(
        &self,
        source: GitRepository,
        link: &SubmoduleEntry,
        revision: &NamedGitRevision,
    ) -> Result<Vec<String>, CompareError> {
        let (label, path) = (revision.name_and_short_commit(), link.submodule_path.display());
        if source.git_object_folders.is_empty() {
            // An earlier comparison may have left a symbolic link at the submodule's path, so the
            // path is checked before removal.
            self.remove_folder_inside_checkout(&link.submodule_path)?;
            let get = format!("`git submodule update --init --recursive -- {path}` gets it");
            if source.work_tree_root.is_dir() {
                return Ok(vec![format!(
                    "submodule {path} of {label} stays empty, as it is in the working tree; {get}"
                )]);
            }
            return Err(CompareError::SubmoduleNotOnThisMachine {
                path: link.submodule_path.clone(),
                revision: label,
            });
        }
        let below = Self {
            checkout_folder: self.path_inside_checkout_without_links(&link.submodule_path)?,
            source_repository: source,
        };
        let (new, kept) = (
            self.snapshot_object_folder().join("submodules").join(&link.submodule_path),
            below.snapshot_object_folder(),
        );
        let io = CompareError::file_error("write", &kept);
        leftover_files::remove_file_or_folder_if_present(&kept).map_err(io)?;
        if new.exists() {
            std::fs::create_dir_all(kept.parent().unwrap_or(&kept)).map_err(io)?;
            std::fs::rename(&new, &kept).map_err(io)?;
        }
        below.initialise_git_repository()?;
        let object = format!("{}^{{commit}}", link.recorded_commit);
        if !run_git_and_return_output(
            isolated_git(&below.checkout_folder).args(["cat-file", "-e", &object]),
        )?
        .status
        .success()
        {
            let (path, commit) = (link.submodule_path.clone(), link.recorded_commit.clone());
            return Err(CompareError::SubmoduleCommitNotOnThisMachine {
                path,
                commit,
                revision: label,
            });
        }
        let name = format!("submodule {path} of {label}");
        below.check_out_with_submodules(&NamedGitRevision {
            revision_name: name,
            full_commit_id: link.recorded_commit.clone(),
        })
    }

    fn remove_folder_inside_checkout(&self, path: &Path) -> Result<(), CompareError> {
        let gone = self.path_inside_checkout_without_links(path)?;
        match std::fs::remove_dir_all(&gone) {
            Err(cause) if gone.exists() => Err(CompareError::file_error("remove", &gone)(cause)),
            _ => Ok(()),
        }
    }

    /// Joins a relative path to the checkout's folder, and refuses it if any part of it is a
    /// symbolic link. A build may have left a symbolic link inside the checkout, and writing
    /// through the link would change files outside the checkout.
    fn path_inside_checkout_without_links(&self, path: &Path) -> Result<PathBuf, CompareError> {
        let whole = self.checkout_folder.join(path);
        let below = path.ancestors().filter(|part| part.components().next().is_some());
        for part in below.map(|part| self.checkout_folder.join(part)) {
            if part.is_symlink() {
                return Err(CompareError::LinkInCheckout {
                    link: part,
                    checkout: self.checkout_folder.clone(),
                });
            }
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::super::git::tests::{run_test_git, test_repository};
    use super::super::snapshot::{WorkTreeSnapshotOptions, commit_working_tree_snapshot};
    use super::*;

    fn write_test_file(folder: &Path, name: &str, text: &str) {
        std::fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
        std::fs::write(folder.join(name), text).unwrap();
    }

    fn take_test_snapshot(of: &GitRepository, checkout: &SideCheckout) -> NamedGitRevision {
        let options = WorkTreeSnapshotOptions {
            cargo_target_folder: Path::new("/none"),
            paths_excluded_from_snapshot: &[],
            print_note: &|_| (),
        };
        commit_working_tree_snapshot(of, checkout, options).unwrap()
    }

    /// Makes a test repository with the submodule `deps/outer`, which has the submodule `inner`;
    /// each of the three has a file `a`.
    fn repository_with_nested_submodules() -> (Vec<tempfile::TempDir>, GitRepository) {
        let (inner, _) = test_repository();
        let (outer, _) = test_repository();
        let (top, of) = test_repository();
        let add = |to: &tempfile::TempDir, from: &tempfile::TempDir, path: &str| {
            let url = from.path().to_str().unwrap();
            run_test_git(
                to.path(),
                &["submodule", "--quiet", "add", "--name", "a name", url, path],
            );
            run_test_git(to.path(), &["commit", "--quiet", "-m", "submodule"]);
        };
        add(&outer, &inner, "inner");
        add(&top, &outer, "deps/outer");
        run_test_git(top.path(), &["submodule", "--quiet", "update", "--init", "--recursive"]);
        (vec![top, outer, inner], of)
    }

    #[test]
    fn submodules_are_checked_out_at_their_recorded_commits() {
        let (folders, repository) = repository_with_nested_submodules();
        let top = folders[0].path();
        let elsewhere = tempfile::tempdir().unwrap();
        let read = |name: &str| std::fs::read_to_string(elsewhere.path().join(name)).ok();
        let first = repository.resolve_revision("HEAD").unwrap();
        let before = repository.resolve_revision("HEAD~1").unwrap();
        // The test makes a commit in one clone of the submodule only, and a commit of the main
        // repository that records it.
        write_test_file(&top.join("deps/outer"), "a", "2");
        run_test_git(&top.join("deps/outer"), &["commit", "--quiet", "-am", "second"]);
        run_test_git(top, &["commit", "--quiet", "-am", "second"]);
        let second = repository.resolve_revision("HEAD").unwrap();
        let checkout =
            SideCheckout::open_or_create_checkout(&repository, elsewhere.path()).unwrap();
        for (revision, a) in [(&first, "1"), (&second, "2"), (&first, "1")] {
            assert_eq!(checkout.check_out_revision(revision).unwrap(), [""; 0]);
            assert_eq!(read("deps/outer/a").as_deref(), Some(a));
            assert_eq!(read("deps/outer/inner/a").as_deref(), Some("1"));
        }
        // The test deletes the submodule's work tree, so its objects come from the copy in the main
        // repository's `.git/modules`.
        std::fs::remove_dir_all(top.join("deps/outer")).unwrap();
        checkout.check_out_revision(&second).unwrap();
        assert_eq!(read("deps/outer/inner/a").as_deref(), Some("1"));
        // In this test, the commit before has no submodule at the path `deps/outer`; in the next
        // revision a file takes the submodule's place.
        checkout.check_out_revision(&before).unwrap();
        assert_eq!(read("deps/outer/a"), None);
        checkout.check_out_revision(&second).unwrap();
        run_test_git(top, &["rm", "--quiet", "--cached", "deps/outer"]);
        write_test_file(top, "deps/outer", "a file");
        checkout.check_out_revision(&take_test_snapshot(&repository, &checkout)).unwrap();
        assert_eq!(read("deps/outer").as_deref(), Some("a file"));
    }

    #[test]
    fn changes_in_a_submodule_belong_to_the_working_tree_snapshot() {
        let (folders, repository) = repository_with_nested_submodules();
        let top = folders[0].path();
        let elsewhere = tempfile::tempdir().unwrap();
        let read = |name: &str| std::fs::read_to_string(elsewhere.path().join(name)).unwrap();
        let open = || SideCheckout::open_or_create_checkout(&repository, elsewhere.path()).unwrap();
        assert_eq!(
            take_test_snapshot(&repository, &open()).revision_name,
            "working tree, no changes"
        );
        write_test_file(top, "deps/outer/a", "edited");
        write_test_file(top, "deps/outer/inner/new", "new");
        let status = || run_test_git(&top.join("deps/outer"), &["status", "--porcelain"]);
        let before = status();
        let checkout = open();
        let changed = take_test_snapshot(&repository, &checkout);
        assert_eq!(take_test_snapshot(&repository, &checkout), changed);
        assert_eq!(
            changed.revision_name,
            "working tree, with changes in submodules deps/outer, deps/outer/inner"
        );
        checkout.check_out_revision(&changed).unwrap();
        assert_eq!(
            (read("deps/outer/a"), read("deps/outer/inner/new")),
            ("edited".into(), "new".into())
        );
        assert_eq!(status(), before, "nothing of the user's is changed");
        // Opening the checkout again removes the objects of the earlier snapshot; the submodule's
        // old checkout must not fail because of it.
        write_test_file(top, "deps/outer/a", "edited again");
        let checkout = open();
        checkout.check_out_revision(&take_test_snapshot(&repository, &checkout)).unwrap();
        assert_eq!(read("deps/outer/a"), "edited again");
        let head = repository.resolve_revision("HEAD").unwrap();
        let checkout = open();
        checkout.check_out_revision(&head).unwrap();
        assert_eq!(read("deps/outer/a"), "1");
        assert!(!elsewhere.path().join("deps/outer/inner/new").exists());
    }

    #[test]
    fn a_missing_submodule_is_reported_with_the_fetch_command() {
        let (folders, _) = repository_with_nested_submodules();
        let url = folders[0].path().to_str().unwrap();
        let clone = tempfile::tempdir().unwrap();
        run_test_git(clone.path(), &["clone", "--quiet", url, "."]);
        let (repository, elsewhere) = (
            GitRepository::open_around_folder(clone.path()).unwrap(),
            tempfile::tempdir().unwrap(),
        );
        let checkout =
            SideCheckout::open_or_create_checkout(&repository, elsewhere.path()).unwrap();
        let head = repository.resolve_revision("HEAD").unwrap();
        // In this part of the test the submodule is empty in the user's working tree too, which may
        // be intended, so it is only noted.
        let notes = checkout.check_out_revision(&head).unwrap().concat();
        let hidden = |text: String| text.replace(&head.full_commit_id[..8], "HASH");
        insta::assert_snapshot!(hidden(notes), @"submodule deps/outer of HEAD (HASH) stays empty, as it is in the working tree; `git submodule update --init --recursive -- deps/outer` gets it");
        assert!(!elsewhere.path().join("deps/outer").exists());
        std::fs::remove_dir(clone.path().join("deps/outer")).unwrap();
        let message = checkout.check_out_revision(&head).unwrap_err().to_string();
        insta::assert_snapshot!(hidden(message), @"submodule deps/outer of HEAD (HASH) is not on this machine: `git submodule update --init --recursive -- deps/outer` gets it in a work tree of that revision");

        // In this part of the test, the submodule's repository is on this machine but the recorded
        // commit is missing.
        run_test_git(clone.path(), &["submodule", "--quiet", "update", "--init"]);
        let commit = "1".repeat(40);
        let entry = format!("160000,{commit},deps/outer");
        run_test_git(clone.path(), &["update-index", "--cacheinfo", &entry]);
        run_test_git(clone.path(), &["commit", "--quiet", "-m", "elsewhere"]);
        let head = repository.resolve_revision("HEAD").unwrap();
        let message = checkout.check_out_revision(&head).unwrap_err().to_string();
        let message = message.replace(&commit, "COMMIT").replace(&head.full_commit_id[..8], "HASH");
        insta::assert_snapshot!(message, @"submodule deps/outer: its commit 11111111 of HEAD (HASH) is not on this machine: `git -C deps/outer fetch origin COMMIT` gets it");
    }
}
