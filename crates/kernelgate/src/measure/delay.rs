//! Delays of known length added to launches on purpose, to test which delays a gate finds.
//!
//! An injected wait does not affect caches and memory. Work in the form of passes over memory
//! affects the next launch as additional work of a kernel would. On a GPU both are fitted to the
//! case before it is timed: by the added time of a launch, which is more than the delay takes
//! alone. A calibration fits once per comparison and passes the size to its processes.

use std::hint::black_box;
use std::str::FromStr;
use std::time::{Duration, Instant};

use super::CacheState;
use super::events::{CasePlan, EventTimer};
use crate::backend::{AllowedActions, BackendError, Executable, OutputContent};
use crate::stats;
use crate::workload::{Tensor, Tensors};
use kernelgate_cuda::instruments::bandwidth::BandwidthPasses;
use kernelgate_cuda::instruments::spin_kernel::SpinKernel;

/// Longest delay that may be asked for: a second.
const MAX_DELAY_NS: u64 = 1_000_000_000;
/// Maximum bytes that a delay reads: more than any memory gives in that time.
const MAX_TOUCHED_BYTES: u64 = 100_000 * MAX_DELAY_NS;
/// Maximum bytes that a delaying pass on a GPU reads: more than its L2.
const MAX_DELAY_PASS_BYTES: u64 = 256 << 20;
/// Maximum words that a delaying pass on the host reads: more than a core's own caches.
const MAX_DELAY_PASS_WORDS: usize = 1 << 19;
/// The least work: what one load of a thread takes, bytes.
const MIN_DELAY_READ_BYTES: u64 = 16;
/// About how much a GPU reads in a nanosecond: the first try.
const ASSUMED_BYTES_PER_NS: f64 = 2000.0;
/// How often the size of work on the host is corrected.
const MAX_HOST_CORRECTIONS: usize = 6;
/// Maximum number of measurements of a size on a GPU, and the share of the delay within which the
/// fit ends.
const MAX_SIZE_MEASUREMENTS: usize = 6;
const CLOSE_DELAY_ERROR: f64 = 0.05;
/// Maximum relative error of a fitted delay.
const MAX_DELAY_ERROR: f64 = 0.25;
/// Approximate time of the launches of a turn, nanoseconds, and their largest number. A turn is a
/// series of launches, with the injected delay or without it.
const TARGET_TURN_NS: f64 = 2e6;
const MAX_LAUNCHES_PER_TURN: f64 = 50.0;
/// Turns come in groups of four: without, with, with, without. Target time of all turns together,
/// nanoseconds, and the largest number of groups. One turn of each kind would be too few: a launch
/// after an idle moment takes a few µs more or less than the next launch, and the clock drifts by 1
/// % within ten milliseconds.
const TARGET_TURNS_NS: f64 = 1e8;
const MAX_TURN_GROUPS: f64 = 8.0;

/// A delay for the cases whose id contains a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectedDelay {
    /// The delayed cases: a part of the case id, or the whole id.
    pub case: String,
    /// Delay that is added to each launch of a case, nanoseconds.
    pub delay_ns: u64,
    /// Whether extra work, instead of a wait, delays the launches.
    pub by_work: bool,
    /// Fitted size that adds the delay on a GPU: nanoseconds of a spin, or bytes that are read. The
    /// size is `None` before it is fitted, and on the host.
    pub size: Option<u64>,
}

/// The format is `CASE=NS` or `CASE=NS:work`, optionally followed by `@SIZE`.
impl FromStr for InjectedDelay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let usage = || {
            format!(
                "`{text}`: a delay is CASE=NANOSECONDS or CASE=NANOSECONDS:work, with 1 to \
                 {MAX_DELAY_NS} of them, and @SIZE behind it where it was fitted before"
            )
        };
        let (case, delay) = text.rsplit_once('=').ok_or_else(usage)?;
        let (delay, size) = match delay.split_once('@') {
            Some((delay, size)) => (delay, Some(size.parse().map_err(|_| usage())?)),
            None => (delay, None),
        };
        let (delay_ns, by_work, most) = match delay.strip_suffix(":work") {
            Some(delay_ns) => (delay_ns, true, MAX_TOUCHED_BYTES),
            None => (delay, false, MAX_DELAY_NS),
        };
        if size.is_some_and(|size: u64| size > most) {
            return Err(usage());
        }
        let delay_ns = delay_ns
            .parse()
            .ok()
            .filter(|delay_ns| (1..=MAX_DELAY_NS).contains(delay_ns))
            .ok_or_else(usage)?;
        if case.is_empty() {
            return Err(usage());
        }
        Ok(Self { case: case.to_owned(), delay_ns, by_work, size })
    }
}

impl InjectedDelay {
    /// Returns the delay of a case: the one for exactly this id, else the last one whose filter
    /// text the id contains.
    pub fn find_for_case<'a>(delays: &'a [Self], id: &str) -> Option<&'a InjectedDelay> {
        let exact = delays.iter().rfind(|delay| delay.case == id);
        exact.or_else(|| delays.iter().rfind(|delay| id.contains(&delay.case)))
    }
}

/// Executable that waits after each launch at the place of the computation: on the host, or on the
/// device's stream (in graphs too).
pub struct DelayedExecutable<'a> {
    inner: &'a mut dyn Executable,
    wait: DelayMethod,
}

enum DelayMethod {
    Host(Duration),
    HostWork { words: Vec<u64>, count: usize },
    Device { spin: SpinKernel, spin_ns: u64 },
    DeviceWork { passes: Box<BandwidthPasses>, count: u64, bytes: u64 },
}

impl<'a> DelayedExecutable<'a> {
    /// Delays launches that run on the host.
    pub fn with_host_delay(
        inner: &'a mut dyn Executable,
        delay: &InjectedDelay,
    ) -> DelayedExecutable<'a> {
        if !delay.by_work {
            return Self { inner, wait: DelayMethod::Host(Duration::from_nanos(delay.delay_ns)) };
        }
        let mut words = vec![1; MAX_DELAY_PASS_WORDS];
        let mut count = MAX_DELAY_PASS_WORDS;
        for _ in 0..MAX_HOST_CORRECTIONS {
            let started = Instant::now();
            touch_words(&mut words, count);
            let took_ns = started.elapsed().as_nanos().max(1) as f64;
            count = (count as f64 * delay.delay_ns as f64 / took_ns).ceil() as usize;
        }
        Self { inner, wait: DelayMethod::HostWork { words, count } }
    }

    /// Delays launches on a GPU by one more kernel, which spins, or by work: kernels that read
    /// memory. The size of delay kernels is fitted so that a launch, timed as samples are, becomes
    /// longer by the delay, including the cost of a further kernel and its effect on the next
    /// launch. A delay size that is given is used unchanged.
    ///
    /// # Errors
    /// Fails if the smallest such kernel exceeds the delay, when no size adds approximately the
    /// delay, or when the kernel cannot be prepared.
    pub fn delay_on_device(
        inner: &'a mut dyn Executable,
        delay: &InjectedDelay,
        events: &mut EventTimer,
        cache: CacheState,
    ) -> Result<Self, BackendError> {
        let device = events.device();
        let (wait, per_ns) = if delay.by_work {
            let pattern: Vec<u8> =
                (0..1 << 12).map(|index: u32| (index * 167 % 251) as u8).collect();
            let passes =
                Box::new(BandwidthPasses::new(device, MAX_DELAY_PASS_BYTES as usize, &pattern)?);
            (
                DelayMethod::DeviceWork { passes, count: 1, bytes: MIN_DELAY_READ_BYTES },
                ASSUMED_BYTES_PER_NS,
            )
        } else {
            (DelayMethod::Device { spin: SpinKernel::new(device)?, spin_ns: 0 }, 1.0)
        };
        let mut delayed = Self { inner, wait };
        if let Some(size) = delay.size {
            delayed.wait.set_delay_size(size);
            return Ok(delayed);
        }
        let delay_ns = delay.delay_ns as f64;
        let mut without = events.plan_case(delayed.inner, cache)?;
        let least_ns = delayed.measured_delay_ns(&mut without, events, cache)?;
        if least_ns > delay_ns {
            let by_work = if delay.by_work { " by work" } else { "" };
            let why = format!(
                "a delay of {} ns cannot be made{by_work}: a further kernel alone makes a launch \
                 {least_ns:.0} ns longer",
                delay.delay_ns
            );
            return Err(BackendError::Unsupported(why));
        }
        let (size, added_ns) = fit_delay_size(delay_ns, least_ns, per_ns, |size| {
            delayed.wait.set_delay_size(size as u64);
            delayed.measured_delay_ns(&mut without, events, cache)
        })?;
        if (added_ns - delay_ns).abs() > MAX_DELAY_ERROR * delay_ns {
            let why = format!(
                "a delay of {delay_ns:.0} ns cannot be made: the closest makes a launch \
                 {added_ns:.0} ns longer"
            );
            return Err(BackendError::Unsupported(why));
        }
        delayed.wait.set_delay_size(size as u64);
        Ok(delayed)
    }

    /// The size of what launches are delayed by; none on the host.
    pub const fn delay_size(&self) -> Option<u64> {
        match self.wait {
            DelayMethod::Device { spin_ns, .. } => Some(spin_ns),
            DelayMethod::DeviceWork { count, bytes, .. } => Some(count * bytes),
            DelayMethod::Host(_) | DelayMethod::HostWork { .. } => None,
        }
    }

    /// Added time of a launch, nanoseconds, from launches with and without the delay in
    /// alternation: the median over groups of four, in each of which a falling clock affects both
    /// sides alike.
    fn measured_delay_ns(
        &mut self,
        without: &mut CasePlan,
        events: &mut EventTimer,
        cache: CacheState,
    ) -> Result<f64, BackendError> {
        // The captured graph includes the delay that was set at that time.
        let mut with = events.plan_case(self, cache)?;
        let mut turn_ns = |delayed: &mut Self, is_delayed: bool, launches: u64| {
            let sample = match is_delayed {
                false => events.steady_sample(without, delayed.inner, launches)?,
                true => events.steady_sample(&mut with, delayed, launches)?,
            };
            Ok::<_, BackendError>(sample.elapsed_ns / sample.launches as f64)
        };
        let first_ns = turn_ns(self, false, 1)?;
        let launches = (TARGET_TURN_NS / first_ns).clamp(1.0, MAX_LAUNCHES_PER_TURN) as u64;
        let group_ns = 4.0 * launches as f64 * first_ns;
        let groups = (TARGET_TURNS_NS / group_ns).clamp(1.0, MAX_TURN_GROUPS) as usize;
        // The first turn is not counted, because the clock sinks most at first.
        turn_ns(self, true, launches)?;
        let mut added_ns = Vec::with_capacity(groups);
        for _ in 0..groups {
            let mut sum_ns = 0.0;
            for is_delayed in [false, true, true, false] {
                let turn_ns = turn_ns(self, is_delayed, launches)?;
                sum_ns += if is_delayed { turn_ns } else { -turn_ns };
            }
            added_ns.push(sum_ns / 2.0);
        }
        Ok(stats::median(&added_ns))
    }
}

/// Size at which `added_ns` equals the delay; the smallest size adds `least_ns`. The search narrows
/// an interval between a size that is too small and one that is too large. The added time need not
/// be proportional; the best measured size is returned, with its added time.
fn fit_delay_size(
    delay_ns: f64,
    least_ns: f64,
    per_ns: f64,
    mut added_ns: impl FnMut(f64) -> Result<f64, BackendError>,
) -> Result<(f64, f64), BackendError> {
    let (mut below, mut above) = ((0.0, least_ns), None);
    let mut best = below;
    let mut size = (delay_ns - least_ns).max(1.0) * per_ns;
    for _ in 0..MAX_SIZE_MEASUREMENTS {
        let added = added_ns(size)?;
        let off = (added - delay_ns).abs();
        if off < (best.1 - delay_ns).abs() {
            best = (size, added);
        }
        if off <= CLOSE_DELAY_ERROR * delay_ns {
            break;
        }
        if added < delay_ns {
            below = (size, added);
        } else {
            above = Some((size, added));
        }
        size = match above {
            None => 2.0 * size,
            Some(above) => {
                let share = (delay_ns - below.1) / (above.1 - below.1);
                below.0 + share.clamp(0.1, 0.9) * (above.0 - below.0)
            }
        };
    }
    Ok(best)
}

impl DelayMethod {
    /// Sets the size of the delay: a spin in nanoseconds, passes in bytes.
    fn set_delay_size(&mut self, size: u64) {
        match self {
            Self::Device { spin_ns, .. } => *spin_ns = size,
            Self::DeviceWork { count, bytes, .. } => {
                let all = size.max(MIN_DELAY_READ_BYTES);
                *count = all.div_ceil(MAX_DELAY_PASS_BYTES);
                *bytes = (all / *count).clamp(MIN_DELAY_READ_BYTES, MAX_DELAY_PASS_BYTES)
                    / MIN_DELAY_READ_BYTES
                    * MIN_DELAY_READ_BYTES;
            }
            Self::Host(_) | Self::HostWork { .. } => {}
        }
    }
}

impl Executable for DelayedExecutable<'_> {
    fn poison_outputs(&mut self) -> Result<(), BackendError> {
        self.inner.poison_outputs()
    }

    fn rewrite_outputs(&mut self, with: OutputContent) -> Result<(), BackendError> {
        self.inner.rewrite_outputs(with)
    }

    fn reset(&mut self) -> Result<(), BackendError> {
        self.inner.reset()
    }

    fn carries_state(&self) -> bool {
        self.inner.carries_state()
    }

    fn gpus(&self) -> usize {
        self.inner.gpus()
    }

    fn allowed(&self) -> AllowedActions {
        self.inner.allowed()
    }

    fn launch(&mut self) -> Result<(), BackendError> {
        self.inner.launch()?;
        match &mut self.wait {
            DelayMethod::Host(delay) => {
                busy_wait(*delay);
                Ok(())
            }
            DelayMethod::HostWork { words, count } => {
                touch_words(words, *count);
                Ok(())
            }
            DelayMethod::Device { spin, spin_ns } => spin.launch(*spin_ns),
            DelayMethod::DeviceWork { passes, count, bytes } => {
                (0..*count).try_for_each(|_| passes.enqueue_read(*bytes))
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

    fn still_poisoned(&mut self) -> Result<Vec<bool>, BackendError> {
        self.inner.still_poisoned()
    }
}

/// Keeps the host busy for a duration.
fn busy_wait(delay: Duration) {
    let start = Instant::now();
    while start.elapsed() < delay {
        std::hint::spin_loop();
    }
}

/// Reads and writes `count` words, from the first on, again and again.
fn touch_words(words: &mut [u64], mut count: usize) {
    while count > 0 {
        let part = count.min(words.len());
        for word in &mut words[..part] {
            *word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        }
        black_box(&mut *words);
        count -= part;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kernelgate_cuda::Device;
    use kernelgate_cuda::testing::lock_first_gpu;

    use super::*;
    use crate::backend::cpu::CpuTask;
    use crate::backend::cuda::CudaTask;

    #[test]
    fn the_delay_for_the_whole_case_id_takes_precedence() {
        let delays: Vec<InjectedDelay> =
            ["a/b=100", "a/b/cpu/hot=7", "b=3"].map(|text| text.parse().unwrap()).into();
        let delay_ns =
            |id: &str| InjectedDelay::find_for_case(&delays, id).map(|delay| delay.delay_ns);
        assert_eq!(delay_ns("a/b/cpu/hot"), Some(7));
        assert_eq!(delay_ns("a/b/cpu/cold"), Some(3));
        assert_eq!(delay_ns("c"), None);
        let by_work =
            InjectedDelay { case: "a".to_owned(), delay_ns: 5, by_work: true, size: None };
        assert_eq!("a=5:work".parse().as_ref(), Ok(&by_work));
        let of_size = InjectedDelay { size: Some(4096), ..by_work };
        assert_eq!("a=5:work@4096".parse().as_ref(), Ok(&of_size));
        assert_eq!("a=5@4096".parse(), Ok(InjectedDelay { by_work: false, ..of_size }));
        let of_no_number = ["a=5:rest", "a=5@", "a=5@x", "a=5@-1", "a=5@1:work", "a=@5"]
            .into_iter()
            .chain(["a=5@1000000001", "a=5:work@100000000000001"]);
        let wrong = ["", "a", "a=", "=5", "a=0", "a=-1", "a=1.5", "a=1000000001"];
        for bad in wrong.into_iter().chain(of_no_number) {
            assert!(bad.parse::<InjectedDelay>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_delayed_host_launch_takes_at_least_the_delay() {
        let mut task = CpuTask::new(Arc::default(), Tensors::new(), |_, _| {});
        let mut delayed =
            DelayedExecutable::with_host_delay(&mut task, &"a=2000000".parse().unwrap());
        let start = Instant::now();
        delayed.launch().unwrap();
        assert!(start.elapsed() >= Duration::from_millis(2));
    }

    #[test]
    fn a_launch_delayed_by_work_reads_extra_memory() {
        let mut task = CpuTask::new(Arc::default(), Tensors::new(), |_, _| {});
        let mut delayed =
            DelayedExecutable::with_host_delay(&mut task, &"a=2000000:work".parse().unwrap());
        let DelayMethod::HostWork { count, .. } = delayed.wait else { panic!("not by work") };
        assert!(count > 10_000, "{count} words in two milliseconds");
        let sum = |delayed: &DelayedExecutable<'_>| match &delayed.wait {
            DelayMethod::HostWork { words, .. } => {
                words.iter().fold(0u64, |sum, x| sum.wrapping_add(*x))
            }
            _ => 0,
        };
        let before = sum(&delayed);
        delayed.launch().unwrap();
        assert_ne!(sum(&delayed), before);
    }

    /// A task whose launch reads memory for some 100 µs, and whose host code is slow.
    fn slow_host_task(device: &Arc<Device>) -> CudaTask {
        let passes =
            BandwidthPasses::new(device, MAX_DELAY_PASS_BYTES as usize, &[7; 1 << 10]).unwrap();
        CudaTask::new(device, [], Vec::new(), move |_| {
            busy_wait(Duration::from_micros(50));
            passes.enqueue_read(MAX_DELAY_PASS_BYTES)
        })
    }

    #[test]
    fn the_delay_size_is_found_for_times_that_are_not_proportional() {
        // In this simulation the added time has a floor, a step, and a slope that changes.
        let added = |size: f64| 2_000.0 + size / 4.0 + if size > 6_000.0 { 3_000.0 } else { 0.0 };
        for delay_ns in [2_500.0, 3_400.0, 7_000.0, 90_000.0] {
            for per_ns in [1.0, 4.0, 20.0] {
                let mut measured = 0;
                let size = fit_delay_size(delay_ns, 2_000.0, per_ns, |size| {
                    measured += 1;
                    Ok(added(size))
                });
                let (size, found) = size.unwrap();
                assert_eq!(found, added(size));
                let off = (found - delay_ns).abs() / delay_ns;
                assert!(
                    off < 0.15 && measured <= MAX_SIZE_MEASUREMENTS,
                    "{delay_ns}, {per_ns}: {off}"
                );
            }
        }
        // If no size makes the launch longer, nothing is added.
        assert_eq!(fit_delay_size(9.0, 9.0, 1.0, |_| Ok(99.0)).unwrap(), (0.0, 9.0));
        // If a size step exceeds the requested delay, the result is the added time.
        assert_eq!(fit_delay_size(50.0, 9.0, 1.0, |_| Ok(99.0)).unwrap().1, 9.0);
        let fails = fit_delay_size(9.0, 1.0, 1.0, |_| Err(BackendError::Lost("gone".to_owned())));
        assert!(matches!(fails, Err(BackendError::Lost(_))));
    }

    #[test]
    fn gpu_launches_get_longer_by_the_delay_even_on_a_slow_host() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let mut events = EventTimer::new(&device).unwrap();
        for cache in [CacheState::Hot, CacheState::Cold] {
            for (delay, wanted_ns) in [("a=8000", 8e3), ("a=8000:work", 8e3), ("a=300000", 3e5)] {
                let mut slow = slow_host_task(&device);
                let mut delay: InjectedDelay = delay.parse().unwrap();
                let mut without = events.plan_case(&mut slow, cache).unwrap();
                let fitted =
                    DelayedExecutable::delay_on_device(&mut slow, &delay, &mut events, cache);
                delay.size = fitted.unwrap().delay_size();
                let again =
                    DelayedExecutable::delay_on_device(&mut slow, &delay, &mut events, cache);
                let mut again = again.unwrap();
                assert_eq!(again.delay_size(), delay.size);
                let added_ns = again.measured_delay_ns(&mut without, &mut events, cache).unwrap();
                eprintln!("{delay:?}, {cache:?}: {added_ns:.0} ns");
                assert!((added_ns - wanted_ns).abs() < 0.3 * wanted_ns, "{delay:?}: {added_ns}");
            }
        }
        let mut slow = slow_host_task(&device);
        let short = DelayedExecutable::delay_on_device(
            &mut slow,
            &"a=1".parse().unwrap(),
            &mut events,
            CacheState::Hot,
        );
        let Err(BackendError::Unsupported(why)) = short else { panic!("a delay of 1 ns is made") };
        let start = "a delay of 1 ns cannot be made: a further kernel alone makes a launch ";
        let least = why.strip_prefix(start).and_then(|end| end.strip_suffix(" ns longer"));
        assert!(least.is_some_and(|least| least.parse::<f64>().is_ok_and(|ns| ns > 1.0)), "{why}");
    }
}
