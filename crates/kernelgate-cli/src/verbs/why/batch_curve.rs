//! How much of its rate a batch keeps: cases that differ in the number of samples of a launch
//! alone, side by side.

use std::collections::BTreeMap;

use kernelgate::display::table::TextTable;
use kernelgate::display::time_text;
use serde_json::{Value, json};

/// A case whose launch computes a batch of samples.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchLaunchTime {
    /// Id of the case.
    pub case: String,
    pub samples: u64,
    /// A launch, nanoseconds.
    pub launch_ns: f64,
    /// Share of the case's limit, where one is known.
    pub of_limit: Option<f64>,
}

impl BatchLaunchTime {
    #[allow(clippy::cast_precision_loss)]
    fn samples_per_s(&self) -> f64 {
        self.samples as f64 * 1e9 / self.launch_ns.max(1.0)
    }
}

/// Two or more cases that differ in their number of samples alone, the smallest first.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchCurve {
    /// The case id with `*` in place of the batch size.
    pub cases: String,
    /// Each number once.
    pub batches: Vec<BatchLaunchTime>,
}

/// The curves of cases. The ids show which axis has the number of samples: it is a word of the
/// problem that ends in this number, and is the only difference.
pub fn batch_curves(times: &[BatchLaunchTime]) -> Vec<BatchCurve> {
    let mut by_pattern: BTreeMap<String, BTreeMap<u64, &BatchLaunchTime>> = BTreeMap::new();
    for of in times {
        for pattern in ids_with_batch_wildcard(&of.case, of.samples) {
            by_pattern.entry(pattern).or_default().entry(of.samples).or_insert(of);
        }
    }
    by_pattern.retain(|_, batches| batches.len() > 1);
    let curve = |(cases, batches): (String, BTreeMap<u64, &BatchLaunchTime>)| BatchCurve {
        cases,
        batches: batches.into_values().cloned().collect(),
    };
    by_pattern.into_iter().map(curve).collect()
}

/// The case id with `*` in place of the batch size, for each word that contains this number.
fn ids_with_batch_wildcard(case: &str, samples: u64) -> Vec<String> {
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
    fn best_samples_per_s(&self) -> f64 {
        self.batches.iter().map(BatchLaunchTime::samples_per_s).fold(0.0, f64::max)
    }

    /// Rate of a batch over the best one's, and time of the smallest batch over this one's for as
    /// many samples: how far the rate grows beyond the smallest's.
    fn batch_efficiency(&self, of: &BatchLaunchTime) -> (f64, f64) {
        let rate = of.samples_per_s();
        (rate / self.best_samples_per_s(), rate / self.batches[0].samples_per_s())
    }

    pub fn text(&self, shown: &dyn Fn(&TextTable) -> String) -> String {
        let mut table = TextTable::new(&[
            "samples",
            "a launch",
            "samples/s",
            "of the best rate",
            "of the smallest's rate",
            "of limit",
        ]);
        for of in &self.batches {
            let (of_best, of_smallest) = self.batch_efficiency(of);
            table.row(vec![
                of.samples.to_string(),
                time_text(of.launch_ns),
                format!("{:.0}", of.samples_per_s()),
                format!("{:.1}%", 100.0 * of_best),
                format!("{of_smallest:.2}x"),
                of.of_limit.map_or_else(|| "-".to_owned(), |of| format!("{:.1}%", 100.0 * of)),
            ]);
        }
        format!("batch efficiency of {}\n{}\n\n", self.cases, shown(&table))
    }

    /// Returns the numbers of a case as JSON, if it is in this curve.
    pub fn batch_json_of_case(&self, case: &str) -> Option<Value> {
        let batch = self.batches.iter().find(|batch| batch.case == case)?;
        let (of_best, of_smallest) = self.batch_efficiency(batch);
        Some(json!({
            "cases": self.cases,
            "samples": batch.samples,
            "launch_ns": batch.launch_ns,
            "samples_per_s": batch.samples_per_s(),
            "of_best_rate": of_best,
            "of_smallest_rate": of_smallest,
            "of_limit": batch.of_limit,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch_time(case: &str, samples: u64, launch_ns: f64) -> BatchLaunchTime {
        BatchLaunchTime { case: case.to_owned(), samples, launch_ns, of_limit: None }
    }

    #[test]
    fn cases_that_differ_only_in_their_samples_form_one_scaling_curve() {
        let times = [
            batch_time("net/step/w8_b32_t8/cuda/best/hot", 32, 2e6),
            batch_time("net/step/w8_b8_t8/cuda/best/hot", 8, 1e6),
            // These two cases differ in the number of steps and in the implementation, so no curve
            // joins them.
            batch_time("net/step/w8_b8_t4/cuda/best/hot", 8, 0.5e6),
            batch_time("net/step/w8_b32_t8/cpu", 32, 9e6),
        ];
        let curves = batch_curves(&times);
        assert_eq!(curves.len(), 1);
        let curve = &curves[0];
        assert_eq!(curve.cases, "net/step/w8_b*_t8/cuda/best/hot");
        let samples: Vec<u64> = curve.batches.iter().map(|batch_time| batch_time.samples).collect();
        assert_eq!(samples, [8, 32]);
        let smallest = curve.batch_json_of_case("net/step/w8_b8_t8/cuda/best/hot").unwrap();
        assert_eq!(smallest["samples_per_s"], 8000.0);
        assert_eq!(
            (&smallest["of_best_rate"], &smallest["of_smallest_rate"]),
            (&0.5.into(), &1.0.into())
        );
        assert_eq!(
            curve.batch_json_of_case("net/step/w8_b32_t8/cuda/best/hot").unwrap()["of_best_rate"],
            1.0
        );
        assert_eq!(curve.batch_json_of_case("net/step/w8_b8_t4/cuda/best/hot"), None);
        let text = curve.text(&|table| table.text_within(None));
        assert!(text.contains("50.0%") && text.contains("2.00x"), "{text}");
    }

    #[test]
    fn a_number_within_a_word_is_not_taken_as_a_number_of_samples() {
        assert_eq!(
            ids_with_batch_wildcard("a/b8_t8_x8y_n18_8/cpu", 8),
            ["a/b*_t8_x8y_n18_8/cpu", "a/b8_t*_x8y_n18_8/cpu"]
        );
        assert!(batch_curves(&[batch_time("a/b8", 8, 1.0), batch_time("a/b8", 8, 2.0)]).is_empty());
    }
}
