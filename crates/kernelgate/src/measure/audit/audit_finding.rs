//! Reasons why kernelgate's audit refuses a measured time, because the time would not be the time
//! of the work.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::backend::BackendError;
use crate::backend::failure_facts::case_failure_with_error_fields;

/// The kind of timed code that the audit refused: a launch of an implementation or the routine of a
/// Criterion bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum RefusedTimedCode {
    /// The refused timed code is a launch of an implementation.
    #[serde(rename = "a launch")]
    ImplementationLaunch,
    /// The refused timed code is the routine of a Criterion bench.
    #[serde(rename = "the routine")]
    CriterionRoutine,
}

impl RefusedTimedCode {
    /// Returns, for an error message, the name of one execution of the timed code, and of the
    /// shortest command with which its time is compared.
    const fn names_of_execution_and_shortest_command(self) -> (&'static str, &'static str) {
        match self {
            Self::ImplementationLaunch => ("a launch", "an empty kernel"),
            Self::CriterionRoutine => ("an iteration", "the least command"),
        }
    }
}

impl fmt::Display for RefusedTimedCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ImplementationLaunch => "a launch",
            Self::CriterionRoutine => "the routine",
        })
    }
}

/// Returns ` on rank N` for an error message, or an empty string for rank 0, which may be the only
/// GPU.
fn rank_suffix_for_message(rank: usize) -> String {
    if rank == 0 { String::new() } else { format!(" on rank {rank}") }
}

/// The reason why kernelgate's audit refuses to time a launch or a Criterion routine.
#[derive(Debug, Clone, PartialEq, Serialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TimingRefusal {
    /// Refused: the timed code enqueues no command on the timed stream.
    #[error(
        "{subject} enqueues nothing on the stream that is timed; what runs on another stream, or on \
         the host, has no time here"
    )]
    NothingEnqueued {
        /// The timed code that is refused: a launch or a Criterion routine.
        subject: RefusedTimedCode,
    },
    /// Refused: a launch over several GPUs enqueues no command on one of them.
    #[error(
        "a launch enqueues nothing on rank {gpu_rank} (GPU {gpu_ordinal}): every GPU of a case takes part"
    )]
    #[serde(rename = "nothing_on_rank")]
    NothingEnqueuedOnRank {
        /// Rank of this GPU in the case's set of GPUs.
        #[serde(rename = "rank")]
        gpu_rank: usize,
        /// The GPU's ordinal.
        #[serde(rename = "gpu")]
        gpu_ordinal: usize,
    },
    /// Refused: launches that were captured together in one graph have fewer commands than the sum
    /// of single launches.
    #[error(
        "launches differ in their commands{}: {commands_of_one_launch} in one, {commands_of_batch} in {launches_in_batch} together",
        rank_suffix_for_message(*gpu_rank)
    )]
    #[serde(rename = "commands_differ")]
    CommandsDifferInBatch {
        /// Rank of the GPU whose commands differ.
        #[serde(rename = "rank")]
        gpu_rank: usize,
        /// Number of commands of one launch that is captured alone.
        #[serde(rename = "alone")]
        commands_of_one_launch: usize,
        /// Number of commands in the graph that holds all launches captured together.
        #[serde(rename = "together")]
        commands_of_batch: usize,
        /// Launches captured together.
        #[serde(rename = "launches")]
        launches_in_batch: u64,
    },
    /// Refused: the measured time of the code is shorter than any command takes on the GPU.
    #[error(
        "{} takes {launch_or_iteration_ns:.0} ns by the events around it, {} {shortest_command_ns:.0} ns",
        subject.names_of_execution_and_shortest_command().0, subject.names_of_execution_and_shortest_command().1
    )]
    #[serde(rename = "too_short")]
    ShorterThanShortestCommand {
        /// The timed code that is refused: a launch or a Criterion routine.
        subject: RefusedTimedCode,
        /// Measured time of one launch or routine iteration, nanoseconds.
        #[serde(rename = "elapsed_ns")]
        launch_or_iteration_ns: f64,
        /// Time that the shortest possible GPU command takes, nanoseconds.
        #[serde(rename = "least_ns")]
        shortest_command_ns: f64,
    },
    /// Refused: a launch writes outputs while the timed stream is still blocked ahead of the
    /// launch.
    #[error(
        "a launch writes its outputs while the stream that is timed is held: it works on another \
         stream"
    )]
    #[serde(rename = "writes_while_held")]
    WritesWhileStreamBlocked,
    /// Refused: the GPU is still busy with other work after the timed stream has finished.
    #[error(
        "{subject} keeps the GPU busy for {} µs after the stream that is timed has finished: it \
         works on another stream",
        context_busy_time.as_micros()
    )]
    #[serde(rename = "busy_after_stream")]
    ContextBusyAfterStream {
        /// The timed code that is refused: a launch or a Criterion routine.
        subject: RefusedTimedCode,
        /// Shortest time for which the CUDA context stayed busy after the timed stream had
        /// finished, over all repetitions.
        #[serde(rename = "busy_s", serialize_with = "serialize_duration_as_seconds")]
        context_busy_time: Duration,
    },
    /// Refused: Refused: CUPTI recorded an operation of the timed code on another stream than the
    /// timed stream.
    #[error(
        "{gpu_operation} runs on another stream than the one that is timed, by CUPTI's record of {}",
        subject.names_of_execution_and_shortest_command().0
    )]
    #[serde(rename = "recorded_elsewhere")]
    RecordedOnOtherStream {
        /// The timed code that is refused: a launch or a Criterion routine.
        subject: RefusedTimedCode,
        /// Name of the GPU operation that caused the refusal.
        #[serde(rename = "operation")]
        gpu_operation: String,
    },
    /// Refused: Refused: CUPTI recorded an operation of the timed code on a GPU that does not
    /// belong to the case.
    #[error(
        "{gpu_operation} runs on GPU {gpu_ordinal}, which is not one of the case's, by CUPTI's record of {}",
        subject.names_of_execution_and_shortest_command().0
    )]
    RecordedOnOtherGpu {
        /// The timed code that is refused: a launch or a Criterion routine.
        subject: RefusedTimedCode,
        /// Name of the GPU operation that caused the refusal.
        #[serde(rename = "operation")]
        gpu_operation: String,
        /// The GPU.
        #[serde(rename = "gpu")]
        gpu_ordinal: u32,
    },
    /// Refused: the Criterion routine waits for work that does not run on the timed stream.
    #[error(
        "the routine takes {:.0} µs between the events, and the stream did nothing in it while the \
         host waited ({:.0} µs): it works on another stream, or on the host",
        unblocked_pass_ns / 1e3, blocked_stream_work_ns / 1e3
    )]
    #[serde(rename = "waits_for_work_elsewhere")]
    WaitsForWorkOnOtherStream {
        /// Shortest event time of a routine's pass whose stream was not blocked, nanoseconds.
        #[serde(rename = "elapsed_ns")]
        unblocked_pass_ns: f64,
        /// Time for which the blocked stream itself worked in the first pass of the routine,
        /// nanoseconds.
        #[serde(rename = "held_ns")]
        blocked_stream_work_ns: f64,
    },
    /// Refused: the captured graph of a launch contains a memory allocation node.
    #[error("a launch allocates device memory in the order of the stream")]
    #[serde(rename = "allocates_in_order")]
    AllocatesInGraph,
    /// Refused: each trial launch allocates device memory.
    #[error("each launch allocates {allocated_bytes} bytes of device memory")]
    #[serde(rename = "allocates")]
    AllocatesDeviceMemory {
        /// Smallest number of bytes that a trial launch allocated.
        #[serde(rename = "bytes")]
        allocated_bytes: u64,
    },
    /// Refused: the timed code makes the host wait for the GPU in a driver or runtime function that
    /// CUPTI identified.
    #[error("{subject} waits for the GPU in `{cuda_function}`")]
    #[serde(rename = "waits_in")]
    WaitsInCudaCall {
        /// The timed code that is refused: a launch or a Criterion routine.
        subject: RefusedTimedCode,
        /// Name of the CUDA driver or runtime function in which the host waited.
        #[serde(rename = "call")]
        cuda_function: String,
    },
    /// Refused: the timed code makes the host wait for the GPU, in a call that was not identified.
    #[error("{subject} waits for the GPU: it synchronises, copies to the host, or frees memory")]
    #[serde(rename = "waits")]
    WaitsForGpu {
        /// The timed code that is refused: a launch or a Criterion routine.
        subject: RefusedTimedCode,
    },
    /// Refused: without CUPTI it is unknown whether the host waits for the GPU or for room in the
    /// launch queue.
    #[error(
        "a launch waits for the GPU: it synchronises, copies to the host, or frees memory; or it is \
         more commands than can be queued (CUPTI would show which)"
    )]
    WaitsOrFillsQueue,
    /// Refused: a launch reuses results that an earlier launch on the same inputs computed.
    #[error(
        "a launch for new inputs and poisoned outputs takes {:.1} µs longer than the next one, \
         which takes {:.1} µs as those that were timed: it reuses what an earlier launch computed",
        first_launch_excess_ns / 1e3, second_launch_ns / 1e3
    )]
    #[serde(rename = "reuses")]
    ReusesResults {
        /// Time by which the first launch on new inputs exceeds the next launch on the same inputs,
        /// nanoseconds.
        #[serde(rename = "more_ns")]
        first_launch_excess_ns: f64,
        /// Time of the second launch on the same inputs, nanoseconds.
        #[serde(rename = "next_ns")]
        second_launch_ns: f64,
    },
    /// Refused: a launch captured alone takes longer than each launch of a batch captured in one
    /// graph, so the batch reuses results.
    #[error(
        "a launch that is captured alone takes {:.1} µs, each of those that are captured together \
         {:.1} µs: they reuse what one of them computed",
        single_launch_ns / 1e3, batched_launch_ns / 1e3
    )]
    #[serde(rename = "reuses_in_batch")]
    ReusesResultsInBatch {
        /// Time of a launch that is captured alone in a graph, nanoseconds.
        #[serde(rename = "alone_ns")]
        single_launch_ns: f64,
        /// Time per launch if several launches are captured in one graph, nanoseconds.
        #[serde(rename = "together_ns")]
        batched_launch_ns: f64,
    },
    /// Refused: the untimed reset closure already computes the outputs, and the launch leaves them
    /// unchanged.
    #[error("a launch leaves the outputs as its reset made them, which is not in the time")]
    #[serde(rename = "computed_by_reset")]
    OutputsComputedByReset,
    /// Refused: in each attempt, the host took longer to enqueue than the stream can be blocked, so
    /// host time would be measured.
    #[error(
        "the host was held up for longer than the GPU can wait for it, in each attempt: its time \
         would be in what is measured"
    )]
    #[serde(rename = "host_held_up")]
    HostDelayedLongerThanHold,
    /// Refused: the launches of a case have more commands than can be queued behind a blocked
    /// stream.
    #[error(
        "{launches} launches of {commands_per_launch} commands are too many to queue ahead: the host's time \
         would be in them"
    )]
    #[serde(rename = "too_many_commands")]
    TooManyCommandsToQueue {
        /// Launches.
        launches: usize,
        /// Commands of one.
        #[serde(rename = "commands")]
        commands_per_launch: usize,
    },
}

impl From<TimingRefusal> for BackendError {
    fn from(refusal: TimingRefusal) -> Self {
        Self::NotTimed(case_failure_with_error_fields(&refusal))
    }
}

fn serialize_duration_as_seconds<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timing_refusal_is_recorded_with_kind_and_fields() {
        let subject = RefusedTimedCode::CriterionRoutine;
        let busy = Duration::from_micros(1_500);
        let refusal = TimingRefusal::ContextBusyAfterStream { subject, context_busy_time: busy };
        let failure = case_failure_with_error_fields(&refusal);
        assert_eq!(failure.failure_kind, "busy_after_stream");
        assert_eq!(
            failure.names_in_failure_sentence,
            [("subject".to_owned(), "the routine".to_owned())].into()
        );
        assert_eq!(failure.numbers_in_failure_sentence, [("busy_s".to_owned(), 0.0015)].into());
        assert_eq!(failure.failure_sentence, refusal.to_string());
        let refusal = TimingRefusal::ReusesResults {
            first_launch_excess_ns: f64::INFINITY,
            second_launch_ns: 2.0,
        };
        let failure = case_failure_with_error_fields(&refusal);
        assert_eq!(failure.numbers_in_failure_sentence, [("next_ns".to_owned(), 2.0)].into());
        assert_eq!(
            case_failure_with_error_fields(&TimingRefusal::HostDelayedLongerThanHold).failure_kind,
            "host_held_up"
        );
    }
}
