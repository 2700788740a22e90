//! `kernelgate peers`: compares the cases of the last run with other people's kernels for the same
//! problems, which are timed now on the same GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::benches::bench_requests::{self, RequestSettings};
use crate::benches::child_process::{ChildProcess, ProcessEnd, memory_kill_reason};
use crate::benches::process_output::{
    KEPT_START_BYTES, KeptOutput, drain_on_thread, wait_for_captured_text,
};
use crate::compare::progress::parse_duration;
use crate::pages::measured_runs::PeerTime;
use crate::verbs::shared::bench_flags::BenchFlags;
use crate::verbs::shared::case_selection::unexpected_response;
use crate::verbs::shared::interrupt::{self, PartialResults};
use crate::verbs::shared::output::{OutputFormat, print_json};
use crate::verbs::shared::refusal::Refusal;
use crate::verbs::shared::sessions::SelectedSessions;
use kernelgate::display::table::TextTable;
use kernelgate::display::time_text;
use kernelgate::exit::ExitReason;
use kernelgate::measure::plausibility;
use kernelgate::measure::power::PowerState;
use kernelgate::protocol::{BenchResponseBody, PeerProgram, RequestedAction};
use kernelgate::record::store::check_path_component;
use kernelgate::record::text::{check_plain_text, printable_on_terminal, start_of_quotation};
use kernelgate::record::{BaselineStore, CaseRecord, ProcessRun, RecordedGpus, file};
use kernelgate::stats::median;

#[derive(Debug, clap::Args)]
pub struct PeersArguments {
    /// Use only problems whose id matches this regular expression
    filter: Option<String>,
    /// Python interpreter that has PyTorch
    #[arg(long, env = "KERNELGATE_PYTHON", value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
    #[command(flatten)]
    sessions: SelectedSessions,
    #[command(flatten)]
    benches: BenchFlags,
    /// Time after which a peer program is treated as hung and ended
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_duration)]
    wait: Duration,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

/// Largest file of peers' times that is read.
const MAX_PEER_BYTES: u64 = 64 << 20;
/// Timeout of a bench that is asked for its peers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A problem in the JSON list that a peer program reads.
#[derive(Debug, Serialize)]
struct RequestedPeerProblem<'a> {
    id: &'a str,
    workload: &'a str,
    axes: &'a BTreeMap<String, String>,
}

/// A line of a peer program: its environment comes first, then its results.
#[derive(Debug)]
enum PeerLine {
    Environment(BTreeMap<String, String>),
    Result(PeerProgramResult),
}

/// The time of a peer for a problem, or the reason why it has none.
#[derive(Debug, Deserialize)]
struct PeerProgramResult {
    id: String,
    peer: String,
    about: String,
    median_ns: Option<f64>,
    /// Whether the time had settled under the load.
    #[serde(default)]
    power: Option<PowerState>,
    /// SM clock under the load of our kernel, MHz.
    #[serde(default)]
    clock_mhz: Option<f64>,
    error: Option<String>,
}

impl PeerLine {
    /// A line with an id is a result.
    fn parse(text: &str) -> serde_json::Result<PeerLine> {
        let fields: serde_json::Value = serde_json::from_str(text)?;
        if fields.get("id").is_none() {
            return serde_json::from_value(fields).map(Self::Environment);
        }
        let result: PeerProgramResult = serde_json::from_value(fields)?;
        if result.median_ns.is_none() && result.error.is_none() {
            return Err(serde::de::Error::missing_field("median_ns"));
        }
        Ok(Self::Result(result))
    }
}

/// A time of a peer beside one of our implementations.
#[derive(Debug, Serialize, Deserialize)]
struct PeerComparisonRow {
    problem: String,
    peer: String,
    about: String,
    peer_ns: Option<f64>,
    /// Whether the peer's time had settled under the load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    peer_power: Option<PowerState>,
    /// SM clock under the peer's load, MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    peer_clock_mhz: Option<f64>,
    /// The reason why the peer has no time.
    error: Option<String>,
    implementation: String,
    ours_ns: f64,
    /// Share of the limit that our implementation of the case reaches.
    of_limit: Option<f64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct PeerComparisonReport {
    device: String,
    commit: String,
    peers: BTreeMap<String, String>,
    /// The reason why rows are missing, if a peer program did not run to its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ended_early: Option<String>,
    rows: Vec<PeerComparisonRow>,
}

pub fn run(arguments: &PeersArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    let runs = arguments.sessions.read(store)?;
    let filter = arguments
        .filter
        .as_deref()
        .map(Regex::new)
        .transpose()
        .context("the filter is not a regular expression")?;
    let problems = timed_problems(&runs, filter.as_ref());
    ensure!(
        !problems.is_empty(),
        "no hot GPU case of the last run has a peer: run `cargo bench` on a GPU first, or widen \
         the filter"
    );
    let families: BTreeSet<&str> = problems.keys().filter_map(|id| id.split('/').next()).collect();
    let (running, partial) = &interrupt::watch_interrupts_partial()?;
    let programs = peer_programs(arguments, store, &families, running)?;
    let gpus = runs.iter().rev().map(|run| &run.environment.gpus).find(|gpus| !gpus.is_empty());
    let cards: Vec<&str> =
        gpus.into_iter().flat_map(RecordedGpus::iter).map(|gpu| &*gpu.uuid).collect();
    // The names come from a file and are passed to the driver in a variable, so only plain
    // characters are accepted.
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    for card in &cards {
        ensure!(
            card.chars().all(plain),
            "the run's GPU `{}` is no id of one",
            printable_on_terminal(card)
        );
    }
    let (asking, cards) = ((arguments, running, partial), cards.join(","));
    let PeerResults { rows, environment, ended_early } =
        time_peers(asking, &cards, &programs, &problems)?;
    let device = runs.first().map(|run| run.environment.device_name.clone()).unwrap_or_default();
    if environment.get("device").is_some_and(|found| *found != device) {
        let why = format!("the run was on {device}, the peers on {}", environment["device"]);
        return Err(Refusal::message(why).into());
    }
    let commit = runs.first().map(|run| run.provenance.short_commit()).unwrap_or_default();
    let report = PeerComparisonReport { device, commit, peers: environment, ended_early, rows };
    report.validate().map_err(|why| anyhow::anyhow!("the peer programs answered {why}"))?;
    // Partial results of a peer program are printed, because they took minutes on a GPU.
    if report.ended_early.is_none() || !report.rows.is_empty() {
        match arguments.format {
            OutputFormat::Json => print_json(&report)?,
            format => print_peers(&report, format),
        }
    }
    match report.ended_early {
        None => Ok(ExitReason::Fine),
        Some(why) if partial.was_interrupted() => {
            eprintln!("\n{why}");
            std::process::exit(ExitReason::INTERRUPTED_EXIT_CODE)
        }
        Some(why) => bail!(why),
    }
}

/// Times and errors that peer programs printed.
struct PeerResults {
    rows: Vec<PeerComparisonRow>,
    environment: BTreeMap<String, String>,
    /// Reason why times of peers are missing.
    ended_early: Option<String>,
}

/// Times the peers of every problem, family by family, until a program fails or is interrupted.
fn time_peers(
    (arguments, running, partial): (&PeersArguments, &ChildProcess, &PartialResults),
    cards: &str,
    programs: &[PeerProgram],
    problems: &BTreeMap<String, Vec<FastestOwnCase<'_>>>,
) -> anyhow::Result<PeerResults> {
    let mut rows = Vec::new();
    let mut environment = BTreeMap::new();
    let mut ended_early = None;
    partial.catch_interrupts();
    for program in programs {
        let family = &program.family;
        if partial.was_interrupted() {
            ended_early = Some(format!("interrupted, before the peers of {family}"));
            break;
        }
        let requested: Vec<RequestedPeerProblem<'_>> = problems
            .iter()
            .filter(|(id, _)| id.starts_with(&format!("{family}/")))
            .map(|(id, ours)| RequestedPeerProblem {
                id,
                workload: &ours[0].case.workload,
                axes: &ours[0].case.problem,
            })
            .collect();
        eprintln!("timing the peers of {} {family} problems", requested.len());
        let (lines, ended) =
            run_peer_program((arguments, running, partial), cards, program, &requested)?;
        ended_early = ended;
        for line in lines {
            let PeerProgramResult { id, peer, about, median_ns: peer_ns, power, clock_mhz, error } =
                match line {
                    PeerLine::Environment(found) => {
                        environment = found;
                        continue;
                    }
                    PeerLine::Result(result) => result,
                };
            let ours = problems.get(&id).with_context(|| {
                format!("peers/{} answers for {id}, which it was not asked", program.main)
            })?;
            rows.extend(ours.iter().map(|ours| PeerComparisonRow {
                problem: id.clone(),
                peer: peer.clone(),
                about: about.clone(),
                peer_ns,
                peer_power: power,
                peer_clock_mhz: clock_mhz,
                error: error.clone(),
                implementation: ours.case.implementation.clone(),
                ours_ns: ours.median_ns,
                of_limit: ours.case.limit.as_ref().map(|limit| limit.fraction(ours.median_ns)),
            }));
        }
        if ended_early.is_some() {
            break;
        }
    }
    Ok(PeerResults { rows, environment, ended_early })
}

impl PeerComparisonReport {
    /// Checks every name and number, whether from a file or from a peer program.
    fn validate(&self) -> Result<(), String> {
        check_plain_text(&self.device)?;
        check_plain_text(&self.commit)?;
        self.rows.iter().try_for_each(|row| {
            row.validate().map_err(|why| {
                format!(
                    "{}, {}: {why}",
                    start_of_quotation(&row.problem),
                    start_of_quotation(&row.peer)
                )
            })
        })
    }
}

impl PeerComparisonRow {
    fn validate(&self) -> Result<(), String> {
        let names = [&self.problem, &self.peer, &self.implementation];
        names.into_iter().try_for_each(|name| check_plain_text(name))?;
        plausibility::check_launch_ns("our time", self.ours_ns)?;
        self.peer_ns.map_or(Ok(()), |ns| plausibility::check_launch_ns("its time", ns))?;
        self.peer_clock_mhz.map_or(Ok(()), plausibility::check_clock_mhz)?;
        self.of_limit.map_or(Ok(()), |share| plausibility::check_ratio("of_limit", share))
    }
}

/// Reads the times and the device from a file that `--format json` wrote.
pub fn read(path: &Path) -> anyhow::Result<(String, Vec<PeerTime>)> {
    let failed = || {
        format!("failed to read {} as what `kernelgate peers --format json` prints", path.display())
    };
    let text = file::read_untrusted_text(path, MAX_PEER_BYTES).with_context(failed)?;
    let report: PeerComparisonReport = serde_json::from_str(&text).with_context(failed)?;
    report.validate().map_err(anyhow::Error::msg).with_context(failed)?;
    let time = |row: PeerComparisonRow| {
        let PeerComparisonRow { problem, peer, peer_ns, implementation, ours_ns, .. } = row;
        let (power, clock_mhz) = (row.peer_power, row.peer_clock_mhz);
        let peer_ns = peer_ns?;
        Some(PeerTime { problem, peer, peer_ns, power, clock_mhz, implementation, ours_ns })
    };
    Ok((report.device, report.rows.into_iter().filter_map(time).collect()))
}

/// Our case, with which peers are compared.
struct FastestOwnCase<'a> {
    case: &'a CaseRecord,
    median_ns: f64,
}

/// Implementations that call libraries, which peers call as well.
const LIBRARY_ROWS: &[&str] = &["cuda/cudnn", "cuda/nccl"];

/// By problem, among the hot GPU cases: our own fastest kernel, and every library's. The id of a
/// problem is a case id without implementation and cache.
fn timed_problems<'a>(
    runs: &'a [ProcessRun],
    filter: Option<&Regex>,
) -> BTreeMap<String, Vec<FastestOwnCase<'a>>> {
    let mut problems: BTreeMap<String, Vec<FastestOwnCase<'a>>> = BTreeMap::new();
    let gpu = runs.iter().filter(|run| !run.environment.gpus.is_empty());
    for (id, case) in gpu.flat_map(|run| &run.cases).filter(|(_, case)| case.cache == "hot") {
        let problem =
            id.strip_suffix(&format!("/{}/{}", case.implementation, case.cache)).unwrap_or(id);
        if filter.is_none_or(|filter| filter.is_match(problem)) {
            let ours = FastestOwnCase { case, median_ns: median(&case.samples.per_launch_ns()) };
            problems.entry(problem.to_owned()).or_default().push(ours);
        }
    }
    let is_library =
        |ours: &FastestOwnCase<'_>| LIBRARY_ROWS.contains(&ours.case.implementation.as_str());
    for ours in problems.values_mut() {
        ours.sort_by(|a, b| {
            is_library(a).cmp(&is_library(b)).then(a.median_ns.total_cmp(&b.median_ns))
        });
        let mut first = true;
        ours.retain(|ours| std::mem::take(&mut first) || is_library(ours));
    }
    problems
}

/// The peer programs of these families in the package's benches.
fn peer_programs(
    arguments: &PeersArguments,
    store: &BaselineStore,
    families: &BTreeSet<&str>,
    running: &ChildProcess,
) -> anyhow::Result<Vec<PeerProgram>> {
    let settings = BTreeMap::new();
    let asking = RequestSettings { settings, filter: None, timeout: ANSWER_TIMEOUT, running };
    let found = arguments.benches.find(&store.root, running)?;
    let mut programs: Vec<PeerProgram> = Vec::new();
    for (bench, answer) in
        bench_requests::ask_all_benches(&found, &asking, &RequestedAction::Peers)?
    {
        let BenchResponseBody::Peers(found) = answer else {
            return Err(unexpected_response(&bench));
        };
        programs
            .extend(found.into_iter().filter(|program| families.contains(program.family.as_str())));
    }
    programs.sort_by(|a, b| a.family.cmp(&b.family));
    programs.dedup_by(|a, b| a == b);
    ensure!(
        !programs.is_empty(),
        "no bench of the package has peers for {}",
        Vec::from_iter(families.iter().copied()).join(", ")
    );
    Ok(programs)
}

/// Runs a peer program on the cards of the run and reads its output. The second value is the reason
/// why the peer program ended early, if it did.
fn run_peer_program(
    (arguments, running, partial): (&PeersArguments, &ChildProcess, &PartialResults),
    cards: &str,
    program: &PeerProgram,
    requested: &[RequestedPeerProblem<'_>],
) -> anyhow::Result<(Vec<PeerLine>, Option<String>)> {
    let folder = tempfile::tempdir().context("failed to make a folder for the peer program")?;
    for (name, text) in &program.files {
        check_path_component(name).map_err(|_| {
            anyhow::anyhow!("the peers of {}: `{name}` is no plain file name", program.family)
        })?;
        std::fs::write(folder.path().join(name), text)
            .context("failed to write the peer program")?;
    }
    let main = &program.main;
    check_path_component(main).map_err(|_| {
        anyhow::anyhow!("the peers of {}: `{main}` is no plain file name", program.family)
    })?;
    let python = arguments.python.display();
    let (problems, lost) = (folder.path().join("problems.json"), "failed to write the problems");
    std::fs::write(&problems, serde_json::to_string(requested).context(lost)?).context(lost)?;
    let mut command = Command::new(&arguments.python);
    command
        .arg(folder.path().join(main))
        .env("CUDA_VISIBLE_DEVICES", cards)
        .stdin(std::fs::File::open(&problems).context(lost)?)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let (stdout, stderr) = running.start_process(&mut command).with_context(|| {
        format!("failed to start {python}: --python names the one that has PyTorch")
    })?;
    let (printed, said) = (
        stdout.map(|it| drain_on_thread(it, KeptOutput::Start)),
        stderr.map(|it| drain_on_thread(it, KeptOutput::End)),
    );
    let ended = running
        .wait_for_end(arguments.wait)
        .with_context(|| format!("failed to wait for peers/{main}"))?;
    let (printed, said) = (wait_for_captured_text(printed), wait_for_captured_text(said));
    let early = match ended {
        _ if partial.was_interrupted() => Some(format!("interrupted, with peers/{main} at work")),
        ProcessEnd::Exited(status) if status.success() => None,
        ProcessEnd::Exited(_) => {
            let errors = String::from_utf8_lossy(&said.kept);
            Some(format!(
                "peers/{main} under {python}: {}",
                errors.trim().lines().last().unwrap_or("it failed and said nothing")
            ))
        }
        ProcessEnd::TimedOut => Some(format!(
            "peers/{main} under {python} gave no answer within {} s (--wait sets this)",
            arguments.wait.as_secs_f64()
        )),
        ProcessEnd::OverMemory(limit) => {
            Some(format!("peers/{main} was {}", memory_kill_reason(limit)))
        }
    };
    ensure!(!printed.cut, "peers/{main} printed more than {KEPT_START_BYTES} bytes, the limit");
    let text = String::from_utf8_lossy(&printed.kept);
    // A line that was truncated while it was written is ignored.
    let whole =
        if early.is_some() { text.rfind('\n').map_or(0, |end| end + 1) } else { text.len() };
    let lines = text[..whole].lines().map(|line| {
        PeerLine::parse(line).with_context(|| {
            format!("peers/{main} printed what is no result: {}", start_of_quotation(line))
        })
    });
    Ok((lines.collect::<anyhow::Result<_>>()?, early))
}

fn print_peers(report: &PeerComparisonReport, format: OutputFormat) {
    let with: Vec<String> =
        report.peers.iter().map(|(name, version)| format!("{name} {version}")).collect();
    println!(
        "{}\n",
        format.words(&format!("{}, {}; peers: {}", report.device, report.commit, with.join(", ")))
    );
    let mut table = TextTable::new(&[
        "problem", "peer", "its time", "power", "ours", "our time", "ratio", "of limit",
    ]);
    for row in &report.rows {
        table.row(vec![
            row.problem.clone(),
            row.peer.clone(),
            row.peer_ns.map_or_else(|| "-".to_owned(), time_text),
            row.peer_power.map_or("-", PowerState::name).to_owned(),
            row.implementation.clone(),
            time_text(row.ours_ns),
            row.peer_ns
                .map_or_else(|| "-".to_owned(), |peer_ns| format!("{:.2}x", peer_ns / row.ours_ns)),
            row.of_limit.map_or_else(|| "-".to_owned(), |share| format!("{:.1}%", 100.0 * share)),
        ]);
    }
    println!("{}", format.table(&table));
    println!("\nratio: the peer's time over ours; above 1 ours is faster");
    if let Some(why) = &report.ended_early {
        println!("{}", format.words(&format!("not all: {why}")));
    }
    for row in &report.rows {
        if let Some(error) = &row.error {
            println!(
                "{}",
                format.words(&format!("no time for {} on {}: {error}", row.peer, row.problem))
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_peer_is_parsed_as_environment_time_or_reason() {
        let result = |fields: &str| {
            PeerLine::parse(&format!(
                r#"{{"id": "a/b/c", "peer": "torch", "about": "eager"{fields}}}"#
            ))
        };
        let time = |fields: &str| match result(fields) {
            Ok(PeerLine::Result(PeerProgramResult { median_ns, error, .. })) => (median_ns, error),
            other => panic!("{other:?}"),
        };
        assert_eq!(time(r#", "median_ns": 1500.5"#), (Some(1500.5), None));
        assert_eq!(time(r#", "error": "no memory""#), (None, Some("no memory".to_owned())));
        assert!(result("").is_err(), "neither a time nor a reason");
        assert!(result(r#", "median_ns": "fast""#).is_err());
        let Ok(PeerLine::Environment(environment)) = PeerLine::parse(r#"{"torch": "2.9"}"#) else {
            panic!("no environment")
        };
        assert_eq!(environment["torch"], "2.9");
    }
}
