//! Chooses which shard records a merge uses: one record for each shard, and only from equally fast
//! cards.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Serialize;

use super::anchors::{
    MAX_GPU_ANCHOR_RATE_DIFFERENCE, MAX_HOST_ANCHOR_RATE_DIFFERENCE,
    find_shards_with_outlying_anchors,
};
use kernelgate::display::counted_noun;
use kernelgate::measure::anchors::{AnchorRatesOfDevice, ShardAnchorRecord};
use kernelgate::record::{RunEnvironment, ShardOfWork};

/// The record of one shard, with the file that it was read from and the facts that decide whether a
/// merge uses it.
#[derive(Debug, Clone)]
pub struct ShardRecordWithFile<T> {
    /// Path of the record file.
    pub path: PathBuf,
    /// Content hash of the record file, by which a file that was given twice is detected.
    pub hash: String,
    /// Name of the work that was divided into shards: "bench attention".
    pub work: String,
    pub shard: ShardOfWork,
    /// Whether the shard's process ran to its end.
    pub complete: bool,
    /// Start or end time of the shard's process: of several records of one shard, the earliest
    /// complete one is used.
    pub time: String,
    /// Device and build with which the record was measured.
    pub environment: RunEnvironment,
    /// Anchors: rates of fixed work on the device that ran the shard; `None` if the record has
    /// none.
    pub anchors: Option<ShardAnchorRecord>,
    pub record: T,
}

/// Largest relative difference of anchor rates between merged shards, if the user or a calibration
/// sets it; `None` for the default.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnchorTolerance(pub Option<f64>);

impl AnchorTolerance {
    /// Returns the largest relative difference of anchor rates with which shards on this kind of
    /// device (GPU or CPU) may be merged.
    fn tolerance_on_device(self, environment: &RunEnvironment) -> f64 {
        let usual = if environment.is_cpu_run() {
            MAX_HOST_ANCHOR_RATE_DIFFERENCE
        } else {
            MAX_GPU_ANCHOR_RATE_DIFFERENCE
        };
        self.0.unwrap_or(usual)
    }
}

/// Account of a merge: which shard records were used, and which were not, with the reasons.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ShardMergeAccount {
    /// Names of the shards whose records were merged: "bench attention, shard 1/4".
    pub merged: Vec<String>,
    /// Number of record files that were ignored because their content equals another given file.
    pub identical: usize,
    /// Records that were not used because their shard has another, earlier or more complete record.
    pub superseded: Vec<UnmergedShardRecord>,
    /// Records that were not used because the shard's anchor rates could not be measured.
    pub without_anchor: Vec<UnmergedShardRecord>,
    /// Records that were not used because the shard's card is slower or faster than the other
    /// cards.
    pub other_speed: Vec<UnmergedShardRecord>,
    /// Names of merged shards whose process did not run to its end; their finished cases are used.
    pub interrupted: Vec<String>,
    /// Names of the shards for which no usable record was given.
    pub missing: Vec<String>,
    /// Numbers of the shards that are missing or interrupted and should be repeated.
    #[serde(skip)]
    pub lacking: BTreeSet<u32>,
}

/// A shard record that a merge does not use, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct UnmergedShardRecord {
    /// Name of the shard: "bench attention, shard 1/4".
    pub shard: String,
    /// Path of the record file.
    pub file: PathBuf,
    /// Reason for this entry, as a text.
    pub why: String,
}

impl ShardMergeAccount {
    /// Returns whether every shard was merged and ran to its end.
    pub fn has_every_shard_complete(&self) -> bool {
        self.missing.is_empty() && self.interrupted.is_empty()
    }

    /// Returns lines of text that state which shards were merged, not used, interrupted or missing.
    pub fn report_lines(&self) -> Vec<String> {
        let mut lines = vec![format!("{} merged", counted_noun(self.merged.len(), "shard"))];
        if self.identical > 0 {
            lines.push(format!("{} records were read more than once", self.identical));
        }
        for (what, records) in [
            ("not counted again", &self.superseded),
            ("excluded", &self.without_anchor),
            ("excluded", &self.other_speed),
        ] {
            lines.extend(
                records
                    .iter()
                    .map(|it| format!("{what}: {} in {}: {}", it.shard, it.file.display(), it.why)),
            );
        }
        lines.extend(self.interrupted.iter().map(|shard| format!("interrupted: {shard}")));
        lines.extend(self.missing.iter().map(|shard| format!("missing: {shard}")));
        lines
    }
}

fn shard_name(work: &str, shard: ShardOfWork) -> String {
    format!("{work}, shard {shard}")
}

/// Returns the shard records that a merge uses, sorted by work and shard independently of the order
/// of `pieces`, and the account of the others.
pub fn choose_records_to_merge<T>(
    mut pieces: Vec<ShardRecordWithFile<T>>,
    tolerance: AnchorTolerance,
) -> (Vec<ShardRecordWithFile<T>>, ShardMergeAccount) {
    let mut account = ShardMergeAccount::default();
    pieces.sort_by(|one, other| {
        let key =
            |piece: &ShardRecordWithFile<T>| (piece.work.clone(), piece.shard, !piece.complete);
        let later =
            || (&one.time, &one.hash, &one.path).cmp(&(&other.time, &other.hash, &other.path));
        key(one).cmp(&key(other)).then_with(later)
    });
    let mut hashes = BTreeSet::new();
    let before = pieces.len();
    pieces.retain(|piece| hashes.insert(piece.hash.clone()));
    account.identical = before - pieces.len();
    let planned: BTreeMap<String, u32> =
        pieces.iter().map(|piece| (piece.work.clone(), piece.shard.count)).collect();

    let (usable, failed): (Vec<_>, Vec<_>) = pieces
        .into_iter()
        .partition(|piece| !matches!(piece.anchors, Some(ShardAnchorRecord::Failed(_))));
    account.without_anchor = failed
        .iter()
        .map(|piece| {
            let why = match &piece.anchors {
                Some(ShardAnchorRecord::Failed(why)) => format!("its anchors failed: {why}"),
                _ => String::new(),
            };
            unmerged_shard_record(piece, why)
        })
        .collect();
    let anchors: Vec<Option<AnchorRatesOfDevice>> = usable
        .iter()
        .map(|piece| match piece.anchors {
            Some(ShardAnchorRecord::Measured(anchors)) => Some(anchors),
            _ => None,
        })
        .collect();
    let tolerance = usable.first().map_or(MAX_GPU_ANCHOR_RATE_DIFFERENCE, |piece| {
        tolerance.tolerance_on_device(&piece.environment)
    });
    let outliers = find_shards_with_outlying_anchors(&anchors, tolerance);
    let mut kept: Vec<ShardRecordWithFile<T>> = Vec::new();
    for (index, piece) in usable.into_iter().enumerate() {
        if let Some(outlier) = outliers.iter().find(|outlier| outlier.shard_index == index) {
            let [low, high] = outlier.group;
            account.other_speed.push(unmerged_shard_record(
                &piece,
                format!(
                    "its {} on {} is {:.3e} a second, those of the others are {low:.3e} to \
                     {high:.3e}, and {:.1} % is allowed",
                    outlier.anchor.anchor_name(),
                    piece.environment.id_of_gpus_or_host(),
                    outlier.rate,
                    100.0 * tolerance
                ),
            ));
            continue;
        }
        match kept.last() {
            Some(first) if first.work == piece.work && first.shard == piece.shard => {
                let why = format!("{} counts", first.path.display());
                account.superseded.push(unmerged_shard_record(&piece, why));
            }
            _ => kept.push(piece),
        }
    }
    let present: BTreeSet<(&str, u32)> =
        kept.iter().map(|piece| (&*piece.work, piece.shard.index)).collect();
    for (work, count) in &planned {
        for index in (1..=*count).filter(|index| !present.contains(&(work, *index))) {
            account.missing.push(shard_name(work, ShardOfWork { index, count: *count }));
            account.lacking.insert(index);
        }
    }
    account.merged = kept.iter().map(|piece| shard_name(&piece.work, piece.shard)).collect();
    for piece in kept.iter().filter(|piece| !piece.complete) {
        account.interrupted.push(shard_name(&piece.work, piece.shard));
        account.lacking.insert(piece.shard.index);
    }
    (kept, account)
}

fn unmerged_shard_record<T>(piece: &ShardRecordWithFile<T>, why: String) -> UnmergedShardRecord {
    UnmergedShardRecord {
        shard: shard_name(&piece.work, piece.shard),
        file: piece.path.clone(),
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::measure::power::TimingPowerMode;

    fn test_record_at_time(index: u32, time: &str) -> ShardRecordWithFile<()> {
        let anchors = AnchorRatesOfDevice {
            power: TimingPowerMode::Steady,
            memory_bytes_per_s: 4e12,
            matmul_flops_per_s: Some(9e14),
        };
        ShardRecordWithFile {
            path: format!("{index}-{time}.json").into(),
            hash: format!("{index}-{time}"),
            work: "bench b".to_owned(),
            shard: ShardOfWork { index, count: 3 },
            complete: true,
            time: time.to_owned(),
            environment: RunEnvironment::environment_of_process_on_cpu(),
            anchors: Some(ShardAnchorRecord::Measured(anchors)),
            record: (),
        }
    }

    fn names_of_chosen_records(
        pieces: &[ShardRecordWithFile<()>],
    ) -> (Vec<String>, ShardMergeAccount) {
        let (kept, account) = choose_records_to_merge(pieces.to_vec(), AnchorTolerance::default());
        let mut reversed = pieces.to_vec();
        reversed.reverse();
        let again = choose_records_to_merge(reversed, AnchorTolerance::default()).1;
        assert_eq!(account, again, "the order of records must not matter");
        (kept.into_iter().map(|piece| piece.hash).collect(), account)
    }

    #[test]
    fn the_first_complete_record_of_a_shard_is_merged_once() {
        let interrupted = ShardRecordWithFile { complete: false, ..test_record_at_time(1, "t0") };
        let copy = ShardRecordWithFile { path: "copy.json".into(), ..test_record_at_time(2, "t1") };
        let (kept, account) = names_of_chosen_records(&[
            interrupted,
            test_record_at_time(1, "t2"),
            test_record_at_time(1, "t1"),
            test_record_at_time(2, "t1"),
            copy,
            test_record_at_time(3, "t1"),
        ]);
        assert_eq!(kept, ["1-t1", "2-t1", "3-t1"]);
        assert_eq!(account.identical, 1);
        let others: Vec<&str> =
            account.superseded.iter().filter_map(|it| it.file.to_str()).collect();
        assert_eq!(others, ["1-t2.json", "1-t0.json"]);
        assert!(account.has_every_shard_complete());
    }

    #[test]
    fn missing_and_interrupted_shards_are_named() {
        let interrupted = ShardRecordWithFile { complete: false, ..test_record_at_time(1, "t0") };
        let (_, account) = names_of_chosen_records(&[interrupted, test_record_at_time(3, "t0")]);
        assert_eq!(account.missing, ["bench b, shard 2/3"]);
        assert_eq!(account.interrupted, ["bench b, shard 1/3"]);
        assert!(!account.has_every_shard_complete());
    }

    #[test]
    fn a_shard_on_a_slow_card_or_without_anchor_is_excluded_and_may_be_repeated() {
        let slow = |index, time: &str| {
            let anchors = AnchorRatesOfDevice {
                power: TimingPowerMode::Steady,
                memory_bytes_per_s: 2e12,
                matmul_flops_per_s: Some(9e14),
            };
            ShardRecordWithFile {
                anchors: Some(ShardAnchorRecord::Measured(anchors)),
                ..test_record_at_time(index, time)
            }
        };
        let failed = Some(ShardAnchorRecord::Failed("no memory".to_owned()));
        let (kept, account) = names_of_chosen_records(&[
            test_record_at_time(1, "t0"),
            slow(2, "t0"),
            test_record_at_time(2, "t1"),
            ShardRecordWithFile { anchors: failed, ..test_record_at_time(3, "t0") },
        ]);
        assert_eq!(kept, ["1-t0", "2-t1"]);
        insta::assert_snapshot!(account.other_speed[0].why, @"its memory ceiling on host efdf3622a9257e53 is 2.000e12 a second, those of the others are 4.000e12 to 4.000e12, and 30.0 % is allowed");
        insta::assert_snapshot!(account.without_anchor[0].why, @"its anchors failed: no memory");
        assert_eq!(account.missing, ["bench b, shard 3/3"]);
    }
}
