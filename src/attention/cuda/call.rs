//! Plain data of a call of attention: technique, addresses, scratch, launches.

use kernelgate::backend::BackendError;
use kernelgate_cuda::observe::range::within;
use kernelgate_cuda::{DeviceBuffer, PreparedLaunch};

/// Kind of kernels that compute attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionTechnique {
    /// GEMMs through `mma.sync`, from sm_80 on. Its backward pass needs equal numbers of heads of
    /// keys and of queries.
    FlashMma,
    /// GEMMs through `wgmma`, tiles by tensor copies: sm_90a only.
    FlashWgmma,
}

/// The order in which the gradient of the queries is summed over blocks of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryGradientSumOrder {
    /// Whichever block comes first: low bits may differ between launches. Gradients of keys and
    /// values of grouped heads too.
    Any,
    /// A fixed order in every launch, so that all gradients are the same bit by bit.
    /// [`AttentionTechnique::FlashWgmma`] only.
    Fixed,
}

/// Device memory besides the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionScratchBytes {
    /// Bytes that every run of the launches writes before it reads them.
    pub any: u64,
    /// Bytes that are zero before the first launch. Every run of the launches leaves zeros, so that
    /// layers that run one after the other share them.
    pub zeroed: u64,
}

/// Addresses of the scratch, each a multiple of 256. An address of no bytes is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScratchAddresses {
    /// Address of [`AttentionScratchBytes::any`].
    pub any: u64,
    /// Address of [`AttentionScratchBytes::zeroed`].
    pub zeroed: u64,
}

/// A launch, and the range that profilers show it in.
pub struct Step {
    /// Name of the range.
    pub range: &'static str,
    /// The launch.
    pub launch: PreparedLaunch,
}

/// Launches in order, on one stream or as consecutive nodes of a graph.
pub struct OrderedLaunches {
    steps: Vec<Step>,
    /// Lists of tiles that launches read.
    tables: Vec<DeviceBuffer>,
}

impl OrderedLaunches {
    pub(super) fn new(steps: impl IntoIterator<Item = (&'static str, PreparedLaunch)>) -> Self {
        let steps = steps.into_iter().map(|(range, launch)| Step { range, launch }).collect();
        Self { steps, tables: Vec::new() }
    }

    pub(super) fn with_table_buffer(self, table: DeviceBuffer) -> Self {
        Self { tables: vec![table], ..self }
    }

    /// Each launch.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Device memory that the launches own.
    pub fn device_bytes(&self) -> u64 {
        self.tables.iter().map(|table| table.bytes() as u64).sum()
    }

    /// Enqueues the launches on the device's stream.
    pub fn launch(&self) -> Result<(), BackendError> {
        self.steps.iter().try_for_each(|step| within(step.range, || step.launch.launch()))
    }
}

/// Addresses of the forward's tensors, each a multiple of 16 but lse's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForwardAddresses {
    /// Queries.
    pub q: u64,
    /// Keys.
    pub k: u64,
    /// Values.
    pub v: u64,
    /// Output.
    pub out: u64,
    /// Natural logarithms of the rows' sums of exponentials, fp32, if a backward pass needs them.
    pub lse: Option<u64>,
}

/// Addresses of the backward's tensors, each a multiple of 16 but lse's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackwardAddresses {
    /// Queries.
    pub q: u64,
    /// Keys.
    pub k: u64,
    /// Values.
    pub v: u64,
    /// The forward's output.
    pub out: u64,
    /// Written by the forward.
    pub lse: u64,
    /// Gradient of the output.
    pub grad_out: u64,
    /// Gradient of the queries, written.
    pub grad_q: u64,
    /// Gradient of the keys, written.
    pub grad_k: u64,
    /// Gradient of the values, written.
    pub grad_v: u64,
}
