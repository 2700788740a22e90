//! Every reader of files that others may have written, with the use of an accepted file.

use std::path::Path;

use clap::Parser as _;
use kernelgate::attach::safetensors::SafeTensorsFile;
use kernelgate::display;
use kernelgate::protocol::{self, BenchRequestFile, BenchResponseFile, CuptiCaseRecording};
use kernelgate::record::file::{self, RecordFileType};
use kernelgate::record::resources::KernelResourcesFile;
use kernelgate::record::{
    BaselineFile, BenchProcessRun, CaseSummaryOfRun, ComparisonTrialsFile, MachineHardware,
    MeasurementOfRuns, OutputErrorsOfExecutable, criterion_store, tensors,
};
use kernelgate_cli::benches::{criterion, harness_kind, package};
use kernelgate_cli::bisect::search_state::SavedBisectionState;
use kernelgate_cli::fleet::submission::ClusterSubmission;
use kernelgate_cli::fleet::verification::VerificationShardRecord;
use kernelgate_cli::gate::calibration::{
    GateCalibration, recommend_thresholds, summarise_calibration,
};
use kernelgate_cli::gate::comparison_shard::{self, ComparisonShardRecord};
use kernelgate_cli::gate::rules::rules_file;
use kernelgate_cli::history::case_index::HistoryStoreIndex;
use kernelgate_cli::verbs::KernelgateCommandLine;
use kernelgate_cli::{report, verbs};
use kernelgate_cuda::compiler::{code, cubin};
use kernelgate_cuda::driver::launch::code_image::KernelImage;
use kernelgate_trace::diagnose::diagnose_trace_in_memory;
use kernelgate_trace::read::{self, WantedTraceParts};
use kernelgate_trace::stats::{self, StatsReport};

use crate::FuzzedReader;
use crate::mutate::FuzzInputSyntax::{self, ArbitraryBytes, Json, TextLines};

/// Reads a record file; asserts that an accepted record can be written, and is the same when it is
/// read again.
fn read_and_rewrite_record<T: RecordFileType + PartialEq>(path: &Path) -> Option<T> {
    let record: T = file::read_record(path).ok()?;
    let again = path.with_extension("again");
    file::write_record_atomically(&again, &record).expect("an accepted record can be written");
    assert!(file::read_record::<T>(&again).expect("a written record can be read") == record);
    Some(record)
}

fn fuzz_run_record(path: &Path, _: u64) -> bool {
    let Some(run) = read_and_rewrite_record::<BenchProcessRun>(path) else { return false };
    let runs = [run];
    display::runs::results_table_and_remarks_text(&runs, Some(100));
    report::costs::launch_costs_table_text(&runs, Some(100));
    let mut baseline = BaselineFile::empty_baseline_with_name("main");
    baseline.merge_run_replacing_other_code(&runs[0]);
    let _ = baseline.add_comparable_run(&runs[0]);
    assert_eq!(baseline.check_record_plausible(), Ok(()));
    for case in runs[0].cases.values() {
        assert_eq!(
            CaseSummaryOfRun::summarize_case_record(case)
                .round_to_significant_digits()
                .check_summary_plausible(),
            Ok(())
        );
    }
    let [run] = runs;
    let _ = MeasurementOfRuns::from_matching_runs(vec![run.clone(), run]);
    true
}

fn fuzz_trials_file(path: &Path, _: u64) -> bool {
    let Some(trials) = read_and_rewrite_record::<ComparisonTrialsFile>(path) else { return false };
    for trial in &trials.trials {
        assert!(std::time::Duration::from_secs_f64(trial.wall_s) < std::time::Duration::MAX);
    }
    true
}

fn fuzz_calibration_file(path: &Path, _: u64) -> bool {
    let Some(calibration) = read_and_rewrite_record::<GateCalibration>(path) else { return false };
    report::calibration::calibration_report_text(&calibration, Some(100));
    report::calibration::calibration_report_markdown(&calibration);
    summarise_calibration(&calibration);
    recommend_thresholds(&calibration);
    let mut twice = calibration.clone();
    let _ = twice.check_and_merge_calibration(calibration);
    true
}

fn fuzz_comparison_shard(path: &Path, _: u64) -> bool {
    let Some(shard) = read_and_rewrite_record::<ComparisonShardRecord>(path) else { return false };
    assert_eq!(shard.first_fact_that_prevents_merging(&shard), None);
    let comparison = comparison_shard::merge_comparison_shard_records(vec![shard], Vec::new())
        .expect("one shard makes a comparison");
    report::verdicts::verdict_report_text(&comparison, Some(100));
    comparison.exit_reason();
    true
}

fn fuzz_verification_shard(path: &Path, _: u64) -> bool {
    let Some(shard) = read_and_rewrite_record::<VerificationShardRecord>(path) else {
        return false;
    };
    assert_eq!(shard.first_fact_that_prevents_merging(&shard), None);
    true
}

fn fuzz_baseline_file(path: &Path, _: u64) -> bool {
    let Some(mut baseline) = read_and_rewrite_record::<BaselineFile>(path) else {
        return file::read_record_ignoring_checksum::<BaselineFile>(path).is_ok();
    };
    let run = BenchProcessRun::empty_run_starting_now(
        "fixture",
        "s",
        kernelgate::record::RunEnvironment::environment_of_process_on_cpu(),
        kernelgate::record::CommitAndChanges::default(),
    );
    let cases: Vec<String> = baseline.cases.keys().cloned().collect();
    baseline.runs_that_merge_would_replace(&run, cases.iter().map(String::as_str));
    baseline.merge_run_replacing_other_code(&run);
    true
}

fn fuzz_bench_response(path: &Path, number: u64) -> bool {
    let Some(response) = read_and_rewrite_record::<BenchResponseFile>(path) else { return false };
    let recording = |case: protocol::CaseProfileResponse| case.recording;
    if let protocol::ResponseToBenchAction::Profile(cases) = response.answer {
        for recording in cases.into_iter().filter_map(recording) {
            let path = path.with_extension("recording");
            file::write_record_atomically(&path, &*recording)
                .expect("an accepted recording can be written");
            fuzz_trace_file(&path, number);
        }
    }
    true
}

/// Reads a trace, sums it up, diagnoses it and writes it as a timeline. A mutated trace takes one
/// of the three ways, by its number.
fn fuzz_trace_file(path: &Path, number: u64) -> bool {
    let Ok(trace) = read::open_trace_file(path, &WantedTraceParts::ALL) else { return false };
    let takes = |way: u64| number == 0 || number % 3 == way;
    if takes(0) {
        for report in StatsReport::ALL_REPORTS {
            stats::make_table(&trace, report).to_terminal_text();
        }
    }
    if takes(1) {
        let diagnosis = diagnose_trace_in_memory(&trace);
        diagnosis.diagnosis_to_text();
        serde_json::to_string(&diagnosis.diagnosis_to_json()).unwrap();
    }
    if takes(2) {
        kernelgate_trace::export::write_perfetto_json(&trace, &mut std::io::sink()).unwrap();
    }
    true
}

/// Output of `kernelgate::peers`, as `report --peers` reads it.
fn fuzz_peer_times(path: &Path, _: u64) -> bool {
    verbs::read_peers(path).is_ok()
}

fn fuzz_rules_file(path: &Path, _: u64) -> bool {
    let Ok(rules) = rules_file::read_rules_file(path, "kernelgate.toml") else { return false };
    rules.threshold_limits_for_case("fixture/spin/n64/cpu/hot");
    rules.acceptances_of_case("fixture/spin/n64/cpu/hot");
    rules.report_effects(&["fixture/spin/n64/cpu/hot"], None).report_lines();
    true
}

/// Reads a mutated sample file of Criterion's store.
fn fuzz_criterion_sample(path: &Path, _: u64) -> bool {
    let store = path.with_extension("store");
    let folder = store.join("case/new");
    std::fs::create_dir_all(&folder).unwrap();
    let benchmark = r#"{"group_id":"g","full_id":"g/f","title":"g/f"}"#;
    std::fs::write(folder.join("benchmark.json"), benchmark).unwrap();
    std::fs::copy(path, folder.join("sample.json")).unwrap();
    let Ok(stored) = criterion_store::read_criterion_store(&store) else { return false };
    for case in stored.cases.values() {
        let launches = case.iterations_per_sample.clone();
        let samples = kernelgate::record::SamplesOfCase {
            launches_per_sample: launches,
            elapsed_per_sample_ns: case.sample_times.clone(),
            ..Default::default()
        };
        if samples.check_samples_plausible().is_ok() {
            CaseSummaryOfRun::summarize_case_record(&case.to_case_record(samples))
                .check_summary_plausible()
                .unwrap();
        }
    }
    !stored.cases.is_empty()
}

fn fuzz_safetensors_file(path: &Path, _: u64) -> bool {
    let Ok(tensors) = SafeTensorsFile::read_and_check(path) else { return false };
    let names: Vec<String> = tensors.tensor_names().map(str::to_owned).collect();
    for name in names {
        let _ = tensors.tensor_with_name_and_shape(&name, &[2, 2]);
    }
    true
}

/// Machine code: sections of kernels, their facts and hashes.
fn fuzz_machine_code(path: &Path, _: u64) -> bool {
    let bytes = std::fs::read(path).unwrap();
    let facts = cubin::resources_of_kernels_in_cubin(&bytes, "");
    let _ = (code::machine_code_hashes_of_cubin(&bytes), harness_kind::harness_kind_of_file(path));
    let symbols = facts.iter().flat_map(|facts| facts.keys());
    symbols.for_each(|symbol| drop(code::machine_code_of_kernel_in_image(&bytes, symbol)));
    let image = KernelImage::from_bytes("image", bytes);
    facts.is_ok() && image.is_ok()
}

/// The index of a history store: one that cannot be used is made anew.
fn fuzz_history_index(path: &Path, _: u64) -> bool {
    let Some(index) = HistoryStoreIndex::read_index_file(path) else { return false };
    assert!(index.write_index_file(&path.with_extension("again")));
    let _ = index.run_count_by_package();
    true
}

/// Output of executables in response to the version question.
fn fuzz_version_answer(path: &Path, _: u64) -> bool {
    let text = String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned();
    let _ = (criterion::parse_criterion_list(&text), package::is_in_a_cargo_package(path));
    protocol::parse_protocol_version_answer(&text).is_some()
}

/// Puts the mutated run into a session's folder, and lets the program's own verbs judge it against
/// a baseline of the same case.
fn fuzz_verbs_on_run_file(path: &Path, _: u64) -> bool {
    let folder = path.parent().unwrap().join("package");
    let session = folder.join("runs/s2");
    std::fs::create_dir_all(&session).unwrap();
    std::fs::copy(path, session.join("fixture.json")).unwrap();
    let baselines = folder.join("baselines");
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/baseline");
    // The baseline is copied to the folder of the device that the run names.
    let at = baselines.join("amd-epyc");
    std::fs::create_dir_all(&at).unwrap();
    std::fs::copy(committed.join("main.json"), at.join("main.json")).unwrap();
    let verb = |line: &str| {
        let places = ["--baselines", baselines.to_str().unwrap(), "--records"];
        let runs = folder.join("runs");
        let words = ["kernelgate"].into_iter().chain(line.split(' ')).chain(places);
        let cli =
            KernelgateCommandLine::try_parse_from(words.chain([runs.to_str().unwrap()])).unwrap();
        cli.run_verb()
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
pub const ALL_FUZZED_READERS: &[FuzzedReader] = &[
    fuzzed_reader("verbs", Json, 30, fuzz_verbs_on_run_file),
    fuzzed_reader("index", Json, 2_000, fuzz_history_index),
    fuzzed_reader("nsys", ArbitraryBytes, 3_000, fuzz_trace_file),
    fuzzed_reader("ncu_report", ArbitraryBytes, 12_000, fuzz_trace_file),
    fuzzed_reader("cubin", ArbitraryBytes, 12_000, fuzz_machine_code),
    fuzzed_reader("chrome", Json, 12_000, fuzz_trace_file),
    fuzzed_reader("recording", Json, 10_000, fuzz_trace_file),
    fuzzed_reader("rocprof", Json, 10_000, fuzz_trace_file),
    fuzzed_reader("ncu_csv", TextLines, 8_000, fuzz_trace_file),
    fuzzed_reader("calibration", Json, 12_000, fuzz_calibration_file),
    fuzzed_reader("comparison_shard", Json, 10_000, fuzz_comparison_shard),
    fuzzed_reader("verification_shard", Json, 20_000, fuzz_verification_shard),
    fuzzed_reader("baseline", Json, 25_000, fuzz_baseline_file),
    fuzzed_reader("run", Json, 40_000, fuzz_run_record),
    fuzzed_reader("response", Json, 40_000, fuzz_bench_response),
    fuzzed_reader("trials", Json, 60_000, fuzz_trials_file),
    fuzzed_reader("request", Json, 70_000, |path, _| {
        read_and_rewrite_record::<BenchRequestFile>(path).is_some()
    }),
    fuzzed_reader("numerics", Json, 50_000, |path, _| {
        read_and_rewrite_record::<OutputErrorsOfExecutable>(path).is_some()
    }),
    fuzzed_reader("resources", Json, 20_000, |path, _| {
        read_and_rewrite_record::<KernelResourcesFile>(path).is_some()
    }),
    fuzzed_reader("bisection", Json, 70_000, |path, _| {
        read_and_rewrite_record::<SavedBisectionState>(path).is_some()
    }),
    fuzzed_reader("case_recording", Json, 15_000, |path, _| {
        read_and_rewrite_record::<CuptiCaseRecording>(path).is_some()
    }),
    fuzzed_reader("machine", Json, 10_000, |path, _| {
        read_and_rewrite_record::<MachineHardware>(path).is_some()
    }),
    fuzzed_reader("submission", Json, 10_000, |path, _| {
        read_and_rewrite_record::<ClusterSubmission>(path).is_some()
    }),
    fuzzed_reader("peers", Json, 100_000, fuzz_peer_times),
    fuzzed_reader("rules", TextLines, 25_000, fuzz_rules_file),
    fuzzed_reader("criterion", Json, 80_000, fuzz_criterion_sample),
    fuzzed_reader("safetensors", ArbitraryBytes, 110_000, fuzz_safetensors_file),
    fuzzed_reader("tensors", ArbitraryBytes, 100_000, |path, _| {
        tensors::read_tensor_file(path).is_some()
    }),
    fuzzed_reader("printed", TextLines, 63_970, fuzz_version_answer),
];

const fn fuzzed_reader(
    name: &'static str,
    syntax: FuzzInputSyntax,
    inputs: u64,
    read: fn(&Path, u64) -> bool,
) -> FuzzedReader {
    FuzzedReader {
        corpus_folder_name: name,
        syntax,
        inputs_per_million: inputs,
        read_and_use_input: read,
    }
}
