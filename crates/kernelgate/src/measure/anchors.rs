//! Anchors: two rates that every shard measures alike, whatever its cases, so that a slower card is
//! noticed before its times are merged with times of other cards.
//!
//! Anchors are ceilings of fixed work, so that shards with other problems have comparable ones.
//! This module does not decide how far two anchor rates may differ.

use serde::{Deserialize, Serialize};

use super::CacheState;
use super::limits::{CaseWork, DeviceLimits};
use super::plausibility;
use super::power::PowerMode;
use crate::backend::BackendError;
use crate::measure::events::EventTimer;
use crate::stats::median;
use crate::workload::{Dtype, FlopUnit, Work};

/// Bytes read on a GPU, and bytes written: far beyond its L2 cache.
const GPU_ANCHOR_BYTES: u64 = 512 << 20;
/// Measurements of the matmul ceiling of a GPU: one alone varied by 0.7 to 1.0 % on two H100.
const ANCHOR_MATMUL_REPEATS: usize = 3;
/// Bytes read on the host, and bytes written: beyond the caches of a core.
const HOST_ANCHOR_BYTES: u64 = 16 << 20;

/// Rates of a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AnchorRates {
    /// Power state in which the anchors were measured, which is that of the cases.
    pub power: PowerMode,
    /// Rate of the fastest memory pass, which reads as many bytes as it writes, bytes a second.
    pub memory_bytes_per_s: f64,
    /// Rate of the matmul ceiling, operations a second: bf16 on a GPU, f32 on the host; absent if
    /// the device has no such instructions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matmul_flops_per_s: Option<f64>,
}

/// Anchors of a shard, or the reason why it has none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnchorRecord {
    /// Both anchors were measured.
    Measured(AnchorRates),
    /// Measuring the anchor rates failed: times of this process cannot be merged with times of
    /// other cards.
    Failed(String),
}

impl AnchorRecord {
    /// Measures the anchor rates of the host.
    pub fn measure_cpu(power: PowerMode) -> AnchorRecord {
        let limits = DeviceLimits::measure_cpu(&[anchor_work(HOST_ANCHOR_BYTES, Dtype::F32)]);
        Self::anchors_from_limits(&limits, power)
    }

    /// Measures the anchors of a GPU in a power state.
    pub fn measure_cuda(events: &mut EventTimer, power: PowerMode) -> AnchorRecord {
        match gpu_anchor_limits(events, power) {
            Ok(limits) => Self::anchors_from_limits(&limits, power),
            Err(error) => Self::Failed(error.to_string()),
        }
    }

    fn anchors_from_limits(limits: &DeviceLimits, power: PowerMode) -> Self {
        let Some(memory) = limits.largest_memory() else {
            return Self::Failed("no memory pass was timed".to_owned());
        };
        Self::Measured(AnchorRates {
            power,
            memory_bytes_per_s: memory.bytes_per_s(),
            matmul_flops_per_s: limits.flops_per_s.values().next().copied(),
        })
    }

    /// Checks the rates.
    pub fn validate(&self) -> Result<(), String> {
        let Self::Measured(anchors) = self else { return Ok(()) };
        plausibility::check_rate("anchors: memory_bytes_per_s", anchors.memory_bytes_per_s)?;
        let matmul = anchors.matmul_flops_per_s;
        matmul.map_or(Ok(()), |rate| plausibility::check_rate("anchors: matmul_flops_per_s", rate))
    }
}

/// Ceilings of a GPU; of the matmul ceiling, which the power cap varies, the median of several.
fn gpu_anchor_limits(
    events: &mut EventTimer,
    power: PowerMode,
) -> Result<DeviceLimits, BackendError> {
    let mut limits = DeviceLimits::measure_cuda_in(
        events,
        &[anchor_work(GPU_ANCHOR_BYTES, Dtype::Bf16)],
        power,
    )?;
    let mut rates: Vec<f64> = limits.flops_per_s.values().copied().collect();
    for _ in rates.len()..ANCHOR_MATMUL_REPEATS {
        let again = DeviceLimits::measure_cuda_in(events, &[anchor_work(0, Dtype::Bf16)], power)?;
        rates.extend(again.flops_per_s.values());
    }
    limits.flops_per_s.values_mut().for_each(|rate| *rate = median(&rates));
    Ok(limits)
}

/// Declared work whose measured ceilings are the anchor rates.
fn anchor_work(bytes: u64, dtype: Dtype) -> CaseWork {
    let work = Work::bytes(bytes, bytes).with_flops(FlopUnit::Matmul, dtype, 1);
    CaseWork { work, cache: CacheState::Hot }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_a_memory_and_a_compute_anchor_rate() {
        let AnchorRecord::Measured(anchors) = AnchorRecord::measure_cpu(PowerMode::Steady) else {
            panic!("the host's ceilings cannot fail");
        };
        assert!(anchors.memory_bytes_per_s > 1e8, "{anchors:?}");
        assert!(anchors.matmul_flops_per_s.unwrap() > 1e8, "{anchors:?}");
        assert_eq!(AnchorRecord::Measured(anchors).validate(), Ok(()));
        let broken = AnchorRates { memory_bytes_per_s: f64::NAN, ..anchors };
        let why = AnchorRecord::Measured(broken).validate().unwrap_err();
        assert!(why.starts_with("anchors: memory_bytes_per_s"), "{why}");
    }
}
