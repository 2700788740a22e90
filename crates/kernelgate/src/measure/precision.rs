//! How well the time of a case at the power cap is known, from windows of its samples.
//!
//! The clock of a capped card wanders, and some cards lower it for some tenths of a second now and
//! then. The median hardly moves by such dips, so its interval decides whether a case is settled:
//! by the order of the windows, as if they were independent. The mean moves by them, and successive
//! windows depend on each other. The method of batch means divides them into a few long parts:
//! their means hardly depend on each other, and show by their spread what another run would give. A
//! clock that wanders more slowly than the samples last cannot be seen. Deliberately absent: how
//! long samples go on, what a case without precision is called.

use crate::stats::binomial::median_interval;
use crate::stats::mean;

/// Probability that the interval of a settled case's median misses it. Windows too few for that
/// must all lie as close together.
const MEDIAN_ERROR: f64 = 0.05;
/// Largest width of that interval, relative to its lower end.
const MAX_MEDIAN_WIDTH: f64 = 0.015;
/// Numbers of equal parts into which the windows are divided, and the 99.5 % quantile of Student's
/// distribution for as many means. Parts of different lengths show a clock that wanders at
/// different speeds.
const PARTS_OF_SAMPLES: [(usize, f64); 2] = [(4, 5.84), (8, 3.50)];
/// Largest distance of an end of [`mean_interval`] from the mean, relative to the mean.
const MAX_MEAN_DISTANCE: f64 = 0.5;

/// Whether the windows give a median that another run would repeat: its 95 % interval is at most
/// 1.5 % wide. All windows must lie as close together if they are too few for that interval.
pub fn median_is_precise(windows_ns: &[f64]) -> bool {
    let interval =
        median_interval(windows_ns, MEDIAN_ERROR).or_else(|| smallest_and_largest(windows_ns));
    interval.is_none_or(|[low, high]| high - low <= MAX_MEDIAN_WIDTH * low)
}

/// Range in which the median of another run may lie: that of the windows and of the mean's
/// interval, and around it half the width that the interval of a settled median may have. Absent
/// without windows.
pub fn range_of_medians(windows_ns: &[f64]) -> Option<[f64; 2]> {
    let around_ns = mean_interval(windows_ns).into_iter().flatten();
    let [low, high] =
        smallest_and_largest(&windows_ns.iter().copied().chain(around_ns).collect::<Vec<_>>())?;
    Some([low * (1.0 - 0.5 * MAX_MEDIAN_WIDTH), high * (1.0 + 0.5 * MAX_MEDIAN_WIDTH)])
}

/// The smallest and the largest of some values; absent without values.
pub fn smallest_and_largest(values: &[f64]) -> Option<[f64; 2]> {
    let low = values.iter().copied().reduce(f64::min)?;
    Some([low, values.iter().copied().reduce(f64::max)?])
}

/// The 99 % interval of the mean; absent for fewer than four windows.
fn mean_interval(windows_ns: &[f64]) -> Option<[f64; 2]> {
    let distance = relative_half_width(windows_ns)?.min(MAX_MEAN_DISTANCE);
    let mean_ns = mean(windows_ns);
    Some([mean_ns * (1.0 - distance), mean_ns * (1.0 + distance)])
}

/// Half-width of the 99 % interval of the mean, relative to the mean: the largest by 4 and by 8
/// parts; absent for fewer than four windows.
fn relative_half_width(windows_ns: &[f64]) -> Option<f64> {
    let half_width = |(parts, quantile): (usize, f64)| {
        let windows_per_part = windows_ns.len() / parts;
        if windows_per_part == 0 {
            return None;
        }
        let last = &windows_ns[windows_ns.len() - parts * windows_per_part..];
        let means: Vec<f64> = last.chunks_exact(windows_per_part).map(mean).collect();
        Some(quantile * standard_error(&means) / mean(last))
    };
    PARTS_OF_SAMPLES.into_iter().filter_map(half_width).reduce(f64::max)
}

/// Standard error of the mean of independent values.
fn standard_error(values: &[f64]) -> f64 {
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
    fn windows_that_drift_apart_are_not_precise() {
        assert!(median_is_precise(&[]) && median_is_precise(&[1.0, 1.01]));
        assert!(!median_is_precise(&[1.0, 1.01, 1.016]));
        assert!(median_is_precise(&[1.0, 1.002, 0.998, 1.001]));
        assert!(!median_is_precise(&[1.0, 1.005, 1.01, 1.005, 1.016]));
        let alternating = [1.0, 1.03].repeat(8);
        assert!(!median_is_precise(&alternating), "no value lies in the middle");
        assert_eq!((mean_interval(&[1.0, 2.0, 1.0]), range_of_medians(&[])), (None, None));
        assert_eq!(range_of_medians(&[1.0, 2.0]), Some([0.9925, 2.015]));
    }

    /// Some cards lower the clock of a capped case by a sixth for two tenths of a second.
    #[test]
    fn a_dip_of_the_clock_leaves_the_median_where_it_was() {
        let with_dip = |windows: usize, dipped: usize| {
            let mut windows_ns = [1.0, 1.01].repeat(windows / 2);
            windows_ns[3..3 + dipped].fill(1.18);
            windows_ns
        };
        assert!(!median_is_precise(&with_dip(6, 1)), "six windows are too few for a dip");
        assert!(median_is_precise(&with_dip(12, 2)) && !median_is_precise(&with_dip(12, 3)));
        assert!(mean_interval(&with_dip(12, 2)).is_some_and(|[low, high]| high > 1.02 * low));
    }

    /// How runs of 4 to 12 windows end on a card whose clock wanders by `deviation` around its
    /// mean, with this correlation between successive windows: shares of runs whose median is
    /// precise, whose median is called precise and is wrong by more than 1 %, and whose range
    /// misses the truth.
    fn outcomes_on_wandering_clock(deviation: f64, correlation: f64) -> [f64; 3] {
        const RUNS: usize = 2000;
        const MOST_WINDOWS: usize = 12;
        let normals = normal_values(47, "wandering clock", RUNS * (MOST_WINDOWS + 1));
        let (mut precise, mut wrong, mut missed) = (0.0, 0.0, 0.0);
        for normals in normals.chunks_exact(MOST_WINDOWS + 1) {
            let mut away = deviation * f64::from(normals[0]);
            let mut windows = Vec::new();
            for &normal in &normals[1..] {
                windows.push(1.0 + away);
                if windows.len() >= 4 && median_is_precise(&windows) {
                    break;
                }
                let fresh = (1.0 - correlation * correlation).sqrt() * f64::from(normal);
                away = correlation * away + deviation * fresh;
            }
            let [low, high] = range_of_medians(&windows).unwrap();
            if median_is_precise(&windows) {
                precise += 1.0;
                wrong += f64::from(u8::from((stats::median(&windows) - 1.0).abs() > 0.01));
            } else if !(low..=high).contains(&1.0) {
                missed += 1.0;
            }
        }
        [precise, wrong, missed].map(|count| count / RUNS as f64)
    }

    #[test]
    fn a_wandering_clock_is_settled_only_where_its_median_is_known() {
        for (deviation, correlation, least_precise, most_wrong) in [
            (0.003, 0.5, 0.99, 0.001),
            (0.005, 0.5, 0.99, 0.01),
            (0.01, 0.5, 0.7, 0.1),
            (0.03, 0.6, 0.0, 0.05),
        ] {
            let [precise, wrong, missed] = outcomes_on_wandering_clock(deviation, correlation);
            println!(
                "{deviation} {correlation}: {precise} precise, {wrong} wrong, {missed} missed"
            );
            assert!(precise >= least_precise, "{deviation} {correlation}: {precise}");
            assert!(wrong <= most_wrong, "{deviation} {correlation}: {wrong} are wrong by 1 %");
            assert!(missed <= 0.01, "{deviation} {correlation}: {missed} ranges miss the truth");
        }
    }

    /// A clock that stays where it is for half a second looks steady for a tenth.
    #[test]
    fn a_slowly_wandering_clock_is_detected_in_some_of_the_runs() {
        let [precise, wrong, missed] = outcomes_on_wandering_clock(0.03, 0.9);
        println!("{precise} precise, {wrong} wrong, {missed} missed");
        assert!(precise < 0.35 && missed < 0.1);
    }
}
