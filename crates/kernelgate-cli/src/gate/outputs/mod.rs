//! Compares the outputs of cases between base and head: verification that was lost, and errors that
//! grew.

pub mod numerics;
pub mod verification;
