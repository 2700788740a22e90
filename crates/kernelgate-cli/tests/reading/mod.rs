//! Records, histories and traces, read and shown.

mod history;
mod nvtx;
mod profile;
mod report;
mod traces;
