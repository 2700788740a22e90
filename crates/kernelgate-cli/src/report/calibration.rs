//! Report of a calibration of the gate as text and Markdown: false alarms, detection power, noise
//! between processes, and recommended thresholds.

use kernelgate::display::harmless_text::EscapedForMarkdown;
use kernelgate::record::text::{clean_message_for_terminal, join_lines_with_spaces};
use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::gate::calibration::summary::{
    InjectedSlowdownDetection, NoiseBetweenProcesses, ProportionWithInterval, TallyOfComparisonKind,
};
use crate::gate::calibration::{GateCalibration, RecommendedThresholds, summarise_calibration};
use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::time_text;

/// The report of a calibration as plain text, with tables as wide as the terminal if its width is
/// known.
pub fn calibration_report_text(calibration: &GateCalibration, columns: Option<usize>) -> String {
    let table = |table: &AlignedTextTable| table.aligned_text_for_terminal(columns);
    write_calibration_report(calibration, "", &table, &|text| {
        clean_message_for_terminal(text).into_owned()
    })
}

pub fn calibration_report_markdown(calibration: &GateCalibration) -> String {
    write_calibration_report(calibration, "## ", &AlignedTextTable::to_markdown, &|text| {
        EscapedForMarkdown(text).to_string()
    })
}

/// Writes the report of a calibration; `words` escapes texts of the calibration file for the format
/// of the report.
fn write_calibration_report(
    calibration: &GateCalibration,
    heading: &str,
    table: &dyn Fn(&AlignedTextTable) -> String,
    words: &dyn Fn(&str) -> String,
) -> String {
    let summary = summarise_calibration(calibration);
    let mut out = format!(
        "{heading}Calibration of the gate on {}\n\n{}\n",
        words(&calibration.environment.device_name),
        calibration_origin_and_plan(calibration, words)
    );
    let mut section = |title: &str, rows: &AlignedTextTable, below: &str| {
        if !rows.has_no_rows() {
            let below = if below.is_empty() { String::new() } else { format!("\n{below}\n") };
            let _ = write!(out, "\n{heading}{title}\n\n{}\n{below}", table(rows));
        }
    };
    let reasons: Vec<String> = summary
        .tallies_by_kind
        .iter()
        .flat_map(|tally| {
            tally.inconclusive_cases_by_reason.iter().map(|(reason, count)| {
                format!("{}: inconclusive: {}: {count}", tally.comparison_kind_name, words(reason))
            })
        })
        .collect();
    section("Verdicts", &verdict_counts_table(&summary.tallies_by_kind), &reasons.join("\n"));
    let not: Vec<String> = summary
        .slowdown_detections
        .iter()
        .filter(|power| power.case_id.is_some() || summary.slowdown_detections.len() == 1)
        .filter_map(|power| Some(words(&note_on_slowdowns_not_injected(power)?)))
        .collect();
    section(
        "Slow-downs found",
        &detection_power_table(&summary.slowdown_detections),
        &not.join("\n"),
    );
    section("Processes of one executable", &process_noise_table(&summary.noise_by_case), "");
    if let Some(recommended) = &calibration.recommended {
        section(
            "Thresholds",
            &tried_thresholds_table(recommended),
            &words(&recommended_thresholds_text(recommended)),
        );
    }
    if let Some(tolerance) = calibration.anchor_rate_tolerance {
        let percent = 100.0 * tolerance;
        let _ = write!(out, "\nAnchors of shards that merge may differ by {percent:.1} %.\n");
    }
    if !calibration.cases_with_simulated_slowdowns.is_empty() {
        let cases: Vec<&str> =
            calibration.cases_with_simulated_slowdowns.iter().map(String::as_str).collect();
        let line = format!("{}{}", GateCalibration::SIMULATED_CASES_NOTE, cases.join(", "));
        let _ = write!(out, "\n{}\n", words(&line));
    }
    for line in &calibration.unmeasured_cases_with_reason {
        let _ = write!(out, "\n{}\n", words(line));
    }
    out
}

fn calibration_origin_and_plan(
    calibration: &GateCalibration,
    words: &dyn Fn(&str) -> String,
) -> String {
    let environment = &calibration.environment;
    let gpus = &environment.gpus;
    let place = match gpus.is_empty() {
        false => {
            let driver = gpus.join_distinct_values_of_gpus(|gpu| gpu.driver_version.clone());
            format!(
                "driver {driver}, NVRTC {}",
                gpus.join_distinct_values_of_gpus(|gpu| gpu.nvrtc_version.clone())
            )
        }
        true => format!(
            "{} cores, {} threads, {}",
            environment.usable_logical_cores, environment.cpu_backend_threads, environment.os
        ),
    };
    let plan = &calibration.plan;
    let sampling = calibration.sampling;
    // The command is written as Markdown code, in which only a backtick is special: each backtick
    // becomes an apostrophe.
    let code = |command: &String| {
        format!(
            "`{}`",
            join_lines_with_spaces(&without_shard_and_time_flags(command)).replace('`', "'")
        )
    };
    let commands: BTreeSet<String> =
        calibration.calibration_command_lines.iter().map(code).collect();
    let commands: Vec<String> = commands.into_iter().collect();
    format!(
        "From {} to {}, {}, commit {}, {} comparisons, {} processes.\nThreshold {:.2} %, {:.0} \
         ns, tolerated {:.1} % from {} blocks, at most {} blocks, {:.0} s a round; a process \
         warms a case up for {:.2} s and times it for {:.2} s.\nMeasured by {}.",
        words(&calibration.first_comparison_start_time),
        words(calibration.comparisons.last().map_or("", |known| &known.comparison_start_time)),
        words(&place),
        words(&calibration.provenance.short_commit_with_changes_mark()),
        calibration.comparisons.len(),
        calibration.comparisons.iter().map(|known| known.process_count).sum::<usize>(),
        100.0 * plan.relative_time_change_threshold,
        plan.absolute_time_change_threshold_ns,
        100.0 * plan.max_unchanged_relative_change,
        plan.min_blocks_for_unchanged.min(plan.max_trial_blocks),
        plan.max_trial_blocks,
        calibration.round_budget_s,
        sampling.warm_up_s,
        sampling.measurement_s,
        commands.join(", ")
    )
}

/// The calibration command without `--shard` and `--total-time`, the flags that divide a
/// calibration into several processes.
fn without_shard_and_time_flags(command: &str) -> String {
    kernelgate::display::words_without_flags(
        command.split(' ').map(str::to_owned),
        &["--shard", "--total-time"],
        &[],
    )
    .join(" ")
}

fn share_as_percent_text(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn proportion_interval_text(rate: ProportionWithInterval) -> String {
    format!(
        "{} … {}",
        share_as_percent_text(rate.probability_low),
        share_as_percent_text(rate.probability_high)
    )
}

fn verdict_counts_table(kinds: &[TallyOfComparisonKind]) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&[
        "comparisons",
        "failed",
        "95 % bound",
        "cases",
        "unchanged",
        "improved",
        "regressed",
        "inconclusive",
        "share",
        "broken",
        "blocks",
        "mean time",
        "longest",
    ]);
    for tally in kinds {
        let cases = tally.inconclusive_cases.trial_count;
        table.add_row(vec![
            tally.comparison_kind_name.clone(),
            format!(
                "{} of {}",
                tally.comparisons_with_alarm.event_count, tally.comparisons_with_alarm.trial_count
            ),
            tally
                .false_alarm_probability_bound
                .map_or_else(|| "-".to_owned(), share_as_percent_text),
            cases.to_string(),
            tally.unchanged_cases.to_string(),
            tally.improved_cases.to_string(),
            tally.regressed_cases.to_string(),
            tally.inconclusive_cases.event_count.to_string(),
            share_as_percent_text(tally.inconclusive_cases.observed_proportion()),
            tally.comparisons_with_failure.to_string(),
            format!("{:.1}", tally.mean_trial_blocks),
            format!("{:.0} s", tally.mean_comparison_wall_s),
            format!("{:.0} s", tally.longest_comparison_wall_s),
        ]);
    }
    table
}

fn detection_power_table(rows: &[InjectedSlowdownDetection]) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&[
        "case",
        "made",
        "added",
        "measured",
        "found",
        "share",
        "95 % interval",
        "called unchanged",
    ]);
    for row in rows.iter().filter(|row| row.slowdowns_found.trial_count > 0) {
        table.add_row(vec![
            row.case_id.clone().unwrap_or_else(|| "all".to_owned()),
            row.comparison_kind_name.clone(),
            format!("{:.2} %", row.mean_injected_delay_percent),
            format!("{:.2} %", row.mean_measured_slowdown_percent),
            format!("{} of {}", row.slowdowns_found.event_count, row.slowdowns_found.trial_count),
            share_as_percent_text(row.slowdowns_found.observed_proportion()),
            proportion_interval_text(row.slowdowns_found),
            row.slowdowns_missed.to_string(),
        ]);
    }
    table
}

fn note_on_slowdowns_not_injected(power: &InjectedSlowdownDetection) -> Option<String> {
    let (count, reason) = power.failed_injections_with_reason.as_ref()?;
    let case = power.case_id.as_deref().unwrap_or("all");
    Some(format!(
        "not made: {}, {case}, in {count} comparisons: {reason}",
        power.comparison_kind_name
    ))
}

fn process_noise_table(rows: &[NoiseBetweenProcesses]) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&[
        "case",
        "time",
        "pairs",
        "process to process",
        "95 % of pairs within",
        "co-running share of the CPU",
    ]);
    for row in rows {
        table.add_row(vec![
            row.case_id.clone(),
            time_text(row.median_launch_ns),
            row.pair_count.to_string(),
            format!("{:.2} %", row.process_standard_deviation_percent),
            format!("±{:.2} %", row.pair_difference_95_half_width_percent),
            row.median_contention_share.map_or_else(|| "-".to_owned(), share_as_percent_text),
        ]);
    }
    table
}

fn tried_thresholds_table(recommended: &RecommendedThresholds) -> AlignedTextTable {
    let mut table = AlignedTextTable::new(&[
        "threshold",
        "failed, A/A and sham",
        "A/A inconclusive",
        "slow-down",
        "found",
        "share",
    ]);
    for tried in &recommended.tried_thresholds {
        let (slower, found, share) = match tried.injected_slowdown_percent {
            Some(slower) if tried.slowdowns_injected > 0 => {
                let share = tried.slowdowns_found as f64 / tried.slowdowns_injected as f64;
                (
                    format!("{slower} %"),
                    format!("{} of {}", tried.slowdowns_found, tried.slowdowns_injected),
                    share_as_percent_text(share),
                )
            }
            _ => ("-".to_owned(), "-".to_owned(), "-".to_owned()),
        };
        table.add_row(vec![
            format!("{:.2} %", 100.0 * tried.relative_threshold),
            format!("{} of {}", tried.comparisons_with_false_alarm, tried.comparison_count),
            share_as_percent_text(tried.inconclusive_share),
            slower,
            found,
            share,
        ]);
    }
    table
}

fn recommended_thresholds_text(recommended: &RecommendedThresholds) -> String {
    let weight = format!("contention weight {:.1}", recommended.slowdown_per_contention);
    let note = recommended
        .why_not_recommended
        .as_ref()
        .map(|note| format!(" ({note})"))
        .unwrap_or_default();
    match recommended.recommended_relative_threshold {
        Some(relative) => {
            let blocks = recommended.min_blocks_for_unchanged.map_or_else(
                || "as many blocks as here".to_owned(),
                |blocks| format!("settled from {blocks} blocks"),
            );
            format!(
                "Recommended: threshold {:.2} %, {blocks}, {weight}; these cases then take at \
                 most {:.0} s a round{note}.",
                100.0 * relative,
                recommended.recommended_round_budget_s
            )
        }
        None => format!("Nothing is recommended{note}."),
    }
}
