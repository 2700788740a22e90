//! Tests of `kernelgate calibrate` as a process, on the fixture, whose kernel takes as long as a
//! variable sets.

#![cfg(unix)]

use std::path::{Path, PathBuf};

use super::{error_message, report_without_times};
use crate::package::outcome::redact_varying_parts;
use crate::package::{
    FIXTURE_CASE_ID, ProcessOutcome, copy_executable, fixture_path, lines_with_word,
};

/// A package with a folder of executables that holds the fixture.
struct Package(crate::package::TempPackage);

impl Package {
    fn new() -> Self {
        let package = Self(crate::package::TempPackage::new());
        std::fs::create_dir(package.path_in_package("bin")).unwrap();
        copy_executable(fixture_path(), package.path_in_package("bin/fixture"));
        package
    }

    fn path_in_package(&self, below: &str) -> PathBuf {
        self.0.package_path(below)
    }

    fn run_kernelgate(&self, line: &str) -> ProcessOutcome {
        let mut command = self.0.package_command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), line);
        command.env("FIXTURE_NS", "400000").output().unwrap().into()
    }

    fn path_of_calibration(&self) -> PathBuf {
        self.0.baseline_path("calibration")
    }
}

const CALIBRATE_COMMAND_LINE: &str =
    "calibrate --dir bin --backend cpu --relative 0.3 --tolerated 0.6 --case-time 0.01s";

#[test]
fn calibration_comparisons_are_counted_and_kept_beside_the_baselines() {
    let package = Package::new();
    let few = "n64 --comparisons 2 --inject 50,100 --power-comparisons 1 --sham 0 --max-blocks 4";
    // With `--total-time 1s` no comparison is started, because one may take longer; the same
    // command with `--resume` goes on.
    let none = package.run_kernelgate(&format!("{CALIBRATE_COMMAND_LINE} {few} --total-time 1s"));
    insta::assert_snapshot!(redact_varying_parts(&lines_with_word(&none.assert_exit(3).stdout_and_stderr(), "left")), @"4 comparisons are left: the same command with --resume goes on; so far in FOLDER/target/kernelgate/calibrate/state.json");
    assert!(!package.path_in_package("baselines").exists());
    let outcome =
        package.run_kernelgate(&format!("{CALIBRATE_COMMAND_LINE} {few} --resume --format json"));
    insta::assert_snapshot!(lines_with_word(&outcome.assert_exit(0).stderr, FIXTURE_CASE_ID), @"1 case: fixture/spin/n64_none/cpu/hot");
    let json = outcome.stdout_as_json();
    let null = &json["summary"]["kinds"][0];
    assert_eq!(
        (&null["kind"], &null["fired"]["hits"], &null["fired"]["of"]),
        (&"A/A".into(), &0.into(), &2.into())
    );
    let power = &json["summary"]["power"][1];
    assert_eq!((&power["percent"], &power["found"]["of"]), (&100.0.into(), &1.into()), "{power}");
    assert!(power["measured"].as_f64().unwrap() > 50.0, "{power}");
    assert_eq!(json["recommended"]["relative"], serde_json::Value::Null);
    let path = package.path_of_calibration();
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        text.contains("\"schema\": \"kernelgate-calibration\"")
            && !text.contains(package.path_in_package("").to_str().unwrap()),
        "{text}"
    );
    // `baseline list` and `show` do not treat a calibration file as a baseline, and the next
    // comparison uses the calibration.
    package.run_kernelgate("baseline list").assert_exit(0);
    insta::assert_snapshot!(package.run_kernelgate("baseline show calibration").refusal_message(2), @"error: baseline name `calibration`: that file is the calibration of the device");
    let again = "compare --base-dir bin --head-dir bin --time-identical --backend cpu n64 \
                 --max-blocks 1 --case-time 0.01s";
    let compared = package.run_kernelgate(&format!("{again} --format json"));
    insta::assert_snapshot!(report_without_times(compared.assert_exit(3)), @r#"
    fixture/spin/n64_none/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2}
    identical: "fixture"
    "#);
    insta::assert_snapshot!(redact_varying_parts(&compared.stdout_as_json()["calibration"].to_string()), @r#""calibration of DAY (2 A/A comparisons, 0 failed; commit no commit) recommends no threshold: 2 A/A comparisons: too few to recommend anything, 20 are needed; the default ones are used""#);
    std::fs::write(&path, "{").unwrap();
    insta::assert_snapshot!(package.run_kernelgate(again).refusal_message(2), @"error: failed to read FOLDER/baselines/DEVICE/calibration.json: broken or cut short (EOF while parsing an object at line 1 column 1)");
}

/// Tests a calibration of two cases: added work slows both, "one case slower" delays a different
/// case each time, and another memory layout is a kind of its own.
#[test]
fn work_single_cases_and_layouts_are_distinguished() {
    let package = Package::new();
    let few = "n64|n128 --axis n=64,128 --comparisons 0 --inject 100 --work 100 \
               --power-comparisons 1 --single 2 --layouts 1 --sham 0 --max-blocks 2";
    let json = package
        .run_kernelgate(&format!("{CALIBRATE_COMMAND_LINE} {few} --format json"))
        .assert_exit(0)
        .stdout_as_json();
    let kinds: Vec<&str> = json["summary"]["kinds"]
        .as_array()
        .unwrap()
        .iter()
        .map(|kind| kind["kind"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["other layout", "100 % slower", "100 % more work", "one case 100 % slower"]);
    let text = std::fs::read_to_string(package.path_of_calibration()).unwrap();
    let calibration: serde_json::Value = serde_json::from_str(&text).unwrap();
    let single: Vec<_> = calibration["comparisons"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|known| known["kind"]["single"] == 100)
        .map(|known| known["delays_ns"].as_object().unwrap().keys().cloned().collect::<Vec<_>>())
        .collect();
    assert_eq!(single.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1]);
    assert_ne!(single[0], single[1]);
    let work = json["summary"]["power"]
        .as_array()
        .unwrap()
        .iter()
        .find(|power| power["kind"] == "100 % more work" && power["case"].is_null())
        .unwrap();
    assert!(work["measured"].as_f64().unwrap() > 30.0, "{work}");
}

#[test]
fn parts_of_one_calibration_are_merged_and_others_refused() {
    let package = Package::new();
    // The calibration has three comparisons, of which the first and the last compare a build with
    // itself.
    let few = "--comparisons 2 --inject 50 --power-comparisons 0 --sham 1 --max-blocks 1 n64";
    package.run_kernelgate(&format!("{CALIBRATE_COMMAND_LINE} {few} --shard 1/2")).assert_exit(0);
    package
        .run_kernelgate(&format!("{CALIBRATE_COMMAND_LINE} {few} --shard 2/2 --output two.json"))
        .assert_exit(0);
    let part = "target/kernelgate/calibrate/part-1-of-2.json";
    let all = format!("calibrate --merge {part} two.json --output all.json --format json");
    let kinds =
        package.run_kernelgate(&all).assert_exit(0).stdout_as_json()["summary"]["kinds"].clone();
    let fired = |kind: &serde_json::Value| {
        format!("{}: {} of {}", kind["kind"], kind["fired"]["hits"], kind["fired"]["of"])
    };
    let fired: Vec<String> = kinds.as_array().unwrap().iter().map(fired).collect();
    insta::assert_snapshot!(fired.join("\n"), @r#"
    "A/A": 0 of 2
    "sham load": 0 of 1
    "#);
    let none = package.run_kernelgate(&format!("calibrate --merge {part} none.json"));
    insta::assert_snapshot!(none.refusal_message(2), @"error: failed to read none.json: No such file or directory (os error 2)");
    let merge = |files: &str| {
        package
            .run_kernelgate(&format!("merge --anchor-tolerance 100 --output merged.json {files}"))
    };
    insta::assert_snapshot!(merge(&format!("two.json {part}")).assert_exit(0).stderr, @r"
    2 shards merged
    written to merged.json
    ");
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(package.path_in_package(name)).unwrap())
            .unwrap()
    };
    let anchors = &read("two.json")["comparisons"][0]["anchors"]["measured"];
    assert!(anchors["memory_bytes_per_s"].is_number(), "{anchors}");
    assert_eq!(read("merged.json")["comparisons"].as_array().unwrap().len(), 3);
    insta::assert_snapshot!(lines_with_word(&merge("two.json").assert_exit(3).stdout_and_stderr(), "shard"), @r"
    1 shard merged
    missing: calibration, shard 1/2
    ");
    let write = |name: &str, calibration: &serde_json::Value| {
        std::fs::write(package.path_in_package(name), calibration.to_string()).unwrap();
    };
    let mut cut = read("two.json");
    cut["comparisons"] = serde_json::json!([]);
    write("cut.json", &cut);
    let cut = merge(&format!("cut.json {part}"));
    insta::assert_snapshot!(lines_with_word(&cut.assert_exit(3).stdout_and_stderr(), "shard"), @r"
    2 shards merged
    interrupted: calibration, shard 2/2
    ");
    let mut other_plan = read("two.json");
    other_plan["part"]["plan"] = "0123".into();
    write("other_plan.json", &other_plan);
    insta::assert_snapshot!(merge(&format!("other_plan.json {part}")).text_for_snapshot(), @r"
    exit 4
    refused: plan is `HASH` in target/kernelgate/calibrate/part-1-of-2.json and `0123` in other_plan.json
    ");
    insta::assert_snapshot!(merge(&format!("all.json {part}")).refusal_message(2), @"error: all.json: measured without --shard: it is the whole, not a part");
    let edited = read("two.json").to_string().replace(r#""filter":"n64""#, r#""filter":"x""#);
    std::fs::write(package.path_in_package("edited.json"), edited).unwrap();
    let edited = package.run_kernelgate(&format!("calibrate --merge {part} edited.json"));
    insta::assert_snapshot!(edited.text_for_snapshot(), @r"
    exit 4

    -- stderr
    refused: edited.json is of something else than target/kernelgate/calibrate/part-1-of-2.json: filter is `n64` and `x`
    ");
}

#[test]
fn mistakes_of_a_calibration_are_named_before_anything_is_measured() {
    let package = Package::new();
    let mut refusals = String::new();
    for flags in [
        "--inject 0",
        "--work=-1",
        "--dir bin --shard 1/2",
        "--shard 3/2",
        "--dir bin --backend cpu n64 --relative=-1",
        "--dir none",
    ] {
        refusals += &format!(
            "{}\n",
            package.run_kernelgate(&format!("calibrate {flags}")).refusal_message(2)
        );
    }
    let unknown = package.run_kernelgate("calibrate --dir bin --backend cpu nothing");
    refusals += &error_message(&unknown, 2);
    insta::assert_snapshot!(refusals, @r"
    error: --inject takes percentages above 0, up to 1000, not 0
    error: --work takes percentages above 0, up to 1000, not -1
    error: --shard needs a filter or --axis: which cases are short enough may differ from part to part
    error: invalid value '3/2' for '--shard <I/N|auto>': `3/2`: a shard is 1/2 to 2/2; shards are counted from 1

    For more information, try '--help'.
    error: --relative takes a number from 0 to 1000000
    error: failed to read none: No such file or directory (os error 2)
    error: no case matches `nothing`; `--list` shows the cases
    ");
}
