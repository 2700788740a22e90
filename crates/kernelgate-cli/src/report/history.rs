//! Histories of benchmark cases as text: a table with a row for each case, or a table with a row
//! for each commit if there is only one case.

use jiff::Timestamp;

use super::judgement_cells::ratio_as_percent_change;
use crate::history::series::TimeLevelChange;
use crate::history::{CaseTimeHistory, FileWithoutRun, GitCommitOrder};
use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::terminal::break_lines_to_columns;
use kernelgate::display::time_text;
use kernelgate::record::text::clean_message_for_terminal;

/// Characters of a sparkline, from the shortest time to the longest time of the case.
const SPARKLINE_STEPS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Largest number of commits in the sparkline of a table of several cases.
const MAX_COMMITS_IN_TABLE_SPARKLINE: usize = 20;
/// Largest number of commits in the sparkline of the history of a single case.
const MAX_COMMITS_IN_CASE_SPARKLINE: usize = 60;
/// Largest number of commits, one in each row, in the history table of a single case.
const MAX_COMMITS_IN_CASE_HISTORY: usize = 40;
/// Largest number of commits that are named for a change of a case's time.
const MAX_COMMITS_NAMED_IN_CHANGE: usize = 8;
/// Width in columns of a history's text if the output is not a terminal.
const HISTORY_COLUMNS_WITHOUT_TERMINAL: usize = 100;

/// Histories of all selected cases as text.
pub fn histories_report_text(
    histories: &[CaseTimeHistory],
    order: &GitCommitOrder,
    columns: Option<usize>,
) -> String {
    let columns = columns.unwrap_or(HISTORY_COLUMNS_WITHOUT_TERMINAL);
    let mut lines = match histories {
        [] => Vec::new(),
        [only] => single_case_history_lines(only, Some(columns)),
        several => history_tables_with_devices(several, Some(columns)),
    };
    let not_searched: usize =
        histories.iter().map(|history| history.runs_not_searched_for_changes).sum();
    if not_searched > 0 {
        lines.push(format!("{not_searched} times, the oldest, were not searched for changes"));
    }
    lines.push(commit_order_description(histories, order));
    break_lines_to_columns(&lines.join("\n"), columns)
}

/// Describes how the commits of a history were put in order: by git's history, or by recorded
/// times.
pub fn commit_order_description(histories: &[CaseTimeHistory], order: &GitCommitOrder) -> String {
    let by_time: usize = histories.iter().map(|history| history.runs_ordered_by_time).sum();
    let runs = histories.iter().flat_map(|history| &history.points);
    let all: usize = runs.map(|point| point.run_medians_ns.len()).sum();
    match by_time {
        0 => "in the order of the commits' history".to_owned(),
        _ if order.has_no_commits() => {
            "in the order of recorded times: there is no git history here".to_owned()
        }
        _ => format!(
            "in the order of the commits' history; {by_time} of {all} times, whose commits are not \
             in it, are where their recorded start puts them"
        ),
    }
}

/// Lists the first five record files that could not be read with the problem of each, then the
/// number of further skipped files.
pub fn skipped_record_files_text(files: &[FileWithoutRun]) -> String {
    const MAX_NAMED_SKIPPED_FILES: usize = 5;
    let each = files
        .iter()
        .take(MAX_NAMED_SKIPPED_FILES)
        .map(|file| format!("skipped {}: {}", file.ignored_file.display(), file.why_no_run));
    let more = files.len().saturating_sub(MAX_NAMED_SKIPPED_FILES);
    let more = (more > 0).then(|| format!("skipped {more} more files"));
    // Names and contents of record files may come from others, so characters that control the
    // terminal are escaped.
    clean_message_for_terminal(&each.chain(more).collect::<Vec<_>>().join("\n")).into_owned()
}

fn history_tables_with_devices(
    histories: &[CaseTimeHistory],
    columns: Option<usize>,
) -> Vec<String> {
    let each = history_tables_by_device(histories).into_iter();
    each.flat_map(|(device, table)| {
        [device, table.aligned_text_for_terminal(columns), String::new()]
    })
    .collect()
}

/// A table for each device, with a row for the history of each case; the text before a table is the
/// name of its device.
pub fn history_tables_by_device(histories: &[CaseTimeHistory]) -> Vec<(String, AlignedTextTable)> {
    let of_device = |histories: Vec<&CaseTimeHistory>| {
        let mut table =
            AlignedTextTable::new(&["case", "commits", "runs", "last", "last change", "times"]);
        for history in &histories {
            let runs: usize = history.points.iter().map(|point| point.run_medians_ns.len()).sum();
            table.add_row(vec![
                case_name_with_revision(history),
                history.points.len().to_string(),
                runs.to_string(),
                history
                    .points
                    .last()
                    .map(|point| time_text(point.median_launch_ns))
                    .unwrap_or_default(),
                history
                    .changes
                    .last()
                    .map(|change| level_change_with_commit(history, change))
                    .unwrap_or_default(),
                sparkline_of_last_commits(history, MAX_COMMITS_IN_TABLE_SPARKLINE),
            ]);
        }
        (device_and_card_text(histories[0]), table)
    };
    histories_by_device(histories).into_iter().map(of_device).collect()
}

fn histories_by_device(histories: &[CaseTimeHistory]) -> Vec<Vec<&CaseTimeHistory>> {
    let mut devices = std::collections::BTreeMap::<_, Vec<&CaseTimeHistory>>::new();
    for history in histories {
        devices
            .entry((&history.environment_fingerprint, &history.card_or_host_id))
            .or_default()
            .push(history);
    }
    devices.into_values().collect()
}

fn single_case_history_lines(history: &CaseTimeHistory, columns: Option<usize>) -> Vec<String> {
    let mut lines = vec![
        case_name_with_revision(history),
        device_and_card_text(history),
        sparkline_of_last_commits(history, MAX_COMMITS_IN_CASE_SPARKLINE),
    ];
    if !history.earlier_ids.is_empty() {
        let names: Vec<&str> = history.earlier_ids.iter().map(String::as_str).collect();
        lines.push(format!("formerly {}", names.join(", ")));
    }
    let mut table =
        AlignedTextTable::new(&["commit", "first run", "runs", "time", "from", "to", "change"]);
    let hidden = history.points.len().saturating_sub(MAX_COMMITS_IN_CASE_HISTORY);
    for (at, point) in history.points.iter().enumerate().skip(hidden) {
        let change = history.changes.iter().find(|change| change.first_point_after == at);
        table.add_row(vec![
            point.measured_code().short_commit_with_changes_mark(),
            start_date_text(point.first_process_start_unix_ms),
            point.run_medians_ns.len().to_string(),
            time_text(point.median_launch_ns),
            time_text(point.smallest_run_median_ns),
            time_text(point.largest_run_median_ns),
            change
                .map(|change| ratio_as_percent_change(1.0 + change.relative_level_change))
                .unwrap_or_default(),
        ]);
    }
    if hidden > 0 {
        lines.push(format!("{hidden} older commits are not shown (--format json has all)"));
    }
    lines.push(table.aligned_text_for_terminal(columns));
    lines.extend(history.changes.iter().map(|change| level_change_sentence(history, change)));
    if history.changes.is_empty() {
        lines.push("no change of the level".to_owned());
    }
    lines
}

/// Describes a change of a case's time in its history in a sentence: size, interval, confidence and
/// commits.
fn level_change_sentence(history: &CaseTimeHistory, change: &TimeLevelChange) -> String {
    let TimeLevelChange {
        first_point_after: point,
        possible_cause_commits: commits,
        relative_change_low: low,
        relative_change_high: high,
        level_change_confidence: confidence,
        ..
    } = change;
    let code = |at: usize| history.points[at].measured_code().short_commit_with_changes_mark();
    let size = format!(
        "{} ({} to {}), confidence {:.1} %",
        ratio_as_percent_change(1.0 + change.relative_level_change),
        ratio_as_percent_change(1.0 + low),
        ratio_as_percent_change(1.0 + high),
        // A confidence of more than 99.9 % is printed as 99.9 %, because no confidence is truly 100
        // %.
        (100.0 * confidence).min(99.9)
    );
    if change.changed_within_one_build {
        return format!("{size}: within the runs of {}, so not by its code", code(*point));
    }
    let last = commits[commits.len().saturating_sub(MAX_COMMITS_NAMED_IN_CHANGE)..].iter();
    let shown: Vec<&str> = last.map(|commit| commit.get(..8).unwrap_or(commit)).collect();
    let which = match commits.len() {
        0 => String::new(),
        1 => " (that commit)".to_owned(),
        count if count > shown.len() => format!(" ({count} commits, the last {})", shown.join(" ")),
        count => format!(" ({count} commits: {})", shown.join(" ")),
    };
    format!("{size}: after {}, up to {}{which}", code(point - 1), code(*point))
}

/// Short text of a change in a case's history, with the first commit that has the new time: "+5.2%
/// 1a2b3c4d".
fn level_change_with_commit(history: &CaseTimeHistory, change: &TimeLevelChange) -> String {
    format!(
        "{} {}",
        ratio_as_percent_change(1.0 + change.relative_level_change),
        history.points[change.first_point_after].measured_code().short_commit_with_changes_mark()
    )
}

fn case_name_with_revision(history: &CaseTimeHistory) -> String {
    match history.definition_revision {
        1 => history.current_case_id.clone(),
        revision => format!("{} (revision {revision})", history.current_case_id),
    }
}

fn device_and_card_text(history: &CaseTimeHistory) -> String {
    match &history.card_or_host_id {
        Some(card) => format!("{}; {card}", history.device),
        None => format!("{}; all cards of the model", history.device),
    }
}

fn start_date_text(started_ms: i64) -> String {
    match Timestamp::from_millisecond(started_ms) {
        Ok(started) if started_ms > 0 => started.strftime("%Y-%m-%d").to_string(),
        _ => "unknown".to_owned(),
    }
}

/// Draws the times of the last commits of a history as a sparkline, with one character for each
/// commit.
fn sparkline_of_last_commits(history: &CaseTimeHistory, width: usize) -> String {
    let last = history.points.len().saturating_sub(width);
    let times: Vec<f64> =
        history.points[last..].iter().map(|point| point.median_launch_ns).collect();
    let low = times.iter().copied().fold(f64::INFINITY, f64::min);
    let high = times.iter().copied().fold(0.0, f64::max);
    let step = |ns: &f64| {
        let share = if high > low { (ns - low) / (high - low) } else { 0.0 };
        SPARKLINE_STEPS
            [((share * SPARKLINE_STEPS.len() as f64) as usize).min(SPARKLINE_STEPS.len() - 1)]
    };
    times.iter().map(step).collect()
}
