//! Work that the events on the stream do not enclose: launched on another stream, or not at all.
//!
//! Two checks. While a blocking kernel holds the stream, nothing of a launch may have been written;
//! and when the stream is done, the context has to be. The first reads samples of each output, from
//! its beginning to its end, and is left out where a launch is more commands than can be queued; the
//! second sees whatever lasts long enough. What both miss a record of a launch may show
//! ([`super::recorded`]). Deliberately absent: guarding against code that attacks the process.

use std::time::{Duration, Instant};

use crate::backend::{BackendError, Executable};
use kernelgate_cuda::Device;
use kernelgate_cuda::instruments::timing::Instruments;

/// How long the stream is held at most; a host that is held up for longer sees nothing this time.
const HOLD: Duration = Duration::from_millis(200);
/// How long work on another stream has to show itself: starting a kernel takes microseconds.
const SHOWS_WITHIN: Duration = Duration::from_millis(2);
/// By how much the context may be busy for longer than the stream: what asking costs, and a share
/// of the launch, below which it does not matter.
const ASKING: Duration = Duration::from_micros(60);
const SHARE: f64 = 0.02;
/// Launches of which each has to show such work: a host that was held up shows it once.
const LAUNCHES: usize = 5;

/// The error for a launch that leaves nothing on the stream.
pub fn nothing() -> BackendError {
    BackendError::NotTimed("a launch enqueues nothing on the stream that is timed".to_owned())
}

/// The error for a launch that takes less than a kernel can.
pub fn impossible(launch_ns: f64, empty_ns: f64) -> BackendError {
    // What events cost is taken off, and may be more than what they tell of nothing.
    let launch_ns = launch_ns.max(0.0);
    BackendError::NotTimed(format!(
        "a launch takes {launch_ns:.0} ns by the events around it, an empty kernel {empty_ns:.0} ns"
    ))
}

/// Holds the stream and launches: no sample of an output may change before the stream is let go. An
/// output that a reset writes holds no poison to look for, and is left out.
///
/// # Errors
/// [`BackendError::NotTimed`] where one does; when the device fails.
pub fn check_writes(
    instruments: &mut Instruments,
    executable: &mut dyn Executable,
) -> Result<(), BackendError> {
    executable.poison_outputs()?;
    // A launch needs its state, which may lie in its outputs.
    executable.reset()?;
    executable.synchronize()?;
    // Of another row no output is left out: what overwrites poison there works elsewhere.
    let poisoned = match executable.carries_state() {
        true => Some(executable.still_poisoned()?),
        false => None,
    };
    if poisoned.as_ref().is_some_and(|poisoned| !poisoned.contains(&true)) {
        return Ok(());
    }
    instruments.block(HOLD)?;
    let untouched = executable.launch().and_then(|()| {
        std::thread::sleep(SHOWS_WITHIN);
        executable.still_poisoned()
    });
    instruments.release();
    executable.synchronize()?;
    // A stream that let go by itself says nothing of what came after that.
    let is_looked_at = |output: usize| poisoned.as_ref().is_none_or(|poisoned| poisoned[output]);
    let mut outputs = untouched?.into_iter().enumerate();
    let written = outputs.any(|(output, untouched)| !untouched && is_looked_at(output));
    if written && instruments.released() {
        return Err(BackendError::NotTimed(
            "a launch writes its outputs while the stream that is timed is held: it works on \
             another stream"
                .to_owned(),
        ));
    }
    Ok(())
}

/// Launches and waits for the stream: then the context has to be done too.
///
/// # Errors
/// [`BackendError::NotTimed`] where it is not; when the device fails.
pub fn check_duration(
    device: &Device,
    executable: &mut dyn Executable,
) -> Result<(), BackendError> {
    let mut shortest = Duration::MAX;
    for _ in 0..LAUNCHES {
        executable.reset()?;
        device.synchronize_context()?;
        let launched = Instant::now();
        executable.launch()?;
        executable.synchronize()?;
        // The driver tidies up after a graph when it is first asked about it.
        device.synchronize_stream()?;
        let stream_done = Instant::now();
        device.synchronize_context()?;
        shortest = shortest.min(stream_done.elapsed());
        if shortest <= ASKING + launched.elapsed().mul_f64(SHARE) {
            return Ok(());
        }
    }
    Err(BackendError::NotTimed(format!(
        "a launch keeps the GPU busy for {} µs after the stream that is timed has finished: it \
         works on another stream",
        shortest.as_micros()
    )))
}
