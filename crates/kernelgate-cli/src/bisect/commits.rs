//! Searches among the commits of a repository: each question becomes a comparison of two builds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::search::{
    BisectionAnswer, BisectionQuestion, CommitTimeRatio, SearchEnd, SlowdownRange, search_slowdown,
};
use super::search_state::BisectionState;
use crate::compare::sides::git::{GitRepository, GitRevision, git, output, run_git};
use crate::compare::{
    CompareError, ComparisonRequest, PlanRequest, SessionTools, SideSource, one_case,
};
use crate::gate::comparison::Comparison;
use crate::gate::paired::TestPlan;
use crate::gate::verdict::Verdict;
use kernelgate_cuda::CaseFailure;

/// Lines of a message that give the reason why a commit was skipped.
const SHOWN_LINES: usize = 3;

/// The range of commits, the case and the settings of a search.
#[derive(Debug)]
pub struct BisectionRequest {
    /// The good revision of the search, at which the case is not slow.
    pub good: String,
    /// The bad revision, at which the case is slow; it descends from the good revision.
    pub bad: String,
    pub case: String,
    /// Settings of each comparison, with the plan for the good and the bad end; the search sets
    /// base, head, filter and `resume`.
    pub comparison: ComparisonRequest,
    /// Continue the last search, which was interrupted.
    pub resume: bool,
}

/// The result of a search for the commit that made a case slower.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bisection {
    /// The case.
    pub case: String,
    /// Good end of the search, name and commit: "v1.0 (1a2b3c4d)".
    pub good: String,
    /// Bad end of the search, name and commit: "main (5e6f7a8b)".
    pub bad: String,
    /// Commits after the good end up to the bad one, along first parents.
    pub commits: usize,
    /// The end of the search; places are counted from the good end, which is 0.
    pub ended: SearchEnd,
    /// Commits at the places; `None` if no commit was found.
    pub found: Option<FoundCommits>,
}

/// Commits that were found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FoundCommits {
    /// The last commit at which the case is not slow.
    pub last_good: String,
    /// Commits of which one slowed the case down, the oldest first: a single one, unless some could
    /// not be measured.
    pub suspects: Vec<SuspectCommit>,
    /// Output of `git diff --stat` between the last good commit and the first bad one.
    pub diff_stat: String,
    /// Executables of the two commits, if they were compared with each other: they show what
    /// changed in machine code.
    pub executables: Option<[PathBuf; 2]>,
    /// Commits that were skipped, with the reason.
    pub left_out: BTreeMap<String, String>,
}

/// A commit that may have slowed the case down.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SuspectCommit {
    /// Id of the commit.
    pub commit: String,
    /// First line of the suspected commit's message.
    pub subject: String,
    /// Number of commits that this commit merged; 0 for a commit that is not a merge.
    pub merged: usize,
}

/// Searches for the commit that slowed the case down.
///
/// # Errors
/// Fails if the revisions do not follow each other, a side cannot be made ready for another reason
/// than its code, or what is answered cannot be written.
pub fn run(request: &BisectionRequest) -> Result<Bisection, CompareError> {
    let repository = GitRepository::around_package(&request.comparison.package)?;
    let (good, bad) = (repository.resolve(&request.good)?, repository.resolve(&request.bad)?);
    let commits = first_parent_commits(&repository, &good, &bad)?;
    let tools = SessionTools::interruptible()?;
    let mut comparer = CommitComparer::new(request, &repository, &commits, tools)?;
    let blocks = first_attempt_blocks(request);
    let ended = search_slowdown(commits.len() - 1, blocks, |question| comparer.answer(question));
    comparer.tools.end_progress_line();
    let ended = ended?;
    let found = match &ended {
        SearchEnd::Found(found) => Some(comparer.describe(found)?),
        _ => None,
    };
    Ok(Bisection {
        case: request.case.clone(),
        good: good.label(),
        bad: bad.label(),
        commits: commits.len() - 1,
        ended,
        found,
    })
}

/// Lists the good commit, then the commits up to the bad one along first parents: a merge stands
/// for the commits of its branch.
fn first_parent_commits(
    repository: &GitRepository,
    good: &GitRevision,
    bad: &GitRevision,
) -> Result<Vec<String>, CompareError> {
    if good.commit == bad.commit {
        return Err(CompareError::OneCommit(good.name.clone(), bad.name.clone()));
    }
    let git_in = |folder: &Path| git(folder);
    let ancestor = output(git_in(&repository.top).args([
        "merge-base",
        "--is-ancestor",
        &good.commit,
        &bad.commit,
    ]))?;
    if !ancestor.status.success() {
        return Err(CompareError::NotDescended { good: good.label(), bad: bad.label() });
    }
    let range = format!("{}..{}", good.commit, bad.commit);
    let listed = run_git(
        git_in(&repository.top).args(["rev-list", "--first-parent", "--reverse", &range]),
        "list the commits",
    )?;
    Ok(std::iter::once(good.commit.clone()).chain(listed.lines().map(str::to_owned)).collect())
}

/// Compares pairs of commits and stores the answers.
struct CommitComparer<'a> {
    request: &'a BisectionRequest,
    repository: &'a GitRepository,
    commits: &'a [String],
    tools: SessionTools,
    state: BisectionState,
    path: PathBuf,
    /// The bench that has the case, once it was found: other benches need not be built.
    bench: Option<String>,
}

impl<'a> CommitComparer<'a> {
    fn new(
        request: &'a BisectionRequest,
        repository: &'a GitRepository,
        commits: &'a [String],
        tools: SessionTools,
    ) -> Result<Self, CompareError> {
        let path = request.comparison.folder.join("state.json");
        let mut identity = request.comparison.settings.clone();
        identity.extend(
            [
                ("the good commit", commits[0].clone()),
                ("the bad commit", commits[commits.len() - 1].clone()),
                ("the case", request.case.clone()),
                ("the profile", request.comparison.profile.clone()),
                ("a feature", request.comparison.features.join(" ")),
                ("a threshold", {
                    let PlanRequest { asked, max_blocks, .. } = &request.comparison.plan;
                    format!("{asked:?}, {max_blocks:?} blocks")
                }),
                ("--case-time", format!("{:?}", request.comparison.sampling)),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        let state = BisectionState::open_or_begin(&path, identity, request.resume)?;
        if !state.answers.is_empty() {
            tools.say(&format!("resuming with {} answers", state.answers.len()));
        }
        Ok(Self { request, repository, commits, tools, state, path, bench: None })
    }

    fn answer(&mut self, question: &BisectionQuestion) -> Result<BisectionAnswer, CompareError> {
        let BisectionQuestion { base, head, attempt, .. } = *question;
        let short = |place: usize| self.commits[place].get(..8).unwrap_or_default().to_owned();
        let key = format!("{} {} {attempt}", self.commits[base], self.commits[head]);
        if let Some(answer) = self.state.answers.get(&key) {
            return Ok(answer.clone());
        }
        let label = format!(
            "{} against {} (commit {head} of {}){}",
            short(head),
            short(base),
            self.commits.len() - 1,
            if attempt > 0 { format!(", attempt {}", attempt + 1) } else { String::new() }
        );
        let interrupted = self.state.asking.as_ref() == Some(&key);
        self.state.asking = Some(key.clone());
        self.write_state()?;
        let answer = self.compare_commits(question, interrupted, &label)?;
        self.tools.say(&format!("{label}: {}", words(&answer)));
        self.state.asking = None;
        self.state.answers.insert(key, answer.clone());
        self.write_state()?;
        Ok(answer)
    }

    fn compare_commits(
        &mut self,
        question: &BisectionQuestion,
        resume: bool,
        label: &str,
    ) -> Result<BisectionAnswer, CompareError> {
        let BisectionQuestion { base, head, attempt, plan } = *question;
        let template = &self.request.comparison;
        let plan = plan.map_or_else(
            || {
                let template_plan = template.plan.clone();
                let more = (attempt > 0).then(|| first_attempt_blocks(self.request) << attempt);
                PlanRequest { max_blocks: more.or(template_plan.max_blocks), ..template_plan }
            },
            PlanRequest::with_fixed_plan,
        );
        let benches = self.bench.iter().cloned().collect::<Vec<_>>();
        let comparison = ComparisonRequest {
            base: SideSource::Revision(self.commits[base].clone()),
            head: SideSource::Revision(self.commits[head].clone()),
            benches: if benches.is_empty() { template.benches.clone() } else { benches },
            filter: Some(format!("^{}$", regex::escape(&self.request.case))),
            plan,
            budget: template.budget * (1 << attempt),
            resume,
            ..template.clone()
        };
        match one_case::compare_one_case(
            &comparison,
            &self.request.case,
            self.tools.with_progress_label(label),
        ) {
            Ok(outcome) => {
                self.bench = self.bench.take().or(outcome.bench);
                Ok(bisection_answer(&outcome.comparison, &self.request.case))
            }
            // The good end is the base of every comparison: if it does not build, no other commit
            // can be measured.
            Err(error) if error.is_unbuildable() => {
                Ok(BisectionAnswer::Unusable(shortened_subject(&error.to_string())))
            }
            Err(error) => Err(error),
        }
    }

    fn write_state(&self) -> Result<(), CompareError> {
        Ok(self.state.write(&self.path)?)
    }

    fn describe(&self, found: &SlowdownRange) -> Result<FoundCommits, CompareError> {
        let (good, bad) = (&self.commits[found.last_good], &self.commits[found.first_bad]);
        let suspects = &self.commits[found.last_good + 1..=found.first_bad];
        let top = || git(&self.repository.top);
        let stat =
            ["diff", "--stat=100", "--no-color", "--no-ext-diff", "--no-textconv", good, bad, "--"];
        let folder = &self.request.comparison.folder;
        let executables = self
            .bench
            .as_ref()
            .map(|bench| ["base", "head"].map(|side| folder.join(side).join("bin").join(bench)));
        // Result files of the previous comparison are no longer valid.
        let executables = executables.filter(|paths| {
            matches!(found.confirmation, BisectionAnswer::Slower(_) | BisectionAnswer::NotSlower(_))
                && paths.iter().all(|path| path.is_file())
        });
        Ok(FoundCommits {
            last_good: good.clone(),
            suspects: suspects
                .iter()
                .map(|commit| self.suspect(commit))
                .collect::<Result<_, _>>()?,
            diff_stat: run_git(top().args(stat), "list the differences")?,
            executables,
            left_out: found
                .left_out
                .iter()
                .map(|(place, why)| (self.commits[*place].clone(), why.clone()))
                .collect(),
        })
    }

    fn suspect(&self, commit: &str) -> Result<SuspectCommit, CompareError> {
        let top = || git(&self.repository.top);
        let subject = run_git(
            top().args(["log", "-1", "--no-show-signature", "--format=%s", commit, "--"]),
            "read a commit",
        )?;
        let range = format!("{commit}^1..{commit}");
        let counted = run_git(top().args(["rev-list", "--count", &range]), "count commits")?;
        let merged = counted.parse::<usize>().map_or(0, |count| count.saturating_sub(1));
        Ok(SuspectCommit { commit: commit.to_owned(), subject, merged })
    }
}

/// Largest number of blocks for the first attempt at a question.
fn first_attempt_blocks(request: &BisectionRequest) -> usize {
    request.comparison.plan.max_blocks.unwrap_or(TestPlan::default().max_blocks)
}

/// Converts a comparison into an answer of the search: whether a case is slower.
fn bisection_answer(comparison: &Comparison, case: &str) -> BisectionAnswer {
    let facts = &comparison.facts;
    if facts.untimed.iter().any(|id| id == case) {
        return BisectionAnswer::NotSlower(CommitTimeRatio { ratio: 1.0, low: 1.0, high: 1.0 });
    }
    if let Some(judged) = comparison.judged.iter().find(|it| it.case == case) {
        let ratio = judged.ratio;
        let times = CommitTimeRatio { ratio: ratio.center, low: ratio.low, high: ratio.high };
        let reason = judged.reason().unwrap_or_else(|| "inconclusive".to_owned());
        return match judged.verdict {
            Verdict::Regressed => BisectionAnswer::Slower(times),
            Verdict::Unchanged | Verdict::Improved | Verdict::Accepted => {
                BisectionAnswer::NotSlower(times)
            }
            Verdict::Inconclusive if judged.case_error().is_some() => {
                BisectionAnswer::Unusable(reason)
            }
            Verdict::Inconclusive => BisectionAnswer::Undecided(reason),
        };
    }
    let failed_in = |what: &str, cases: &BTreeMap<String, CaseFailure>| {
        cases.get(case).map(|why| format!("{what}: {why}"))
    };
    let refused = comparison
        .refused
        .iter()
        .find(|refusal| refusal.cases.is_empty() || refusal.cases.iter().any(|id| id == case));
    let why = failed_in("the case is wrong", &comparison.failed)
        .or_else(|| failed_in("the case is wrong in the base", &facts.failed_in_base))
        .or_else(|| comparison.skipped.get(case).map(|why| format!("the case was skipped: {why}")))
        .or_else(|| {
            let it = refused?;
            Some(format!("{} is `{}` in the base and `{}` here", it.field, it.base, it.head))
        })
        .or_else(|| facts.broken.first().map(|broken| broken.case_error().to_string()))
        .unwrap_or_else(|| "there is no such case".to_owned());
    BisectionAnswer::Unusable(shortened_subject(&why))
}

/// Shortens a message to its first lines and its last line, which names the error.
fn shortened_subject(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let errors = lines.iter().filter(|line| line.starts_with("error"));
    let first = lines.first().into_iter().chain(errors);
    first.take(SHOWN_LINES).copied().collect::<Vec<_>>().join("; ")
}

/// Formats the answer of a comparison, such as "slower, +5.0 % (+4.1 to +6.0)".
pub fn words(answer: &BisectionAnswer) -> String {
    let times = |CommitTimeRatio { ratio, low, high }: &CommitTimeRatio| {
        let percent = |ratio: f64| 100.0 * (ratio - 1.0);
        format!("{:+.1} % ({:+.1} to {:+.1})", percent(*ratio), percent(*low), percent(*high))
    };
    match answer {
        BisectionAnswer::Slower(it) => format!("slower, {}", times(it)),
        BisectionAnswer::NotSlower(it) => format!("not slower, {}", times(it)),
        BisectionAnswer::Undecided(why) => format!("inconclusive: {why}"),
        BisectionAnswer::Unusable(why) => format!("skipped: {why}"),
    }
}
