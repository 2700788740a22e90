//! Splits Nsight Systems' global ids of processes and threads, and names tables of the export.

pub(super) const KERNEL_TABLE: &str = "CUPTI_ACTIVITY_KIND_KERNEL";
pub(super) const COPY_TABLE: &str = "CUPTI_ACTIVITY_KIND_MEMCPY";
pub(super) const MEMSET_TABLE: &str = "CUPTI_ACTIVITY_KIND_MEMSET";
pub(super) const GRAPH_TABLE: &str = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE";
pub(super) const CUDA_API_CALL_TABLE: &str = "CUPTI_ACTIVITY_KIND_RUNTIME";
pub(super) const NVTX_EVENT_TABLE: &str = "NVTX_EVENTS";

/// Splits a global thread id into process key, process id (pid) and thread id (tid).
pub(super) fn process_key_pid_and_tid_of_global_id(id: i64) -> (u64, i64, i64) {
    let key = id.cast_unsigned() >> 24;
    (key, (key & 0xFF_FFFF).cast_signed(), id & 0xFF_FFFF)
}
