//! The samples of a process in order of measurement, and how they are matched to cases in
//! Criterion's store.
//!
//! Criterion does not name the case whose sample a measurement takes. The times in Criterion's
//! store identify the case of a sample, because they equal the measured times bit for bit.

use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::record::criterion_store::StoredCriterionCase;

/// Time between two events.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct GpuEventInterval {
    /// Nanoseconds.
    pub(super) ns: f64,
    /// Whether the GPU waited for the host when the sample ended.
    pub(super) drained: bool,
    /// Whether CUPTI's record of a pass shows that the routine works on no other stream.
    pub(super) recorded: bool,
    /// Whether the bench routine measured the time itself and passed it to Criterion
    /// (`iter_custom`).
    pub(super) by_routine: bool,
}

/// Makes a sample from a time that the routine measured itself with `iter_custom`. Criterion
/// reports a case timed by its routine; kernelgate does not record it, because nothing is known
/// about how it was measured.
impl From<Duration> for GpuEventInterval {
    fn from(elapsed: Duration) -> Self {
        Self { ns: elapsed.as_nanos() as f64, by_routine: true, ..Self::default() }
    }
}

/// Origin of the samples of a case in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleOrigin {
    /// This process took the samples; the field states whether host time is in most of them.
    Here {
        /// Number of samples in Criterion's store that this process measured: all of them, except
        /// that Criterion's quick mode may invent the second one.
        samples: usize,
        /// Whether the GPU waited for the host in most samples.
        host_bound: bool,
        /// Whether CUPTI recorded a pass of the routine at the latest with the last sample.
        recorded: bool,
    },
    /// The bench routine measured the time itself (`iter_custom`).
    ByRoutine,
    /// Another process or another measurement measured the samples.
    Elsewhere,
}

/// Log of all samples that a process measured.
#[derive(Debug, Clone)]
pub struct ProcessSampleLog {
    since: SystemTime,
    taken: Vec<GpuEventInterval>,
}

impl ProcessSampleLog {
    /// An empty log, for cases that Criterion will store in that folder.
    pub fn without_samples(store: &Path) -> ProcessSampleLog {
        // The start is read from the file system's clock, which need not be the host's.
        let there = store.ancestors().find(|folder| folder.is_dir());
        let probe = there.and_then(|folder| tempfile::tempfile_in(folder).ok());
        let since = probe.and_then(|file| file.metadata().ok()?.modified().ok());
        Self { since: since.unwrap_or_else(SystemTime::now), taken: Vec::new() }
    }

    /// Whether this process measured no sample.
    pub fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    /// Adds the next.
    pub fn add(&mut self, sample: GpuEventInterval) {
        self.taken.push(sample);
    }

    /// Determines which process measured a case's samples in Criterion's store, and how.
    pub fn origin(&self, case: &StoredCriterionCase) -> SampleOrigin {
        if case.written.is_some_and(|written| written < self.since) || case.times.is_empty() {
            return SampleOrigin::Elsewhere;
        }
        // Criterion's quick mode makes up the second sample of what takes too long for two.
        let made_up = matches!(*case.times, [first, second] if second == first.next_up());
        let times = if made_up { &case.times[..1] } else { &case.times };
        let same = |window: &&[GpuEventInterval]| {
            let pairs = window.iter().zip(times);
            pairs.into_iter().all(|(taken, time)| taken.ns.to_bits() == time.to_bits())
        };
        let Some(found) = self.taken.windows(times.len()).rfind(same) else {
            return SampleOrigin::Elsewhere;
        };
        if found.iter().any(|sample| sample.by_routine) {
            return SampleOrigin::ByRoutine;
        }
        let drained = found.iter().filter(|sample| sample.drained).count();
        // The first sample precedes the recorded pass where a warm-up has one pass.
        let recorded = found.last().is_some_and(|sample| sample.recorded);
        SampleOrigin::Here { samples: times.len(), host_bound: 2 * drained > times.len(), recorded }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored_case(times: &[f64]) -> StoredCriterionCase {
        StoredCriterionCase {
            group: "g".to_owned(),
            iterations: vec![1; times.len()],
            times: times.to_vec(),
            written: Some(SystemTime::now() + Duration::from_secs(1)),
        }
    }

    #[test]
    fn a_case_in_criterions_store_is_matched_by_its_times() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = ProcessSampleLog::without_samples(&folder.path().join("not/yet"));
        let sample = |ns| GpuEventInterval { ns, ..GpuEventInterval::default() };
        // Two cases, separated by a sample that was never stored.
        for ns in [10.0, 20.5, 30.0, 7.0] {
            log.add(sample(ns));
        }
        for ns in [1.0, 2.0, 3.0] {
            log.add(GpuEventInterval { drained: ns < 3.0, recorded: ns > 1.0, ..sample(ns) });
        }
        log.add(Duration::from_nanos(50).into());
        log.add(Duration::from_nanos(60).into());
        let origin = |times: &[f64]| log.origin(&stored_case(times));
        let here =
            |samples, host_bound, recorded| SampleOrigin::Here { samples, host_bound, recorded };
        assert_eq!(origin(&[10.0, 20.5, 30.0]), here(3, false, false));
        assert_eq!(origin(&[1.0, 2.0, 3.0]), here(3, true, true));
        assert_eq!(origin(&[50.0, 60.0]), SampleOrigin::ByRoutine);
        assert_eq!(origin(&[10.0, 20.5, 31.0]), SampleOrigin::Elsewhere);
        assert_eq!(origin(&[20.5, 10.0]), SampleOrigin::Elsewhere, "another order");
        let made_up = origin(&[7.0, 7.0_f64.next_up()]);
        assert_eq!(made_up, here(1, false, false), "the second was made up");
        let old = SystemTime::now() - Duration::from_secs(60);
        let earlier =
            StoredCriterionCase { written: Some(old), ..stored_case(&[10.0, 20.5, 30.0]) };
        assert_eq!(log.origin(&earlier), SampleOrigin::Elsewhere);
    }
}
