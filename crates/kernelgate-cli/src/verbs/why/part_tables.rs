//! Tables of the parts of a recorded case that its workload names: the time of each part in a
//! launch, its share, its launches, and the limit of its declared work.
//!
//! Times of parts add up to the whole: if a launch begins before the previous one has ended, the
//! time of both counts for the earlier launch.

use kernelgate::display::table::TextTable;
use kernelgate::display::{byte_text, time_text};
use kernelgate::measure::limits::TimeLimit;
use kernelgate::protocol::CaseRecording;
use kernelgate::workload::SampleUnit;
use kernelgate_trace::diagnose::{JoinedTrace, RangeTreeNode};
use serde_json::{Value, json};

/// Parts of a case, and other facts about one launch.
pub struct LaunchParts {
    parts: Vec<NetworkPartUse>,
    /// Samples a second, if a launch has samples.
    samples_per_s: Option<f64>,
    sample_unit: SampleUnit,
    /// Kernels of a launch, if all launches have the same ones in the same order.
    kernels: Option<usize>,
    memory_uses: Vec<(String, u64)>,
}

/// Time and limit of a network's part in one launch.
struct NetworkPartUse {
    table: String,
    label: String,
    range: String,
    /// Measured time; `None` if nothing was launched in the part's ranges.
    measured: Option<MeasuredPart>,
    /// The limit of the part that takes longest: memory or arithmetic.
    limit: Option<TimeLimit>,
}

struct MeasuredPart {
    own_ns: f64,
    share: f64,
    launched: f64,
}

/// The parts of a recording, which was read as this trace.
#[allow(clippy::cast_precision_loss)]
pub fn from_recording(recording: &CaseRecording, trace: &JoinedTrace<'_>) -> LaunchParts {
    let names: Vec<&str> = recording.parts.iter().flat_map(|part| part.range.split('/')).collect();
    let tree = trace.range_tree(&names);
    let is_step =
        |range: &&RangeTreeNode| range.depth == 1 && range.name == CaseRecording::LAUNCH_RANGE;
    let step = tree.iter().find(is_step);
    let steps = f64::from(recording.steps.max(1));
    let part = |of: &kernelgate::protocol::RecordedPart| {
        let found: Vec<&RangeTreeNode> =
            tree.iter().filter(|range| path_ends_with(&range.path, &of.range)).collect();
        let own_ns = found.iter().map(|range| range.own_ns).sum::<i64>() as f64;
        let measured = (!found.is_empty()).then(|| MeasuredPart {
            own_ns: own_ns / steps,
            share: own_ns / step.map_or(1, |step| step.own_ns).max(1) as f64,
            launched: found.iter().map(|range| range.operations).sum::<usize>() as f64 / steps,
        });
        let largest = of.limits.iter().max_by(|a, b| a.time_ns.total_cmp(&b.time_ns));
        NetworkPartUse {
            table: of.table.clone(),
            label: of.label.clone(),
            range: of.range.clone(),
            measured,
            limit: largest.cloned(),
        }
    };
    let rate = |samples: u64| Some(samples as f64 * steps * 1e9 / step?.span_ns as f64);
    LaunchParts {
        parts: recording.parts.iter().map(part).collect(),
        samples_per_s: recording.samples.and_then(rate),
        sample_unit: recording.sample_unit,
        kernels: kernels_a_launch(recording),
        memory_uses: recording.memory_uses.clone(),
    }
}

/// Returns whether a path equals this range or ends with it, comparing whole names.
fn path_ends_with(path: &str, range: &str) -> bool {
    path.strip_suffix(range).is_some_and(|before| before.is_empty() || before.ends_with('/'))
}

/// Number of kernels of a launch, if each launch has the same ones, with the same grids, in the
/// same order.
fn kernels_a_launch(recording: &CaseRecording) -> Option<usize> {
    let kernels = &recording.trace.kernels;
    let (all, steps) = (kernels.len(), recording.steps as usize);
    if all == 0 || steps == 0 || all % steps != 0 {
        return None;
    }
    let mut launches = kernels
        .chunks(all / steps)
        .map(|launch| launch.iter().map(|kernel| (kernel.name, kernel.grid)));
    let first: Vec<_> = launches.next()?.collect();
    launches.all(|launch| launch.eq(first.iter().copied())).then_some(first.len())
}

impl LaunchParts {
    /// The rate, the kernels, the memory and the tables as text.
    pub fn text(&self, shown: &dyn Fn(&TextTable) -> String) -> String {
        let mut text = String::new();
        if let Some(rate) = self.samples_per_s {
            text += &format!("{}\n", self.sample_unit.per_second(rate));
        }
        text += &match self.kernels {
            Some(kernels) => format!("{kernels} kernels a launch, the same in every one\n"),
            None => "launches differ in their kernels\n".to_owned(),
        };
        if !self.memory_uses.is_empty() {
            let uses =
                self.memory_uses.iter().map(|(of, size)| format!("{of} {}", byte_text(*size)));
            text += &format!("device memory by use: {}\n", uses.collect::<Vec<_>>().join(", "));
        }
        for parts in self.parts.chunk_by(|a, b| a.table == b.table) {
            let mut table = TextTable::new(&[
                &parts[0].table,
                "a launch",
                "share",
                "launched",
                "limit",
                "of limit",
                "limited by",
            ]);
            parts.iter().for_each(|part| table.row(part.cells()));
            text += &format!("\n{}", shown(&table));
        }
        text
    }

    pub fn json(&self) -> Value {
        let part = |part: &NetworkPartUse| {
            let measured = part.measured.as_ref();
            json!({
                "table": part.table,
                "label": part.label,
                "range": part.range,
                "own_ns": measured.map(|measured| measured.own_ns),
                "share": measured.map(|measured| measured.share),
                "launched": measured.map_or(0.0, |measured| measured.launched),
                "limit_ns": part.limit.as_ref().map(|limit| limit.time_ns),
                "limited_by": part.limit.as_ref().map(|limit| &limit.by),
            })
        };
        let uses = self.memory_uses.iter();
        let uses: Vec<Value> =
            uses.map(|(of, bytes)| json!({ "use": of, "bytes": bytes })).collect();
        json!({
            "samples_per_s": self.samples_per_s,
            "kernels_a_launch": self.kernels,
            "memory_uses": uses,
            "parts": self.parts.iter().map(part).collect::<Vec<_>>(),
        })
    }
}

impl NetworkPartUse {
    fn cells(&self) -> Vec<String> {
        let none = || "-".to_owned();
        let percent = |part: f64| format!("{:.1}%", 100.0 * part);
        let measured = self.measured.as_ref();
        let reached = self.limit.as_ref().zip(measured);
        vec![
            self.label.clone(),
            measured.map_or_else(none, |measured| time_text(measured.own_ns)),
            measured.map_or_else(none, |measured| percent(measured.share)),
            measured.map_or_else(|| "0".to_owned(), |measured| measured.launched.to_string()),
            self.limit.as_ref().map_or_else(none, |limit| time_text(limit.time_ns)),
            reached.map_or_else(none, |(limit, of)| percent(limit.time_ns / of.own_ns.max(1.0))),
            self.limit.as_ref().map_or_else(none, |limit| limit.by.clone()),
        ]
    }
}
