//! CUDA streams and events, of kernelgate and of other code: holding and timing streams, ordering
//! them, and restoring their settings.

pub mod event;
pub mod foreign_stream;
pub(crate) mod host_wait;
pub mod joined_stream;
pub mod raw_stream;
pub mod stream_hold;
pub(crate) mod stream_settings;
pub mod stream_timer;
pub mod thread_state;
pub(crate) mod timed_stream;
