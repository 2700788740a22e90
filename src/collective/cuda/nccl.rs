//! Collectives between GPUs by NCCL.

use super::message_buffers::ExchangeMessageBuffers;
use crate::collective::definition::{ExchangeKind, ExchangeProblem};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::Devices;
use kernelgate_cuda::libraries::nccl::{
    CollectiveBufferAddresses, NcclCollective, NcclCommunicatorsOfGpus, NcclElementType,
};

/// Connects the GPUs by NCCL communicators and allocates the messages of a collective; the returned
/// task enqueues the NCCL collective.
pub fn prepare_nccl_exchange_task(
    problem: &ExchangeProblem,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    let communicators = NcclCommunicatorsOfGpus::connect_gpus_by_nccl(devices)?;
    let messages =
        ExchangeMessageBuffers::upload_inputs_and_allocate_outputs(problem, inputs, devices)?;
    let (collective, count) = match problem.kind {
        ExchangeKind::AllReduce => (NcclCollective::AllReduce, problem.message_elements),
        ExchangeKind::AllGather => {
            (NcclCollective::AllGather, problem.message_elements / problem.gpus)
        }
        ExchangeKind::ReduceScatter => {
            (NcclCollective::ReduceScatter, problem.message_elements / problem.gpus)
        }
        ExchangeKind::Broadcast => (NcclCollective::Broadcast, problem.message_elements),
        ExchangeKind::Send => (NcclCollective::SendToLastRank, problem.message_elements),
    };
    let element = match problem.dtype {
        Dtype::Bf16 => NcclElementType::Bf16,
        _ => NcclElementType::F32,
    };
    let addresses =
        messages.input_addresses_by_rank().into_iter().zip(messages.output_addresses_by_rank());
    let parts: Vec<CollectiveBufferAddresses> = addresses
        .map(|(send, receive)| CollectiveBufferAddresses {
            send_address: send,
            receive_address: receive,
        })
        .collect();
    Ok(messages.into_task_that_enqueues_exchange(devices, move || {
        communicators.enqueue_collective_on_all_gpus(collective, element, count, &parts)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::cuda::message_buffers::ExchangeMessageBuffers;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::backend::LaunchableProblem;
    use kernelgate::workload::Problem;
    use kernelgate_cuda::DeviceOptions;
    use kernelgate_cuda::testing::open_second_gpu_or_print_skip;
    use std::time::Duration;

    /// If the GPUs are not connected yet, the host waits for the missing rank of the NCCL sum;
    /// otherwise the NCCL kernel waits on the GPU.
    #[test]
    fn an_nccl_sum_whose_peer_never_arrives_ends_with_an_error_naming_the_rank() {
        let Some((_first, _alone)) = lock_first_gpu() else { return };
        for connected in [false, true] {
            assert_sum_with_missing_rank_times_out(connected);
        }
    }

    fn assert_sum_with_missing_rank_times_out(connected: bool) {
        if open_second_gpu_or_print_skip().is_none() {
            return;
        }
        let options = DeviceOptions {
            hung_kernel_timeout: Duration::from_secs(5),
            ..DeviceOptions::from_environment()
        };
        let devices = Devices::from_distinct_in_order([0, 1]).unwrap().open(&options).unwrap();
        let problem = ExchangeProblem {
            kind: ExchangeKind::AllReduce,
            gpus: 2,
            message_elements: 1024,
            dtype: Dtype::F32,
        };
        let communicators = match NcclCommunicatorsOfGpus::connect_gpus_by_nccl(&devices) {
            Ok(communicators) => communicators,
            Err(BackendError::Unsupported(why)) => return eprintln!("skipped: {why}"),
            Err(error) => panic!("{error}"),
        };
        let messages = ExchangeMessageBuffers::upload_inputs_and_allocate_outputs(
            &problem,
            &problem.inputs(1),
            &devices,
        )
        .unwrap();
        let addresses =
            messages.input_addresses_by_rank().into_iter().zip(messages.output_addresses_by_rank());
        let parts: Vec<CollectiveBufferAddresses> = addresses
            .map(|(send, receive)| CollectiveBufferAddresses {
                send_address: send,
                receive_address: receive,
            })
            .collect();
        let sum = move |ranks: usize| {
            communicators.enqueue_collective_on_all_gpus(
                NcclCollective::AllReduce,
                NcclElementType::F32,
                1024,
                &parts[..ranks],
            )
        };
        if connected {
            sum(2).unwrap();
            devices.for_each_with_context_current(|_, device| device.synchronize()).unwrap();
        }
        // Only rank 0 enqueues the all-reduce; the second rank never starts its part.
        let mut task = messages.into_task_that_enqueues_exchange(&devices, move || sum(1));
        let waited = task.launch_once().and_then(|()| task.wait_for_launches());
        let error = waited.unwrap_err().to_string();
        eprintln!("{error}");
        assert!(error.contains("rank 0 on GPU 0"), "{error}");
        // After the timeout the NCCL operation is aborted, and the test checks that both GPUs still
        // synchronise without an error.
        drop(task);
        devices.for_each_with_context_current(|_, device| device.synchronize()).unwrap();
    }
}
