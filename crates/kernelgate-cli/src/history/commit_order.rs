//! Orders commits by the git history, if the repository contains them. Recorded times are
//! unreliable: branches are merged later, and clocks go backwards.

use std::collections::HashMap;
use std::path::Path;

use super::HistoryError;
use crate::compare::sides::git::{self, GitRepository};

/// Commits in the order of their history, each after its parents.
#[derive(Debug, Clone, Default)]
pub struct CommitOrder {
    commits: Vec<String>,
    places: HashMap<String, usize>,
}

impl CommitOrder {
    /// The order of these commits, the oldest first.
    pub fn new(commits: Vec<String>) -> Self {
        let places = commits.iter().enumerate().map(|(at, commit)| (commit.clone(), at)).collect();
        Self { commits, places }
    }

    /// The ancestors of a revision of the repository around a folder; empty without a repository if
    /// no revision was named.
    pub fn from_repository_around(
        folder: &Path,
        revision: Option<&str>,
    ) -> Result<CommitOrder, HistoryError> {
        let usage_error = |error| HistoryError::Revision(Box::new(error));
        let repository = match (GitRepository::around(folder), revision) {
            (Ok(repository), _) => repository,
            (Err(_), None) => return Ok(Self::default()),
            (Err(error), Some(_)) => return Err(usage_error(error)),
        };
        let commit = match (repository.resolve(revision.unwrap_or("HEAD")), revision) {
            (Ok(revision), _) => revision.commit,
            // The git repository has no commit yet.
            (Err(_), None) => return Ok(Self::default()),
            (Err(error), Some(_)) => return Err(usage_error(error)),
        };
        let list = ["rev-list", "--topo-order", "--reverse", &commit];
        let listed = git::run_git(git::git(&repository.top).args(list), "list commits")
            .map_err(usage_error)?;
        Ok(Self::new(listed.lines().map(str::to_owned).collect()))
    }

    /// Whether the order contains no commit.
    pub fn is_empty(&self) -> bool {
        self.commits.is_empty()
    }

    /// Position of a commit in the order.
    pub fn place(&self, commit: &str) -> Option<usize> {
        self.places.get(commit).copied()
    }

    /// Returns the commits after one commit up to another, oldest first; empty if one is unknown or
    /// they are in the other order.
    pub fn between(&self, after: &str, up_to: &str) -> &[String] {
        let (Some(after), Some(up_to)) = (self.place(after), self.place(up_to)) else {
            return &[];
        };
        self.commits.get(after + 1..=up_to).unwrap_or_default()
    }
}
