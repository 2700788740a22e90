//! Work on other streams, by CUPTI's record of a launch: also work that writes no output and
//! finishes before the stream does, which [`super::writes`] cannot see.
//!
//! The stream is held while the case is launched. An operation that begins during the hold, or ends
//! after a mark that follows on the stream, runs on another stream. A launch with more commands
//! than the queue holds returns only once the stream goes on. Operations on other streams may then
//! run at any time, and the record is conclusive only if all of them are on one stream. If CUPTI
//! records nothing, the record of the case states that.

use std::collections::BTreeMap;
use std::time::Duration;

use super::refusal::Refusal;
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::driver::stream::hold::Hold;
use kernelgate_cuda::instruments::timing::{Blocker, Instruments};
use kernelgate_cuda::observe::activity::{Activity, KernelRecord};
use kernelgate_cuda::observe::cupti::{Recorded, Recorder};
use kernelgate_cuda::{Device, Devices};

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

/// Launches while the streams of the GPUs are held, and checks CUPTI's record of it. CUPTI is
/// detached afterwards. Returns the reason if the record is not conclusive and the case is not at
/// fault: CUPTI is missing, another program uses it, or the record shows too little.
///
/// # Errors
/// [`BackendError::NotTimed`] if something ran on another stream, or on another GPU; when a device
/// fails.
pub fn check(
    devices: &Devices,
    streams: &mut dyn MarkedHold,
    executable: &mut dyn Executable,
) -> Result<Option<String>, BackendError> {
    executable.reset_and_wait()?;
    let recording = match Recording::start(devices.one(), Recorded::Operations) {
        Ok(Some(recording)) => recording,
        Ok(None) => return Ok(Some("CUPTI is missing".to_owned())),
        Err(error) => return Ok(Some(error.to_string())),
    };
    streams.hold(HOLD)?;
    let launched = executable.launch();
    std::thread::sleep(BEGINS_WITHIN);
    streams.release();
    streams.mark()?;
    executable.synchronize()?;
    devices.for_each(|_, device| device.synchronize_context())?;
    let held = streams.was_released();
    let record = recording.end(0);
    launched?;
    let record = match record {
        Ok(record) => record,
        Err(lost @ BackendError::Lost(_)) => return Err(lost),
        Err(error) => return Ok(Some(error.to_string())),
    };
    match outside(&record, held, devices.count()) {
        Ok(Some(refusal)) => Err(refusal.into()),
        Ok(None) => Ok(None),
        Err(why) => Ok(Some(why)),
    }
}

/// Streams that are held, and on which a mark may be set.
pub trait MarkedHold: Hold {
    /// Enqueues a mark on each: the probe of the clocks.
    ///
    /// # Errors
    /// When a launch is refused.
    fn mark(&mut self) -> Result<(), BackendError>;
}

/// The streams of one GPU that were held, and the mark behind the launch.
struct Held {
    blocker: KernelRecord,
    mark: u64,
}

impl Held {
    /// The stream of each GPU.
    ///
    /// # Errors
    /// Why the record is not conclusive.
    fn on_each_gpu(record: &Activity, gpus: usize) -> Result<BTreeMap<u32, Self>, String> {
        let own = |symbol: &'static str| {
            let found = record.kernels.iter();
            found.filter(move |kernel| record.names[kernel.name as usize] == symbol)
        };
        let mut held = BTreeMap::new();
        for blocker in own(Blocker::SYMBOL) {
            let mut marks = own(Instruments::PROBE).filter(|it| it.on.device == blocker.on.device);
            let mark = marks.next().map(|mark| mark.start);
            let lacks = || format!("CUPTI's record lacks `{}`", Instruments::PROBE);
            let found = Self { blocker: *blocker, mark: mark.ok_or_else(lacks)? };
            held.entry(blocker.on.device).or_insert(found);
        }
        if held.len() < gpus {
            return Err(format!("CUPTI's record lacks `{}`", Blocker::SYMBOL));
        }
        Ok(held)
    }
}

/// The first operation that began while the stream of its GPU was held, or ended after the mark, or
/// ran on another GPU than the `gpus` whose streams were held. `held`: the streams were held
/// until the launch had returned.
///
/// # Errors
/// Why the record is not conclusive.
fn outside(record: &Activity, held: bool, gpus: usize) -> Result<Option<Refusal>, String> {
    let name = |kernel: u32| record.names[kernel as usize].as_str();
    let streams = Held::on_each_gpu(record, gpus)?;
    let kernels = record.kernels.iter().map(|it| (it.start, it.end, it.on, name(it.name)));
    let kernels =
        kernels.filter(|(.., name)| ![Blocker::SYMBOL, Instruments::PROBE].contains(name));
    let copies = record.copies.iter().map(|copy| (copy.start, copy.end, copy.on, ""));
    let sets = record.sets.iter().map(|set| (set.start, set.end, set.on, ""));
    let mut all = kernels.chain(copies).chain(sets);
    let operation = |name: &str| match name {
        "" => "a copy or set of memory".to_owned(),
        name => format!("kernel `{name}`"),
    };
    if let Some((_, _, on, name)) =
        all.clone().find(|(_, _, on, _)| !streams.contains_key(&on.device))
    {
        let (operation, gpu) = (operation(name), on.device);
        return Ok(Some(Refusal::RecordedOnOtherGpu { operation, gpu }));
    }
    // CUPTI records no times for operations that it could not follow.
    let is_timed = |start: u64, end: u64| (start, end) != (0, 0);
    let found = (all.clone().filter(|&(start, end, ..)| is_timed(start, end))).find(
        |&(start, end, on, _)| {
            let Held { blocker, mark } = &streams[&on.device];
            start + EARLY_NS < blocker.end || end > mark + LATE_NS
        },
    );
    match found {
        Some((.., name)) => Ok(Some(Refusal::RecordedElsewhere { operation: operation(name) })),
        None if record.dropped > 0 => Err(format!("CUPTI lost {} records", record.dropped)),
        None if !held && all.any(|(_, _, on, _)| on != streams[&on.device].blocker.on) => {
            Err("the stream was not held until the launch had returned".to_owned())
        }
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use kernelgate_cuda::observe::activity::CopyRecord;

    use super::*;

    const MS: u64 = 1_000_000;

    fn outside(record: &Activity) -> Result<Option<Refusal>, String> {
        super::outside(record, true, 1)
    }

    fn elsewhere(operation: &str) -> Refusal {
        Refusal::RecordedElsewhere { operation: operation.to_owned() }
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
        let theirs = Ok(Some(elsewhere("kernel `theirs`")));
        assert_eq!(outside(&record(11 * MS, 11 * MS + 5_000)), theirs);
        assert_eq!(outside(&record(14 * MS, 16 * MS)), theirs);
        assert_eq!(outside(&record(0, 0)), Ok(None), "without times");
        let copy = CopyRecord { start: 12 * MS, end: 13 * MS, ..Default::default() };
        let copied = Activity { copies: vec![copy], ..record(14 * MS, 15 * MS) };
        assert_eq!(outside(&copied), Ok(Some(elsewhere("a copy or set of memory"))));
    }

    #[test]
    fn a_launch_longer_than_the_hold_is_found_by_its_streams() {
        let outside = |record: &Activity| super::outside(record, false, 1);
        assert_eq!(outside(&record(14 * MS, 15 * MS)), Ok(None), "on one stream");
        let mut other = record(14 * MS, 15 * MS);
        other.kernels[1].on.stream = 7;
        let unknown = "the stream was not held until the launch had returned".to_owned();
        assert_eq!(outside(&other), Err(unknown), "joined or not");
        other.kernels[1].start = 11 * MS;
        assert_eq!(outside(&other), Ok(Some(elsewhere("kernel `theirs`"))));
    }

    /// Holds on GPUs 0 and 3, each with a kernel of the launch.
    fn over_two(start: u64, end: u64) -> Activity {
        let mut both = record(14 * MS, 15 * MS);
        let mut second = record(start, end).kernels;
        second.iter_mut().for_each(|kernel| kernel.on.device = 3);
        both.kernels.extend(second);
        both
    }

    #[test]
    fn each_gpu_is_held_against_its_own_stream() {
        let outside = |record: &Activity| super::outside(record, true, 2);
        assert_eq!(outside(&over_two(14 * MS, 15 * MS)), Ok(None));
        let theirs = Ok(Some(elsewhere("kernel `theirs`")));
        assert_eq!(outside(&over_two(11 * MS, 12 * MS)), theirs);
        let mut later = over_two(16 * MS, 17 * MS);
        for kernel in later.kernels.iter_mut().filter(|kernel| kernel.on.device == 3) {
            kernel.start += u64::from(kernel.name != 2) * 2 * MS;
            kernel.end += u64::from(kernel.name != 2) * 2 * MS;
        }
        assert_eq!(outside(&later), Ok(None), "its own hold ended later");
    }

    #[test]
    fn work_on_a_gpu_outside_of_the_set_is_reported() {
        let mut other = over_two(14 * MS, 15 * MS);
        other.kernels[1].on.device = 1;
        let operation = "kernel `theirs`".to_owned();
        let refused = Refusal::RecordedOnOtherGpu { operation, gpu: 1 };
        assert_eq!(super::outside(&other, true, 2), Ok(Some(refused)));
        let one = over_two(14 * MS, 15 * MS);
        let lacks = "CUPTI's record lacks `measure_blocker`".to_owned();
        assert_eq!(super::outside(&one, true, 3), Err(lacks));
    }

    #[test]
    fn a_record_that_shows_too_little_says_what_is_missing() {
        let empty = Activity { kernels: Vec::new(), ..record(0, 0) };
        let lacks = "CUPTI's record lacks `measure_blocker`".to_owned();
        assert_eq!(outside(&empty), Err(lacks));
        let lost = |start| Activity { dropped: 3, ..record(start, 15 * MS) };
        assert_eq!(outside(&lost(14 * MS)), Err("CUPTI lost 3 records".to_owned()));
        assert_eq!(outside(&lost(11 * MS)), Ok(Some(elsewhere("kernel `theirs`"))));
    }
}
