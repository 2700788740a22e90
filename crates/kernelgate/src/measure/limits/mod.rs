//! The device's measured ceilings, and the time they allow for declared work.
//!
//! The memory ceiling of a case is the time of the fastest of our own passes that moves as many
//! bytes as the case declares, with its caches hot or cold; each distinct traffic is measured once,
//! without interpolation. Fractions of a limit are not clamped: above 100 % is a finding.

mod best_pass;
mod cpu;
mod cpu_matmul;
mod cuda;
mod gpu_links;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{CacheState, plausibility};
use crate::stats;
use crate::workload::work::Flops;
use crate::workload::{GpuLinkWork, Work};

/// Measured ceilings of a device: memory, matmuls and links.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceLimits {
    /// Memory ceilings by traffic.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<MemoryLimit>,
    /// Ceilings of the links between GPUs, by bytes; empty for one GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<LinkLimit>,
    /// Operations a second by compute unit and dtype, such as "matmul f32".
    pub flops_per_s: BTreeMap<String, f64>,
    /// Measured costs of a launch on a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead: Option<LaunchOverhead>,
    /// SM clock while the ceilings were measured, MHz, by the kind of limit ("memory", "matmul
    /// f32"); empty if the device does not report it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub clock_mhz: BTreeMap<String, f64>,
}

/// Declared work of a case, with the state of its caches.
#[derive(Debug, Clone)]
pub struct CaseWork {
    /// Work of a launch.
    pub work: Work,
    /// State of the caches when a launch begins: hot or cold.
    pub cache: CacheState,
}

/// Bytes that a launch reads and writes, with the state of the caches before the launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemoryTraffic {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// State of the caches when a launch begins: hot or cold.
    pub cache: CacheState,
}

impl MemoryTraffic {
    /// Traffic of a work.
    pub const fn new(work: &Work, cache: CacheState) -> Self {
        Self { read_bytes: work.read_bytes, write_bytes: work.write_bytes, cache }
    }

    /// Bytes read and written.
    pub const fn total_bytes(self) -> u64 {
        self.read_bytes + self.write_bytes
    }

    /// Collects each distinct traffic of these works once, smallest first; a work that moves no
    /// bytes has no traffic.
    fn distinct_of_works(works: &[CaseWork]) -> BTreeSet<MemoryTraffic> {
        let all = works.iter().map(|of| Self::new(&of.work, of.cache));
        all.filter(|traffic| traffic.total_bytes() > 0).collect()
    }
}

/// Measured memory ceiling for one traffic: bytes and cache state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoryLimit {
    /// Bytes moved.
    pub traffic: MemoryTraffic,
    /// Time of the fastest memory pass, nanoseconds.
    pub time_ns: f64,
    /// Description of the fastest memory pass.
    pub pass: String,
}

impl MemoryLimit {
    /// Bytes a second.
    pub fn bytes_per_s(&self) -> f64 {
        self.traffic.total_bytes() as f64 / self.time_ns * 1e9
    }
}

/// Measured ceiling of the links between GPUs for one number of bytes: every GPU copies to the next
/// one and the last to the first, or only the first GPU copies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkLimit {
    /// Bytes of each copy.
    pub bytes: u64,
    /// Whether every GPU copies at the same time, in both directions of its link.
    pub both_ways: bool,
    /// Number of GPUs.
    pub gpus: usize,
    /// Time of the copies between GPUs, nanoseconds.
    pub time_ns: f64,
}

impl LinkLimit {
    /// Bytes a second that each GPU receives.
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.time_ns * 1e9
    }

    const fn is_limit_of(&self, work: GpuLinkWork) -> bool {
        self.bytes == work.bytes && self.both_ways == work.both_ways && self.gpus == work.gpus
    }
}

/// Cost of launching and timing on a GPU, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LaunchOverhead {
    /// Time between two CUDA events with no work between them, nanoseconds.
    pub event_pair_ns: f64,
    /// Time of an empty kernel between its neighbours in a stream, nanoseconds.
    pub launch_ns: f64,
    /// Time of an empty kernel between its neighbours in a graph, nanoseconds.
    pub graph_node_ns: f64,
    /// Host time of a launch, nanoseconds.
    pub host_launch_ns: f64,
    /// Nanoseconds that a pair of events adds to a launch between them; subtracted from every
    /// interval around a launch.
    pub around_launch_ns: f64,
    /// Nanoseconds that a pair of events adds to a graph between them; subtracted from every
    /// interval around a graph.
    pub around_graph_ns: f64,
}

/// Name of the memory ceiling in [`TimeLimit::by`].
const MEMORY_BOUND: &str = "memory";
/// Name that [`TimeLimit::by`] has for the ceiling of links between GPUs.
const LINK_BOUND: &str = "link";

/// The least time that the measured ceilings allow, and the ceiling that sets it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TimeLimit {
    /// Nanoseconds a launch.
    pub time_ns: f64,
    /// Name of the deciding ceiling: "memory", "link", or unit and dtype: "matmul f32".
    pub by: String,
}

impl TimeLimit {
    /// Checks the facts that deserialising does not enforce.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        plausibility::check_launch_ns("a limit", self.time_ns)
    }

    /// How much of the limit a time reaches: 1 is the limit.
    pub fn fraction(&self, elapsed_ns: f64) -> f64 {
        self.time_ns / elapsed_ns
    }

    /// Why these times of a launch cannot be true, if they cannot: ceilings are measured to a few
    /// per cent, and no kernel is twice as fast as they allow unless it does less than the declared
    /// work.
    pub fn broken_by(&self, per_launch_ns: &[f64]) -> Option<String> {
        const MAX_LIMIT_FRACTION: f64 = 2.0;
        if per_launch_ns.is_empty() {
            return None;
        }
        let launch_ns = stats::median(per_launch_ns);
        (self.fraction(launch_ns) > MAX_LIMIT_FRACTION).then(|| {
            format!(
                "has no time: a launch takes {launch_ns:.0} ns, the declared work at least {:.0} \
                 ns by the measured ceiling ({})",
                self.time_ns, self.by
            )
        })
    }
}

impl LaunchOverhead {
    /// Checks the times.
    pub fn validate(&self) -> Result<(), String> {
        self.all_ns().into_iter().try_for_each(plausibility::check_cost_ns)
    }

    fn all_ns(&self) -> [f64; 6] {
        let Self { event_pair_ns, launch_ns, graph_node_ns, .. } = *self;
        let Self { host_launch_ns, around_launch_ns, around_graph_ns, .. } = *self;
        [event_pair_ns, launch_ns, graph_node_ns, host_launch_ns, around_launch_ns, around_graph_ns]
    }
}

impl DeviceLimits {
    /// Checks the facts that deserialising does not enforce.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        for limit in &self.memory {
            plausibility::check_launch_ns("a memory limit", limit.time_ns)?;
            let MemoryTraffic { read_bytes, write_bytes, .. } = limit.traffic;
            plausibility::check_bytes("traffic", read_bytes)?;
            plausibility::check_bytes("traffic", write_bytes)?;
        }
        for link in &self.links {
            plausibility::check_launch_ns("a limit of links", link.time_ns)?;
            plausibility::check_bytes("a copy between GPUs", link.bytes)?;
            plausibility::check_count("GPUs", link.gpus as u64)?;
        }
        for (unit, rate) in &self.flops_per_s {
            plausibility::check_rate(&format!("a ceiling ({unit})"), *rate)?;
        }
        self.clock_mhz.values().try_for_each(|mhz| plausibility::check_clock_mhz(*mhz))?;
        self.overhead.as_ref().map_or(Ok(()), LaunchOverhead::validate)
    }

    /// Whether nothing was measured.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns these ceilings, completed by those of `others` that are missing here.
    #[must_use]
    pub fn filled_from(mut self, others: &Self) -> Self {
        let is_new =
            |limit: &&MemoryLimit| self.memory.iter().all(|it| it.traffic != limit.traffic);
        let new: Vec<MemoryLimit> = others.memory.iter().filter(is_new).cloned().collect();
        self.memory.extend(new);
        for (unit, rate) in &others.flops_per_s {
            self.flops_per_s.entry(unit.clone()).or_insert(*rate);
        }
        for (by, clock_mhz) in &others.clock_mhz {
            self.clock_mhz.entry(by.clone()).or_insert(*clock_mhz);
        }
        self
    }

    /// Keeps only the ceilings of memory and compute units that limit any of these works.
    #[must_use]
    pub fn bounding_works(mut self, works: &[CaseWork]) -> Self {
        let traffic = MemoryTraffic::distinct_of_works(works);
        self.memory.retain(|limit| traffic.contains(&limit.traffic));
        let flops = || works.iter().flat_map(|of| &of.work.flops);
        let units: BTreeSet<String> = flops().map(Flops::ceiling_key).collect();
        self.flops_per_s.retain(|unit, _| units.contains(unit));
        let Self { memory, flops_per_s, .. } = &self;
        let is_kept =
            |by: &str| flops_per_s.contains_key(by) || (by == MEMORY_BOUND && !memory.is_empty());
        let clock_mhz = self.clock_mhz.iter().filter(|(by, _)| is_kept(by));
        let clock_mhz = clock_mhz.map(|(by, mhz)| (by.clone(), *mhz)).collect();
        Self { clock_mhz, links: Vec::new(), overhead: None, ..self }
    }

    /// The least time for the work: the largest of memory and each unit.
    pub fn bound(&self, work: &Work, cache: CacheState) -> Option<TimeLimit> {
        self.bounds(work, cache).into_iter().max_by(|a, b| a.time_ns.total_cmp(&b.time_ns))
    }

    /// The least times for the work that memory and each unit allow. Traffic and units that were
    /// not measured do not bound.
    pub fn bounds(&self, work: &Work, cache: CacheState) -> Vec<TimeLimit> {
        let traffic = MemoryTraffic::new(work, cache);
        let memory = self.memory.iter().find(|limit| limit.traffic == traffic);
        let memory =
            memory.map(|limit| TimeLimit { time_ns: limit.time_ns, by: MEMORY_BOUND.to_owned() });
        let link = work.link.and_then(|work| self.links.iter().find(|link| link.is_limit_of(work)));
        let link = link.map(|link| TimeLimit { time_ns: link.time_ns, by: LINK_BOUND.to_owned() });
        let mut bounds: Vec<TimeLimit> =
            memory.into_iter().chain(link).chain(self.unit_bounds(work)).collect();
        bounds.retain(|bound| bound.time_ns > 0.0);
        bounds
    }

    /// The time limit of each compute unit whose ceiling was measured.
    fn unit_bounds(&self, work: &Work) -> Vec<TimeLimit> {
        let mut bounds = Vec::new();
        for flops in &work.flops {
            let key = flops.ceiling_key();
            if let Some(rate) = self.flops_per_s.get(&key) {
                bounds.push(TimeLimit { time_ns: flops.count as f64 / rate * 1e9, by: key });
            }
        }
        bounds
    }

    /// The memory ceiling that was measured for the most bytes.
    pub fn largest_memory(&self) -> Option<&MemoryLimit> {
        self.memory.iter().max_by_key(|limit| limit.traffic.total_bytes())
    }

    /// Text of all ceilings in one line; of the memory ceilings, the one for the most bytes.
    pub fn summary(&self) -> String {
        let mut parts = Vec::new();
        if let Some(largest) = self.largest_memory() {
            let gb = |bytes: u64| bytes as f64 / 1e9;
            parts.push(format!(
                "memory {:.1} GB/s ({:.3} GB read, {:.3} GB written)",
                largest.bytes_per_s() / 1e9,
                gb(largest.traffic.read_bytes),
                gb(largest.traffic.write_bytes)
            ));
        }
        if let Some(link) = self.links.iter().max_by_key(|link| link.bytes) {
            parts.push(format!("link {:.1} GB/s", link.bytes_per_s() / 1e9));
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
    use crate::workload::{Dtype, FlopUnit};

    fn example_limits() -> DeviceLimits {
        let at = |read_bytes, write_bytes, cache, time_ns| MemoryLimit {
            traffic: MemoryTraffic { read_bytes, write_bytes, cache },
            time_ns,
            pass: "of a test".to_owned(),
        };
        DeviceLimits {
            memory: vec![
                at(500, 0, CacheState::Hot, 30.0),
                at(500, 0, CacheState::Cold, 120.0),
                at(500, 100, CacheState::Hot, 40.0),
                at(4, 0, CacheState::Hot, 1.0),
            ],
            links: Vec::new(),
            flops_per_s: BTreeMap::from([("matmul f32".to_owned(), 1e9)]),
            overhead: None,
            clock_mhz: BTreeMap::new(),
        }
    }

    #[test]
    fn the_memory_limit_is_used_only_for_measured_traffic() {
        let bound = |read, write, cache| {
            example_limits().bound(&Work::bytes(read, write), cache).map(|bound| bound.time_ns)
        };
        assert_eq!(bound(500, 0, CacheState::Hot), Some(30.0));
        assert_eq!(bound(500, 0, CacheState::Cold), Some(120.0));
        assert_eq!(bound(500, 100, CacheState::Hot), Some(40.0));
        assert_eq!(bound(500, 101, CacheState::Hot), None);
    }

    #[test]
    fn the_link_limit_is_used_only_for_measured_copies() {
        let link = LinkLimit { bytes: 64, both_ways: true, gpus: 2, time_ns: 200.0 };
        let limits = DeviceLimits { links: vec![link], ..example_limits() };
        let bound = |bytes, both_ways, gpus| {
            let link = GpuLinkWork { bytes, both_ways, gpus };
            limits.bound(&Work::bytes(500, 0).with_link(link), CacheState::Hot)
        };
        let by_link = TimeLimit { time_ns: 200.0, by: "link".to_owned() };
        assert_eq!(bound(64, true, 2), Some(by_link));
        for other in [bound(64, false, 2), bound(64, true, 4), bound(65, true, 2)] {
            assert_eq!(other.unwrap().by, "memory");
        }
    }

    #[test]
    fn equal_traffic_of_several_works_is_measured_once() {
        let case_of = |read, write, cache| CaseWork { work: Work::bytes(read, write), cache };
        let works = [
            case_of(8, 0, CacheState::Hot),
            case_of(4, 4, CacheState::Hot),
            case_of(8, 0, CacheState::Cold),
            case_of(8, 0, CacheState::Hot),
            case_of(0, 0, CacheState::Hot),
        ];
        let distinct: Vec<_> = MemoryTraffic::distinct_of_works(&works)
            .into_iter()
            .map(|traffic| (traffic.read_bytes, traffic.write_bytes, traffic.cache))
            .collect();
        assert_eq!(
            distinct,
            [(4, 4, CacheState::Hot), (8, 0, CacheState::Hot), (8, 0, CacheState::Cold)]
        );
    }

    #[test]
    fn times_below_half_the_limit_are_rejected() {
        let limit = TimeLimit { time_ns: 100.0, by: "memory".to_owned() };
        assert_eq!(limit.broken_by(&[51.0, 60.0, 49.0]), None);
        assert_eq!(limit.broken_by(&[]), None);
        let why = limit.broken_by(&[30.0, 49.0, 200.0]).unwrap();
        assert!(why.contains("49 ns") && why.contains("100 ns") && why.contains("memory"), "{why}");
    }

    #[test]
    fn the_slowest_measured_unit_sets_the_limit() {
        let work = Work::bytes(4, 0).with_flops(FlopUnit::Matmul, Dtype::F32, 5_000).with_flops(
            FlopUnit::Vector,
            Dtype::F32,
            u64::MAX,
        );
        assert_eq!(
            example_limits().bound(&work, CacheState::Hot),
            Some(TimeLimit { time_ns: 5000.0, by: "matmul f32".to_owned() })
        );
        assert_eq!(DeviceLimits::default().bound(&work, CacheState::Hot), None);
        assert_eq!(example_limits().bound(&Work::default(), CacheState::Hot), None);
    }

    #[test]
    fn known_ceilings_that_limit_none_of_the_works_are_dropped() {
        let traffic =
            |read_bytes| MemoryTraffic { read_bytes, write_bytes: 8, cache: CacheState::Hot };
        let memory = |read_bytes, time_ns| MemoryLimit {
            traffic: traffic(read_bytes),
            time_ns,
            pass: String::new(),
        };
        let limits = |memory, units: &[(&str, f64)]| DeviceLimits {
            memory,
            flops_per_s: units.iter().map(|(unit, rate)| ((*unit).to_owned(), *rate)).collect(),
            clock_mhz: units.iter().map(|(unit, rate)| ((*unit).to_owned(), *rate)).collect(),
            ..DeviceLimits::default()
        };
        let first = limits(vec![memory(1, 10.0)], &[("matmul bf16", 1.0), ("matmul f32", 2.0)]);
        let second = limits(vec![memory(1, 20.0), memory(2, 30.0)], &[("matmul bf16", 3.0)]);
        let both = first.filled_from(&second);
        let all = limits(
            vec![memory(1, 10.0), memory(2, 30.0)],
            &[("matmul bf16", 1.0), ("matmul f32", 2.0)],
        );
        assert_eq!(both, all);
        let work = Work::bytes(2, 8).with_flops(FlopUnit::Matmul, Dtype::F32, 1);
        let bounding = both.bounding_works(&[CaseWork { work, cache: CacheState::Hot }]);
        assert_eq!(bounding, limits(vec![memory(2, 30.0)], &[("matmul f32", 2.0)]));
        assert!(all.bounding_works(&[]).is_empty());
    }
}
