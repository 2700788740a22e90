//! Samples: how long launches took, and the ceilings they are held against.
//!
//! Deliberately absent: decisions about how many samples to take (Criterion plans them) and what they mean (`stats`, `gate`).

pub mod criterion;
pub mod limits;
pub mod wall;

/// One timing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Launches in it, at least 1.
    pub launches: u64,
    /// Time of all of them together, nanoseconds.
    pub elapsed_ns: f64,
}
