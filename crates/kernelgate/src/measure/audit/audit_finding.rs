//! Findings of the audit: reasons why a measured time would not be that of the work.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::backend::BackendError;
use crate::backend::failure_facts::failure_with_facts;

/// The code that is timed: a launch or a Criterion routine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum RefusedSubject {
    /// The refused code is a launch of an implementation.
    #[serde(rename = "a launch")]
    Launch,
    /// The refused code is the routine of a Criterion bench.
    #[serde(rename = "the routine")]
    Routine,
}

impl RefusedSubject {
    /// Words for one execution of the code and for the least command with which its time is
    /// compared.
    const fn execution_and_least_command(self) -> (&'static str, &'static str) {
        match self {
            Self::Launch => ("a launch", "an empty kernel"),
            Self::Routine => ("an iteration", "the least command"),
        }
    }
}

impl fmt::Display for RefusedSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Launch => "a launch",
            Self::Routine => "the routine",
        })
    }
}

/// Names the GPU in a message, except the first GPU, which may be the only one.
fn rank_in_message(rank: usize) -> String {
    if rank == 0 { String::new() } else { format!(" on rank {rank}") }
}

/// The reason why a row or a routine has no time.
#[derive(Debug, Clone, PartialEq, Serialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TimingRefusal {
    /// Refused: the code enqueues nothing on the timed stream.
    #[error(
        "{subject} enqueues nothing on the stream that is timed; what runs on another stream, or on \
         the host, has no time here"
    )]
    NothingEnqueued {
        /// The code.
        subject: RefusedSubject,
    },
    /// The code enqueues nothing on one GPU of the set.
    #[error("a launch enqueues nothing on rank {rank} (GPU {gpu}): every GPU of a case takes part")]
    NothingOnRank {
        /// Rank of the GPU in the set.
        rank: usize,
        /// The GPU's ordinal.
        gpu: usize,
    },
    /// Launches that were captured together have fewer commands than each alone.
    #[error(
        "launches differ in their commands{}: {alone} in one, {together} in {launches} together",
        rank_in_message(*rank)
    )]
    CommandsDiffer {
        /// Rank of the GPU in the set of GPUs.
        rank: usize,
        /// Commands of one launch.
        alone: usize,
        /// Number of commands of all launches that were captured together.
        together: usize,
        /// Launches captured together.
        launches: u64,
    },
    /// Refused: the measured time is shorter than any command takes on the GPU.
    #[error(
        "{} takes {elapsed_ns:.0} ns by the events around it, {} {least_ns:.0} ns",
        subject.execution_and_least_command().0, subject.execution_and_least_command().1
    )]
    TooShort {
        /// The code.
        subject: RefusedSubject,
        /// Measured time of the code, nanoseconds.
        elapsed_ns: f64,
        /// Time that the shortest possible command takes, nanoseconds.
        least_ns: f64,
    },
    /// A launch writes outputs before the timed stream reaches it.
    #[error(
        "a launch writes its outputs while the stream that is timed is held: it works on another \
         stream"
    )]
    WritesWhileHeld,
    /// The GPU still works after the timed stream has finished.
    #[error(
        "{subject} keeps the GPU busy for {} µs after the stream that is timed has finished: it \
         works on another stream",
        busy.as_micros()
    )]
    BusyAfterStream {
        /// The code.
        subject: RefusedSubject,
        /// Shortest time for which the context stayed busy after a repetition, of all repetitions.
        #[serde(rename = "busy_s", serialize_with = "serialize_as_seconds")]
        busy: Duration,
    },
    /// Refused: CUPTI recorded work on another stream than the timed one.
    #[error(
        "{operation} runs on another stream than the one that is timed, by CUPTI's record of {}",
        subject.execution_and_least_command().0
    )]
    RecordedElsewhere {
        /// The code.
        subject: RefusedSubject,
        /// The operation.
        operation: String,
    },
    /// Refused: CUPTI recorded work on a GPU that the case does not have.
    #[error(
        "{operation} runs on GPU {gpu}, which is not one of the case's, by CUPTI's record of {}",
        subject.execution_and_least_command().0
    )]
    RecordedOnOtherGpu {
        /// The code.
        subject: RefusedSubject,
        /// The operation.
        operation: String,
        /// The GPU.
        gpu: u32,
    },
    /// Refused: a pass of the routine waits for work on another stream.
    #[error(
        "the routine takes {:.0} µs between the events, and the stream did nothing in it while the \
         host waited ({:.0} µs): it works on another stream, or on the host",
        elapsed_ns / 1e3, held_ns / 1e3
    )]
    WaitsForWorkElsewhere {
        /// Shortest time of a pass that was not held, nanoseconds.
        elapsed_ns: f64,
        /// Time of the stream alone in the first pass, nanoseconds.
        held_ns: f64,
    },
    /// Refused: the commands of a launch contain a memory allocation.
    #[error("a launch allocates device memory in the order of the stream")]
    AllocatesInOrder,
    /// Device memory is taken.
    #[error("each launch allocates {bytes} bytes of device memory")]
    Allocates {
        /// Bytes of the launch's smallest allocation, over all launches.
        bytes: u64,
    },
    /// The host waits for the GPU in a known call.
    #[error("{subject} waits for the GPU in `{call}`")]
    WaitsIn {
        /// The code.
        subject: RefusedSubject,
        /// Name of the driver or runtime function that was called.
        call: String,
    },
    /// Refused: the code makes the host wait for the GPU.
    #[error("{subject} waits for the GPU: it synchronises, copies to the host, or frees memory")]
    Waits {
        /// The code.
        subject: RefusedSubject,
    },
    /// The host waits for the GPU, or for room in the queue.
    #[error(
        "a launch waits for the GPU: it synchronises, copies to the host, or frees memory; or it is \
         more commands than can be queued (CUPTI would show which)"
    )]
    WaitsOrFillsQueue,
    /// Refused: launches return results that an earlier launch computed.
    #[error(
        "a launch for new inputs and poisoned outputs takes {:.1} µs longer than the next one, \
         which takes {:.1} µs as those that were timed: it reuses what an earlier launch computed",
        more_ns / 1e3, next_ns / 1e3
    )]
    Reuses {
        /// Time by which the first launch for new inputs exceeds the next one, nanoseconds.
        more_ns: f64,
        /// Time of the next launch with the same inputs, nanoseconds.
        next_ns: f64,
    },
    /// A launch that is captured alone takes longer than each launch of a captured batch.
    #[error(
        "a launch that is captured alone takes {:.1} µs, each of those that are captured together \
         {:.1} µs: they reuse what one of them computed",
        alone_ns / 1e3, together_ns / 1e3
    )]
    ReusesInBatch {
        /// Time of a launch if it is captured alone in a graph, nanoseconds.
        alone_ns: f64,
        /// Time of each launch if several are captured in one graph, nanoseconds.
        together_ns: f64,
    },
    /// Refused: the reset closure computes the results in advance.
    #[error("a launch leaves the outputs as its reset made them, which is not in the time")]
    ComputedByReset,
    /// Refused: the host, not the GPU, spends most of the time between the events.
    #[error(
        "the host was held up for longer than the GPU can wait for it, in each attempt: its time \
         would be in what is measured"
    )]
    HostHeldUp,
    /// The case needs more commands than can be queued ahead.
    #[error(
        "{launches} launches of {commands} commands are too many to queue ahead: the host's time \
         would be in them"
    )]
    TooManyCommands {
        /// Launches.
        launches: usize,
        /// Commands of one.
        commands: usize,
    },
}

impl From<TimingRefusal> for BackendError {
    fn from(refusal: TimingRefusal) -> Self {
        Self::NotTimed(failure_with_facts(&refusal))
    }
}

fn serialize_as_seconds<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_recorded_as_a_reason_with_its_fields() {
        let subject = RefusedSubject::Routine;
        let busy = Duration::from_micros(1_500);
        let refusal = TimingRefusal::BusyAfterStream { subject, busy };
        let failure = failure_with_facts(&refusal);
        assert_eq!(failure.kind, "busy_after_stream");
        assert_eq!(failure.names, [("subject".to_owned(), "the routine".to_owned())].into());
        assert_eq!(failure.numbers, [("busy_s".to_owned(), 0.0015)].into());
        assert_eq!(failure.text, refusal.to_string());
        let refusal = TimingRefusal::Reuses { more_ns: f64::INFINITY, next_ns: 2.0 };
        let failure = failure_with_facts(&refusal);
        assert_eq!(failure.numbers, [("next_ns".to_owned(), 2.0)].into());
        assert_eq!(failure_with_facts(&TimingRefusal::HostHeldUp).kind, "host_held_up");
    }
}
