//! Attention backward through `mma.sync`: kernels and launcher of
//! `kernels/attention/backward_flash_mma`. The `wgmma` backward also launches the prepare kernel
//! and the finish kernel of `backward_flash_mma`.

use std::sync::Arc;

use crate::attention::cuda::call::{
    AttentionBackwardAddresses, AttentionLaunches, AttentionScratchAddresses,
};
use crate::attention::cuda::launch::{
    AttentionExtents, BYTES_OF_16_BIT_ELEMENT, attention_defines_with_row_strides,
    attention_kernel_spec_with_build_per_shape, dense_and_one_strided_build_extents,
};
use crate::attention::cuda::layout::{AttentionBackwardLayout, AttentionTensorStrides};
use kernelgate::backend::BackendError;
use kernelgate_cuda::{
    Device, KernelArgumentList, KernelSpec, LoadedKernelWithLaunch, RequiredArchitecture,
};

/// Kernels of `kernels/attention/backward_flash_mma`, each with a build for two query stages and
/// one for a single stage.
pub const BACKWARD_MMA_KERNELS: &[KernelSpec<AttentionExtents>] = &[
    ROW_STATISTICS_AND_ZERO_DQ_KERNEL,
    BACKWARD_FLASH_MMA_KERNEL,
    ROUND_DQ_SUMS_KERNEL,
    ONE_STAGE_ROW_STATISTICS_KERNEL,
    ONE_STAGE_BACKWARD_MMA_KERNEL,
    ONE_STAGE_ROUND_DQ_SUMS_KERNEL,
];

const THREADS_PER_BACKWARD_MMA_BLOCK: usize = 256;

/// Number of threads of a warp.
const THREADS_PER_WARP: usize = 32;

/// Number of keys in a key block of `backward_flash_mma`.
pub const KEYS_PER_BACKWARD_BLOCK: usize = 128;

/// Number of queries that a block of `backward_flash_mma` processes in one step of its loop.
pub const fn queries_per_backward_mma_step(extents: &AttentionExtents) -> usize {
    if extents.head_dim == 64 { 128 } else { 64 }
}

/// Number of queries that a block of a WIDE build of `backward_flash_wgmma` processes in one step
/// of its loop.
pub const QUERIES_PER_WIDE_BACKWARD_STEP: usize = 80;

/// Number of query rows of all heads, where each head is padded to whole steps of every backward
/// kernel.
const fn query_rows_padded_to_steps(extents: &AttentionExtents) -> usize {
    let wide = if extents.head_dim == 128 {
        QUERIES_PER_WIDE_BACKWARD_STEP
    } else {
        queries_per_backward_mma_step(extents)
    };
    let (padded, padded_wide) = (
        extents.queries_per_head.next_multiple_of(queries_per_backward_mma_step(extents)),
        extents.queries_per_head.next_multiple_of(wide),
    );
    extents.total_query_heads * if padded_wide > padded { padded_wide } else { padded }
}

pub const BACKWARD_FLASH_MMA_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    macro_definitions: |extents| {
        attention_defines_with_row_strides(extents, |rows| {
            [("Q_ROW", rows.q_row_stride_elements), ("DOUT_ROW", rows.grad_out_row_stride_elements)]
        })
    },
    listed_build_parameters: dense_and_one_strided_build_extents,
    constant_macros: |extents| backward_flash_mma_macros(extents, 2),
    dynamic_shared_bytes: |extents| backward_flash_mma_shared_bytes(extents, 2),
    ..attention_kernel_spec_with_build_per_shape(
        "attention/backward_flash_mma",
        "attention_backward_flash_mma",
        THREADS_PER_BACKWARD_MMA_BLOCK,
        |extents| {
            [
                extents.queries_per_head.div_ceil(KEYS_PER_BACKWARD_BLOCK)
                    * extents.total_query_heads,
                1,
                1,
            ]
        },
    )
};
pub const ROW_STATISTICS_AND_ZERO_DQ_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    kernel_symbol: "attention_backward_flash_mma_prepare",
    // Each thread of the prepare kernel handles sixteen bytes of a row.
    blocks: |extents| {
        [
            (query_rows_padded_to_steps(extents)
                * (extents.head_dim * BYTES_OF_16_BIT_ELEMENT as usize / 16))
                .div_ceil(THREADS_PER_BACKWARD_MMA_BLOCK),
            1,
            1,
        ]
    },
    dynamic_shared_bytes: |_| 0,
    ..BACKWARD_FLASH_MMA_KERNEL
};
pub const ROUND_DQ_SUMS_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    kernel_symbol: "attention_backward_flash_mma_finish",
    // Sixteen warps of the finish kernel handle the query rows of one step.
    blocks: |extents| {
        [
            (query_rows_padded_to_steps(extents).div_ceil(queries_per_backward_mma_step(extents))
                * 16)
                .div_ceil(THREADS_PER_BACKWARD_MMA_BLOCK / THREADS_PER_WARP),
            1,
            1,
        ]
    },
    dynamic_shared_bytes: |_| 0,
    ..BACKWARD_FLASH_MMA_KERNEL
};

/// Build of the gradient kernel with one query stage, for GPUs with too little shared memory for
/// two. GPUs from sm_90 on never use the one-stage build: their shared memory holds two stages, or
/// too little even for one.
const ONE_STAGE_BACKWARD_MMA_KERNEL: KernelSpec<AttentionExtents> = KernelSpec {
    dynamic_shared_bytes: |extents| backward_flash_mma_shared_bytes(extents, 1),
    ..with_one_query_stage(BACKWARD_FLASH_MMA_KERNEL)
};
const ONE_STAGE_ROW_STATISTICS_KERNEL: KernelSpec<AttentionExtents> =
    with_one_query_stage(ROW_STATISTICS_AND_ZERO_DQ_KERNEL);
const ONE_STAGE_ROUND_DQ_SUMS_KERNEL: KernelSpec<AttentionExtents> =
    with_one_query_stage(ROUND_DQ_SUMS_KERNEL);

const fn with_one_query_stage(row: KernelSpec<AttentionExtents>) -> KernelSpec<AttentionExtents> {
    KernelSpec {
        macro_definitions: |extents| {
            let stages = "STAGES=1".to_owned();
            (BACKWARD_FLASH_MMA_KERNEL.macro_definitions)(extents)
                .into_iter()
                .chain([stages])
                .collect()
        },
        constant_macros: |extents| backward_flash_mma_macros(extents, 1),
        required_architecture: RequiredArchitecture::CapabilityRange(80, 90),
        ..row
    }
}

/// A build with one query stage has STAGES in its name; the build with two stages gets STAGES as an
/// ordinary macro.
fn backward_flash_mma_macros(
    extents: &AttentionExtents,
    stages: usize,
) -> Vec<(&'static str, usize)> {
    let shared = ("SHARED_BYTES", backward_flash_mma_shared_bytes(extents, stages));
    let tiles = [
        ("TILE_QUERIES", queries_per_backward_mma_step(extents)),
        ("TILE_KEYS", KEYS_PER_BACKWARD_BLOCK),
    ];
    let common = [("THREADS", THREADS_PER_BACKWARD_MMA_BLOCK), tiles[0], tiles[1], shared];
    common.into_iter().chain((stages == 2).then_some(("STAGES", 2))).collect()
}

/// Shared memory of the gradient kernel: keys and values; stages of queries, output gradients and
/// two floats a query; probabilities; two stages of score gradients.
fn backward_flash_mma_shared_bytes(extents: &AttentionExtents, stages: usize) -> usize {
    let (element, queries) =
        (BYTES_OF_16_BIT_ELEMENT as usize, queries_per_backward_mma_step(extents));
    let keys_and_values = 2 * KEYS_PER_BACKWARD_BLOCK * extents.head_dim * element;
    let copied = stages * (2 * queries * extents.head_dim * element + 2 * 4 * queries);
    keys_and_values + copied + 3 * KEYS_PER_BACKWARD_BLOCK * queries * element
}

pub const fn backward_row_statistics_bytes(extents: &AttentionExtents) -> u64 {
    2 * 4 * query_rows_padded_to_steps(extents) as u64
}

pub const fn dq_accumulator_scratch_bytes(extents: &AttentionExtents) -> u64 {
    4 * (query_rows_padded_to_steps(extents) * extents.head_dim) as u64
}

/// Number of query tiles that shared memory of the `backward_flash_mma` kernel holds at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryStagesInSharedMemory {
    OneStage,
    TwoStages,
}

impl QueryStagesInSharedMemory {
    /// Chooses two query stages, unless the device has shared memory for only one.
    pub fn choose_query_stages_for_device(
        device: &Device,
        extents: &AttentionExtents,
    ) -> Result<Self, BackendError> {
        let (arch, most) =
            (&device.gpu_properties().kernel_architecture, device.max_shared_bytes_per_block()?);
        let fits = |row: &KernelSpec<AttentionExtents>| {
            row.reason_gpu_cannot_run_kernel_for(extents, arch, most).is_none()
        };
        Ok(if !fits(&BACKWARD_FLASH_MMA_KERNEL) && fits(&ONE_STAGE_BACKWARD_MMA_KERNEL) {
            Self::OneStage
        } else {
            Self::TwoStages
        })
    }

    const fn kernels_in_launch_order(self) -> [KernelSpec<AttentionExtents>; 3] {
        match self {
            Self::OneStage => [
                ONE_STAGE_ROW_STATISTICS_KERNEL,
                ONE_STAGE_BACKWARD_MMA_KERNEL,
                ONE_STAGE_ROUND_DQ_SUMS_KERNEL,
            ],
            Self::TwoStages => {
                [ROW_STATISTICS_AND_ZERO_DQ_KERNEL, BACKWARD_FLASH_MMA_KERNEL, ROUND_DQ_SUMS_KERNEL]
            }
        }
    }
}

/// Compiles and loads the three kernels of `backward_flash_mma` and returns them in the order of
/// their launches.
pub fn load_mma_backward_kernels(
    device: &Device,
    extents: &AttentionExtents,
    stages: QueryStagesInSharedMemory,
) -> Result<[LoadedKernelWithLaunch; 3], BackendError> {
    let kernels = stages.kernels_in_launch_order();
    // The gradient kernel is loaded first, because only this kernel can exceed the device's shared
    // memory.
    let [main, first, last] =
        [kernels[1], kernels[0], kernels[2]].map(|kernel| kernel.compile_and_load(device, extents));
    Ok([first?, main?, last?])
}

/// Device, shape, layout and addresses of one attention backward, from which its kernel arguments
/// are made.
pub struct BackwardLaunchInputs<'a> {
    pub device: &'a Arc<Device>,
    pub extents: &'a AttentionExtents,
    pub layout: &'a AttentionBackwardLayout,
    pub addresses: &'a AttentionBackwardAddresses,
    pub scratch: &'a AttentionScratchAddresses,
}

impl BackwardLaunchInputs<'_> {
    /// Device address of the row statistics: two fp32 numbers for each query row, with heads padded
    /// to whole steps.
    pub const fn row_statistics_address(&self) -> u64 {
        self.scratch.uninitialised_scratch_address
    }

    /// Device address of the fp32 accumulator of the query gradient dq.
    pub const fn dq_accumulator_address(&self) -> u64 {
        self.scratch.uninitialised_scratch_address + backward_row_statistics_bytes(self.extents)
    }

    /// Arguments of the prepare kernel; with `zeroed`, the kernel also zeroes the dq sums at this
    /// address.
    pub fn row_statistics_kernel_arguments(&self, zeroed: Option<u64>) -> KernelArgumentList {
        let AttentionBackwardAddresses {
            out_address: out,
            grad_out_address: grad_out,
            lse_address: lse,
            ..
        } = *self.addresses;
        let AttentionBackwardLayout { forward, grad_out: grad_out_strides, .. } = self.layout;
        let tensors = [out, grad_out, lse, self.row_statistics_address(), zeroed.unwrap_or(0)];
        self.arguments_with_extents_and_strides(
            &tensors,
            &[&forward.out, grad_out_strides, &forward.lse],
        )
    }

    /// Arguments of the finish kernel, which rounds the dq sums to the gradient of the queries.
    pub fn round_dq_kernel_arguments(&self) -> KernelArgumentList {
        self.arguments_with_extents_and_strides(
            &[self.dq_accumulator_address(), self.addresses.grad_q_address],
            &[&self.layout.grad_q],
        )
    }

    fn gradient_kernel_arguments(&self) -> KernelArgumentList {
        let AttentionBackwardAddresses {
            q_address: q,
            k_address: k,
            v_address: v,
            grad_out_address: grad_out,
            grad_k_address: grad_k,
            grad_v_address: grad_v,
            ..
        } = *self.addresses;
        let tensors = [
            q,
            k,
            v,
            grad_out,
            self.row_statistics_address(),
            self.dq_accumulator_address(),
            grad_k,
            grad_v,
        ];
        let AttentionBackwardLayout { forward, grad_out, grad_k, grad_v, .. } = self.layout;
        let strides = [&forward.q, &forward.k, &forward.v, grad_out, grad_k, grad_v];
        self.arguments_with_extents_and_strides(&tensors, &strides)
    }

    /// Arguments of a backward kernel in the order: addresses, `seqlen`, `batch_heads`, `heads`,
    /// strides.
    fn arguments_with_extents_and_strides(
        &self,
        addresses: &[u64],
        strides: &[&AttentionTensorStrides],
    ) -> KernelArgumentList {
        let extents = self.extents;
        let numbers = [
            extents.queries_per_head,
            extents.total_query_heads,
            extents.query_heads_per_sequence(),
        ];
        let all = addresses
            .iter()
            .fold(KernelArgumentList::new(), |all, address| all.with_address(*address));
        let all = numbers.into_iter().fold(all, |all, number| all.with_value(number as i32));
        strides
            .iter()
            .fold(all, |all, strides| all.with_value(strides.batch_head_row_stride_argument()))
    }
}

/// Loads the three kernels of `backward_flash_mma` and prepares their launches, without enqueuing
/// them.
pub fn prepare_mma_backward_launches(
    call: &BackwardLaunchInputs<'_>,
    stages: QueryStagesInSharedMemory,
) -> Result<AttentionLaunches, BackendError> {
    let [first, main, last] = load_mma_backward_kernels(call.device, call.extents, stages)?;
    Ok(AttentionLaunches::from_nvtx_ranges_and_launches([
        (
            "prepare",
            first.prepare_launch_with_blocks(
                call.device,
                None,
                call.row_statistics_kernel_arguments(Some(call.dq_accumulator_address())),
            )?,
        ),
        (
            "scores_dkv_dq",
            main.prepare_launch_with_blocks(call.device, None, call.gradient_kernel_arguments())?,
        ),
        (
            "finish",
            last.prepare_launch_with_blocks(call.device, None, call.round_dq_kernel_arguments())?,
        ),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::Dtype;

    #[test]
    fn backward_mma_grids_cover_all_padded_query_rows() {
        let narrow = AttentionExtents {
            causal: true,
            ..AttentionExtents::single_sequence_self_attention(6, 200, Dtype::Bf16)
        };
        let wide = AttentionExtents { head_dim: 128, ..narrow };
        // A head of 200 query rows is padded to two steps of 128 rows, or four of 64.
        assert_eq!(
            (query_rows_padded_to_steps(&narrow), query_rows_padded_to_steps(&wide)),
            (6 * 256, 6 * 256)
        );
        assert_eq!((ROW_STATISTICS_AND_ZERO_DQ_KERNEL.blocks)(&narrow), [6 * 256 * 8 / 256, 1, 1]);
        assert_eq!((ROUND_DQ_SUMS_KERNEL.blocks)(&narrow), [6 * 2 * 2, 1, 1]);
        assert_eq!((ROUND_DQ_SUMS_KERNEL.blocks)(&wide), [6 * 4 * 2, 1, 1]);
    }
}
