//! `kernelgate profile`: shows where the time of a case goes, on a GPU by range and kernel as CUPTI
//! recorded them, on a CPU by phase as the host's clock measured it.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::{terminal, time_text};
use kernelgate::exit::ProcessExitReason;
use kernelgate::protocol::{
    BenchCaseStatus, CaseProfileResponse, LaunchesToRecord, RequestedBenchAction,
    ResponseToBenchAction,
};
use kernelgate::record::RecordFoldersOfPackage;
use kernelgate::record::text::{clean_message_for_terminal, path_for_terminal};
use kernelgate_trace::diagnose::shortened_kernel_name_for_readers;
use kernelgate_trace::stats::shorten_in_the_middle;
use serde_json::Value;

use super::batch_curve::{BatchCurve, BatchLaunchTime, batch_curves_of_cases};
use super::network::{self, RecordedNetwork};
use super::recorded_case::{self, DiagnosedRecording};
use super::tool_lines;
use crate::verbs::shared::case_selection::{
    BenchSelectionFlags, CaseSelectionFlags, error_for_unexpected_response,
};
use crate::verbs::shared::output::{
    OutputFormat, json_safe_for_terminals, print_as_json, write_all_files_or_none,
};

/// Longest name of a kernel in the text output of `kernelgate profile`, in columns.
const MAX_KERNEL_NAME_COLUMNS: usize = 44;

#[derive(Debug, clap::Args)]
pub struct ProfileCommandArguments {
    #[command(flatten)]
    choice: CaseSelectionFlags,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
    /// Number of launches of a case to record [default: 3; phases on the CPU: as many as 0.3 s
    /// allow]
    #[arg(id = "steps", long = "steps", value_name = "N")]
    recorded_launches: Option<NonZeroU32>,
    /// Number of launches of a case before the recorded ones [default: 3]
    #[arg(id = "warm_up", long = "warm-up", value_name = "N")]
    warm_up_launches: Option<u32>,
    /// Also write profile.txt, profile.md and profile.json into this folder, drawings of kernels'
    /// stages and of networks, and traces/ with a recording of each case, which `diagnose`, `stats`
    /// and `export` read
    #[arg(id = "out", long = "out", value_name = "DIR")]
    output_folder: Option<PathBuf>,
}

pub fn run_profile_command(
    arguments: &ProfileCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let repetitions = LaunchesToRecord {
        warm_up_launches: arguments.warm_up_launches,
        recorded_launches: arguments.recorded_launches.map(NonZeroU32::get),
    };
    let scratch = tempfile::tempdir()?;
    let folder = arguments
        .output_folder
        .as_ref()
        .map_or_else(|| scratch.path().to_owned(), |out| out.join("traces"));
    let profiled = profile_selected_cases(&arguments.choice, store, repetitions, &folder)?;
    match arguments.format {
        OutputFormat::Json => print_as_json(&profiles_as_json_values(&profiled)?)?,
        format => format.print_wrapped_lines(
            all_profiles_text(&profiled, format, terminal::terminal_columns()).trim_end(),
        ),
    }
    if let Some(out) = &arguments.output_folder {
        let files = [
            ("profile.txt", all_profiles_text(&profiled, OutputFormat::Text, None)),
            ("profile.md", all_profiles_text(&profiled, OutputFormat::Markdown, None)),
            ("profile.json", json_safe_for_terminals(&profiles_as_json_values(&profiled)?)?),
        ];
        let recorded = || profiled.iter().filter_map(|profiled| profiled.recorded.as_ref());
        let drawings: Vec<_> =
            recorded().map(DiagnosedRecording::stage_chart_files).collect::<Result<_, _>>()?;
        let drawings = drawings
            .into_iter()
            .flatten()
            .chain(network::network_chart_files(&networks_of_profiles(&profiled))?);
        let drawings = Vec::from_iter(drawings);
        let drawings = drawings.iter().map(|(name, svg)| (&**name, svg.clone()));
        write_all_files_or_none(out, files.into_iter().chain(drawings), &[])?;
        for recorded in recorded() {
            eprintln!("recorded: {}", path_for_terminal(&recorded.recording_file));
        }
    }
    let with = |status| profiled.iter().any(|profiled| profiled.case.status == status);
    anyhow::ensure!(
        with(BenchCaseStatus::Ok) || with(BenchCaseStatus::Failed),
        "nothing was profiled: every case was skipped"
    );
    Ok(if with(BenchCaseStatus::Failed) {
        ProcessExitReason::Inconclusive
    } else {
        ProcessExitReason::Success
    })
}

/// Records the cases that a filter selects into a folder, one file for each case, and returns their
/// ids with the files.
pub fn record_cases_to_folder(
    filter: &str,
    benches: &BenchSelectionFlags,
    store: &RecordFoldersOfPackage,
    folder: &Path,
) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let profiled = profile_selected_cases(
        &CaseSelectionFlags::flags_for_matching_cases(filter, benches),
        store,
        LaunchesToRecord::default(),
        folder,
    )?;
    let mut recorded = Vec::new();
    for CaseWithRecording { case, recorded: found, .. } in profiled {
        let why = case.reason_without_full_profile.as_deref().unwrap_or("there is no GPU");
        match found {
            Some(found) => recorded.push((case.case_id, found.recording_file)),
            None => {
                eprintln!("{}: not recorded: {}", case.case_id, clean_message_for_terminal(why))
            }
        }
    }
    anyhow::ensure!(
        !recorded.is_empty(),
        "failed to diagnose {filter}: nothing was recorded; `kernelgate profile` shows what can be \
         seen without a GPU, and a trace is a file with an extension"
    );
    Ok(recorded)
}

/// A profiled case with its recording; a case that ran on the CPU has none.
struct CaseWithRecording {
    case: CaseProfileResponse,
    recorded: Option<DiagnosedRecording>,
    /// Command lines that measure the same case with Nsight Systems and Nsight Compute.
    profiler_command_lines: Vec<Vec<String>>,
}

fn profile_selected_cases(
    choice: &CaseSelectionFlags,
    store: &RecordFoldersOfPackage,
    repetitions: LaunchesToRecord,
    folder: &Path,
) -> anyhow::Result<Vec<CaseWithRecording>> {
    let settings = choice.bench_environment_variables();
    let client = choice.bench_client(store)?;
    let (mut profiled, mut files) = (Vec::new(), BTreeSet::new());
    for (bench, answer) in client
        .send_request_to_all_benches(&RequestedBenchAction::RecordCuptiActivity(repetitions))?
    {
        let ResponseToBenchAction::Profile(cases) = answer else {
            return Err(error_for_unexpected_response(&bench));
        };
        let mut executables = client.found_benches.usable_executables.iter();
        let executable = executables.find(|found| found.bench_name == bench);
        for mut case in cases {
            let recording = case.recording.take();
            let recorded = recording
                .map(|recording| {
                    recorded_case::write_recording_and_read_as_trace(*recording, folder)
                })
                .transpose()?;
            if let Some(DiagnosedRecording { recording_file: path, .. }) = &recorded {
                let new = files.insert(path.clone());
                anyhow::ensure!(
                    new,
                    "{}: another case was recorded in the file of this name: choose one of them",
                    path.display()
                );
            }
            let kernels = case.summary.iter().flat_map(|summary| &summary.kernels);
            let kernels: Vec<&str> = kernels.map(|kernel| kernel.kernel_symbol.as_str()).collect();
            let tools =
                executable.filter(|_| recorded.is_some()).map_or_else(Vec::new, |executable| {
                    tool_lines::nsight_command_lines(executable, &settings, &case.case_id, &kernels)
                        .to_vec()
                });
            profiled.push(CaseWithRecording { case, recorded, profiler_command_lines: tools });
        }
    }
    Ok(profiled)
}

/// Number of samples and time of one launch; `None` if the case computes no samples.
fn batch_launch_time_of_profile(profiled: &CaseWithRecording) -> Option<BatchLaunchTime> {
    let case = &profiled.case;
    let by_host = || {
        let launch = case.phases.iter().find(|phase| phase.phase == "launch")?;
        Some((launch.total_ns / launch.measurement_count.max(1) as f64, None))
    };
    let recorded =
        profiled.recorded.as_ref().and_then(DiagnosedRecording::launch_time_and_share_of_limit);
    let (launch_ns, of_limit) = recorded.or_else(by_host)?;
    Some(BatchLaunchTime {
        case_id: case.case_id.clone(),
        samples_per_launch: case.items_per_launch?,
        launch_ns,
        share_of_limit: of_limit,
    })
}

fn batch_curves_of_profiles(profiled: &[CaseWithRecording]) -> Vec<BatchCurve> {
    batch_curves_of_cases(
        &profiled.iter().filter_map(batch_launch_time_of_profile).collect::<Vec<_>>(),
    )
}

fn networks_of_profiles(profiled: &[CaseWithRecording]) -> Vec<RecordedNetwork> {
    let recorded = profiled.iter().filter_map(|profiled| profiled.recorded.as_ref());
    recorded.filter_map(DiagnosedRecording::as_network).collect()
}

/// The profiles of all selected cases as JSON values.
fn profiles_as_json_values(profiled: &[CaseWithRecording]) -> anyhow::Result<Vec<Value>> {
    let (curves, networks) = (batch_curves_of_profiles(profiled), networks_of_profiles(profiled));
    let value = |profiled: &CaseWithRecording| {
        let mut value = serde_json::to_value(&profiled.case)?;
        let case = &profiled.case.case_id;
        if let Some(of) = curves.iter().find_map(|curve| curve.batch_numbers_of_case_as_json(case))
        {
            value["batch"] = of;
        }
        if let Some(network) = networks.iter().find(|network| network.case_id == *case) {
            value["network"] = network.network_numbers_as_json(&networks);
        }
        if let Some(recorded) = &profiled.recorded {
            value["recorded"] = recorded.profile_as_json();
            let tools: Vec<String> =
                profiled.profiler_command_lines.iter().map(|words| words.join(" ")).collect();
            value["tools"] = tools.into();
        }
        Ok(value)
    };
    profiled.iter().map(value).collect()
}

fn all_profiles_text(
    profiled: &[CaseWithRecording],
    format: OutputFormat,
    columns: Option<usize>,
) -> String {
    let shown = |table: &AlignedTextTable| match format {
        OutputFormat::Markdown => table.to_markdown(),
        _ => table.aligned_text_for_terminal(columns),
    };
    let cases = profiled.iter().map(|profiled| text_of_one_profile(profiled, format, &shown));
    let curves = batch_curves_of_profiles(profiled);
    let curves = curves.iter().map(|curve| curve.batch_curve_table_with_heading(&shown));
    cases
        .chain(curves)
        .chain([network::all_network_tables_text(&networks_of_profiles(profiled), &shown)])
        .collect()
}

fn text_of_one_profile(
    profiled: &CaseWithRecording,
    format: OutputFormat,
    shown: &dyn Fn(&AlignedTextTable) -> String,
) -> String {
    let case = &profiled.case;
    if !case.phases.is_empty() {
        return cpu_phases_text(case, format, shown);
    }
    let Some(summary) = &case.summary else {
        let reason = format
            .escape_foreign_text(case.reason_without_full_profile.as_deref().unwrap_or_default());
        return format!("{}\n    {}: {reason}\n\n", case.case_id, case.status.name_in_responses());
    };
    let mut table = AlignedTextTable::new(&[
        "kernel",
        "launches",
        "total",
        "of the span",
        "each",
        "shortest",
        "longest",
    ]);
    for kernel in &summary.kernels {
        table.add_row(vec![
            shorten_in_the_middle(
                &shortened_kernel_name_for_readers(&kernel.kernel_symbol),
                MAX_KERNEL_NAME_COLUMNS,
            ),
            kernel.launch_count.to_string(),
            time_text(kernel.total_launch_ns as f64),
            format!(
                "{:.1}%",
                100.0 * kernel.total_launch_ns as f64 / summary.span_ns.max(1) as f64
            ),
            time_text(kernel.total_launch_ns as f64 / kernel.launch_count as f64),
            time_text(kernel.shortest_launch_ns as f64),
            time_text(kernel.longest_launch_ns as f64),
        ]);
    }
    let table = shown(&table);
    let idle = summary.span_ns.saturating_sub(summary.busy_ns);
    let recorded = profiled
        .recorded
        .as_ref()
        .map(|recorded| recorded.recorded_profile_text(format, shown))
        .unwrap_or_default();
    let tools: Vec<String> = profiled
        .profiler_command_lines
        .iter()
        .map(|words| tool_lines::wrapped_command_line(words))
        .collect();
    let tools = match format {
        OutputFormat::Markdown if !tools.is_empty() => {
            format!("```sh\n{}\n```\n", tools.join("\n"))
        }
        _ => tools.join("\n") + "\n",
    };
    format!(
        "{}\n{recorded}\n{table}\n{} from the first kernel's start to the last one's end, {} \
         ({:.1}%) with none running\n\n{tools}\n",
        case.case_id,
        time_text(summary.span_ns as f64),
        time_text(idle as f64),
        100.0 * idle as f64 / summary.span_ns.max(1) as f64
    )
}

/// Tables of the phases of a case that ran on the CPU, with an explanation.
fn cpu_phases_text(
    case: &CaseProfileResponse,
    format: OutputFormat,
    shown: &dyn Fn(&AlignedTextTable) -> String,
) -> String {
    let mut table = AlignedTextTable::new(&[
        "phase",
        "times",
        "total",
        "each",
        "shortest",
        "longest",
        "threads busy",
    ]);
    for phase in &case.phases {
        table.add_row(vec![
            phase.phase.clone(),
            phase.measurement_count.to_string(),
            time_text(phase.total_ns),
            time_text(phase.total_ns / phase.measurement_count.max(1) as f64),
            time_text(phase.shortest_ns),
            time_text(phase.longest_ns),
            phase.busy_threads.map_or_else(|| "-".to_owned(), |busy| format!("{busy:.2}")),
        ]);
    }
    let table = shown(&table);
    let note = case
        .reason_without_full_profile
        .as_deref()
        .map(|note| format!("; {}", format.escape_foreign_text(note)));
    format!(
        "{}\n{table}\nwall time of the host; launch: the call and the wait for its end, after \
         others; threads busy: CPU time over wall time{}\n\n",
        case.case_id,
        note.unwrap_or_default()
    )
}
