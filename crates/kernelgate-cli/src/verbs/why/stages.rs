//! The stages inside a kernel whose row names them: the time of each in a launch, by the clocks of
//! another build of the kernel, and the differences between blocks.
//!
//! The clocks count cycles. The time of a stage is its share of the cycles, multiplied by the time
//! of the kernel without clocks.

use kernelgate::display::table::TextTable;
use kernelgate::display::time_text;
use kernelgate::protocol::{CaseRecording, RecordedStages};
use kernelgate::record::text::printable_on_terminal;
use kernelgate::stats::mean;
use serde_json::{Value, json};

use crate::plot::{
    ChartAxis, ChartBody, ChartRowMark, ChartWithTitle, LabelledRow, LabelledRows, PlottedUnit,
    ScaleKind,
};

/// The stages of a kernel in one launch of its case.
pub struct KernelStages {
    kernel: String,
    /// Number of blocks.
    blocks: usize,
    /// Time of the kernel without clocks, as recorded, nanoseconds.
    kernel_ns: f64,
    stages: Vec<StageTime>,
}

struct StageTime {
    name: String,
    /// The stage's share of the kernel's cycles.
    share: f64,
    /// Time of the stage in each block, nanoseconds.
    blocks_ns: Vec<f64>,
}

/// The stages of a recording; kernels without counts are skipped.
pub fn stages_of_recording(recording: &CaseRecording) -> Vec<KernelStages> {
    recording.stages.iter().filter_map(|stages| kernel_stages(recording, stages)).collect()
}

#[allow(clippy::cast_precision_loss)]
fn kernel_stages(recording: &CaseRecording, stages: &RecordedStages) -> Option<KernelStages> {
    let trace = &recording.trace;
    let is_it = |name: u32| trace.names.get(name as usize) == Some(&stages.kernel);
    let recorded = trace.kernels.iter().filter(|kernel| is_it(kernel.name));
    let times_ns = recorded.map(|kernel| kernel.end.saturating_sub(kernel.start));
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
        StageTime {
            name: name.clone(),
            share: cycles().sum::<f64>() / all,
            blocks_ns: cycles().map(|cycles| cycles * ns_a_cycle).collect(),
        }
    };
    Some(KernelStages {
        kernel: stages.kernel.clone(),
        blocks: blocks.len(),
        kernel_ns,
        stages: stages.names.iter().enumerate().map(stage).collect(),
    })
}

impl StageTime {
    fn mean_ns(&self) -> f64 {
        mean(&self.blocks_ns)
    }

    fn shortest_block_ns(&self) -> f64 {
        self.blocks_ns.iter().copied().fold(f64::INFINITY, f64::min)
    }

    fn longest_block_ns(&self) -> f64 {
        self.blocks_ns.iter().copied().fold(0.0, f64::max)
    }
}

impl KernelStages {
    /// The stages as a table with a heading.
    pub fn text(&self, shown: &dyn Fn(&TextTable) -> String) -> String {
        let mut table =
            TextTable::new(&["stage", "a launch", "share", "shortest block", "longest block"]);
        for stage in &self.stages {
            table.row(vec![
                printable_on_terminal(&stage.name).into_owned(),
                time_text(stage.mean_ns()),
                format!("{:.1}%", 100.0 * stage.share),
                time_text(stage.shortest_block_ns()),
                time_text(stage.longest_block_ns()),
            ]);
        }
        format!("\nstages of {}\n{}", self.heading(), shown(&table))
    }

    fn heading(&self) -> String {
        format!(
            "{}, {} in {} blocks: mean over the blocks, by clocks in another build of it",
            printable_on_terminal(&self.kernel),
            time_text(self.kernel_ns),
            self.blocks
        )
    }

    pub fn json(&self) -> Value {
        let stage = |stage: &StageTime| {
            json!({
                "name": stage.name,
                "share": stage.share,
                "mean_ns": stage.mean_ns(),
                "blocks_ns": stage.blocks_ns,
            })
        };
        json!({
            "kernel": self.kernel,
            "kernel_ns": self.kernel_ns,
            "stages": self.stages.iter().map(stage).collect::<Vec<_>>(),
        })
    }

    /// A chart with a row for each stage and a ring for each block.
    fn stage_chart(&self, case: &str) -> ChartWithTitle {
        let row = |stage: &StageTime| LabelledRow {
            label: stage.name.clone(),
            value: format!("{} {:.1}%", time_text(stage.mean_ns()), 100.0 * stage.share),
            marks: vec![
                ChartRowMark::Dots(stage.blocks_ns.clone(), 0),
                ChartRowMark::Tick(stage.mean_ns()),
            ],
        };
        let axis = ChartAxis::new("time in a launch", PlottedUnit::Time, ScaleKind::FromZero);
        ChartWithTitle {
            title: case.to_owned(),
            subtitle: format!("ring: a block, line: mean of all blocks; {}", self.heading()),
            body: ChartBody::Rows(LabelledRows {
                axis,
                legend: Vec::new(),
                rows: self.stages.iter().map(row).collect(),
                origin: None,
            }),
        }
    }

    /// File name and contents of the stage chart.
    pub fn stage_drawing(&self, case: &str) -> anyhow::Result<(String, String)> {
        let safe = |text: &str| text.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
        Ok((
            format!("{}-{}-stages.svg", safe(case), safe(&self.kernel)),
            self.stage_chart(case).svg()?,
        ))
    }
}
