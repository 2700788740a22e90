//! A case that was recorded on a GPU by `kernelgate profile`: its recording is read like any other
//! trace, diagnosed and printed.

use std::path::{Path, PathBuf};

use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::{decimal_byte_size_text, time_text};
use kernelgate::protocol::CuptiCaseRecording;
use kernelgate::record::file;
use kernelgate::record::text::clean_message_for_terminal;
use kernelgate_trace::diagnose::ranks::JobOfJoinedRanks;
use kernelgate_trace::diagnose::{RangeTreeRow, TraceDiagnosis, TraceJoinedForAnalyses};
use kernelgate_trace::read::{self, WantedTraceParts};
use serde_json::{Value, json};

use super::network::RecordedNetwork;
use super::part_tables::{self, NetworkPartTimesOfLaunch};
use super::stages::{self, KernelStageTimes};
use super::trace_file;
use crate::verbs::shared::output::OutputFormat;

/// Share of the GPU time of a case below which a range is omitted from the text.
const MIN_SHARE_OF_SHOWN_RANGE: f64 = 0.01;

/// A recorded case.
pub struct DiagnosedRecording {
    /// Path of the recording's file.
    pub recording_file: PathBuf,
    recording: CuptiCaseRecording,
    range_tree: Vec<RangeTreeRow>,
    /// Times of the network parts that the workload names; `None` if it names none.
    parts: Option<NetworkPartTimesOfLaunch>,
    /// Times of the stages inside kernels, for implementations that name stages.
    stages: Vec<KernelStageTimes>,
    diagnosis: TraceDiagnosis,
    /// All GPUs as ranks of a job, for a case that runs on several GPUs.
    gpus_as_ranks: Option<JobOfJoinedRanks>,
}

/// Writes the recording of a case into a folder, and reads the file as a trace.
pub fn write_recording_and_read_as_trace(
    recording: CuptiCaseRecording,
    folder: &Path,
) -> anyhow::Result<DiagnosedRecording> {
    let path = folder.join(format!("{}.json", recording.case_id.replace('/', "_")));
    file::write_record_atomically(&path, &recording)?;
    let trace = read::open_trace_file(&path, &WantedTraceParts::ALL)
        .map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    let joined = TraceJoinedForAnalyses::join_trace(&trace);
    let (tree, diagnosis) = (joined.gpu_work_by_range_tree(&[]), joined.diagnose_joined_trace());
    let parts = (!recording.parts.is_empty())
        .then(|| part_tables::network_part_times_of_recording(&recording, &joined));
    let stages = stages::stage_times_of_recording(&recording);
    let gpus = trace_file::gpus_as_ranks(&recording.case_id, &path, &diagnosis)?;
    Ok(DiagnosedRecording {
        recording_file: path,
        recording,
        range_tree: tree,
        parts,
        stages,
        diagnosis,
        gpus_as_ranks: gpus,
    })
}

impl DiagnosedRecording {
    /// Times of device and host, the table of ranges, and the findings, as text.
    pub fn recorded_profile_text(
        &self,
        format: OutputFormat,
        shown: &dyn Fn(&AlignedTextTable) -> String,
    ) -> String {
        let indented = |text: &str| {
            let lines: Vec<_> = text.lines().map(clean_message_for_terminal).collect();
            match format {
                // In Markdown only code keeps the indents of range names.
                OutputFormat::Markdown => {
                    format!("```text\n{}\n```", lines.join("\n").replace('`', "'"))
                }
                _ => lines.join("\n"),
            }
        };
        let findings = indented(&self.diagnosis.findings_without_evidence_to_text());
        let gpus = self.gpus_as_ranks.as_ref().map(|job| indented(&job.job_to_text()) + "\n\n");
        let parts = self
            .parts
            .as_ref()
            .map(|parts| parts.rate_memory_and_tables_text(shown) + "\n\n")
            .unwrap_or_default();
        let stages: String =
            self.stages.iter().map(|stages| stages.stage_table_text(shown) + "\n").collect();
        format!(
            "{}{parts}{}\n{stages}\n{}findings, whose evidence `kernelgate diagnose` shows\n\
             {findings}\n",
            self.device_and_host_times_text(),
            self.table_of_ranges(shown),
            gpus.unwrap_or_default(),
        )
    }

    /// Sentences on the times that the device and the host took.
    fn device_and_host_times_text(&self) -> String {
        let CuptiCaseRecording {
            recorded_launches_wall_ns: wall_ns,
            recorded_launches: steps,
            warm_up_launches: warm_up,
            cupti_overhead_per_launch_ns: launch_cost_ns,
            ..
        } = &self.recording;
        let wall_ns = *wall_ns as f64;
        let Some(case) = self.range_tree.first() else {
            return format!("nothing ran on the device in {}\n", time_text(wall_ns));
        };
        let busy_ns = case.gpu_busy_ns as f64;
        let mut text = format!(
            "{} of {} on the device ({:.1}%), {steps} launches after {warm_up}\n",
            time_text(busy_ns),
            time_text(wall_ns),
            100.0 * busy_ns / wall_ns.max(1.0),
        );
        if let Some(step) = self.launch_range() {
            text += &format!(
                "a launch: {} from its first start to its last end\n",
                time_text(
                    step.total_gpu_span_ns as f64 / step.ranges_with_operations.max(1) as f64
                )
            );
            for (by, reached) in &step.reached_share_of_limits {
                text += &format!("{:.1}% of the {by} limit\n", reached * 100.0);
            }
        }
        if let Some(memory) = self.diagnosis.device_memory_over_time.first() {
            // The outermost range of a case's recording covers the whole case, so its memory phase
            // is that of the case.
            let held = |phase: usize| {
                decimal_byte_size_text(memory.phases.get(phase).map_or(0, |of| of.peak_bytes))
            };
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

    /// The numbers of the recorded case as a neural network; `None` if the case is not a network.
    pub fn as_network(&self) -> Option<RecordedNetwork> {
        RecordedNetwork::from_case_recording(&self.recording, &self.range_tree, &self.diagnosis)
    }

    /// Charts of the stages inside the case's kernels, as file names with SVG texts.
    pub fn stage_chart_files(&self) -> anyhow::Result<Vec<(String, String)>> {
        self.stages.iter().map(|stages| stages.stage_chart_file(&self.recording.case_id)).collect()
    }

    /// Time of a launch from its first start to its last end on the GPU, nanoseconds, and the
    /// largest share of a hardware limit that the launch reaches.
    pub fn launch_time_and_share_of_limit(&self) -> Option<(f64, Option<f64>)> {
        let step = self.launch_range()?;
        let of_limit =
            step.reached_share_of_limits.iter().map(|(_, reached)| *reached).max_by(f64::total_cmp);
        Some((step.total_gpu_span_ns as f64 / step.ranges_with_operations.max(1) as f64, of_limit))
    }

    fn launch_range(&self) -> Option<&RangeTreeRow> {
        self.range_tree.iter().find(|range| {
            range.depth == 1 && range.range_name == CuptiCaseRecording::RANGE_NAME_OF_LAUNCH
        })
    }

    fn table_of_ranges(&self, shown: &dyn Fn(&AlignedTextTable) -> String) -> String {
        let mut table = AlignedTextTable::new(&[
            "range", "times", "host", "device", "busy", "share", "launched", "bound",
        ]);
        let mut left_out = 0;
        for range in &self.range_tree {
            if range.share_of_busy_time < MIN_SHARE_OF_SHOWN_RANGE {
                left_out += 1;
                continue;
            }
            // The outermost range has the name of the case, which the heading shows, so the table
            // calls the range "all".
            let name = if range.depth == 0 { "all" } else { &range.range_name };
            table.add_row(vec![
                format!("{} {name}", "·".repeat(range.depth)),
                range.ranges_with_operations.to_string(),
                range.total_host_ns.map_or_else(|| "-".to_owned(), |ns| time_text(ns as f64)),
                time_text(range.total_gpu_span_ns as f64),
                time_text(range.gpu_busy_ns as f64),
                format!("{:.1}%", range.share_of_busy_time * 100.0),
                range.operations.to_string(),
                range.bound.printed_time_bound().to_owned(),
            ]);
        }
        let mut text = shown(&table);
        if left_out > 0 {
            text += &format!(
                "\n{left_out} ranges below {:.0}% are omitted",
                MIN_SHARE_OF_SHOWN_RANGE * 100.0
            );
        }
        text
    }

    /// The profile of the recorded case as a JSON value.
    pub fn profile_as_json(&self) -> Value {
        let ranges: Vec<Value> =
            self.range_tree.iter().map(RangeTreeRow::range_tree_node_to_json).collect();
        json!({
            "steps": self.recording.recorded_launches,
            "warm_up": self.recording.warm_up_launches,
            "wall_ns": self.recording.recorded_launches_wall_ns,
            "busy_ns": self.range_tree.first().map(|case| case.gpu_busy_ns),
            "launch_cost_ns": self.recording.cupti_overhead_per_launch_ns,
            "ranges": ranges,
            "parts": self.parts.as_ref().map(NetworkPartTimesOfLaunch::network_parts_as_json),
            "stages": self.stages.iter().map(KernelStageTimes::stage_times_as_json).collect::<Vec<_>>(),
            "diagnosis": self.diagnosis.diagnosis_to_json(),
            "gpus": self.gpus_as_ranks.as_ref().map(JobOfJoinedRanks::job_to_json),
        })
    }
}
