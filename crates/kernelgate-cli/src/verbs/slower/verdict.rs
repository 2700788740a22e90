//! Prints the verdicts of a kernelgate verb in the requested format, and writes them to files in
//! all formats.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::ValueEnum;
use serde::Serialize;

use crate::pages::verdict;
use crate::report::formats::metrics::{self, MetricsByCase};
use crate::report::formats::{comment, junit};
use crate::report::summary::VerdictSummary;
use crate::verbs::shared::output::{
    json_safe_for_terminals, print_as_json, write_all_files_or_none,
};
use kernelgate::display::terminal;
use kernelgate::record::file;

/// Format in which verdicts are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum VerdictOutputFormat {
    /// For a terminal
    #[default]
    Text,
    /// Everything, for programs
    Json,
    /// The comment for a pull request in Markdown, at most 60,000 bytes
    Markdown,
    /// JUnit XML, for the test view of a CI system
    Junit,
    /// JSON in Bencher Metric Format: only the times, for `bencher run --adapter json`
    #[value(name = "bmf")]
    BencherMetricFormat,
    /// JSON with only the times, for github-action-benchmark's tool setting customSmallerIsBetter
    #[value(name = "smaller-is-better")]
    GithubSmallerIsBetter,
}

/// File of the chart of time changes; not written if no case was timed.
const TIME_CHANGE_CHART_FILE: &str = "change.svg";

/// Command-line flags on the output of a verb that ends in a verdict.
#[derive(Debug, clap::Args)]
pub struct VerdictOutputFlags {
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: VerdictOutputFormat,
    /// Also write comment.md, report.html, change.svg, junit.xml, result.json, bmf.json and
    /// smaller-is-better.json into this folder
    #[arg(id = "out", long = "out", value_name = "DIR")]
    output_folder: Option<PathBuf>,
}

impl VerdictOutputFlags {
    /// The output format in which verdicts are printed.
    pub const fn requested_verdict_format(&self) -> VerdictOutputFormat {
        self.format
    }

    /// Checks, before anything is measured, that the folder of `--out` can be written.
    pub fn check_output_folder_is_writable(&self) -> anyhow::Result<()> {
        let Some(folder) = &self.output_folder else { return Ok(()) };
        file::check_file_is_writable(&folder.join("result.json")).context("--out")
    }

    /// Prints the verdicts in the requested format, then writes all formats to the folder of
    /// `--out`; a file that cannot be written is an error after the verdicts were printed. `text`
    /// is the report for a terminal, and `result` is what JSON shows.
    pub fn print_and_write_all_formats(
        &self,
        text: &str,
        summary: &VerdictSummary,
        result: &impl Serialize,
        metrics: &MetricsByCase,
    ) -> anyhow::Result<()> {
        match self.format {
            VerdictOutputFormat::Text => terminal::print_broken_to_terminal_width(text),
            VerdictOutputFormat::Json => print_as_json(result)?,
            VerdictOutputFormat::Markdown => {
                print!("{}", comment::pull_request_comment_markdown(summary))
            }
            VerdictOutputFormat::Junit => print!("{}", junit::junit_xml_of_verdicts(summary)),
            VerdictOutputFormat::BencherMetricFormat => {
                print_as_json(&metrics::bencher_metric_format(metrics))?
            }
            VerdictOutputFormat::GithubSmallerIsBetter => {
                print_as_json(&metrics::github_action_benchmark_format(metrics))?
            }
        }
        if let Some(folder) = &self.output_folder {
            let mut files = vec![
                ("comment.md", comment::pull_request_comment_markdown(summary)),
                ("junit.xml", junit::junit_xml_of_verdicts(summary)),
                ("result.json", json_safe_for_terminals(result)?),
                ("bmf.json", json_safe_for_terminals(&metrics::bencher_metric_format(metrics))?),
                (
                    "smaller-is-better.json",
                    json_safe_for_terminals(&metrics::github_action_benchmark_format(metrics))?,
                ),
                ("report.html", verdict::verdict_page(summary).context("--out")?),
            ];
            let figure = verdict::time_change_chart(summary);
            if let Some(figure) = &figure {
                files.push((TIME_CHANGE_CHART_FILE, figure.chart.render_svg().context("--out")?));
            }
            let absent: &[&str] = if figure.is_some() { &[] } else { &[TIME_CHANGE_CHART_FILE] };
            write_all_files_or_none(folder, files, absent)?;
        }
        Ok(())
    }
}
