//! A trace of a job with what a replay needs of it: its operations, and the calls that launched them.

use crate::analyze::launches::{Launches, NONE};
use crate::analyze::replay::{Dependencies, LaunchCall, WaitCall};
use crate::diagnose::waiting::waiting_names;
use crate::model::Trace;

/// A trace without its calls.
#[derive(Debug)]
pub(super) struct Recorded {
    pub trace: Trace,
    /// By operation.
    launches: Vec<LaunchCall>,
    waits: Vec<WaitCall>,
}

impl Recorded {
    /// Joins the calls of a trace with its operations, and drops them.
    pub fn new(mut trace: Trace) -> Self {
        let launches = Launches::of(&trace);
        let waiting = waiting_names(&trace);
        let calls = std::mem::take(&mut trace.calls);
        let launch = |&call: &u32| match call {
            NONE => LaunchCall::UNKNOWN,
            call => {
                let call = call as usize;
                LaunchCall::new(calls.start[call], calls.end[call], calls.thread[call])
            }
        };
        let wait = |call: usize| WaitCall {
            thread: calls.thread[call],
            start: calls.start[call],
            end: calls.end[call],
        };
        let waits = (0..calls.len()).filter(|&call| waiting[calls.name[call].0 as usize]);
        Self {
            launches: launches.call_of.iter().map(launch).collect(),
            waits: waits.map(wait).collect(),
            trace,
        }
    }

    /// Whether the calls that launch were recorded.
    pub fn has_calls(&self) -> bool {
        self.launches.iter().any(LaunchCall::is_known)
    }

    /// The dependencies of its operations.
    pub fn dependencies(&self) -> Option<Dependencies<'_>> {
        Dependencies::new(&self.trace, &self.launches, &self.waits)
    }
}
