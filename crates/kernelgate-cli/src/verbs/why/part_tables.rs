//! Tables of the network parts that a case's workload names: time of each part in a launch, its
//! share, its launches, and the limit of its declared work.
//!
//! The times of all parts add up to the time of a launch; if two launches overlap, the overlap
//! counts for the earlier launch.

use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::{decimal_byte_size_text, time_text};
use kernelgate::measure::limits::ShortestLaunchTime;
use kernelgate::protocol::CuptiCaseRecording;
use kernelgate::workload::ThroughputItemUnit;
use kernelgate_trace::diagnose::{RangeTreeRow, TraceJoinedForAnalyses};
use serde_json::{Value, json};

/// The named parts of a recorded case with their times, and other facts about one launch of the
/// case.
pub struct NetworkPartTimesOfLaunch {
    parts: Vec<NetworkPartTime>,
    /// Samples per second; `None` if the launch does not compute samples.
    samples_per_s: Option<f64>,
    sample_unit: ThroughputItemUnit,
    /// Number of kernels of a launch; `None` unless all launches run the same kernels in the same
    /// order.
    kernels_per_launch: Option<usize>,
    bytes_by_memory_use: Vec<(String, u64)>,
}

/// Measured time and hardware limit of one part of a network in one launch.
struct NetworkPartTime {
    table_title: String,
    part_label: String,
    range_path: String,
    /// Measured time of the part; `None` if nothing was launched in the part's ranges.
    measured: Option<MeasuredPartTime>,
    /// The hardware limit that allows the least speed for the part: of memory or of arithmetic.
    limit: Option<ShortestLaunchTime>,
}

struct MeasuredPartTime {
    part_ns_per_launch: f64,
    share_of_launch_time: f64,
    kernels_per_launch: f64,
}

/// The times of the parts of a recording, read from the trace that was made of the recording.
#[allow(clippy::cast_precision_loss)]
pub fn network_part_times_of_recording(
    recording: &CuptiCaseRecording,
    trace: &TraceJoinedForAnalyses<'_>,
) -> NetworkPartTimesOfLaunch {
    let names: Vec<&str> =
        recording.parts.iter().flat_map(|part| part.range_path_ending.split('/')).collect();
    let tree = trace.gpu_work_by_range_tree(&names);
    let is_step = |range: &&RangeTreeRow| {
        range.depth == 1 && range.range_name == CuptiCaseRecording::RANGE_NAME_OF_LAUNCH
    };
    let step = tree.iter().find(is_step);
    let steps = f64::from(recording.recorded_launches.max(1));
    let part = |of: &kernelgate::protocol::RecordedNetworkPart| {
        let found: Vec<&RangeTreeRow> = tree
            .iter()
            .filter(|range| path_ends_with_range(&range.range_path, &of.range_path_ending))
            .collect();
        let own_ns = found.iter().map(|range| range.non_overlapping_gpu_ns).sum::<i64>() as f64;
        let measured = (!found.is_empty()).then(|| MeasuredPartTime {
            part_ns_per_launch: own_ns / steps,
            share_of_launch_time: own_ns
                / step.map_or(1, |step| step.non_overlapping_gpu_ns).max(1) as f64,
            kernels_per_launch: found.iter().map(|range| range.operations).sum::<usize>() as f64
                / steps,
        });
        let largest =
            of.limits.iter().max_by(|a, b| a.shortest_launch_ns.total_cmp(&b.shortest_launch_ns));
        NetworkPartTime {
            table_title: of.profile_table.clone(),
            part_label: of.part_label.clone(),
            range_path: of.range_path_ending.clone(),
            measured,
            limit: largest.cloned(),
        }
    };
    let rate = |samples: u64| Some(samples as f64 * steps * 1e9 / step?.total_gpu_span_ns as f64);
    NetworkPartTimesOfLaunch {
        parts: recording.parts.iter().map(part).collect(),
        samples_per_s: recording.items_per_launch.and_then(rate),
        sample_unit: recording.sample_unit,
        kernels_per_launch: kernels_per_launch(recording),
        bytes_by_memory_use: recording.memory_bytes_by_purpose.clone(),
    }
}

/// Whether a range's path equals `range_path`, or ends with `range_path` after a slash.
fn path_ends_with_range(path: &str, range: &str) -> bool {
    path.strip_suffix(range).is_some_and(|before| before.is_empty() || before.ends_with('/'))
}

/// Number of kernels of a launch; `None` unless all launches run the same kernels, with the same
/// grids, in the same order.
fn kernels_per_launch(recording: &CuptiCaseRecording) -> Option<usize> {
    let kernels = &recording.trace.kernels;
    let (all, steps) = (kernels.len(), recording.recorded_launches as usize);
    if all == 0 || steps == 0 || all % steps != 0 {
        return None;
    }
    let mut launches = kernels
        .chunks(all / steps)
        .map(|launch| launch.iter().map(|kernel| (kernel.name_index, kernel.grid)));
    let first: Vec<_> = launches.next()?.collect();
    launches.all(|launch| launch.eq(first.iter().copied())).then_some(first.len())
}

impl NetworkPartTimesOfLaunch {
    /// The samples per second, the number of kernels, the memory uses and the tables of parts as
    /// text.
    pub fn rate_memory_and_tables_text(
        &self,
        shown: &dyn Fn(&AlignedTextTable) -> String,
    ) -> String {
        let mut text = String::new();
        if let Some(rate) = self.samples_per_s {
            text += &format!("{}\n", self.sample_unit.throughput_as_text(rate));
        }
        text += &match self.kernels_per_launch {
            Some(kernels) => format!("{kernels} kernels a launch, the same in every one\n"),
            None => "launches differ in their kernels\n".to_owned(),
        };
        if !self.bytes_by_memory_use.is_empty() {
            let uses = self
                .bytes_by_memory_use
                .iter()
                .map(|(of, size)| format!("{of} {}", decimal_byte_size_text(*size)));
            text += &format!("device memory by use: {}\n", uses.collect::<Vec<_>>().join(", "));
        }
        for parts in self.parts.chunk_by(|a, b| a.table_title == b.table_title) {
            let mut table = AlignedTextTable::new(&[
                &parts[0].table_title,
                "a launch",
                "share",
                "launched",
                "limit",
                "of limit",
                "limited by",
            ]);
            parts.iter().for_each(|part| table.add_row(part.part_table_cells()));
            text += &format!("\n{}", shown(&table));
        }
        text
    }

    pub fn network_parts_as_json(&self) -> Value {
        let part = |part: &NetworkPartTime| {
            let measured = part.measured.as_ref();
            json!({
                "table": part.table_title,
                "label": part.part_label,
                "range": part.range_path,
                "own_ns": measured.map(|measured| measured.part_ns_per_launch),
                "share": measured.map(|measured| measured.share_of_launch_time),
                "launched": measured.map_or(0.0, |measured| measured.kernels_per_launch),
                "limit_ns": part.limit.as_ref().map(|limit| limit.shortest_launch_ns),
                "limited_by": part.limit.as_ref().map(|limit| &limit.deciding_ceiling),
            })
        };
        let uses = self.bytes_by_memory_use.iter();
        let uses: Vec<Value> =
            uses.map(|(of, bytes)| json!({ "use": of, "bytes": bytes })).collect();
        json!({
            "samples_per_s": self.samples_per_s,
            "kernels_a_launch": self.kernels_per_launch,
            "memory_uses": uses,
            "parts": self.parts.iter().map(part).collect::<Vec<_>>(),
        })
    }
}

impl NetworkPartTime {
    fn part_table_cells(&self) -> Vec<String> {
        let none = || "-".to_owned();
        let percent = |part: f64| format!("{:.1}%", 100.0 * part);
        let measured = self.measured.as_ref();
        let reached = self.limit.as_ref().zip(measured);
        vec![
            self.part_label.clone(),
            measured.map_or_else(none, |measured| time_text(measured.part_ns_per_launch)),
            measured.map_or_else(none, |measured| percent(measured.share_of_launch_time)),
            measured
                .map_or_else(|| "0".to_owned(), |measured| measured.kernels_per_launch.to_string()),
            self.limit.as_ref().map_or_else(none, |limit| time_text(limit.shortest_launch_ns)),
            reached.map_or_else(none, |(limit, of)| {
                percent(limit.shortest_launch_ns / of.part_ns_per_launch.max(1.0))
            }),
            self.limit.as_ref().map_or_else(none, |limit| limit.deciding_ceiling.clone()),
        ]
    }
}
