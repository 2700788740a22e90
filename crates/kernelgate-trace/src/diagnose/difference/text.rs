//! A difference for a terminal of 100 columns.

use std::fmt::Write as _;

use super::super::labels::short_name;
use super::super::text::{percent, time, wrap};
use super::{Amount, CallChange, Change, Difference, Part, PartChange, PartKind, PlaceChange};
use crate::stats::{shorten, thousands};

/// Parts and ranges that have lines of their own.
const TOP: usize = 10;
/// Calls and parts that are only named.
const MAX_NAMED_PARTS: usize = 6;
/// The column at which the words of a line begin.
const INDENT: &str = "                         ";
/// Columns for the words after the name.
const WORDS: usize = 75;
/// Columns for a name among others.
const NAME: usize = 60;

impl Difference {
    /// The difference as text of at most 100 columns; `names` are the names of the two traces.
    pub fn to_text(&self, names: [&str; 2]) -> String {
        let mut text = String::new();
        self.head(&mut text, names);
        self.by_part(&mut text);
        self.by_range(&mut text);
        self.by_kind(&mut text);
        self.calls(&mut text);
        for (letter, found) in ["A", "B"].into_iter().zip(&self.findings) {
            if !found.is_empty() {
                let _ = writeln!(text, "\nFindings of {letter} alone (`diagnose` shows each)");
            }
            for (id, title) in found {
                wrap(&mut text, &format!("{id}: {title}"), "  - ", "    ");
            }
        }
        text
    }

    fn head(&self, text: &mut String, names: [&str; 2]) {
        if !self.setup.is_empty() {
            let heading = match self.other_machine() {
                true => "Two machines, so the comparison is of both machines and programs:",
                false => "Recorded in unlike ways:",
            };
            let _ = writeln!(text, "{heading}");
            for change in &self.setup {
                wrap(text, &change.to_string(), "  ", "    ");
            }
        }
        for ((letter, name), whole) in ["A", "B"].into_iter().zip(names).zip(&self.wholes) {
            let line = format!(
                "{letter}: {name} ({}): {} kernels, busy {:.1} % of {}",
                whole.recorder,
                thousands(&whole.kernels.to_string()),
                percent(whole.busy_ns, whole.whole_ns),
                time(whole.whole_ns)
            );
            wrap(text, &line, "", "   ");
        }
        let change = self.change_ns();
        let relative = percent(change, self.wholes[0].whole_ns);
        let words = match change {
            0 => "B takes as long as A".to_owned(),
            1.. => format!("B takes {} longer than A ({relative:+.1} %)", time(change)),
            _ => format!("B takes {} less than A ({relative:+.1} %)", time(-change)),
        };
        let _ = writeln!(text, "{words}, from the first operation to the last");
        for note in &self.notes {
            wrap(text, &format!("note: {note}"), "", "  ");
        }
    }

    fn by_part(&self, text: &mut String) {
        let of_unexplained = |change: &&PartChange| change.part.kind == PartKind::Unexplained;
        let changed: Vec<&PartChange> = self
            .parts
            .iter()
            .filter(|change| change.change_ns() != 0 && !of_unexplained(change))
            .collect();
        let _ = writeln!(text, "\nWhat explains it: operations, and idle time by its cause");
        let (shown, rest) = changed.split_at(changed.len().min(TOP));
        for change in shown {
            let label = format!("{} {}: ", change.part.kind.label(), change.change().label());
            let name = shorten(&name(&change.part), WORDS - label.chars().count());
            let words = label + &name;
            self.line(text, change.change_ns(), &words);
            wrap(text, &details(change), INDENT, INDENT);
        }
        self.others(text, rest.iter().map(|change| change.change_ns()));
        let words = "unexplained: idle before operations whose launch is not in the trace";
        self.line(text, self.unexplained_ns(), words);
        self.line(text, self.change_ns(), "the whole difference");
        for change in [Change::Appeared, Change::Vanished, Change::More, Change::Fewer] {
            let named: Vec<String> = rest
                .iter()
                .filter(|other| other.change() == change && other.part.kind != PartKind::Idle)
                .map(|other| shorten(&name(&other.part), NAME))
                .collect();
            let more = named.len().saturating_sub(MAX_NAMED_PARTS);
            let more = if more > 0 { format!("; {more} more") } else { String::new() };
            let first = &named[..named.len().min(MAX_NAMED_PARTS)];
            if !first.is_empty() {
                let line = format!("also {}: {}{more}", change.label(), first.join("; "));
                wrap(text, &line, "  ", "    ");
            }
        }
    }

    fn by_range(&self, text: &mut String) {
        if self.places.iter().all(|change| change.path.is_empty()) {
            return;
        }
        let _ = writeln!(
            text,
            "\nWhere it is: by the innermost range around the launch, idle time before it included"
        );
        let changed: Vec<&PlaceChange> =
            self.places.iter().filter(|change| change.change_ns() != 0).collect();
        let (shown, rest) = changed.split_at(changed.len().min(TOP));
        for change in shown {
            self.line(text, change.change_ns(), &shorten(path(change), NAME));
            let [base, head] = &change.places;
            let own = format!("{} -> {}", time(base.launched.own_ns), time(head.launched.own_ns));
            let host = match change.path.is_empty() {
                true => String::new(),
                false => format!(", host {} -> {}", time(base.host_ns), time(head.host_ns)),
            };
            let ranges = counts([base.ranges, head.ranges], "ranges");
            let operations = counts([base.launched.count, head.launched.count], "operations");
            let words =
                if change.path.is_empty() { operations } else { ranges + ", " + &operations };
            wrap(text, &format!("{words}, {own}{host}"), INDENT, INDENT);
        }
        self.others(text, rest.iter().map(|change| change.change_ns()));
        self.line(text, self.change_ns(), "the whole difference");
    }

    fn by_kind(&self, text: &mut String) {
        let kinds = self.kinds();
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

    /// Calls whose number changed, and waits; the whole has no host time.
    fn calls(&self, text: &mut String) {
        let waits = |change: &&CallChange| change.calls.iter().any(|calls| calls.wait);
        let counted = |change: &&CallChange| change.calls[0].count != change.calls[1].count;
        let mut shown: Vec<&CallChange> = self
            .calls
            .iter()
            .filter(|change| counted(change) || (waits(change) && change.change_ns() != 0))
            .collect();
        // The largest first, waits before others.
        shown.sort_by_key(|change| !waits(change));
        if shown.is_empty() {
            return;
        }
        let _ = writeln!(text, "\nCalls of the host (their time may pass while the GPU works)");
        for change in shown.iter().take(TOP) {
            let [base, head] = &change.calls;
            let range = change.site.range.as_ref().filter(|range| !range.is_empty());
            let range = range.map_or(String::new(), |range| format!(", in {}", shorten(range, 40)));
            let waits = if waits(change) { " (waits)" } else { "" };
            let line = format!(
                "{}{waits}{range}: {}, {} -> {}",
                shorten(&change.site.function, 40),
                counts([base.count, head.count], "calls"),
                time(base.total_ns),
                time(head.total_ns)
            );
            wrap(text, &line, "  - ", "    ");
        }
        if shown.len() > TOP {
            let _ = writeln!(text, "  - {} more, in the JSON", shown.len() - TOP);
        }
    }

    /// The time that a part adds, its share of the whole difference, and its name.
    fn line(&self, text: &mut String, change_ns: i64, words: &str) {
        let share = match self.change_ns() {
            0 => "-".to_owned(),
            _ if change_ns == 0 => "0.0 %".to_owned(),
            whole => format!("{:.1} %", change_ns as f64 / whole as f64 * 100.0),
        };
        let first = format!("{:>13}{share:>10}  ", signed(change_ns));
        wrap(text, words, &first, INDENT);
    }

    fn others(&self, text: &mut String, changes: impl Iterator<Item = i64>) {
        let (count, sum) = changes.fold((0, 0), |(count, sum), ns| (count + 1, sum + ns));
        if count > 0 {
            self.line(text, sum, &format!("{count} others, together"));
        }
    }
}

fn name(part: &Part) -> String {
    if part.kind == PartKind::Kernel { short_name(&part.name) } else { part.name.clone() }
}

fn path(change: &PlaceChange) -> &str {
    if change.path.is_empty() { "outside of all ranges" } else { &change.path }
}

/// How often and how long, and what of the change is due to which.
#[allow(clippy::cast_possible_truncation)]
fn details(change: &PartChange) -> String {
    let [base, head] = &change.amounts;
    let mean = |amount: &Amount| time(amount.mean_ns() as i64);
    let unit = match change.part.kind {
        PartKind::Kernel | PartKind::Graph => "launches",
        PartKind::Copy => "copies",
        PartKind::Set => "sets",
        PartKind::Idle | PartKind::Unexplained => "gaps",
    };
    let mut words = vec![counts([base.count, head.count], unit)];
    words.push(match (base.count, head.count) {
        (0, _) => format!("{} each", mean(head)),
        (_, 0) => format!("{} each", mean(base)),
        _ => format!("each {} -> {}", mean(base), mean(head)),
    });
    let parts = [change.by_number_ns(), change.by_length_ns()];
    if base.count > 0 && head.count > 0 && parts.iter().all(|ns| *ns != 0) {
        let [number, length] = parts.map(signed);
        words.push(format!("{number} by their number, {length} by their length"));
    }
    let overlaps = [base, head].map(|amount| amount.total_ns - amount.own_ns);
    if overlaps.iter().any(|ns| *ns > 0) {
        let [base, head] = overlaps.map(time);
        words.push(format!("{base} -> {head} of it beside earlier work"));
    }
    words.extend(change.evidence());
    words.join(", ")
}

/// `5 -> 10 launches`, or `5 launches`.
fn counts([base, head]: [usize; 2], what: &str) -> String {
    let count = |count: usize| thousands(&count.to_string());
    if base == head {
        format!("{} {what}", count(base))
    } else {
        format!("{} -> {} {what}", count(base), count(head))
    }
}

fn signed(ns: i64) -> String {
    if ns > 0 { format!("+{}", time(ns)) } else { time(ns) }
}
