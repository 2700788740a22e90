//! Finds work on other streams by CUPTI's record of a launch, even work that writes no output and
//! ends early, which [`super::early_writes`] cannot detect.
//!
//! The timed stream is blocked while the case is launched under CUPTI. An operation that begins
//! while the timed stream is blocked, or ends after the clock probe that follows the launch, ran on
//! another stream. A launch with more commands than the launch queue holds returns only once the
//! stream is no longer blocked. After an early end of the hold, operations on other streams may be
//! legitimate, so the record is conclusive only if all operations are on one stream. If CUPTI
//! records nothing, the case's record states that the check for work on other streams was not made.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::audit_finding::{RefusedTimedCode, TimingRefusal};
use crate::backend::{BackendError, LaunchableProblem};
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;
use kernelgate_cuda::instruments::timing::{ClockProbeAndL2Flush, StreamBlocker};
use kernelgate_cuda::observe::activity::{
    CuptiRecordedActivity, GpuContextStreamIds, KernelRecord,
};
use kernelgate_cuda::observe::cupti::{CuptiActivityRecorder, CuptiRecordingExtent};
use kernelgate_cuda::{Device, Devices};

/// Longest time for which the stream is blocked during a launch that CUPTI records. If the host
/// needs longer than this hold to launch, the check is inconclusive.
const MAX_STREAM_HOLD_UNDER_CUPTI: Duration = Duration::from_millis(200);
/// Time that kernelgate waits after a launch call has returned, so that its work on another stream
/// can begin. A loaded host can start such work milliseconds late.
pub const WAIT_FOR_OTHER_STREAM_START: Duration = Duration::from_millis(10);
/// An operation counts as early, and so on another stream, if it begins at least this many
/// nanoseconds before the hold ends.
const MIN_EARLY_START_ON_OTHER_STREAM_NS: u64 = 1_000_000;
/// Nanoseconds after the start of the clock probe within which an operation of the timed stream may
/// still end.
const MAX_END_AFTER_PROBE_START_NS: u64 = 2_000;

/// A CUPTI recording of this process, which is running. CUPTI is detached when the value is
/// dropped, even after a panic in the launch closure.
pub struct CuptiRecordingOfProcess<'a> {
    device: &'a Device,
    recorder: Option<CuptiActivityRecorder>,
}

impl<'a> CuptiRecordingOfProcess<'a> {
    /// Attaches CUPTI to this process and starts recording; returns `None` if the CUPTI library is
    /// missing.
    pub fn attach_cupti_and_start(
        device: &'a Device,
        recorded: CuptiRecordingExtent,
    ) -> Result<Option<CuptiRecordingOfProcess<'a>>, BackendError> {
        let recorder = CuptiActivityRecorder::start_cupti_recording(recorded)?;
        Ok(recorder.map(|recorder| Self { device, recorder: Some(recorder) }))
    }

    /// Returns the present time on the clock of CUPTI's timestamps, nanoseconds.
    pub fn cupti_clock_ns(&self) -> u64 {
        self.recorder.as_ref().map_or(0, CuptiActivityRecorder::record_clock_now_ns)
    }

    /// Detaches CUPTI and returns the operations and calls recorded since the CUPTI clock time
    /// `since`.
    pub fn detach_cupti_and_take_records(
        mut self,
        since: u64,
    ) -> Result<CuptiRecordedActivity, BackendError> {
        self.device.synchronize_all_streams()?;
        let recorder = self.recorder.take();
        let record = recorder.as_ref().map_or_else(
            || Ok(CuptiRecordedActivity::default()),
            |recorder| recorder.take_new_records_since(since, since),
        );
        recorder.map_or(Ok(()), CuptiActivityRecorder::end_recording_and_detach_cupti)?;
        record
    }
}

impl Drop for CuptiRecordingOfProcess<'_> {
    fn drop(&mut self) {
        if let Some(recorder) = self.recorder.take() {
            // The GPU must be idle while CUPTI detaches, hence the synchronisation. If the
            // synchronisation fails, the device is lost, and nothing runs on it any more.
            let _ = self.device.synchronize_all_streams();
            let _ = recorder.end_recording_and_detach_cupti();
        }
    }
}

/// Launches the case once while the streams of all its GPUs are blocked, and searches CUPTI's
/// record for operations on other streams. CUPTI is detached after the launch. Returns a reason if
/// the record is inconclusive through no fault of the case: CUPTI is missing, another program uses
/// CUPTI, or CUPTI's record is incomplete.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if something ran on another stream, or on another GPU, or
/// if a device fails.
pub fn check_launch_streams_with_cupti(
    devices: &Devices,
    streams: &mut dyn HoldWithEndMark,
    executable: &mut dyn LaunchableProblem,
) -> Result<Option<String>, BackendError> {
    executable.reset_state_and_wait()?;
    let recording = match CuptiRecordingOfProcess::attach_cupti_and_start(
        devices.first_device(),
        CuptiRecordingExtent::GpuOperations,
    ) {
        Ok(Some(recording)) => recording,
        Ok(None) => return Ok(Some("CUPTI is missing".to_owned())),
        Err(error) => return Ok(Some(error.to_string())),
    };
    streams.enqueue_hold(MAX_STREAM_HOLD_UNDER_CUPTI)?;
    let launched = executable.launch_once();
    std::thread::sleep(WAIT_FOR_OTHER_STREAM_START);
    streams.release_stream();
    streams.enqueue_clock_probe_on_each_stream()?;
    executable.wait_for_launches()?;
    devices.for_each_with_context_current(|_, device| device.synchronize_all_streams())?;
    let held = streams.was_released_in_time();
    let record = recording.detach_cupti_and_take_records(0);
    launched?;
    let record = match record {
        Ok(record) => record,
        Err(lost @ BackendError::DeviceLost(_)) => return Err(lost),
        Err(error) => return Ok(Some(error.to_string())),
    };
    match find_operation_outside_timed_streams(&record, held, devices.device_count()) {
        Ok(Some(refusal)) => Err(refusal.into()),
        Ok(None) => Ok(None),
        Err(why) => Ok(Some(why)),
    }
}

/// The timed streams of a case's GPUs, which can be blocked and on which a clock-probe kernel can
/// mark the launch's end.
pub trait HoldWithEndMark: StreamHold {
    /// Enqueues the clock-probe kernel on each timed stream, as a mark that follows the launch.
    fn enqueue_clock_probe_on_each_stream(&mut self) -> Result<(), BackendError>;
}

/// The kernel that blocked the timed stream of one GPU, and the start of the clock probe that
/// followed the launch.
struct HeldStreamInCuptiRecord {
    blocking_kernel: KernelRecord,
    clock_probe_start_cupti_ns: u64,
}

impl HeldStreamInCuptiRecord {
    /// Finds, in CUPTI's record, the blocking kernel and the clock probe of each GPU.
    ///
    /// # Errors
    /// The error states why the record is not conclusive.
    fn held_streams_from_cupti_record(
        record: &CuptiRecordedActivity,
        gpus: usize,
    ) -> Result<BTreeMap<u32, HeldStreamInCuptiRecord>, String> {
        let own = |symbol: &'static str| {
            let found = record.kernels.iter();
            found.filter(move |kernel| record.interned_names[kernel.name_index as usize] == symbol)
        };
        let mut held = BTreeMap::new();
        for blocker in own(StreamBlocker::BLOCKING_KERNEL_SYMBOL) {
            let mut marks = own(ClockProbeAndL2Flush::CLOCK_PROBE_SYMBOL).filter(|it| {
                it.device_context_stream.device_ordinal
                    == blocker.device_context_stream.device_ordinal
            });
            let mark = marks.next().map(|mark| mark.start_ns);
            let lacks =
                || format!("CUPTI's record lacks `{}`", ClockProbeAndL2Flush::CLOCK_PROBE_SYMBOL);
            let found = Self {
                blocking_kernel: *blocker,
                clock_probe_start_cupti_ns: mark.ok_or_else(lacks)?,
            };
            held.entry(blocker.device_context_stream.device_ordinal).or_insert(found);
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

/// Finds the first operation that began while its GPU's timed stream was blocked, ended after the
/// clock probe, or ran on a GPU outside of the case. The parameter `held` is true if the timed
/// streams stayed blocked until the launch call had returned.
///
/// # Errors
/// The error states why CUPTI's record is not conclusive.
fn find_operation_outside_timed_streams(
    record: &CuptiRecordedActivity,
    held: bool,
    gpus: usize,
) -> Result<Option<TimingRefusal>, String> {
    let streams = HeldStreamInCuptiRecord::held_streams_from_cupti_record(record, gpus)?;
    let own = [StreamBlocker::BLOCKING_KERNEL_SYMBOL, ClockProbeAndL2Flush::CLOCK_PROBE_SYMBOL];
    let all: Vec<OperationInCuptiRecord<'_>> = kernels_copies_and_sets_in_cupti_record(record)
        .filter(|operation| !own.contains(&operation.kernel_symbol))
        .collect();
    let subject = RefusedTimedCode::ImplementationLaunch;
    if let Some(other) =
        all.iter().find(|it| !streams.contains_key(&it.context_and_stream.device_ordinal))
    {
        let (operation, gpu) = (other.to_string(), other.context_and_stream.device_ordinal);
        return Ok(Some(TimingRefusal::RecordedOnOtherGpu {
            subject,
            gpu_operation: operation,
            gpu_ordinal: gpu,
        }));
    }
    let found = all.iter().filter(|it| it.has_recorded_times()).find(|it| {
        let HeldStreamInCuptiRecord { blocking_kernel: blocker, clock_probe_start_cupti_ns: mark } =
            &streams[&it.context_and_stream.device_ordinal];
        it.start_cupti_ns + MIN_EARLY_START_ON_OTHER_STREAM_NS < blocker.end_ns
            || it.end_cupti_ns > mark + MAX_END_AFTER_PROBE_START_NS
    });
    match found {
        Some(it) => Ok(Some(TimingRefusal::RecordedOnOtherStream {
            subject,
            gpu_operation: it.to_string(),
        })),
        None if record.dropped_records > 0 => {
            Err(format!("CUPTI lost {} records", record.dropped_records))
        }
        None if !held
            && all.iter().any(|it| {
                it.context_and_stream
                    != streams[&it.context_and_stream.device_ordinal]
                        .blocking_kernel
                        .device_context_stream
            }) =>
        {
            Err(REASON_STREAM_WAS_NOT_HELD_LONG_ENOUGH.to_owned())
        }
        None => Ok(None),
    }
}

/// One pass of a Criterion routine that CUPTI recorded, on a CUDA stream that the bench itself
/// created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CuptiRecordedRoutinePass {
    /// Whether the stream stayed blocked until the Criterion routine had returned.
    pub stream_stayed_held: bool,
    /// Earliest time at which the stream was no longer blocked, on CUPTI's clock, nanoseconds.
    pub release_cupti_ns: u64,
}

/// Searches CUPTI's record of one pass of a Criterion routine for operations on other streams or
/// GPUs. The first one-byte memset in CUPTI's record identifies the timed stream. Returns a reason
/// if CUPTI's record of the pass is not conclusive.
///
/// # Errors
/// Fails if something ran on another stream, or on another GPU.
pub fn check_routine_pass_streams_with_cupti(
    record: &CuptiRecordedActivity,
    pass: CuptiRecordedRoutinePass,
) -> Result<Option<String>, TimingRefusal> {
    let Some(mark) = record.memsets.iter().find(|set| set.bytes == 1) else {
        return Ok(Some("CUPTI's record lacks the mark on the stream".to_owned()));
    };
    let subject = RefusedTimedCode::CriterionRoutine;
    let is_mark = |it: &OperationInCuptiRecord<'_>| {
        (it.start_cupti_ns, it.context_and_stream, it.kernel_symbol)
            == (mark.start_ns, mark.device_context_stream, "")
    };
    let all: Vec<OperationInCuptiRecord<'_>> =
        kernels_copies_and_sets_in_cupti_record(record).filter(|it| !is_mark(it)).collect();
    if let Some(other) = all.iter().find(|it| {
        it.context_and_stream.device_ordinal != mark.device_context_stream.device_ordinal
    }) {
        let (operation, gpu) = (other.to_string(), other.context_and_stream.device_ordinal);
        return Err(TimingRefusal::RecordedOnOtherGpu {
            subject,
            gpu_operation: operation,
            gpu_ordinal: gpu,
        });
    }
    let early = |it: &&OperationInCuptiRecord<'_>| {
        it.has_recorded_times()
            && it.start_cupti_ns + MIN_EARLY_START_ON_OTHER_STREAM_NS < pass.release_cupti_ns
    };
    if let Some(it) = all.iter().find(early) {
        return Err(TimingRefusal::RecordedOnOtherStream {
            subject,
            gpu_operation: it.to_string(),
        });
    }
    Ok(match record.dropped_records {
        0 if !pass.stream_stayed_held
            && all.iter().any(|it| it.context_and_stream != mark.device_context_stream) =>
        {
            Some(REASON_STREAM_WAS_NOT_HELD_LONG_ENOUGH.to_owned())
        }
        0 if all.is_empty() => Some("CUPTI recorded nothing of the routine".to_owned()),
        0 if all.iter().any(|it| {
            it.context_and_stream != mark.device_context_stream && !it.has_recorded_times()
        }) =>
        {
            Some("CUPTI recorded no times of work on another stream".to_owned())
        }
        0 => None,
        lost => Some(format!("CUPTI lost {lost} records")),
    })
}

const REASON_STREAM_WAS_NOT_HELD_LONG_ENOUGH: &str =
    "the stream was not held until the launch had returned";

/// One operation of a GPU in CUPTI's record: a kernel, a memory copy or a memory set.
struct OperationInCuptiRecord<'a> {
    start_cupti_ns: u64,
    end_cupti_ns: u64,
    context_and_stream: GpuContextStreamIds,
    /// Symbol name of the kernel; empty for a memory copy or a memory set.
    kernel_symbol: &'a str,
}

impl OperationInCuptiRecord<'_> {
    /// Returns whether CUPTI recorded times for the operation; CUPTI writes zeros for an operation
    /// that it could not follow.
    const fn has_recorded_times(&self) -> bool {
        self.start_cupti_ns != 0 || self.end_cupti_ns != 0
    }
}

impl fmt::Display for OperationInCuptiRecord<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kernel_symbol {
            "" => f.write_str("a copy or set of memory"),
            kernel => write!(f, "kernel `{kernel}`"),
        }
    }
}

fn kernels_copies_and_sets_in_cupti_record(
    record: &CuptiRecordedActivity,
) -> impl Iterator<Item = OperationInCuptiRecord<'_>> {
    let kernels = record.kernels.iter().map(
        |&KernelRecord {
             start_ns: start,
             end_ns: end,
             device_context_stream: on,
             name_index: name,
             ..
         }| OperationInCuptiRecord {
            start_cupti_ns: start,
            end_cupti_ns: end,
            context_and_stream: on,
            kernel_symbol: &record.interned_names[name as usize],
        },
    );
    let copies = record.copies.iter().map(|it| (it.start_ns, it.end_ns, it.device_context_stream));
    let sets = record.memsets.iter().map(|it| (it.start_ns, it.end_ns, it.device_context_stream));
    let others = copies.chain(sets);
    kernels.chain(others.map(|(start, end, on)| OperationInCuptiRecord {
        start_cupti_ns: start,
        end_cupti_ns: end,
        context_and_stream: on,
        kernel_symbol: "",
    }))
}

#[cfg(test)]
mod tests {
    use kernelgate_cuda::observe::activity::{MemoryCopyRecord, MemsetRecord};

    use super::*;

    const NS_PER_MS: u64 = 1_000_000;

    fn find_operation_outside_one_held_stream(
        record: &CuptiRecordedActivity,
    ) -> Result<Option<TimingRefusal>, String> {
        find_operation_outside_timed_streams(record, true, 1)
    }

    fn refusal_of_operation_on_another_stream(operation: &str) -> TimingRefusal {
        TimingRefusal::RecordedOnOtherStream {
            subject: RefusedTimedCode::ImplementationLaunch,
            gpu_operation: operation.to_owned(),
        }
    }

    /// This CUPTI record holds a blocking kernel from 10 to 14 ms, a kernel `theirs` with the given
    /// times, and a clock probe at 15 ms.
    fn record_of_blocker_kernel_and_clock_probe(start: u64, end: u64) -> CuptiRecordedActivity {
        let names = [
            StreamBlocker::BLOCKING_KERNEL_SYMBOL,
            ClockProbeAndL2Flush::CLOCK_PROBE_SYMBOL,
            "theirs",
        ]
        .map(str::to_owned);
        let kernel = |name, start, end| KernelRecord {
            name_index: name,
            start_ns: start,
            end_ns: end,
            ..Default::default()
        };
        CuptiRecordedActivity {
            interned_names: names.into(),
            kernels: vec![
                kernel(0, 10 * NS_PER_MS, 14 * NS_PER_MS),
                kernel(2, start, end),
                kernel(1, 15 * NS_PER_MS, 15 * NS_PER_MS + 1_000),
            ],
            ..CuptiRecordedActivity::default()
        }
    }

    #[test]
    fn work_during_the_hold_of_the_timed_stream_is_refused() {
        assert_eq!(
            find_operation_outside_one_held_stream(&record_of_blocker_kernel_and_clock_probe(
                14 * NS_PER_MS,
                15 * NS_PER_MS
            )),
            Ok(None)
        );
        let jitter = record_of_blocker_kernel_and_clock_probe(
            14 * NS_PER_MS - 1_000,
            15 * NS_PER_MS + 1_000,
        );
        assert_eq!(find_operation_outside_one_held_stream(&jitter), Ok(None), "clocks of hardware");
        let theirs = Ok(Some(refusal_of_operation_on_another_stream("kernel `theirs`")));
        assert_eq!(
            find_operation_outside_one_held_stream(&record_of_blocker_kernel_and_clock_probe(
                11 * NS_PER_MS,
                11 * NS_PER_MS + 5_000
            )),
            theirs
        );
        assert_eq!(
            find_operation_outside_one_held_stream(&record_of_blocker_kernel_and_clock_probe(
                14 * NS_PER_MS,
                16 * NS_PER_MS
            )),
            theirs
        );
        assert_eq!(
            find_operation_outside_one_held_stream(&record_of_blocker_kernel_and_clock_probe(0, 0)),
            Ok(None),
            "without times"
        );
        let copy = MemoryCopyRecord {
            start_ns: 12 * NS_PER_MS,
            end_ns: 13 * NS_PER_MS,
            ..Default::default()
        };
        let copied = CuptiRecordedActivity {
            copies: vec![copy],
            ..record_of_blocker_kernel_and_clock_probe(14 * NS_PER_MS, 15 * NS_PER_MS)
        };
        assert_eq!(
            find_operation_outside_one_held_stream(&copied),
            Ok(Some(refusal_of_operation_on_another_stream("a copy or set of memory")))
        );
    }

    #[test]
    fn a_launch_that_outlasts_the_hold_is_judged_by_streams() {
        let outside =
            |record: &CuptiRecordedActivity| find_operation_outside_timed_streams(record, false, 1);
        assert_eq!(
            outside(&record_of_blocker_kernel_and_clock_probe(14 * NS_PER_MS, 15 * NS_PER_MS)),
            Ok(None),
            "on one stream"
        );
        let mut other = record_of_blocker_kernel_and_clock_probe(14 * NS_PER_MS, 15 * NS_PER_MS);
        other.kernels[1].device_context_stream.stream_id = 7;
        let unknown = "the stream was not held until the launch had returned".to_owned();
        assert_eq!(outside(&other), Err(unknown), "joined or not");
        other.kernels[1].start_ns = 11 * NS_PER_MS;
        assert_eq!(
            outside(&other),
            Ok(Some(refusal_of_operation_on_another_stream("kernel `theirs`")))
        );
    }

    /// This CUPTI record holds, for GPU 0 and GPU 3, a blocking kernel, one kernel of the launch
    /// and a clock probe.
    fn cupti_record_of_two_gpus(start: u64, end: u64) -> CuptiRecordedActivity {
        let mut both = record_of_blocker_kernel_and_clock_probe(14 * NS_PER_MS, 15 * NS_PER_MS);
        let mut second = record_of_blocker_kernel_and_clock_probe(start, end).kernels;
        second.iter_mut().for_each(|kernel| kernel.device_context_stream.device_ordinal = 3);
        both.kernels.extend(second);
        both
    }

    #[test]
    fn each_gpu_is_judged_by_its_own_held_stream() {
        let outside =
            |record: &CuptiRecordedActivity| find_operation_outside_timed_streams(record, true, 2);
        assert_eq!(outside(&cupti_record_of_two_gpus(14 * NS_PER_MS, 15 * NS_PER_MS)), Ok(None));
        let theirs = Ok(Some(refusal_of_operation_on_another_stream("kernel `theirs`")));
        assert_eq!(outside(&cupti_record_of_two_gpus(11 * NS_PER_MS, 12 * NS_PER_MS)), theirs);
        let mut later = cupti_record_of_two_gpus(16 * NS_PER_MS, 17 * NS_PER_MS);
        for kernel in later
            .kernels
            .iter_mut()
            .filter(|kernel| kernel.device_context_stream.device_ordinal == 3)
        {
            kernel.start_ns += u64::from(kernel.name_index != 2) * 2 * NS_PER_MS;
            kernel.end_ns += u64::from(kernel.name_index != 2) * 2 * NS_PER_MS;
        }
        assert_eq!(outside(&later), Ok(None), "its own hold ended later");
    }

    #[test]
    fn work_on_a_gpu_outside_of_the_case_is_refused() {
        let mut other = cupti_record_of_two_gpus(14 * NS_PER_MS, 15 * NS_PER_MS);
        other.kernels[1].device_context_stream.device_ordinal = 1;
        let operation = "kernel `theirs`".to_owned();
        let subject = RefusedTimedCode::ImplementationLaunch;
        let refused =
            TimingRefusal::RecordedOnOtherGpu { subject, gpu_operation: operation, gpu_ordinal: 1 };
        assert_eq!(find_operation_outside_timed_streams(&other, true, 2), Ok(Some(refused)));
        let one = cupti_record_of_two_gpus(14 * NS_PER_MS, 15 * NS_PER_MS);
        let lacks = "CUPTI's record lacks `measure_blocker`".to_owned();
        assert_eq!(find_operation_outside_timed_streams(&one, true, 3), Err(lacks));
    }

    /// This CUPTI record of a routine's pass holds the one-byte memset on the timed stream, and one
    /// kernel on the stream `stream`.
    fn cupti_record_of_routine_pass(start: u64, stream: u32) -> CuptiRecordedActivity {
        let on = GpuContextStreamIds { stream_id: stream, ..GpuContextStreamIds::default() };
        let kernel = KernelRecord {
            name_index: 2,
            start_ns: start,
            end_ns: start + 5_000,
            device_context_stream: on,
            ..Default::default()
        };
        let mark = MemsetRecord {
            bytes: 1,
            start_ns: NS_PER_MS,
            end_ns: NS_PER_MS + 900,
            ..Default::default()
        };
        CuptiRecordedActivity {
            kernels: vec![kernel],
            memsets: vec![mark],
            ..record_of_blocker_kernel_and_clock_probe(0, 0)
        }
    }

    #[test]
    fn a_routine_pass_working_on_another_stream_is_refused() {
        let held =
            CuptiRecordedRoutinePass { stream_stayed_held: true, release_cupti_ns: 14 * NS_PER_MS };
        let timed_out = CuptiRecordedRoutinePass {
            stream_stayed_held: false,
            release_cupti_ns: 14 * NS_PER_MS,
        };
        let (subject, operation) =
            (RefusedTimedCode::CriterionRoutine, "kernel `theirs`".to_owned());
        let elsewhere =
            Err(TimingRefusal::RecordedOnOtherStream { subject, gpu_operation: operation });
        for recorded in [held, timed_out] {
            assert_eq!(
                check_routine_pass_streams_with_cupti(
                    &cupti_record_of_routine_pass(14 * NS_PER_MS, 0),
                    recorded
                ),
                Ok(None)
            );
            assert_eq!(
                check_routine_pass_streams_with_cupti(
                    &cupti_record_of_routine_pass(11 * NS_PER_MS, 7),
                    recorded
                ),
                elsewhere
            );
        }
        assert_eq!(
            check_routine_pass_streams_with_cupti(
                &cupti_record_of_routine_pass(14 * NS_PER_MS, 7),
                held
            ),
            Ok(None),
            "joined with the stream"
        );
        assert_eq!(
            check_routine_pass_streams_with_cupti(
                &cupti_record_of_routine_pass(14 * NS_PER_MS, 7),
                timed_out
            ),
            Ok(Some(REASON_STREAM_WAS_NOT_HELD_LONG_ENOUGH.to_owned()))
        );
        let mut without_times = cupti_record_of_routine_pass(0, 7);
        without_times.kernels[0].end_ns = 0;
        assert_eq!(
            check_routine_pass_streams_with_cupti(&without_times, held),
            Ok(Some("CUPTI recorded no times of work on another stream".to_owned()))
        );
        let empty = CuptiRecordedActivity {
            kernels: Vec::new(),
            ..cupti_record_of_routine_pass(14 * NS_PER_MS, 0)
        };
        assert_eq!(
            check_routine_pass_streams_with_cupti(&empty, held),
            Ok(Some("CUPTI recorded nothing of the routine".to_owned()))
        );
        let unmarked = CuptiRecordedActivity {
            memsets: Vec::new(),
            ..cupti_record_of_routine_pass(11 * NS_PER_MS, 7)
        };
        assert!(check_routine_pass_streams_with_cupti(&unmarked, held).unwrap().is_some());
        let lost = CuptiRecordedActivity {
            dropped_records: 2,
            ..cupti_record_of_routine_pass(14 * NS_PER_MS, 0)
        };
        assert_eq!(
            check_routine_pass_streams_with_cupti(&lost, held),
            Ok(Some("CUPTI lost 2 records".to_owned()))
        );
    }

    #[test]
    fn an_incomplete_cupti_record_is_inconclusive_with_reason() {
        let empty = CuptiRecordedActivity {
            kernels: Vec::new(),
            ..record_of_blocker_kernel_and_clock_probe(0, 0)
        };
        let lacks = "CUPTI's record lacks `measure_blocker`".to_owned();
        assert_eq!(find_operation_outside_one_held_stream(&empty), Err(lacks));
        let lost = |start| CuptiRecordedActivity {
            dropped_records: 3,
            ..record_of_blocker_kernel_and_clock_probe(start, 15 * NS_PER_MS)
        };
        assert_eq!(
            find_operation_outside_one_held_stream(&lost(14 * NS_PER_MS)),
            Err("CUPTI lost 3 records".to_owned())
        );
        assert_eq!(
            find_operation_outside_one_held_stream(&lost(11 * NS_PER_MS)),
            Ok(Some(refusal_of_operation_on_another_stream("kernel `theirs`")))
        );
    }
}
