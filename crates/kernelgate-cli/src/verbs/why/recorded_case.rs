//! A case that was recorded on a GPU: read like any other trace, diagnosed, and printed.

use std::path::{Path, PathBuf};

use kernelgate::display::table::TextTable;
use kernelgate::display::{byte_text, time_text};
use kernelgate::protocol::CaseRecording;
use kernelgate::record::file;
use kernelgate::record::text::printable_on_terminal;
use kernelgate_trace::diagnose::ranks::JoinedJob;
use kernelgate_trace::diagnose::{JoinedTrace, RangeTreeNode, TraceDiagnosis};
use kernelgate_trace::read::{self, WantedTraceParts};
use serde_json::{Value, json};

use super::network::RecordedNetwork;
use super::part_tables::{self, LaunchParts};
use super::stages::{self, KernelStages};
use super::trace_file;
use crate::verbs::shared::output::OutputFormat;

/// Share of the device's time below which a range is omitted from the text.
const MIN_SHOWN_SHARE: f64 = 0.01;

/// A recorded case.
pub struct ProfiledRecording {
    /// Path of the recording's file.
    pub path: PathBuf,
    recording: CaseRecording,
    tree: Vec<RangeTreeNode>,
    /// Parts of the network, if the workload names some.
    parts: Option<LaunchParts>,
    /// Stage times of kernels whose rows name stages.
    stages: Vec<KernelStages>,
    diagnosis: TraceDiagnosis,
    /// The other GPUs of a case that runs on several.
    gpus: Option<JoinedJob>,
}

/// Writes a recording into a folder, and reads it as a trace.
pub fn write_and_read_trace(
    recording: CaseRecording,
    folder: &Path,
) -> anyhow::Result<ProfiledRecording> {
    let path = folder.join(format!("{}.json", recording.case.replace('/', "_")));
    file::write(&path, &recording)?;
    let trace = read::open_trace_file(&path, &WantedTraceParts::ALL)
        .map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    let joined = JoinedTrace::new(&trace);
    let (tree, diagnosis) = (joined.range_tree(&[]), joined.diagnose_whole_job());
    let parts =
        (!recording.parts.is_empty()).then(|| part_tables::from_recording(&recording, &joined));
    let stages = stages::stages_of_recording(&recording);
    let gpus = trace_file::gpus(&recording.case, &path, &diagnosis)?;
    Ok(ProfiledRecording { path, recording, tree, parts, stages, diagnosis, gpus })
}

impl ProfiledRecording {
    /// Device and host times, the ranges and the findings as text.
    pub fn text(&self, format: OutputFormat, shown: &dyn Fn(&TextTable) -> String) -> String {
        let indented = |text: &str| {
            let lines: Vec<_> = text.lines().map(printable_on_terminal).collect();
            match format {
                // Markdown keeps the indents of names only in code.
                OutputFormat::Markdown => {
                    format!("```text\n{}\n```", lines.join("\n").replace('`', "'"))
                }
                _ => lines.join("\n"),
            }
        };
        let findings = indented(&self.diagnosis.findings_text());
        let gpus = self.gpus.as_ref().map(|job| indented(&job.to_text()) + "\n\n");
        let parts = self.parts.as_ref().map(|parts| parts.text(shown) + "\n\n").unwrap_or_default();
        let stages: String = self.stages.iter().map(|stages| stages.text(shown) + "\n").collect();
        format!(
            "{}{parts}{}\n{stages}\n{}findings, whose evidence `kernelgate diagnose` shows\n\
             {findings}\n",
            self.times(),
            self.ranges(shown),
            gpus.unwrap_or_default(),
        )
    }

    /// Sentences that explain the device and host times.
    fn times(&self) -> String {
        let CaseRecording { wall_ns, steps, warm_up, launch_cost_ns, .. } = &self.recording;
        let wall_ns = *wall_ns as f64;
        let Some(case) = self.tree.first() else {
            return format!("nothing ran on the device in {}\n", time_text(wall_ns));
        };
        let busy_ns = case.busy_ns as f64;
        let mut text = format!(
            "{} of {} on the device ({:.1}%), {steps} launches after {warm_up}\n",
            time_text(busy_ns),
            time_text(wall_ns),
            100.0 * busy_ns / wall_ns.max(1.0),
        );
        if let Some(step) = self.step() {
            text += &format!(
                "a launch: {} from its first start to its last end\n",
                time_text(step.span_ns as f64 / step.times.max(1) as f64)
            );
            for (by, reached) in &step.of_limits {
                text += &format!("{:.1}% of the {by} limit\n", reached * 100.0);
            }
        }
        if let Some(memory) = self.diagnosis.memory.first() {
            // The range of the case is the only outermost range.
            let held =
                |phase: usize| byte_text(memory.phases.get(phase).map_or(0, |of| of.peak_bytes));
            text += &format!(
                "device memory: {} at most while it was prepared and verified, {} while it was \
                 launched\n",
                held(0),
                held(1),
            );
        }
        if let Some(cost_ns) = launch_cost_ns {
            text += &format!(
                "recording adds {} to the host's part of a launch\n",
                time_text(cost_ns.max(0.0))
            );
        }
        text
    }

    /// The recorded case as a network; `None` if it is not a network.
    pub fn network(&self) -> Option<RecordedNetwork> {
        RecordedNetwork::new(&self.recording, &self.tree, &self.diagnosis)
    }

    /// Drawings of the stages of the case: names of files with their contents.
    pub fn stage_drawings(&self) -> anyhow::Result<Vec<(String, String)>> {
        self.stages.iter().map(|stages| stages.stage_drawing(&self.recording.case)).collect()
    }

    /// Time of a launch from its first start to its last end, nanoseconds, and the largest share of
    /// a limit that it reaches.
    pub fn launch_time_and_limit_share(&self) -> Option<(f64, Option<f64>)> {
        let step = self.step()?;
        let of_limit = step.of_limits.iter().map(|(_, reached)| *reached).max_by(f64::total_cmp);
        Some((step.span_ns as f64 / step.times.max(1) as f64, of_limit))
    }

    fn step(&self) -> Option<&RangeTreeNode> {
        self.tree.iter().find(|range| range.depth == 1 && range.name == CaseRecording::LAUNCH_RANGE)
    }

    fn ranges(&self, shown: &dyn Fn(&TextTable) -> String) -> String {
        let mut table = TextTable::new(&[
            "range", "times", "host", "device", "busy", "share", "launched", "bound",
        ]);
        let mut left_out = 0;
        for range in &self.tree {
            if range.share < MIN_SHOWN_SHARE {
                left_out += 1;
                continue;
            }
            // The outermost range has the name of the case, which the heading shows already.
            let name = if range.depth == 0 { "all" } else { &range.name };
            table.row(vec![
                format!("{} {name}", "·".repeat(range.depth)),
                range.times.to_string(),
                range.host_ns.map_or_else(|| "-".to_owned(), |ns| time_text(ns as f64)),
                time_text(range.span_ns as f64),
                time_text(range.busy_ns as f64),
                format!("{:.1}%", range.share * 100.0),
                range.operations.to_string(),
                range.bound.label().to_owned(),
            ]);
        }
        let mut text = shown(&table);
        if left_out > 0 {
            text +=
                &format!("\n{left_out} ranges below {:.0}% are omitted", MIN_SHOWN_SHARE * 100.0);
        }
        text
    }

    /// The recorded case as a JSON value.
    pub fn json(&self) -> Value {
        let ranges: Vec<Value> = self.tree.iter().map(RangeTreeNode::to_json).collect();
        json!({
            "steps": self.recording.steps,
            "warm_up": self.recording.warm_up,
            "wall_ns": self.recording.wall_ns,
            "busy_ns": self.tree.first().map(|case| case.busy_ns),
            "launch_cost_ns": self.recording.launch_cost_ns,
            "ranges": ranges,
            "parts": self.parts.as_ref().map(LaunchParts::json),
            "stages": self.stages.iter().map(KernelStages::json).collect::<Vec<_>>(),
            "diagnosis": self.diagnosis.to_json(),
            "gpus": self.gpus.as_ref().map(JoinedJob::to_json),
        })
    }
}
