//! A difference for a terminal of 100 columns.

use std::fmt::Write as _;

use super::super::labels::readable_name;
use super::super::text::{percent, time, wrap_line};
use super::{
    AmountChange, CountAndTimes, FunctionCallChange, RangePathChange, TraceDifference, TracePart,
    TracePartChange, TracePartKind,
};
use crate::stats::{shorten, with_thousands_separators};

/// Number of parts and ranges that have lines of their own.
const MAX_LISTED: usize = 10;
/// Calls and parts that are only named.
const MAX_NAMED_SMALL_PARTS: usize = 6;
/// The column at which the words of a line begin.
const LINE_INDENT: &str = "                         ";
/// Number of columns for the text after a name.
const WORDS_COLUMN: usize = 75;
/// Width of a name in a table of several columns.
const NAME_WIDTH: usize = 60;

impl TraceDifference {
    /// The difference as text of at most 100 columns; `names` are the names of the two traces.
    pub fn to_text(&self, names: [&str; 2]) -> String {
        let mut text = String::new();
        self.write_heading(&mut text, names);
        self.write_changes_by_part(&mut text);
        self.write_changes_by_range(&mut text);
        self.write_changes_by_class(&mut text);
        self.write_call_changes(&mut text);
        for (letter, found) in ["A", "B"].into_iter().zip(&self.findings) {
            if !found.is_empty() {
                let _ = writeln!(text, "\nFindings of {letter} alone (`diagnose` shows each)");
            }
            for (id, title) in found {
                wrap_line(&mut text, &format!("{id}: {title}"), "  - ", "    ");
            }
        }
        text
    }

    fn write_heading(&self, text: &mut String, names: [&str; 2]) {
        if !self.setup.is_empty() {
            let heading = match self.is_other_machine() {
                true => "Two machines, so the comparison is of both machines and programs:",
                false => "Recorded in unlike ways:",
            };
            let _ = writeln!(text, "{heading}");
            for change in &self.setup {
                wrap_line(text, &change.to_string(), "  ", "    ");
            }
        }
        for ((letter, name), whole) in ["A", "B"].into_iter().zip(names).zip(&self.wholes) {
            let line = format!(
                "{letter}: {name} ({}): {} kernels, busy {:.1} % of {}",
                whole.recorder,
                with_thousands_separators(whole.kernels),
                percent(whole.busy_ns, whole.whole_ns),
                time(whole.whole_ns)
            );
            wrap_line(text, &line, "", "   ");
        }
        let change = self.total_change_ns();
        let relative = percent(change, self.wholes[0].whole_ns);
        let words = match change {
            0 => "B takes as long as A".to_owned(),
            1.. => format!("B takes {} longer than A ({relative:+.1} %)", time(change)),
            _ => format!("B takes {} less than A ({relative:+.1} %)", time(-change)),
        };
        let _ = writeln!(text, "{words}, from the first operation to the last");
        for note in &self.notes {
            wrap_line(text, &format!("note: {note}"), "", "  ");
        }
    }

    fn write_changes_by_part(&self, text: &mut String) {
        let of_unexplained =
            |change: &&TracePartChange| change.part.kind == TracePartKind::Unexplained;
        let changed: Vec<&TracePartChange> = self
            .parts
            .iter()
            .filter(|change| change.total_change_ns() != 0 && !of_unexplained(change))
            .collect();
        let _ = writeln!(text, "\nWhat explains it: operations, and idle time by its cause");
        let (shown, rest) = changed.split_at(changed.len().min(MAX_LISTED));
        for change in shown {
            let label = format!("{} {}: ", change.part.kind.label(), change.change().label());
            let name = shorten(&name(&change.part), WORDS_COLUMN - label.chars().count());
            let words = label + &name;
            self.write_line(text, change.total_change_ns(), &words);
            wrap_line(text, &change_details_text(change), LINE_INDENT, LINE_INDENT);
        }
        self.write_other_changes(text, rest.iter().map(|change| change.total_change_ns()));
        let words = "unexplained: idle before operations whose launch is not in the trace";
        self.write_line(text, self.unexplained_idle_ns(), words);
        self.write_line(text, self.total_change_ns(), "the whole difference");
        for change in [
            AmountChange::Appeared,
            AmountChange::Vanished,
            AmountChange::More,
            AmountChange::Fewer,
        ] {
            let named: Vec<String> = rest
                .iter()
                .filter(|other| other.change() == change && other.part.kind != TracePartKind::Idle)
                .map(|other| shorten(&name(&other.part), NAME_WIDTH))
                .collect();
            let more = named.len().saturating_sub(MAX_NAMED_SMALL_PARTS);
            let more = if more > 0 { format!("; {more} more") } else { String::new() };
            let first = &named[..named.len().min(MAX_NAMED_SMALL_PARTS)];
            if !first.is_empty() {
                let line = format!("also {}: {}{more}", change.label(), first.join("; "));
                wrap_line(text, &line, "  ", "    ");
            }
        }
    }

    fn write_changes_by_range(&self, text: &mut String) {
        if self.places.iter().all(|change| change.path.is_empty()) {
            return;
        }
        let _ = writeln!(
            text,
            "\nWhere it is: by the innermost range around the launch, idle time before it included"
        );
        let changed: Vec<&RangePathChange> =
            self.places.iter().filter(|change| change.total_change_ns() != 0).collect();
        let (shown, rest) = changed.split_at(changed.len().min(MAX_LISTED));
        for change in shown {
            self.write_line(
                text,
                change.total_change_ns(),
                &shorten(changed_path(change), NAME_WIDTH),
            );
            let [base, head] = &change.places;
            let own = format!("{} -> {}", time(base.launched.own_ns), time(head.launched.own_ns));
            let host = match change.path.is_empty() {
                true => String::new(),
                false => format!(", host {} -> {}", time(base.host_ns), time(head.host_ns)),
            };
            let ranges = count_change_text([base.ranges, head.ranges], "ranges");
            let operations =
                count_change_text([base.launched.count, head.launched.count], "operations");
            let words =
                if change.path.is_empty() { operations } else { ranges + ", " + &operations };
            wrap_line(text, &format!("{words}, {own}{host}"), LINE_INDENT, LINE_INDENT);
        }
        self.write_other_changes(text, rest.iter().map(|change| change.total_change_ns()));
        self.write_line(text, self.total_change_ns(), "the whole difference");
    }

    fn write_changes_by_class(&self, text: &mut String) {
        let kinds = self.kernel_time_by_class();
        if kinds.is_empty() {
            return;
        }
        let side = |side: usize| kinds.iter().map(|(_, sums)| sums[side]).sum::<i64>();
        let totals = [side(0), side(1)];
        let _ = writeln!(text, "\nKernel time by kind of work, A and B (by the kernels' names)");
        for (kind, sums) in &kinds {
            let [base, head] = [0, 1].map(|side| {
                format!("{:>12}{:>7.1} %", time(sums[side]), percent(sums[side], totals[side]))
            });
            let _ = writeln!(text, "  {:<15}{base}   {head}", kind.label());
        }
    }

    /// Calls whose number changed, and waits; the total difference excludes host time.
    fn write_call_changes(&self, text: &mut String) {
        let waits = |change: &&FunctionCallChange| change.calls.iter().any(|calls| calls.wait);
        let counted = |change: &&FunctionCallChange| change.calls[0].count != change.calls[1].count;
        let mut shown: Vec<&FunctionCallChange> = self
            .calls
            .iter()
            .filter(|change| counted(change) || (waits(change) && change.total_change_ns() != 0))
            .collect();
        // The largest changes come first, and waits before other calls.
        shown.sort_by_key(|change| !waits(change));
        if shown.is_empty() {
            return;
        }
        let _ = writeln!(text, "\nCalls of the host (their time may pass while the GPU works)");
        for change in shown.iter().take(MAX_LISTED) {
            let [base, head] = &change.calls;
            let range = change.site.range.as_ref().filter(|range| !range.is_empty());
            let range = range.map_or(String::new(), |range| format!(", in {}", shorten(range, 40)));
            let waits = if waits(change) { " (waits)" } else { "" };
            let line = format!(
                "{}{waits}{range}: {}, {} -> {}",
                shorten(&change.site.function, 40),
                count_change_text([base.count, head.count], "calls"),
                time(base.total_ns),
                time(head.total_ns)
            );
            wrap_line(text, &line, "  - ", "    ");
        }
        if shown.len() > MAX_LISTED {
            let _ = writeln!(text, "  - {} more, in the JSON", shown.len() - MAX_LISTED);
        }
    }

    /// The time that a part adds, its share of the whole difference, and its name.
    fn write_line(&self, text: &mut String, change_ns: i64, words: &str) {
        let share = match self.total_change_ns() {
            0 => "-".to_owned(),
            _ if change_ns == 0 => "0.0 %".to_owned(),
            whole => format!("{:.1} %", change_ns as f64 / whole as f64 * 100.0),
        };
        let first = format!("{:>13}{share:>10}  ", signed_time_text(change_ns));
        wrap_line(text, words, &first, LINE_INDENT);
    }

    fn write_other_changes(&self, text: &mut String, changes: impl Iterator<Item = i64>) {
        let (count, sum) = changes.fold((0, 0), |(count, sum), ns| (count + 1, sum + ns));
        if count > 0 {
            self.write_line(text, sum, &format!("{count} others, together"));
        }
    }
}

fn name(part: &TracePart) -> String {
    if part.kind == TracePartKind::Kernel { readable_name(&part.name) } else { part.name.clone() }
}

fn changed_path(change: &RangePathChange) -> &str {
    if change.path.is_empty() { "outside of all ranges" } else { &change.path }
}

/// Writes the counts and times that changed between two traces, each with the cause of its change.
#[allow(clippy::cast_possible_truncation)]
fn change_details_text(change: &TracePartChange) -> String {
    let [base, head] = &change.amounts;
    let mean = |amount: &CountAndTimes| time(amount.mean_ns() as i64);
    let unit = match change.part.kind {
        TracePartKind::Kernel | TracePartKind::Graph => "launches",
        TracePartKind::Copy => "copies",
        TracePartKind::Set => "sets",
        TracePartKind::Idle | TracePartKind::Unexplained => "gaps",
    };
    let mut words = vec![count_change_text([base.count, head.count], unit)];
    words.push(match (base.count, head.count) {
        (0, _) => format!("{} each", mean(head)),
        (_, 0) => format!("{} each", mean(base)),
        _ => format!("each {} -> {}", mean(base), mean(head)),
    });
    let parts = [change.change_by_count_ns(), change.change_by_length_ns()];
    if base.count > 0 && head.count > 0 && parts.iter().all(|ns| *ns != 0) {
        let [number, length] = parts.map(signed_time_text);
        words.push(format!("{number} by their number, {length} by their length"));
    }
    let overlaps = [base, head].map(|amount| amount.total_ns - amount.own_ns);
    if overlaps.iter().any(|ns| *ns > 0) {
        let [base, head] = overlaps.map(time);
        words.push(format!("{base} -> {head} of it beside earlier work"));
    }
    words.extend(change.describe_launch_changes());
    words.join(", ")
}

/// `5 -> 10 launches`, or `5 launches`.
fn count_change_text([base, head]: [usize; 2], what: &str) -> String {
    let count = |count: usize| with_thousands_separators(count);
    if base == head {
        format!("{} {what}", count(base))
    } else {
        format!("{} -> {} {what}", count(base), count(head))
    }
}

fn signed_time_text(ns: i64) -> String {
    if ns > 0 { format!("+{}", time(ns)) } else { time(ns) }
}
