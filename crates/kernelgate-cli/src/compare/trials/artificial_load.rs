//! Starts artificial CPU or GPU load while the head is measured, with which a calibration tests how
//! the gate handles contention.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Artificial load that a calibration runs at the same time as a measured bench process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArtificialCoRunningLoad {
    /// No artificial load runs beside the head.
    NoLoad,
    /// CPU load by this number of spinning threads in this program; the measured bench sees it as
    /// load of another process.
    SpinningThreads(usize),
    /// GPU load by a second process of the same executable, which times its first case repeatedly
    /// on the same GPU. The load process starts this duration before the measured bench process.
    GpuProcessWithLeadTime(Duration),
}

/// CPU load: threads that spin until this value is dropped.
pub struct SpinningLoadThreads {
    stop_flag: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl SpinningLoadThreads {
    /// Starts `threads` spinning threads.
    pub fn start_spinning_threads(threads: usize) -> SpinningLoadThreads {
        let stop = Arc::new(AtomicBool::new(false));
        let busy = |_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    spin_loop();
                }
            })
        };
        Self { threads: (0..threads).map(busy).collect(), stop_flag: stop }
    }
}

impl Drop for SpinningLoadThreads {
    fn drop(&mut self) {
        self.stop_flag.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
