//! What tables of a profile are made of: named ranges and the work that is done in each.
//!
//! Deliberately absent: times.

use super::Work;

/// What a problem says of its parts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Breakdown {
    /// Samples that one execution computes, for a rate.
    pub samples: Option<u64>,
    /// The parts, in the order of the tables.
    pub parts: Vec<Part>,
}

/// A part of an execution.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// The table that it is in, such as `component` or `layer`.
    pub table: &'static str,
    /// What the table calls it.
    pub label: String,
    /// The ranges whose path is this, or ends with it: names with `/` between them. Rows open them
    /// around their launches; what a row does elsewhere it has no such range for.
    pub range: String,
    /// What the mathematics needs; empty where nothing bounds it.
    pub work: Work,
}
