//! Tests of the public functions, one module for each subject, in one executable.

#![allow(clippy::unwrap_used)]

mod accounting;
mod diagnosis;
mod difference;
mod faults;
mod fixture;
mod inputs;
mod network;
mod public;
mod ranks;
mod real_traces;
mod timeline;
mod utilization;
mod variants;
