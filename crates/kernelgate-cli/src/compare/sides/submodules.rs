//! Lists the submodule commits that a revision of the repository records, and finds the submodules'
//! clones on this machine. kernelgate fetches no commits: if the user's clone lacks a submodule's
//! commit, the error states the command that fetches it.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use super::git::{GitRepository, isolated_git, run_git_and_return_output, run_git_or_fail};
use crate::compare::CompareError;

/// File mode of a git tree entry that records the commit of a submodule.
const GITLINK_MODE: &str = "160000";

/// A submodule entry (gitlink) of a git tree or index: path and recorded commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubmoduleEntry {
    /// Path of the submodule, relative to the root of the main repository.
    pub submodule_path: PathBuf,
    /// The submodule's commit that the main repository records.
    pub recorded_commit: String,
}

/// Lists the submodules in a git index; `command` is a git command that is set up for the index.
pub fn submodules_in_index(mut command: Command) -> Result<Vec<SubmoduleEntry>, CompareError> {
    let listed = run_git_or_fail(command.args(["ls-files", "--stage", "-z"]), "list submodules")?;
    // "160000 <commit> <stage>\t<path>"
    Ok(parse_submodule_entries(&listed, 1))
}

/// Lists the submodules, with their commits, that a commit of the main repository records.
pub fn submodules_in_commit(
    folder: &Path,
    commit: &str,
) -> Result<Vec<SubmoduleEntry>, CompareError> {
    let mut command = isolated_git(folder);
    command.args(["ls-tree", "-r", "-z", "--full-tree", commit]);
    // "160000 commit <commit>\t<path>"
    Ok(parse_submodule_entries(&run_git_or_fail(&mut command, "list submodules")?, 2))
}

fn parse_submodule_entries(listed: &str, place: usize) -> Vec<SubmoduleEntry> {
    let entries = listed.split('\0').filter_map(|entry| entry.split_once('\t'));
    let links = entries.filter_map(|(facts, path)| {
        let mut words = facts.split(' ');
        let is_link = words.next() == Some(GITLINK_MODE);
        let commit = words.nth(place - 1)?.to_owned();
        let path = PathBuf::from(path);
        (is_link && stays_inside_start_folder(&path))
            .then_some(SubmoduleEntry { submodule_path: path, recorded_commit: commit })
    });
    links.collect()
}

/// Returns whether a relative path stays inside the folder from which it starts. The check is
/// necessary because the author of `.gitmodules` may write any path, although git refuses paths out
/// of the repository in its index.
fn stays_inside_start_folder(path: &Path) -> bool {
    path.components().next().is_some()
        && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// Returns the names of submodules by their paths, as the file `.gitmodules` of a commit states
/// them.
pub fn submodule_names_by_path(folder: &Path, commit: &str) -> BTreeMap<PathBuf, PathBuf> {
    let blob = format!("--blob={commit}:.gitmodules");
    let mut command = isolated_git(folder);
    command.args(["config", &blob, "-z", "--get-regexp", r"^submodule\..*\.path$"]);
    // The command `git config` fails if the commit has no `.gitmodules` or the file has no
    // submodule path; both give an empty map.
    let Ok(listed) = run_git_and_return_output(&mut command) else { return BTreeMap::new() };
    let text = String::from_utf8_lossy(&listed.stdout);
    let each = text.split('\0').filter_map(|entry| {
        let (key, path) = entry.split_once('\n')?;
        let name = key.strip_prefix("submodule.")?.strip_suffix(".path")?;
        stays_inside_start_folder(Path::new(name))
            .then(|| (PathBuf::from(path), PathBuf::from(name)))
    });
    each.collect()
}

/// Finds the local clones of a submodule: its working tree in the user's repository, and the copy
/// in `.git/modules` under the submodule's name. The list of local clones is empty if the submodule
/// has neither.
pub fn local_repository_of_submodule(
    of: &GitRepository,
    path: &Path,
    name: Option<&PathBuf>,
) -> GitRepository {
    let top = of.work_tree_root.join(path);
    let mut found = GitRepository {
        work_tree_root: top.clone(),
        package_path_in_tree: PathBuf::new(),
        git_object_folders: Vec::new(),
        submodule_repository_folders: Vec::new(),
        git_object_format: of.git_object_format.clone(),
    };
    if let Some(work_tree) = repository_rooted_at(&top) {
        found.git_object_folders.extend(work_tree.git_object_folders);
        found.submodule_repository_folders.extend(work_tree.submodule_repository_folders);
    }
    for kept in &of.submodule_repository_folders {
        let kept = kept.join(name.map_or(path, PathBuf::as_path));
        if kept.join("objects").is_dir()
            && !found.git_object_folders.contains(&kept.join("objects"))
        {
            found.git_object_folders.push(kept.join("objects"));
            found.submodule_repository_folders.push(kept.join("modules"));
        }
    }
    found
}

/// Opens the repository whose working tree begins exactly at a folder; `None` if the folder merely
/// lies inside another repository.
pub fn repository_rooted_at(top: &Path) -> Option<GitRepository> {
    std::fs::symlink_metadata(top.join(".git")).ok()?;
    let found = GitRepository::open_around_folder(top).ok()?;
    let same = found.work_tree_root.canonicalize().ok()? == top.canonicalize().ok()?;
    same.then_some(found)
}
