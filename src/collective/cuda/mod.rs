//! Exchanges between GPUs by NCCL, and sums by our own kernels.

mod in_place;
mod message_buffers;
mod nccl;
mod one_shot;
mod sum_kernels;
mod two_shot;

use super::definition::ExchangeProblem;
pub use in_place::InPlaceSum;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate_cuda::spec::{ListedKernel, list_kernel_rows};

/// All kernels of the collective family.
pub fn kernels() -> Vec<ListedKernel> {
    [list_kernel_rows(one_shot::KERNELS), list_kernel_rows(two_shot::KERNELS)].concat()
}

const NCCL_ROW: Implementation<ExchangeProblem> = Implementation {
    name: "cuda/nccl",
    about: "NCCL, a communicator a GPU in one process, without NVLink multicast",
    supports: |_| Ok(()),
    prepare: Prepare::CudaSet {
        device_bytes: message_buffers::message_bytes_per_gpu,
        prepare: nccl::prepare_nccl_exchange,
    },
};

/// Rows of the exchanges that only NCCL implements.
pub const NCCL_ONLY_ROWS: &[Implementation<ExchangeProblem>] = &[NCCL_ROW];

/// Rows of the all-reduce: NCCL and our own sums.
pub const ALL_REDUCE: &[Implementation<ExchangeProblem>] = &[
    Implementation {
        name: "cuda/one_shot",
        about: "every GPU stores its message into the memory of all, each word with a flag",
        supports: one_shot::check_message_size,
        prepare: Prepare::CudaSet {
            device_bytes: one_shot::device_bytes,
            prepare: one_shot::prepare_one_shot_sum,
        },
    },
    Implementation {
        name: "cuda/two_shot",
        about: "every GPU sums its part from the memory of all, and stores it into that of all",
        supports: two_shot::check_message_size,
        prepare: Prepare::CudaSet {
            device_bytes: message_buffers::message_bytes_per_gpu,
            prepare: two_shot::prepare_two_shot_sum,
        },
    },
    NCCL_ROW,
];

#[cfg(test)]
mod on_one;

#[cfg(test)]
mod tests {
    use super::super::definition::ExchangeKind;
    use super::*;
    use kernelgate::verify::launch_and_verify;
    use kernelgate::workload::{Dtype, Problem};
    use kernelgate_cuda::BackendError;
    use kernelgate_cuda::testing::two_gpus_for_test;

    #[test]
    fn exchange_rows_agree_with_the_reference_on_two_gpus() {
        let Some((devices, _alone)) = two_gpus_for_test() else { return };
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
            let problem = ExchangeProblem { kind, gpus: 2, elements, dtype };
            let inputs = problem.inputs(5);
            let expected = problem.reference(&inputs);
            let rows = if kind == ExchangeKind::AllReduce { ALL_REDUCE } else { NCCL_ONLY_ROWS };
            for row in rows.iter().filter(|row| (row.supports)(&problem).is_ok()) {
                let mut task = match row.prepare_on(&problem, &inputs, &devices) {
                    Ok(task) => task,
                    Err(BackendError::Unsupported(why)) => {
                        eprintln!("skipped: {}: {why}", row.name);
                        continue;
                    }
                    Err(error) => panic!("{}: {error}", row.name),
                };
                // The exchange is launched several times, because flags and halves of buffers
                // alternate between launches.
                for _ in 0..3 {
                    let found = launch_and_verify(&mut task, &expected, problem.tolerance());
                    assert!(found.is_ok(), "{} {problem:?}: {found:?}", row.name);
                }
            }
        }
    }
}
