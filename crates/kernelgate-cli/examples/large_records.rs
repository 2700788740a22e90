//! Example program that makes record files with many cases, then reads or merges them and prints
//! the time and the process's peak memory.
//!
//! ```text
//! cargo run --release --example large_records -- make DIR CASES RUNS SAMPLES
//! cargo run --release --example large_records -- read DIR/baselines/DEVICE/main.json
//! cargo run --release --example large_records -- shards DIR SHARDS CASES SAMPLES
//! cargo run --release --example large_records -- comparisons DIR SHARD SHARDS CASES BLOCKS
//! cargo run --release --example large_records -- merge DIR
//! ```
//!
//! `make` lays out a package: After `make`, `kernelgate gate --baseline main` in `DIR` judges the
//! last run, and `kernelgate report --runs DIR/target/kernelgate/runs` draws all runs. `shards`
//! writes a run record with CASES cases for each shard; `comparisons` writes copies of a shard of
//! `kernelgate compare --shard`; `merge` merges the files as `kernelgate merge` does.

#![allow(clippy::disallowed_methods, reason = "arguments of an example")]

use std::path::Path;
use std::time::Instant;

use kernelgate::measure::limits::ShortestLaunchTime;
use kernelgate::record::{
    BaselineFile, BenchProcessRun, CaseRecordWithSamples, CommitAndChanges, RecordFoldersOfPackage,
    RunEnvironment, ShardOfWork, file,
};
use kernelgate_cli::fleet::counted_shards::MaxAnchorRateDifference;
use kernelgate_cli::fleet::merge;
use kernelgate_cli::gate::calibration::CaseBlocksAsColumns;
use kernelgate_cli::gate::comparison_shard::{self, ComparisonShardRecord};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse().expect("a number");
    match words[..] {
        ["make", folder, cases, runs, samples] => {
            write_synthetic_baseline_and_run(
                Path::new(folder),
                number(cases),
                number(runs),
                number(samples),
            );
        }
        ["read", path] => time_read_of_record(Path::new(path)),
        ["shards", folder, shards, cases, samples] => {
            write_synthetic_run_shards(
                Path::new(folder),
                number(shards),
                number(cases),
                number(samples),
            );
        }
        ["comparisons", folder, shard, shards, cases, blocks] => {
            let size = SyntheticComparisonSize {
                shard_count: number(shards),
                cases_per_shard: number(cases),
                blocks_per_case: number(blocks),
            };
            write_synthetic_comparison_shards(Path::new(folder), Path::new(shard), &size);
        }
        ["merge", folder] => time_merge_of_shard_records(Path::new(folder)),
        _ => eprintln!("make, read, shards, comparisons or merge, as in the head of this file"),
    }
}

/// Generates a run record with synthetic case times, which differ by less than one per cent between
/// sessions.
fn synthetic_run(session: usize, cases: usize, samples: usize) -> BenchProcessRun {
    let case = |index: usize| {
        let time = |sample: usize| {
            1e6 * (1.0 + (1.0 + (session * 7919 + index * 104_729 + sample) as f64).sin() / 300.0)
        };
        let mut case =
            CaseRecordWithSamples::example_with_sample_times((0..samples).map(time).collect());
        case.samples.sm_clock_per_sample_mhz =
            (0..samples).map(|sample| 1700.0 + time(sample) / 7e4).collect();
        // The synthetic cases form problems over two axes; each problem has five implementations,
        // hot and cold.
        let (row, cache) = (index % 5, ["hot", "cold"][index / 5 % 2]);
        let (s, d) = (512 << (index / 10 % 6), 32 << (index / 60 % 4));
        case.workload = format!("family{}/operation", index / 240);
        (case.implementation, case.cache_state) = (format!("cuda/row{row}"), cache.to_owned());
        case.limit = Some(ShortestLaunchTime {
            shortest_launch_ns: 5e5,
            deciding_ceiling: "memory".to_owned(),
        });
        (case.verification.max_error, case.work.min_read_bytes) = (1e-4, 1 << 30);
        case.work.flops_by_unit_and_dtype.insert("matmul bf16".to_owned(), 1 << 40);
        (format!("{}/s{s}_d{d}_causal_bf16/cuda/row{row}/{cache}", case.workload), case)
    };
    BenchProcessRun {
        ended_normally: true,
        cases: (0..cases).map(case).collect(),
        ..BenchProcessRun::empty_run_starting_now(
            "large",
            &format!("s{session}"),
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        )
    }
}

fn write_synthetic_baseline_and_run(folder: &Path, cases: usize, runs: usize, samples: usize) {
    let store = RecordFoldersOfPackage::for_package_root(folder, &folder.join("target"));
    let mut baseline = BaselineFile::empty_baseline_with_name("main");
    for session in 1..=runs {
        let run = synthetic_run(session, cases, samples);
        baseline.add_comparable_run(&run).expect("runs of one environment");
        let recorded = store.path_of_run_record(&run.session_name, &run.bench);
        file::write_record_atomically(&recorded, &run).expect("a folder that can be written");
    }
    let judged = synthetic_run(runs + 1, cases, samples);
    let of_device = store
        .path_of_baseline(&judged.environment.baseline_folder_of_device_and_count(), "main")
        .expect("a plain name");
    let recorded = store.path_of_run_record(&judged.session_name, &judged.bench);
    file::write_record_atomically(&of_device, &baseline).expect("a folder that can be written");
    file::write_record_atomically(&recorded, &judged).expect("a folder that can be written");
    std::fs::write(folder.join("Cargo.toml"), "[package]\nname = \"large\"\n").expect("written");
    for path in [of_device, recorded] {
        let bytes = std::fs::metadata(&path).map_or(0, |facts| facts.len());
        println!("{:.1} MB {}", bytes as f64 / 1e6, path.display());
    }
}

fn write_synthetic_run_shards(folder: &Path, shards: usize, cases: usize, samples: usize) {
    for index in 1..=shards {
        let mut run = synthetic_run(index, cases, samples);
        // Every synthetic shard gets problems of its own, because two shards of a run may not
        // contain the same case.
        run.cases = std::mem::take(&mut run.cases)
            .into_iter()
            .map(|(id, case)| (id.replacen("/s", &format!("/shard{index}_s"), 1), case))
            .collect();
        let shard = ShardOfWork { index_from_one: index as u32, shard_count: shards as u32 };
        run.shard = Some(shard);
        let path = folder.join(format!("{}.json", run.bench_name_with_shard()));
        file::write_record_atomically(&path, &run).expect("a folder that can be written");
    }
}

/// Numbers of shards, of cases in each shard, and of blocks of each case in a synthetic comparison.
struct SyntheticComparisonSize {
    shard_count: usize,
    cases_per_shard: usize,
    blocks_per_case: usize,
}

/// Writes synthetic shards of a comparison, copied from a recorded shard under other case ids; in
/// one case of a hundred the head is 5 % slower.
fn write_synthetic_comparison_shards(
    folder: &Path,
    recorded: &Path,
    size: &SyntheticComparisonSize,
) {
    let template: ComparisonShardRecord =
        file::read_record(recorded).expect("a shard of a comparison");
    let (case, series) = template.first_round_times.first_key_value().expect("a case with times");
    let limits = template.limits_by_case[case];
    let mut recorded = series.to_trial_blocks();
    recorded.truncate(2);
    let blocks = |slower: f64| -> CaseBlocksAsColumns {
        let mut blocks: Vec<_> =
            recorded.iter().cycle().take(size.blocks_per_case).cloned().collect();
        for timing in blocks.iter_mut().flat_map(|block| &mut block.head) {
            timing.median_time_ns *= slower;
        }
        CaseBlocksAsColumns::from_trial_blocks(&blocks)
    };
    let (equal, slower) = (blocks(1.0), blocks(1.05));
    for index in 1..=size.shard_count {
        let mut shard = template.clone();
        (shard.shard, shard.cases_of_all_shards) = (
            ShardOfWork { index_from_one: index as u32, shard_count: size.shard_count as u32 },
            size.shard_count * size.cases_per_shard,
        );
        (shard.limits_by_case, shard.first_round_times, shard.second_round_times) =
            Default::default();
        for number in 0..size.cases_per_shard {
            let id = format!("{case}/{index}/{number}");
            let is_slower = (index * size.cases_per_shard + number).is_multiple_of(100);
            shard.limits_by_case.insert(id.clone(), limits);
            if is_slower {
                shard.second_round_times.insert(id.clone(), slower.clone());
            }
            shard
                .first_round_times
                .insert(id, if is_slower { slower.clone() } else { equal.clone() });
        }
        let path = folder.join(format!("{}.json", shard.shard.label_for_file_name()));
        file::write_record_atomically(&path, &shard).expect("a folder that can be written");
    }
}

fn time_merge_of_shard_records(folder: &Path) {
    let started = Instant::now();
    let files = merge::collect_record_files(&[folder.to_owned()]).expect("a folder of shards");
    let (shards, cases) = match merge::common_kind_of_records(&files).expect("records") {
        merge::MergedRecordKind::BuildComparisons => {
            let merged = merge::merge_comparison_shards(&files, MaxAnchorRateDifference::default())
                .expect("shards of one plan");
            let account = merged.merge_account;
            let comparison = comparison_shard::merge_comparison_shard_records(
                merged.shards,
                account.missing_shards,
            );
            let cases = comparison.map_or(0, |comparison| comparison.judged_cases.len());
            (account.merged_shards.len(), cases)
        }
        _ => {
            let merged = merge::merge_run_shards(&files, MaxAnchorRateDifference::default())
                .expect("shards of one plan");
            merge::write_merged_runs_into_folder(&folder.with_extension("merged"), &merged.runs)
                .expect("written");
            let cases = merged.runs.iter().map(|piece| piece.record.cases.len()).sum();
            (merged.merge_account.merged_shards.len(), cases)
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{shards} shards, {cases} cases in {seconds:.2} s, peak {}",
        peak_memory_of_this_process()
    );
}

fn time_read_of_record(path: &Path) {
    let started = Instant::now();
    let cases = match file::read_record::<BaselineFile>(path) {
        Ok(baseline) => baseline.cases.len(),
        Err(_) => {
            file::read_record::<BenchProcessRun>(path).expect("a baseline or a run").cases.len()
        }
    };
    println!(
        "{cases} cases in {:.2} s, peak {}",
        started.elapsed().as_secs_f64(),
        peak_memory_of_this_process()
    );
}

/// Peak resident memory of this process, as text from `VmHWM` of Linux's `/proc/self/status`.
fn peak_memory_of_this_process() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or_else(|| "unknown".to_owned(), |value| value.trim().to_owned())
}
