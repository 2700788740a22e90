//! `kernelgate timing`: how far event timing can be trusted on this GPU, measured now.

use std::time::Duration;

use anyhow::Context;
use serde::Serialize;

use super::output::{Format, print_json};
use kernelgate::backend::Target;
use kernelgate::display::table::Table;
use kernelgate::display::{bytes, time};
use kernelgate::exit::Exit;
use kernelgate::harness::place::DEFAULT_TIMEOUT_S;
use kernelgate::measure::accuracy::{self, ColdRow, SpinRow, TraceRow};
use kernelgate::measure::events::EventTimer;
use kernelgate::measure::limits::{Limits, Overhead};
use kernelgate::record::Environment;
use kernelgate_cuda::Device;
use kernelgate_cuda::library::Library;
use kernelgate_cuda::observe::telemetry::{Reading, Telemetry};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Which GPU, counted from 0
    #[arg(long, env = "KERNELGATE_DEVICE", value_name = "NUMBER", default_value_t = 0)]
    device: usize,
    /// Only one part
    #[arg(long, value_enum)]
    part: Option<Part>,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Spins of known length.
    Spins,
    /// Copies, against CUPTI's record of the same launches.
    Cupti,
    /// Reads with the caches hot and cold.
    Cold,
    /// Bandwidths and matrix products.
    Limits,
}

/// Everything that was measured; parts that were not asked for, or cannot be measured, are absent.
#[derive(Debug, Serialize)]
struct Report {
    environment: Environment,
    telemetry: Vec<Reading>,
    overhead: Overhead,
    limits: Option<Limits>,
    spins: Option<Vec<SpinRow>>,
    cold: Option<Vec<ColdRow>>,
    cupti: Option<Vec<TraceRow>>,
    notes: Vec<String>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Exit> {
    let device = Device::open(arguments.device, Duration::from_secs(DEFAULT_TIMEOUT_S)).context("no GPU to time")?;
    let report = measure(arguments, &Target::Cuda(device))?;
    match arguments.format {
        Format::Json => print_json(&report)?,
        format => print(&report, |table| if format == Format::Markdown { table.markdown() } else { table.text() }),
    }
    Ok(Exit::Fine)
}

fn measure(arguments: &Arguments, target: &Target) -> anyhow::Result<Report> {
    let Target::Cuda(device) = target else { anyhow::bail!("timing is about GPUs") };
    let wanted = |part| arguments.part.is_none_or(|only| only == part);
    let telemetry = target.telemetry();
    let read = || telemetry.iter().map(Telemetry::read);
    let mut readings: Vec<Reading> = read().collect();
    let mut notes = Vec::new();
    let mut events = EventTimer::new(device)?;
    let spins = wanted(Part::Spins).then(|| accuracy::spins(&mut events)).transpose()?;
    let limits = if wanted(Part::Limits) {
        Some(Limits::measure_cuda_all(&mut events)?)
    } else if wanted(Part::Cold) {
        Some(Limits::measure_cuda(&mut events, &[kernelgate::workload::Work::bytes(1, 0)])?)
    } else {
        None
    };
    let memory = limits.as_ref().and_then(|limits| limits.bandwidth.last());
    let cold = match memory {
        Some(memory) if wanted(Part::Cold) => Some(accuracy::cold(&mut events, memory.read)?),
        _ => None,
    };
    readings.extend(read());
    // Last: CUPTI stays attached to the process and slows every later launch.
    let cupti = if wanted(Part::Cupti) { accuracy::against_cupti(&mut events)? } else { None };
    if cupti.is_none() && wanted(Part::Cupti) {
        notes.push(format!(
            "not compared with the hardware's record: {} is missing: {}",
            Library::Cupti.name(),
            Library::Cupti.advice()
        ));
    }
    let overhead = events.overhead();
    Ok(Report { environment: Environment::of(target), telemetry: readings, overhead, limits, spins, cold, cupti, notes })
}

fn print(report: &Report, show: impl Fn(&Table) -> String) {
    let environment = &report.environment;
    println!("{}, driver {}", environment.device_name, environment.gpu.as_ref().map_or("unknown", |gpu| &gpu.driver));
    let overhead = report.overhead;
    let mut table = Table::new(&["overhead", "time"]);
    for (what, ns) in [
        ("between two events with nothing between them", overhead.event_pair_ns),
        ("of a launch in a stream, on the device", overhead.launch_ns),
        ("of a kernel in a graph", overhead.graph_node_ns),
        ("of a launch, on the host", overhead.host_launch_ns),
        ("of the events around a launch, subtracted", overhead.around_launch_ns),
        ("of the events around a graph, subtracted", overhead.around_graph_ns),
    ] {
        table.row(vec![what.to_owned(), time(ns)]);
    }
    println!("\n{}", show(&table));
    if let Some(limits) = &report.limits {
        let mut table = Table::new(&["working set", "read", "copy", "write"]);
        let rate = |rate: f64| format!("{:.0} GB/s", rate / 1e9);
        for at in &limits.bandwidth {
            table.row(vec![bytes(at.working_set_bytes), rate(at.read), rate(at.copy), rate(at.write)]);
        }
        println!("\n{}", show(&table));
        if !limits.flops_per_s.is_empty() {
            let mut table = Table::new(&["unit", "rate"]);
            for (unit, rate) in &limits.flops_per_s {
                table.row(vec![unit.clone(), format!("{:.1} TFLOP/s", rate / 1e12)]);
            }
            println!("\n{}", show(&table));
        }
    }
    if let Some(rows) = &report.spins {
        let mut table =
            Table::new(&["spin of", "by the device's timer", "by events", "difference", "less that of an empty spin", "relative"]);
        for row in rows {
            let difference = row.events_ns - row.spent_ns;
            let calibrated = difference - row.offset_ns;
            table.row(vec![
                time(row.wanted_ns as f64),
                time(row.spent_ns),
                time(row.events_ns),
                signed(difference),
                signed(calibrated),
                format!("{:+.2}%", 100.0 * calibrated / row.spent_ns),
            ]);
        }
        println!("\n{}", show(&table));
    }
    if let Some(rows) = &report.cupti {
        let mut table =
            Table::new(&["kernel", "cache", "by events", "by events, recorded", "by CUPTI", "difference, recorded", "relative"]);
        for row in rows {
            let difference = row.events_recorded_ns - row.cupti_ns;
            table.row(vec![
                row.what.clone(),
                row.cache.to_owned(),
                time(row.events_ns),
                time(row.events_recorded_ns),
                time(row.cupti_ns),
                signed(difference),
                format!("{:+.2}%", 100.0 * difference / row.cupti_ns),
            ]);
        }
        println!("\n{}", show(&table));
    }
    if let Some(rows) = &report.cold {
        let mut table = Table::new(&["read of", "hot", "cold", "memory's best"]);
        for row in rows {
            table.row(vec![bytes(row.bytes), time(row.hot_ns), time(row.cold_ns), time(row.memory_ns)]);
        }
        println!("\n{}", show(&table));
    }
    for note in &report.notes {
        println!("\n{note}");
    }
}

fn signed(ns: f64) -> String {
    format!("{}{}", if ns < 0.0 { "-" } else { "+" }, time(ns.abs()))
}
