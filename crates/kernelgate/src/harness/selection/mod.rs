//! Which cases run, and where: declared names, the filter, the backend.

pub mod backend_choice;
pub mod cases;
pub mod filter;
pub mod names;
#[cfg(test)]
pub mod sample;
