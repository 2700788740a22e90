//! Chooses the records of shards that count: each shard once, and only from equally fast cards.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Serialize;

use super::anchors::{MAX_GPU_ANCHOR_DIFFERENCE, MAX_HOST_ANCHOR_DIFFERENCE, anchor_outliers};
use kernelgate::display::counted_noun;
use kernelgate::measure::anchors::{AnchorRates, AnchorRecord};
use kernelgate::record::{Environment, Shard};

/// The record of one shard, with the file that it was read from.
#[derive(Debug, Clone)]
pub struct RecordPiece<T> {
    /// File of the record.
    pub path: PathBuf,
    /// Hash of the record file's content.
    pub hash: String,
    /// Name of the divided work: "bench attention".
    pub work: String,
    pub shard: Shard,
    /// Whether the process ran to its end.
    pub complete: bool,
    /// Start or end of the process: the earlier of two records counts.
    pub time: String,
    /// Device and build.
    pub environment: Environment,
    /// Anchors: rates of fixed work on the device of the shard.
    pub anchors: Option<AnchorRecord>,
    pub record: T,
}

/// Allowed relative difference of anchors, if the user or a calibration sets it.
#[derive(Debug, Clone, Copy, Default)]
pub struct AnchorTolerance(pub Option<f64>);

impl AnchorTolerance {
    /// Returns the relative difference of anchor rates that is allowed between cards of a device.
    fn on(self, environment: &Environment) -> f64 {
        let usual = if environment.is_on_host() {
            MAX_HOST_ANCHOR_DIFFERENCE
        } else {
            MAX_GPU_ANCHOR_DIFFERENCE
        };
        self.0.unwrap_or(usual)
    }
}

/// Counts of the records that were read: used, replaced, or excluded with the reason.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct MergeAccount {
    /// Shards whose records were merged, each as "bench attention, shard 1/4".
    pub merged: Vec<String>,
    /// Number of records that were given more than once.
    pub identical: usize,
    /// Further records of a shard that has a record already.
    pub superseded: Vec<UnusedRecord>,
    /// Shards whose anchor rates could not be measured.
    pub without_anchor: Vec<UnusedRecord>,
    /// Shards whose cards are slower or faster than the other cards.
    pub other_speed: Vec<UnusedRecord>,
    /// Shards whose process did not run to its end; their finished cases count.
    pub interrupted: Vec<String>,
    /// Shards without a usable record.
    pub missing: Vec<String>,
    /// Numbers of the shards that are missing or interrupted.
    #[serde(skip)]
    pub lacking: BTreeSet<u32>,
}

/// A record that a merge does not use, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct UnusedRecord {
    /// Name of the shard: "bench attention, shard 1/4".
    pub shard: String,
    /// File of the record.
    pub file: PathBuf,
    /// The reason.
    pub why: String,
}

impl MergeAccount {
    /// Returns whether every shard was merged and is complete.
    pub fn is_whole(&self) -> bool {
        self.missing.is_empty() && self.interrupted.is_empty()
    }

    /// Says in lines of text which shards were merged, replaced or excluded.
    pub fn lines(&self) -> Vec<String> {
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

fn name(work: &str, shard: Shard) -> String {
    format!("{work}, shard {shard}")
}

/// The records that count, in order of work and shard, whatever the order of `pieces`.
pub fn choose_pieces<T>(
    mut pieces: Vec<RecordPiece<T>>,
    tolerance: AnchorTolerance,
) -> (Vec<RecordPiece<T>>, MergeAccount) {
    let mut account = MergeAccount::default();
    pieces.sort_by(|one, other| {
        let key = |piece: &RecordPiece<T>| (piece.work.clone(), piece.shard, !piece.complete);
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
        .partition(|piece| !matches!(piece.anchors, Some(AnchorRecord::Failed(_))));
    account.without_anchor = failed
        .iter()
        .map(|piece| {
            let why = match &piece.anchors {
                Some(AnchorRecord::Failed(why)) => format!("its anchors failed: {why}"),
                _ => String::new(),
            };
            unused_record(piece, why)
        })
        .collect();
    let anchors: Vec<Option<AnchorRates>> = usable
        .iter()
        .map(|piece| match piece.anchors {
            Some(AnchorRecord::Measured(anchors)) => Some(anchors),
            _ => None,
        })
        .collect();
    let tolerance =
        usable.first().map_or(MAX_GPU_ANCHOR_DIFFERENCE, |piece| tolerance.on(&piece.environment));
    let outliers = anchor_outliers(&anchors, tolerance);
    let mut kept: Vec<RecordPiece<T>> = Vec::new();
    for (index, piece) in usable.into_iter().enumerate() {
        if let Some(outlier) = outliers.iter().find(|outlier| outlier.index == index) {
            let [low, high] = outlier.group;
            account.other_speed.push(unused_record(
                &piece,
                format!(
                    "its {} on {} is {:.3e} a second, those of the others are {low:.3e} to \
                     {high:.3e}, and {:.1} % is allowed",
                    outlier.anchor.name(),
                    piece.environment.device_identifier(),
                    outlier.rate,
                    100.0 * tolerance
                ),
            ));
            continue;
        }
        match kept.last() {
            Some(first) if first.work == piece.work && first.shard == piece.shard => {
                let why = format!("{} counts", first.path.display());
                account.superseded.push(unused_record(&piece, why));
            }
            _ => kept.push(piece),
        }
    }
    let present: BTreeSet<(&str, u32)> =
        kept.iter().map(|piece| (&*piece.work, piece.shard.index)).collect();
    for (work, count) in &planned {
        for index in (1..=*count).filter(|index| !present.contains(&(work, *index))) {
            account.missing.push(name(work, Shard { index, count: *count }));
            account.lacking.insert(index);
        }
    }
    account.merged = kept.iter().map(|piece| name(&piece.work, piece.shard)).collect();
    for piece in kept.iter().filter(|piece| !piece.complete) {
        account.interrupted.push(name(&piece.work, piece.shard));
        account.lacking.insert(piece.shard.index);
    }
    (kept, account)
}

fn unused_record<T>(piece: &RecordPiece<T>, why: String) -> UnusedRecord {
    UnusedRecord { shard: name(&piece.work, piece.shard), file: piece.path.clone(), why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::measure::power::PowerMode;

    fn piece_at_time(index: u32, time: &str) -> RecordPiece<()> {
        let anchors = AnchorRates {
            power: PowerMode::Steady,
            memory_bytes_per_s: 4e12,
            matmul_flops_per_s: Some(9e14),
        };
        RecordPiece {
            path: format!("{index}-{time}.json").into(),
            hash: format!("{index}-{time}"),
            work: "bench b".to_owned(),
            shard: Shard { index, count: 3 },
            complete: true,
            time: time.to_owned(),
            environment: Environment::cpu(),
            anchors: Some(AnchorRecord::Measured(anchors)),
            record: (),
        }
    }

    fn chosen_piece_names(pieces: &[RecordPiece<()>]) -> (Vec<String>, MergeAccount) {
        let (kept, account) = choose_pieces(pieces.to_vec(), AnchorTolerance::default());
        let mut reversed = pieces.to_vec();
        reversed.reverse();
        let again = choose_pieces(reversed, AnchorTolerance::default()).1;
        assert_eq!(account, again, "the order of records must not matter");
        (kept.into_iter().map(|piece| piece.hash).collect(), account)
    }

    #[test]
    fn the_first_complete_record_of_a_shard_is_merged_once() {
        let interrupted = RecordPiece { complete: false, ..piece_at_time(1, "t0") };
        let copy = RecordPiece { path: "copy.json".into(), ..piece_at_time(2, "t1") };
        let (kept, account) = chosen_piece_names(&[
            interrupted,
            piece_at_time(1, "t2"),
            piece_at_time(1, "t1"),
            piece_at_time(2, "t1"),
            copy,
            piece_at_time(3, "t1"),
        ]);
        assert_eq!(kept, ["1-t1", "2-t1", "3-t1"]);
        assert_eq!(account.identical, 1);
        let others: Vec<&str> =
            account.superseded.iter().filter_map(|it| it.file.to_str()).collect();
        assert_eq!(others, ["1-t2.json", "1-t0.json"]);
        assert!(account.is_whole());
    }

    #[test]
    fn missing_and_interrupted_shards_are_named() {
        let interrupted = RecordPiece { complete: false, ..piece_at_time(1, "t0") };
        let (_, account) = chosen_piece_names(&[interrupted, piece_at_time(3, "t0")]);
        assert_eq!(account.missing, ["bench b, shard 2/3"]);
        assert_eq!(account.interrupted, ["bench b, shard 1/3"]);
        assert!(!account.is_whole());
    }

    #[test]
    fn a_shard_on_a_slow_card_or_without_anchor_is_excluded_and_may_be_repeated() {
        let slow = |index, time: &str| {
            let anchors = AnchorRates {
                power: PowerMode::Steady,
                memory_bytes_per_s: 2e12,
                matmul_flops_per_s: Some(9e14),
            };
            RecordPiece {
                anchors: Some(AnchorRecord::Measured(anchors)),
                ..piece_at_time(index, time)
            }
        };
        let failed = Some(AnchorRecord::Failed("no memory".to_owned()));
        let (kept, account) = chosen_piece_names(&[
            piece_at_time(1, "t0"),
            slow(2, "t0"),
            piece_at_time(2, "t1"),
            RecordPiece { anchors: failed, ..piece_at_time(3, "t0") },
        ]);
        assert_eq!(kept, ["1-t0", "2-t1"]);
        insta::assert_snapshot!(account.other_speed[0].why, @"its memory ceiling on host efdf3622a9257e53 is 2.000e12 a second, those of the others are 4.000e12 to 4.000e12, and 30.0 % is allowed");
        insta::assert_snapshot!(account.without_anchor[0].why, @"its anchors failed: no memory");
        assert_eq!(account.missing, ["bench b, shard 3/3"]);
    }
}
