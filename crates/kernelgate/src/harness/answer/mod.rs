//! Answers to the requests of the `kernelgate` program, one file for each action. The requests that
//! this module answers are defined in the module `protocol`. Requests for trials, and requests that
//! need no case, are answered by the bench binary itself.

pub mod list_cases;
mod per_case;
mod phases;
pub mod profile;
pub mod resources;
pub mod timing;
pub mod verify;
