//! Delays of known length added to launches on purpose: what a gate should find, and from which
//! length on it does.

use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::backend::{BackendError, Executable};
use crate::workload::{Tensor, Tensors};
use kernelgate_cuda::Device;
use kernelgate_cuda::instruments::spin::Spin;

/// Longest delay that may be asked for: a second.
const MAX_DELAY_NS: u64 = 1_000_000_000;

/// A delay for the cases whose id contains a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delay {
    /// Part of the id, or all of it.
    pub case: String,
    /// Added to each launch, nanoseconds.
    pub delay_ns: u64,
}

/// `CASE=NS`.
impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted =
            || format!("`{text}`: a delay is CASE=NANOSECONDS, with 1 to {MAX_DELAY_NS} of them");
        let (case, delay_ns) = text.rsplit_once('=').ok_or_else(wanted)?;
        let delay_ns = delay_ns
            .parse()
            .ok()
            .filter(|delay_ns| (1..=MAX_DELAY_NS).contains(delay_ns))
            .ok_or_else(wanted)?;
        if case.is_empty() {
            return Err(wanted());
        }
        Ok(Self { case: case.to_owned(), delay_ns })
    }
}

impl Delay {
    /// What is added to a case: the delay of its whole id, else the last of those whose text it
    /// contains.
    pub fn of(delays: &[Self], id: &str) -> Option<u64> {
        let exact = delays.iter().rfind(|delay| delay.case == id);
        exact
            .or_else(|| delays.iter().rfind(|delay| id.contains(&delay.case)))
            .map(|delay| delay.delay_ns)
    }
}

/// Launches, then waits where the launch computes: on the host, or on the device's stream (in
/// graphs too).
pub struct Delayed<'a> {
    inner: &'a mut dyn Executable,
    wait: Wait,
}

enum Wait {
    Host(Duration),
    Device { spin: Spin, spin_ns: u64 },
}

impl<'a> Delayed<'a> {
    /// Delays launches on the host.
    pub fn on_host(inner: &'a mut dyn Executable, delay_ns: u64) -> Self {
        Self { inner, wait: Wait::Host(Duration::from_nanos(delay_ns)) }
    }

    /// Delays launches on a GPU by one more kernel, which spins for what is left of the delay when
    /// `launch_ns` is taken off: what a further kernel on the stream costs by itself.
    ///
    /// # Errors
    /// When the delay is shorter than that, or the kernel cannot be made.
    pub fn on_device(
        inner: &'a mut dyn Executable,
        delay_ns: u64,
        launch_ns: f64,
        device: &Device,
    ) -> Result<Self, BackendError> {
        let spin_ns = delay_ns as f64 - launch_ns;
        if spin_ns < 0.0 {
            let why = format!(
                "a delay of {delay_ns} ns cannot be made: a further kernel alone takes \
                 {launch_ns:.0} ns"
            );
            return Err(BackendError::Unsupported(why));
        }
        Ok(Self { inner, wait: Wait::Device { spin: Spin::new(device)?, spin_ns: spin_ns as u64 } })
    }
}

impl Executable for Delayed<'_> {
    fn poison_outputs(&mut self) -> Result<(), BackendError> {
        self.inner.poison_outputs()
    }

    fn reset(&mut self) -> Result<(), BackendError> {
        self.inner.reset()
    }

    fn carries_state(&self) -> bool {
        self.inner.carries_state()
    }

    fn is_attached(&self) -> bool {
        self.inner.is_attached()
    }

    fn launch(&mut self) -> Result<(), BackendError> {
        self.inner.launch()?;
        match &self.wait {
            Wait::Host(delay) => {
                let start = Instant::now();
                while start.elapsed() < *delay {
                    std::hint::spin_loop();
                }
                Ok(())
            }
            Wait::Device { spin, spin_ns } => spin.launch(*spin_ns),
        }
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.inner.synchronize()
    }

    fn outputs(&mut self) -> Result<&Tensors, BackendError> {
        self.inner.outputs()
    }

    fn launch_inputs(&self) -> Vec<&str> {
        self.inner.launch_inputs()
    }

    fn replace_input(&mut self, name: &str, values: &Tensor) -> Result<(), BackendError> {
        self.inner.replace_input(name, values)
    }

    fn still_poisoned(&mut self) -> Result<Option<bool>, BackendError> {
        self.inner.still_poisoned()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::cpu::CpuTask;

    #[test]
    fn delays_are_parsed_and_the_whole_id_wins() {
        let delays: Vec<Delay> =
            ["a/b=100", "a/b/cpu/hot=7", "b=3"].map(|text| text.parse().unwrap()).into();
        assert_eq!(Delay::of(&delays, "a/b/cpu/hot"), Some(7));
        assert_eq!(Delay::of(&delays, "a/b/cpu/cold"), Some(3));
        assert_eq!(Delay::of(&delays, "c"), None);
        for bad in ["", "a", "a=", "=5", "a=0", "a=-1", "a=1.5", "a=1000000001"] {
            assert!(bad.parse::<Delay>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_delayed_launch_takes_at_least_that_long() {
        let mut task = CpuTask::new(Arc::default(), Tensors::new(), |_, _| {});
        let mut delayed = Delayed::on_host(&mut task, 2_000_000);
        let start = Instant::now();
        delayed.launch().unwrap();
        assert!(start.elapsed() >= Duration::from_millis(2));
    }
}
