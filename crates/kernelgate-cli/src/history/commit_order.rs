//! Orders the commits of recorded runs by the git history of the user's repository. The times in
//! the records do not order commits reliably: branches are merged later, and clocks may go
//! backwards.

use std::collections::HashMap;
use std::path::Path;

use super::CaseHistoryError;
use crate::compare::sides::git::{self, GitRepository};

/// Commits in the order of the git history, each after its parents.
#[derive(Debug, Clone, Default)]
pub struct GitCommitOrder {
    commits_oldest_first: Vec<String>,
    position_of_commit: HashMap<String, usize>,
}

impl GitCommitOrder {
    /// Makes the order from a list of commits, the oldest first.
    pub fn from_oldest_first(commits: Vec<String>) -> Self {
        let places = commits.iter().enumerate().map(|(at, commit)| (commit.clone(), at)).collect();
        Self { commits_oldest_first: commits, position_of_commit: places }
    }

    /// Lists a revision and its ancestors in the repository around a folder; without a named
    /// revision it takes `HEAD`, and the list is empty without a repository.
    pub fn ancestors_in_repository(
        folder: &Path,
        revision: Option<&str>,
    ) -> Result<GitCommitOrder, CaseHistoryError> {
        let usage_error = |error| CaseHistoryError::RevisionLookup(Box::new(error));
        let repository = match (GitRepository::open_around_folder(folder), revision) {
            (Ok(repository), _) => repository,
            (Err(_), None) => return Ok(Self::default()),
            (Err(error), Some(_)) => return Err(usage_error(error)),
        };
        let commit = match (repository.resolve_revision(revision.unwrap_or("HEAD")), revision) {
            (Ok(revision), _) => revision.full_commit_id,
            // The git repository has no commit yet, so the order is empty.
            (Err(_), None) => return Ok(Self::default()),
            (Err(error), Some(_)) => return Err(usage_error(error)),
        };
        let list = ["rev-list", "--topo-order", "--reverse", &commit];
        let listed = git::run_git_or_fail(
            git::isolated_git(&repository.work_tree_root).args(list),
            "list commits",
        )
        .map_err(usage_error)?;
        Ok(Self::from_oldest_first(listed.lines().map(str::to_owned).collect()))
    }

    /// Returns whether the order contains no commit.
    pub fn has_no_commits(&self) -> bool {
        self.commits_oldest_first.is_empty()
    }

    /// Returns the position of a commit in the order, from 0 for the oldest; `None` if the order
    /// does not contain the commit.
    pub fn position_of_commit(&self, commit: &str) -> Option<usize> {
        self.position_of_commit.get(commit).copied()
    }

    /// Returns the commits after one commit up to and including another, oldest first; empty if one
    /// is unknown or they are in the wrong order.
    pub fn commits_after_up_to(&self, after: &str, up_to: &str) -> &[String] {
        let (Some(after), Some(up_to)) =
            (self.position_of_commit(after), self.position_of_commit(up_to))
        else {
            return &[];
        };
        self.commits_oldest_first.get(after + 1..=up_to).unwrap_or_default()
    }
}
