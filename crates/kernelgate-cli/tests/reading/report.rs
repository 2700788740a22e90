//! Tests of `kernelgate report` on records that the tests write: its files, and its refusals.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::package::outcome::redact_varying_parts;
use crate::package::{html_elements_with_words, lines_with_word};
use kernelgate::measure::limits::{MeasuredDeviceLimits, ShortestLaunchTime};
use kernelgate::measure::power::{CasePowerRecord, PowerStateOfSamples};
use kernelgate::record::{
    BaselineFile, BenchProcessRun, CaseRecordWithSamples, CommitAndChanges, RunEnvironment, file,
};

/// A case whose id would act as markup.
const CASE_ID_WITH_MARKUP: &str = "w/<script>alert(1)<\u{2f}script>&\"ä/n512_f32/cuda/fast/hot";

fn case_with_markup_in_id(
    problem: &str,
    implementation: &str,
    cache: &str,
    time_ns: f64,
) -> (String, CaseRecordWithSamples) {
    let mut case = CaseRecordWithSamples::example_with_sample_times(vec![
        time_ns,
        time_ns * 1.01,
        time_ns * 0.99,
    ]);
    (case.implementation, case.cache_state) = (implementation.to_owned(), cache.to_owned());
    case.limit =
        Some(ShortestLaunchTime { shortest_launch_ns: 5e5, deciding_ceiling: "memory".to_owned() });
    case.verification.max_error = 1e-5;
    case.work.flops_by_unit_and_dtype.insert("matmul f32".to_owned(), 1000);
    (format!("w/f/{problem}/{implementation}/{cache}"), case)
}

fn run_with_scaled_times(session: &str, scale: f64) -> BenchProcessRun {
    let mut run = BenchProcessRun::empty_run_starting_now(
        "b",
        session,
        RunEnvironment::environment_of_process_on_cpu(),
        CommitAndChanges::default(),
    );
    for (i, n) in [512, 1024, 2048].into_iter().enumerate() {
        let time = 1e6 * scale * (i + 1) as f64;
        let problem = format!("n{n}_f32");
        run.cases.extend([
            case_with_markup_in_id(&problem, "cuda/fast", "hot", time),
            case_with_markup_in_id(&problem, "cuda/slow", "hot", 30.0 * time),
            case_with_markup_in_id(&problem, "cuda/fast", "cold", 2.0 * time),
            case_with_markup_in_id(&problem, "cuda/other", "hot", 3.0 * time),
        ]);
    }
    run.cases.insert(
        CASE_ID_WITH_MARKUP.to_owned(),
        case_with_markup_in_id("n512_f32", "cuda/fast", "hot", 1e5).1,
    );
    run.skipped.insert("w/f/n4096_f32/cuda/fast/hot".to_owned(), "too large <b>".to_owned());
    run.failed.insert("w/f/n64_f32/cuda/fast/hot".to_owned(), "3 elements differ".into());
    run.limits = MeasuredDeviceLimits {
        flops_per_s: [("matmul f32".to_owned(), 1e9)].into(),
        ..MeasuredDeviceLimits::default()
    };
    run.ended_normally = true;
    run
}

struct FolderOfRunRecords {
    folder: tempfile::TempDir,
}

impl FolderOfRunRecords {
    fn new() -> Self {
        let records = Self { folder: tempfile::tempdir().unwrap() };
        std::fs::write(records.path_in_folder("Cargo.toml"), "[package]\nname = \"x\"\n").unwrap();
        records
    }

    fn path_in_folder(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write_run_record(&self, session: &str, run: &BenchProcessRun) {
        file::write_record_atomically(&self.path_in_folder(&format!("runs/{session}/b.json")), run)
            .unwrap();
    }

    fn run_report_verb(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_kernelgate"))
            .current_dir(self.folder.path())
            .env("CARGO_TARGET_DIR", self.path_in_folder("target"))
            .args(["report"])
            .args(arguments)
            .output()
            .unwrap()
    }

    fn error_of_refused_report(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run_report_verb(arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(!text.contains("panicked") && !self.path_in_folder("target").exists(), "{text}");
        text
    }
}

fn read_text_file(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn a_page_its_charts_and_its_numbers_are_written() {
    let records = FolderOfRunRecords::new();
    records.write_run_record("1", &run_with_scaled_times("1", 1.0));
    records.write_run_record("2", &run_with_scaled_times("2", 1.1));
    let output = records.run_report_verb(&["--runs", "runs"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let folder = records.path_in_folder("target/kernelgate/report");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(Path::new(printed.trim()), folder.join("index.html"));

    let page = read_text_file(&folder.join("index.html"));
    // The HTML page escapes text from records, and loads nothing from elsewhere.
    assert!(!page.contains("<script>alert") && page.contains("&lt;script&gt;alert(1)"));
    assert!(page.contains("large &lt;b&gt;") && !page.contains("large <b>"));
    assert!(!page.contains("src=") && !page.contains("url(") && !page.contains("@import"));
    for anchor in [
        "workloads",
        "ladders",
        "curves",
        "roofline",
        "caches",
        "errors",
        "runs",
        "cases",
        "not-measured",
        "environment",
        "glossary",
    ] {
        assert!(page.contains(&format!("<section id=\"{anchor}\">")), "{anchor}");
    }
    for text in [
        "<dt>process run</dt>",
        "over n",
        "prefers-color-scheme: dark",
        "3 elements differ",
        "13 cases",
    ] {
        assert!(page.contains(text), "{text}");
    }

    let plots: Vec<String> = std::fs::read_dir(folder.join("plots"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let count = |ending: &str| plots.iter().filter(|name| name.ends_with(ending)).count();
    assert_eq!(count(".svg"), count(".png"));
    assert_eq!(count(".svg"), page.matches("<figure").count());
    let ladder = read_text_file(&folder.join("plots/w_f-n2048_f32-hot-ladder.svg"));
    let rungs: Vec<usize> =
        ["cuda/slow<", "cuda/other<", "cuda/fast<"].map(|name| ladder.find(name).unwrap()).to_vec();
    assert!(rungs.is_sorted(), "the slowest first");

    let csv = read_text_file(&folder.join("cases.csv"));
    assert_eq!(csv.lines().count(), 14);
    let json: serde_json::Value =
        serde_json::from_str(&read_text_file(&folder.join("report.json"))).unwrap();
    assert_eq!(json["schema_version"], 1);
    let fast = json["cases"].as_array().unwrap().iter();
    let mut fast = fast.filter(|case| case["numbers"]["case"] == "w/f/n512_f32/cuda/fast/hot");
    let fast = fast.next().unwrap();
    assert_eq!(
        (&fast["numbers"]["runs"], fast["medians_ns"].as_array().unwrap().len()),
        (&2.into(), 2)
    );
    assert!((fast["numbers"]["median_ns"].as_f64().unwrap() - 1.05e6).abs() < 1e-3, "{fast}");
    assert!((fast["numbers"]["of_limit"].as_f64().unwrap() - 0.5 / 1.05).abs() < 1e-9);
}

#[test]
fn a_baseline_is_drawn_and_gives_verdicts() {
    let records = FolderOfRunRecords::new();
    let mut baseline = BaselineFile::empty_baseline_with_name("main");
    for session in 1..=4 {
        baseline
            .add_comparable_run(&run_with_scaled_times(
                &session.to_string(),
                1.0 + 0.001 * f64::from(session),
            ))
            .unwrap();
    }
    let device =
        RunEnvironment::environment_of_process_on_cpu().baseline_folder_of_device_and_count();
    let path = records.path_in_folder(&format!("baselines/{device}/main.json"));
    file::write_record_atomically(&path, &baseline).unwrap();
    let out = records.path_in_folder("out");
    let output = records.run_report_verb(&["--runs", "baselines", "--out", out.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = read_text_file(&out.join("index.html"));
    // A baseline keeps the limits of its cases and the ceilings of the device.
    for text in ["over n", ">limit<", "matmul f32 1 GFLOP/s", "of their limit", "limited by"] {
        assert!(page.contains(text), "{text}");
    }
    assert!(out.join("plots/w_f-n-f32-hot-of_limit.svg").is_file());
    // The report reads a case's axes from its id, and draws the cases of one problem together.
    assert!(out.join("plots/w_f-n2048_f32-hot-ladder.svg").is_file());

    records.write_run_record("slow", &run_with_scaled_times("slow", 2.0));
    let out = out.to_str().unwrap();
    let output = records.run_report_verb(&["--runs", "runs", "--baseline", "main", "--out", out]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = read_text_file(&records.path_in_folder("out/index.html"));
    assert!(
        page.contains("<section id=\"verdicts\">") && page.contains("12 regressed"),
        "verdicts"
    );
    assert!(records.path_in_folder("out/plots/change.svg").is_file());
}

#[test]
fn peers_are_drawn_beside_ours() {
    let records = FolderOfRunRecords::new();
    let run = run_with_scaled_times("1", 1.0);
    records.write_run_record("1", &run);
    let row = |n: u64, implementation: &str| {
        serde_json::json!({
            "problem": format!("w/f/n{n}_f32"), "peer": "torch/<eager>", "about": "", "error": null,
            "peer_ns": 5e6, "implementation": implementation, "ours_ns": 1e6, "of_limit": null,
        })
    };
    let rows = [
        row(512, "cuda/fast"),
        row(512, "cuda/cudnn"),
        row(2048, "cuda/fast"),
        row(4096, "cuda/fast"),
    ];
    let mut peers = serde_json::json!({
        "device": run.environment.device_name, "commit": "", "peers": {}, "rows": rows,
    });
    std::fs::write(records.path_in_folder("peers.json"), peers.to_string()).unwrap();
    let line = ["--runs", "runs", "--peers", "peers.json", "--out", "out"];
    let output = records.run_report_verb(&line);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page = read_text_file(&records.path_in_folder("out/index.html"));
    assert!(page.contains("<section id=\"peers\">") && !page.contains("torch/<eager>"));
    // The peer appears once in the legend of a curve, and once as a bar; its time counts once.
    let named = |plot: &str| {
        let svg = read_text_file(&records.path_in_folder("out/plots").join(plot));
        svg.matches("torch/&lt;eager&gt;<").count()
    };
    assert_eq!(named("w_f-n-f32-hot-time.svg"), 1);
    assert_eq!(named("w_f-n512_f32-hot-ladder.svg"), 1);
    assert_eq!(named("w_f-n1024_f32-hot-ladder.svg"), 0);

    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    let folder = records.path_in_folder("").display().to_string();
    insta::assert_snapshot!(lines_with_word(&messages, "--peers"), @"--peers: 1 of 4 times are of no case here: w/f/n4096_f32 …");
    peers["rows"][0]["peer_ns"] = (-5e6).into();
    std::fs::write(records.path_in_folder("peers.json"), peers.to_string()).unwrap();
    let text = records.error_of_refused_report(2, &line);
    insta::assert_snapshot!(text.replace(&folder, "FOLDER/"), @"error: failed to read peers.json as what `kernelgate peers --format json` prints: w/f/n512_f32, torch/<eager>: its time of -5000000 ns a launch");
    peers["rows"] = serde_json::json!([]);
    peers["device"] = "another".into();
    std::fs::write(records.path_in_folder("peers.json"), peers.to_string()).unwrap();
    let text = records.error_of_refused_report(4, &line);
    let device = RunEnvironment::environment_of_process_on_cpu().device_name;
    insta::assert_snapshot!(text.replace(&folder, "FOLDER/").replace(&device, "DEVICE"), @"refused: the peers were timed on another, the cases on DEVICE");
}

/// A run in which each case has a power state: steady, and at the cap for the fast case.
fn run_with_power_states(session: &str, scale: f64) -> BenchProcessRun {
    let mut run = run_with_scaled_times(session, scale);
    for case in run.cases.values_mut() {
        case.samples.sm_clock_per_sample_mhz = vec![1430.0, 1425.0, 1435.0];
        let at_cap = case.implementation == "cuda/fast";
        case.samples.power = Some(CasePowerRecord {
            state: PowerStateOfSamples::SteadyUnderLoad,
            reason_not_applicable: None,
            at_power_cap: at_cap,
            power_limit_mw: Some(700_000),
            ..CasePowerRecord::with_power_state_not_applicable("")
        });
    }
    run
}

#[test]
fn results_are_one_markdown_page_for_each_family() {
    let records = FolderOfRunRecords::new();
    records.write_run_record("1", &run_with_power_states("1", 1.0));
    records.write_run_record("2", &run_with_power_states("2", 1.1));
    let device = RunEnvironment::environment_of_process_on_cpu().device_name;
    let peers = serde_json::json!({
        "device": device, "commit": "", "peers": {}, "rows": [{
            "problem": "w/f/n512_f32", "peer": "torch|eager", "about": "", "error": null,
            "peer_ns": 5e5, "peer_power": "unsettled", "peer_clock_mhz": 1800.0,
            "implementation": "cuda/fast", "ours_ns": 1e6, "of_limit": null,
        }],
    });
    std::fs::write(records.path_in_folder("peers.json"), peers.to_string()).unwrap();
    let output = records.run_report_verb(&[
        "--runs",
        "runs",
        "--peers",
        "peers.json",
        "--results",
        "results",
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(Path::new(printed.trim()), Path::new("results/w.md"));
    let page = read_text_file(&records.path_in_folder("results/w.md"));
    // Facts of the machine are removed from the page, because they differ from machine to machine.
    let shown = page.lines().filter(|line| !line.starts_with("- "));
    insta::assert_snapshot!("results.md", shown.collect::<Vec<_>>().join("\n"));
    assert!(page.contains(&format!("- device: {device}")), "{page}");
}

#[test]
fn marked_tables_of_a_page_are_filled_and_the_rest_stays() {
    let records = FolderOfRunRecords::new();
    records.write_run_record("1", &run_with_power_states("1", 1.0));
    let path = records.path_in_folder("results/fast.md");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let page = |filter: &str, columns: &str, table: &str| {
        format!("# Fast\n\n<!-- results {filter}: {columns} -->\n{table}\nBy hand.\n")
    };
    let filter = "^w/f/n512.*/hot";
    std::fs::write(&path, page(filter, "operation, row, time", "| stale |\n| --- |\n")).unwrap();
    std::fs::write(records.path_in_folder("results/other.md"), "By hand.\n").unwrap();
    let arguments = ["--runs", "runs", "--results", "results"];
    let output = records.run_report_verb(&arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let filled = read_text_file(&path);
    let table = "| operation |        row |     time |\n\
                 | --- | ---: | ---: |\n\
                 | f         |  cuda/fast | 1.000 ms |\n\
                 | f         | cuda/other | 3.000 ms |\n\
                 | f         |  cuda/slow | 30.00 ms |\n";
    assert_eq!(filled, page(filter, "operation, row, time", table));
    assert_eq!(read_text_file(&records.path_in_folder("results/other.md")), "By hand.\n");
    assert!(!records.path_in_folder("results/w.md").exists());
    let mut refusals = String::new();
    for (filter, columns) in [("^none", "row"), (filter, "speed, colour")] {
        std::fs::write(&path, page(filter, columns, "")).unwrap();
        refusals += &redact_varying_parts(&records.error_of_refused_report(2, &arguments));
        assert_eq!(read_text_file(&path), page(filter, columns, ""));
    }
    insta::assert_snapshot!(refusals, @r"
    error: --results: results/fast.md: line 3: no case matches the filter: write `<!-- results FILTER: COLUMN, COLUMN -->`
    error: --results: results/fast.md: line 3: no column `colour` beside problem, cache, row, time, ±, speed, rate, clock, power, limit, limited by, of limit, operation: write `<!-- results FILTER: COLUMN, COLUMN -->`
    ");
}

#[test]
fn results_without_a_power_state_are_refused() {
    let records = FolderOfRunRecords::new();
    records.write_run_record("1", &run_with_scaled_times("1", 1.0));
    let text = records.error_of_refused_report(4, &["--runs", "runs", "--results", "results"]);
    insta::assert_snapshot!(text, @"refused: 13 of 13 cases have no recorded power state, the first is w/f/n512_f32/cuda/fast/hot: `cargo bench -- --save-baseline NAME` measures them again");
    assert!(!records.path_in_folder("results").exists());
}

#[test]
fn times_over_commits_come_from_the_store() {
    let records = FolderOfRunRecords::new();
    for number in 0..20 {
        let time = if number < 12 { 1e6 } else { 1.1e6 };
        let commit = Some(format!("{number:040x}"));
        let run = BenchProcessRun {
            start_time: format!("2026-01-01T00:{number:02}:00.000Z"),
            cases: [case_with_markup_in_id("n512_f32", "cuda/fast", "hot", time)].into(),
            ended_normally: true,
            ..BenchProcessRun::empty_run_starting_now(
                "b",
                &format!("s{number:02}"),
                RunEnvironment::environment_of_process_on_cpu(),
                CommitAndChanges { commit, dirty: false },
            )
        };
        let path = records.path_in_folder(&format!("target/kernelgate/runs/s{number:02}/b.json"));
        file::write_record_atomically(&path, &run).unwrap();
    }
    let out = records.path_in_folder("out");
    let drawn = |arguments: &[&str]| {
        let _ = std::fs::remove_dir_all(&out);
        let output =
            records.run_report_verb(&[arguments, &["--out", out.to_str().unwrap()]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (read_text_file(&out.join("index.html")), String::from_utf8(output.stderr).unwrap())
    };
    let (page, _) = drawn(&[]);
    let texts =
        ["<section id=\"history\">", "last change +10.0% at 00000000", "▁", "order of recorded"];
    for text in texts {
        assert!(page.contains(text), "{text}");
    }
    assert!(out.join("plots/w_f_n512_f32_cuda_fast_hot-history.png").is_file());
    let csv = read_text_file(&out.join("history.csv"));
    assert_eq!(csv.lines().count(), 21);
    let changed: Vec<&str> = csv.lines().skip(1).filter(|line| !line.ends_with(',')).collect();
    assert!(changed.len() == 1 && changed[0].contains("1100000"), "{csv}");
    let json: serde_json::Value =
        serde_json::from_str(&read_text_file(&out.join("report.json"))).unwrap();
    let change = json["histories"][0]["changes"][0]["change"].as_f64().unwrap();
    assert!((change - 0.1).abs() < 1e-3 && json["histories"][0]["changes"][0]["point"] == 12);

    // Runs that `--runs` names are drawn without a history, unless `--store` names a history store
    // too.
    let one = "target/kernelgate/runs/s19/b.json";
    assert!(!drawn(&["--runs", one]).0.contains("id=\"history\""));
    assert!(!out.join("history.csv").exists());
    let named = drawn(&["--runs", one, "--store", "target/kernelgate"]).0;
    assert!(named.contains("id=\"history\""));
    let output = records.run_report_verb(&["--store", "absent"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    insta::assert_snapshot!(text, @r"
    1 run without a recorded package counted as of package x (Cargo.toml)
    error: absent is not a store: it has neither runs/ nor imported/
    ");
    // If the store cannot be read, the page has no history.
    std::fs::write(records.path_in_folder("target/kernelgate/imported"), "").unwrap();
    let (page, said) = drawn(&[]);
    let folder = records.path_in_folder("").display().to_string();
    insta::assert_snapshot!(said.replace(&folder, "FOLDER/"), @r"
    1 run without a recorded package counted as of package x (Cargo.toml)
    no times over commits: failed to read FOLDER/target/kernelgate/imported: Not a directory (os error 20)
    ");
    insta::assert_snapshot!(html_elements_with_words(&page, "of 1 workload"), @"1 case of 1 workload; the fastest implementations reach 45% of their limit in the median problem.");
    assert!(!page.contains("id=\"history\""));
}

#[test]
fn a_file_that_is_not_a_record_is_refused_by_name() {
    let records = FolderOfRunRecords::new();
    let (mut texts, folder) = (String::new(), records.path_in_folder("").display().to_string());
    let device = run_with_scaled_times("1", 1.0).environment.device_name;
    let mut add = |line: &str, text: &str| {
        let text = text.replace(&folder, "FOLDER/").replace(&device, "DEVICE");
        texts.push_str(&format!("$ report {line}\n{text}\n"));
    };
    let mut refuse = |code, line: &str| {
        let flags: Vec<&str> = line.split_whitespace().collect();
        add(line, &records.error_of_refused_report(code, &flags));
    };
    refuse(2, "");
    refuse(2, "--runs absent");
    std::fs::create_dir(records.path_in_folder("empty")).unwrap();
    refuse(2, "--runs empty");

    records.write_run_record("1", &run_with_scaled_times("1", 1.0));
    let good = read_text_file(&records.path_in_folder("runs/1/b.json"));
    std::fs::write(records.path_in_folder("cut.json"), &good[..9]).unwrap();
    refuse(2, "--runs cut.json");
    std::fs::write(records.path_in_folder("foreign.json"), "{\"schema\": \"another\"}").unwrap();
    refuse(2, "--runs foreign.json");
    let newer = good.replacen("\"schema_version\": 3", "\"schema_version\": 99", 1);
    assert_ne!(newer, good);
    std::fs::write(records.path_in_folder("newer.json"), newer).unwrap();
    refuse(2, "--runs newer.json");
    refuse(2, "--runs runs runs");
    refuse(2, "--runs runs --peers foreign.json");

    let mut other = run_with_scaled_times("2", 1.0);
    other.environment.device_name = "NVIDIA H200".to_owned();
    records.write_run_record("2", &other);
    refuse(4, "--runs runs");
    // The report names and skips files in the folder of runs that do not contain records.
    std::fs::remove_dir_all(records.path_in_folder("runs/2")).unwrap();
    std::fs::copy(
        records.path_in_folder("foreign.json"),
        records.path_in_folder("runs/foreign.json"),
    )
    .unwrap();
    let output = records.run_report_verb(&["--runs", "runs"]);
    assert!(output.status.success());
    add("--runs runs", &String::from_utf8_lossy(&output.stderr));
    insta::assert_snapshot!("refusals", texts);
}
