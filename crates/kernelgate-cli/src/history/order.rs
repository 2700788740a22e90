//! The order of commits: that of their history, where git knows it. Recorded times say little:
//! branches are merged later, and clocks go backwards.

use std::collections::HashMap;
use std::path::Path;

use super::HistoryError;
use crate::compare::sides::git::{self, Repository};

/// Commits in the order of their history, each after its parents.
#[derive(Debug, Clone, Default)]
pub struct CommitOrder {
    commits: Vec<String>,
    places: HashMap<String, usize>,
}

impl CommitOrder {
    /// Of these commits, the oldest first.
    pub fn of(commits: Vec<String>) -> Self {
        let places = commits.iter().enumerate().map(|(at, commit)| (commit.clone(), at)).collect();
        Self { commits, places }
    }

    /// What a revision of the repository around a folder descends from; empty where there is no
    /// repository and no revision was named.
    pub fn around(folder: &Path, revision: Option<&str>) -> Result<Self, HistoryError> {
        let told = |error: crate::compare::CompareError| HistoryError::Usage(error.to_string());
        let repository = match (Repository::around(folder), revision) {
            (Ok(repository), _) => repository,
            (Err(_), None) => return Ok(Self::default()),
            (Err(error), Some(_)) => return Err(told(error)),
        };
        let commit = match (repository.resolve(revision.unwrap_or("HEAD")), revision) {
            (Ok(revision), _) => revision.commit,
            // A repository without a commit.
            (Err(_), None) => return Ok(Self::default()),
            (Err(error), Some(_)) => return Err(told(error)),
        };
        let list = ["rev-list", "--topo-order", "--reverse", &commit];
        let listed =
            git::run(git::git(&repository.top).args(list), "list commits").map_err(told)?;
        Ok(Self::of(listed.lines().map(str::to_owned).collect()))
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.commits.is_empty()
    }

    /// Place of a commit.
    pub fn place(&self, commit: &str) -> Option<usize> {
        self.places.get(commit).copied()
    }

    /// The commits after one up to another, the oldest first; none where one is not known, or they
    /// are in the other order.
    pub fn between(&self, after: &str, up_to: &str) -> &[String] {
        let (Some(after), Some(up_to)) = (self.place(after), self.place(up_to)) else {
            return &[];
        };
        self.commits.get(after + 1..=up_to).unwrap_or_default()
    }
}
