//! Every reader of files that others may have written, with the use of an accepted file.

use std::path::Path;

use clap::Parser as _;
use kernelgate::attach::safetensors::SafeTensorsFile;
use kernelgate::display;
use kernelgate::protocol::{self, BenchRequest, BenchResponse, CaseRecording};
use kernelgate::record::file::{self, RecordType};
use kernelgate::record::resources::ResourceRecord;
use kernelgate::record::{
    Baseline, CaseRun, ComparisonTrials, MachineFacts, Measurement, Numerics, ProcessRun,
    criterion_store, tensors,
};
use kernelgate_cli::benches::{criterion, harness_kind, package};
use kernelgate_cli::bisect::search_state::BisectionState;
use kernelgate_cli::fleet::submission::JobSubmission;
use kernelgate_cli::fleet::verification::VerificationShard;
use kernelgate_cli::gate::calibration::{Calibration, recommend, summarise_calibration};
use kernelgate_cli::gate::comparison_shard::{self, ComparisonShard};
use kernelgate_cli::gate::rules::rules_file;
use kernelgate_cli::history::case_index::HistoryIndex;
use kernelgate_cli::verbs::CliArguments;
use kernelgate_cli::{report, verbs};
use kernelgate_cuda::compiler::{code, cubin};
use kernelgate_cuda::driver::launch::code_image::KernelImage;
use kernelgate_trace::diagnose::diagnose;
use kernelgate_trace::read::{self, WantedTraceParts};
use kernelgate_trace::stats::{self, StatsReport};

use crate::Reader;
use crate::mutate::Syntax::{self, Bytes, Json, Lines};

/// Reads a record; one that is accepted can be written, and is then the same.
fn record<T: RecordType + PartialEq>(path: &Path) -> Option<T> {
    let record: T = file::read(path).ok()?;
    let again = path.with_extension("again");
    file::write(&again, &record).expect("an accepted record can be written");
    assert!(file::read::<T>(&again).expect("a written record can be read") == record);
    Some(record)
}

fn run(path: &Path, _: u64) -> bool {
    let Some(run) = record::<ProcessRun>(path) else { return false };
    let runs = [run];
    display::runs::results_text(&runs, Some(100));
    report::costs::costs_text(&runs, Some(100));
    let mut baseline = Baseline::new("main");
    baseline.merge_run(&runs[0]);
    let _ = baseline.add(&runs[0]);
    assert_eq!(baseline.validate(), Ok(()));
    for case in runs[0].cases.values() {
        assert_eq!(CaseRun::from_record(case).round_to_significant_digits().validate(), Ok(()));
    }
    let [run] = runs;
    let _ = Measurement::from_runs(vec![run.clone(), run]);
    true
}

fn trials(path: &Path, _: u64) -> bool {
    let Some(trials) = record::<ComparisonTrials>(path) else { return false };
    for trial in &trials.trials {
        assert!(std::time::Duration::from_secs_f64(trial.wall_s) < std::time::Duration::MAX);
    }
    true
}

fn calibration(path: &Path, _: u64) -> bool {
    let Some(calibration) = record::<Calibration>(path) else { return false };
    report::calibration::text(&calibration, Some(100));
    report::calibration::markdown(&calibration);
    summarise_calibration(&calibration);
    recommend(&calibration);
    let mut twice = calibration.clone();
    let _ = twice.merge(calibration);
    true
}

fn comparison_shard(path: &Path, _: u64) -> bool {
    let Some(shard) = record::<ComparisonShard>(path) else { return false };
    assert_eq!(shard.mismatch(&shard), None);
    let comparison =
        comparison_shard::merge(vec![shard], Vec::new()).expect("one shard makes a comparison");
    report::verdicts::text(&comparison, Some(100));
    comparison.exit();
    true
}

fn verification_shard(path: &Path, _: u64) -> bool {
    let Some(shard) = record::<VerificationShard>(path) else { return false };
    assert_eq!(shard.mismatch(&shard), None);
    true
}

fn baseline(path: &Path, _: u64) -> bool {
    let Some(mut baseline) = record::<Baseline>(path) else {
        return file::read_without_checksum::<Baseline>(path).is_ok();
    };
    let run = ProcessRun::start_now(
        "fixture",
        "s",
        kernelgate::record::Environment::cpu(),
        kernelgate::record::Provenance::default(),
    );
    let cases: Vec<String> = baseline.cases.keys().cloned().collect();
    baseline.runs_replaced_by(&run, cases.iter().map(String::as_str));
    baseline.merge_run(&run);
    true
}

fn response(path: &Path, number: u64) -> bool {
    let Some(response) = record::<BenchResponse>(path) else { return false };
    let recording = |case: protocol::ProfiledCase| case.recording;
    if let protocol::BenchResponseBody::Profile(cases) = response.answer {
        for recording in cases.into_iter().filter_map(recording) {
            let path = path.with_extension("recording");
            file::write(&path, &*recording).expect("an accepted recording can be written");
            trace(&path, number);
        }
    }
    true
}

/// Reads a trace, sums it up, diagnoses it and writes it as a timeline. A mutated trace takes one
/// of the three ways, by its number.
fn trace(path: &Path, number: u64) -> bool {
    let Ok(trace) = read::open_trace_file(path, &WantedTraceParts::ALL) else { return false };
    let takes = |way: u64| number == 0 || number % 3 == way;
    if takes(0) {
        for report in StatsReport::ALL_REPORTS {
            stats::make_table(&trace, report).to_text();
        }
    }
    if takes(1) {
        let diagnosis = diagnose(&trace);
        diagnosis.to_text();
        serde_json::to_string(&diagnosis.to_json()).unwrap();
    }
    if takes(2) {
        kernelgate_trace::export::write_perfetto(&trace, &mut std::io::sink()).unwrap();
    }
    true
}

/// Output of `kernelgate::peers`, as `report --peers` reads it.
fn peers(path: &Path, _: u64) -> bool {
    verbs::read_peers(path).is_ok()
}

fn rules(path: &Path, _: u64) -> bool {
    let Ok(rules) = rules_file::read(path, "kernelgate.toml") else { return false };
    rules.limits("fixture/spin/n64/cpu/hot");
    rules.acceptances_for("fixture/spin/n64/cpu/hot");
    rules.report(&["fixture/spin/n64/cpu/hot"], None).lines();
    true
}

/// A sample of Criterion's store.
fn criterion_sample(path: &Path, _: u64) -> bool {
    let store = path.with_extension("store");
    let folder = store.join("case/new");
    std::fs::create_dir_all(&folder).unwrap();
    let benchmark = r#"{"group_id":"g","full_id":"g/f","title":"g/f"}"#;
    std::fs::write(folder.join("benchmark.json"), benchmark).unwrap();
    std::fs::copy(path, folder.join("sample.json")).unwrap();
    let Ok(stored) = criterion_store::read(&store) else { return false };
    for case in stored.cases.values() {
        let launches = case.iterations.clone();
        let samples = kernelgate::record::CaseSamples {
            launches,
            elapsed_ns: case.times.clone(),
            ..Default::default()
        };
        if samples.validate().is_ok() {
            CaseRun::from_record(&case.record(samples)).validate().unwrap();
        }
    }
    !stored.cases.is_empty()
}

fn safetensors(path: &Path, _: u64) -> bool {
    let Ok(tensors) = SafeTensorsFile::read(path) else { return false };
    let names: Vec<String> = tensors.names().map(str::to_owned).collect();
    for name in names {
        let _ = tensors.tensor(&name, &[2, 2]);
    }
    true
}

/// Machine code: sections of kernels, their facts and hashes.
fn machine_code(path: &Path, _: u64) -> bool {
    let bytes = std::fs::read(path).unwrap();
    let facts = cubin::kernel_facts(&bytes, "");
    let _ = (code::machine_code_hashes(&bytes), harness_kind::harness_kind_of_file(path));
    let symbols = facts.iter().flat_map(|facts| facts.keys());
    symbols.for_each(|symbol| drop(code::machine_code_in_image(&bytes, symbol)));
    let image = KernelImage::from_bytes("image", bytes);
    facts.is_ok() && image.is_ok()
}

/// The index of a history store: one that cannot be used is made anew.
fn index(path: &Path, _: u64) -> bool {
    let Some(index) = HistoryIndex::read(path) else { return false };
    assert!(index.write(&path.with_extension("again")));
    let _ = index.packages();
    true
}

/// Output of executables in response to the version question.
fn printed(path: &Path, _: u64) -> bool {
    let text = String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    let _ = (criterion::parse_criterion_list(&text), package::has_manifest(path));
    protocol::parse_version_answer(&text).is_some()
}

/// A session's folder with this run in it, judged against a baseline of the same case, by the
/// program's own verbs.
fn verbs_on_a_run(path: &Path, _: u64) -> bool {
    let folder = path.parent().unwrap().join("package");
    let session = folder.join("runs/s2");
    std::fs::create_dir_all(&session).unwrap();
    std::fs::copy(path, session.join("fixture.json")).unwrap();
    let baselines = folder.join("baselines");
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/baseline");
    // The folder of the device that the run names.
    let at = baselines.join("amd-epyc");
    std::fs::create_dir_all(&at).unwrap();
    std::fs::copy(committed.join("main.json"), at.join("main.json")).unwrap();
    let verb = |line: &str| {
        let places = ["--baselines", baselines.to_str().unwrap(), "--records"];
        let runs = folder.join("runs");
        let words = ["kernelgate"].into_iter().chain(line.split(' ')).chain(places);
        let cli = CliArguments::try_parse_from(words.chain([runs.to_str().unwrap()])).unwrap();
        cli.run()
    };
    let mut accepted = false;
    for line in [
        "runs",
        "runs --format bmf",
        "gate --baseline main",
        "gate --baseline main --format markdown",
        "gate --baseline main --format junit",
    ] {
        let done = verb(line).is_ok();
        accepted |= done && line.starts_with("gate");
    }
    accepted
}

/// Every reader, the slow ones first, with its share of a million inputs: fewer of those that take
/// long.
pub const READERS: &[Reader] = &[
    reader("verbs", Json, 30, verbs_on_a_run),
    reader("index", Json, 2_000, index),
    reader("nsys", Bytes, 3_000, trace),
    reader("ncu_report", Bytes, 12_000, trace),
    reader("cubin", Bytes, 12_000, machine_code),
    reader("chrome", Json, 12_000, trace),
    reader("recording", Json, 10_000, trace),
    reader("rocprof", Json, 10_000, trace),
    reader("ncu_csv", Lines, 8_000, trace),
    reader("calibration", Json, 12_000, calibration),
    reader("comparison_shard", Json, 10_000, comparison_shard),
    reader("verification_shard", Json, 20_000, verification_shard),
    reader("baseline", Json, 25_000, baseline),
    reader("run", Json, 40_000, run),
    reader("response", Json, 40_000, response),
    reader("trials", Json, 60_000, trials),
    reader("request", Json, 70_000, |path, _| record::<BenchRequest>(path).is_some()),
    reader("numerics", Json, 50_000, |path, _| record::<Numerics>(path).is_some()),
    reader("resources", Json, 20_000, |path, _| record::<ResourceRecord>(path).is_some()),
    reader("bisection", Json, 70_000, |path, _| record::<BisectionState>(path).is_some()),
    reader("case_recording", Json, 15_000, |path, _| record::<CaseRecording>(path).is_some()),
    reader("machine", Json, 10_000, |path, _| record::<MachineFacts>(path).is_some()),
    reader("submission", Json, 10_000, |path, _| record::<JobSubmission>(path).is_some()),
    reader("peers", Json, 100_000, peers),
    reader("rules", Lines, 25_000, rules),
    reader("criterion", Json, 80_000, criterion_sample),
    reader("safetensors", Bytes, 110_000, safetensors),
    reader("tensors", Bytes, 100_000, |path, _| tensors::read(path).is_some()),
    reader("printed", Lines, 63_970, printed),
];

const fn reader(
    name: &'static str,
    syntax: Syntax,
    inputs: u64,
    read: fn(&Path, u64) -> bool,
) -> Reader {
    Reader { name, syntax, inputs, read }
}
