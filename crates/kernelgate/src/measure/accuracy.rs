//! How good event timing is here: against spins of known length, against the hardware's own record
//! of the same launches, and cold against hot.

use serde::{Deserialize, Serialize};

use super::Cache;
use super::events::EventTimer;
use crate::backend::BackendError;
use crate::stats::median;
use crate::workload::random;
use kernelgate_cuda::instruments::bandwidth::Passes;
use kernelgate_cuda::instruments::spin::Spin;
use kernelgate_cuda::observe::cupti::{Recorded, Recorder};

/// A spin, timed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpinRow {
    /// What the kernel was asked to spin, nanoseconds.
    pub wanted_ns: u64,
    /// What it spent by the device's own timer: median.
    pub spent_ns: f64,
    /// What the events say: median.
    pub events_ns: f64,
    /// What the events say of a spin that ends at once: what a kernel takes to begin and end, and
    /// what the overhead is wrong by.
    pub offset_ns: f64,
}

/// A kernel, timed by events and by the hardware.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TraceRow {
    /// What ran.
    pub what: String,
    /// "hot" or "cold".
    pub cache: String,
    /// Medians, nanoseconds a launch: events while nobody records, as results are timed.
    pub events_ns: f64,
    /// Events around the launches that CUPTI recorded.
    pub events_recorded_ns: f64,
    /// CUPTI's record of those launches.
    pub cupti_ns: f64,
}

/// A pass over memory that was read before, and one that was not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ColdRow {
    /// Bytes read.
    pub bytes: u64,
    /// Hot, nanoseconds: median.
    pub hot_ns: f64,
    /// Cold, nanoseconds: median.
    pub cold_ns: f64,
    /// What memory needs at its best rate, nanoseconds: a cold pass that is faster was not cold.
    pub memory_ns: f64,
}

/// Lengths of the spins, nanoseconds.
const SPINS_NS: [u64; 8] =
    [20_000, 50_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 100_000_000];
/// Launches a row.
const REPEATS: usize = 15;
/// Bytes of the copies that are timed both ways: from some microseconds to about a millisecond.
const COPIES: [u64; 7] = [8 << 20, 16 << 20, 48 << 20, 96 << 20, 256 << 20, 1 << 30, 4 << 30];
/// Bytes of the reads that are timed hot and cold: all of them fit L2.
const READS: [u64; 3] = [4 << 20, 16 << 20, 32 << 20];

/// Times spins.
///
/// # Errors
/// When the device fails.
pub fn spins(events: &mut EventTimer) -> Result<Vec<SpinRow>, BackendError> {
    let spin = Spin::new(events.device())?;
    let mut time = |wanted_ns| -> Result<(f64, f64), BackendError> {
        let (mut spent, mut timed) = (Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            timed.extend(events.launches_ns(1, Cache::Hot, &mut || spin.launch(wanted_ns))?);
            spent.push(spin.spent_ns()? as f64);
        }
        Ok((median(&spent), median(&timed)))
    };
    let (spent_ns, events_ns) = time(0)?;
    let offset_ns = events_ns - spent_ns;
    SPINS_NS
        .into_iter()
        .map(|wanted_ns| {
            time(wanted_ns).map(|(spent_ns, events_ns)| SpinRow {
                wanted_ns,
                spent_ns,
                events_ns,
                offset_ns,
            })
        })
        .collect()
}

/// Times copies by events and by CUPTI; `None` where CUPTI is missing.
///
/// # Errors
/// When the device or CUPTI fails.
pub fn against_cupti(events: &mut EventTimer) -> Result<Option<Vec<TraceRow>>, BackendError> {
    let passes = passes(events)?;
    let mut rows = Vec::new();
    for cache in [Cache::Hot, Cache::Cold] {
        for bytes in COPIES {
            let copy = &mut || passes.copy(bytes);
            events.launches_ns(3, cache, copy)?;
            rows.push(TraceRow {
                what: format!("copy {} MiB", bytes >> 20),
                cache: cache.name().to_owned(),
                events_ns: median(&events.launches_ns(REPEATS, cache, copy)?),
                events_recorded_ns: 0.0,
                cupti_ns: 0.0,
            });
        }
    }
    let Some(recorder) = Recorder::start(Recorded::Kernels)? else { return Ok(None) };
    for (row, (cache, bytes)) in rows.iter_mut().zip(
        [Cache::Hot, Cache::Cold].into_iter().flat_map(|cache| COPIES.map(|bytes| (cache, bytes))),
    ) {
        let copy = &mut || passes.copy(bytes);
        events.launches_ns(3, cache, copy)?;
        events.device().synchronize()?;
        recorder.take()?;
        row.events_recorded_ns = median(&events.launches_ns(REPEATS, cache, copy)?);
        events.device().synchronize()?;
        let recorded = recorder.take()?;
        let is_copy = |name: u32| recorded.names[name as usize].contains("copy_bandwidth");
        let copies = recorded.kernels.iter().filter(|record| is_copy(record.name));
        let times: Vec<f64> = copies.map(|record| record.elapsed_ns() as f64).collect();
        if times.len() != REPEATS {
            return Err(BackendError::Launch(format!(
                "CUPTI recorded {} of {REPEATS} launches",
                times.len()
            )));
        }
        row.cupti_ns = median(&times);
    }
    Ok(Some(rows))
}

/// Reads what fits L2, hot and cold. `rate` is the best rate of reading memory, bytes a second.
///
/// # Errors
/// When the device fails.
pub fn cold(events: &mut EventTimer, rate: f64) -> Result<Vec<ColdRow>, BackendError> {
    let passes = passes(events)?;
    let mut rows = Vec::new();
    for bytes in READS {
        let read = &mut || passes.read(bytes);
        events.launches_ns(3, Cache::Hot, read)?;
        rows.push(ColdRow {
            bytes,
            hot_ns: median(&events.launches_ns(REPEATS, Cache::Hot, read)?),
            cold_ns: median(&events.launches_ns(REPEATS, Cache::Cold, read)?),
            memory_ns: bytes as f64 / rate * 1e9,
        });
    }
    Ok(rows)
}

fn passes(events: &EventTimer) -> Result<Passes, BackendError> {
    let pattern = random::normal(0, "accuracy", 1 << 20);
    Passes::new(events.device(), COPIES[COPIES.len() - 1] as usize, bytemuck::cast_slice(&pattern))
}
