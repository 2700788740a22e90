//! Plain data of an attention call: technique, addresses, scratch memory, launches.

use kernelgate::backend::BackendError;
use kernelgate_cuda::observe::range::within_range;
use kernelgate_cuda::{DeviceBuffer, PreparedLaunch};

/// Technique by which kernels compute attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionTechnique {
    /// GEMMs through `mma.sync`, from sm_80 on. The backward pass by this technique needs as many
    /// key heads as query heads.
    FlashMma,
    /// GEMMs through `wgmma` and tiles by tensor copies, on sm_90a only.
    FlashWgmma,
}

/// Order in which the gradient of the queries is summed over key blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryGradientSumOrder {
    /// Addends may be summed in any order, so low bits of the gradient may differ between launches.
    /// For grouped heads this is also true of the gradients of keys and values.
    Any,
    /// A fixed order, so that all gradients are bitwise equal in every launch. Only
    /// [`AttentionTechnique::FlashWgmma`] supports it.
    Fixed,
}

/// Bytes of device memory that attention needs besides its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionScratchBytes {
    /// Scratch bytes that every run of the launches writes before it reads them.
    pub any: u64,
    /// Bytes of scratch memory that must be zero before the first launch. Scratch bytes that every
    /// run of the launches leaves zero, so that consecutive layers can share them.
    pub zeroed: u64,
}

/// Addresses of the scratch memory, each a multiple of 256. If the size of a part is zero, its
/// address is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScratchAddresses {
    /// Address of [`AttentionScratchBytes::any`].
    pub any: u64,
    /// Address of [`AttentionScratchBytes::zeroed`].
    pub zeroed: u64,
}

/// One launch, and the name of the range in which profilers show it.
pub struct LaunchStep {
    /// Name of the range.
    pub range: &'static str,
    /// Launch with its arguments.
    pub launch: PreparedLaunch,
}

/// Launches in order, to be enqueued on one stream or as consecutive nodes of a graph.
pub struct OrderedLaunches {
    steps: Vec<LaunchStep>,
    /// Lists of query tiles in device memory, which the launches read.
    tables: Vec<DeviceBuffer>,
}

impl OrderedLaunches {
    pub(super) fn new(steps: impl IntoIterator<Item = (&'static str, PreparedLaunch)>) -> Self {
        let steps = steps.into_iter().map(|(range, launch)| LaunchStep { range, launch }).collect();
        Self { steps, tables: Vec::new() }
    }

    pub(super) fn with_table_buffer(self, table: DeviceBuffer) -> Self {
        Self { tables: vec![table], ..self }
    }

    /// Returns the launches of the attention call in order.
    pub fn steps(&self) -> &[LaunchStep] {
        &self.steps
    }

    /// Returns the bytes of device memory that the launches own.
    pub fn device_bytes(&self) -> u64 {
        self.tables.iter().map(|table| table.bytes() as u64).sum()
    }

    /// Enqueues all launches on the device's stream.
    pub fn launch(&self) -> Result<(), BackendError> {
        self.steps.iter().try_for_each(|step| within_range(step.range, || step.launch.launch()))
    }
}

/// Addresses of the tensors of an attention forward; all but that of lse are multiples of 16.
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
    /// Natural logarithm of each row's sum of exponentials, fp32, if a backward pass needs it.
    pub lse: Option<u64>,
}

/// Addresses of the tensors of an attention backward; all but that of lse are multiples of 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackwardAddresses {
    /// Queries.
    pub q: u64,
    /// Keys.
    pub k: u64,
    /// Values.
    pub v: u64,
    /// Output of the forward pass.
    pub out: u64,
    /// Log-sum-exp of the rows, as the forward pass wrote it.
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
