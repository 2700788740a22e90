//! `kernelgate calibrate` from outside, on the fixture, whose kernel takes as long as a variable
//! sets.

#![cfg(unix)]

use std::path::{Path, PathBuf};

use crate::package::{CASE, Outcome, copy_executable, fixture_path};

/// A package with a folder of executables that holds the fixture.
struct Package(crate::package::Package);

impl Package {
    fn new() -> Self {
        let package = Self(crate::package::Package::new());
        std::fs::create_dir(package.path("bin")).unwrap();
        copy_executable(fixture_path(), package.path("bin/fixture"));
        package
    }

    fn path(&self, below: &str) -> PathBuf {
        self.0.path(below)
    }

    fn run(&self, line: &str) -> Outcome {
        let mut command = self.0.command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), line);
        command.env("FIXTURE_NS", "2000000").output().unwrap().into()
    }

    fn calibration(&self) -> PathBuf {
        self.0.baseline("calibration")
    }
}

const CALIBRATE: &str =
    "calibrate --dir bin --backend cpu --relative 0.3 --tolerated 0.6 --case-time 0.05s";

#[test]
fn calibration_comparisons_are_counted_and_kept_beside_the_baselines() {
    let package = Package::new();
    let few = "n64 --comparisons 2 --inject 50,100 --power-comparisons 1 --sham 0 --max-blocks 12";
    // A comparison may take longer than the whole time, so none is started; the same command goes on.
    package
        .run(&format!("{CALIBRATE} {few} --total-time 1s"))
        .expect(3, &["4 comparisons are left", "one may take 3 min", "--resume goes on"]);
    assert!(!package.path("baselines").exists());
    let outcome = package.run(&format!("{CALIBRATE} {few} --resume --format json"));
    outcome.expect(0, &["1 case: fixture/spin/n64_none/cpu/hot"]);
    let json: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    let null = &json["summary"]["kinds"][0];
    assert_eq!(
        (&null["kind"], &null["fired"]["hits"], &null["fired"]["of"]),
        (&"A/A".into(), &0.into(), &2.into())
    );
    let power = &json["summary"]["power"][1];
    assert_eq!((&power["percent"], &power["found"]["of"]), (&100.0.into(), &1.into()), "{power}");
    assert!(power["measured"].as_f64().unwrap() > 50.0, "{power}");
    assert_eq!(json["recommended"]["relative"], serde_json::Value::Null);
    let path = package.calibration();
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        text.contains("\"schema\": \"kernelgate-calibration\"")
            && !text.contains(package.path("").to_str().unwrap()),
        "{text}"
    );
    // A calibration is not a baseline, and the next comparison uses it.
    package.run("baseline list").expect(0, &[]);
    package.run("baseline show calibration").expect(2, &["is the calibration of the device"]);
    let again = "compare --base-dir bin --head-dir bin --time-identical --backend cpu n64 \
                 --max-blocks 1 --case-time 0.05s";
    package.run(again).expect(3, &["recommends no threshold: 2 A/A comparisons: too few", CASE]);
    std::fs::write(&path, "{").unwrap();
    package.run(again).expect(2, &["calibration.json: broken or cut short"]);
}

/// Two cases: one is made slower by work alone, and with another layout no case is slower.
#[test]
fn work_single_cases_and_layouts_are_distinguished() {
    let package = Package::new();
    let few = "n64|n128 --axis n=64,128 --comparisons 0 --inject 100 --work 100 \
               --power-comparisons 1 --single 2 --layouts 1 --sham 0 --max-blocks 4";
    let outcome = package.run(&format!("{CALIBRATE} {few} --format json"));
    outcome.expect(0, &["2 cases: "]);
    let json: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    let kinds: Vec<&str> = json["summary"]["kinds"]
        .as_array()
        .unwrap()
        .iter()
        .map(|kind| kind["kind"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["other layout", "100 % slower", "100 % more work", "one case 100 % slower"]);
    let text = std::fs::read_to_string(package.calibration()).unwrap();
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
    // Three comparisons; the first and the last are A/A comparisons.
    let few = "--comparisons 2 --inject 50 --power-comparisons 0 --sham 1 --max-blocks 4 n64";
    package
        .run(&format!("{CALIBRATE} {few} --shard 1/2"))
        .expect(0, &["part-1-of-2.json", "0 of 2"]);
    package
        .run(&format!("{CALIBRATE} {few} --shard 2/2 --output two.json"))
        .expect(0, &["written to two.json", "sham load"]);
    let part = "target/kernelgate/calibrate/part-1-of-2.json";
    package
        .run(&format!("calibrate --merge {part} two.json --output all.json --format markdown"))
        .expect(0, &["0 of 2", "sham load", "## Verdicts"]);
    package.run(&format!("calibrate --merge {part} none.json")).expect(2, &["none.json"]);
    let merge = "merge --anchor-tolerance 100 --output merged.json";
    package
        .run(&format!("{merge} two.json {part}"))
        .expect(0, &["2 shards merged", "0 of 2", "written to merged.json"]);
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(package.path(name)).unwrap()).unwrap()
    };
    let anchors = &read("two.json")["comparisons"][0]["anchors"]["measured"];
    assert!(anchors["memory_bytes_per_s"].is_number(), "{anchors}");
    assert_eq!(read("merged.json")["comparisons"].as_array().unwrap().len(), 3);
    package
        .run(&format!("{merge} two.json"))
        .expect(3, &["missing: calibration, shard 1/2", "written to merged.json"]);
    let mut cut = read("two.json");
    cut["comparisons"] = serde_json::json!([]);
    std::fs::write(package.path("cut.json"), cut.to_string()).unwrap();
    package
        .run(&format!("{merge} cut.json {part}"))
        .expect(3, &["interrupted: calibration, shard 2/2"]);
    let other_plan = few.replace("--comparisons 2", "--comparisons 3");
    package.run(&format!("{CALIBRATE} {other_plan} --shard 2/2 --output more.json")).expect(0, &[]);
    package
        .run(&format!("{merge} more.json {part}"))
        .expect(4, &["refused: plan is `", "more.json"]);
    package
        .run(&format!("{merge} all.json {part}"))
        .expect(2, &["all.json: measured without --shard"]);
    std::fs::write(
        package.path("edited.json"),
        std::fs::read_to_string(package.path("two.json"))
            .unwrap()
            .replace("\"filter\": \"n64\"", "\"filter\": \"x\""),
    )
    .unwrap();
    package
        .run(&format!("calibrate --merge {part} edited.json"))
        .expect(4, &["refused: edited.json", "filter is `n64` and `x`"]);
    for (bad, words) in [
        ("calibrate --inject 0", "--inject takes percentages"),
        ("calibrate --work=-1", "--work takes percentages"),
        ("calibrate --dir bin --shard 1/2", "--shard needs a filter"),
        ("calibrate --shard 3/2", "a shard is 1/2 to 2/2"),
        ("calibrate --dir bin --backend cpu n64 --relative=-1", "--relative"),
        ("calibrate --dir bin --backend cpu nothing", "no case matches `nothing`"),
        ("calibrate --dir none", "none"),
    ] {
        package.run(bad).expect(2, &[words]);
    }
}
