//! Work on other streams, by CUPTI's record of a launch: also work that writes no output and
//! finishes before the stream does, which [`super::early_writes`] cannot see.
//!
//! The timed stream is held while the case is launched under CUPTI. An operation that begins during
//! the hold, or ends after a mark that follows on the stream, runs on another stream. A launch with
//! more commands than the queue holds returns only once the stream goes on. Operations on other
//! streams may then run at any time, and the record is conclusive only if all of them are on one
//! stream. If CUPTI records nothing, the record of the case states that.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::audit_finding::{RefusedSubject, TimingRefusal};
use crate::backend::{BackendError, Executable};
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;
use kernelgate_cuda::instruments::timing::{StreamBlocker, TimingInstruments};
use kernelgate_cuda::observe::activity::{KernelRecord, RecordedActivity, StreamId};
use kernelgate_cuda::observe::cupti::{ActivityRecorder, RecordingExtent};
use kernelgate_cuda::{Device, Devices};

/// Longest time for which the stream is held under CUPTI. If the host is held up for longer, the
/// check shows nothing.
const CUPTI_HOLD: Duration = Duration::from_millis(200);
/// How long work on another stream has to begin after the launch has returned.
pub const OTHER_STREAM_START_TIME: Duration = Duration::from_millis(2);
/// How much earlier than the end of the hold an operation on another stream begins, nanoseconds:
/// work in order may begin while the blocker ends.
const EARLY_START_TOLERANCE_NS: u64 = OTHER_STREAM_START_TIME.as_nanos() as u64 / 2;
/// How much later than the begin of the mark work in order may end, nanoseconds.
const LATE_END_TOLERANCE_NS: u64 = 2_000;

/// An attached CUPTI recording of this process. CUPTI is detached on drop, also after a panic of
/// the launch's closure.
pub struct CuptiRecording<'a> {
    device: &'a Device,
    recorder: Option<ActivityRecorder>,
}

impl<'a> CuptiRecording<'a> {
    /// Attaches CUPTI to the process; `None` if the library is missing.
    pub fn attach_and_start(
        device: &'a Device,
        recorded: RecordingExtent,
    ) -> Result<Option<CuptiRecording<'a>>, BackendError> {
        let recorder = ActivityRecorder::start(recorded)?;
        Ok(recorder.map(|recorder| Self { device, recorder: Some(recorder) }))
    }

    /// Current time on the clock of CUPTI's records, nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.recorder.as_ref().map_or(0, ActivityRecorder::clock_ns)
    }

    /// Detaches CUPTI, and returns the records that began after a time of that clock.
    pub fn detach_and_take(mut self, since: u64) -> Result<RecordedActivity, BackendError> {
        self.device.synchronize_context()?;
        let recorder = self.recorder.take();
        let record = recorder.as_ref().map_or_else(
            || Ok(RecordedActivity::default()),
            |recorder| recorder.take_records_since(since, since),
        );
        recorder.map_or(Ok(()), ActivityRecorder::detach_cupti)?;
        record
    }
}

impl Drop for CuptiRecording<'_> {
    fn drop(&mut self) {
        if let Some(recorder) = self.recorder.take() {
            // Nothing may run on the GPU while CUPTI detaches. On a lost device nothing runs any
            // more.
            let _ = self.device.synchronize_context();
            let _ = recorder.detach_cupti();
        }
    }
}

/// Launches once while the streams of all GPUs are held, and checks CUPTI's record of the launch.
/// CUPTI is detached afterwards. Returns the reason if the record is not conclusive and the case is
/// not at fault: CUPTI is missing, another program uses it, or the record shows too little.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if something ran on another stream, or on another GPU, or
/// if a device fails.
pub fn check_recorded_streams(
    devices: &Devices,
    streams: &mut dyn MarkedHold,
    executable: &mut dyn Executable,
) -> Result<Option<String>, BackendError> {
    executable.reset_and_wait()?;
    let recording =
        match CuptiRecording::attach_and_start(devices.first_device(), RecordingExtent::Operations)
        {
            Ok(Some(recording)) => recording,
            Ok(None) => return Ok(Some("CUPTI is missing".to_owned())),
            Err(error) => return Ok(Some(error.to_string())),
        };
    streams.hold(CUPTI_HOLD)?;
    let launched = executable.launch();
    std::thread::sleep(OTHER_STREAM_START_TIME);
    streams.release();
    streams.mark_streams()?;
    executable.synchronize()?;
    devices.for_each_device(|_, device| device.synchronize_context())?;
    let held = streams.was_released();
    let record = recording.detach_and_take(0);
    launched?;
    let record = match record {
        Ok(record) => record,
        Err(lost @ BackendError::Lost(_)) => return Err(lost),
        Err(error) => return Ok(Some(error.to_string())),
    };
    match find_operation_outside(&record, held, devices.device_count()) {
        Ok(Some(refusal)) => Err(refusal.into()),
        Ok(None) => Ok(None),
        Err(why) => Ok(Some(why)),
    }
}

/// Streams that are held, and on which a mark may be set.
pub trait MarkedHold: StreamHold {
    /// Enqueues a mark on each: the probe of the clocks.
    fn mark_streams(&mut self) -> Result<(), BackendError>;
}

/// The streams of one GPU that were held, and the mark behind the launch.
struct HeldStreamsOfGpu {
    blocker: KernelRecord,
    mark: u64,
}

impl HeldStreamsOfGpu {
    /// The held streams of each GPU in CUPTI's record.
    ///
    /// # Errors
    /// The error states why the record is not conclusive.
    fn from_record_by_gpu(
        record: &RecordedActivity,
        gpus: usize,
    ) -> Result<BTreeMap<u32, HeldStreamsOfGpu>, String> {
        let own = |symbol: &'static str| {
            let found = record.kernels.iter();
            found.filter(move |kernel| record.names[kernel.name as usize] == symbol)
        };
        let mut held = BTreeMap::new();
        for blocker in own(StreamBlocker::BLOCKING_KERNEL_SYMBOL) {
            let mut marks = own(TimingInstruments::CLOCK_PROBE_SYMBOL)
                .filter(|it| it.on.device == blocker.on.device);
            let mark = marks.next().map(|mark| mark.start);
            let lacks =
                || format!("CUPTI's record lacks `{}`", TimingInstruments::CLOCK_PROBE_SYMBOL);
            let found = Self { blocker: *blocker, mark: mark.ok_or_else(lacks)? };
            held.entry(blocker.on.device).or_insert(found);
        }
        if held.len() < gpus {
            return Err(format!(
                "CUPTI's record lacks `{}`",
                StreamBlocker::BLOCKING_KERNEL_SYMBOL
            ));
        }
        Ok(held)
    }
}

/// Finds the first operation that began while its stream was held, ended after the mark, or ran on
/// a GPU without a held stream. `held`: the streams were held until the launch had returned.
///
/// # Errors
/// The error states why CUPTI's record is not conclusive.
fn find_operation_outside(
    record: &RecordedActivity,
    held: bool,
    gpus: usize,
) -> Result<Option<TimingRefusal>, String> {
    let streams = HeldStreamsOfGpu::from_record_by_gpu(record, gpus)?;
    let own = [StreamBlocker::BLOCKING_KERNEL_SYMBOL, TimingInstruments::CLOCK_PROBE_SYMBOL];
    let all: Vec<RecordedOperation<'_>> =
        recorded_operations(record).filter(|operation| !own.contains(&operation.kernel)).collect();
    let subject = RefusedSubject::Launch;
    if let Some(other) = all.iter().find(|it| !streams.contains_key(&it.on.device)) {
        let (operation, gpu) = (other.to_string(), other.on.device);
        return Ok(Some(TimingRefusal::RecordedOnOtherGpu { subject, operation, gpu }));
    }
    let found = all.iter().filter(|it| it.has_recorded_times()).find(|it| {
        let HeldStreamsOfGpu { blocker, mark } = &streams[&it.on.device];
        it.start + EARLY_START_TOLERANCE_NS < blocker.end || it.end > mark + LATE_END_TOLERANCE_NS
    });
    match found {
        Some(it) => {
            Ok(Some(TimingRefusal::RecordedElsewhere { subject, operation: it.to_string() }))
        }
        None if record.dropped > 0 => Err(format!("CUPTI lost {} records", record.dropped)),
        None if !held && all.iter().any(|it| it.on != streams[&it.on.device].blocker.on) => {
            Err(NOT_HELD_REASON.to_owned())
        }
        None => Ok(None),
    }
}

/// A pass of a routine that CUPTI recorded, on a stream that other code made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedPass {
    /// Whether the stream was held until the routine had returned.
    pub held: bool,
    /// When the hold ended at the earliest, on the clock of the records.
    pub released: u64,
}

/// Checks CUPTI's record of one pass of the routine. The first memset of one byte in the record is
/// on the timed stream. Returns the reason if the record is not conclusive.
///
/// # Errors
/// Fails if something ran on another stream, or on another GPU.
pub fn check_recorded_pass(
    record: &RecordedActivity,
    pass: RecordedPass,
) -> Result<Option<String>, TimingRefusal> {
    let Some(mark) = record.sets.iter().find(|set| set.bytes == 1) else {
        return Ok(Some("CUPTI's record lacks the mark on the stream".to_owned()));
    };
    let subject = RefusedSubject::Routine;
    let is_mark =
        |it: &RecordedOperation<'_>| (it.start, it.on, it.kernel) == (mark.start, mark.on, "");
    let all: Vec<RecordedOperation<'_>> =
        recorded_operations(record).filter(|it| !is_mark(it)).collect();
    if let Some(other) = all.iter().find(|it| it.on.device != mark.on.device) {
        let (operation, gpu) = (other.to_string(), other.on.device);
        return Err(TimingRefusal::RecordedOnOtherGpu { subject, operation, gpu });
    }
    let early = |it: &&RecordedOperation<'_>| {
        it.has_recorded_times() && it.start + EARLY_START_TOLERANCE_NS < pass.released
    };
    if let Some(it) = all.iter().find(early) {
        return Err(TimingRefusal::RecordedElsewhere { subject, operation: it.to_string() });
    }
    Ok(match record.dropped {
        0 if !pass.held && all.iter().any(|it| it.on != mark.on) => {
            Some(NOT_HELD_REASON.to_owned())
        }
        0 => None,
        lost => Some(format!("CUPTI lost {lost} records")),
    })
}

const NOT_HELD_REASON: &str = "the stream was not held until the launch had returned";

/// One operation of a GPU in CUPTI's record: a kernel, a copy or a fill.
struct RecordedOperation<'a> {
    start: u64,
    end: u64,
    on: StreamId,
    /// Symbol of the kernel; empty for a copy or a set.
    kernel: &'a str,
}

impl RecordedOperation<'_> {
    /// CUPTI records no times for operations that it could not follow.
    const fn has_recorded_times(&self) -> bool {
        self.start != 0 || self.end != 0
    }
}

impl fmt::Display for RecordedOperation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kernel {
            "" => f.write_str("a copy or set of memory"),
            kernel => write!(f, "kernel `{kernel}`"),
        }
    }
}

fn recorded_operations(record: &RecordedActivity) -> impl Iterator<Item = RecordedOperation<'_>> {
    let kernels = record.kernels.iter().map(|&KernelRecord { start, end, on, name, .. }| {
        RecordedOperation { start, end, on, kernel: &record.names[name as usize] }
    });
    let copies = record.copies.iter().map(|it| (it.start, it.end, it.on));
    let sets = record.sets.iter().map(|it| (it.start, it.end, it.on));
    let others = copies.chain(sets);
    kernels.chain(others.map(|(start, end, on)| RecordedOperation { start, end, on, kernel: "" }))
}

#[cfg(test)]
mod tests {
    use kernelgate_cuda::observe::activity::{CopyRecord, MemsetRecord};

    use super::*;

    const MS: u64 = 1_000_000;

    fn find_operation_outside(record: &RecordedActivity) -> Result<Option<TimingRefusal>, String> {
        super::find_operation_outside(record, true, 1)
    }

    fn recorded_elsewhere(operation: &str) -> TimingRefusal {
        TimingRefusal::RecordedElsewhere {
            subject: RefusedSubject::Launch,
            operation: operation.to_owned(),
        }
    }

    /// A hold from 10 to 14 ms, a kernel of the launch, the mark at 15 ms.
    fn kernel_and_mark(start: u64, end: u64) -> RecordedActivity {
        let names = [
            StreamBlocker::BLOCKING_KERNEL_SYMBOL,
            TimingInstruments::CLOCK_PROBE_SYMBOL,
            "theirs",
        ]
        .map(str::to_owned);
        let kernel = |name, start, end| KernelRecord { name, start, end, ..Default::default() };
        RecordedActivity {
            names: names.into(),
            kernels: vec![
                kernel(0, 10 * MS, 14 * MS),
                kernel(2, start, end),
                kernel(1, 15 * MS, 15 * MS + 1_000),
            ],
            ..RecordedActivity::default()
        }
    }

    #[test]
    fn work_that_runs_while_the_timed_stream_is_held_is_reported() {
        assert_eq!(find_operation_outside(&kernel_and_mark(14 * MS, 15 * MS)), Ok(None));
        let jitter = kernel_and_mark(14 * MS - 1_000, 15 * MS + 1_000);
        assert_eq!(find_operation_outside(&jitter), Ok(None), "clocks of hardware");
        let theirs = Ok(Some(recorded_elsewhere("kernel `theirs`")));
        assert_eq!(find_operation_outside(&kernel_and_mark(11 * MS, 11 * MS + 5_000)), theirs);
        assert_eq!(find_operation_outside(&kernel_and_mark(14 * MS, 16 * MS)), theirs);
        assert_eq!(find_operation_outside(&kernel_and_mark(0, 0)), Ok(None), "without times");
        let copy = CopyRecord { start: 12 * MS, end: 13 * MS, ..Default::default() };
        let copied = RecordedActivity { copies: vec![copy], ..kernel_and_mark(14 * MS, 15 * MS) };
        assert_eq!(
            find_operation_outside(&copied),
            Ok(Some(recorded_elsewhere("a copy or set of memory")))
        );
    }

    #[test]
    fn a_launch_that_outlasts_the_hold_is_checked_by_its_streams() {
        let outside = |record: &RecordedActivity| super::find_operation_outside(record, false, 1);
        assert_eq!(outside(&kernel_and_mark(14 * MS, 15 * MS)), Ok(None), "on one stream");
        let mut other = kernel_and_mark(14 * MS, 15 * MS);
        other.kernels[1].on.stream = 7;
        let unknown = "the stream was not held until the launch had returned".to_owned();
        assert_eq!(outside(&other), Err(unknown), "joined or not");
        other.kernels[1].start = 11 * MS;
        assert_eq!(outside(&other), Ok(Some(recorded_elsewhere("kernel `theirs`"))));
    }

    /// Holds on GPUs 0 and 3, each with a kernel of the launch.
    fn recording_over_two_gpus(start: u64, end: u64) -> RecordedActivity {
        let mut both = kernel_and_mark(14 * MS, 15 * MS);
        let mut second = kernel_and_mark(start, end).kernels;
        second.iter_mut().for_each(|kernel| kernel.on.device = 3);
        both.kernels.extend(second);
        both
    }

    #[test]
    fn each_gpu_is_checked_with_its_own_held_stream() {
        let outside = |record: &RecordedActivity| super::find_operation_outside(record, true, 2);
        assert_eq!(outside(&recording_over_two_gpus(14 * MS, 15 * MS)), Ok(None));
        let theirs = Ok(Some(recorded_elsewhere("kernel `theirs`")));
        assert_eq!(outside(&recording_over_two_gpus(11 * MS, 12 * MS)), theirs);
        let mut later = recording_over_two_gpus(16 * MS, 17 * MS);
        for kernel in later.kernels.iter_mut().filter(|kernel| kernel.on.device == 3) {
            kernel.start += u64::from(kernel.name != 2) * 2 * MS;
            kernel.end += u64::from(kernel.name != 2) * 2 * MS;
        }
        assert_eq!(outside(&later), Ok(None), "its own hold ended later");
    }

    #[test]
    fn work_on_a_gpu_outside_of_the_set_is_reported() {
        let mut other = recording_over_two_gpus(14 * MS, 15 * MS);
        other.kernels[1].on.device = 1;
        let operation = "kernel `theirs`".to_owned();
        let subject = RefusedSubject::Launch;
        let refused = TimingRefusal::RecordedOnOtherGpu { subject, operation, gpu: 1 };
        assert_eq!(super::find_operation_outside(&other, true, 2), Ok(Some(refused)));
        let one = recording_over_two_gpus(14 * MS, 15 * MS);
        let lacks = "CUPTI's record lacks `measure_blocker`".to_owned();
        assert_eq!(super::find_operation_outside(&one, true, 3), Err(lacks));
    }

    /// A mark on the stream, and one kernel of the routine.
    fn recorded_pass(start: u64, stream: u32) -> RecordedActivity {
        let on = StreamId { stream, ..StreamId::default() };
        let kernel = KernelRecord { name: 2, start, end: start + 5_000, on, ..Default::default() };
        let mark = MemsetRecord { bytes: 1, start: MS, end: MS + 900, ..Default::default() };
        RecordedActivity { kernels: vec![kernel], sets: vec![mark], ..kernel_and_mark(0, 0) }
    }

    #[test]
    fn a_pass_that_works_on_another_stream_is_refused() {
        let held = RecordedPass { held: true, released: 14 * MS };
        let timed_out = RecordedPass { held: false, released: 14 * MS };
        let (subject, operation) = (RefusedSubject::Routine, "kernel `theirs`".to_owned());
        let elsewhere = Err(TimingRefusal::RecordedElsewhere { subject, operation });
        for recorded in [held, timed_out] {
            assert_eq!(check_recorded_pass(&recorded_pass(14 * MS, 0), recorded), Ok(None));
            assert_eq!(check_recorded_pass(&recorded_pass(11 * MS, 7), recorded), elsewhere);
        }
        assert_eq!(
            check_recorded_pass(&recorded_pass(14 * MS, 7), held),
            Ok(None),
            "joined with the stream"
        );
        assert_eq!(
            check_recorded_pass(&recorded_pass(14 * MS, 7), timed_out),
            Ok(Some(NOT_HELD_REASON.to_owned()))
        );
        let unmarked = RecordedActivity { sets: Vec::new(), ..recorded_pass(11 * MS, 7) };
        assert!(check_recorded_pass(&unmarked, held).unwrap().is_some());
        let lost = RecordedActivity { dropped: 2, ..recorded_pass(14 * MS, 0) };
        assert_eq!(check_recorded_pass(&lost, held), Ok(Some("CUPTI lost 2 records".to_owned())));
    }

    #[test]
    fn an_inconclusive_cupti_record_names_the_missing_part() {
        let empty = RecordedActivity { kernels: Vec::new(), ..kernel_and_mark(0, 0) };
        let lacks = "CUPTI's record lacks `measure_blocker`".to_owned();
        assert_eq!(find_operation_outside(&empty), Err(lacks));
        let lost = |start| RecordedActivity { dropped: 3, ..kernel_and_mark(start, 15 * MS) };
        assert_eq!(find_operation_outside(&lost(14 * MS)), Err("CUPTI lost 3 records".to_owned()));
        assert_eq!(
            find_operation_outside(&lost(11 * MS)),
            Ok(Some(recorded_elsewhere("kernel `theirs`")))
        );
    }
}
