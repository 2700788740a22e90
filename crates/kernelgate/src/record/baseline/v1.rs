//! Baselines of version 1, which held raw samples: read, a run at a time made what it is now.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::entries::{BaselineCase, BaselineRun, EarlierRuns};
use crate::record::case_run::CaseRun;
use crate::record::run::Samples;
use crate::record::verification::Verification;
use crate::record::work::WorkRecord;

#[derive(Deserialize)]
pub struct Baseline {
    pub name: String,
    pub runs: BTreeMap<String, BaselineRun>,
    pub cases: BTreeMap<String, Case>,
}

#[derive(Deserialize)]
pub struct Case {
    workload: String,
    revision: u32,
    work: WorkRecord,
    samples: BTreeMap<String, Measured>,
    #[serde(default)]
    earlier: Option<EarlierRuns>,
}

/// Raw samples, of which only what a verdict needs is held.
#[derive(Deserialize)]
#[serde(try_from = "Samples")]
struct Measured(CaseRun);

impl TryFrom<Samples> for Measured {
    type Error = String;

    fn try_from(samples: Samples) -> Result<Self, String> {
        samples.validate()?;
        Ok(Self(CaseRun::of(&samples)))
    }
}

impl From<Case> for BaselineCase {
    fn from(Case { workload, revision, work, samples, earlier }: Case) -> Self {
        Self {
            workload,
            revision,
            work,
            runs: samples.into_iter().map(|(key, Measured(run))| (key, run)).collect(),
            verification: Verification::Unknown,
            numerics: None,
            earlier,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::measure::limits::TimeLimit;
    use crate::record::file::{self, FileError, Record as _};
    use crate::record::{Baseline, CaseRecord, CaseRun, Environment, ProcessRun, Provenance};
    use crate::verify::Errors;
    use std::collections::BTreeMap;

    /// A baseline as version 1 wrote it, of what `runs` measured.
    fn text(runs: &[ProcessRun]) -> String {
        let mut baseline = Baseline::new("main");
        runs.iter().for_each(|run| baseline.add(run).unwrap());
        let mut value = serde_json::to_value(&baseline).unwrap();
        for (id, case) in value["cases"].as_object_mut().unwrap() {
            let case = case.as_object_mut().unwrap();
            case.retain(|field, _| !["runs", "numerics"].contains(&field.as_str()));
            let samples =
                runs.iter().filter_map(|run| Some((run.key(), &run.cases.get(id)?.samples)));
            let samples: serde_json::Map<_, _> =
                samples.map(|(key, it)| (key, serde_json::to_value(it).unwrap())).collect();
            case.insert("samples".to_owned(), samples.into());
        }
        value["schema"] = Baseline::SCHEMA.into();
        value["schema_version"] = 1.into();
        value["checksum"] = file::text_hash(&value.to_string()).into();
        value.to_string()
    }

    fn run(session: &str) -> ProcessRun {
        let mut case = CaseRecord::of_samples(vec![100.0, 103.0, 0.1, 700.0, 101.5]);
        case.samples.clock_mhz = vec![1700.0, 1701.0, 1702.0, 1703.0, 1704.0];
        case.samples.launches = vec![1, 1, 1, 7, 1];
        case.samples.throttled = 1;
        case.samples.contention = Some(0.25);
        ProcessRun {
            cases: [("a".to_owned(), case)].into(),
            ..ProcessRun::start("b", session, Environment::cpu(), Provenance::default())
        }
    }

    #[test]
    fn a_file_of_version_1_is_read_as_what_its_samples_say() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("main.json");
        let runs = [run("1"), run("2")];
        std::fs::write(&path, text(&runs)).unwrap();
        let read: Baseline = file::read(&path).unwrap();
        assert_eq!(file::version::<Baseline>(&path), Some(1));
        let case = &read.cases["a"];
        assert_eq!(case.runs["1/b"], CaseRun::of(&runs[0].cases["a"].samples));
        let of = &case.runs["2/b"];
        assert_eq!((of.median_ns, of.samples, of.total_launches), (100.0, 5, 11));
        assert_eq!((of.throttled, of.contention), (1, Some(0.25)));
        assert_eq!((of.median_clock_mhz, case.numerics.as_ref()), (Some(1702.0), None));
        // Written again it is of this version, and the same.
        file::write(&path, &read).unwrap();
        assert_eq!(file::version::<Baseline>(&path), Some(2));
        assert_eq!(file::read::<Baseline>(&path).unwrap(), read);
    }

    #[test]
    fn an_edited_or_impossible_file_of_version_1_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("main.json");
        let whole = text(&[run("1")]);
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            file::read::<Baseline>(&path)
        };
        let edited = whole.replace("103.0", "104.0");
        assert!(matches!(read(&edited), Err(FileError::Edited { .. })));
        let unsealed = |text: &str| {
            std::fs::write(&path, text).unwrap();
            file::read_unsealed::<Baseline>(&path).map_err(|error| error.to_string())
        };
        assert!(unsealed(&edited).is_ok());
        let wrong = unsealed(&whole.replace("103.0", "-1.0")).unwrap_err();
        assert!(wrong.contains("a sample of -1 ns a launch"), "{wrong}");
        // More launches than a number holds.
        let many = format!("\"launches\":[{0},{0},1,7,1]", 1_u64 << 63);
        let wrong = unsealed(&whole.replace("\"launches\":[1,1,1,7,1]", &many)).unwrap_err();
        assert!(wrong.contains("more launches than can be counted"), "{wrong}");
        // Samples belong to version 1, medians to version 2.
        let newer = whole.replace("\"schema_version\":1", "\"schema_version\":2");
        let wrong = unsealed(&newer).unwrap_err();
        assert!(wrong.contains("missing field `runs`"), "{wrong}");
    }

    /// What the committed files are to stay below.
    #[test]
    fn a_case_and_run_take_less_than_a_kilobyte() {
        let many: Vec<f64> = (0..500).map(|i| 1e6 / 3.0 + f64::from(i) / 7.0).collect();
        let of = |session: &str| {
            let mut run = run(session);
            let id = "attention/backward/s16384_d128_causal_bf16/cuda/flash_mma/hot";
            let mut case = CaseRecord::of_samples(many.clone());
            case.limit = Some(TimeLimit { time_ns: 1e6 / 7.0, by: "matmul bf16".to_owned() });
            run.cases = (0..100).map(|i| (format!("{id}{i}"), case.clone())).collect();
            run
        };
        let mut baseline = Baseline::new("main");
        (1..=3).for_each(|session| baseline.add(&of(&session.to_string())).unwrap());
        let bytes = file::to_text(&baseline).len();
        assert!(bytes < 300 * 600, "{bytes}");
        // One run alone, with the errors of sixteen seeds.
        let mut baseline = Baseline::new("main");
        baseline.add(&of("1")).unwrap();
        for case in baseline.cases.values_mut() {
            let numerics = case.numerics.get_or_insert_default();
            for seed in 1..=16 {
                let error = 0.004_759_243_539 / seed as f64;
                let errors =
                    Errors { max_error: error, relative_l2: error, rounding: 0.003_906_25 };
                numerics.insert(seed, errors, &BTreeMap::new());
            }
        }
        let bytes = file::to_text(&baseline).len();
        assert!(bytes < 100 * 1000, "{bytes}");
    }
}
