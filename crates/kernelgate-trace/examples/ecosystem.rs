//! Prints the findings and the time accounting of every trace below a folder as one text that
//! `diff` can compare; the text has no dates and no outer paths. A developer who changes an
//! analysis rule sees the effect on real traces by comparing two outputs.
//!
//! `cargo run --release -p kernelgate-trace --example ecosystem -- FOLDER > findings.txt`

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use kernelgate_trace::TraceError;
use kernelgate_trace::diagnose::{
    TraceDiagnosis, diagnose_export_while_reading, diagnose_trace_in_memory,
};
use kernelgate_trace::read::{self, WantedTraceParts};

/// File name endings of files that may be traces.
const TRACE_FILE_EXTENSIONS: &[&str] =
    &[".sqlite", ".nsys-rep", ".json", ".json.gz", ".csv", ".ncu-rep", ".log"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder] = &arguments[..] else {
        eprintln!("usage: ecosystem FOLDER");
        return ExitCode::from(2);
    };
    let mut traces = Vec::new();
    if let Err(error) = collect_trace_files_below(Path::new(folder), &mut traces) {
        eprintln!("error: failed to read {folder}: {error}");
        return ExitCode::from(2);
    }
    traces.sort();
    for trace in &traces {
        let name = trace.strip_prefix(folder).unwrap_or(trace).display();
        println!("== {name}");
        match diagnose_trace_streamed_if_possible(trace) {
            Ok(diagnosis) => print_diagnosis_without_paths(&diagnosis),
            // The path of the trace is removed from the error, so that the same trace in another
            // folder gives the same text.
            Err(error) => println!("  not read: {}", error.to_string().replace(folder, "")),
        }
        println!();
    }
    ExitCode::SUCCESS
}

/// Collects the files below a folder whose names end like those of traces.
fn collect_trace_files_below(folder: &Path, traces: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            collect_trace_files_below(&path, traces)?;
        } else if TRACE_FILE_EXTENSIONS.iter().any(|end| name.ends_with(end)) {
            traces.push(path);
        }
    }
    Ok(())
}

fn diagnose_trace_streamed_if_possible(path: &Path) -> Result<TraceDiagnosis, TraceError> {
    match diagnose_export_while_reading(path)? {
        Some(diagnosis) => Ok(diagnosis),
        None => Ok(diagnose_trace_in_memory(&read::open_trace_file(path, &WantedTraceParts::ALL)?)),
    }
}

fn print_diagnosis_without_paths(diagnosis: &TraceDiagnosis) {
    let records = diagnosis.records.iter().filter(|(_, count)| *count > 0);
    let records: Vec<String> = records.map(|(kind, count)| format!("{kind} {count}")).collect();
    println!("  {}: {}", diagnosis.recorder_and_version, records.join(", "));
    for device in &diagnosis.gpu_use_by_process {
        let total = device.account.whole_trace_account.span_length_ns();
        println!("  process {}, device {}: {} ns", device.pid, device.gpu_ordinal, total);
        for (label, ns) in device.account.whole_trace_account.labels_and_ns_of_lines() {
            println!("    {label}: {}", percentage_text(ns, total));
        }
        if let Some(iterations) = &device.account.iterations {
            println!(
                "    {} iterations by {}",
                iterations.listed_iterations.len(),
                iterations.evidence.printed_iteration_evidence()
            );
        }
    }
    for finding in diagnosis.data_quality_findings.iter().chain(&diagnosis.findings) {
        println!(
            "  {} {}: {}",
            finding.severity.printed_severity_label(),
            finding.rule_id,
            finding.finding_title
        );
        println!(
            "    measured {:.1} {}, savings {}, replayed {}",
            finding.measured_value.number_in_unit,
            finding.measured_value.unit,
            nanoseconds_or_dash_text(finding.max_recoverable_ns),
            nanoseconds_or_dash_text(finding.replayed_gain.map(|of| of.further_saved_ns))
        );
    }
    for question in &diagnosis.questions {
        if let Some(reason) = question.reason_without_answer() {
            println!("  not measured {}: {reason}", question.rule_id);
        }
    }
}

fn nanoseconds_or_dash_text(ns: Option<i64>) -> String {
    ns.map_or("-".to_owned(), |ns| format!("{ns} ns"))
}

#[allow(clippy::cast_precision_loss)]
fn percentage_text(part: i64, whole: i64) -> String {
    format!("{:.1} %", part as f64 / whole.max(1) as f64 * 100.0)
}
