//! Measures the cost of large record files: makes a baseline and a run of many cases, and reads
//! one, with the time it took and the peak of the process' memory.
//!
//! ```text
//! cargo run --release --example large_records -- make DIR CASES RUNS SAMPLES
//! cargo run --release --example large_records -- read DIR/baselines/DEVICE/main.json
//! cargo run --release --example large_records -- shards DIR SHARDS CASES SAMPLES
//! cargo run --release --example large_records -- comparisons DIR SHARD SHARDS CASES BLOCKS
//! cargo run --release --example large_records -- merge DIR
//! ```
//!
//! `make` lays out a package: Then `kernelgate gate --baseline main` in `DIR` judges the last run,
//! and `kernelgate report --runs DIR/target/kernelgate/runs` draws all runs. `shards` writes one
//! run of so many cases a shard, `comparisons` as many cases and blocks from the record of one
//! shard, which `kernelgate compare --shard` wrote; `merge` puts either together as `kernelgate
//! merge` does.

#![allow(clippy::disallowed_methods, reason = "arguments of an example")]

use std::path::Path;
use std::time::Instant;

use kernelgate::measure::limits::TimeLimit;
use kernelgate::record::{
    Baseline, BaselineStore, CaseRecord, Environment, ProcessRun, Provenance, Shard, file,
};
use kernelgate_cli::fleet::counted_shards::AnchorTolerance;
use kernelgate_cli::fleet::merge;
use kernelgate_cli::gate::calibration::BlockSeries;
use kernelgate_cli::gate::comparison_shard::{self, ComparisonShard};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse().expect("a number");
    match words[..] {
        ["make", folder, cases, runs, samples] => {
            make_records(Path::new(folder), number(cases), number(runs), number(samples));
        }
        ["read", path] => read_and_time(Path::new(path)),
        ["shards", folder, shards, cases, samples] => {
            make_shards(Path::new(folder), number(shards), number(cases), number(samples));
        }
        ["comparisons", folder, shard, shards, cases, blocks] => {
            let size = RecordsSize {
                shards: number(shards),
                cases: number(cases),
                blocks: number(blocks),
            };
            make_comparisons(Path::new(folder), Path::new(shard), &size);
        }
        ["merge", folder] => merge_made_records(Path::new(folder)),
        _ => eprintln!("make, read, shards, comparisons or merge, as in the head of this file"),
    }
}

/// Makes a run record whose times differ a little from those of all other runs.
fn run(session: usize, cases: usize, samples: usize) -> ProcessRun {
    let case = |index: usize| {
        let time = |sample: usize| {
            1e6 * (1.0 + (1.0 + (session * 7919 + index * 104_729 + sample) as f64).sin() / 300.0)
        };
        let mut case = CaseRecord::untimed_samples((0..samples).map(time).collect());
        case.samples.clock_mhz = (0..samples).map(|sample| 1700.0 + time(sample) / 7e4).collect();
        // Five implementations of each problem, hot and cold; problems over two axes.
        let (row, cache) = (index % 5, ["hot", "cold"][index / 5 % 2]);
        let (s, d) = (512 << (index / 10 % 6), 32 << (index / 60 % 4));
        case.workload = format!("family{}/operation", index / 240);
        (case.implementation, case.cache) = (format!("cuda/row{row}"), cache.to_owned());
        case.limit = Some(TimeLimit { time_ns: 5e5, by: "memory".to_owned() });
        (case.verification.max_error, case.work.read_bytes) = (1e-4, 1 << 30);
        case.work.flops.insert("matmul bf16".to_owned(), 1 << 40);
        (format!("{}/s{s}_d{d}_causal_bf16/cuda/row{row}/{cache}", case.workload), case)
    };
    ProcessRun {
        complete: true,
        cases: (0..cases).map(case).collect(),
        ..ProcessRun::start_now(
            "large",
            &format!("s{session}"),
            Environment::cpu(),
            Provenance::default(),
        )
    }
}

fn make_records(folder: &Path, cases: usize, runs: usize, samples: usize) {
    let store = BaselineStore::at(folder, &folder.join("target"));
    let mut baseline = Baseline::new("main");
    for session in 1..=runs {
        let run = run(session, cases, samples);
        baseline.add(&run).expect("runs of one environment");
        let recorded = store.run_record_path(&run.session, &run.bench);
        file::write(&recorded, &run).expect("a folder that can be written");
    }
    let judged = run(runs + 1, cases, samples);
    let of_device = store
        .baseline_path(&judged.environment.baseline_folder_name(), "main")
        .expect("a plain name");
    let recorded = store.run_record_path(&judged.session, &judged.bench);
    file::write(&of_device, &baseline).expect("a folder that can be written");
    file::write(&recorded, &judged).expect("a folder that can be written");
    std::fs::write(folder.join("Cargo.toml"), "[package]\nname = \"large\"\n").expect("written");
    for path in [of_device, recorded] {
        let bytes = std::fs::metadata(&path).map_or(0, |facts| facts.len());
        println!("{:.1} MB {}", bytes as f64 / 1e6, path.display());
    }
}

fn make_shards(folder: &Path, shards: usize, cases: usize, samples: usize) {
    for index in 1..=shards {
        let mut run = run(index, cases, samples);
        // Every shard gets its own problems.
        run.cases = std::mem::take(&mut run.cases)
            .into_iter()
            .map(|(id, case)| (id.replacen("/s", &format!("/shard{index}_s"), 1), case))
            .collect();
        let shard = Shard { index: index as u32, count: shards as u32 };
        run.shard = Some(shard);
        let path = folder.join(format!("{}.json", run.process_name_of_run()));
        file::write(&path, &run).expect("a folder that can be written");
    }
}

/// Numbers of cases and blocks of a generated comparison.
struct RecordsSize {
    shards: usize,
    cases: usize,
    blocks: usize,
}

/// Shards like a recorded one, with other cases; one case in a hundred has a slower head.
fn make_comparisons(folder: &Path, recorded: &Path, size: &RecordsSize) {
    let template: ComparisonShard = file::read(recorded).expect("a shard of a comparison");
    let (case, series) = template.first.first_key_value().expect("a case with times");
    let limits = template.limits[case];
    let mut recorded = series.blocks();
    recorded.truncate(2);
    let blocks = |slower: f64| -> BlockSeries {
        let mut blocks: Vec<_> = recorded.iter().cycle().take(size.blocks).cloned().collect();
        for timing in blocks.iter_mut().flat_map(|block| &mut block.head) {
            timing.time_ns *= slower;
        }
        BlockSeries::from_blocks(&blocks)
    };
    let (equal, slower) = (blocks(1.0), blocks(1.05));
    for index in 1..=size.shards {
        let mut shard = template.clone();
        (shard.shard, shard.planned) =
            (Shard { index: index as u32, count: size.shards as u32 }, size.shards * size.cases);
        (shard.limits, shard.first, shard.second) = Default::default();
        for number in 0..size.cases {
            let id = format!("{case}/{index}/{number}");
            let is_slower = (index * size.cases + number).is_multiple_of(100);
            shard.limits.insert(id.clone(), limits);
            if is_slower {
                shard.second.insert(id.clone(), slower.clone());
            }
            shard.first.insert(id, if is_slower { slower.clone() } else { equal.clone() });
        }
        let path = folder.join(format!("{}.json", shard.shard.shard_file_label()));
        file::write(&path, &shard).expect("a folder that can be written");
    }
}

fn merge_made_records(folder: &Path) {
    let started = Instant::now();
    let files = merge::record_files(&[folder.to_owned()]).expect("a folder of shards");
    let (shards, cases) = match merge::kind(&files).expect("records") {
        merge::MergedRecordKind::Comparisons => {
            let merged = merge::merge_comparison_shards(&files, AnchorTolerance::default())
                .expect("shards of one plan");
            let account = merged.account;
            let comparison = comparison_shard::merge(merged.shards, account.missing);
            let cases = comparison.map_or(0, |comparison| comparison.judged.len());
            (account.merged.len(), cases)
        }
        _ => {
            let merged =
                merge::merge_runs(&files, AnchorTolerance::default()).expect("shards of one plan");
            merge::write_session(&folder.with_extension("merged"), &merged.runs).expect("written");
            let cases = merged.runs.iter().map(|piece| piece.record.cases.len()).sum();
            (merged.account.merged.len(), cases)
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    println!("{shards} shards, {cases} cases in {seconds:.2} s, peak {}", peak_memory());
}

fn read_and_time(path: &Path) {
    let started = Instant::now();
    let cases = match file::read::<Baseline>(path) {
        Ok(baseline) => baseline.cases.len(),
        Err(_) => file::read::<ProcessRun>(path).expect("a baseline or a run").cases.len(),
    };
    println!("{cases} cases in {:.2} s, peak {}", started.elapsed().as_secs_f64(), peak_memory());
}

/// Peak memory of the process, as Linux reports it.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or_else(|| "unknown".to_owned(), |value| value.trim().to_owned())
}
