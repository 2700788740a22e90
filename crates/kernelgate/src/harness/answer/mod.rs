//! Answers to the requests of the `kernelgate` program, one file for each action. The module
//! `protocol` defines the requests. The bench binary itself answers requests for trials and those
//! that need no case.

mod each;
pub mod list;
mod phases;
pub mod profile;
pub mod resources;
pub mod timing;
pub mod verify;
