//! Work on streams that are not joined with the timed one: the events do not enclose it.
//!
//! Two checks. While a blocker holds the stream, a launch may write no output; the check reads
//! samples from the beginning to the end of each. It is skipped if a launch is more commands than
//! can be queued. When the stream has finished, the context has to be idle; this shows work that
//! lasts long enough. CUPTI's record of a launch shows what both miss ([`super::cupti`]).
//! Deliberately absent: defence against code that attacks the process.

use std::time::{Duration, Instant};

use crate::backend::{BackendError, Executable};
use kernelgate_cuda::Device;
use kernelgate_cuda::instruments::timing::Instruments;

/// How long the stream is held at most. If the host is held up for longer, the check shows nothing.
const HOLD: Duration = Duration::from_millis(200);
/// How long work on another stream has to show itself: starting a kernel takes microseconds.
const SHOWS_WITHIN: Duration = Duration::from_millis(2);
/// How much longer the context may be busy than the stream: the cost of asking, and a share of the
/// launch that does not matter.
const ASKING: Duration = Duration::from_micros(60);
const SHARE: f64 = 0.02;
/// Launches of which each has to show such work: a host that was held up shows it once.
const LAUNCHES: usize = 5;

/// Holds the stream and launches: no sample of an output may change before the stream is released.
/// Outputs that the reset writes hold no poison, and are skipped.
///
/// # Errors
/// [`BackendError::NotTimed`] if one changes; when the device fails.
pub fn check_writes(
    instruments: &mut Instruments,
    executable: &mut dyn Executable,
) -> Result<(), BackendError> {
    executable.poison_outputs()?;
    // A launch needs its state, which may lie in its outputs.
    executable.reset()?;
    executable.synchronize()?;
    // Without state every output holds poison, or work elsewhere has overwritten it already.
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
    // If the blocker timed out, the launch may have run on the timed stream.
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

/// Launches and waits for the stream: then the context has to be idle.
///
/// # Errors
/// [`BackendError::NotTimed`] if it is not; when the device fails.
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
        // The driver cleans up after a graph when the stream is first synchronised.
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
