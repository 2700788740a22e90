//! The `kernelgate` program: one file a verb, in the order of the four questions (right? how fast? slower? why?).
//!
//! Results go to standard output in the format that was asked for, everything else to standard error; the exit code says the rest.

mod baseline;
mod calibrate;
mod choice;
mod cli;
mod compare;
mod doctor;
mod gate;
mod list;
mod lock;
mod output;
mod peers;
mod profile;
mod resources;
mod runs;
mod save;
mod sessions;
mod settings;
mod timing;
mod verdict;
mod verify;

pub use cli::Cli;
