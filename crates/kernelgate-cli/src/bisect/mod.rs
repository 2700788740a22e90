//! The first slower commit, by paired comparisons.
//!
//! [`search`] decides what to ask and what follows from the answers, whatever answers: builds that
//! are compared ([`commits`]), or recorded noise in its tests. `state` keeps the answers, so that
//! an interrupted search goes on. Deliberately absent: how two builds are compared (`compare`),
//! printing (`report`).

pub mod commits;
pub mod search;
pub mod state;

pub use commits::{Bisection, BisectionRequest, FoundCommits, run};
pub use search::{Answer, Ended, Found, Question, Times};
