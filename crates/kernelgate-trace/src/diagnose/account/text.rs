//! Accounts for a terminal of 100 columns.

use std::fmt::Write as _;

use super::{DeviceIterations, DeviceTimeAccount, TimeAccount};
use crate::analyze::classes::OperationClass;
use crate::analyze::timeline::BusyTimeLine;
use crate::diagnose::text::{format_bytes, percent, time, wrap_line};
use crate::stats::{shorten, with_thousands_separators};

/// Numbers of unusual iterations that are listed.
const MAX_UNUSUAL_ITERATIONS: usize = 5;

impl TimeAccount {
    /// Returns the label of each nonzero line and its nanoseconds, which add up to the total.
    pub fn labelled_times(&self) -> Vec<(String, i64)> {
        let busy = self.nonzero_busy_lines().map(|(line, ns)| (line.label().to_owned(), ns));
        let mut idle: Vec<(String, i64)> = self
            .idle
            .iter()
            .map(|(cause, &ns)| (format!("idle: {}", cause.brief_label()), ns))
            .collect();
        idle.sort_by_key(|&(_, ns)| std::cmp::Reverse(ns));
        busy.chain(idle).collect()
    }

    fn ns_of_label(&self, label: &str) -> i64 {
        self.labelled_times().iter().find(|(own, _)| own == label).map_or(0, |&(_, ns)| ns)
    }
}

impl DeviceTimeAccount {
    /// The accounts as text of at most 100 columns.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let total = self.total.total_ns();
        let _ = writeln!(
            text,
            "Time of process {}, device {} (lines add up to {})",
            self.pid,
            self.device,
            time(total)
        );
        let columns = self.iterations.as_ref().map(AccountColumns::new);
        let header = match &columns {
            Some(_) => format!("{:>13}{:>13}{:>13}", "start-up", "first", "steady, mean"),
            None => String::new(),
        };
        let _ = writeln!(text, "  {:<38}{:>12}{:>8}{header}", "", "all", "share");
        for (label, ns) in self.total.labelled_times() {
            let columns = columns.as_ref().map_or(String::new(), |columns| columns.cells(&label));
            let _ = writeln!(
                text,
                "  {label:<38}{:>12}{:>6.1} %{columns}",
                time(ns),
                percent(ns, total)
            );
        }
        if let Some(iterations) = &self.iterations {
            iterations.write_iterations(&mut text);
        }
        self.write_transfer_table(&mut text);
        self.write_range_table(&mut text);
        text
    }

    fn write_transfer_table(&self, text: &mut String) {
        if self.transfers.is_empty() {
            return;
        }
        let _ = writeln!(
            text,
            "  {:<36}{:>9}{:>12}{:>12}{:>11}{:>16}",
            "transfers", "count", "all", "exposed", "bytes", "speed"
        );
        for of in &self.transfers {
            let size = if of.bytes > 0 { format_bytes(of.bytes) } else { "-".to_owned() };
            #[allow(clippy::cast_precision_loss)]
            let speed = match (of.bus, of.class) {
                (Some(bus), _) => format!("bus {bus:.1} GB/s"),
                (None, OperationClass::Communication) => "-".to_owned(),
                _ if of.bytes == 0 => "-".to_owned(),
                _ => format!("{:.1} GB/s", of.bytes as f64 / of.total_ns.max(1) as f64),
            };
            let _ = writeln!(
                text,
                "  {:<36}{:>9}{:>12}{:>12}{:>11}{:>16}",
                shorten(&format!("{} {}", of.class.label(), of.label), 36),
                with_thousands_separators(of.count),
                time(of.total_ns),
                time(of.exposed_ns),
                size,
                speed
            );
        }
    }

    fn write_range_table(&self, text: &mut String) {
        if self.ranges.is_empty() {
            return;
        }
        let _ = writeln!(
            text,
            "  {:<38}{:>12}{:>13}{:>13}{:>11}{:>11}",
            "by range", "all", "compute", "exposed comm", "copies", "idle"
        );
        for range in &self.ranges {
            let name = range.path.rsplit('/').next().filter(|_| range.depth > 0);
            let name = name.map_or(range.path.clone(), |name| format!("  {name}"));
            let account = &range.account;
            let compute = [
                BusyTimeLine::Compute,
                BusyTimeLine::ComputeAndCommunication,
                BusyTimeLine::ComputeAndMigration,
                BusyTimeLine::ComputeAndCopy,
                BusyTimeLine::Graph,
            ];
            let copies = [BusyTimeLine::Copy, BusyTimeLine::Migration, BusyTimeLine::Set];
            let sum = |lines: &[BusyTimeLine]| {
                time(lines.iter().map(|&line| account.busy_ns_of_line(line)).sum())
            };
            let _ = writeln!(
                text,
                "  {:<38}{:>12}{:>13}{:>13}{:>11}{:>11}",
                shorten(&name, 38),
                time(account.total_ns()),
                sum(&compute),
                time(account.busy_ns_of_line(BusyTimeLine::Communication)),
                sum(&copies),
                time(account.total_idle_ns())
            );
        }
    }
}

/// Columns of an account's table beside the column of sums.
struct AccountColumns {
    before: TimeAccount,
    first: TimeAccount,
    steady: TimeAccount,
    count: i64,
}

impl AccountColumns {
    fn new(iterations: &DeviceIterations) -> Self {
        let first = iterations.each.first().map(|of| of.account.clone()).unwrap_or_default();
        let count = i64::try_from(iterations.lengths.len()).unwrap_or(i64::MAX) - 1;
        let steady = iterations.steady.clone();
        Self { before: iterations.before.clone(), first, steady, count: count.max(1) }
    }

    fn cells(&self, label: &str) -> String {
        let cell = |ns: i64| if ns == 0 { "-".to_owned() } else { time(ns) };
        format!(
            "{:>13}{:>13}{:>13}",
            cell(self.before.ns_of_label(label)),
            cell(self.first.ns_of_label(label)),
            cell(self.steady.ns_of_label(label) / self.count)
        )
    }
}

impl DeviceIterations {
    fn write_iterations(&self, text: &mut String) {
        let lengths = self.sorted_steady_lengths();
        let (Some(&least), Some(&most)) = (lengths.first(), lengths.last()) else { return };
        let mut line = format!(
            "iterations: {} by {}; first {}, then median {} ({} to {})",
            with_thousands_separators(self.lengths.len()),
            shorten(&self.sign.label(), 60),
            time(self.lengths[0]),
            time(lengths[lengths.len() / 2]),
            time(least),
            time(most)
        );
        let unusual = self.unusually_long_iterations();
        if !unusual.is_empty() {
            let numbers: Vec<String> =
                unusual.iter().take(MAX_UNUSUAL_ITERATIONS).map(ToString::to_string).collect();
            let more = unusual.len().saturating_sub(MAX_UNUSUAL_ITERATIONS);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let _ = write!(line, "; twice the median or longer: {}{more}", numbers.join(", "));
        }
        wrap_line(text, &line, "  ", "    ");
    }
}
