//! What runs measured, as a table: time, spread, rate, share of the limit; then what was not
//! measured and why.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::table::Table;
use super::{rate, time};
use crate::record::run::InputChange;
use crate::record::text::printable;
use crate::record::{CaseRecord, Run};
use crate::stats::{self, Spread};

/// Share of the host's CPU time from which on contention is mentioned.
const NOTEWORTHY_CONTENTION: f64 = 0.10;

/// What is said below the table of the cases that it applies to.
type Remark = (&'static str, fn(&Run, &CaseRecord) -> bool);

/// A ceiling that was measured at less than this share of the SM clock of a case flatters it.
const SAME_CLOCK: f64 = 0.9;

const REMARKS: [Remark; 6] = [
    ("unverified, nothing says whether the outputs are right", |_, case| {
        case.verification.checked == 0
    }),
    ("host-bound, the host's launches are in the time", |_, case| case.samples.host_bound),
    ("warning: throttled GPU, the times are too long", |_, case| case.samples.throttled > 0),
    ("of limit is too high, the ceiling was measured at a lower SM clock", |run, case| {
        let ceiling = case.limit.as_ref().and_then(|limit| run.limits.clock_mhz.get(&limit.by));
        let clocks = &case.samples.clock_mhz;
        !clocks.is_empty()
            && ceiling.is_some_and(|&ceiling| ceiling < SAME_CLOCK * stats::median(clocks))
    }),
    ("timed again, the GPU was throttled at first", |_, case| {
        case.samples.discarded > 0 && case.samples.throttled == 0
    }),
    (
        "computed from inputs that were read before timing: a remembered result would pass",
        |_, case| {
            case.verification.after.is_some_and(|after| {
                after.inputs == InputChange::Same && case.verification.by.is_none()
            })
        },
    ),
];

/// The runs' cases for a terminal, of so many columns where it has a width.
pub fn text(runs: &[Run], columns: Option<usize>) -> String {
    let table = table(runs);
    let mut out =
        if table.is_empty() { "no case was timed".to_owned() } else { table.text_within(columns) };
    // Where nothing ran, that is why.
    let every = table.is_empty();
    for (reason, ids) in skips_by_reason(runs, every) {
        let _ = write!(out, "\nskipped {}: {reason}", ids.len());
        if ids.len() <= SHOWN {
            let _ = write!(out, ": {}", ids.join(", "));
        }
    }
    let unsupported: usize = runs.iter().map(|run| run.unsupported.len()).sum();
    if unsupported > 0 && !every {
        let _ = write!(
            out,
            "\n{unsupported} combinations left out that their implementation does not compute"
        );
    }
    let shares =
        runs.iter().flat_map(|run| run.cases.values()).filter_map(|case| case.samples.contention);
    let most = shares.fold(0.0, f64::max);
    if most > NOTEWORTHY_CONTENTION {
        let _ = write!(
            out,
            "\nwarning: co-running processes took up to {:.0}% of the CPU time while a case was measured",
            100.0 * most
        );
    }
    for (what, applies) in REMARKS {
        let of_run = |run: &'_ Run| -> Vec<_> {
            let cases = run.cases.iter();
            cases.filter(|(_, case)| applies(run, case)).map(|(id, _)| id.clone()).collect()
        };
        let ids: Vec<String> = runs.iter().flat_map(of_run).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        if !ids.is_empty() {
            let _ = write!(out, "\n{what}: {}", shorten(&ids));
        }
    }
    for run in runs.iter().filter(|run| !run.delays.is_empty()) {
        let _ = write!(out, "\nDELAYED on purpose, nanoseconds a launch: {}", run.delays_text());
    }
    for run in runs {
        for (id, error) in &run.failed {
            let _ = write!(out, "\nFAILED {id}: {error}");
        }
    }
    printable(&out).into_owned()
}

fn table(runs: &[Run]) -> Table {
    let mut table = Table::new(&["case", "time", "spread", "rate", "of limit", "limited by"]);
    for (id, case) in runs.iter().flat_map(|run| &run.cases) {
        let spread = Spread::of(&case.samples.per_launch_ns());
        let (share, by) = match &case.limit {
            Some(limit) => (share(limit.fraction(spread.median)), limit.by.clone()),
            None => ("-".to_owned(), "-".to_owned()),
        };
        table.row(vec![
            id.clone(),
            time(spread.median),
            format!("±{:.1}%", 100.0 * spread.relative()),
            case_rate(case, spread.median),
            share,
            by,
        ]);
    }
    table
}

/// Above 100 % is a finding, not an error: marked, not hidden.
fn share(fraction: f64) -> String {
    format!("{:.1}%{}", 100.0 * fraction, if fraction > 1.0 { "!" } else { "" })
}

fn case_rate(case: &CaseRecord, elapsed_ns: f64) -> String {
    match (case.work.matmul_flops(), case.work.read_bytes + case.work.write_bytes) {
        (0, 0) => "-".to_owned(),
        (0, bytes) => rate(bytes, "B", elapsed_ns),
        (flops, _) => rate(flops, "FLOP", elapsed_ns),
    }
}

/// What was skipped here; with `every`, also what no machine can run.
fn skips_by_reason(runs: &[Run], every: bool) -> BTreeMap<&str, Vec<&str>> {
    let mut grouped: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for run in runs {
        let here = run.skipped.iter().filter(|(id, _)| every || !run.unsupported.contains(*id));
        for (id, reason) in here {
            grouped.entry(reason).or_default().push(id);
        }
    }
    grouped
}

/// Most ids of one line.
const SHOWN: usize = 3;

fn shorten(ids: &[&str]) -> String {
    let mut text = ids[..ids.len().min(SHOWN)].join(", ");
    if ids.len() > SHOWN {
        let _ = write!(text, " and {} more", ids.len() - SHOWN);
    }
    text
}
