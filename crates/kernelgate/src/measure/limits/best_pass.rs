//! Measures the shortest time of a loop (a pass) on one host thread or on all, from which the
//! host's performance ceilings are computed.
//!
//! All threads begin and end each timing window together, and are woken only once for all windows.
//! Windows are shorter than a scheduler's time slice, so on a busy host some are not interrupted;
//! the fastest window counts, because a ceiling is what the host can do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::measure::contention::HostCpuTimeTicks;

/// Shortest time of a timing window, seconds; a small working set is passed over many times in a
/// window.
const MIN_TIMING_WINDOW_S: f64 = 1e-4;

/// Smallest number of timing windows of a pass, and their longest total time.
#[derive(Clone, Copy)]
pub struct TimingWindowBudget {
    min_windows: usize,
    /// Longest time of all timing windows together, seconds, unless the fewest windows take longer.
    max_total_s: f64,
    /// Longest time of all timing windows together, seconds, if other processes use the host's
    /// cores too.
    max_total_s_on_busy_host: f64,
}

/// Marks a pause of all threads: when the threads wake up, the operating system may assign them to
/// other cores. Without this pause two threads may share a core for a long time.
const PAUSE_ALL_THREADS_MARKER: usize = usize::MAX;
const ALL_THREADS_PAUSE: Duration = Duration::from_millis(2);

struct TimingWindowTimes {
    /// Seconds from the window's start until this thread had finished its passes.
    this_thread_s: f64,
    /// Seconds from the window's start until all threads had finished their passes.
    all_threads_s: f64,
}

/// The host counts as busy if other processes use more than this share of its CPU time.
const BUSY_HOST_CPU_SHARE: f64 = 0.05;

/// Returns whether other processes used more than 5 % of the host's CPU time since `then`.
fn was_host_busy_since(then: Option<HostCpuTimeTicks>) -> bool {
    let now = HostCpuTimeTicks::read_for_this_process();
    now.zip(then)
        .and_then(|(now, then)| now.cpu_share_of_other_processes_since(&then))
        .is_some_and(|it| it > BUSY_HOST_CPU_SHARE)
}

impl TimingWindowBudget {
    /// Number and time of timing windows that suffice to measure a host ceiling.
    pub const CEILING_BUDGET: TimingWindowBudget =
        Self { min_windows: 5, max_total_s: 0.05, max_total_s_on_busy_host: 0.5 };
    /// Number and time of timing windows for a host ceiling that is measured only once.
    pub const SINGLE_CEILING_BUDGET: TimingWindowBudget =
        Self { max_total_s_on_busy_host: 2.0, ..Self::CEILING_BUDGET };
    /// Number and time of timing windows for a brief trial, which chooses the fastest of several
    /// memory passes.
    pub const BRIEF_TRIAL_BUDGET: TimingWindowBudget =
        Self { min_windows: 2, max_total_s: 0.004, max_total_s_on_busy_host: 0.04 };

    /// Returns the seconds of one pass on this thread in the fastest timing window.
    pub fn fastest_pass_on_this_thread_s(self, mut pass: impl FnMut()) -> f64 {
        self.run_timing_windows_on_thread(&TimingThreadBarrier::default(), (0, 1), &mut pass)
    }

    /// Returns the seconds of one pass on all threads of the pool in the fastest timing window;
    /// `pass` gets the index of its thread.
    pub fn fastest_pass_on_all_threads_s(self, pass: impl Fn(usize) + Sync) -> f64 {
        let meeting = TimingThreadBarrier::default();
        let seconds = rayon::broadcast(|thread| {
            let place = (thread.index(), thread.num_threads());
            self.run_timing_windows_on_thread(&meeting, place, &mut || pass(thread.index()))
        });
        seconds[0]
    }

    /// Runs the passes of thread `index` of `threads` in all timing windows, and returns the
    /// seconds of a pass in the fastest window (on thread 0). Thread 0 decides for all threads how
    /// many passes a timing window has, and which window is the last.
    fn run_timing_windows_on_thread(
        self,
        meeting: &TimingThreadBarrier,
        (index, threads): (usize, usize),
        pass: &mut dyn FnMut(),
    ) -> f64 {
        let mut expected = 0;
        let mut meet = || {
            expected += threads;
            meeting.arrive_and_wait_for(expected);
        };
        let mut window = |passes: usize| {
            if index == 0 {
                meeting.passes_per_thread.store(passes, Ordering::Relaxed);
            }
            meet();
            let passes = meeting.passes_per_thread.load(Ordering::Relaxed);
            let started = Instant::now();
            match passes {
                PAUSE_ALL_THREADS_MARKER => std::thread::sleep(ALL_THREADS_PAUSE),
                _ => (0..passes).for_each(|_| pass()),
            }
            let own_s = started.elapsed().as_secs_f64();
            meet();
            (passes > 0).then(|| TimingWindowTimes {
                this_thread_s: own_s,
                all_threads_s: started.elapsed().as_secs_f64(),
            })
        };
        if index > 0 {
            while window(0).is_some() {}
            return 0.0;
        }
        window(1);
        let (begun, start) = (Instant::now(), HostCpuTimeTicks::read_for_this_process());
        let (mut passes, mut windows) = (1, 0);
        let (mut fastest, mut until_s) = (f64::INFINITY, self.max_total_s);
        while windows < self.min_windows || begun.elapsed().as_secs_f64() < until_s {
            if let Some(TimingWindowTimes { this_thread_s: own_s, all_threads_s: all_s }) =
                window(passes)
            {
                fastest = fastest.min(all_s / passes as f64);
                // The time that a thread waits for other threads does not count when the window's
                // length is checked.
                if own_s < MIN_TIMING_WINDOW_S {
                    passes *= 2;
                } else {
                    windows += 1;
                }
            }
            let over = begun.elapsed().as_secs_f64() >= until_s;
            if over && until_s < self.max_total_s_on_busy_host && was_host_busy_since(start) {
                window(PAUSE_ALL_THREADS_MARKER);
                until_s += self.max_total_s;
            }
        }
        window(0);
        fastest
    }
}

/// Barrier at which the threads that measure a host ceiling wait for each other.
#[derive(Default)]
struct TimingThreadBarrier {
    arrived_threads: AtomicUsize,
    /// Number of passes of each thread in the next timing window; zero ends the measurement.
    passes_per_thread: AtomicUsize,
}

impl TimingThreadBarrier {
    /// Counts this thread as arrived, and waits until `expected` arrivals are counted. A waiting
    /// thread spins, and later yields its core, because another process may occupy the core of the
    /// missing thread.
    fn arrive_and_wait_for(&self, expected: usize) {
        self.arrived_threads.fetch_add(1, Ordering::AcqRel);
        let mut spins = 0_u32;
        while self.arrived_threads.load(Ordering::Acquire) < expected {
            spins += 1;
            if spins < 1000 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_makes_equally_many_passes_in_a_window() {
        let passes: Vec<_> =
            (0..rayon::current_num_threads()).map(|_| AtomicUsize::new(0)).collect();
        let count = |thread: usize| {
            passes[thread].fetch_add(1, Ordering::Relaxed);
        };
        assert!(TimingWindowBudget::BRIEF_TRIAL_BUDGET.fastest_pass_on_all_threads_s(count) < 0.01);
        let counts: Vec<_> = passes.iter().map(|it| it.load(Ordering::Relaxed)).collect();
        assert!(counts[0] > 0 && counts.iter().all(|it| *it == counts[0]), "{counts:?}");
    }

    #[test]
    fn a_host_ceiling_is_the_time_of_the_fastest_window() {
        let mut calls = 0;
        let seconds = TimingWindowBudget::BRIEF_TRIAL_BUDGET.fastest_pass_on_this_thread_s(|| {
            calls += 1;
            std::thread::sleep(Duration::from_millis(if calls < 3 { 40 } else { 5 }));
        });
        assert!((0.005..0.04).contains(&seconds), "{seconds}");
    }
}
