//! What launches of other code must not do while they are timed: wait for the GPU, and allocate.
//! What they leave behind on the thread is looked at when they are launched
//! ([`kernelgate_cuda::driver::conduct`]).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::queue::MAX_QUEUED;
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::graph::Graph;
use kernelgate_cuda::instruments::timing::Instruments;
use kernelgate_cuda::observe::activity::Activity;
use kernelgate_cuda::observe::cupti::{Recorded, Recorder};

/// How long the stream is held for a launch that might wait for it.
const HOLD: Duration = Duration::from_millis(200);
/// Launches of which each has to take memory away: a driver may do so once.
const LAUNCHES: usize = 3;

fn refused(why: String) -> BackendError {
    BackendError::NotTimed(why)
}

/// Looks for allocations among the commands of a launch.
///
/// # Errors
/// [`BackendError::NotTimed`] where there are some; when the driver refuses.
pub fn check_graph(graph: &Graph) -> Result<(), BackendError> {
    if graph.allocates()? {
        return Err(refused(
            "a launch allocates device memory in the order of the stream".to_owned(),
        ));
    }
    Ok(())
}

/// Launches, and looks at free memory.
///
/// # Errors
/// [`BackendError::NotTimed`] where each launch takes some away; when one fails.
pub fn check_memory(device: &Device, executable: &mut dyn Executable) -> Result<(), BackendError> {
    let mut least = u64::MAX;
    for _ in 0..LAUNCHES {
        let (before, _) = device.memory()?;
        executable.launch()?;
        executable.synchronize()?;
        let (after, _) = device.memory()?;
        least = least.min(before.saturating_sub(after));
    }
    if least > 0 {
        return Err(refused(format!("each launch allocates {least} bytes of device memory")));
    }
    Ok(())
}

/// Launches while the stream is held, and looks at the clock. A launch that was captured waits for
/// nothing: it could not be captured. One that returns only when the stream is let go waits for the
/// GPU, or for room in the queue: then whether the launch is more than can be queued.
///
/// # Errors
/// [`BackendError::NotTimed`] where it waits for the GPU; when it fails.
pub fn check_waits(
    device: &Device,
    instruments: &mut Instruments,
    executable: &mut dyn Executable,
) -> Result<bool, BackendError> {
    instruments.block(HOLD)?;
    let started = Instant::now();
    let launched = executable.launch();
    let took = started.elapsed();
    instruments.release();
    executable.synchronize()?;
    launched?;
    // Only then had it to wait until the stream let go by itself.
    if took < HOLD.mul_f64(0.9) || instruments.released() {
        return Ok(false);
    }
    let commands = recorded_commands(device, executable)?;
    let returns_early = commands.is_none() && returns_early(device, executable)?;
    held_up(commands, returns_early).map_or(Ok(true), |why| Err(refused(why.to_owned())))
}

/// Why a launch that a held stream held up has no time; none where its commands filled the queue.
/// How many they are is known where CUPTI tells. Else a launch that returns while the GPU still
/// works has not waited for the end of it, which is all that can be said.
const fn held_up(commands: Option<usize>, returns_early: bool) -> Option<&'static str> {
    match commands {
        Some(commands) if commands > MAX_QUEUED => None,
        Some(_) => {
            Some("a launch waits for the GPU: it synchronises, copies to the host, or frees memory")
        }
        None if returns_early => None,
        None => Some(
            "a launch waits for the GPU: it synchronises, copies to the host, or frees memory; or \
             it is more commands than can be queued, which CUPTI would tell",
        ),
    }
}

/// What CUPTI records of a launch, as commands. Before any sample, and only for a launch that would
/// be refused otherwise: recording changes times, and CUPTI leaves the process again.
fn recorded_commands(
    device: &Device,
    executable: &mut dyn Executable,
) -> Result<Option<usize>, BackendError> {
    let Ok(Some(recorder)) = Recorder::start(Recorded::Operations) else { return Ok(None) };
    let launched = executable.launch().and_then(|()| executable.synchronize());
    device.synchronize_context()?;
    let (record, left) = (recorder.take(), recorder.detach());
    launched?;
    Ok(record.ok().filter(|_| left.is_ok()).and_then(|record| commands(&record)))
}

/// Calls that put something into the queue, each of which has a number of its own: all nodes of a
/// graph have that of its launch. None where too many records were lost to tell.
fn commands(record: &Activity) -> Option<usize> {
    let kernels = record.kernels.iter().map(|kernel| kernel.correlation);
    let copies = record.copies.iter().map(|copy| copy.correlation);
    let sets = record.sets.iter().map(|set| set.correlation);
    let calls = kernels.chain(copies).chain(sets).collect::<BTreeSet<u32>>().len();
    (record.dropped == 0 || calls > MAX_QUEUED).then_some(calls)
}

/// Whether a launch on an idle GPU returns, at least once, while the GPU still works.
fn returns_early(device: &Device, executable: &mut dyn Executable) -> Result<bool, BackendError> {
    for _ in 0..LAUNCHES {
        executable.synchronize()?;
        executable.launch()?;
        let busy = device.is_busy()?;
        executable.synchronize()?;
        if busy {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use kernelgate_cuda::observe::activity::{CopyRecord, KernelRecord, SetRecord};

    use super::*;

    #[test]
    fn a_launch_that_fills_the_queue_does_not_wait_for_the_gpu() {
        assert_eq!(held_up(Some(MAX_QUEUED + 1), false), None);
        assert_eq!(held_up(Some(MAX_QUEUED + 1), true), None);
        // Few commands fit any queue, whatever the GPU does when the launch returns: one that waits
        // between its commands returns early too.
        for returns_early in [false, true] {
            assert!(held_up(Some(2), returns_early).unwrap().starts_with("a launch waits for"));
        }
        assert_eq!(held_up(None, true), None);
        let unknown = held_up(None, false).unwrap();
        assert!(unknown.contains("waits for the GPU") && unknown.contains("CUPTI"), "{unknown}");
    }

    #[test]
    fn commands_are_counted_by_the_calls_that_enqueue_them() {
        let kernel = |correlation, graph_node| KernelRecord {
            correlation,
            graph_node,
            ..Default::default()
        };
        let record = Activity {
            // One by itself, and a graph of two that is launched twice.
            kernels: vec![kernel(1, 0), kernel(2, 7), kernel(2, 8), kernel(3, 7), kernel(3, 8)],
            copies: vec![CopyRecord { correlation: 4, ..Default::default() }],
            sets: vec![SetRecord { correlation: 5, ..Default::default() }],
            ..Activity::default()
        };
        assert_eq!(commands(&record), Some(5));
        assert_eq!(commands(&Activity { dropped: 1, ..record }), None);
        let kernels = (0..=MAX_QUEUED as u32).map(|call| kernel(call, 0)).collect();
        let many = Activity { kernels, dropped: 1, ..Activity::default() };
        assert_eq!(commands(&many), Some(MAX_QUEUED + 1));
    }
}
