//! Lists the commits that a revision records for git submodules, and finds their clones on this
//! machine. No commit is fetched: a commit that the user's clone lacks is an error that states how
//! to get it.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use super::git::{GitRepository, git, output, run_git};
use crate::compare::CompareError;

/// Mode of a tree's entry that is a commit of another repository.
const GITLINK_MODE: &str = "160000";

/// A submodule entry (gitlink) of a git tree or index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gitlink {
    /// Path of the submodule, relative to the repository's root.
    pub path: PathBuf,
    /// The commit that the repository records for the submodule.
    pub commit: String,
}

/// The submodules that an index records; `command` is git with that index.
pub fn submodules_in_index(mut command: Command) -> Result<Vec<Gitlink>, CompareError> {
    let listed = run_git(command.args(["ls-files", "--stage", "-z"]), "list submodules")?;
    // "160000 <commit> <stage>\t<path>"
    Ok(parse(&listed, 1))
}

/// Lists the submodules that a commit records.
pub fn submodules_in_commit(folder: &Path, commit: &str) -> Result<Vec<Gitlink>, CompareError> {
    let mut command = git(folder);
    command.args(["ls-tree", "-r", "-z", "--full-tree", commit]);
    // "160000 commit <commit>\t<path>"
    Ok(parse(&run_git(&mut command, "list submodules")?, 2))
}

fn parse(listed: &str, place: usize) -> Vec<Gitlink> {
    let entries = listed.split('\0').filter_map(|entry| entry.split_once('\t'));
    let links = entries.filter_map(|(facts, path)| {
        let mut words = facts.split(' ');
        let is_link = words.next() == Some(GITLINK_MODE);
        let commit = words.nth(place - 1)?.to_owned();
        let path = PathBuf::from(path);
        (is_link && is_below(&path)).then_some(Gitlink { path, commit })
    });
    links.collect()
}

/// Returns whether a relative path stays inside of the folder where it starts. Git refuses such
/// paths in its index, but the author of `.gitmodules` may write any name.
fn is_below(path: &Path) -> bool {
    path.components().next().is_some()
        && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// Names of submodules by path, from the `.gitmodules` of a commit.
pub fn submodule_names(folder: &Path, commit: &str) -> BTreeMap<PathBuf, PathBuf> {
    let blob = format!("--blob={commit}:.gitmodules");
    let mut command = git(folder);
    command.args(["config", &blob, "-z", "--get-regexp", r"^submodule\..*\.path$"]);
    // Without `.gitmodules`, or without an entry in the file, git fails.
    let Ok(listed) = output(&mut command) else { return BTreeMap::new() };
    let text = String::from_utf8_lossy(&listed.stdout);
    let each = text.split('\0').filter_map(|entry| {
        let (key, path) = entry.split_once('\n')?;
        let name = key.strip_prefix("submodule.")?.strip_suffix(".path")?;
        is_below(Path::new(name)).then(|| (PathBuf::from(path), PathBuf::from(name)))
    });
    each.collect()
}

/// The local repository of a submodule: its work tree in the user's, and git's copy under its name.
/// Empty if neither exists.
pub fn source(of: &GitRepository, path: &Path, name: Option<&PathBuf>) -> GitRepository {
    let top = of.top.join(path);
    let mut found = GitRepository {
        top: top.clone(),
        package: PathBuf::new(),
        objects: Vec::new(),
        modules: Vec::new(),
        object_format: of.object_format.clone(),
    };
    if let Some(work_tree) = work_tree(&top) {
        found.objects.extend(work_tree.objects);
        found.modules.extend(work_tree.modules);
    }
    for kept in &of.modules {
        let kept = kept.join(name.map_or(path, PathBuf::as_path));
        if kept.join("objects").is_dir() && !found.objects.contains(&kept.join("objects")) {
            found.objects.push(kept.join("objects"));
            found.modules.push(kept.join("modules"));
        }
    }
    found
}

/// The repository whose working tree begins at a folder; `None` if git would answer for a
/// repository around the folder.
pub fn work_tree(top: &Path) -> Option<GitRepository> {
    std::fs::symlink_metadata(top.join(".git")).ok()?;
    let found = GitRepository::around(top).ok()?;
    let same = found.top.canonicalize().ok()? == top.canonicalize().ok()?;
    same.then_some(found)
}
