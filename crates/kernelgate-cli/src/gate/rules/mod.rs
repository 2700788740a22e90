//! The rules in `kernelgate.toml`, which a package commits for its gate. The rules set thresholds
//! for cases, accept slow-downs (with bound and reason, until the next baseline), and give the
//! earlier ids of renamed cases.
//!
//! The module `rules_file` reads the file; no rule can let a case pass whose outputs are wrong.

pub mod rules_file;

use super::recorded_names::{RECORDED_ACCEPTANCE_RULE_NAMES, debug_text_with_recorded_names};
use std::collections::{BTreeMap, BTreeSet};

use super::limits::{CaseTimeAndErrorLimits, LimitSource, RequestedLimits};
use kernelgate::record::CommitAndChanges;
use regex::Regex;
use serde::{Deserialize, Serialize};

/// Name of the package's rules file, which lies beside `Cargo.toml`.
pub const RULES_FILE_NAME: &str = "kernelgate.toml";

/// The gate rules of a package, from `kernelgate.toml`; empty if the package has no such file.
#[derive(Debug, Clone, Default)]
pub struct PackageGateRules {
    /// Whether the package has a `kernelgate.toml`.
    pub rules_file_exists: bool,
    /// The `[[threshold]]` entries, in the order of the file.
    pub thresholds: Vec<CaseThresholdRule>,
    /// The `[[accept]]` entries, in the order of the file.
    pub accepted: Vec<CaseAcceptanceRule>,
    /// Current case ids by the earlier ids of renamed cases, so that histories continue.
    pub current_ids_of_renamed_cases: BTreeMap<String, String>,
    /// Effect on the outcome if the head no longer has a case of the base.
    pub removed: RemovedCasesEffect,
}

/// Effect on the outcome of a comparison if a case exists only in the base and no `[[accept]]`
/// allows its removal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemovedCasesEffect {
    /// A removed case makes the comparison inconclusive.
    #[default]
    #[serde(rename = "inconclusive")]
    MakeInconclusive,
    /// A removed case makes the comparison fail, like a regressed case.
    #[serde(rename = "fail")]
    FailComparison,
    /// Removed cases do not affect the outcome of the comparison; the report lists them.
    #[serde(rename = "ignore")]
    ListOnly,
}

/// A `[[threshold]]` entry of `kernelgate.toml`: limits for the cases that match its pattern. A
/// limit that the threshold rule does not set keeps the value that other cases have.
#[derive(Debug, Clone)]
pub struct CaseThresholdRule {
    /// Regular expression for the ids of the cases to which the threshold rule applies.
    pub case_pattern: Regex,
    /// Limits that the threshold rule sets for its cases.
    pub limits: RequestedLimits,
}

/// An `[[accept]]` entry: an intended slow-down, loss of accuracy, loss of verification or removal
/// of cases, with its reason.
#[derive(Debug, Clone)]
pub struct CaseAcceptanceRule {
    /// Regular expression for the ids of the cases to which the acceptance applies.
    pub case_pattern: Regex,
    /// Largest accepted relative growth of a case's time; `None` accepts none.
    pub max_accepted_relative_slowdown: Option<f64>,
    /// Largest accepted ratio of the head's to the base's output error; `None` accepts no growth.
    pub max_accepted_error_ratio: Option<f64>,
    /// Whether the acceptance allows its cases to be verified less completely than before.
    pub allows_less_verification: bool,
    /// Whether the acceptance allows its cases to be removed.
    pub allows_removal: bool,
    pub acceptance_reason: String,
    /// First digits of the baseline's commit: the acceptance expires when the baseline is from
    /// another commit.
    pub baseline_commit_prefix: Option<String>,
}

/// An acceptance that applied to a judged case, for the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AcceptanceAppliedToCase {
    /// Id of the case, in the form `workload/problem/implementation/cache`.
    #[serde(rename = "case")]
    pub case_id: String,
    /// Largest relative growth of this case's time that the rule accepts; `None` if it accepts
    /// none.
    #[serde(rename = "slower")]
    pub max_accepted_relative_slowdown: Option<f64>,
    /// Largest ratio of the head's to the base's output error that the rule accepts for this case;
    /// `None` if it accepts no growth.
    #[serde(rename = "growth")]
    pub max_accepted_error_ratio: Option<f64>,
    /// Whether the rule allows this case to be verified less completely than before.
    #[serde(rename = "less_verified")]
    pub allows_less_verification: bool,
    /// Whether the rule allows this case to be removed.
    #[serde(rename = "removed")]
    pub allows_removal: bool,
    /// Reason that the `[[accept]]` entry gives for the accepted change, as a text.
    #[serde(rename = "reason")]
    pub acceptance_reason: String,
}

/// Effects of `kernelgate.toml` on one comparison: rules that applied, had no effect, or could not
/// be judged.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GateRulesEffectReport {
    /// Name of the rules file; `None` if the package has none.
    #[serde(rename = "file")]
    pub rules_file_name: Option<String>,
    /// Effect on the outcome of a comparison if the head no longer has a case of the base.
    pub removed: RemovedCasesEffect,
    /// Each threshold rule as text, with the number of judged cases to which it applied.
    #[serde(rename = "thresholds")]
    pub threshold_rules_with_case_counts: Vec<(String, usize)>,
    /// Acceptances of the rules file that applied to judged cases.
    pub accepted: Vec<AcceptanceAppliedToCase>,
    /// Sentences about rules that had no effect, such as a pattern that matches no case.
    #[serde(rename = "notes")]
    pub notes_on_rules_without_effect: Vec<String>,
    /// Sentences about patterns that match no case of this shard; they become notes only if no
    /// shard has a matching case.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[serde(rename = "unmatched")]
    pub notes_on_unmatched_patterns: BTreeSet<String>,
    /// Sentences about limits that could be judged for none of their cases; they make the outcome
    /// inconclusive.
    #[serde(rename = "undecided")]
    pub notes_on_unjudged_limits: Vec<String>,
}

impl PackageGateRules {
    /// Returns a text that changes whenever the rules change, to detect that a comparison is
    /// resumed with other rules; `None` without a rules file.
    pub fn text_that_identifies_rules(&self) -> Option<String> {
        let lines = self
            .report_effects(&[], None)
            .threshold_rules_with_case_counts
            .into_iter()
            .map(|(words, _)| words);
        let recorded = |rule| debug_text_with_recorded_names(rule, RECORDED_ACCEPTANCE_RULE_NAMES);
        let accepted = self.accepted.iter().map(recorded);
        let removed = debug_text_with_recorded_names(&self.removed, RECORDED_ACCEPTANCE_RULE_NAMES);
        let removed = std::iter::once(format!("removed {removed}"));
        self.rules_file_exists
            .then(|| lines.chain(accepted).chain(removed).collect::<Vec<_>>().join("; "))
    }

    /// Returns the limits that the `[[threshold]]` entries set for a case; for each limit, the last
    /// matching entry counts.
    pub fn threshold_limits_for_case(&self, case: &str) -> RequestedLimits {
        let of_case = self.thresholds.iter().filter(|rule| rule.case_pattern.is_match(case));
        of_case.fold(RequestedLimits::default(), |before, rule| {
            rule.limits.with_missing_limits_from(before)
        })
    }

    /// Returns the limits of a case: the common limits, replaced by its `[[threshold]]` entries and
    /// raised by its `[[accept]]` entries.
    pub fn limits_of_case(
        &self,
        case: &str,
        of_all: &CaseTimeAndErrorLimits,
    ) -> CaseTimeAndErrorLimits {
        let accepted = self.acceptances_of_case(case);
        of_all
            .overridden_by(&self.threshold_limits_for_case(case), LimitSource::RulesThresholdEntry)
            .raised_by_acceptance(
                accepted.iter().find_map(|it| it.max_accepted_relative_slowdown),
                accepted.iter().find_map(|it| it.max_accepted_error_ratio),
            )
    }

    /// Returns the `[[accept]]` entries that apply to a case; for each kind of acceptance, the last
    /// matching entry counts. The acceptances are in the order of the file; an entry without any
    /// bound that counts is absent.
    pub fn acceptances_of_case(&self, case: &str) -> Vec<AcceptanceAppliedToCase> {
        let (mut has_slower, mut has_growth) = (false, false);
        let (mut has_verified, mut has_removed) = (false, false);
        let mut found = Vec::new();
        for rule in self.accepted.iter().rev().filter(|rule| rule.case_pattern.is_match(case)) {
            let slower = rule.max_accepted_relative_slowdown.filter(|_| !has_slower);
            let growth = rule.max_accepted_error_ratio.filter(|_| !has_growth);
            let less_verified = rule.allows_less_verification && !has_verified;
            has_slower |= slower.is_some();
            has_growth |= growth.is_some();
            let removed = rule.allows_removal && !has_removed;
            has_verified |= less_verified;
            has_removed |= removed;
            if slower.is_some() || growth.is_some() || less_verified || removed {
                let (case, reason) = (case.to_owned(), rule.acceptance_reason.clone());
                found.push(AcceptanceAppliedToCase {
                    case_id: case,
                    max_accepted_relative_slowdown: slower,
                    max_accepted_error_ratio: growth,
                    allows_less_verification: less_verified,
                    allows_removal: removed,
                    acceptance_reason: reason,
                });
            }
        }
        found.reverse();
        found
    }

    /// Returns whether an `[[accept]]` entry allows a case to be verified less completely than
    /// before.
    pub fn accepts_less_verification(&self, case: &str) -> bool {
        self.acceptances_of_case(case).iter().any(|it| it.allows_less_verification)
    }

    /// Returns the rules without the acceptances that the base's rules file has too, because the
    /// base already includes their effect; also returns a note for each of these.
    pub fn without_acceptances_of_base(mut self, base: &Self) -> (Self, Vec<String>) {
        let (expired, new) =
            self.accepted.into_iter().partition(|rule| base.accepted.contains(rule));
        self.accepted = new;
        let notes = expired.iter().map(|rule| {
            format!(
                "{} is accepted in the base already: expired, remove it",
                rule.acceptance_entry_name()
            )
        });
        let notes = notes.collect();
        (self, notes)
    }

    /// Returns the rules without the acceptances that do not name the commit of the current
    /// baseline of their cases; also returns a note for each of these. A baseline that was saved
    /// with uncommitted changes has no commit that an acceptance could name. An acceptance that
    /// matches no case of the baseline is kept.
    pub fn without_expired_acceptances(
        mut self,
        code_of: impl Fn(&Regex) -> Vec<CommitAndChanges>,
    ) -> (Self, Vec<String>) {
        let mut notes = Vec::new();
        self.accepted.retain(|rule| {
            let code = code_of(&rule.case_pattern);
            let same =
                |wanted: &String| code.iter().all(|it| it.is_clean_commit_beginning_with(wanted));
            let found = code
                .iter()
                .map(CommitAndChanges::short_commit_with_changes_mark)
                .collect::<BTreeSet<_>>();
            let several = found.len() > 1;
            let found = found.into_iter().collect::<Vec<_>>().join(" and ");
            let unnamed = code
                .iter()
                .any(|it| !it.is_clean_commit_beginning_with(&it.short_commit_with_changes_mark()));
            let holds = code.is_empty() || rule.baseline_commit_prefix.as_ref().is_some_and(same);
            if !holds {
                let why = match &rule.baseline_commit_prefix {
                    Some(of) => {
                        format!(
                            "the baseline is no longer of {of} but of {found}: expired, remove it"
                        )
                    }
                    None if unnamed => format!(
                        "without `baseline` it holds for `kernelgate compare` only; no `baseline` \
                         names one of {found}, save it of a commit"
                    ),
                    None if several => format!(
                        "without `baseline` it holds for `kernelgate compare` only; the cases that \
                         it names are of {found}: an entry for each, with its `baseline`"
                    ),
                    None => format!(
                        "without `baseline` it holds for `kernelgate compare` only: `baseline = \
                         \"{found}\"` makes it hold until the next baseline"
                    ),
                };
                notes.push(format!("{}: {why}", rule.acceptance_entry_name()));
            }
            holds
        });
        (self, notes)
    }

    /// Reports which rules apply to the judged cases, and which match no case. The argument `known`
    /// holds all existing case ids; `None` if there may be others, so that no pattern is reported
    /// as unmatched.
    pub fn report_effects(&self, judged: &[&str], known: Option<&[&str]>) -> GateRulesEffectReport {
        let count =
            |cases: &Regex, ids: &[&str]| ids.iter().filter(|id| cases.is_match(id)).count();
        let patterns = self.thresholds.iter().map(|rule| ("threshold", &rule.case_pattern));
        let patterns =
            patterns.chain(self.accepted.iter().map(|rule| ("accept", &rule.case_pattern)));
        let nothing = patterns
            .filter(|(_, cases)| known.is_some_and(|known| count(cases, known) == 0))
            .map(|(kind, cases)| {
                format!("[[{kind}]] `{}` matches no case", text_on_one_line(cases.as_str()))
            });
        let accepted = judged.iter().flat_map(|case| self.acceptances_of_case(case));
        GateRulesEffectReport {
            rules_file_name: self.rules_file_exists.then(|| RULES_FILE_NAME.to_owned()),
            removed: self.removed,
            threshold_rules_with_case_counts: self
                .thresholds
                .iter()
                .map(|rule| (rule.threshold_rule_text(), count(&rule.case_pattern, judged)))
                .collect(),
            accepted: accepted.collect(),
            notes_on_rules_without_effect: nothing.collect(),
            notes_on_unmatched_patterns: BTreeSet::new(),
            notes_on_unjudged_limits: Vec::new(),
        }
    }
}

/// Puts a text that others wrote on one line, because further lines could be mistaken for output of
/// the program.
pub fn text_on_one_line(text: &str) -> String {
    text.split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

impl PartialEq for CaseAcceptanceRule {
    fn eq(&self, other: &Self) -> bool {
        self.case_pattern.as_str() == other.case_pattern.as_str()
            && (self.max_accepted_relative_slowdown, self.max_accepted_error_ratio)
                == (other.max_accepted_relative_slowdown, other.max_accepted_error_ratio)
            && (self.allows_less_verification, self.allows_removal)
                == (other.allows_less_verification, other.allows_removal)
            && self.acceptance_reason == other.acceptance_reason
            && self.baseline_commit_prefix == other.baseline_commit_prefix
    }
}

impl CaseAcceptanceRule {
    fn acceptance_entry_name(&self) -> String {
        format!("[[accept]] `{}`", text_on_one_line(self.case_pattern.as_str()))
    }
}

impl CaseThresholdRule {
    /// Formats a threshold rule as text: "`^denoise/`: 3%, 200 ns".
    fn threshold_rule_text(&self) -> String {
        let RequestedLimits {
            relative_time_change_threshold: relative,
            absolute_time_change_threshold_ns: absolute_ns,
            output_error_growth_threshold: growth,
            device_memory_growth_threshold: device_memory,
            command_growth_threshold: launches,
            host_time_growth_threshold: host_time,
            energy_growth_threshold: energy,
            ..
        } = self.limits;
        let percent =
            |what: &str, value: Option<f64>| value.map(|value| format!("{what}{}%", 100.0 * value));
        let words = [
            percent("", relative),
            absolute_ns.map(|ns| format!("{ns} ns")),
            growth.map(|growth| format!("errors {growth} times as large")),
            percent("device memory ", device_memory),
            percent("launches ", launches),
            percent("host time ", host_time),
            percent("energy ", energy),
        ];
        let words: Vec<String> = words.into_iter().flatten().collect();
        format!("`{}`: {}", text_on_one_line(self.case_pattern.as_str()), words.join(", "))
    }

    /// Returns the name of a rule's entry, as the file writes it: ``[[threshold]] `^denoise/` ``.
    pub fn threshold_entry_name(&self) -> String {
        format!("[[threshold]] `{}`", text_on_one_line(self.case_pattern.as_str()))
    }
}

impl AcceptanceAppliedToCase {
    /// Formats an acceptance as text: "up to 12% slower: the reason".
    pub fn acceptance_text(&self) -> String {
        let slower = self
            .max_accepted_relative_slowdown
            .map(|slower| format!("up to {}% slower", 100.0 * slower));
        let growth = self
            .max_accepted_error_ratio
            .map(|growth| format!("errors up to {growth} times as large"));
        let verified = self.allows_less_verification.then(|| "less verified".to_owned());
        let removed = self.allows_removal.then(|| "removed".to_owned());
        let what: Vec<String> =
            slower.into_iter().chain(growth).chain(verified).chain(removed).collect();
        format!("{}: {}", what.join(", "), self.acceptance_reason)
    }
}

impl GateRulesEffectReport {
    /// Returns whether an applied acceptance allows a case to be removed.
    pub fn accepts_removal_of_case(&self, case: &str) -> bool {
        self.accepted.iter().any(|accepted| accepted.allows_removal && accepted.case_id == case)
    }

    /// Returns the lines about rules for the report: undecided limits, acceptances, thresholds and
    /// notes.
    pub fn report_lines(&self) -> Vec<String> {
        let file = self.rules_file_name.as_deref().unwrap_or(RULES_FILE_NAME);
        let accepted = self
            .accepted
            .iter()
            .map(|it| format!("accepted in {file}: {}: {}", it.case_id, it.acceptance_text()));
        let thresholds =
            self.threshold_rules_with_case_counts.iter().filter(|(_, count)| *count > 0);
        let thresholds = thresholds.map(|(words, count)| {
            let cases = if *count == 1 { "case" } else { "cases" };
            format!("threshold in {file}: {words} ({count} {cases})")
        });
        let notes = self.notes_on_rules_without_effect.iter().map(|note| format!("{file}: {note}"));
        let undecided =
            self.notes_on_unjudged_limits.iter().map(|why| format!("inconclusive: {file}: {why}"));
        // Limits that could not be judged come first, because the end of a long list is cut off.
        undecided.chain(accepted).chain(thresholds).chain(notes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::rules_file;
    use super::*;

    fn parse_test_rules(text: &str) -> Result<PackageGateRules, String> {
        rules_file::parse_rules("kernelgate.toml", text).map_err(|error| error.to_string())
    }

    fn test_provenance(text: &str) -> CommitAndChanges {
        let clean = text.strip_suffix("+changes");
        let (commit, dirty) = (clean.unwrap_or(text).to_owned(), clean.is_some());
        CommitAndChanges { commit: Some(commit), dirty }
    }

    const TEST_RULES_FILE: &str = r#"
        [[threshold]]
        cases = "^denoise/"
        relative = 0.03
        absolute-ns = 200

        [[threshold]]
        cases = "/graph/"
        relative = 0.1
        growth = 2.0
        launches = 0

        [[accept]]
        cases = "^denoise/loop/"
        slower = 0.12
        reason = "exact sums"
        baseline = "951c294"
    "#;

    #[test]
    fn the_last_of_several_matching_patterns_sets_the_limit() {
        let rules = parse_test_rules(TEST_RULES_FILE).unwrap();
        let both = rules.threshold_limits_for_case("denoise/loop/graph/hot");
        assert_eq!(
            (
                both.relative_time_change_threshold,
                both.absolute_time_change_threshold_ns,
                both.command_growth_threshold
            ),
            (Some(0.1), Some(200.0), Some(0.0))
        );
        let first = rules.threshold_limits_for_case("denoise/loop/fused/hot");
        assert_eq!(
            (first.relative_time_change_threshold, first.output_error_growth_threshold),
            (Some(0.03), None)
        );
        assert_eq!(rules.threshold_limits_for_case("attention/x"), RequestedLimits::default());
        let resolved = rules.limits_of_case(
            "denoise/loop/x",
            &CaseTimeAndErrorLimits::default_with_relative_limit(0.01),
        );
        assert_eq!(
            (
                resolved.accepted_relative_slowdown,
                resolved.relative_time_change_threshold.limit_value
            ),
            (Some(0.12), 0.03)
        );
        assert_eq!(
            resolved.relative_time_change_threshold.source,
            LimitSource::RulesThresholdEntry
        );
        assert!(rules.acceptances_of_case("denoise/step/x").is_empty());
    }

    #[test]
    fn an_acceptance_ends_with_a_new_baseline_or_in_the_base() {
        let rules = parse_test_rules(TEST_RULES_FILE).unwrap();
        let holds = |commits: &[&str]| {
            let commits: Vec<CommitAndChanges> =
                commits.iter().map(|it| test_provenance(it)).collect();
            let (rules, notes) = rules.clone().without_expired_acceptances(|_| commits.clone());
            (!rules.acceptances_of_case("denoise/loop/x").is_empty(), notes.join(" "))
        };
        assert_eq!(holds(&["951c29400d"]), (true, String::new()));
        assert_eq!(holds(&["951c294"]), (true, String::new()));
        let mut texts = String::new();
        let mut ended = |commits: &[&str]| {
            let (held, note) = holds(commits);
            assert!(!held, "{note}");
            texts.push_str(&format!("{commits:?}: {note}\n"));
        };
        ended(&["2af5b74"]);
        ended(&["951c294", "2af5b74"]);
        // In this part of the test, the baseline has no case that the acceptance matches, so the
        // acceptance does not expire.
        assert_eq!(holds(&[]), (true, String::new()));
        // A baseline that was saved with uncommitted changes is not the baseline of its commit, so
        // an acceptance that names this commit expires.
        ended(&["951c29400d+changes"]);
        ended(&["951c29400d", "951c29400d+changes"]);
        // This part of the test has baselines whose commit text is not a commit id, or has too few
        // digits.
        ["9", "", "951c29", "951c294zz"].iter().for_each(|other| ended(&[other]));
        let nameless =
            parse_test_rules(&TEST_RULES_FILE.replace("baseline = \"951c294\"", "")).unwrap();
        let at = |commits: &[&str]| {
            let commits: Vec<CommitAndChanges> =
                commits.iter().map(|it| test_provenance(it)).collect();
            nameless.clone().without_expired_acceptances(|_| commits.clone())
        };
        for commits in [&["2af5b74"][..], &["9"], &["2af5b74+changes"], &["2af5b74", "951c294"]] {
            let (unheld, notes) = at(commits);
            assert!(unheld.acceptances_of_case("denoise/loop/x").is_empty());
            texts.push_str(&format!("without a baseline, {commits:?}: {}\n", notes.join(" ")));
        }
        // In a comparison of two builds, an acceptance applies until the base's rules file also
        // contains it.
        let (new, notes) =
            nameless.clone().without_acceptances_of_base(&PackageGateRules::default());
        assert!(!new.acceptances_of_case("denoise/loop/x").is_empty() && notes.is_empty());
        let (old, notes) = nameless.clone().without_acceptances_of_base(&nameless);
        assert!(old.acceptances_of_case("denoise/loop/x").is_empty());
        texts.push_str(&notes.join(" "));
        insta::assert_snapshot!(texts);
    }

    #[test]
    fn the_last_of_several_matching_acceptances_applies() {
        let entry = |cases: &str, bounds: &str, reason: &str| {
            format!("[[accept]]\ncases = \"{cases}\"\n{bounds}\nreason = \"{reason}\"\n")
        };
        let rules = parse_test_rules(
            &[
                entry("^a/", "slower = 0.5", "first"),
                entry("^a/b", "growth = 3", "second\\n2 regressed, 0 improved"),
                entry("^a/c", "slower = 0.2\ngrowth = 2", "third"),
            ]
            .concat(),
        )
        .unwrap();
        let accepted = |case: &str| {
            let limits = rules
                .limits_of_case(case, &CaseTimeAndErrorLimits::default_with_relative_limit(0.01));
            (limits.accepted_relative_slowdown, limits.output_error_growth_threshold.limit_value)
        };
        assert_eq!(accepted("a/b"), (Some(0.5), 3.0));
        assert_eq!(accepted("a/c"), (Some(0.2), 2.0));
        let lines = rules.report_effects(&["a/b", "a/c"], None).report_lines();
        let lines_expected = [
            "accepted in kernelgate.toml: a/b: up to 50% slower: first",
            "accepted in kernelgate.toml: a/b: errors up to 3 times as large: second 2 regressed, \
             0 improved",
            "accepted in kernelgate.toml: a/c: up to 20% slower, errors up to 2 times as large: \
             third",
        ];
        assert_eq!(lines, lines_expected);
    }

    #[test]
    fn the_report_states_which_rules_matched_cases_and_which_did_not() {
        let rules = parse_test_rules(TEST_RULES_FILE).unwrap();
        let judged = ["denoise/loop/a", "denoise/step/b"];
        let report = rules.report_effects(&judged, Some(&judged));
        let expected = [
            "accepted in kernelgate.toml: denoise/loop/a: up to 12% slower: exact sums",
            "threshold in kernelgate.toml: `^denoise/`: 3%, 200 ns (2 cases)",
            "kernelgate.toml: [[threshold]] `/graph/` matches no case",
        ];
        assert_eq!(report.report_lines(), expected);
        assert_eq!(rules.report_effects(&judged, None).report_lines(), expected[..2]);
        assert_eq!(
            PackageGateRules::default().report_effects(&judged, Some(&judged)).report_lines(),
            Vec::<String>::new()
        );
    }
}
