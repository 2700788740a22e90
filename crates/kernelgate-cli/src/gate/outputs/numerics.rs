//! Decides whether a case lost accuracy: compares the errors of base and head against the
//! reference, paired by the seed of the inputs.
//!
//! An error figure has grown if the head's error exceeds g times the base's for every seed, g being
//! the allowed ratio, with at least [`MIN_SEEDS_TO_SHOW_ERROR_GROWTH`] seeds. If the median growth
//! is at most the allowed ratio, all n seeds exceed that ratio with a probability of at most 2⁻ⁿ.
//! Two figures are tested for each of the m outputs whose errors changed, so n is chosen such that
//! 2m · 2⁻ⁿ is at most `MAX_FALSE_ACCURACY_FINDINGS` (Bonferroni). A single seed without growth
//! already shows that an output did not lose accuracy, so most cases need only one seed. If base or
//! head recorded only the errors of all outputs together, all outputs of the case count as one
//! output.
//!
//! A seed counts only if it generates inputs of its own. If all seeds have the same inputs or
//! reference (golden tensors), growth of the error is only suspected, because its scatter over
//! inputs is unknown.
//!
//! This module runs no kernels and measures no errors: it compares recorded errors.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use kernelgate::record::CaseOutputErrorsBySeed;
use kernelgate::record::numerics::OutputErrorListsBySeed;
use kernelgate::stats::median;
use kernelgate::verify::ErrorsRelativeToReference;

/// Smallest number of seeds that can show that an output error grew.
pub const MIN_SEEDS_TO_SHOW_ERROR_GROWTH: usize = 8;
/// Errors below this many unit roundoffs of the output's type are attributed to rounding alone;
/// rounding each output element once causes an error of 0.4.
const ROUNDING_ERROR_IN_UNIT_ROUNDOFFS: f64 = 0.25;

/// Growth ratios of errors from this value on are printed with an exponent.
const MIN_ERROR_RATIO_WITH_EXPONENT: f64 = 1e6;

/// Highest probability that a loss of accuracy is reported for any case if no error grew.
const MAX_FALSE_ACCURACY_FINDINGS: f64 = 0.01;

/// Returns how many seeds are needed to show that an error grew, if the errors of this number of
/// outputs changed.
pub fn seeds_needed_for_changed_outputs(changed: usize) -> usize {
    let tests = 2.0 * changed.max(1) as f64;
    ((tests / MAX_FALSE_ACCURACY_FINDINGS).log2().ceil() as usize)
        .max(MIN_SEEDS_TO_SHOW_ERROR_GROWTH)
}

/// A figure for how far outputs are from the reference: relative L2 error or maximum error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputErrorFigure {
    /// Relative L2 error of an output: ‖out - ref‖₂ / ‖ref‖₂.
    RelativeL2,
    /// Maximum error of an output: the largest |out - ref| divided by the largest |ref|.
    MaxError,
}

impl OutputErrorFigure {
    /// Returns the value of this error figure for an output.
    const fn value_in_errors(self, errors: &ErrorsRelativeToReference) -> f64 {
        match self {
            Self::RelativeL2 => errors.relative_l2,
            Self::MaxError => errors.max_error,
        }
    }

    /// The measure in words.
    pub const fn figure_name(self) -> &'static str {
        match self {
            Self::RelativeL2 => "relative L2 error",
            Self::MaxError => "max error",
        }
    }
}

/// A case whose output error grew for every seed that base and head share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorGrowthOfCase {
    /// Id of the case: `workload/problem/implementation/cache`.
    pub case: String,
    /// Name of the output whose error grew the most; `None` if the case has one output, or base or
    /// head did not record outputs separately.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    /// The error figure that grew; the relative L2 error if both figures grew.
    pub figure: OutputErrorFigure,
    /// Number of seeds.
    pub seeds: usize,
    /// Number of seeds that are needed to show the growth.
    pub needed: usize,
    /// Median over the seeds of the error of the base's output.
    pub base: f64,
    /// Median over the seeds of the error of the head's output.
    pub head: f64,
    /// Median over the seeds of the head's error divided by the base's; `None` if the base has no
    /// error.
    pub ratio: Option<f64>,
    /// Growth that was allowed.
    pub allowed: f64,
    /// Whether all seeds have the same inputs or reference, so that further seeds would show
    /// nothing new.
    pub one_data_set: bool,
}

impl ErrorGrowthOfCase {
    /// Returns whether the growth of the error is shown by enough seeds, and not only suspected.
    pub const fn is_growth_shown(&self) -> bool {
        self.seeds >= self.needed
    }

    /// Describes the growth of an error: "relative L2 error of `y` 3.2 times as large (1.2e-4, was
    /// 3.8e-5) for each of 8 seeds".
    pub fn describe_error_growth(&self) -> String {
        let times = match self.ratio {
            Some(ratio) if ratio < MIN_ERROR_RATIO_WITH_EXPONENT => {
                format!("{ratio:.1} times as large")
            }
            Some(ratio) => format!("{ratio:.1e} times as large"),
            None => "no longer 0".to_owned(),
        };
        let (figure, head, base) = (self.figure.figure_name(), self.head, self.base);
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

/// Result of comparing the output errors of base and head against the reference.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OutputErrorReport {
    /// Number of cases for which base and head recorded errors with a common seed.
    pub compared: usize,
    /// Number of compared cases whose errors differ between base and head for some seed.
    pub changed: usize,
    /// Number of outputs whose errors differ between base and head for some seed.
    pub changed_outputs: usize,
    /// Cases whose output error grew for every common seed: shown or only suspected losses of
    /// accuracy.
    pub grown: Vec<ErrorGrowthOfCase>,
}

impl OutputErrorReport {
    /// Cases that lost accuracy.
    pub fn shown_accuracy_losses(&self) -> impl Iterator<Item = &ErrorGrowthOfCase> {
        self.grown.iter().filter(|growth| growth.is_growth_shown())
    }

    /// Returns the cases with a suspected loss of accuracy, for which too few seeds were measured.
    pub fn suspected_accuracy_losses(&self) -> impl Iterator<Item = &ErrorGrowthOfCase> {
        self.grown.iter().filter(|growth| !growth.is_growth_shown())
    }
}

/// Compares the output errors of base and head; `growth` returns the ratio by which a case's error
/// may grow.
pub fn compare_output_errors<'a>(
    cases: impl IntoIterator<Item = (&'a str, &'a CaseOutputErrorsBySeed, &'a CaseOutputErrorsBySeed)>,
    growth: impl Fn(&str) -> f64,
) -> OutputErrorReport {
    let common: BTreeMap<&str, (Vec<OutputErrorsBySeed>, bool)> = cases
        .into_iter()
        .map(|(case, base, head)| {
            (
                case,
                (
                    pair_errors_by_output_and_seed(base, head),
                    base.one_data_set || head.one_data_set,
                ),
            )
        })
        .filter(|(_, (outputs, _))| outputs.iter().any(|output| !output.pairs.is_empty()))
        .collect();
    let changed_of = |outputs: &[OutputErrorsBySeed]| {
        outputs.iter().filter(|output| output.has_differing_errors()).count()
    };
    let changed: Vec<usize> = common.values().map(|(outputs, _)| changed_of(outputs)).collect();
    let changed_outputs = changed.iter().sum();
    let needed = seeds_needed_for_changed_outputs(changed_outputs);
    let grown = common.iter().filter_map(|(case, (outputs, one_data_set))| {
        let each = outputs
            .iter()
            .filter_map(|output| error_growth_of_output(case, output, growth(case), needed));
        // A ratio of `None` counts as infinite growth, because the base had no error.
        let ratio = |growth: &ErrorGrowthOfCase| growth.ratio.unwrap_or(f64::INFINITY);
        let found = each.max_by(|a, b| ratio(a).total_cmp(&ratio(b)))?;
        Some(ErrorGrowthOfCase { one_data_set: *one_data_set, ..found })
    });
    OutputErrorReport {
        compared: common.len(),
        changed: changed.iter().filter(|outputs| **outputs > 0).count(),
        changed_outputs,
        grown: grown.collect(),
    }
}

/// Errors of one output in base and head for each common seed, or those of all outputs together.
struct OutputErrorsBySeed {
    /// Name of the output; `None` for the errors of all outputs together.
    name: Option<String>,
    pairs: Vec<ErrorsOfBothBuildsForSeed>,
}

impl OutputErrorsBySeed {
    fn has_differing_errors(&self) -> bool {
        let same = |pair: &ErrorsOfBothBuildsForSeed, figure: OutputErrorFigure| {
            figure.value_in_errors(&pair.base) == figure.value_in_errors(&pair.head)
        };
        self.pairs
            .iter()
            .any(|pair| BOTH_ERROR_FIGURES.into_iter().any(|figure| !same(pair, figure)))
    }
}

/// All kinds of output errors that are compared.
const BOTH_ERROR_FIGURES: [OutputErrorFigure; 2] =
    [OutputErrorFigure::RelativeL2, OutputErrorFigure::MaxError];

struct ErrorsOfBothBuildsForSeed {
    base: ErrorsRelativeToReference,
    head: ErrorsRelativeToReference,
    /// Smallest error that counts, because smaller errors come from rounding alone.
    floor: f64,
}

/// Pairs the errors of base and head by output and common seed. If base or head knows that all
/// seeds have the same inputs, only one seed is used.
fn pair_errors_by_output_and_seed(
    base: &CaseOutputErrorsBySeed,
    head: &CaseOutputErrorsBySeed,
) -> Vec<OutputErrorsBySeed> {
    let most = if base.one_data_set || head.one_data_set { 1 } else { usize::MAX };
    let position = |&seed: &u64| base.position_of_seed(seed).zip(head.position_of_seed(seed));
    let both: Vec<_> = base.seeds.iter().filter_map(position).take(most).collect();
    let pairs = |base: &OutputErrorListsBySeed, head: &OutputErrorListsBySeed| {
        let floor = ROUNDING_ERROR_IN_UNIT_ROUNDOFFS * base.rounding.max(head.rounding);
        let pair = |&(before, now): &(usize, usize)| ErrorsOfBothBuildsForSeed {
            base: base.errors_at(before),
            head: head.errors_at(now),
            floor,
        };
        both.iter().map(pair).collect()
    };
    if !base.by_output.is_empty() && base.by_output.keys().eq(head.by_output.keys()) {
        let each = base.by_output.iter().zip(head.by_output.values());
        let paired_output = |((name, base), head): (
            (&String, &OutputErrorListsBySeed),
            &OutputErrorListsBySeed,
        )| {
            OutputErrorsBySeed { name: Some(name.clone()), pairs: pairs(base, head) }
        };
        return each.map(paired_output).collect();
    }
    vec![OutputErrorsBySeed { name: None, pairs: pairs(&base.errors, &head.errors) }]
}

fn error_growth_of_output(
    case: &str,
    output: &OutputErrorsBySeed,
    allowed: f64,
    needed: usize,
) -> Option<ErrorGrowthOfCase> {
    let pairs = &output.pairs;
    let growth_of = |figure: OutputErrorFigure| {
        let errors = |pair: &ErrorsOfBothBuildsForSeed| {
            let real =
                |errors: &ErrorsRelativeToReference| figure.value_in_errors(errors).max(pair.floor);
            (real(&pair.base), real(&pair.head))
        };
        let ratios: Vec<f64> = pairs
            .iter()
            .map(errors)
            .map(|(base, head)| (head / base.max(f64::MIN_POSITIVE)).min(f64::MAX))
            .collect();
        let all = pairs.iter().map(errors).all(|(base, head)| head > allowed * base);
        let middle = |side: fn(&ErrorsOfBothBuildsForSeed) -> &ErrorsRelativeToReference| {
            median(&pairs.iter().map(|pair| figure.value_in_errors(side(pair))).collect::<Vec<_>>())
        };
        let (base, head) = (middle(|pair| &pair.base), middle(|pair| &pair.head));
        let growth = ErrorGrowthOfCase {
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
    BOTH_ERROR_FIGURES.into_iter().find_map(growth_of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn test_numerics_with_errors(errors: impl IntoIterator<Item = f64>) -> CaseOutputErrorsBySeed {
        let mut numerics = CaseOutputErrorsBySeed::default();
        for (seed, relative_l2) in errors.into_iter().enumerate() {
            let rounding = 0.5f64.powi(24);
            let errors =
                ErrorsRelativeToReference { max_error: 2.0 * relative_l2, relative_l2, rounding };
            numerics.set_errors_of_seed(seed as u64, errors, &BTreeMap::new());
        }
        numerics
    }

    fn report_for_test_errors(base: &[f64], head: &[f64]) -> OutputErrorReport {
        let (base, head) = (
            test_numerics_with_errors(base.iter().copied()),
            test_numerics_with_errors(head.iter().copied()),
        );
        compare_output_errors([("x", &base, &head)], |_| 1.5)
    }

    #[test]
    fn an_error_that_grew_for_eight_seeds_is_a_finding_and_for_fewer_is_suspected() {
        let eight = report_for_test_errors(&[1e-5; 8], &[1.6e-5; 8]);
        assert_eq!((eight.changed, eight.shown_accuracy_losses().count()), (1, 1));
        assert_eq!(
            eight.grown[0].describe_error_growth(),
            "relative L2 error 1.6 times as large (1.6e-5, was 1.0e-5) for each of 8 seeds"
        );
        let seven = report_for_test_errors(&[1e-5; 7], &[1.6e-5; 7]);
        assert_eq!(
            (seven.shown_accuracy_losses().count(), seven.suspected_accuracy_losses().count()),
            (0, 1)
        );
        // In this test, one seed without growth decides the case, and so does growth within the
        // allowed ratio.
        let mut one = [1.6e-5; 8];
        one[3] = 1.4e-5;
        for head in [one, [1.5e-5; 8], [1e-5; 8], [1e-9; 8]] {
            assert!(report_for_test_errors(&[1e-5; 8], &head).grown.is_empty());
        }
        assert_eq!(report_for_test_errors(&[1e-5; 8], &[1e-5; 8]).changed, 0);
    }

    /// Makes test errors of a case with a 16-bit output and a 32-bit output, equal for eight seeds.
    fn test_numerics_with_two_outputs(wide: f64, narrow: f64) -> CaseOutputErrorsBySeed {
        let mut numerics = CaseOutputErrorsBySeed::default();
        for seed in 0..8 {
            let errors = |relative_l2, bits| {
                let rounding = 0.5f64.powi(bits);
                ErrorsRelativeToReference { max_error: relative_l2, relative_l2, rounding }
            };
            let by_output = [("lse", errors(narrow, 24)), ("o", errors(wide, 9))]
                .map(|(name, errors)| (name.to_owned(), errors));
            numerics.set_errors_of_seed(seed, errors(wide, 9), &by_output.into());
        }
        numerics
    }

    #[test]
    fn growth_of_a_small_error_of_one_output_is_found_beside_a_large_one() {
        let (base, head) = (
            test_numerics_with_two_outputs(4e-3, 1e-6),
            test_numerics_with_two_outputs(4e-3, 2e-3),
        );
        let judge = |base: &CaseOutputErrorsBySeed, head: &CaseOutputErrorsBySeed| {
            compare_output_errors([("x", base, head)], |_| 1.5)
        };
        let report = judge(&base, &head);
        assert_eq!(
            (report.changed, report.changed_outputs, report.shown_accuracy_losses().count()),
            (1, 1, 1)
        );
        let words = report.grown[0].describe_error_growth();
        insta::assert_snapshot!(words, @"relative L2 error of `lse` 2000.0 times as large (2.0e-3, was 1.0e-6) for each of 8 seeds");
        // In this part of the test both outputs grew: the larger growth is reported, and two
        // outputs need one more seed.
        let both = judge(&base, &test_numerics_with_two_outputs(7e-3, 2e-3));
        assert_eq!((both.changed, both.changed_outputs, both.grown[0].needed), (1, 2, 9));
        assert_eq!(both.grown[0].output.as_deref(), Some("lse"));
        // In this part of the test, base or head does not record outputs separately, or has other
        // outputs.
        let older = CaseOutputErrorsBySeed { by_output: BTreeMap::new(), ..base.clone() };
        assert!(judge(&older, &head).grown.is_empty());
        let mut renamed = head.clone();
        let lse = renamed.by_output.remove("lse").unwrap();
        renamed.by_output.insert("sums".to_owned(), lse);
        assert!(judge(&base, &renamed).grown.is_empty());
    }

    #[test]
    fn one_data_set_counts_as_one_pair_for_any_number_of_seeds() {
        // In this test, an older baseline counted one data set as eight seeds.
        let base = test_numerics_with_errors([1e-5; 8]);
        let head =
            CaseOutputErrorsBySeed { one_data_set: true, ..test_numerics_with_errors([3e-5; 8]) };
        let mut growth = Vec::new();
        for (base, head) in [(&base, &head), (&head, &test_numerics_with_errors([9e-5]))] {
            let report = compare_output_errors([("x", base, head)], |_| 1.5);
            assert_eq!(
                (
                    report.shown_accuracy_losses().count(),
                    report.suspected_accuracy_losses().count()
                ),
                (0, 1)
            );
            growth.push(report.grown[0].describe_error_growth());
        }
        insta::assert_debug_snapshot!(growth, @r#"
        [
            "relative L2 error 3.0 times as large (3.0e-5, was 1.0e-5) for the only data set",
            "relative L2 error 3.0 times as large (9.0e-5, was 3.0e-5) for the only data set",
        ]
        "#);
        let accepted = compare_output_errors([("x", &base, &head)], |_| 4.0);
        assert!(accepted.grown.is_empty());
    }

    #[test]
    fn rounding_of_exact_outputs_does_not_count_as_growth() {
        let exact = [0.0; 8];
        assert!(report_for_test_errors(&exact, &[1e-8; 8]).grown.is_empty(), "below 0.25 · 2^-24");
        let lost = report_for_test_errors(&exact, &[1e-6; 8]);
        assert_eq!(lost.grown[0].ratio, None);
        insta::assert_snapshot!(lost.grown[0].describe_error_growth(), @"relative L2 error no longer 0 (1.0e-6, was 0.0e0) for each of 8 seeds");
    }

    #[test]
    fn an_infinite_ratio_of_errors_is_stored_as_a_number() {
        let mut growth = Vec::new();
        for count in [8, 9] {
            let report = report_for_test_errors(&vec![1e-300; count], &vec![8e307; count]);
            let ErrorGrowthOfCase { ratio, .. } = report.grown[0];
            assert!(ratio.is_some_and(|ratio| ratio.is_finite() && ratio > 1e300), "{ratio:?}");
            growth.push(report.grown[0].describe_error_growth());
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
        assert_eq!([0, 1, 2, 10, 181].map(seeds_needed_for_changed_outputs), [8, 8, 9, 11, 16]);
        let (base, head) =
            (test_numerics_with_errors([1e-5; 8]), test_numerics_with_errors([3e-5; 8]));
        let cases = ["a", "b", "c"].map(|case| (case, &base, &head));
        let report = compare_output_errors(cases, |_| 1.5);
        assert_eq!((report.suspected_accuracy_losses().count(), report.grown[0].needed), (3, 10));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// At the allowed ratio, a seed exceeds the ratio with probability one half, so eight seeds
        /// all exceed it in one of 256 trials.
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
                alarms += report_for_test_errors(&[1e-5; 8], &head).shown_accuracy_losses().count();
            }
            // The test expects 7.8 false findings; 30 would be 8 standard deviations more.
            prop_assert!(alarms < 30, "{alarms} of 2000");
        }
    }
}
