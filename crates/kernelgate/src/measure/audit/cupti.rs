//! Work on other streams, by CUPTI's record of a launch: also work that writes no output and
//! finishes before the stream does, which [`super::writes`] cannot see.
//!
//! The stream is held while the case is launched. An operation that begins during the hold, or ends
//! after a mark that follows on the stream, runs on another stream. A launch with more commands
//! than the queue holds returns only once the stream goes on. Operations on other streams may then
//! run at any time, and the record is conclusive only if all of them are on one stream. If CUPTI
//! records nothing, the record of the case states that.

use std::time::Duration;

use super::refusal::Refusal;
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::stream::hold::Hold;
use kernelgate_cuda::instruments::timing::{Blocker, Instruments};
use kernelgate_cuda::observe::activity::Activity;
use kernelgate_cuda::observe::cupti::{Recorded, Recorder};

/// How long the stream is held at most. If the host is held up for longer, the check shows nothing.
const HOLD: Duration = Duration::from_millis(200);
/// How long work on another stream has to begin after the launch has returned.
const BEGINS_WITHIN: Duration = Duration::from_millis(2);
/// How much earlier than the end of the hold an operation on another stream begins, nanoseconds:
/// work in order may begin while the blocker ends.
const EARLY_NS: u64 = BEGINS_WITHIN.as_nanos() as u64 / 2;
/// How much later than the begin of the mark work in order may end, nanoseconds.
const LATE_NS: u64 = 2_000;

/// CUPTI attached to the process. It is detached on drop, also after a panic of the launch's closure.
pub struct Recording<'a> {
    device: &'a Device,
    recorder: Option<Recorder>,
}

impl<'a> Recording<'a> {
    /// Attaches CUPTI; `None` if it is missing.
    ///
    /// # Errors
    /// When CUPTI refuses.
    pub fn start(device: &'a Device, recorded: Recorded) -> Result<Option<Self>, BackendError> {
        let recorder = Recorder::start(recorded)?;
        Ok(recorder.map(|recorder| Self { device, recorder: Some(recorder) }))
    }

    /// Now, on the clock of the records, nanoseconds.
    pub fn now(&self) -> u64 {
        self.recorder.as_ref().map_or(0, Recorder::now)
    }

    /// Detaches CUPTI, and returns the records that began after a time of that clock.
    ///
    /// # Errors
    /// When the device fails, or CUPTI.
    pub fn end(mut self, since: u64) -> Result<Activity, BackendError> {
        self.device.synchronize_context()?;
        let recorder = self.recorder.take();
        let record = recorder
            .as_ref()
            .map_or_else(|| Ok(Activity::default()), |recorder| recorder.take_since(since, since));
        recorder.map_or(Ok(()), Recorder::detach)?;
        record
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if let Some(recorder) = self.recorder.take() {
            // Nothing may run while CUPTI detaches. On a lost device nothing does.
            let _ = self.device.synchronize_context();
            let _ = recorder.detach();
        }
    }
}

/// Launches while the stream is held, and checks CUPTI's record of it. CUPTI is detached
/// afterwards. Returns the reason if the record is not conclusive and the case is not at fault:
/// CUPTI is missing, another program uses it, or the record shows too little.
///
/// # Errors
/// [`BackendError::NotTimed`] if something ran on another stream; when the device fails.
pub fn check(
    device: &Device,
    blocker: &mut Blocker,
    instruments: &Instruments,
    executable: &mut dyn Executable,
) -> Result<Option<String>, BackendError> {
    executable.reset_and_wait()?;
    let recording = match Recording::start(device, Recorded::Operations) {
        Ok(Some(recording)) => recording,
        Ok(None) => return Ok(Some("CUPTI is missing".to_owned())),
        Err(error) => return Ok(Some(error.to_string())),
    };
    blocker.hold(HOLD)?;
    let launched = executable.launch();
    std::thread::sleep(BEGINS_WITHIN);
    blocker.release();
    instruments.probe(1)?;
    executable.synchronize()?;
    device.synchronize_context()?;
    let held = blocker.was_released();
    let record = recording.end(0);
    launched?;
    let record = match record {
        Ok(record) => record,
        Err(lost @ BackendError::Lost(_)) => return Err(lost),
        Err(error) => return Ok(Some(error.to_string())),
    };
    match outside(&record, held) {
        Ok(Some(operation)) => Err(Refusal::RecordedElsewhere { operation }.into()),
        Ok(None) => Ok(None),
        Err(why) => Ok(Some(why)),
    }
}

/// The first operation that began while the stream was held, or ended after the mark. `held`: the
/// stream was held until the launch had returned.
///
/// # Errors
/// Why the record is not conclusive.
fn outside(record: &Activity, held: bool) -> Result<Option<String>, String> {
    let name = |kernel: u32| record.names[kernel as usize].as_str();
    let own = |symbol| {
        let found = record.kernels.iter().find(|kernel| name(kernel.name) == symbol);
        found.ok_or_else(|| format!("CUPTI's record lacks `{symbol}`"))
    };
    let (blocker, mark) = (own(Blocker::SYMBOL)?, own(Instruments::PROBE)?.start);
    let kernels = record.kernels.iter().map(|it| (it.start, it.end, it.on, name(it.name)));
    let kernels =
        kernels.filter(|(.., name)| ![Blocker::SYMBOL, Instruments::PROBE].contains(name));
    let copies = record.copies.iter().map(|copy| (copy.start, copy.end, copy.on, ""));
    let sets = record.sets.iter().map(|set| (set.start, set.end, set.on, ""));
    let mut all = kernels.chain(copies).chain(sets);
    // CUPTI records no times for operations that it could not follow.
    let is_timed = |start: u64, end: u64| (start, end) != (0, 0);
    let early = |start: u64| start + EARLY_NS < blocker.end;
    let found = (all.clone().filter(|&(start, end, ..)| is_timed(start, end)))
        .find(|&(start, end, ..)| early(start) || end > mark + LATE_NS);
    match found {
        Some((.., "")) => Ok(Some("a copy or set of memory".to_owned())),
        Some((.., name)) => Ok(Some(format!("kernel `{name}`"))),
        None if record.dropped > 0 => Err(format!("CUPTI lost {} records", record.dropped)),
        None if !held && all.any(|(_, _, on, _)| on != blocker.on) => {
            Err("the stream was not held until the launch had returned".to_owned())
        }
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use kernelgate_cuda::observe::activity::{CopyRecord, KernelRecord};

    use super::*;

    const MS: u64 = 1_000_000;

    fn outside(record: &Activity) -> Result<Option<String>, String> {
        super::outside(record, true)
    }

    /// A hold from 10 to 14 ms, a kernel of the launch, the mark at 15 ms.
    fn record(start: u64, end: u64) -> Activity {
        let names = [Blocker::SYMBOL, Instruments::PROBE, "theirs"].map(str::to_owned);
        let kernel = |name, start, end| KernelRecord { name, start, end, ..Default::default() };
        Activity {
            names: names.into(),
            kernels: vec![
                kernel(0, 10 * MS, 14 * MS),
                kernel(2, start, end),
                kernel(1, 15 * MS, 15 * MS + 1_000),
            ],
            ..Activity::default()
        }
    }

    #[test]
    fn work_outside_of_the_held_interval_is_reported() {
        assert_eq!(outside(&record(14 * MS, 15 * MS)), Ok(None));
        let jitter = record(14 * MS - 1_000, 15 * MS + 1_000);
        assert_eq!(outside(&jitter), Ok(None), "clocks of hardware");
        let theirs = Ok(Some("kernel `theirs`".to_owned()));
        assert_eq!(outside(&record(11 * MS, 11 * MS + 5_000)), theirs);
        assert_eq!(outside(&record(14 * MS, 16 * MS)), theirs);
        assert_eq!(outside(&record(0, 0)), Ok(None), "without times");
        let copy = CopyRecord { start: 12 * MS, end: 13 * MS, ..Default::default() };
        let copied = Activity { copies: vec![copy], ..record(14 * MS, 15 * MS) };
        assert_eq!(outside(&copied), Ok(Some("a copy or set of memory".to_owned())));
    }

    #[test]
    fn a_launch_longer_than_the_hold_is_found_by_its_streams() {
        let outside = |record: &Activity| super::outside(record, false);
        assert_eq!(outside(&record(14 * MS, 15 * MS)), Ok(None), "on one stream");
        let mut other = record(14 * MS, 15 * MS);
        other.kernels[1].on.stream = 7;
        let unknown = "the stream was not held until the launch had returned".to_owned();
        assert_eq!(outside(&other), Err(unknown), "joined or not");
        other.kernels[1].start = 11 * MS;
        assert_eq!(outside(&other), Ok(Some("kernel `theirs`".to_owned())));
    }

    #[test]
    fn a_record_that_shows_too_little_says_what_is_missing() {
        let empty = Activity { kernels: Vec::new(), ..record(0, 0) };
        let lacks = "CUPTI's record lacks `measure_blocker`".to_owned();
        assert_eq!(outside(&empty), Err(lacks));
        let lost = |start| Activity { dropped: 3, ..record(start, 15 * MS) };
        assert_eq!(outside(&lost(14 * MS)), Err("CUPTI lost 3 records".to_owned()));
        assert_eq!(outside(&lost(11 * MS)), Ok(Some("kernel `theirs`".to_owned())));
    }
}
