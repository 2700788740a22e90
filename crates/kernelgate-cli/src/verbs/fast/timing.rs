//! `kernelgate timing`: measures how accurate event timing is on this GPU, with a bench executable
//! of the package.

use std::time::Duration;

use kernelgate::display::table::TextTable;
use kernelgate::display::{byte_text, time_text};
use kernelgate::exit::ExitReason;
use kernelgate::harness::filter::CaseFilter;
use kernelgate::measure::accuracy::{EventAndCuptiTimeRow, HotAndColdReadRow, TimedSpinRow};
use kernelgate::measure::limits::DeviceLimits;
use kernelgate::protocol::{self, BenchResponseBody, RequestedAction, TimingMethodReport};
use kernelgate::record::BaselineStore;
use kernelgate_cuda::driver::device;

use crate::benches::bench_requests::{self, RequestSettings};
use crate::compare::progress::parse_duration;
use crate::verbs::shared::bench_flags::BenchFlags;
use crate::verbs::shared::case_selection::unexpected_response;
use crate::verbs::shared::interrupt;
use crate::verbs::shared::output::{OutputFormat, print_json};

#[derive(Debug, clap::Args)]
pub struct TimingArguments {
    /// Measure only cases whose id matches this regular expression, with `--part cases`
    filter: Option<String>,
    /// Number of the GPU, counted from 0
    #[arg(long, env = "KERNELGATE_DEVICE", value_name = "NUMBER", default_value_t = 0)]
    device: usize,
    /// Measure only this part
    #[arg(long, value_enum)]
    part: Option<TimingPart>,
    #[command(flatten)]
    benches: BenchFlags,
    /// Time after which a bench that has given no response is ended
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    wait: Duration,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum TimingPart {
    /// Spins of known length.
    Spins,
    /// Copies, against CUPTI's record of the same launches.
    Cupti,
    /// Cases of the benches, hot, against CUPTI's record of the same launches; measured only if
    /// named.
    Cases,
    /// Reads with the caches hot and cold.
    Cold,
    /// Bandwidths and GEMMs.
    Limits,
}

impl From<TimingPart> for protocol::TimingReportPart {
    fn from(part: TimingPart) -> Self {
        match part {
            TimingPart::Spins => Self::Spins,
            TimingPart::Cupti => Self::Cupti,
            TimingPart::Cases => Self::Cases,
            TimingPart::Cold => Self::Cold,
            TimingPart::Limits => Self::Limits,
        }
    }
}

pub fn run(arguments: &TimingArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    // The GPU is checked before benches are built.
    device::gpu_count().map_err(|error| anyhow::anyhow!("timing needs a GPU: {error}"))?;
    let running = &interrupt::watched_processes()?;
    let found = arguments.benches.find(&store.root, running)?;
    let settings = [
        ("KERNELGATE_BACKEND", "cuda".to_owned()),
        ("KERNELGATE_DEVICE", arguments.device.to_string()),
    ];
    let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let filter = arguments.filter.as_deref();
    let asking = RequestSettings { settings, filter, timeout: arguments.wait, running };
    let action = RequestedAction::Timing { part: arguments.part.map(Into::into) };
    let show = |bench: &str, answer| {
        match answer {
            BenchResponseBody::Timing(report) => match arguments.format {
                OutputFormat::Json => print_json(&report)?,
                format => print_timing(&report, |table| format.table(table)),
            },
            BenchResponseBody::Refused(reason) => anyhow::bail!("{reason}"),
            _ => return Err(unexpected_response(bench)),
        }
        Ok(())
    };
    match arguments.part {
        Some(TimingPart::Cases) => {
            CaseFilter::parse(filter, false)?;
            bench_requests::ask_each_bench(&found, &asking, &action, show)?;
        }
        _ => {
            anyhow::ensure!(filter.is_none(), "a filter of cases goes with --part cases");
            // Only the first bench is asked, because every bench would measure the same facts about
            // timing.
            let bench = &found.executables[0];
            show(&bench.bench, bench_requests::ask_one_bench(bench, &asking, &action)?)?;
        }
    }
    Ok(ExitReason::Fine)
}

fn print_timing(report: &TimingMethodReport, show: impl Fn(&TextTable) -> String) {
    let environment = &report.environment;
    let driver = match environment.gpus.is_empty() {
        true => "unknown".to_owned(),
        false => environment.gpus.values(|gpu| gpu.driver.clone()),
    };
    println!("{}, driver {driver}", environment.device_name);
    let mut tables = vec![overhead_table(report)];
    if let Some(limits) = &report.limits {
        tables.push(bandwidth_table(limits));
        tables.extend((!limits.flops_per_s.is_empty()).then(|| matmul_rate_table(limits)));
    }
    tables.extend(report.spins.as_deref().map(spins_table));
    tables.extend(report.cupti.as_deref().map(recorded_table));
    tables.extend(report.cold.as_deref().map(cold_read_table));
    for table in tables {
        println!("\n{}", show(&table));
    }
    for note in &report.notes {
        println!("\n{note}");
    }
}

/// A table of the overheads of launches and events.
fn overhead_table(report: &TimingMethodReport) -> TextTable {
    let overhead = report.overhead;
    let mut table = TextTable::new(&["overhead", "time"]);
    for (what, ns) in [
        ("between two events with nothing between them", overhead.event_pair_ns),
        ("of a launch in a stream, on the device", overhead.launch_ns),
        ("of a kernel in a graph", overhead.graph_node_ns),
        ("of a launch, on the host", overhead.host_launch_ns),
        ("of the events around a launch, subtracted", overhead.around_launch_ns),
        ("of the events around a graph, subtracted", overhead.around_graph_ns),
    ] {
        table.row(vec![what.to_owned(), time_text(ns)]);
    }
    table
}

fn bandwidth_table(limits: &DeviceLimits) -> TextTable {
    let mut table = TextTable::new(&["read", "written", "time", "rate", "fastest pass"]);
    for limit in &limits.memory {
        table.row(vec![
            byte_text(limit.traffic.read_bytes),
            byte_text(limit.traffic.write_bytes),
            time_text(limit.time_ns),
            format!("{:.0} GB/s", limit.bytes_per_s() / 1e9),
            limit.pass.clone(),
        ]);
    }
    table
}

/// A table of the rates of arithmetic units.
fn matmul_rate_table(limits: &DeviceLimits) -> TextTable {
    let mut table = TextTable::new(&["unit", "rate"]);
    for (unit, rate) in &limits.flops_per_s {
        table.row(vec![unit.clone(), format!("{:.1} TFLOP/s", rate / 1e12)]);
    }
    table
}

/// A table of spins of known length, by the device's timer and by events.
fn spins_table(rows: &[TimedSpinRow]) -> TextTable {
    let mut table = TextTable::new(&[
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
        table.row(vec![
            time_text(row.wanted_ns as f64),
            time_text(row.spent_ns),
            time_text(row.events_ns),
            signed_time(difference),
            signed_time(calibrated),
            format!("{:+.2}%", 100.0 * calibrated / row.spent_ns),
        ]);
    }
    table
}

/// A table of launches, by events and by CUPTI.
fn recorded_table(rows: &[EventAndCuptiTimeRow]) -> TextTable {
    let mut table = TextTable::new(&[
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
        table.row(vec![
            row.what.clone(),
            row.cache.clone(),
            time_text(row.events_ns),
            time_text(row.events_recorded_ns),
            time_text(row.cupti_ns),
            signed_time(difference),
            format!("{:+.2}%", row.event_excess_percent()),
        ]);
    }
    table
}

/// A table of reads with caches hot and cold.
fn cold_read_table(rows: &[HotAndColdReadRow]) -> TextTable {
    let mut table = TextTable::new(&["read of", "hot", "cold", "memory's best"]);
    for row in rows {
        table.row(vec![
            byte_text(row.bytes),
            time_text(row.hot_ns),
            time_text(row.cold_ns),
            time_text(row.memory_ns),
        ]);
    }
    table
}

fn signed_time(ns: f64) -> String {
    format!("{}{}", if ns < 0.0 { "-" } else { "+" }, time_text(ns.abs()))
}
