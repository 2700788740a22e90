//! Answers the questions of a bisection: compares the builds of two commits of a repository.

use crate::gate::recorded_names::{
    RECORDED_LIMIT_NAMES, RECORDED_SAMPLING_NAMES, debug_text_with_recorded_names,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::search::{
    BisectionAnswer, BisectionEnd, BisectionQuestion, CommitRangeWithSlowdown, HeadToBaseTimeRatio,
    bisect_commit_range,
};
use super::search_state::SavedBisectionState;
use crate::compare::sides::git::{
    GitRepository, NamedGitRevision, isolated_git, run_git_and_return_output, run_git_or_fail,
};
use crate::compare::{
    BuildComparisonRequest, CompareError, ComparedSideSource, ProgressAndChildProcesses,
    TestPlanRequest, one_case,
};
use crate::gate::comparison::Comparison;
use crate::gate::paired::ComparisonTestPlan;
use crate::gate::verdict::VerdictOnCase;
use kernelgate_cuda::CaseFailureReason;

/// Largest number of lines of a build error that are kept as the reason why a commit was skipped.
const MAX_SKIP_REASON_LINES: usize = 3;

/// The range of commits, the case and the comparison settings of a bisection, which searches for
/// the commit that made the case slower.
#[derive(Debug)]
pub struct BisectionRequest {
    /// The good revision of the bisection, at which the case is not slow.
    pub good_revision: String,
    /// The bad revision of the bisection, at which the case is slow; it must descend from the good
    /// revision.
    pub bad_revision: String,
    pub case_id: String,
    /// Settings of each comparison of the bisection; the bisection itself sets base, head, filter
    /// and `resume`.
    pub comparison: BuildComparisonRequest,
    /// Whether to continue the previous bisection, which was interrupted.
    pub resume_interrupted_bisection: bool,
}

/// The result of a bisection, which searches for the commit that made a case slower.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BisectionResult {
    /// Id of the case, in the form `workload/problem/implementation/cache`.
    #[serde(rename = "case")]
    pub case_id: String,
    /// Good end of the bisection, as revision name and commit: "v1.0 (1a2b3c4d)".
    #[serde(rename = "good")]
    pub good_revision: String,
    /// Bad end of the bisection, as revision name and commit: "main (5e6f7a8b)".
    #[serde(rename = "bad")]
    pub bad_revision: String,
    /// Number of commits after the good end up to and including the bad end, along first parents.
    #[serde(rename = "commits")]
    pub bisected_commit_count: usize,
    /// How the bisection ended; commits are given as positions, counted from the good end, which is
    /// 0.
    #[serde(rename = "ended")]
    pub bisection_end: BisectionEnd,
    /// The commits that the bisection found to have caused the slow-down; `None` if it found none.
    pub found: Option<FoundSlowdownCommits>,
}

/// Commits that a bisection found as the cause of a slow-down.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FoundSlowdownCommits {
    /// The last commit at which the case is not slower than at the good end.
    #[serde(rename = "last_good")]
    pub last_good_commit: String,
    /// Commits of which one slowed the case down, the oldest first: exactly one, unless some
    /// commits could not be measured.
    pub suspects: Vec<SlowdownSuspectCommit>,
    /// Output of `git diff --stat` between the last good commit and the first bad commit of the
    /// bisection.
    #[serde(rename = "diff_stat")]
    pub git_diff_stat: String,
    /// Paths of the bench executables of the last good and the first bad commit, whose machine code
    /// can be compared; `None` if the two were not compared.
    pub executables: Option<[PathBuf; 2]>,
    /// Ids of commits that the bisection skipped, with the reasons.
    #[serde(rename = "left_out")]
    pub skipped_commits: BTreeMap<String, String>,
}

/// A commit of the bisected range that may have slowed the case down.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SlowdownSuspectCommit {
    /// Id of the commit that may have slowed the case down.
    #[serde(rename = "commit")]
    pub suspect_commit: String,
    /// First line of the suspect commit's message.
    #[serde(rename = "subject")]
    pub commit_subject: String,
    /// Number of commits that this merge commit brought in; 0 if the commit is not a merge.
    #[serde(rename = "merged")]
    pub merged_commit_count: usize,
}

/// Searches by bisection for the commit that slowed the case down.
///
/// # Errors
/// Fails if the bad revision does not descend from the good one, a commit cannot be prepared for
/// another reason than its code, or the bisection's state file cannot be written.
pub fn bisect_slowdown(request: &BisectionRequest) -> Result<BisectionResult, CompareError> {
    let repository = GitRepository::open_around_package(&request.comparison.package_root)?;
    let (good, bad) = (
        repository.resolve_revision(&request.good_revision)?,
        repository.resolve_revision(&request.bad_revision)?,
    );
    let commits = commits_along_first_parents(&repository, &good, &bad)?;
    let tools = ProgressAndChildProcesses::with_interrupt_handler()?;
    let mut comparer =
        BisectionCommitComparer::open_commit_comparer(request, &repository, &commits, tools)?;
    let blocks = max_blocks_of_first_attempt(request);
    let ended = bisect_commit_range(commits.len() - 1, blocks, |question| {
        comparer.answer_bisection_question(question)
    });
    comparer.progress_and_children.clear_progress_line();
    let ended = ended?;
    let found = match &ended {
        BisectionEnd::SlowdownFound(found) => Some(comparer.describe_found_commits(found)?),
        _ => None,
    };
    Ok(BisectionResult {
        case_id: request.case_id.clone(),
        good_revision: good.name_and_short_commit(),
        bad_revision: bad.name_and_short_commit(),
        bisected_commit_count: commits.len() - 1,
        bisection_end: ended,
        found,
    })
}

/// Lists the good commit, then the commits up to the bad one along first parents, oldest first: a
/// merge commit stands for its merged branch.
fn commits_along_first_parents(
    repository: &GitRepository,
    good: &NamedGitRevision,
    bad: &NamedGitRevision,
) -> Result<Vec<String>, CompareError> {
    if good.full_commit_id == bad.full_commit_id {
        return Err(CompareError::GoodAndBadAreOneCommit(
            good.revision_name.clone(),
            bad.revision_name.clone(),
        ));
    }
    let git_in = |folder: &Path| isolated_git(folder);
    let ancestor = run_git_and_return_output(git_in(&repository.work_tree_root).args([
        "merge-base",
        "--is-ancestor",
        &good.full_commit_id,
        &bad.full_commit_id,
    ]))?;
    if !ancestor.status.success() {
        return Err(CompareError::BadNotDescendedFromGood {
            good: good.name_and_short_commit(),
            bad: bad.name_and_short_commit(),
        });
    }
    let range = format!("{}..{}", good.full_commit_id, bad.full_commit_id);
    let listed = run_git_or_fail(
        git_in(&repository.work_tree_root).args([
            "rev-list",
            "--first-parent",
            "--reverse",
            &range,
        ]),
        "list the commits",
    )?;
    Ok(std::iter::once(good.full_commit_id.clone())
        .chain(listed.lines().map(str::to_owned))
        .collect())
}

/// Compares the builds of pairs of commits, and stores the answers in the bisection's state file.
struct BisectionCommitComparer<'a> {
    request: &'a BisectionRequest,
    repository: &'a GitRepository,
    commits: &'a [String],
    progress_and_children: ProgressAndChildProcesses,
    state: SavedBisectionState,
    bisection_state_file: PathBuf,
    /// The bench that has the bisected case, known after the first comparison: later comparisons
    /// build only this bench.
    bench_with_case: Option<String>,
}

impl<'a> BisectionCommitComparer<'a> {
    fn open_commit_comparer(
        request: &'a BisectionRequest,
        repository: &'a GitRepository,
        commits: &'a [String],
        tools: ProgressAndChildProcesses,
    ) -> Result<Self, CompareError> {
        let path = request.comparison.comparison_folder.join("state.json");
        let mut identity = request.comparison.bench_variables.clone();
        identity.extend(
            [
                ("the good commit", commits[0].clone()),
                ("the bad commit", commits[commits.len() - 1].clone()),
                ("the case", request.case_id.clone()),
                ("the profile", request.comparison.build_profile.clone()),
                ("a feature", request.comparison.cargo_features.join(" ")),
                ("a threshold", {
                    let TestPlanRequest {
                        requested_limits: asked,
                        max_trial_blocks: max_blocks,
                        ..
                    } = &request.comparison.plan;
                    let limits_text = debug_text_with_recorded_names(asked, RECORDED_LIMIT_NAMES);
                    format!("{limits_text}, {max_blocks:?} blocks")
                }),
                (
                    "--case-time",
                    debug_text_with_recorded_names(
                        &request.comparison.sampling,
                        RECORDED_SAMPLING_NAMES,
                    ),
                ),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        let state = SavedBisectionState::resume_or_begin_bisection(
            &path,
            identity,
            request.resume_interrupted_bisection,
        )?;
        if !state.answers_by_question.is_empty() {
            tools.print_line(&format!("resuming with {} answers", state.answers_by_question.len()));
        }
        Ok(Self {
            request,
            repository,
            commits,
            progress_and_children: tools,
            state,
            bisection_state_file: path,
            bench_with_case: None,
        })
    }

    fn answer_bisection_question(
        &mut self,
        question: &BisectionQuestion,
    ) -> Result<BisectionAnswer, CompareError> {
        let BisectionQuestion {
            base_position: base,
            head_position: head,
            earlier_attempts: attempt,
            ..
        } = *question;
        let short = |place: usize| self.commits[place].get(..8).unwrap_or_default().to_owned();
        let key = format!("{} {} {attempt}", self.commits[base], self.commits[head]);
        if let Some(answer) = self.state.answers_by_question.get(&key) {
            return Ok(answer.clone());
        }
        let label = format!(
            "{} against {} (commit {head} of {}){}",
            short(head),
            short(base),
            self.commits.len() - 1,
            if attempt > 0 { format!(", attempt {}", attempt + 1) } else { String::new() }
        );
        let interrupted = self.state.question_in_progress.as_ref() == Some(&key);
        self.state.question_in_progress = Some(key.clone());
        self.write_bisection_state()?;
        let answer = self.compare_builds_of_commits(question, interrupted, &label)?;
        self.progress_and_children
            .print_line(&format!("{label}: {}", bisection_answer_text(&answer)));
        self.state.question_in_progress = None;
        self.state.answers_by_question.insert(key, answer.clone());
        self.write_bisection_state()?;
        Ok(answer)
    }

    fn compare_builds_of_commits(
        &mut self,
        question: &BisectionQuestion,
        resume: bool,
        label: &str,
    ) -> Result<BisectionAnswer, CompareError> {
        let BisectionQuestion {
            base_position: base,
            head_position: head,
            earlier_attempts: attempt,
            plan,
        } = *question;
        let template = &self.request.comparison;
        let plan = plan.map_or_else(
            || {
                let template_plan = template.plan.clone();
                let more =
                    (attempt > 0).then(|| max_blocks_of_first_attempt(self.request) << attempt);
                TestPlanRequest {
                    max_trial_blocks: more.or(template_plan.max_trial_blocks),
                    ..template_plan
                }
            },
            TestPlanRequest::with_fixed_plan,
        );
        let benches = self.bench_with_case.iter().cloned().collect::<Vec<_>>();
        let comparison = BuildComparisonRequest {
            base: ComparedSideSource::GitRevision(self.commits[base].clone()),
            head: ComparedSideSource::GitRevision(self.commits[head].clone()),
            bench_names: if benches.is_empty() { template.bench_names.clone() } else { benches },
            criterion_filter: Some(format!("^{}$", regex::escape(&self.request.case_id))),
            plan,
            round_time_budget: template.round_time_budget * (1 << attempt),
            resume_interrupted_comparison: resume,
            ..template.clone()
        };
        match one_case::compare_one_case(
            &comparison,
            &self.request.case_id,
            self.progress_and_children.with_progress_label(label),
        ) {
            Ok(outcome) => {
                self.bench_with_case = self.bench_with_case.take().or(outcome.bench_with_case);
                Ok(bisection_answer_from_comparison(&outcome.comparison, &self.request.case_id))
            }
            // The good commit is the base of every comparison of the search: if the good commit
            // does not build, no other commit can be measured.
            Err(error) if error.is_unbuildable_revision() => {
                Ok(BisectionAnswer::UnmeasurableWithReason(shorten_build_error(&error.to_string())))
            }
            Err(error) => Err(error),
        }
    }

    fn write_bisection_state(&self) -> Result<(), CompareError> {
        Ok(self.state.write_bisection_state_file(&self.bisection_state_file)?)
    }

    fn describe_found_commits(
        &self,
        found: &CommitRangeWithSlowdown,
    ) -> Result<FoundSlowdownCommits, CompareError> {
        let (good, bad) =
            (&self.commits[found.last_good_position], &self.commits[found.first_bad_position]);
        let suspects = &self.commits[found.last_good_position + 1..=found.first_bad_position];
        let top = || isolated_git(&self.repository.work_tree_root);
        let stat =
            ["diff", "--stat=100", "--no-color", "--no-ext-diff", "--no-textconv", good, bad, "--"];
        let folder = &self.request.comparison.comparison_folder;
        let executables = self
            .bench_with_case
            .as_ref()
            .map(|bench| ["base", "head"].map(|side| folder.join(side).join("bin").join(bench)));
        // The executables are reported only if the last comparison measured both commits; files
        // left by an earlier comparison belong to other commits.
        let executables = executables.filter(|paths| {
            matches!(found.confirmation, BisectionAnswer::Slower(_) | BisectionAnswer::NotSlower(_))
                && paths.iter().all(|path| path.is_file())
        });
        Ok(FoundSlowdownCommits {
            last_good_commit: good.clone(),
            suspects: suspects
                .iter()
                .map(|commit| self.describe_suspect_commit(commit))
                .collect::<Result<_, _>>()?,
            git_diff_stat: run_git_or_fail(top().args(stat), "list the differences")?,
            executables,
            skipped_commits: found
                .skipped_positions
                .iter()
                .map(|(place, why)| (self.commits[*place].clone(), why.clone()))
                .collect(),
        })
    }

    fn describe_suspect_commit(&self, commit: &str) -> Result<SlowdownSuspectCommit, CompareError> {
        let top = || isolated_git(&self.repository.work_tree_root);
        let subject = run_git_or_fail(
            top().args(["log", "-1", "--no-show-signature", "--format=%s", commit, "--"]),
            "read a commit",
        )?;
        let range = format!("{commit}^1..{commit}");
        let counted =
            run_git_or_fail(top().args(["rev-list", "--count", &range]), "count commits")?;
        let merged = counted.parse::<usize>().map_or(0, |count| count.saturating_sub(1));
        Ok(SlowdownSuspectCommit {
            suspect_commit: commit.to_owned(),
            commit_subject: subject,
            merged_commit_count: merged,
        })
    }
}

/// Largest number of blocks of a case in the first comparison of two commits; each repeated
/// comparison doubles the number.
fn max_blocks_of_first_attempt(request: &BisectionRequest) -> usize {
    request
        .comparison
        .plan
        .max_trial_blocks
        .unwrap_or(ComparisonTestPlan::default().max_trial_blocks)
}

/// Converts a finished comparison of two commits into the bisection's answer: the case is slower,
/// not slower, undecided or unusable.
fn bisection_answer_from_comparison(comparison: &Comparison, case: &str) -> BisectionAnswer {
    let facts = &comparison.method_facts;
    if facts.cases_with_identical_executable.iter().any(|id| id == case) {
        return BisectionAnswer::NotSlower(HeadToBaseTimeRatio {
            time_ratio: 1.0,
            time_ratio_low: 1.0,
            time_ratio_high: 1.0,
        });
    }
    if let Some(judged) = comparison.judged_cases.iter().find(|it| it.case_id == case) {
        let ratio = judged.ratio;
        let times = HeadToBaseTimeRatio {
            time_ratio: ratio.estimated_ratio,
            time_ratio_low: ratio.ratio_low,
            time_ratio_high: ratio.ratio_high,
        };
        let reason =
            judged.joined_inconclusive_reasons().unwrap_or_else(|| "inconclusive".to_owned());
        return match judged.verdict {
            VerdictOnCase::Regressed => BisectionAnswer::Slower(times),
            VerdictOnCase::Unchanged
            | VerdictOnCase::Improved
            | VerdictOnCase::AcceptedSlowdown => BisectionAnswer::NotSlower(times),
            VerdictOnCase::Inconclusive if judged.joined_measurement_errors().is_some() => {
                BisectionAnswer::UnmeasurableWithReason(reason)
            }
            VerdictOnCase::Inconclusive => BisectionAnswer::UndecidedWithReason(reason),
        };
    }
    let failed_in = |what: &str, cases: &BTreeMap<String, CaseFailureReason>| {
        cases.get(case).map(|why| format!("{what}: {why}"))
    };
    let refused = comparison.refused.iter().find(|refusal| {
        refusal.affected_cases.is_empty() || refusal.affected_cases.iter().any(|id| id == case)
    });
    let why = failed_in("the case is wrong", &comparison.failed_in_head)
        .or_else(|| failed_in("the case is wrong in the base", &facts.failed_in_base))
        .or_else(|| {
            comparison.skipped_in_head.get(case).map(|why| format!("the case was skipped: {why}"))
        })
        .or_else(|| {
            let it = refused?;
            Some(format!(
                "{} is `{}` in the base and `{}` here",
                it.differing_field, it.base_value, it.head_value
            ))
        })
        .or_else(|| {
            facts
                .failed_processes
                .first()
                .map(|broken| broken.inconclusive_reason_for_cases().to_string())
        })
        .unwrap_or_else(|| "there is no such case".to_owned());
    BisectionAnswer::UnmeasurableWithReason(shorten_build_error(&why))
}

/// Shortens a build error to its first line and its lines that begin with "error".
fn shorten_build_error(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let errors = lines.iter().filter(|line| line.starts_with("error"));
    let first = lines.first().into_iter().chain(errors);
    first.take(MAX_SKIP_REASON_LINES).copied().collect::<Vec<_>>().join("; ")
}

/// Formats a bisection answer, such as "slower, +5.0 % (+4.1 to +6.0)": time change of head against
/// base with its confidence interval.
pub fn bisection_answer_text(answer: &BisectionAnswer) -> String {
    let times = |HeadToBaseTimeRatio {
                     time_ratio: ratio,
                     time_ratio_low: low,
                     time_ratio_high: high,
                 }: &HeadToBaseTimeRatio| {
        let percent = |ratio: f64| 100.0 * (ratio - 1.0);
        format!("{:+.1} % ({:+.1} to {:+.1})", percent(*ratio), percent(*low), percent(*high))
    };
    match answer {
        BisectionAnswer::Slower(it) => format!("slower, {}", times(it)),
        BisectionAnswer::NotSlower(it) => format!("not slower, {}", times(it)),
        BisectionAnswer::UndecidedWithReason(why) => format!("inconclusive: {why}"),
        BisectionAnswer::UnmeasurableWithReason(why) => format!("skipped: {why}"),
    }
}
