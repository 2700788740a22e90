//! Starts artificial load beside the measured processes, to test how the gate handles contention.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Artificial load that runs at the same time as a measured process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoRunningLoad {
    /// No load.
    Nothing,
    /// Artificial load by this number of spinning threads in this program, which benches see as
    /// another process.
    Threads(usize),
    /// Artificial load by a second process of the executable, which times its first case again and
    /// again on the same GPU. The load process starts this long before the measured process.
    Process(Duration),
}

/// Threads that keep the CPU busy until this value is dropped.
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
