//! Reports of Nsight Compute, written by the tests in its format, and recorded ones.

use std::path::{Path, PathBuf};

use crate::fixture::{file, reason, refused, titles, without_folders};
use kernelgate_trace::diagnose::{diagnose_trace_in_memory, shortened_kernel_name_for_readers};
use kernelgate_trace::model::Trace;
use kernelgate_trace::model::kernel_metrics::NcuProfiledLaunch;
use kernelgate_trace::read::{self, WantedTraceParts};

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
    bytes
}

/// A field with a whole number.
fn number(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

/// A field with a double.
fn double(field: u64, value: f64) -> Vec<u8> {
    [varint(field << 3 | 1), value.to_le_bytes().to_vec()].concat()
}

/// A field with a text or a message.
fn bytes(field: u64, value: impl AsRef<[u8]>) -> Vec<u8> {
    let value = value.as_ref();
    [varint(field << 3 | 2), varint(value.len() as u64), value.to_vec()].concat()
}

/// A part of the file behind its length.
fn part(message: &[u8]) -> Vec<u8> {
    [&u32::try_from(message.len()).unwrap().to_le_bytes(), message].concat()
}

const STRINGS: [&str; 6] = [
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "device__attribute_display_name",
    "device__attribute_compute_capability_major",
    "device__attribute_compute_capability_minor",
];

/// A launch with a duration in nanoseconds, and fields that nobody knows yet.
fn launch(name: &str, duration: f64) -> Vec<u8> {
    let dimensions = |x, y| [number(1, x), number(2, y), number(3, 1)].concat();
    let metric = |id, value: Vec<u8>| bytes(13, [number(1, id), bytes(2, value)].concat());
    let message = [bytes(1, "compute is busy"), number(2, 4)].concat();
    let rule =
        [bytes(1, "SOLBottleneck"), bytes(2, "Bottleneck"), bytes(3, bytes(1, bytes(1, message)))];
    [
        number(1, 7),
        bytes(5, name),
        bytes(10, dimensions(9, 32)),
        bytes(11, dimensions(128, 1)),
        metric(0, double(3, duration)),
        metric(1, double(3, 91.5)),
        metric(2, double(3, 40.0)),
        metric(3, bytes(1, "NVIDIA H100")),
        metric(4, number(4, 9)),
        metric(5, number(5, 0)),
        bytes(19, rule.concat()),
        bytes(77, "new"),
        number(78, 5),
    ]
    .concat()
}

fn report(version: &str, launches: &[Vec<u8>]) -> Vec<u8> {
    let strings: Vec<u8> = STRINGS.iter().flat_map(|text| bytes(1, text)).collect();
    let version = [bytes(1, "Nsight Compute"), bytes(2, version)].concat();
    let header = [
        number(2, launches.len() as u64),
        bytes(3, bytes(8, version)),
        bytes(4, strings),
        number(5, 0),
    ];
    let mut report = [b"NVR\0".to_vec(), part(&number(1, 2)), part(&header.concat())].concat();
    launches.iter().for_each(|launch| report.extend(part(launch)));
    report
}

fn read(content: &[u8]) -> Trace {
    let (_folder, path) = file("report.ncu-rep", content);
    read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap()
}

fn value(trace: &Trace, launch: &NcuProfiledLaunch, name: &str) -> Option<f64> {
    Some(launch.metrics.get(&trace.names.find_interned_text(name)?)?.value)
}

#[test]
fn a_report_has_launches_metrics_and_rules() {
    let trace = read(&report("2025.1.0", &[launch("_Z4gemmPf", 4608.0), launch("k", 1.0)]));
    let [gemm, other] = &trace.profiled[..] else { panic!("{} launches", trace.profiled.len()) };
    assert_eq!(trace.names.text_of_name(gemm.kernel), "gemm(float*)");
    assert_eq!((gemm.shape.grid, gemm.shape.block), ([9, 32, 1], [128, 1, 1]));
    assert_eq!(value(&trace, gemm, "Duration"), Some(4608.0));
    assert_eq!(value(&trace, gemm, "Compute (SM) Throughput"), Some(91.5));
    assert_eq!(gemm.device, "device 0, compute capability 9.0");
    assert_eq!(trace.devices[0].name, "NVIDIA H100");
    let rules: Vec<[&str; 2]> = gemm
        .rules
        .iter()
        .map(|(name, text)| [*name, *text].map(|it| trace.names.text_of_name(it)))
        .collect();
    assert_eq!(rules, [["SOLBottleneck", "compute is busy"]]);
    assert_eq!(value(&trace, other, "Duration"), Some(1.0));
    assert_eq!(trace.metadata["PRODUCT_VERSION"], "2025.1.0");
    assert!(trace.quality.notes.is_empty() && trace.quality.unreadable.is_empty());
    let bound =
        diagnose_trace_in_memory(&trace).findings.into_iter().find(|it| it.id == "kernel-bound");
    assert_eq!(bound.unwrap().title, "gemm is compute-bound");
}

#[test]
fn a_truncated_report_is_read_up_to_its_last_whole_launch() {
    let whole = report("2025.1.0", &[launch("a", 1.0), launch("b", 2.0)]);
    let trace = read(&whole[..whole.len() - 10]);
    assert_eq!(trace.profiled.len(), 1);
    insta::assert_snapshot!(trace.quality.unreadable[0], @"report after 1 results: a part of 166 bytes, 156 bytes before the end of the file");
    let cut = [4, 9, 40, 300].map(|length| {
        let message = refused("cut.ncu-rep", &whole[..length]);
        format!("{length}: {}", reason(&message))
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
    let trace = read(&report("2031.4.1", &[launch("k", 5.0)]));
    assert_eq!(value(&trace, &trace.profiled[0], "Duration"), Some(5.0));
    assert!(trace.quality.notes[0].contains("2031.4.1"), "{:?}", trace.quality.notes);
    insta::assert_debug_snapshot!(titles(&diagnose_trace_in_memory(&trace).quality), @r#"
    [
        "Nsight Compute 2031.4.1 wrote the report; its format is known up to 2026.3, and what is new is skipped",
    ]
    "#);
}

#[test]
fn other_content_is_not_a_report() {
    let other = refused("r.ncu-rep", b"something else");
    insta::assert_snapshot!(without_folders(reason(&other)), @"it is not a report of Nsight Compute: its first bytes are not NVR; if ncu opens it, run: ncu --csv --page details --import FOLDER/r.ncu-rep > FOLDER/r.csv");
    assert!(refused("r.ncu-rep", b"NVR\0").contains("before a header"));
}

/// A file of the folder that this variable names; without it the test prints that it is skipped.
fn recorded(name: &str) -> Option<PathBuf> {
    let Some(folder) = std::env::var_os("KERNELGATE_NCU_REPORTS") else {
        eprintln!("skipped: KERNELGATE_NCU_REPORTS names no folder with full.ncu-rep and its CSV");
        return None;
    };
    Some(Path::new(&folder).join(name))
}

#[test]
fn a_recorded_report_agrees_with_the_csv_of_ncu() {
    let Some(path) = recorded("full.ncu-rep") else { return };
    let native = read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap();
    let csv =
        read::open_trace_file(&path.with_file_name("full-details.csv"), &WantedTraceParts::ALL)
            .unwrap();
    assert_eq!(native.profiled.len(), csv.profiled.len());
    let mut compared = 0;
    for (ours, theirs) in native.profiled.iter().zip(&csv.profiled) {
        let names = [native.names.text_of_name(ours.kernel), csv.names.text_of_name(theirs.kernel)];
        let [native_name, csv_name] = names.map(shortened_kernel_name_for_readers);
        assert_eq!(native_name, csv_name, "ncu prints casts in one of both");
        assert_eq!((ours.shape, &ours.device), (theirs.shape, &theirs.device));
        for (&name, metric) in &theirs.metrics {
            let (name, unit) = (csv.names.text_of_name(name), csv.names.text_of_name(metric.unit));
            let Some(value) = value(&native, ours, name) else { continue };
            if unit == "%" {
                assert!((value - metric.value).abs() < 0.006, "{name}: {value} {}", metric.value);
                compared += 1;
            }
        }
        assert!(!ours.rules.is_empty());
        let samples: Vec<u64> = ours.lines.iter().map(|line| line.samples).collect();
        assert!(!samples.is_empty() && samples.is_sorted_by(|a, b| a >= b), "{samples:?}");
        assert!(native.names.text_of_name(ours.lines[0].file).ends_with("prog.cu"));
    }
    assert!(compared >= 10, "{compared} percentages");
}
