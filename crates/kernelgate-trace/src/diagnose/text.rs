//! A diagnosis for a terminal of 100 columns.

use std::fmt::{self, Write as _};

use super::answers::{HEAD_SIZES, TraceAnswers};
use super::finding::{
    DiagnosisFinding, FindingEvidence, InspectedShare, InspectedUnit, QuestionAnswer,
    TraceDiagnosis,
};
use super::host::gpu_gaps::GapLengthClass;
use super::labels::readable_name;
use crate::stats::{shorten, with_thousands_separators};

const TEXT_WIDTH: usize = 100;
/// Softmax over matmul below which the two do not belong to one attention: a head of 128 has a
/// ratio of 0.01 in FLOPs, and a FLOP of softmax is not faster.
const MIN_SHOWN_SOFTMAX_RATIO: f64 = 0.01;
/// Characters of the first words of evidence.
const MAX_EVIDENCE_NAME_CHARACTERS: usize = 110;
/// Kinds of segments of the critical path that are shown.
const MAX_SHOWN_PATH_SEGMENT_KINDS: usize = 8;
/// Phases of device memory that are shown.
const MAX_SHOWN_PHASES: usize = 12;

impl TraceDiagnosis {
    /// The diagnosis as text of at most 100 columns.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        self.write_head(&mut text);
        self.write_doubts(&mut text);
        self.write_time_accounts(&mut text);
        self.write_critical_path_text(&mut text);
        self.write_gaps(&mut text);
        self.write_findings(&mut text);
        self.write_time_answers(&mut text);
        self.utilization.write_utilization(&mut text);
        if let Some(network) = &self.network {
            network.write_network(&mut text);
        }
        self.write_memory_use(&mut text);
        self.write_inspected_without_findings(&mut text);
        text
    }

    /// The findings without their evidence, as text of at most 100 columns.
    pub fn findings_text(&self) -> String {
        let mut text = String::new();
        for finding in &self.quality {
            finding.write_data_quality_doubt(&mut text);
        }
        for (index, finding) in self.findings.iter().enumerate() {
            finding.write_finding_head(&mut text, index + 1);
        }
        text
    }

    fn write_head(&self, text: &mut String) {
        let records: Vec<String> = self
            .records
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(what, count)| format!("{what} {}", with_thousands_separators(count)))
            .collect();
        let records = if records.is_empty() { "no records".to_owned() } else { records.join(", ") };
        wrap_line(text, &format!("{}: {records}", self.recorder), "", "  ");
        for device in &self.devices {
            let name = device.name.as_ref().map_or(String::new(), |name| format!(" ({name})"));
            let span = device.span.1 - device.span.0;
            let line = format!(
                "device {}{name}, process {}: busy {:.1} % of {}, {} operations",
                device.device,
                device.pid,
                percent(device.busy_ns, span),
                time(span),
                with_thousands_separators(device.operations)
            );
            wrap_line(text, &line, "  ", "    ");
        }
    }

    /// Doubts about the trace are printed before all text that depends on the trace.
    fn write_doubts(&self, text: &mut String) {
        if self.quality.is_empty() {
            return;
        }
        let _ = writeln!(text, "\nData quality: how far this trace can be believed");
        for finding in &self.quality {
            finding.write_data_quality_doubt(text);
            for evidence in &finding.evidence {
                evidence.write_evidence(text, self.origin_ns, usize::MAX);
            }
            wrap_line(text, &format!("do: {}", finding.advice), "     ", "       ");
        }
    }

    fn write_time_accounts(&self, text: &mut String) {
        for device in &self.devices {
            let _ = write!(text, "\n{}", device.account.to_text());
        }
    }

    fn write_critical_path_text(&self, text: &mut String) {
        let path = &self.critical_path;
        if path.total_ns == 0 {
            return;
        }
        let _ = writeln!(text, "\nCritical path ({})", time(path.total_ns));
        let line = |ns: i64, label: &str| {
            let share = percent(ns, path.total_ns);
            format!("  {share:>5.1} %{:>12}  {}", time(ns), shorten(label, 76))
        };
        for (kind, ns) in path.segments.iter().take(MAX_SHOWN_PATH_SEGMENT_KINDS) {
            let _ = writeln!(text, "{}", line(*ns, kind));
        }
        let rest: i64 =
            path.segments.iter().skip(MAX_SHOWN_PATH_SEGMENT_KINDS).map(|(_, ns)| ns).sum();
        if rest > 0 {
            let _ = writeln!(text, "{}", line(rest, "other kinds"));
        }
        let _ = writeln!(text, "  gains, from the replay of the recorded dependencies");
        for gain in &path.gains {
            let _ = writeln!(text, "{}", line(gain.gain_ns, &gain.change.label()));
        }
    }

    fn write_gaps(&self, text: &mut String) {
        if self.devices.iter().all(|device| device.gaps.gap_count() == 0) {
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
        for device in &self.devices {
            let gaps = &device.gaps;
            let class = |class: GapLengthClass| {
                format!("{} / {}", with_thousands_separators(class.count), time(class.total_ns))
            };
            #[allow(clippy::cast_possible_truncation)]
            let mean = time(gaps.mean_gap_ns() as i64);
            let _ = writeln!(
                text,
                "  {:<16}{:>19}{:>19}{:>19}{:>11}{:>12}",
                format!("{}, {}", device.pid, device.device),
                class(gaps.normal),
                class(gaps.warning),
                class(gaps.severe),
                mean,
                time(gaps.longest_ns)
            );
        }
        for device in self.devices.iter().filter(|device| device.gaps.gap_count() > 0) {
            let _ =
                writeln!(text, "  why device {} was idle (process {}):", device.device, device.pid);
            for cause in device.gaps.causes.iter().take(4) {
                let _ = writeln!(
                    text,
                    "    {:<56}{:>10} ×{:>14}{:>10.1} %",
                    shorten(&cause.label(), 55),
                    with_thousands_separators(cause.count),
                    time(cause.total_ns),
                    percent(cause.total_ns, device.gaps.total_ns())
                );
            }
            let _ = writeln!(text, "  between what (longest in all first):");
            for transition in device.gaps.transitions.iter().take(3) {
                let _ = writeln!(
                    text,
                    "    {} → {}",
                    shorten(&readable_name(&transition.before), 45),
                    shorten(&readable_name(&transition.after), 46)
                );
                let range = transition
                    .range
                    .as_ref()
                    .map_or(String::new(), |range| format!(", in {}", shorten(range, 50)));
                let count = with_thousands_separators(transition.count);
                let _ =
                    writeln!(text, "      {count} ×, {} in all{range}", time(transition.total_ns));
            }
        }
    }

    fn write_findings(&self, text: &mut String) {
        let _ = writeln!(text, "\nFindings");
        if self.findings.is_empty() {
            let none = if self.answers_any_gpu_question() {
                "none"
            } else {
                "no question can be answered"
            };
            let _ = writeln!(text, "  {none}");
        }
        let whole = self.critical_path.total_ns;
        for (index, finding) in self.findings.iter().enumerate() {
            finding.write_finding(text, index + 1, self.origin_ns);
            if let Some(of) = finding.replayed {
                let share = percent(of.alone_ns, whole);
                let mut line =
                    format!("replayed without it: {} less, {share:.1} %", time(of.alone_ns));
                if of.further_ns != of.alone_ns {
                    let _ = write!(line, "; {} once those above are mended", time(of.further_ns));
                }
                wrap_line(text, &line, "     ", "       ");
            }
            if let Some(QuestionAnswer::Yes { inspected, .. }) =
                self.question(finding.id).map(|question| &question.answer)
                && let Some(missing) = &inspected.missing
            {
                let line = format!("inspected {inspected}: {missing}");
                wrap_line(text, &line, "     ", "       ");
            }
        }
        let replayed: Vec<i64> =
            self.findings.iter().filter_map(|of| Some(of.replayed?.further_ns)).collect();
        if replayed.len() > 1 {
            let all: i64 = replayed.iter().sum();
            let line = format!(
                "all that is replayed, mended together: {} less, {:.1} %",
                time(all),
                percent(all, whole)
            );
            wrap_line(text, &line, "  ", "    ");
        }
    }

    fn write_time_answers(&self, text: &mut String) {
        let answers = &self.answers;
        if !answers.top_kernels.is_empty() {
            let _ = writeln!(text, "\nTop kernels ({} of kernel time)", time(answers.kernel_ns));
            for kernel in &answers.top_kernels {
                let _ = writeln!(
                    text,
                    "  {:>5.1} %{:>12}{:>10} × {:<10}{:<15}{}",
                    kernel.share * 100.0,
                    time(kernel.summary.total),
                    with_thousands_separators(kernel.summary.count),
                    median_time_text(kernel.summary.median),
                    kernel.class.label(),
                    shorten(&readable_name(&kernel.name), 41)
                );
            }
            let _ = writeln!(text, "\nKernel time by kind of work (by the kernels' names)");
            for (class, ns, count) in &answers.classes {
                let _ = writeln!(
                    text,
                    "  {:>5.1} %{:>12}{:>10} launches  {}",
                    percent(*ns, answers.kernel_ns),
                    time(*ns),
                    with_thousands_separators(count),
                    class.label()
                );
            }
        }
        self.write_softmax_ratio(text);
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
            let name = format!("{}{}", "  ".repeat(component.depth), component.path);
            let _ = writeln!(
                text,
                "  {:<38}{:>8}{:>12}{:>12}{:>6.1} %{:>9}{:>10}",
                shorten(&name, 37),
                with_thousands_separators(component.host.count),
                time(component.host.total),
                time(component.kernel_ns),
                component.share * 100.0,
                with_thousands_separators(component.kernels),
                component
                    .host_time_variation()
                    .map_or("-".to_owned(), |v| format!("{:.1} %", v * 100.0))
            );
        }
    }

    /// Prints softmax time against matmul time, if their ratio is plausible for attention.
    fn write_softmax_ratio(&self, text: &mut String) {
        let Some(ratio) = self
            .answers
            .softmax_over_matmul_time()
            .filter(|&ratio| ratio >= MIN_SHOWN_SOFTMAX_RATIO)
        else {
            return;
        };
        let _ = writeln!(text, "  softmax takes {ratio:.2} of the time of matmul");
        let of_head = |head| {
            let flops = TraceAnswers::softmax_to_matmul_flops(head);
            format!(
                "{flops:.3} for heads of {head} (a FLOP takes {:.0} times as long)",
                ratio / flops
            )
        };
        let _ = writeln!(
            text,
            "  and does of the FLOPs, if that matmul is attention's alone (--range):\n    {}",
            HEAD_SIZES.map(of_head).join("\n    ")
        );
    }

    fn write_memory_use(&self, text: &mut String) {
        if self.memory.is_empty() {
            return;
        }
        let _ = writeln!(text, "\nDevice memory (taken since the recording began)");
        for of in &self.memory {
            let (peak_at, peak) = of.peak;
            let unknown = match of.unknown {
                0 => String::new(),
                count => format!(", {count} given back that were taken before"),
            };
            let when = match peak_at - self.origin_ns {
                ns if ns < 0 => "before the first activity".to_owned(),
                ns => format!("first at {}", seconds_text(ns)),
            };
            let line = format!(
                "process {}, device {}: {} at most, {when}; {} at the end; {} allocations, {} \
                 given back{unknown}",
                of.pid,
                of.device,
                format_bytes(peak),
                format_bytes(of.bytes_at_end()),
                with_thousands_separators(of.taken),
                with_thousands_separators(of.given_back),
            );
            wrap_line(text, &line, "  ", "    ");
            let header = ["phase", "times", "at most", "change"];
            let [phase, times, most, change] = header;
            let _ = writeln!(text, "    {phase:<50}{times:>8}{most:>12}{change:>13}");
            for phase in of.phases.iter().take(MAX_SHOWN_PHASES) {
                let sign = if phase.change_bytes < 0 { '-' } else { '+' };
                let _ = writeln!(
                    text,
                    "    {:<50}{:>8}{:>12}{:>13}",
                    shorten(&phase.name, 49),
                    with_thousands_separators(phase.times),
                    format_bytes(phase.peak_bytes),
                    format!("{sign}{}", format_bytes(phase.change_bytes.unsigned_abs()))
                );
            }
            if let Some(more) =
                of.phases.len().checked_sub(MAX_SHOWN_PHASES).filter(|&more| more > 0)
            {
                let _ = writeln!(text, "    {more} more phases are in the JSON");
            }
        }
    }

    fn write_inspected_without_findings(&self, text: &mut String) {
        // Several rules inspected, or lack, the same data, so they share one line.
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
                QuestionAnswer::No { inspected: of } => {
                    add(&mut passed, of.to_string(), question.id)
                }
                QuestionAnswer::Yes { .. } => {}
                QuestionAnswer::CannotAnswer { .. } => {
                    add(
                        &mut lacking,
                        question.missing_data_reason().unwrap_or_default(),
                        question.id,
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
                wrap_line(text, &line, "  ", "    ");
            }
        }
    }
}

impl fmt::Display for InspectedShare {
    /// `12 of 20 copies`, `36.0 % of 3.2 ms of kernel time`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = self.unit.label();
        if self.unit == InspectedUnit::KernelTime {
            let share = self.inspected_share() * 100.0;
            return write!(formatter, "{share:.1} % of {} of {label}", time(self.whole));
        }
        let [seen, whole] = [self.seen, self.whole].map(with_thousands_separators);
        write!(formatter, "{seen} of {whole} {label}")
    }
}

impl DiagnosisFinding {
    /// Prints one line for a doubt about the trace.
    fn write_data_quality_doubt(&self, text: &mut String) {
        let severity = self.severity.label().to_uppercase();
        wrap_line(text, &format!("{severity}: {}", self.title), "  ", "     ");
    }

    /// Prints a finding with its measurements.
    fn write_finding_head(&self, text: &mut String, number: usize) {
        let head = format!(
            "{number}. {} {}: {}",
            self.severity.label().to_uppercase(),
            self.id,
            self.title
        );
        wrap_line(text, &head, "  ", "     ");
        let saved = self.recoverable_ns.filter(|&ns| ns > 0);
        let saved = saved.map_or(String::new(), |ns| format!("; could save up to {}", time(ns)));
        let line = format!(
            "measured {} {}, threshold {} {}{saved}; confidence {}",
            short_number_text(self.measured.value),
            self.measured.unit,
            short_number_text(self.threshold.value),
            self.threshold.unit,
            self.confidence.label()
        );
        wrap_line(text, &line, "     ", "       ");
    }

    fn write_finding(&self, text: &mut String, number: usize, origin_ns: i64) {
        self.write_finding_head(text, number);
        for evidence in &self.evidence {
            evidence.write_evidence(text, origin_ns, MAX_EVIDENCE_NAME_CHARACTERS);
        }
        wrap_line(text, &format!("do: {}", self.advice), "     ", "       ");
        wrap_line(text, &format!("no fault if: {}", self.false_positive), "     ", "       ");
    }
}

impl FindingEvidence {
    fn write_evidence(&self, text: &mut String, origin_ns: i64, width: usize) {
        let mut line = shorten(&self.what, width);
        if self.count > 1 {
            let _ = write!(line, ", {} times", with_thousands_separators(self.count));
        }
        if let Some(ns) = self.total_ns {
            let _ = write!(line, ", {}", time(ns));
        }
        if let Some(range) = &self.range {
            let _ = write!(line, ", in {}", shorten(range, 60));
        }
        if let Some((start, end)) = self.span {
            let _ = write!(
                line,
                ", at {} (longest {})",
                seconds_text(start - origin_ns),
                time(end - start)
            );
        }
        if let Some((pid, device)) = self.place {
            let _ = write!(line, ", process {pid}, device {device}");
        }
        wrap_line(text, &line, "     - ", "       ");
    }
}

/// Breaks a line between words at [`TEXT_WIDTH`] columns.
pub(super) fn wrap_line(text: &mut String, line: &str, first: &str, rest: &str) {
    let mut current = first.to_owned();
    let mut empty = true;
    for word in line.split(' ') {
        let length = current.chars().count() + usize::from(!empty) + word.chars().count();
        if !empty && length > TEXT_WIDTH {
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
pub(super) fn percent(part: i64, whole: i64) -> f64 {
    part as f64 / whole.max(1) as f64 * 100.0
}

/// Formats nanoseconds in a suitable unit.
#[allow(clippy::cast_precision_loss)]
pub(super) fn time(ns: i64) -> String {
    let value = ns as f64;
    match ns.unsigned_abs() {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} µs", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.3} ms", value / 1e6),
        _ => format!("{:.3} s", value / 1e9),
    }
}

/// Formats bytes in a suitable unit.
#[allow(clippy::cast_precision_loss)]
pub(super) fn format_bytes(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", value / 1e6),
        _ => format!("{:.2} GB", value / 1e9),
    }
}

#[allow(clippy::cast_possible_truncation)]
fn median_time_text(ns: f64) -> String {
    time(ns as i64)
}

#[allow(clippy::cast_precision_loss)]
fn seconds_text(ns: i64) -> String {
    format!("{:.6} s", ns as f64 / 1e9)
}

fn short_number_text(value: f64) -> String {
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
    fn long_lines_of_a_report_are_broken_between_words() {
        let mut text = String::new();
        wrap_line(&mut text, &"word ".repeat(40), "  - ", "    ");
        assert!(text.lines().all(|line| line.chars().count() <= TEXT_WIDTH), "{text}");
        assert_eq!(text.matches("word").count(), 40);
        let first = format!("  - {}", ["word"; 19].join(" "));
        assert_eq!(text.lines().next(), Some(first.as_str()));
        assert!(text.lines().nth(1).is_some_and(|line| line.starts_with("    word")));
    }

    #[test]
    fn times_are_formatted_with_a_suitable_unit() {
        assert_eq!(time(999), "999 ns");
        assert_eq!(time(20_000), "20.0 µs");
        assert_eq!(time(342_000_000), "342.000 ms");
        assert_eq!(time(7_000_000_000), "7.000 s");
    }
}
