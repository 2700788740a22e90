//! The program from outside, in one binary: each file here is a subject. One binary links once, and
//! its tests keep every core busy where one after the other would wait for its slowest test.

#![allow(clippy::unwrap_used)]

mod attach;
mod baselines;
mod bisect;
mod calibrate;
mod check;
mod code;
mod compare;
mod criterion;
mod end_to_end;
mod gpu;
mod gpu_time;
mod history;
mod hostile;
mod libraries;
mod nvtx;
mod outputs;
mod package;
mod packages;
mod peers;
mod profile;
mod report;
mod rules;
mod sanitize;
mod shards;
mod shared_target;
mod timeouts;
mod traces;
mod untrusted;
mod verification;
