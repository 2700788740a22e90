//! Report of `kernelgate bisect` as text: the outcome of the search for the first slower commit.

use crate::bisect::commits::{SlowdownSuspectCommit, bisection_answer_text};
use crate::bisect::{
    BisectionEnd, BisectionResult, CommitRangeWithSlowdown, FoundSlowdownCommits,
    HeadToBaseTimeRatio,
};

/// Largest number of suspect commits that the report of a bisection lists.
const MAX_LISTED_SUSPECTS: usize = 20;

/// Lines for a terminal.
pub fn bisection_report_text(bisection: &BisectionResult) -> String {
    let BisectionResult {
        case_id: case,
        good_revision: good,
        bad_revision: bad,
        bisected_commit_count: commits,
        bisection_end: ended,
        found,
    } = bisection;
    let ends = format!("{case}: {bad} against {good}, {commits} commits later");
    match (ended, found) {
        (BisectionEnd::SlowdownFound(search), Some(found)) => {
            slowed_commits_report(&ends, search, found)
        }
        (BisectionEnd::SlowdownFound(_), None) => ends,
        (BisectionEnd::BadEndNotSlower(times), _) => format!(
            "{ends}: not slower ({}), so there is no first slower commit between them",
            time_change_with_interval(times)
        ),
        (BisectionEnd::GoodAndBadEndUndecided(why), _) => format!(
            "{ends}: it is undecided whether it is slower ({why}); a longer --budget, more \
             --max-blocks or a quieter machine may decide it"
        ),
        (BisectionEnd::BadEndUnmeasurable(why), _) => format!("{ends}: cannot be compared: {why}"),
    }
}

fn slowed_commits_report(
    ends: &str,
    search: &CommitRangeWithSlowdown,
    found: &FoundSlowdownCommits,
) -> String {
    let mut lines = vec![format!(
        "{ends}: slower, {}",
        time_change_with_interval(&search.bad_to_good_time_ratio)
    )];
    let named: Vec<String> =
        found.suspects.iter().take(MAX_LISTED_SUSPECTS).map(suspect_commit_description).collect();
    match &found.suspects[..] {
        [_] => lines.push(format!("first slower commit: {}", named.concat())),
        several => {
            lines.push(format!("one of {} commits made it slower:", several.len()));
            lines.extend(named.into_iter().map(|line| format!("  {line}")));
        }
    }
    let last_good = found.last_good_commit.get(..8).unwrap_or_default();
    lines.push(format!(
        "against {last_good}, the one before: {}",
        bisection_answer_text(&search.confirmation)
    ));
    if search.is_slowdown_confirmed() {
        lines.push(format!(
            "confidence {:.1} % after {} comparisons",
            100.0 * search.bisection_confidence,
            search.comparisons_made
        ));
    } else {
        lines.push(
            "not confirmed: the slow-down may be spread over several commits; smaller ranges may \
             decide"
                .to_owned(),
        );
    }
    for (commit, why) in &found.skipped_commits {
        lines.push(format!("skipped {}: {why}", commit.get(..8).unwrap_or(commit)));
    }
    if !found.git_diff_stat.is_empty() {
        lines.push(found.git_diff_stat.clone());
    }
    if let Some([base, head]) = &found.executables {
        lines.push(format!("executables: {} and {}", base.display(), head.display()));
    }
    lines.join("\n")
}

fn suspect_commit_description(
    SlowdownSuspectCommit {
        suspect_commit: commit,
        commit_subject: subject,
        merged_commit_count: merged,
    }: &SlowdownSuspectCommit,
) -> String {
    let short = commit.get(..8).unwrap_or(commit);
    match merged {
        0 => format!("{short} {subject}"),
        count => format!(
            "{short} {subject} (a merge of {count} commits; `--good {short}^1 --bad {short}^2` \
             searches them where the branch itself is slower)"
        ),
    }
}

fn time_change_with_interval(
    HeadToBaseTimeRatio { time_ratio: ratio, time_ratio_low: low, time_ratio_high: high }: &HeadToBaseTimeRatio,
) -> String {
    let percent = super::judgement_cells::ratio_as_percent_change;
    format!("{} ({} to {})", percent(*ratio), percent(*low), percent(*high))
}

/// The bisection report for a pull request: inside a Markdown code block, so that its commit
/// subjects cannot act as markup.
pub fn report_as_markdown_code_block(text: &str) -> String {
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest.max(2) + 1);
    format!("{fence}\n{text}\n{fence}")
}
