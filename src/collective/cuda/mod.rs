//! Collectives between GPUs, all of them by NCCL, and the all-reduce also by kernelgate's own
//! kernels.

mod in_place;
mod message_buffers;
mod nccl;
mod one_shot;
mod sum_kernels;
mod two_shot;

use super::definition::ExchangeProblem;
pub use in_place::InPlaceAllReduce;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate_cuda::spec::{ListedKernelBuild, list_kernel_rows};

/// Lists all of kernelgate's CUDA kernels for collectives.
pub fn list_collective_kernels() -> Vec<ListedKernelBuild> {
    [list_kernel_rows(one_shot::ONE_SHOT_KERNELS), list_kernel_rows(two_shot::TWO_SHOT_KERNELS)]
        .concat()
}

const NCCL_EXCHANGE_ROW: Implementation<ExchangeProblem> = Implementation {
    implementation_name: "cuda/nccl",
    description: "NCCL, a communicator a GPU in one process, without NVLink multicast",
    supports: |_| Ok(()),
    prepare: PrepareFunction::CudaOnGpuSet {
        device_bytes: message_buffers::input_and_output_bytes_per_gpu,
        prepare: nccl::prepare_nccl_exchange_task,
    },
};

/// Implementations of the collectives that only NCCL implements: all but the all-reduce.
pub const NCCL_ONLY_ROWS: &[Implementation<ExchangeProblem>] = &[NCCL_EXCHANGE_ROW];

/// GPU implementations (rows) of the all-reduce: kernelgate's one-step and two-step kernels, and
/// NCCL.
pub const CUDA_ALL_REDUCE_ROWS: &[Implementation<ExchangeProblem>] = &[
    Implementation {
        implementation_name: "cuda/one_shot",
        description: "every GPU stores its message into the memory of all, each word with a flag",
        supports: one_shot::check_one_shot_message_size,
        prepare: PrepareFunction::CudaOnGpuSet {
            device_bytes: one_shot::one_shot_device_bytes_per_gpu,
            prepare: one_shot::prepare_one_shot_all_reduce,
        },
    },
    Implementation {
        implementation_name: "cuda/two_shot",
        description: "every GPU sums its part from the memory of all, and stores it into that of all",
        supports: two_shot::check_two_shot_message_size,
        prepare: PrepareFunction::CudaOnGpuSet {
            device_bytes: message_buffers::input_and_output_bytes_per_gpu,
            prepare: two_shot::prepare_two_shot_all_reduce,
        },
    },
    NCCL_EXCHANGE_ROW,
];

#[cfg(test)]
mod on_one;

#[cfg(test)]
mod tests {
    use super::super::definition::ExchangeKind;
    use super::*;
    use kernelgate::verify::launch_twice_and_compare_with_reference;
    use kernelgate::workload::{Dtype, Problem};
    use kernelgate_cuda::BackendError;
    use kernelgate_cuda::testing::lock_two_gpus;

    #[test]
    fn exchange_rows_agree_with_the_reference_on_two_gpus() {
        let Some((devices, _alone)) = lock_two_gpus() else { return };
        let kinds = [
            ExchangeKind::AllReduce,
            ExchangeKind::AllGather,
            ExchangeKind::ReduceScatter,
            ExchangeKind::Broadcast,
            ExchangeKind::Send,
        ];
        for (kind, elements, dtype) in kinds.into_iter().flat_map(|kind| {
            [(48, Dtype::F32), (4096, Dtype::Bf16), (100_032, Dtype::Bf16), (262_144, Dtype::F32)]
                .map(|(elements, dtype)| (kind, elements, dtype))
        }) {
            let problem = ExchangeProblem { kind, gpus: 2, message_elements: elements, dtype };
            let inputs = problem.inputs(5);
            let expected = problem.reference(&inputs);
            let rows =
                if kind == ExchangeKind::AllReduce { CUDA_ALL_REDUCE_ROWS } else { NCCL_ONLY_ROWS };
            for row in rows.iter().filter(|row| (row.supports)(&problem).is_ok()) {
                let mut task = match row.prepare_on_gpus(&problem, &inputs, &devices) {
                    Ok(task) => task,
                    Err(BackendError::Unsupported(why)) => {
                        eprintln!("skipped: {}: {why}", row.implementation_name);
                        continue;
                    }
                    Err(error) => panic!("{}: {error}", row.implementation_name),
                };
                // The test launches each collective several times, because flags and halves of
                // buffers alternate between launches.
                for _ in 0..3 {
                    let found = launch_twice_and_compare_with_reference(
                        &mut task,
                        &expected,
                        problem.tolerance(),
                    );
                    assert!(found.is_ok(), "{} {problem:?}: {found:?}", row.implementation_name);
                }
            }
        }
    }
}
