//! The least time that a launch may have taken, which refuses what cannot be true.
//!
//! It differs from the limit that is shown. Between two measured working sets the limit is
//! interpolated, while on a card the bandwidth falls all at once where its L2 ends, which may be
//! anywhere between them; and after a flush writes land in L2, while the limit takes them to memory.
//! Deliberately absent: the limit itself, and what "much faster" is ([`TimeLimit::broken_by`]).

use super::{Bandwidth, Limits, TimeLimit};
use crate::measure::Cache;
use crate::workload::Work;

/// A cache that serves more than half of a working set is larger than half of it, and neighbours of
/// the measured working sets are a factor of four apart: one of those from an eighth of it on shows
/// the bandwidth of that cache.
const SMALLER: u64 = 8;

impl Limits {
    /// The least time for the work at the fastest bandwidths that it may have found: the largest of
    /// memory and each unit. With hot caches those of the measured working sets from an eighth of
    /// its own to the next larger one; with cold ones reads at memory's, writes concurrent with them
    /// at the fastest of those working sets.
    pub fn floor(&self, work: &Work, cache: Cache) -> Option<TimeLimit> {
        let (read, write) = (work.read_bytes, work.write_bytes);
        let memory_ns = match cache {
            Cache::Hot => self
                .about(read.saturating_add(write))
                .map(|at| at.time_ns(read, write))
                .min_by(f64::total_cmp),
            Cache::Cold => self.bandwidth.last().map(|memory| {
                let rate = self.about(write).map(|at| at.write).fold(memory.write, f64::max);
                (read as f64 / memory.read).max(write as f64 / rate) * 1e9
            }),
        };
        let memory = memory_ns.map(|time_ns| TimeLimit { time_ns, by: "memory".to_owned() });
        let bounds = memory.into_iter().chain(self.unit_bounds(work));
        bounds.filter(|bound| bound.time_ns > 0.0).max_by(|a, b| a.time_ns.total_cmp(&b.time_ns))
    }

    /// The measured working sets from an eighth of one to the next larger one; the largest where all
    /// are smaller than that.
    fn about(&self, working_set_bytes: u64) -> impl Iterator<Item = &Bandwidth> {
        let sets = &self.bandwidth;
        let end = sets.partition_point(|set| set.working_set_bytes < working_set_bytes) + 1;
        let sets = &sets[..end.min(sets.len())];
        let least = working_set_bytes / SMALLER;
        let begin = sets.partition_point(|set| set.working_set_bytes < least);
        sets[begin.min(sets.len().saturating_sub(1))..].iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Dtype, Unit};

    const MIB: u64 = 1 << 20;

    /// Ceilings of a card with so large an L2: bandwidths of L2 and of memory, in GB/s.
    fn card(l2_bytes: u64, [l2, memory]: [f64; 2]) -> Limits {
        let at = |bytes: u64| {
            let rate = 1e9 * if bytes <= l2_bytes { l2 } else { memory };
            // A copy in L2 is as fast as reads are; writes of both are somewhat slower.
            Bandwidth { working_set_bytes: bytes, read: rate, copy: rate, write: 0.8 * rate }
        };
        let bandwidth = [2, 8, 32, 128, 512, 2048].map(|mib| at(mib * MIB)).to_vec();
        Limits { bandwidth, ..Limits::default() }
    }

    /// Whether so many bytes read and written in so many nanoseconds are refused.
    fn refused(limits: &Limits, (read, write): (u64, u64), cache: Cache, time_ns: f64) -> bool {
        let floor = limits.floor(&Work::bytes(read, write), cache).unwrap();
        floor.broken_by(&[time_ns]).is_some()
    }

    #[test]
    fn a_hot_case_that_fits_a_large_cache_may_be_as_fast_as_the_cache() {
        // 72 MB, 5 TB/s and 1 TB/s: 64 MB between the working sets of 32 and 128 MiB.
        let limits = card(72_000_000, [5000.0, 1000.0]);
        let honest_ns = 64e6 / 4900.0;
        let shown = limits.bound(&Work::bytes(64_000_000, 0), Cache::Hot).unwrap();
        assert!(shown.broken_by(&[honest_ns]).is_some(), "the limit that is shown says nothing");
        let hot = |time_ns| refused(&limits, (64_000_000, 0), Cache::Hot, time_ns);
        assert!(!hot(honest_ns));
        assert!(hot(0.4 * honest_ns));
        // 126 MB of L2, of which the working set of 128 MiB shows nothing.
        let limits = card(126_000_000, [10_000.0, 8000.0]);
        assert!(!refused(&limits, (120_000_000, 0), Cache::Hot, 120e6 / 9900.0));
        assert!(refused(&limits, (120_000_000, 0), Cache::Hot, 120e6 / 21_000.0));
    }

    #[test]
    fn a_hot_case_far_beyond_the_caches_is_held_against_memory() {
        let limits = card(72_000_000, [5000.0, 1000.0]);
        for mib in [300, 1000, 2048, 40_000] {
            let bytes = mib * MIB;
            let refused = |rate| refused(&limits, (bytes, 0), Cache::Hot, bytes as f64 / rate);
            assert!(!refused(1900.0), "{mib} MiB");
            assert!(refused(2100.0), "{mib} MiB");
        }
        // And a small one against what caches give.
        assert!(!refused(&limits, (1000, 0), Cache::Hot, 0.11));
        assert!(refused(&limits, (1000, 0), Cache::Hot, 0.09));
    }

    #[test]
    fn writes_of_a_cold_case_may_land_in_the_cache() {
        let limits = card(72_000_000, [5000.0, 1000.0]);
        let cold = |read, write, time_ns| refused(&limits, (read, write), Cache::Cold, time_ns);
        // 48 MB written at 4 TB/s.
        let honest_ns = 48e6 / 3900.0;
        let shown = limits.bound(&Work::bytes(0, 48_000_000), Cache::Cold).unwrap();
        assert!(shown.broken_by(&[honest_ns]).is_some(), "the limit that is shown says nothing");
        assert!(!cold(0, 48_000_000, honest_ns));
        assert!(cold(0, 48_000_000, 0.4 * honest_ns));
        // Reads come from memory, and writes may go on meanwhile.
        assert!(!cold(12_000_000, 48_000_000, 12_300.0));
        assert!(!cold(48_000_000, 12_000_000, 49_000.0));
        assert!(cold(48_000_000, 12_000_000, 23_000.0));
        // What is written far beyond any cache goes to memory.
        assert!(cold(0, 2048 * MIB, 2048.0 * MIB as f64 / 1700.0));
    }

    #[test]
    fn units_bound_as_they_do_in_the_limit() {
        let mut limits = card(72_000_000, [5000.0, 1000.0]);
        limits.flops_per_s.insert("matmul f32".to_owned(), 1e9);
        let work = Work::bytes(4, 0).with_flops(Unit::Matmul, Dtype::F32, 5_000);
        let expected = Some(TimeLimit { time_ns: 5000.0, by: "matmul f32".to_owned() });
        assert_eq!(limits.floor(&work, Cache::Hot), expected);
        assert_eq!(limits.floor(&Work::default(), Cache::Cold), None);
        assert_eq!(Limits::default().floor(&Work::bytes(4, 4), Cache::Hot), None);
    }
}
