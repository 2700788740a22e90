//! Compares the outputs of cases: lost verification, and errors that grew.

pub mod numerics;
pub mod verification;
