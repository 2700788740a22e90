//! Tests of the public functions, one module for each subject, in one executable.

#![allow(clippy::unwrap_used)]

mod accounting;
mod chrome_and_ncu;
mod diagnosis;
mod difference;
mod faults;
mod fixture;
mod ncu_report;
mod network;
mod nsys;
mod nsys_tables;
mod odd_inputs;
mod parquet;
mod public;
mod ranks;
mod real_traces;
mod recording;
mod schema;
mod streamed;
mod timeline;
mod utilization;
mod variants;
