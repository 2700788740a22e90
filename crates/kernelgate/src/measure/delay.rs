//! Delays of known length added to launches on purpose: what a gate should find, and from which
//! length on it does.
//!
//! A wait leaves caches and memory alone, and takes its time to the nanosecond. Work, passes over
//! memory, does to the next launch what more work of a kernel's own would do; its time is as exact
//! as a trial of it tells.

use std::hint::black_box;
use std::str::FromStr;
use std::time::{Duration, Instant};

use super::events::EventTimer;
use super::queue::MAX_QUEUED;
use crate::backend::{BackendError, Executable};
use crate::workload::{Tensor, Tensors};
use kernelgate_cuda::instruments::bandwidth::Passes;
use kernelgate_cuda::instruments::spin::Spin;

/// Longest delay that may be asked for: a second.
const MAX_DELAY_NS: u64 = 1_000_000_000;
/// What a pass on a GPU goes over at most, bytes: more than its L2.
const PASS_BYTES: u64 = 256 << 20;
/// What a pass on the host goes over, words: more than a core's own caches.
const PASS_WORDS: usize = 1 << 19;
/// Passes in a row that are timed together, and how often their size is corrected.
const TRIALS: (usize, usize) = (32, 6);

/// A delay for the cases whose id contains a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delay {
    /// Part of the id, or all of it.
    pub case: String,
    /// Added to each launch, nanoseconds.
    pub delay_ns: u64,
    /// Whether by work in place of a wait.
    pub by_work: bool,
}

/// `CASE=NS` or `CASE=NS:work`.
impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || {
            format!(
                "`{text}`: a delay is CASE=NANOSECONDS or CASE=NANOSECONDS:work, with 1 to \
                 {MAX_DELAY_NS} of them"
            )
        };
        let (case, delay_ns) = text.rsplit_once('=').ok_or_else(wanted)?;
        let (delay_ns, by_work) = match delay_ns.strip_suffix(":work") {
            Some(delay_ns) => (delay_ns, true),
            None => (delay_ns, false),
        };
        let delay_ns = delay_ns
            .parse()
            .ok()
            .filter(|delay_ns| (1..=MAX_DELAY_NS).contains(delay_ns))
            .ok_or_else(wanted)?;
        if case.is_empty() {
            return Err(wanted());
        }
        Ok(Self { case: case.to_owned(), delay_ns, by_work })
    }
}

impl Delay {
    /// What is added to a case: the delay of its whole id, else the last of those whose text it
    /// contains.
    pub fn of<'a>(delays: &'a [Self], id: &str) -> Option<&'a Self> {
        let exact = delays.iter().rfind(|delay| delay.case == id);
        exact.or_else(|| delays.iter().rfind(|delay| id.contains(&delay.case)))
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
    HostWork { words: Vec<u64>, count: usize },
    Device { spin: Spin, spin_ns: u64 },
    DeviceWork { passes: Box<Passes>, count: u64, bytes: u64 },
}

impl<'a> Delayed<'a> {
    /// Delays launches on the host.
    pub fn on_host(inner: &'a mut dyn Executable, delay: &Delay) -> Self {
        if !delay.by_work {
            return Self { inner, wait: Wait::Host(Duration::from_nanos(delay.delay_ns)) };
        }
        let mut words = vec![1; PASS_WORDS];
        let mut count = PASS_WORDS;
        for _ in 0..TRIALS.1 {
            let started = Instant::now();
            pass_over(&mut words, count);
            let took_ns = started.elapsed().as_nanos().max(1) as f64;
            count = (count as f64 * delay.delay_ns as f64 / took_ns).ceil() as usize;
        }
        Self { inner, wait: Wait::HostWork { words, count } }
    }

    /// Delays launches on a GPU by one more kernel, which spins for what is left of the delay when
    /// what a further kernel on the stream costs by itself is taken off. By work, the kernels read
    /// so much memory as takes that long.
    ///
    /// # Errors
    /// When the delay is shorter than that, or the kernel cannot be made.
    pub fn on_device(
        inner: &'a mut dyn Executable,
        delay: &Delay,
        events: &mut EventTimer,
    ) -> Result<Self, BackendError> {
        let delay_ns = delay.delay_ns;
        if delay.by_work {
            return Ok(Self { inner, wait: device_work(delay_ns, events)? });
        }
        let launch_ns = events.overhead().launch_ns;
        let spin_ns = delay_ns as f64 - launch_ns;
        if spin_ns < 0.0 {
            let why = format!(
                "a delay of {delay_ns} ns cannot be made: a further kernel alone takes \
                 {launch_ns:.0} ns"
            );
            return Err(BackendError::Unsupported(why));
        }
        let spin = Spin::new(events.device())?;
        Ok(Self { inner, wait: Wait::Device { spin, spin_ns: spin_ns as u64 } })
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
        match &mut self.wait {
            Wait::Host(delay) => {
                wait(*delay);
                Ok(())
            }
            Wait::HostWork { words, count } => {
                pass_over(words, *count);
                Ok(())
            }
            Wait::Device { spin, spin_ns } => spin.launch(*spin_ns),
            Wait::DeviceWork { passes, count, bytes } => {
                (0..*count).try_for_each(|_| passes.read(*bytes))
            }
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

/// Keeps the host busy for so long.
fn wait(delay: Duration) {
    let start = Instant::now();
    while start.elapsed() < delay {
        std::hint::spin_loop();
    }
}

/// Reads and writes so many words, from the first on over and over.
fn pass_over(words: &mut [u64], mut count: usize) {
    while count > 0 {
        let part = count.min(words.len());
        for word in &mut words[..part] {
            *word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        }
        black_box(&mut *words);
        count -= part;
    }
}

/// Passes over memory that take that long a launch. They are timed as samples are, behind the
/// blocker: the least of them is shorter than the host takes to launch it.
fn device_work(delay_ns: u64, events: &mut EventTimer) -> Result<Wait, BackendError> {
    let pattern: Vec<u8> = (0..1 << 12).map(|index: u32| (index * 167 % 251) as u8).collect();
    let passes = Passes::new(events.device(), PASS_BYTES as usize, &pattern)?;
    let mut time_ns = |count: u64, bytes: u64| {
        let commands = count as usize;
        let mut launch = || (0..count).try_for_each(|_| passes.read(bytes));
        launch()?;
        events.row_ns((MAX_QUEUED / commands).clamp(1, TRIALS.0), commands, &mut launch)
    };
    let count = (delay_ns as f64 / time_ns(1, PASS_BYTES)?).ceil().max(1.0) as u64;
    let mut bytes = PASS_BYTES;
    for _ in 0..TRIALS.1 {
        let wanted = bytes as f64 * delay_ns as f64 / time_ns(count, bytes)?;
        bytes = (wanted as u64).clamp(16, PASS_BYTES) / 16 * 16;
    }
    if time_ns(count, 16)? > delay_ns as f64 {
        let why = format!("a delay of {delay_ns} ns cannot be made by work: a kernel takes longer");
        return Err(BackendError::Unsupported(why));
    }
    Ok(Wait::DeviceWork { passes: Box::new(passes), count, bytes })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kernelgate_cuda::testing::gpu;

    use super::*;
    use crate::backend::cpu::CpuTask;

    #[test]
    fn delays_are_parsed_and_the_whole_id_wins() {
        let delays: Vec<Delay> =
            ["a/b=100", "a/b/cpu/hot=7", "b=3"].map(|text| text.parse().unwrap()).into();
        let delay_ns = |id: &str| Delay::of(&delays, id).map(|delay| delay.delay_ns);
        assert_eq!(delay_ns("a/b/cpu/hot"), Some(7));
        assert_eq!(delay_ns("a/b/cpu/cold"), Some(3));
        assert_eq!(delay_ns("c"), None);
        let by_work = Delay { case: "a".to_owned(), delay_ns: 5, by_work: true };
        assert_eq!("a=5:work".parse(), Ok(by_work));
        for bad in ["", "a", "a=", "=5", "a=0", "a=-1", "a=1.5", "a=1000000001", "a=5:rest"] {
            assert!(bad.parse::<Delay>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_delayed_launch_takes_at_least_that_long() {
        let mut task = CpuTask::new(Arc::default(), Tensors::new(), |_, _| {});
        let mut delayed = Delayed::on_host(&mut task, &"a=2000000".parse().unwrap());
        let start = Instant::now();
        delayed.launch().unwrap();
        assert!(start.elapsed() >= Duration::from_millis(2));
    }

    #[test]
    fn a_launch_delayed_by_work_goes_over_memory() {
        let mut task = CpuTask::new(Arc::default(), Tensors::new(), |_, _| {});
        let mut delayed = Delayed::on_host(&mut task, &"a=2000000:work".parse().unwrap());
        let Wait::HostWork { count, .. } = delayed.wait else { panic!("not by work") };
        assert!(count > 10_000, "{count} words in two milliseconds");
        let sum = |delayed: &Delayed<'_>| match &delayed.wait {
            Wait::HostWork { words, .. } => words.iter().fold(0u64, |sum, x| sum.wrapping_add(*x)),
            _ => 0,
        };
        let before = sum(&delayed);
        delayed.launch().unwrap();
        assert_ne!(sum(&delayed), before);
    }

    #[test]
    fn work_on_a_gpu_takes_what_was_asked_for_however_slow_the_host_is() {
        let Some((device, _alone)) = gpu() else { return };
        let mut events = EventTimer::new(&device).unwrap();
        let Wait::DeviceWork { passes, count, bytes } = device_work(6_000, &mut events).unwrap()
        else {
            panic!("not by work")
        };
        let mut launch = || {
            wait(Duration::from_micros(50));
            (0..count).try_for_each(|_| passes.read(bytes))
        };
        let took_ns = events.row_ns(TRIALS.0, count as usize, &mut launch).unwrap();
        assert!((4_000.0..9_000.0).contains(&took_ns), "{took_ns} ns of {bytes} bytes");
    }
}
