//! Prints time accounts of a GPU as text for a terminal of 100 columns.

use std::fmt::Write as _;

use super::{GpuTimeAccount, IterationsOnGpu, ProcessTimeAccountOnGpu};
use crate::analyze::classes::OperationClass;
use crate::analyze::timeline::BusyTimeCategoryOfGpu;
use crate::diagnose::text::{
    append_wrapped_line, format_bytes_with_unit, format_nanoseconds, percent_of_whole,
};
use crate::stats::{shorten_in_the_middle, with_thousands_separators};

/// Largest number of unusually long iterations whose numbers are printed.
const MAX_PRINTED_UNUSUAL_ITERATIONS: usize = 5;

impl GpuTimeAccount {
    /// Returns label and nanoseconds of each nonzero line of the account; they add up to the whole
    /// span.
    pub fn labels_and_ns_of_lines(&self) -> Vec<(String, i64)> {
        let busy = self
            .nonzero_busy_categories_and_ns()
            .map(|(line, ns)| (line.printed_busy_category_label().to_owned(), ns));
        let mut idle: Vec<(String, i64)> = self
            .idle_ns_by_cause
            .iter()
            .map(|(cause, &ns)| (format!("idle: {}", cause.printed_idle_cause_for_table()), ns))
            .collect();
        idle.sort_by_key(|&(_, ns)| std::cmp::Reverse(ns));
        busy.chain(idle).collect()
    }

    fn ns_of_line_with_label(&self, label: &str) -> i64 {
        self.labels_and_ns_of_lines().iter().find(|(own, _)| own == label).map_or(0, |&(_, ns)| ns)
    }
}

impl ProcessTimeAccountOnGpu {
    /// Formats the time accounts of a process on a GPU as text of at most 100 columns.
    pub fn time_accounts_to_text(&self) -> String {
        let mut text = String::new();
        let total = self.whole_trace_account.span_length_ns();
        let _ = writeln!(
            text,
            "Time of process {}, device {} (lines add up to {})",
            self.pid,
            self.gpu_ordinal,
            format_nanoseconds(total)
        );
        let columns = self.iterations.as_ref().map(IterationAccountColumns::columns_of_iterations);
        let header = match &columns {
            Some(_) => format!("{:>13}{:>13}{:>13}", "start-up", "first", "steady, mean"),
            None => String::new(),
        };
        let _ = writeln!(text, "  {:<38}{:>12}{:>8}{header}", "", "all", "share");
        for (label, ns) in self.whole_trace_account.labels_and_ns_of_lines() {
            let columns = columns
                .as_ref()
                .map_or(String::new(), |columns| columns.format_cells_of_line(&label));
            let _ = writeln!(
                text,
                "  {label:<38}{:>12}{:>6.1} %{columns}",
                format_nanoseconds(ns),
                percent_of_whole(ns, total)
            );
        }
        if let Some(iterations) = &self.iterations {
            iterations.write_iteration_lengths(&mut text);
        }
        self.write_transfers_table(&mut text);
        self.write_range_accounts_table(&mut text);
        text
    }

    fn write_transfers_table(&self, text: &mut String) {
        if self.transfers.is_empty() {
            return;
        }
        let _ = writeln!(
            text,
            "  {:<36}{:>9}{:>12}{:>12}{:>11}{:>16}",
            "transfers", "count", "all", "exposed", "bytes", "speed"
        );
        for of in &self.transfers {
            let size = if of.recorded_transfer_bytes > 0 {
                format_bytes_with_unit(of.recorded_transfer_bytes)
            } else {
                "-".to_owned()
            };
            #[allow(clippy::cast_precision_loss)]
            let speed = match (of.collective_bus_gb_per_s, of.transfer_class) {
                (Some(bus), _) => format!("bus {bus:.1} GB/s"),
                (None, OperationClass::Communication) => "-".to_owned(),
                _ if of.recorded_transfer_bytes == 0 => "-".to_owned(),
                _ => format!(
                    "{:.1} GB/s",
                    of.recorded_transfer_bytes as f64 / of.total_transfer_ns.max(1) as f64
                ),
            };
            let _ = writeln!(
                text,
                "  {:<36}{:>9}{:>12}{:>12}{:>11}{:>16}",
                shorten_in_the_middle(
                    &format!(
                        "{} {}",
                        of.transfer_class.printed_operation_class(),
                        of.transfer_label
                    ),
                    36
                ),
                with_thousands_separators(of.transfer_count),
                format_nanoseconds(of.total_transfer_ns),
                format_nanoseconds(of.exposed_transfer_ns),
                size,
                speed
            );
        }
    }

    fn write_range_accounts_table(&self, text: &mut String) {
        if self.range_path_accounts.is_empty() {
            return;
        }
        let _ = writeln!(
            text,
            "  {:<38}{:>12}{:>13}{:>13}{:>11}{:>11}",
            "by range", "all", "compute", "exposed comm", "copies", "idle"
        );
        for range in &self.range_path_accounts {
            let name =
                range.range_path.rsplit('/').next().filter(|_| range.enclosing_range_count > 0);
            let name = name.map_or(range.range_path.clone(), |name| format!("  {name}"));
            let account = &range.account;
            let compute = [
                BusyTimeCategoryOfGpu::ComputeKernelsAlone,
                BusyTimeCategoryOfGpu::ComputeAndCommunication,
                BusyTimeCategoryOfGpu::ComputeAndMigration,
                BusyTimeCategoryOfGpu::ComputeAndCopy,
                BusyTimeCategoryOfGpu::WholeCudaGraph,
            ];
            let copies = [
                BusyTimeCategoryOfGpu::ExposedCopies,
                BusyTimeCategoryOfGpu::ExposedPageMigration,
                BusyTimeCategoryOfGpu::OnlyMemsets,
            ];
            let sum = |lines: &[BusyTimeCategoryOfGpu]| {
                format_nanoseconds(
                    lines.iter().map(|&line| account.busy_ns_of_category(line)).sum(),
                )
            };
            let _ = writeln!(
                text,
                "  {:<38}{:>12}{:>13}{:>13}{:>11}{:>11}",
                shorten_in_the_middle(&name, 38),
                format_nanoseconds(account.span_length_ns()),
                sum(&compute),
                format_nanoseconds(
                    account.busy_ns_of_category(BusyTimeCategoryOfGpu::ExposedCommunication)
                ),
                sum(&copies),
                format_nanoseconds(account.idle_time_of_all_causes_ns())
            );
        }
    }
}

/// Columns that the table of a time account has if there are iterations: start-up, first iteration
/// and mean of the others.
struct IterationAccountColumns {
    before_first_iteration: GpuTimeAccount,
    first_iteration: GpuTimeAccount,
    later_iterations: GpuTimeAccount,
    later_iteration_count: i64,
}

impl IterationAccountColumns {
    fn columns_of_iterations(iterations: &IterationsOnGpu) -> Self {
        let first =
            iterations.listed_iterations.first().map(|of| of.account.clone()).unwrap_or_default();
        let count = i64::try_from(iterations.iteration_lengths_ns.len()).unwrap_or(i64::MAX) - 1;
        let steady = iterations.account_without_first_iteration.clone();
        Self {
            before_first_iteration: iterations.account_before_first_iteration.clone(),
            first_iteration: first,
            later_iterations: steady,
            later_iteration_count: count.max(1),
        }
    }

    fn format_cells_of_line(&self, label: &str) -> String {
        let cell = |ns: i64| if ns == 0 { "-".to_owned() } else { format_nanoseconds(ns) };
        format!(
            "{:>13}{:>13}{:>13}",
            cell(self.before_first_iteration.ns_of_line_with_label(label)),
            cell(self.first_iteration.ns_of_line_with_label(label)),
            cell(self.later_iterations.ns_of_line_with_label(label) / self.later_iteration_count)
        )
    }
}

impl IterationsOnGpu {
    fn write_iteration_lengths(&self, text: &mut String) {
        let lengths = self.sorted_iteration_lengths_without_first();
        let (Some(&least), Some(&most)) = (lengths.first(), lengths.last()) else { return };
        let mut line = format!(
            "iterations: {} by {}; first {}, then median {} ({} to {})",
            with_thousands_separators(self.iteration_lengths_ns.len()),
            shorten_in_the_middle(&self.evidence.printed_iteration_evidence(), 60),
            format_nanoseconds(self.iteration_lengths_ns[0]),
            format_nanoseconds(lengths[lengths.len() / 2]),
            format_nanoseconds(least),
            format_nanoseconds(most)
        );
        let unusual = self.numbers_of_unusually_long_iterations();
        if !unusual.is_empty() {
            let numbers: Vec<String> = unusual
                .iter()
                .take(MAX_PRINTED_UNUSUAL_ITERATIONS)
                .map(ToString::to_string)
                .collect();
            let more = unusual.len().saturating_sub(MAX_PRINTED_UNUSUAL_ITERATIONS);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let _ = write!(line, "; twice the median or longer: {}{more}", numbers.join(", "));
        }
        append_wrapped_line(text, &line, "  ", "    ");
    }
}
