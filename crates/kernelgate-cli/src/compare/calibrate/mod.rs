//! Runs many comparisons whose answer is known, of one executable with itself: they show how often
//! the gate raises a false alarm, and which slow-downs it finds.

pub mod cases;
pub mod probe_processes;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::engine::ComparisonEngine;
use super::engine::rounds;
use super::progress::{self, ComparisonProgress};
use super::session::{ComparisonSession, PreparedSides, SessionTools};
use super::trials::artificial_load::CoRunningLoad;
use super::{CompareError, ComparisonRequest, SideInjection, SideSource};
use crate::gate::calibration::{
    BlockSeries, Calibration, CalibrationComparison, CalibrationPart, ComparisonKind, anchors,
    first_differing_name,
};
use crate::gate::comparison::Comparison;
use crate::gate::paired::TestPlan;
use cases::{CalibrationCaseChoice, choose_cases};
use kernelgate::record::{
    ComparisonTrials, Environment, Provenance, Shard, current_timestamp, file,
};
use kernelgate::stats::median;
use kernelgate_cuda::CaseFailure;
use probe_processes::InjectedDelaySizes;

/// Processes before a comparison that measure the times from which delays are derived.
const PROBE_PROCESSES: usize = 3;
/// Time between two measurements of the anchors, which are a process with several ceilings each.
const ANCHOR_INTERVAL: Duration = Duration::from_secs(120);
/// Number of code layouts that alternate: on a GPU each layout is compiled once.
const MAX_CODE_LAYOUTS: usize = 16;

/// Number and settings of the comparisons of a calibration.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationRequest {
    /// Number of A/A comparisons, whose base and head are the same build.
    pub null: usize,
    /// Comparisons in which code and memory of the head have other addresses.
    pub layouts: usize,
    /// Sizes of the slow-downs that are injected as waits, per cent.
    pub injected: Vec<f64>,
    /// Sizes of the slow-downs that are injected as additional work, per cent.
    pub work: Vec<f64>,
    /// Number of comparisons for each size in `injected` and for each size in `work`.
    pub each: usize,
    /// Number of comparisons in which one case alone has the injected slow-down.
    pub single: usize,
    /// Comparisons with the host busy with co-running load while the head runs.
    pub sham: usize,
    /// The shard of the calibration's comparisons that this process runs; absent if it runs all.
    pub shard: Option<Shard>,
    /// Thresholds and error rates.
    pub plan: TestPlan,
    /// Largest number of calibrated cases if the user names none.
    pub cases: usize,
    /// Whether the user named the cases, which are then all calibrated.
    pub named: bool,
    /// Time within which the last comparison of the calibration must end.
    pub total: Option<Duration>,
    /// Command line of the calibration, for its report.
    pub command: String,
    /// File with all comparisons so far, written after each comparison.
    pub state: PathBuf,
    /// Whether an earlier, interrupted calibration is continued.
    pub resume: bool,
}

/// Runs a calibration. The second value is the number of comparisons that a later run must make.
///
/// # Errors
/// Fails if the executables cannot be made ready, no case can be measured, or the result cannot be
/// written.
pub fn run_calibration(
    request: &ComparisonRequest,
    settings: &CalibrationRequest,
) -> Result<(Calibration, usize), CompareError> {
    let started = Instant::now();
    let session = ComparisonSession::open_session(request, true, SessionTools::interruptible()?)?;
    let outcome = measure_calibration(request, settings, &session, started);
    session.progress.end_progress_line();
    outcome
}

/// Makes the comparisons. The function is long because each kind of comparison has its own
/// settings.
#[expect(clippy::too_many_lines)]
fn measure_calibration(
    request: &ComparisonRequest,
    settings: &CalibrationRequest,
    session: &ComparisonSession,
    started: Instant,
) -> Result<(Calibration, usize), CompareError> {
    let mut prepared =
        ComparisonEngine::new(request, session, ComparisonTrials::default()).prepare()?;
    let left_out: BTreeSet<String> =
        prepared.case_errors().map(|(case, reason)| format!("skipped: {case}: {reason}")).collect();
    left_out.iter().for_each(|line| session.progress.say(line));
    let environment = prepared.environment.clone().ok_or(CompareError::NothingVerified)?;
    let earlier = file::read::<Calibration>(&settings.state).ok().filter(|_| settings.resume);
    let choice = CalibrationCaseChoice { named: settings.named, most: settings.cases, earlier };
    let times_ns = choose_cases(request, choice, session, &mut prepared, &environment)?;
    let simulated: BTreeSet<&String> =
        prepared.criterion.iter().flat_map(|bench| &bench.cases).collect();
    if !simulated.is_empty() && !settings.injected.is_empty() {
        let cases = simulated.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        session.progress.say(&format!("{}{cases}", Calibration::SIMULATED_CASES_NOTE));
    }
    let listed = times_ns.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    session
        .progress
        .say(&format!("{}: {listed}", kernelgate::display::counted_noun(times_ns.len(), "case")));
    let mut calibration = continue_or_start_calibration(
        request,
        settings,
        session,
        (&prepared, environment, times_ns),
    )?;
    calibration.left_out.extend(left_out);
    let tasks = comparison_schedule(settings);
    let remaining: Vec<(ComparisonKind, usize)> =
        tasks.iter().copied().filter(|task| !is_measured(&calibration, *task)).collect();
    let (measuring, mut done, mut last_anchors) = (Instant::now(), 0, None);
    for (kind, number) in remaining.iter().copied() {
        // The next comparison may take as long as the longest comparison so far; the first may take
        // its budget.
        let walls_s =
            calibration.comparisons.iter().map(|comparison_record| comparison_record.wall_s);
        let longest_s = walls_s.reduce(f64::max).unwrap_or(request.budget.as_secs_f64());
        let end = started.elapsed() + Duration::from_secs_f64(longest_s);
        if let Some(total) = settings.total.filter(|total| end > *total) {
            session.progress.say(&format!(
                "no further comparison: one may take {}, and {} of --total-time {} are spent",
                progress::duration(Duration::from_secs_f64(longest_s)),
                progress::duration(started.elapsed()),
                progress::duration(total)
            ));
            break;
        }
        let ahead = progress::duration(calibration_time_left(
            &calibration,
            remaining.len() - done,
            measuring.elapsed(),
            done,
        ));
        let label = format!(
            "{} of {} comparisons done, {ahead} left; {}",
            tasks.len() - remaining.len() + done,
            tasks.len(),
            kind.name()
        );
        session.progress.show_step(&label);
        let engine = ComparisonEngine::new(request, session, ComparisonTrials::default());
        let is_due = last_anchors.is_none_or(|last: Instant| last.elapsed() > ANCHOR_INTERVAL);
        let anchors =
            match is_due && calibration.comparisons.len() < anchors::MAX_ANCHOR_MEASUREMENTS {
                true => engine.anchors(&prepared)?,
                false => None,
            };
        if anchors.is_some() {
            last_anchors = Some(Instant::now());
        }
        let compared = run_calibration_comparison(
            request,
            settings,
            session,
            &prepared,
            (kind, number),
            &label,
        )?;
        print_comparison_outcome(&session.progress, &compared);
        let card = calibration.environment.device_identifier();
        calibration.comparisons.push(CalibrationComparison { card, anchors, ..compared });
        done += 1;
        file::write(&settings.state, &calibration)?;
    }
    calibration.derive_thresholds();
    file::write(&settings.state, &calibration)?;
    Ok((calibration, remaining.len() - done))
}

impl CalibrationRequest {
    /// Describes the part of the calibration that is measured, if this process is a shard.
    fn part(&self, cases: &BTreeSet<String>) -> Option<CalibrationPart> {
        let shard = self.shard?;
        let all = comparison_schedule(&Self { shard: None, ..self.clone() });
        let tasks: Vec<String> = all.iter().map(|task| format!("{task:?}")).collect();
        let facts = tasks.iter().chain(cases).map(String::as_str);
        let comparisons = shard.deal_to_shard(&all).count();
        Some(CalibrationPart { shard, plan: file::hash_of_all(facts), comparisons })
    }
}

/// All comparisons of this shard, in an order that mixes their kinds evenly, so that drift of the
/// machine affects all kinds equally.
fn comparison_schedule(settings: &CalibrationRequest) -> Vec<(ComparisonKind, usize)> {
    let untouched = [
        (ComparisonKind::Null, settings.null),
        (ComparisonKind::Layout, settings.layouts),
        (ComparisonKind::Sham, settings.sham),
    ];
    let injected = settings.injected.iter().flat_map(|percent| {
        [
            (ComparisonKind::Injected(*percent), settings.each),
            (ComparisonKind::Single(*percent), settings.single),
        ]
    });
    let work = settings.work.iter().map(|percent| (ComparisonKind::Work(*percent), settings.each));
    let counts: Vec<(ComparisonKind, usize)> =
        untouched.into_iter().chain(injected).chain(work).collect();
    let mut tasks: Vec<(f64, ComparisonKind, usize)> = Vec::new();
    for (kind, count) in counts {
        tasks.extend((0..count).map(|number| ((number as f64 + 0.5) / count as f64, kind, number)));
    }
    tasks.sort_by(|a, b| a.0.total_cmp(&b.0));
    let tasks = tasks.into_iter().map(|(_, kind, number)| (kind, number));
    match settings.shard {
        Some(shard) => shard.deal_to_shard(tasks).collect(),
        None => tasks.collect(),
    }
}

fn is_measured(calibration: &Calibration, (kind, number): (ComparisonKind, usize)) -> bool {
    calibration.comparisons_of(kind).any(|comparison| comparison.number == number)
}

fn calibration_time_left(
    calibration: &Calibration,
    tasks: usize,
    elapsed: Duration,
    done: usize,
) -> Duration {
    let earlier: Vec<f64> =
        calibration.comparisons.iter().map(|comparison| comparison.wall_s).collect();
    let each_s = match (done, earlier.len()) {
        (0, 0) => return Duration::from_secs_f64(calibration.budget_s * tasks as f64),
        (0, count) => earlier.iter().sum::<f64>() / count as f64,
        (done, _) => elapsed.as_secs_f64() / done as f64,
    };
    Duration::from_secs_f64(each_s * tasks as f64)
}

/// Returns the calibration to continue, or an empty one.
fn continue_or_start_calibration(
    request: &ComparisonRequest,
    settings: &CalibrationRequest,
    session: &ComparisonSession,
    (prepared, environment, cases): (&PreparedSides, Environment, BTreeMap<String, f64>),
) -> Result<Calibration, CompareError> {
    let identity = session.comparison_identity(request)?;
    // An executable that was built elsewhere does not record its commit: the commit of the package
    // around it is the best guess.
    let provenance = match request.base {
        SideSource::Folder(_) => Provenance::detect_from_git(&request.package),
        _ => prepared.provenance.clone(),
    };
    let mut fresh = Calibration {
        started: current_timestamp(),
        environment,
        provenance,
        identity,
        commands: BTreeSet::new(),
        plan: settings.plan,
        budget_s: request.budget.as_secs_f64(),
        sampling: ComparisonEngine::sampling(prepared),
        cases,
        left_out: BTreeSet::new(),
        simulated: prepared.criterion.iter().flat_map(|bench| bench.cases.clone()).collect(),
        part: settings.part(prepared.cases()),
        anchor_tolerance: None,
        recommended: None,
        comparisons: Vec::new(),
    };
    fresh.commands.insert(settings.command.clone());
    if !settings.resume {
        return Ok(fresh);
    }
    match file::read::<Calibration>(&settings.state) {
        Ok(earlier) => {
            let of_another = first_differing_name(&earlier.identity, &fresh.identity)
                .or_else(|| {
                    (earlier.cases.keys().ne(fresh.cases.keys())).then(|| "which cases".to_owned())
                })
                .or_else(|| {
                    fresh
                        .environment
                        .mismatches(&earlier.environment)
                        .first()
                        .map(|mismatch| mismatch.field.to_owned())
                });
            if let Some(name) = of_another {
                let path = settings.state.clone();
                return Err(CompareError::CalibratesAnother { path, differs: name });
            }
            session
                .progress
                .say(&format!("going on after {} comparisons", earlier.comparisons.len()));
            fresh.merge(earlier).map_err(CompareError::Unmergeable)?;
            Ok(fresh)
        }
        Err(error) if error.is_not_found() => {
            session.progress.say("--resume: nothing was interrupted here: starting anew");
            Ok(fresh)
        }
        Err(error) => Err(error.into()),
    }
}

/// Runs one comparison with new processes, which are used once.
fn run_calibration_comparison(
    request: &ComparisonRequest,
    settings: &CalibrationRequest,
    session: &ComparisonSession,
    prepared: &PreparedSides,
    (kind, number): (ComparisonKind, usize),
    label: &str,
) -> Result<CalibrationComparison, CompareError> {
    let (started, clock) = (current_timestamp(), Instant::now());
    let simulated: BTreeSet<&String> =
        prepared.criterion.iter().flat_map(|bench| &bench.cases).collect();
    let delays_ns: BTreeMap<String, f64> = match kind.injected_percent() {
        Some(percent) => {
            let mut times_ns: BTreeMap<String, Vec<f64>> = BTreeMap::new();
            for _ in 0..PROBE_PROCESSES {
                for (id, time_ns) in
                    ComparisonEngine::new(request, session, ComparisonTrials::default())
                        .probe(prepared)?
                {
                    times_ns.entry(id).or_default().push(time_ns);
                }
            }
            let share = |id: &String, times_ns: &[f64]| {
                let share_ns = median(times_ns) * percent / 100.0;
                // A delay of a launch is a whole number of nanoseconds.
                if simulated.contains(id) { share_ns } else { share_ns.round().max(1.0) }
            };
            let share = |(id, times_ns): (String, Vec<f64>)| {
                let share_ns = share(&id, &times_ns);
                (id, share_ns)
            };
            let mut delays_ns: BTreeMap<String, f64> = times_ns.into_iter().map(share).collect();
            if let ComparisonKind::Single(_) = kind {
                let chosen = delays_ns.keys().nth(number % delays_ns.len().max(1)).cloned();
                delays_ns.retain(|id, _| Some(id) == chosen.as_ref());
            }
            delays_ns
        }
        None => BTreeMap::new(),
    };
    let injection = SideInjection {
        delays_ns: delays_ns.clone(),
        by_work: matches!(kind, ComparisonKind::Work(_)),
        layout: matches!(kind, ComparisonKind::Layout).then_some(1 + number % MAX_CODE_LAYOUTS),
        ..SideInjection::default()
    };
    let mut request_of_head = ComparisonRequest { injection, ..request.clone() };
    let on_host = prepared.environment.as_ref().is_none_or(Environment::is_on_host);
    let mut prepared = prepared.clone();
    let not_made = match delays_ns.is_empty() || on_host {
        true => BTreeMap::new(),
        false => fit_injected_delays(&mut request_of_head, session, &mut prepared),
    };
    let co_running = match kind {
        ComparisonKind::Sham if on_host => {
            CoRunningLoad::Threads(std::thread::available_parallelism().map_or(1, Into::into))
        }
        ComparisonKind::Sham => {
            // After the time of a whole process the co-running load certainly runs.
            let whole = Instant::now();
            ComparisonEngine::new(request, session, ComparisonTrials::default())
                .probe(&prepared)?;
            CoRunningLoad::Process(whole.elapsed())
        }
        _ => CoRunningLoad::Nothing,
    };
    let mut engine = ComparisonEngine::for_calibration(
        &request_of_head,
        session,
        settings.plan,
        co_running,
        label,
    );
    let comparison = engine.compare(prepared)?;
    let took = (started, clock.elapsed());
    let mut comparison_record =
        comparison_record((kind, number), took, delays_ns, &comparison, &engine.trials);
    comparison_record.failed.extend(not_made.into_iter().map(|(id, why)| (id, why.text)));
    Ok(comparison_record)
}

/// Determines the sizes of the injected delays once, with many launches, so that all processes use
/// equal sizes. Removes the cases to which the requested delay cannot be added, and returns the
/// reasons.
fn fit_injected_delays(
    request_of_head: &mut ComparisonRequest,
    session: &ComparisonSession,
    prepared: &mut PreparedSides,
) -> BTreeMap<String, CaseFailure> {
    let found = ComparisonEngine::new(request_of_head, session, ComparisonTrials::default())
        .injected_delay_sizes(prepared);
    match found {
        Ok(InjectedDelaySizes { sizes, failed }) => {
            request_of_head.injection.delay_sizes = sizes;
            let can_be_delayed = |id: &&String| !failed.contains_key(*id);
            prepared.keep(&prepared.cases().iter().filter(can_be_delayed).cloned().collect());
            failed
        }
        Err(error) => {
            session.progress.say(&format!("each process finds the size of its delays: {error}"));
            BTreeMap::new()
        }
    }
}

fn comparison_record(
    (kind, number): (ComparisonKind, usize),
    (started, took): (String, Duration),
    delays_ns: BTreeMap<String, f64>,
    comparison: &Comparison,
    trials: &ComparisonTrials,
) -> CalibrationComparison {
    // A case that could not be measured says nothing about the gate.
    let judged = || comparison.judged.iter().filter(|judged| judged.case_error().is_none());
    let unmeasured = comparison
        .judged
        .iter()
        .filter_map(|judged| Some((judged.case.clone(), judged.case_error()?)));
    let facts = &comparison.facts;
    let series = |round| {
        let observed = rounds::whole_blocks_by_case(&trials.trials, round);
        observed
            .into_iter()
            .map(|(case, blocks)| (case, BlockSeries::from_blocks(&blocks)))
            .collect()
    };
    CalibrationComparison {
        kind,
        number,
        started,
        wall_s: (took.as_secs_f64() * 10.0).round() / 10.0,
        processes: facts.rounds.iter().map(|round| round.processes).sum(),
        delays_ns,
        verdicts: judged().map(|judged| (judged.case.clone(), judged.verdict)).collect(),
        reasons: judged()
            .filter_map(|judged| Some((judged.case.clone(), judged.reason()?)))
            .collect(),
        failed: comparison
            .failed
            .clone()
            .into_iter()
            .chain(facts.failed_in_base.clone())
            .map(|(id, why)| (id, why.text))
            .chain(unmeasured)
            .collect(),
        broken: facts
            .broken
            .iter()
            .map(|broken| format!("{} of the {}: {}", broken.bench, broken.side, broken.reason))
            .collect(),
        first: series(1),
        second: series(2),
        card: String::new(),
        anchors: None,
    }
}

/// Prints a line with the outcome of a comparison.
fn print_comparison_outcome(progress: &ComparisonProgress, comparison: &CalibrationComparison) {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, verdict) in comparison.judged() {
        *counts.entry(verdict.name()).or_default() += 1;
    }
    let counts: Vec<String> =
        counts.into_iter().map(|(verdict, count)| format!("{count} {verdict}")).collect();
    let failed = if comparison.failed.is_empty() {
        String::new()
    } else {
        format!(", {} not run", comparison.failed.len())
    };
    let blocks = comparison.processes / rounds::PROCESSES_PER_BLOCK;
    progress.say(&format!(
        "{} {}: {}{failed} ({blocks} blocks, {:.0} s)",
        comparison.kind.name(),
        comparison.number + 1,
        counts.join(", "),
        comparison.wall_s
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calibration_request(shard: Option<Shard>) -> CalibrationRequest {
        CalibrationRequest {
            null: 7,
            layouts: 1,
            injected: vec![2.0, 5.0],
            work: vec![1.0],
            each: 3,
            single: 1,
            sham: 2,
            shard,
            plan: TestPlan::default(),
            cases: 4,
            named: false,
            total: None,
            command: String::new(),
            state: PathBuf::new(),
            resume: false,
        }
    }

    #[test]
    fn shards_of_a_calibration_divide_its_comparisons_without_overlap() {
        let whole = comparison_schedule(&calibration_request(None));
        assert_eq!(whole.len(), 21);
        // The first half has comparisons of every kind that occurs several times.
        for kind in [
            ComparisonKind::Null,
            ComparisonKind::Sham,
            ComparisonKind::Injected(2.0),
            ComparisonKind::Injected(5.0),
            ComparisonKind::Work(1.0),
        ] {
            assert!(whole[..11].iter().any(|task| task.0 == kind), "{kind:?}");
        }
        let shards = (1..=4).map(|index| Shard { index, count: 4 });
        let parts: Vec<(ComparisonKind, usize)> = shards
            .flat_map(|shard| comparison_schedule(&calibration_request(Some(shard))))
            .collect();
        assert_eq!(parts.len(), whole.len());
        assert!(whole.iter().all(|task| parts.contains(task)));
    }
}
