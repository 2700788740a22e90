//! Derives, from repeated anchor measurements of a calibration, by how much the anchor rates of
//! equal cards may differ.

use std::collections::BTreeMap;

use super::CalibrationComparisonRecord;
use kernelgate::measure::anchors::{AnchorRatesOfDevice, ShardAnchorRecord};
use kernelgate::stats::{mean, median};

/// Largest number of comparisons of a calibration's part for which the anchors are measured.
pub const MAX_ANCHOR_MEASUREMENTS_PER_PART: usize = 30;
/// Smallest number of degrees of freedom (anchor measurements beyond the first of each card) from
/// which an anchor tolerance is derived.
const MIN_DEGREES_OF_FREEDOM_FOR_ANCHORS: usize = 10;
/// The anchor tolerance is this many standard deviations, within which the anchors of 1000 shards
/// on equal cards stay in 99 % of merges.
const ANCHOR_TOLERANCE_STANDARD_DEVIATIONS: f64 = 8.0;
/// Smallest relative anchor tolerance that is recommended; differences below one per cent are below
/// the thresholds that comparisons can decide.
const MIN_ANCHOR_TOLERANCE: f64 = 0.01;

/// Returns the largest relative difference of anchor rates that the noise of one card explains;
/// `None` if too few anchors were measured.
///
/// The standard deviation of the logarithm of the anchor rates is computed for each card
/// separately, so that a slow card does not widen the tolerance.
pub fn anchor_tolerance_from_noise(comparisons: &[CalibrationComparisonRecord]) -> Option<f64> {
    let mut cards: BTreeMap<&str, Vec<AnchorRatesOfDevice>> = BTreeMap::new();
    for known in comparisons {
        if let Some(ShardAnchorRecord::Measured(anchors)) = known.anchors {
            cards.entry(&known.card_or_host_id).or_default().push(anchors);
        }
    }
    let memory = |anchors: &AnchorRatesOfDevice| Some(anchors.memory_bytes_per_s);
    let matmul = |anchors: &AnchorRatesOfDevice| anchors.matmul_flops_per_s;
    let deviations = [
        log_rate_deviation_within_cards(&cards, memory),
        log_rate_deviation_within_cards(&cards, matmul),
    ];
    let largest = deviations.into_iter().flatten().reduce(f64::max)?;
    let tolerance =
        (ANCHOR_TOLERANCE_STANDARD_DEVIATIONS * largest).exp_m1().max(MIN_ANCHOR_TOLERANCE);
    Some((tolerance * 1e3).ceil() / 1e3)
}

/// Returns the pooled standard deviation of the logarithm of an anchor rate within cards; `None` if
/// there are too few measurements.
fn log_rate_deviation_within_cards(
    cards: &BTreeMap<&str, Vec<AnchorRatesOfDevice>>,
    rate: impl Fn(&AnchorRatesOfDevice) -> Option<f64>,
) -> Option<f64> {
    let (mut squares, mut degrees) = (0.0, 0usize);
    for anchors in cards.values() {
        let logs: Vec<f64> = anchors.iter().filter_map(|it| Some(rate(it)?.ln())).collect();
        let mean = mean(&logs);
        squares += logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>();
        degrees += logs.len().saturating_sub(1);
    }
    (degrees >= MIN_DEGREES_OF_FREEDOM_FOR_ANCHORS).then(|| (squares / degrees as f64).sqrt())
}

/// Returns the median anchor rates of a calibration part's comparisons, or the first failure if no
/// comparison measured anchors.
pub fn median_anchors_of_comparisons(
    comparisons: &[CalibrationComparisonRecord],
) -> Option<ShardAnchorRecord> {
    let records = || comparisons.iter().filter_map(|known| known.anchors.as_ref());
    let measured: Vec<&AnchorRatesOfDevice> = records()
        .filter_map(|record| match record {
            ShardAnchorRecord::Measured(anchors) => Some(anchors),
            ShardAnchorRecord::NotMeasured(_) => None,
        })
        .collect();
    let Some(first) = measured.first() else { return records().next().cloned() };
    let memory: Vec<f64> = measured.iter().map(|it| it.memory_bytes_per_s).collect();
    let matmul: Vec<f64> = measured.iter().filter_map(|it| it.matmul_flops_per_s).collect();
    Some(ShardAnchorRecord::Measured(AnchorRatesOfDevice {
        power: first.power,
        memory_bytes_per_s: median(&memory),
        matmul_flops_per_s: (!matmul.is_empty()).then(|| median(&matmul)),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::calibration::tests::test_calibration;
    use kernelgate::measure::power::TimingPowerMode;

    /// Makes test comparisons on a card whose anchor rates alternate up and down by a relative
    /// amount.
    fn test_comparisons_on_card(
        card: &str,
        count: usize,
        rate: f64,
        share: f64,
    ) -> Vec<CalibrationComparisonRecord> {
        let mut comparisons = test_calibration(count, &[]).comparisons;
        for (number, known) in comparisons.iter_mut().enumerate() {
            let factor = if number % 2 == 0 { 1.0 + share } else { 1.0 - share };
            known.card_or_host_id = card.to_owned();
            known.anchors = Some(ShardAnchorRecord::Measured(AnchorRatesOfDevice {
                power: TimingPowerMode::SteadyLoad,
                memory_bytes_per_s: rate * factor,
                matmul_flops_per_s: Some(9e14),
            }));
        }
        comparisons
    }

    #[test]
    fn the_noise_of_one_card_sets_the_anchor_tolerance() {
        // The test's rates differ by 0.5 % each way with 21 degrees of freedom for 22 values: a
        // deviation of 0.51 %, times eight.
        let tolerance = |cards: &[Vec<CalibrationComparisonRecord>]| {
            anchor_tolerance_from_noise(&cards.concat())
        };
        assert_eq!(tolerance(&[test_comparisons_on_card("a", 22, 4e12, 0.005)]), Some(0.042));
        // In this test, a second card is 10 % slower and has equal noise.
        let both = [
            test_comparisons_on_card("a", 12, 4e12, 0.005),
            test_comparisons_on_card("b", 12, 3.6e12, 0.005),
        ];
        assert_eq!(tolerance(&both), Some(0.043));
        assert_eq!(
            tolerance(&[test_comparisons_on_card("a", 22, 4e12, 1e-6)]),
            Some(MIN_ANCHOR_TOLERANCE)
        );
        assert_eq!(tolerance(&[test_comparisons_on_card("a", 10, 4e12, 0.005)]), None);
        assert_eq!(tolerance(&[test_calibration(30, &[]).comparisons]), None);
    }

    #[test]
    fn a_part_of_a_calibration_has_the_median_of_its_anchor_rates() {
        let mut comparisons = test_comparisons_on_card("a", 3, 4e12, 0.0);
        comparisons[0].anchors = Some(ShardAnchorRecord::NotMeasured("no memory".to_owned()));
        let Some(ShardAnchorRecord::Measured(anchors)) =
            median_anchors_of_comparisons(&comparisons)
        else {
            panic!("two were measured");
        };
        assert_eq!(anchors.memory_bytes_per_s, 4e12);
        assert_eq!(median_anchors_of_comparisons(&comparisons[..1]), comparisons[0].anchors);
        assert_eq!(median_anchors_of_comparisons(&test_calibration(1, &[]).comparisons), None);
    }
}
