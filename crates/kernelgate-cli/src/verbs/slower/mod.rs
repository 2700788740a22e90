//! Verbs of kernelgate that judge whether kernels got slower, and the verbs that save, check and
//! calibrate their baselines.

pub mod baseline;
pub mod bisect;
pub mod calibrate;
pub mod check;
pub mod compare;
pub mod gate;
pub mod resources;
pub mod save;
pub mod verdict;
