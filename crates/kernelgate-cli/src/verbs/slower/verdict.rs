//! Prints the result of verbs that end in a verdict.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::ValueEnum;
use serde::Serialize;

use crate::pages::verdict;
use crate::report::formats::metrics::{self, MetricsByCase};
use crate::report::formats::{comment, junit};
use crate::report::summary::VerdictSummary;
use crate::verbs::shared::output::{json, print_json, write_files};
use kernelgate::display::terminal;
use kernelgate::record::file;

/// Format in which a verdict is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum VerdictFormat {
    /// For a terminal
    #[default]
    Text,
    /// Everything, for programs
    Json,
    /// The comment for a pull request, at most 60,000 bytes
    Markdown,
    /// JUnit XML, for the test view of a CI system
    Junit,
    /// Bencher Metric Format: the times only, for `bencher run --adapter json`
    Bmf,
    /// The times only, for github-action-benchmark's tool customSmallerIsBetter
    SmallerIsBetter,
}

/// Picture of the changes; absent where no case was timed.
const CHANGE_CHART_FILE: &str = "change.svg";

/// Flags of a verb that ends in a verdict.
#[derive(Debug, clap::Args)]
pub struct VerdictOutput {
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: VerdictFormat,
    /// Also write comment.md, report.html, change.svg, junit.xml, result.json, bmf.json and
    /// smaller-is-better.json into this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl VerdictOutput {
    /// How results are printed.
    pub const fn verdict_format(&self) -> VerdictFormat {
        self.format
    }

    /// Looks before anything is measured: whether the folder that was asked for can be written.
    pub fn check(&self) -> anyhow::Result<()> {
        let Some(folder) = &self.out else { return Ok(()) };
        file::check_writable(&folder.join("result.json")).context("--out")
    }

    /// Prints a result, then writes all its formats where asked for: what cannot be written costs
    /// no verdict. `text` is the form for a terminal, `result` the whole result for JSON.
    pub fn print_and_write(
        &self,
        text: &str,
        summary: &VerdictSummary,
        result: &impl Serialize,
        metrics: &MetricsByCase,
    ) -> anyhow::Result<()> {
        match self.format {
            VerdictFormat::Text => terminal::print_wrapped(text),
            VerdictFormat::Json => print_json(result)?,
            VerdictFormat::Markdown => print!("{}", comment::markdown(summary)),
            VerdictFormat::Junit => print!("{}", junit::xml(summary)),
            VerdictFormat::Bmf => print_json(&metrics::bencher_metric_format(metrics))?,
            VerdictFormat::SmallerIsBetter => {
                print_json(&metrics::smaller_is_better_format(metrics))?
            }
        }
        if let Some(folder) = &self.out {
            let mut files = vec![
                ("comment.md", comment::markdown(summary)),
                ("junit.xml", junit::xml(summary)),
                ("result.json", json(result)?),
                ("bmf.json", json(&metrics::bencher_metric_format(metrics))?),
                ("smaller-is-better.json", json(&metrics::smaller_is_better_format(metrics))?),
                ("report.html", verdict::page(summary).context("--out")?),
            ];
            let figure = verdict::changes(summary);
            if let Some(figure) = &figure {
                files.push((CHANGE_CHART_FILE, figure.chart.svg().context("--out")?));
            }
            let absent: &[&str] = if figure.is_some() { &[] } else { &[CHANGE_CHART_FILE] };
            write_files(folder, files, absent)?;
        }
        Ok(())
    }
}
