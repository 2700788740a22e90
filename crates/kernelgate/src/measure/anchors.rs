//! Anchors are the memory rate and matmul rate of a device, measured equally in every shard, to
//! notice a slower card before shards are merged.
//!
//! Anchors are measured with work of fixed size, so shards that ran different problems can be
//! compared. This module measures anchor rates; it does not decide how far the anchor rates of two
//! cards may differ.

use serde::{Deserialize, Serialize};

use super::CacheState;
use super::limits::{DeclaredWorkAndCacheState, MeasuredDeviceLimits};
use super::plausibility;
use super::power::TimingPowerMode;
use crate::backend::BackendError;
use crate::measure::events::CudaEventTimer;
use crate::stats::median;
use crate::workload::{Dtype, FlopUnit, Work};

/// Bytes that the anchor memory pass on a GPU reads, and bytes that it writes: far more than the L2
/// cache holds.
const GPU_ANCHOR_BYTES_READ_AND_WRITTEN: u64 = 512 << 20;
/// How often the matmul rate of a GPU is measured for the median; single measurements varied by 0.7
/// to 1.0 % on two H100.
const ANCHOR_MATMUL_MEASUREMENTS: usize = 3;
/// Bytes that the anchor memory pass on the host reads, and bytes that it writes: more than a
/// core's caches hold.
const HOST_ANCHOR_BYTES_READ_AND_WRITTEN: u64 = 16 << 20;

/// Anchor rates of a device: rates of fixed work, by which devices of different shards are
/// compared.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AnchorRatesOfDevice {
    /// Power state of the GPU during the anchor measurement, which is the power state in which the
    /// cases are timed.
    pub power: TimingPowerMode,
    /// Rate of the fastest memory pass that reads as many bytes as it writes, in bytes read plus
    /// written a second.
    pub memory_bytes_per_s: f64,
    /// Measured matmul rate, operations a second: bf16 on a GPU, f32 on the host; absent if the
    /// device lacks these instructions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matmul_flops_per_s: Option<f64>,
}

/// Anchor rates of the device that ran a shard, or the reason why they were not measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardAnchorRecord {
    /// Both anchors were measured.
    Measured(AnchorRatesOfDevice),
    /// The anchor rates could not be measured, so times of this process cannot be merged with times
    /// from other cards.
    #[serde(rename = "failed")]
    NotMeasured(String),
}

impl ShardAnchorRecord {
    /// Measures the anchor memory rate and matmul rate of the host CPU.
    pub fn measure_cpu_anchors(power: TimingPowerMode) -> ShardAnchorRecord {
        let limits = MeasuredDeviceLimits::measure_host_limits(&[work_for_anchor_measurement(
            HOST_ANCHOR_BYTES_READ_AND_WRITTEN,
            Dtype::F32,
        )]);
        Self::anchors_from_measured_limits(&limits, power)
    }

    /// Measures the anchor memory rate and matmul rate of a GPU in the given power state.
    pub fn measure_gpu_anchors(
        events: &mut CudaEventTimer,
        power: TimingPowerMode,
    ) -> ShardAnchorRecord {
        match measure_gpu_limits_for_anchors(events, power) {
            Ok(limits) => Self::anchors_from_measured_limits(&limits, power),
            Err(error) => Self::NotMeasured(error.to_string()),
        }
    }

    fn anchors_from_measured_limits(limits: &MeasuredDeviceLimits, power: TimingPowerMode) -> Self {
        let Some(memory) = limits.memory_limit_with_most_bytes() else {
            return Self::NotMeasured("no memory pass was timed".to_owned());
        };
        Self::Measured(AnchorRatesOfDevice {
            power,
            memory_bytes_per_s: memory.bytes_read_and_written_per_s(),
            matmul_flops_per_s: limits.flops_per_s.values().next().copied(),
        })
    }

    /// Checks the rates.
    pub fn check_anchor_rates_plausible(&self) -> Result<(), String> {
        let Self::Measured(anchors) = self else { return Ok(()) };
        plausibility::check_rate_per_s_plausible(
            "anchors: memory_bytes_per_s",
            anchors.memory_bytes_per_s,
        )?;
        let matmul = anchors.matmul_flops_per_s;
        matmul.map_or(Ok(()), |rate| {
            plausibility::check_rate_per_s_plausible("anchors: matmul_flops_per_s", rate)
        })
    }
}

/// Measures the memory and matmul rates of a GPU for its anchors; the matmul rate is the median of
/// several measurements.
fn measure_gpu_limits_for_anchors(
    events: &mut CudaEventTimer,
    power: TimingPowerMode,
) -> Result<MeasuredDeviceLimits, BackendError> {
    let mut limits = MeasuredDeviceLimits::measure_gpu_limits_in_power_mode(
        events,
        &[work_for_anchor_measurement(GPU_ANCHOR_BYTES_READ_AND_WRITTEN, Dtype::Bf16)],
        power,
    )?;
    let mut rates: Vec<f64> = limits.flops_per_s.values().copied().collect();
    for _ in rates.len()..ANCHOR_MATMUL_MEASUREMENTS {
        let again = MeasuredDeviceLimits::measure_gpu_limits_in_power_mode(
            events,
            &[work_for_anchor_measurement(0, Dtype::Bf16)],
            power,
        )?;
        rates.extend(again.flops_per_s.values());
    }
    limits.flops_per_s.values_mut().for_each(|rate| *rate = median(&rates));
    Ok(limits)
}

/// Returns declared work that makes the limit measurement measure the two anchor rates.
fn work_for_anchor_measurement(bytes: u64, dtype: Dtype) -> DeclaredWorkAndCacheState {
    let work = Work::bytes(bytes, bytes).with_flops(FlopUnit::Matmul, dtype, 1);
    DeclaredWorkAndCacheState { work, cache: CacheState::HotCaches }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_has_memory_and_matmul_anchor_rates() {
        let ShardAnchorRecord::Measured(anchors) =
            ShardAnchorRecord::measure_cpu_anchors(TimingPowerMode::SteadyLoad)
        else {
            panic!("the host's ceilings cannot fail");
        };
        assert!(anchors.memory_bytes_per_s > 1e8, "{anchors:?}");
        assert!(anchors.matmul_flops_per_s.unwrap() > 1e8, "{anchors:?}");
        assert_eq!(ShardAnchorRecord::Measured(anchors).check_anchor_rates_plausible(), Ok(()));
        let broken = AnchorRatesOfDevice { memory_bytes_per_s: f64::NAN, ..anchors };
        let why = ShardAnchorRecord::Measured(broken).check_anchor_rates_plausible().unwrap_err();
        assert!(why.starts_with("anchors: memory_bytes_per_s"), "{why}");
    }
}
