//! Recognises well-known files that kernelgate cannot read, and names a command that produces a
//! readable file.

use std::path::Path;

/// Returns why a file is unsupported and what to do, judging by its name and first bytes; `None`
/// for unknown files.
pub(super) fn reason_if_unsupported_file(path: &Path, head: &[u8]) -> Option<String> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let json = || {
        let text = String::from_utf8_lossy(head);
        let start = text.trim_start_matches('\u{feff}').trim_start();
        start.starts_with(['{', '[']).then(|| reason_by_json_content(start)).flatten()
    };
    reason_by_file_name(name)
        .or_else(|| reason_by_magic_bytes(head))
        .or_else(json)
        .map(str::to_owned)
}

/// Returns why a text file, such as profiler output without records, cannot be read as a trace.
pub(super) fn reason_if_unsupported_text(head: &[u8]) -> Option<String> {
    reason_by_text_content(
        String::from_utf8_lossy(head).trim_start_matches('\u{feff}').trim_start(),
    )
}

const OTHER_NSYS_EXPORT_ADVICE: &str = "it is an export of Nsight Systems in another format; export the report with: nsys export \
     --type sqlite --output trace.sqlite REPORT.nsys-rep";
const ADVICE_TO_RECORD_ROCPROF_JSON: &str =
    "record with: rocprofv3 --sys-trace --output-format json -- PROGRAM";

fn reason_by_file_name(name: &str) -> Option<&'static str> {
    let ends = |end: &str| name.ends_with(end);
    if ends(".xplane.pb") {
        return Some(
            "it is a profile of JAX or XLA (xplane); diagnose the *.trace.json.gz beside it, which \
             jax.profiler.trace(FOLDER, create_perfetto_trace=True) writes",
        );
    }
    if ends(".pftrace") || ends(".perfetto-trace") {
        return Some(
            "it is a trace of Perfetto (protobuf); convert it with: traceconv json FILE \
             trace.json, or record with: rocprofv3 --sys-trace --output-format json -- PROGRAM",
        );
    }
    if ends(".nvvp") || ends(".nvprof") {
        return Some(
            "it is a profile of nvprof, which is no longer developed; record with: nsys profile \
             --trace=cuda,nvtx -o trace PROGRAM",
        );
    }
    None
}

fn reason_by_magic_bytes(head: &[u8]) -> Option<&'static str> {
    let hdf = head.starts_with(b"\x89HDF\r\n");
    let arrow = head.starts_with(b"ARROW1") || head.starts_with(b"PAR1");
    (hdf || arrow).then_some(OTHER_NSYS_EXPORT_ADVICE)
}

fn reason_by_json_content(text: &str) -> Option<&'static str> {
    let has = |word: &str| text.contains(word);
    if has("\"ph\"") || has("\"traceEvents\"") {
        return None;
    }
    let layers = has("\"timeMs\"") && has("\"averageMs\"");
    let times = has("\"startComputeMs\"") || has("\"computeMs\"");
    if layers || times || text.starts_with("{\"Layers\"") {
        return Some(
            "it is a profile of TensorRT (trtexec --exportProfile, --exportTimes or \
             --exportLayerInfo), which has no kernels; record with: nsys profile \
             --trace=cuda,nvtx -o trace trtexec OPTIONS",
        );
    }
    if has("\"nodes\"") && has("[pytorch|profiler|execution_") {
        return Some(
            "it is an execution trace of PyTorch (ExecutionTraceObserver), which has no times of a \
             GPU; record with: torch.profiler.profile(activities=[ProfilerActivity.CPU, \
             ProfilerActivity.CUDA]), and export_chrome_trace(\"trace.json\")",
        );
    }
    let nsys = has("\"TargetName\"") || has("\"CudaEvent\"") || has("\"TraceProcessEvent\"");
    nsys.then_some(OTHER_NSYS_EXPORT_ADVICE)
}

fn reason_by_text_content(text: &str) -> Option<String> {
    let has = |word: &str| text.contains(word);
    if has("ERR_NVGPUCTRPERM") {
        return Some(
            "Nsight Compute was not permitted to read the GPU's performance counters \
             (ERR_NVGPUCTRPERM): run ncu as root, or let the administrator set \
             NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module; in a container add \
             --cap-add=SYS_ADMIN"
                .to_owned(),
        );
    }
    let of_ncu = has("==PROF==") || has("==WARNING==") || has("==ERROR==");
    if has("Section: ") && (has("Metric Value") || of_ncu) {
        return Some(
            "it is the text that ncu prints; print CSV with: ncu --csv --page details PROGRAM > \
             ncu.csv, or keep the report with: ncu --set full -o report PROGRAM"
                .to_owned(),
        );
    }
    if of_ncu && has("No kernels were profiled") {
        let error = text.lines().find(|line| line.starts_with("==ERROR==")).unwrap_or_default();
        let error = error.trim_start_matches("==ERROR==").trim();
        let why = if error.is_empty() { String::new() } else { format!(" ({error})") };
        return Some(format!(
            "Nsight Compute profiled no kernel{why}; check its kernel filter, and that the program \
             launches on the GPU"
        ));
    }
    if of_ncu {
        return Some(
            "it is output of ncu without metrics; run it with: ncu --csv --page details PROGRAM > \
             ncu.csv"
                .to_owned(),
        );
    }
    if has("\"Source\"") && has("Warp Stall Sampling") {
        return Some(
            "it is the source page of ncu; print metrics with: ncu --csv --page details --import \
             REPORT.ncu-rep > ncu.csv, or pass the report itself"
                .to_owned(),
        );
    }
    if has("NVPROF is profiling process") {
        return reason_by_file_name(".nvvp").map(str::to_owned);
    }
    if has("_sum):") && has(" ** ") {
        return Some("it is the text that nsys stats prints; pass the report itself".to_owned());
    }
    let header = text.lines().next().unwrap_or_default();
    let column = |name: &str| header.contains(name);
    if column("Kernel_Name") && column("Start_Timestamp")
        || column("KernelName") && column("gpu-id")
    {
        return Some(format!(
            "it is CSV of rocprof, one kind of record a file; {ADVICE_TO_RECORD_ROCPROF_JSON}"
        ));
    }
    None
}

/// Recognises a database of another profiler by its table names; returns why it is unsupported and
/// what to do.
pub(super) fn reason_if_database_of_other_profiler<'a>(
    mut tables: impl Iterator<Item = &'a str>,
) -> Option<String> {
    tables.find_map(|table| {
        if table.starts_with("rocpd_") {
            return Some(format!(
                "it is a database of rocprofv3 (rocpd); {ADVICE_TO_RECORD_ROCPROF_JSON}"
            ));
        }
        let nvprof = table == "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL";
        nvprof.then(|| reason_by_file_name(".nvvp").unwrap_or_default().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unsupported_reason_for_test_file(name: &str, head: &str) -> String {
        let head = head.as_bytes();
        reason_if_unsupported_file(Path::new(name), head)
            .or_else(|| reason_if_unsupported_text(head))
            .unwrap_or_default()
    }

    #[test]
    fn known_unsupported_files_get_a_conversion_command() {
        for (name, head, what) in [
            ("host.xplane.pb", "\u{a}x", "trace.json.gz"),
            ("a.pftrace", "x", "traceconv json"),
            ("p.json", r#"[{"count": 9}, {"name": "c", "timeMs": 1, "averageMs": 1}]"#, "trtexec"),
            ("t.json", r#"[{"startInMs": 1, "computeMs": 0.5}]"#, "trtexec"),
            ("a.h5", "x", ""),
            ("l.txt", "==PROF== a\n==ERROR== ERR_NVGPUCTRPERM - The user", "CTRPERM"),
            ("l.txt", "==PROF== a\n    Section: Occupancy\n Metric Value", "--csv --page details"),
            ("l.txt", "==PROF== a\n==WARNING== No kernels were profiled.", "profiled no kernel"),
            ("l.txt", "==7== NVPROF is profiling process 7", "nsys profile"),
            ("k.csv", "\"Kind\",\"Kernel_Name\",\"Start_Timestamp\"", "rocprofv3"),
            ("e.json", r#"{"nodes": [{"name": "[pytorch|profiler|execution_trace|x]"}]}"#, "torch"),
            ("s.csv", "\"#\",\"Source\",\"Warp Stall Sampling (All Samples)\"", "--page details"),
            ("notes.txt", "hello", ""),
            ("t.json", r#"{"traceEvents": [{"ph": "X", "name": "\"timeMs\" \"averageMs\""}]}"#, ""),
        ] {
            let reason = unsupported_reason_for_test_file(name, head);
            assert!(reason.contains(what), "{name}: {reason}");
            assert_eq!(reason.is_empty(), what.is_empty(), "{name}: {reason}");
        }
    }

    #[test]
    fn a_database_without_a_trace_is_described_by_its_tables() {
        let name = |tables: &[&str]| {
            reason_if_database_of_other_profiler(tables.iter().copied()).unwrap_or_default()
        };
        assert!(name(&["x", "rocpd_kernel_dispatch_1"]).contains("rocprofv3"));
        assert!(name(&["CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL"]).contains("nvprof"));
        assert_eq!(name(&["StringIds", "CUPTI_ACTIVITY_KIND_KERNEL"]), "");
    }
}
