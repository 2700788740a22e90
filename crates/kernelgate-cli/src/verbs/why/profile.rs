//! `kernelgate profile`: shows where the time of a case goes: on a GPU by range and kernel, as the
//! hardware recorded it, otherwise by phase, by the host's clock.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use kernelgate::display::table::TextTable;
use kernelgate::display::{terminal, time_text};
use kernelgate::exit::ExitReason;
use kernelgate::protocol::{
    BenchResponseBody, CaseStatus, ProfiledCase, RecordedLaunches, RequestedAction,
};
use kernelgate::record::BaselineStore;
use kernelgate::record::text::{printable_on_terminal, printable_path};
use kernelgate_trace::diagnose::readable_name;
use kernelgate_trace::stats::shorten;
use serde_json::Value;

use super::batch_curve::{BatchCurve, BatchLaunchTime, batch_curves};
use super::network::{self, RecordedNetwork};
use super::recorded_case::{self, ProfiledRecording};
use super::tool_lines;
use crate::verbs::shared::case_selection::{CaseSelection, ChosenBenches, unexpected_response};
use crate::verbs::shared::output::{OutputFormat, json, print_json, write_files};

/// Longest name of a kernel in the text output, columns.
const MAX_KERNEL_NAME_COLUMNS: usize = 44;

#[derive(Debug, clap::Args)]
pub struct ProfileArguments {
    #[command(flatten)]
    choice: CaseSelection,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
    /// Number of launches to record [default: 3; phases on the CPU: as many as 0.3 s allow]
    #[arg(long, value_name = "N")]
    steps: Option<NonZeroU32>,
    /// Number of launches before the recorded ones [default: 3]
    #[arg(long, value_name = "N")]
    warm_up: Option<u32>,
    /// Also write profile.txt, profile.md and profile.json into this folder, drawings of kernels'
    /// stages and of networks, and traces/ with a recording of each case, which `diagnose`, `stats`
    /// and `export` read
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub fn run(arguments: &ProfileArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    let repetitions = RecordedLaunches {
        warm_up: arguments.warm_up,
        steps: arguments.steps.map(NonZeroU32::get),
    };
    let scratch = tempfile::tempdir()?;
    let folder =
        arguments.out.as_ref().map_or_else(|| scratch.path().to_owned(), |out| out.join("traces"));
    let profiled = profile_cases_of(&arguments.choice, store, repetitions, &folder)?;
    match arguments.format {
        OutputFormat::Json => print_json(&profile_values(&profiled)?)?,
        format => {
            format.print(profiles_text(&profiled, format, terminal::terminal_columns()).trim_end())
        }
    }
    if let Some(out) = &arguments.out {
        let files = [
            ("profile.txt", profiles_text(&profiled, OutputFormat::Text, None)),
            ("profile.md", profiles_text(&profiled, OutputFormat::Markdown, None)),
            ("profile.json", json(&profile_values(&profiled)?)?),
        ];
        let recorded = || profiled.iter().filter_map(|profiled| profiled.recorded.as_ref());
        let drawings: Vec<_> =
            recorded().map(ProfiledRecording::stage_drawings).collect::<Result<_, _>>()?;
        let drawings = drawings
            .into_iter()
            .flatten()
            .chain(network::chart_files(&recorded_networks(&profiled))?);
        let drawings = Vec::from_iter(drawings);
        let drawings = drawings.iter().map(|(name, svg)| (&**name, svg.clone()));
        write_files(out, files.into_iter().chain(drawings), &[])?;
        for recorded in recorded() {
            eprintln!("recorded: {}", printable_path(&recorded.path));
        }
    }
    let with = |status| profiled.iter().any(|profiled| profiled.case.status == status);
    anyhow::ensure!(
        with(CaseStatus::Ok) || with(CaseStatus::Failed),
        "nothing was profiled: every case was skipped"
    );
    Ok(if with(CaseStatus::Failed) { ExitReason::Inconclusive } else { ExitReason::Fine })
}

/// Records the cases that a filter selects into a folder, a file for each.
pub fn record_cases(
    filter: &str,
    benches: &ChosenBenches,
    store: &BaselineStore,
    folder: &Path,
) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let profiled = profile_cases_of(
        &CaseSelection::matching(filter, benches),
        store,
        RecordedLaunches::default(),
        folder,
    )?;
    let mut recorded = Vec::new();
    for RecordedProfile { case, recorded: found, .. } in profiled {
        let why = case.reason.as_deref().unwrap_or("there is no GPU");
        match found {
            Some(found) => recorded.push((case.case, found.path)),
            None => eprintln!("{}: not recorded: {}", case.case, printable_on_terminal(why)),
        }
    }
    anyhow::ensure!(
        !recorded.is_empty(),
        "failed to diagnose {filter}: nothing was recorded; `kernelgate profile` shows what can be \
         seen without a GPU, and a trace is a file with an extension"
    );
    Ok(recorded)
}

/// A profiled case with its recording.
struct RecordedProfile {
    case: ProfiledCase,
    recorded: Option<ProfiledRecording>,
    /// Command lines that measure the case with other tools.
    tools: Vec<Vec<String>>,
}

fn profile_cases_of(
    choice: &CaseSelection,
    store: &BaselineStore,
    repetitions: RecordedLaunches,
    folder: &Path,
) -> anyhow::Result<Vec<RecordedProfile>> {
    let settings = choice.variables();
    let client = choice.bench_client(store)?;
    let (mut profiled, mut files) = (Vec::new(), BTreeSet::new());
    for (bench, answer) in client.ask(&RequestedAction::Record(repetitions))? {
        let BenchResponseBody::Profile(cases) = answer else {
            return Err(unexpected_response(&bench));
        };
        let mut executables = client.found.executables.iter();
        let executable = executables.find(|found| found.bench == bench);
        for mut case in cases {
            let recording = case.recording.take();
            let recorded = recording
                .map(|recording| recorded_case::write_and_read_trace(*recording, folder))
                .transpose()?;
            if let Some(ProfiledRecording { path, .. }) = &recorded {
                let new = files.insert(path.clone());
                anyhow::ensure!(
                    new,
                    "{}: another case was recorded in the file of this name: choose one of them",
                    path.display()
                );
            }
            let kernels = case.summary.iter().flat_map(|summary| &summary.kernels);
            let kernels: Vec<&str> = kernels.map(|kernel| kernel.name.as_str()).collect();
            let tools =
                executable.filter(|_| recorded.is_some()).map_or_else(Vec::new, |executable| {
                    tool_lines::tool_command_lines(executable, &settings, &case.case, &kernels)
                        .to_vec()
                });
            profiled.push(RecordedProfile { case, recorded, tools });
        }
    }
    Ok(profiled)
}

/// Time of one launch of a batch case; `None` if the case computes no samples.
fn batch_time_of_profile(profiled: &RecordedProfile) -> Option<BatchLaunchTime> {
    let case = &profiled.case;
    let by_host = || {
        let launch = case.phases.iter().find(|phase| phase.name == "launch")?;
        Some((launch.total_ns / launch.count.max(1) as f64, None))
    };
    let recorded =
        profiled.recorded.as_ref().and_then(ProfiledRecording::launch_time_and_limit_share);
    let (launch_ns, of_limit) = recorded.or_else(by_host)?;
    Some(BatchLaunchTime { case: case.case.clone(), samples: case.samples?, launch_ns, of_limit })
}

fn batch_curves_of(profiled: &[RecordedProfile]) -> Vec<BatchCurve> {
    batch_curves(&profiled.iter().filter_map(batch_time_of_profile).collect::<Vec<_>>())
}

fn recorded_networks(profiled: &[RecordedProfile]) -> Vec<RecordedNetwork> {
    let recorded = profiled.iter().filter_map(|profiled| profiled.recorded.as_ref());
    recorded.filter_map(ProfiledRecording::network).collect()
}

/// The profiled cases as JSON values.
fn profile_values(profiled: &[RecordedProfile]) -> anyhow::Result<Vec<Value>> {
    let (curves, networks) = (batch_curves_of(profiled), recorded_networks(profiled));
    let value = |profiled: &RecordedProfile| {
        let mut value = serde_json::to_value(&profiled.case)?;
        let case = &profiled.case.case;
        if let Some(of) = curves.iter().find_map(|curve| curve.batch_json_of_case(case)) {
            value["batch"] = of;
        }
        if let Some(network) = networks.iter().find(|network| network.case == *case) {
            value["network"] = network.json(&networks);
        }
        if let Some(recorded) = &profiled.recorded {
            value["recorded"] = recorded.json();
            let tools: Vec<String> = profiled.tools.iter().map(|words| words.join(" ")).collect();
            value["tools"] = tools.into();
        }
        Ok(value)
    };
    profiled.iter().map(value).collect()
}

fn profiles_text(
    profiled: &[RecordedProfile],
    format: OutputFormat,
    columns: Option<usize>,
) -> String {
    let shown = |table: &TextTable| match format {
        OutputFormat::Markdown => table.to_markdown(),
        _ => table.text_within(columns),
    };
    let cases = profiled.iter().map(|profiled| profile_text(profiled, format, &shown));
    let curves = batch_curves_of(profiled);
    let curves = curves.iter().map(|curve| curve.text(&shown));
    cases.chain(curves).chain([network::text(&recorded_networks(profiled), &shown)]).collect()
}

fn profile_text(
    profiled: &RecordedProfile,
    format: OutputFormat,
    shown: &dyn Fn(&TextTable) -> String,
) -> String {
    let case = &profiled.case;
    if !case.phases.is_empty() {
        return phase_tables_text(case, format, shown);
    }
    let Some(summary) = &case.summary else {
        let reason = format.words(case.reason.as_deref().unwrap_or_default());
        return format!("{}\n    {}: {reason}\n\n", case.case, case.status.name());
    };
    let mut table = TextTable::new(&[
        "kernel",
        "launches",
        "total",
        "of the span",
        "each",
        "shortest",
        "longest",
    ]);
    for kernel in &summary.kernels {
        table.row(vec![
            shorten(&readable_name(&kernel.name), MAX_KERNEL_NAME_COLUMNS),
            kernel.count.to_string(),
            time_text(kernel.total_ns as f64),
            format!("{:.1}%", 100.0 * kernel.total_ns as f64 / summary.span_ns.max(1) as f64),
            time_text(kernel.total_ns as f64 / kernel.count as f64),
            time_text(kernel.shortest_ns as f64),
            time_text(kernel.longest_ns as f64),
        ]);
    }
    let table = shown(&table);
    let idle = summary.span_ns.saturating_sub(summary.busy_ns);
    let recorded =
        profiled.recorded.as_ref().map(|recorded| recorded.text(format, shown)).unwrap_or_default();
    let tools: Vec<String> =
        profiled.tools.iter().map(|words| tool_lines::wrapped_command(words)).collect();
    let tools = match format {
        OutputFormat::Markdown if !tools.is_empty() => {
            format!("```sh\n{}\n```\n", tools.join("\n"))
        }
        _ => tools.join("\n") + "\n",
    };
    format!(
        "{}\n{recorded}\n{table}\n{} from the first kernel's start to the last one's end, {} \
         ({:.1}%) with none running\n\n{tools}\n",
        case.case,
        time_text(summary.span_ns as f64),
        time_text(idle as f64),
        100.0 * idle as f64 / summary.span_ns.max(1) as f64
    )
}

/// The phases of a case, with an explanation.
fn phase_tables_text(
    case: &ProfiledCase,
    format: OutputFormat,
    shown: &dyn Fn(&TextTable) -> String,
) -> String {
    let mut table =
        TextTable::new(&["phase", "times", "total", "each", "shortest", "longest", "threads busy"]);
    for phase in &case.phases {
        table.row(vec![
            phase.name.clone(),
            phase.count.to_string(),
            time_text(phase.total_ns),
            time_text(phase.total_ns / phase.count.max(1) as f64),
            time_text(phase.shortest_ns),
            time_text(phase.longest_ns),
            phase.busy_threads.map_or_else(|| "-".to_owned(), |busy| format!("{busy:.2}")),
        ]);
    }
    let table = shown(&table);
    let note = case.reason.as_deref().map(|note| format!("; {}", format.words(note)));
    format!(
        "{}\n{table}\nwall time of the host; launch: the call and the wait for its end, after \
         others; threads busy: CPU time over wall time{}\n\n",
        case.case,
        note.unwrap_or_default()
    )
}
