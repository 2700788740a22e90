//! Finds the first slower commit, by paired comparisons.
//!
//! [`search`] chooses the questions and draws the conclusions. The answers come from builds that
//! are compared ([`commits`]), or in its tests from recorded noise. `state` keeps the answers, so
//! that an interrupted search goes on. Deliberately absent: how two builds are compared
//! (`compare`), printing (`report`).

pub mod commits;
pub mod search;
pub mod search_state;

pub use commits::{Bisection, BisectionRequest, FoundCommits, run};
pub use search::{BisectionAnswer, BisectionQuestion, CommitTimeRatio, SearchEnd, SlowdownRange};
