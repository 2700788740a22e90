//! Answers to the program's requests, one file an action. What is asked is in `protocol`; what is
//! not here, the bench binary does itself: trials, and what it knows without a case.

mod each;
pub mod list;
mod phases;
pub mod profile;
pub mod resources;
pub mod timing;
pub mod verify;
