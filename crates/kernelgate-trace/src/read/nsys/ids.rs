//! Ids of processes and threads, and names of tables.

pub(super) const KERNEL_TABLE: &str = "CUPTI_ACTIVITY_KIND_KERNEL";
pub(super) const COPY_TABLE: &str = "CUPTI_ACTIVITY_KIND_MEMCPY";
pub(super) const MEMSET_TABLE: &str = "CUPTI_ACTIVITY_KIND_MEMSET";
pub(super) const GRAPH_TABLE: &str = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE";
pub(super) const RUNTIME_CALL_TABLE: &str = "CUPTI_ACTIVITY_KIND_RUNTIME";

/// Returns the process of a global id and the thread in it: (key of the process, pid, tid).
pub(super) fn split_global_id(id: i64) -> (u64, i64, i64) {
    let key = id.cast_unsigned() >> 24;
    (key, (key & 0xFF_FFFF).cast_signed(), id & 0xFF_FFFF)
}
