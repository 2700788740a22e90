//! Adds delays of known length to launches on purpose, to test which slow-downs `kernelgate`'s
//! comparison finds.
//!
//! A delay by waiting does not change caches or memory traffic. A delay by work, which reads
//! memory, affects the next launch as additional work of the kernel itself would. Before a case on
//! a GPU is timed, the delay is fitted to the time that it adds to a launch, which exceeds the
//! delay kernel's own time. A calibration fits the size of the delay kernel once per comparison,
//! and passes the size to the bench processes that it starts.

use std::hint::black_box;
use std::str::FromStr;
use std::time::{Duration, Instant};

use super::CacheState;
use super::events::{CaseTimingPlan, CudaEventTimer};
use crate::backend::{
    AllowedActionsOfTimedCode, BackendError, LaunchableProblem, OutputContentBeforeLaunch,
};
use crate::stats;
use crate::workload::{Tensor, Tensors};
use kernelgate_cuda::instruments::bandwidth::BandwidthKernelsAndBuffer;
use kernelgate_cuda::instruments::spin_kernel::SpinKernel;

/// Longest delay of a launch that a user may request, nanoseconds: one second.
const MAX_REQUESTED_DELAY_NS: u64 = 1_000_000_000;
/// Largest number of bytes that a delay by work may read, more than any memory delivers in
/// `MAX_REQUESTED_DELAY_NS`.
const MAX_BYTES_READ_BY_DELAY: u64 = 100_000 * MAX_REQUESTED_DELAY_NS;
/// Largest number of bytes that one delaying kernel on a GPU reads: more than the L2 cache holds.
const MAX_GPU_DELAY_PASS_BYTES: u64 = 256 << 20;
/// Largest number of 8-byte words that one delaying loop on the host reads: more than a core's own
/// caches hold.
const MAX_HOST_DELAY_PASS_WORDS: usize = 1 << 19;
/// Smallest delay by work on a GPU: one 16-byte load of one thread.
const MIN_GPU_DELAY_READ_BYTES: u64 = 16;
/// Assumed read rate of a GPU, bytes a nanosecond, from which the fit of the delay begins.
const ASSUMED_GPU_READ_BYTES_PER_NS: f64 = 2000.0;
/// How often the number of words that a delay by work on the host reads is corrected.
const HOST_DELAY_CORRECTIONS: usize = 6;
/// Largest number of measurements while the size of a GPU delay is fitted; the next constant is the
/// relative error at which the fit ends.
const MAX_DELAY_FIT_MEASUREMENTS: usize = 6;
const RELATIVE_ERROR_THAT_ENDS_DELAY_FIT: f64 = 0.05;
/// Largest accepted relative error of the fitted delay; beyond it the delay is refused.
const MAX_RELATIVE_DELAY_ERROR: f64 = 0.25;
/// Approximate time of one series of launches, nanoseconds; the next constant is the largest number
/// of these launches. Such a series consists of launches that all have, or all lack, the injected
/// delay.
const TARGET_TIME_OF_ONE_TURN_NS: f64 = 2e6;
const MAX_LAUNCHES_PER_DELAY_SERIES: f64 = 50.0;
/// Measurements come in groups of four: without delay, with delay, with delay, without delay.
/// Target time of all series of launches together, nanoseconds; the next constant is the largest
/// number of groups of four series. One series of launches with delay and one without would be too
/// few. A launch after an idle moment differs by a few µs, and the SM clock drifts by 1 % within
/// ten milliseconds.
const TARGET_TIME_OF_ALL_TURNS_NS: f64 = 1e8;
const MAX_GROUPS_OF_FOUR_DELAY_SERIES: f64 = 8.0;

/// A delay that a user injects into the launches of those cases whose id contains a given text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectedLaunchDelay {
    /// Text that selects the delayed cases: a part of the case id, or the whole case id.
    pub case_id_text: String,
    /// Time that is added to each launch of a selected case, nanoseconds.
    pub delay_ns: u64,
    /// Whether each launch is delayed by additional memory reads instead of a wait.
    pub delays_by_memory_reads: bool,
    /// Fitted size of the GPU delay kernel that adds the requested delay: nanoseconds of spinning,
    /// or bytes that are read. The size is `None` before it is fitted, and for delays on the host.
    pub fitted_gpu_delay_size: Option<u64>,
}

/// Parses a delay of the form `CASE=NS` or `CASE=NS:work`, optionally followed by `@SIZE`, the size
/// fitted earlier.
impl FromStr for InjectedLaunchDelay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let usage = || {
            format!(
                "`{text}`: a delay is CASE=NANOSECONDS or CASE=NANOSECONDS:work, with 1 to \
                 {MAX_REQUESTED_DELAY_NS} of them, and @SIZE behind it where it was fitted before"
            )
        };
        let (case, delay) = text.rsplit_once('=').ok_or_else(usage)?;
        let (delay, size) = match delay.split_once('@') {
            Some((delay, size)) => (delay, Some(size.parse().map_err(|_| usage())?)),
            None => (delay, None),
        };
        let (delay_ns, by_work, most) = match delay.strip_suffix(":work") {
            Some(delay_ns) => (delay_ns, true, MAX_BYTES_READ_BY_DELAY),
            None => (delay, false, MAX_REQUESTED_DELAY_NS),
        };
        if size.is_some_and(|size: u64| size > most) {
            return Err(usage());
        }
        let delay_ns = delay_ns
            .parse()
            .ok()
            .filter(|delay_ns| (1..=MAX_REQUESTED_DELAY_NS).contains(delay_ns))
            .ok_or_else(usage)?;
        if case.is_empty() {
            return Err(usage());
        }
        Ok(Self {
            case_id_text: case.to_owned(),
            delay_ns,
            delays_by_memory_reads: by_work,
            fitted_gpu_delay_size: size,
        })
    }
}

impl InjectedLaunchDelay {
    /// Returns the delay for a case id: the last delay given for exactly this id, otherwise the
    /// last whose text the id contains.
    pub fn find_delay_for_case<'a>(
        delays: &'a [Self],
        id: &str,
    ) -> Option<&'a InjectedLaunchDelay> {
        let exact = delays.iter().rfind(|delay| delay.case_id_text == id);
        exact.or_else(|| delays.iter().rfind(|delay| id.contains(&delay.case_id_text)))
    }
}

/// An executable each of whose launches is followed by the injected delay: on the host for CPU
/// cases, on the GPU's stream (also in graphs) for GPU cases.
pub struct ExecutableWithDelayedLaunches<'a> {
    delayed_executable: &'a mut dyn LaunchableProblem,
    delay_method: LaunchDelayMethod,
}

enum LaunchDelayMethod {
    HostWait(Duration),
    HostWork { words: Vec<u64>, count: usize },
    DeviceWait { spin: SpinKernel, spin_ns: u64 },
    DeviceWork { passes: Box<BandwidthKernelsAndBuffer>, count: u64, bytes: u64 },
}

impl<'a> ExecutableWithDelayedLaunches<'a> {
    /// Wraps an executable so that the host waits or works after each launch.
    pub fn delay_launches_on_host(
        inner: &'a mut dyn LaunchableProblem,
        delay: &InjectedLaunchDelay,
    ) -> ExecutableWithDelayedLaunches<'a> {
        if !delay.delays_by_memory_reads {
            return Self {
                delayed_executable: inner,
                delay_method: LaunchDelayMethod::HostWait(Duration::from_nanos(delay.delay_ns)),
            };
        }
        let mut words = vec![1; MAX_HOST_DELAY_PASS_WORDS];
        let mut count = MAX_HOST_DELAY_PASS_WORDS;
        for _ in 0..HOST_DELAY_CORRECTIONS {
            let started = Instant::now();
            read_and_write_words_on_host(&mut words, count);
            let took_ns = started.elapsed().as_nanos().max(1) as f64;
            count = (count as f64 * delay.delay_ns as f64 / took_ns).ceil() as usize;
        }
        Self {
            delayed_executable: inner,
            delay_method: LaunchDelayMethod::HostWork { words, count },
        }
    }

    /// Wraps an executable so that further kernels follow each launch on the GPU's stream: one that
    /// spins, or kernels that read memory. The size of the delay kernels is fitted so that a
    /// launch, timed like a sample, takes longer by the requested delay, including all side
    /// effects. A fitted size that the user passes is used unchanged.
    ///
    /// # Errors
    /// Fails if the smallest delay kernel exceeds the requested delay, if no size adds
    /// approximately that delay, or if the kernel cannot be prepared.
    pub fn delay_launches_on_gpu(
        inner: &'a mut dyn LaunchableProblem,
        delay: &InjectedLaunchDelay,
        events: &mut CudaEventTimer,
        cache: CacheState,
    ) -> Result<Self, BackendError> {
        let device = events.first_gpu();
        let (wait, per_ns) = if delay.delays_by_memory_reads {
            let pattern: Vec<u8> =
                (0..1 << 12).map(|index: u32| (index * 167 % 251) as u8).collect();
            let passes = Box::new(BandwidthKernelsAndBuffer::bandwidth_kernels_with_filled_buffer(
                device,
                MAX_GPU_DELAY_PASS_BYTES as usize,
                &pattern,
            )?);
            (
                LaunchDelayMethod::DeviceWork { passes, count: 1, bytes: MIN_GPU_DELAY_READ_BYTES },
                ASSUMED_GPU_READ_BYTES_PER_NS,
            )
        } else {
            (
                LaunchDelayMethod::DeviceWait {
                    spin: SpinKernel::compile_and_allocate_report(device)?,
                    spin_ns: 0,
                },
                1.0,
            )
        };
        let mut delayed = Self { delayed_executable: inner, delay_method: wait };
        if let Some(size) = delay.fitted_gpu_delay_size {
            delayed.delay_method.set_gpu_delay_size(size);
            return Ok(delayed);
        }
        let delay_ns = delay.delay_ns as f64;
        let mut without = events.audit_and_plan_case_timing(delayed.delayed_executable, cache)?;
        let least_ns = delayed.measure_time_added_to_launch_ns(&mut without, events, cache)?;
        if least_ns > delay_ns {
            let by_work = if delay.delays_by_memory_reads { " by work" } else { "" };
            let why = format!(
                "a delay of {} ns cannot be made{by_work}: a further kernel alone makes a launch \
                 {least_ns:.0} ns longer",
                delay.delay_ns
            );
            return Err(BackendError::Unsupported(why));
        }
        let (size, added_ns) = fit_gpu_delay_size(delay_ns, least_ns, per_ns, |size| {
            delayed.delay_method.set_gpu_delay_size(size as u64);
            delayed.measure_time_added_to_launch_ns(&mut without, events, cache)
        })?;
        if (added_ns - delay_ns).abs() > MAX_RELATIVE_DELAY_ERROR * delay_ns {
            let why = format!(
                "a delay of {delay_ns:.0} ns cannot be made: the closest makes a launch \
                 {added_ns:.0} ns longer"
            );
            return Err(BackendError::Unsupported(why));
        }
        delayed.delay_method.set_gpu_delay_size(size as u64);
        Ok(delayed)
    }

    /// Returns the size of the GPU delay kernels: nanoseconds of spinning, or bytes that are read;
    /// `None` for a delay on the host.
    pub const fn gpu_delay_size(&self) -> Option<u64> {
        match self.delay_method {
            LaunchDelayMethod::DeviceWait { spin_ns, .. } => Some(spin_ns),
            LaunchDelayMethod::DeviceWork { count, bytes, .. } => Some(count * bytes),
            LaunchDelayMethod::HostWait(_) | LaunchDelayMethod::HostWork { .. } => None,
        }
    }

    /// Measures the time that the delay adds to a launch, nanoseconds: the median over groups of
    /// four series of launches, in which a steady drift of the clock cancels.
    fn measure_time_added_to_launch_ns(
        &mut self,
        without: &mut CaseTimingPlan,
        events: &mut CudaEventTimer,
        cache: CacheState,
    ) -> Result<f64, BackendError> {
        // A captured graph contains the delay size that was set when the launches were captured.
        let mut with = events.audit_and_plan_case_timing(self, cache)?;
        let mut turn_ns = |delayed: &mut Self, is_delayed: bool, launches: u64| {
            let sample = match is_delayed {
                false => {
                    events.take_unthrottled_sample(without, delayed.delayed_executable, launches)?
                }
                true => events.take_unthrottled_sample(&mut with, delayed, launches)?,
            };
            Ok::<_, BackendError>(sample.elapsed_ns / sample.launches as f64)
        };
        let first_ns = turn_ns(self, false, 1)?;
        let launches = (TARGET_TIME_OF_ONE_TURN_NS / first_ns)
            .clamp(1.0, MAX_LAUNCHES_PER_DELAY_SERIES) as u64;
        let group_ns = 4.0 * launches as f64 * first_ns;
        let groups = (TARGET_TIME_OF_ALL_TURNS_NS / group_ns)
            .clamp(1.0, MAX_GROUPS_OF_FOUR_DELAY_SERIES) as usize;
        // The series of launches before the first group is not counted, because the SM clock falls
        // most at the beginning.
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

/// Searches the delay size at which the measured time `added_ns(size)` equals the requested delay;
/// the smallest size adds `least_ns`. The search narrows the interval between a delay size that
/// adds too little and one that adds too much. The added time need not be proportional to the delay
/// size; returns the best measured size with its added time.
fn fit_gpu_delay_size(
    delay_ns: f64,
    least_ns: f64,
    per_ns: f64,
    mut added_ns: impl FnMut(f64) -> Result<f64, BackendError>,
) -> Result<(f64, f64), BackendError> {
    let (mut below, mut above) = ((0.0, least_ns), None);
    let mut best = below;
    let mut size = (delay_ns - least_ns).max(1.0) * per_ns;
    for _ in 0..MAX_DELAY_FIT_MEASUREMENTS {
        let added = added_ns(size)?;
        let off = (added - delay_ns).abs();
        if off < (best.1 - delay_ns).abs() {
            best = (size, added);
        }
        if off <= RELATIVE_ERROR_THAT_ENDS_DELAY_FIT * delay_ns {
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

impl LaunchDelayMethod {
    /// Sets the size of the GPU delay kernels: nanoseconds for a spin, bytes for memory reads.
    fn set_gpu_delay_size(&mut self, size: u64) {
        match self {
            Self::DeviceWait { spin_ns, .. } => *spin_ns = size,
            Self::DeviceWork { count, bytes, .. } => {
                let all = size.max(MIN_GPU_DELAY_READ_BYTES);
                *count = all.div_ceil(MAX_GPU_DELAY_PASS_BYTES);
                *bytes = (all / *count).clamp(MIN_GPU_DELAY_READ_BYTES, MAX_GPU_DELAY_PASS_BYTES)
                    / MIN_GPU_DELAY_READ_BYTES
                    * MIN_GPU_DELAY_READ_BYTES;
            }
            Self::HostWait(_) | Self::HostWork { .. } => {}
        }
    }
}

impl LaunchableProblem for ExecutableWithDelayedLaunches<'_> {
    fn poison_outputs(&mut self) -> Result<(), BackendError> {
        self.delayed_executable.poison_outputs()
    }

    fn overwrite_outputs_before_launch(
        &mut self,
        with: OutputContentBeforeLaunch,
    ) -> Result<(), BackendError> {
        self.delayed_executable.overwrite_outputs_before_launch(with)
    }

    fn reset_state(&mut self) -> Result<(), BackendError> {
        self.delayed_executable.reset_state()
    }

    fn launches_carry_state(&self) -> bool {
        self.delayed_executable.launches_carry_state()
    }

    fn gpus_used_by_launch(&self) -> usize {
        self.delayed_executable.gpus_used_by_launch()
    }

    fn actions_allowed_to_launches(&self) -> AllowedActionsOfTimedCode {
        self.delayed_executable.actions_allowed_to_launches()
    }

    fn launch_once(&mut self) -> Result<(), BackendError> {
        self.delayed_executable.launch_once()?;
        match &mut self.delay_method {
            LaunchDelayMethod::HostWait(delay) => {
                busy_wait_on_host(*delay);
                Ok(())
            }
            LaunchDelayMethod::HostWork { words, count } => {
                read_and_write_words_on_host(words, *count);
                Ok(())
            }
            LaunchDelayMethod::DeviceWait { spin, spin_ns } => spin.enqueue_spin(*spin_ns),
            LaunchDelayMethod::DeviceWork { passes, count, bytes } => {
                (0..*count).try_for_each(|_| passes.enqueue_read_kernel(*bytes))
            }
        }
    }

    fn wait_for_launches(&mut self) -> Result<(), BackendError> {
        self.delayed_executable.wait_for_launches()
    }

    fn outputs_on_host(&mut self) -> Result<&Tensors, BackendError> {
        self.delayed_executable.outputs_on_host()
    }

    fn names_of_inputs_read_by_launches(&self) -> Vec<&str> {
        self.delayed_executable.names_of_inputs_read_by_launches()
    }

    fn replace_input(&mut self, name: &str, values: &Tensor) -> Result<(), BackendError> {
        self.delayed_executable.replace_input(name, values)
    }

    fn outputs_are_still_poisoned(&mut self) -> Result<Vec<bool>, BackendError> {
        self.delayed_executable.outputs_are_still_poisoned()
    }
}

/// Keeps a host core busy for the given duration.
fn busy_wait_on_host(delay: Duration) {
    let start = Instant::now();
    while start.elapsed() < delay {
        std::hint::spin_loop();
    }
}

/// Reads and writes `count` 64-bit words on the host, and starts again at the first word after the
/// last.
fn read_and_write_words_on_host(words: &mut [u64], mut count: usize) {
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
    fn a_delay_for_the_whole_case_id_takes_precedence() {
        let delays: Vec<InjectedLaunchDelay> =
            ["a/b=100", "a/b/cpu/hot=7", "b=3"].map(|text| text.parse().unwrap()).into();
        let delay_ns = |id: &str| {
            InjectedLaunchDelay::find_delay_for_case(&delays, id).map(|delay| delay.delay_ns)
        };
        assert_eq!(delay_ns("a/b/cpu/hot"), Some(7));
        assert_eq!(delay_ns("a/b/cpu/cold"), Some(3));
        assert_eq!(delay_ns("c"), None);
        let by_work = InjectedLaunchDelay {
            case_id_text: "a".to_owned(),
            delay_ns: 5,
            delays_by_memory_reads: true,
            fitted_gpu_delay_size: None,
        };
        assert_eq!("a=5:work".parse().as_ref(), Ok(&by_work));
        let of_size = InjectedLaunchDelay { fitted_gpu_delay_size: Some(4096), ..by_work };
        assert_eq!("a=5:work@4096".parse().as_ref(), Ok(&of_size));
        assert_eq!(
            "a=5@4096".parse(),
            Ok(InjectedLaunchDelay { delays_by_memory_reads: false, ..of_size })
        );
        let of_no_number = ["a=5:rest", "a=5@", "a=5@x", "a=5@-1", "a=5@1:work", "a=@5"]
            .into_iter()
            .chain(["a=5@1000000001", "a=5:work@100000000000001"]);
        let wrong = ["", "a", "a=", "=5", "a=0", "a=-1", "a=1.5", "a=1000000001"];
        for bad in wrong.into_iter().chain(of_no_number) {
            assert!(bad.parse::<InjectedLaunchDelay>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_delayed_host_launch_takes_at_least_the_delay() {
        let mut task = CpuTask::new(Arc::default(), Tensors::new(), |_, _| {});
        let mut delayed = ExecutableWithDelayedLaunches::delay_launches_on_host(
            &mut task,
            &"a=2000000".parse().unwrap(),
        );
        let start = Instant::now();
        delayed.launch_once().unwrap();
        assert!(start.elapsed() >= Duration::from_millis(2));
    }

    #[test]
    fn a_launch_delayed_by_work_reads_extra_memory() {
        let mut task = CpuTask::new(Arc::default(), Tensors::new(), |_, _| {});
        let mut delayed = ExecutableWithDelayedLaunches::delay_launches_on_host(
            &mut task,
            &"a=2000000:work".parse().unwrap(),
        );
        let LaunchDelayMethod::HostWork { count, .. } = delayed.delay_method else {
            panic!("not by work")
        };
        assert!(count > 10_000, "{count} words in two milliseconds");
        let sum = |delayed: &ExecutableWithDelayedLaunches<'_>| match &delayed.delay_method {
            LaunchDelayMethod::HostWork { words, .. } => {
                words.iter().fold(0u64, |sum, x| sum.wrapping_add(*x))
            }
            _ => 0,
        };
        let before = sum(&delayed);
        delayed.launch_once().unwrap();
        assert_ne!(sum(&delayed), before);
    }

    /// A task whose launch reads device memory for about 100 µs, and whose launch call is slow on
    /// the host.
    fn gpu_task_with_slow_launch_call(device: &Arc<Device>) -> CudaTask {
        let passes = BandwidthKernelsAndBuffer::bandwidth_kernels_with_filled_buffer(
            device,
            MAX_GPU_DELAY_PASS_BYTES as usize,
            &[7; 1 << 10],
        )
        .unwrap();
        CudaTask::new(device, [], Vec::new(), move |_| {
            busy_wait_on_host(Duration::from_micros(50));
            passes.enqueue_read_kernel(MAX_GPU_DELAY_PASS_BYTES)
        })
    }

    #[test]
    fn the_delay_size_is_fitted_to_nonlinear_added_times() {
        // In this simulation the time added by the delay kernel has a floor, a step, and a slope
        // that changes.
        let added = |size: f64| 2_000.0 + size / 4.0 + if size > 6_000.0 { 3_000.0 } else { 0.0 };
        for delay_ns in [2_500.0, 3_400.0, 7_000.0, 90_000.0] {
            for per_ns in [1.0, 4.0, 20.0] {
                let mut measured = 0;
                let size = fit_gpu_delay_size(delay_ns, 2_000.0, per_ns, |size| {
                    measured += 1;
                    Ok(added(size))
                });
                let (size, found) = size.unwrap();
                assert_eq!(found, added(size));
                let off = (found - delay_ns).abs() / delay_ns;
                assert!(
                    off < 0.15 && measured <= MAX_DELAY_FIT_MEASUREMENTS,
                    "{delay_ns}, {per_ns}: {off}"
                );
            }
        }
        // If no size makes the launch longer, the fit returns the size 0, which adds nothing.
        assert_eq!(fit_gpu_delay_size(9.0, 9.0, 1.0, |_| Ok(99.0)).unwrap(), (0.0, 9.0));
        // If a step of the added time skips the requested delay, the fit returns the closest size
        // with its added time.
        assert_eq!(fit_gpu_delay_size(50.0, 9.0, 1.0, |_| Ok(99.0)).unwrap().1, 9.0);
        let fails =
            fit_gpu_delay_size(9.0, 1.0, 1.0, |_| Err(BackendError::DeviceLost("gone".to_owned())));
        assert!(matches!(fails, Err(BackendError::DeviceLost(_))));
    }

    #[test]
    fn gpu_launches_get_longer_by_the_delay_on_a_slow_host() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let mut events = CudaEventTimer::new(&device).unwrap();
        for cache in [CacheState::HotCaches, CacheState::ColdCaches] {
            for (delay, wanted_ns) in [("a=8000", 8e3), ("a=8000:work", 8e3), ("a=300000", 3e5)] {
                let mut slow = gpu_task_with_slow_launch_call(&device);
                let mut delay: InjectedLaunchDelay = delay.parse().unwrap();
                let mut without = events.audit_and_plan_case_timing(&mut slow, cache).unwrap();
                let fitted = ExecutableWithDelayedLaunches::delay_launches_on_gpu(
                    &mut slow,
                    &delay,
                    &mut events,
                    cache,
                );
                delay.fitted_gpu_delay_size = fitted.unwrap().gpu_delay_size();
                let again = ExecutableWithDelayedLaunches::delay_launches_on_gpu(
                    &mut slow,
                    &delay,
                    &mut events,
                    cache,
                );
                let mut again = again.unwrap();
                assert_eq!(again.gpu_delay_size(), delay.fitted_gpu_delay_size);
                let added_ns = again
                    .measure_time_added_to_launch_ns(&mut without, &mut events, cache)
                    .unwrap();
                eprintln!("{delay:?}, {cache:?}: {added_ns:.0} ns");
                assert!((added_ns - wanted_ns).abs() < 0.3 * wanted_ns, "{delay:?}: {added_ns}");
            }
        }
        let mut slow = gpu_task_with_slow_launch_call(&device);
        let short = ExecutableWithDelayedLaunches::delay_launches_on_gpu(
            &mut slow,
            &"a=1".parse().unwrap(),
            &mut events,
            CacheState::HotCaches,
        );
        let Err(BackendError::Unsupported(why)) = short else { panic!("a delay of 1 ns is made") };
        let start = "a delay of 1 ns cannot be made: a further kernel alone makes a launch ";
        let least = why.strip_prefix(start).and_then(|end| end.strip_suffix(" ns longer"));
        assert!(least.is_some_and(|least| least.parse::<f64>().is_ok_and(|ns| ns > 1.0)), "{why}");
    }
}
