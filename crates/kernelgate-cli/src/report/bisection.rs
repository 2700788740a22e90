//! The outcome of a search for the first slower commit, as text.

use crate::bisect::commits::{SuspectCommit, words};
use crate::bisect::{Bisection, CommitTimeRatio, FoundCommits, SearchEnd, SlowdownRange};

/// Largest number of commits of a range that are named.
const MAX_LISTED_SUSPECTS: usize = 20;

/// Lines for a terminal.
pub fn text(bisection: &Bisection) -> String {
    let Bisection { case, good, bad, commits, ended, found } = bisection;
    let ends = format!("{case}: {bad} against {good}, {commits} commits later");
    match (ended, found) {
        (SearchEnd::Found(search), Some(found)) => slowed_commits_text(&ends, search, found),
        (SearchEnd::Found(_), None) => ends,
        (SearchEnd::NoDifference(times), _) => format!(
            "{ends}: not slower ({}), so there is no first slower commit between them",
            ratio_range(times)
        ),
        (SearchEnd::EndsUndecided(why), _) => format!(
            "{ends}: it is undecided whether it is slower ({why}); a longer --budget, more \
             --max-blocks or a quieter machine may decide it"
        ),
        (SearchEnd::EndUnusable(why), _) => format!("{ends}: cannot be compared: {why}"),
    }
}

fn slowed_commits_text(ends: &str, search: &SlowdownRange, found: &FoundCommits) -> String {
    let mut lines = vec![format!("{ends}: slower, {}", ratio_range(&search.ends))];
    let named: Vec<String> =
        found.suspects.iter().take(MAX_LISTED_SUSPECTS).map(suspect_commit_line).collect();
    match &found.suspects[..] {
        [_] => lines.push(format!("first slower commit: {}", named.concat())),
        several => {
            lines.push(format!("one of {} commits made it slower:", several.len()));
            lines.extend(named.into_iter().map(|line| format!("  {line}")));
        }
    }
    let last_good = found.last_good.get(..8).unwrap_or_default();
    lines.push(format!("against {last_good}, the one before: {}", words(&search.confirmation)));
    if search.is_confirmed() {
        lines.push(format!(
            "confidence {:.1} % after {} comparisons",
            100.0 * search.confidence,
            search.asked
        ));
    } else {
        lines.push(
            "not confirmed: the slow-down may be spread over several commits; smaller ranges may \
             decide"
                .to_owned(),
        );
    }
    for (commit, why) in &found.left_out {
        lines.push(format!("skipped {}: {why}", commit.get(..8).unwrap_or(commit)));
    }
    if !found.diff_stat.is_empty() {
        lines.push(found.diff_stat.clone());
    }
    if let Some([base, head]) = &found.executables {
        lines.push(format!("executables: {} and {}", base.display(), head.display()));
    }
    lines.join("\n")
}

fn suspect_commit_line(SuspectCommit { commit, subject, merged }: &SuspectCommit) -> String {
    let short = commit.get(..8).unwrap_or(commit);
    match merged {
        0 => format!("{short} {subject}"),
        count => format!(
            "{short} {subject} (a merge of {count} commits; `--good {short}^1 --bad {short}^2` \
             searches them where the branch itself is slower)"
        ),
    }
}

fn ratio_range(CommitTimeRatio { ratio, low, high }: &CommitTimeRatio) -> String {
    let percent = super::judgement_cells::percent;
    format!("{} ({} to {})", percent(*ratio), percent(*low), percent(*high))
}

/// The text for a pull request: in a block, so that no text of others acts as markup.
pub fn markdown(text: &str) -> String {
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest.max(2) + 1);
    format!("{fence}\n{text}\n{fence}")
}
