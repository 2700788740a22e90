//! Runs as a table: time, spread, rate and share of the limit of each case; then the unmeasured
//! cases with their reasons.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::table::TextTable;
use super::{amount_rate_text, joules_text, natural_sort_key, time_text};
use crate::measure::audit::reused_results;
use crate::measure::energy::LaunchEnergy;
use crate::measure::power::PowerState;
use crate::record::run::InputChange;
use crate::record::text::{indent_lines, printable_on_terminal};
use crate::record::{CaseRecord, ProcessRun, VerificationExtent};
use crate::stats::{self, QuartileSpread};

/// Share of the host's CPU time from which on contention is mentioned.
const MIN_MENTIONED_CONTENTION: f64 = 0.10;

/// A remark below the table and the test for the cases that it applies to.
type TableRemark = (&'static str, fn(&ProcessRun, &CaseRecord) -> bool);

/// A ceiling is marked if its SM clock was below this share of the case's SM clock, because the
/// case then looks closer to its limit than it is.
const MIN_CEILING_CLOCK_SHARE: f64 = 0.9;

/// The host time of a launch is reported if it exceeds the GPU time by this factor, and by this
/// many nanoseconds: launching a short kernel normally takes longer than the kernel itself.
const SLOW_HOST_FACTOR: f64 = 2.0;
const SLOW_HOST_EXCESS_NS: f64 = 100_000.0;

/// Whether the host needs longer to start a launch than the GPU needs to run it, although the
/// samples hide that.
fn host_is_slower(case: &CaseRecord) -> bool {
    let launches_ns = case.samples.per_launch_ns();
    case.samples.costs.host_launch_ns.filter(|_| !launches_ns.is_empty()).is_some_and(|host_ns| {
        let gpu_ns = stats::median(&launches_ns);
        !case.samples.conditions.host_bound
            && host_ns >= SLOW_HOST_FACTOR * gpu_ns
            && host_ns >= gpu_ns + SLOW_HOST_EXCESS_NS
    })
}

const TABLE_REMARKS: [TableRemark; 11] = [
    ("unverified, nothing says whether the outputs are right", |_, case| {
        case.verification.value() == VerificationExtent::Unverified
    }),
    ("host-bound, the host's launches are in the time", |_, case| {
        case.samples.conditions.host_bound
    }),
    (
        "the host needs longer to launch than the GPU to run it, and its time is not in this",
        |_, case| host_is_slower(case),
    ),
    ("warning: throttled GPU, the times are too long", |_, case| {
        case.samples.conditions.throttled > 0
    }),
    ("warning: another process computed on the GPU, the times may be too long", |_, case| {
        case.samples.conditions.shared_gpu()
    }),
    ("of limit is too high, the ceiling was measured at a lower SM clock", |run, case| {
        let ceiling = case.limit.as_ref().and_then(|limit| run.limits.clock_mhz.get(&limit.by));
        let clocks = &case.samples.clock_mhz;
        !clocks.is_empty()
            && ceiling
                .is_some_and(|&ceiling| ceiling < MIN_CEILING_CLOCK_SHARE * stats::median(clocks))
    }),
    ("unsettled, the time still changed under a steady load", |_, case| {
        case.samples.power.as_ref().is_some_and(|power| power.state == PowerState::Unsettled)
    }),
    ("timed again, the SM clock was low at first", |_, case| {
        case.samples.conditions.discarded > 0 && case.samples.conditions.throttled == 0
    }),
    (
        "computed from inputs that were read before timing: a remembered result would pass",
        |_, case| {
            case.verification.after.is_some_and(|after| {
                after.inputs == InputChange::Same && case.verification.by.is_none()
            })
        },
    ),
    ("without a record of a launch: short work on another stream may pass", |_, case| {
        case.samples.unrecorded.is_some()
    }),
    ("too short: a result that saves more than a quarter of a launch may pass", |run, case| {
        let launches_ns = case.samples.per_launch_ns();
        !run.environment.is_on_host()
            && case.verification.after.is_some()
            && !launches_ns.is_empty()
            && !reused_results::is_reuse_detectable(stats::median(&launches_ns))
    }),
];

/// Cases of the runs for a terminal, within its columns if it has a width.
pub fn results_text(runs: &[ProcessRun], columns: Option<usize>) -> String {
    let table = results_table(runs);
    let mut out =
        if table.is_empty() { "no case was timed".to_owned() } else { table.text_within(columns) };
    if table.rows().iter().any(|row| row[0].starts_with("* ")) {
        out.push_str("\n*: the fastest of its problem with that state of the caches");
    }
    // If no case ran, every reason of a skip is printed.
    let every = table.is_empty();
    for (reason, ids) in skipped_ids_by_reason(runs, every) {
        let _ = write!(out, "\nskipped {}: {}", ids.len(), indent_lines(reason));
        if ids.len() <= MAX_IDS_PER_LINE {
            let _ = write!(out, ": {}", ids.join(", "));
        }
    }
    let unsupported: usize = runs.iter().map(|run| run.unsupported.len()).sum();
    if unsupported > 0 && !every {
        let _ = write!(
            out,
            "\n{unsupported} unsupported combinations of problem and implementation skipped"
        );
    }
    let shares = runs
        .iter()
        .flat_map(|run| run.cases.values())
        .filter_map(|case| case.samples.conditions.contention);
    let most = shares.fold(0.0, f64::max);
    if most > MIN_MENTIONED_CONTENTION {
        let _ = write!(
            out,
            "\nwarning: co-running processes took up to {:.0}% of the CPU time while a case was measured",
            100.0 * most
        );
    }
    for (what, applies) in TABLE_REMARKS {
        let of_run = |run: &'_ ProcessRun| -> Vec<_> {
            let cases = run.cases.iter();
            cases.filter(|(_, case)| applies(run, case)).map(|(id, _)| id.clone()).collect()
        };
        let ids: Vec<String> = runs.iter().flat_map(of_run).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        if !ids.is_empty() {
            let _ = write!(out, "\n{what}: {}", shorten_case_ids(&ids));
        }
    }
    for run in runs.iter().filter(|run| !run.delays.is_empty()) {
        let _ = write!(out, "\nDELAYED on purpose, nanoseconds a launch: {}", run.delays_text());
    }
    for run in runs {
        for (id, error) in &run.failed {
            let _ = write!(out, "\nFAILED {id}: {}", indent_lines(&error.text));
        }
    }
    printable_on_terminal(&out).into_owned()
}

/// A heading a problem, problems by size; below it its implementations, the fastest first, hot
/// caches before cold ones.
fn results_table(runs: &[ProcessRun]) -> TextTable {
    let low_clocks =
        runs.iter().any(|run| run.cases.values().any(|case| clock_cell(run, case).is_some()));
    let mut header = vec!["case", "time", "spread", "rate", "limit", "of limit", "limited by", ""];
    header.extend(low_clocks.then_some("SM clock"));
    let skews = runs.iter().any(|run| run.cases.values().any(|it| !it.samples.skew_ns.is_empty()));
    header.extend(skews.then_some("skew"));
    let energies = runs.iter().any(|run| run.cases.values().any(|it| it.samples.energy.is_some()));
    header.extend(energies.then_some("energy"));
    let networks = runs.iter().any(|run| run.cases.values().any(is_network_case));
    if networks {
        header.extend(["throughput", "of matmul peak"]);
    }
    let mut table = TextTable::new(&header);
    let mut problems: BTreeMap<Vec<(String, u64)>, Vec<TimedTableRow<'_>>> = BTreeMap::new();
    for (run, of) in runs.iter().flat_map(|run| run.cases.iter().map(move |of| (run, of))) {
        let clock = low_clocks.then(|| clock_cell(run, of.1).unwrap_or_default());
        let energy = energies.then(|| energy_cell(of.1));
        let network = networks.then(|| link_cells(run, of.1));
        let skew = skews.then(|| of.1.samples.typical_skew_ns().map_or("-".to_owned(), time_text));
        let timed = TimedTableRow { clock, skew, energy, network, ..TimedTableRow::new(of) };
        problems.entry(natural_sort_key(timed.problem)).or_default().push(timed);
    }
    for mut cases in problems.into_values() {
        cases.sort_by(|a, b| {
            let order = |timed: &TimedTableRow<'_>| timed.case.cache == "cold";
            order(a).cmp(&order(b)).then(a.spread.median.total_cmp(&b.spread.median))
        });
        if !cases[0].problem.is_empty() {
            table.add_heading(cases[0].problem.to_owned());
        }
        for same in cases.chunk_by(|a, b| a.case.cache == b.case.cache) {
            let best = |at: usize| at == 0 && same.len() > 1 && !same[0].problem.is_empty();
            same.iter().enumerate().for_each(|(at, timed)| table.row(timed.row_cells(best(at))));
        }
    }
    table
}

/// One row of the results table: a timed case.
struct TimedTableRow<'a> {
    /// Case id without the parts that distinguish cases of a problem; empty if the id has another
    /// form.
    problem: &'a str,
    /// The case's id without its problem, such as `cpu/hot`.
    name: &'a str,
    case: &'a CaseRecord,
    spread: QuartileSpread,
    /// Cell of the clock, if the table has that column.
    clock: Option<String>,
    /// Cell of the skew between GPUs, if the table has that column.
    skew: Option<String>,
    /// Cell of the energy, if the table has that column.
    energy: Option<String>,
    /// Cells of networks, if the table has those columns.
    network: Option<[String; 2]>,
}

/// Whether launches compute samples by matrix products.
fn is_network_case(case: &CaseRecord) -> bool {
    case.computed_samples.is_some() && case.work.matmul_flops() > 0
}

/// Throughput, and the share of the measured peak of matrix products.
fn link_cells(run: &ProcessRun, case: &CaseRecord) -> [String; 2] {
    let dash = || "-".to_owned();
    if !is_network_case(case) {
        return [dash(), dash()];
    }
    let launch_ns = stats::median(&case.samples.per_launch_ns());
    let products = case.work.flops.iter().filter(|(unit, _)| unit.starts_with("matmul "));
    let least_ns: Option<f64> = products
        .map(|(unit, count)| Some(*count as f64 / run.limits.flops_per_s.get(unit)? * 1e9))
        .sum();
    let rate = case.computed_samples.map(|samples| samples as f64 * 1e9 / launch_ns);
    [
        rate.map_or_else(dash, |rate| case.sample_unit.per_second(rate)),
        least_ns.map_or_else(dash, |least_ns| limit_share_cell(least_ns / launch_ns)),
    ]
}

/// Energy of a launch, with how exact it is, and operations per joule: "1.234 J ±9.1% 512 GFLOP/J".
fn energy_cell(case: &CaseRecord) -> String {
    match &case.samples.energy {
        None => "-".to_owned(),
        Some(LaunchEnergy::NotResolved(_)) => "not resolved".to_owned(),
        Some(LaunchEnergy::Measured(energy)) => {
            let exact =
                format!("{} ±{:.1}%", joules_text(energy.launch_j), 100.0 * energy.relative);
            match case.work.matmul_flops() {
                0 => exact,
                flops => format!("{exact} {:.0} GFLOP/J", flops as f64 * 1e-9 / energy.launch_j),
            }
        }
    }
}

/// A clock below this share of the highest one is shown.
const FULL_CLOCK_SHARE: f64 = 0.98;

/// Median SM clock of a case that ran clearly below the card's highest clock, with the reason: the
/// power cap ("1430 MHz cap"), or heat or the hardware ("1290 MHz slowed").
fn clock_cell(run: &ProcessRun, case: &CaseRecord) -> Option<String> {
    let highest_mhz = f64::from(run.environment.gpus.one()?.max_clock_mhz);
    let clocks = &case.samples.clock_mhz;
    let median_mhz = (!clocks.is_empty()).then(|| stats::median(clocks))?;
    let mark = match &case.samples.power {
        Some(power) if power.was_slowed() => " slowed",
        Some(power) if power.at_cap => " cap",
        _ => "",
    };
    let low = !mark.is_empty() || median_mhz < FULL_CLOCK_SHARE * highest_mhz;
    low.then(|| format!("{median_mhz:.0} MHz{mark}"))
}

impl<'a> TimedTableRow<'a> {
    fn new((id, case): (&'a String, &'a CaseRecord)) -> Self {
        let end = format!("/{}/{}", case.implementation, case.cache);
        let problem = id.strip_suffix(&end).unwrap_or_default();
        let name = id[problem.len()..].trim_start_matches('/');
        let spread = QuartileSpread::from_values(&case.samples.per_launch_ns());
        Self { problem, name, case, spread, clock: None, skew: None, energy: None, network: None }
    }

    fn row_cells(&self, best: bool) -> Vec<String> {
        let Self { name, case, spread, clock, skew, energy, network, .. } = self;
        let limit = case.limit.as_ref();
        let fraction = limit.map(|limit| limit.fraction(spread.median));
        let dash = || "-".to_owned();
        let mut cells = vec![
            match (self.problem.is_empty(), best) {
                (true, _) => (*name).to_owned(),
                (_, best) => format!("{} {name}", if best { '*' } else { '-' }),
            },
            time_text(spread.median),
            format!("±{:.1}%", 100.0 * spread.relative_half_iqr()),
            case_rate(case, spread.median),
            limit.map_or_else(dash, |limit| time_text(limit.time_ns)),
            fraction.map_or_else(dash, limit_share_cell),
            limit.map_or_else(dash, |limit| limit.by.clone()),
            fraction.map_or_else(String::new, bar_of_share),
        ];
        cells.extend(clock.clone());
        cells.extend(skew.clone());
        cells.extend(energy.clone());
        cells.extend(network.clone().into_iter().flatten());
        cells
    }
}

/// Above 100 % is a finding, not an error: marked, not hidden.
fn limit_share_cell(fraction: f64) -> String {
    format!("{:.1}%{}", 100.0 * fraction, if fraction > 1.0 { "!" } else { "" })
}

/// A share drawn as a bar of eight characters, to an eighth of a character.
fn bar_of_share(fraction: f64) -> String {
    const BAR_WIDTH: usize = 8;
    const EIGHTH_BLOCKS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (fraction.clamp(0.0, 1.0) * (8 * BAR_WIDTH) as f64).round() as usize;
    let bar = "█".repeat(eighths / 8) + EIGHTH_BLOCKS[eighths % 8];
    // Blanks at the end of a cell would go.
    format!("{bar:░<BAR_WIDTH$}")
}

fn case_rate(case: &CaseRecord, elapsed_ns: f64) -> String {
    match (case.work.matmul_flops(), case.work.total_bytes()) {
        (0, _) if case.work.link_bytes > 0 => {
            amount_rate_text(case.work.link_bytes, "B", elapsed_ns)
        }
        (0, 0) => "-".to_owned(),
        (0, bytes) => amount_rate_text(bytes, "B", elapsed_ns),
        (flops, _) => amount_rate_text(flops, "FLOP", elapsed_ns),
    }
}

/// Ids of skipped cases by the reason of the skip; with `every`, also cases that no machine can
/// run.
fn skipped_ids_by_reason(runs: &[ProcessRun], every: bool) -> BTreeMap<&str, Vec<&str>> {
    let mut grouped: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for run in runs {
        let here = run.skipped.iter().filter(|(id, _)| every || !run.unsupported.contains(*id));
        for (id, reason) in here {
            grouped.entry(reason).or_default().push(id);
        }
    }
    grouped
}

/// Largest number of ids on one line.
const MAX_IDS_PER_LINE: usize = 3;

fn shorten_case_ids(ids: &[&str]) -> String {
    let mut text = ids[..ids.len().min(MAX_IDS_PER_LINE)].join(", ");
    if ids.len() > MAX_IDS_PER_LINE {
        let _ = write!(text, " and {} more", ids.len() - MAX_IDS_PER_LINE);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::limits::TimeLimit;
    use crate::record::run::AfterTiming;
    use crate::record::{Environment, Provenance, SampleUnit};

    fn timed_case(implementation: &str, cache: &str, elapsed_ns: f64) -> CaseRecord {
        CaseRecord {
            implementation: implementation.to_owned(),
            cache: cache.to_owned(),
            limit: Some(TimeLimit { time_ns: 50.0, by: "memory".to_owned() }),
            ..CaseRecord::untimed_samples(vec![elapsed_ns])
        }
    }

    #[test]
    fn a_case_whose_launches_cupti_did_not_record_is_named_below_the_table() {
        let mut run = ProcessRun::start_now("b", "s", Environment::cpu(), Provenance::default());
        run.cases.insert("w/f/n1/cuda/seen/hot".to_owned(), timed_case("cuda/seen", "hot", 100.0));
        let mut unseen = timed_case("cuda/unseen", "hot", 100.0);
        unseen.samples.unrecorded = Some("CUPTI is missing".to_owned());
        run.cases.insert("w/f/n1/cuda/unseen/hot".to_owned(), unseen);
        let text = results_text(&[run], None);
        let line = text.lines().find(|line| line.starts_with("without a record")).unwrap();
        assert_eq!(
            line,
            "without a record of a launch: short work on another stream may pass: w/f/n1/cuda/unseen/hot"
        );
    }

    #[test]
    fn a_launch_that_is_too_short_to_show_reuse_is_marked() {
        let environment = Environment { device_kind: "cuda".to_owned(), ..Environment::cpu() };
        let mut run = ProcessRun::start_now("b", "s", environment, Provenance::default());
        for (name, elapsed_ns) in [("tiny", 1_500.0), ("long", 2_500.0)] {
            let mut of = timed_case(name, "hot", elapsed_ns);
            of.verification.after = Some(AfterTiming::SAME_BITS_VERIFICATION);
            run.cases.insert(format!("w/f/n1/{name}/hot"), of);
        }
        let text = results_text(&[run], None);
        let line = text.lines().find(|line| line.starts_with("too short")).unwrap();
        assert_eq!(
            line,
            "too short: a result that saves more than a quarter of a launch may pass: w/f/n1/tiny/hot"
        );
    }

    #[test]
    fn continued_lines_of_a_failure_message_are_indented() {
        let mut run = ProcessRun::start_now("b", "s", Environment::cpu(), Provenance::default());
        let message = "boom\n\n0 regressed, 3 unchanged";
        run.failed.insert("w/f/a".to_owned(), message.into());
        run.skipped.insert("w/f/b".to_owned(), message.to_owned());
        let expected = "no case was timed\nskipped 1: boom\n    0 regressed, 3 unchanged: w/f/b\n\
                      FAILED w/f/a: boom\n    0 regressed, 3 unchanged";
        assert_eq!(results_text(&[run], None), expected);
    }

    #[test]
    fn a_host_that_needs_longer_than_the_gpu_is_mentioned() {
        let mut run = ProcessRun::start_now("b", "s", Environment::cpu(), Provenance::default());
        for (name, gpu_ns, host_ns, host_bound) in [
            // Two milliseconds of computing on the host, and a copy.
            ("computes", 200e3, Some(2e6), false),
            ("tiny", 2e3, Some(4e3), false),
            ("many", 300e3, Some(500e3), false),
            ("shows", 2e6, Some(8e6), true),
            ("unknown", 1e3, None, false),
        ] {
            let mut of = timed_case(name, "hot", gpu_ns);
            (of.samples.costs.host_launch_ns, of.samples.conditions.host_bound) =
                (host_ns, host_bound);
            run.cases.insert(format!("w/f/n1/{name}/hot"), of);
        }
        let text = results_text(&[run], None);
        let line = text.lines().find(|line| line.ends_with("w/f/n1/computes/hot")).unwrap();
        assert_eq!(
            line,
            "the host needs longer to launch than the GPU to run it, and its time is not in this: w/f/n1/computes/hot"
        );
    }

    #[test]
    fn a_network_has_its_rate_and_its_share_of_the_matmul_peak() {
        let mut run = ProcessRun::start_now("b", "s", Environment::cpu(), Provenance::default());
        run.limits.flops_per_s.insert("matmul bf16".to_owned(), 500e12);
        let mut network = timed_case("cuda/fused", "hot", 1e6);
        network.work.flops.insert("matmul bf16".to_owned(), 250_000_000_000);
        network.computed_samples = Some(2048);
        network.sample_unit = SampleUnit::Tokens;
        run.cases.insert("w/f/n1/cuda/fused/hot".to_owned(), network);
        run.cases.insert("w/g/n1/cuda/fused/hot".to_owned(), timed_case("cuda/fused", "hot", 1e6));
        let text = results_text(&[run], None);
        let row = |problem: &str| {
            let mut lines = text.lines().skip_while(|line| !line.contains(problem)).skip(1);
            lines.next().unwrap().split_whitespace().rev().collect::<Vec<_>>()
        };
        assert_eq!(row("w/f/n1")[..3], ["50.0%", "tokens/s", "2048000"], "{text}");
        assert_eq!(row("w/g/n1")[..2], ["-", "-"], "{text}");
    }

    #[test]
    fn problems_are_in_order_of_size_and_their_fastest_case_is_marked() {
        let mut run = ProcessRun::start_now("b", "s", Environment::cpu(), Provenance::default());
        for (id, cached) in [
            ("w/f/n1024/cpu/hot", timed_case("cpu", "hot", 100.0)),
            ("w/f/n512/cuda/slow/hot", timed_case("cuda/slow", "hot", 200.0)),
            ("w/f/n512/cuda/fast/cold", timed_case("cuda/fast", "cold", 60.0)),
            ("w/f/n512/cuda/fast/hot", timed_case("cuda/fast", "hot", 40.0)),
            ("another bench's case", timed_case("", "", 80.0)),
        ] {
            run.cases.insert(id.to_owned(), cached);
        }
        let text = results_text(&[run], None);
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
