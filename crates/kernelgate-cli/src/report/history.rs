//! Histories as text: a line for each case, or one case commit by commit.

use jiff::Timestamp;

use super::judgement_cells::percent;
use crate::history::series::LevelChange;
use crate::history::{CaseHistory, CommitOrder, SkippedRecordFile};
use kernelgate::display::table::TextTable;
use kernelgate::display::terminal::wrap_terminal_text;
use kernelgate::display::time_text;
use kernelgate::record::text::printable_on_terminal;

/// Steps of a sparkline, from the shortest time to the longest.
const SPARKLINE_STEPS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Largest number of commits in the sparkline of a table.
const MAX_COMMITS_IN_TABLE_SPARKLINE: usize = 20;
/// Largest number of commits in the sparkline of one case.
const MAX_COMMITS_IN_CASE_SPARKLINE: usize = 60;
/// Largest number of commits in the table of one case.
const MAX_ROWS: usize = 40;
/// Largest number of commits of a change that are named.
const MAX_LISTED_COMMITS: usize = 8;
/// Columns of the output without a terminal.
const COLUMNS: usize = 100;

/// All histories as text.
pub fn text(histories: &[CaseHistory], order: &CommitOrder, columns: Option<usize>) -> String {
    let columns = columns.unwrap_or(COLUMNS);
    let mut lines = match histories {
        [] => Vec::new(),
        [only] => case_history_lines(only, Some(columns)),
        several => history_overview(several, Some(columns)),
    };
    let not_searched: usize = histories.iter().map(|history| history.not_searched).sum();
    if not_searched > 0 {
        lines.push(format!("{not_searched} times, the oldest, were not searched for changes"));
    }
    lines.push(commit_order_text(histories, order));
    wrap_terminal_text(&lines.join("\n"), columns)
}

/// Describes in words how commits were put in order.
pub fn commit_order_text(histories: &[CaseHistory], order: &CommitOrder) -> String {
    let by_time: usize = histories.iter().map(|history| history.placed_by_time).sum();
    let runs = histories.iter().flat_map(|history| &history.points);
    let all: usize = runs.map(|point| point.runs_ns.len()).sum();
    match by_time {
        0 => "in the order of the commits' history".to_owned(),
        _ if order.is_empty() => {
            "in the order of recorded times: there is no git history here".to_owned()
        }
        _ => format!(
            "in the order of the commits' history; {by_time} of {all} times, whose commits are not \
             in it, are where their recorded start puts them"
        ),
    }
}

/// Names a few of the skipped files, with the number of all skipped files.
pub fn skipped(files: &[SkippedRecordFile]) -> String {
    const MAX_NAMED_SKIPPED_FILES: usize = 5;
    let each = files
        .iter()
        .take(MAX_NAMED_SKIPPED_FILES)
        .map(|file| format!("skipped {}: {}", file.path.display(), file.problem));
    let more = files.len().saturating_sub(MAX_NAMED_SKIPPED_FILES);
    let more = (more > 0).then(|| format!("skipped {more} more files"));
    // The program does not trust names and contents of files.
    printable_on_terminal(&each.chain(more).collect::<Vec<_>>().join("\n")).into_owned()
}

fn history_overview(histories: &[CaseHistory], columns: Option<usize>) -> Vec<String> {
    let each = tables(histories).into_iter();
    each.flat_map(|(device, table)| [device, table.text_within(columns), String::new()]).collect()
}

/// A table for each device, with a line for each case.
pub fn tables(histories: &[CaseHistory]) -> Vec<(String, TextTable)> {
    let of_device = |histories: Vec<&CaseHistory>| {
        let mut table =
            TextTable::new(&["case", "commits", "runs", "last", "last change", "times"]);
        for history in &histories {
            let runs: usize = history.points.iter().map(|point| point.runs_ns.len()).sum();
            table.row(vec![
                name(history),
                history.points.len().to_string(),
                runs.to_string(),
                history.points.last().map(|point| time_text(point.median_ns)).unwrap_or_default(),
                history
                    .changes
                    .last()
                    .map(|change| short_change(history, change))
                    .unwrap_or_default(),
                sparkline(history, MAX_COMMITS_IN_TABLE_SPARKLINE),
            ]);
        }
        (history_device(histories[0]), table)
    };
    histories_by_device(histories).into_iter().map(of_device).collect()
}

fn histories_by_device(histories: &[CaseHistory]) -> Vec<Vec<&CaseHistory>> {
    let mut devices = std::collections::BTreeMap::<_, Vec<&CaseHistory>>::new();
    for history in histories {
        devices.entry((&history.fingerprint, &history.card)).or_default().push(history);
    }
    devices.into_values().collect()
}

fn case_history_lines(history: &CaseHistory, columns: Option<usize>) -> Vec<String> {
    let mut lines = vec![
        name(history),
        history_device(history),
        sparkline(history, MAX_COMMITS_IN_CASE_SPARKLINE),
    ];
    if !history.formerly.is_empty() {
        let names: Vec<&str> = history.formerly.iter().map(String::as_str).collect();
        lines.push(format!("formerly {}", names.join(", ")));
    }
    let mut table =
        TextTable::new(&["commit", "first run", "runs", "time", "from", "to", "change"]);
    let hidden = history.points.len().saturating_sub(MAX_ROWS);
    for (at, point) in history.points.iter().enumerate().skip(hidden) {
        let change = history.changes.iter().find(|change| change.point == at);
        table.row(vec![
            point.code().short_commit(),
            day(point.started_ms),
            point.runs_ns.len().to_string(),
            time_text(point.median_ns),
            time_text(point.low_ns),
            time_text(point.high_ns),
            change.map(|change| percent(1.0 + change.change)).unwrap_or_default(),
        ]);
    }
    if hidden > 0 {
        lines.push(format!("{hidden} older commits are not shown (--format json has all)"));
    }
    lines.push(table.text_within(columns));
    lines.extend(history.changes.iter().map(|change| change_sentence(history, change)));
    if history.changes.is_empty() {
        lines.push("no change of the level".to_owned());
    }
    lines
}

/// Describes a change of a history in a sentence.
fn change_sentence(history: &CaseHistory, change: &LevelChange) -> String {
    let LevelChange { point, commits, low, high, confidence, .. } = change;
    let code = |at: usize| history.points[at].code().short_commit();
    let size = format!(
        "{} ({} to {}), confidence {:.1} %",
        percent(1.0 + change.change),
        percent(1.0 + low),
        percent(1.0 + high),
        // At most 99.9 % is printed, because a confidence of 100.0 % cannot be known.
        (100.0 * confidence).min(99.9)
    );
    if change.same_build {
        return format!("{size}: within the runs of {}, so not by its code", code(*point));
    }
    let last = commits[commits.len().saturating_sub(MAX_LISTED_COMMITS)..].iter();
    let shown: Vec<&str> = last.map(|commit| commit.get(..8).unwrap_or(commit)).collect();
    let which = match commits.len() {
        0 => String::new(),
        1 => " (that commit)".to_owned(),
        count if count > shown.len() => format!(" ({count} commits, the last {})", shown.join(" ")),
        count => format!(" ({count} commits: {})", shown.join(" ")),
    };
    format!("{size}: after {}, up to {}{which}", code(point - 1), code(*point))
}

/// Short text of a change in a history: "+5.2% 1a2b3c4d".
fn short_change(history: &CaseHistory, change: &LevelChange) -> String {
    format!(
        "{} {}",
        percent(1.0 + change.change),
        history.points[change.point].code().short_commit()
    )
}

fn name(history: &CaseHistory) -> String {
    match history.revision {
        1 => history.case.clone(),
        revision => format!("{} (revision {revision})", history.case),
    }
}

fn history_device(history: &CaseHistory) -> String {
    match &history.card {
        Some(card) => format!("{}; {card}", history.device),
        None => format!("{}; all cards of the model", history.device),
    }
}

fn day(started_ms: i64) -> String {
    match Timestamp::from_millisecond(started_ms) {
        Ok(started) if started_ms > 0 => started.strftime("%Y-%m-%d").to_string(),
        _ => "unknown".to_owned(),
    }
}

/// The times of the last points as a sparkline, a character each.
fn sparkline(history: &CaseHistory, width: usize) -> String {
    let last = history.points.len().saturating_sub(width);
    let times: Vec<f64> = history.points[last..].iter().map(|point| point.median_ns).collect();
    let low = times.iter().copied().fold(f64::INFINITY, f64::min);
    let high = times.iter().copied().fold(0.0, f64::max);
    let step = |ns: &f64| {
        let share = if high > low { (ns - low) / (high - low) } else { 0.0 };
        SPARKLINE_STEPS
            [((share * SPARKLINE_STEPS.len() as f64) as usize).min(SPARKLINE_STEPS.len() - 1)]
    };
    times.iter().map(step).collect()
}
