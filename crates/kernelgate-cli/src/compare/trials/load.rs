//! Co-running load: contention on purpose, to see what the gate makes of it.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// What is co-running with a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoRunning {
    /// Nothing that we know of.
    Nothing,
    /// So many spinning threads of this process, which to the bench processes is another one.
    Threads(usize),
    /// Another process of the same executable that goes on timing its first case, on the same GPU,
    /// started so long before.
    Process(Duration),
}

/// Busy threads, until it is dropped.
pub struct BusyThreads {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyThreads {
    /// Starts that many.
    pub fn start(threads: usize) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let busy = |_| {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    spin_loop();
                }
            })
        };
        Self { threads: (0..threads).map(busy).collect(), over }
    }
}

impl Drop for BusyThreads {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
