//! Formats bench results as a table of time, spread, rate and share of the limit per case, followed
//! by the unmeasured cases with reasons.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::table::AlignedTextTable;
use super::{amount_rate_text, energy_text, natural_sort_key, time_text};
use crate::measure::audit::reused_results;
use crate::measure::energy::LaunchEnergyOrReason;
use crate::measure::power::PowerStateOfSamples;
use crate::record::run::InputChangeAfterTiming;
use crate::record::text::{clean_message_for_terminal, indent_every_line};
use crate::record::{BenchProcessRun, CaseRecordWithSamples, OutputVerificationExtent};
use crate::stats::{self, MedianAndQuartiles};

/// Share of host CPU time used by other processes from which on the results mention contention.
const MIN_MENTIONED_CPU_CONTENTION: f64 = 0.10;

/// A remark below the results table, and the condition that selects the cases to which it applies.
type RemarkAndCondition = (&'static str, fn(&BenchProcessRun, &CaseRecordWithSamples) -> bool);

/// A ceiling (measured device rate) is marked if its SM clock was below this share of the case's SM
/// clock, because the case then seems closer to its limit.
const MIN_CEILING_TO_CASE_CLOCK_RATIO: f64 = 0.9;

/// The host time of a launch is mentioned if it exceeds the GPU time by this factor and by 100 µs;
/// short kernels always take longer to launch than to run.
const SLOW_HOST_LAUNCH_FACTOR: f64 = 2.0;
const SLOW_HOST_LAUNCH_EXCESS_NS: f64 = 100_000.0;

/// Whether the host needs much longer to enqueue a launch than the GPU needs to run it, while the
/// samples contain only GPU time.
fn host_launch_is_slower_than_gpu(case: &CaseRecordWithSamples) -> bool {
    let launches_ns = case.samples.launch_times_by_sample_ns();
    case.samples.costs.host_launch_ns.filter(|_| !launches_ns.is_empty()).is_some_and(|host_ns| {
        let gpu_ns = stats::median(&launches_ns);
        !case.samples.conditions.includes_host_launch_time
            && host_ns >= SLOW_HOST_LAUNCH_FACTOR * gpu_ns
            && host_ns >= gpu_ns + SLOW_HOST_LAUNCH_EXCESS_NS
    })
}

const RESULTS_TABLE_REMARKS: [RemarkAndCondition; 11] = [
    ("unverified, nothing says whether the outputs are right", |_, case| {
        case.verification.verification_extent() == OutputVerificationExtent::Unverified
    }),
    ("host-bound, the host's launches are in the time", |_, case| {
        case.samples.conditions.includes_host_launch_time
    }),
    (
        "the host needs longer to launch than the GPU to run it, and its time is not in this",
        |_, case| host_launch_is_slower_than_gpu(case),
    ),
    ("warning: throttled GPU, the times are too long", |_, case| {
        case.samples.conditions.throttled_samples > 0
    }),
    ("warning: another process computed on the GPU, the times may be too long", |_, case| {
        case.samples.conditions.was_gpu_shared_with_other_processes()
    }),
    ("of limit is too high, the ceiling was measured at a lower SM clock", |run, case| {
        let ceiling = case
            .limit
            .as_ref()
            .and_then(|limit| run.limits.sm_clock_mhz_by_ceiling.get(&limit.deciding_ceiling));
        let clocks = &case.samples.sm_clock_per_sample_mhz;
        !clocks.is_empty()
            && ceiling.is_some_and(|&ceiling| {
                ceiling < MIN_CEILING_TO_CASE_CLOCK_RATIO * stats::median(clocks)
            })
    }),
    ("unsettled, the time still changed under a steady load", |_, case| {
        case.samples
            .power
            .as_ref()
            .is_some_and(|power| power.state == PowerStateOfSamples::UnsettledUnderLoad)
    }),
    ("timed again, the SM clock was low at first", |_, case| {
        case.samples.conditions.discarded_attempts > 0
            && case.samples.conditions.throttled_samples == 0
    }),
    (
        "computed from inputs that were read before timing: a remembered result would pass",
        |_, case| {
            case.verification.after_timing.is_some_and(|after| {
                after.inputs == InputChangeAfterTiming::InputsUnchanged
                    && case.verification.reused_from_run.is_none()
            })
        },
    ),
    ("without a record of a launch: short work on another stream may pass", |_, case| {
        case.samples.reason_cupti_did_not_check.is_some()
    }),
    ("too short: a result that saves more than a quarter of a launch may pass", |run, case| {
        let launches_ns = case.samples.launch_times_by_sample_ns();
        !run.environment.is_cpu_run()
            && case.verification.after_timing.is_some()
            && !launches_ns.is_empty()
            && !reused_results::is_reuse_of_results_detectable(stats::median(&launches_ns))
    }),
];

/// Formats the cases of runs as a table for a terminal with `columns` columns, or of any width.
pub fn results_table_and_remarks_text(runs: &[BenchProcessRun], columns: Option<usize>) -> String {
    let table = results_table_of_runs(runs);
    let mut out = if table.has_no_rows() {
        "no case was timed".to_owned()
    } else {
        table.aligned_text_for_terminal(columns)
    };
    if table.rows().iter().any(|row| row[0].starts_with("* ")) {
        out.push_str("\n*: the fastest of its problem with that state of the caches");
    }
    // If no case ran, the reasons of all skipped cases are printed.
    let every = table.has_no_rows();
    for (reason, ids) in skipped_ids_by_reason(runs, every) {
        let _ = write!(out, "\nskipped {}: {}", ids.len(), indent_every_line(reason));
        if ids.len() <= MAX_IDS_PER_LINE {
            let _ = write!(out, ": {}", ids.join(", "));
        }
    }
    let unsupported: usize = runs.iter().map(|run| run.unsupported_case_ids.len()).sum();
    if unsupported > 0 && !every {
        let _ = write!(
            out,
            "\n{unsupported} unsupported combinations of problem and implementation skipped"
        );
    }
    let shares = runs
        .iter()
        .flat_map(|run| run.cases.values())
        .filter_map(|case| case.samples.conditions.other_processes_cpu_share);
    let most = shares.fold(0.0, f64::max);
    if most > MIN_MENTIONED_CPU_CONTENTION {
        let _ = write!(
            out,
            "\nwarning: co-running processes took up to {:.0}% of the CPU time while a case was measured",
            100.0 * most
        );
    }
    for (what, applies) in RESULTS_TABLE_REMARKS {
        let of_run = |run: &'_ BenchProcessRun| -> Vec<_> {
            let cases = run.cases.iter();
            cases.filter(|(_, case)| applies(run, case)).map(|(id, _)| id.clone()).collect()
        };
        let ids: Vec<String> = runs.iter().flat_map(of_run).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        if !ids.is_empty() {
            let _ = write!(out, "\n{what}: {}", first_case_ids_and_count_text(&ids));
        }
    }
    for run in runs.iter().filter(|run| !run.injected_delays_ns.is_empty()) {
        let _ = write!(
            out,
            "\nDELAYED on purpose, nanoseconds a launch: {}",
            run.injected_delays_as_text()
        );
    }
    for run in runs {
        for (id, error) in &run.failed {
            let _ = write!(out, "\nFAILED {id}: {}", indent_every_line(&error.failure_sentence));
        }
    }
    clean_message_for_terminal(&out).into_owned()
}

/// Makes a table with a heading per problem, problems sorted by size, and the implementations
/// below: hot caches before cold caches, fastest first.
fn results_table_of_runs(runs: &[BenchProcessRun]) -> AlignedTextTable {
    let low_clocks = runs
        .iter()
        .any(|run| run.cases.values().any(|case| low_sm_clock_cell(run, case).is_some()));
    let mut header = vec!["case", "time", "spread", "rate", "limit", "of limit", "limited by", ""];
    header.extend(low_clocks.then_some("SM clock"));
    let skews = runs
        .iter()
        .any(|run| run.cases.values().any(|it| !it.samples.gpu_skew_per_sample_ns.is_empty()));
    header.extend(skews.then_some("skew"));
    let energies = runs.iter().any(|run| run.cases.values().any(|it| it.samples.energy.is_some()));
    header.extend(energies.then_some("energy"));
    let networks = runs.iter().any(|run| run.cases.values().any(is_network_case));
    if networks {
        header.extend(["throughput", "of matmul peak"]);
    }
    let mut table = AlignedTextTable::new(&header);
    let mut problems: BTreeMap<Vec<(String, u64)>, Vec<TimedCaseRow<'_>>> = BTreeMap::new();
    for (run, of) in runs.iter().flat_map(|run| run.cases.iter().map(move |of| (run, of))) {
        let clock = low_clocks.then(|| low_sm_clock_cell(run, of.1).unwrap_or_default());
        let energy = energies.then(|| launch_energy_cell(of.1));
        let network = networks.then(|| throughput_and_matmul_peak_share_cells(run, of.1));
        let skew = skews.then(|| {
            of.1.samples.median_gpu_skew_per_launch_ns().map_or("-".to_owned(), time_text)
        });
        let timed = TimedCaseRow {
            sm_clock_cell: clock,
            skew_between_gpus_cell: skew,
            energy_cell: energy,
            network,
            ..TimedCaseRow::from_id_and_record(of)
        };
        problems.entry(natural_sort_key(timed.problem)).or_default().push(timed);
    }
    for mut cases in problems.into_values() {
        cases.sort_by(|a, b| {
            let order = |timed: &TimedCaseRow<'_>| timed.case.cache_state == "cold";
            order(a)
                .cmp(&order(b))
                .then(a.launch_time_spread.median.total_cmp(&b.launch_time_spread.median))
        });
        if !cases[0].problem.is_empty() {
            table.add_heading(cases[0].problem.to_owned());
        }
        for same in cases.chunk_by(|a, b| a.case.cache_state == b.case.cache_state) {
            let best = |at: usize| at == 0 && same.len() > 1 && !same[0].problem.is_empty();
            same.iter()
                .enumerate()
                .for_each(|(at, timed)| table.add_row(timed.cells_with_mark_of_fastest(best(at))));
        }
    }
    table
}

/// One row of the results table: a timed case.
struct TimedCaseRow<'a> {
    /// The problem's part of the case id, used as heading; empty if the id has another form.
    problem: &'a str,
    /// The end of the case id: implementation and cache state, such as `cpu/hot`.
    implementation_and_cache: &'a str,
    case: &'a CaseRecordWithSamples,
    launch_time_spread: MedianAndQuartiles,
    /// Text of the SM clock column, if the table has this column.
    sm_clock_cell: Option<String>,
    /// Text of the column of start-time skew between GPUs, if the table has this column.
    skew_between_gpus_cell: Option<String>,
    /// Text of the energy column, if the table has this column.
    energy_cell: Option<String>,
    /// Texts of the columns of throughput and share of the matmul peak, if the table has these
    /// columns.
    network: Option<[String; 2]>,
}

/// Whether the case is a network: its launches compute samples by matrix products.
fn is_network_case(case: &CaseRecordWithSamples) -> bool {
    case.data_items_per_launch.is_some() && case.work.matmul_flops_of_all_dtypes() > 0
}

/// Texts of throughput in samples per second, and of the share of the measured peak rate of matrix
/// products.
fn throughput_and_matmul_peak_share_cells(
    run: &BenchProcessRun,
    case: &CaseRecordWithSamples,
) -> [String; 2] {
    let dash = || "-".to_owned();
    if !is_network_case(case) {
        return [dash(), dash()];
    }
    let launch_ns = stats::median(&case.samples.launch_times_by_sample_ns());
    let products =
        case.work.flops_by_unit_and_dtype.iter().filter(|(unit, _)| unit.starts_with("matmul "));
    let least_ns: Option<f64> = products
        .map(|(unit, count)| Some(*count as f64 / run.limits.flops_per_s.get(unit)? * 1e9))
        .sum();
    let rate = case.data_items_per_launch.map(|samples| samples as f64 * 1e9 / launch_ns);
    [
        rate.map_or_else(dash, |rate| case.data_item_unit.throughput_as_text(rate)),
        least_ns.map_or_else(dash, |least_ns| limit_share_cell(least_ns / launch_ns)),
    ]
}

/// Formats the energy of a launch with its uncertainty, and the operations per joule: "1.234 J
/// ±9.1% 512 GFLOP/J".
fn launch_energy_cell(case: &CaseRecordWithSamples) -> String {
    match &case.samples.energy {
        None => "-".to_owned(),
        Some(LaunchEnergyOrReason::NotMeasured(_)) => "not resolved".to_owned(),
        Some(LaunchEnergyOrReason::Measured(energy)) => {
            let exact = format!(
                "{} ±{:.1}%",
                energy_text(energy.energy_per_launch_j),
                100.0 * energy.relative_resolution
            );
            match case.work.matmul_flops_of_all_dtypes() {
                0 => exact,
                flops => format!(
                    "{exact} {:.0} GFLOP/J",
                    flops as f64 * 1e-9 / energy.energy_per_launch_j
                ),
            }
        }
    }
}

/// The SM clock column shows only clocks below this share of the card's highest clock.
const MAX_SHOWN_SHARE_OF_HIGHEST_CLOCK: f64 = 0.98;

/// Formats the median SM clock of a case clearly below the card's highest clock, with the reason:
/// power cap ("1430 MHz cap"), or heat or hardware ("1290 MHz slowed").
fn low_sm_clock_cell(run: &BenchProcessRun, case: &CaseRecordWithSamples) -> Option<String> {
    let highest_mhz = f64::from(run.environment.gpus.only_gpu()?.max_clock_mhz);
    let clocks = &case.samples.sm_clock_per_sample_mhz;
    let median_mhz = (!clocks.is_empty()).then(|| stats::median(clocks))?;
    let mark = match &case.samples.power {
        Some(power) if power.was_slowed_by_heat_or_hardware() => " slowed",
        Some(power) if power.at_power_cap => " cap",
        _ => "",
    };
    let low = !mark.is_empty() || median_mhz < MAX_SHOWN_SHARE_OF_HIGHEST_CLOCK * highest_mhz;
    low.then(|| format!("{median_mhz:.0} MHz{mark}"))
}

impl<'a> TimedCaseRow<'a> {
    fn from_id_and_record((id, case): (&'a String, &'a CaseRecordWithSamples)) -> Self {
        let end = format!("/{}/{}", case.implementation, case.cache_state);
        let problem = id.strip_suffix(&end).unwrap_or_default();
        let name = id[problem.len()..].trim_start_matches('/');
        let spread = MedianAndQuartiles::median_and_quartiles_from_values(
            &case.samples.launch_times_by_sample_ns(),
        );
        Self {
            problem,
            implementation_and_cache: name,
            case,
            launch_time_spread: spread,
            sm_clock_cell: None,
            skew_between_gpus_cell: None,
            energy_cell: None,
            network: None,
        }
    }

    fn cells_with_mark_of_fastest(&self, best: bool) -> Vec<String> {
        let Self {
            implementation_and_cache: name,
            case,
            launch_time_spread: spread,
            sm_clock_cell: clock,
            skew_between_gpus_cell: skew,
            energy_cell: energy,
            network,
            ..
        } = self;
        let limit = case.limit.as_ref();
        let fraction = limit.map(|limit| limit.share_of_limit_reached(spread.median));
        let dash = || "-".to_owned();
        let mut cells = vec![
            match (self.problem.is_empty(), best) {
                (true, _) => (*name).to_owned(),
                (_, best) => format!("{} {name}", if best { '*' } else { '-' }),
            },
            time_text(spread.median),
            format!("±{:.1}%", 100.0 * spread.half_interquartile_range_by_median()),
            case_rate_text(case, spread.median),
            limit.map_or_else(dash, |limit| time_text(limit.shortest_launch_ns)),
            fraction.map_or_else(dash, limit_share_cell),
            limit.map_or_else(dash, |limit| limit.deciding_ceiling.clone()),
            fraction.map_or_else(String::new, bar_of_share),
        ];
        cells.extend(clock.clone());
        cells.extend(skew.clone());
        cells.extend(energy.clone());
        cells.extend(network.clone().into_iter().flatten());
        cells
    }
}

/// Formats a share of the limit as a percentage; a share above 100 % is marked with "!" instead of
/// rejected.
fn limit_share_cell(fraction: f64) -> String {
    format!("{:.1}%{}", 100.0 * fraction, if fraction > 1.0 { "!" } else { "" })
}

/// Draws a share as a bar of eight block characters, with a resolution of an eighth of a character.
fn bar_of_share(fraction: f64) -> String {
    const BAR_WIDTH: usize = 8;
    const EIGHTH_BLOCKS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (fraction.clamp(0.0, 1.0) * (8 * BAR_WIDTH) as f64).round() as usize;
    let bar = "█".repeat(eighths / 8) + EIGHTH_BLOCKS[eighths % 8];
    // The bar is filled up with `░`, because trailing blanks of a cell would be removed.
    format!("{bar:░<BAR_WIDTH$}")
}

fn case_rate_text(case: &CaseRecordWithSamples, elapsed_ns: f64) -> String {
    match (case.work.matmul_flops_of_all_dtypes(), case.work.bytes_read_and_written()) {
        (0, _) if case.work.min_received_bytes > 0 => {
            amount_rate_text(case.work.min_received_bytes, "B", elapsed_ns)
        }
        (0, 0) => "-".to_owned(),
        (0, bytes) => amount_rate_text(bytes, "B", elapsed_ns),
        (flops, _) => amount_rate_text(flops, "FLOP", elapsed_ns),
    }
}

/// Groups ids of skipped cases by reason; `every` includes cases that no machine can run.
fn skipped_ids_by_reason(runs: &[BenchProcessRun], every: bool) -> BTreeMap<&str, Vec<&str>> {
    let mut grouped: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for run in runs {
        let here =
            run.skipped.iter().filter(|(id, _)| every || !run.unsupported_case_ids.contains(*id));
        for (id, reason) in here {
            grouped.entry(reason).or_default().push(id);
        }
    }
    grouped
}

/// Maximum number of case ids that are listed in one line.
const MAX_IDS_PER_LINE: usize = 3;

fn first_case_ids_and_count_text(ids: &[&str]) -> String {
    let mut text = ids[..ids.len().min(MAX_IDS_PER_LINE)].join(", ");
    if ids.len() > MAX_IDS_PER_LINE {
        let _ = write!(text, " and {} more", ids.len() - MAX_IDS_PER_LINE);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::limits::ShortestLaunchTime;
    use crate::record::run::VerificationAfterTiming;
    use crate::record::{CommitAndChanges, RunEnvironment, ThroughputItemUnit};

    fn case_record_with_one_time(
        implementation: &str,
        cache: &str,
        elapsed_ns: f64,
    ) -> CaseRecordWithSamples {
        CaseRecordWithSamples {
            implementation: implementation.to_owned(),
            cache_state: cache.to_owned(),
            limit: Some(ShortestLaunchTime {
                shortest_launch_ns: 50.0,
                deciding_ceiling: "memory".to_owned(),
            }),
            ..CaseRecordWithSamples::example_with_sample_times(vec![elapsed_ns])
        }
    }

    #[test]
    fn cases_without_cupti_record_are_listed_below_the_table() {
        let mut run = BenchProcessRun::empty_run_starting_now(
            "b",
            "s",
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        );
        run.cases.insert(
            "w/f/n1/cuda/seen/hot".to_owned(),
            case_record_with_one_time("cuda/seen", "hot", 100.0),
        );
        let mut unseen = case_record_with_one_time("cuda/unseen", "hot", 100.0);
        unseen.samples.reason_cupti_did_not_check = Some("CUPTI is missing".to_owned());
        run.cases.insert("w/f/n1/cuda/unseen/hot".to_owned(), unseen);
        let text = results_table_and_remarks_text(&[run], None);
        let line = text.lines().find(|line| line.starts_with("without a record")).unwrap();
        assert_eq!(
            line,
            "without a record of a launch: short work on another stream may pass: w/f/n1/cuda/unseen/hot"
        );
    }

    #[test]
    fn a_launch_too_short_to_detect_reused_results_is_marked() {
        let environment = RunEnvironment {
            device_kind: "cuda".to_owned(),
            ..RunEnvironment::environment_of_process_on_cpu()
        };
        let mut run = BenchProcessRun::empty_run_starting_now(
            "b",
            "s",
            environment,
            CommitAndChanges::default(),
        );
        for (name, elapsed_ns) in [("tiny", 1_500.0), ("long", 2_500.0)] {
            let mut of = case_record_with_one_time(name, "hot", elapsed_ns);
            of.verification.after_timing =
                Some(VerificationAfterTiming::EQUAL_BITS_FOR_UNCHANGED_INPUTS);
            run.cases.insert(format!("w/f/n1/{name}/hot"), of);
        }
        let text = results_table_and_remarks_text(&[run], None);
        let line = text.lines().find(|line| line.starts_with("too short")).unwrap();
        assert_eq!(
            line,
            "too short: a result that saves more than a quarter of a launch may pass: w/f/n1/tiny/hot"
        );
    }

    #[test]
    fn continuation_lines_of_failure_messages_are_indented() {
        let mut run = BenchProcessRun::empty_run_starting_now(
            "b",
            "s",
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        );
        let message = "boom\n\n0 regressed, 3 unchanged";
        run.failed.insert("w/f/a".to_owned(), message.into());
        run.skipped.insert("w/f/b".to_owned(), message.to_owned());
        let expected = "no case was timed\nskipped 1: boom\n    0 regressed, 3 unchanged: w/f/b\n\
                      FAILED w/f/a: boom\n    0 regressed, 3 unchanged";
        assert_eq!(results_table_and_remarks_text(&[run], None), expected);
    }

    #[test]
    fn a_host_launch_slower_than_the_gpu_is_mentioned() {
        let mut run = BenchProcessRun::empty_run_starting_now(
            "b",
            "s",
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        );
        for (name, gpu_ns, host_ns, host_bound) in [
            // The case computes for two milliseconds on the host, and then enqueues a copy.
            ("computes", 200e3, Some(2e6), false),
            ("tiny", 2e3, Some(4e3), false),
            ("many", 300e3, Some(500e3), false),
            ("shows", 2e6, Some(8e6), true),
            ("unknown", 1e3, None, false),
        ] {
            let mut of = case_record_with_one_time(name, "hot", gpu_ns);
            (of.samples.costs.host_launch_ns, of.samples.conditions.includes_host_launch_time) =
                (host_ns, host_bound);
            run.cases.insert(format!("w/f/n1/{name}/hot"), of);
        }
        let text = results_table_and_remarks_text(&[run], None);
        let line = text.lines().find(|line| line.ends_with("w/f/n1/computes/hot")).unwrap();
        assert_eq!(
            line,
            "the host needs longer to launch than the GPU to run it, and its time is not in this: w/f/n1/computes/hot"
        );
    }

    #[test]
    fn a_network_shows_throughput_and_share_of_matmul_peak() {
        let mut run = BenchProcessRun::empty_run_starting_now(
            "b",
            "s",
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        );
        run.limits.flops_per_s.insert("matmul bf16".to_owned(), 500e12);
        let mut network = case_record_with_one_time("cuda/fused", "hot", 1e6);
        network.work.flops_by_unit_and_dtype.insert("matmul bf16".to_owned(), 250_000_000_000);
        network.data_items_per_launch = Some(2048);
        network.data_item_unit = ThroughputItemUnit::Tokens;
        run.cases.insert("w/f/n1/cuda/fused/hot".to_owned(), network);
        run.cases.insert(
            "w/g/n1/cuda/fused/hot".to_owned(),
            case_record_with_one_time("cuda/fused", "hot", 1e6),
        );
        let text = results_table_and_remarks_text(&[run], None);
        let row = |problem: &str| {
            let mut lines = text.lines().skip_while(|line| !line.contains(problem)).skip(1);
            lines.next().unwrap().split_whitespace().rev().collect::<Vec<_>>()
        };
        assert_eq!(row("w/f/n1")[..3], ["50.0%", "tokens/s", "2048000"], "{text}");
        assert_eq!(row("w/g/n1")[..2], ["-", "-"], "{text}");
    }

    #[test]
    fn problems_are_sorted_by_size_and_the_fastest_case_marked() {
        let mut run = BenchProcessRun::empty_run_starting_now(
            "b",
            "s",
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        );
        for (id, cached) in [
            ("w/f/n1024/cpu/hot", case_record_with_one_time("cpu", "hot", 100.0)),
            ("w/f/n512/cuda/slow/hot", case_record_with_one_time("cuda/slow", "hot", 200.0)),
            ("w/f/n512/cuda/fast/cold", case_record_with_one_time("cuda/fast", "cold", 60.0)),
            ("w/f/n512/cuda/fast/hot", case_record_with_one_time("cuda/fast", "hot", 40.0)),
            ("another bench's case", case_record_with_one_time("", "", 80.0)),
        ] {
            run.cases.insert(id.to_owned(), cached);
        }
        let text = results_table_and_remarks_text(&[run], None);
        let first =
            |line: &str| line.split("  ").find(|word| !word.trim().is_empty()).map(str::to_owned);
        let firsts: Vec<String> =
            text.lines().filter_map(first).map(|word| word.trim().to_owned()).collect();
        assert_eq!(
            &firsts[..7],
            [
                "case",
                "another bench's case",
                "w/f/n512",
                "* cuda/fast/hot",
                "- cuda/slow/hot",
                "- cuda/fast/cold",
                "w/f/n1024",
            ],
            "{text}"
        );
        assert!(text.contains("125.0%!") && text.contains("████████"), "{text}");
        let half = text.lines().find(|line| line.contains("cpu/hot")).unwrap();
        assert!(half.ends_with(" ████░░░░") && half.contains("50.0%"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    }
}
