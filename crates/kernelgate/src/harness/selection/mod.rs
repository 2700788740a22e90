//! Decides which cases run on which backend, and checks declared names.

pub mod backend_choice;
pub mod cases;
pub mod filter;
pub mod names;
#[cfg(test)]
pub mod sample;
