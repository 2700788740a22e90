//! Summarises recorded activity: GPU time by kernel, and host time by phase.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use kernelgate_cuda::observe::activity::CuptiRecordedActivity;

/// Number and total time of the recorded launches of one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchTimesOfKernel {
    /// Symbol of the kernel.
    #[serde(rename = "name")]
    pub kernel_symbol: String,
    /// Number of recorded launches of the kernel.
    #[serde(rename = "count")]
    pub launch_count: usize,
    /// Time of all recorded launches of the kernel, nanoseconds; launches that overlapped each
    /// count fully.
    #[serde(rename = "total_ns")]
    pub total_launch_ns: u64,
    /// Time of the kernel's shortest launch, nanoseconds.
    #[serde(rename = "shortest_ns")]
    pub shortest_launch_ns: u64,
    /// Time of the kernel's longest launch, nanoseconds.
    #[serde(rename = "longest_ns")]
    pub longest_launch_ns: u64,
}

/// Summary of recorded GPU activity: its total time, the time in which kernels ran, and the times
/// of each kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedKernelsSummary {
    /// Time from the first kernel's start to the last kernel's end, nanoseconds.
    pub span_ns: u64,
    /// Time during which at least one kernel ran, nanoseconds.
    pub busy_ns: u64,
    /// Longest first.
    pub kernels: Vec<LaunchTimesOfKernel>,
}

/// Largest plausible time or count in a summary; sums of such numbers stay exact enough.
const MAX_TIME_OR_COUNT_IN_SUMMARY: f64 = 1e15;

impl RecordedKernelsSummary {
    /// Fails if a time is negative, not finite or implausibly large.
    pub fn check_kernels_summary_plausible(&self) -> Result<(), String> {
        let kernel = |kernel: &LaunchTimesOfKernel| {
            [
                kernel.total_launch_ns,
                kernel.shortest_launch_ns,
                kernel.longest_launch_ns,
                kernel.launch_count as u64,
            ]
        };
        let each = self.kernels.iter().flat_map(kernel).chain([self.span_ns, self.busy_ns]);
        each.map(|number| number as f64).try_for_each(check_time_or_count_plausible)
    }

    /// Summarises recorded GPU activity, whose kernels must be ordered by their start.
    pub fn summarize_recorded_activity(activity: &CuptiRecordedActivity) -> RecordedKernelsSummary {
        let mut kernels: BTreeMap<&str, LaunchTimesOfKernel> = BTreeMap::new();
        let (mut busy_ns, mut busy_until) = (0, 0);
        for record in &activity.kernels {
            let ns = record.kernel_duration_ns();
            let name = activity.interned_names[record.name_index as usize].as_str();
            let kernel = kernels.entry(name).or_insert_with(|| LaunchTimesOfKernel {
                kernel_symbol: name.to_owned(),
                launch_count: 0,
                total_launch_ns: 0,
                shortest_launch_ns: u64::MAX,
                longest_launch_ns: 0,
            });
            kernel.launch_count += 1;
            kernel.total_launch_ns += ns;
            kernel.shortest_launch_ns = kernel.shortest_launch_ns.min(ns);
            kernel.longest_launch_ns = kernel.longest_launch_ns.max(ns);
            busy_ns += record.end_ns.saturating_sub(record.start_ns.max(busy_until));
            busy_until = busy_until.max(record.end_ns);
        }
        let mut kernels: Vec<LaunchTimesOfKernel> = kernels.into_values().collect();
        kernels.sort_by_key(|kernel| std::cmp::Reverse(kernel.total_launch_ns));
        let first = activity.kernels.first().map_or(0, |record| record.start_ns);
        Self { span_ns: busy_until.saturating_sub(first), busy_ns, kernels }
    }
}

/// Host time of one phase of a case, such as preparing the implementation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostTimeOfPhase {
    /// Name of the phase: "prepare", "first launch", "launch" or "outputs".
    #[serde(rename = "name")]
    pub phase: String,
    /// Number of times that the duration of the phase was measured.
    #[serde(rename = "count")]
    pub measurement_count: usize,
    /// Sum of the durations, nanoseconds.
    pub total_ns: f64,
    /// Shortest duration, nanoseconds.
    pub shortest_ns: f64,
    /// Longest duration, nanoseconds.
    pub longest_ns: f64,
    /// CPU time of the process divided by elapsed time: the average number of busy threads,
    /// including threads that spin while they wait. Absent if the operating system does not report
    /// CPU time.
    pub busy_threads: Option<f64>,
}

/// Fails if a time or count is negative, not a number or implausibly large.
fn check_time_or_count_plausible(number: f64) -> Result<(), String> {
    if (0.0..=MAX_TIME_OR_COUNT_IN_SUMMARY).contains(&number) {
        Ok(())
    } else {
        Err(format!("a time of {number} ns"))
    }
}

impl HostTimeOfPhase {
    /// Fails if a time is negative, not finite or implausibly large.
    pub fn check_host_phase_plausible(&self) -> Result<(), String> {
        let Self {
            total_ns, shortest_ns, longest_ns, busy_threads, measurement_count: count, ..
        } = *self;
        [total_ns, shortest_ns, longest_ns, busy_threads.unwrap_or(0.0), count as f64]
            .into_iter()
            .try_for_each(check_time_or_count_plausible)
    }

    /// Summarises the durations of a phase, nanoseconds, at least one; `cpu_ns` is the CPU time
    /// that the process used in them.
    pub fn summarize_durations_of_phase(
        name: &str,
        elapsed_ns: &[f64],
        cpu_ns: Option<f64>,
    ) -> HostTimeOfPhase {
        let total_ns: f64 = elapsed_ns.iter().sum();
        Self {
            phase: name.to_owned(),
            measurement_count: elapsed_ns.len(),
            total_ns,
            shortest_ns: elapsed_ns.iter().copied().fold(f64::INFINITY, f64::min),
            longest_ns: elapsed_ns.iter().copied().fold(0.0, f64::max),
            busy_threads: cpu_ns.filter(|_| total_ns > 0.0).map(|cpu_ns| cpu_ns / total_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate_cuda::observe::activity::KernelRecord;

    #[test]
    fn concurrent_kernels_count_once_as_busy_and_fully_in_totals() {
        let record = |name, start, end| KernelRecord {
            name_index: name,
            start_ns: start,
            end_ns: end,
            ..KernelRecord::default()
        };
        let summary = RecordedKernelsSummary::summarize_recorded_activity(&CuptiRecordedActivity {
            interned_names: vec!["a".to_owned(), "b".to_owned()],
            kernels: vec![
                record(0, 100, 200),
                record(1, 150, 250),
                record(0, 300, 320),
                record(1, 305, 310),
            ],
            ..CuptiRecordedActivity::default()
        });
        assert_eq!((summary.span_ns, summary.busy_ns), (220, 170));
        let times: Vec<_> = summary
            .kernels
            .iter()
            .map(|k| {
                (
                    k.kernel_symbol.as_str(),
                    k.launch_count,
                    k.total_launch_ns,
                    k.shortest_launch_ns,
                    k.longest_launch_ns,
                )
            })
            .collect();
        assert_eq!(times, [("a", 2, 120, 20, 100), ("b", 2, 105, 5, 100)]);
        assert_eq!(
            RecordedKernelsSummary::summarize_recorded_activity(&CuptiRecordedActivity::default()),
            RecordedKernelsSummary { span_ns: 0, busy_ns: 0, kernels: vec![] }
        );
    }

    #[test]
    fn a_host_phase_records_its_extreme_times_and_busy_threads() {
        let phase = HostTimeOfPhase::summarize_durations_of_phase(
            "launch",
            &[10.0, 30.0, 20.0],
            Some(90.0),
        );
        assert_eq!((phase.measurement_count, phase.total_ns), (3, 60.0));
        assert_eq!((phase.shortest_ns, phase.longest_ns), (10.0, 30.0));
        assert_eq!(phase.busy_threads, Some(1.5));
    }
}
