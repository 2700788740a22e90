//! Several runs of a bench: whether they belong together, as process runs of the same code or as
//! shards of one measurement, and which shards are missing.

use std::collections::{BTreeMap, BTreeSet};

use kernelgate::record::{ProcessRun, Shard};

/// Why runs of a bench are neither process runs of the same code nor the parts of one measurement,
/// with the first of them and the one that differs; none where they belong together.
pub fn differing(runs: &[ProcessRun]) -> Option<String> {
    let mut first: BTreeMap<&str, &ProcessRun> = BTreeMap::new();
    for run in runs {
        let other = *first.entry(&run.bench).or_insert(run);
        if let Some((field, one, two)) = difference(other, run) {
            let sharded = run.shard.is_some() || other.shard.is_some();
            return Some(format!(
                "{field} is `{one}` in the run {} and `{two}` in the run {}: these are no {}",
                other.key(),
                run.key(),
                if sharded { "shards of one measurement" } else { "process runs of the same code" }
            ));
        }
    }
    None
}

fn difference(one: &ProcessRun, two: &ProcessRun) -> Option<(&'static str, String, String)> {
    let count = |run: &ProcessRun| run.shard.map_or(1, |shard| shard.count).to_string();
    let code = |run: &ProcessRun| run.provenance.short();
    let fields = [
        ("number of shards", count(one), count(two)),
        ("commit", code(one), code(two)),
        ("effort", one.effort.clone(), two.effort.clone()),
        ("seed", one.seed.to_string(), two.seed.to_string()),
    ];
    let built = other_build(one, two).map(|[one, two]| ("executable", one, two));
    let differs = fields.into_iter().find(|(_, one, two)| one != two);
    differs.or(built).or_else(|| {
        let mismatch = two.environment.mismatches(&one.environment).into_iter().next()?;
        Some((mismatch.field, mismatch.base, mismatch.head))
    })
}

/// The executables of two runs, where they differ and should not. Machines that share the cases,
/// or are of one model, build their own of a clean commit; where they are not known to be two, it
/// is other code.
fn other_build(one: &ProcessRun, two: &ProcessRun) -> Option<[String; 2]> {
    let settled = one.provenance.commit.is_some() && !one.provenance.dirty;
    let sharded = one.shard.is_some() || two.shard.is_some();
    let named =
        |run: &ProcessRun| run.environment.gpu.is_some() || run.environment.machine.is_some();
    let two_machines = named(one) && named(two) && !two.environment.same_device(&one.environment);
    if settled && (sharded || two_machines) {
        return None;
    }
    let known = [&one.executable, &two.executable];
    if settled && known.iter().any(|executable| executable.is_none()) {
        return None;
    }
    let words = known.map(|executable| executable.as_deref().unwrap_or("unknown").to_owned());
    (words[0] != words[1]).then_some(words)
}

/// Shards that several others lack: "attention, shard 3/4". A single shard is judged by itself,
/// where each machine judges its own.
pub fn missing(runs: &[ProcessRun]) -> Vec<String> {
    let mut there: BTreeMap<&str, BTreeSet<Shard>> = BTreeMap::new();
    for run in runs {
        there.entry(&run.bench).or_default().extend(run.shard);
    }
    let mut missing = Vec::new();
    for (bench, shards) in there.iter().filter(|(_, shards)| shards.len() > 1) {
        let count = shards.first().map_or(0, |shard| shard.count);
        let all = (1..=count).map(|index| Shard { index, count });
        let lacking = all.filter(|shard| !shards.contains(shard));
        missing.extend(lacking.map(|shard| format!("{bench}, shard {shard}")));
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::{Environment, Provenance};

    fn shard(index: u32, count: u32) -> ProcessRun {
        let commit = Provenance { commit: Some("aaaa".to_owned()), dirty: false };
        ProcessRun {
            shard: Some(Shard { index, count }),
            executable: Some(format!("built for {index}")),
            ..ProcessRun::start("b", "s", Environment::cpu(), commit)
        }
    }

    #[test]
    fn shards_of_one_measurement_belong_together_and_others_do_not() {
        let with = |other: ProcessRun| differing(&[shard(1, 2), other]);
        assert_eq!(with(shard(2, 2)), None);
        let dirty = Provenance { dirty: true, ..shard(1, 2).provenance };
        let whole = ProcessRun { shard: None, ..shard(2, 2) };
        let elsewhere = Environment { threads: 99, ..Environment::cpu() };
        for (other, field) in [
            (shard(2, 3), "number of shards is `2`"),
            (whole, "number of shards"),
            (ProcessRun { provenance: dirty.clone(), ..shard(2, 2) }, "commit is `aaaa`"),
            (ProcessRun { effort: "quick".to_owned(), ..shard(2, 2) }, "effort"),
            (ProcessRun { seed: 2, ..shard(2, 2) }, "seed"),
            (ProcessRun { environment: elsewhere, ..shard(2, 2) }, "threads"),
        ] {
            let why = with(other).unwrap();
            assert!(why.starts_with(field), "{why}");
        }
        let changed = |index| ProcessRun { provenance: dirty.clone(), ..shard(index, 2) };
        let why = differing(&[changed(1), changed(2)]).unwrap();
        assert!(why.starts_with("executable is `built for 1` in the run s/b-1-of-2"), "{why}");
    }

    #[test]
    fn whole_runs_are_process_runs_of_the_same_code() {
        let mut here = Environment::cpu();
        here.machine = Some("this host".to_owned());
        let whole = || ProcessRun { shard: None, environment: here.clone(), ..shard(1, 1) };
        let why = |other: ProcessRun| {
            differing(&[whole(), ProcessRun { session: "t".to_owned(), ..other }])
        };
        assert_eq!(why(whole()), None);
        assert_eq!(why(ProcessRun { executable: None, ..whole() }), None);
        // Another bench is no process run of this one.
        let foreign = Provenance { commit: Some("bbbb".to_owned()), dirty: false };
        let other = || ProcessRun { provenance: foreign.clone(), ..whole() };
        assert_eq!(why(ProcessRun { bench: "c".to_owned(), ..other() }), None);
        let rebuilt = ProcessRun { executable: Some("other flags".to_owned()), ..whole() };
        for (run, wanted) in [
            (other(), "commit is `aaaa` in the run s/b and `bbbb` in the run t/b: these are no"),
            (rebuilt.clone(), "executable is `built for 1` in the run s/b and `other flags`"),
            (ProcessRun { effort: "quick".to_owned(), ..whole() }, "effort is `default`"),
            (ProcessRun { seed: 2, ..whole() }, "seed is `1`"),
        ] {
            let why = why(run).unwrap();
            assert!(why.starts_with(wanted), "{why}");
            assert!(why.ends_with("no process runs of the same code"), "{why}");
        }
        // Two machines of one model build their own.
        let mut there = here.clone();
        there.machine = Some("another host".to_owned());
        assert_eq!(why(ProcessRun { environment: there, ..rebuilt.clone() }), None);
        let nameless = Environment { machine: None, ..here.clone() };
        assert!(why(ProcessRun { environment: nameless, ..rebuilt }).is_some());
    }

    #[test]
    fn what_several_shards_lack_is_missing() {
        assert_eq!(missing(&[shard(1, 4)]), [""; 0]);
        assert_eq!(missing(&[shard(1, 2), shard(2, 2)]), [""; 0]);
        assert_eq!(missing(&[shard(1, 4), shard(4, 4), shard(2, 4)]), ["b, shard 3/4"]);
    }
}
