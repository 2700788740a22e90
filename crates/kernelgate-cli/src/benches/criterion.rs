//! Lists and times the cases of benches that use Criterion without kernelgate, by Criterion's own
//! command-line flags, which versions 0.5 to 0.8 share.
//!
//! An executable that uses Criterion lists its cases (`--list`), measures those that match one
//! regular expression, and writes the samples of each case as JSON below the folder in
//! `CRITERION_HOME`. The module `benches::criterion` neither starts the Criterion bench executable
//! (`compare` does) nor interprets the measured times (`gate` does).

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::record::TrialSamplingPlan;
use kernelgate::record::criterion_store::title_without_criterions_number;
use kernelgate::record::text::join_lines_with_spaces;

/// Number of samples that kernelgate requests of Criterion for each case: the fewest that Criterion
/// accepts.
pub const CRITERION_SAMPLE_SIZE: usize = 10;
/// Number of bootstrap resamples for Criterion's own analysis, which kernelgate ignores: few,
/// because Criterion's default of 100,000 takes longer than the measurement.
const CRITERION_RESAMPLES: &str = "100";
/// Shortest measurement time and warm-up time that kernelgate passes to Criterion, seconds;
/// Criterion refuses 0.
const MIN_CRITERION_TIME_S: f64 = 0.001;
/// Longest case filter that kernelgate passes to a Criterion bench on its command line, bytes.
/// Linux limits one command-line argument to 128 KiB.
const MAX_CRITERION_FILTER_BYTES: usize = 100_000;
/// Text at the end of each line that names a case in the `--list` output of Criterion and of
/// libtest.
const LISTED_CASE_SUFFIX: &str = ": benchmark";

/// The titles of the cases that a Criterion bench printed for `--list`. Criterion's title of a case
/// is the case id, cut after 100 bytes, with a number appended if an earlier case has an equal
/// title.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListedCriterionTitles {
    /// Titles of the bench's cases, as Criterion's `--list` prints them, without the duplicates.
    pub case_titles: BTreeSet<String>,
    /// Case titles that the bench listed more than once, because two of its Criterion groups use an
    /// equal name. Criterion stores the results of cases with equal titles in one folder, so
    /// kernelgate cannot distinguish these cases.
    pub repeated_case_titles: BTreeSet<String>,
}

impl ListedCriterionTitles {
    /// Returns the ids of the listed cases that a Criterion filter matches.
    pub fn case_ids_matching_filter(&self, filter: Option<&str>) -> BTreeSet<String> {
        let Ok(filter) = CaseIdFilter::parse_exact_id_or_regex(filter, false) else {
            return BTreeSet::new();
        };
        let ids = self
            .case_titles
            .iter()
            .map(|title| title_without_criterions_number(title).unwrap_or(title));
        ids.filter(|id| filter.selects_case_id(id)).map(join_lines_with_spaces).collect()
    }
}

/// Sets the environment variables of a Criterion bench command so that Criterion stores its results
/// only in this folder.
pub fn set_criterion_result_folder<'a>(command: &'a mut Command, store: &Path) -> &'a mut Command {
    // `CARGO_CRITERION_PORT` is removed, because Criterion would send its samples to that port;
    // `CRITERION_DEBUG` is removed, because it makes Criterion print and write more.
    command
        .env("CRITERION_HOME", store)
        .env_remove("CARGO_CRITERION_PORT")
        .env_remove("CRITERION_DEBUG")
}

/// Command-line arguments that make a Criterion bench list its cases.
pub const CRITERION_LIST_ARGUMENTS: [&str; 2] = ["--bench", "--list"];

/// Returns the command-line arguments that make a Criterion bench measure the cases that a filter
/// matches, or all cases. A Criterion measurement takes longer than kernelgate requests if the
/// bench's source code sets its own measurement times.
pub fn criterion_measuring_arguments(
    filter: Option<&str>,
    sampling: &TrialSamplingPlan,
) -> Vec<String> {
    let seconds = |seconds: f64| seconds.max(MIN_CRITERION_TIME_S).to_string();
    let mut arguments: Vec<String> =
        ["--bench", "--noplot", "--nresamples", CRITERION_RESAMPLES].map(str::to_owned).into();
    for (flag, value) in [
        ("--sample-size", CRITERION_SAMPLE_SIZE.to_string()),
        ("--warm-up-time", seconds(sampling.warm_up_s)),
        ("--measurement-time", seconds(sampling.measurement_s)),
    ] {
        arguments.extend([flag.to_owned(), value]);
    }
    arguments.extend(filter.into_iter().flat_map(|filter| ["--".to_owned(), filter.to_owned()]));
    arguments
}

/// Returns the last case that Criterion began, from Criterion's messages on standard error, to name
/// the case at which the bench process ended. Such a message begins with "Benchmarking" and the
/// case's title.
pub fn last_case_criterion_began(messages: &str) -> Option<&str> {
    const CRITERION_STEP_TEXTS: [&str; 4] =
        [": Warming up for ", ": Collecting ", ": Analyzing", ": Profiling "];
    let lines = messages.split(['\n', '\r']);
    let case = lines.filter_map(|line| line.trim().strip_prefix("Benchmarking ")).next_back()?;
    let end = CRITERION_STEP_TEXTS.iter().filter_map(|step| case.rfind(step)).min();
    Some(end.map_or(case, |end| &case[..end]))
}

/// Returns a Criterion filter that matches exactly these cases and the cases with equal ids; `None`
/// if the filter would be too long for a command line.
pub fn criterion_filter_for_cases(cases: &BTreeSet<String>) -> Option<String> {
    let ids = cases
        .iter()
        .flat_map(|case| [Some(&**case), title_without_criterions_number(case)])
        .flatten();
    let ids: Vec<String> = ids.map(regex::escape).collect();
    let filter = format!("^(?:{})$", ids.join("|"));
    (filter.len() <= MAX_CRITERION_FILTER_BYTES).then_some(filter)
}

/// Parses the case titles in Criterion's `--list` output, and ignores lines that the bench's own
/// code prints.
pub fn parse_criterion_list(text: &str) -> Result<ListedCriterionTitles, String> {
    let mut listed = ListedCriterionTitles::default();
    for line in text.lines() {
        if is_libtest_summary_line(line) {
            return Err("it is a bench of libtest (`#[bench]`)".to_owned());
        }
        if let Some(title) = line.strip_suffix(LISTED_CASE_SUFFIX)
            && !listed.case_titles.insert(title.to_owned())
        {
            listed.repeated_case_titles.insert(title.to_owned());
        }
    }
    listed.case_titles.retain(|title| !listed.repeated_case_titles.contains(title));
    Ok(listed)
}

/// Returns whether a line is libtest's summary "0 tests, 2 benchmarks", which shows that the bench
/// uses libtest and not Criterion.
fn is_libtest_summary_line(line: &str) -> bool {
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
        let cases: Vec<&str> = listed.case_titles.iter().map(String::as_str).collect();
        assert_eq!(cases, ["g/β ?*", "sum of 100", "sum/a: b"]);
        assert_eq!(listed.repeated_case_titles, ["twice".to_owned()].into());
        assert_eq!(
            parse_criterion_list("usage: nothing of the kind").unwrap(),
            ListedCriterionTitles::default()
        );
        for summary in ["0 tests, 1 benchmark", "1 test, 12 benchmarks"] {
            let text = format!("a: benchmark\n\n{summary}\n");
            assert!(parse_criterion_list(&text).unwrap_err().contains("libtest"), "{summary}");
        }
        let own = "3 tests, some benchmarks\na: benchmark";
        assert_eq!(
            parse_criterion_list(own).unwrap().case_titles.len(),
            1,
            "a line of the bench's own"
        );
    }

    #[test]
    fn the_case_that_ran_last_is_parsed_from_criterions_messages() {
        let text = "Benchmarking a\nBenchmarking a: Warming up for 1.0 ms\nBenchmarking a: Analyzing\n\
                    Benchmarking g/b: 1\nBenchmarking g/b: 1: Collecting 10 samples in estimated 1 s\n\
                    thread 'main' panicked at x";
        assert_eq!(last_case_criterion_began(text), Some("g/b: 1"));
        assert_eq!(
            last_case_criterion_began("Benchmarking of nothing\nthread 'main'"),
            Some("of nothing")
        );
        assert_eq!(last_case_criterion_began("nothing of the kind"), None);
    }

    #[test]
    fn the_filter_for_requested_cases_matches_exactly_these() {
        let ids = ["a", "a/b", "a.b", "g (x|y)", "-dash", "ü \u{1f980}", "sum #two"];
        let filter_for =
            |wanted: &str| criterion_filter_for_cases(&[wanted.to_owned()].into()).unwrap();
        let matched = |filter: &str| -> Vec<&str> {
            let filter = regex::Regex::new(filter).unwrap();
            ids.into_iter().filter(|id| filter.is_match(id)).collect()
        };
        for wanted in ids {
            assert_eq!(matched(&filter_for(wanted)), [wanted]);
        }
        // A filter cannot select only the second of two cases with equal ids, so it must match the
        // first one too.
        assert_eq!(matched(&filter_for("a/b #2")), ["a/b"]);
        let many: BTreeSet<String> = (0..2000).map(|i| format!("{i:060}")).collect();
        assert_eq!(criterion_filter_for_cases(&many), None, "too long to be passed");
        let arguments =
            criterion_measuring_arguments(Some("-dash"), &TrialSamplingPlan::SAMPLING_ON_HOST);
        assert_eq!(arguments[arguments.len() - 2..], ["--", "-dash"]);
        let none = TrialSamplingPlan { warm_up_s: 0.0, ..TrialSamplingPlan::SAMPLING_ON_HOST };
        assert!(
            criterion_measuring_arguments(None, &none).contains(&"0.001".to_owned()),
            "Criterion refuses 0"
        );
    }
}
