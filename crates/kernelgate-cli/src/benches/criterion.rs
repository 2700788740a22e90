//! Drives benches that use Criterion alone by Criterion's own flags, in versions 0.5 to 0.8, which
//! agree in everything used here.
//!
//! An executable that uses Criterion lists its cases (`--list`), measures those that match one
//! regular expression, and writes the samples of each case as JSON below the folder in
//! `CRITERION_HOME`. This module neither starts the executable (`compare` does) nor interprets its
//! times (`gate` does).

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use kernelgate::harness::filter::CaseFilter;
use kernelgate::record::TrialSampling;
use kernelgate::record::criterion_store::title_without_repeat_suffix;
use kernelgate::record::text::on_one_line;

/// Number of samples of a case: the fewest that Criterion accepts.
pub const CRITERION_SAMPLES: usize = 10;
/// Resamples of Criterion's own analysis, whose outcome is not used: few, because at its default of
/// 100,000 the analysis takes longer than the measurement.
const CRITERION_RESAMPLES: &str = "100";
/// Shortest measurement time for Criterion, which refuses 0, seconds.
const MIN_SAMPLING_TIME_S: f64 = 0.001;
/// Longest filter that is passed to a bench on its command line, bytes: Linux limits one argument
/// to 128 KiB.
const MAX_FILTER_BYTES: usize = 100_000;
/// End of the line of a case in a list, of Criterion and of libtest.
const LISTED_CASE_END: &str = ": benchmark";

/// Titles of the cases that a Criterion bench listed. A title is the id, cut after 100 bytes, and
/// with a number where another case has that title already.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListedCriterionIds {
    /// Titles of the bench's cases, as Criterion prints them.
    pub titles: BTreeSet<String>,
    /// Titles that the bench listed more than once, from groups that do not know each other:
    /// Criterion's store does not distinguish such cases.
    pub duplicates: BTreeSet<String>,
}

impl ListedCriterionIds {
    /// Returns the ids of the cases that Criterion's filter matches.
    pub fn ids(&self, filter: Option<&str>) -> BTreeSet<String> {
        let Ok(filter) = CaseFilter::parse(filter, false) else { return BTreeSet::new() };
        let ids =
            self.titles.iter().map(|title| title_without_repeat_suffix(title).unwrap_or(title));
        ids.filter(|id| filter.matches_id(id)).map(on_one_line).collect()
    }
}

/// Sets the environment of a bench command so that the bench stores results only in this folder.
pub fn with_criterion_folder<'a>(command: &'a mut Command, store: &Path) -> &'a mut Command {
    // The port variable is removed, because Criterion would send its samples to that port; the
    // debugging variable is removed, because it prints and writes more.
    command
        .env("CRITERION_HOME", store)
        .env_remove("CARGO_CRITERION_PORT")
        .env_remove("CRITERION_DEBUG")
}

/// Arguments for listing cases.
pub const LIST_ARGUMENTS: [&str; 2] = ["--bench", "--list"];

/// Arguments for measuring the cases that a filter in Criterion's syntax matches, or all cases. The
/// measurement may take longer than requested if the bench's source sets its own times.
pub fn measuring_arguments(filter: Option<&str>, sampling: &TrialSampling) -> Vec<String> {
    let seconds = |seconds: f64| seconds.max(MIN_SAMPLING_TIME_S).to_string();
    let mut arguments: Vec<String> =
        ["--bench", "--noplot", "--nresamples", CRITERION_RESAMPLES].map(str::to_owned).into();
    for (flag, value) in [
        ("--sample-size", CRITERION_SAMPLES.to_string()),
        ("--warm-up-time", seconds(sampling.warm_up_s)),
        ("--measurement-time", seconds(sampling.measurement_s)),
    ] {
        arguments.extend([flag.to_owned(), value]);
    }
    arguments.extend(filter.into_iter().flat_map(|filter| ["--".to_owned(), filter.to_owned()]));
    arguments
}

/// The case that ran when a process ended, found in the lines that Criterion writes on standard
/// error: "Benchmarking sum of 100: Returns the last case that Criterion began, from messages such
/// as "Benchmarking a/b: Warming up for 3.0000 s".
pub fn case_that_ran(messages: &str) -> Option<&str> {
    const CRITERION_STEPS: [&str; 4] =
        [": Warming up for ", ": Collecting ", ": Analyzing", ": Profiling "];
    let lines = messages.split(['\n', '\r']);
    let case = lines.filter_map(|line| line.trim().strip_prefix("Benchmarking ")).next_back()?;
    let end = CRITERION_STEPS.iter().filter_map(|step| case.rfind(step)).min();
    Some(end.map_or(case, |end| &case[..end]))
}

/// Returns a regular expression that matches these cases, and others with equal ids; `None` if it
/// would be too long.
pub fn regex_for_cases(cases: &BTreeSet<String>) -> Option<String> {
    let ids =
        cases.iter().flat_map(|case| [Some(&**case), title_without_repeat_suffix(case)]).flatten();
    let ids: Vec<String> = ids.map(regex::escape).collect();
    let filter = format!("^(?:{})$", ids.join("|"));
    (filter.len() <= MAX_FILTER_BYTES).then_some(filter)
}

/// Reads the titles from the output of `--list`; lines of the bench's own code are skipped.
pub fn parse_criterion_list(text: &str) -> Result<ListedCriterionIds, String> {
    let mut listed = ListedCriterionIds::default();
    for line in text.lines() {
        if is_summary_of_libtest(line) {
            return Err("it is a bench of libtest (`#[bench]`)".to_owned());
        }
        if let Some(title) = line.strip_suffix(LISTED_CASE_END)
            && !listed.titles.insert(title.to_owned())
        {
            listed.duplicates.insert(title.to_owned());
        }
    }
    listed.titles.retain(|title| !listed.duplicates.contains(title));
    Ok(listed)
}

/// Returns whether a line is libtest's summary "0 tests, 2 benchmarks", which Criterion does not
/// print.
fn is_summary_of_libtest(line: &str) -> bool {
    let count = |part: &str, word: &str| {
        part.trim_end_matches('s')
            .strip_suffix(word)
            .is_some_and(|count| count.trim_end().parse::<u64>().is_ok())
    };
    line.split_once(", ")
        .is_some_and(|(tests, benches)| count(tests, "test") && count(benches, "benchmark"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_lists_of_criterion_are_parsed_and_those_of_libtest_refused() {
        let text = "reading data\nsum of 100: benchmark\n\ng/β ?*: benchmark\nsum/a: b: benchmark\n\
                    twice: benchmark\ntwice: benchmark\nit: test\n";
        let listed = parse_criterion_list(text).unwrap();
        let cases: Vec<&str> = listed.titles.iter().map(String::as_str).collect();
        assert_eq!(cases, ["g/β ?*", "sum of 100", "sum/a: b"]);
        assert_eq!(listed.duplicates, ["twice".to_owned()].into());
        assert_eq!(
            parse_criterion_list("usage: nothing of the kind").unwrap(),
            ListedCriterionIds::default()
        );
        for summary in ["0 tests, 1 benchmark", "1 test, 12 benchmarks"] {
            let text = format!("a: benchmark\n\n{summary}\n");
            assert!(parse_criterion_list(&text).unwrap_err().contains("libtest"), "{summary}");
        }
        let own = "3 tests, some benchmarks\na: benchmark";
        assert_eq!(parse_criterion_list(own).unwrap().titles.len(), 1, "a line of the bench's own");
    }

    #[test]
    fn the_case_that_ran_last_is_parsed_from_criterions_messages() {
        let text = "Benchmarking a\nBenchmarking a: Warming up for 1.0 ms\nBenchmarking a: Analyzing\n\
                    Benchmarking g/b: 1\nBenchmarking g/b: 1: Collecting 10 samples in estimated 1 s\n\
                    thread 'main' panicked at x";
        assert_eq!(case_that_ran(text), Some("g/b: 1"));
        assert_eq!(case_that_ran("Benchmarking of nothing\nthread 'main'"), Some("of nothing"));
        assert_eq!(case_that_ran("nothing of the kind"), None);
    }

    #[test]
    fn the_filter_for_requested_cases_matches_exactly_these() {
        let ids = ["a", "a/b", "a.b", "g (x|y)", "-dash", "ü \u{1f980}", "sum #two"];
        let filter_for = |wanted: &str| regex_for_cases(&[wanted.to_owned()].into()).unwrap();
        let matched = |filter: &str| -> Vec<&str> {
            let filter = regex::Regex::new(filter).unwrap();
            ids.into_iter().filter(|id| filter.is_match(id)).collect()
        };
        for wanted in ids {
            assert_eq!(matched(&filter_for(wanted)), [wanted]);
        }
        // A second case with an equal id can be requested only together with the first one.
        assert_eq!(matched(&filter_for("a/b #2")), ["a/b"]);
        let many: BTreeSet<String> = (0..2000).map(|i| format!("{i:060}")).collect();
        assert_eq!(regex_for_cases(&many), None, "too long to be passed");
        let arguments = measuring_arguments(Some("-dash"), &TrialSampling::HOST_SAMPLING);
        assert_eq!(arguments[arguments.len() - 2..], ["--", "-dash"]);
        let none = TrialSampling { warm_up_s: 0.0, ..TrialSampling::HOST_SAMPLING };
        assert!(
            measuring_arguments(None, &none).contains(&"0.001".to_owned()),
            "Criterion refuses 0"
        );
    }
}
