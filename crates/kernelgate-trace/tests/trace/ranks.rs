//! Tests that traces of one job are joined by their collectives, and that planted stragglers are
//! named.

use std::path::PathBuf;

use crate::fixture::lines_with_word;
use kernelgate_trace::diagnose::ranks::{
    JobOfJoinedRanks, ProblemOfJobTraces, TraceOfRank, join_gpus_of_one_trace, join_ranks_to_job,
    read_traces_of_ranks,
};
use serde_json::json;
use tempfile::TempDir;

/// A rank of a synthetic job with known delays.
#[derive(Clone, Copy)]
struct SyntheticRank {
    rank_number: u32,
    world_size: u32,
    /// Microseconds by which the rank's clock is ahead.
    clock_ahead_us: f64,
    /// Microseconds of compute before each all-reduce.
    compute_us_per_step: f64,
    /// First recorded step and the step after the last: only the collectives of these steps are in
    /// the trace.
    first_and_end_step: (usize, usize),
    all_reduce_elements: u64,
}

const RECORDED_STEPS: usize = 40;

impl SyntheticRank {
    fn new(number: u32) -> Self {
        Self {
            rank_number: number,
            world_size: 4,
            clock_ahead_us: 0.0,
            compute_us_per_step: 100.0,
            first_and_end_step: (0, RECORDED_STEPS),
            all_reduce_elements: 1 << 20,
        }
    }
}

/// Writes one trace per rank: each step computes, then runs an all-reduce that ends when the
/// slowest rank has arrived.
fn write_trace_per_rank(folder: &TempDir, ranks: &[SyntheticRank]) -> Vec<(String, PathBuf)> {
    let slowest = ranks.iter().map(|of| of.compute_us_per_step).fold(0.0, f64::max);
    let each = |(index, rank): (usize, &SyntheticRank)| {
        let mut events = Vec::new();
        for step in rank.first_and_end_step.0..rank.first_and_end_step.1 {
            // Steps differ in length, so that only one alignment of two recordings fits.
            let uneven = (0..=step).map(|step| step * step * 7 % 53).sum::<usize>() as f64;
            let start = 1000.0 + step as f64 * (slowest + 60.0) + uneven + rank.clock_ahead_us;
            let kernel = |name: &str, from: f64, to: f64, arguments: serde_json::Value| {
                json!({ "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": from,
                        "dur": to - from, "args": arguments })
            };
            let until = start + rank.compute_us_per_step;
            events.push(kernel("gemm", start, until, json!({ "device": 0, "stream": 7 })));
            events.push(kernel(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                until,
                start + slowest + 50.0,
                json!({ "device": 0, "stream": 13, "Collective name": "allreduce",
                        "In msg nelems": rank.all_reduce_elements, "Out msg nelems": rank.all_reduce_elements,
                        "dtype": "Float", "Group size": rank.world_size,
                        "Process Group Name": "0" }),
            ));
        }
        let trace = json!({
            "deviceProperties": [{ "id": 0, "name": "NVIDIA H100 80GB HBM3" }],
            "distributedInfo": { "rank": rank.rank_number, "world_size": rank.world_size },
            "traceEvents": events,
        });
        let path = folder.path().join(format!("rank{index}.json"));
        std::fs::write(&path, trace.to_string()).unwrap();
        (format!("rank{index}.json"), path)
    };
    ranks.iter().enumerate().map(each).collect()
}

fn join_synthetic_ranks(ranks: &[SyntheticRank]) -> JobOfJoinedRanks {
    let folder = tempfile::tempdir().unwrap();
    let parts: Vec<TraceOfRank> =
        read_traces_of_ranks(&write_trace_per_rank(&folder, ranks)).unwrap();
    let job = join_ranks_to_job(parts);
    let text = job.job_to_text();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    job
}

#[test]
fn a_straggler_is_named_and_waiting_stands_apart_from_transfer() {
    let mut ranks = [0, 1, 2, 3].map(SyntheticRank::new);
    ranks[2].compute_us_per_step = 300.0;
    let job = join_synthetic_ranks(&ranks);
    assert_eq!(job.problems, []);
    assert_eq!(job.joined_collectives, RECORDED_STEPS);
    let stragglers = job.straggler_ranks_slowest_first();
    assert_eq!(stragglers.len(), 1);
    assert_eq!(stragglers[0].rank_name, "rank 2");
    assert_eq!(
        (stragglers[0].last_arrivals, stragglers[0].waited_in_collectives_ns),
        (RECORDED_STEPS, 0)
    );
    assert_eq!(stragglers[0].delayed_other_ranks_ns, RECORDED_STEPS as i64 * 200_000);
    assert_eq!(job.wait_ns_between_ranks[0][2], RECORDED_STEPS as i64 * 200_000);
    assert_eq!(job.wait_ns_between_ranks[0][1], 0);
    // Each collective starts 200 µs earlier if rank 2 computes as fast as the others.
    assert_eq!(stragglers[0].gain_at_median_speed_ns, RECORDED_STEPS as i64 * 200_000);
    // The all-reduce moves 4 MiB in 50 µs on four ranks.
    let sum = &job.collectives[0];
    assert_eq!(
        (sum.total_transfer_ns, sum.bytes_per_collective),
        (RECORDED_STEPS as i64 * 50_000, 4 << 20)
    );
    let bus = sum.bus_bandwidth_gb_per_s.unwrap();
    assert!((bus - f64::from(4 << 20) * 1.5 / 50_000.0).abs() < 0.01, "{bus}");
    assert!(job.job_to_text().contains("computes"), "{}", job.job_to_text());
}

#[test]
fn clocks_that_differ_by_seconds_are_aligned() {
    let mut ranks = [0, 1, 2, 3].map(SyntheticRank::new);
    ranks[1].clock_ahead_us = 7_300_000.0;
    ranks[3].clock_ahead_us = -2_000_000.0;
    ranks[2].compute_us_per_step = 150.0;
    let job = join_synthetic_ranks(&ranks);
    let ahead: Vec<i64> = job
        .problems
        .iter()
        .filter_map(|of| match of {
            ProblemOfJobTraces::ClockDiffersFromFirstRank { clock_ahead_ns: ahead_ns, .. } => {
                Some(*ahead_ns)
            }
            _ => None,
        })
        .collect();
    assert_eq!(ahead, [7_300_000_000, -2_000_000_000]);
    assert_eq!(job.straggler_ranks_slowest_first()[0].rank_name, "rank 2");
    assert_eq!(job.wait_ns_between_ranks[1][2], RECORDED_STEPS as i64 * 50_000);
}

#[test]
fn a_rank_of_another_job_is_reported_and_the_rest_is_joined() {
    let mut ranks = [0, 1, 2, 3].map(SyntheticRank::new);
    ranks[1].all_reduce_elements = 77;
    let job = join_synthetic_ranks(&ranks);
    assert!(
        job.problems.iter().any(
            |of| matches!(of, ProblemOfJobTraces::TraceOfOtherJob { trace, .. } if trace == "rank1.json")
        ),
        "{:?}",
        job.problems
    );
    assert_eq!((job.ranks.len(), job.joined_collectives), (3, RECORDED_STEPS));
    let mut ranks = [0, 1, 2, 3].map(SyntheticRank::new);
    ranks[3].world_size = 8;
    let problems = join_synthetic_ranks(&ranks).problems;
    assert!(problems.iter().any(
        |of| matches!(of, ProblemOfJobTraces::TraceOfOtherJob { why, .. } if why.starts_with('8'))
    ));
}

#[test]
fn missing_and_duplicate_ranks_are_reported() {
    let mut ranks = [0, 1, 3].map(SyntheticRank::new);
    let job = join_synthetic_ranks(&ranks);
    assert_eq!(
        job.problems,
        [ProblemOfJobTraces::MissingRanks { missing_ranks: vec![2], missing_rank_count: 1 }]
    );
    ranks[2].rank_number = 1;
    let problems = join_synthetic_ranks(&ranks).problems;
    assert!(
        problems.iter().any(|of| matches!(of, ProblemOfJobTraces::DuplicateRank { .. })),
        "{problems:?}"
    );
}

#[test]
fn a_rank_that_was_cut_is_reported_and_joined() {
    let folder = tempfile::tempdir().unwrap();
    let traces = write_trace_per_rank(
        &folder,
        &[0, 1].map(|number| SyntheticRank { world_size: 2, ..SyntheticRank::new(number) }),
    );
    let whole = std::fs::read(&traces[1].1).unwrap();
    std::fs::write(&traces[1].1, &whole[..whole.len() * 3 / 4]).unwrap();
    let job = join_ranks_to_job(read_traces_of_ranks(&traces).unwrap());
    insta::assert_snapshot!(job.problems[0].problem_as_sentence(), @"rank1.json: read in part only: JSON after 59 events: EOF while parsing an object at line 1 column 254");
    assert!(
        (RECORDED_STEPS / 2..RECORDED_STEPS).contains(&job.joined_collectives),
        "{}",
        job.joined_collectives
    );
}

#[test]
fn recordings_of_unequal_length_are_joined_by_common_collectives() {
    let mut ranks = [0, 1, 2, 3].map(SyntheticRank::new);
    ranks[3].first_and_end_step = (5, RECORDED_STEPS);
    ranks[2].compute_us_per_step = 250.0;
    let job = join_synthetic_ranks(&ranks);
    assert_eq!(job.joined_collectives, RECORDED_STEPS - 5);
    let unequal = job
        .problems
        .iter()
        .filter(|of| matches!(of, ProblemOfJobTraces::FewerCollectivesThanOtherRanks { .. }));
    assert_eq!(unequal.count(), 3, "{:?}", job.problems);
}

#[test]
fn one_rank_alone_is_no_job() {
    let job = join_synthetic_ranks(&[SyntheticRank { world_size: 1, ..SyntheticRank::new(0) }]);
    assert_eq!(job.joined_collectives, 0);
    insta::assert_snapshot!(lines_with_word(&job.job_to_text(), "joined"), @r"
    1 ranks, 0 collectives joined over 0 ns; clocks aligned to ± 0 ns
    no collective could be joined: waiting cannot be separated from transfer; give the traces of
    ");
}

/// An event of a synthetic trace: name, category, thread or stream, start and end in microseconds,
/// correlation id.
type SyntheticTraceEvent<'a> = (&'a str, &'a str, u32, f64, f64, u32);

/// Joins two ranks, of which each recorded the given events.
fn join_two_ranks_with_events(ranks: [&[SyntheticTraceEvent<'_>]; 2]) -> JobOfJoinedRanks {
    let folder = tempfile::tempdir().unwrap();
    let write = |(rank, events): (usize, &&[SyntheticTraceEvent<'_>])| {
        let event = |&(name, category, thread, start, end, correlation): &SyntheticTraceEvent<
            '_,
        >| {
            json!({ "ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "ts": start,
                    "dur": end - start,
                    "args": { "device": 0, "stream": thread, "correlation": correlation,
                              "Collective name": "allreduce", "In msg nelems": 1024,
                              "Out msg nelems": 1024, "dtype": "Float", "Group size": 2,
                              "Process Group Name": "0" } })
        };
        let trace = json!({
            "distributedInfo": { "rank": rank, "world_size": 2 },
            "traceEvents": events.iter().map(event).collect::<Vec<_>>(),
        });
        let path = folder.path().join(format!("rank{rank}.json"));
        std::fs::write(&path, trace.to_string()).unwrap();
        (format!("rank{rank}.json"), path)
    };
    let job = join_ranks_to_job(
        read_traces_of_ranks(&ranks.iter().enumerate().map(write).collect::<Vec<_>>()).unwrap(),
    );
    assert_eq!((job.joined_collectives, &job.problems[..]), (1, &[][..]));
    let sum: i64 = job.critical_path.rank_kind_and_ns_of_segments.iter().map(|of| of.2).sum();
    assert_eq!(sum, job.critical_path.path_length_ns);
    job
}

fn gain_ns_of_job_change(job: &JobOfJoinedRanks, change: &str) -> Option<i64> {
    job.critical_path.gains.iter().find(|of| of.change == change).map(|of| of.gain_ns)
}

const ALL_REDUCE_KERNEL_NAME: &str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)";

#[test]
fn an_all_reduce_that_compute_partly_hides_gains_what_it_does_not_hide() {
    // Rank 1 arrives at the all-reduce 240 µs after rank 0. The transfer of the all-reduce takes 30
    // µs, and rank 1 computes during 20 µs of it.
    let job = join_two_ranks_with_events([
        &[
            ("a", "kernel", 7, 0.0, 100.0, 1),
            ("b", "kernel", 7, 100.0, 160.0, 2),
            (ALL_REDUCE_KERNEL_NAME, "kernel", 13, 100.0, 370.0, 3),
            ("c", "kernel", 7, 370.0, 410.0, 4),
        ],
        &[
            ("a", "kernel", 7, 0.0, 340.0, 1),
            (ALL_REDUCE_KERNEL_NAME, "kernel", 13, 340.0, 370.0, 2),
            ("b", "kernel", 7, 340.0, 360.0, 3),
            ("c", "kernel", 7, 370.0, 410.0, 4),
        ],
    ]);
    assert_eq!(job.critical_path.path_length_ns, 410_000);
    assert_eq!(gain_ns_of_job_change(&job, "transfers that take no time"), Some(10_000));
    // If a, b and c of rank 1 take half their time (170, 10 and 20 µs), c of rank 0 ends at 170 +
    // 30 + 40 µs.
    assert_eq!(gain_ns_of_job_change(&job, "rank 1 as fast as the median rank"), Some(170_000));
    assert_eq!(gain_ns_of_job_change(&job, "half the time of a"), Some(170_000));
    assert_eq!(gain_ns_of_job_change(&job, "half the time of b"), Some(0), "the transfer hides it");
    assert_eq!(gain_ns_of_job_change(&job, "half the time of c"), Some(20_000));
    assert_eq!(gain_ns_of_job_change(&job, "rank 0 as fast as the median rank"), None);
    let a = job
        .critical_path
        .rank_kind_and_ns_of_segments
        .first()
        .map(|(rank, what, ns)| (*rank, what.as_str(), *ns));
    assert_eq!(a, Some((1, "a", 340_000)));
    assert_eq!(job.straggler_ranks_slowest_first()[0].gain_at_median_speed_ns, 170_000);
    insta::assert_snapshot!(lines_with_word(&job.job_to_text(), "computes"), @"time); it computes 400.0 µs, the median rank 200.0 µs. As fast as the median rank, the job gains");
}

#[test]
fn the_critical_path_crosses_to_the_rank_that_came_last() {
    let job = join_two_ranks_with_events([
        &[
            ("a", "kernel", 7, 0.0, 100.0, 1),
            (ALL_REDUCE_KERNEL_NAME, "kernel", 7, 100.0, 330.0, 2),
            ("b", "kernel", 7, 330.0, 400.0, 3),
        ],
        &[
            ("a", "kernel", 7, 0.0, 300.0, 1),
            (ALL_REDUCE_KERNEL_NAME, "kernel", 7, 300.0, 330.0, 2),
            ("b", "kernel", 7, 330.0, 350.0, 3),
        ],
    ]);
    // The path consists of rank 1's kernel a before, rank 0's last kernel and the transfer.
    let expected = [(1, "a", 300_000), (0, "b", 70_000), (0, "communication", 30_000)];
    let found: Vec<(usize, &str, i64)> = job
        .critical_path
        .rank_kind_and_ns_of_segments
        .iter()
        .map(|(rank, what, ns)| (*rank, what.as_str(), *ns))
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn work_before_a_recording_is_not_a_delay() {
    let job = join_two_ranks_with_events([
        &[
            ("a", "kernel", 7, 0.0, 100.0, 1),
            (ALL_REDUCE_KERNEL_NAME, "kernel", 7, 100.0, 1330.0, 2),
            ("b", "kernel", 7, 1330.0, 1430.0, 3),
        ],
        &[
            ("a", "kernel", 7, 1000.0, 1300.0, 1),
            (ALL_REDUCE_KERNEL_NAME, "kernel", 7, 1300.0, 1330.0, 2),
        ],
    ]);
    assert_eq!(
        (job.wait_ns_between_ranks[0][1], job.ranks[1].delayed_other_ranks_ns),
        (300_000, 300_000)
    );
    assert_eq!((job.collectives_span_ns, job.critical_path.path_length_ns), (330_000, 430_000));
    let times = job.ranks[0].times_in_common_span;
    assert_eq!(
        (times.exposed_communication_ns, times.compute_ns, times.total_ns_of_all_activities()),
        (330_000, 100_000, 430_000)
    );
}

#[test]
fn a_late_rank_that_compute_hides_is_no_straggler() {
    // Rank 0 waits in the all-reduce for rank 1, and computes during all of this wait.
    let late = |compute_beside: f64| {
        join_two_ranks_with_events([
            &[
                ("a", "kernel", 7, 0.0, 100.0, 1),
                (ALL_REDUCE_KERNEL_NAME, "kernel", 13, 100.0, 400.0, 2),
                ("b", "kernel", 7, 100.0, 100.0 + compute_beside, 3),
                ("c", "kernel", 7, 400.0, 500.0, 4),
            ],
            &[
                ("a", "kernel", 7, 0.0, 390.0, 1),
                (ALL_REDUCE_KERNEL_NAME, "kernel", 13, 390.0, 400.0, 2),
                ("c", "kernel", 7, 400.0, 500.0, 3),
            ],
        ])
    };
    let hidden = late(295.0);
    assert_eq!(hidden.ranks[1].delayed_other_ranks_ns, 290_000);
    assert!(
        hidden.straggler_ranks_slowest_first().is_empty()
            && hidden.severity_of_worst_straggler().is_none()
    );
    insta::assert_snapshot!(lines_with_word(&hidden.job_to_text(), "straggler"), @"no straggler: no rank delays the others by 5 % of the time where no compute hides it, and by more");
    let felt = late(100.0);
    assert_eq!(felt.straggler_ranks_slowest_first()[0].rank_name, "rank 1");
    assert_eq!(felt.exposed_communication_share_range(), Some((0.02, 0.4)));
}

#[test]
fn a_rank_that_its_host_holds_up_gains_the_time_of_the_host() {
    let call = "cuda_runtime";
    let launch = "cudaLaunchKernel";
    let job = join_two_ranks_with_events([
        &[
            (launch, call, 1, 0.0, 5.0, 1),
            (launch, call, 1, 10.0, 15.0, 2),
            (launch, call, 1, 15.0, 20.0, 3),
            ("first", "kernel", 7, 10.0, 20.0, 1),
            ("a", "kernel", 7, 20.0, 120.0, 2),
            (ALL_REDUCE_KERNEL_NAME, "kernel", 13, 120.0, 245.0, 3),
        ],
        &[
            (launch, call, 1, 0.0, 5.0, 1),
            (launch, call, 1, 105.0, 110.0, 2),
            (launch, call, 1, 110.0, 115.0, 3),
            ("first", "kernel", 7, 10.0, 20.0, 1),
            ("a", "kernel", 7, 115.0, 215.0, 2),
            (ALL_REDUCE_KERNEL_NAME, "kernel", 13, 215.0, 245.0, 3),
        ],
    ]);
    assert_eq!(job.critical_path.path_length_ns, 235_000);
    // As fast as the median rank, rank 1 makes its second call at once: kernel a runs from 21 to
    // 121 µs, and the transfer takes 30 µs.
    assert_eq!(gain_ns_of_job_change(&job, "rank 1 as fast as the median rank"), Some(94_000));
    assert_eq!(gain_ns_of_job_change(&job, "transfers that take no time"), Some(30_000));
    insta::assert_snapshot!(lines_with_word(&job.job_to_text(), "idle"), @r"
    time); it is idle for 95.0 µs, the median rank 0 ns. As fast as the median rank, the job gains
    rank                           compute exposed comm       idle       waits      delays    last
    ");
}

#[test]
fn two_processes_of_one_real_trace_are_two_ranks() {
    let Some(folder) = std::env::var_os("REAL_TRACES") else {
        println!("skipped: REAL_TRACES does not name a folder with real traces");
        return;
    };
    let name = "GindaChen_tests_fixtures_mfu_2gpu_before";
    let path = PathBuf::from(folder).join(name).join("trace.sqlite");
    let job = join_ranks_to_job(read_traces_of_ranks(&[(name.to_owned(), path)]).unwrap());
    // The trace has 33 exchanges of each of two devices, whose times come from one clock.
    assert_eq!((job.ranks.len(), job.joined_collectives), (2, 33), "{:?}", job.problems);
    assert_eq!(job.problems, []);
    let waited: i64 = job.ranks.iter().map(|rank| rank.waited_in_collectives_ns).sum();
    let exposed: i64 = job
        .ranks
        .iter()
        .map(|rank| rank.rank_trace.time_by_activity.exposed_communication_ns)
        .sum();
    assert!(0 < waited && waited < exposed, "{waited} of {exposed}");
}

/// Recording of `attention/ring` on two H100 with 16,384 tokens by `kernelgate profile`; calls of
/// `cudaEventQuery` are removed.
#[test]
fn gpus_of_one_recording_are_ranks_whose_copies_compute_hides() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/trace/fixture/ring_on_two_gpus.json");
    let job = join_gpus_of_one_trace("ring.json", path.as_ref()).unwrap().unwrap();
    assert_eq!(job.problems, []);
    let names: Vec<&str> = job.ranks.iter().map(|of| of.rank_name.as_str()).collect();
    assert_eq!(names, ["device 0", "device 1"]);
    // Each launch has two barriers; the barriers are the joined collectives.
    assert_eq!((job.joined_collectives, job.collectives.len()), (6, 1));
    assert_eq!(job.collectives[0].collective.collective_label(), "barrier");
    for rank in &job.ranks {
        let times = rank.times_in_common_span;
        assert_eq!(times.copies_alone_ns, 0, "copies from the other GPU communicate");
        assert!(
            times.hidden_communication_ns > 500_000 && times.exposed_communication_ns < 100_000,
            "{times:?}"
        );
        assert!(times.compute_ns > 20 * times.exposed_communication_ns, "{times:?}");
    }
    // The host enqueues the first launch of the second GPU later than that of the first GPU, so
    // rank 0 waits for rank 1.
    assert!(
        job.wait_ns_between_ranks[0][1] > 60_000 && job.wait_ns_between_ranks[1][0] < 1_000,
        "{:?}",
        job.wait_ns_between_ranks
    );
    assert!(job.straggler_ranks_slowest_first().is_empty());
}

#[test]
fn a_recording_of_one_gpu_is_no_job() {
    let folder = tempfile::tempdir().unwrap();
    let (name, path) = write_trace_per_rank(&folder, &[SyntheticRank::new(0)]).remove(0);
    assert!(join_gpus_of_one_trace(&name, &path).unwrap().is_none());
}
