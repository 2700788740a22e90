//! Splits a case id into problem, implementation and cache state, for records that do not contain
//! these parts.

use std::collections::BTreeMap;

/// The parts of a case id after its workload.
#[derive(Debug, PartialEq, Eq)]
pub struct CaseIdParts<'a> {
    /// The problem: "s1024_d64_full_f32".
    pub problem_id: &'a str,
    /// The implementation: "cuda/flash_mma"; empty if the case id cannot be divided into parts.
    pub implementation: &'a str,
    /// The cache state: "hot" or "cold"; empty if the id does not have this form.
    pub cache_state: &'a str,
}

impl<'a> CaseIdParts<'a> {
    pub fn split_case_id(id: &'a str, workload: &str) -> CaseIdParts<'a> {
        let rest = id.strip_prefix(workload).and_then(|rest| rest.strip_prefix('/')).unwrap_or(id);
        let cached = rest.rsplit_once('/').filter(|(_, cache)| ["hot", "cold"].contains(cache));
        let parts = cached.and_then(|(rest, cache)| {
            let (problem, implementation) = rest.split_once('/')?;
            Some(Self { problem_id: problem, implementation, cache_state: cache })
        });
        parts.unwrap_or(Self { problem_id: rest, implementation: "", cache_state: "" })
    }
}

/// The axes of a problem with their values: numbers such as sizes, and words such as the data type.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProblemAxisValues {
    /// Numbers by axis.
    pub numeric_axes: BTreeMap<String, u64>,
    /// Axis values that are words, by the axis's name or by their place in the id.
    pub word_axes: BTreeMap<String, String>,
}

/// Prefixes of words in ids that end in digits but name a data type, such as `f32`, and not a
/// numeric axis.
const DATA_TYPE_PREFIXES: [&str; 8] = ["f", "bf", "tf", "fp", "int", "uint", "i", "u"];

impl ProblemAxisValues {
    /// Makes the axis values from the texts in a run record.
    pub fn from_record_axes(axes: &BTreeMap<String, String>) -> ProblemAxisValues {
        let mut all = Self::default();
        for (name, value) in axes {
            match value.parse() {
                Ok(number) => drop(all.numeric_axes.insert(name.clone(), number)),
                Err(_) => drop(all.word_axes.insert(name.clone(), value.clone())),
            }
        }
        all
    }

    /// Parses axis values from the problem's part of a case id: a number follows its axis's name
    /// (`s512`), a word stands alone (`causal`).
    pub fn from_problem_in_case_id(problem: &str) -> ProblemAxisValues {
        let mut all = Self::default();
        for (place, word) in problem.split('_').enumerate() {
            let digits = word.find(|c: char| c.is_ascii_digit()).unwrap_or(word.len());
            let (name, number) = word.split_at(digits);
            let number = number.parse::<u64>().ok().filter(|_| !number.starts_with('0'));
            match number.filter(|_| !name.is_empty() && !DATA_TYPE_PREFIXES.contains(&name)) {
                Some(number) => drop(all.numeric_axes.insert(name.to_owned(), number)),
                None => drop(all.word_axes.insert(place.to_string(), word.to_owned())),
            }
        }
        all
    }

    /// Returns the axis values without these numeric axes: what problems that differ only in these
    /// axes have in common.
    pub fn without_numeric_axes(&self, axes: &[&str]) -> Self {
        let mut rest = self.clone();
        rest.numeric_axes.retain(|axis, _| !axes.contains(&axis.as_str()));
        rest
    }
}

// Formats the axis values as text: "d128 causal bf16".
impl std::fmt::Display for ProblemAxisValues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers = self.numeric_axes.iter().map(|(name, number)| format!("{name}{number}"));
        let all: Vec<String> = numbers.chain(self.word_axes.values().cloned()).collect();
        f.write_str(&all.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_id_is_divided_into_its_parts() {
        let parts_of = |id| {
            let CaseIdParts { problem_id: problem, implementation, cache_state: cache } =
                CaseIdParts::split_case_id(id, "attention/forward");
            [problem, implementation, cache]
        };
        let id = "attention/forward/s64_d8_full_f32/cuda/flash_mma/hot";
        assert_eq!(parts_of(id), ["s64_d8_full_f32", "cuda/flash_mma", "hot"]);
        assert_eq!(parts_of("a group/a function/16"), ["a group/a function/16", "", ""]);
        assert_eq!(parts_of("attention/forward/cold"), ["cold", "", ""]);
        assert_eq!(parts_of(""), ["", "", ""]);
    }

    #[test]
    fn numbers_in_a_case_id_are_axes_and_dtypes_are_not() {
        let axes = ProblemAxisValues::from_problem_in_case_id("pi05_s50_p968_steps10_bf16_int8");
        let numbers: Vec<_> =
            axes.numeric_axes.iter().map(|(name, n)| (name.as_str(), *n)).collect();
        assert_eq!(numbers, [("p", 968), ("s", 50), ("steps", 10)]);
        assert_eq!(axes.without_numeric_axes(&["s", "p"]).to_string(), "steps10 pi05 bf16 int8");
    }
}
