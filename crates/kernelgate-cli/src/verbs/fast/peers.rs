//! `kernelgate peers`: compares times of the last run with kernels of other libraries (peers) for
//! the same problems, which are timed now on the same GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::benches::bench_requests::{self, BenchRequestSettings};
use crate::benches::child_process::{ChildProcessEnd, SharedChildProcess, memory_kill_reason_text};
use crate::benches::process_output::{
    KEPT_BYTES_AT_STREAM_START, KeptPartOfOutput, capture_stream_on_thread,
    wait_for_captured_output,
};
use crate::compare::progress::parse_duration;
use crate::pages::measured_runs::PeerTimeForProblem;
use crate::verbs::shared::bench_flags::BenchExecutableFlags;
use crate::verbs::shared::case_selection::error_for_unexpected_response;
use crate::verbs::shared::interrupt::{self, PartialResultsOnInterrupt};
use crate::verbs::shared::output::{OutputFormat, print_as_json};
use crate::verbs::shared::refusal::RefusalToCompare;
use crate::verbs::shared::sessions::SessionSelectionFlags;
use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::time_text;
use kernelgate::exit::ProcessExitReason;
use kernelgate::measure::plausibility;
use kernelgate::measure::power::PowerStateOfSamples;
use kernelgate::protocol::{PythonPeerProgram, RequestedBenchAction, ResponseToBenchAction};
use kernelgate::record::store::check_baseline_file_name;
use kernelgate::record::text::{
    clean_message_for_terminal, refuse_control_characters, shortened_quotation,
};
use kernelgate::record::{
    BenchProcessRun, CaseRecordWithSamples, GpusInEnvironment, RecordFoldersOfPackage, file,
};
use kernelgate::stats::median;

#[derive(Debug, clap::Args)]
pub struct PeersCommandArguments {
    /// Time only problems whose id matches this regular expression
    #[arg(id = "filter", value_name = "FILTER")]
    problem_id_regex: Option<String>,
    /// Python interpreter that has PyTorch, with which peer programs are run
    #[arg(
        long = "python",
        env = "KERNELGATE_PYTHON",
        value_name = "PROGRAM",
        default_value = "python3"
    )]
    python_interpreter: PathBuf,
    #[command(flatten)]
    sessions: SessionSelectionFlags,
    #[command(flatten)]
    benches: BenchExecutableFlags,
    /// Time after which a peer program is treated as hung and killed
    #[arg(id = "wait", long = "wait", value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    peer_program_timeout: Duration,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

/// Largest accepted size in bytes of a file with the times of peers.
const MAX_PEER_TIMES_FILE_BYTES: u64 = 64 << 20;
/// Time within which a bench must answer which peer programs it has.
const PEER_PROGRAM_LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// A problem in the JSON list that a peer program (other libraries' kernels) reads from standard
/// input.
#[derive(Debug, Serialize)]
struct ProblemForPeerProgram<'a> {
    #[serde(rename = "id")]
    problem_id: &'a str,
    #[serde(rename = "workload")]
    workload_name: &'a str,
    #[serde(rename = "axes")]
    value_of_each_axis: &'a BTreeMap<String, String>,
}

/// A JSON line that a peer program prints: first its environment, then its results.
#[derive(Debug)]
enum PeerProgramLine {
    PeerEnvironment(BTreeMap<String, String>),
    PeerResult(PeerKernelResult),
}

/// The time of a peer's kernel for one problem, or the reason why it has no time.
#[derive(Debug, Deserialize)]
struct PeerKernelResult {
    #[serde(rename = "id")]
    problem_id: String,
    #[serde(rename = "peer")]
    peer_name: String,
    #[serde(rename = "about")]
    peer_description: String,
    #[serde(rename = "median_ns")]
    peer_median_ns: Option<f64>,
    /// Whether the GPU's power state was steady under load while the peer's kernel was timed.
    #[serde(default)]
    power: Option<PowerStateOfSamples>,
    /// SM clock in MHz while the peer's kernel ran.
    #[serde(default)]
    #[serde(rename = "clock_mhz")]
    sm_clock_mhz: Option<f64>,
    #[serde(rename = "error")]
    missing_time_reason: Option<String>,
}

impl PeerProgramLine {
    /// A JSON line with an id is a result of a peer; a line without an id is its environment.
    fn parse_peer_line(text: &str) -> serde_json::Result<PeerProgramLine> {
        let fields: serde_json::Value = serde_json::from_str(text)?;
        if fields.get("id").is_none() {
            return serde_json::from_value(fields).map(Self::PeerEnvironment);
        }
        let result: PeerKernelResult = serde_json::from_value(fields)?;
        if result.peer_median_ns.is_none() && result.missing_time_reason.is_none() {
            return Err(serde::de::Error::missing_field("median_ns"));
        }
        Ok(Self::PeerResult(result))
    }
}

/// The time of a peer's kernel beside the time of one of the package's implementations of the same
/// problem.
#[derive(Debug, Serialize, Deserialize)]
struct PeerTimeBesideOwnTime {
    #[serde(rename = "problem")]
    problem_id: String,
    #[serde(rename = "peer")]
    peer_name: String,
    #[serde(rename = "about")]
    peer_description: String,
    #[serde(rename = "peer_ns")]
    peer_median_ns: Option<f64>,
    /// Whether the GPU's power state was steady under load while the peer's kernel was timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    peer_power: Option<PowerStateOfSamples>,
    /// SM clock in MHz while the peer's kernel ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "peer_clock_mhz")]
    peer_sm_clock_mhz: Option<f64>,
    /// The reason why the peer's kernel has no time.
    #[serde(rename = "error")]
    peer_failure_reason: Option<String>,
    #[serde(rename = "implementation")]
    own_implementation: String,
    #[serde(rename = "ours_ns")]
    own_median_ns: f64,
    /// Share of the hardware limit that the package's own implementation of the case reaches, 0 to
    /// 1.
    #[serde(rename = "of_limit")]
    own_share_of_limit: Option<f64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct PeerComparisonJson {
    #[serde(rename = "device")]
    device_name: String,
    #[serde(rename = "commit")]
    run_commit: String,
    #[serde(rename = "peers")]
    peer_environment: BTreeMap<String, String>,
    /// The reason why rows are missing; `None` if every peer program ran to its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "ended_early")]
    early_end_reason: Option<String>,
    rows: Vec<PeerTimeBesideOwnTime>,
}

pub fn run_peers_command(
    arguments: &PeersCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let runs = arguments.sessions.read_runs_of_package(store)?;
    let filter = arguments
        .problem_id_regex
        .as_deref()
        .map(Regex::new)
        .transpose()
        .context("the filter is not a regular expression")?;
    let problems = own_cases_by_problem(&runs, filter.as_ref());
    ensure!(
        !problems.is_empty(),
        "no hot GPU case of the last run has a peer: run `cargo bench` on a GPU first, or widen \
         the filter"
    );
    let families: BTreeSet<&str> = problems.keys().filter_map(|id| id.split('/').next()).collect();
    let (running, partial) = &interrupt::keep_partial_results_on_interrupt()?;
    let programs = peer_programs_of_families(arguments, store, &families, running)?;
    let gpus = runs.iter().rev().map(|run| &run.environment.gpus).find(|gpus| !gpus.is_empty());
    let cards: Vec<&str> =
        gpus.into_iter().flat_map(GpusInEnvironment::gpus_by_uuid).map(|gpu| &*gpu.uuid).collect();
    // The names of the cards come from a record file and are passed to the driver in a variable, so
    // only plain characters are accepted.
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    for card in &cards {
        ensure!(
            card.chars().all(plain),
            "the run's GPU `{}` is no id of one",
            clean_message_for_terminal(card)
        );
    }
    let (asking, cards) = ((arguments, running, partial), cards.join(","));
    let ResultsOfPeerPrograms {
        rows,
        peer_environment: environment,
        early_end_reason: ended_early,
    } = run_peer_programs_by_family(asking, &cards, &programs, &problems)?;
    let device = runs.first().map(|run| run.environment.device_name.clone()).unwrap_or_default();
    if environment.get("device").is_some_and(|found| *found != device) {
        let why = format!("the run was on {device}, the peers on {}", environment["device"]);
        return Err(RefusalToCompare::refusal_printed_on_stderr(why).into());
    }
    let commit =
        runs.first().map(|run| run.provenance.short_commit_with_changes_mark()).unwrap_or_default();
    let report = PeerComparisonJson {
        device_name: device,
        run_commit: commit,
        peer_environment: environment,
        early_end_reason: ended_early,
        rows,
    };
    report
        .check_peer_comparison_plausible()
        .map_err(|why| anyhow::anyhow!("the peer programs answered {why}"))?;
    // Even incomplete results of peer programs are printed, because they took minutes on a GPU.
    if report.early_end_reason.is_none() || !report.rows.is_empty() {
        match arguments.format {
            OutputFormat::Json => print_as_json(&report)?,
            format => print_peer_comparison(&report, format),
        }
    }
    match report.early_end_reason {
        None => Ok(ProcessExitReason::Success),
        Some(why) if partial.was_interrupted() => {
            eprintln!("\n{why}");
            std::process::exit(ProcessExitReason::INTERRUPTED_EXIT_CODE)
        }
        Some(why) => bail!(why),
    }
}

/// Times and errors that all peer programs printed.
struct ResultsOfPeerPrograms {
    rows: Vec<PeerTimeBesideOwnTime>,
    peer_environment: BTreeMap<String, String>,
    /// The reason why times of peers are missing; `None` if all peer programs ran to their end.
    early_end_reason: Option<String>,
}

/// Runs the peer program of each family for the problems of the family, until a program fails or
/// the user interrupts.
fn run_peer_programs_by_family(
    (arguments, running, partial): (
        &PeersCommandArguments,
        &SharedChildProcess,
        &PartialResultsOnInterrupt,
    ),
    cards: &str,
    programs: &[PythonPeerProgram],
    problems: &BTreeMap<String, Vec<OwnCaseWithMedian<'_>>>,
) -> anyhow::Result<ResultsOfPeerPrograms> {
    let mut rows = Vec::new();
    let mut environment = BTreeMap::new();
    let mut ended_early = None;
    partial.survive_first_interrupt();
    for program in programs {
        let family = &program.workload_family;
        if partial.was_interrupted() {
            ended_early = Some(format!("interrupted, before the peers of {family}"));
            break;
        }
        let requested: Vec<ProblemForPeerProgram<'_>> = problems
            .iter()
            .filter(|(id, _)| id.starts_with(&format!("{family}/")))
            .map(|(id, ours)| ProblemForPeerProgram {
                problem_id: id,
                workload_name: &ours[0].case.workload,
                value_of_each_axis: &ours[0].case.axis_values,
            })
            .collect();
        eprintln!("timing the peers of {} {family} problems", requested.len());
        let (lines, ended) =
            run_peer_program((arguments, running, partial), cards, program, &requested)?;
        ended_early = ended;
        for line in lines {
            let PeerKernelResult {
                problem_id: id,
                peer_name: peer,
                peer_description: about,
                peer_median_ns,
                power,
                sm_clock_mhz: clock_mhz,
                missing_time_reason: error,
            } = match line {
                PeerProgramLine::PeerEnvironment(found) => {
                    environment = found;
                    continue;
                }
                PeerProgramLine::PeerResult(result) => result,
            };
            let ours = problems.get(&id).with_context(|| {
                format!("peers/{} answers for {id}, which it was not asked", program.main_file_name)
            })?;
            rows.extend(ours.iter().map(|ours| {
                PeerTimeBesideOwnTime {
                    problem_id: id.clone(),
                    peer_name: peer.clone(),
                    peer_description: about.clone(),
                    peer_median_ns,
                    peer_power: power,
                    peer_sm_clock_mhz: clock_mhz,
                    peer_failure_reason: error.clone(),
                    own_implementation: ours.case.implementation.clone(),
                    own_median_ns: ours.own_median_ns,
                    own_share_of_limit: ours
                        .case
                        .limit
                        .as_ref()
                        .map(|limit| limit.share_of_limit_reached(ours.own_median_ns)),
                }
            }));
        }
        if ended_early.is_some() {
            break;
        }
    }
    Ok(ResultsOfPeerPrograms { rows, peer_environment: environment, early_end_reason: ended_early })
}

impl PeerComparisonJson {
    /// Checks every name and number of the comparison with peers, which may come from a file of
    /// others or from a peer program.
    fn check_peer_comparison_plausible(&self) -> Result<(), String> {
        refuse_control_characters(&self.device_name)?;
        refuse_control_characters(&self.run_commit)?;
        self.rows.iter().try_for_each(|row| {
            row.check_peer_time_plausible().map_err(|why| {
                format!(
                    "{}, {}: {why}",
                    shortened_quotation(&row.problem_id),
                    shortened_quotation(&row.peer_name)
                )
            })
        })
    }
}

impl PeerTimeBesideOwnTime {
    fn check_peer_time_plausible(&self) -> Result<(), String> {
        let names = [&self.problem_id, &self.peer_name, &self.own_implementation];
        names.into_iter().try_for_each(|name| refuse_control_characters(name))?;
        plausibility::check_launch_ns_plausible("our time", self.own_median_ns)?;
        self.peer_median_ns
            .map_or(Ok(()), |ns| plausibility::check_launch_ns_plausible("its time", ns))?;
        self.peer_sm_clock_mhz.map_or(Ok(()), plausibility::check_sm_clock_mhz_plausible)?;
        self.own_share_of_limit
            .map_or(Ok(()), |share| plausibility::check_time_ratio_plausible("of_limit", share))
    }
}

/// Reads the name of the device and the peers' times from a file that `kernelgate peers --format
/// json` wrote.
pub fn read_device_and_peer_times(
    path: &Path,
) -> anyhow::Result<(String, Vec<PeerTimeForProblem>)> {
    let failed = || {
        format!("failed to read {} as what `kernelgate peers --format json` prints", path.display())
    };
    let text =
        file::read_untrusted_text_up_to(path, MAX_PEER_TIMES_FILE_BYTES).with_context(failed)?;
    let report: PeerComparisonJson = serde_json::from_str(&text).with_context(failed)?;
    report.check_peer_comparison_plausible().map_err(anyhow::Error::msg).with_context(failed)?;
    let time = |row: PeerTimeBesideOwnTime| {
        let PeerTimeBesideOwnTime {
            problem_id: problem,
            peer_name,
            peer_median_ns: peer_ns,
            own_implementation: implementation,
            own_median_ns: ours_ns,
            ..
        } = row;
        let (power, clock_mhz) = (row.peer_power, row.peer_sm_clock_mhz);
        let peer_ns = peer_ns?;
        Some(PeerTimeForProblem {
            workload_and_problem: problem,
            peer_name,
            peer_launch_ns: peer_ns,
            peer_power_state: power,
            peer_sm_clock_mhz: clock_mhz,
            fastest_own_implementation: implementation,
            own_fastest_launch_ns: ours_ns,
        })
    };
    Ok((report.device_name, report.rows.into_iter().filter_map(time).collect()))
}

/// The package's own case with which the kernels of peers are compared.
struct OwnCaseWithMedian<'a> {
    case: &'a CaseRecordWithSamples,
    own_median_ns: f64,
}

/// Implementations of the package that call NVIDIA's libraries, which peers call as well.
const IMPLEMENTATIONS_CALLING_NVIDIA_LIBRARIES: &[&str] = &["cuda/cudnn", "cuda/nccl"];

/// For each problem, the package's fastest implementation and all implementations that call
/// NVIDIA's libraries, among GPU cases with a hot cache. The id of a problem is the id of a case
/// without its implementation and its cache state.
fn own_cases_by_problem<'a>(
    runs: &'a [BenchProcessRun],
    filter: Option<&Regex>,
) -> BTreeMap<String, Vec<OwnCaseWithMedian<'a>>> {
    let mut problems: BTreeMap<String, Vec<OwnCaseWithMedian<'a>>> = BTreeMap::new();
    let gpu = runs.iter().filter(|run| !run.environment.gpus.is_empty());
    for (id, case) in gpu.flat_map(|run| &run.cases).filter(|(_, case)| case.cache_state == "hot") {
        let problem = id
            .strip_suffix(&format!("/{}/{}", case.implementation, case.cache_state))
            .unwrap_or(id);
        if filter.is_none_or(|filter| filter.is_match(problem)) {
            let ours = OwnCaseWithMedian {
                case,
                own_median_ns: median(&case.samples.launch_times_by_sample_ns()),
            };
            problems.entry(problem.to_owned()).or_default().push(ours);
        }
    }
    let is_library = |ours: &OwnCaseWithMedian<'_>| {
        IMPLEMENTATIONS_CALLING_NVIDIA_LIBRARIES.contains(&ours.case.implementation.as_str())
    };
    for ours in problems.values_mut() {
        ours.sort_by(|a, b| {
            is_library(a).cmp(&is_library(b)).then(a.own_median_ns.total_cmp(&b.own_median_ns))
        });
        let mut first = true;
        ours.retain(|ours| std::mem::take(&mut first) || is_library(ours));
    }
    problems
}

/// Asks the package's benches for their peer programs, and returns those of these families of
/// workloads.
fn peer_programs_of_families(
    arguments: &PeersCommandArguments,
    store: &RecordFoldersOfPackage,
    families: &BTreeSet<&str>,
    running: &SharedChildProcess,
) -> anyhow::Result<Vec<PythonPeerProgram>> {
    let settings = BTreeMap::new();
    let asking = BenchRequestSettings {
        bench_variables: settings,
        criterion_filter: None,
        response_timeout: PEER_PROGRAM_LIST_TIMEOUT,
        running_child: running,
    };
    let found = arguments.benches.find_selected_benches(&store.package_root, running)?;
    let mut programs: Vec<PythonPeerProgram> = Vec::new();
    for (bench, answer) in bench_requests::request_from_all_benches(
        &found,
        &asking,
        &RequestedBenchAction::ReturnPeerPrograms,
    )? {
        let ResponseToBenchAction::Peers(found) = answer else {
            return Err(error_for_unexpected_response(&bench));
        };
        programs.extend(
            found.into_iter().filter(|program| families.contains(program.workload_family.as_str())),
        );
    }
    programs.sort_by(|a, b| a.workload_family.cmp(&b.workload_family));
    programs.dedup_by(|a, b| a == b);
    ensure!(
        !programs.is_empty(),
        "no bench of the package has peers for {}",
        Vec::from_iter(families.iter().copied()).join(", ")
    );
    Ok(programs)
}

/// Runs one peer program in Python on the GPUs of the recorded run, and reads the lines that the
/// program prints. The second value of the result is the reason why the peer program ended early;
/// `None` if it did not.
fn run_peer_program(
    (arguments, running, partial): (
        &PeersCommandArguments,
        &SharedChildProcess,
        &PartialResultsOnInterrupt,
    ),
    cards: &str,
    program: &PythonPeerProgram,
    requested: &[ProblemForPeerProgram<'_>],
) -> anyhow::Result<(Vec<PeerProgramLine>, Option<String>)> {
    let folder = tempfile::tempdir().context("failed to make a folder for the peer program")?;
    for (name, text) in &program.file_contents_by_name {
        check_baseline_file_name(name).map_err(|_| {
            anyhow::anyhow!(
                "the peers of {}: `{name}` is no plain file name",
                program.workload_family
            )
        })?;
        std::fs::write(folder.path().join(name), text)
            .context("failed to write the peer program")?;
    }
    let main = &program.main_file_name;
    check_baseline_file_name(main).map_err(|_| {
        anyhow::anyhow!("the peers of {}: `{main}` is no plain file name", program.workload_family)
    })?;
    let python = arguments.python_interpreter.display();
    let (problems, lost) = (folder.path().join("problems.json"), "failed to write the problems");
    std::fs::write(&problems, serde_json::to_string(requested).context(lost)?).context(lost)?;
    let mut command = Command::new(&arguments.python_interpreter);
    command
        .arg(folder.path().join(main))
        .env("CUDA_VISIBLE_DEVICES", cards)
        .stdin(std::fs::File::open(&problems).context(lost)?)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let (stdout, stderr) = running.start_child_process(&mut command).with_context(|| {
        format!("failed to start {python}: --python names the one that has PyTorch")
    })?;
    let (printed, said) = (
        stdout.map(|it| capture_stream_on_thread(it, KeptPartOfOutput::KeepStreamStart)),
        stderr.map(|it| capture_stream_on_thread(it, KeptPartOfOutput::KeepStreamEnd)),
    );
    let ended = running
        .wait_or_kill_at_timeout(arguments.peer_program_timeout)
        .with_context(|| format!("failed to wait for peers/{main}"))?;
    let (printed, said) = (wait_for_captured_output(printed), wait_for_captured_output(said));
    let early = match ended {
        _ if partial.was_interrupted() => Some(format!("interrupted, with peers/{main} at work")),
        ChildProcessEnd::Exited(status) if status.success() => None,
        ChildProcessEnd::Exited(_) => {
            let errors = String::from_utf8_lossy(&said.kept_bytes);
            Some(format!(
                "peers/{main} under {python}: {}",
                errors.trim().lines().last().unwrap_or("it failed and said nothing")
            ))
        }
        ChildProcessEnd::KilledAtTimeout => Some(format!(
            "peers/{main} under {python} gave no answer within {} s (--wait sets this)",
            arguments.peer_program_timeout.as_secs_f64()
        )),
        ChildProcessEnd::KilledAboveMemoryBytes(limit) => {
            Some(format!("peers/{main} was {}", memory_kill_reason_text(limit)))
        }
    };
    ensure!(
        !printed.output_truncated,
        "peers/{main} printed more than {KEPT_BYTES_AT_STREAM_START} bytes, the limit"
    );
    let text = String::from_utf8_lossy(&printed.kept_bytes);
    // The last line that a peer program printed is ignored if the program was killed while writing
    // the line.
    let whole =
        if early.is_some() { text.rfind('\n').map_or(0, |end| end + 1) } else { text.len() };
    let lines = text[..whole].lines().map(|line| {
        PeerProgramLine::parse_peer_line(line).with_context(|| {
            format!("peers/{main} printed what is no result: {}", shortened_quotation(line))
        })
    });
    Ok((lines.collect::<anyhow::Result<_>>()?, early))
}

fn print_peer_comparison(report: &PeerComparisonJson, format: OutputFormat) {
    let with: Vec<String> =
        report.peer_environment.iter().map(|(name, version)| format!("{name} {version}")).collect();
    println!(
        "{}\n",
        format.escape_foreign_text(&format!(
            "{}, {}; peers: {}",
            report.device_name,
            report.run_commit,
            with.join(", ")
        ))
    );
    let mut table = AlignedTextTable::new(&[
        "problem", "peer", "its time", "power", "ours", "our time", "ratio", "of limit",
    ]);
    for row in &report.rows {
        table.add_row(vec![
            row.problem_id.clone(),
            row.peer_name.clone(),
            row.peer_median_ns.map_or_else(|| "-".to_owned(), time_text),
            row.peer_power.map_or("-", PowerStateOfSamples::name_in_files_and_tables).to_owned(),
            row.own_implementation.clone(),
            time_text(row.own_median_ns),
            row.peer_median_ns.map_or_else(
                || "-".to_owned(),
                |peer_ns| format!("{:.2}x", peer_ns / row.own_median_ns),
            ),
            row.own_share_of_limit
                .map_or_else(|| "-".to_owned(), |share| format!("{:.1}%", 100.0 * share)),
        ]);
    }
    println!("{}", format.format_table(&table));
    println!("\nratio: the peer's time over ours; above 1 ours is faster");
    if let Some(why) = &report.early_end_reason {
        println!("{}", format.escape_foreign_text(&format!("not all: {why}")));
    }
    for row in &report.rows {
        if let Some(error) = &row.peer_failure_reason {
            println!(
                "{}",
                format.escape_foreign_text(&format!(
                    "no time for {} on {}: {error}",
                    row.peer_name, row.problem_id
                ))
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_peer_program_is_environment_time_or_error() {
        let result = |fields: &str| {
            PeerProgramLine::parse_peer_line(&format!(
                r#"{{"id": "a/b/c", "peer": "torch", "about": "eager"{fields}}}"#
            ))
        };
        let time = |fields: &str| match result(fields) {
            Ok(PeerProgramLine::PeerResult(PeerKernelResult {
                peer_median_ns: median_ns,
                missing_time_reason: error,
                ..
            })) => (median_ns, error),
            other => panic!("{other:?}"),
        };
        assert_eq!(time(r#", "median_ns": 1500.5"#), (Some(1500.5), None));
        assert_eq!(time(r#", "error": "no memory""#), (None, Some("no memory".to_owned())));
        assert!(result("").is_err(), "neither a time nor a reason");
        assert!(result(r#", "median_ns": "fast""#).is_err());
        let Ok(PeerProgramLine::PeerEnvironment(environment)) =
            PeerProgramLine::parse_peer_line(r#"{"torch": "2.9"}"#)
        else {
            panic!("no environment")
        };
        assert_eq!(environment["torch"], "2.9");
    }
}
