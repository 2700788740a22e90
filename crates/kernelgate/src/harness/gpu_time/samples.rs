//! Logs the samples that a process measured, and matches them with the cases in Criterion's store.
//!
//! Criterion does not pass the case of a sample to the measurement. The times in Criterion's
//! store identify the case of each sample, because they equal the measured times bit for bit.

use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::record::criterion_store::CaseInCriterionStore;

/// A sample of Criterion: GPU time between two CUDA events.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GpuTimeSample {
    /// Elapsed time of the GPU time sample, nanoseconds.
    pub(super) elapsed_ns: f64,
    /// Whether the GPU had finished and waited for the host when the sample ended.
    pub(super) gpu_drained_before_end: bool,
    /// Whether CUPTI's record of a pass shows that the routine uses only the timed stream.
    pub(super) cupti_record_was_conclusive: bool,
    /// Whether the routine measured the time itself and passed it to Criterion (`iter_custom`).
    pub(super) timed_by_routine: bool,
}

/// Makes a sample from a time that the routine measured itself with `iter_custom`. Criterion
/// reports such a case, but kernelgate does not record it, because it cannot know how the time was
/// measured.
impl From<Duration> for GpuTimeSample {
    fn from(elapsed: Duration) -> Self {
        Self { elapsed_ns: elapsed.as_nanos() as f64, timed_by_routine: true, ..Self::default() }
    }
}

/// Origin of the samples of a case in Criterion's store: the process or routine that took them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhoMeasuredStoredSamples {
    /// This process measured the samples.
    MeasuredByThisProcess {
        /// Number of stored samples that this process measured: all, except a second sample that
        /// Criterion's quick mode invents.
        measured_sample_count: usize,
        /// Whether the GPU waited for the host at the end of most samples.
        gpu_waited_for_host: bool,
        /// Whether CUPTI's record of a pass was conclusive by the last sample of the case.
        cupti_record_was_conclusive: bool,
    },
    /// The routine measured the time itself (`iter_custom`).
    TimedByRoutineItself,
    /// Another process, or another measurement, took the samples.
    MeasuredByAnotherProcess,
}

/// Log of all samples that this process measured, in order.
#[derive(Debug, Clone)]
pub struct LogOfMeasuredSamples {
    start_time: SystemTime,
    samples: Vec<GpuTimeSample>,
}

impl LogOfMeasuredSamples {
    /// Creates an empty log for cases that Criterion will store in the folder `store`.
    pub fn empty_log_for_store(store: &Path) -> LogOfMeasuredSamples {
        // The start time is read from a new file in the store, because the file system's clock may
        // differ from the host's clock.
        let there = store.ancestors().find(|folder| folder.is_dir());
        let probe = there.and_then(|folder| tempfile::tempfile_in(folder).ok());
        let since = probe.and_then(|file| file.metadata().ok()?.modified().ok());
        Self { start_time: since.unwrap_or_else(SystemTime::now), samples: Vec::new() }
    }

    /// Whether this process has measured no sample.
    pub fn has_no_samples(&self) -> bool {
        self.samples.is_empty()
    }

    /// Adds the next.
    pub fn add_sample(&mut self, sample: GpuTimeSample) {
        self.samples.push(sample);
    }

    /// Determines who measured the samples of a case in Criterion's store, by comparing their times
    /// with the log.
    pub fn origin_of_stored_samples(
        &self,
        case: &CaseInCriterionStore,
    ) -> WhoMeasuredStoredSamples {
        if case.samples_file_write_time.is_some_and(|written| written < self.start_time)
            || case.sample_times.is_empty()
        {
            return WhoMeasuredStoredSamples::MeasuredByAnotherProcess;
        }
        // Criterion's quick mode invents the second sample of a case that takes too long for two.
        let made_up = matches!(*case.sample_times, [first, second] if second == first.next_up());
        let times = if made_up { &case.sample_times[..1] } else { &case.sample_times };
        let same = |window: &&[GpuTimeSample]| {
            let pairs = window.iter().zip(times);
            pairs.into_iter().all(|(taken, time)| taken.elapsed_ns.to_bits() == time.to_bits())
        };
        let Some(found) = self.samples.windows(times.len()).rfind(same) else {
            return WhoMeasuredStoredSamples::MeasuredByAnotherProcess;
        };
        if found.iter().any(|sample| sample.timed_by_routine) {
            return WhoMeasuredStoredSamples::TimedByRoutineItself;
        }
        let drained = found.iter().filter(|sample| sample.gpu_drained_before_end).count();
        // If the warm-up had only one pass, the first sample was taken before the pass that CUPTI
        // recorded.
        let recorded = found.last().is_some_and(|sample| sample.cupti_record_was_conclusive);
        WhoMeasuredStoredSamples::MeasuredByThisProcess {
            measured_sample_count: times.len(),
            gpu_waited_for_host: 2 * drained > times.len(),
            cupti_record_was_conclusive: recorded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored_case_with_times(times: &[f64]) -> CaseInCriterionStore {
        CaseInCriterionStore {
            criterion_group_name: "g".to_owned(),
            iterations_per_sample: vec![1; times.len()],
            sample_times: times.to_vec(),
            samples_file_write_time: Some(SystemTime::now() + Duration::from_secs(1)),
        }
    }

    #[test]
    fn stored_cases_are_recognised_by_their_times() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = LogOfMeasuredSamples::empty_log_for_store(&folder.path().join("not/yet"));
        let sample = |ns| GpuTimeSample { elapsed_ns: ns, ..GpuTimeSample::default() };
        // The test logs two cases, separated by a sample that Criterion never stored.
        for ns in [10.0, 20.5, 30.0, 7.0] {
            log.add_sample(sample(ns));
        }
        for ns in [1.0, 2.0, 3.0] {
            log.add_sample(GpuTimeSample {
                gpu_drained_before_end: ns < 3.0,
                cupti_record_was_conclusive: ns > 1.0,
                ..sample(ns)
            });
        }
        log.add_sample(Duration::from_nanos(50).into());
        log.add_sample(Duration::from_nanos(60).into());
        let origin = |times: &[f64]| log.origin_of_stored_samples(&stored_case_with_times(times));
        let here =
            |samples, host_bound, recorded| WhoMeasuredStoredSamples::MeasuredByThisProcess {
                measured_sample_count: samples,
                gpu_waited_for_host: host_bound,
                cupti_record_was_conclusive: recorded,
            };
        assert_eq!(origin(&[10.0, 20.5, 30.0]), here(3, false, false));
        assert_eq!(origin(&[1.0, 2.0, 3.0]), here(3, true, true));
        assert_eq!(origin(&[50.0, 60.0]), WhoMeasuredStoredSamples::TimedByRoutineItself);
        assert_eq!(origin(&[10.0, 20.5, 31.0]), WhoMeasuredStoredSamples::MeasuredByAnotherProcess);
        assert_eq!(
            origin(&[20.5, 10.0]),
            WhoMeasuredStoredSamples::MeasuredByAnotherProcess,
            "another order"
        );
        let made_up = origin(&[7.0, 7.0_f64.next_up()]);
        assert_eq!(made_up, here(1, false, false), "the second was made up");
        let old = SystemTime::now() - Duration::from_secs(60);
        let earlier = CaseInCriterionStore {
            samples_file_write_time: Some(old),
            ..stored_case_with_times(&[10.0, 20.5, 30.0])
        };
        assert_eq!(
            log.origin_of_stored_samples(&earlier),
            WhoMeasuredStoredSamples::MeasuredByAnotherProcess
        );
    }
}
