//! Runs of shards: whether they belong together, and which are missing.

use std::collections::{BTreeMap, BTreeSet};

use kernelgate::record::{Run, Shard};

/// Why runs of shards are not the parts of one measurement, with the first of them and the one that
/// differs; none where they are, or no run is of a shard.
pub fn differing(runs: &[Run]) -> Option<String> {
    let mut first: BTreeMap<&str, &Run> = BTreeMap::new();
    for run in runs {
        let other = *first.entry(&run.bench).or_insert(run);
        let sharded = run.shard.is_some() || other.shard.is_some();
        if let Some((field, one, two)) = sharded.then(|| difference(other, run)).flatten() {
            return Some(format!(
                "{field} is `{one}` in the run {} and `{two}` in the run {}: these are no shards \
                 of one measurement",
                other.key(),
                run.key()
            ));
        }
    }
    None
}

fn difference(one: &Run, two: &Run) -> Option<(&'static str, String, String)> {
    let count = |run: &Run| run.shard.map_or(1, |shard| shard.count).to_string();
    let executable = |run: &Run| run.executable.clone().unwrap_or_default();
    let code = |run: &Run| run.provenance.short();
    let fields = [
        ("number of shards", count(one), count(two)),
        ("commit", code(one), code(two)),
        ("effort", one.effort.clone(), two.effort.clone()),
        ("seed", one.seed.to_string(), two.seed.to_string()),
    ];
    let settled = one.provenance.commit.is_some() && !one.provenance.dirty;
    let built = (!settled).then(|| ("executable", executable(one), executable(two)));
    let differs = fields.into_iter().chain(built).find(|(_, one, two)| one != two);
    differs.or_else(|| {
        let mismatch = two.environment.mismatches(&one.environment).into_iter().next()?;
        Some((mismatch.field, mismatch.base, mismatch.head))
    })
}

/// Shards that several others lack: "attention, shard 3/4". A single shard is judged by itself,
/// where each machine judges its own.
pub fn missing(runs: &[Run]) -> Vec<String> {
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

    fn shard(index: u32, count: u32) -> Run {
        let commit = Provenance { commit: Some("aaaa".to_owned()), dirty: false };
        Run {
            shard: Some(Shard { index, count }),
            executable: Some(format!("built for {index}")),
            ..Run::start("b", "s", Environment::cpu(), commit)
        }
    }

    #[test]
    fn shards_of_one_measurement_belong_together_and_others_do_not() {
        let with = |other: Run| differing(&[shard(1, 2), other]);
        assert_eq!(with(shard(2, 2)), None);
        let dirty = Provenance { dirty: true, ..shard(1, 2).provenance };
        let whole = Run { shard: None, ..shard(2, 2) };
        let elsewhere = Environment { threads: 99, ..Environment::cpu() };
        for (other, field) in [
            (shard(2, 3), "number of shards is `2`"),
            (whole, "number of shards"),
            (Run { provenance: dirty.clone(), ..shard(2, 2) }, "commit is `aaaa`"),
            (Run { effort: "quick".to_owned(), ..shard(2, 2) }, "effort"),
            (Run { seed: 2, ..shard(2, 2) }, "seed"),
            (Run { environment: elsewhere, ..shard(2, 2) }, "threads"),
        ] {
            let why = with(other).unwrap();
            assert!(why.starts_with(field), "{why}");
        }
        let changed = |index| Run { provenance: dirty.clone(), ..shard(index, 2) };
        let why = differing(&[changed(1), changed(2)]).unwrap();
        assert!(why.starts_with("executable is `built for 1` in the run s/b-1-of-2"), "{why}");
        // Whole runs are process runs, as ever.
        let whole = |seed| Run { shard: None, seed, ..shard(1, 1) };
        assert_eq!(differing(&[whole(1), whole(2)]), None);
    }

    #[test]
    fn what_several_shards_lack_is_missing() {
        assert_eq!(missing(&[shard(1, 4)]), [""; 0]);
        assert_eq!(missing(&[shard(1, 2), shard(2, 2)]), [""; 0]);
        assert_eq!(missing(&[shard(1, 4), shard(4, 4), shard(2, 4)]), ["b, shard 3/4"]);
    }
}
