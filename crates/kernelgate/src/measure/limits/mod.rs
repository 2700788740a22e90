//! The device's measured ceilings, and the time they allow for declared work.
//!
//! Bandwidth depends on where the working set lives, so it is measured at several sizes and
//! interpolated between them: a case whose data fits a cache is bounded by the bandwidth of that
//! cache. Fractions are not clamped: above 100 % is a finding.

mod cpu;
#[cfg(feature = "matmul-ceiling")]
mod cpu_matmul;
mod cuda;
mod fastest;
mod floor;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Cache, possible};
use crate::stats;
use crate::workload::Work;

/// Measured ceilings of a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Bandwidths by working set, smallest first.
    pub bandwidth: Vec<Bandwidth>,
    /// Operations a second, by unit and dtype ("matmul f32").
    pub flops_per_s: BTreeMap<String, f64>,
    /// What launching costs, on a device that is launched on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead: Option<Overhead>,
    /// SM clock while the ceilings were measured, MHz, by what a limit is set by ("memory",
    /// "matmul f32"); empty where the device does not tell.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub clock_mhz: BTreeMap<String, f64>,
}

/// What launching and timing cost on a GPU, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Overhead {
    /// Between two events with nothing between them.
    pub event_pair_ns: f64,
    /// An empty kernel between its neighbours in a stream.
    pub launch_ns: f64,
    /// An empty kernel between its neighbours in a graph.
    pub graph_node_ns: f64,
    /// The host's part of a launch.
    pub host_launch_ns: f64,
    /// What a pair of events adds to a launch between them; subtracted from every such interval.
    pub around_launch_ns: f64,
    /// What a pair of events adds to a graph between them; subtracted from every such interval.
    pub around_graph_ns: f64,
}

/// Bandwidths with one working set: all bytes that the pass touches.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Bytes touched.
    pub working_set_bytes: u64,
    /// Bytes a second when everything is read.
    pub read: f64,
    /// Bytes a second when half is read and half is written, both counted.
    pub copy: f64,
    /// Bytes a second when everything is written.
    pub write: f64,
}

impl Bandwidth {
    /// Reads cost what the read pass measured; writes concurrent with reads cost what a copy takes
    /// beyond its reads. Nanoseconds.
    fn time_ns(&self, read_bytes: u64, write_bytes: u64) -> f64 {
        // What a copy takes beyond its reads; inside a cache the two overlap, and then half the
        // time of writes alone is the least.
        let beside_reads = (2.0 / self.copy - 1.0 / self.read).max(0.5 / self.write);
        let write_s = if read_bytes == 0 { 1.0 / self.write } else { beside_reads };
        (read_bytes as f64 / self.read + write_bytes as f64 * write_s) * 1e9
    }
}

/// The time that the ceilings allow, and which ceiling sets it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TimeLimit {
    /// Nanoseconds a launch.
    pub time_ns: f64,
    /// "memory", or the unit: "matmul f32".
    pub by: String,
}

impl TimeLimit {
    /// What deserialising does not enforce.
    ///
    /// # Errors
    /// A fragment that says what is wrong.
    pub fn validate(&self) -> Result<(), String> {
        possible::check_launch_ns("a limit", self.time_ns)
    }

    /// How much of the limit a time reaches: 1 is the limit.
    pub fn fraction(&self, elapsed_ns: f64) -> f64 {
        self.time_ns / elapsed_ns
    }

    /// Why these times of a launch cannot be true, if they cannot, of the least time that the work
    /// may take ([`Limits::floor`]): ceilings are measured to a few per cent, and no kernel is twice
    /// as fast as they allow unless it does less than the declared work.
    pub fn broken_by(&self, per_launch_ns: &[f64]) -> Option<String> {
        const MAX_FRACTION: f64 = 2.0;
        if per_launch_ns.is_empty() {
            return None;
        }
        let launch_ns = stats::median(per_launch_ns);
        (self.fraction(launch_ns) > MAX_FRACTION).then(|| {
            format!(
                "has no time: a launch takes {launch_ns:.0} ns, the declared work at least {:.0} \
                 ns by the measured ceiling ({})",
                self.time_ns, self.by
            )
        })
    }
}

impl Overhead {
    fn all_ns(&self) -> [f64; 6] {
        let Self { event_pair_ns, launch_ns, graph_node_ns, .. } = *self;
        let Self { host_launch_ns, around_launch_ns, around_graph_ns, .. } = *self;
        [event_pair_ns, launch_ns, graph_node_ns, host_launch_ns, around_launch_ns, around_graph_ns]
    }
}

impl Limits {
    /// What deserialising does not enforce.
    ///
    /// # Errors
    /// A fragment that says what is wrong.
    pub fn validate(&self) -> Result<(), String> {
        for Bandwidth { read, copy, write, .. } in &self.bandwidth {
            let mut all = [read, copy, write].into_iter();
            all.try_for_each(|rate| possible::check_rate("a bandwidth", *rate))?;
        }
        for (unit, rate) in &self.flops_per_s {
            possible::check_rate(&format!("a ceiling ({unit})"), *rate)?;
        }
        self.clock_mhz.values().try_for_each(|mhz| possible::check_clock_mhz(*mhz))?;
        let mut costs = self.overhead.iter().flat_map(Overhead::all_ns);
        costs.try_for_each(possible::check_cost_ns)
    }

    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The least time for the work: the largest of memory and each unit.
    pub fn bound(&self, work: &Work, cache: Cache) -> Option<TimeLimit> {
        self.bounds(work, cache).into_iter().max_by(|a, b| a.time_ns.total_cmp(&b.time_ns))
    }

    /// The least times for the work that memory and each unit allow. Units whose ceiling was not
    /// measured do not bound. With cold caches the data comes from memory, however small it is.
    pub fn bounds(&self, work: &Work, cache: Cache) -> Vec<TimeLimit> {
        let mut bounds = Vec::new();
        if let Some(time_ns) = self.memory_ns(work.read_bytes, work.write_bytes, cache) {
            bounds.push(TimeLimit { time_ns, by: "memory".to_owned() });
        }
        bounds.extend(self.unit_bounds(work));
        bounds.retain(|bound| bound.time_ns > 0.0);
        bounds
    }

    /// What each unit allows, where its ceiling was measured.
    fn unit_bounds(&self, work: &Work) -> Vec<TimeLimit> {
        let mut bounds = Vec::new();
        for flops in &work.flops {
            let key = format!("{} {}", flops.unit.name(), flops.dtype.name());
            if let Some(rate) = self.flops_per_s.get(&key) {
                bounds.push(TimeLimit { time_ns: flops.count as f64 / rate * 1e9, by: key });
            }
        }
        bounds
    }

    fn memory_ns(&self, read_bytes: u64, write_bytes: u64, cache: Cache) -> Option<f64> {
        let at = match cache {
            Cache::Hot => self.bandwidth_at(read_bytes + write_bytes)?,
            Cache::Cold => *self.bandwidth.last()?,
        };
        Some(at.time_ns(read_bytes, write_bytes))
    }

    /// Bandwidths for a working set, by linear interpolation of seconds a byte over the logarithm
    /// of the size.
    fn bandwidth_at(&self, working_set_bytes: u64) -> Option<Bandwidth> {
        let (first, last) = (*self.bandwidth.first()?, *self.bandwidth.last()?);
        let above = self
            .bandwidth
            .iter()
            .position(|measured| measured.working_set_bytes >= working_set_bytes);
        let (low, high) = match above {
            Some(0) => (first, first),
            Some(i) => (self.bandwidth[i - 1], self.bandwidth[i]),
            None => (last, last),
        };
        if low.working_set_bytes == high.working_set_bytes {
            return Some(low);
        }
        let log = |bytes: u64| (bytes as f64).ln();
        let share = (log(working_set_bytes) - log(low.working_set_bytes))
            / (log(high.working_set_bytes) - log(low.working_set_bytes));
        let mix = |low: f64, high: f64| 1.0 / ((1.0 - share) / low + share / high);
        Some(Bandwidth {
            working_set_bytes,
            read: mix(low.read, high.read),
            copy: mix(low.copy, high.copy),
            write: mix(low.write, high.write),
        })
    }

    /// The ceilings in one line, at the largest working set.
    pub fn summary(&self) -> String {
        let mut parts = Vec::new();
        if let Some(last) = self.bandwidth.last() {
            let gb = |rate: f64| rate / 1e9;
            parts.push(format!(
                "read {:.1} GB/s, copy {:.1} GB/s, write {:.1} GB/s",
                gb(last.read),
                gb(last.copy),
                gb(last.write)
            ));
        }
        if let Some(overhead) = &self.overhead {
            parts.push(format!(
                "launch {:.2} µs, graph node {:.2} µs",
                overhead.launch_ns / 1e3,
                overhead.graph_node_ns / 1e3
            ));
        }
        parts.extend(
            self.flops_per_s.iter().map(|(unit, rate)| format!("{unit} {:.1} GFLOP/s", rate / 1e9)),
        );
        parts.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Dtype, Unit};

    fn limits() -> Limits {
        let at = |working_set_bytes, scale: f64| Bandwidth {
            working_set_bytes,
            read: 4e9 * scale,
            copy: 4e9 * scale,
            write: 2e9 * scale,
        };
        Limits {
            bandwidth: vec![at(1000, 4.0), at(1_000_000, 1.0)],
            flops_per_s: BTreeMap::from([("matmul f32".to_owned(), 1e9)]),
            overhead: None,
            clock_mhz: BTreeMap::new(),
        }
    }

    #[test]
    fn memory_bounds_by_reads_and_writes() {
        let bound = |read, write| limits().bound(&Work::bytes(read, write), Cache::Hot).unwrap();
        // 4 GB/s read; a copy at 4 GB/s leaves 4 GB/s for its writes.
        assert_eq!(bound(4_000_000, 0), TimeLimit { time_ns: 1e6, by: "memory".to_owned() });
        assert!((bound(4_000_000, 4_000_000).time_ns - 2e6).abs() < 1e-3);
        // Writes alone are bounded by the write pass.
        assert!((bound(0, 4_000_000).time_ns - 2e6).abs() < 1e-3);
    }

    #[test]
    fn small_working_sets_are_held_against_the_cache() {
        let rate = |bytes: u64| {
            bytes as f64 / limits().bound(&Work::bytes(bytes, 0), Cache::Hot).unwrap().time_ns
        };
        assert!((rate(500) - 16.0).abs() < 1e-9);
        assert!((rate(10_000_000) - 4.0).abs() < 1e-9);
        let between = rate(31_623);
        assert!(between > 4.0 && between < 16.0, "{between}");
        let cold = limits().bound(&Work::bytes(500, 0), Cache::Cold).unwrap();
        assert!((500.0 / cold.time_ns - 4.0).abs() < 1e-9);
    }

    #[test]
    fn twice_as_fast_as_the_limit_is_no_time() {
        let limit = TimeLimit { time_ns: 100.0, by: "memory".to_owned() };
        assert_eq!(limit.broken_by(&[51.0, 60.0, 49.0]), None);
        assert_eq!(limit.broken_by(&[]), None);
        let why = limit.broken_by(&[30.0, 49.0, 200.0]).unwrap();
        assert!(why.contains("49 ns") && why.contains("100 ns") && why.contains("memory"), "{why}");
    }

    #[test]
    fn the_slowest_unit_bounds_and_unmeasured_units_do_not() {
        let work = Work::bytes(4, 0).with_flops(Unit::Matmul, Dtype::F32, 5_000).with_flops(
            Unit::Vector,
            Dtype::F32,
            u64::MAX,
        );
        assert_eq!(
            limits().bound(&work, Cache::Hot),
            Some(TimeLimit { time_ns: 5000.0, by: "matmul f32".to_owned() })
        );
        assert_eq!(Limits::default().bound(&work, Cache::Hot), None);
        assert_eq!(limits().bound(&Work::default(), Cache::Hot), None);
    }
}
