//! Tests of Nsight Compute reports: reports that the tests write in the same format, and recorded
//! reports.

use std::path::{Path, PathBuf};

use crate::fixture::{
    finding_titles, reason_in_message, refusal_message, shorten_paths_to_file_names,
    write_temporary_file,
};
use kernelgate_trace::diagnose::{diagnose_trace_in_memory, shortened_kernel_name_for_readers};
use kernelgate_trace::model::Trace;
use kernelgate_trace::model::kernel_metrics::NcuProfiledLaunch;
use kernelgate_trace::read::{self, WantedTraceParts};

fn encode_varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
    bytes
}

/// Encodes a protobuf field that contains an integer.
fn encode_integer_field(field: u64, value: u64) -> Vec<u8> {
    [encode_varint(field << 3), encode_varint(value)].concat()
}

/// Encodes a protobuf field that contains a double.
fn encode_double_field(field: u64, value: f64) -> Vec<u8> {
    [encode_varint(field << 3 | 1), value.to_le_bytes().to_vec()].concat()
}

/// Encodes a protobuf field that contains a text or a nested message.
fn encode_bytes_field(field: u64, value: impl AsRef<[u8]>) -> Vec<u8> {
    let value = value.as_ref();
    [encode_varint(field << 3 | 2), encode_varint(value.len() as u64), value.to_vec()].concat()
}

/// Encodes a message of the report file behind its length in four bytes.
fn encode_message_with_length(message: &[u8]) -> Vec<u8> {
    [&u32::try_from(message.len()).unwrap().to_le_bytes(), message].concat()
}

const METRIC_AND_UNIT_TEXTS: [&str; 6] = [
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "device__attribute_display_name",
    "device__attribute_compute_capability_major",
    "device__attribute_compute_capability_minor",
];

/// Encodes a kernel launch with a duration in nanoseconds, and with unknown protobuf fields.
fn encode_profiled_launch(name: &str, duration: f64) -> Vec<u8> {
    let dimensions = |x, y| {
        [encode_integer_field(1, x), encode_integer_field(2, y), encode_integer_field(3, 1)]
            .concat()
    };
    let metric = |id, value: Vec<u8>| {
        encode_bytes_field(13, [encode_integer_field(1, id), encode_bytes_field(2, value)].concat())
    };
    let message = [encode_bytes_field(1, "compute is busy"), encode_integer_field(2, 4)].concat();
    let rule = [
        encode_bytes_field(1, "SOLBottleneck"),
        encode_bytes_field(2, "Bottleneck"),
        encode_bytes_field(3, encode_bytes_field(1, encode_bytes_field(1, message))),
    ];
    [
        encode_integer_field(1, 7),
        encode_bytes_field(5, name),
        encode_bytes_field(10, dimensions(9, 32)),
        encode_bytes_field(11, dimensions(128, 1)),
        metric(0, encode_double_field(3, duration)),
        metric(1, encode_double_field(3, 91.5)),
        metric(2, encode_double_field(3, 40.0)),
        metric(3, encode_bytes_field(1, "NVIDIA H100")),
        metric(4, encode_integer_field(4, 9)),
        metric(5, encode_integer_field(5, 0)),
        encode_bytes_field(19, rule.concat()),
        encode_bytes_field(77, "new"),
        encode_integer_field(78, 5),
    ]
    .concat()
}

fn encode_ncu_report(version: &str, launches: &[Vec<u8>]) -> Vec<u8> {
    let strings: Vec<u8> =
        METRIC_AND_UNIT_TEXTS.iter().flat_map(|text| encode_bytes_field(1, text)).collect();
    let version =
        [encode_bytes_field(1, "Nsight Compute"), encode_bytes_field(2, version)].concat();
    let header = [
        encode_integer_field(2, launches.len() as u64),
        encode_bytes_field(3, encode_bytes_field(8, version)),
        encode_bytes_field(4, strings),
        encode_integer_field(5, 0),
    ];
    let mut report = [
        b"NVR\0".to_vec(),
        encode_message_with_length(&encode_integer_field(1, 2)),
        encode_message_with_length(&header.concat()),
    ]
    .concat();
    launches.iter().for_each(|launch| report.extend(encode_message_with_length(launch)));
    report
}

fn write_and_read_trace(content: &[u8]) -> Trace {
    let (_folder, path) = write_temporary_file("report.ncu-rep", content);
    read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap()
}

fn metric_value_of_launch(trace: &Trace, launch: &NcuProfiledLaunch, name: &str) -> Option<f64> {
    Some(launch.metrics.get(&trace.names.find_interned_text(name)?)?.metric_value)
}

#[test]
fn a_report_has_launches_metrics_and_rules() {
    let trace = write_and_read_trace(&encode_ncu_report(
        "2025.1.0",
        &[encode_profiled_launch("_Z4gemmPf", 4608.0), encode_profiled_launch("k", 1.0)],
    ));
    let [gemm, other] = &trace.profiled_launches[..] else {
        panic!("{} launches", trace.profiled_launches.len())
    };
    assert_eq!(trace.names.text_of_name(gemm.kernel_name), "gemm(float*)");
    assert_eq!((gemm.shape.grid, gemm.shape.block), ([9, 32, 1], [128, 1, 1]));
    assert_eq!(metric_value_of_launch(&trace, gemm, "Duration"), Some(4608.0));
    assert_eq!(metric_value_of_launch(&trace, gemm, "Compute (SM) Throughput"), Some(91.5));
    assert_eq!(gemm.device_description, "device 0, compute capability 9.0");
    assert_eq!(trace.devices[0].device_name, "NVIDIA H100");
    let rules: Vec<[&str; 2]> = gemm
        .rule_names_and_messages
        .iter()
        .map(|(name, text)| [*name, *text].map(|it| trace.names.text_of_name(it)))
        .collect();
    assert_eq!(rules, [["SOLBottleneck", "compute is busy"]]);
    assert_eq!(metric_value_of_launch(&trace, other, "Duration"), Some(1.0));
    assert_eq!(trace.metadata["PRODUCT_VERSION"], "2025.1.0");
    assert!(
        trace.quality.interpretation_notes.is_empty() && trace.quality.unreadable_parts.is_empty()
    );
    let bound = diagnose_trace_in_memory(&trace)
        .findings
        .into_iter()
        .find(|it| it.rule_id == "kernel-bound");
    assert_eq!(bound.unwrap().finding_title, "gemm is compute-bound");
}

#[test]
fn a_truncated_report_is_read_up_to_its_last_whole_launch() {
    let whole = encode_ncu_report(
        "2025.1.0",
        &[encode_profiled_launch("a", 1.0), encode_profiled_launch("b", 2.0)],
    );
    let trace = write_and_read_trace(&whole[..whole.len() - 10]);
    assert_eq!(trace.profiled_launches.len(), 1);
    insta::assert_snapshot!(trace.quality.unreadable_parts[0], @"report after 1 results: a part of 166 bytes, 156 bytes before the end of the file");
    let cut = [4, 9, 40, 300].map(|length| {
        let message = refusal_message("cut.ncu-rep", &whole[..length]);
        format!("{length}: {}", reason_in_message(&message))
    });
    insta::assert_snapshot!(cut.join("\n"), @r"
    4: report after 0 results: the file ends before a header
    9: report after 0 results: a part of 2 bytes, 1 bytes before the end of the file
    40: report after 0 results: a part of 297 bytes, 26 bytes before the end of the file
    300: report after 0 results: a part of 297 bytes, 286 bytes before the end of the file
    ");
}

#[test]
fn a_report_of_a_newer_release_is_noted_and_read() {
    let trace =
        write_and_read_trace(&encode_ncu_report("2031.4.1", &[encode_profiled_launch("k", 5.0)]));
    assert_eq!(metric_value_of_launch(&trace, &trace.profiled_launches[0], "Duration"), Some(5.0));
    assert!(
        trace.quality.interpretation_notes[0].contains("2031.4.1"),
        "{:?}",
        trace.quality.interpretation_notes
    );
    insta::assert_debug_snapshot!(finding_titles(&diagnose_trace_in_memory(&trace).data_quality_findings), @r#"
    [
        "Nsight Compute 2031.4.1 wrote the report; its format is known up to 2026.3, and what is new is skipped",
    ]
    "#);
}

#[test]
fn other_content_is_not_a_report() {
    let other = refusal_message("r.ncu-rep", b"something else");
    insta::assert_snapshot!(shorten_paths_to_file_names(reason_in_message(&other)), @"it is not a report of Nsight Compute: its first bytes are not NVR; if ncu opens it, run: ncu --csv --page details --import FOLDER/r.ncu-rep > FOLDER/r.csv");
    assert!(refusal_message("r.ncu-rep", b"NVR\0").contains("before a header"));
}

/// Returns the path of a report file in the folder that `KERNELGATE_NCU_REPORTS` names; without the
/// variable the test prints that it is skipped.
fn ncu_report_file_or_skip(name: &str) -> Option<PathBuf> {
    let Some(folder) = std::env::var_os("KERNELGATE_NCU_REPORTS") else {
        eprintln!("skipped: KERNELGATE_NCU_REPORTS names no folder with full.ncu-rep and its CSV");
        return None;
    };
    Some(Path::new(&folder).join(name))
}

#[test]
fn a_recorded_report_agrees_with_the_csv_of_ncu() {
    let Some(path) = ncu_report_file_or_skip("full.ncu-rep") else { return };
    let native = read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap();
    let csv =
        read::open_trace_file(&path.with_file_name("full-details.csv"), &WantedTraceParts::ALL)
            .unwrap();
    assert_eq!(native.profiled_launches.len(), csv.profiled_launches.len());
    let mut compared = 0;
    for (ours, theirs) in native.profiled_launches.iter().zip(&csv.profiled_launches) {
        let names = [
            native.names.text_of_name(ours.kernel_name),
            csv.names.text_of_name(theirs.kernel_name),
        ];
        let [native_name, csv_name] = names.map(shortened_kernel_name_for_readers);
        assert_eq!(native_name, csv_name, "ncu prints casts in one of both");
        assert_eq!(
            (ours.shape, &ours.device_description),
            (theirs.shape, &theirs.device_description)
        );
        for (&name, metric) in &theirs.metrics {
            let (name, unit) = (csv.names.text_of_name(name), csv.names.text_of_name(metric.unit));
            let Some(value) = metric_value_of_launch(&native, ours, name) else { continue };
            if unit == "%" {
                assert!(
                    (value - metric.metric_value).abs() < 0.006,
                    "{name}: {value} {}",
                    metric.metric_value
                );
                compared += 1;
            }
        }
        assert!(!ours.rule_names_and_messages.is_empty());
        let samples: Vec<u64> = ours.lines.iter().map(|line| line.stalled_sample_count).collect();
        assert!(!samples.is_empty() && samples.is_sorted_by(|a, b| a >= b), "{samples:?}");
        assert!(native.names.text_of_name(ours.lines[0].source_file).ends_with("prog.cu"));
    }
    assert!(compared >= 10, "{compared} percentages");
}
