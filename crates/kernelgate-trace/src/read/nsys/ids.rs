//! Ids of processes and threads.

/// The process of a global id, and the thread in it: (key of the process, pid, tid).
pub(super) fn split_global_id(id: i64) -> (u64, i64, i64) {
    let key = id.cast_unsigned() >> 24;
    (key, (key & 0xFF_FFFF).cast_signed(), id & 0xFF_FFFF)
}
