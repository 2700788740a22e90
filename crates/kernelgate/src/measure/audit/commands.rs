//! Checks the commands (graph nodes) that stream capture finds in launches.

use super::audit_finding::{RefusedTimedCode, TimingRefusal};
use kernelgate_cuda::Devices;
use kernelgate_cuda::driver::graph_set::ExecutableGraphPerGpu;

/// Fails if a captured launch has no command on any GPU; passes if the launch could not be
/// captured.
///
/// # Errors
/// Fails if the launch enqueues no command.
pub fn check_launch_has_commands(commands: Option<&[usize]>) -> Result<(), TimingRefusal> {
    match commands.and_then(|commands| commands.iter().max()) {
        Some(0) => {
            Err(TimingRefusal::NothingEnqueued { subject: RefusedTimedCode::ImplementationLaunch })
        }
        _ => Ok(()),
    }
}

/// Fails if a captured launch over several GPUs has no command on one of them.
///
/// # Errors
/// Fails with the first GPU on which the launch has no command.
pub fn check_launch_has_commands_on_each_gpu(
    captured: Option<&ExecutableGraphPerGpu>,
    devices: &Devices,
) -> Result<(), TimingRefusal> {
    let Some(rank) = captured.and_then(ExecutableGraphPerGpu::first_gpu_without_commands) else {
        return Ok(());
    };
    let gpu = devices.iter().nth(rank).map_or(rank, |device| device.gpu_properties().gpu_ordinal);
    Err(TimingRefusal::NothingEnqueuedOnRank { gpu_rank: rank, gpu_ordinal: gpu })
}

/// Fails if the graph of several captured launches has fewer commands on a GPU than the launches
/// have when captured singly. A library such as NCCL may add event nodes to every capture, so event
/// nodes do not count.
///
/// # Errors
/// Fails with the first GPU whose graph has fewer commands than the launch.
pub fn check_batch_has_commands_of_single_launches(
    together: &[usize],
    launches: u64,
    alone: &[usize],
) -> Result<(), TimingRefusal> {
    for (rank, (&together, &alone)) in together.iter().zip(alone).enumerate() {
        if (together as u64) < launches * alone as u64 {
            return Err(TimingRefusal::CommandsDifferInBatch {
                gpu_rank: rank,
                commands_of_one_launch: alone,
                commands_of_batch: together,
                launches_in_batch: launches,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_that_enqueues_no_commands_is_refused() {
        assert!(
            check_launch_has_commands(Some(&[0, 1])).is_ok()
                && check_launch_has_commands(None).is_ok()
        );
        assert_eq!(
            check_launch_has_commands(Some(&[0])),
            Err(TimingRefusal::NothingEnqueued { subject: RefusedTimedCode::ImplementationLaunch })
        );
    }

    #[test]
    fn a_captured_batch_needs_the_commands_of_single_launches() {
        assert_eq!(check_batch_has_commands_of_single_launches(&[64], 64, &[1]), Ok(()));
        assert_eq!(check_batch_has_commands_of_single_launches(&[130, 64], 64, &[2, 1]), Ok(()));
        let fewer = check_batch_has_commands_of_single_launches(&[22], 33, &[1]).unwrap_err();
        let words = "launches differ in their commands: 1 in one, 22 in 33 together";
        assert_eq!(fewer.to_string(), words);
    }

    #[test]
    fn a_gpu_with_too_few_commands_in_a_batch_is_refused() {
        let fewer = check_batch_has_commands_of_single_launches(&[66, 2], 33, &[2, 2]).unwrap_err();
        let refusal = TimingRefusal::CommandsDifferInBatch {
            gpu_rank: 1,
            commands_of_one_launch: 2,
            commands_of_batch: 2,
            launches_in_batch: 33,
        };
        assert_eq!(fewer, refusal);
        let words = "launches differ in their commands on rank 1: 2 in one, 2 in 33 together";
        assert_eq!(fewer.to_string(), words);
    }
}
