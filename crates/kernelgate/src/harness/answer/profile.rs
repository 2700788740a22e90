//! What the time of each case goes to: on a GPU by kernel, as the hardware recorded it, elsewhere by
//! phase.

use std::sync::Arc;

use kernelgate_cuda::Device;
use kernelgate_cuda::observe::cupti::KernelTrace;

use super::each::{each_implementation, parts};
use super::phases;
use crate::backend::{BackendError, Executable, Target};
use crate::harness::cases::{Case, Group, Selection};
use crate::harness::problem::{CaseError, Ready};
use crate::protocol::{ProfiledCase, ResponseBody};
use crate::trace::KernelSummary;

/// Launches before the one that is recorded.
const WARM_UP: usize = 3;

/// Verifies and records one case an implementation.
///
/// # Errors
/// When CUPTI refuses.
pub fn profile(
    selection: &Selection<'_>,
    seed: u64,
    target: &Target,
) -> Result<ResponseBody, BackendError> {
    let Target::Cuda(device) = target else {
        return Ok(by_phase(selection, seed, target, None));
    };
    // Before anything is captured: graphs made earlier are recorded whole.
    let Some(trace) = KernelTrace::start()? else {
        let note = "no kernels are recorded: CUPTI is missing, and `kernelgate doctor` says how to \
                    get it";
        return Ok(by_phase(selection, seed, target, Some(note)));
    };
    let one = |group: &Group<'_>, case: &Case, ready: &mut Ready| {
        profile_case(group, case, ready, target, (device, &trace))
    };
    let (outcomes, lost) = each_implementation(selection, (seed, target), "profiling", one);
    if lost {
        // A lost device gives nothing back: it is left to the end of the process.
        std::mem::forget((Arc::clone(device), trace));
    }
    let profiled = outcomes.into_iter().map(|(case, outcome)| {
        let (status, summary, reason) = parts(outcome);
        ProfiledCase { case, status, summary, phases: Vec::new(), reason }
    });
    Ok(ResponseBody::Profile(profiled.collect()))
}

/// Measures the phases of one case an implementation, and verifies it.
fn by_phase(
    selection: &Selection<'_>,
    seed: u64,
    target: &Target,
    note: Option<&str>,
) -> ResponseBody {
    let one = |group: &Group<'_>, case: &Case, ready: &mut Ready| {
        let phases = phases::of(group, case, ready, target)?;
        ready.verify(group, case, target).map(|_| phases)
    };
    let (outcomes, _) = each_implementation(selection, (seed, target), "profiling", one);
    let profiled = outcomes.into_iter().map(|(case, outcome)| {
        let (status, phases, reason) = parts(outcome);
        let reason = reason.or_else(|| note.map(str::to_owned));
        ProfiledCase { case, status, summary: None, phases: phases.unwrap_or_default(), reason }
    });
    ResponseBody::Profile(profiled.collect())
}

fn profile_case(
    group: &Group<'_>,
    case: &Case,
    ready: &mut Ready,
    target: &Target,
    (device, trace): (&Device, &KernelTrace),
) -> Result<KernelSummary, CaseError> {
    let (mut executable, _) = ready.verify(group, case, target)?;
    let record = |executable: &mut dyn Executable| {
        for _ in 0..WARM_UP {
            executable.launch()?;
        }
        executable.synchronize()?;
        trace.take(device)?;
        executable.launch()?;
        executable.synchronize()?;
        trace.take(device)
    };
    match record(executable.as_mut()) {
        Ok(records) => Ok(KernelSummary::of(&records)),
        Err(error) => {
            std::mem::forget(executable);
            Err(CaseError::Lost(error.to_string()))
        }
    }
}
