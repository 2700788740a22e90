//! Tests of how bench executables are built, found, linked and driven, with and without a GPU.

mod attach;
mod criterion;
mod end_to_end;
mod gpu;
mod gpu_time;
mod libraries;
mod packages;
mod peers;
mod sanitize;
mod shared_target;
mod timeouts;
