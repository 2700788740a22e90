//! Outputs: which case lost its verification, and which errors grew.

pub mod numerics;
pub mod verification;
