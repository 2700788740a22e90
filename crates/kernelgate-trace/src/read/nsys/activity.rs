//! The GPU's work: kernels, copies, sets, graph launches, waits, allocations.

use hashbrown::HashMap;

use super::super::trace_builder::{COPY_DIRECTIONS, TraceBuilder};
use super::super::wanted_parts::WantedTraceParts;
use super::NsysReader;
use super::database::Row;
use super::ids::{COPY_TABLE, GRAPH_TABLE, KERNEL_TABLE, MEMSET_TABLE, split_global_id};
use crate::error::TraceError;
use crate::model::gpu::{
    LaunchShape, MemoryKind, OperationColumns, OperationPlace, PageFaultTable, PlaceId,
    SynchronisationKind,
};
use crate::model::interned_names::NameId;

const OPERATION_COLUMNS: [&str; 7] =
    ["start", "end", "globalPid", "deviceId", "contextId", "streamId", "correlationId"];
const SYNCHRONIZATION_TABLE: &str = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION";

/// The columns that every operation table has, followed by further ones.
fn operation_columns<const N: usize>(others: [&'static str; N]) -> Vec<&'static str> {
    OPERATION_COLUMNS.into_iter().chain(others).collect()
}

/// Reads the first seven columns of a row as an operation; `false` if the row has no times.
fn push(builder: &mut TraceBuilder, operations: &mut OperationColumns, row: &Row<'_, '_>) -> bool {
    let [start, end] = [0, 1].map(|column| builder.trace.quality.time(row.integer_cell(column)));
    let (Some(start), Some(end)) = (start, end) else {
        builder.trace.quality.without_times += 1;
        return false;
    };
    if start == 0 && end == 0 {
        builder.trace.quality.without_times += 1;
        return false;
    }
    let end = builder.trace.quality.plausible_span_end(start, end);
    let place = row_place(builder, row);
    let correlation = builder.trace.quality.correlation(row.integer_cell(6));
    operations.push(start, end, place, correlation);
    true
}

/// The process, device, context and stream of a row with [`OPERATION_COLUMNS`]'s columns.
fn row_place(builder: &mut TraceBuilder, row: &Row<'_, '_>) -> PlaceId {
    let (key, pid, _) = split_global_id(row.integer_cell(2).unwrap_or(0));
    let process = builder.process_of_key(key, pid);
    let number =
        |column| row.integer_cell(column).and_then(|id| u32::try_from(id).ok()).unwrap_or(0);
    let stream = row.integer_cell(5).unwrap_or(0).cast_unsigned();
    builder.place(OperationPlace { process, device: number(3), context: number(4), stream })
}

impl NsysReader {
    pub(super) fn read_operations(&mut self, wanted: &WantedTraceParts) -> Result<(), TraceError> {
        self.kernels(wanted)?;
        self.read_copies()?;
        self.read_memsets()?;
        self.read_graph_launches()
    }

    fn kernels(&mut self, wanted: &WantedTraceParts) -> Result<(), TraceError> {
        if !self.note_if_table_missing(KERNEL_TABLE) {
            return Ok(());
        }
        let mut names = vec!["demangledName", "shortName", "graphNodeId"];
        if wanted.shapes {
            names.extend([
                "gridX",
                "gridY",
                "gridZ",
                "blockX",
                "blockY",
                "blockZ",
                "registersPerThread",
                "staticSharedMemory",
                "dynamicSharedMemory",
                "localMemoryPerThread",
            ]);
        }
        let names: Vec<&str> = OPERATION_COLUMNS.into_iter().chain(names).collect();
        let mut kernels = std::mem::take(&mut self.builder.trace.kernels);
        let unknown = self.builder.trace.names.intern_text("unknown kernel");
        self.visit_rows(KERNEL_TABLE, &names, |builder, strings, row| {
            if !push(builder, &mut kernels.on_gpu, row) {
                return;
            }
            let name = |column| row.integer_cell(column).and_then(|id| strings.get(&id)).copied();
            let demangled = name(7).or_else(|| name(8)).unwrap_or(unknown);
            kernels.function.push(builder.function(demangled, name(8).unwrap_or(demangled)));
            kernels.push_graph_node(row.integer_cell(9).unwrap_or(0).cast_unsigned());
            if wanted.shapes {
                let number = |column| {
                    row.integer_cell(column).and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
                };
                kernels.shape.push(builder.shape(LaunchShape {
                    grid: [number(10), number(11), number(12)],
                    block: [number(13), number(14), number(15)],
                    registers: number(16),
                    static_shared: number(17),
                    dynamic_shared: number(18),
                    local: number(19),
                }));
            }
        })?;
        self.builder.trace.kernels = kernels;
        Ok(())
    }

    fn read_copies(&mut self) -> Result<(), TraceError> {
        let labels = self.read_enum_labels("ENUM_CUDA_MEMCPY_OPER", COPY_DIRECTIONS)?;
        let memories = self.read_enum_labels("ENUM_CUDA_MEM_KIND", MEMORY_KIND_LABELS)?;
        let unknown = self.builder.trace.names.intern_text("Unknown");
        let mut copies = std::mem::take(&mut self.builder.trace.copies);
        let names = operation_columns(["bytes", "copyKind", "srcKind", "dstKind"]);
        self.visit_rows(COPY_TABLE, &names, |builder, _, row| {
            if !push(builder, &mut copies.on_gpu, row) {
                return;
            }
            copies.bytes.push(row.integer_cell(7).unwrap_or(0).max(0).cast_unsigned());
            let kind = row.integer_cell(8).and_then(|kind| labels.get(&kind).copied());
            copies.kind.push(kind.unwrap_or(unknown));
            let memory = |column| {
                let label = row.integer_cell(column).and_then(|kind| memories.get(&kind));
                label.map_or(MemoryKind::Unknown, |&name| {
                    memory_kind_of_label(builder.trace.names.text(name))
                })
            };
            copies.source.push(memory(9));
            copies.target.push(memory(10));
        })?;
        self.builder.trace.copies = copies;
        Ok(())
    }

    fn read_memsets(&mut self) -> Result<(), TraceError> {
        let mut sets = std::mem::take(&mut self.builder.trace.sets);
        self.visit_rows(MEMSET_TABLE, &operation_columns(["bytes"]), |builder, _, row| {
            if push(builder, &mut sets.on_gpu, row) {
                sets.bytes.push(row.integer_cell(7).unwrap_or(0).max(0).cast_unsigned());
            }
        })?;
        self.builder.trace.sets = sets;
        Ok(())
    }

    fn read_graph_launches(&mut self) -> Result<(), TraceError> {
        let mut graphs = std::mem::take(&mut self.builder.trace.graphs);
        self.visit_rows(GRAPH_TABLE, &operation_columns(["graphExecId"]), |builder, _, row| {
            if push(builder, &mut graphs.on_gpu, row) {
                let id = row.integer_cell(7).and_then(|id| u32::try_from(id).ok());
                graphs.executable.push(id.unwrap_or(0));
            }
        })?;
        self.builder.trace.graphs = graphs;
        Ok(())
    }

    /// Reads streams whose creation flags affect other streams.
    pub(super) fn read_streams(&mut self) -> Result<(), TraceError> {
        let mut streams = std::mem::take(&mut self.builder.trace.streams);
        for table in ["TARGET_INFO_CUDA_STREAM", "TARGET_INFO_CUDA_NULL_STREAM"] {
            let null = table.contains("NULL");
            self.visit_rows(table, &["processId", "streamId", "flag"], |builder, _, row| {
                let processes = &builder.trace.processes;
                let process = processes.iter().position(|of| Some(of.pid) == row.integer_cell(0));
                let process = process.and_then(|process| u32::try_from(process).ok());
                let stream = row.integer_cell(1).map(i64::cast_unsigned);
                let Some(stream) = process.zip(stream) else { return };
                // Numbers of CUPTI.
                match row.integer_cell(2) {
                    _ if null => streams.null.push(stream),
                    Some(3) => streams.null.push(stream),
                    Some(2) => streams.non_blocking.push(stream),
                    _ => {}
                }
            })?;
        }
        self.builder.trace.streams = streams;
        Ok(())
    }

    pub(super) fn read_synchronisations(&mut self) -> Result<(), TraceError> {
        if !self.note_if_table_missing(SYNCHRONIZATION_TABLE) {
            return Ok(());
        }
        let mut syncs = std::mem::take(&mut self.builder.trace.syncs);
        self.visit_rows(
            SYNCHRONIZATION_TABLE,
            &operation_columns(["syncType"]),
            |builder, _, row| {
                if push(builder, &mut syncs.on_gpu, row) {
                    syncs.kind.push(match row.integer_cell(7) {
                        Some(1) => SynchronisationKind::Event,
                        Some(2) => SynchronisationKind::StreamWaitsEvent,
                        Some(3) => SynchronisationKind::Stream,
                        Some(4) => SynchronisationKind::Context,
                        // 0 also stands for cudaDeviceSynchronize in some versions.
                        _ => SynchronisationKind::Unknown,
                    });
                }
            },
        )?;
        self.builder.trace.syncs = syncs;
        Ok(())
    }

    pub(super) fn read_allocations(&mut self) -> Result<(), TraceError> {
        let memories = self.read_enum_labels("ENUM_CUDA_MEM_KIND", MEMORY_KIND_LABELS)?;
        let mut allocations = std::mem::take(&mut self.builder.trace.allocations);
        let names = [
            "start",
            "start",
            "globalPid",
            "deviceId",
            "contextId",
            "streamId",
            "bytes",
            "memoryOperationType",
            "address",
            "memKind",
        ];
        self.visit_rows("CUDA_GPU_MEMORY_USAGE_EVENTS", &names, |builder, _, row| {
            // This table also contains allocations of host memory.
            let of_host =
                row.integer_cell(9).and_then(|kind| memories.get(&kind)).is_some_and(|&name| {
                    let kind = memory_kind_of_label(builder.trace.names.text(name));
                    matches!(kind, MemoryKind::Pageable | MemoryKind::Pinned)
                });
            let time = row.integer_cell(0).filter(|_| !of_host);
            let Some(time) = builder.trace.quality.time(time) else { return };
            let number = |column| row.integer_cell(column).unwrap_or(0).max(0).cast_unsigned();
            let address = row.integer_cell(8).unwrap_or(0).cast_unsigned();
            // 0 allocates, 1 frees.
            let given_back = row.integer_cell(7) == Some(1);
            allocations.push(time, row_place(builder, row), address, number(6), given_back);
        })?;
        self.builder.trace.allocations = allocations;
        Ok(())
    }

    /// Page faults of managed memory: one row for each of the host, one for a group of a device.
    pub(super) fn read_page_faults(&mut self) -> Result<(), TraceError> {
        let mut faults = std::mem::take(&mut self.builder.trace.page_faults);
        let names = ["start", "end", "globalPid", "deviceId", "numberOfPageFaults"];
        for table in ["CUDA_UM_CPU_PAGE_FAULT_EVENTS", "CUDA_UM_GPU_PAGE_FAULT_EVENTS"] {
            let on_host = table.contains("CPU");
            self.visit_rows(table, &names, |builder, _, row| {
                let Some(start) = builder.trace.quality.time(row.integer_cell(0)) else { return };
                let (key, pid, _) = split_global_id(row.integer_cell(2).unwrap_or(0));
                let device = row.integer_cell(3).and_then(|id| u32::try_from(id).ok()).unwrap_or(0);
                faults.start.push(start);
                faults.end.push(row.integer_cell(1).unwrap_or(start).max(start));
                faults.process.push(builder.process_of_key(key, pid));
                faults.device.push(if on_host { PageFaultTable::HOST_PLACE } else { device });
                let count = row.integer_cell(4).and_then(|count| u64::try_from(count).ok());
                faults.count.push(count.unwrap_or(1));
            })?;
        }
        self.builder.trace.page_faults = faults;
        Ok(())
    }

    /// Reads the labels of an enumeration: labels in the file, else known ones.
    fn read_enum_labels(
        &mut self,
        table: &str,
        known: &[&str],
    ) -> Result<HashMap<i64, NameId>, TraceError> {
        let names = &mut self.builder.trace.names;
        let mut labels: HashMap<i64, NameId> =
            (0..).zip(known).map(|(id, label)| (id, names.intern_text(label))).collect();
        self.visit_rows(table, &["id", "label"], |builder, _, row| {
            if let (Some(id), Some(label)) = (row.integer_cell(0), row.text_cell(1)) {
                builder.trace.quality.text(label);
                labels.insert(id, builder.trace.names.intern_bytes(label));
            }
        })?;
        Ok(labels)
    }
}

const MEMORY_KIND_LABELS: &[&str] =
    &["Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static"];

fn memory_kind_of_label(label: &str) -> MemoryKind {
    match label.split(' ').next().unwrap_or_default() {
        "Pageable" => MemoryKind::Pageable,
        "Pinned" => MemoryKind::Pinned,
        "Device" => MemoryKind::Device,
        "Array" => MemoryKind::Array,
        "Managed" => MemoryKind::Managed,
        _ => MemoryKind::Unknown,
    }
}
