//! Stores the user's working tree with its uncommitted changes as a git commit in the object store
//! of a checkout.

use std::path::{Path, PathBuf};
use std::process::Command;

use kernelgate::display;
use kernelgate::record::text::join_lines_with_spaces;

use super::checkout::SideCheckout;
use super::git::{
    GitRepository, NamedGitRevision, isolated_git, run_git_and_return_output, run_git_or_fail,
};
use super::submodules;
use crate::compare::CompareError;

/// If the untracked files of a snapshot have more bytes than this in total, a note with their size
/// is printed.
const MAX_UNTRACKED_BYTES_WITHOUT_NOTE: u64 = 50_000_000;
/// Largest number of files or submodules that a message about a snapshot names.
const MAX_NAMED_FILES_IN_MESSAGE: usize = 3;
const SNAPSHOT_ACTION_IN_ERRORS: &str = "snapshot the working tree";

/// Exclusions of a working-tree snapshot, and the function that prints its notes.
#[derive(Clone, Copy)]
pub struct WorkTreeSnapshotOptions<'a> {
    /// Cargo's target folder, which the snapshot excludes even if git does not ignore it.
    pub cargo_target_folder: &'a Path,
    /// Untracked files and folders that the snapshot excludes.
    pub paths_excluded_from_snapshot: &'a [PathBuf],
    /// Function that prints a note if large untracked files become part of the snapshot.
    pub print_note: &'a dyn Fn(&str),
}

/// Stores the working tree as a commit: tracked changes and new files that git does not ignore,
/// including those in its submodules. Working trees with equal content give an equal snapshot
/// commit.
///
/// The git objects of the snapshot are written to the checkout's own store, not to the user's
/// repository.
pub fn commit_working_tree_snapshot(
    of: &GitRepository,
    checkout: &SideCheckout,
    options: WorkTreeSnapshotOptions<'_>,
) -> Result<NamedGitRevision, CompareError> {
    for path in options.paths_excluded_from_snapshot {
        check_exclusion_is_untracked(of, path)?;
    }
    let (revision, changed) =
        commit_snapshot_with_submodules(of, &checkout.snapshot_object_folder(), options)?;
    // The submodule paths are put on one line, because they come from the author of the repository,
    // who is not trusted.
    let plain = |path: &PathBuf| join_lines_with_spaces(&path.display().to_string());
    let name = match &changed[..] {
        [] => return Ok(revision),
        [one] => format!("{}, with changes in submodule {}", revision.revision_name, plain(one)),
        several => {
            let named: Vec<String> =
                several.iter().take(MAX_NAMED_FILES_IN_MESSAGE).map(plain).collect();
            let more = several.len() - named.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!(
                "{}, with changes in submodules {}{more}",
                revision.revision_name,
                named.join(", ")
            )
        }
    };
    Ok(NamedGitRevision { revision_name: name, ..revision })
}

/// Stores the working tree of a repository and its submodules, and returns the snapshot's commit
/// and the submodules that contain uncommitted changes. Git objects of submodules are stored below
/// the snapshot's store, at the paths where the module `checkout` looks for them.
fn commit_snapshot_with_submodules(
    of: &GitRepository,
    store: &Path,
    options: WorkTreeSnapshotOptions<'_>,
) -> Result<(NamedGitRevision, Vec<PathBuf>), CompareError> {
    let head = of.resolve_revision("HEAD")?;
    let io = |cause| CompareError::Snapshot { action: SNAPSHOT_ACTION_IN_ERRORS, cause };
    let objects = store.join("objects");
    std::fs::create_dir_all(&objects).map_err(io)?;
    let folder = tempfile::tempdir().map_err(io)?;
    let index = folder.path().join("index");
    let own = run_git_or_fail(
        isolated_git(&of.work_tree_root).args(["rev-parse", "--git-path", "index"]),
        SNAPSHOT_ACTION_IN_ERRORS,
    )?;
    // The snapshot starts from a copy of the user's git index, so that git need not read unchanged
    // files again; without a copy git reads every file.
    if copy_git_index_with_time(&of.work_tree_root.join(own), &index).is_err() {
        let _ = std::fs::remove_file(&index);
    }
    let alternates = std::env::join_paths(&of.git_object_folders).unwrap_or_default();
    let plumbing = || {
        let mut command = isolated_git(&of.work_tree_root);
        command.env("GIT_INDEX_FILE", &index).env("GIT_OBJECT_DIRECTORY", &objects);
        command.env("GIT_ALTERNATE_OBJECT_DIRECTORIES", &alternates);
        for who in ["AUTHOR", "COMMITTER"] {
            command
                .env(format!("GIT_{who}_NAME"), "kernelgate")
                .env(format!("GIT_{who}_EMAIL"), "kernelgate@localhost");
            command.env(format!("GIT_{who}_DATE"), "2000-01-01T00:00:00Z");
        }
        command
    };
    add_working_tree_to_index(of, plumbing, options)?;
    let mut changed = Vec::new();
    for link in submodules::submodules_in_index(plumbing())? {
        let Some(inner) =
            submodules::repository_rooted_at(&of.work_tree_root.join(&link.submodule_path))
        else {
            continue;
        };
        let below = store.join("submodules").join(&link.submodule_path);
        let (revision, within) = commit_snapshot_with_submodules(&inner, &below, options)?;
        if revision.full_commit_id != link.recorded_commit {
            let entry =
                format!("160000,{},{}", revision.full_commit_id, link.submodule_path.display());
            run_git_or_fail(
                plumbing().args(["update-index", "--cacheinfo", &entry]),
                SNAPSHOT_ACTION_IN_ERRORS,
            )?;
            changed.push(link.submodule_path.clone());
        }
        changed.extend(within.into_iter().map(|path| link.submodule_path.join(path)));
    }
    let tree = run_git_or_fail(plumbing().arg("write-tree"), SNAPSHOT_ACTION_IN_ERRORS)?;
    if tree
        == run_git_or_fail(
            isolated_git(&of.work_tree_root).args(["rev-parse", "HEAD^{tree}"]),
            SNAPSHOT_ACTION_IN_ERRORS,
        )?
    {
        let name = "working tree, no changes".to_owned();
        return Ok((
            NamedGitRevision { revision_name: name, full_commit_id: head.full_commit_id },
            changed,
        ));
    }
    let commit = run_git_or_fail(
        plumbing().args(["commit-tree", &tree, "-p", &head.full_commit_id, "-m", "working tree"]),
        SNAPSHOT_ACTION_IN_ERRORS,
    )?;
    Ok((
        NamedGitRevision { revision_name: "working tree".to_owned(), full_commit_id: commit },
        changed,
    ))
}

/// Copies a git index file and keeps its modification time. With a new time on the copied index,
/// git would miss an edit that keeps the file's size and happens in the same second as the commit.
fn copy_git_index_with_time(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::copy(from, to)?;
    let modified = std::fs::metadata(from)?.modified()?;
    std::fs::File::options().write(true).open(to)?.set_modified(modified)
}

/// Adds the files of the working tree to the snapshot's index, without the excluded untracked
/// files.
fn add_working_tree_to_index(
    of: &GitRepository,
    plumbing: impl Fn() -> Command,
    options: WorkTreeSnapshotOptions<'_>,
) -> Result<(), CompareError> {
    let top = of.work_tree_root.canonicalize().unwrap_or_else(|_| of.work_tree_root.clone());
    let below = |path: &PathBuf| {
        let path = path.canonicalize().ok()?.strip_prefix(&top).map(Path::to_owned).ok()?;
        (path.components().next().is_some()).then_some(path)
    };
    // A path that git ignores already gets no exclusion, because `git add` reports such an
    // exclusion as an error.
    let ignored = |path: &PathBuf| {
        let ignored_status = isolated_git(&of.work_tree_root)
            .args(["check-ignore", "--quiet", "--"])
            .arg(path)
            .status();
        ignored_status.is_ok_and(|status| status.success())
    };
    let unwanted = options
        .paths_excluded_from_snapshot
        .iter()
        .map(PathBuf::as_path)
        .chain([options.cargo_target_folder]);
    let unwanted: Vec<String> = unwanted
        .filter_map(|path| below(&path.to_owned()))
        .filter(|path| !ignored(path))
        .map(|path| format!(":(exclude,literal){}", path.display()))
        .collect();
    let mut listing = isolated_git(&of.work_tree_root);
    listing.args(["ls-files", "--others", "--exclude-standard", "-z", "--", "."]).args(&unwanted);
    print_note_about_large_untracked_files(
        of,
        &run_git_or_fail(&mut listing, SNAPSHOT_ACTION_IN_ERRORS)?,
        options.print_note,
    );
    let quietly = ["-c", "core.safecrlf=false", "-c", "advice.addEmbeddedRepo=false", "add"];
    if !unwanted.is_empty() {
        // Tracked files belong to the snapshot even if they lie in an excluded folder.
        run_git_or_fail(plumbing().args(quietly).arg("--update"), SNAPSHOT_ACTION_IN_ERRORS)?;
    }
    run_git_or_fail(
        plumbing().args(quietly).args(["--all", "--", "."]).args(&unwanted),
        SNAPSHOT_ACTION_IN_ERRORS,
    )
    .map(drop)
}

/// Prints a note with the total size of the untracked files if it is large, because all of them are
/// copied into the snapshot.
fn print_note_about_large_untracked_files(of: &GitRepository, untracked: &str, say: &dyn Fn(&str)) {
    let size = |name: &str| {
        std::fs::symlink_metadata(of.work_tree_root.join(name)).map_or(0, |it| it.len())
    };
    let mut sizes: Vec<(u64, &str)> =
        untracked.split('\0').filter(|it| !it.is_empty()).map(|it| (size(it), it)).collect();
    let sum: u64 = sizes.iter().map(|(bytes, _)| bytes).sum();
    if sum <= MAX_UNTRACKED_BYTES_WITHOUT_NOTE {
        return;
    }
    sizes.sort_by_key(|(bytes, name)| (std::cmp::Reverse(*bytes), *name));
    let named: Vec<String> = sizes
        .iter()
        .take(MAX_NAMED_FILES_IN_MESSAGE)
        .map(|(bytes, name)| format!("{name} ({})", display::decimal_byte_size_text(*bytes)))
        .collect();
    say(&format!(
        "{} of untracked files become part of the working tree's side, the largest: {}; \
         .gitignore or --leave-out PATH leaves them out",
        display::decimal_byte_size_text(sum),
        named.join(", ")
    ));
}

/// Returns an error if the path of a requested exclusion (`--leave-out`) does not exist or is a
/// file that git tracks.
fn check_exclusion_is_untracked(of: &GitRepository, path: &Path) -> Result<(), CompareError> {
    let refuse = |why| {
        Err(CompareError::CannotExcludePath {
            path_to_exclude: path.to_owned(),
            why_trials_do_not_fit: why,
        })
    };
    if std::fs::symlink_metadata(path).is_err() {
        return refuse("there is no such file or folder");
    }
    let mut command = isolated_git(&of.work_tree_root);
    command.args(["ls-files", "--error-unmatch", "--"]).arg(path);
    match path.is_dir() || !run_git_and_return_output(&mut command)?.status.success() {
        true => Ok(()),
        false => refuse("git tracks it, so it is part of what is compared"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::super::git::tests::{run_test_git, test_repository};
    use super::*;

    const NO_EXCLUDED_PATHS: &[PathBuf] = &[];

    fn snapshot_test_work_tree(
        of: &GitRepository,
        checkout: &SideCheckout,
        target: &Path,
    ) -> NamedGitRevision {
        commit_working_tree_snapshot(
            of,
            checkout,
            WorkTreeSnapshotOptions {
                cargo_target_folder: target,
                paths_excluded_from_snapshot: NO_EXCLUDED_PATHS,
                print_note: &|_| (),
            },
        )
        .unwrap()
    }

    #[test]
    fn a_snapshot_contains_changes_and_new_files_and_leaves_the_repository_untouched() {
        let (folder, repository) = test_repository();
        let elsewhere = tempfile::tempdir().unwrap();
        let checkout =
            SideCheckout::open_or_create_checkout(&repository, elsewhere.path()).unwrap();
        let target = folder.path().join("target");
        let clean = snapshot_test_work_tree(&repository, &checkout, &target);
        assert_eq!(
            clean.full_commit_id,
            repository.resolve_revision("main").unwrap().full_commit_id
        );
        std::fs::write(folder.path().join("a"), "2").unwrap();
        std::fs::create_dir(&target).unwrap();
        for name in ["new", "ignored", "target/built"] {
            std::fs::write(folder.path().join(name), "x").unwrap();
        }
        let status = || run_test_git(folder.path(), &["status", "--porcelain"]);
        let objects = || std::fs::read_dir(&repository.git_object_folders[0]).unwrap().count();
        let (before, count) = (status(), objects());
        let changed = snapshot_test_work_tree(&repository, &checkout, &target);
        assert_eq!(
            snapshot_test_work_tree(&repository, &checkout, &target),
            changed,
            "the same content is the same commit"
        );
        assert_eq!((status(), objects()), (before, count));
        assert!(
            repository.resolve_revision(&changed.full_commit_id).is_err(),
            "its objects are not in the repository"
        );
        checkout.check_out_revision(&changed).unwrap();
        assert_eq!(std::fs::read_to_string(elsewhere.path().join("a")).unwrap(), "2");
        assert!(
            elsewhere.path().join("new").exists() && !elsewhere.path().join("ignored").exists()
        );
        assert!(!elsewhere.path().join("target").exists());
        checkout.check_out_revision(&clean).unwrap();
        assert!(!elsewhere.path().join("new").exists());

        // This test has a `.gitignore`, as nearly every package does.
        std::fs::write(folder.path().join(".gitignore"), "/target\nignored\n").unwrap();
        let usual = snapshot_test_work_tree(&repository, &checkout, &target);
        checkout.check_out_revision(&usual).unwrap();
        assert!(elsewhere.path().join("new").exists() && !elsewhere.path().join("target").exists());
    }

    #[test]
    fn an_edit_of_equal_length_in_the_second_of_the_commit_is_noticed() {
        let (folder, repository) = test_repository();
        let elsewhere = tempfile::tempdir().unwrap();
        let checkout =
            SideCheckout::open_or_create_checkout(&repository, elsewhere.path()).unwrap();
        let second = || {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
            (now.as_secs(), Duration::from_nanos(1_000_000_000 - u64::from(now.subsec_nanos())))
        };
        let file = folder.path().join("a");
        for attempt in 0..10 {
            std::thread::sleep(second().1);
            let began = second().0;
            std::fs::write(&file, format!("{attempt}1")).unwrap();
            run_test_git(folder.path(), &["commit", "--quiet", "--all", "--message", "edit"]);
            std::fs::write(&file, format!("{attempt}2")).unwrap();
            let (ended, left) = second();
            if began == ended {
                std::thread::sleep(left);
                let revision =
                    snapshot_test_work_tree(&repository, &checkout, &folder.path().join("target"));
                checkout.check_out_revision(&revision).unwrap();
                let seen = std::fs::read_to_string(elsewhere.path().join("a")).unwrap();
                return assert_eq!(seen, format!("{attempt}2"));
            }
        }
        panic!("a commit takes more than a second");
    }

    #[test]
    fn large_untracked_files_are_reported_and_can_be_excluded() {
        let (folder, repository) = test_repository();
        let elsewhere = tempfile::tempdir().unwrap();
        let large = folder.path().join("data/large");
        std::fs::create_dir(folder.path().join("data")).unwrap();
        // The test's large file is sparse: it has a large size but is quick to copy.
        std::fs::File::create(&large).unwrap().set_len(MAX_UNTRACKED_BYTES_WITHOUT_NOTE).unwrap();
        std::fs::write(folder.path().join("data/small"), "x").unwrap();
        let messages = std::cell::RefCell::new(Vec::<String>::new());
        let say = |text: &str| messages.borrow_mut().push(text.to_owned());
        let take_snapshot = |checkout: &SideCheckout, leave_out: &[PathBuf]| {
            let target = Path::new("/none");
            commit_working_tree_snapshot(
                &repository,
                checkout,
                WorkTreeSnapshotOptions {
                    cargo_target_folder: target,
                    paths_excluded_from_snapshot: leave_out,
                    print_note: &say,
                },
            )
        };
        let checkout =
            SideCheckout::open_or_create_checkout(&repository, elsewhere.path()).unwrap();
        let everything = take_snapshot(&checkout, NO_EXCLUDED_PATHS).unwrap();
        let text = messages.take().concat();
        assert!(text.contains("data/large (50.0 MB)") && text.contains("--leave-out"), "{text}");
        checkout.check_out_revision(&everything).unwrap();
        assert!(elsewhere.path().join("data/large").exists());

        // The test opens the checkout again, which removes the objects of the previous snapshot.
        let checkout =
            SideCheckout::open_or_create_checkout(&repository, elsewhere.path()).unwrap();
        assert!(!checkout.snapshot_object_folder().exists());
        std::fs::write(folder.path().join("a"), "2").unwrap();
        let leave_out = [large.clone()];
        let without = take_snapshot(&checkout, &leave_out).unwrap();
        assert_eq!(messages.take(), [""; 0]);
        checkout.check_out_revision(&without).unwrap();
        let there = |name: &str| elsewhere.path().join(name).exists();
        assert!(!there("data/large") && there("data/small"));
        assert_eq!(std::fs::read_to_string(elsewhere.path().join("a")).unwrap(), "2");
        let gone =
            run_test_git(elsewhere.path(), &["cat-file", "--batch-check", "--batch-all-objects"]);
        assert!(!gone.contains(&everything.full_commit_id), "{gone}");

        let refused = ["a", "nothing"].map(|path| {
            let paths = [folder.path().join(path)];
            let message = take_snapshot(&checkout, &paths).unwrap_err().to_string();
            message.replace(folder.path().to_str().unwrap(), "FOLDER")
        });
        insta::assert_snapshot!(refused.join("\n"), @r"
        --leave-out FOLDER/a: git tracks it, so it is part of what is compared
        --leave-out FOLDER/nothing: there is no such file or folder
        ");
        // If a folder that contains tracked files is excluded, only its untracked files are left
        // out of the snapshot.
        run_test_git(folder.path(), &["add", "data/small"]);
        run_test_git(folder.path(), &["commit", "--quiet", "-m", "small"]);
        std::fs::write(folder.path().join("data/small"), "y").unwrap();
        let folder = [folder.path().join("data")];
        checkout.check_out_revision(&take_snapshot(&checkout, &folder).unwrap()).unwrap();
        assert!(!there("data/large"));
        assert_eq!(std::fs::read_to_string(elsewhere.path().join("data/small")).unwrap(), "y");
    }
}
