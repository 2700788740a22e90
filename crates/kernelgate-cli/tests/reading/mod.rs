//! Tests of how run records, histories and traces are read and printed.

mod history;
mod nvtx;
mod profile;
mod report;
mod traces;
