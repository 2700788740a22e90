//! A job for programs. Times are nanoseconds.

use serde_json::{Value, json};

use super::join_ranks::{CollectivesOfKindAndSize, JobOfJoinedRanks, RankWithCollectiveSums};
use super::what_if::JobChangeWithGain;

/// Version of the JSON format for joined ranks, which `schema/job.json` of this crate describes.
/// Version 2 restricted the times of ranks to the span in which all ranks were recorded.
const JOB_JSON_SCHEMA_VERSION: u32 = 2;

impl JobOfJoinedRanks {
    /// Converts the joined job to JSON, with the field `schema_version`.
    pub fn job_to_json(&self) -> Value {
        let rank = |of: &RankWithCollectiveSums| {
            let key = match of.rank_trace.rank {
                Some(rank) => format!("rank:{rank}"),
                None => format!("trace:{}", of.name),
            };
            json!({
                "key": key,
                "name": of.name,
                "trace": of.rank_trace.name,
                "rank": of.rank_trace.rank,
                "device": of.rank_trace.device,
                "compute_ns": of.times.compute_ns,
                "hidden_communication_ns": of.times.hidden_communication_ns,
                "exposed_communication_ns": of.times.exposed_communication_ns,
                "exposed_copies_ns": of.times.copies_ns,
                "idle_ns": of.times.idle_ns,
                "waits_ns": of.waited_ns,
                "delays_ns": of.delayed_ns,
                "last": of.last_arrivals,
                "between_collectives_ns": of.between_ns,
                "gain_at_median_ns": of.gain_ns,
            })
        };
        let collective = |of: &CollectivesOfKindAndSize| {
            json!({
                "key": format!("{}:{}", of.collective.collective_label(), of.bytes),
                "collective": of.collective.collective_label(),
                "bytes": (of.bytes > 0).then_some(of.bytes),
                "ranks": of.ranks,
                "count": of.collective_count,
                "transfer_ns": of.transfer_ns,
                "skew_ns": of.skew_ns,
                "bus_gb_s": of.bus_gb_per_s,
            })
        };
        let segment = |(rank, what, ns): &(usize, String, i64)| json!({ "rank": self.ranks[*rank].name, "what": what, "ns": ns });
        let gain = |of: &JobChangeWithGain| json!({ "change": of.change, "gain_ns": of.gain_ns });
        json!({
            "schema_version": JOB_JSON_SCHEMA_VERSION,
            "ranks": self.ranks.iter().map(rank).collect::<Vec<_>>(),
            "stragglers": self.straggler_ranks_slowest_first().iter().map(|of| &of.name).collect::<Vec<_>>(),
            "collectives": self.collectives.iter().map(collective).collect::<Vec<_>>(),
            "waits_ns": self.wait_ns_between_ranks,
            "critical_path": {
                "total_ns": self.critical_path.total_ns,
                "segments": self.critical_path.segments.iter().map(segment).collect::<Vec<_>>(),
                "gains": self.critical_path.gains.iter().map(gain).collect::<Vec<_>>(),
            },
            "joined": self.joined_collectives,
            "span_ns": self.span_ns,
            "clock_precision_ns": self.precision_ns,
            "link_gb_s": self.link_bandwidth_and_name.map(|(speed, _)| speed),
            "problems": self.problems.iter().map(|of| of.problem_as_sentence()).collect::<Vec<_>>(),
        })
    }
}
