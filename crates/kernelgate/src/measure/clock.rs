//! Compares the SM clock of a sample with the settled clock of its case, to detect a card that was
//! slowed down during the sample.
//!
//! A case at the power cap keeps a clock far below the card's highest one; `power` waits until that
//! clock is steady. A sample whose SM clock falls clearly below the settled one is taken again if
//! NVML names heat or a slow-down of the hardware, or reports nothing. Deliberately absent: how
//! often a sample is taken again, the power cap.

use super::power::PowerMeter;
use kernelgate_cuda::driver::device::DeviceFacts;

/// A clock below this share of the settled clock is examined for throttling.
const LOW_CLOCK_RATIO: f64 = 0.90;

/// Compares the clocks of samples with the clock that the case settled at.
pub struct SampleClockWatch {
    highest_mhz: f64,
    settled_mhz: Option<f64>,
}

impl SampleClockWatch {
    /// Watches the SM clock of one card.
    pub fn new(facts: &DeviceFacts) -> Self {
        Self { highest_mhz: f64::from(facts.max_clock_mhz), settled_mhz: None }
    }

    /// Begins a case; its settled clock is not known yet.
    pub const fn begin_case(&mut self) {
        self.settled_mhz = None;
    }

    /// Sets the clock that the samples of the case are compared with.
    pub const fn set_settled_clock(&mut self, clock_mhz: Option<f64>) {
        self.settled_mhz = clock_mhz;
    }

    /// Returns whether heat or the hardware slowed the card down during the sample that has just
    /// ended.
    pub fn is_throttled(&self, clock_mhz: Option<f64>, power: &PowerMeter) -> bool {
        let Some(clock_mhz) = clock_mhz else { return false };
        is_throttled(clock_mhz, self.settled_mhz, self.highest_mhz, || {
            power.is_slowed_by_hardware()
        })
    }
}

/// Whether a clock shows that the card was slowed down: it is clearly below the settled clock and
/// `slowed` names heat or a slow-down of the hardware, or reports nothing. Before a case has
/// settled, no clock is recognised as throttled, because it may be the clock of the load.
fn is_throttled(
    clock_mhz: f64,
    settled_mhz: Option<f64>,
    highest_mhz: f64,
    slowed: impl FnOnce() -> Option<bool>,
) -> bool {
    match settled_mhz {
        Some(settled_mhz) => {
            clock_mhz < LOW_CLOCK_RATIO * settled_mhz.min(highest_mhz) && slowed() != Some(false)
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HIGHEST_CLOCK_MHZ: f64 = 1980.0;

    #[test]
    fn a_clock_near_the_settled_clock_is_not_throttled() {
        for clock in [1230.0, 1400.0, 1300.0] {
            assert!(!is_throttled(clock, Some(1300.0), HIGHEST_CLOCK_MHZ, || panic!(
                "NVML is not asked"
            )));
        }
        // The case has not settled yet, so no clock counts as throttled.
        assert!(!is_throttled(345.0, None, HIGHEST_CLOCK_MHZ, || panic!("NVML is not asked")));
    }

    #[test]
    fn a_fallen_clock_is_throttled_unless_nvml_reports_no_reason() {
        for (slowed, expected) in [(Some(true), true), (None, true), (Some(false), false)] {
            assert_eq!(is_throttled(1100.0, Some(1400.0), HIGHEST_CLOCK_MHZ, || slowed), expected);
        }
    }

    #[test]
    fn a_boosted_clock_does_not_raise_the_reference_above_the_highest_clock() {
        assert!(!is_throttled(1900.0, Some(2700.0), HIGHEST_CLOCK_MHZ, || None));
    }
}
