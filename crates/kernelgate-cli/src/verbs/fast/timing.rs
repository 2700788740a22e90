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
    #[arg(id = "filter", value_name = "FILTER")]
    case_id_regex: Option<String>,
    /// Number of the GPU, counted from 0
    #[arg(
        id = "device",
        long = "device",
        env = "KERNELGATE_DEVICE",
        value_name = "NUMBER",
        default_value_t = 0
    )]
    gpu_ordinal: usize,
    /// Measure only this part
    #[arg(id = "part", long = "part", value_name = "PART", value_enum)]
    only_part: Option<TimingCheckPart>,
    #[command(flatten)]
    benches: BenchExecutableFlags,
    /// Time after which a bench process that gives no response is killed
    #[arg(id = "wait", long = "wait", value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    bench_response_timeout: Duration,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum TimingCheckPart {
    /// Kernels that spin for a known time.
    #[value(name = "spins")]
    SpinsOfKnownLength,
    /// Device copies, timed with events and compared with CUPTI's record of the same launches.
    #[value(name = "cupti")]
    CopiesAgainstCupti,
    /// Cases of the benches with hot caches, timed with events and compared with CUPTI's record of
    /// the same launches; measured only if named in `--part`.
    #[value(name = "cases")]
    CasesAgainstCupti,
    /// Reads of GPU memory with the caches hot and cold.
    #[value(name = "cold")]
    HotAndColdReads,
    /// Bandwidths and GEMMs.
    #[value(name = "limits")]
    BandwidthsAndGemms,
}

impl From<TimingCheckPart> for protocol::TimingAccuracyReportPart {
    fn from(part: TimingCheckPart) -> Self {
        match part {
            TimingCheckPart::SpinsOfKnownLength => Self::SpinKernels,
            TimingCheckPart::CopiesAgainstCupti => Self::CopiesAgainstCupti,
            TimingCheckPart::CasesAgainstCupti => Self::CasesAgainstCupti,
            TimingCheckPart::HotAndColdReads => Self::HotAndColdReads,
            TimingCheckPart::BandwidthsAndGemms => Self::DeviceLimits,
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
    let found = arguments.benches.find_selected_benches(&store.package_root, running)?;
    let settings = [
        ("KERNELGATE_BACKEND", "cuda".to_owned()),
        ("KERNELGATE_DEVICE", arguments.gpu_ordinal.to_string()),
    ];
    let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let filter = arguments.case_id_regex.as_deref();
    let asking = BenchRequestSettings {
        bench_variables: settings,
        criterion_filter: filter,
        response_timeout: arguments.bench_response_timeout,
        running_child: running,
    };
    let action =
        RequestedBenchAction::MeasureTimingAccuracy { part: arguments.only_part.map(Into::into) };
    let show = |bench: &str, answer| {
        match answer {
            ResponseToBenchAction::Timing(report) => match arguments.format {
                OutputFormat::Json => print_as_json(&report)?,
                format => print_timing_report(&report, |table| format.format_table(table)),
            },
            ResponseToBenchAction::ActionImpossible(reason) => anyhow::bail!("{reason}"),
            _ => return Err(error_for_unexpected_response(bench)),
        }
        Ok(())
    };
    match arguments.only_part {
        Some(TimingCheckPart::CasesAgainstCupti) => {
            CaseIdFilter::parse_exact_id_or_regex(filter, false)?;
            bench_requests::request_from_each_bench(&found, &asking, &action, show)?;
        }
        _ => {
            anyhow::ensure!(filter.is_none(), "a filter of cases goes with --part cases");
            // Only the first bench executable is asked, because facts about event timing do not
            // depend on the bench.
            let bench = &found.usable_executables[0];
            show(
                &bench.bench_name,
                bench_requests::request_from_one_bench(bench, &asking, &action)?,
            )?;
        }
    }
    Ok(ProcessExitReason::Success)
}

fn print_timing_report(report: &TimingAccuracyReport, show: impl Fn(&AlignedTextTable) -> String) {
    let environment = &report.environment;
    let driver = match environment.gpus.is_empty() {
        true => "unknown".to_owned(),
        false => environment.gpus.join_distinct_values_of_gpus(|gpu| gpu.driver_version.clone()),
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
    for note in &report.unmeasured_part_notes {
        println!("\n{note}");
    }
}

/// A table of the overheads of launches and events on the GPU, as times.
fn launch_overhead_table(report: &TimingAccuracyReport) -> AlignedTextTable {
    let overhead = report.overhead;
    let mut table = AlignedTextTable::new(&["overhead", "time"]);
    for (what, ns) in [
        ("between two events with nothing between them", overhead.empty_event_pair_ns),
        ("of a launch in a stream, on the device", overhead.ns_per_further_stream_kernel),
        ("of a kernel in a graph", overhead.ns_per_further_graph_node),
        ("of a launch, on the host", overhead.host_launch_call_ns),
        ("of the events around a launch, subtracted", overhead.events_around_launch_ns),
        ("of the events around a graph, subtracted", overhead.events_around_graph_ns),
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
            time_text(limit.fastest_pass_ns),
            format!("{:.0} GB/s", limit.bytes_read_and_written_per_s() / 1e9),
            limit.fastest_pass.clone(),
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
        let difference = row.event_spin_ns - row.gpu_timer_spin_ns;
        let calibrated = difference - row.kernel_begin_and_end_ns;
        table.add_row(vec![
            time_text(row.requested_spin_ns as f64),
            time_text(row.gpu_timer_spin_ns),
            time_text(row.event_spin_ns),
            time_text_with_sign(difference),
            time_text_with_sign(calibrated),
            format!("{:+.2}%", 100.0 * calibrated / row.gpu_timer_spin_ns),
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
        let difference = row.event_ns_under_cupti - row.cupti_launch_ns;
        table.add_row(vec![
            row.operation.clone(),
            row.cache_state.clone(),
            time_text(row.event_ns_without_cupti),
            time_text(row.event_ns_under_cupti),
            time_text(row.cupti_launch_ns),
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
            decimal_byte_size_text(row.read_bytes),
            time_text(row.hot_read_ns),
            time_text(row.cold_read_ns),
            time_text(row.device_memory_read_ns),
        ]);
    }
    table
}

fn time_text_with_sign(ns: f64) -> String {
    format!("{}{}", if ns < 0.0 { "-" } else { "+" }, time_text(ns.abs()))
}
