//! Calibrates the gate: compares an executable with itself many times, with and without injected
//! delays, to count false alarms and found slow-downs.

pub mod cases;
pub mod probe_processes;

use crate::gate::recorded_names::{RECORDED_CALIBRATION_NAMES, debug_text_with_recorded_names};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::engine::ComparisonEngine;
use super::engine::rounds;
use super::progress::{self, ComparisonProgressDisplay};
use super::session::{ComparisonSession, PreparedSides, ProgressAndChildProcesses};
use super::trials::artificial_load::ArtificialCoRunningLoad;
use super::{BuildComparisonRequest, CompareError, ComparedSideSource, InjectedHeadChanges};
use crate::gate::calibration::{
    CalibrationComparisonKind, CalibrationComparisonRecord, CalibrationShardIdentity,
    CaseBlocksAsColumns, GateCalibration, anchors, first_differing_name,
};
use crate::gate::comparison::Comparison;
use crate::gate::paired::ComparisonTestPlan;
use cases::{CalibrationCaseSelection, choose_calibration_cases};
use kernelgate::record::{
    CommitAndChanges, ComparisonTrialsFile, RunEnvironment, ShardOfWork, current_time_for_records,
    file,
};
use kernelgate::stats::median;
use kernelgate_cuda::CaseFailureReason;
use probe_processes::InjectedGpuDelaySizes;

/// Number of processes that measure the case times before a calibration's comparison; the injected
/// delay is a percentage of their median.
const PROCESSES_THAT_TIME_CASES_FOR_DELAYS: usize = 3;
/// Minimum time between two measurements of the anchors (fixed work that shows the machine's
/// speed); each measurement takes a process of its own.
const MIN_ANCHOR_MEASUREMENT_INTERVAL: Duration = Duration::from_secs(120);
/// Number of artificial layouts of code and memory that a calibration's layout comparisons cycle
/// through; on a GPU, each layout is compiled once.
const ARTIFICIAL_CODE_LAYOUT_COUNT: usize = 16;

/// Number of comparisons of each kind that a calibration of the gate makes, and its settings.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationRequest {
    /// Number of A/A comparisons of the calibration, whose base and head are the same build without
    /// any change.
    pub identical_build_comparisons: usize,
    /// Number of A/A comparisons in which the head's code and memory lie at other addresses than
    /// the base's.
    pub code_layout_comparisons: usize,
    /// Sizes of the slow-downs that the calibration injects into the head as waits, per cent of the
    /// case's time.
    pub slowdowns_by_wait_percent: Vec<f64>,
    /// Sizes of the slow-downs that the calibration injects into the head as additional work, per
    /// cent of the case's time.
    pub slowdowns_by_work_percent: Vec<f64>,
    /// Number of comparisons for each slow-down size in `slowdowns_by_wait_percent` and for each in
    /// `slowdowns_by_work_percent`.
    pub comparisons_per_slowdown: usize,
    /// Number of comparisons, for each size in `slowdowns_by_wait_percent`, in which only one case
    /// has the injected slow-down.
    pub single_case_comparisons: usize,
    /// Number of A/A comparisons in which an artificial load runs on the same machine while the
    /// head is timed.
    pub sham_load_comparisons: usize,
    /// The shard of the calibration's comparisons that this process runs; `None` if it runs all
    /// comparisons.
    pub shard: Option<ShardOfWork>,
    /// Test plan of each comparison of the calibration: thresholds, error rates and numbers of
    /// blocks.
    pub plan: ComparisonTestPlan,
    /// Largest number of cases that the calibration chooses by itself if the user names none.
    pub max_chosen_cases: usize,
    /// Whether the user named the cases; if so, the calibration uses all of them.
    pub cases_chosen_by_user: bool,
    /// Total time of the calibration: no comparison starts that would probably end later; `None`
    /// for no limit.
    pub total_time_limit: Option<Duration>,
    /// Command line of the calibration, which its record stores.
    pub command_line: String,
    /// State file that holds all comparisons of the calibration so far; it is rewritten after each
    /// comparison.
    pub calibration_state_file: PathBuf,
    /// Whether an interrupted calibration is continued from its state file.
    pub resume_interrupted_calibration: bool,
}

/// Runs a calibration, and returns it with the number of comparisons that a resumed run still has
/// to make.
///
/// # Errors
/// Fails if the bench executables cannot be built or copied, no case can be measured, or the
/// calibration's state file cannot be written.
pub fn run_calibration(
    request: &BuildComparisonRequest,
    settings: &CalibrationRequest,
) -> Result<(GateCalibration, usize), CompareError> {
    let started = Instant::now();
    let session = ComparisonSession::prepare_sides_in_locked_folder(
        request,
        true,
        ProgressAndChildProcesses::with_interrupt_handler()?,
    )?;
    let outcome = make_calibration_comparisons(request, settings, &session, started);
    session.progress.clear_progress_line();
    outcome
}

/// Makes the comparisons. The function `make_calibration_comparisons` is long because each kind of
/// comparison has its own settings.
#[expect(clippy::too_many_lines)]
fn make_calibration_comparisons(
    request: &BuildComparisonRequest,
    settings: &CalibrationRequest,
    session: &ComparisonSession,
    started: Instant,
) -> Result<(GateCalibration, usize), CompareError> {
    let mut prepared =
        ComparisonEngine::engine_with_trials(request, session, ComparisonTrialsFile::default())
            .verify_and_match_sides()?;
    let left_out: BTreeSet<String> = prepared
        .reasons_of_unusable_cases()
        .map(|(case, reason)| format!("skipped: {case}: {reason}"))
        .collect();
    left_out.iter().for_each(|line| session.progress.print_line(line));
    let environment = prepared.environment.clone().ok_or(CompareError::NoBenchVerified)?;
    let earlier = file::read_record::<GateCalibration>(&settings.calibration_state_file)
        .ok()
        .filter(|_| settings.resume_interrupted_calibration);
    let choice = CalibrationCaseSelection {
        cases_chosen_by_user: settings.cases_chosen_by_user,
        max_chosen_cases: settings.max_chosen_cases,
        interrupted_calibration: earlier,
    };
    let times_ns = choose_calibration_cases(request, choice, session, &mut prepared, &environment)?;
    let simulated: BTreeSet<&String> =
        prepared.criterion_benches.iter().flat_map(|bench| &bench.compared_cases).collect();
    if !simulated.is_empty() && !settings.slowdowns_by_wait_percent.is_empty() {
        let cases = simulated.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        session.progress.print_line(&format!("{}{cases}", GateCalibration::SIMULATED_CASES_NOTE));
    }
    let listed = times_ns.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    session.progress.print_line(&format!(
        "{}: {listed}",
        kernelgate::display::counted_noun(times_ns.len(), "case")
    ));
    let mut calibration = resume_or_start_calibration(
        request,
        settings,
        session,
        (&prepared, environment, times_ns),
    )?;
    calibration.unmeasured_cases_with_reason.extend(left_out);
    let tasks = calibration_comparison_schedule(settings);
    let remaining: Vec<(CalibrationComparisonKind, usize)> = tasks
        .iter()
        .copied()
        .filter(|task| !is_comparison_already_measured(&calibration, *task))
        .collect();
    let (measuring, mut done, mut last_anchors) = (Instant::now(), 0, None);
    for (kind, number) in remaining.iter().copied() {
        // The next comparison is assumed to take as long as the longest comparison so far, and the
        // first one to take its whole budget.
        let walls_s = calibration
            .comparisons
            .iter()
            .map(|comparison_record| comparison_record.comparison_wall_s);
        let longest_s = walls_s.reduce(f64::max).unwrap_or(request.round_time_budget.as_secs_f64());
        let end = started.elapsed() + Duration::from_secs_f64(longest_s);
        if let Some(total) = settings.total_time_limit.filter(|total| end > *total) {
            session.progress.print_line(&format!(
                "no further comparison: one may take {}, and {} of --total-time {} are spent",
                progress::duration(Duration::from_secs_f64(longest_s)),
                progress::duration(started.elapsed()),
                progress::duration(total)
            ));
            break;
        }
        let ahead = progress::duration(estimated_calibration_time_left(
            &calibration,
            remaining.len() - done,
            measuring.elapsed(),
            done,
        ));
        let label = format!(
            "{} of {} comparisons done, {ahead} left; {}",
            tasks.len() - remaining.len() + done,
            tasks.len(),
            kind.kind_name()
        );
        session.progress.show_current_step(&label);
        let engine =
            ComparisonEngine::engine_with_trials(request, session, ComparisonTrialsFile::default());
        let is_due = last_anchors
            .is_none_or(|last: Instant| last.elapsed() > MIN_ANCHOR_MEASUREMENT_INTERVAL);
        let anchors = match is_due
            && calibration.comparisons.len() < anchors::MAX_ANCHOR_MEASUREMENTS_PER_PART
        {
            true => engine.measure_anchors_in_base_process(&prepared)?,
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
        print_calibration_comparison_outcome(&session.progress, &compared);
        let card = calibration.environment.id_of_gpus_or_host();
        calibration.comparisons.push(CalibrationComparisonRecord {
            card_or_host_id: card,
            anchors,
            ..compared
        });
        done += 1;
        file::write_record_atomically(&settings.calibration_state_file, &calibration)?;
    }
    calibration.derive_thresholds_and_anchor_tolerance();
    file::write_record_atomically(&settings.calibration_state_file, &calibration)?;
    Ok((calibration, remaining.len() - done))
}

impl CalibrationRequest {
    /// Describes which part of the calibration this shard measures; `None` if the calibration is
    /// not divided into shards.
    fn identity_of_this_shard(&self, cases: &BTreeSet<String>) -> Option<CalibrationShardIdentity> {
        let shard = self.shard?;
        let all = calibration_comparison_schedule(&Self { shard: None, ..self.clone() });
        let tasks: Vec<String> = all
            .iter()
            .map(|task| debug_text_with_recorded_names(task, RECORDED_CALIBRATION_NAMES))
            .collect();
        let facts = tasks.iter().chain(cases).map(String::as_str);
        let comparisons = shard.items_of_shard_in_turn(&all).count();
        Some(CalibrationShardIdentity {
            shard,
            plan_hash: file::hash_of_texts_hex(facts),
            comparisons_in_shard: comparisons,
        })
    }
}

/// Lists the comparisons that this shard of the calibration makes, with their kinds mixed evenly,
/// so that drift of the machine affects all kinds equally.
fn calibration_comparison_schedule(
    settings: &CalibrationRequest,
) -> Vec<(CalibrationComparisonKind, usize)> {
    let untouched = [
        (CalibrationComparisonKind::IdenticalBuilds, settings.identical_build_comparisons),
        (CalibrationComparisonKind::OtherCodeLayout, settings.code_layout_comparisons),
        (CalibrationComparisonKind::ShamLoad, settings.sham_load_comparisons),
    ];
    let injected = settings.slowdowns_by_wait_percent.iter().flat_map(|percent| {
        [
            (
                CalibrationComparisonKind::SlowdownByWaitPercent(*percent),
                settings.comparisons_per_slowdown,
            ),
            (
                CalibrationComparisonKind::OneCaseSlowdownPercent(*percent),
                settings.single_case_comparisons,
            ),
        ]
    });
    let work = settings.slowdowns_by_work_percent.iter().map(|percent| {
        (
            CalibrationComparisonKind::SlowdownByWorkPercent(*percent),
            settings.comparisons_per_slowdown,
        )
    });
    let counts: Vec<(CalibrationComparisonKind, usize)> =
        untouched.into_iter().chain(injected).chain(work).collect();
    let mut tasks: Vec<(f64, CalibrationComparisonKind, usize)> = Vec::new();
    for (kind, count) in counts {
        tasks.extend((0..count).map(|number| ((number as f64 + 0.5) / count as f64, kind, number)));
    }
    tasks.sort_by(|a, b| a.0.total_cmp(&b.0));
    let tasks = tasks.into_iter().map(|(_, kind, number)| (kind, number));
    match settings.shard {
        Some(shard) => shard.items_of_shard_in_turn(tasks).collect(),
        None => tasks.collect(),
    }
}

fn is_comparison_already_measured(
    calibration: &GateCalibration,
    (kind, number): (CalibrationComparisonKind, usize),
) -> bool {
    calibration.comparisons_of_kind(kind).any(|comparison| comparison.number_within_kind == number)
}

fn estimated_calibration_time_left(
    calibration: &GateCalibration,
    tasks: usize,
    elapsed: Duration,
    done: usize,
) -> Duration {
    let earlier: Vec<f64> =
        calibration.comparisons.iter().map(|comparison| comparison.comparison_wall_s).collect();
    let each_s = match (done, earlier.len()) {
        (0, 0) => return Duration::from_secs_f64(calibration.round_budget_s * tasks as f64),
        (0, count) => earlier.iter().sum::<f64>() / count as f64,
        (done, _) => elapsed.as_secs_f64() / done as f64,
    };
    Duration::from_secs_f64(each_s * tasks as f64)
}

/// Returns the interrupted calibration that is continued, or an empty one.
fn resume_or_start_calibration(
    request: &BuildComparisonRequest,
    settings: &CalibrationRequest,
    session: &ComparisonSession,
    (prepared, environment, cases): (&PreparedSides, RunEnvironment, BTreeMap<String, f64>),
) -> Result<GateCalibration, CompareError> {
    let identity = session.facts_that_identify_comparison(request)?;
    // Prebuilt executables do not record their commit, so the calibration records the commit of the
    // package around the current folder.
    let provenance = match request.base {
        ComparedSideSource::PrebuiltFolder(_) => {
            CommitAndChanges::from_git_or_variable(&request.package_root)
        }
        _ => prepared.head_provenance.clone(),
    };
    let mut fresh = GateCalibration {
        first_comparison_start_time: current_time_for_records(),
        environment,
        provenance,
        calibration_identity_facts: identity,
        calibration_command_lines: BTreeSet::new(),
        plan: settings.plan,
        round_budget_s: request.round_time_budget.as_secs_f64(),
        sampling: ComparisonEngine::sampling_of_first_bench(prepared),
        launch_ns_by_case: cases,
        unmeasured_cases_with_reason: BTreeSet::new(),
        cases_with_simulated_slowdowns: prepared
            .criterion_benches
            .iter()
            .flat_map(|bench| bench.compared_cases.clone())
            .collect(),
        shard_identity: settings.identity_of_this_shard(prepared.case_ids_to_compare()),
        anchor_rate_tolerance: None,
        recommended: None,
        comparisons: Vec::new(),
    };
    fresh.calibration_command_lines.insert(settings.command_line.clone());
    if !settings.resume_interrupted_calibration {
        return Ok(fresh);
    }
    match file::read_record::<GateCalibration>(&settings.calibration_state_file) {
        Ok(earlier) => {
            let of_another = first_differing_name(
                &earlier.calibration_identity_facts,
                &fresh.calibration_identity_facts,
            )
            .or_else(|| {
                (earlier.launch_ns_by_case.keys().ne(fresh.launch_ns_by_case.keys()))
                    .then(|| "which cases".to_owned())
            })
            .or_else(|| {
                fresh
                    .environment
                    .incomparable_facts_with_base(&earlier.environment)
                    .first()
                    .map(|mismatch| mismatch.field_name.to_owned())
            });
            if let Some(name) = of_another {
                let path = settings.calibration_state_file.clone();
                return Err(CompareError::SavedCalibrationOfOtherRequest { path, differs: name });
            }
            session
                .progress
                .print_line(&format!("going on after {} comparisons", earlier.comparisons.len()));
            fresh
                .check_and_merge_calibration(earlier)
                .map_err(CompareError::UnmergeableCalibration)?;
            Ok(fresh)
        }
        Err(error) if error.is_because_file_is_missing() => {
            session.progress.print_line("--resume: nothing was interrupted here: starting anew");
            Ok(fresh)
        }
        Err(error) => Err(error.into()),
    }
}

/// Runs one comparison of a calibration in new processes, which no other comparison uses.
fn run_calibration_comparison(
    request: &BuildComparisonRequest,
    settings: &CalibrationRequest,
    session: &ComparisonSession,
    prepared: &PreparedSides,
    (kind, number): (CalibrationComparisonKind, usize),
    label: &str,
) -> Result<CalibrationComparisonRecord, CompareError> {
    let (started, clock) = (current_time_for_records(), Instant::now());
    let simulated: BTreeSet<&String> =
        prepared.criterion_benches.iter().flat_map(|bench| &bench.compared_cases).collect();
    let delays_ns: BTreeMap<String, f64> = match kind.injected_slowdown_percent() {
        Some(percent) => {
            let mut times_ns: BTreeMap<String, Vec<f64>> = BTreeMap::new();
            for _ in 0..PROCESSES_THAT_TIME_CASES_FOR_DELAYS {
                for (id, time_ns) in ComparisonEngine::engine_with_trials(
                    request,
                    session,
                    ComparisonTrialsFile::default(),
                )
                .time_cases_in_one_process(prepared)?
                {
                    times_ns.entry(id).or_default().push(time_ns);
                }
            }
            let share = |id: &String, times_ns: &[f64]| {
                let share_ns = median(times_ns) * percent / 100.0;
                // The delay that is injected into a launch is a whole number of nanoseconds; only
                // simulated delays of Criterion benches may be fractions.
                if simulated.contains(id) { share_ns } else { share_ns.round().max(1.0) }
            };
            let share = |(id, times_ns): (String, Vec<f64>)| {
                let share_ns = share(&id, &times_ns);
                (id, share_ns)
            };
            let mut delays_ns: BTreeMap<String, f64> = times_ns.into_iter().map(share).collect();
            if let CalibrationComparisonKind::OneCaseSlowdownPercent(_) = kind {
                let chosen = delays_ns.keys().nth(number % delays_ns.len().max(1)).cloned();
                delays_ns.retain(|id, _| Some(id) == chosen.as_ref());
            }
            delays_ns
        }
        None => BTreeMap::new(),
    };
    let injection = InjectedHeadChanges {
        injected_delays_ns: delays_ns.clone(),
        delay_is_gpu_work: matches!(kind, CalibrationComparisonKind::SlowdownByWorkPercent(_)),
        code_layout_number: matches!(kind, CalibrationComparisonKind::OtherCodeLayout)
            .then_some(1 + number % ARTIFICIAL_CODE_LAYOUT_COUNT),
        ..InjectedHeadChanges::default()
    };
    let mut request_of_head = BuildComparisonRequest { injection, ..request.clone() };
    let on_host = prepared.environment.as_ref().is_none_or(RunEnvironment::is_cpu_run);
    let mut prepared = prepared.clone();
    let not_made = match delays_ns.is_empty() || on_host {
        true => BTreeMap::new(),
        false => determine_injected_delay_sizes(&mut request_of_head, session, &mut prepared),
    };
    let co_running = match kind {
        CalibrationComparisonKind::ShamLoad if on_host => ArtificialCoRunningLoad::SpinningThreads(
            std::thread::available_parallelism().map_or(1, Into::into),
        ),
        CalibrationComparisonKind::ShamLoad => {
            // The co-running load process starts before the measured process by the duration of one
            // whole bench process, after which its load certainly runs.
            let whole = Instant::now();
            ComparisonEngine::engine_with_trials(request, session, ComparisonTrialsFile::default())
                .time_cases_in_one_process(&prepared)?;
            ArtificialCoRunningLoad::GpuProcessWithLeadTime(whole.elapsed())
        }
        _ => ArtificialCoRunningLoad::NoLoad,
    };
    let mut engine = ComparisonEngine::engine_for_calibration(
        &request_of_head,
        session,
        settings.plan,
        co_running,
        label,
    );
    let comparison = engine.run_both_rounds(prepared)?;
    let took = (started, clock.elapsed());
    let mut comparison_record = calibration_comparison_record(
        (kind, number),
        took,
        delays_ns,
        &comparison,
        &engine.trials_file,
    );
    comparison_record
        .failed_cases_with_reason
        .extend(not_made.into_iter().map(|(id, why)| (id, why.failure_sentence)));
    Ok(comparison_record)
}

/// Determines each case's injected delay size once, with many launches, so that all processes of
/// the comparison inject equal delays. Removes the cases to which the requested delay cannot be
/// added from the comparison, and returns them with the reasons.
fn determine_injected_delay_sizes(
    request_of_head: &mut BuildComparisonRequest,
    session: &ComparisonSession,
    prepared: &mut PreparedSides,
) -> BTreeMap<String, CaseFailureReason> {
    let found = ComparisonEngine::engine_with_trials(
        request_of_head,
        session,
        ComparisonTrialsFile::default(),
    )
    .measure_injected_delay_sizes(prepared);
    match found {
        Ok(InjectedGpuDelaySizes { delay_sizes_by_case: sizes, cases_without_delay: failed }) => {
            request_of_head.injection.gpu_delay_sizes = sizes;
            let can_be_delayed = |id: &&String| !failed.contains_key(*id);
            prepared.retain_cases(
                &prepared.case_ids_to_compare().iter().filter(can_be_delayed).cloned().collect(),
            );
            failed
        }
        Err(error) => {
            session
                .progress
                .print_line(&format!("each process finds the size of its delays: {error}"));
            BTreeMap::new()
        }
    }
}

fn calibration_comparison_record(
    (kind, number): (CalibrationComparisonKind, usize),
    (started, took): (String, Duration),
    delays_ns: BTreeMap<String, f64>,
    comparison: &Comparison,
    trials: &ComparisonTrialsFile,
) -> CalibrationComparisonRecord {
    // A case that could not be measured is excluded, because it shows nothing about the gate's
    // error rates.
    let judged = || {
        comparison.judged_cases.iter().filter(|judged| judged.joined_measurement_errors().is_none())
    };
    let unmeasured = comparison
        .judged_cases
        .iter()
        .filter_map(|judged| Some((judged.case_id.clone(), judged.joined_measurement_errors()?)));
    let facts = &comparison.method_facts;
    let series = |round| {
        let observed = rounds::complete_blocks_by_case(&trials.trials, round);
        observed
            .into_iter()
            .map(|(case, blocks)| (case, CaseBlocksAsColumns::from_trial_blocks(&blocks)))
            .collect()
    };
    CalibrationComparisonRecord {
        kind,
        number_within_kind: number,
        comparison_start_time: started,
        comparison_wall_s: (took.as_secs_f64() * 10.0).round() / 10.0,
        process_count: facts.rounds.iter().map(|round| round.process_count).sum(),
        injected_delays_ns: delays_ns,
        verdicts: judged().map(|judged| (judged.case_id.clone(), judged.verdict)).collect(),
        inconclusive_reasons_by_case: judged()
            .filter_map(|judged| {
                Some((judged.case_id.clone(), judged.joined_inconclusive_reasons()?))
            })
            .collect(),
        failed_cases_with_reason: comparison
            .failed_in_head
            .clone()
            .into_iter()
            .chain(facts.failed_in_base.clone())
            .map(|(id, why)| (id, why.failure_sentence))
            .chain(unmeasured)
            .collect(),
        failed_bench_processes: facts
            .failed_processes
            .iter()
            .map(|broken| {
                format!("{} of the {}: {}", broken.bench_name, broken.side, broken.failure_reason)
            })
            .collect(),
        first_round_times: series(1),
        second_round_times: series(2),
        card_or_host_id: String::new(),
        anchors: None,
    }
}

/// Prints one line with the outcome of a calibration's comparison: verdict counts, failed cases,
/// blocks and time.
fn print_calibration_comparison_outcome(
    progress: &ComparisonProgressDisplay,
    comparison: &CalibrationComparisonRecord,
) {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, verdict) in comparison.verdicts_by_case() {
        *counts.entry(verdict.verdict_name()).or_default() += 1;
    }
    let counts: Vec<String> =
        counts.into_iter().map(|(verdict, count)| format!("{count} {verdict}")).collect();
    let failed = if comparison.failed_cases_with_reason.is_empty() {
        String::new()
    } else {
        format!(", {} not run", comparison.failed_cases_with_reason.len())
    };
    let blocks = comparison.process_count / rounds::PROCESSES_PER_BLOCK;
    progress.print_line(&format!(
        "{} {}: {}{failed} ({blocks} blocks, {:.0} s)",
        comparison.kind.kind_name(),
        comparison.number_within_kind + 1,
        counts.join(", "),
        comparison.comparison_wall_s
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_calibration_request(shard: Option<ShardOfWork>) -> CalibrationRequest {
        CalibrationRequest {
            identical_build_comparisons: 7,
            code_layout_comparisons: 1,
            slowdowns_by_wait_percent: vec![2.0, 5.0],
            slowdowns_by_work_percent: vec![1.0],
            comparisons_per_slowdown: 3,
            single_case_comparisons: 1,
            sham_load_comparisons: 2,
            shard,
            plan: ComparisonTestPlan::default(),
            max_chosen_cases: 4,
            cases_chosen_by_user: false,
            total_time_limit: None,
            command_line: String::new(),
            calibration_state_file: PathBuf::new(),
            resume_interrupted_calibration: false,
        }
    }

    #[test]
    fn shards_of_a_calibration_divide_its_comparisons_without_overlap() {
        let whole = calibration_comparison_schedule(&test_calibration_request(None));
        assert_eq!(whole.len(), 21);
        // The first half of the calibration's schedule must contain each kind of comparison that
        // occurs several times.
        for kind in [
            CalibrationComparisonKind::IdenticalBuilds,
            CalibrationComparisonKind::ShamLoad,
            CalibrationComparisonKind::SlowdownByWaitPercent(2.0),
            CalibrationComparisonKind::SlowdownByWaitPercent(5.0),
            CalibrationComparisonKind::SlowdownByWorkPercent(1.0),
        ] {
            assert!(whole[..11].iter().any(|task| task.0 == kind), "{kind:?}");
        }
        let shards = (1..=4).map(|index| ShardOfWork { index_from_one: index, shard_count: 4 });
        let parts: Vec<(CalibrationComparisonKind, usize)> = shards
            .flat_map(|shard| {
                calibration_comparison_schedule(&test_calibration_request(Some(shard)))
            })
            .collect();
        assert_eq!(parts.len(), whole.len());
        assert!(whole.iter().all(|task| parts.contains(task)));
    }
}
