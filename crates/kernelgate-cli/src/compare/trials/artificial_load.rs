//! Starts artificial load beside the measured processes, to test how the gate handles contention.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Load that runs at the same time as a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoRunningLoad {
    /// No load.
    Nothing,
    /// Load by this number of spinning threads of this program, which the benches see as another
    /// process.
    Threads(usize),
    /// A second process of the same executable, which times its first case again and again on the
    /// same GPU. Background load from another bench process, which starts this long before the
    /// measured process.
    Process(Duration),
}

/// Busy threads, which end when this is dropped.
pub struct BusyLoadThreads {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyLoadThreads {
    /// Starts `threads` spinning threads.
    pub fn start_on_threads(threads: usize) -> BusyLoadThreads {
        let stop = Arc::new(AtomicBool::new(false));
        let busy = |_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    spin_loop();
                }
            })
        };
        Self { threads: (0..threads).map(busy).collect(), stop }
    }
}

impl Drop for BusyLoadThreads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
