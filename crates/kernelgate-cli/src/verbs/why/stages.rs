//! Times of the stages inside a kernel, for implementations that name stages: a second build of the
//! kernel reads clocks, also showing differences between blocks.
//!
//! The clocks count cycles. The time of a stage is its share of the clock cycles, multiplied by the
//! time of the kernel's build without clocks.

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
    kernel: String,
    /// Number of blocks.
    blocks: usize,
    /// Time per launch of the kernel's build without clocks, nanoseconds.
    kernel_ns: f64,
    stages: Vec<KernelStageTime>,
}

struct KernelStageTime {
    name: String,
    /// The stage's share of the cycles of all stages, 0 to 1.
    share: f64,
    /// Time of the stage in each thread block, nanoseconds.
    blocks_ns: Vec<f64>,
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
    let is_it = |name: u32| trace.names.get(name as usize) == Some(&stages.kernel);
    let recorded = trace.kernels.iter().filter(|kernel| is_it(kernel.name));
    let times_ns = recorded.map(|kernel| kernel.end_ns.saturating_sub(kernel.start_ns));
    let total_ns = times_ns.fold(0, u64::saturating_add);
    let kernel_ns = total_ns as f64 / f64::from(recording.steps.max(1));
    let blocks: Vec<&Vec<u64>> = stages
        .cycles
        .iter()
        .filter(|cycles| cycles.len() == stages.names.len() && cycles.iter().any(|&of| of > 0))
        .collect();
    let all: f64 = blocks.iter().copied().flatten().map(|&cycles| cycles as f64).sum();
    if all == 0.0 {
        return None;
    }
    let ns_a_cycle = kernel_ns * blocks.len() as f64 / all;
    let stage = |(i, name): (usize, &String)| {
        let cycles = || blocks.iter().map(|cycles| cycles[i] as f64);
        KernelStageTime {
            name: name.clone(),
            share: cycles().sum::<f64>() / all,
            blocks_ns: cycles().map(|cycles| cycles * ns_a_cycle).collect(),
        }
    };
    Some(KernelStageTimes {
        kernel: stages.kernel.clone(),
        blocks: blocks.len(),
        kernel_ns,
        stages: stages.names.iter().enumerate().map(stage).collect(),
    })
}

impl KernelStageTime {
    fn mean_ns_over_blocks(&self) -> f64 {
        mean(&self.blocks_ns)
    }

    fn shortest_time_over_thread_blocks_ns(&self) -> f64 {
        self.blocks_ns.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn longest_time_over_blocks_ns(&self) -> f64 {
        self.blocks_ns.iter().copied().fold(0.0, f64::max)
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
                clean_message_for_terminal(&stage.name).into_owned(),
                time_text(stage.mean_ns_over_blocks()),
                format!("{:.1}%", 100.0 * stage.share),
                time_text(stage.shortest_time_over_thread_blocks_ns()),
                time_text(stage.longest_time_over_blocks_ns()),
            ]);
        }
        format!("\nstages of {}\n{}", self.stage_table_heading(), shown(&table))
    }

    fn stage_table_heading(&self) -> String {
        format!(
            "{}, {} in {} blocks: mean over the blocks, by clocks in another build of it",
            clean_message_for_terminal(&self.kernel),
            time_text(self.kernel_ns),
            self.blocks
        )
    }

    pub fn stage_times_as_json(&self) -> Value {
        let stage = |stage: &KernelStageTime| {
            json!({
                "name": stage.name,
                "share": stage.share,
                "mean_ns": stage.mean_ns_over_blocks(),
                "blocks_ns": stage.blocks_ns,
            })
        };
        json!({
            "kernel": self.kernel,
            "kernel_ns": self.kernel_ns,
            "stages": self.stages.iter().map(stage).collect::<Vec<_>>(),
        })
    }

    /// A chart with a row for each stage of the kernel, and a ring for the time of each thread
    /// block.
    fn stage_times_chart(&self, case: &str) -> TitledChart {
        let row = |stage: &KernelStageTime| ChartRowWithLabel {
            label: stage.name.clone(),
            value_text: format!(
                "{} {:.1}%",
                time_text(stage.mean_ns_over_blocks()),
                100.0 * stage.share
            ),
            marks: vec![
                MarkInChartRow::Dots(stage.blocks_ns.clone(), 0),
                MarkInChartRow::Tick(stage.mean_ns_over_blocks()),
            ],
        };
        let axis = ChartAxis::with_round_ticks(
            "time in a launch",
            PlottedUnit::Time,
            AxisScaleKind::FromZero,
        );
        TitledChart {
            title: case.to_owned(),
            subtitle: format!(
                "ring: a block, line: mean of all blocks; {}",
                self.stage_table_heading()
            ),
            body: ChartBody::Rows(LabelledRowsChart {
                axis,
                legend: Vec::new(),
                rows: self.stages.iter().map(row).collect(),
                origin: None,
            }),
        }
    }

    /// File name and SVG text of the stage chart.
    pub fn stage_chart_file(&self, case: &str) -> anyhow::Result<(String, String)> {
        let safe = |text: &str| text.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
        Ok((
            format!("{}-{}-stages.svg", safe(case), safe(&self.kernel)),
            self.stage_times_chart(case).render_svg()?,
        ))
    }
}
