//! Times of the stages inside a kernel, for implementations that name stages: a second build of the
//! kernel reads clocks, also showing differences between blocks.
//!
//! The stage clocks count cycles. The time of a stage is its share of the clock cycles, multiplied
//! by the time of the kernel's build without clocks.

use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::time_text;
use kernelgate::protocol::{CuptiCaseRecording, KernelStageCycles};
use kernelgate::record::text::clean_message_for_terminal;
use kernelgate::stats::mean;
use serde_json::{Value, json};

use crate::plot::{
    AxisScaleKind, ChartAxis, ChartBody, ChartRowWithLabel, LabelledRowsChart, MarkInChartRow,
    PlottedUnit, TitledChart,
};

/// Times of the stages inside one kernel, per launch of the case.
pub struct KernelStageTimes {
    kernel_name: String,
    /// Number of blocks.
    thread_block_count: usize,
    /// Time per launch of the kernel's build without clocks, nanoseconds.
    kernel_ns_without_clocks: f64,
    stages: Vec<KernelStageTime>,
}

struct KernelStageTime {
    stage_name: String,
    /// The stage's share of the cycles of all stages, 0 to 1.
    share_of_stage_cycles: f64,
    /// Time of the stage in each thread block, nanoseconds.
    ns_by_thread_block: Vec<f64>,
}

/// Stage times of the kernels of a recording; kernels without clock counts are skipped.
pub fn stage_times_of_recording(recording: &CuptiCaseRecording) -> Vec<KernelStageTimes> {
    recording.stages.iter().filter_map(|stages| stage_times_of_kernel(recording, stages)).collect()
}

#[allow(clippy::cast_precision_loss)]
fn stage_times_of_kernel(
    recording: &CuptiCaseRecording,
    stages: &KernelStageCycles,
) -> Option<KernelStageTimes> {
    let trace = &recording.trace;
    let is_it = |name: u32| trace.interned_names.get(name as usize) == Some(&stages.kernel_name);
    let recorded = trace.kernels.iter().filter(|kernel| is_it(kernel.name_index));
    let times_ns = recorded.map(|kernel| kernel.end_ns.saturating_sub(kernel.start_ns));
    let total_ns = times_ns.fold(0, u64::saturating_add);
    let kernel_ns = total_ns as f64 / f64::from(recording.recorded_launches.max(1));
    let blocks: Vec<&Vec<u64>> = stages
        .stage_cycles_by_block
        .iter()
        .filter(|cycles| {
            cycles.len() == stages.stage_names.len() && cycles.iter().any(|&of| of > 0)
        })
        .collect();
    let all: f64 = blocks.iter().copied().flatten().map(|&cycles| cycles as f64).sum();
    if all == 0.0 {
        return None;
    }
    let ns_a_cycle = kernel_ns * blocks.len() as f64 / all;
    let stage = |(i, name): (usize, &String)| {
        let cycles = || blocks.iter().map(|cycles| cycles[i] as f64);
        KernelStageTime {
            stage_name: name.clone(),
            share_of_stage_cycles: cycles().sum::<f64>() / all,
            ns_by_thread_block: cycles().map(|cycles| cycles * ns_a_cycle).collect(),
        }
    };
    Some(KernelStageTimes {
        kernel_name: stages.kernel_name.clone(),
        thread_block_count: blocks.len(),
        kernel_ns_without_clocks: kernel_ns,
        stages: stages.stage_names.iter().enumerate().map(stage).collect(),
    })
}

impl KernelStageTime {
    fn mean_ns_over_blocks(&self) -> f64 {
        mean(&self.ns_by_thread_block)
    }

    fn shortest_time_over_thread_blocks_ns(&self) -> f64 {
        self.ns_by_thread_block.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn longest_time_over_blocks_ns(&self) -> f64 {
        self.ns_by_thread_block.iter().copied().fold(0.0, f64::max)
    }
}

impl KernelStageTimes {
    /// The stage times of the kernel as a table with a heading.
    pub fn stage_table_text(&self, shown: &dyn Fn(&AlignedTextTable) -> String) -> String {
        let mut table = AlignedTextTable::new(&[
            "stage",
            "a launch",
            "share",
            "shortest block",
            "longest block",
        ]);
        for stage in &self.stages {
            table.add_row(vec![
                clean_message_for_terminal(&stage.stage_name).into_owned(),
                time_text(stage.mean_ns_over_blocks()),
                format!("{:.1}%", 100.0 * stage.share_of_stage_cycles),
                time_text(stage.shortest_time_over_thread_blocks_ns()),
                time_text(stage.longest_time_over_blocks_ns()),
            ]);
        }
        format!("\nstages of {}\n{}", self.stage_table_heading(), shown(&table))
    }

    fn stage_table_heading(&self) -> String {
        format!(
            "{}, {} in {} blocks: mean over the blocks, by clocks in another build of it",
            clean_message_for_terminal(&self.kernel_name),
            time_text(self.kernel_ns_without_clocks),
            self.thread_block_count
        )
    }

    pub fn stage_times_as_json(&self) -> Value {
        let stage = |stage: &KernelStageTime| {
            json!({
                "name": stage.stage_name,
                "share": stage.share_of_stage_cycles,
                "mean_ns": stage.mean_ns_over_blocks(),
                "blocks_ns": stage.ns_by_thread_block,
            })
        };
        json!({
            "kernel": self.kernel_name,
            "kernel_ns": self.kernel_ns_without_clocks,
            "stages": self.stages.iter().map(stage).collect::<Vec<_>>(),
        })
    }

    /// A chart with a row for each stage of the kernel, and a ring for the time of each thread
    /// block.
    fn stage_times_chart(&self, case: &str) -> TitledChart {
        let row = |stage: &KernelStageTime| ChartRowWithLabel {
            row_label: stage.stage_name.clone(),
            value_text: format!(
                "{} {:.1}%",
                time_text(stage.mean_ns_over_blocks()),
                100.0 * stage.share_of_stage_cycles
            ),
            marks: vec![
                MarkInChartRow::RingsAtValues(stage.ns_by_thread_block.clone(), 0),
                MarkInChartRow::VerticalTickAtValue(stage.mean_ns_over_blocks()),
            ],
        };
        let axis = ChartAxis::with_round_ticks(
            "time in a launch",
            PlottedUnit::TimeNs,
            AxisScaleKind::LinearFromZero,
        );
        TitledChart {
            chart_title: case.to_owned(),
            chart_subtitle: format!(
                "ring: a block, line: mean of all blocks; {}",
                self.stage_table_heading()
            ),
            body: ChartBody::Rows(LabelledRowsChart {
                horizontal_axis: axis,
                mark_colour_legend: Vec::new(),
                rows: self.stages.iter().map(row).collect(),
                vertical_line_value: None,
            }),
        }
    }

    /// File name and SVG text of the stage chart.
    pub fn stage_chart_file(&self, case: &str) -> anyhow::Result<(String, String)> {
        let safe = |text: &str| text.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
        Ok((
            format!("{}-{}-stages.svg", safe(case), safe(&self.kernel_name)),
            self.stage_times_chart(case).render_svg()?,
        ))
    }
}
