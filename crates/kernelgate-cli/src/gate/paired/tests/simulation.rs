//! The promised error rates and the power, by simulation: whole comparisons that are decided after
//! every block, and in which decided cases are no longer measured. `KERNELGATE_SIMULATIONS=1000
//! cargo test --lib simulation -- --nocapture --test-threads 1` prints the table of
//! docs/concepts/evidence-decision.md. Without the variable each row has few comparisons, which
//! would only show a gross error.

use std::path::Path;

use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal, StudentT};
use rayon::prelude::*;

use super::*;
use crate::gate::calibration::{CalibrationComparisonKind, GateCalibration};
use kernelgate::record::file;

/// Distribution of the differences between processes of a case, in units of the standard deviation
/// if there is one.
#[derive(Debug, Clone, Copy)]
enum NoiseShape {
    Normal,
    /// Student's t with two degrees of freedom, which has no variance.
    Student,
    /// A normal distribution; one process in ten is five times as wide.
    Contaminated,
    /// One process in twenty takes twice as long.
    Doubled,
}

impl NoiseShape {
    fn draw_noise(self, sd: f64, random: &mut impl Rng) -> f64 {
        let normal: f64 = StandardNormal.sample(random);
        match self {
            Self::Normal => sd * normal,
            Self::Student => sd * StudentT::new(2.0).unwrap().sample(random),
            Self::Contaminated if random.random_bool(0.1) => 5.0 * sd * normal,
            Self::Doubled if random.random_bool(0.05) => std::f64::consts::LN_2 + sd * normal,
            Self::Contaminated | Self::Doubled => sd * normal,
        }
    }
}

/// Co-running load.
#[derive(Debug, Clone, Copy)]
struct SimulatedHeadLoad {
    /// Probability that the load runs beside a process of the base, and of the head.
    beside: [f64; 2],
    /// Share of the CPU time that the load takes.
    share: f64,
    /// Factor by which the load multiplies the time.
    slowdown: f64,
}

#[derive(Debug, Clone, Copy)]
struct Simulation {
    name: &'static str,
    cases: usize,
    noise: NoiseShape,
    /// Standard deviation between processes; half the variance is common to the cases of a process.
    noise_sd: f64,
    /// Relative slow-down of one case in four (at least one) of the head; negative is faster.
    effect: f64,
    /// Growth of the time from process to process, relative.
    drift: f64,
    /// Width of the steps from process to process that all cases share.
    wander_sd: f64,
    /// Part of the sum of earlier steps that a process keeps: 1 is a random walk, a smaller value
    /// gives a level with that autocorrelation.
    persistence: f64,
    /// Whether the processes record the CPU share of others (a little, at random).
    has_host_load: bool,
    load: Option<SimulatedHeadLoad>,
    /// Relative clock of the head's processes, which affects the time and not the cycles; 1 leaves
    /// the cycles unknown.
    head_clock_ratio: f64,
    plan: ComparisonTestPlan,
    /// Blocks after which the budget is used up.
    budget: usize,
}

fn a_a_simulation(name: &'static str, cases: usize, noise: NoiseShape, sd: f64) -> Simulation {
    Simulation {
        name,
        cases,
        noise,
        noise_sd: sd,
        effect: 0.0,
        drift: 0.0,
        wander_sd: 0.0,
        persistence: 1.0,
        has_host_load: true,
        load: None,
        head_clock_ratio: 1.0,
        plan: ComparisonTestPlan::default(),
        budget: usize::MAX,
    }
}

impl Simulation {
    fn is_case_changed(&self, case: usize) -> bool {
        self.effect != 0.0 && case.is_multiple_of(4)
    }

    /// Simulates one process: an observation for each case.
    fn simulate_process(
        &self,
        arm: ComparedArm,
        level: f64,
        random: &mut ChaCha8Rng,
    ) -> Vec<CaseTimeInTrial> {
        let side = usize::from(arm == ComparedArm::Head);
        let load = self.load.filter(|load| random.random_bool(load.beside[side]));
        let clock = if arm == ComparedArm::Head { self.head_clock_ratio } else { 1.0 };
        let half = self.noise_sd * 0.5f64.sqrt();
        let common = self.noise.draw_noise(half, random) + level;
        let one = |case: usize| {
            let effect = if self.is_case_changed(case) && arm == ComparedArm::Head {
                self.effect.ln_1p()
            } else {
                0.0
            };
            let slowed = load.map_or(0.0, |load| load.slowdown.ln());
            let idle: f64 = StandardNormal.sample(random);
            let contention = 0.004 * idle.abs()
                + load.map_or(0.0, |load| load.share * random.random_range(0.8..1.2));
            let own = self.noise.draw_noise(half, random);
            let cycles = 1e6 * (common + own + effect + slowed).exp();
            CaseTimeInTrial {
                time_ns: cycles / clock,
                cycles: (self.head_clock_ratio != 1.0).then_some(cycles),
                contention: self.has_host_load.then_some(contention),
                averaged: false,
                at_cap: false,
                throttled: false,
            }
        };
        (0..self.cases).map(one).collect()
    }

    fn simulate_comparison(&self, seed: u64) -> (PairedDecisionsOfRound, usize) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let name = |case: usize| format!("{case:02}");
        let mut observed: TimedBlocksByCase =
            (0..self.cases).map(|case| (name(case), Vec::new())).collect();
        let mut walk = 0.0;
        let mut going: Vec<String> = observed.keys().cloned().collect();
        let blocks = self.plan.max_blocks.min(self.budget);
        for block in 0..blocks {
            let leader = if block % 2 == 0 { ComparedArm::Base } else { ComparedArm::Head };
            let other = if block % 2 == 0 { ComparedArm::Head } else { ComparedArm::Base };
            let order = [leader, other, other, leader];
            let mut process = |(position, arm): (usize, &ComparedArm)| {
                walk = self.persistence * walk + self.noise.draw_noise(self.wander_sd, &mut random);
                self.simulate_process(
                    *arm,
                    walk + self.drift * (4 * block + position) as f64,
                    &mut random,
                )
            };
            let runs: Vec<_> = order.iter().enumerate().map(&mut process).collect();
            for case in (0..self.cases).filter(|case| going.contains(&name(*case))) {
                let (outer, inner) =
                    ([runs[0][case], runs[3][case]], [runs[1][case], runs[2][case]]);
                let (base, head) =
                    if leader == ComparedArm::Base { (outer, inner) } else { (inner, outer) };
                observed.get_mut(&name(case)).unwrap().push(TimedBlock { leader, base, head });
            }
            let outcome = decide_cases_with_one_plan(&observed, &self.plan, block + 1 == blocks);
            if outcome.undecided.is_empty() {
                return (outcome, block + 1);
            }
            going.clone_from(&outcome.undecided);
        }
        (decide_cases_with_one_plan(&observed, &self.plan, true), blocks)
    }
}

/// Counts over many comparisons.
#[derive(Debug, Clone, Copy, Default)]
struct OutcomeCounts {
    comparisons: usize,
    /// Comparisons with a case called regressed that the head does not slow down by more than the
    /// threshold.
    false_alarms: usize,
    unchanged_cases: usize,
    inconclusive_of_unchanged: usize,
    changed_cases: usize,
    detected_changes: usize,
    missed_changes: usize,
    null_pairs_rejected: usize,
    blocks: usize,
}

fn count_outcomes(world: &Simulation, default: usize) -> OutcomeCounts {
    let comparisons = std::env::var("KERNELGATE_SIMULATIONS")
        .ok()
        .and_then(|count| count.parse().ok())
        .unwrap_or(default);
    let tally = |seed: usize| {
        let (outcome, blocks) = world.simulate_comparison(seed as u64);
        let mut row = OutcomeCounts {
            comparisons: 1,
            blocks,
            null_pairs_rejected: usize::from(!outcome.null_fired.is_empty()),
            ..OutcomeCounts::default()
        };
        let mut alarmed = false;
        for decision in &outcome.decisions {
            let is = |verdict| usize::from(decision.verdict == verdict);
            if world.is_case_changed(decision.case.parse().unwrap()) {
                let expected = if world.effect > 0.0 {
                    VerdictOnCase::Regressed
                } else {
                    VerdictOnCase::Improved
                };
                row.changed_cases += 1;
                row.detected_changes += is(expected);
                row.missed_changes += is(VerdictOnCase::Unchanged);
            } else {
                row.unchanged_cases += 1;
                row.inconclusive_of_unchanged += is(VerdictOnCase::Inconclusive);
                alarmed |= decision.verdict == VerdictOnCase::Regressed;
            }
        }
        row.false_alarms = usize::from(alarmed);
        row
    };
    let add = |a: OutcomeCounts, b: OutcomeCounts| OutcomeCounts {
        comparisons: a.comparisons + b.comparisons,
        false_alarms: a.false_alarms + b.false_alarms,
        unchanged_cases: a.unchanged_cases + b.unchanged_cases,
        inconclusive_of_unchanged: a.inconclusive_of_unchanged + b.inconclusive_of_unchanged,
        changed_cases: a.changed_cases + b.changed_cases,
        detected_changes: a.detected_changes + b.detected_changes,
        missed_changes: a.missed_changes + b.missed_changes,
        null_pairs_rejected: a.null_pairs_rejected + b.null_pairs_rejected,
        blocks: a.blocks + b.blocks,
    };
    let row = (0..comparisons).into_par_iter().map(tally).reduce(OutcomeCounts::default, add);
    let share = |part: usize, whole: usize| match whole {
        0 => "–".to_owned(),
        _ => format!("{:.1} %", 100.0 * part as f64 / whole as f64),
    };
    println!(
        "| {} | {} | {} of {} | {:.2} % | {} | {} | {} | {} | {:.1} |",
        world.name,
        world.cases,
        row.false_alarms,
        row.comparisons,
        100.0 * clopper_pearson_upper_bound(row.false_alarms, row.comparisons),
        share(row.inconclusive_of_unchanged, row.unchanged_cases),
        share(row.detected_changes, row.changed_cases),
        share(row.missed_changes, row.changed_cases),
        share(row.null_pairs_rejected, row.comparisons),
        row.blocks as f64 / row.comparisons as f64,
    );
    row
}

/// Binomial probability of at most `seen` of `count` at probability `p`.
fn binomial_cdf(seen: usize, count: usize, p: f64) -> f64 {
    let mut term = (count as f64 * (-p).ln_1p()).exp();
    let mut sum = term;
    for k in 0..seen {
        term *= (count - k) as f64 / (k + 1) as f64 * p / (1.0 - p);
        sum += term;
    }
    sum
}

/// Exact upper 95 % bound for the probability of an event that was seen this often (Clopper and
/// Pearson).
fn clopper_pearson_upper_bound(seen: usize, count: usize) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..50 {
        let middle = 0.5 * (low + high);
        if binomial_cdf(seen, count, middle) > 0.05 { low = middle } else { high = middle }
    }
    high
}

/// Whether the number of alarms is within chance (1 in 1000) of the promised probability.
fn are_alarms_within_chance(row: &OutcomeCounts, promised: f64) -> bool {
    row.false_alarms == 0
        || 1.0 - binomial_cdf(row.false_alarms - 1, row.comparisons, promised) > 1e-3
}

#[test]
fn the_bound_is_that_of_the_tables() {
    assert!(
        (clopper_pearson_upper_bound(0, 300) - 0.009_936).abs() < 1e-5
            && (clopper_pearson_upper_bound(2, 100) - 0.061_62).abs() < 1e-4
    );
}

/// With threshold 0, identical builds are at the edge of a failure: if the level is used up
/// anywhere, it is here.
#[test]
fn at_the_edge_false_alarms_keep_the_promised_level() {
    let plan = ComparisonTestPlan {
        relative: 0.0,
        absolute_ns: 0.0,
        false_alarms: 0.05,
        max_blocks: 12,
        ..ComparisonTestPlan::default()
    };
    for (name, cases, noise, sd) in [
        ("edge, level 5 %, normal", 1, NoiseShape::Normal, 0.01),
        ("edge, level 5 %, normal", 4, NoiseShape::Normal, 0.02),
        ("edge, level 5 %, normal", 20, NoiseShape::Normal, 0.005),
        ("edge, level 5 %, Student t (2)", 1, NoiseShape::Student, 0.01),
        ("edge, level 5 %, one in ten five times wider", 4, NoiseShape::Contaminated, 0.01),
        ("edge, level 5 %, one in twenty takes twice as long", 4, NoiseShape::Doubled, 0.02),
    ] {
        let row = count_outcomes(
            &Simulation { plan, has_host_load: false, ..a_a_simulation(name, cases, noise, sd) },
            160 / (cases + 3),
        );
        assert!(are_alarms_within_chance(&row, 0.05), "{cases} {noise:?} {sd}: {row:?}");
    }
}

/// The level of a process persists, with steps of heavy tails, as on a shared host: pairs are then
/// not independent of each other.
#[test]
fn autocorrelated_trials_keep_the_promised_level() {
    let edge = ComparisonTestPlan {
        relative: 0.0,
        absolute_ns: 0.0,
        false_alarms: 0.05,
        max_blocks: 24,
        ..ComparisonTestPlan::default()
    };
    for (name, persistence, noise, plan, promised) in [
        ("edge, level 5 %, autocorrelation 0.5, normal", 0.5, NoiseShape::Normal, edge, 0.05),
        ("edge, level 5 %, autocorrelation 0.9, normal", 0.9, NoiseShape::Normal, edge, 0.05),
        (
            "edge, level 5 %, autocorrelation 0.5, Student t (2)",
            0.5,
            NoiseShape::Student,
            edge,
            0.05,
        ),
        (
            "edge, level 5 %, autocorrelation 0.9, Student t (2)",
            0.9,
            NoiseShape::Student,
            edge,
            0.05,
        ),
        ("edge, level 5 %, random walk, Student t (2)", 1.0, NoiseShape::Student, edge, 0.05),
        (
            "A/A, autocorrelation 0.5, one in ten five times wider, 2 %",
            0.5,
            NoiseShape::Contaminated,
            ComparisonTestPlan::default(),
            0.01,
        ),
    ] {
        // The persistent level makes almost all of the difference between processes.
        let world_of_case = Simulation {
            persistence,
            wander_sd: 0.02,
            plan,
            ..a_a_simulation(name, 3, noise, 0.002)
        };
        let row = count_outcomes(&world_of_case, 8);
        assert!(are_alarms_within_chance(&row, promised), "{name}: {row:?}");
    }
}

#[test]
fn identical_builds_are_not_called_slower() {
    for (name, cases, noise, sd) in [
        ("A/A, 0.05 %", 20, NoiseShape::Normal, 0.0005),
        ("A/A, 0.5 %", 20, NoiseShape::Normal, 0.005),
        ("A/A, 1 %", 10, NoiseShape::Normal, 0.01),
        ("A/A, 2 %", 10, NoiseShape::Normal, 0.02),
        ("A/A, 2 %", 1, NoiseShape::Normal, 0.02),
        ("A/A, 5 %", 10, NoiseShape::Normal, 0.05),
        ("A/A, Student t (2), 0.5 %", 10, NoiseShape::Student, 0.005),
        ("A/A, one in ten five times wider, 1 %", 10, NoiseShape::Contaminated, 0.01),
        ("A/A, one in twenty takes twice as long, 1 %", 10, NoiseShape::Doubled, 0.01),
    ] {
        let row = count_outcomes(&a_a_simulation(name, cases, noise, sd), 6);
        assert!(are_alarms_within_chance(&row, 0.01), "{name}: {row:?}");
        assert!(
            sd > 0.005 || row.inconclusive_of_unchanged * 20 <= row.unchanged_cases,
            "{name}: {row:?}"
        );
    }
}

/// A small budget fails nothing, and cases with little noise are still decided.
#[test]
fn few_blocks_fail_nothing() {
    for (name, cases, sd, blocks, least) in [
        ("A/A, 0.3 %, 6 blocks", 20, 0.003, 6, 0.95),
        ("A/A, 1 %, 6 blocks", 10, 0.01, 6, 0.9),
        ("A/A, 2 %, 8 blocks", 10, 0.02, 8, 0.8),
        ("A/A, 3 %, 12 blocks", 10, 0.03, 12, 0.7),
        ("A/A, 5 %, 8 blocks", 10, 0.05, 8, 0.0),
    ] {
        let plan = ComparisonTestPlan { max_blocks: blocks, ..ComparisonTestPlan::default() };
        let row = count_outcomes(
            &Simulation { plan, ..a_a_simulation(name, cases, NoiseShape::Normal, sd) },
            10,
        );
        assert!(are_alarms_within_chance(&row, 0.01), "{name}: {row:?}");
        assert!(
            1.0 - row.inconclusive_of_unchanged as f64 / row.unchanged_cases as f64 >= least,
            "{name}: {row:?}"
        );
    }
}

/// Cases at the power cap take so long that a budget is used up after three blocks.
#[test]
fn three_blocks_of_a_larger_plan_show_that_little_changed() {
    let ended = |name, sd| Simulation {
        budget: 3,
        has_host_load: false,
        ..a_a_simulation(name, 20, NoiseShape::Normal, sd)
    };
    let same = count_outcomes(&ended("A/A, 1 %, ended after 3 blocks", 0.01), 10);
    assert!(same.inconclusive_of_unchanged * 20 <= same.unchanged_cases, "{same:?}");
    for (name, sd, effect) in [
        ("GPU, 5.2 % slower, 1 %, ended after 3 blocks", 0.01, 0.052),
        ("GPU, 5.2 % slower, 3 %, ended after 3 blocks", 0.03, 0.052),
        ("GPU, 3 % slower, 0.5 %, ended after 3 blocks", 0.005, 0.03),
    ] {
        let row = count_outcomes(&Simulation { effect, ..ended(name, sd) }, 20);
        assert!(
            row.missed_changes * 20 <= row.changed_cases && are_alarms_within_chance(&row, 0.01),
            "{name}: {row:?}"
        );
    }
}

#[test]
fn drift_and_wandering_raise_no_alarm() {
    let steady = Simulation {
        drift: 0.002,
        ..a_a_simulation("A/A, 0.5 %, drift 0.2 % a process", 4, NoiseShape::Normal, 0.005)
    };
    let wandering = Simulation {
        wander_sd: 0.005,
        ..a_a_simulation("A/A, 0.5 %, random walk 0.5 % a process", 4, NoiseShape::Normal, 0.005)
    };
    for world in [steady, wandering] {
        let row = count_outcomes(&world, 15);
        assert!(
            are_alarms_within_chance(&row, 0.01) && row.null_pairs_rejected * 20 <= row.comparisons,
            "{row:?}"
        );
    }
}

#[test]
fn injected_changes_are_found() {
    for (name, host, sd, effect, blocks, least) in [
        ("GPU, 2 % slower, 0.3 %", false, 0.003, 0.02, 24, 0.9),
        ("GPU, 2 % slower, 0.3 %, 8 blocks", false, 0.003, 0.02, 8, 0.9),
        ("GPU, 5 % slower, 1 %, 8 blocks", false, 0.01, 0.05, 8, 0.95),
        ("CPU, 2 % slower, 0.3 %, 8 blocks", true, 0.003, 0.02, 8, 0.7),
        ("CPU, 5 % slower, 0.5 %", true, 0.005, 0.05, 24, 0.95),
        ("CPU, 5 % slower, 2 %", true, 0.02, 0.05, 24, 0.9),
        ("CPU, 5 % slower, 2 %, 12 blocks", true, 0.02, 0.05, 12, 0.8),
        ("CPU, 5 % slower, 2 %, 8 blocks", true, 0.02, 0.05, 8, 0.6),
        ("CPU, 10 % slower, 4 %, 8 blocks", true, 0.04, 0.1, 8, 0.5),
        ("CPU, 6 % slower, 4 %", true, 0.04, 0.06, 24, 0.6),
        ("CPU, 5 % faster, 2 %", true, 0.02, -0.05, 24, 0.9),
    ] {
        let plan = ComparisonTestPlan { max_blocks: blocks, ..ComparisonTestPlan::default() };
        let row = count_outcomes(
            &Simulation {
                effect,
                plan,
                has_host_load: host,
                ..a_a_simulation(name, 8, NoiseShape::Normal, sd)
            },
            10,
        );
        assert!(row.detected_changes as f64 >= least * row.changed_cases as f64, "{name}: {row:?}");
        assert!(
            row.missed_changes * 10 <= row.changed_cases && are_alarms_within_chance(&row, 0.01),
            "{name}: {row:?}"
        );
    }
    let row = count_outcomes(
        &Simulation {
            effect: 0.05,
            ..a_a_simulation("CPU, 5 % slower, Student t (2), 0.5 %", 8, NoiseShape::Student, 0.005)
        },
        10,
    );
    assert!(row.detected_changes * 10 >= row.changed_cases * 9, "{row:?}");
}

/// The change that comparisons of identical builds call detectable is injected afterwards.
#[test]
fn a_change_that_is_called_detectable_is_found() {
    for (name, blocks) in
        [("as called detectable, 2 %, 6 blocks", 6), ("as called detectable, 2 %, 20 blocks", 20)]
    {
        let plan = ComparisonTestPlan { max_blocks: blocks, ..ComparisonTestPlan::default() };
        let same = Simulation { plan, ..a_a_simulation("", 1, NoiseShape::Normal, 0.02) };
        let called: Vec<f64> = (1000..1060)
            .filter_map(|seed| same.simulate_comparison(seed).0.decisions[0].detectable)
            .collect();
        let row = count_outcomes(
            &Simulation {
                effect: kernelgate::stats::median(&called),
                has_host_load: false,
                name,
                ..same
            },
            100,
        );
        assert!(
            (0.65..0.97).contains(&(row.detected_changes as f64 / row.changed_cases as f64)),
            "{name} {called:?}: {row:?}"
        );
    }
}

#[test]
fn load_from_others_is_never_a_regression() {
    // No case is decided before the blocks end.
    let plan = ComparisonTestPlan { max_blocks: 48, ..ComparisonTestPlan::default() };
    for (name, beside, share, slowdown) in [
        ("load beside the head: 33 %, 1.8 times", [0.0, 1.0], 0.33, 1.8),
        ("load beside the head: 3 %, 1.06 times", [0.0, 1.0], 0.03, 1.06),
        ("load beside the head: 1.5 %, 1.03 times", [0.0, 1.0], 0.015, 1.03),
        ("load beside half of the head: 33 %, 1.8 times", [0.0, 0.5], 0.33, 1.8),
        ("load beside a third of all: 33 %, 1.8 times", [0.33, 0.33], 0.33, 1.8),
        ("load beside all: 33 %, 1.8 times", [1.0, 1.0], 0.33, 1.8),
    ] {
        let load = Some(SimulatedHeadLoad { beside, share, slowdown });
        let row = count_outcomes(
            &Simulation { load, plan, ..a_a_simulation(name, 4, NoiseShape::Normal, 0.01) },
            10,
        );
        assert_eq!(row.false_alarms, 0, "{name}: {row:?}");
    }
}

#[test]
fn a_lower_clock_is_never_a_regression() {
    let row = count_outcomes(
        &Simulation {
            head_clock_ratio: 0.97,
            has_host_load: false,
            plan: ComparisonTestPlan { max_blocks: 48, ..ComparisonTestPlan::default() },
            ..a_a_simulation("clock of the head 3 % lower, 0.3 %", 4, NoiseShape::Normal, 0.003)
        },
        10,
    );
    assert_eq!(row.false_alarms, 0, "{row:?}");
    assert_eq!(row.inconclusive_of_unchanged, row.unchanged_cases, "{row:?}");
}

/// Recorded A/A comparisons of H200s.
fn recorded_a_a_comparisons() -> Vec<TimedBlocksByCase> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/calibrations/h200.json");
    let calibration = file::read_record::<GateCalibration>(&path).unwrap();
    let most = ComparisonTestPlan::default().max_blocks;
    calibration
        .comparisons_of_kind(CalibrationComparisonKind::Null)
        .map(|known| known.blocks_of_round(false, most))
        .collect()
}

/// An A/A comparison with its builds exchanged.
fn exchange_base_and_head(observed: &TimedBlocksByCase) -> TimedBlocksByCase {
    let block = |block: &TimedBlock| {
        let leader =
            if block.leader == ComparedArm::Base { ComparedArm::Head } else { ComparedArm::Base };
        TimedBlock { leader, base: block.head, head: block.base }
    };
    let blocks = |blocks: &Vec<TimedBlock>| blocks.iter().map(block).collect();
    observed.iter().map(|(case, of_case)| (case.clone(), blocks(of_case))).collect()
}

/// Number of comparisons with a false alarm, each in this number of shards, which are recorded
/// comparisons of a card.
fn comparisons_with_alarm_in_shards(
    recorded: &[TimedBlocksByCase],
    shards: usize,
    plan: &ComparisonTestPlan,
    count: usize,
) -> OutcomeCounts {
    let compare = |seed: u64| {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut draw = |_| {
            let drawn = &recorded[random.random_range(0..recorded.len())];
            if random.random_bool(0.5) { exchange_base_and_head(drawn) } else { drawn.clone() }
        };
        let drawn: Vec<TimedBlocksByCase> = (0..shards).map(&mut draw).collect();
        let family = ErrorRateFamily::Plan(drawn.iter().map(BTreeMap::len).sum());
        drawn.iter().any(|observed| {
            decide_cases_with_own_thresholds(observed, plan, &|_| *plan, family, true)
                .count_cases_with_verdict(VerdictOnCase::Regressed)
                > 0
        })
    };
    let alarmed = (0..count as u64).into_par_iter().filter(|seed| compare(*seed)).count();
    println!(
        "| {shards} shards, threshold {:.1} % | {alarmed} of {count} | {:.2} % |",
        100.0 * plan.relative,
        100.0 * clopper_pearson_upper_bound(alarmed, count)
    );
    OutcomeCounts { comparisons: count, false_alarms: alarmed, ..OutcomeCounts::default() }
}

/// Alarms of the first round alone: the second round, which confirms, only removes some. With
/// threshold 0, identical builds are at the edge of a failure.
#[test]
fn shards_together_alarm_as_rarely_as_one_comparison() {
    let recorded = recorded_a_a_comparisons();
    assert!(recorded.len() > 18, "{}", recorded.len());
    let edge =
        ComparisonTestPlan { relative: 0.0, absolute_ns: 0.0, ..ComparisonTestPlan::default() };
    let default = |shards: usize| 200 / shards;
    for plan in [ComparisonTestPlan::default(), edge] {
        for shards in [1, 4, 16] {
            let count = std::env::var("KERNELGATE_SIMULATIONS")
                .ok()
                .and_then(|count| count.parse().ok())
                .unwrap_or(default(shards));
            let row = comparisons_with_alarm_in_shards(&recorded, shards, &plan, count);
            assert!(are_alarms_within_chance(&row, 0.01), "{shards} shards, {plan:?}: {row:?}");
        }
    }
}
