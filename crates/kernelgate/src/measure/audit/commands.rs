//! The commands that launches leave in a capture of the stream.

use super::audit_finding::{RefusedSubject, TimingRefusal};
use kernelgate_cuda::Devices;
use kernelgate_cuda::driver::graph_set::GraphSet;

/// Checks that a launch has commands on some GPU.
///
/// # Errors
/// Fails if the launch enqueues no command.
pub fn check_has_commands(commands: Option<&[usize]>) -> Result<(), TimingRefusal> {
    match commands.and_then(|commands| commands.iter().max()) {
        Some(0) => Err(TimingRefusal::NothingEnqueued { subject: RefusedSubject::Launch }),
        _ => Ok(()),
    }
}

/// Checks that a launch over several GPUs has commands on each.
///
/// # Errors
/// The first GPU without.
pub fn check_commands_on_each_gpu(
    captured: Option<&GraphSet>,
    devices: &Devices,
) -> Result<(), TimingRefusal> {
    let Some(rank) = captured.and_then(GraphSet::first_idle_gpu) else { return Ok(()) };
    let gpu = devices.iter().nth(rank).map_or(rank, |device| device.facts().ordinal);
    Err(TimingRefusal::NothingOnRank { rank, gpu })
}

/// Checks that launches that were captured together have the commands of each, GPU by GPU. A
/// library may add an event to every capture (NCCL does); events do not count.
///
/// # Errors
/// Fails with the first GPU whose graph has fewer commands than the launch.
pub fn check_captured_commands_match(
    together: &[usize],
    launches: u64,
    alone: &[usize],
) -> Result<(), TimingRefusal> {
    for (rank, (&together, &alone)) in together.iter().zip(alone).enumerate() {
        if (together as u64) < launches * alone as u64 {
            return Err(TimingRefusal::CommandsDiffer { rank, alone, together, launches });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_that_enqueues_no_commands_is_refused() {
        assert!(check_has_commands(Some(&[0, 1])).is_ok() && check_has_commands(None).is_ok());
        assert_eq!(
            check_has_commands(Some(&[0])),
            Err(TimingRefusal::NothingEnqueued { subject: RefusedSubject::Launch })
        );
    }

    #[test]
    fn each_launch_of_a_batch_must_have_the_commands_of_a_single_launch() {
        assert_eq!(check_captured_commands_match(&[64], 64, &[1]), Ok(()));
        assert_eq!(check_captured_commands_match(&[130, 64], 64, &[2, 1]), Ok(()));
        let fewer = check_captured_commands_match(&[22], 33, &[1]).unwrap_err();
        let words = "launches differ in their commands: 1 in one, 22 in 33 together";
        assert_eq!(fewer.to_string(), words);
    }

    #[test]
    fn a_gpu_on_which_a_batch_has_too_few_commands_is_refused() {
        let fewer = check_captured_commands_match(&[66, 2], 33, &[2, 2]).unwrap_err();
        let refusal =
            TimingRefusal::CommandsDiffer { rank: 1, alone: 2, together: 2, launches: 33 };
        assert_eq!(fewer, refusal);
        let words = "launches differ in their commands on rank 1: 2 in one, 2 in 33 together";
        assert_eq!(fewer.to_string(), words);
    }
}
