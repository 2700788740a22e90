//! The program from outside, in one binary: each file here is a subject. One binary links once, and
//! its tests keep every core busy where one after the other would wait for its slowest test.

#![allow(clippy::unwrap_used)]

mod benches;
mod check;
mod hostile;
mod judging;
mod outputs;
mod package;
mod reading;
mod reference;
mod setup;
mod untrusted;
