//! Sizes and communicators of NCCL's collectives, from the payloads of its NVTX ranges: as JSON, or
//! as bytes that a schema describes (`nsys export --include-blobs=true`).
//!
//! A kernel has the sizes of the range around its launch. The kernels of a group are launched as
//! the group ends, and have the sizes of the calls in the group. Absent: reduction operations,
//! roots.

use hashbrown::HashMap;
use serde_json::Value;

use super::NsysReader;
use super::ids::{RUNTIME_CALL_TABLE, split_global_id};
use crate::error::TraceError;
use crate::model::collective::CollectiveKind;
use crate::model::collectives::CollectiveKernelCall;
use crate::model::interned_names::NameId;
use crate::model::launch_correlation_key;

const EVENTS_TABLE: &str = "NVTX_EVENTS";
/// Bytes before a payload: its domain, its schema, its size and where it begins.
const PAYLOAD_HEADER_BYTES: usize = 32;

/// Content of a payload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct NcclPayload {
    communicator: Option<u64>,
    bytes: Option<u64>,
    ranks: Option<u32>,
}

/// A known field of an NCCL payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NcclPayloadField {
    Communicator,
    Bytes,
    Ranks,
}

impl NcclPayloadField {
    /// The field that NCCL gives a name.
    fn named(name: &str) -> Option<NcclPayloadField> {
        let name = name.to_ascii_lowercase();
        match () {
            () if name.contains("communicator id") => Some(Self::Communicator),
            () if name.contains("message size") => Some(Self::Bytes),
            () if name.contains("of ranks") || name == "nranks" => Some(Self::Ranks),
            () => None,
        }
    }
}

impl NcclPayload {
    fn set_field(&mut self, field: NcclPayloadField, value: u64) {
        match field {
            NcclPayloadField::Communicator => self.communicator = Some(value),
            NcclPayloadField::Bytes => self.bytes = Some(value),
            NcclPayloadField::Ranks => self.ranks = u32::try_from(value).ok(),
        }
    }

    fn from_json(text: &str) -> Option<NcclPayload> {
        let mut payload = Self::default();
        let value: Value = serde_json::from_str(text).ok()?;
        for (name, value) in value.as_object()? {
            let number = value.as_u64().or_else(|| {
                let digits: String = value.as_str()?.chars().filter(|c| *c != ',').collect();
                digits.parse().ok()
            });
            if let Some((field, number)) = NcclPayloadField::named(name).zip(number) {
                payload.set_field(field, number);
            }
        }
        Some(payload)
    }
}

/// Fields by schema: where each begins, and how many bytes it has.
type PayloadSchemas = HashMap<(u64, u64), Vec<(NcclPayloadField, usize, usize)>>;

fn decode_nccl_payload(blob: &[u8], schemas: &PayloadSchemas) -> Option<NcclPayload> {
    let word = |at: usize| {
        let bytes = blob.get(at..at + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    let schema = schemas.get(&(word(0)?, word(8)?))?;
    let size = usize::try_from(word(16)?).ok()?;
    let at = usize::try_from(word(24)?).ok().filter(|at| *at >= PAYLOAD_HEADER_BYTES)?;
    let bytes = blob.get(at..at.checked_add(size)?)?;
    let mut payload = NcclPayload::default();
    for &(field, offset, width) in schema {
        let value = bytes.get(offset..offset + width)?;
        let value = value.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        payload.set_field(field, value);
    }
    Some(payload)
}

#[derive(Debug, Clone)]
struct NcclCall {
    thread: i64,
    start: i64,
    end: i64,
    name: String,
    payload: NcclPayload,
}

impl NsysReader {
    /// Describes the kernels of NCCL by the payloads of its ranges.
    pub(super) fn describe_nccl_kernels(&mut self) -> Result<(), TraceError> {
        let has = |column| self.database.has_column(EVENTS_TABLE, column);
        if !["binaryData", "jsonText", "jsonTextId"].into_iter().any(has) {
            return Ok(());
        }
        self.builder.copy_tables_to_trace();
        let trace = &self.builder.trace;
        let communicates = |&row: &u32| {
            let function = trace.kernels.function.at(row as usize) as usize;
            let name = trace.functions[function].demangled;
            let function = trace.names.text(name).to_ascii_lowercase();
            ["ncclkernel", "nccldevkernel"].iter().any(|it| function.contains(it))
        };
        let kernels: Vec<u32> = (0..u32::try_from(trace.kernels.on_gpu.len()).unwrap_or(0))
            .filter(communicates)
            .collect();
        if kernels.is_empty() {
            return Ok(());
        }
        let calls = self.read_nccl_calls()?;
        let ranks: HashMap<u64, u32> = calls
            .iter()
            .filter_map(|call| Some((call.payload.communicator?, call.payload.ranks?)))
            .collect();
        if calls.iter().all(|call| call.payload.bytes.is_none()) {
            return Ok(());
        }
        let launches = self.launch_times_of_kernels(&kernels)?;
        for row in kernels {
            let on_gpu = &self.builder.trace.kernels.on_gpu;
            let process = self.builder.trace.process_of_place(on_gpu.place.at(row as usize));
            let launch =
                launches.get(&launch_correlation_key(process, on_gpu.correlation.at(row as usize)));
            let Some(found) = launch.and_then(|&(thread, time)| calls_around(&calls, thread, time))
            else {
                continue;
            };
            let Some(sized) = found.first() else { continue };
            let bytes: u64 = found.iter().filter_map(|call| call.payload.bytes).sum();
            let communicator = sized.payload.communicator.unwrap_or(0);
            let ranks = ranks.get(&communicator).copied().unwrap_or(0);
            let (bytes_in, bytes_out) =
                bytes_given_and_received(&sized.name, bytes, u64::from(ranks));
            let names = &mut self.builder.trace.names;
            let call = CollectiveKernelCall {
                name: names.intern_text(&sized.name),
                group: names.intern_text(&format!("{communicator:#x}")),
                ranks,
                bytes_in,
                bytes_out,
            };
            self.builder.trace.collectives.push(row, call);
        }
        Ok(())
    }

    /// The ranges with NCCL's names, in the order of their threads and starts.
    fn read_nccl_calls(&mut self) -> Result<Vec<NcclCall>, TraceError> {
        let schemas = self.read_payload_schemas()?;
        let mut calls = Vec::new();
        let columns =
            ["start", "end", "globalTid", "text", "textId", "binaryData", "jsonText", "jsonTextId"];
        self.visit_rows(EVENTS_TABLE, &columns, |builder, strings, row| {
            let names = &builder.trace.names;
            let string = |column: usize| {
                let id = row.integer_cell(column)?;
                strings.get(&id).map(|&name: &NameId| names.text(name))
            };
            let own = row.text_cell(3).map(String::from_utf8_lossy);
            let Some(name) = string(4).or(own.as_deref()) else { return };
            if !name.starts_with("nccl") {
                return;
            }
            let text = row.text_cell(6).map(String::from_utf8_lossy);
            let json = string(7).or(text.as_deref()).and_then(NcclPayload::from_json);
            let payload = json
                .or_else(|| decode_nccl_payload(row.text_cell(5)?, &schemas))
                .unwrap_or_default();
            let (Some(start), Some(end)) = (row.integer_cell(0), row.integer_cell(1)) else {
                return;
            };
            let thread = row.integer_cell(2).unwrap_or(0);
            calls.push(NcclCall { thread, start, end, name: name.to_owned(), payload });
        })?;
        calls.sort_by_key(|call| (call.thread, call.start));
        Ok(calls)
    }

    fn read_payload_schemas(&mut self) -> Result<PayloadSchemas, TraceError> {
        let mut schemas = PayloadSchemas::new();
        let columns = ["domainId", "schemaId", "name", "offset"];
        self.visit_rows("NVTX_PAYLOAD_SCHEMA_ENTRIES", &columns, |_, _, row| {
            let number = |column| row.integer_cell(column).map(i64::cast_unsigned);
            let (Some(domain), Some(schema)) = (number(0), number(1)) else { return };
            let Some(field) = NcclPayloadField::named(&row.display(2)) else { return };
            let width = if field == NcclPayloadField::Ranks { 4 } else { 8 };
            let offset = usize::try_from(number(3).unwrap_or(0)).unwrap_or(usize::MAX - 8);
            schemas.entry((domain, schema)).or_default().push((field, offset, width));
        })?;
        Ok(schemas)
    }

    /// Thread and time of the calls that launched some kernels, by process and correlation id.
    fn launch_times_of_kernels(
        &mut self,
        kernels: &[u32],
    ) -> Result<HashMap<u64, (i64, i64)>, TraceError> {
        let on_gpu = &self.builder.trace.kernels.on_gpu;
        let mut launches: HashMap<u64, (i64, i64)> = kernels
            .iter()
            .map(|&row| {
                let process = self.builder.trace.process_of_place(on_gpu.place.at(row as usize));
                (
                    launch_correlation_key(process, on_gpu.correlation.at(row as usize)),
                    (0, i64::MIN),
                )
            })
            .collect();
        self.visit_rows(
            RUNTIME_CALL_TABLE,
            &["start", "globalTid", "correlationId"],
            |builder, _, row| {
                let Some(correlation) = row.integer_cell(2).and_then(|id| u32::try_from(id).ok())
                else {
                    return;
                };
                let thread = row.integer_cell(1).unwrap_or(0);
                let (process, pid, _) = split_global_id(thread);
                let process = builder.process_of_key(process, pid);
                if let Some(launch) =
                    launches.get_mut(&launch_correlation_key(process, correlation))
                    && launch.1 == i64::MIN
                {
                    *launch = (thread, row.integer_cell(0).unwrap_or(i64::MIN));
                }
            },
        )?;
        Ok(launches)
    }
}

/// The calls with sizes that launched at a time: the innermost around it, or all of the group that
/// ends then.
fn calls_around(calls: &[NcclCall], thread: i64, time: i64) -> Option<Vec<&NcclCall>> {
    let behind = calls.partition_point(|call| (call.thread, call.start) <= (thread, time));
    let own = calls[..behind].iter().rev().take_while(|call| call.thread == thread);
    let launching = own.clone().find(|call| call.end >= time)?;
    if launching.payload.bytes.is_some() {
        return Some(vec![launching]);
    }
    // Walks back from the end of a group to its outermost start.
    let mut depth = 0usize;
    let mut found = Vec::new();
    for call in own.skip_while(|call| call.start > launching.start) {
        match call.name.as_str() {
            name if name.starts_with("ncclGroupEnd") => depth += 1,
            name if name.starts_with("ncclGroupStart") => depth = depth.saturating_sub(1),
            _ if call.payload.bytes.is_some() => found.push(call),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    (!found.is_empty()).then_some(found)
}

/// Bytes that each rank contributes and receives, computed from the size of the smaller buffer,
/// which NCCL records.
fn bytes_given_and_received(name: &str, bytes: u64, ranks: u64) -> (u64, u64) {
    let all = bytes.saturating_mul(ranks.max(1));
    match CollectiveKind::from_name(name) {
        CollectiveKind::AllGather => (bytes, all),
        CollectiveKind::ReduceScatter => (all, bytes),
        _ => (bytes, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvtx_payloads_are_read_as_bytes_and_as_json() {
        let fields = vec![
            (NcclPayloadField::Communicator, 0, 8),
            (NcclPayloadField::Bytes, 8, 8),
            (NcclPayloadField::Ranks, 16, 4),
        ];
        let schemas = PayloadSchemas::from_iter([((1, 9), fields)]);
        let mut blob = Vec::new();
        [1u64, 9, 24, 32, 0xABC, 4096].iter().for_each(|word| blob.extend(word.to_le_bytes()));
        blob.extend([8, 0, 0, 0, 0, 0, 0, 0]);
        let expected = NcclPayload { communicator: Some(0xABC), bytes: Some(4096), ranks: Some(8) };
        assert_eq!(decode_nccl_payload(&blob, &schemas), Some(expected));
        assert_eq!(decode_nccl_payload(&blob[..50], &schemas), None, "cut short");
        let json =
            r#"{"NCCL communicator ID": "2,748", "Message size [bytes]": 4096, "No. of ranks": 8}"#;
        assert_eq!(NcclPayload::from_json(json), Some(expected));
    }

    #[test]
    fn kernels_in_a_nccl_group_get_the_sizes_of_its_calls() {
        let call = |start, end, name: &str, bytes| NcclCall {
            thread: 1,
            start,
            end,
            name: name.to_owned(),
            payload: NcclPayload { bytes, ..NcclPayload::default() },
        };
        let calls = [
            call(0, 5, "ncclAllReduce", Some(10)),
            call(10, 11, "ncclGroupStart", None),
            call(12, 13, "ncclSend", Some(100)),
            call(14, 15, "ncclRecv", Some(200)),
            call(16, 30, "ncclGroupEnd", None),
        ];
        let bytes = |time| -> Option<u64> {
            let found = calls_around(&calls, 1, time)?;
            Some(found.iter().filter_map(|call| call.payload.bytes).sum())
        };
        assert_eq!(bytes(3), Some(10));
        assert_eq!(bytes(20), Some(300));
        assert_eq!(bytes(40), None);
        assert_eq!(calls_around(&calls, 2, 3).map(|found| found.len()), None);
        assert_eq!(bytes_given_and_received("ncclAllGather", 10, 4), (10, 40));
        assert_eq!(bytes_given_and_received("ncclReduceScatter", 10, 4), (40, 10));
        assert_eq!(bytes_given_and_received("ncclAllReduce", 10, 4), (10, 10));
    }
}
