//! Reads sizes and communicators of NCCL collectives from the payloads of NCCL's NVTX ranges: JSON,
//! or binary data with a schema (`nsys export --include-blobs=true`).
//!
//! A collective kernel gets its sizes from the NCCL range in which the kernel was launched. NCCL
//! launches the kernels of a group when the group ends, so these kernels get the summed sizes of
//! the calls in the group. Reduction operations and root ranks are not read.

use hashbrown::HashMap;
use serde_json::Value;

use super::NsysExportReader;
use super::ids::{CUDA_API_CALL_TABLE, NVTX_EVENT_TABLE, process_key_pid_and_tid_of_global_id};
use crate::error::TraceError;
use crate::model::collective::CollectiveKind;
use crate::model::collectives::RecordedCollective;
use crate::model::interned_names::InternedNameId;
use crate::model::process_and_correlation_key;

/// Length in bytes of the header before a binary payload: domain id, schema id, payload size and
/// payload offset, eight bytes each.
const NVTX_PAYLOAD_HEADER_BYTES: usize = 32;

/// Sizes of one NCCL call, from the payload of its NVTX range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct NcclCallSizes {
    communicator_id: Option<u64>,
    message_bytes: Option<u64>,
    ranks: Option<u32>,
}

/// A field of NCCL's NVTX payloads that kernelgate reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KnownNcclPayloadField {
    CommunicatorId,
    MessageBytes,
    RankCount,
}

impl KnownNcclPayloadField {
    /// Recognises a payload field by the name that NCCL gives to the field.
    fn from_nccl_field_name(name: &str) -> Option<KnownNcclPayloadField> {
        let name = name.to_ascii_lowercase();
        match () {
            () if name.contains("communicator id") => Some(Self::CommunicatorId),
            () if name.contains("message size") => Some(Self::MessageBytes),
            () if name.contains("of ranks") || name == "nranks" => Some(Self::RankCount),
            () => None,
        }
    }
}

impl NcclCallSizes {
    fn set_payload_field(&mut self, field: KnownNcclPayloadField, value: u64) {
        match field {
            KnownNcclPayloadField::CommunicatorId => self.communicator_id = Some(value),
            KnownNcclPayloadField::MessageBytes => self.message_bytes = Some(value),
            KnownNcclPayloadField::RankCount => self.ranks = u32::try_from(value).ok(),
        }
    }

    fn from_json_payload(text: &str) -> Option<NcclCallSizes> {
        let mut payload = Self::default();
        let value: Value = serde_json::from_str(text).ok()?;
        for (name, value) in value.as_object()? {
            let number = value.as_u64().or_else(|| {
                let digits: String = value.as_str()?.chars().filter(|c| *c != ',').collect();
                digits.parse().ok()
            });
            if let Some((field, number)) =
                KnownNcclPayloadField::from_nccl_field_name(name).zip(number)
            {
                payload.set_payload_field(field, number);
            }
        }
        Some(payload)
    }
}

/// Byte offset and length of each known payload field, by domain id and schema id.
type NcclPayloadSchemas = HashMap<(u64, u64), Vec<(KnownNcclPayloadField, usize, usize)>>;

fn decode_binary_nccl_payload(blob: &[u8], schemas: &NcclPayloadSchemas) -> Option<NcclCallSizes> {
    let word = |at: usize| {
        let bytes = blob.get(at..at + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    let schema = schemas.get(&(word(0)?, word(8)?))?;
    let size = usize::try_from(word(16)?).ok()?;
    let at = usize::try_from(word(24)?).ok().filter(|at| *at >= NVTX_PAYLOAD_HEADER_BYTES)?;
    let bytes = blob.get(at..at.checked_add(size)?)?;
    let mut payload = NcclCallSizes::default();
    for &(field, offset, width) in schema {
        let value = bytes.get(offset..offset + width)?;
        let value = value.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        payload.set_payload_field(field, value);
    }
    Some(payload)
}

#[derive(Debug, Clone)]
struct NcclApiCall {
    global_thread_id: i64,
    start_ns: i64,
    end_ns: i64,
    function_name: String,
    payload: NcclCallSizes,
}

impl NsysExportReader {
    /// Sets size, communicator and ranks of each NCCL kernel, from the payloads of NCCL's NVTX
    /// ranges.
    pub(super) fn attach_nccl_sizes_to_kernels(&mut self) -> Result<(), TraceError> {
        let has = |column| self.database.has_export_column(NVTX_EVENT_TABLE, column);
        if !["binaryData", "jsonText", "jsonTextId"].into_iter().any(has) {
            return Ok(());
        }
        self.builder.copy_tables_and_demangle_kernel_names();
        let trace = &self.builder.trace;
        let communicates = |&row: &u32| {
            let function = trace.kernels.function_index.at(row as usize) as usize;
            let name = trace.functions[function].demangled_name;
            let function = trace.names.text_of_name(name).to_ascii_lowercase();
            ["ncclkernel", "nccldevkernel"].iter().any(|it| function.contains(it))
        };
        let kernels: Vec<u32> = (0..u32::try_from(trace.kernels.on_gpu.operation_count())
            .unwrap_or(0))
            .filter(communicates)
            .collect();
        if kernels.is_empty() {
            return Ok(());
        }
        let calls = self.read_nccl_calls()?;
        let ranks: HashMap<u64, u32> = calls
            .iter()
            .filter_map(|call| Some((call.payload.communicator_id?, call.payload.ranks?)))
            .collect();
        if calls.iter().all(|call| call.payload.message_bytes.is_none()) {
            return Ok(());
        }
        let launches = self.launch_thread_and_time_of_kernels(&kernels)?;
        for row in kernels {
            let on_gpu = &self.builder.trace.kernels.on_gpu;
            let process = self.builder.trace.process_index_of_place(on_gpu.place.at(row as usize));
            let launch = launches
                .get(&process_and_correlation_key(process, on_gpu.correlation.at(row as usize)));
            let Some(found) = launch
                .and_then(|&(thread, time)| nccl_calls_that_launched_at(&calls, thread, time))
            else {
                continue;
            };
            let Some(sized) = found.first() else { continue };
            let bytes: u64 = found.iter().filter_map(|call| call.payload.message_bytes).sum();
            let communicator = sized.payload.communicator_id.unwrap_or(0);
            let ranks = ranks.get(&communicator).copied().unwrap_or(0);
            let (bytes_in, bytes_out) =
                bytes_sent_and_received_per_rank(&sized.function_name, bytes, u64::from(ranks));
            let names = &mut self.builder.trace.names;
            let call = RecordedCollective {
                collective_name: names.intern_text(&sized.function_name),
                communicator_name: names.intern_text(&format!("{communicator:#x}")),
                ranks,
                contributed_bytes: bytes_in,
                received_bytes: bytes_out,
            };
            self.builder.trace.collectives.push_collective_of_kernel(row, call);
        }
        Ok(())
    }

    /// Reads the NVTX ranges whose names begin with `nccl`, sorted by thread and start time.
    fn read_nccl_calls(&mut self) -> Result<Vec<NcclApiCall>, TraceError> {
        let schemas = self.read_payload_schemas()?;
        let mut calls = Vec::new();
        let columns =
            ["start", "end", "globalTid", "text", "textId", "binaryData", "jsonText", "jsonTextId"];
        self.visit_rows_and_record_problems(
            NVTX_EVENT_TABLE,
            &columns,
            |builder, strings, row| {
                let names = &builder.trace.names;
                let string = |column: usize| {
                    let id = row.cell_as_integer(column)?;
                    strings.get(&id).map(|&name: &InternedNameId| names.text_of_name(name))
                };
                let own = row.cell_as_text_bytes(3).map(String::from_utf8_lossy);
                let Some(name) = string(4).or(own.as_deref()) else { return };
                if !name.starts_with("nccl") {
                    return;
                }
                let text = row.cell_as_text_bytes(6).map(String::from_utf8_lossy);
                let json = string(7).or(text.as_deref()).and_then(NcclCallSizes::from_json_payload);
                let payload = json
                    .or_else(|| decode_binary_nccl_payload(row.cell_as_text_bytes(5)?, &schemas))
                    .unwrap_or_default();
                let (Some(start), Some(end)) = (row.cell_as_integer(0), row.cell_as_integer(1))
                else {
                    return;
                };
                let thread = row.cell_as_integer(2).unwrap_or(0);
                calls.push(NcclApiCall {
                    global_thread_id: thread,
                    start_ns: start,
                    end_ns: end,
                    function_name: name.to_owned(),
                    payload,
                });
            },
        )?;
        calls.sort_by_key(|call| (call.global_thread_id, call.start_ns));
        Ok(calls)
    }

    fn read_payload_schemas(&mut self) -> Result<NcclPayloadSchemas, TraceError> {
        let mut schemas = NcclPayloadSchemas::new();
        let columns = ["domainId", "schemaId", "name", "offset"];
        self.visit_rows_and_record_problems(
            "NVTX_PAYLOAD_SCHEMA_ENTRIES",
            &columns,
            |_, _, row| {
                let number = |column| row.cell_as_integer(column).map(i64::cast_unsigned);
                let (Some(domain), Some(schema)) = (number(0), number(1)) else { return };
                let Some(field) =
                    KnownNcclPayloadField::from_nccl_field_name(&row.cell_as_displayed_text(2))
                else {
                    return;
                };
                let width = if field == KnownNcclPayloadField::RankCount { 4 } else { 8 };
                let offset = usize::try_from(number(3).unwrap_or(0)).unwrap_or(usize::MAX - 8);
                schemas.entry((domain, schema)).or_default().push((field, offset, width));
            },
        )?;
        Ok(schemas)
    }

    /// Finds host thread and time of the launch calls of the given kernels, by process and
    /// correlation id.
    fn launch_thread_and_time_of_kernels(
        &mut self,
        kernels: &[u32],
    ) -> Result<HashMap<u64, (i64, i64)>, TraceError> {
        let on_gpu = &self.builder.trace.kernels.on_gpu;
        let mut launches: HashMap<u64, (i64, i64)> = kernels
            .iter()
            .map(|&row| {
                let process =
                    self.builder.trace.process_index_of_place(on_gpu.place.at(row as usize));
                (
                    process_and_correlation_key(process, on_gpu.correlation.at(row as usize)),
                    (0, i64::MIN),
                )
            })
            .collect();
        self.visit_rows_and_record_problems(
            CUDA_API_CALL_TABLE,
            &["start", "globalTid", "correlationId"],
            |builder, _, row| {
                let Some(correlation) =
                    row.cell_as_integer(2).and_then(|id| u32::try_from(id).ok())
                else {
                    return;
                };
                let thread = row.cell_as_integer(1).unwrap_or(0);
                let (process, pid, _) = process_key_pid_and_tid_of_global_id(thread);
                let process = builder.index_of_process(process, pid);
                if let Some(launch) =
                    launches.get_mut(&process_and_correlation_key(process, correlation))
                    && launch.1 == i64::MIN
                {
                    *launch = (thread, row.cell_as_integer(0).unwrap_or(i64::MIN));
                }
            },
        )?;
        Ok(launches)
    }
}

/// Finds the NCCL calls that launched a kernel at a time on a thread: the innermost call around
/// that time, or all calls of the group that ends then.
fn nccl_calls_that_launched_at(
    calls: &[NcclApiCall],
    thread: i64,
    time: i64,
) -> Option<Vec<&NcclApiCall>> {
    let behind =
        calls.partition_point(|call| (call.global_thread_id, call.start_ns) <= (thread, time));
    let own = calls[..behind].iter().rev().take_while(|call| call.global_thread_id == thread);
    let launching = own.clone().find(|call| call.end_ns >= time)?;
    if launching.payload.message_bytes.is_some() {
        return Some(vec![launching]);
    }
    // Searches backwards from the end of the NCCL group to the start of the outermost group.
    let mut depth = 0usize;
    let mut found = Vec::new();
    for call in own.skip_while(|call| call.start_ns > launching.start_ns) {
        match call.function_name.as_str() {
            name if name.starts_with("ncclGroupEnd") => depth += 1,
            name if name.starts_with("ncclGroupStart") => depth = depth.saturating_sub(1),
            _ if call.payload.message_bytes.is_some() => found.push(call),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    (!found.is_empty()).then_some(found)
}

/// Computes the bytes that each rank contributes and receives, from the size of the smaller buffer,
/// which NCCL records.
fn bytes_sent_and_received_per_rank(name: &str, bytes: u64, ranks: u64) -> (u64, u64) {
    let all = bytes.saturating_mul(ranks.max(1));
    match CollectiveKind::from_kernel_name(name) {
        CollectiveKind::AllGather => (bytes, all),
        CollectiveKind::ReduceScatter => (all, bytes),
        _ => (bytes, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_payloads_are_decoded_from_bytes_and_from_json() {
        let fields = vec![
            (KnownNcclPayloadField::CommunicatorId, 0, 8),
            (KnownNcclPayloadField::MessageBytes, 8, 8),
            (KnownNcclPayloadField::RankCount, 16, 4),
        ];
        let schemas = NcclPayloadSchemas::from_iter([((1, 9), fields)]);
        let mut blob = Vec::new();
        [1u64, 9, 24, 32, 0xABC, 4096].iter().for_each(|word| blob.extend(word.to_le_bytes()));
        blob.extend([8, 0, 0, 0, 0, 0, 0, 0]);
        let expected = NcclCallSizes {
            communicator_id: Some(0xABC),
            message_bytes: Some(4096),
            ranks: Some(8),
        };
        assert_eq!(decode_binary_nccl_payload(&blob, &schemas), Some(expected));
        assert_eq!(decode_binary_nccl_payload(&blob[..50], &schemas), None, "cut short");
        let json =
            r#"{"NCCL communicator ID": "2,748", "Message size [bytes]": 4096, "No. of ranks": 8}"#;
        assert_eq!(NcclCallSizes::from_json_payload(json), Some(expected));
    }

    #[test]
    fn kernels_of_a_nccl_group_get_the_sizes_of_its_calls() {
        let call = |start, end, name: &str, bytes| NcclApiCall {
            global_thread_id: 1,
            start_ns: start,
            end_ns: end,
            function_name: name.to_owned(),
            payload: NcclCallSizes { message_bytes: bytes, ..NcclCallSizes::default() },
        };
        let calls = [
            call(0, 5, "ncclAllReduce", Some(10)),
            call(10, 11, "ncclGroupStart", None),
            call(12, 13, "ncclSend", Some(100)),
            call(14, 15, "ncclRecv", Some(200)),
            call(16, 30, "ncclGroupEnd", None),
        ];
        let bytes = |time| -> Option<u64> {
            let found = nccl_calls_that_launched_at(&calls, 1, time)?;
            Some(found.iter().filter_map(|call| call.payload.message_bytes).sum())
        };
        assert_eq!(bytes(3), Some(10));
        assert_eq!(bytes(20), Some(300));
        assert_eq!(bytes(40), None);
        assert_eq!(nccl_calls_that_launched_at(&calls, 2, 3).map(|found| found.len()), None);
        assert_eq!(bytes_sent_and_received_per_rank("ncclAllGather", 10, 4), (10, 40));
        assert_eq!(bytes_sent_and_received_per_rank("ncclReduceScatter", 10, 4), (40, 10));
        assert_eq!(bytes_sent_and_received_per_rank("ncclAllReduce", 10, 4), (10, 10));
    }
}
