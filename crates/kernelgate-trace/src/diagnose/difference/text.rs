//! Formats the difference of two traces as text for a terminal of 100 columns.

use std::fmt::Write as _;

use super::super::labels::shortened_kernel_name_for_readers;
use super::super::text::{append_wrapped_line, format_nanoseconds, percent_of_whole};
use super::{
    DifferenceOfTwoTraces, FunctionCallsInBothTraces, RangePathTimesOfBothTraces,
    TracePartChangeKind, TracePartComparison, TracePartCountAndTimes, TracePartKey, TracePartKind,
};
use crate::stats::{shorten_in_the_middle, with_thousands_separators};

/// Largest number of operations or ranges that are printed on lines of their own.
const MAX_PRINTED_PARTS_OR_RANGES: usize = 10;
/// Largest number of small changes of which only the names are printed.
const MAX_NAMES_OF_SMALL_CHANGES: usize = 6;
/// Blanks before the continuation of a line, so that it begins in the column of the words.
const CONTINUATION_INDENT: &str = "                         ";
/// Number of columns that a line has for words after the numbers.
const WORDS_COLUMN_WIDTH: usize = 75;
/// Number of columns that a name has in a table of several columns.
const NAME_COLUMN_WIDTH: usize = 60;

impl DifferenceOfTwoTraces {
    /// Formats the difference of two traces as text of at most 100 columns; `names` are the names
    /// of the first and second trace.
    pub fn difference_to_text(&self, names: [&str; 2]) -> String {
        let mut text = String::new();
        self.write_whole_times_and_setup(&mut text, names);
        self.write_changes_by_operation_and_idle_cause(&mut text);
        self.write_changes_by_range_path(&mut text);
        self.write_changes_by_kernel_work_class(&mut text);
        self.write_host_call_changes(&mut text);
        for (letter, found) in ["A", "B"].into_iter().zip(&self.findings) {
            if !found.is_empty() {
                let _ = writeln!(text, "\nFindings of {letter} alone (`diagnose` shows each)");
            }
            for (id, title) in found {
                append_wrapped_line(&mut text, &format!("{id}: {title}"), "  - ", "    ");
            }
        }
        text
    }

    fn write_whole_times_and_setup(&self, text: &mut String, names: [&str; 2]) {
        if !self.setup_changes.is_empty() {
            let heading = match self.are_machines_different() {
                true => "Two machines, so the comparison is of both machines and programs:",
                false => "Recorded in unlike ways:",
            };
            let _ = writeln!(text, "{heading}");
            for change in &self.setup_changes {
                append_wrapped_line(text, &change.to_string(), "  ", "    ");
            }
        }
        for ((letter, name), whole) in ["A", "B"].into_iter().zip(names).zip(&self.wholes) {
            let line = format!(
                "{letter}: {name} ({}): {} kernels, busy {:.1} % of {}",
                whole.recorder_program,
                with_thousands_separators(whole.kernel_count),
                percent_of_whole(whole.summed_gpu_busy_ns, whole.summed_whole_time_ns),
                format_nanoseconds(whole.summed_whole_time_ns)
            );
            append_wrapped_line(text, &line, "", "   ");
        }
        let change = self.whole_time_change_ns();
        let relative = percent_of_whole(change, self.wholes[0].summed_whole_time_ns);
        let words = match change {
            0 => "B takes as long as A".to_owned(),
            1.. => {
                format!("B takes {} longer than A ({relative:+.1} %)", format_nanoseconds(change))
            }
            _ => format!("B takes {} less than A ({relative:+.1} %)", format_nanoseconds(-change)),
        };
        let _ = writeln!(text, "{words}, from the first operation to the last");
        for note in &self.comparability_notes {
            append_wrapped_line(text, &format!("note: {note}"), "", "  ");
        }
    }

    fn write_changes_by_operation_and_idle_cause(&self, text: &mut String) {
        let of_unexplained =
            |change: &&TracePartComparison| change.part.kind == TracePartKind::UnexplainedIdleTime;
        let changed: Vec<&TracePartComparison> = self
            .part_changes
            .iter()
            .filter(|change| change.exclusive_time_change_ns() != 0 && !of_unexplained(change))
            .collect();
        let _ = writeln!(text, "\nWhat explains it: operations, and idle time by its cause");
        let (shown, rest) = changed.split_at(changed.len().min(MAX_PRINTED_PARTS_OR_RANGES));
        for change in shown {
            let label = format!(
                "{} {}: ",
                change.part.kind.printed_trace_part_kind(),
                change.kind_of_part_change().printed_change_label()
            );
            let name = shorten_in_the_middle(
                &printed_part_name(&change.part),
                WORDS_COLUMN_WIDTH - label.chars().count(),
            );
            let words = label + &name;
            self.write_change_line(text, change.exclusive_time_change_ns(), &words);
            append_wrapped_line(
                text,
                &part_change_details(change),
                CONTINUATION_INDENT,
                CONTINUATION_INDENT,
            );
        }
        self.write_sum_of_other_changes(
            text,
            rest.iter().map(|change| change.exclusive_time_change_ns()),
        );
        let words = "unexplained: idle before operations whose launch is not in the trace";
        self.write_change_line(text, self.change_of_unexplained_idle_ns(), words);
        self.write_change_line(text, self.whole_time_change_ns(), "the whole difference");
        for change in [
            TracePartChangeKind::OnlyInSecondTrace,
            TracePartChangeKind::OnlyInFirstTrace,
            TracePartChangeKind::MoreOperations,
            TracePartChangeKind::FewerOperations,
        ] {
            let named: Vec<String> = rest
                .iter()
                .filter(|other| {
                    other.kind_of_part_change() == change
                        && other.part.kind != TracePartKind::IdleTimeOfKnownCause
                })
                .map(|other| {
                    shorten_in_the_middle(&printed_part_name(&other.part), NAME_COLUMN_WIDTH)
                })
                .collect();
            let more = named.len().saturating_sub(MAX_NAMES_OF_SMALL_CHANGES);
            let more = if more > 0 { format!("; {more} more") } else { String::new() };
            let first = &named[..named.len().min(MAX_NAMES_OF_SMALL_CHANGES)];
            if !first.is_empty() {
                let line =
                    format!("also {}: {}{more}", change.printed_change_label(), first.join("; "));
                append_wrapped_line(text, &line, "  ", "    ");
            }
        }
    }

    fn write_changes_by_range_path(&self, text: &mut String) {
        if self.range_path_changes.iter().all(|change| change.range_path.is_empty()) {
            return;
        }
        let _ = writeln!(
            text,
            "\nWhere it is: by the innermost range around the launch, idle time before it included"
        );
        let changed: Vec<&RangePathTimesOfBothTraces> = self
            .range_path_changes
            .iter()
            .filter(|change| change.launched_time_change_ns() != 0)
            .collect();
        let (shown, rest) = changed.split_at(changed.len().min(MAX_PRINTED_PARTS_OR_RANGES));
        for change in shown {
            self.write_change_line(
                text,
                change.launched_time_change_ns(),
                &shorten_in_the_middle(path_or_outside_ranges(change), NAME_COLUMN_WIDTH),
            );
            let [base, head] = &change.places;
            let own = format!(
                "{} -> {}",
                format_nanoseconds(base.launched_operations.exclusive_ns),
                format_nanoseconds(head.launched_operations.exclusive_ns)
            );
            let host = match change.range_path.is_empty() {
                true => String::new(),
                false => format!(
                    ", host {} -> {}",
                    format_nanoseconds(base.host_range_ns),
                    format_nanoseconds(head.host_range_ns)
                ),
            };
            let ranges =
                count_before_and_after_text([base.range_count, head.range_count], "ranges");
            let operations = count_before_and_after_text(
                [
                    base.launched_operations.operation_count,
                    head.launched_operations.operation_count,
                ],
                "operations",
            );
            let words =
                if change.range_path.is_empty() { operations } else { ranges + ", " + &operations };
            append_wrapped_line(
                text,
                &format!("{words}, {own}{host}"),
                CONTINUATION_INDENT,
                CONTINUATION_INDENT,
            );
        }
        self.write_sum_of_other_changes(
            text,
            rest.iter().map(|change| change.launched_time_change_ns()),
        );
        self.write_change_line(text, self.whole_time_change_ns(), "the whole difference");
    }

    fn write_changes_by_kernel_work_class(&self, text: &mut String) {
        let kinds = self.kernel_time_of_both_by_work_class();
        if kinds.is_empty() {
            return;
        }
        let side = |side: usize| kinds.iter().map(|(_, sums)| sums[side]).sum::<i64>();
        let totals = [side(0), side(1)];
        let _ = writeln!(text, "\nKernel time by kind of work, A and B (by the kernels' names)");
        for (kind, sums) in &kinds {
            let [base, head] = [0, 1].map(|side| {
                format!(
                    "{:>12}{:>7.1} %",
                    format_nanoseconds(sums[side]),
                    percent_of_whole(sums[side], totals[side])
                )
            });
            let _ = writeln!(text, "  {:<15}{base}   {head}", kind.printed_work_class_label());
        }
    }

    /// Writes host calls whose number or waiting time changed; the difference of the whole times
    /// does not include their host time.
    fn write_host_call_changes(&self, text: &mut String) {
        let waits = |change: &&FunctionCallsInBothTraces| {
            change.calls.iter().any(|calls| calls.waits_for_gpu)
        };
        let counted =
            |change: &&FunctionCallsInBothTraces| change.calls[0].calls != change.calls[1].calls;
        let mut shown: Vec<&FunctionCallsInBothTraces> = self
            .host_call_changes
            .iter()
            .filter(|change| {
                counted(change) || (waits(change) && change.host_call_time_change_ns() != 0)
            })
            .collect();
        // Waits come before other calls, and larger changes before smaller ones.
        shown.sort_by_key(|change| !waits(change));
        if shown.is_empty() {
            return;
        }
        let _ = writeln!(text, "\nCalls of the host (their time may pass while the GPU works)");
        for change in shown.iter().take(MAX_PRINTED_PARTS_OR_RANGES) {
            let [base, head] = &change.calls;
            let range = change.site.innermost_range_path.as_ref().filter(|range| !range.is_empty());
            let range = range.map_or(String::new(), |range| {
                format!(", in {}", shorten_in_the_middle(range, 40))
            });
            let waits = if waits(change) { " (waits)" } else { "" };
            let line = format!(
                "{}{waits}{range}: {}, {} -> {}",
                shorten_in_the_middle(&change.site.function_name, 40),
                count_before_and_after_text([base.calls, head.calls], "calls"),
                format_nanoseconds(base.total_call_ns),
                format_nanoseconds(head.total_call_ns)
            );
            append_wrapped_line(text, &line, "  - ", "    ");
        }
        if shown.len() > MAX_PRINTED_PARTS_OR_RANGES {
            let _ = writeln!(
                text,
                "  - {} more, in the JSON",
                shown.len() - MAX_PRINTED_PARTS_OR_RANGES
            );
        }
    }

    /// Writes one line of the difference: the time that a trace part adds, its share of the
    /// difference of the whole times, and words.
    fn write_change_line(&self, text: &mut String, change_ns: i64, words: &str) {
        let share = match self.whole_time_change_ns() {
            0 => "-".to_owned(),
            _ if change_ns == 0 => "0.0 %".to_owned(),
            whole => format!("{:.1} %", change_ns as f64 / whole as f64 * 100.0),
        };
        let first = format!("{:>13}{share:>10}  ", time_with_sign_text(change_ns));
        append_wrapped_line(text, words, &first, CONTINUATION_INDENT);
    }

    fn write_sum_of_other_changes(&self, text: &mut String, changes: impl Iterator<Item = i64>) {
        let (count, sum) = changes.fold((0, 0), |(count, sum), ns| (count + 1, sum + ns));
        if count > 0 {
            self.write_change_line(text, sum, &format!("{count} others, together"));
        }
    }
}

fn printed_part_name(part: &TracePartKey) -> String {
    if part.kind == TracePartKind::Kernel {
        shortened_kernel_name_for_readers(&part.part_name)
    } else {
        part.part_name.clone()
    }
}

fn path_or_outside_ranges(change: &RangePathTimesOfBothTraces) -> &str {
    if change.range_path.is_empty() { "outside of all ranges" } else { &change.range_path }
}

/// Returns words for the number and mean time of a part's operations in both traces, and for the
/// cause of the change.
#[allow(clippy::cast_possible_truncation)]
fn part_change_details(change: &TracePartComparison) -> String {
    let [base, head] = &change.amounts;
    let mean =
        |amount: &TracePartCountAndTimes| format_nanoseconds(amount.mean_operation_ns() as i64);
    let unit = match change.part.kind {
        TracePartKind::Kernel | TracePartKind::CudaGraphLaunch => "launches",
        TracePartKind::Copy => "copies",
        TracePartKind::Memset => "sets",
        TracePartKind::IdleTimeOfKnownCause | TracePartKind::UnexplainedIdleTime => "gaps",
    };
    let mut words =
        vec![count_before_and_after_text([base.operation_count, head.operation_count], unit)];
    words.push(match (base.operation_count, head.operation_count) {
        (0, _) => format!("{} each", mean(head)),
        (_, 0) => format!("{} each", mean(base)),
        _ => format!("each {} -> {}", mean(base), mean(head)),
    });
    let parts =
        [change.change_due_to_operation_count_ns(), change.change_due_to_operation_length_ns()];
    if base.operation_count > 0 && head.operation_count > 0 && parts.iter().all(|ns| *ns != 0) {
        let [number, length] = parts.map(time_with_sign_text);
        words.push(format!("{number} by their number, {length} by their length"));
    }
    let overlaps = [base, head].map(|amount| amount.total_operation_ns - amount.exclusive_ns);
    if overlaps.iter().any(|ns| *ns > 0) {
        let [base, head] = overlaps.map(format_nanoseconds);
        words.push(format!("{base} -> {head} of it beside earlier work"));
    }
    words.extend(change.describe_launch_shape_and_metric_changes());
    words.join(", ")
}

/// Returns `5 -> 10 launches` if the count changed, otherwise `5 launches`.
fn count_before_and_after_text([base, head]: [usize; 2], what: &str) -> String {
    let count = |count: usize| with_thousands_separators(count);
    if base == head {
        format!("{} {what}", count(base))
    } else {
        format!("{} -> {} {what}", count(base), count(head))
    }
}

fn time_with_sign_text(ns: i64) -> String {
    if ns > 0 { format!("+{}", format_nanoseconds(ns)) } else { format_nanoseconds(ns) }
}
