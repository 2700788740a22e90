//! A bench executable's answers to requests of the program `kernelgate`, one module per action. The
//! module `protocol` defines the requests that this module answers. The bench executable itself
//! answers requests for trials, and requests that need no case.

pub mod list_cases;
mod per_case;
mod phases;
pub mod profile;
pub mod resources;
pub mod timing;
pub mod verify;
