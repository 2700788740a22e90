//! Compares the SM clock during a sample with the settled SM clock of its case, to detect that the
//! GPU was slowed down.
//!
//! At the power cap, a case runs at an SM clock far below the card's highest one; the module
//! `power` waits until the clock is steady. A sample whose SM clock falls clearly below the settled
//! clock is repeated if NVML reports heat or a hardware slow-down, or does not answer. This module
//! neither limits how often a sample is repeated nor handles the power cap.

use super::power::NvmlPowerMeter;
use kernelgate_cuda::driver::device::GpuProperties;

/// An SM clock below this share of the case's settled clock is examined for throttling.
const LOW_SM_CLOCK_RATIO: f64 = 0.90;

/// Compares the SM clock of each sample with the SM clock that the case settled at.
pub struct SampleThrottleDetector {
    highest_sm_clock_mhz: f64,
    settled_sm_clock_mhz: Option<f64>,
}

impl SampleThrottleDetector {
    /// Creates a detector for the GPU with these facts, whose highest SM clock limits the settled
    /// clock.
    pub fn new(facts: &GpuProperties) -> Self {
        Self { highest_sm_clock_mhz: f64::from(facts.max_sm_clock_mhz), settled_sm_clock_mhz: None }
    }

    /// Begins a case, whose settled SM clock is not known yet.
    pub const fn forget_settled_clock_for_new_case(&mut self) {
        self.settled_sm_clock_mhz = None;
    }

    /// Sets the settled SM clock, MHz, with which the SM clocks of this case's samples are
    /// compared.
    pub const fn set_settled_sm_clock(&mut self, clock_mhz: Option<f64>) {
        self.settled_sm_clock_mhz = clock_mhz;
    }

    /// Returns whether heat or the hardware lowered the SM clock during the sample that has just
    /// ended.
    pub fn was_sample_throttled(&self, clock_mhz: Option<f64>, power: &NvmlPowerMeter) -> bool {
        let Some(clock_mhz) = clock_mhz else { return false };
        is_sm_clock_throttled(
            clock_mhz,
            self.settled_sm_clock_mhz,
            self.highest_sm_clock_mhz,
            || power.is_gpu_slowed_by_heat_or_hardware(),
        )
    }
}

/// Returns whether an SM clock is clearly below the settled clock and `slowed` confirms heat or a
/// hardware slow-down, or has no answer. Before a case has settled, no SM clock counts as
/// throttled, because the SM clock still changes under the load.
fn is_sm_clock_throttled(
    clock_mhz: f64,
    settled_mhz: Option<f64>,
    highest_mhz: f64,
    slowed: impl FnOnce() -> Option<bool>,
) -> bool {
    match settled_mhz {
        Some(settled_mhz) => {
            clock_mhz < LOW_SM_CLOCK_RATIO * settled_mhz.min(highest_mhz) && slowed() != Some(false)
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIGHEST_SM_CLOCK_MHZ: f64 = 1980.0;

    #[test]
    fn a_clock_near_the_settled_sm_clock_is_not_throttled() {
        for clock in [1230.0, 1400.0, 1300.0] {
            assert!(!is_sm_clock_throttled(clock, Some(1300.0), HIGHEST_SM_CLOCK_MHZ, || panic!(
                "NVML is not asked"
            )));
        }
        // The case has no settled SM clock yet, so no SM clock counts as throttled.
        assert!(!is_sm_clock_throttled(345.0, None, HIGHEST_SM_CLOCK_MHZ, || panic!(
            "NVML is not asked"
        )));
    }

    #[test]
    fn a_low_sm_clock_is_throttled_unless_nvml_denies_it() {
        for (slowed, expected) in [(Some(true), true), (None, true), (Some(false), false)] {
            assert_eq!(
                is_sm_clock_throttled(1100.0, Some(1400.0), HIGHEST_SM_CLOCK_MHZ, || slowed),
                expected
            );
        }
    }

    #[test]
    fn a_settled_clock_above_the_highest_clock_is_capped() {
        assert!(!is_sm_clock_throttled(1900.0, Some(2700.0), HIGHEST_SM_CLOCK_MHZ, || None));
    }
}
