//! `kernelgate.toml`: the rules that a package commits for its gate. Thresholds by case; slow-downs
//! that are accepted, with a bound, a reason, and until the next baseline; earlier names of cases.
//!
//! Deliberately absent: reading the file (`rules_file`), and any rule that would make a wrong case
//! pass.

pub mod rules_file;

use std::collections::{BTreeMap, BTreeSet};

use super::limits::{AskedLimits, CaseLimits, LimitSource};
use kernelgate::record::Provenance;
use regex::Regex;
use serde::{Deserialize, Serialize};

/// Name of the rules file, next to `Cargo.toml`.
pub const RULES_FILE: &str = "kernelgate.toml";

/// Rules of a package; empty if it has no rules file.
#[derive(Debug, Clone, Default)]
pub struct PackageRules {
    /// Whether the file exists.
    pub exists: bool,
    /// Threshold rules in the order of the file.
    pub thresholds: Vec<ThresholdRule>,
    /// Acceptance rules in the order of the file.
    pub accepted: Vec<AcceptanceRule>,
    /// Present ids of cases by their earlier ids, for histories.
    pub renamed: BTreeMap<String, String>,
    /// The meaning of a case that the head no longer has.
    pub removed: RemovedCasesMeaning,
}

/// The meaning of a case that only the base of a comparison has, if its removal is not accepted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemovedCasesMeaning {
    /// The comparison is inconclusive.
    #[default]
    Inconclusive,
    /// A removed case fails the comparison, as a slower case does.
    Fail,
    /// Cases may be removed; the report lists them.
    Ignore,
}

/// Limits for some cases. An absent limit keeps the value that other cases have.
#[derive(Debug, Clone)]
pub struct ThresholdRule {
    /// Pattern of the case ids to which the rule applies.
    pub cases: Regex,
    /// Limits that the rule sets for its cases.
    pub limits: AskedLimits,
}

/// A slow-down, or a loss of accuracy, that is intended.
#[derive(Debug, Clone)]
pub struct AcceptanceRule {
    /// Pattern of the case ids to which the rule applies.
    pub cases: Regex,
    /// Largest accepted relative growth of the time.
    pub slower: Option<f64>,
    /// Largest accepted growth of errors, a ratio.
    pub growth: Option<f64>,
    /// Whether the cases of the rule may be verified less completely than before.
    pub less_verified: bool,
    /// Whether the rule accepts that its cases are removed.
    pub removed: bool,
    pub reason: String,
    /// First digits of the commit of the baseline from which the growth is measured.
    pub baseline: Option<String>,
}

/// An acceptance that applied to a case, for the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AppliedAcceptance {
    /// The case.
    pub case: String,
    /// Largest accepted relative growth of the time.
    pub slower: Option<f64>,
    /// Largest accepted growth of errors, a ratio.
    pub growth: Option<f64>,
    /// Whether the case may be verified less completely than before.
    pub less_verified: bool,
    /// Whether the rules accept that the case is removed.
    pub removed: bool,
    /// The reason.
    pub reason: String,
}

/// Effects of the file on a comparison.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RulesReport {
    /// Path of the rules file; `None` without a file.
    pub file: Option<String>,
    /// The effect on the verdict of a case that the head no longer has.
    pub removed: RemovedCasesMeaning,
    /// Thresholds in words, and the number of judged cases that each names.
    pub thresholds: Vec<(String, usize)>,
    /// Acceptances of the rules file that apply to cases.
    pub accepted: Vec<AppliedAcceptance>,
    /// Notes, one sentence for each rule of the rules file that has no effect.
    pub notes: Vec<String>,
    /// Patterns that match no case of a shard, in sentences: all shards together decide.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub unmatched: BTreeSet<String>,
    /// Limits that could not be judged for any of their cases, as sentences; they make the outcome
    /// inconclusive.
    pub undecided: Vec<String>,
}

impl PackageRules {
    /// Text that differs whenever the rules differ; `None` without a file.
    pub fn identity(&self) -> Option<String> {
        let lines = self.report(&[], None).thresholds.into_iter().map(|(words, _)| words);
        let accepted = self.accepted.iter().map(|it| format!("{it:?}"));
        let removed = std::iter::once(format!("removed {:?}", self.removed));
        self.exists.then(|| lines.chain(accepted).chain(removed).collect::<Vec<_>>().join("; "))
    }

    /// The limits that are set for a case: the last pattern that names it and sets a limit counts.
    pub fn limits(&self, case: &str) -> AskedLimits {
        let of_case = self.thresholds.iter().filter(|rule| rule.cases.is_match(case));
        of_case.fold(AskedLimits::default(), |before, rule| rule.limits.or(before))
    }

    /// The limits of a case: the common limits, replaced by the case's thresholds and raised by its
    /// acceptances.
    pub fn resolve(&self, case: &str, of_all: &CaseLimits) -> CaseLimits {
        let accepted = self.acceptances_for(case);
        of_all.overridden_by(&self.limits(case), LimitSource::Threshold).larger_with_accepted(
            accepted.iter().find_map(|it| it.slower),
            accepted.iter().find_map(|it| it.growth),
        )
    }

    /// The acceptances of a case: the last entry that names it and sets a bound counts. The result
    /// is in the order of the file, one for each entry of which a bound holds.
    pub fn acceptances_for(&self, case: &str) -> Vec<AppliedAcceptance> {
        let (mut has_slower, mut has_growth) = (false, false);
        let (mut has_verified, mut has_removed) = (false, false);
        let mut found = Vec::new();
        for rule in self.accepted.iter().rev().filter(|rule| rule.cases.is_match(case)) {
            let slower = rule.slower.filter(|_| !has_slower);
            let growth = rule.growth.filter(|_| !has_growth);
            let less_verified = rule.less_verified && !has_verified;
            has_slower |= slower.is_some();
            has_growth |= growth.is_some();
            let removed = rule.removed && !has_removed;
            has_verified |= less_verified;
            has_removed |= removed;
            if slower.is_some() || growth.is_some() || less_verified || removed {
                let (case, reason) = (case.to_owned(), rule.reason.clone());
                found.push(AppliedAcceptance {
                    case,
                    slower,
                    growth,
                    less_verified,
                    removed,
                    reason,
                });
            }
        }
        found.reverse();
        found
    }

    /// Returns whether a case may be verified less completely than before.
    pub fn accepts_less_verified(&self, case: &str) -> bool {
        self.acceptances_for(case).iter().any(|it| it.less_verified)
    }

    /// The rules without acceptances that another state of the file has too: the base includes
    /// their effect.
    pub fn rules_added_since(mut self, base: &Self) -> (Self, Vec<String>) {
        let (expired, new) =
            self.accepted.into_iter().partition(|rule| base.accepted.contains(rule));
        self.accepted = new;
        let notes = expired.iter().map(|rule| {
            format!("{} is accepted in the base already: expired, remove it", rule.words())
        });
        let notes = notes.collect();
        (self, notes)
    }

    /// Returns the rules without the acceptances of cases that do not belong to a baseline of this
    /// code. An acceptance names the first digits of the baseline's commit; a baseline that was
    /// saved with uncommitted changes cannot be named. An entry that names no case of the baseline
    /// stays as it is.
    pub fn rules_for_baseline(
        mut self,
        code_of: impl Fn(&Regex) -> Vec<Provenance>,
    ) -> (Self, Vec<String>) {
        let mut notes = Vec::new();
        self.accepted.retain(|rule| {
            let code = code_of(&rule.cases);
            let same = |wanted: &String| code.iter().all(|it| it.is_of(wanted));
            let found = code.iter().map(Provenance::short_commit).collect::<BTreeSet<_>>();
            let several = found.len() > 1;
            let found = found.into_iter().collect::<Vec<_>>().join(" and ");
            let unnamed = code.iter().any(|it| !it.is_of(&it.short_commit()));
            let holds = code.is_empty() || rule.baseline.as_ref().is_some_and(same);
            if !holds {
                let why = match &rule.baseline {
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
                notes.push(format!("{}: {why}", rule.words()));
            }
            holds
        });
        (self, notes)
    }

    /// Effects of the file on the cases that are judged. `known` holds all existing case ids, if no
    /// others can exist.
    pub fn report(&self, judged: &[&str], known: Option<&[&str]>) -> RulesReport {
        let count =
            |cases: &Regex, ids: &[&str]| ids.iter().filter(|id| cases.is_match(id)).count();
        let patterns = self.thresholds.iter().map(|rule| ("threshold", &rule.cases));
        let patterns = patterns.chain(self.accepted.iter().map(|rule| ("accept", &rule.cases)));
        let nothing = patterns
            .filter(|(_, cases)| known.is_some_and(|known| count(cases, known) == 0))
            .map(|(kind, cases)| {
                format!("[[{kind}]] `{}` matches no case", one_line(cases.as_str()))
            });
        let accepted = judged.iter().flat_map(|case| self.acceptances_for(case));
        RulesReport {
            file: self.exists.then(|| RULES_FILE.to_owned()),
            removed: self.removed,
            thresholds: self
                .thresholds
                .iter()
                .map(|rule| (rule.words(), count(&rule.cases, judged)))
                .collect(),
            accepted: accepted.collect(),
            notes: nothing.collect(),
            unmatched: BTreeSet::new(),
            undecided: Vec::new(),
        }
    }
}

/// Text that others wrote, on one line: further lines could be taken for the program's.
pub fn one_line(text: &str) -> String {
    text.split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

impl PartialEq for AcceptanceRule {
    fn eq(&self, other: &Self) -> bool {
        self.cases.as_str() == other.cases.as_str()
            && (self.slower, self.growth) == (other.slower, other.growth)
            && (self.less_verified, self.removed) == (other.less_verified, other.removed)
            && self.reason == other.reason
            && self.baseline == other.baseline
    }
}

impl AcceptanceRule {
    fn words(&self) -> String {
        format!("[[accept]] `{}`", one_line(self.cases.as_str()))
    }
}

impl ThresholdRule {
    /// The threshold rule as text: "`^denoise/`: 3%, 200 ns".
    fn words(&self) -> String {
        let AskedLimits {
            relative,
            absolute_ns,
            growth,
            device_memory,
            launches,
            host_time,
            energy,
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
        format!("`{}`: {}", one_line(self.cases.as_str()), words.join(", "))
    }

    /// Name of a rule's entry, as in the file: ``[[threshold]] `^denoise/` ``.
    pub fn name(&self) -> String {
        format!("[[threshold]] `{}`", one_line(self.cases.as_str()))
    }
}

impl AppliedAcceptance {
    /// The acceptance in words: "up to 12% slower: the reason".
    pub fn words(&self) -> String {
        let slower = self.slower.map(|slower| format!("up to {}% slower", 100.0 * slower));
        let growth = self.growth.map(|growth| format!("errors up to {growth} times as large"));
        let verified = self.less_verified.then(|| "less verified".to_owned());
        let removed = self.removed.then(|| "removed".to_owned());
        let what: Vec<String> =
            slower.into_iter().chain(growth).chain(verified).chain(removed).collect();
        format!("{}: {}", what.join(", "), self.reason)
    }
}

impl RulesReport {
    /// Returns whether the rules accept that a case is removed.
    pub fn accepts_removed(&self, case: &str) -> bool {
        self.accepted.iter().any(|accepted| accepted.removed && accepted.case == case)
    }

    /// Returns the lines about the rules that the report must show.
    pub fn lines(&self) -> Vec<String> {
        let file = self.file.as_deref().unwrap_or(RULES_FILE);
        let accepted = self
            .accepted
            .iter()
            .map(|it| format!("accepted in {file}: {}: {}", it.case, it.words()));
        let thresholds = self.thresholds.iter().filter(|(_, count)| *count > 0);
        let thresholds = thresholds.map(|(words, count)| {
            let cases = if *count == 1 { "case" } else { "cases" };
            format!("threshold in {file}: {words} ({count} {cases})")
        });
        let notes = self.notes.iter().map(|note| format!("{file}: {note}"));
        let undecided = self.undecided.iter().map(|why| format!("inconclusive: {file}: {why}"));
        // Undecided bounds come first, because the end of a long list is cut.
        undecided.chain(accepted).chain(thresholds).chain(notes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::rules_file;
    use super::*;

    fn parse(text: &str) -> Result<PackageRules, String> {
        rules_file::parse("kernelgate.toml", text).map_err(|error| error.to_string())
    }

    fn code_provenance(text: &str) -> Provenance {
        let clean = text.strip_suffix("+changes");
        let (commit, dirty) = (clean.unwrap_or(text).to_owned(), clean.is_some());
        Provenance { commit: Some(commit), dirty }
    }

    const COMPLETE_RULES: &str = r#"
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
        let rules = parse(COMPLETE_RULES).unwrap();
        let both = rules.limits("denoise/loop/graph/hot");
        assert_eq!(
            (both.relative, both.absolute_ns, both.launches),
            (Some(0.1), Some(200.0), Some(0.0))
        );
        let first = rules.limits("denoise/loop/fused/hot");
        assert_eq!((first.relative, first.growth), (Some(0.03), None));
        assert_eq!(rules.limits("attention/x"), AskedLimits::default());
        let resolved = rules.resolve("denoise/loop/x", &CaseLimits::default_limit(0.01));
        assert_eq!((resolved.accepted, resolved.relative.value), (Some(0.12), 0.03));
        assert_eq!(resolved.relative.source, LimitSource::Threshold);
        assert!(rules.acceptances_for("denoise/step/x").is_empty());
    }

    #[test]
    fn an_acceptance_ends_with_the_next_baseline_or_when_the_base_has_it() {
        let rules = parse(COMPLETE_RULES).unwrap();
        let holds = |commits: &[&str]| {
            let commits: Vec<Provenance> = commits.iter().map(|it| code_provenance(it)).collect();
            let (rules, notes) = rules.clone().rules_for_baseline(|_| commits.clone());
            (!rules.acceptances_for("denoise/loop/x").is_empty(), notes.join(" "))
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
        // The baseline has no case of the entry, so nothing can expire.
        assert_eq!(holds(&[]), (true, String::new()));
        // A baseline that was saved with changes is not the baseline of that commit.
        ended(&["951c29400d+changes"]);
        ended(&["951c29400d", "951c29400d+changes"]);
        // The test has texts that do not name a commit, or have too few digits.
        ["9", "", "951c29", "951c294zz"].iter().for_each(|other| ended(&[other]));
        let nameless = parse(&COMPLETE_RULES.replace("baseline = \"951c294\"", "")).unwrap();
        let at = |commits: &[&str]| {
            let commits: Vec<Provenance> = commits.iter().map(|it| code_provenance(it)).collect();
            nameless.clone().rules_for_baseline(|_| commits.clone())
        };
        for commits in [&["2af5b74"][..], &["9"], &["2af5b74+changes"], &["2af5b74", "951c294"]] {
            let (unheld, notes) = at(commits);
            assert!(unheld.acceptances_for("denoise/loop/x").is_empty());
            texts.push_str(&format!("without a baseline, {commits:?}: {}\n", notes.join(" ")));
        }
        // In a comparison an acceptance applies as long as the base build's file does not have it.
        let (new, notes) = nameless.clone().rules_added_since(&PackageRules::default());
        assert!(!new.acceptances_for("denoise/loop/x").is_empty() && notes.is_empty());
        let (old, notes) = nameless.clone().rules_added_since(&nameless);
        assert!(old.acceptances_for("denoise/loop/x").is_empty());
        texts.push_str(&notes.join(" "));
        insta::assert_snapshot!(texts);
    }

    #[test]
    fn the_last_of_several_matching_acceptances_applies() {
        let entry = |cases: &str, bounds: &str, reason: &str| {
            format!("[[accept]]\ncases = \"{cases}\"\n{bounds}\nreason = \"{reason}\"\n")
        };
        let rules = parse(
            &[
                entry("^a/", "slower = 0.5", "first"),
                entry("^a/b", "growth = 3", "second\\n2 regressed, 0 improved"),
                entry("^a/c", "slower = 0.2\ngrowth = 2", "third"),
            ]
            .concat(),
        )
        .unwrap();
        let accepted = |case: &str| {
            let limits = rules.resolve(case, &CaseLimits::default_limit(0.01));
            (limits.accepted, limits.growth.value)
        };
        assert_eq!(accepted("a/b"), (Some(0.5), 3.0));
        assert_eq!(accepted("a/c"), (Some(0.2), 2.0));
        let lines = rules.report(&["a/b", "a/c"], None).lines();
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
        let rules = parse(COMPLETE_RULES).unwrap();
        let judged = ["denoise/loop/a", "denoise/step/b"];
        let report = rules.report(&judged, Some(&judged));
        let expected = [
            "accepted in kernelgate.toml: denoise/loop/a: up to 12% slower: exact sums",
            "threshold in kernelgate.toml: `^denoise/`: 3%, 200 ns (2 cases)",
            "kernelgate.toml: [[threshold]] `/graph/` matches no case",
        ];
        assert_eq!(report.lines(), expected);
        assert_eq!(rules.report(&judged, None).lines(), expected[..2]);
        assert_eq!(
            PackageRules::default().report(&judged, Some(&judged)).lines(),
            Vec::<String>::new()
        );
    }
}
