//! Records, histories and traces: how they are read and shown.

mod history;
mod nvtx;
mod profile;
mod report;
mod traces;
