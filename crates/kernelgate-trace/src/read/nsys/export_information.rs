//! An export's own description: devices, processes, versions, errors while recording.

use super::NsysReader;
use super::ids::split_global_id;
use crate::error::TraceError;
use crate::model::TracedDevice;

/// Metrics of the GPU whose type id names the GPU in its lowest byte.
const GPU_METRIC_TYPE_MASK: i64 = 0xFF;
/// Names of the facts about the system that are kept.
const KEPT_SYSTEM_FACTS: [&str; 4] =
    ["NvDriverVersion", "CudaDriverVersion", "SoftwarePlatform", "SoftwareReleaseVersion"];

impl NsysReader {
    pub(super) fn read_export_information(&mut self) -> Result<(), TraceError> {
        // The second table name is used by schemas before version 3.
        for table in ["META_DATA_EXPORT", "EXPORT_META_DATA", "META_DATA_CAPTURE"] {
            self.visit_rows(table, &["name", "value"], |builder, _, row| {
                builder.trace.metadata.insert(row.display(0), row.display(1));
            })?;
        }
        self.visit_rows("TARGET_INFO_SYSTEM_ENV", &["name", "value"], |builder, _, row| {
            let name = row.display(0);
            if KEPT_SYSTEM_FACTS.contains(&name.as_str()) {
                builder.trace.metadata.insert(name, row.display(1));
            }
        })?;
        let columns = [
            "id",
            "name",
            "smCount",
            "computeMajor",
            "computeMinor",
            "maxWarpsPerSm",
            "threadsPerWarp",
            "maxRegistersPerSm",
            "maxShmemPerSm",
            "maxBlocksPerSm",
        ];
        self.visit_rows("TARGET_INFO_GPU", &columns, |builder, _, row| {
            let number = |column| row.integer_cell(column).and_then(|n| u32::try_from(n).ok());
            builder.trace.devices.push(TracedDevice {
                id: number(0).unwrap_or(0),
                name: row.display(1),
                multiprocessors: number(2),
                compute: number(3).zip(number(4)),
                threads_per_sm: number(5)
                    .zip(number(6))
                    .and_then(|(warps, of)| warps.checked_mul(of)),
                registers_per_sm: number(7),
                shared_per_sm: number(8),
                blocks_per_sm: number(9),
                warp: number(6),
            });
        })?;
        self.visit_rows("PROCESSES", &["globalPid", "name"], |builder, _, row| {
            let Some(id) = row.integer_cell(0) else { return };
            let (key, pid, _) = split_global_id(id);
            let process = builder.process_of_key(key, pid) as usize;
            if let Some(text) = row.text_cell(1) {
                let name = builder.trace.names.intern_bytes(text);
                builder.trace.processes[process].name = Some(name);
            }
        })
    }

    /// Sampled counters of the GPU, by name: their ids differ between versions.
    pub(super) fn read_counters(&mut self) -> Result<(), TraceError> {
        let mut names = hashbrown::HashMap::new();
        let columns = ["typeId", "metricId", "metricName"];
        self.visit_rows("TARGET_INFO_GPU_METRICS", &columns, |builder, _, row| {
            if let (Some(kind), Some(id), Some(text)) =
                (row.integer_cell(0), row.integer_cell(1), row.text_cell(2))
            {
                names.insert((kind, id), builder.trace.names.intern_bytes(text));
            }
        })?;
        let mut counters = std::mem::take(&mut self.builder.trace.counters);
        let columns = ["timestamp", "typeId", "metricId", "value"];
        self.visit_rows("GPU_METRICS", &columns, |builder, _, row| {
            let time = builder.trace.quality.time(row.integer_cell(0));
            let (Some(time), Some(kind), Some(id)) =
                (time, row.integer_cell(1), row.integer_cell(2))
            else {
                return;
            };
            // Samples from before the recording have negative times.
            let Some(&metric) = names.get(&(kind, id)).filter(|_| time >= 0) else {
                builder.trace.quality.odd_values += 1;
                return;
            };
            counters.time.push(time);
            counters.gpu.push(u32::try_from(kind & GPU_METRIC_TYPE_MASK).unwrap_or(0));
            counters.metric.push(metric);
            counters.value.push(row.real_cell(3).unwrap_or(0.0));
        })?;
        self.builder.trace.counters = counters;
        Ok(())
    }

    pub(super) fn read_diagnostics(&mut self) -> Result<(), TraceError> {
        let columns = ["severity", "text"];
        self.visit_rows("DIAGNOSTIC_EVENT", &columns, |builder, _, row| {
            // Severity 2 is a warning, 3 an error; lost records are reported as information too.
            let text = row.display(1);
            if matches!(row.integer_cell(0), Some(2 | 3)) || text.contains("might be missing") {
                if let Some(text) = row.text_cell(1) {
                    builder.trace.quality.text(text);
                }
                builder.trace.quality.messages.push(text);
            }
        })?;
        for table in ["PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD"] {
            self.visit_rows(table, &["start", "end"], |builder, _, row| {
                let quality = &mut builder.trace.quality;
                let [start, end] = [0, 1].map(|column| quality.time(row.integer_cell(column)));
                if let (Some(start), Some(end)) = (start, end) {
                    let end = quality.plausible_span_end(start, end);
                    quality.overhead.push((start, end));
                }
            })?;
        }
        Ok(())
    }
}
