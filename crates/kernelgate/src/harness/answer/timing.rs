//! How far event timing can be trusted on this GPU, measured now.

use std::sync::Arc;

use kernelgate_cuda::Device;
use kernelgate_cuda::library::Library;
use kernelgate_cuda::observe::telemetry::{Reading, Telemetry};

use crate::backend::{BackendError, Target};
use crate::measure::accuracy;
use crate::measure::events::EventTimer;
use crate::measure::limits::Limits;
use crate::protocol::{Part, TimingReport};
use crate::record::Environment;
use crate::workload::Work;

/// Measures every part, or only one.
///
/// # Errors
/// When the device fails.
pub fn timing(device: &Arc<Device>, only: Option<Part>) -> Result<TimingReport, BackendError> {
    let target = Target::Cuda(Arc::clone(device));
    let wanted = |part| only.is_none_or(|only| only == part);
    let telemetry = target.telemetry();
    let read = || telemetry.iter().map(Telemetry::read);
    let mut readings: Vec<Reading> = read().collect();
    let mut notes = Vec::new();
    let mut events = EventTimer::new(device)?;
    let spins = wanted(Part::Spins).then(|| accuracy::spins(&mut events)).transpose()?;
    let limits = if wanted(Part::Limits) {
        Some(Limits::measure_cuda_all(&mut events)?)
    } else if wanted(Part::Cold) {
        Some(Limits::measure_cuda(&mut events, &[Work::bytes(1, 0)])?)
    } else {
        None
    };
    let memory = limits.as_ref().and_then(|limits| limits.bandwidth.last());
    let cold = match memory {
        Some(memory) if wanted(Part::Cold) => Some(accuracy::cold(&mut events, memory.read)?),
        _ => None,
    };
    readings.extend(read());
    // Last: CUPTI stays attached to the process and slows every later launch.
    let cupti = if wanted(Part::Cupti) { accuracy::against_cupti(&mut events)? } else { None };
    if cupti.is_none() && wanted(Part::Cupti) {
        let (name, advice) = (Library::Cupti.name(), Library::Cupti.advice());
        notes.push(format!("not compared with the hardware's record: {name} is missing: {advice}"));
    }
    let (environment, overhead) = (Environment::of(&target), events.overhead());
    Ok(TimingReport {
        environment,
        telemetry: readings,
        overhead,
        limits,
        spins,
        cold,
        cupti,
        notes,
    })
}
