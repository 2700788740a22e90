//! Attention backward through `mma.sync`: kernels and launcher of
//! `kernels/attention/backward_flash_mma`. The backward through `wgmma` also launches the first and
//! last of these kernels.

use std::sync::Arc;

use crate::attention::cuda::call::{BackwardAddresses, OrderedLaunches, ScratchAddresses};
use crate::attention::cuda::launch::{
    ELEMENT_BYTES, Extents, attention_kernel, strided_defines, strided_variants,
};
use crate::attention::cuda::layout::{BackwardLayout, Strides};
use kernelgate::backend::BackendError;
use kernelgate_cuda::{Arguments, Device, KernelSpec, LoadedKernel, RequiredArchitecture};

/// Kernels of `backward_flash_mma`, one of each build.
pub const KERNELS: &[KernelSpec<Extents>] = &[
    FLASH_MMA_PREPARE,
    FLASH_MMA,
    FLASH_MMA_FINISH,
    ONE_STAGE_PREPARE,
    ONE_STAGE_KERNEL,
    ONE_STAGE_FINISH,
];

const THREADS: usize = 256;

/// Number of threads that sum one row.
const THREADS_PER_ROW_SUM: usize = 32;

/// Number of keys in a key block of `backward_flash_mma`.
pub const KEYS_PER_BLOCK: usize = 128;

/// Number of queries in one step of `backward_flash_mma`.
pub const fn queries_per_step(extents: &Extents) -> usize {
    if extents.d == 64 { 128 } else { 64 }
}

/// Queries in a wide step of `backward_flash_wgmma`.
pub const QUERIES_OF_WIDE_STEP: usize = 80;

/// Number of queries of all heads, where each head is padded to whole steps of any kernel.
const fn padded_rows(extents: &Extents) -> usize {
    let wide = if extents.d == 128 { QUERIES_OF_WIDE_STEP } else { queries_per_step(extents) };
    let (padded, padded_wide) =
        (extents.s.next_multiple_of(queries_per_step(extents)), extents.s.next_multiple_of(wide));
    extents.heads * if padded_wide > padded { padded_wide } else { padded }
}

pub const FLASH_MMA: KernelSpec<Extents> = KernelSpec {
    defines: |extents| {
        strided_defines(extents, |rows| [("Q_ROW", rows.q), ("DOUT_ROW", rows.grad_out)])
    },
    variants: strided_variants,
    constants: |extents| flash_mma_macros(extents, 2),
    shared_bytes: |extents| flash_mma_shared_bytes(extents, 2),
    ..attention_kernel(
        "attention/backward_flash_mma",
        "attention_backward_flash_mma",
        THREADS,
        |extents| [extents.s.div_ceil(KEYS_PER_BLOCK) * extents.heads, 1, 1],
    )
};
pub const FLASH_MMA_PREPARE: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_backward_flash_mma_prepare",
    // Each thread handles sixteen bytes of a row.
    blocks: |extents| {
        [(padded_rows(extents) * (extents.d * ELEMENT_BYTES as usize / 16)).div_ceil(THREADS), 1, 1]
    },
    shared_bytes: |_| 0,
    ..FLASH_MMA
};
pub const FLASH_MMA_FINISH: KernelSpec<Extents> = KernelSpec {
    symbol: "attention_backward_flash_mma_finish",
    // Sixteen warps handle one step.
    blocks: |extents| {
        [
            (padded_rows(extents).div_ceil(queries_per_step(extents)) * 16)
                .div_ceil(THREADS / THREADS_PER_ROW_SUM),
            1,
            1,
        ]
    },
    shared_bytes: |_| 0,
    ..FLASH_MMA
};

/// Build of the main kernel for cards with less shared memory. Cards from sm_90 on have enough for
/// two stages, or too little for one.
const ONE_STAGE_KERNEL: KernelSpec<Extents> = KernelSpec {
    shared_bytes: |extents| flash_mma_shared_bytes(extents, 1),
    ..one_stage_kernel(FLASH_MMA)
};
const ONE_STAGE_PREPARE: KernelSpec<Extents> = one_stage_kernel(FLASH_MMA_PREPARE);
const ONE_STAGE_FINISH: KernelSpec<Extents> = one_stage_kernel(FLASH_MMA_FINISH);

const fn one_stage_kernel(row: KernelSpec<Extents>) -> KernelSpec<Extents> {
    KernelSpec {
        defines: |extents| {
            let stages = "STAGES=1".to_owned();
            (FLASH_MMA.defines)(extents).into_iter().chain([stages]).collect()
        },
        constants: |extents| flash_mma_macros(extents, 1),
        requires: RequiredArchitecture::Between(80, 90),
        ..row
    }
}

/// Builds with one stage have that number in their name.
fn flash_mma_macros(extents: &Extents, stages: usize) -> Vec<(&'static str, usize)> {
    let shared = ("SHARED_BYTES", flash_mma_shared_bytes(extents, stages));
    let tiles = [("TILE_QUERIES", queries_per_step(extents)), ("TILE_KEYS", KEYS_PER_BLOCK)];
    let common = [("THREADS", THREADS), tiles[0], tiles[1], shared];
    common.into_iter().chain((stages == 2).then_some(("STAGES", 2))).collect()
}

/// Shared memory of the main kernel: keys and values; the stages of queries, of output gradients,
/// and of two floats for each of their rows; the probabilities and two stages of score gradients.
fn flash_mma_shared_bytes(extents: &Extents, stages: usize) -> usize {
    let (element, queries) = (ELEMENT_BYTES as usize, queries_per_step(extents));
    let keys_and_values = 2 * KEYS_PER_BLOCK * extents.d * element;
    let copied = stages * (2 * queries * extents.d * element + 2 * 4 * queries);
    keys_and_values + copied + 3 * KEYS_PER_BLOCK * queries * element
}

pub const fn row_statistics_bytes(extents: &Extents) -> u64 {
    2 * 4 * padded_rows(extents) as u64
}

pub const fn dq_sum_bytes(extents: &Extents) -> u64 {
    4 * (padded_rows(extents) * extents.d) as u64
}

/// Number of query tiles that shared memory holds at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryStages {
    One,
    Two,
}

impl QueryStages {
    /// Chooses two stages, unless the device has shared memory for only one.
    pub fn choose_for_device(device: &Device, extents: &Extents) -> Result<Self, BackendError> {
        let (arch, most) = (&device.facts().arch, device.shared_bytes_a_block()?);
        let fits =
            |row: &KernelSpec<Extents>| row.unmet_requirement_for(extents, arch, most).is_none();
        Ok(if !fits(&FLASH_MMA) && fits(&ONE_STAGE_KERNEL) { Self::One } else { Self::Two })
    }

    const fn kernels(self) -> [KernelSpec<Extents>; 3] {
        match self {
            Self::One => [ONE_STAGE_PREPARE, ONE_STAGE_KERNEL, ONE_STAGE_FINISH],
            Self::Two => [FLASH_MMA_PREPARE, FLASH_MMA, FLASH_MMA_FINISH],
        }
    }
}

/// Loads the kernels, in the order of their launches.
pub fn load_backward_kernels(
    device: &Device,
    extents: &Extents,
    stages: QueryStages,
) -> Result<[LoadedKernel; 3], BackendError> {
    let kernels = stages.kernels();
    // The main kernel is loaded first, because the device may decline it.
    let [main, first, last] =
        [kernels[1], kernels[0], kernels[2]].map(|kernel| kernel.compile_and_load(device, extents));
    Ok([first?, main?, last?])
}

/// Arguments of the launches of one backward, before the launches are prepared.
pub struct PendingLaunches<'a> {
    pub device: &'a Arc<Device>,
    pub extents: &'a Extents,
    pub layout: &'a BackwardLayout,
    pub addresses: &'a BackwardAddresses,
    pub scratch: &'a ScratchAddresses,
}

impl PendingLaunches<'_> {
    /// Address of the row statistics: two floats for each row, padded to whole steps.
    pub const fn row_statistics_address(&self) -> u64 {
        self.scratch.any
    }

    /// Address of the fp32 accumulator of dq.
    pub const fn dq_accumulator_address(&self) -> u64 {
        self.scratch.any + row_statistics_bytes(self.extents)
    }

    /// Arguments of the kernel before the main one, with the address of the dq sums that it zeroes.
    pub fn arguments_of_prepare_kernel(&self, zeroed: Option<u64>) -> Arguments {
        let BackwardAddresses { out, grad_out, lse, .. } = *self.addresses;
        let BackwardLayout { forward, grad_out: grad_out_strides, .. } = self.layout;
        let tensors = [out, grad_out, lse, self.row_statistics_address(), zeroed.unwrap_or(0)];
        self.kernel_arguments(&tensors, &[&forward.out, grad_out_strides, &forward.lse])
    }

    /// Arguments of the kernel that runs after the main one.
    pub fn arguments_of_finish_kernel(&self) -> Arguments {
        self.kernel_arguments(
            &[self.dq_accumulator_address(), self.addresses.grad_q],
            &[&self.layout.grad_q],
        )
    }

    fn main_kernel_arguments(&self) -> Arguments {
        let BackwardAddresses { q, k, v, grad_out, grad_k, grad_v, .. } = *self.addresses;
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
        let BackwardLayout { forward, grad_out, grad_k, grad_v, .. } = self.layout;
        let strides = [&forward.q, &forward.k, &forward.v, grad_out, grad_k, grad_v];
        self.kernel_arguments(&tensors, &strides)
    }

    /// Arguments of a kernel: addresses, `seqlen`, `batch_heads`, `heads`, strides.
    fn kernel_arguments(&self, addresses: &[u64], strides: &[&Strides]) -> Arguments {
        let extents = self.extents;
        let numbers = [extents.s, extents.heads, extents.query_heads_per_sequence()];
        let all = addresses.iter().fold(Arguments::new(), |all, address| all.address(*address));
        let all = numbers.into_iter().fold(all, |all, number| all.value(number as i32));
        strides.iter().fold(all, |all, strides| all.value(strides.stride_words()))
    }
}

/// Prepares the three launches of `backward_flash_mma`.
pub fn prepare_mma_backward_launches(
    call: &PendingLaunches<'_>,
    stages: QueryStages,
) -> Result<OrderedLaunches, BackendError> {
    let [first, main, last] = load_backward_kernels(call.device, call.extents, stages)?;
    Ok(OrderedLaunches::new([
        (
            "prepare",
            first.prepare_launch(
                call.device,
                None,
                call.arguments_of_prepare_kernel(Some(call.dq_accumulator_address())),
            )?,
        ),
        ("scores_dkv_dq", main.prepare_launch(call.device, None, call.main_kernel_arguments())?),
        ("finish", last.prepare_launch(call.device, None, call.arguments_of_finish_kernel())?),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::workload::Dtype;

    #[test]
    fn the_grid_covers_all_padded_rows() {
        let narrow =
            Extents { causal: true, ..Extents::self_attention_extents(6, 200, Dtype::Bf16) };
        let wide = Extents { d: 128, ..narrow };
        // A head of 200 rows is padded to two steps of 128, or four of 64.
        assert_eq!((padded_rows(&narrow), padded_rows(&wide)), (6 * 256, 6 * 256));
        assert_eq!((FLASH_MMA_PREPARE.blocks)(&narrow), [6 * 256 * 8 / 256, 1, 1]);
        assert_eq!((FLASH_MMA_FINISH.blocks)(&narrow), [6 * 2 * 2, 1, 1]);
        assert_eq!((FLASH_MMA_FINISH.blocks)(&wide), [6 * 4 * 2, 1, 1]);
    }
}
