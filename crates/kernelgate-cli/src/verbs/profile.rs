//! `kernelgate profile`: what the GPU's time of a case goes to, kernel by kernel, as the hardware recorded it.

use anyhow::Context;
use serde::Serialize;

use super::choice::{Choice, each_implementation};
use super::output::{Format, print_json};
use kernelgate::backend::{Executable, Target};
use kernelgate::display::table::Table;
use kernelgate::display::time;
use kernelgate::exit::Exit;
use kernelgate::harness::cases::{Case, Group};
use kernelgate::harness::problem::{Ready, Setback};
use kernelgate::trace::Summary;
use kernelgate_cuda::observe::cupti::KernelTrace;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// Seed of the random inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Debug, Serialize)]
struct Profiled {
    case: String,
    /// "ok", "failed" or "skipped".
    status: &'static str,
    /// Of one launch after others; absent where it failed or was skipped.
    summary: Option<Summary>,
    /// Why it failed or was skipped.
    reason: Option<String>,
}

impl Profiled {
    fn new(case: String, outcome: Result<Summary, Setback>) -> Self {
        let (status, summary, reason) = match outcome {
            Ok(summary) => ("ok", Some(summary), None),
            Err(Setback::Skip(reason)) => ("skipped", None, Some(reason)),
            Err(Setback::Fail(reason) | Setback::Lost(reason)) => ("failed", None, Some(reason)),
        };
        Self { case, status, summary, reason }
    }
}

/// Launches before the one that is recorded.
const WARM_UP: usize = 3;

pub fn run(arguments: &Arguments) -> anyhow::Result<Exit> {
    let suites = kernelgate_suite::all();
    let wanted = arguments.choice.wanted();
    let place = wanted.place(suites.iter().map(AsRef::as_ref))?;
    let selection = arguments.choice.select(&suites, &place)?;
    let target = wanted.open(&place)?;
    anyhow::ensure!(matches!(target, Target::Cuda(_)), "no GPU to profile");
    // Before anything is captured: graphs made earlier are recorded whole.
    let trace = KernelTrace::start()?.context("CUPTI is missing: `kernelgate doctor` says how to get it")?;
    let (outcomes, lost) = each_implementation(&selection, arguments.seed, "profiling", |group, case, ready| {
        Ok(profile(group, case, ready, &target, &trace))
    })?;
    if lost {
        // A lost device gives nothing back: it is left to the end of the process.
        std::mem::forget((target, trace));
    }
    let profiled: Vec<Profiled> = outcomes.into_iter().map(|(case, outcome)| Profiled::new(case, outcome)).collect();
    match arguments.format {
        Format::Json => print_json(&profiled)?,
        format => profiled.iter().for_each(|case| print(case, format)),
    }
    anyhow::ensure!(profiled.iter().any(|case| case.status != "skipped"), "nothing was profiled: every case was skipped");
    Ok(if profiled.iter().any(|case| case.status == "failed") { Exit::Inconclusive } else { Exit::Fine })
}

fn profile(group: &Group<'_>, case: &Case, ready: &Ready, target: &Target, trace: &KernelTrace) -> Result<Summary, Setback> {
    let (mut executable, _) = ready.verify(group, case, target)?;
    let record = |executable: &mut dyn Executable| {
        let Target::Cuda(device) = target else { unreachable!("only a GPU is profiled") };
        for _ in 0..WARM_UP {
            executable.launch()?;
        }
        executable.synchronize()?;
        trace.take(device)?;
        executable.launch()?;
        executable.synchronize()?;
        trace.take(device)
    };
    match record(executable.as_mut()) {
        Ok(records) => Ok(Summary::of(&records)),
        Err(error) => {
            std::mem::forget(executable);
            Err(Setback::Lost(error.to_string()))
        }
    }
}

fn print(case: &Profiled, format: Format) {
    println!("{}", case.case);
    let Some(summary) = &case.summary else {
        println!("    {}: {}\n", case.status, format.words(case.reason.as_deref().unwrap_or_default()));
        return;
    };
    let mut table = Table::new(&["kernel", "launches", "total", "of the span", "each", "shortest", "longest"]);
    for kernel in &summary.kernels {
        table.row(vec![
            kernel.name.clone(),
            kernel.count.to_string(),
            time(kernel.total_ns as f64),
            format!("{:.1}%", 100.0 * kernel.total_ns as f64 / summary.span_ns as f64),
            time(kernel.total_ns as f64 / kernel.count as f64),
            time(kernel.shortest_ns as f64),
            time(kernel.longest_ns as f64),
        ]);
    }
    println!("{}", if format == Format::Markdown { table.markdown() } else { table.text() });
    let idle = summary.span_ns.saturating_sub(summary.busy_ns);
    println!(
        "{} from the first kernel's start to the last one's end, {} ({:.1}%) with none running\n",
        time(summary.span_ns as f64),
        time(idle as f64),
        100.0 * idle as f64 / summary.span_ns as f64
    );
}
