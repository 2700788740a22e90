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
        .kinds
        .iter()
        .flat_map(|tally| {
            tally.reasons.iter().map(|(reason, count)| {
                format!("{}: inconclusive: {}: {count}", tally.kind, words(reason))
            })
        })
        .collect();
    section("Verdicts", &verdict_counts_table(&summary.kinds), &reasons.join("\n"));
    let not: Vec<String> = summary
        .power
        .iter()
        .filter(|power| power.case.is_some() || summary.power.len() == 1)
        .filter_map(|power| Some(words(&note_on_slowdowns_not_injected(power)?)))
        .collect();
    section("Slow-downs found", &detection_power_table(&summary.power), &not.join("\n"));
    section("Processes of one executable", &process_noise_table(&summary.noise), "");
    if let Some(recommended) = &calibration.recommended {
        section(
            "Thresholds",
            &tried_thresholds_table(recommended),
            &words(&recommended_thresholds_text(recommended)),
        );
    }
    if let Some(tolerance) = calibration.anchor_tolerance {
        let percent = 100.0 * tolerance;
        let _ = write!(out, "\nAnchors of shards that merge may differ by {percent:.1} %.\n");
    }
    if !calibration.simulated.is_empty() {
        let cases: Vec<&str> = calibration.simulated.iter().map(String::as_str).collect();
        let line = format!("{}{}", GateCalibration::SIMULATED_CASES_NOTE, cases.join(", "));
        let _ = write!(out, "\n{}\n", words(&line));
    }
    for line in &calibration.left_out {
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
            let driver = gpus.distinct_values_of_gpus(|gpu| gpu.driver.clone());
            format!(
                "driver {driver}, NVRTC {}",
                gpus.distinct_values_of_gpus(|gpu| gpu.nvrtc.clone())
            )
        }
        true => format!(
            "{} cores, {} threads, {}",
            environment.cores, environment.threads, environment.os
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
    let commands: BTreeSet<String> = calibration.commands.iter().map(code).collect();
    let commands: Vec<String> = commands.into_iter().collect();
    format!(
        "From {} to {}, {}, commit {}, {} comparisons, {} processes.\nThreshold {:.2} %, {:.0} \
         ns, tolerated {:.1} % from {} blocks, at most {} blocks, {:.0} s a round; a process \
         warms a case up for {:.2} s and times it for {:.2} s.\nMeasured by {}.",
        words(&calibration.started),
        words(calibration.comparisons.last().map_or("", |known| &known.started)),
        words(&place),
        words(&calibration.provenance.short_commit_with_changes_mark()),
        calibration.comparisons.len(),
        calibration.comparisons.iter().map(|known| known.processes).sum::<usize>(),
        100.0 * plan.relative,
        plan.absolute_ns,
        100.0 * plan.tolerated,
        plan.settle_blocks.min(plan.max_blocks),
        plan.max_blocks,
        calibration.budget_s,
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
    format!("{} … {}", share_as_percent_text(rate.low), share_as_percent_text(rate.high))
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
        let cases = tally.inconclusive.of;
        table.add_row(vec![
            tally.kind.clone(),
            format!("{} of {}", tally.fired.hits, tally.fired.of),
            tally.fired_bound.map_or_else(|| "-".to_owned(), share_as_percent_text),
            cases.to_string(),
            tally.unchanged.to_string(),
            tally.improved.to_string(),
            tally.regressed.to_string(),
            tally.inconclusive.hits.to_string(),
            share_as_percent_text(tally.inconclusive.observed_proportion()),
            tally.broken.to_string(),
            format!("{:.1}", tally.blocks),
            format!("{:.0} s", tally.wall_s),
            format!("{:.0} s", tally.longest_s),
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
    for row in rows.iter().filter(|row| row.found.of > 0) {
        table.add_row(vec![
            row.case.clone().unwrap_or_else(|| "all".to_owned()),
            row.kind.clone(),
            format!("{:.2} %", row.added),
            format!("{:.2} %", row.measured),
            format!("{} of {}", row.found.hits, row.found.of),
            share_as_percent_text(row.found.observed_proportion()),
            proportion_interval_text(row.found),
            row.missed.to_string(),
        ]);
    }
    table
}

fn note_on_slowdowns_not_injected(power: &InjectedSlowdownDetection) -> Option<String> {
    let (count, reason) = power.not_injected.as_ref()?;
    let case = power.case.as_deref().unwrap_or("all");
    Some(format!("not made: {}, {case}, in {count} comparisons: {reason}", power.kind))
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
            row.case.clone(),
            time_text(row.time_ns),
            row.pairs.to_string(),
            format!("{:.2} %", row.process),
            format!("±{:.2} %", row.widest),
            row.contention.map_or_else(|| "-".to_owned(), share_as_percent_text),
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
    for tried in &recommended.tried {
        let (slower, found, share) = match tried.percent {
            Some(slower) if tried.of > 0 => {
                let share = tried.found as f64 / tried.of as f64;
                (
                    format!("{slower} %"),
                    format!("{} of {}", tried.found, tried.of),
                    share_as_percent_text(share),
                )
            }
            _ => ("-".to_owned(), "-".to_owned(), "-".to_owned()),
        };
        table.add_row(vec![
            format!("{:.2} %", 100.0 * tried.relative),
            format!("{} of {}", tried.false_alarms, tried.comparisons),
            share_as_percent_text(tried.inconclusive),
            slower,
            found,
            share,
        ]);
    }
    table
}

fn recommended_thresholds_text(recommended: &RecommendedThresholds) -> String {
    let weight = format!("contention weight {:.1}", recommended.contention_weight);
    let note = recommended.note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
    match recommended.relative {
        Some(relative) => {
            let blocks = recommended.settle_blocks.map_or_else(
                || "as many blocks as here".to_owned(),
                |blocks| format!("settled from {blocks} blocks"),
            );
            format!(
                "Recommended: threshold {:.2} %, {blocks}, {weight}; these cases then take at \
                 most {:.0} s a round{note}.",
                100.0 * relative,
                recommended.budget_s
            )
        }
        None => format!("Nothing is recommended{note}."),
    }
}
