//! Reads GPU operations, synchronisations, allocations, streams and page faults from an Nsight
//! Systems export.

use hashbrown::HashMap;

use super::super::trace_builder::{COPY_DIRECTIONS, TraceBuilder};
use super::super::wanted_parts::WantedTraceParts;
use super::NsysExportReader;
use super::database::ExportRow;
use super::ids::{
    COPY_TABLE, GRAPH_TABLE, KERNEL_TABLE, MEMSET_TABLE, process_key_pid_and_tid_of_global_id,
};
use crate::error::TraceError;
use crate::model::gpu::{
    CopiedMemoryKind, GpuOperationColumns, KernelLaunchShape, ManagedPageFaultTable,
    OperationStreamIndex, ProcessDeviceContextAndStream, SynchronisationTarget,
};
use crate::model::interned_names::InternedNameId;

const COMMON_OPERATION_COLUMNS: [&str; 7] =
    ["start", "end", "globalPid", "deviceId", "contextId", "streamId", "correlationId"];
const SYNCHRONIZATION_TABLE: &str = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION";

/// Returns the columns that all tables of GPU operations have, followed by the given columns.
fn operation_columns_followed_by<const N: usize>(others: [&'static str; N]) -> Vec<&'static str> {
    COMMON_OPERATION_COLUMNS.into_iter().chain(others).collect()
}

/// Appends a GPU operation from the first seven columns of a row; returns `false` if the row has no
/// times.
fn push_operation_of_row(
    builder: &mut TraceBuilder,
    operations: &mut GpuOperationColumns,
    row: &ExportRow<'_, '_>,
) -> bool {
    let [start, end] = [0, 1].map(|column| {
        builder.trace.quality.plausible_time_or_count_as_odd(row.cell_as_integer(column))
    });
    let (Some(start), Some(end)) = (start, end) else {
        builder.trace.quality.operations_without_times += 1;
        return false;
    };
    if start == 0 && end == 0 {
        builder.trace.quality.operations_without_times += 1;
        return false;
    }
    let end = builder.trace.quality.plausible_span_end_or_start(start, end);
    let place = operation_place_of_row(builder, row);
    let correlation = builder.trace.quality.correlation_id_or_zero(row.cell_as_integer(6));
    operations.push_operation(start, end, place, correlation);
    true
}

/// Returns the index of process, device, context and stream of a row that begins with
/// [`COMMON_OPERATION_COLUMNS`].
fn operation_place_of_row(
    builder: &mut TraceBuilder,
    row: &ExportRow<'_, '_>,
) -> OperationStreamIndex {
    let (key, pid, _) = process_key_pid_and_tid_of_global_id(row.cell_as_integer(2).unwrap_or(0));
    let process = builder.index_of_process(key, pid);
    let number =
        |column| row.cell_as_integer(column).and_then(|id| u32::try_from(id).ok()).unwrap_or(0);
    let stream = row.cell_as_integer(5).unwrap_or(0).cast_unsigned();
    builder.index_of_operation_place(ProcessDeviceContextAndStream {
        process_index: process,
        device: number(3),
        context: number(4),
        stream,
    })
}

impl NsysExportReader {
    pub(super) fn read_gpu_operations(
        &mut self,
        wanted: &WantedTraceParts,
    ) -> Result<(), TraceError> {
        self.read_kernels(wanted)?;
        self.read_copies()?;
        self.read_memsets()?;
        self.read_graph_launches()
    }

    fn read_kernels(&mut self, wanted: &WantedTraceParts) -> Result<(), TraceError> {
        if !self.has_table_or_record_missing(KERNEL_TABLE) {
            return Ok(());
        }
        let mut names = vec!["demangledName", "shortName", "graphNodeId"];
        if wanted.reads_launch_shapes {
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
        let names: Vec<&str> = COMMON_OPERATION_COLUMNS.into_iter().chain(names).collect();
        let mut kernels = std::mem::take(&mut self.builder.trace.kernels);
        let unknown = self.builder.trace.names.intern_text("unknown kernel");
        self.visit_rows_and_record_problems(KERNEL_TABLE, &names, |builder, strings, row| {
            if !push_operation_of_row(builder, &mut kernels.on_gpu, row) {
                return;
            }
            let name =
                |column| row.cell_as_integer(column).and_then(|id| strings.get(&id)).copied();
            let demangled = name(7).or_else(|| name(8)).unwrap_or(unknown);
            kernels.function_index.push_row(
                builder.index_of_kernel_function(demangled, name(8).unwrap_or(demangled)),
            );
            kernels.push_graph_node_of_last_kernel(
                row.cell_as_integer(9).unwrap_or(0).cast_unsigned(),
            );
            if wanted.reads_launch_shapes {
                let number = |column| {
                    row.cell_as_integer(column).and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
                };
                kernels.launch_shape_index.push_row(builder.index_of_launch_shape(
                    KernelLaunchShape {
                        grid: [number(10), number(11), number(12)],
                        block: [number(13), number(14), number(15)],
                        registers_per_thread: number(16),
                        static_shared_bytes: number(17),
                        dynamic_shared_bytes: number(18),
                        local_bytes_per_thread: number(19),
                    },
                ));
            }
        })?;
        self.builder.trace.kernels = kernels;
        Ok(())
    }

    fn read_copies(&mut self) -> Result<(), TraceError> {
        let labels = self.read_enumeration_labels("ENUM_CUDA_MEMCPY_OPER", COPY_DIRECTIONS)?;
        let memories =
            self.read_enumeration_labels("ENUM_CUDA_MEM_KIND", CUPTI_MEMORY_KIND_LABELS)?;
        let unknown = self.builder.trace.names.intern_text("Unknown");
        let mut copies = std::mem::take(&mut self.builder.trace.copies);
        let names = operation_columns_followed_by(["bytes", "copyKind", "srcKind", "dstKind"]);
        self.visit_rows_and_record_problems(COPY_TABLE, &names, |builder, _, row| {
            if !push_operation_of_row(builder, &mut copies.on_gpu, row) {
                return;
            }
            copies.copied_bytes.push(row.cell_as_integer(7).unwrap_or(0).max(0).cast_unsigned());
            let kind = row.cell_as_integer(8).and_then(|kind| labels.get(&kind).copied());
            copies.direction_label.push(kind.unwrap_or(unknown));
            let memory = |column| {
                let label = row.cell_as_integer(column).and_then(|kind| memories.get(&kind));
                label.map_or(CopiedMemoryKind::Unknown, |&name| {
                    memory_kind_from_nsys_label(builder.trace.names.text_of_name(name))
                })
            };
            copies.source_memory.push(memory(9));
            copies.target_memory.push(memory(10));
        })?;
        self.builder.trace.copies = copies;
        Ok(())
    }

    fn read_memsets(&mut self) -> Result<(), TraceError> {
        let mut sets = std::mem::take(&mut self.builder.trace.memsets);
        self.visit_rows_and_record_problems(
            MEMSET_TABLE,
            &operation_columns_followed_by(["bytes"]),
            |builder, _, row| {
                if push_operation_of_row(builder, &mut sets.on_gpu, row) {
                    sets.set_bytes.push(row.cell_as_integer(7).unwrap_or(0).max(0).cast_unsigned());
                }
            },
        )?;
        self.builder.trace.memsets = sets;
        Ok(())
    }

    fn read_graph_launches(&mut self) -> Result<(), TraceError> {
        let mut graphs = std::mem::take(&mut self.builder.trace.graphs);
        self.visit_rows_and_record_problems(
            GRAPH_TABLE,
            &operation_columns_followed_by(["graphExecId"]),
            |builder, _, row| {
                if push_operation_of_row(builder, &mut graphs.on_gpu, row) {
                    let id = row.cell_as_integer(7).and_then(|id| u32::try_from(id).ok());
                    graphs.executable_graph_id.push(id.unwrap_or(0));
                }
            },
        )?;
        self.builder.trace.graphs = graphs;
        Ok(())
    }

    /// Reads the streams whose creation flags change implicit synchronisation: legacy default and
    /// non-blocking streams.
    pub(super) fn read_null_and_non_blocking_streams(&mut self) -> Result<(), TraceError> {
        let mut streams = std::mem::take(&mut self.builder.trace.special_streams);
        for table in ["TARGET_INFO_CUDA_STREAM", "TARGET_INFO_CUDA_NULL_STREAM"] {
            let null = table.contains("NULL");
            self.visit_rows_and_record_problems(
                table,
                &["processId", "streamId", "flag"],
                |builder, _, row| {
                    let processes = &builder.trace.processes;
                    let process =
                        processes.iter().position(|of| Some(of.pid) == row.cell_as_integer(0));
                    let process = process.and_then(|process| u32::try_from(process).ok());
                    let stream = row.cell_as_integer(1).map(i64::cast_unsigned);
                    let Some(stream) = process.zip(stream) else { return };
                    // Numbers of CUPTI.
                    match row.cell_as_integer(2) {
                        _ if null => streams.null_streams.push(stream),
                        Some(3) => streams.null_streams.push(stream),
                        Some(2) => streams.non_blocking_streams.push(stream),
                        _ => {}
                    }
                },
            )?;
        }
        self.builder.trace.special_streams = streams;
        Ok(())
    }

    pub(super) fn read_synchronisations(&mut self) -> Result<(), TraceError> {
        if !self.has_table_or_record_missing(SYNCHRONIZATION_TABLE) {
            return Ok(());
        }
        let mut syncs = std::mem::take(&mut self.builder.trace.synchronisation_waits);
        self.visit_rows_and_record_problems(
            SYNCHRONIZATION_TABLE,
            &operation_columns_followed_by(["syncType"]),
            |builder, _, row| {
                if push_operation_of_row(builder, &mut syncs.on_gpu, row) {
                    syncs.kind.push(match row.cell_as_integer(7) {
                        Some(1) => SynchronisationTarget::HostWaitsForEvent,
                        Some(2) => SynchronisationTarget::StreamWaitsEvent,
                        Some(3) => SynchronisationTarget::HostWaitsForStream,
                        Some(4) => SynchronisationTarget::HostWaitsForContext,
                        // Some CUPTI versions also write 0 for cudaDeviceSynchronize.
                        _ => SynchronisationTarget::Unknown,
                    });
                }
            },
        )?;
        self.builder.trace.synchronisation_waits = syncs;
        Ok(())
    }

    pub(super) fn read_gpu_allocations_and_frees(&mut self) -> Result<(), TraceError> {
        let memories =
            self.read_enumeration_labels("ENUM_CUDA_MEM_KIND", CUPTI_MEMORY_KIND_LABELS)?;
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
        self.visit_rows_and_record_problems(
            "CUDA_GPU_MEMORY_USAGE_EVENTS",
            &names,
            |builder, _, row| {
                // The table also contains allocations of host memory, which are skipped here.
                let of_host = row
                    .cell_as_integer(9)
                    .and_then(|kind| memories.get(&kind))
                    .is_some_and(|&name| {
                        let kind =
                            memory_kind_from_nsys_label(builder.trace.names.text_of_name(name));
                        matches!(kind, CopiedMemoryKind::Pageable | CopiedMemoryKind::Pinned)
                    });
                let time = row.cell_as_integer(0).filter(|_| !of_host);
                let Some(time) = builder.trace.quality.plausible_time_or_count_as_odd(time) else {
                    return;
                };
                let number =
                    |column| row.cell_as_integer(column).unwrap_or(0).max(0).cast_unsigned();
                let address = row.cell_as_integer(8).unwrap_or(0).cast_unsigned();
                // Value 0 of this column means an allocation, 1 a free.
                let given_back = row.cell_as_integer(7) == Some(1);
                allocations.push_allocation_or_free(
                    time,
                    operation_place_of_row(builder, row),
                    address,
                    number(6),
                    given_back,
                );
            },
        )?;
        self.builder.trace.allocations = allocations;
        Ok(())
    }

    /// Reads page faults of managed memory: one row per page fault of the host, and one row per
    /// group of page faults of a GPU.
    pub(super) fn read_managed_memory_page_faults(&mut self) -> Result<(), TraceError> {
        let mut faults = std::mem::take(&mut self.builder.trace.page_faults);
        let names = ["start", "end", "globalPid", "deviceId", "numberOfPageFaults"];
        for table in ["CUDA_UM_CPU_PAGE_FAULT_EVENTS", "CUDA_UM_GPU_PAGE_FAULT_EVENTS"] {
            let on_host = table.contains("CPU");
            self.visit_rows_and_record_problems(table, &names, |builder, _, row| {
                let Some(start) =
                    builder.trace.quality.plausible_time_or_count_as_odd(row.cell_as_integer(0))
                else {
                    return;
                };
                let (key, pid, _) =
                    process_key_pid_and_tid_of_global_id(row.cell_as_integer(2).unwrap_or(0));
                let device =
                    row.cell_as_integer(3).and_then(|id| u32::try_from(id).ok()).unwrap_or(0);
                faults.start_ns.push(start);
                faults.end_ns.push(row.cell_as_integer(1).unwrap_or(start).max(start));
                faults.process_index.push(builder.index_of_process(key, pid));
                faults.device.push(if on_host {
                    ManagedPageFaultTable::HOST_INSTEAD_OF_DEVICE
                } else {
                    device
                });
                let count = row.cell_as_integer(4).and_then(|count| u64::try_from(count).ok());
                faults.fault_count.push(count.unwrap_or(1));
            })?;
        }
        self.builder.trace.page_faults = faults;
        Ok(())
    }

    /// Reads the labels of an enumeration from its table in the export; ids without a row keep the
    /// known labels.
    fn read_enumeration_labels(
        &mut self,
        table: &str,
        known: &[&str],
    ) -> Result<HashMap<i64, InternedNameId>, TraceError> {
        let names = &mut self.builder.trace.names;
        let mut labels: HashMap<i64, InternedNameId> =
            (0..).zip(known).map(|(id, label)| (id, names.intern_text(label))).collect();
        self.visit_rows_and_record_problems(table, &["id", "label"], |builder, _, row| {
            if let (Some(id), Some(label)) = (row.cell_as_integer(0), row.cell_as_text_bytes(1)) {
                builder.trace.quality.count_invalid_utf8(label);
                labels.insert(id, builder.trace.names.intern_bytes_as_text(label));
            }
        })?;
        Ok(labels)
    }
}

const CUPTI_MEMORY_KIND_LABELS: &[&str] =
    &["Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static"];

fn memory_kind_from_nsys_label(label: &str) -> CopiedMemoryKind {
    match label.split(' ').next().unwrap_or_default() {
        "Pageable" => CopiedMemoryKind::Pageable,
        "Pinned" => CopiedMemoryKind::Pinned,
        "Device" => CopiedMemoryKind::DeviceMemory,
        "Array" => CopiedMemoryKind::CudaArray,
        "Managed" => CopiedMemoryKind::Managed,
        _ => CopiedMemoryKind::Unknown,
    }
}
