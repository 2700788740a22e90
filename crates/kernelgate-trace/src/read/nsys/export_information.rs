//! Reads devices, process names, versions, GPU counters and diagnostic messages from an Nsight
//! Systems export.

use super::NsysExportReader;
use super::ids::process_key_pid_and_tid_of_global_id;
use crate::error::TraceError;
use crate::model::TracedDevice;

/// Mask of a GPU metric's type id; the lowest byte is the number of the GPU.
const GPU_NUMBER_MASK_OF_METRIC_TYPE: i64 = 0xFF;
/// Names of the system facts that are kept in the trace's metadata: driver, CUDA and platform
/// versions.
const KEPT_SYSTEM_FACTS: [&str; 4] =
    ["NvDriverVersion", "CudaDriverVersion", "SoftwarePlatform", "SoftwareReleaseVersion"];

impl NsysExportReader {
    pub(super) fn read_versions_devices_and_process_names(&mut self) -> Result<(), TraceError> {
        // Export schemas before version 3 name the metadata table `EXPORT_META_DATA`.
        for table in ["META_DATA_EXPORT", "EXPORT_META_DATA", "META_DATA_CAPTURE"] {
            self.visit_rows_and_record_problems(table, &["name", "value"], |builder, _, row| {
                builder
                    .trace
                    .metadata
                    .insert(row.cell_as_displayed_text(0), row.cell_as_displayed_text(1));
            })?;
        }
        self.visit_rows_and_record_problems(
            "TARGET_INFO_SYSTEM_ENV",
            &["name", "value"],
            |builder, _, row| {
                let name = row.cell_as_displayed_text(0);
                if KEPT_SYSTEM_FACTS.contains(&name.as_str()) {
                    builder.trace.metadata.insert(name, row.cell_as_displayed_text(1));
                }
            },
        )?;
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
        self.visit_rows_and_record_problems("TARGET_INFO_GPU", &columns, |builder, _, row| {
            let number = |column| row.cell_as_integer(column).and_then(|n| u32::try_from(n).ok());
            builder.trace.devices.push(TracedDevice {
                device_ordinal: number(0).unwrap_or(0),
                device_name: row.cell_as_displayed_text(1),
                multiprocessors: number(2),
                compute_capability: number(3).zip(number(4)),
                threads_per_sm: number(5)
                    .zip(number(6))
                    .and_then(|(warps, of)| warps.checked_mul(of)),
                registers_per_sm: number(7),
                shared_bytes_per_sm: number(8),
                blocks_per_sm: number(9),
                threads_per_warp: number(6),
            });
        })?;
        self.visit_rows_and_record_problems(
            "PROCESSES",
            &["globalPid", "name"],
            |builder, _, row| {
                let Some(id) = row.cell_as_integer(0) else { return };
                let (key, pid, _) = process_key_pid_and_tid_of_global_id(id);
                let process = builder.index_of_process(key, pid) as usize;
                if let Some(text) = row.cell_as_text_bytes(1) {
                    let name = builder.trace.names.intern_bytes_as_text(text);
                    builder.trace.processes[process].process_name = Some(name);
                }
            },
        )
    }

    /// Reads samples of GPU hardware counters by metric name, because metric ids differ between
    /// versions.
    pub(super) fn read_counters(&mut self) -> Result<(), TraceError> {
        let mut names = hashbrown::HashMap::new();
        let columns = ["typeId", "metricId", "metricName"];
        self.visit_rows_and_record_problems(
            "TARGET_INFO_GPU_METRICS",
            &columns,
            |builder, _, row| {
                if let (Some(kind), Some(id), Some(text)) =
                    (row.cell_as_integer(0), row.cell_as_integer(1), row.cell_as_text_bytes(2))
                {
                    names.insert((kind, id), builder.trace.names.intern_bytes_as_text(text));
                }
            },
        )?;
        let mut counters = std::mem::take(&mut self.builder.trace.counters);
        let columns = ["timestamp", "typeId", "metricId", "value"];
        self.visit_rows_and_record_problems("GPU_METRICS", &columns, |builder, _, row| {
            let time = builder.trace.quality.plausible_time_or_count_as_odd(row.cell_as_integer(0));
            let (Some(time), Some(kind), Some(id)) =
                (time, row.cell_as_integer(1), row.cell_as_integer(2))
            else {
                return;
            };
            // Counter samples from before the start of the recording have negative times and are
            // skipped.
            let Some(&metric) = names.get(&(kind, id)).filter(|_| time >= 0) else {
                builder.trace.quality.implausible_value_count += 1;
                return;
            };
            counters.time_ns.push(time);
            counters
                .gpu_number
                .push(u32::try_from(kind & GPU_NUMBER_MASK_OF_METRIC_TYPE).unwrap_or(0));
            counters.metric_name.push(metric);
            counters.metric_value.push(row.cell_as_float(3).unwrap_or(0.0));
        })?;
        self.builder.trace.counters = counters;
        Ok(())
    }

    pub(super) fn read_diagnostics_and_profiler_overhead(&mut self) -> Result<(), TraceError> {
        let columns = ["severity", "text"];
        self.visit_rows_and_record_problems("DIAGNOSTIC_EVENT", &columns, |builder, _, row| {
            // Severity 2 is a warning and 3 an error; Nsight Systems reports lost records with the
            // severity of information.
            let text = row.cell_as_displayed_text(1);
            if matches!(row.cell_as_integer(0), Some(2 | 3)) || text.contains("might be missing") {
                if let Some(text) = row.cell_as_text_bytes(1) {
                    builder.trace.quality.count_invalid_utf8(text);
                }
                builder.trace.quality.profiler_messages.push(text);
            }
        })?;
        for table in ["PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD"] {
            self.visit_rows_and_record_problems(table, &["start", "end"], |builder, _, row| {
                let quality = &mut builder.trace.quality;
                let [start, end] = [0, 1].map(|column| {
                    quality.plausible_time_or_count_as_odd(row.cell_as_integer(column))
                });
                if let (Some(start), Some(end)) = (start, end) {
                    let end = quality.plausible_span_end_or_start(start, end);
                    quality.profiler_overhead_spans.push((start, end));
                }
            })?;
        }
        Ok(())
    }
}
