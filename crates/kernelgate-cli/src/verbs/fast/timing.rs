//! `kernelgate timing`: measures how accurate timing with CUDA events is on this GPU, with a bench
//! executable of the package.

use std::time::Duration;

use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::{decimal_byte_size_text, time_text};
use kernelgate::exit::ProcessExitReason;
use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::measure::accuracy::{
    EventAndCuptiTimeRow, HotAndColdReadTimesRow, SpinTimedByEventsRow,
};
use kernelgate::measure::limits::MeasuredDeviceLimits;
use kernelgate::protocol::{
    self, RequestedBenchAction, ResponseToBenchAction, TimingAccuracyReport,
};
use kernelgate::record::RecordFoldersOfPackage;
use kernelgate_cuda::driver::device;

use crate::benches::bench_requests::{self, BenchRequestSettings};
use crate::compare::progress::parse_duration;
use crate::verbs::shared::bench_flags::BenchExecutableFlags;
use crate::verbs::shared::case_selection::error_for_unexpected_response;
use crate::verbs::shared::interrupt;
use crate::verbs::shared::output::{OutputFormat, print_as_json};

#[derive(Debug, clap::Args)]
pub struct TimingCommandArguments {
    /// With `--part cases`, measure only cases whose id matches this regular expression
    filter: Option<String>,
    /// Number of the GPU, counted from 0
    #[arg(long, env = "KERNELGATE_DEVICE", value_name = "NUMBER", default_value_t = 0)]
    device: usize,
    /// Measure only this part
    #[arg(long, value_enum)]
    part: Option<MeasuredTimingFacts>,
    #[command(flatten)]
    benches: BenchExecutableFlags,
    /// Time after which a bench process that gives no response is killed
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    wait: Duration,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum MeasuredTimingFacts {
    /// Spins of known length.
    Spins,
    /// Device copies, timed with events and compared with CUPTI's record of the same launches.
    Cupti,
    /// Cases of the benches with hot caches, timed with events and compared with CUPTI's record of
    /// the same launches; measured only if named in `--part`.
    Cases,
    /// Reads of GPU memory with the caches hot and cold.
    Cold,
    /// Bandwidths and GEMMs.
    Limits,
}

impl From<MeasuredTimingFacts> for protocol::TimingAccuracyReportPart {
    fn from(part: MeasuredTimingFacts) -> Self {
        match part {
            MeasuredTimingFacts::Spins => Self::Spins,
            MeasuredTimingFacts::Cupti => Self::Cupti,
            MeasuredTimingFacts::Cases => Self::Cases,
            MeasuredTimingFacts::Cold => Self::Cold,
            MeasuredTimingFacts::Limits => Self::Limits,
        }
    }
}

pub fn run_timing_command(
    arguments: &TimingCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    // The GPU is checked before cargo builds the benches.
    device::count_gpus().map_err(|error| anyhow::anyhow!("timing needs a GPU: {error}"))?;
    let running = &interrupt::kill_child_and_exit_on_interrupt()?;
    let found = arguments.benches.find_selected_benches(&store.root, running)?;
    let settings = [
        ("KERNELGATE_BACKEND", "cuda".to_owned()),
        ("KERNELGATE_DEVICE", arguments.device.to_string()),
    ];
    let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let filter = arguments.filter.as_deref();
    let asking =
        BenchRequestSettings { settings, filter, timeout: arguments.wait, running_child: running };
    let action = RequestedBenchAction::Timing { part: arguments.part.map(Into::into) };
    let show = |bench: &str, answer| {
        match answer {
            ResponseToBenchAction::Timing(report) => match arguments.format {
                OutputFormat::Json => print_as_json(&report)?,
                format => print_timing_report(&report, |table| format.format_table(table)),
            },
            ResponseToBenchAction::Refused(reason) => anyhow::bail!("{reason}"),
            _ => return Err(error_for_unexpected_response(bench)),
        }
        Ok(())
    };
    match arguments.part {
        Some(MeasuredTimingFacts::Cases) => {
            CaseIdFilter::parse_exact_or_regex(filter, false)?;
            bench_requests::request_from_each_bench(&found, &asking, &action, show)?;
        }
        _ => {
            anyhow::ensure!(filter.is_none(), "a filter of cases goes with --part cases");
            // Only the first bench executable is asked, because facts about event timing do not
            // depend on the bench.
            let bench = &found.executables[0];
            show(&bench.bench, bench_requests::request_from_one_bench(bench, &asking, &action)?)?;
        }
    }
    Ok(ProcessExitReason::Fine)
}

fn print_timing_report(report: &TimingAccuracyReport, show: impl Fn(&AlignedTextTable) -> String) {
    let environment = &report.environment;
    let driver = match environment.gpus.is_empty() {
        true => "unknown".to_owned(),
        false => environment.gpus.distinct_values_of_gpus(|gpu| gpu.driver.clone()),
    };
    println!("{}, driver {driver}", environment.device_name);
    let mut tables = vec![launch_overhead_table(report)];
    if let Some(limits) = &report.limits {
        tables.push(memory_bandwidth_table(limits));
        tables.extend((!limits.flops_per_s.is_empty()).then(|| arithmetic_rate_table(limits)));
    }
    tables.extend(report.spins.as_deref().map(spin_kernel_times_table));
    tables.extend(report.cupti.as_deref().map(event_and_cupti_times_table));
    tables.extend(report.cold.as_deref().map(hot_and_cold_reads_table));
    for table in tables {
        println!("\n{}", show(&table));
    }
    for note in &report.notes {
        println!("\n{note}");
    }
}

/// A table of the overheads of launches and events on the GPU, as times.
fn launch_overhead_table(report: &TimingAccuracyReport) -> AlignedTextTable {
    let overhead = report.overhead;
    let mut table = AlignedTextTable::new(&["overhead", "time"]);
    for (what, ns) in [
        ("between two events with nothing between them", overhead.event_pair_ns),
        ("of a launch in a stream, on the device", overhead.launch_ns),
        ("of a kernel in a graph", overhead.graph_node_ns),
        ("of a launch, on the host", overhead.host_launch_ns),
        ("of the events around a launch, subtracted", overhead.around_launch_ns),
        ("of the events around a graph, subtracted", overhead.around_graph_ns),
    ] {
        table.add_row(vec![what.to_owned(), time_text(ns)]);
    }
    table
}

fn memory_bandwidth_table(limits: &MeasuredDeviceLimits) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&["read", "written", "time", "rate", "fastest pass"]);
    for limit in &limits.memory {
        table.add_row(vec![
            decimal_byte_size_text(limit.traffic.read_bytes),
            decimal_byte_size_text(limit.traffic.write_bytes),
            time_text(limit.time_ns),
            format!("{:.0} GB/s", limit.bytes_read_and_written_per_s() / 1e9),
            limit.pass.clone(),
        ]);
    }
    table
}

/// A table of measured operations per second of the GPU's arithmetic units, by unit and dtype.
fn arithmetic_rate_table(limits: &MeasuredDeviceLimits) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&["unit", "rate"]);
    for (unit, rate) in &limits.flops_per_s {
        table.add_row(vec![unit.clone(), format!("{:.1} TFLOP/s", rate / 1e12)]);
    }
    table
}

/// A table of spin kernels of known length: their time by the GPU's own timer and by CUDA events.
fn spin_kernel_times_table(rows: &[SpinTimedByEventsRow]) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&[
        "spin of",
        "by the device's timer",
        "by events",
        "difference",
        "less that of an empty spin",
        "relative",
    ]);
    for row in rows {
        let difference = row.events_ns - row.spent_ns;
        let calibrated = difference - row.offset_ns;
        table.add_row(vec![
            time_text(row.wanted_ns as f64),
            time_text(row.spent_ns),
            time_text(row.events_ns),
            time_text_with_sign(difference),
            time_text_with_sign(calibrated),
            format!("{:+.2}%", 100.0 * calibrated / row.spent_ns),
        ]);
    }
    table
}

/// A table of launches with the time by CUDA events and the time by CUPTI's records of the same
/// launches.
fn event_and_cupti_times_table(rows: &[EventAndCuptiTimeRow]) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&[
        "kernel",
        "cache",
        "by events",
        "by events, recorded",
        "by CUPTI",
        "difference, recorded",
        "relative",
    ]);
    for row in rows {
        let difference = row.events_recorded_ns - row.cupti_ns;
        table.add_row(vec![
            row.what.clone(),
            row.cache.clone(),
            time_text(row.events_ns),
            time_text(row.events_recorded_ns),
            time_text(row.cupti_ns),
            time_text_with_sign(difference),
            format!("{:+.2}%", row.event_time_excess_over_cupti_percent()),
        ]);
    }
    table
}

/// A table of memory reads with the caches hot and cold.
fn hot_and_cold_reads_table(rows: &[HotAndColdReadTimesRow]) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&["read of", "hot", "cold", "memory's best"]);
    for row in rows {
        table.add_row(vec![
            decimal_byte_size_text(row.bytes),
            time_text(row.hot_ns),
            time_text(row.cold_ns),
            time_text(row.memory_ns),
        ]);
    }
    table
}

fn time_text_with_sign(ns: f64) -> String {
    format!("{}{}", if ns < 0.0 { "-" } else { "+" }, time_text(ns.abs()))
}
