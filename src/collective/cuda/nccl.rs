//! Exchanges between GPUs by NCCL.

use super::message_buffers::MessageBuffers;
use crate::collective::definition::{ExchangeKind, ExchangeProblem};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::Devices;
use kernelgate_cuda::libraries::nccl::{
    NcclCollective, NcclCommunicators, NcclElement, SendReceiveAddresses,
};

/// Connects the GPUs by NCCL and allocates the messages.
pub fn prepare_nccl_exchange(
    problem: &ExchangeProblem,
    inputs: &Tensors,
    devices: &Devices,
) -> Result<CudaTask, BackendError> {
    let communicators = NcclCommunicators::connect_gpus(devices)?;
    let messages = MessageBuffers::new(problem, inputs, devices)?;
    let (collective, count) = match problem.kind {
        ExchangeKind::AllReduce => (NcclCollective::AllReduce, problem.elements),
        ExchangeKind::AllGather => (NcclCollective::AllGather, problem.elements / problem.gpus),
        ExchangeKind::ReduceScatter => {
            (NcclCollective::ReduceScatter, problem.elements / problem.gpus)
        }
        ExchangeKind::Broadcast => (NcclCollective::Broadcast, problem.elements),
        ExchangeKind::Send => (NcclCollective::Send, problem.elements),
    };
    let element = match problem.dtype {
        Dtype::Bf16 => NcclElement::Bf16,
        _ => NcclElement::F32,
    };
    let addresses = messages.input_addresses().into_iter().zip(messages.output_addresses());
    let parts: Vec<SendReceiveAddresses> =
        addresses.map(|(send, receive)| SendReceiveAddresses { send, receive }).collect();
    Ok(messages.into_exchange_task(devices, move || {
        communicators.enqueue_collective(collective, element, count, &parts)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::cuda::message_buffers::MessageBuffers;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::backend::Executable;
    use kernelgate::workload::Problem;
    use kernelgate_cuda::DeviceOptions;
    use kernelgate_cuda::testing::second_gpu_for_test;
    use std::time::Duration;

    /// The host waits if the GPUs are not connected yet; otherwise the kernel waits.
    #[test]
    fn a_sum_whose_peer_never_arrives_ends_with_an_error_naming_the_rank() {
        let Some((_first, _alone)) = lock_first_gpu() else { return };
        for connected in [false, true] {
            waits_in_vain(connected);
        }
    }

    fn waits_in_vain(connected: bool) {
        if second_gpu_for_test().is_none() {
            return;
        }
        let options =
            DeviceOptions { timeout: Duration::from_secs(5), ..DeviceOptions::from_environment() };
        let devices = Devices::in_launch_order([0, 1]).unwrap().open(&options).unwrap();
        let problem = ExchangeProblem {
            kind: ExchangeKind::AllReduce,
            gpus: 2,
            elements: 1024,
            dtype: Dtype::F32,
        };
        let communicators = match NcclCommunicators::connect_gpus(&devices) {
            Ok(communicators) => communicators,
            Err(BackendError::Unsupported(why)) => return eprintln!("skipped: {why}"),
            Err(error) => panic!("{error}"),
        };
        let messages = MessageBuffers::new(&problem, &problem.inputs(1), &devices).unwrap();
        let addresses = messages.input_addresses().into_iter().zip(messages.output_addresses());
        let parts: Vec<SendReceiveAddresses> =
            addresses.map(|(send, receive)| SendReceiveAddresses { send, receive }).collect();
        let sum = move |ranks: usize| {
            communicators.enqueue_collective(
                NcclCollective::AllReduce,
                NcclElement::F32,
                1024,
                &parts[..ranks],
            )
        };
        if connected {
            sum(2).unwrap();
            devices.for_each_device(|_, device| device.synchronize()).unwrap();
        }
        // The second rank (GPU) never starts its part of the sum.
        let mut task = messages.into_exchange_task(&devices, move || sum(1));
        let waited = task.launch().and_then(|()| task.synchronize());
        let error = waited.unwrap_err().to_string();
        eprintln!("{error}");
        assert!(error.contains("rank 0 on GPU 0"), "{error}");
        // NCCL aborts, and the GPU works again afterwards.
        drop(task);
        devices.for_each_device(|_, device| device.synchronize()).unwrap();
    }
}
