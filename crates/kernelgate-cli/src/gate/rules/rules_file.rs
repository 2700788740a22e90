//! Reads and checks `kernelgate.toml`; errors name the file, the line and the key.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;

use kernelgate::record::file;
use kernelgate::record::provenance::is_unambiguous_commit_id;
use kernelgate::record::text::{cut_middle_of_long_message, shortened_quotation};
use regex::Regex;
use serde::Deserialize;
use toml::Spanned;

use super::{
    CaseAcceptanceRule, CaseThresholdRule, PackageGateRules, RULES_FILE_NAME, RemovedCasesEffect,
    text_on_one_line,
};
use crate::gate::limits::RequestedLimits;

/// Largest `kernelgate.toml` that is read, bytes.
const MAX_RULES_FILE_BYTES: u64 = 1 << 20;

/// Largest value of a ratio or relative change in `kernelgate.toml`; a larger value would allow
/// everything and is refused.
pub const MAX_RATIO_IN_RULES: f64 = 1e6;
/// Largest value of a time in `kernelgate.toml`, nanoseconds: about a quarter of an hour.
pub const MAX_TIME_IN_RULES_NS: f64 = 1e12;

/// Error: `kernelgate.toml` cannot be read or contains an invalid entry; states the file, the line
/// and the problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{displayed_rules_path}{}: {problem_in_rules_file}", line.as_ref().map(ToString::to_string).unwrap_or_default())]
pub struct RulesFileError {
    /// Path of the rules file, as the error message shows it.
    pub displayed_rules_path: String,
    /// The faulty line of the rules file; `None` if the problem is not in one line.
    pub line: Option<FaultyLineOfRulesFile>,
    /// The problem in the rules file, beginning with the key if the problem concerns one key.
    pub problem_in_rules_file: String,
}

/// A faulty line of the rules file, for the error message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultyLineOfRulesFile {
    /// Number of the faulty line in the rules file, counted from 1.
    pub line_number: usize,
    /// Text of the faulty line, cut if it is long.
    pub line_text: String,
}

impl fmt::Display for FaultyLineOfRulesFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ", line {} (`{}`)", self.line_number, self.line_text)
    }
}

/// Reads `kernelgate.toml` in a folder; if the file does not exist, the rules are empty.
pub fn read_rules_in_folder(folder: &Path) -> Result<PackageGateRules, RulesFileError> {
    let path = folder.join(RULES_FILE_NAME);
    let shown = path.display().to_string();
    read_rules_file(&path, &shown)
}

/// Reads the rules in the file at `path`, which error messages call `shown`; if the file does not
/// exist, the rules are empty.
pub fn read_rules_file(path: &Path, shown: &str) -> Result<PackageGateRules, RulesFileError> {
    let failed = |problem| RulesFileError {
        displayed_rules_path: shown.to_owned(),
        line: None,
        problem_in_rules_file: problem,
    };
    let text = match file::read_untrusted_text_up_to(path, MAX_RULES_FILE_BYTES) {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
            return Ok(PackageGateRules::default());
        }
        Err(cause) => return Err(failed(cause.to_string())),
        Ok(text) => text,
    };
    parse_rules(shown, &text)
}

/// Parses the text of a rules file, which error messages call `shown`.
pub fn parse_rules(shown: &str, text: &str) -> Result<PackageGateRules, RulesFileError> {
    let source = RulesFileText { displayed_path: shown, file_text: text };
    let RulesFileContents { threshold, accept, renamed_case_ids: renamed, removed } =
        toml::from_str(text).map_err(|error| {
            source.error_at_position(error.span().map(|span| span.start), error.message())
        })?;
    let ratio = |name, value: &Option<Spanned<f64>>| {
        source.read_number_in_range(name, value.as_ref(), 0.0..=MAX_RATIO_IN_RULES)
    };
    let growth = |value: &Option<Spanned<f64>>| {
        source.read_number_in_range("growth", value.as_ref(), 1.0..=MAX_RATIO_IN_RULES)
    };
    let thresholds = threshold.iter().map(|rule| {
        let relative = ratio("relative", &rule.relative_time_change_threshold)?;
        let absolute_ns = rule.absolute_time_change_threshold_ns.as_ref();
        let absolute_range = 0.0..=MAX_TIME_IN_RULES_NS;
        let absolute_ns =
            source.read_number_in_range("absolute-ns", absolute_ns, absolute_range)?;
        let device_memory = ratio("device-memory", &rule.device_memory_growth_threshold)?;
        let limits = RequestedLimits {
            relative_time_change_threshold: relative,
            absolute_time_change_threshold_ns: absolute_ns,
            output_error_growth_threshold: growth(&rule.output_error_growth_threshold)?,
            device_memory_growth_threshold: device_memory,
            command_growth_threshold: ratio("launches", &rule.command_growth_threshold)?,
            host_time_growth_threshold: ratio("host-time", &rule.host_time_growth_threshold)?,
            energy_growth_threshold: ratio("energy", &rule.energy_growth_threshold)?,
            ..RequestedLimits::default()
        };
        if limits == RequestedLimits::default() {
            let at = Some(rule.case_pattern.span().start);
            return Err(source.error_at_position(at, "this [[threshold]] sets nothing"));
        }
        let case_pattern = source.compile_case_pattern(&rule.case_pattern)?;
        Ok(CaseThresholdRule { case_pattern, limits })
    });
    let accepted = accept.iter().map(|rule| {
        let problem_here =
            |problem: &str| source.error_at_position(Some(rule.case_pattern.span().start), problem);
        let bounded = rule.max_accepted_relative_slowdown.is_some()
            || rule.max_accepted_error_ratio.is_some();
        if !bounded && !rule.allows_less_verification && !rule.allows_removal {
            return Err(problem_here(
                "this [[accept]] has no bound: `slower`, `growth`, `less-verified` or `removed`",
            ));
        }
        if text_on_one_line(rule.acceptance_reason.get_ref()).is_empty() {
            let at = Some(rule.acceptance_reason.span().start);
            return Err(source.error_at_position(at, "reason: it is empty"));
        }
        let commit = rule.baseline_commit_prefix.as_ref();
        if let Some(commit) = commit.filter(|it| !is_unambiguous_commit_id(it.get_ref())) {
            let problem = "baseline: not a commit (7 to 64 hexadecimal digits)";
            return Err(source.error_at_position(Some(commit.span().start), problem));
        }
        Ok(CaseAcceptanceRule {
            case_pattern: source.compile_case_pattern(&rule.case_pattern)?,
            max_accepted_relative_slowdown: ratio("slower", &rule.max_accepted_relative_slowdown)?,
            max_accepted_error_ratio: growth(&rule.max_accepted_error_ratio)?,
            allows_less_verification: rule.allows_less_verification,
            allows_removal: rule.allows_removal,
            acceptance_reason: text_on_one_line(rule.acceptance_reason.get_ref()),
            baseline_commit_prefix: commit.map(|commit| commit.get_ref().clone()),
        })
    });
    Ok(PackageGateRules {
        rules_file_exists: true,
        thresholds: thresholds.collect::<Result<_, _>>()?,
        accepted: accepted.collect::<Result<_, _>>()?,
        current_ids_of_renamed_cases: renamed,
        removed,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RulesFileContents {
    #[serde(default)]
    threshold: Vec<ThresholdEntryInFile>,
    #[serde(default)]
    accept: Vec<AcceptEntryInFile>,
    #[serde(default)]
    #[serde(rename = "renamed")]
    renamed_case_ids: BTreeMap<String, String>,
    #[serde(default, rename = "removed-cases")]
    removed: RemovedCasesEffect,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ThresholdEntryInFile {
    #[serde(rename = "cases")]
    case_pattern: Spanned<String>,
    #[serde(rename = "relative")]
    relative_time_change_threshold: Option<Spanned<f64>>,
    #[serde(rename = "absolute-ns")]
    absolute_time_change_threshold_ns: Option<Spanned<f64>>,
    #[serde(rename = "growth")]
    output_error_growth_threshold: Option<Spanned<f64>>,
    #[serde(rename = "device-memory")]
    device_memory_growth_threshold: Option<Spanned<f64>>,
    #[serde(rename = "launches")]
    command_growth_threshold: Option<Spanned<f64>>,
    #[serde(rename = "host-time")]
    host_time_growth_threshold: Option<Spanned<f64>>,
    #[serde(rename = "energy")]
    energy_growth_threshold: Option<Spanned<f64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct AcceptEntryInFile {
    #[serde(rename = "cases")]
    case_pattern: Spanned<String>,
    #[serde(rename = "slower")]
    max_accepted_relative_slowdown: Option<Spanned<f64>>,
    #[serde(rename = "growth")]
    max_accepted_error_ratio: Option<Spanned<f64>>,
    #[serde(default)]
    #[serde(rename = "less-verified")]
    allows_less_verification: bool,
    #[serde(default)]
    #[serde(rename = "removed")]
    allows_removal: bool,
    #[serde(rename = "reason")]
    acceptance_reason: Spanned<String>,
    #[serde(rename = "baseline")]
    baseline_commit_prefix: Option<Spanned<String>>,
}

/// The text of a rules file and its name, for error messages.
struct RulesFileText<'a> {
    displayed_path: &'a str,
    file_text: &'a str,
}

impl RulesFileText<'_> {
    fn error_at_position(&self, at: Option<usize>, problem: &str) -> RulesFileError {
        let line = at.map(|at| {
            let before = self.file_text[..at.min(self.file_text.len())].matches('\n').count();
            let text = self.file_text.lines().nth(before).unwrap_or_default().trim();
            FaultyLineOfRulesFile {
                line_number: before + 1,
                line_text: shortened_quotation(text).into_owned(),
            }
        });
        RulesFileError {
            displayed_rules_path: self.displayed_path.to_owned(),
            line,
            problem_in_rules_file: cut_middle_of_long_message(problem.to_owned()),
        }
    }

    fn compile_case_pattern(&self, cases: &Spanned<String>) -> Result<Regex, RulesFileError> {
        Regex::new(cases.get_ref()).map_err(|error| {
            let reason = error.to_string();
            let reason = reason.lines().last().unwrap_or_default().trim_start_matches("error: ");
            self.error_at_position(
                Some(cases.span().start),
                &format!("cases: not a regular expression: {reason}"),
            )
        })
    }

    /// Reads the number of a key in the rules file and checks that it is within a range; `None` if
    /// the key is absent.
    fn read_number_in_range(
        &self,
        key: &str,
        value: Option<&Spanned<f64>>,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, RulesFileError> {
        let Some(value) = value else { return Ok(None) };
        let number = *value.get_ref();
        if range.contains(&number) {
            return Ok(Some(number));
        }
        let (least, most) = range.into_inner();
        let problem = format!("{key}: {number:?} is no number from {least} to {most}");
        Err(self.error_at_position(Some(value.span().start), &problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_rules_file_is_reported_with_line_and_key() {
        let texts = [
            "[[threshold]]\ncases = 3",
            "[[threshold]]\ncases = \"x\"\nrelativ = 1",
            "[[threshold]]\ncases = \"x\"\nrelative = -1",
            "[[threshold]]\ncases = \"x\"\nrelative = nan",
            "[[threshold]]\ncases = \"x\"\ngrowth = 0.5",
            "[[threshold]]\ncases = \"x\"\nrelative = 1e308",
            "[[threshold]]\ncases = \"x\"\nabsolute-ns = inf",
            "[[accept]]\ncases = \"x\"\nslower = 2e6\nreason = \"r\"",
            "[[threshold]]\ncases = \"x\"",
            "[[threshold]]\nrelative = 1",
            "\n[[accept]]\ncases = \"(\"\nslower = 1\nreason = \"r\"",
            "[[accept]]\ncases = \"x\"\nreason = \"r\"",
            "[[accept]]\ncases = \"x\"\nslower = 1\nreason = \" \"",
            "[[accept]]\ncases = \"x\"\nslower = 1",
            "[[accept]]\ncases = \"x\"\nslower = 1\nreason = \"r\"\nbaseline = \"main\"",
            "removed-cases = \"maybe\"",
            "[renamed]\na = 3",
            "[threshold]",
            "x = ",
        ];
        let messages =
            texts.map(|text| parse_rules(RULES_FILE_NAME, text).unwrap_err().to_string());
        insta::assert_snapshot!(messages.join("\n"), @r#"
        kernelgate.toml, line 2 (`cases = 3`): invalid type: integer `3`, expected a string
        kernelgate.toml, line 3 (`relativ = 1`): unknown field `relativ`, expected one of `cases`, `relative`, `absolute-ns`, `growth`, `device-memory`, `launches`, `host-time`, `energy`
        kernelgate.toml, line 3 (`relative = -1`): relative: -1.0 is no number from 0 to 1000000
        kernelgate.toml, line 3 (`relative = nan`): relative: NaN is no number from 0 to 1000000
        kernelgate.toml, line 3 (`growth = 0.5`): growth: 0.5 is no number from 1 to 1000000
        kernelgate.toml, line 3 (`relative = 1e308`): relative: 1e308 is no number from 0 to 1000000
        kernelgate.toml, line 3 (`absolute-ns = inf`): absolute-ns: inf is no number from 0 to 1000000000000
        kernelgate.toml, line 3 (`slower = 2e6`): slower: 2000000.0 is no number from 0 to 1000000
        kernelgate.toml, line 2 (`cases = "x"`): this [[threshold]] sets nothing
        kernelgate.toml, line 1 (`[[threshold]]`): missing field `cases`
        kernelgate.toml, line 3 (`cases = "("`): cases: not a regular expression: unclosed group
        kernelgate.toml, line 2 (`cases = "x"`): this [[accept]] has no bound: `slower`, `growth`, `less-verified` or `removed`
        kernelgate.toml, line 4 (`reason = " "`): reason: it is empty
        kernelgate.toml, line 1 (`[[accept]]`): missing field `reason`
        kernelgate.toml, line 5 (`baseline = "main"`): baseline: not a commit (7 to 64 hexadecimal digits)
        kernelgate.toml, line 1 (`removed-cases = "maybe"`): unknown variant `maybe`, expected one of `inconclusive`, `fail`, `ignore`
        kernelgate.toml, line 2 (`a = 3`): invalid type: integer `3`, expected a string
        kernelgate.toml, line 1 (`[threshold]`): invalid type: map, expected a sequence
        kernelgate.toml, line 1 (`x =`): string values must be quoted, expected literal string
        "#);
        assert!(parse_rules(RULES_FILE_NAME, "").is_ok());
        assert!(
            parse_rules(RULES_FILE_NAME, "[[threshold]]\ncases = \"x\"\nrelative = 1e6").is_ok()
        );
    }

    #[test]
    fn long_quotations_in_rule_messages_are_cut() {
        let long = "x".repeat(900_000);
        for text in [format!("{long} = "), format!("[[threshold]]\n{long} = 1")] {
            let message = parse_rules(RULES_FILE_NAME, &text).unwrap_err().to_string();
            assert!(message.len() < 1000 && message.contains("xxx…`)"), "{}", message.len());
        }
    }

    /// In a test, the rules file is a link to a device, as a commit may contain: such a file has no
    /// length and no end.
    #[test]
    fn a_rules_file_that_is_a_device_or_too_long_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(RULES_FILE_NAME);
        let message = || {
            let error = read_rules_in_folder(folder.path()).unwrap_err().to_string();
            error.replace(&folder.path().display().to_string(), "FOLDER")
        };
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        insta::assert_snapshot!(message(), @"FOLDER/kernelgate.toml: it is no file but a device, a pipe or a socket");
        std::fs::remove_file(&path).unwrap();
        assert!(!read_rules_in_folder(folder.path()).unwrap().rules_file_exists);
        std::os::unix::fs::symlink("nowhere.toml", &path).unwrap();
        insta::assert_snapshot!(message(), @"FOLDER/kernelgate.toml: a link to nothing (nowhere.toml)");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, vec![b' '; MAX_RULES_FILE_BYTES as usize + 1]).unwrap();
        insta::assert_snapshot!(message(), @"FOLDER/kernelgate.toml: larger than 1048576 bytes");
        std::fs::write(&path, vec![b' '; MAX_RULES_FILE_BYTES as usize]).unwrap();
        assert!(read_rules_in_folder(folder.path()).is_ok());
    }
}
