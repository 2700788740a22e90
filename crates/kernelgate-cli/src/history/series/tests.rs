use std::path::Path;

use kernelgate::record::{
    BaselineFile, BenchProcessRun, CaseRecordWithSamples, RunEnvironment, file,
};
use kernelgate::stats::change_points::{
    MIN_VALUES_TO_SEARCH_LEVEL_CHANGES, noise_standard_deviation as noise_of,
};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::gate::calibration::{CalibrationComparisonKind, CaseBlocksAsColumns, GateCalibration};
use crate::history::HistoryRecordStore;
use crate::history::case_index::IndexedRecordFolder;
use crate::history::import::import_records_into_store;
use crate::history::indexed_run::ProcessRunInIndex;

const TEST_CASE_ID: &str = "w/f/n1/cpu/hot";

fn make_test_bench_run(
    session: usize,
    commit: &str,
    minute: usize,
    time_ns: f64,
) -> BenchProcessRun {
    BenchProcessRun {
        start_time: format!("2026-01-01T{:02}:{:02}:00.000Z", minute / 60, minute % 60),
        cases: [(
            TEST_CASE_ID.to_owned(),
            CaseRecordWithSamples::example_with_sample_times(vec![time_ns; 3]),
        )]
        .into(),
        ..BenchProcessRun::empty_run_starting_now(
            "bench",
            &format!("s{session}"),
            RunEnvironment {
                machine_hash: Some("host".to_owned()),
                ..RunEnvironment::environment_of_process_on_cpu()
            },
            CommitAndChanges { commit: Some(commit.to_owned()), dirty: false },
        )
    }
}

fn write_test_run(root: &Path, run: &BenchProcessRun) {
    file::write_record_atomically(
        &root.join("runs").join(&run.session_name).join("bench.json"),
        run,
    )
    .unwrap();
}

fn test_history_query<'a>(
    cases: &'a CaseIdFilter,
    renamed: &'a BTreeMap<String, String>,
) -> CaseHistoryQuery<'a> {
    CaseHistoryQuery {
        package: None,
        cases,
        current_ids_of_renamed_cases: renamed,
        joins_cards_of_model: false,
        only_known_commits: false,
        min_relative_level_change: MIN_REPORTED_LEVEL_CHANGE,
    }
}

fn all_test_histories(root: &Path, order: &GitCommitOrder) -> Vec<CaseTimeHistory> {
    let renamed = BTreeMap::new();
    compute_case_histories(
        &HistoryRecordStore::in_folder(root).update_and_return_index().unwrap().0,
        &test_history_query(&CaseIdFilter::AllCases, &renamed),
        order,
    )
    .unwrap()
}

fn numbered_test_commits(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{number:040x}")).collect()
}

#[test]
fn history_points_are_in_commit_order_and_changes_name_their_commits() {
    let folder = tempfile::tempdir().unwrap();
    let commits = numbered_test_commits(20);
    // The test has two runs of every other commit, measured from the last commit to the first. In
    // this test, the case is slower from commit 12 on.
    for (session, commit) in (0..20).step_by(2).rev().flat_map(|commit| [commit; 2]).enumerate() {
        let slower = if commit >= 12 { 1.1 } else { 1.0 };
        let wobble = 1.0 + 0.002 * (session % 3) as f64;
        write_test_run(
            folder.path(),
            &make_test_bench_run(session, &commits[commit], session, 1e6 * slower * wobble),
        );
    }
    let order = GitCommitOrder::from_oldest_first(commits.clone());
    let found = all_test_histories(folder.path(), &order);
    let [history] = &found[..] else { panic!("{found:?}") };
    let points: Vec<_> =
        history.points.iter().map(|it| it.measured_commit.clone().unwrap()).collect();
    assert_eq!(points, commits.iter().step_by(2).cloned().collect::<Vec<_>>());
    assert_eq!((history.points[0].run_medians_ns.len(), history.runs_ordered_by_time), (2, 0));
    let [change] = &history.changes[..] else { panic!("{:?}", history.changes) };
    assert_eq!(
        (&change.last_commit_before_change, &change.first_commit_after_change),
        (&Some(commits[10].clone()), &Some(commits[12].clone()))
    );
    assert_eq!(change.possible_cause_commits, commits[11..=12]);
    assert!(
        (change.relative_level_change - 0.1).abs() < 0.01
            && change.relative_change_low <= 0.1
            && !change.changed_within_one_build
    );
    // Without git, runs are ordered by their start time, and a change between runs of one build is
    // not attributed to its code.
    let by_time = &all_test_histories(folder.path(), &GitCommitOrder::default())[0];
    assert_eq!(
        (by_time.runs_ordered_by_time, by_time.points[0].measured_commit.as_ref()),
        (20, Some(&commits[18]))
    );
    let only = tempfile::tempdir().unwrap();
    for session in 0..20 {
        let slower = if session >= 12 { 1.1 } else { 1.0 };
        write_test_run(
            only.path(),
            &make_test_bench_run(session, &commits[0], session, 1e6 * slower),
        );
    }
    let change = &all_test_histories(only.path(), &order)[0].changes[0];
    assert!(
        change.changed_within_one_build && change.possible_cause_commits.is_empty(),
        "{change:?}"
    );
}

#[test]
fn a_run_that_is_also_in_a_baseline_counts_once_and_renamed_cases_continue() {
    let folder = tempfile::tempdir().unwrap();
    let commits = numbered_test_commits(2);
    let runs =
        [make_test_bench_run(0, &commits[0], 0, 1e6), make_test_bench_run(1, &commits[1], 1, 2e6)];
    let mut renamed = runs[1].clone();
    let odd = "w/f/é <b>|\"'%_\\/cpu/hot".to_owned();
    renamed.cases = [(odd.clone(), renamed.cases[TEST_CASE_ID].clone())].into();
    write_test_run(folder.path(), &runs[0]);
    write_test_run(folder.path(), &renamed);
    let mut baseline = BaselineFile::empty_baseline_with_name("main");
    baseline.merge_run_replacing_other_code(&runs[0]);
    let path = folder.path().join("elsewhere/main.json");
    file::write_record_atomically(&path, &baseline).unwrap();
    let store = HistoryRecordStore::in_folder(folder.path());
    let imported = import_records_into_store(&store, &[path.clone(), path]).unwrap();
    assert_eq!((imported.newly_imported_records, imported.already_stored_records), (1, 1));
    let order = GitCommitOrder::from_oldest_first(commits);
    assert_eq!(all_test_histories(folder.path(), &order).len(), 2);
    let names =
        BTreeMap::from([(TEST_CASE_ID.to_owned(), "x".to_owned()), ("x".to_owned(), odd.clone())]);
    let found = compute_case_histories(
        &store.update_and_return_index().unwrap().0,
        &test_history_query(&CaseIdFilter::ExactId(odd.clone()), &names),
        &order,
    )
    .unwrap();
    let times: Vec<f64> = found[0].points.iter().flat_map(|it| it.run_medians_ns.clone()).collect();
    assert_eq!((found.len(), times), (1, vec![1e6, 2e6]));
    assert_eq!(found[0].earlier_ids, BTreeSet::from([TEST_CASE_ID.to_owned()]));
    let circle = BTreeMap::from([(odd.clone(), "x".to_owned()), ("x".to_owned(), odd)]);
    let error = compute_case_histories(
        &store.update_and_return_index().unwrap().0,
        &test_history_query(&CaseIdFilter::AllCases, &circle),
        &order,
    )
    .unwrap_err();
    assert!(error.to_string().contains("in a circle"), "{error}");
}

#[test]
fn runs_of_another_package_form_another_history() {
    let folder = tempfile::tempdir().unwrap();
    let commits = numbered_test_commits(3);
    let package = |name: &str| CargoPackageId {
        name: name.to_owned(),
        manifest_path: "Cargo.toml".to_owned(),
    };
    let run_of = |at: usize, package| BenchProcessRun {
        package,
        ..make_test_bench_run(at, &commits[at], at, 1e6)
    };
    let runs = [run_of(0, Some(package("one"))), run_of(1, Some(package("two"))), run_of(2, None)];
    runs.iter().for_each(|run| write_test_run(folder.path(), run));
    let (order, renamed, one) =
        (GitCommitOrder::from_oldest_first(commits), BTreeMap::new(), package("one"));
    let index = HistoryRecordStore::in_folder(folder.path()).update_and_return_index().unwrap().0;
    let query = CaseHistoryQuery {
        package: Some(&one),
        ..test_history_query(&CaseIdFilter::AllCases, &renamed)
    };
    let found = compute_case_histories(&index, &query, &order).unwrap();
    assert_eq!((found.len(), found[0].points.len()), (1, 2));
    assert_eq!(found[0].package_name.as_deref(), Some("one (Cargo.toml)"));
    assert_eq!(all_test_histories(folder.path(), &order).len(), 3);
    let counts = [("one (Cargo.toml)".to_owned(), 1), ("two (Cargo.toml)".to_owned(), 1)];
    assert_eq!(index.run_count_by_package(), counts.into());
}

#[test]
fn other_devices_and_revisions_form_other_histories() {
    let folder = tempfile::tempdir().unwrap();
    let commits = numbered_test_commits(4);
    let mut runs: Vec<BenchProcessRun> =
        (0..4).map(|at| make_test_bench_run(at, &commits[at], at, 1e6)).collect();
    runs[1].environment.machine_hash = Some("another".to_owned());
    runs[2].environment.usable_logical_cores += 1;
    runs[3].cases.get_mut(TEST_CASE_ID).unwrap().workload_revision = 2;
    runs.iter().for_each(|run| write_test_run(folder.path(), run));
    let order = GitCommitOrder::from_oldest_first(commits);
    assert_eq!(all_test_histories(folder.path(), &order).len(), 4);
    let (store, renamed) = (HistoryRecordStore::in_folder(folder.path()), BTreeMap::new());
    let joined = CaseHistoryQuery {
        joins_cards_of_model: true,
        ..test_history_query(&CaseIdFilter::AllCases, &renamed)
    };
    assert_eq!(
        compute_case_histories(&store.update_and_return_index().unwrap().0, &joined, &order)
            .unwrap()
            .len(),
        3
    );
}

#[test]
fn only_the_latest_runs_are_searched_for_level_changes() {
    let (runs, commits) = (100_000, numbered_test_commits(1000));
    let folder = tempfile::tempdir().unwrap();
    let example = &make_test_bench_run(0, &commits[0], 0, 1e6);
    let process_run = |number: usize| {
        let median_ns = if number < runs - 500 { 1e6 } else { 1.1e6 };
        ProcessRunInIndex {
            bench_and_shard_name: "bench".to_owned(),
            package_name: None,
            process_start_unix_ms: number as i64,
            environment_fingerprint: example.environment.name_of_comparable_environments(),
            card_or_host_id: "host".to_owned(),
            device: "a host".to_owned(),
            provenance: CommitAndChanges {
                commit: Some(commits[number / 100].clone()),
                dirty: false,
            },
            revision_and_median_ns_by_case: [(TEST_CASE_ID.to_owned(), (1, median_ns))].into(),
        }
    };
    let runs_of_all = (0..runs).map(process_run).collect();
    let all =
        IndexedRecordFolder { folder_modified_ns: 1, runs: runs_of_all, files_without_run: vec![] };
    let mut index = HistoryStoreIndex::default();
    index.folders.insert("imported/all".to_owned(), all);
    let path = folder.path().join("index");
    assert!(index.write_index_file(&path));
    let index = HistoryStoreIndex::read_index_file(&path).unwrap();
    let (renamed, order) = (BTreeMap::new(), GitCommitOrder::from_oldest_first(commits));
    let found = compute_case_histories(
        &index,
        &test_history_query(&CaseIdFilter::AllCases, &renamed),
        &order,
    )
    .unwrap();
    let [history] = &found[..] else { panic!("{} histories", found.len()) };
    assert_eq!(
        (history.points.len(), history.runs_not_searched_for_changes),
        (1000, runs - MAX_VALUES_TO_SEARCH_LEVEL_CHANGES)
    );
    let changes: Vec<usize> =
        history.changes.iter().map(|change| change.first_point_after).collect();
    assert_eq!(changes, [995]);
}

#[test]
fn foreign_files_are_named_and_a_broken_index_is_rebuilt() {
    let folder = tempfile::tempdir().unwrap();
    let order = GitCommitOrder::from_oldest_first(numbered_test_commits(1));
    write_test_run(folder.path(), &make_test_bench_run(0, &numbered_test_commits(1)[0], 0, 1e6));
    let whole = std::fs::read_to_string(folder.path().join("runs/s0/bench.json")).unwrap();
    for (name, text) in [
        ("cut.json", &whole[..whole.len() / 2]),
        ("foreign.json", "{\"schema\": \"other\"}"),
        ("newer.json", &whole.replace("\"schema_version\": 3", "\"schema_version\": 9")),
    ] {
        std::fs::write(folder.path().join("runs/s0").join(name), text).unwrap();
    }
    let store = HistoryRecordStore::in_folder(folder.path());
    let check = || -> String {
        assert_eq!(all_test_histories(folder.path(), &order)[0].points.len(), 1);
        let skipped = store.files_without_runs(&store.update_and_return_index().unwrap().0);
        let runs = folder.path().join("runs/s0").display().to_string();
        let problems = skipped.iter().map(|it| it.why_no_run.replace(&runs, "RUNS"));
        let mut problems: Vec<String> = problems.collect();
        problems.sort();
        problems.join("\n")
    };
    let problems = check();
    insta::assert_snapshot!(problems, @r"
    failed to read RUNS/cut.json: broken or cut short (EOF while parsing a value at line 21 column 3)
    failed to read RUNS/newer.json: written by a newer kernelgate (schema 9, this one reads up to 3)
    neither a run nor a baseline of kernelgate
    ");
    let index = folder.path().join("history.index");
    let text = std::fs::read(&index).unwrap();
    for broken in [&b"not an index"[..], &text[..text.len() / 2], &[0; 5000]] {
        std::fs::write(&index, broken).unwrap();
        assert_eq!(check(), problems);
    }
    std::fs::remove_file(&index).unwrap();
    assert_eq!(check(), problems);
    std::fs::remove_dir_all(folder.path().join("runs/s0")).unwrap();
    assert_eq!(all_test_histories(folder.path(), &order), []);
}

/// Returns, for each case and each A/A comparison, the logarithms of the process medians in the
/// order of measurement.
fn recorded_log_time_sequences() -> Vec<Vec<f64>> {
    const H200_CALIBRATION_FILE: &str = "../../docs/calibrations/h200.json";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(H200_CALIBRATION_FILE);
    let calibration: GateCalibration = file::read_record(&path).unwrap();
    let comparisons: Vec<_> =
        calibration.comparisons_of_kind(CalibrationComparisonKind::IdenticalBuilds).collect();
    let in_order = |series: &CaseBlocksAsColumns| -> Vec<f64> {
        let blocks = series.leading_side_letters.chars().enumerate().flat_map(|(block, leader)| {
            let [base, head] =
                [&series.base, &series.head].map(|it| &it.process_times_ns[2 * block..]);
            match leader {
                'b' => [base[0], head[0], head[1], base[1]],
                _ => [head[0], base[0], base[1], head[1]],
            }
        });
        blocks.map(f64::ln).collect()
    };
    let cases = calibration.launch_ns_by_case.keys();
    let each =
        cases.flat_map(|case| comparisons.iter().filter_map(|it| it.first_round_times.get(case)));
    each.map(in_order).collect()
}

/// Returns the values of the recorded sequences without their levels, scaled to a standard
/// deviation of 1 %.
fn recorded_noise_scaled_to_one_percent(sequences: &[Vec<f64>]) -> Vec<f64> {
    let mut values: Vec<f64> = Vec::new();
    for sequence in sequences {
        let (level, width) = (median(sequence), noise_of(sequence));
        values.extend(sequence.iter().map(|value| (value - level) / width.max(1e-6)));
    }
    let variance = values.iter().map(|it| it * it).sum::<f64>() / values.len() as f64;
    values.iter().map(|it| 0.01 * it / variance.sqrt()).collect()
}

fn draw_noise_at_random(noise: &[f64], count: usize, random: &mut impl Rng) -> Vec<f64> {
    (0..count).map(|_| noise[random.random_range(0..noise.len())]).collect()
}

/// The test checks the detection and false-alarm rates in the documentation, on noise of one
/// executable on an H200; `KERNELGATE_SIMULATIONS` sets the number of sequences.
#[test]
fn level_changes_are_found_in_recorded_noise_with_few_false_alarms() {
    let count = std::env::var("KERNELGATE_SIMULATIONS").ok().and_then(|it| it.parse().ok());
    let count: u64 = count.unwrap_or(100);
    let found = |values: &[f64]| {
        detect_level_changes(values, MIN_REPORTED_LEVEL_CHANGE.ln_1p(), MIN_ASSUMED_RELATIVE_NOISE)
    };
    let sequences = recorded_log_time_sequences();
    let noise = recorded_noise_scaled_to_one_percent(&sequences);
    let mut random = ChaCha8Rng::seed_from_u64(19);
    let (mut missed, mut alarms) = (0, 0);
    for _ in 0..count {
        let values = draw_noise_at_random(&noise, 100, &mut random);
        let alarm = |runs: usize| !found(&values[..runs]).is_empty();
        alarms += u32::from((MIN_VALUES_TO_SEARCH_LEVEL_CHANGES..=100).any(alarm));
        let mut values = values;
        values[40..].iter_mut().for_each(|value| *value += 0.05f64.ln_1p());
        let seen = |runs: usize| {
            found(&values[..runs]).iter().any(|it| it.first_index_after_change.abs_diff(40) <= 1)
        };
        missed += u32::from(!(41..=45).any(seen));
    }
    println!("{missed} of {count} steps missed, {alarms} with a false alarm");
    let slack = |rate: f64| rate * count as f64 + 3.0 * (rate * count as f64).sqrt();
    assert!(f64::from(missed) <= slack(0.05), "{missed}");
    assert!(f64::from(alarms) <= slack(0.01), "{alarms}");
    // This part of the test uses the recorded sequences in their original order.
    let alarms = sequences.iter().filter(|values| !found(values).is_empty()).count();
    assert_eq!(alarms, 0, "of {}", sequences.len());
    assert!(sequences.len() >= 64, "{}", sequences.len());
}
