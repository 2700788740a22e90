//! Plain data of a GPU attention call: technique, addresses, scratch memory and launches.

use kernelgate::backend::BackendError;
use kernelgate_cuda::observe::range::run_within_named_range;
use kernelgate_cuda::{DeviceBuffer, PreparedLaunch};

/// Technique by which kernelgate's attention kernels compute their GEMMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionGemmTechnique {
    /// GEMMs by `mma.sync`, from sm_80 on. The backward by `mma.sync` needs as many key heads as
    /// query heads.
    FlashMma,
    /// GEMMs by `wgmma`, with tiles loaded by tensor copies (TMA); sm_90a only.
    FlashWgmma,
}

/// Order in which the key blocks add to the gradient of the queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryGradientSumOrder {
    /// Key blocks may add in any order, so low bits of the query gradient may differ between
    /// launches. With grouped heads, low bits of the gradients of keys and values may also differ
    /// between launches.
    AnyKeyBlockOrder,
    /// Key blocks add in a fixed order, so all gradients are bitwise equal in every launch. Only
    /// [`AttentionGemmTechnique::FlashWgmma`] supports a fixed order of additions.
    FixedKeyBlockOrder,
}

/// Bytes of device memory that an attention call needs besides its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionScratchBytes {
    /// Scratch bytes whose initial content does not matter: every run of the launches writes these
    /// bytes before it reads them.
    pub uninitialised_scratch_bytes: u64,
    /// Scratch bytes that must be zero before the first launch. Every run of the launches leaves
    /// the zeroed scratch bytes zero, so consecutive layers can share these bytes.
    pub zeroed_scratch_bytes: u64,
}

/// Device addresses of the scratch memory of an attention call, each a multiple of 256. If one of
/// the two scratch sizes is zero, the launches do not use its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionScratchAddresses {
    /// Address of [`AttentionScratchBytes::uninitialised_scratch_bytes`].
    pub uninitialised_scratch_address: u64,
    /// Address of [`AttentionScratchBytes::zeroed_scratch_bytes`].
    pub zeroed_scratch_address: u64,
}

/// One kernel launch of an attention call, and the name of its range in profilers.
pub struct AttentionKernelLaunch {
    /// Name of the NVTX range around the launch.
    pub nvtx_range: &'static str,
    /// Kernel launch with its arguments, ready to be enqueued.
    pub launch: PreparedLaunch,
}

/// Kernel launches of one attention call in order, to be enqueued on one stream or as consecutive
/// nodes of a graph.
pub struct AttentionLaunches {
    launches: Vec<AttentionKernelLaunch>,
    /// Device buffers that the launches read, such as lists of query tiles, kept alive here.
    tables_read_by_launches: Vec<DeviceBuffer>,
}

impl AttentionLaunches {
    pub(super) fn from_nvtx_ranges_and_launches(
        steps: impl IntoIterator<Item = (&'static str, PreparedLaunch)>,
    ) -> Self {
        let steps = steps
            .into_iter()
            .map(|(range, launch)| AttentionKernelLaunch { nvtx_range: range, launch })
            .collect();
        Self { launches: steps, tables_read_by_launches: Vec::new() }
    }

    pub(super) fn keeping_table_buffer_alive(self, table: DeviceBuffer) -> Self {
        Self { tables_read_by_launches: vec![table], ..self }
    }

    /// Returns the kernel launches of the attention call in order.
    pub fn launches_in_order(&self) -> &[AttentionKernelLaunch] {
        &self.launches
    }

    /// Returns the bytes of device memory that the launches own, besides tensors and scratch
    /// memory.
    pub fn bytes_of_owned_tables(&self) -> u64 {
        self.tables_read_by_launches.iter().map(|table| table.size_in_bytes() as u64).sum()
    }

    /// Enqueues all launches of the attention call on the device's stream, each within its profiler
    /// range, without waiting for them.
    pub fn enqueue_all_launches(&self) -> Result<(), BackendError> {
        self.launches
            .iter()
            .try_for_each(|step| run_within_named_range(step.nvtx_range, || step.launch.enqueue()))
    }
}

/// Device addresses of the tensors of an attention forward; all but the address of lse are
/// multiples of 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionForwardAddresses {
    /// Device address of the attention queries.
    pub q_address: u64,
    /// Device address of the attention keys.
    pub k_address: u64,
    /// Device address of the attention values.
    pub v_address: u64,
    /// Device address of the attention output.
    pub out_address: u64,
    /// Device address of the log-sum-exp, the natural logarithm of each score row's sum of
    /// exponentials in fp32; `None` if no backward pass needs it.
    pub lse_address: Option<u64>,
}

/// Device addresses of the tensors of an attention backward; all but the address of lse are
/// multiples of 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionBackwardAddresses {
    /// Queries of the attention.
    pub q_address: u64,
    /// Keys of the attention.
    pub k_address: u64,
    /// Values of the attention.
    pub v_address: u64,
    /// Device address of the output of the attention forward, which the backward reads.
    pub out_address: u64,
    /// Device address of the log-sum-exp of the score rows, which the attention forward wrote and
    /// the backward reads.
    pub lse_address: u64,
    /// Device address of the gradient of the attention output, which the backward reads.
    pub grad_out_address: u64,
    /// Device address of the gradient of the queries, which the attention backward writes.
    pub grad_q_address: u64,
    /// Device address of the gradient of the keys, which the attention backward writes.
    pub grad_k_address: u64,
    /// Device address of the gradient of the values, which the attention backward writes.
    pub grad_v_address: u64,
}
