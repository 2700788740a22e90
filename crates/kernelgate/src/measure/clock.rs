//! Whether the SM clock that a sample ran at is one that the card keeps, or the card was throttled.
//!
//! A card whose power limit is low for what it computes (an L4, an H100 in a large GEMM) never
//! reaches its highest clock under such a kernel, nor does one whose clocks were set: those clocks
//! are steady, and no sample would be better. Heat and slow-downs of the hardware are told by NVML,
//! and last for longer than a sample. Deliberately absent: how often a sample is taken again.

use kernelgate_cuda::driver::device::DeviceFacts;
use kernelgate_cuda::observe::telemetry::Telemetry;

/// A clock below this share of the card's highest one is looked at.
const LOW: f64 = 0.75;
/// By how much of it a clock differs at most from a steady one before.
const STEADY: f64 = 0.10;

/// Looks at the clocks of samples, one after the other.
pub struct ClockWatch {
    highest_mhz: f64,
    uuid: String,
    /// Opened when a clock is low for the first time.
    telemetry: Option<Option<Telemetry>>,
    before_mhz: Option<f64>,
}

impl ClockWatch {
    /// For a card.
    pub fn of(facts: &DeviceFacts) -> Self {
        let (highest_mhz, uuid) = (f64::from(facts.max_clock_mhz), facts.uuid.clone());
        Self { highest_mhz, uuid, telemetry: None, before_mhz: None }
    }

    /// Forgets the clock before: what follows is another kernel's.
    pub const fn begin(&mut self) {
        self.before_mhz = None;
    }

    /// Whether the card was throttled, or its clock not steady, in the sample that has just ended.
    pub fn throttled(&mut self, clock_mhz: Option<f64>) -> bool {
        let Some(clock_mhz) = clock_mhz else { return false };
        let before_mhz = self.before_mhz.replace(clock_mhz);
        throttled(clock_mhz, self.highest_mhz, before_mhz, || {
            let uuid = &self.uuid;
            self.telemetry.get_or_insert_with(|| Telemetry::open(uuid)).as_ref()?.slowed()
        })
    }
}

/// Whether a clock says that the card was throttled: it is low, and not that of the sample before,
/// or `slowed` tells of heat or a slow-down of the hardware, or does not tell.
fn throttled(
    clock_mhz: f64,
    highest_mhz: f64,
    before_mhz: Option<f64>,
    slowed: impl FnOnce() -> Option<bool>,
) -> bool {
    if clock_mhz >= LOW * highest_mhz {
        return false;
    }
    let steady =
        before_mhz.is_some_and(|before| (clock_mhz - before).abs() <= STEADY * before.max(1.0));
    !steady || slowed() != Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of each clock whether it is that of a throttled card.
    fn each(highest_mhz: f64, slowed: Option<bool>, clocks: &[f64]) -> Vec<bool> {
        let mut before_mhz = None;
        let mut of = |&clock: &f64| {
            let before_mhz = before_mhz.replace(clock);
            throttled(clock, highest_mhz, before_mhz, || slowed)
        };
        clocks.iter().map(&mut of).collect()
    }

    #[test]
    fn a_clock_that_the_power_limit_keeps_is_not_throttled() {
        // An L4: 2040 MHz at most; a heavy kernel takes the clock down within some samples.
        let l4 = [2040.0, 1500.0, 1210.0, 1200.0, 1185.0, 1230.0];
        let expected = [false, true, true, false, false, false];
        assert_eq!(each(2040.0, Some(false), &l4), expected);
        // An H100 or H200 at its power limit.
        assert_eq!(each(1980.0, Some(false), &[1400.0, 1380.0, 1310.0]), [true, false, false]);
        // What is near the highest clock is never looked at.
        assert_eq!(each(1980.0, Some(true), &[1980.0, 1490.0, 1980.0]), [false; 3]);
        // A consumer's card, and clocks that were set.
        assert_eq!(each(2520.0, None, &[2700.0, 2520.0, 1900.0]), [false; 3]);
        assert_eq!(each(2520.0, Some(false), &[1200.0, 1200.0]), [true, false]);
    }

    #[test]
    fn a_clock_that_rises_is_taken_again() {
        let rises = [345.0, 900.0, 1980.0, 1980.0];
        assert_eq!(each(1980.0, Some(false), &rises), [true, true, false, false]);
    }

    #[test]
    fn heat_and_what_nvml_does_not_tell_are_throttling_however_steady() {
        for slowed in [Some(true), None] {
            assert_eq!(each(1980.0, slowed, &[1100.0; 4]), [true; 4]);
        }
        // A fall is one whatever NVML says.
        assert_eq!(each(1980.0, Some(false), &[1980.0, 1000.0]), [false, true]);
    }
}
