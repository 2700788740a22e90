//! Chooses which shard records a merge uses: one record for each shard, and only from equally fast
//! cards.

use std::cmp::Ordering;
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
    /// Path of the shard's record file.
    pub record_path: PathBuf,
    /// Content hash of the record file, by which a file that was given twice is detected.
    pub record_hash: String,
    /// Name of the work that was divided into shards: "bench attention".
    pub divided_work_name: String,
    pub shard: ShardOfWork,
    /// Whether the shard's process ran to its end.
    pub shard_ran_to_end: bool,
    /// Start or end time of the shard's process: of several records of one shard, the earliest
    /// complete one is used.
    pub start_or_end_time: String,
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
pub struct MaxAnchorRateDifference(pub Option<f64>);

impl MaxAnchorRateDifference {
    /// Returns the largest relative difference of anchor rates with which shards on this kind of
    /// device (GPU or CPU) may be merged.
    fn anchor_rate_tolerance_on_device(self, environment: &RunEnvironment) -> f64 {
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
    #[serde(rename = "merged")]
    pub merged_shards: Vec<String>,
    /// Number of record files that were ignored because their content equals another given file.
    #[serde(rename = "identical")]
    pub identical_files: usize,
    /// Records that were not used because their shard has another, earlier or more complete record.
    pub superseded: Vec<UnmergedShardRecord>,
    /// Records that were not used because the shard's anchor rates could not be measured.
    pub without_anchor: Vec<UnmergedShardRecord>,
    /// Records that were not used because the shard's card is slower or faster than the other
    /// cards.
    #[serde(rename = "other_speed")]
    pub from_cards_of_other_speed: Vec<UnmergedShardRecord>,
    /// Names of merged shards whose process did not run to its end; their finished cases are used.
    #[serde(rename = "interrupted")]
    pub interrupted_shards: Vec<String>,
    /// Names of the shards for which no usable record was given.
    #[serde(rename = "missing")]
    pub missing_shards: Vec<String>,
    /// Numbers of the shards that are missing or interrupted in a merge and should be measured
    /// again.
    #[serde(skip)]
    pub shard_numbers_to_repeat: BTreeSet<u32>,
}

/// A shard record that a merge does not use, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct UnmergedShardRecord {
    /// Name of the shard: "bench attention, shard 1/4".
    #[serde(rename = "shard")]
    pub shard_name: String,
    /// Path of the record file.
    #[serde(rename = "file")]
    pub record_file: PathBuf,
    /// Reason why the merge does not use the shard's record, as a text.
    #[serde(rename = "why")]
    pub reason_not_merged: String,
}

impl ShardMergeAccount {
    /// Returns whether every shard was merged and ran to its end.
    pub fn has_every_shard_complete(&self) -> bool {
        self.missing_shards.is_empty() && self.interrupted_shards.is_empty()
    }

    /// Returns lines of text that state which shards were merged, not used, interrupted or missing.
    pub fn merge_report_lines(&self) -> Vec<String> {
        let mut lines = vec![format!("{} merged", counted_noun(self.merged_shards.len(), "shard"))];
        if self.identical_files > 0 {
            lines.push(format!("{} records were read more than once", self.identical_files));
        }
        for (what, records) in [
            ("not counted again", &self.superseded),
            ("excluded", &self.without_anchor),
            ("excluded", &self.from_cards_of_other_speed),
        ] {
            lines.extend(records.iter().map(|it| {
                format!(
                    "{what}: {} in {}: {}",
                    it.shard_name,
                    it.record_file.display(),
                    it.reason_not_merged
                )
            }));
        }
        lines.extend(self.interrupted_shards.iter().map(|shard| format!("interrupted: {shard}")));
        lines.extend(self.missing_shards.iter().map(|shard| format!("missing: {shard}")));
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
    tolerance: MaxAnchorRateDifference,
) -> (Vec<ShardRecordWithFile<T>>, ShardMergeAccount) {
    let mut account = ShardMergeAccount::default();
    pieces.sort_by(|one, other| {
        let key = |piece: &ShardRecordWithFile<T>| {
            (piece.divided_work_name.clone(), piece.shard, !piece.shard_ran_to_end)
        };
        key(one).cmp(&key(other)).then_with(|| order_by_time_hash_and_path(one, other))
    });
    let mut hashes = BTreeSet::new();
    let before = pieces.len();
    pieces.retain(|piece| hashes.insert(piece.record_hash.clone()));
    account.identical_files = before - pieces.len();
    let planned = pieces.iter().map(|it| (it.divided_work_name.clone(), it.shard.shard_count));
    let planned: BTreeMap<String, u32> = planned.collect();

    let (usable, failed): (Vec<_>, Vec<_>) = pieces
        .into_iter()
        .partition(|piece| !matches!(piece.anchors, Some(ShardAnchorRecord::NotMeasured(_))));
    account.without_anchor = failed
        .iter()
        .map(|piece| {
            let why = match &piece.anchors {
                Some(ShardAnchorRecord::NotMeasured(why)) => format!("its anchors failed: {why}"),
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
        tolerance.anchor_rate_tolerance_on_device(&piece.environment)
    });
    let outliers = find_shards_with_outlying_anchors(&anchors, tolerance);
    let mut kept: Vec<ShardRecordWithFile<T>> = Vec::new();
    for (index, piece) in usable.into_iter().enumerate() {
        if let Some(outlier) = outliers.iter().find(|outlier| outlier.shard_index == index) {
            let [low, high] = outlier.group;
            account.from_cards_of_other_speed.push(unmerged_shard_record(
                &piece,
                format!(
                    "its {} on {} is {:.3e} a second, those of the others are {low:.3e} to \
                     {high:.3e}, and {:.1} % is allowed",
                    outlier.anchor.anchor_name(),
                    piece.environment.id_of_gpus_or_host(),
                    outlier.anchor_rate_per_s,
                    100.0 * tolerance
                ),
            ));
            continue;
        }
        match kept.last() {
            Some(first) if is_of_same_shard(first, &piece) => {
                let why = format!("{} counts", first.record_path.display());
                account.superseded.push(unmerged_shard_record(&piece, why));
            }
            _ => kept.push(piece),
        }
    }
    let present: BTreeSet<(&str, u32)> =
        kept.iter().map(|piece| (&*piece.divided_work_name, piece.shard.index_from_one)).collect();
    for (work, count) in &planned {
        for index in (1..=*count).filter(|index| !present.contains(&(work, *index))) {
            let shard = ShardOfWork { index_from_one: index, shard_count: *count };
            account.missing_shards.push(shard_name(work, shard));
            account.shard_numbers_to_repeat.insert(index);
        }
    }
    let name = |piece: &ShardRecordWithFile<T>| shard_name(&piece.divided_work_name, piece.shard);
    account.merged_shards = kept.iter().map(name).collect();
    for piece in kept.iter().filter(|piece| !piece.shard_ran_to_end) {
        account.interrupted_shards.push(name(piece));
        account.shard_numbers_to_repeat.insert(piece.shard.index_from_one);
    }
    (kept, account)
}

/// Order of two records of one shard that ran equally far: by time, then by hash and path.
fn order_by_time_hash_and_path<T>(
    one: &ShardRecordWithFile<T>,
    other: &ShardRecordWithFile<T>,
) -> Ordering {
    let by_time = one.start_or_end_time.cmp(&other.start_or_end_time);
    let by_hash = by_time.then_with(|| one.record_hash.cmp(&other.record_hash));
    by_hash.then_with(|| one.record_path.cmp(&other.record_path))
}

/// Whether two records are of the same shard of the same divided work.
fn is_of_same_shard<T>(one: &ShardRecordWithFile<T>, other: &ShardRecordWithFile<T>) -> bool {
    one.divided_work_name == other.divided_work_name && one.shard == other.shard
}

fn unmerged_shard_record<T>(piece: &ShardRecordWithFile<T>, why: String) -> UnmergedShardRecord {
    UnmergedShardRecord {
        shard_name: shard_name(&piece.divided_work_name, piece.shard),
        record_file: piece.record_path.clone(),
        reason_not_merged: why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::measure::power::TimingPowerMode;

    fn test_record_at_time(index: u32, time: &str) -> ShardRecordWithFile<()> {
        let anchors = AnchorRatesOfDevice {
            power: TimingPowerMode::SteadyLoad,
            memory_bytes_per_s: 4e12,
            matmul_flops_per_s: Some(9e14),
        };
        ShardRecordWithFile {
            record_path: format!("{index}-{time}.json").into(),
            record_hash: format!("{index}-{time}"),
            divided_work_name: "bench b".to_owned(),
            shard: ShardOfWork { index_from_one: index, shard_count: 3 },
            shard_ran_to_end: true,
            start_or_end_time: time.to_owned(),
            environment: RunEnvironment::environment_of_process_on_cpu(),
            anchors: Some(ShardAnchorRecord::Measured(anchors)),
            record: (),
        }
    }

    fn names_of_chosen_records(
        pieces: &[ShardRecordWithFile<()>],
    ) -> (Vec<String>, ShardMergeAccount) {
        let (kept, account) =
            choose_records_to_merge(pieces.to_vec(), MaxAnchorRateDifference::default());
        let mut reversed = pieces.to_vec();
        reversed.reverse();
        let again = choose_records_to_merge(reversed, MaxAnchorRateDifference::default()).1;
        assert_eq!(account, again, "the order of records must not matter");
        (kept.into_iter().map(|piece| piece.record_hash).collect(), account)
    }

    #[test]
    fn the_first_complete_record_of_a_shard_is_merged_once() {
        let interrupted =
            ShardRecordWithFile { shard_ran_to_end: false, ..test_record_at_time(1, "t0") };
        let copy =
            ShardRecordWithFile { record_path: "copy.json".into(), ..test_record_at_time(2, "t1") };
        let (kept, account) = names_of_chosen_records(&[
            interrupted,
            test_record_at_time(1, "t2"),
            test_record_at_time(1, "t1"),
            test_record_at_time(2, "t1"),
            copy,
            test_record_at_time(3, "t1"),
        ]);
        assert_eq!(kept, ["1-t1", "2-t1", "3-t1"]);
        assert_eq!(account.identical_files, 1);
        let others: Vec<&str> =
            account.superseded.iter().filter_map(|it| it.record_file.to_str()).collect();
        assert_eq!(others, ["1-t2.json", "1-t0.json"]);
        assert!(account.has_every_shard_complete());
    }

    #[test]
    fn missing_and_interrupted_shards_are_named() {
        let interrupted =
            ShardRecordWithFile { shard_ran_to_end: false, ..test_record_at_time(1, "t0") };
        let (_, account) = names_of_chosen_records(&[interrupted, test_record_at_time(3, "t0")]);
        assert_eq!(account.missing_shards, ["bench b, shard 2/3"]);
        assert_eq!(account.interrupted_shards, ["bench b, shard 1/3"]);
        assert!(!account.has_every_shard_complete());
    }

    #[test]
    fn a_shard_on_a_slow_card_or_without_anchor_is_excluded_and_may_be_repeated() {
        let slow = |index, time: &str| {
            let anchors = AnchorRatesOfDevice {
                power: TimingPowerMode::SteadyLoad,
                memory_bytes_per_s: 2e12,
                matmul_flops_per_s: Some(9e14),
            };
            ShardRecordWithFile {
                anchors: Some(ShardAnchorRecord::Measured(anchors)),
                ..test_record_at_time(index, time)
            }
        };
        let failed = Some(ShardAnchorRecord::NotMeasured("no memory".to_owned()));
        let (kept, account) = names_of_chosen_records(&[
            test_record_at_time(1, "t0"),
            slow(2, "t0"),
            test_record_at_time(2, "t1"),
            ShardRecordWithFile { anchors: failed, ..test_record_at_time(3, "t0") },
        ]);
        assert_eq!(kept, ["1-t0", "2-t1"]);
        insta::assert_snapshot!(account.from_cards_of_other_speed[0].reason_not_merged, @"its memory ceiling on host efdf3622a9257e53 is 2.000e12 a second, those of the others are 4.000e12 to 4.000e12, and 30.0 % is allowed");
        insta::assert_snapshot!(account.without_anchor[0].reason_not_merged, @"its anchors failed: no memory");
        assert_eq!(account.missing_shards, ["bench b, shard 3/3"]);
    }
}
