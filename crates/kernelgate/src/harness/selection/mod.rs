//! Which cases run, and where: declared names, the filter, the backend.

pub mod cases;
pub mod filter;
pub mod names;
pub mod place;
#[cfg(test)]
pub mod sample;
