//! Batch curves: how the rate (samples per second) grows with the batch size, over cases that
//! differ only in the number of samples of a launch.

use std::collections::BTreeMap;

use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::time_text;
use serde_json::{Value, json};

/// A case whose launch computes a batch of samples, with the time of one launch.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchLaunchTime {
    /// Id of the case.
    pub case_id: String,
    pub samples_per_launch: u64,
    /// A launch, nanoseconds.
    pub launch_ns: f64,
    /// Share of the hardware limit that the case reaches, 0 to 1; `None` if the limit is unknown.
    pub share_of_limit: Option<f64>,
}

impl BatchLaunchTime {
    #[allow(clippy::cast_precision_loss)]
    fn samples_per_second(&self) -> f64 {
        self.samples_per_launch as f64 * 1e9 / self.launch_ns.max(1.0)
    }
}

/// Two or more cases that differ only in the number of samples of a launch, in the order of this
/// number.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchCurve {
    /// Id of the cases, with `*` in place of the number of samples.
    pub case_id_pattern: String,
    /// Each number once.
    pub batches: Vec<BatchLaunchTime>,
}

/// Groups cases that differ only in their number of samples into batch curves. The number of
/// samples is found in a case id as the only differing word that is a name with this number at its
/// end, such as `b16`.
pub fn batch_curves_of_cases(times: &[BatchLaunchTime]) -> Vec<BatchCurve> {
    let mut by_pattern: BTreeMap<String, BTreeMap<u64, &BatchLaunchTime>> = BTreeMap::new();
    for of in times {
        for pattern in ids_with_samples_as_wildcard(&of.case_id, of.samples_per_launch) {
            by_pattern.entry(pattern).or_default().entry(of.samples_per_launch).or_insert(of);
        }
    }
    by_pattern.retain(|_, batches| batches.len() > 1);
    let curve = |(cases, batches): (String, BTreeMap<u64, &BatchLaunchTime>)| BatchCurve {
        case_id_pattern: cases,
        batches: batches.into_values().cloned().collect(),
    };
    by_pattern.into_iter().map(curve).collect()
}

/// Case ids with `*` in place of the number of samples, one id for each word that ends in this
/// number.
fn ids_with_samples_as_wildcard(case: &str, samples: u64) -> Vec<String> {
    let number = samples.to_string();
    let separators = |at: char| at == '_' || at == '/';
    let mut patterns = Vec::new();
    let mut start = 0;
    for word in case.split(separators) {
        let name = word.strip_suffix(&number);
        let is_name = |name: &str| !name.is_empty() && name.chars().all(char::is_alphabetic);
        if let Some(name) = name.filter(|name| is_name(name)) {
            let at = start + name.len();
            patterns.push(format!("{}*{}", &case[..at], &case[at + number.len()..]));
        }
        start += word.len() + 1;
    }
    patterns
}

impl BatchCurve {
    fn best_samples_per_second(&self) -> f64 {
        self.batches.iter().map(BatchLaunchTime::samples_per_second).fold(0.0, f64::max)
    }

    /// Two ratios of the rate (samples per second) of a batch: over the best rate of the curve, and
    /// over the rate of the smallest batch.
    fn rate_ratios_to_best_and_smallest_batch(&self, of: &BatchLaunchTime) -> (f64, f64) {
        let rate = of.samples_per_second();
        (rate / self.best_samples_per_second(), rate / self.batches[0].samples_per_second())
    }

    pub fn batch_curve_table_with_heading(
        &self,
        shown: &dyn Fn(&AlignedTextTable) -> String,
    ) -> String {
        let mut table = AlignedTextTable::new(&[
            "samples",
            "a launch",
            "samples/s",
            "of the best rate",
            "of the smallest's rate",
            "of limit",
        ]);
        for of in &self.batches {
            let (of_best, of_smallest) = self.rate_ratios_to_best_and_smallest_batch(of);
            table.add_row(vec![
                of.samples_per_launch.to_string(),
                time_text(of.launch_ns),
                format!("{:.0}", of.samples_per_second()),
                format!("{:.1}%", 100.0 * of_best),
                format!("{of_smallest:.2}x"),
                of.share_of_limit
                    .map_or_else(|| "-".to_owned(), |of| format!("{:.1}%", 100.0 * of)),
            ]);
        }
        format!("batch efficiency of {}\n{}\n\n", self.case_id_pattern, shown(&table))
    }

    /// The numbers of the case as JSON; `None` if the case is not on this curve.
    pub fn batch_numbers_of_case_as_json(&self, case: &str) -> Option<Value> {
        let batch = self.batches.iter().find(|batch| batch.case_id == case)?;
        let (of_best, of_smallest) = self.rate_ratios_to_best_and_smallest_batch(batch);
        Some(json!({
            "cases": self.case_id_pattern,
            "samples": batch.samples_per_launch,
            "launch_ns": batch.launch_ns,
            "samples_per_s": batch.samples_per_second(),
            "of_best_rate": of_best,
            "of_smallest_rate": of_smallest,
            "of_limit": batch.share_of_limit,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch_launch_time(case: &str, samples: u64, launch_ns: f64) -> BatchLaunchTime {
        BatchLaunchTime {
            case_id: case.to_owned(),
            samples_per_launch: samples,
            launch_ns,
            share_of_limit: None,
        }
    }

    #[test]
    fn cases_that_differ_only_in_their_samples_form_one_scaling_curve() {
        let times = [
            batch_launch_time("net/step/w8_b32_t8/cuda/best/hot", 32, 2e6),
            batch_launch_time("net/step/w8_b8_t8/cuda/best/hot", 8, 1e6),
            // These two cases differ both in the number of steps and in the implementation, so no
            // batch curve joins them.
            batch_launch_time("net/step/w8_b8_t4/cuda/best/hot", 8, 0.5e6),
            batch_launch_time("net/step/w8_b32_t8/cpu", 32, 9e6),
        ];
        let curves = batch_curves_of_cases(&times);
        assert_eq!(curves.len(), 1);
        let curve = &curves[0];
        assert_eq!(curve.case_id_pattern, "net/step/w8_b*_t8/cuda/best/hot");
        let samples: Vec<u64> =
            curve.batches.iter().map(|batch_time| batch_time.samples_per_launch).collect();
        assert_eq!(samples, [8, 32]);
        let smallest =
            curve.batch_numbers_of_case_as_json("net/step/w8_b8_t8/cuda/best/hot").unwrap();
        assert_eq!(smallest["samples_per_s"], 8000.0);
        assert_eq!(
            (&smallest["of_best_rate"], &smallest["of_smallest_rate"]),
            (&0.5.into(), &1.0.into())
        );
        assert_eq!(
            curve.batch_numbers_of_case_as_json("net/step/w8_b32_t8/cuda/best/hot").unwrap()["of_best_rate"],
            1.0
        );
        assert_eq!(curve.batch_numbers_of_case_as_json("net/step/w8_b8_t4/cuda/best/hot"), None);
        let text =
            curve.batch_curve_table_with_heading(&|table| table.aligned_text_for_terminal(None));
        assert!(text.contains("50.0%") && text.contains("2.00x"), "{text}");
    }

    #[test]
    fn a_number_within_a_word_is_not_taken_as_a_number_of_samples() {
        assert_eq!(
            ids_with_samples_as_wildcard("a/b8_t8_x8y_n18_8/cpu", 8),
            ["a/b*_t8_x8y_n18_8/cpu", "a/b8_t*_x8y_n18_8/cpu"]
        );
        assert!(
            batch_curves_of_cases(&[
                batch_launch_time("a/b8", 8, 1.0),
                batch_launch_time("a/b8", 8, 2.0)
            ])
            .is_empty()
        );
    }
}
