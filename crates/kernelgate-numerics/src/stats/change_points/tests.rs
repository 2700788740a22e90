use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal, StudentT};

use super::*;

/// A twentieth slower.
const LOG_OF_FIVE_PERCENT_STEP: f64 = 0.048_790_164_169_432;

fn seeded_noise_values(seed: u64, count: usize, draw: impl Fn(&mut ChaCha8Rng) -> f64) -> Vec<f64> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| 0.01 * draw(&mut random)).collect()
}

fn normal_noise_values(seed: u64, count: usize) -> Vec<f64> {
    seeded_noise_values(seed, count, |random| StandardNormal.sample(random))
}

/// Noise from Student's t distribution with three degrees of freedom, scaled to a standard
/// deviation of 0.01.
fn heavy_tailed_noise_values(seed: u64, count: usize) -> Vec<f64> {
    seeded_noise_values(seed, count, |random| {
        StudentT::new(3.0).unwrap().sample(random) / 3f64.sqrt()
    })
}

fn detect_changes_of_one_percent(values: &[f64]) -> Vec<DetectedLevelChange> {
    detect_level_changes(values, 0.01, 0.001)
}

/// Returns whether a 5 % step at index `at` is detected within one index of its place with at most
/// five values after it.
fn detects_step_within_five_values(mut values: Vec<f64>, at: usize) -> bool {
    values[at..].iter_mut().for_each(|value| *value += LOG_OF_FIVE_PERCENT_STEP);
    (MIN_VALUES_BETWEEN_LEVEL_CHANGES..=5).any(|after| {
        let changes = detect_changes_of_one_percent(&values[..at + after]);
        changes.iter().any(|change| {
            change.first_index_after_change.abs_diff(at) <= 1
                && change.level_shift > LOG_OF_FIVE_PERCENT_STEP / 2.0
        })
    })
}

/// Returns whether any change is detected in values without a change, if the sequence is tested
/// after each new value.
fn has_false_alarm_at_any_length(values: &[f64]) -> bool {
    (MIN_VALUES_TO_SEARCH_LEVEL_CHANGES..=values.len())
        .any(|count| !detect_changes_of_one_percent(&values[..count]).is_empty())
}

#[test]
fn level_changes_are_found_with_their_place_and_size() {
    let mut values = normal_noise_values(1, 60);
    values[20..].iter_mut().for_each(|value| *value += 0.1);
    values[45..].iter_mut().for_each(|value| *value -= 0.04);
    let changes = detect_changes_of_one_percent(&values);
    assert_eq!(changes.len(), 2, "{changes:?}");
    for (change, (at, size)) in changes.iter().zip([(20, 0.1), (45, -0.04)]) {
        assert!(change.first_index_after_change.abs_diff(at) <= 1, "{change:?}");
        assert!(change.shift_lower_bound < size && size < change.shift_upper_bound, "{change:?}");
        assert!(
            (change.level_shift - size).abs() < 0.01
                && change.shift_upper_bound - change.shift_lower_bound < 0.03
        );
        assert!(
            change.rank_sum_confidence > 0.99
                && change.cut_gain_in_noise_deviations > MIN_CUT_GAIN_IN_NOISE_DEVIATIONS,
            "{change:?}"
        );
    }
}

#[test]
fn outliers_and_small_changes_are_not_reported_as_level_changes() {
    let mut values = normal_noise_values(2, 60);
    for at in [10, 30, 31, 59] {
        values[at] += 1.0;
    }
    assert_eq!(detect_changes_of_one_percent(&values), []);
    let mut values: Vec<f64> =
        normal_noise_values(3, 60).iter().map(|value| value / 20.0).collect();
    values[30..].iter_mut().for_each(|value| *value += 0.008);
    assert_eq!(detect_changes_of_one_percent(&values), []);
    assert_eq!(detect_level_changes(&values, 0.005, 0.0)[0].first_index_after_change, 30);
    assert_eq!(detect_changes_of_one_percent(&[1.0; 100]), []);
    assert_eq!(detect_changes_of_one_percent(&[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]), [], "too few");
}

/// Measures the detection rates that the documentation states; `KERNELGATE_SIMULATIONS` sets the
/// number of simulated sequences (docs/concepts/evidence-decision.md has the rates for 4,000).
#[test]
fn a_five_deviation_step_is_found_within_five_values() {
    #[allow(clippy::disallowed_methods, reason = "a variable of this test alone")]
    let count = std::env::var("KERNELGATE_SIMULATIONS").ok().and_then(|it| it.parse().ok());
    let count: u64 = count.unwrap_or(100);
    for (name, noise) in [
        ("normal", normal_noise_values as fn(u64, usize) -> _),
        ("wide", heavy_tailed_noise_values),
    ] {
        let share = |of: &dyn Fn(u64) -> bool| {
            (0..count).filter(|seed| of(*seed)).count() as f64 / count as f64
        };
        let missed = share(&|seed| !detects_step_within_five_values(noise(seed, 45), 40));
        let alarms = share(&|seed| has_false_alarm_at_any_length(&noise(seed, 100)));
        println!("{name}: {missed} of steps missed, {alarms} of hundreds with a false alarm");
        let slack = |rate: f64| rate + 3.0 * (rate / count as f64).sqrt();
        assert!(missed <= slack(0.05), "{name}: {missed}");
        assert!(alarms <= slack(0.01), "{name}: {alarms}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn detected_change_places_do_not_depend_on_unit_or_sign(
        seed in any::<u64>(),
        at in 10usize..50,
        scale in 0.1f64..10.0,
        level in -5.0f64..5.0,
    ) {
        let mut values = normal_noise_values(seed, 60);
        values[at..].iter_mut().for_each(|value| *value += 0.06);
        let places = |values: &[f64]| -> Vec<usize> {
            detect_level_changes(values, 0.0, 0.0).iter().map(|change| change.first_index_after_change).collect()
        };
        let expected = places(&values);
        let scaled: Vec<f64> = values.iter().map(|value| level + scale * value).collect();
        prop_assert_eq!(&places(&scaled), &expected);
        let negated: Vec<f64> = values.iter().map(|value| -value).collect();
        prop_assert_eq!(&places(&negated), &expected);
    }

    /// Compares the deviation sums that two heaps compute with sums computed from their definition.
    #[test]
    fn segment_costs_are_sums_of_deviations_from_the_median(values in prop::collection::vec(-9.0f64..9.0, 1..30)) {
        let ranked = SequenceWithRanks::rank_values(&values);
        for (length, cost) in ranked.absolute_deviation_sums_from(0).enumerate() {
            let part = &values[..=length];
            let expected: f64 = part.iter().map(|value| (value - median(part)).abs()).sum();
            prop_assert!((cost - expected).abs() < 1e-9, "{} {}", cost, expected);
        }
    }
}
