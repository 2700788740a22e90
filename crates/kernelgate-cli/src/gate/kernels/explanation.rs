//! Explains why a case became slower: machine code, launches, clock, host, or an unknown cause. The
//! evidence of an explanation is the machine code of both builds, one profile of each, and the SM
//! clock.
//!
//! An explanation is printed beside a verdict and does not change it, because one profile of each
//! build is not statistical evidence.

use serde::{Deserialize, Serialize};

use super::code::CaseKernelComparison;
use crate::gate::paired::PairedDecisionOnCase;
use kernelgate::display::time_text;
use kernelgate::protocol::CaseProfileResponse;
use kernelgate::trace::{HostTimeOfPhase, LaunchTimesOfKernel, RecordedKernelsSummary};

/// Relative difference between the single profiles of base and head up to which a kernel's time is
/// not reported.
const MAX_UNREPORTED_KERNEL_TIME_CHANGE: f64 = 0.05;
/// Relative decrease of the SM clock in the head from which an explanation reports it.
const MIN_REPORTED_CLOCK_DECREASE: f64 = 0.01;
/// Largest number of observations (kernels or phases) that an explanation names for a cause.
const MAX_NAMED_OBSERVATIONS: usize = 4;

/// A cause of a case's slow-down that the machine code, the profiles or the SM clock show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlowdownCause {
    /// The machine code of a kernel changed between base and head.
    #[serde(rename = "code")]
    CodeChanged,
    /// The number or shapes of launches changed, or other kernels are launched.
    #[serde(rename = "launches")]
    LaunchesChanged,
    /// A kernel takes longer although its machine code did not change or is unknown.
    #[serde(rename = "kernels")]
    SlowerKernels,
    /// The SM clock of the GPU differs between base and head.
    #[serde(rename = "clock")]
    ClockChanged,
    /// The host's code takes longer, or the GPU is idle for longer between kernels.
    #[serde(rename = "host")]
    SlowerHost,
}

impl SlowdownCause {
    /// Returns the name of the cause of a slow-down for messages.
    pub const fn cause_name(self) -> &'static str {
        match self {
            Self::CodeChanged => "code",
            Self::LaunchesChanged => "launches",
            Self::SlowerKernels => "the time of its kernels",
            Self::ClockChanged => "clock",
            Self::SlowerHost => "host",
        }
    }
}

/// The explanation of a case's slow-down, as far as machine code, SM clock and one profile of each
/// build show it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowdownExplanation {
    /// Causes of the slow-down that were found; empty if the cause is unknown.
    pub causes: Vec<SlowdownCause>,
    /// Observations in machine code, clock and profiles that show the causes, as texts.
    #[serde(rename = "evidence")]
    pub evidence_of_causes: Vec<String>,
    /// Whether the machine code and launch shapes of all the case's kernels are equal in both
    /// builds.
    pub identical_code: bool,
    /// The reason why a build could not be profiled; `None` if both were.
    #[serde(rename = "not_profiled")]
    pub why_not_profiled: Option<String>,
}

impl SlowdownExplanation {
    /// Formats the explanation as text: "changed: code, launches; registers 96 -> 128; 1 -> 2
    /// launches". If the profiles do not differ although the case is slower, the text states that
    /// the cause is unknown.
    pub fn explanation_text(&self) -> String {
        let causes: Vec<&str> = self.causes.iter().map(|cause| cause.cause_name()).collect();
        let identical = "slower with identical machine code".to_owned();
        let unknown = "cause unknown: one profile of each build does not show the slow-down";
        let found = match (causes.is_empty(), &self.why_not_profiled) {
            (false, _) => Some(format!("changed: {}", causes.join(", "))),
            (true, None) => Some(unknown.to_owned()),
            (true, Some(_)) => None,
        };
        let mut parts: Vec<String> = self.identical_code.then_some(identical).into_iter().collect();
        parts.extend(found);
        parts.extend(self.evidence_of_causes.iter().cloned());
        parts.extend(self.why_not_profiled.iter().map(|why| format!("not profiled: {why}")));
        parts.join("; ")
    }
}

/// Explains a regressed case by its machine code, if known, and by the profiles of base and head,
/// or the reason why a profile is missing.
pub fn explain_slowdown(
    decision: &PairedDecisionOnCase,
    code: Option<&CaseKernelComparison>,
    profiles: Result<[&CaseProfileResponse; 2], String>,
) -> SlowdownExplanation {
    let mut explanation = SlowdownExplanation {
        identical_code: code.is_some_and(CaseKernelComparison::is_code_known_to_be_identical),
        ..SlowdownExplanation::default()
    };
    if let Some(code) = code {
        explanation
            .add_cause_with_evidence(SlowdownCause::CodeChanged, &code.code_difference_lines);
        explanation
            .add_cause_with_evidence(SlowdownCause::LaunchesChanged, &code.launch_difference_lines);
    }
    match profiles {
        Ok([base, head]) => match (&base.summary, &head.summary) {
            (Some(base), Some(head)) => explanation.compare_kernel_profiles(base, head),
            _ if !base.phases.is_empty() && !head.phases.is_empty() => {
                explanation.compare_host_phases(&base.phases, &head.phases);
            }
            _ => {
                let reason = head
                    .reason_without_full_profile
                    .as_ref()
                    .or(base.reason_without_full_profile.as_ref());
                let reason = reason.map_or("nothing was recorded", String::as_str);
                explanation.why_not_profiled = Some(reason.to_owned());
            }
        },
        Err(why) => explanation.why_not_profiled = Some(why),
    }
    if let Some(cycles) = &decision.cycle_ratio {
        // The growth of the time beyond the growth of the clock cycles is due to a lower SM clock.
        let shift = decision.ratio.estimated_ratio / cycles.estimated_ratio - 1.0;
        if shift > MIN_REPORTED_CLOCK_DECREASE {
            let words = format!("SM clock {:.1}% lower in the head", 100.0 * shift / (1.0 + shift));
            explanation.add_cause_with_evidence(SlowdownCause::ClockChanged, &[words]);
        }
    }
    explanation
}

impl SlowdownExplanation {
    fn add_cause_with_evidence(&mut self, cause: SlowdownCause, evidence: &[String]) {
        if evidence.is_empty() {
            return;
        }
        if !self.causes.contains(&cause) {
            self.causes.push(cause);
            self.causes.sort_unstable();
        }
        self.evidence_of_causes.extend(evidence.iter().take(MAX_NAMED_OBSERVATIONS).cloned());
        if evidence.len() > MAX_NAMED_OBSERVATIONS {
            self.evidence_of_causes
                .push(format!("{} more", evidence.len() - MAX_NAMED_OBSERVATIONS));
        }
    }

    fn compare_kernel_profiles(
        &mut self,
        base: &RecordedKernelsSummary,
        head: &RecordedKernelsSummary,
    ) {
        let find = |summary: &RecordedKernelsSummary, name: &str| {
            summary.kernels.iter().find(|kernel| kernel.kernel_symbol == name).cloned()
        };
        let launches = |summary: &RecordedKernelsSummary| {
            summary.kernels.iter().map(|it| it.launch_count).sum::<usize>()
        };
        let mut counts = Vec::new();
        if launches(base) != launches(head) {
            counts.push(format!("{} -> {} kernels a launch", launches(base), launches(head)));
        }
        let mut times: Vec<(u64, String)> = Vec::new();
        for kernel in &head.kernels {
            let Some(before) = find(base, &kernel.kernel_symbol) else {
                counts.push(format!(
                    "{} appeared, {}",
                    kernel.kernel_symbol,
                    time_text(kernel.total_launch_ns as f64)
                ));
                continue;
            };
            if before.launch_count != kernel.launch_count {
                counts.push(format!(
                    "{} {} -> {} times",
                    kernel.kernel_symbol, before.launch_count, kernel.launch_count
                ));
            }
            let [was, is] = [&before, kernel].map(mean_kernel_launch_ns);
            // A kernel that adds less than one per cent of the base's time does not explain the
            // slow-down.
            let grown = kernel.total_launch_ns.saturating_sub(before.total_launch_ns);
            if is > was * (1.0 + MAX_UNREPORTED_KERNEL_TIME_CHANGE)
                && grown as f64 > 0.01 * base.span_ns as f64
            {
                let words = format!(
                    "{} {} -> {} each",
                    kernel.kernel_symbol,
                    time_text(was),
                    time_text(is)
                );
                times.push((grown, words));
            }
        }
        for kernel in
            base.kernels.iter().filter(|kernel| find(head, &kernel.kernel_symbol).is_none())
        {
            counts.push(format!(
                "{} vanished, {}",
                kernel.kernel_symbol,
                time_text(kernel.total_launch_ns as f64)
            ));
        }
        self.add_cause_with_evidence(SlowdownCause::LaunchesChanged, &counts);
        times.sort_by_key(|(grown, _)| std::cmp::Reverse(*grown));
        let times: Vec<String> = times.into_iter().map(|(_, words)| words).collect();
        // If the machine code changed, longer kernel times are attributed to the code and not
        // listed as a separate cause.
        let cause = if self.causes.contains(&SlowdownCause::CodeChanged) {
            SlowdownCause::CodeChanged
        } else {
            SlowdownCause::SlowerKernels
        };
        self.add_cause_with_evidence(cause, &times);
        let idle =
            |summary: &RecordedKernelsSummary| summary.span_ns.saturating_sub(summary.busy_ns);
        if idle(head) as f64
            > idle(base) as f64 + MAX_UNREPORTED_KERNEL_TIME_CHANGE * base.span_ns as f64
        {
            let [was, is] = [idle(base), idle(head)].map(|ns| time_text(ns as f64));
            self.add_cause_with_evidence(
                SlowdownCause::SlowerHost,
                &[format!("no kernel running {was} -> {is}")],
            );
        }
    }

    fn compare_host_phases(&mut self, base: &[HostTimeOfPhase], head: &[HostTimeOfPhase]) {
        let launch =
            |phases: &[HostTimeOfPhase]| phases.iter().find(|it| it.phase == "launch").cloned();
        let (Some(base), Some(head)) = (launch(base), launch(head)) else { return };
        let [was, is] =
            [&base, &head].map(|phase| phase.total_ns / phase.measurement_count.max(1) as f64);
        if is <= was * (1.0 + MAX_UNREPORTED_KERNEL_TIME_CHANGE) {
            return;
        }
        let mut evidence = vec![format!("a launch {} -> {}", time_text(was), time_text(is))];
        if let (Some(was), Some(is)) = (base.busy_threads, head.busy_threads)
            && (was - is).abs() > 0.1 * was
        {
            evidence.push(format!("busy threads {was:.1} -> {is:.1}"));
        }
        self.add_cause_with_evidence(SlowdownCause::SlowerHost, &evidence);
    }
}

fn mean_kernel_launch_ns(kernel: &LaunchTimesOfKernel) -> f64 {
    kernel.total_launch_ns as f64 / kernel.launch_count.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::super::code::tests::{make_kernel_spill, test_kernel_with_change};
    use super::*;
    use crate::gate::paired::tests::test_decision;
    use crate::gate::ratio_interval::TimeRatioWithInterval;
    use crate::gate::verdict::VerdictOnCase;
    use kernelgate::protocol::BenchCaseStatus;

    fn test_slower_decision(by: f64, cycles: Option<f64>) -> PairedDecisionOnCase {
        let ratio = |center| TimeRatioWithInterval {
            estimated_ratio: center,
            ratio_low: center,
            ratio_high: center,
        };
        let (ratio, cycles) = (ratio(by), cycles.map(ratio));
        PairedDecisionOnCase {
            ratio,
            cycle_ratio: cycles,
            ..test_decision("x", VerdictOnCase::Regressed)
        }
    }

    /// Makes a test profile of a case from name, number of launches and nanoseconds of each kernel,
    /// and an idle time.
    fn test_profile_of_kernels(
        kernels: &[(&str, usize, u64)],
        idle_ns: u64,
    ) -> CaseProfileResponse {
        let kernels: Vec<LaunchTimesOfKernel> = kernels
            .iter()
            .map(|&(name, count, each)| LaunchTimesOfKernel {
                kernel_symbol: name.to_owned(),
                launch_count: count,
                total_launch_ns: each * count as u64,
                shortest_launch_ns: each,
                longest_launch_ns: each,
            })
            .collect();
        let busy_ns = kernels.iter().map(|kernel| kernel.total_launch_ns).sum();
        CaseProfileResponse {
            case_id: "x".to_owned(),
            status: BenchCaseStatus::Ok,
            summary: Some(RecordedKernelsSummary { span_ns: busy_ns + idle_ns, busy_ns, kernels }),
            phases: Vec::new(),
            items_per_launch: None,
            recording: None,
            reason_without_full_profile: None,
        }
    }

    fn explain_test_profiles(
        base: &CaseProfileResponse,
        head: &CaseProfileResponse,
    ) -> SlowdownExplanation {
        explain_slowdown(&test_slower_decision(1.4, None), None, Ok([base, head]))
    }

    #[test]
    fn a_spill_in_the_head_explains_a_slow_down_by_code() {
        let code = CaseKernelComparison::compare_used_kernels(
            &test_kernel_with_change("f/spin", |_| {}),
            &test_kernel_with_change("f/spin", make_kernel_spill),
        );
        let (base, head) = (
            test_profile_of_kernels(&[("spin", 1, 10_000)], 0),
            test_profile_of_kernels(&[("spin", 1, 14_000)], 0),
        );
        let found = explain_slowdown(
            &test_slower_decision(1.4, Some(1.4)),
            Some(&code),
            Ok([&base, &head]),
        );
        assert_eq!(found.causes, [SlowdownCause::CodeChanged]);
        assert_eq!(
            found.explanation_text(),
            "changed: code; f/spin: stack bytes 0 -> 48, registers 96 -> 128; spin 10.00 µs -> \
             14.00 µs each"
        );
    }

    #[test]
    fn an_additional_launch_explains_a_slow_down() {
        let base = test_profile_of_kernels(&[("a", 1, 10_000)], 0);
        let head = test_profile_of_kernels(&[("a", 1, 10_000), ("b", 2, 2_000)], 0);
        let found = explain_test_profiles(&base, &head);
        assert_eq!(found.causes, [SlowdownCause::LaunchesChanged]);
        assert_eq!(found.evidence_of_causes, ["1 -> 3 kernels a launch", "b appeared, 4.000 µs"]);
        let gone = explain_test_profiles(&head, &base);
        assert_eq!(gone.evidence_of_causes[1], "b vanished, 4.000 µs");
    }

    #[test]
    fn with_identical_code_a_lower_clock_and_host_time_are_distinguished() {
        let same = CaseKernelComparison::compare_used_kernels(
            &test_kernel_with_change("a", |_| {}),
            &test_kernel_with_change("a", |_| {}),
        );
        let base = test_profile_of_kernels(&[("a", 1, 10_000)], 0);
        let longer = test_profile_of_kernels(&[("a", 1, 12_000)], 0);
        let clock = explain_slowdown(
            &test_slower_decision(1.2, Some(1.0)),
            Some(&same),
            Ok([&base, &longer]),
        );
        assert_eq!(clock.causes, [SlowdownCause::SlowerKernels, SlowdownCause::ClockChanged]);
        insta::assert_snapshot!(clock.explanation_text(), @"slower with identical machine code; changed: the time of its kernels, clock; a 10.00 µs -> 12.00 µs each; SM clock 16.7% lower in the head");
        let idle =
            explain_test_profiles(&base, &test_profile_of_kernels(&[("a", 1, 10_000)], 4_000));
        assert_eq!(
            (idle.causes, idle.evidence_of_causes.len()),
            (vec![SlowdownCause::SlowerHost], 1)
        );
        let noise = explain_test_profiles(&base, &test_profile_of_kernels(&[("a", 1, 10_100)], 10));
        let words = "cause unknown: one profile of each build does not show the slow-down";
        assert_eq!(noise.explanation_text(), words);
    }

    #[test]
    fn a_host_case_shows_its_launch_and_a_failed_profile_its_reason() {
        let phases = |ns: f64, threads: f64| CaseProfileResponse {
            summary: None,
            phases: vec![HostTimeOfPhase::summarize_durations_of_phase(
                "launch",
                &[ns, ns],
                Some(2.0 * ns * threads),
            )],
            ..test_profile_of_kernels(&[], 0)
        };
        let found = explain_test_profiles(&phases(1e6, 2.0), &phases(2e6, 1.0));
        assert_eq!(found.causes, [SlowdownCause::SlowerHost]);
        assert_eq!(
            found.evidence_of_causes,
            ["a launch 1.000 ms -> 2.000 ms", "busy threads 2.0 -> 1.0"]
        );
        let lost =
            explain_slowdown(&test_slower_decision(1.4, None), None, Err("it hung".to_owned()));
        assert_eq!(lost.explanation_text(), "not profiled: it hung");
    }
}
