//! Decides whether a case lost accuracy: compares its errors against the reference before and
//! after, paired by the seed of the inputs.
//!
//! An error figure has grown if head > g · base for every seed, with at least
//! [`MIN_SEEDS_FOR_ERRORS`] seeds. If the median growth is g or less, n seeds all exceed it with a
//! probability of at most 2⁻ⁿ. Two figures are tested for every output whose errors changed: with m
//! of these, n is such that 2m · 2⁻ⁿ is at most `FALSE_ALARMS` (Bonferroni). A seed without growth
//! decides that an output is unchanged, so most cases need a single seed. If one side knows only
//! the errors of all outputs together, they count as one output.
//!
//! A seed counts only if it draws its own data set. If all seeds share their inputs or their
//! reference (golden tensors), growth is suspected but never shown, because the scatter over inputs
//! is unknown.
//!
//! This module does not measure errors.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use kernelgate::record::CaseNumerics;
use kernelgate::record::numerics::SeedErrors;
use kernelgate::stats::median;
use kernelgate::verify::OutputErrors;

/// Smallest number of seeds that can show growth.
pub const MIN_SEEDS_FOR_ERRORS: usize = 8;
/// Error below which only rounding is assumed, in unit roundoffs: rounding every output once causes
/// 0.4 of it.
const ROUNDING_PER_UNIT_ROUNDOFF: f64 = 0.25;

/// Smallest ratio that is written with an exponent.
const MIN_RATIO_WITH_EXPONENT: f64 = 1e6;

/// Highest probability that growth of any case is found if no error grew.
const MAX_FALSE_ALARM_PROBABILITY: f64 = 0.01;

/// Number of seeds that are necessary if the errors of this number of outputs changed.
pub fn necessary_seeds(changed: usize) -> usize {
    let tests = 2.0 * changed.max(1) as f64;
    ((tests / MAX_FALSE_ALARM_PROBABILITY).log2().ceil() as usize).max(MIN_SEEDS_FOR_ERRORS)
}

/// An error figure: how far outputs are from the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorFigure {
    /// Relative L2 error ‖out - ref‖₂ / ‖ref‖₂.
    RelativeL2,
    /// Maximum error: largest |out - ref| over the largest |ref|.
    MaxError,
}

impl ErrorFigure {
    /// Returns this figure's value among the errors.
    const fn figure_value(self, errors: &OutputErrors) -> f64 {
        match self {
            Self::RelativeL2 => errors.relative_l2,
            Self::MaxError => errors.max_error,
        }
    }

    /// The measure in words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::RelativeL2 => "relative L2 error",
            Self::MaxError => "max error",
        }
    }
}

/// A case whose error grew for every seed that both sides have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorGrowth {
    /// The case.
    pub case: String,
    /// The output whose error grew the most; absent if the case has one output, or if a side does
    /// not record outputs separately.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// The measure that grew; the relative L2 error if both grew.
    pub figure: ErrorFigure,
    /// Number of seeds.
    pub seeds: usize,
    /// Number of seeds that are necessary for a finding.
    pub needed: usize,
    /// Median error of the base build's outputs.
    pub base: f64,
    /// Median error of the head build's outputs.
    pub head: f64,
    /// Median of head over base; `None` if the base has no error.
    pub ratio: Option<f64>,
    /// Growth that was allowed.
    pub allowed: f64,
    /// Whether there is only one data set, so that further seeds would show nothing new.
    pub one_data_set: bool,
}

impl ErrorGrowth {
    /// Whether the growth of errors is a finding, rather than only suspected because of too few
    /// seeds.
    pub const fn is_shown(&self) -> bool {
        self.seeds >= self.needed
    }

    /// The growth in words: "relative L2 error of `y` 3.2 times as large (1.2e-4, was 3.8e-5) for
    /// each of 8 seeds".
    pub fn words(&self) -> String {
        let times = match self.ratio {
            Some(ratio) if ratio < MIN_RATIO_WITH_EXPONENT => format!("{ratio:.1} times as large"),
            Some(ratio) => format!("{ratio:.1e} times as large"),
            None => "no longer 0".to_owned(),
        };
        let (figure, head, base) = (self.figure.words(), self.head, self.base);
        let seeds = match self.seeds {
            1 if self.one_data_set => "for the only data set".to_owned(),
            1 => "for the only seed".to_owned(),
            seeds => format!("for each of {seeds} seeds"),
        };
        let of_output =
            self.output.as_ref().map_or_else(String::new, |output| format!(" of `{output}`"));
        format!("{figure}{of_output} {times} ({head:.1e}, was {base:.1e}) {seeds}")
    }
}

/// Result of comparing the errors of both sides.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct NumericsReport {
    /// Cases whose errors are known on both sides for a seed.
    pub compared: usize,
    /// Number of compared cases that have an error for another seed.
    pub changed: usize,
    /// Outputs of the changed cases, each with another error for a seed.
    pub changed_outputs: usize,
    /// Cases that lost accuracy, or may have.
    pub grown: Vec<ErrorGrowth>,
}

impl NumericsReport {
    /// Cases that lost accuracy.
    pub fn losses(&self) -> impl Iterator<Item = &ErrorGrowth> {
        self.grown.iter().filter(|growth| growth.is_shown())
    }

    /// Cases that may have lost accuracy, for which there are too few seeds.
    pub fn suspected_growth(&self) -> impl Iterator<Item = &ErrorGrowth> {
        self.grown.iter().filter(|growth| !growth.is_shown())
    }
}

/// Compares errors; `growth` is the ratio that is allowed for a case.
pub fn compare_numerics<'a>(
    cases: impl IntoIterator<Item = (&'a str, &'a CaseNumerics, &'a CaseNumerics)>,
    growth: impl Fn(&str) -> f64,
) -> NumericsReport {
    let common: BTreeMap<&str, (Vec<OutputErrorPairs>, bool)> = cases
        .into_iter()
        .map(|(case, base, head)| {
            (case, (paired_outputs(base, head), base.one_data_set || head.one_data_set))
        })
        .filter(|(_, (outputs, _))| outputs.iter().any(|output| !output.pairs.is_empty()))
        .collect();
    let changed_of =
        |outputs: &[OutputErrorPairs]| outputs.iter().filter(|output| output.differs()).count();
    let changed: Vec<usize> = common.values().map(|(outputs, _)| changed_of(outputs)).collect();
    let changed_outputs = changed.iter().sum();
    let needed = necessary_seeds(changed_outputs);
    let grown = common.iter().filter_map(|(case, (outputs, one_data_set))| {
        let each =
            outputs.iter().filter_map(|output| grown_error(case, output, growth(case), needed));
        // A ratio of `None` means infinite growth: the base had no error.
        let ratio = |growth: &ErrorGrowth| growth.ratio.unwrap_or(f64::INFINITY);
        let found = each.max_by(|a, b| ratio(a).total_cmp(&ratio(b)))?;
        Some(ErrorGrowth { one_data_set: *one_data_set, ..found })
    });
    NumericsReport {
        compared: common.len(),
        changed: changed.iter().filter(|outputs| **outputs > 0).count(),
        changed_outputs,
        grown: grown.collect(),
    }
}

/// Errors of an output that both sides record, or of all outputs together.
struct OutputErrorPairs {
    /// Name of the output; `None` for all outputs together.
    name: Option<String>,
    pairs: Vec<SeedErrorPair>,
}

impl OutputErrorPairs {
    fn differs(&self) -> bool {
        let same = |pair: &SeedErrorPair, figure: ErrorFigure| {
            figure.figure_value(&pair.base) == figure.figure_value(&pair.head)
        };
        self.pairs.iter().any(|pair| ERROR_FIGURES.into_iter().any(|figure| !same(pair, figure)))
    }
}

/// All measures.
const ERROR_FIGURES: [ErrorFigure; 2] = [ErrorFigure::RelativeL2, ErrorFigure::MaxError];

struct SeedErrorPair {
    base: OutputErrors,
    head: OutputErrors,
    /// Smallest error that counts; smaller errors are rounding.
    floor: f64,
}

/// Errors of the seeds that both sides have, by output. If one side knows that there is only one
/// data set, one seed counts.
fn paired_outputs(base: &CaseNumerics, head: &CaseNumerics) -> Vec<OutputErrorPairs> {
    let most = if base.one_data_set || head.one_data_set { 1 } else { usize::MAX };
    let position = |&seed: &u64| base.position(seed).zip(head.position(seed));
    let both: Vec<_> = base.seeds.iter().filter_map(position).take(most).collect();
    let pairs = |base: &SeedErrors, head: &SeedErrors| {
        let floor = ROUNDING_PER_UNIT_ROUNDOFF * base.rounding.max(head.rounding);
        let pair = |&(before, now): &(usize, usize)| SeedErrorPair {
            base: base.at(before),
            head: head.at(now),
            floor,
        };
        both.iter().map(pair).collect()
    };
    if !base.by_output.is_empty() && base.by_output.keys().eq(head.by_output.keys()) {
        let each = base.by_output.iter().zip(head.by_output.values());
        let paired_output = |((name, base), head): ((&String, &SeedErrors), &SeedErrors)| {
            OutputErrorPairs { name: Some(name.clone()), pairs: pairs(base, head) }
        };
        return each.map(paired_output).collect();
    }
    vec![OutputErrorPairs { name: None, pairs: pairs(&base.errors, &head.errors) }]
}

fn grown_error(
    case: &str,
    output: &OutputErrorPairs,
    allowed: f64,
    needed: usize,
) -> Option<ErrorGrowth> {
    let pairs = &output.pairs;
    let growth_of = |figure: ErrorFigure| {
        let errors = |pair: &SeedErrorPair| {
            let real = |errors: &OutputErrors| figure.figure_value(errors).max(pair.floor);
            (real(&pair.base), real(&pair.head))
        };
        let ratios: Vec<f64> = pairs
            .iter()
            .map(errors)
            .map(|(base, head)| (head / base.max(f64::MIN_POSITIVE)).min(f64::MAX))
            .collect();
        let all = pairs.iter().map(errors).all(|(base, head)| head > allowed * base);
        let middle = |side: fn(&SeedErrorPair) -> &OutputErrors| {
            median(&pairs.iter().map(|pair| figure.figure_value(side(pair))).collect::<Vec<_>>())
        };
        let (base, head) = (middle(|pair| &pair.base), middle(|pair| &pair.head));
        let growth = ErrorGrowth {
            case: case.to_owned(),
            output: output.name.clone(),
            figure,
            seeds: pairs.len(),
            needed,
            base,
            head,
            ratio: (base > 0.0).then(|| median(&ratios)),
            allowed,
            one_data_set: false,
        };
        (all && !pairs.is_empty()).then_some(growth)
    };
    ERROR_FIGURES.into_iter().find_map(growth_of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn numerics_of_errors(errors: impl IntoIterator<Item = f64>) -> CaseNumerics {
        let mut numerics = CaseNumerics::default();
        for (seed, relative_l2) in errors.into_iter().enumerate() {
            let rounding = 0.5f64.powi(24);
            let errors = OutputErrors { max_error: 2.0 * relative_l2, relative_l2, rounding };
            numerics.insert_seed(seed as u64, errors, &BTreeMap::new());
        }
        numerics
    }

    fn numerics_report(base: &[f64], head: &[f64]) -> NumericsReport {
        let (base, head) =
            (numerics_of_errors(base.iter().copied()), numerics_of_errors(head.iter().copied()));
        compare_numerics([("x", &base, &head)], |_| 1.5)
    }

    #[test]
    fn an_error_that_grew_for_eight_seeds_is_a_finding_and_for_fewer_is_suspected() {
        let eight = numerics_report(&[1e-5; 8], &[1.6e-5; 8]);
        assert_eq!((eight.changed, eight.losses().count()), (1, 1));
        assert_eq!(
            eight.grown[0].words(),
            "relative L2 error 1.6 times as large (1.6e-5, was 1.0e-5) for each of 8 seeds"
        );
        let seven = numerics_report(&[1e-5; 7], &[1.6e-5; 7]);
        assert_eq!((seven.losses().count(), seven.suspected_growth().count()), (0, 1));
        // In this test, one seed without growth decides the case, and so does growth within the
        // allowed ratio.
        let mut one = [1.6e-5; 8];
        one[3] = 1.4e-5;
        for head in [one, [1.5e-5; 8], [1e-5; 8], [1e-9; 8]] {
            assert!(numerics_report(&[1e-5; 8], &head).grown.is_empty());
        }
        assert_eq!(numerics_report(&[1e-5; 8], &[1e-5; 8]).changed, 0);
    }

    /// Makes a case with an output of 16 bits and one of 32 bits, with these errors for eight
    /// seeds.
    fn two_output_numerics(wide: f64, narrow: f64) -> CaseNumerics {
        let mut numerics = CaseNumerics::default();
        for seed in 0..8 {
            let errors = |relative_l2, bits| {
                let rounding = 0.5f64.powi(bits);
                OutputErrors { max_error: relative_l2, relative_l2, rounding }
            };
            let by_output = [("lse", errors(narrow, 24)), ("o", errors(wide, 9))]
                .map(|(name, errors)| (name.to_owned(), errors));
            numerics.insert_seed(seed, errors(wide, 9), &by_output.into());
        }
        numerics
    }

    #[test]
    fn growth_of_a_small_error_of_one_output_is_found_beside_a_large_one() {
        let (base, head) = (two_output_numerics(4e-3, 1e-6), two_output_numerics(4e-3, 2e-3));
        let judge = |base: &CaseNumerics, head: &CaseNumerics| {
            compare_numerics([("x", base, head)], |_| 1.5)
        };
        let report = judge(&base, &head);
        assert_eq!((report.changed, report.changed_outputs, report.losses().count()), (1, 1, 1));
        let words = report.grown[0].words();
        insta::assert_snapshot!(words, @"relative L2 error of `lse` 2000.0 times as large (2.0e-3, was 1.0e-6) for each of 8 seeds");
        // If both outputs grew, the greater growth is reported, and two outputs take a seed more.
        let both = judge(&base, &two_output_numerics(7e-3, 2e-3));
        assert_eq!((both.changed, both.changed_outputs, both.grown[0].needed), (1, 2, 9));
        assert_eq!(both.grown[0].output.as_deref(), Some("lse"));
        // In this test, one side does not record outputs separately, or has other outputs.
        let older = CaseNumerics { by_output: BTreeMap::new(), ..base.clone() };
        assert!(judge(&older, &head).grown.is_empty());
        let mut renamed = head.clone();
        let lse = renamed.by_output.remove("lse").unwrap();
        renamed.by_output.insert("sums".to_owned(), lse);
        assert!(judge(&base, &renamed).grown.is_empty());
    }

    #[test]
    fn one_data_set_counts_as_one_pair_for_any_number_of_seeds() {
        // In this test, an older baseline counted one data set eight times.
        let base = numerics_of_errors([1e-5; 8]);
        let head = CaseNumerics { one_data_set: true, ..numerics_of_errors([3e-5; 8]) };
        let mut growth = Vec::new();
        for (base, head) in [(&base, &head), (&head, &numerics_of_errors([9e-5]))] {
            let report = compare_numerics([("x", base, head)], |_| 1.5);
            assert_eq!((report.losses().count(), report.suspected_growth().count()), (0, 1));
            growth.push(report.grown[0].words());
        }
        insta::assert_debug_snapshot!(growth, @r#"
        [
            "relative L2 error 3.0 times as large (3.0e-5, was 1.0e-5) for the only data set",
            "relative L2 error 3.0 times as large (9.0e-5, was 3.0e-5) for the only data set",
        ]
        "#);
        let accepted = compare_numerics([("x", &base, &head)], |_| 4.0);
        assert!(accepted.grown.is_empty());
    }

    #[test]
    fn rounding_of_exact_outputs_does_not_count_as_growth() {
        let exact = [0.0; 8];
        assert!(numerics_report(&exact, &[1e-8; 8]).grown.is_empty(), "below 0.25 · 2^-24");
        let lost = numerics_report(&exact, &[1e-6; 8]);
        assert_eq!(lost.grown[0].ratio, None);
        insta::assert_snapshot!(lost.grown[0].words(), @"relative L2 error no longer 0 (1.0e-6, was 0.0e0) for each of 8 seeds");
    }

    #[test]
    fn an_infinite_ratio_of_errors_is_stored_as_a_number() {
        let mut growth = Vec::new();
        for count in [8, 9] {
            let report = numerics_report(&vec![1e-300; count], &vec![8e307; count]);
            let ErrorGrowth { ratio, .. } = report.grown[0];
            assert!(ratio.is_some_and(|ratio| ratio.is_finite() && ratio > 1e300), "{ratio:?}");
            growth.push(report.grown[0].words());
        }
        insta::assert_debug_snapshot!(growth, @r#"
        [
            "relative L2 error 1.8e308 times as large (8.0e307, was 1.0e-300) for each of 8 seeds",
            "relative L2 error 1.8e308 times as large (8.0e307, was 1.0e-300) for each of 9 seeds",
        ]
        "#);
    }

    #[test]
    fn more_cases_need_more_seeds_for_a_finding() {
        assert_eq!([0, 1, 2, 10, 181].map(necessary_seeds), [8, 8, 9, 11, 16]);
        let (base, head) = (numerics_of_errors([1e-5; 8]), numerics_of_errors([3e-5; 8]));
        let cases = ["a", "b", "c"].map(|case| (case, &base, &head));
        let report = compare_numerics(cases, |_| 1.5);
        assert_eq!((report.suspected_growth().count(), report.grown[0].needed), (3, 10));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// At the boundary a seed exceeds the ratio with probability one half: eight agree in one
        /// of 256 trials.
        #[test]
        fn false_alarms_about_errors_are_as_rare_as_promised(start in 0u64..1_000_000) {
            let mut alarms = 0;
            let mut state = start.wrapping_mul(2).wrapping_add(1);
            let mut coin = || {
                // SplitMix64.
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = state;
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                (z ^ (z >> 31)) & 1 == 1
            };
            for _ in 0..2000 {
                let head: Vec<f64> =
                    (0..8).map(|_| if coin() { 1.51e-5 } else { 1.49e-5 }).collect();
                alarms += numerics_report(&[1e-5; 8], &head).losses().count();
            }
            // 7.8 are expected; 30 would be 8 standard deviations more.
            prop_assert!(alarms < 30, "{alarms} of 2000");
        }
    }
}
