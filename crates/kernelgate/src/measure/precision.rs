//! Estimates how precisely the launch time of a case at the power cap is known, from time windows
//! of its samples.
//!
//! The SM clock of a GPU at its power cap wanders, and some GPUs lower it for some tenths of a
//! second now and then. Short dips of the SM clock hardly move the median, so the confidence
//! interval of the median decides whether a case is settled; windows are treated as independent.
//! Clock dips move the mean, and the times of successive windows depend on each other. The method
//! of batch means therefore divides the windows into a few long parts, whose means are nearly
//! independent; their spread predicts other runs. A wandering of the SM clock that is slower than
//! the duration of the samples cannot be detected. This module neither decides how long samples are
//! taken nor how an imprecise case is reported.

use crate::stats::binomial::confidence_interval_of_median;
use crate::stats::mean;

/// Probability that the confidence interval of the median does not contain the true median. If
/// there are too few windows for the median's confidence interval, all windows must lie within the
/// allowed width.
const MEDIAN_INTERVAL_MISS_PROBABILITY: f64 = 0.05;
/// Largest width of the median's confidence interval in a settled case, relative to its lower end.
const MAX_RELATIVE_MEDIAN_INTERVAL_WIDTH: f64 = 0.015;
/// Numbers of equal parts for the batch means, each with the 99.5 % quantile of Student's t
/// distribution for as many means. Parts of different lengths detect a clock that wanders slowly or
/// fast.
const BATCH_COUNTS_AND_T_QUANTILES: [(usize, f64); 2] = [(4, 5.84), (8, 3.50)];
/// Largest distance of an end of [`batch_means_interval_of_mean`] from the mean, as a share of the
/// mean.
const MAX_RELATIVE_MEAN_INTERVAL_DISTANCE: f64 = 0.5;

/// Returns whether another run would repeat the median of these window times: the 95 % confidence
/// interval of the median is at most 1.5 % wide. If there are too few windows for the interval,
/// smallest and largest window must differ by at most 1.5 %.
pub fn is_median_of_windows_precise(windows_ns: &[f64]) -> bool {
    let interval = confidence_interval_of_median(windows_ns, MEDIAN_INTERVAL_MISS_PROBABILITY)
        .or_else(|| min_and_max(windows_ns));
    interval.is_none_or(|[low, high]| high - low <= MAX_RELATIVE_MEDIAN_INTERVAL_WIDTH * low)
}

/// Returns the range in which the median of another run may lie: the windows and the mean's 99 %
/// interval, widened by half the interval width of a settled case. Absent without windows.
pub fn range_of_medians_of_other_runs(windows_ns: &[f64]) -> Option<[f64; 2]> {
    let around_ns = batch_means_interval_of_mean(windows_ns).into_iter().flatten();
    let [low, high] =
        min_and_max(&windows_ns.iter().copied().chain(around_ns).collect::<Vec<_>>())?;
    Some([
        low * (1.0 - 0.5 * MAX_RELATIVE_MEDIAN_INTERVAL_WIDTH),
        high * (1.0 + 0.5 * MAX_RELATIVE_MEDIAN_INTERVAL_WIDTH),
    ])
}

/// Returns the smallest and the largest of the values; `None` without values.
pub fn min_and_max(values: &[f64]) -> Option<[f64; 2]> {
    let low = values.iter().copied().reduce(f64::min)?;
    Some([low, values.iter().copied().reduce(f64::max)?])
}

/// Returns the 99 % confidence interval of the mean by batch means; `None` for fewer than four
/// windows.
fn batch_means_interval_of_mean(windows_ns: &[f64]) -> Option<[f64; 2]> {
    let distance =
        relative_half_width_of_mean_interval(windows_ns)?.min(MAX_RELATIVE_MEAN_INTERVAL_DISTANCE);
    let mean_ns = mean(windows_ns);
    Some([mean_ns * (1.0 - distance), mean_ns * (1.0 + distance)])
}

/// Returns the half-width of the mean's 99 % confidence interval, relative to the mean: the larger
/// by 4 and by 8 batches; `None` for fewer than four windows.
fn relative_half_width_of_mean_interval(windows_ns: &[f64]) -> Option<f64> {
    let half_width = |(parts, quantile): (usize, f64)| {
        let windows_per_part = windows_ns.len() / parts;
        if windows_per_part == 0 {
            return None;
        }
        let last = &windows_ns[windows_ns.len() - parts * windows_per_part..];
        let means: Vec<f64> = last.chunks_exact(windows_per_part).map(mean).collect();
        Some(quantile * standard_error_of_mean(&means) / mean(last))
    };
    BATCH_COUNTS_AND_T_QUANTILES.into_iter().filter_map(half_width).reduce(f64::max)
}

/// Returns the standard error of the mean of independent values.
fn standard_error_of_mean(values: &[f64]) -> f64 {
    let (mean, count) = (mean(values), values.len() as f64);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (count - 1.0) / count).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats;
    use kernelgate_numerics::random::normal_values;

    #[test]
    fn windows_that_drift_apart_have_no_precise_median() {
        assert!(is_median_of_windows_precise(&[]) && is_median_of_windows_precise(&[1.0, 1.01]));
        assert!(!is_median_of_windows_precise(&[1.0, 1.01, 1.016]));
        assert!(is_median_of_windows_precise(&[1.0, 1.002, 0.998, 1.001]));
        assert!(!is_median_of_windows_precise(&[1.0, 1.005, 1.01, 1.005, 1.016]));
        let alternating = [1.0, 1.03].repeat(8);
        assert!(!is_median_of_windows_precise(&alternating), "no value lies in the middle");
        assert_eq!(
            (batch_means_interval_of_mean(&[1.0, 2.0, 1.0]), range_of_medians_of_other_runs(&[])),
            (None, None)
        );
        assert_eq!(range_of_medians_of_other_runs(&[1.0, 2.0]), Some([0.9925, 2.015]));
    }

    /// Some GPUs lower the SM clock of a case at the power cap by a sixth for two tenths of a
    /// second.
    #[test]
    fn a_clock_dip_does_not_move_the_median() {
        let with_dip = |windows: usize, dipped: usize| {
            let mut windows_ns = [1.0, 1.01].repeat(windows / 2);
            windows_ns[3..3 + dipped].fill(1.18);
            windows_ns
        };
        assert!(
            !is_median_of_windows_precise(&with_dip(6, 1)),
            "six windows are too few for a dip"
        );
        assert!(
            is_median_of_windows_precise(&with_dip(12, 2))
                && !is_median_of_windows_precise(&with_dip(12, 3))
        );
        assert!(
            batch_means_interval_of_mean(&with_dip(12, 2))
                .is_some_and(|[low, high]| high > 1.02 * low)
        );
    }

    /// Simulates runs of 4 to 12 windows on a clock that wanders by `deviation`. Returns shares of
    /// runs: median precise; precise but wrong by more than 1 %; range misses the truth.
    fn simulated_outcome_shares_on_wandering_clock(deviation: f64, correlation: f64) -> [f64; 3] {
        const SIMULATED_RUNS: usize = 2000;
        const MAX_SIMULATED_WINDOWS: usize = 12;
        let normals =
            normal_values(47, "wandering clock", SIMULATED_RUNS * (MAX_SIMULATED_WINDOWS + 1));
        let (mut precise, mut wrong, mut missed) = (0.0, 0.0, 0.0);
        for normals in normals.chunks_exact(MAX_SIMULATED_WINDOWS + 1) {
            let mut away = deviation * f64::from(normals[0]);
            let mut windows = Vec::new();
            for &normal in &normals[1..] {
                windows.push(1.0 + away);
                if windows.len() >= 4 && is_median_of_windows_precise(&windows) {
                    break;
                }
                let fresh = (1.0 - correlation * correlation).sqrt() * f64::from(normal);
                away = correlation * away + deviation * fresh;
            }
            let [low, high] = range_of_medians_of_other_runs(&windows).unwrap();
            if is_median_of_windows_precise(&windows) {
                precise += 1.0;
                wrong += f64::from(u8::from((stats::median(&windows) - 1.0).abs() > 0.01));
            } else if !(low..=high).contains(&1.0) {
                missed += 1.0;
            }
        }
        [precise, wrong, missed].map(|count| count / SIMULATED_RUNS as f64)
    }

    #[test]
    fn a_wandering_clock_is_settled_only_if_its_median_is_known() {
        for (deviation, correlation, least_precise, most_wrong) in [
            (0.003, 0.5, 0.99, 0.001),
            (0.005, 0.5, 0.99, 0.01),
            (0.01, 0.5, 0.7, 0.1),
            (0.03, 0.6, 0.0, 0.05),
        ] {
            let [precise, wrong, missed] =
                simulated_outcome_shares_on_wandering_clock(deviation, correlation);
            println!(
                "{deviation} {correlation}: {precise} precise, {wrong} wrong, {missed} missed"
            );
            assert!(precise >= least_precise, "{deviation} {correlation}: {precise}");
            assert!(wrong <= most_wrong, "{deviation} {correlation}: {wrong} are wrong by 1 %");
            assert!(missed <= 0.01, "{deviation} {correlation}: {missed} ranges miss the truth");
        }
    }

    /// A clock that stays constant for half a second seems steady in windows of a tenth of a
    /// second.
    #[test]
    fn a_slowly_wandering_clock_is_detected_in_some_runs() {
        let [precise, wrong, missed] = simulated_outcome_shares_on_wandering_clock(0.03, 0.9);
        println!("{precise} precise, {wrong} wrong, {missed} missed");
        assert!(precise < 0.35 && missed < 0.1);
    }
}
