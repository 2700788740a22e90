//! Finds the first commit at which a case is slower, by paired comparisons of builds of commits.
//!
//! [`search`] chooses the questions and draws the conclusions. In use, [`commits`] builds and
//! compares two commits to answer a question of the search; in tests, recorded noise gives the
//! answers. `search_state` stores the answers of the search in a file, so that an interrupted
//! bisection can continue. The module `bisect` does not compare two builds itself (`compare` does)
//! and does not print results (`report` does).

pub mod commits;
pub mod search;
pub mod search_state;

pub use commits::{BisectionRequest, BisectionResult, FoundSlowdownCommits, bisect_slowdown};
pub use search::{
    BisectionAnswer, BisectionEnd, BisectionQuestion, CommitRangeWithSlowdown, HeadToBaseTimeRatio,
};
