//! Explains why a case got slower: code, launches, clock, host, or an unknown cause. The evidence
//! is the machine code of both builds, one profile of each, and the SM clock.
//!
//! An explanation is printed beside a verdict and does not change it, because one profile of each
//! build is not a measurement.

use serde::{Deserialize, Serialize};

use super::code::CodeComparison;
use crate::gate::paired::PairedDecision;
use kernelgate::display::time_text;
use kernelgate::protocol::ProfiledCase;
use kernelgate::trace::{HostPhaseTime, KernelTimeSum, RecordedIntervalSummary};

/// Largest relative change between two profiles of one launch each that is not reported.
const MIN_REPORTED_PROFILE_CHANGE: f64 = 0.05;
/// Relative change of the SM clock from which the explanation reports it.
const REPORTED_CLOCK_CHANGE: f64 = 0.01;
/// Largest number of kernels and phases that are named.
const MAX_NAMED_KERNELS: usize = 4;

/// A cause of a slow-down that profiles can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlowdownCause {
    /// The machine code of a kernel changed.
    Code,
    /// Number or shapes of launches, or which kernels are launched.
    Launches,
    /// A kernel takes longer although its machine code is unchanged or unknown.
    Kernels,
    /// The SM clock.
    Clock,
    /// The host's code, or the time between kernels, takes longer.
    Host,
}

impl SlowdownCause {
    /// The name in messages.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Code => "code",
            Self::Launches => "launches",
            Self::Kernels => "the time of its kernels",
            Self::Clock => "clock",
            Self::Host => "host",
        }
    }
}

/// The reasons why a case is slower, as far as one profile of each build shows them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeExplanation {
    /// Causes that were found; empty if the cause is unknown.
    pub causes: Vec<SlowdownCause>,
    /// Observations in the profiles that show the causes.
    pub evidence: Vec<String>,
    /// Whether machine code and launch shapes of all kernels of the case are equal in both builds.
    pub identical_code: bool,
    /// The reason why a build has no profile.
    pub not_profiled: Option<String>,
}

impl ChangeExplanation {
    /// The explanation in words: "changed: code, launches; registers 96 -> 128; 1 -> 2 launches".
    /// The case is slower, so if the profiles do not differ, the cause is unknown.
    pub fn words(&self) -> String {
        let causes: Vec<&str> = self.causes.iter().map(|cause| cause.words()).collect();
        let identical = "slower with identical machine code".to_owned();
        let unknown = "cause unknown: one profile of each build does not show the slow-down";
        let found = match (causes.is_empty(), &self.not_profiled) {
            (false, _) => Some(format!("changed: {}", causes.join(", "))),
            (true, None) => Some(unknown.to_owned()),
            (true, Some(_)) => None,
        };
        let mut parts: Vec<String> = self.identical_code.then_some(identical).into_iter().collect();
        parts.extend(found);
        parts.extend(self.evidence.iter().cloned());
        parts.extend(self.not_profiled.iter().map(|why| format!("not profiled: {why}")));
        parts.join("; ")
    }
}

/// Explains a case, whose machine code may be unknown, by profiles of base and head or the reason
/// why a profile is missing.
pub fn explain_change(
    decision: &PairedDecision,
    code: Option<&CodeComparison>,
    profiles: Result<[&ProfiledCase; 2], String>,
) -> ChangeExplanation {
    let mut explanation = ChangeExplanation {
        identical_code: code.is_some_and(CodeComparison::is_same),
        ..ChangeExplanation::default()
    };
    if let Some(code) = code {
        explanation.note(SlowdownCause::Code, &code.code);
        explanation.note(SlowdownCause::Launches, &code.launches);
    }
    match profiles {
        Ok([base, head]) => match (&base.summary, &head.summary) {
            (Some(base), Some(head)) => explanation.compare_kernels(base, head),
            _ if !base.phases.is_empty() && !head.phases.is_empty() => {
                explanation.compare_phases(&base.phases, &head.phases);
            }
            _ => {
                let reason = head.reason.as_ref().or(base.reason.as_ref());
                let reason = reason.map_or("nothing was recorded", String::as_str);
                explanation.not_profiled = Some(reason.to_owned());
            }
        },
        Err(why) => explanation.not_profiled = Some(why),
    }
    if let Some(cycles) = &decision.cycles {
        // Growth of the time beyond that of the clock cycles, which is due to a lower clock.
        let shift = decision.ratio.center / cycles.center - 1.0;
        if shift > REPORTED_CLOCK_CHANGE {
            let words = format!("SM clock {:.1}% lower in the head", 100.0 * shift / (1.0 + shift));
            explanation.note(SlowdownCause::Clock, &[words]);
        }
    }
    explanation
}

impl ChangeExplanation {
    fn note(&mut self, cause: SlowdownCause, evidence: &[String]) {
        if evidence.is_empty() {
            return;
        }
        if !self.causes.contains(&cause) {
            self.causes.push(cause);
            self.causes.sort_unstable();
        }
        self.evidence.extend(evidence.iter().take(MAX_NAMED_KERNELS).cloned());
        if evidence.len() > MAX_NAMED_KERNELS {
            self.evidence.push(format!("{} more", evidence.len() - MAX_NAMED_KERNELS));
        }
    }

    fn compare_kernels(&mut self, base: &RecordedIntervalSummary, head: &RecordedIntervalSummary) {
        let find = |summary: &RecordedIntervalSummary, name: &str| {
            summary.kernels.iter().find(|kernel| kernel.name == name).cloned()
        };
        let launches = |summary: &RecordedIntervalSummary| {
            summary.kernels.iter().map(|it| it.count).sum::<usize>()
        };
        let mut counts = Vec::new();
        if launches(base) != launches(head) {
            counts.push(format!("{} -> {} kernels a launch", launches(base), launches(head)));
        }
        let mut times: Vec<(u64, String)> = Vec::new();
        for kernel in &head.kernels {
            let Some(before) = find(base, &kernel.name) else {
                counts.push(format!(
                    "{} appeared, {}",
                    kernel.name,
                    time_text(kernel.total_ns as f64)
                ));
                continue;
            };
            if before.count != kernel.count {
                counts.push(format!("{} {} -> {} times", kernel.name, before.count, kernel.count));
            }
            let [was, is] = [&before, kernel].map(mean_ns);
            // A kernel with a small share of the time explains no slow-down.
            let grown = kernel.total_ns.saturating_sub(before.total_ns);
            if is > was * (1.0 + MIN_REPORTED_PROFILE_CHANGE)
                && grown as f64 > 0.01 * base.span_ns as f64
            {
                let words = format!("{} {} -> {} each", kernel.name, time_text(was), time_text(is));
                times.push((grown, words));
            }
        }
        for kernel in base.kernels.iter().filter(|kernel| find(head, &kernel.name).is_none()) {
            counts.push(format!("{} vanished, {}", kernel.name, time_text(kernel.total_ns as f64)));
        }
        self.note(SlowdownCause::Launches, &counts);
        times.sort_by_key(|(grown, _)| std::cmp::Reverse(*grown));
        let times: Vec<String> = times.into_iter().map(|(_, words)| words).collect();
        // If the code is known to differ, that is why its kernels take longer.
        let cause = if self.causes.contains(&SlowdownCause::Code) {
            SlowdownCause::Code
        } else {
            SlowdownCause::Kernels
        };
        self.note(cause, &times);
        let idle =
            |summary: &RecordedIntervalSummary| summary.span_ns.saturating_sub(summary.busy_ns);
        if idle(head) as f64 > idle(base) as f64 + MIN_REPORTED_PROFILE_CHANGE * base.span_ns as f64
        {
            let [was, is] = [idle(base), idle(head)].map(|ns| time_text(ns as f64));
            self.note(SlowdownCause::Host, &[format!("no kernel running {was} -> {is}")]);
        }
    }

    fn compare_phases(&mut self, base: &[HostPhaseTime], head: &[HostPhaseTime]) {
        let launch =
            |phases: &[HostPhaseTime]| phases.iter().find(|it| it.name == "launch").cloned();
        let (Some(base), Some(head)) = (launch(base), launch(head)) else { return };
        let [was, is] = [&base, &head].map(|phase| phase.total_ns / phase.count.max(1) as f64);
        if is <= was * (1.0 + MIN_REPORTED_PROFILE_CHANGE) {
            return;
        }
        let mut evidence = vec![format!("a launch {} -> {}", time_text(was), time_text(is))];
        if let (Some(was), Some(is)) = (base.busy_threads, head.busy_threads)
            && (was - is).abs() > 0.1 * was
        {
            evidence.push(format!("busy threads {was:.1} -> {is:.1}"));
        }
        self.note(SlowdownCause::Host, &evidence);
    }
}

fn mean_ns(kernel: &KernelTimeSum) -> f64 {
    kernel.total_ns as f64 / kernel.count.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::super::code::tests::{kernels, make_kernel_spill};
    use super::*;
    use crate::gate::paired::tests::decision;
    use crate::gate::ratio_interval::TimeRatio;
    use crate::gate::verdict::Verdict;
    use kernelgate::protocol::CaseStatus;

    fn slower_decision(by: f64, cycles: Option<f64>) -> PairedDecision {
        let ratio = |center| TimeRatio { center, low: center, high: center };
        let (ratio, cycles) = (ratio(by), cycles.map(ratio));
        PairedDecision { ratio, cycles, ..decision("x", Verdict::Regressed) }
    }

    /// A profile of a case: name, launches and nanoseconds of each kernel, and an idle time.
    fn profiled_kernels(kernels: &[(&str, usize, u64)], idle_ns: u64) -> ProfiledCase {
        let kernels: Vec<KernelTimeSum> = kernels
            .iter()
            .map(|&(name, count, each)| KernelTimeSum {
                name: name.to_owned(),
                count,
                total_ns: each * count as u64,
                shortest_ns: each,
                longest_ns: each,
            })
            .collect();
        let busy_ns = kernels.iter().map(|kernel| kernel.total_ns).sum();
        ProfiledCase {
            case: "x".to_owned(),
            status: CaseStatus::Ok,
            summary: Some(RecordedIntervalSummary { span_ns: busy_ns + idle_ns, busy_ns, kernels }),
            phases: Vec::new(),
            samples: None,
            recording: None,
            reason: None,
        }
    }

    fn explain_profiles(base: &ProfiledCase, head: &ProfiledCase) -> ChangeExplanation {
        explain_change(&slower_decision(1.4, None), None, Ok([base, head]))
    }

    #[test]
    fn a_spill_in_the_head_explains_a_slow_down_by_code() {
        let code = CodeComparison::compare_code(
            &kernels("f/spin", |_| {}),
            &kernels("f/spin", make_kernel_spill),
        );
        let (base, head) = (
            profiled_kernels(&[("spin", 1, 10_000)], 0),
            profiled_kernels(&[("spin", 1, 14_000)], 0),
        );
        let found =
            explain_change(&slower_decision(1.4, Some(1.4)), Some(&code), Ok([&base, &head]));
        assert_eq!(found.causes, [SlowdownCause::Code]);
        assert_eq!(
            found.words(),
            "changed: code; f/spin: stack bytes 0 -> 48, registers 96 -> 128; spin 10.00 µs -> \
             14.00 µs each"
        );
    }

    #[test]
    fn an_additional_launch_explains_a_slow_down() {
        let base = profiled_kernels(&[("a", 1, 10_000)], 0);
        let head = profiled_kernels(&[("a", 1, 10_000), ("b", 2, 2_000)], 0);
        let found = explain_profiles(&base, &head);
        assert_eq!(found.causes, [SlowdownCause::Launches]);
        assert_eq!(found.evidence, ["1 -> 3 kernels a launch", "b appeared, 4.000 µs"]);
        let gone = explain_profiles(&head, &base);
        assert_eq!(gone.evidence[1], "b vanished, 4.000 µs");
    }

    #[test]
    fn with_identical_code_a_lower_clock_and_host_time_are_distinguished() {
        let same = CodeComparison::compare_code(&kernels("a", |_| {}), &kernels("a", |_| {}));
        let base = profiled_kernels(&[("a", 1, 10_000)], 0);
        let longer = profiled_kernels(&[("a", 1, 12_000)], 0);
        let clock =
            explain_change(&slower_decision(1.2, Some(1.0)), Some(&same), Ok([&base, &longer]));
        assert_eq!(clock.causes, [SlowdownCause::Kernels, SlowdownCause::Clock]);
        insta::assert_snapshot!(clock.words(), @"slower with identical machine code; changed: the time of its kernels, clock; a 10.00 µs -> 12.00 µs each; SM clock 16.7% lower in the head");
        let idle = explain_profiles(&base, &profiled_kernels(&[("a", 1, 10_000)], 4_000));
        assert_eq!((idle.causes, idle.evidence.len()), (vec![SlowdownCause::Host], 1));
        let noise = explain_profiles(&base, &profiled_kernels(&[("a", 1, 10_100)], 10));
        let words = "cause unknown: one profile of each build does not show the slow-down";
        assert_eq!(noise.words(), words);
    }

    #[test]
    fn a_host_case_shows_its_launch_and_a_failed_profile_its_reason() {
        let phases = |ns: f64, threads: f64| ProfiledCase {
            summary: None,
            phases: vec![HostPhaseTime::from_durations(
                "launch",
                &[ns, ns],
                Some(2.0 * ns * threads),
            )],
            ..profiled_kernels(&[], 0)
        };
        let found = explain_profiles(&phases(1e6, 2.0), &phases(2e6, 1.0));
        assert_eq!(found.causes, [SlowdownCause::Host]);
        assert_eq!(found.evidence, ["a launch 1.000 ms -> 2.000 ms", "busy threads 2.0 -> 1.0"]);
        let lost = explain_change(&slower_decision(1.4, None), None, Err("it hung".to_owned()));
        assert_eq!(lost.words(), "not profiled: it hung");
    }
}
