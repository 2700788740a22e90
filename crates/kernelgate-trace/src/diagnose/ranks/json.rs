//! Formats a job of joined ranks as JSON for other programs. Times are nanoseconds.

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
                None => format!("trace:{}", of.rank_name),
            };
            json!({
                "key": key,
                "name": of.rank_name,
                "trace": of.rank_trace.trace_name,
                "rank": of.rank_trace.rank,
                "device": of.rank_trace.gpu_name,
                "compute_ns": of.times_in_common_span.compute_ns,
                "hidden_communication_ns": of.times_in_common_span.hidden_communication_ns,
                "exposed_communication_ns": of.times_in_common_span.exposed_communication_ns,
                "exposed_copies_ns": of.times_in_common_span.copies_alone_ns,
                "idle_ns": of.times_in_common_span.idle_ns,
                "waits_ns": of.waited_in_collectives_ns,
                "delays_ns": of.delayed_other_ranks_ns,
                "last": of.last_arrivals,
                "between_collectives_ns": of.ns_between_collectives,
                "gain_at_median_ns": of.gain_at_median_speed_ns,
            })
        };
        let collective = |of: &CollectivesOfKindAndSize| {
            json!({
                "key": format!("{}:{}", of.collective.collective_label(), of.bytes_per_collective),
                "collective": of.collective.collective_label(),
                "bytes": (of.bytes_per_collective > 0).then_some(of.bytes_per_collective),
                "ranks": of.ranks,
                "count": of.collective_count,
                "transfer_ns": of.total_transfer_ns,
                "skew_ns": of.total_arrival_skew_ns,
                "bus_gb_s": of.bus_bandwidth_gb_per_s,
            })
        };
        let segment = |(rank, what, ns): &(usize, String, i64)| json!({ "rank": self.ranks[*rank].rank_name, "what": what, "ns": ns });
        let gain = |of: &JobChangeWithGain| json!({ "change": of.change, "gain_ns": of.gain_ns });
        json!({
            "schema_version": JOB_JSON_SCHEMA_VERSION,
            "ranks": self.ranks.iter().map(rank).collect::<Vec<_>>(),
            "stragglers": self.straggler_ranks_slowest_first().iter().map(|of| &of.rank_name).collect::<Vec<_>>(),
            "collectives": self.collectives.iter().map(collective).collect::<Vec<_>>(),
            "waits_ns": self.wait_ns_between_ranks,
            "critical_path": {
                "total_ns": self.critical_path.path_length_ns,
                "segments": self.critical_path.rank_kind_and_ns_of_segments.iter().map(segment).collect::<Vec<_>>(),
                "gains": self.critical_path.gains.iter().map(gain).collect::<Vec<_>>(),
            },
            "joined": self.joined_collectives,
            "span_ns": self.collectives_span_ns,
            "clock_precision_ns": self.clock_alignment_precision_ns,
            "link_gb_s": self.link_bandwidth_and_name.map(|(speed, _)| speed),
            "problems": self.problems.iter().map(|of| of.problem_as_sentence()).collect::<Vec<_>>(),
        })
    }
}
