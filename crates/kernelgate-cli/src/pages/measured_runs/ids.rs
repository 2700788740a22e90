//! Reads the parts of a case from its id, if the record does not contain them.

use std::collections::BTreeMap;

/// The parts of an id after its workload.
#[derive(Debug, PartialEq, Eq)]
pub struct CaseIdParts<'a> {
    /// The problem: "s1024_d64_full_f32".
    pub problem: &'a str,
    /// The implementation: "cuda/flash_mma"; empty if the id has another form.
    pub implementation: &'a str,
    /// The state of the caches: "hot", "cold"; empty if the id has another form.
    pub cache: &'a str,
}

impl<'a> CaseIdParts<'a> {
    pub fn parse(id: &'a str, workload: &str) -> CaseIdParts<'a> {
        let rest = id.strip_prefix(workload).and_then(|rest| rest.strip_prefix('/')).unwrap_or(id);
        let cached = rest.rsplit_once('/').filter(|(_, cache)| ["hot", "cold"].contains(cache));
        let parts = cached.and_then(|(rest, cache)| {
            let (problem, implementation) = rest.split_once('/')?;
            Some(Self { problem, implementation, cache })
        });
        parts.unwrap_or(Self { problem: rest, implementation: "", cache: "" })
    }
}

/// The axes of a problem with their values.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProblemAxes {
    /// Numbers by axis.
    pub numbers: BTreeMap<String, u64>,
    /// Words by axis, or by their place in the id.
    pub words: BTreeMap<String, String>,
}

/// Words of ids that end in digits and are not numbers of an axis.
const DTYPE_PREFIXES: [&str; 8] = ["f", "bf", "tf", "fp", "int", "uint", "i", "u"];

impl ProblemAxes {
    /// Makes the axes from the text values of a record.
    pub fn from_record(axes: &BTreeMap<String, String>) -> ProblemAxes {
        let mut all = Self::default();
        for (name, value) in axes {
            match value.parse() {
                Ok(number) => drop(all.numbers.insert(name.clone(), number)),
                Err(_) => drop(all.words.insert(name.clone(), value.clone())),
            }
        }
        all
    }

    /// Axes as an id spells them: numbers carry their axis' name (`s512`), words stand alone
    /// (`causal`).
    pub fn from_problem_name(problem: &str) -> ProblemAxes {
        let mut all = Self::default();
        for (place, word) in problem.split('_').enumerate() {
            let digits = word.find(|c: char| c.is_ascii_digit()).unwrap_or(word.len());
            let (name, number) = word.split_at(digits);
            let number = number.parse::<u64>().ok().filter(|_| !number.starts_with('0'));
            match number.filter(|_| !name.is_empty() && !DTYPE_PREFIXES.contains(&name)) {
                Some(number) => drop(all.numbers.insert(name.to_owned(), number)),
                None => drop(all.words.insert(place.to_string(), word.to_owned())),
            }
        }
        all
    }

    /// The axes without some of the numbers: problems that differ only in these have this in
    /// common.
    pub fn without(&self, axes: &[&str]) -> Self {
        let mut rest = self.clone();
        rest.numbers.retain(|axis, _| !axes.contains(&axis.as_str()));
        rest
    }
}

// Prints the axes as text: "d128 causal bf16".
impl std::fmt::Display for ProblemAxes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers = self.numbers.iter().map(|(name, number)| format!("{name}{number}"));
        let all: Vec<String> = numbers.chain(self.words.values().cloned()).collect();
        f.write_str(&all.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_id_is_divided_into_its_parts() {
        let parts_of = |id| {
            let CaseIdParts { problem, implementation, cache } =
                CaseIdParts::parse(id, "attention/forward");
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
        let axes = ProblemAxes::from_problem_name("pi05_s50_p968_steps10_bf16_int8");
        let numbers: Vec<_> = axes.numbers.iter().map(|(name, n)| (name.as_str(), *n)).collect();
        assert_eq!(numbers, [("p", 968), ("s", 50), ("steps", 10)]);
        assert_eq!(axes.without(&["s", "p"]).to_string(), "steps10 pi05 bf16 int8");
    }
}
