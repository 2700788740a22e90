//! The commands that launches leave in a capture of the stream.

use super::refusal::{Refusal, Subject};
use kernelgate_cuda::Devices;
use kernelgate_cuda::driver::graph_set::GraphSet;

/// Checks that a launch has commands.
///
/// # Errors
/// If it has none.
pub const fn check_any(commands: Option<usize>) -> Result<(), Refusal> {
    match commands {
        Some(0) => Err(Refusal::NothingEnqueued(Subject::Launch)),
        _ => Ok(()),
    }
}

/// Checks that a launch over several GPUs has commands on each.
///
/// # Errors
/// The first GPU without.
pub fn check_each(captured: Option<&GraphSet>, devices: &Devices) -> Result<(), Refusal> {
    let Some(rank) = captured.and_then(GraphSet::idle) else { return Ok(()) };
    let gpu = devices.iter().nth(rank).map_or(rank, |device| device.facts().ordinal);
    Err(Refusal::NothingOnRank { rank, gpu })
}

/// Checks that launches that were captured together have the commands of each.
///
/// # Errors
/// If they have fewer.
pub const fn check_alike(together: usize, launches: u64, alone: usize) -> Result<(), Refusal> {
    if together as u64 >= launches * alone as u64 {
        return Ok(());
    }
    Err(Refusal::CommandsDiffer { alone, together, launches })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_without_commands_is_refused() {
        assert!(check_any(Some(1)).is_ok() && check_any(None).is_ok());
        assert_eq!(check_any(Some(0)), Err(Refusal::NothingEnqueued(Subject::Launch)));
    }

    #[test]
    fn launches_that_are_captured_together_have_the_commands_of_each() {
        assert_eq!(check_alike(64, 64, 1), Ok(()));
        assert_eq!(check_alike(130, 64, 2), Ok(()));
        let fewer = check_alike(22, 33, 1).unwrap_err();
        assert_eq!(fewer, Refusal::CommandsDiffer { alone: 1, together: 22, launches: 33 });
        let words = "launches differ in their commands: 1 in one, 22 in 33 together";
        assert_eq!(fewer.to_string(), words);
    }
}
