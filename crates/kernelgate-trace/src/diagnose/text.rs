//! Formats the diagnosis of a trace as text for a terminal of 100 columns.

use std::fmt::{self, Write as _};

use super::answers::{KernelTimeAnswers, USUAL_ATTENTION_HEAD_SIZES};
use super::finding::{
    DiagnosisFinding, DiagnosisRuleAnswer, FindingEvidence, GpuUseOfProcess, InspectedRecordKind,
    InspectedShareOfRecords, TraceDiagnosis,
};
use super::host::gpu_gaps::IdleGapsOfLengthClass;
use super::labels::shortened_kernel_name_for_readers;
use crate::stats::{shorten_in_the_middle, with_thousands_separators};

const REPORT_LINE_CHARACTERS: usize = 100;
/// Smallest printed ratio of softmax time to matmul time; a smaller ratio is not of one attention,
/// whose ratio of FLOPs is 0.01 for a head size of 128.
const MIN_PRINTED_SOFTMAX_TO_MATMUL_RATIO: f64 = 0.01;
/// Largest number of characters that are printed of the name of evidence.
const MAX_PRINTED_EVIDENCE_CHARACTERS: usize = 110;
/// Largest number of kinds of critical-path segments that are printed.
const MAX_PRINTED_PATH_SEGMENT_KINDS: usize = 8;
/// Largest number of phases of device memory that are printed.
const MAX_PRINTED_MEMORY_PHASES: usize = 12;

impl TraceDiagnosis {
    /// Formats the diagnosis as text of at most 100 columns.
    pub fn diagnosis_to_text(&self) -> String {
        let mut text = String::new();
        self.write_recorder_and_record_counts(&mut text);
        self.write_data_quality_doubts(&mut text);
        self.write_time_accounts_of_gpus(&mut text);
        self.write_critical_path_section(&mut text);
        self.write_idle_gaps_section(&mut text);
        self.write_findings_section(&mut text);
        self.write_kernel_time_section(&mut text);
        self.utilization.append_utilization_section(&mut text);
        if let Some(network) = &self.network {
            network.write_network_section(&mut text);
        }
        self.write_device_memory_section(&mut text);
        self.write_rules_without_findings(&mut text);
        text
    }

    /// Formats the findings, without their evidence, as text of at most 100 columns.
    pub fn findings_without_evidence_to_text(&self) -> String {
        let mut text = String::new();
        for finding in &self.data_quality_findings {
            finding.write_data_quality_line(&mut text);
        }
        for (index, finding) in self.findings.iter().enumerate() {
            finding.write_finding_title_and_measurement(&mut text, index + 1);
        }
        text
    }

    fn write_recorder_and_record_counts(&self, text: &mut String) {
        let records: Vec<String> = self
            .records
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(what, count)| format!("{what} {}", with_thousands_separators(count)))
            .collect();
        let records = if records.is_empty() { "no records".to_owned() } else { records.join(", ") };
        append_wrapped_line(text, &format!("{}: {records}", self.recorder_and_version), "", "  ");
        for device in &self.gpu_use_by_process {
            let name = device.gpu_name.as_ref().map_or(String::new(), |name| format!(" ({name})"));
            let span = device.first_start_and_last_end_ns.1 - device.first_start_and_last_end_ns.0;
            let line = format!(
                "device {}{name}, process {}: busy {:.1} % of {}, {} operations",
                device.gpu_ordinal,
                device.pid,
                percent_of_whole(device.gpu_busy_ns, span),
                format_nanoseconds(span),
                with_thousands_separators(device.operation_count)
            );
            append_wrapped_line(text, &line, "  ", "    ");
        }
    }

    /// Doubts about the trace's data are printed before all text that depends on the data.
    fn write_data_quality_doubts(&self, text: &mut String) {
        if self.data_quality_findings.is_empty() {
            return;
        }
        let _ = writeln!(text, "\nData quality: how far this trace can be believed");
        for finding in &self.data_quality_findings {
            finding.write_data_quality_line(text);
            for evidence in &finding.evidence {
                evidence.write_evidence_line(text, self.printed_time_origin_ns, usize::MAX);
            }
            append_wrapped_line(text, &format!("do: {}", finding.advice), "     ", "       ");
        }
    }

    fn write_time_accounts_of_gpus(&self, text: &mut String) {
        for device in &self.gpu_use_by_process {
            let _ = write!(text, "\n{}", device.account.time_accounts_to_text());
        }
    }

    fn write_critical_path_section(&self, text: &mut String) {
        let path = &self.critical_path;
        if path.critical_path_ns == 0 {
            return;
        }
        let _ = writeln!(text, "\nCritical path ({})", format_nanoseconds(path.critical_path_ns));
        let line = |ns: i64, label: &str| {
            let share = percent_of_whole(ns, path.critical_path_ns);
            format!(
                "  {share:>5.1} %{:>12}  {}",
                format_nanoseconds(ns),
                shorten_in_the_middle(label, 76)
            )
        };
        for (kind, ns) in
            path.critical_path_ns_by_segment_kind.iter().take(MAX_PRINTED_PATH_SEGMENT_KINDS)
        {
            let _ = writeln!(text, "{}", line(*ns, kind));
        }
        let rest =
            path.critical_path_ns_by_segment_kind.iter().skip(MAX_PRINTED_PATH_SEGMENT_KINDS);
        let rest: i64 = rest.map(|(_, ns)| ns).sum();
        if rest > 0 {
            let _ = writeln!(text, "{}", line(rest, "other kinds"));
        }
        let _ = writeln!(text, "  gains, from the replay of the recorded dependencies");
        for gain in &path.gains {
            let _ = writeln!(text, "{}", line(gain.gain_ns, &gain.change.printed_speedup_label()));
        }
    }

    fn write_idle_gaps_section(&self, text: &mut String) {
        let has_gaps = |device: &GpuUseOfProcess| device.idle_gaps.number_of_idle_gaps() > 0;
        if !self.gpu_use_by_process.iter().any(has_gaps) {
            return;
        }
        let _ = writeln!(text, "\nGaps (times in which no kernel, copy, set or graph ran)");
        let _ = writeln!(
            text,
            "  {:<16}{:>19}{:>19}{:>19}{:>11}{:>12}",
            "process, device",
            "normal < 20 µs",
            "warning 20–50 µs",
            "severe > 50 µs",
            "mean",
            "longest"
        );
        for device in &self.gpu_use_by_process {
            let gaps = &device.idle_gaps;
            let class = |class: IdleGapsOfLengthClass| {
                format!(
                    "{} / {}",
                    with_thousands_separators(class.gap_count),
                    format_nanoseconds(class.total_gap_ns)
                )
            };
            #[allow(clippy::cast_possible_truncation)]
            let mean = format_nanoseconds(gaps.mean_length_of_gaps_ns() as i64);
            let _ = writeln!(
                text,
                "  {:<16}{:>19}{:>19}{:>19}{:>11}{:>12}",
                format!("{}, {}", device.pid, device.gpu_ordinal),
                class(gaps.gaps_below_20_us),
                class(gaps.gaps_of_20_to_50_us),
                class(gaps.gaps_above_50_us),
                mean,
                format_nanoseconds(gaps.longest_gap_ns)
            );
        }
        for device in self.gpu_use_by_process.iter().filter(|it| has_gaps(it)) {
            let (gpu, pid) = (device.gpu_ordinal, device.pid);
            let _ = writeln!(text, "  why device {gpu} was idle (process {pid}):");
            let total = device.idle_gaps.total_length_of_gaps_ns();
            for cause in device.idle_gaps.idle_time_by_cause.iter().take(4) {
                let _ = writeln!(
                    text,
                    "    {:<56}{:>10} ×{:>14}{:>10.1} %",
                    shorten_in_the_middle(&cause.printed_cause_with_name(), 55),
                    with_thousands_separators(cause.gap_count),
                    format_nanoseconds(cause.total_idle_ns),
                    percent_of_whole(cause.total_idle_ns, total)
                );
            }
            let _ = writeln!(text, "  between what (longest in all first):");
            for transition in device.idle_gaps.gaps_by_operation_pair.iter().take(3) {
                let _ = writeln!(
                    text,
                    "    {} → {}",
                    shorten_in_the_middle(
                        &shortened_kernel_name_for_readers(&transition.operation_before),
                        45
                    ),
                    shorten_in_the_middle(
                        &shortened_kernel_name_for_readers(&transition.operation_after),
                        46
                    )
                );
                let range = transition.common_range_path.as_ref().map_or(String::new(), |range| {
                    format!(", in {}", shorten_in_the_middle(range, 50))
                });
                let count = with_thousands_separators(transition.gap_count);
                let _ = writeln!(
                    text,
                    "      {count} ×, {} in all{range}",
                    format_nanoseconds(transition.total_gap_ns)
                );
            }
        }
    }

    fn write_findings_section(&self, text: &mut String) {
        let _ = writeln!(text, "\nFindings");
        if self.findings.is_empty() {
            let none = if self.answers_any_gpu_question() {
                "none"
            } else {
                "no question can be answered"
            };
            let _ = writeln!(text, "  {none}");
        }
        let whole = self.critical_path.critical_path_ns;
        for (index, finding) in self.findings.iter().enumerate() {
            finding.write_finding_with_evidence(text, index + 1, self.printed_time_origin_ns);
            if let Some(of) = finding.replayed_gain {
                let share = percent_of_whole(of.saved_ns_alone, whole);
                let mut line = format!(
                    "replayed without it: {} less, {share:.1} %",
                    format_nanoseconds(of.saved_ns_alone)
                );
                if of.further_saved_ns != of.saved_ns_alone {
                    let _ = write!(
                        line,
                        "; {} once those above are mended",
                        format_nanoseconds(of.further_saved_ns)
                    );
                }
                append_wrapped_line(text, &line, "     ", "       ");
            }
            if let Some(DiagnosisRuleAnswer::Yes { inspected, .. }) =
                self.question_of_rule(finding.rule_id).map(|question| &question.answer)
                && let Some(missing) = &inspected.reason_for_uninspected_records
            {
                let line = format!("inspected {inspected}: {missing}");
                append_wrapped_line(text, &line, "     ", "       ");
            }
        }
        let replayed: Vec<i64> = self
            .findings
            .iter()
            .filter_map(|of| Some(of.replayed_gain?.further_saved_ns))
            .collect();
        if replayed.len() > 1 {
            let all: i64 = replayed.iter().sum();
            let line = format!(
                "all that is replayed, mended together: {} less, {:.1} %",
                format_nanoseconds(all),
                percent_of_whole(all, whole)
            );
            append_wrapped_line(text, &line, "  ", "    ");
        }
    }

    fn write_kernel_time_section(&self, text: &mut String) {
        let answers = &self.answers;
        if !answers.top_kernels.is_empty() {
            let _ = writeln!(
                text,
                "\nTop kernels ({} of kernel time)",
                format_nanoseconds(answers.all_kernels_ns)
            );
            for kernel in &answers.top_kernels {
                let _ = writeln!(
                    text,
                    "  {:>5.1} %{:>12}{:>10} × {:<10}{:<15}{}",
                    kernel.share_of_kernel_time * 100.0,
                    format_nanoseconds(kernel.launch_time_summary.total),
                    with_thousands_separators(kernel.launch_time_summary.value_count),
                    format_median_nanoseconds(kernel.launch_time_summary.median),
                    kernel.class.printed_work_class_label(),
                    shorten_in_the_middle(
                        &shortened_kernel_name_for_readers(&kernel.kernel_name),
                        41
                    )
                );
            }
            let _ = writeln!(text, "\nKernel time by kind of work (by the kernels' names)");
            for (class, ns, count) in &answers.ns_and_launches_by_class {
                let _ = writeln!(
                    text,
                    "  {:>5.1} %{:>12}{:>10} launches  {}",
                    percent_of_whole(*ns, answers.all_kernels_ns),
                    format_nanoseconds(*ns),
                    with_thousands_separators(count),
                    class.printed_work_class_label()
                );
            }
        }
        self.write_softmax_to_matmul_time_ratio(text);
        if answers.components.is_empty() {
            return;
        }
        let _ =
            writeln!(text, "\nComponents (outer ranges; kernels counted where they were launched)");
        let _ = writeln!(
            text,
            "  {:<38}{:>8}{:>12}{:>12}{:>8}{:>9}{:>10}",
            "range", "times", "host time", "kernel time", "share", "kernels", "variation"
        );
        for component in &answers.components {
            let name =
                format!("{}{}", "  ".repeat(component.enclosing_range_count), component.range_path);
            let _ = writeln!(
                text,
                "  {:<38}{:>8}{:>12}{:>12}{:>6.1} %{:>9}{:>10}",
                shorten_in_the_middle(&name, 37),
                with_thousands_separators(component.host_times.value_count),
                format_nanoseconds(component.host_times.total),
                format_nanoseconds(component.kernel_ns),
                component.share_of_kernel_time * 100.0,
                with_thousands_separators(component.kernel_count),
                component
                    .coefficient_of_variation_of_host_time()
                    .map_or("-".to_owned(), |v| format!("{:.1} %", v * 100.0))
            );
        }
    }

    /// Writes softmax time relative to matmul time, if the ratio is plausible for attention.
    fn write_softmax_to_matmul_time_ratio(&self, text: &mut String) {
        let Some(ratio) = self
            .answers
            .softmax_time_by_matmul_time()
            .filter(|&ratio| ratio >= MIN_PRINTED_SOFTMAX_TO_MATMUL_RATIO)
        else {
            return;
        };
        let _ = writeln!(text, "  softmax takes {ratio:.2} of the time of matmul");
        let of_head = |head| {
            let flops = KernelTimeAnswers::softmax_flops_by_matmul_flops(head);
            format!(
                "{flops:.3} for heads of {head} (a FLOP takes {:.0} times as long)",
                ratio / flops
            )
        };
        let _ = writeln!(
            text,
            "  and does of the FLOPs, if that matmul is attention's alone (--range):\n    {}",
            USUAL_ATTENTION_HEAD_SIZES.map(of_head).join("\n    ")
        );
    }

    fn write_device_memory_section(&self, text: &mut String) {
        if self.device_memory_over_time.is_empty() {
            return;
        }
        let _ = writeln!(text, "\nDevice memory (taken since the recording began)");
        for of in &self.device_memory_over_time {
            let (peak_at, peak) = of.peak_time_ns_and_bytes;
            let unknown = match of.frees_without_allocation {
                0 => String::new(),
                count => format!(", {count} given back that were taken before"),
            };
            let when = match peak_at - self.printed_time_origin_ns {
                ns if ns < 0 => "before the first activity".to_owned(),
                ns => format!("first at {}", format_as_seconds(ns)),
            };
            let line = format!(
                "process {}, device {}: {} at most, {when}; {} at the end; {} allocations, {} \
                 given back{unknown}",
                of.pid,
                of.gpu_ordinal,
                format_bytes_with_unit(peak),
                format_bytes_with_unit(of.bytes_held_at_end_of_trace()),
                with_thousands_separators(of.allocation_count),
                with_thousands_separators(of.free_count),
            );
            append_wrapped_line(text, &line, "  ", "    ");
            let header = ["phase", "times", "at most", "change"];
            let [phase, times, most, change] = header;
            let _ = writeln!(text, "    {phase:<50}{times:>8}{most:>12}{change:>13}");
            for phase in of.phases.iter().take(MAX_PRINTED_MEMORY_PHASES) {
                let sign = if phase.held_bytes_change < 0 { '-' } else { '+' };
                let _ = writeln!(
                    text,
                    "    {:<50}{:>8}{:>12}{:>13}",
                    shorten_in_the_middle(&phase.phase_name, 49),
                    with_thousands_separators(phase.range_count),
                    format_bytes_with_unit(phase.peak_bytes),
                    format!(
                        "{sign}{}",
                        format_bytes_with_unit(phase.held_bytes_change.unsigned_abs())
                    )
                );
            }
            if let Some(more) =
                of.phases.len().checked_sub(MAX_PRINTED_MEMORY_PHASES).filter(|&more| more > 0)
            {
                let _ = writeln!(text, "    {more} more phases are in the JSON");
            }
        }
    }

    fn write_rules_without_findings(&self, text: &mut String) {
        // Rules that inspected, or lack, the same data share one line.
        let mut passed: Vec<(String, Vec<&str>)> = Vec::new();
        let mut lacking: Vec<(String, Vec<&str>)> = Vec::new();
        let add = |lines: &mut Vec<(String, Vec<&str>)>, line: String, id| match lines
            .iter_mut()
            .find(|(known, _)| *known == line)
        {
            Some((_, ids)) => ids.push(id),
            None => lines.push((line, vec![id])),
        };
        for question in &self.questions {
            match &question.answer {
                DiagnosisRuleAnswer::No { inspected: of } => {
                    add(&mut passed, of.to_string(), question.rule_id)
                }
                DiagnosisRuleAnswer::Yes { .. } => {}
                DiagnosisRuleAnswer::CannotAnswer { .. } => {
                    add(
                        &mut lacking,
                        question.reason_without_answer().unwrap_or_default(),
                        question.rule_id,
                    );
                }
            }
        }
        for (heading, lines) in [("Nothing found", passed), ("Not measured", lacking)] {
            if !lines.is_empty() {
                let _ = writeln!(text, "\n{heading}");
            }
            for (line, ids) in lines {
                let joined = ids.join(", ");
                let line = match heading {
                    "Nothing found" => format!("{joined}: in {line}"),
                    _ => format!("{joined}: {line}"),
                };
                append_wrapped_line(text, &line, "  ", "    ");
            }
        }
    }
}

impl fmt::Display for InspectedShareOfRecords {
    /// Formats the share: `12 of 20 copies`, or `36.0 % of 3.2 ms of kernel time`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = self.inspected_record_kind.printed_inspected_record_kind();
        if self.inspected_record_kind == InspectedRecordKind::KernelTime {
            let share = self.inspected_share_of_records() * 100.0;
            return write!(
                formatter,
                "{share:.1} % of {} of {label}",
                format_nanoseconds(self.whole_count_or_ns)
            );
        }
        let [seen, whole] =
            [self.inspected_count_or_ns, self.whole_count_or_ns].map(with_thousands_separators);
        write!(formatter, "{seen} of {whole} {label}")
    }
}

impl DiagnosisFinding {
    /// Writes one line for a doubt about the trace's data.
    fn write_data_quality_line(&self, text: &mut String) {
        let severity = self.severity.printed_severity_label().to_uppercase();
        append_wrapped_line(text, &format!("{severity}: {}", self.finding_title), "  ", "     ");
    }

    /// Writes severity, title, measured value and threshold of a finding.
    fn write_finding_title_and_measurement(&self, text: &mut String, number: usize) {
        let head = format!(
            "{number}. {} {}: {}",
            self.severity.printed_severity_label().to_uppercase(),
            self.rule_id,
            self.finding_title
        );
        append_wrapped_line(text, &head, "  ", "     ");
        let saved = self.max_recoverable_ns.filter(|&ns| ns > 0);
        let saved = saved
            .map_or(String::new(), |ns| format!("; could save up to {}", format_nanoseconds(ns)));
        let line = format!(
            "measured {} {}, threshold {} {}{saved}; confidence {}",
            format_short_number(self.measured_value.number_in_unit),
            self.measured_value.unit,
            format_short_number(self.rule_threshold.number_in_unit),
            self.rule_threshold.unit,
            self.confidence.printed_confidence_label()
        );
        append_wrapped_line(text, &line, "     ", "       ");
    }

    fn write_finding_with_evidence(&self, text: &mut String, number: usize, origin_ns: i64) {
        self.write_finding_title_and_measurement(text, number);
        for evidence in &self.evidence {
            evidence.write_evidence_line(text, origin_ns, MAX_PRINTED_EVIDENCE_CHARACTERS);
        }
        append_wrapped_line(text, &format!("do: {}", self.advice), "     ", "       ");
        append_wrapped_line(
            text,
            &format!("no fault if: {}", self.false_positive_note),
            "     ",
            "       ",
        );
    }
}

impl FindingEvidence {
    fn write_evidence_line(&self, text: &mut String, origin_ns: i64, width: usize) {
        let mut line = shorten_in_the_middle(&self.kernel_call_or_copy_name, width);
        if self.covered_count > 1 {
            let _ = write!(line, ", {} times", with_thousands_separators(self.covered_count));
        }
        if let Some(ns) = self.total_duration_ns {
            let _ = write!(line, ", {}", format_nanoseconds(ns));
        }
        if let Some(range) = &self.innermost_common_range_path {
            let _ = write!(line, ", in {}", shorten_in_the_middle(range, 60));
        }
        if let Some((start, end)) = self.longest_instance_start_and_end_ns {
            let _ = write!(
                line,
                ", at {} (longest {})",
                format_as_seconds(start - origin_ns),
                format_nanoseconds(end - start)
            );
        }
        if let Some((pid, device)) = self.process_id_and_device {
            let _ = write!(line, ", process {pid}, device {device}");
        }
        append_wrapped_line(text, &line, "     - ", "       ");
    }
}

/// Appends a line, broken between words so that no line has more than [`REPORT_LINE_CHARACTERS`]
/// columns.
pub(super) fn append_wrapped_line(text: &mut String, line: &str, first: &str, rest: &str) {
    let mut current = first.to_owned();
    let mut empty = true;
    for word in line.split(' ') {
        let length = current.chars().count() + usize::from(!empty) + word.chars().count();
        if !empty && length > REPORT_LINE_CHARACTERS {
            let _ = writeln!(text, "{current}");
            current = rest.to_owned();
            empty = true;
        }
        if !empty {
            current.push(' ');
        }
        current.push_str(word);
        empty = false;
    }
    let _ = writeln!(text, "{current}");
}

#[allow(clippy::cast_precision_loss)]
pub(super) fn percent_of_whole(part: i64, whole: i64) -> f64 {
    part as f64 / whole.max(1) as f64 * 100.0
}

/// Formats nanoseconds as ns, µs, ms or s.
#[allow(clippy::cast_precision_loss)]
pub(super) fn format_nanoseconds(ns: i64) -> String {
    let value = ns as f64;
    match ns.unsigned_abs() {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} µs", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.3} ms", value / 1e6),
        _ => format!("{:.3} s", value / 1e9),
    }
}

/// Formats bytes in a unit that suits the size.
#[allow(clippy::cast_precision_loss)]
pub(super) fn format_bytes_with_unit(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", value / 1e6),
        _ => format!("{:.2} GB", value / 1e9),
    }
}

#[allow(clippy::cast_possible_truncation)]
fn format_median_nanoseconds(ns: f64) -> String {
    format_nanoseconds(ns as i64)
}

#[allow(clippy::cast_precision_loss)]
fn format_as_seconds(ns: i64) -> String {
    format!("{:.6} s", ns as f64 / 1e9)
}

fn format_short_number(value: f64) -> String {
    if value.fract() == 0.0 {
        with_thousands_separators(format!("{value:.0}"))
    } else {
        format!("{value:.1}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_report_lines_are_broken_between_words() {
        let mut text = String::new();
        append_wrapped_line(&mut text, &"word ".repeat(40), "  - ", "    ");
        assert!(text.lines().all(|line| line.chars().count() <= REPORT_LINE_CHARACTERS), "{text}");
        assert_eq!(text.matches("word").count(), 40);
        let first = format!("  - {}", ["word"; 19].join(" "));
        assert_eq!(text.lines().next(), Some(first.as_str()));
        assert!(text.lines().nth(1).is_some_and(|line| line.starts_with("    word")));
    }

    #[test]
    fn nanoseconds_are_formatted_with_a_suitable_unit() {
        assert_eq!(format_nanoseconds(999), "999 ns");
        assert_eq!(format_nanoseconds(20_000), "20.0 µs");
        assert_eq!(format_nanoseconds(342_000_000), "342.000 ms");
        assert_eq!(format_nanoseconds(7_000_000_000), "7.000 s");
    }
}
