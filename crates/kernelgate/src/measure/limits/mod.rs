//! The measured performance ceilings of a device, and the shortest time that they allow for
//! declared work.
//!
//! The memory ceiling of a case is the time of the fastest memory pass that moves as many bytes as
//! the case declares, hot or cold. Each distinct memory traffic is measured once. The share of the
//! limit that a case reaches is not capped at 100 %: a larger share is reported as it is.

mod best_pass;
mod cpu;
mod cpu_matmul;
mod cuda;
mod gpu_links;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{CacheState, plausibility};
use crate::stats;
use crate::workload::work::FlopsOfUnitAndDtype;
use crate::workload::{DeclaredGpuLinkWork, Work};

/// Measured performance ceilings of a device: memory passes, matrix products and links between
/// GPUs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MeasuredDeviceLimits {
    /// Measured memory ceilings, one for each amount of memory traffic.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<MeasuredMemoryLimit>,
    /// Measured ceilings of copies between GPUs, one for each number of bytes; empty if the device
    /// is a single GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<MeasuredLinkLimit>,
    /// Measured operations a second, by compute unit and dtype, such as "matmul f32".
    pub flops_per_s: BTreeMap<String, f64>,
    /// Measured overhead of launching and timing on the GPU, nanoseconds; `None` on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead: Option<LaunchAndTimingOverhead>,
    /// SM clock while a ceiling was measured, MHz, by the name of the ceiling ("memory", "matmul
    /// f32"); empty if the device does not report it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "clock_mhz")]
    pub sm_clock_mhz_by_ceiling: BTreeMap<String, f64>,
}

/// Declared bytes and operations of a case, with the state of its caches.
#[derive(Debug, Clone)]
pub struct DeclaredWorkAndCacheState {
    /// Declared bytes and operations of a launch.
    pub work: Work,
    /// State of the caches when a launch begins: hot or cold.
    pub cache: CacheState,
}

/// Bytes that a launch reads and writes by its declaration, with the state of the caches before the
/// launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeclaredMemoryTraffic {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// State of the caches when a launch begins: hot or cold.
    pub cache: CacheState,
}

impl DeclaredMemoryTraffic {
    /// Makes the declared memory traffic of a launch from its declared work and the cache state.
    pub const fn from_declared_work(work: &Work, cache: CacheState) -> Self {
        Self { read_bytes: work.min_read_bytes, write_bytes: work.min_write_bytes, cache }
    }

    /// Returns the number of bytes read and written.
    pub const fn bytes_read_and_written(self) -> u64 {
        self.read_bytes + self.write_bytes
    }

    /// Returns the distinct memory traffics of these works, smallest first; a work that moves no
    /// bytes has none.
    fn distinct_traffics_of_works(
        works: &[DeclaredWorkAndCacheState],
    ) -> BTreeSet<DeclaredMemoryTraffic> {
        let all = works.iter().map(|of| Self::from_declared_work(&of.work, of.cache));
        all.filter(|traffic| traffic.bytes_read_and_written() > 0).collect()
    }
}

/// Measured shortest time to move a given memory traffic: bytes read, bytes written, and cache
/// state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredMemoryLimit {
    /// Bytes moved.
    pub traffic: DeclaredMemoryTraffic,
    /// Time of the fastest memory pass that moves this traffic, nanoseconds.
    #[serde(rename = "time_ns")]
    pub fastest_pass_ns: f64,
    /// Description of the fastest memory pass, for reports.
    #[serde(rename = "pass")]
    pub fastest_pass: String,
}

impl MeasuredMemoryLimit {
    /// Bytes a second.
    pub fn bytes_read_and_written_per_s(&self) -> f64 {
        self.traffic.bytes_read_and_written() as f64 / self.fastest_pass_ns * 1e9
    }
}

/// Measured shortest time to copy a number of bytes between GPUs: each GPU copies to the next and
/// the last to the first, or only the first copies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredLinkLimit {
    /// Number of bytes that each copy between GPUs moves.
    #[serde(rename = "bytes")]
    pub copied_bytes: u64,
    /// Whether all GPUs copy at the same time, so that links carry data in both directions.
    #[serde(rename = "both_ways")]
    pub copies_both_ways: bool,
    /// Number of GPUs.
    #[serde(rename = "gpus")]
    pub gpu_count: usize,
    /// Time of the fastest copies between GPUs, nanoseconds.
    #[serde(rename = "time_ns")]
    pub fastest_copies_ns: f64,
}

impl MeasuredLinkLimit {
    /// Returns the bytes a second that each GPU receives over the link.
    pub fn bytes_received_per_gpu_per_s(&self) -> f64 {
        self.copied_bytes as f64 / self.fastest_copies_ns * 1e9
    }

    const fn is_limit_of_link_work(&self, work: DeclaredGpuLinkWork) -> bool {
        self.copied_bytes == work.min_received_bytes
            && self.copies_both_ways == work.both_ways
            && self.gpu_count == work.gpu_count
    }
}

/// Measured overhead of launching and timing on a GPU, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LaunchAndTimingOverhead {
    /// Time between two CUDA events with no work between them, nanoseconds.
    #[serde(rename = "event_pair_ns")]
    pub empty_event_pair_ns: f64,
    /// Time that each further empty kernel in a stream adds, nanoseconds.
    #[serde(rename = "launch_ns")]
    pub ns_per_further_stream_kernel: f64,
    /// Time that each further empty kernel in a graph adds, nanoseconds.
    #[serde(rename = "graph_node_ns")]
    pub ns_per_further_graph_node: f64,
    /// Host time of one asynchronous launch call, nanoseconds.
    #[serde(rename = "host_launch_ns")]
    pub host_launch_call_ns: f64,
    /// Nanoseconds that the two CUDA events around a launch add to its measured interval;
    /// subtracted from every launch.
    #[serde(rename = "around_launch_ns")]
    pub events_around_launch_ns: f64,
    /// Nanoseconds that the two CUDA events around a graph replay add to its measured interval;
    /// subtracted from every replay.
    #[serde(rename = "around_graph_ns")]
    pub events_around_graph_ns: f64,
}

/// Value of [`ShortestLaunchTime::deciding_ceiling`] if the memory ceiling decides.
const MEMORY_CEILING_NAME: &str = "memory";
/// Value of [`ShortestLaunchTime::deciding_ceiling`] if the ceiling of links between GPUs decides.
const GPU_LINK_CEILING_NAME: &str = "link";

/// The shortest time of a launch that the measured ceilings allow for its declared work, and the
/// ceiling that decides it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShortestLaunchTime {
    /// Nanoseconds per launch.
    #[serde(rename = "time_ns")]
    pub shortest_launch_ns: f64,
    /// Name of the ceiling that decides: "memory", "link", or a compute unit and dtype such as
    /// "matmul f32".
    #[serde(rename = "by")]
    pub deciding_ceiling: String,
}

impl ShortestLaunchTime {
    /// Fails if the time of this limit is implausible.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_limit_time_plausible(&self) -> Result<(), String> {
        plausibility::check_launch_ns_plausible("a limit", self.shortest_launch_ns)
    }

    /// Returns the share of the limit that a launch of `elapsed_ns` reaches: 1 means as fast as the
    /// ceilings allow.
    pub fn share_of_limit_reached(&self, elapsed_ns: f64) -> f64 {
        self.shortest_launch_ns / elapsed_ns
    }

    /// Returns an error message if the median of these launch times is less than half of the limit:
    /// such launches cannot have done the declared work.
    pub fn refusal_of_times_far_below_limit(&self, per_launch_ns: &[f64]) -> Option<String> {
        const MAX_SHARE_OF_LIMIT: f64 = 2.0;
        if per_launch_ns.is_empty() {
            return None;
        }
        let launch_ns = stats::median(per_launch_ns);
        (self.share_of_limit_reached(launch_ns) > MAX_SHARE_OF_LIMIT).then(|| {
            format!(
                "has no time: a launch takes {launch_ns:.0} ns, the declared work at least {:.0} \
                 ns by the measured ceiling ({})",
                self.shortest_launch_ns, self.deciding_ceiling
            )
        })
    }
}

impl LaunchAndTimingOverhead {
    /// Fails if a time is negative, not finite or implausibly large.
    pub fn check_overheads_plausible(&self) -> Result<(), String> {
        self.all_overheads_ns().into_iter().try_for_each(plausibility::check_overhead_ns_plausible)
    }

    fn all_overheads_ns(&self) -> [f64; 6] {
        let Self {
            empty_event_pair_ns: event_pair_ns,
            ns_per_further_stream_kernel: launch_ns,
            ns_per_further_graph_node: graph_node_ns,
            ..
        } = *self;
        let Self {
            host_launch_call_ns: host_launch_ns,
            events_around_launch_ns: around_launch_ns,
            events_around_graph_ns: around_graph_ns,
            ..
        } = *self;
        [event_pair_ns, launch_ns, graph_node_ns, host_launch_ns, around_launch_ns, around_graph_ns]
    }
}

impl MeasuredDeviceLimits {
    /// Fails if a measured ceiling, an SM clock or an overhead is implausible.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_limits_plausible(&self) -> Result<(), String> {
        for limit in &self.memory {
            plausibility::check_launch_ns_plausible("a memory limit", limit.fastest_pass_ns)?;
            let DeclaredMemoryTraffic { read_bytes, write_bytes, .. } = limit.traffic;
            plausibility::check_bytes_plausible("traffic", read_bytes)?;
            plausibility::check_bytes_plausible("traffic", write_bytes)?;
        }
        for link in &self.links {
            plausibility::check_launch_ns_plausible("a limit of links", link.fastest_copies_ns)?;
            plausibility::check_bytes_plausible("a copy between GPUs", link.copied_bytes)?;
            plausibility::check_count_plausible("GPUs", link.gpu_count as u64)?;
        }
        for (unit, rate) in &self.flops_per_s {
            plausibility::check_rate_per_s_plausible(&format!("a ceiling ({unit})"), *rate)?;
        }
        self.sm_clock_mhz_by_ceiling
            .values()
            .try_for_each(|mhz| plausibility::check_sm_clock_mhz_plausible(*mhz))?;
        self.overhead.as_ref().map_or(Ok(()), LaunchAndTimingOverhead::check_overheads_plausible)
    }

    /// Returns whether no ceiling and no overhead was measured.
    pub fn has_no_limits(&self) -> bool {
        *self == Self::default()
    }

    /// Returns these ceilings, with the ceilings of `others` added that are missing here.
    #[must_use]
    pub fn completed_by_limits_of(mut self, others: &Self) -> Self {
        let is_new =
            |limit: &&MeasuredMemoryLimit| self.memory.iter().all(|it| it.traffic != limit.traffic);
        let new: Vec<MeasuredMemoryLimit> = others.memory.iter().filter(is_new).cloned().collect();
        self.memory.extend(new);
        for (unit, rate) in &others.flops_per_s {
            self.flops_per_s.entry(unit.clone()).or_insert(*rate);
        }
        for (by, clock_mhz) in &others.sm_clock_mhz_by_ceiling {
            self.sm_clock_mhz_by_ceiling.entry(by.clone()).or_insert(*clock_mhz);
        }
        self
    }

    /// Keeps only the memory ceilings and matmul ceilings that bound any of these works.
    #[must_use]
    pub fn keep_limits_that_bound_works(mut self, works: &[DeclaredWorkAndCacheState]) -> Self {
        let traffic = DeclaredMemoryTraffic::distinct_traffics_of_works(works);
        self.memory.retain(|limit| traffic.contains(&limit.traffic));
        let flops = || works.iter().flat_map(|of| &of.work.flops);
        let units: BTreeSet<String> =
            flops().map(FlopsOfUnitAndDtype::key_of_measured_ceiling).collect();
        self.flops_per_s.retain(|unit, _| units.contains(unit));
        let Self { memory, flops_per_s, .. } = &self;
        let is_kept = |by: &str| {
            flops_per_s.contains_key(by) || (by == MEMORY_CEILING_NAME && !memory.is_empty())
        };
        let clock_mhz = self.sm_clock_mhz_by_ceiling.iter().filter(|(by, _)| is_kept(by));
        let clock_mhz = clock_mhz.map(|(by, mhz)| (by.clone(), *mhz)).collect();
        Self { sm_clock_mhz_by_ceiling: clock_mhz, links: Vec::new(), overhead: None, ..self }
    }

    /// Returns the shortest time for the work: the largest of the times that memory, links and each
    /// compute unit need.
    pub fn shortest_time_of_work(
        &self,
        work: &Work,
        cache: CacheState,
    ) -> Option<ShortestLaunchTime> {
        self.shortest_times_by_each_ceiling(work, cache)
            .into_iter()
            .max_by(|a, b| a.shortest_launch_ns.total_cmp(&b.shortest_launch_ns))
    }

    /// Returns the shortest time for the work by each measured ceiling: memory, links and each
    /// compute unit. Memory traffic or compute units whose ceilings were not measured set no limit.
    pub fn shortest_times_by_each_ceiling(
        &self,
        work: &Work,
        cache: CacheState,
    ) -> Vec<ShortestLaunchTime> {
        let traffic = DeclaredMemoryTraffic::from_declared_work(work, cache);
        let memory = self.memory.iter().find(|limit| limit.traffic == traffic);
        let memory = memory.map(|limit| ShortestLaunchTime {
            shortest_launch_ns: limit.fastest_pass_ns,
            deciding_ceiling: MEMORY_CEILING_NAME.to_owned(),
        });
        let link = work
            .link
            .and_then(|work| self.links.iter().find(|link| link.is_limit_of_link_work(work)));
        let link = link.map(|link| ShortestLaunchTime {
            shortest_launch_ns: link.fastest_copies_ns,
            deciding_ceiling: GPU_LINK_CEILING_NAME.to_owned(),
        });
        let mut bounds: Vec<ShortestLaunchTime> = memory
            .into_iter()
            .chain(link)
            .chain(self.shortest_times_by_compute_unit(work))
            .collect();
        bounds.retain(|bound| bound.shortest_launch_ns > 0.0);
        bounds
    }

    /// Returns the shortest time for the work's operations on each compute unit whose ceiling was
    /// measured.
    fn shortest_times_by_compute_unit(&self, work: &Work) -> Vec<ShortestLaunchTime> {
        let mut bounds = Vec::new();
        for flops in &work.flops {
            let key = flops.key_of_measured_ceiling();
            if let Some(rate) = self.flops_per_s.get(&key) {
                bounds.push(ShortestLaunchTime {
                    shortest_launch_ns: flops.operations as f64 / rate * 1e9,
                    deciding_ceiling: key,
                });
            }
        }
        bounds
    }

    /// Returns the memory ceiling that was measured with the most bytes.
    pub fn memory_limit_with_most_bytes(&self) -> Option<&MeasuredMemoryLimit> {
        self.memory.iter().max_by_key(|limit| limit.traffic.bytes_read_and_written())
    }

    /// Returns a one-line text of all ceilings; of the memory ceilings only the one with the most
    /// bytes.
    pub fn one_line_summary(&self) -> String {
        let mut parts = Vec::new();
        if let Some(largest) = self.memory_limit_with_most_bytes() {
            let gb = |bytes: u64| bytes as f64 / 1e9;
            parts.push(format!(
                "memory {:.1} GB/s ({:.3} GB read, {:.3} GB written)",
                largest.bytes_read_and_written_per_s() / 1e9,
                gb(largest.traffic.read_bytes),
                gb(largest.traffic.write_bytes)
            ));
        }
        if let Some(link) = self.links.iter().max_by_key(|link| link.copied_bytes) {
            parts.push(format!("link {:.1} GB/s", link.bytes_received_per_gpu_per_s() / 1e9));
        }
        if let Some(overhead) = &self.overhead {
            parts.push(format!(
                "launch {:.2} µs, graph node {:.2} µs",
                overhead.ns_per_further_stream_kernel / 1e3,
                overhead.ns_per_further_graph_node / 1e3
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

    fn example_device_limits() -> MeasuredDeviceLimits {
        let at = |read_bytes, write_bytes, cache, time_ns| MeasuredMemoryLimit {
            traffic: DeclaredMemoryTraffic { read_bytes, write_bytes, cache },
            fastest_pass_ns: time_ns,
            fastest_pass: "of a test".to_owned(),
        };
        MeasuredDeviceLimits {
            memory: vec![
                at(500, 0, CacheState::HotCaches, 30.0),
                at(500, 0, CacheState::ColdCaches, 120.0),
                at(500, 100, CacheState::HotCaches, 40.0),
                at(4, 0, CacheState::HotCaches, 1.0),
            ],
            links: Vec::new(),
            flops_per_s: BTreeMap::from([("matmul f32".to_owned(), 1e9)]),
            overhead: None,
            sm_clock_mhz_by_ceiling: BTreeMap::new(),
        }
    }

    #[test]
    fn the_memory_limit_applies_only_to_measured_traffic() {
        let bound = |read, write, cache| {
            example_device_limits()
                .shortest_time_of_work(&Work::bytes(read, write), cache)
                .map(|bound| bound.shortest_launch_ns)
        };
        assert_eq!(bound(500, 0, CacheState::HotCaches), Some(30.0));
        assert_eq!(bound(500, 0, CacheState::ColdCaches), Some(120.0));
        assert_eq!(bound(500, 100, CacheState::HotCaches), Some(40.0));
        assert_eq!(bound(500, 101, CacheState::HotCaches), None);
    }

    #[test]
    fn the_link_limit_applies_only_to_measured_copies() {
        let link = MeasuredLinkLimit {
            copied_bytes: 64,
            copies_both_ways: true,
            gpu_count: 2,
            fastest_copies_ns: 200.0,
        };
        let limits = MeasuredDeviceLimits { links: vec![link], ..example_device_limits() };
        let bound = |bytes, both_ways, gpus| {
            let link =
                DeclaredGpuLinkWork { min_received_bytes: bytes, both_ways, gpu_count: gpus };
            limits
                .shortest_time_of_work(&Work::bytes(500, 0).with_link(link), CacheState::HotCaches)
        };
        let by_link =
            ShortestLaunchTime { shortest_launch_ns: 200.0, deciding_ceiling: "link".to_owned() };
        assert_eq!(bound(64, true, 2), Some(by_link));
        for other in [bound(64, false, 2), bound(64, true, 4), bound(65, true, 2)] {
            assert_eq!(other.unwrap().deciding_ceiling, "memory");
        }
    }

    #[test]
    fn equal_memory_traffic_of_several_works_is_listed_once() {
        let case_of = |read, write, cache| DeclaredWorkAndCacheState {
            work: Work::bytes(read, write),
            cache,
        };
        let works = [
            case_of(8, 0, CacheState::HotCaches),
            case_of(4, 4, CacheState::HotCaches),
            case_of(8, 0, CacheState::ColdCaches),
            case_of(8, 0, CacheState::HotCaches),
            case_of(0, 0, CacheState::HotCaches),
        ];
        let distinct: Vec<_> = DeclaredMemoryTraffic::distinct_traffics_of_works(&works)
            .into_iter()
            .map(|traffic| (traffic.read_bytes, traffic.write_bytes, traffic.cache))
            .collect();
        assert_eq!(
            distinct,
            [
                (4, 4, CacheState::HotCaches),
                (8, 0, CacheState::HotCaches),
                (8, 0, CacheState::ColdCaches)
            ]
        );
    }

    #[test]
    fn launch_times_below_half_the_limit_are_refused() {
        let limit =
            ShortestLaunchTime { shortest_launch_ns: 100.0, deciding_ceiling: "memory".to_owned() };
        assert_eq!(limit.refusal_of_times_far_below_limit(&[51.0, 60.0, 49.0]), None);
        assert_eq!(limit.refusal_of_times_far_below_limit(&[]), None);
        let why = limit.refusal_of_times_far_below_limit(&[30.0, 49.0, 200.0]).unwrap();
        assert!(why.contains("49 ns") && why.contains("100 ns") && why.contains("memory"), "{why}");
    }

    #[test]
    fn the_slowest_measured_compute_unit_sets_the_limit() {
        let work = Work::bytes(4, 0).with_flops(FlopUnit::Matmul, Dtype::F32, 5_000).with_flops(
            FlopUnit::VectorArithmetic,
            Dtype::F32,
            u64::MAX,
        );
        assert_eq!(
            example_device_limits().shortest_time_of_work(&work, CacheState::HotCaches),
            Some(ShortestLaunchTime {
                shortest_launch_ns: 5000.0,
                deciding_ceiling: "matmul f32".to_owned()
            })
        );
        assert_eq!(
            MeasuredDeviceLimits::default().shortest_time_of_work(&work, CacheState::HotCaches),
            None
        );
        assert_eq!(
            example_device_limits().shortest_time_of_work(&Work::default(), CacheState::HotCaches),
            None
        );
    }

    #[test]
    fn known_ceilings_that_bound_none_of_the_works_are_dropped() {
        let traffic = |read_bytes| DeclaredMemoryTraffic {
            read_bytes,
            write_bytes: 8,
            cache: CacheState::HotCaches,
        };
        let memory = |read_bytes, time_ns| MeasuredMemoryLimit {
            traffic: traffic(read_bytes),
            fastest_pass_ns: time_ns,
            fastest_pass: String::new(),
        };
        let limits = |memory, units: &[(&str, f64)]| MeasuredDeviceLimits {
            memory,
            flops_per_s: units.iter().map(|(unit, rate)| ((*unit).to_owned(), *rate)).collect(),
            sm_clock_mhz_by_ceiling: units
                .iter()
                .map(|(unit, rate)| ((*unit).to_owned(), *rate))
                .collect(),
            ..MeasuredDeviceLimits::default()
        };
        let first = limits(vec![memory(1, 10.0)], &[("matmul bf16", 1.0), ("matmul f32", 2.0)]);
        let second = limits(vec![memory(1, 20.0), memory(2, 30.0)], &[("matmul bf16", 3.0)]);
        let both = first.completed_by_limits_of(&second);
        let all = limits(
            vec![memory(1, 10.0), memory(2, 30.0)],
            &[("matmul bf16", 1.0), ("matmul f32", 2.0)],
        );
        assert_eq!(both, all);
        let work = Work::bytes(2, 8).with_flops(FlopUnit::Matmul, Dtype::F32, 1);
        let bounding = both.keep_limits_that_bound_works(&[DeclaredWorkAndCacheState {
            work,
            cache: CacheState::HotCaches,
        }]);
        assert_eq!(bounding, limits(vec![memory(2, 30.0)], &[("matmul f32", 2.0)]));
        assert!(all.keep_limits_that_bound_works(&[]).has_no_limits());
    }
}
