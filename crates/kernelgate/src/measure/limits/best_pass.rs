//! Best time of a pass on one or all threads, from which the host's ceilings are computed.
//!
//! Threads begin and end each timing window together, and wake once for all windows. Windows are
//! shorter than a time slice of the scheduler: on a busy machine some of them are not interrupted,
//! and the fastest counts, because a ceiling is the capability of the device, not its average.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::measure::contention::CpuTimeTicks;

/// Shortest time of a window, so that small working sets are passed over many times.
const SHORTEST_WINDOW_S: f64 = 1e-4;

/// Windows of a pass.
#[derive(Clone, Copy)]
pub struct PassWindows {
    fewest: usize,
    /// Longest time of all windows together, seconds, if more windows than the fewest are useful.
    all_s: f64,
    /// Time of all timing windows on a machine whose cores other processes use too, seconds.
    busy_s: f64,
}

/// Marks a rest of all threads: when they wake up, the system may divide them among the cores anew.
/// Without the pause, two threads may share a core for long.
const ALL_THREADS_REST: usize = usize::MAX;
const THREAD_REST_TIME: Duration = Duration::from_millis(2);

struct WindowTimes {
    /// Seconds until this thread had finished its passes.
    own_s: f64,
    /// Seconds until all threads had finished their passes.
    all_s: f64,
}

/// Share of the CPU time of other processes from which a machine is busy.
const BUSY_CPU_SHARE: f64 = 0.05;

/// Returns whether other processes took much of the CPU since `then`.
fn was_cpu_busy(then: Option<CpuTimeTicks>) -> bool {
    let now = CpuTimeTicks::now();
    now.zip(then)
        .and_then(|(now, then)| now.taken_by_others_since(&then))
        .is_some_and(|it| it > BUSY_CPU_SHARE)
}

impl PassWindows {
    /// Enough for a ceiling.
    pub const CEILING_WINDOWS: PassWindows = Self { fewest: 5, all_s: 0.05, busy_s: 0.5 };
    /// Number and time of windows for a ceiling that is measured once.
    pub const SINGLE_CEILING_WINDOWS: PassWindows = Self { busy_s: 2.0, ..Self::CEILING_WINDOWS };
    /// Number and time of windows that suffice to choose among memory passes.
    pub const FEW_WINDOWS: PassWindows = Self { fewest: 2, all_s: 0.004, busy_s: 0.04 };

    /// Seconds that this thread needs for a pass in its fastest window.
    pub fn fastest_s(self, mut pass: impl FnMut()) -> f64 {
        self.take_part(&ThreadBarrier::default(), (0, 1), &mut pass)
    }

    /// Seconds of a pass in the fastest window, on all threads of the pool; `pass` gets the index
    /// of its thread.
    pub fn fastest_on_all_s(self, pass: impl Fn(usize) + Sync) -> f64 {
        let meeting = ThreadBarrier::default();
        let seconds = rayon::broadcast(|thread| {
            let place = (thread.index(), thread.num_threads());
            self.take_part(&meeting, place, &mut || pass(thread.index()))
        });
        seconds[0]
    }

    /// Runs the part of a pass that belongs to thread `index` of `threads`. The first thread
    /// decides for all threads how many passes a window has, and which window is the last.
    fn take_part(
        self,
        meeting: &ThreadBarrier,
        (index, threads): (usize, usize),
        pass: &mut dyn FnMut(),
    ) -> f64 {
        let mut expected = 0;
        let mut meet = || {
            expected += threads;
            meeting.wait_for(expected);
        };
        let mut window = |passes: usize| {
            if index == 0 {
                meeting.passes.store(passes, Ordering::Relaxed);
            }
            meet();
            let passes = meeting.passes.load(Ordering::Relaxed);
            let started = Instant::now();
            match passes {
                ALL_THREADS_REST => std::thread::sleep(THREAD_REST_TIME),
                _ => (0..passes).for_each(|_| pass()),
            }
            let own_s = started.elapsed().as_secs_f64();
            meet();
            (passes > 0).then(|| WindowTimes { own_s, all_s: started.elapsed().as_secs_f64() })
        };
        if index > 0 {
            while window(0).is_some() {}
            return 0.0;
        }
        window(1);
        let (begun, start) = (Instant::now(), CpuTimeTicks::now());
        let (mut passes, mut windows) = (1, 0);
        let (mut fastest, mut until_s) = (f64::INFINITY, self.all_s);
        while windows < self.fewest || begun.elapsed().as_secs_f64() < until_s {
            if let Some(WindowTimes { own_s, all_s }) = window(passes) {
                fastest = fastest.min(all_s / passes as f64);
                // Waiting for other threads does not make a window count as long enough.
                if own_s < SHORTEST_WINDOW_S {
                    passes *= 2;
                } else {
                    windows += 1;
                }
            }
            let over = begun.elapsed().as_secs_f64() >= until_s;
            if over && until_s < self.busy_s && was_cpu_busy(start) {
                window(ALL_THREADS_REST);
                until_s += self.all_s;
            }
        }
        window(0);
        fastest
    }
}

/// Place at which the threads of a pass wait for each other.
#[derive(Default)]
struct ThreadBarrier {
    arrived: AtomicUsize,
    /// Number of passes in the next window; zero ends the work.
    passes: AtomicUsize,
}

impl ThreadBarrier {
    /// Adds this thread to the count and waits until `expected` threads are counted. A waiting
    /// thread spins, and yields its core if another process occupies the core of the missing
    /// thread.
    fn wait_for(&self, expected: usize) {
        self.arrived.fetch_add(1, Ordering::AcqRel);
        let mut spins = 0_u32;
        while self.arrived.load(Ordering::Acquire) < expected {
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
    fn every_thread_makes_equally_many_passes() {
        let passes: Vec<_> =
            (0..rayon::current_num_threads()).map(|_| AtomicUsize::new(0)).collect();
        let count = |thread: usize| {
            passes[thread].fetch_add(1, Ordering::Relaxed);
        };
        assert!(PassWindows::FEW_WINDOWS.fastest_on_all_s(count) < 0.01);
        let counts: Vec<_> = passes.iter().map(|it| it.load(Ordering::Relaxed)).collect();
        assert!(counts[0] > 0 && counts.iter().all(|it| *it == counts[0]), "{counts:?}");
    }

    #[test]
    fn a_ceiling_is_the_time_of_the_fastest_window() {
        let mut calls = 0;
        let seconds = PassWindows::FEW_WINDOWS.fastest_s(|| {
            calls += 1;
            std::thread::sleep(Duration::from_millis(if calls < 3 { 40 } else { 5 }));
        });
        assert!((0.005..0.04).contains(&seconds), "{seconds}");
    }
}
