//! Decides whether a case lost accuracy: compares the errors of base and head against the
//! reference, paired by the seed of the inputs.
//!
//! An error measure has grown if the head's error exceeds g times the base's for every seed, g
//! being the allowed ratio, with at least [`MIN_SEEDS_TO_SHOW_ERROR_GROWTH`] seeds. If the median
//! growth is at most the allowed ratio, all n seeds exceed that ratio with a probability of at most
//! 2⁻ⁿ. Two figures are tested for each of the m outputs whose errors changed, so n is chosen such
//! that 2m · 2⁻ⁿ is at most `MAX_FALSE_ACCURACY_FINDING_PROBABILITY` (Bonferroni). A single seed
//! without growth already shows that an output did not lose accuracy, so most cases need only one
//! seed. If base or head recorded only the errors of all outputs together, all outputs of the case
//! count as one output.
//!
//! A seed counts only if it generates inputs of its own. If all seeds have the same inputs or
//! reference (golden tensors), growth of the error is only suspected, because its scatter over
//! inputs is unknown.
//!
//! The module `numerics` runs no kernels and measures no errors; it only compares recorded errors.

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
const MAX_FALSE_ACCURACY_FINDING_PROBABILITY: f64 = 0.01;

/// Returns how many seeds are needed to show that an error grew, if the errors of this number of
/// outputs changed.
pub fn seeds_needed_for_changed_outputs(changed: usize) -> usize {
    let tests = 2.0 * changed.max(1) as f64;
    ((tests / MAX_FALSE_ACCURACY_FINDING_PROBABILITY).log2().ceil() as usize)
        .max(MIN_SEEDS_TO_SHOW_ERROR_GROWTH)
}

/// A measure of how far outputs are from the reference: relative L2 error or maximum error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputErrorMeasure {
    /// Relative L2 error of an output: ‖out - ref‖₂ / ‖ref‖₂.
    #[serde(rename = "relative_l2")]
    RelativeL2Error,
    /// Maximum error of an output: the largest |out - ref| divided by the largest |ref|.
    #[serde(rename = "max_error")]
    MaxErrorOverMaxReference,
}

impl OutputErrorMeasure {
    /// Returns the value of this error measure for an output.
    const fn value_in_errors(self, errors: &ErrorsRelativeToReference) -> f64 {
        match self {
            Self::RelativeL2Error => errors.relative_l2,
            Self::MaxErrorOverMaxReference => errors.max_error,
        }
    }

    /// Returns the name of the output error measure in words.
    pub const fn error_measure_name(self) -> &'static str {
        match self {
            Self::RelativeL2Error => "relative L2 error",
            Self::MaxErrorOverMaxReference => "max error",
        }
    }
}

/// A case whose output error grew for every seed that base and head share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutputErrorGrowthOfCase {
    /// Id of the case, in the form `workload/problem/implementation/cache`.
    #[serde(rename = "case")]
    pub case_id: String,
    /// Name of the output whose error grew the most; `None` if the case has one output, or base or
    /// head did not record outputs separately.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "output")]
    pub output_with_largest_growth: Option<String>,
    /// The error measure that grew; the relative L2 error if both measures grew.
    #[serde(rename = "figure")]
    pub error_measure: OutputErrorMeasure,
    /// Number of seeds.
    #[serde(rename = "seeds")]
    pub seed_count: usize,
    /// Number of seeds that are needed to show that the output error grew.
    #[serde(rename = "needed")]
    pub seeds_needed: usize,
    /// Median over the seeds of the error of the base's output.
    #[serde(rename = "base")]
    pub base_median_error: f64,
    /// Median over the seeds of the error of the head's output.
    #[serde(rename = "head")]
    pub head_median_error: f64,
    /// Median over the seeds of the head's error divided by the base's; `None` if the base has no
    /// error.
    #[serde(rename = "ratio")]
    pub median_error_ratio: Option<f64>,
    /// Largest allowed ratio of the head's to the base's output error.
    #[serde(rename = "allowed")]
    pub allowed_error_ratio: f64,
    /// Whether all seeds have the same inputs or reference, so that further seeds would show
    /// nothing new.
    #[serde(rename = "one_data_set")]
    pub seeds_share_one_data_set: bool,
}

impl OutputErrorGrowthOfCase {
    /// Returns whether the growth of the error is shown by enough seeds, and not only suspected.
    pub const fn is_growth_shown(&self) -> bool {
        self.seed_count >= self.seeds_needed
    }

    /// Describes the growth of an error: "relative L2 error of `y` 3.2 times as large (1.2e-4, was
    /// 3.8e-5) for each of 8 seeds".
    pub fn describe_error_growth(&self) -> String {
        let times = match self.median_error_ratio {
            Some(ratio) if ratio < MIN_ERROR_RATIO_WITH_EXPONENT => {
                format!("{ratio:.1} times as large")
            }
            Some(ratio) => format!("{ratio:.1e} times as large"),
            None => "no longer 0".to_owned(),
        };
        let (figure, head, base) = (
            self.error_measure.error_measure_name(),
            self.head_median_error,
            self.base_median_error,
        );
        let seeds = match self.seed_count {
            1 if self.seeds_share_one_data_set => "for the only data set".to_owned(),
            1 => "for the only seed".to_owned(),
            seeds => format!("for each of {seeds} seeds"),
        };
        let of_output = self
            .output_with_largest_growth
            .as_ref()
            .map_or_else(String::new, |output| format!(" of `{output}`"));
        format!("{figure}{of_output} {times} ({head:.1e}, was {base:.1e}) {seeds}")
    }
}

/// Result of comparing the output errors of base and head against the reference.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OutputErrorReport {
    /// Number of cases for which base and head recorded errors with a common seed.
    #[serde(rename = "compared")]
    pub compared_cases: usize,
    /// Number of compared cases whose errors differ between base and head for some seed.
    #[serde(rename = "changed")]
    pub cases_with_changed_errors: usize,
    /// Number of outputs whose errors differ between base and head for some seed.
    #[serde(rename = "changed_outputs")]
    pub outputs_with_changed_errors: usize,
    /// Cases whose output error grew for every common seed: shown or only suspected losses of
    /// accuracy.
    #[serde(rename = "grown")]
    pub error_growths: Vec<OutputErrorGrowthOfCase>,
}

impl OutputErrorReport {
    /// Returns the cases whose loss of accuracy is shown by enough seeds.
    pub fn shown_accuracy_losses(&self) -> impl Iterator<Item = &OutputErrorGrowthOfCase> {
        self.error_growths.iter().filter(|growth| growth.is_growth_shown())
    }

    /// Returns the cases with a suspected loss of accuracy, for which too few seeds were measured.
    pub fn suspected_accuracy_losses(&self) -> impl Iterator<Item = &OutputErrorGrowthOfCase> {
        self.error_growths.iter().filter(|growth| !growth.is_growth_shown())
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
                    base.seeds_have_equal_data || head.seeds_have_equal_data,
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
        let ratio =
            |growth: &OutputErrorGrowthOfCase| growth.median_error_ratio.unwrap_or(f64::INFINITY);
        let found = each.max_by(|a, b| ratio(a).total_cmp(&ratio(b)))?;
        Some(OutputErrorGrowthOfCase { seeds_share_one_data_set: *one_data_set, ..found })
    });
    OutputErrorReport {
        compared_cases: common.len(),
        cases_with_changed_errors: changed.iter().filter(|outputs| **outputs > 0).count(),
        outputs_with_changed_errors: changed_outputs,
        error_growths: grown.collect(),
    }
}

/// Errors of one output in base and head for each common seed, or those of all outputs together.
struct OutputErrorsBySeed {
    /// Name of the output; `None` for the errors of all outputs together.
    output_name: Option<String>,
    pairs: Vec<ErrorsOfBothBuildsForSeed>,
}

impl OutputErrorsBySeed {
    fn has_differing_errors(&self) -> bool {
        let same = |pair: &ErrorsOfBothBuildsForSeed, figure: OutputErrorMeasure| {
            figure.value_in_errors(&pair.base) == figure.value_in_errors(&pair.head)
        };
        self.pairs
            .iter()
            .any(|pair| BOTH_ERROR_MEASURES.into_iter().any(|figure| !same(pair, figure)))
    }
}

/// Both kinds of output errors that are compared between base and head.
const BOTH_ERROR_MEASURES: [OutputErrorMeasure; 2] =
    [OutputErrorMeasure::RelativeL2Error, OutputErrorMeasure::MaxErrorOverMaxReference];

struct ErrorsOfBothBuildsForSeed {
    base: ErrorsRelativeToReference,
    head: ErrorsRelativeToReference,
    /// Smallest error that counts, because smaller errors come from rounding alone.
    rounding_error_floor: f64,
}

/// Pairs the errors of base and head by output and common seed. If base or head knows that all
/// seeds have the same inputs, only one seed is used.
fn pair_errors_by_output_and_seed(
    base: &CaseOutputErrorsBySeed,
    head: &CaseOutputErrorsBySeed,
) -> Vec<OutputErrorsBySeed> {
    let most =
        if base.seeds_have_equal_data || head.seeds_have_equal_data { 1 } else { usize::MAX };
    let position = |&seed: &u64| base.position_of_seed(seed).zip(head.position_of_seed(seed));
    let both: Vec<_> = base.seeds.iter().filter_map(position).take(most).collect();
    let pairs = |base: &OutputErrorListsBySeed, head: &OutputErrorListsBySeed| {
        let floor = ROUNDING_ERROR_IN_UNIT_ROUNDOFFS * base.rounding_error.max(head.rounding_error);
        let pair = |&(before, now): &(usize, usize)| ErrorsOfBothBuildsForSeed {
            base: base.errors_at(before),
            head: head.errors_at(now),
            rounding_error_floor: floor,
        };
        both.iter().map(pair).collect()
    };
    if !base.by_output.is_empty() && base.by_output.keys().eq(head.by_output.keys()) {
        let each = base.by_output.iter().zip(head.by_output.values());
        let paired_output = |((name, base), head): (
            (&String, &OutputErrorListsBySeed),
            &OutputErrorListsBySeed,
        )| {
            OutputErrorsBySeed { output_name: Some(name.clone()), pairs: pairs(base, head) }
        };
        return each.map(paired_output).collect();
    }
    vec![OutputErrorsBySeed { output_name: None, pairs: pairs(&base.errors, &head.errors) }]
}

fn error_growth_of_output(
    case: &str,
    output: &OutputErrorsBySeed,
    allowed: f64,
    needed: usize,
) -> Option<OutputErrorGrowthOfCase> {
    let pairs = &output.pairs;
    let growth_of = |figure: OutputErrorMeasure| {
        let errors = |pair: &ErrorsOfBothBuildsForSeed| {
            let real = |errors: &ErrorsRelativeToReference| {
                figure.value_in_errors(errors).max(pair.rounding_error_floor)
            };
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
        let growth = OutputErrorGrowthOfCase {
            case_id: case.to_owned(),
            output_with_largest_growth: output.output_name.clone(),
            error_measure: figure,
            seed_count: pairs.len(),
            seeds_needed: needed,
            base_median_error: base,
            head_median_error: head,
            median_error_ratio: (base > 0.0).then(|| median(&ratios)),
            allowed_error_ratio: allowed,
            seeds_share_one_data_set: false,
        };
        (all && !pairs.is_empty()).then_some(growth)
    };
    BOTH_ERROR_MEASURES.into_iter().find_map(growth_of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn test_numerics_with_errors(errors: impl IntoIterator<Item = f64>) -> CaseOutputErrorsBySeed {
        let mut numerics = CaseOutputErrorsBySeed::default();
        for (seed, relative_l2) in errors.into_iter().enumerate() {
            let rounding = 0.5f64.powi(24);
            let errors = ErrorsRelativeToReference {
                max_error: 2.0 * relative_l2,
                relative_l2,
                rounding_error: rounding,
            };
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
        assert_eq!(
            (eight.cases_with_changed_errors, eight.shown_accuracy_losses().count()),
            (1, 1)
        );
        assert_eq!(
            eight.error_growths[0].describe_error_growth(),
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
            assert!(report_for_test_errors(&[1e-5; 8], &head).error_growths.is_empty());
        }
        assert_eq!(report_for_test_errors(&[1e-5; 8], &[1e-5; 8]).cases_with_changed_errors, 0);
    }

    /// Makes test errors of a case with a 16-bit output and a 32-bit output, equal for eight seeds.
    fn test_numerics_with_two_outputs(wide: f64, narrow: f64) -> CaseOutputErrorsBySeed {
        let mut numerics = CaseOutputErrorsBySeed::default();
        for seed in 0..8 {
            let errors = |relative_l2, bits| {
                let rounding = 0.5f64.powi(bits);
                ErrorsRelativeToReference {
                    max_error: relative_l2,
                    relative_l2,
                    rounding_error: rounding,
                }
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
            (
                report.cases_with_changed_errors,
                report.outputs_with_changed_errors,
                report.shown_accuracy_losses().count()
            ),
            (1, 1, 1)
        );
        let words = report.error_growths[0].describe_error_growth();
        insta::assert_snapshot!(words, @"relative L2 error of `lse` 2000.0 times as large (2.0e-3, was 1.0e-6) for each of 8 seeds");
        // In this part of the test both outputs grew: the larger growth is reported, and two
        // outputs need one more seed.
        let both = judge(&base, &test_numerics_with_two_outputs(7e-3, 2e-3));
        assert_eq!(
            (
                both.cases_with_changed_errors,
                both.outputs_with_changed_errors,
                both.error_growths[0].seeds_needed
            ),
            (1, 2, 9)
        );
        assert_eq!(both.error_growths[0].output_with_largest_growth.as_deref(), Some("lse"));
        // In this part of the test, base or head does not record outputs separately, or has other
        // outputs.
        let older = CaseOutputErrorsBySeed { by_output: BTreeMap::new(), ..base.clone() };
        assert!(judge(&older, &head).error_growths.is_empty());
        let mut renamed = head.clone();
        let lse = renamed.by_output.remove("lse").unwrap();
        renamed.by_output.insert("sums".to_owned(), lse);
        assert!(judge(&base, &renamed).error_growths.is_empty());
    }

    #[test]
    fn one_data_set_counts_as_one_pair_for_any_number_of_seeds() {
        // In this test, an older baseline counted one data set as eight seeds.
        let base = test_numerics_with_errors([1e-5; 8]);
        let head = CaseOutputErrorsBySeed {
            seeds_have_equal_data: true,
            ..test_numerics_with_errors([3e-5; 8])
        };
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
            growth.push(report.error_growths[0].describe_error_growth());
        }
        insta::assert_debug_snapshot!(growth, @r#"
        [
            "relative L2 error 3.0 times as large (3.0e-5, was 1.0e-5) for the only data set",
            "relative L2 error 3.0 times as large (9.0e-5, was 3.0e-5) for the only data set",
        ]
        "#);
        let accepted = compare_output_errors([("x", &base, &head)], |_| 4.0);
        assert!(accepted.error_growths.is_empty());
    }

    #[test]
    fn rounding_of_exact_outputs_does_not_count_as_growth() {
        let exact = [0.0; 8];
        assert!(
            report_for_test_errors(&exact, &[1e-8; 8]).error_growths.is_empty(),
            "below 0.25 · 2^-24"
        );
        let lost = report_for_test_errors(&exact, &[1e-6; 8]);
        assert_eq!(lost.error_growths[0].median_error_ratio, None);
        insta::assert_snapshot!(lost.error_growths[0].describe_error_growth(), @"relative L2 error no longer 0 (1.0e-6, was 0.0e0) for each of 8 seeds");
    }

    #[test]
    fn an_infinite_ratio_of_errors_is_stored_as_a_number() {
        let mut growth = Vec::new();
        for count in [8, 9] {
            let report = report_for_test_errors(&vec![1e-300; count], &vec![8e307; count]);
            let OutputErrorGrowthOfCase { median_error_ratio: ratio, .. } = report.error_growths[0];
            assert!(ratio.is_some_and(|ratio| ratio.is_finite() && ratio > 1e300), "{ratio:?}");
            growth.push(report.error_growths[0].describe_error_growth());
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
        assert_eq!(
            (report.suspected_accuracy_losses().count(), report.error_growths[0].seeds_needed),
            (3, 10)
        );
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
