//! Verbs that judge, and the baselines that they use.

pub mod baseline;
pub mod bisect;
pub mod calibrate;
pub mod check;
pub mod compare;
pub mod gate;
pub mod resources;
pub mod save;
pub mod verdict;
