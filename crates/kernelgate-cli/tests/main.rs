//! Tests that run the program as a process, in one test binary: each file here has one subject. One
//! binary links once, and its tests use every core, whereas several binaries would wait for each
//! other's slowest test.

#![allow(clippy::disallowed_methods, reason = "variables of tests")]
#![allow(clippy::unwrap_used)]

mod benches;
mod check;
mod hostile;
mod invalid;
mod judging;
mod outputs;
mod package;
mod reading;
mod reference;
mod setup;
mod untrusted;
