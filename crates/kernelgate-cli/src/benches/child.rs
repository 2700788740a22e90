//! A child process that can be ended from elsewhere and is not waited for without end.

use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between two polls of a process: short against a process, long against what a poll costs.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The process that runs now, for who wants to end it.
#[derive(Clone, Default)]
pub struct Running {
    child: Arc<Mutex<Option<Child>>>,
}

impl Running {
    /// Ends the process, if one runs, and lets no other start: for a program that is about to end.
    pub fn kill(&self) {
        let mut child = self.lock();
        if let Some(child) = child.as_mut() {
            let _ = child.kill().and_then(|()| child.wait());
        }
        std::mem::forget(child);
    }

    /// Starts a process; its streams, where the command pipes them.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(
        &self,
        command: &mut Command,
    ) -> std::io::Result<(Option<ChildStdout>, Option<ChildStderr>)> {
        let mut held = self.lock();
        let mut child = command.spawn()?;
        let streams = (child.stdout.take(), child.stderr.take());
        *held = Some(child);
        Ok(streams)
    }

    /// Waits for the process that was started.
    ///
    /// # Errors
    /// When the system does not tell how it ended.
    pub fn finish(&self, timeout: Duration) -> std::io::Result<Ended> {
        let started = Instant::now();
        loop {
            let mut held = self.lock();
            let Some(child) = held.as_mut() else { return Ok(Ended::TimedOut) };
            let ended = match child.try_wait()? {
                Some(status) => Some(Ended::Exited(status)),
                None if started.elapsed() > timeout => {
                    let _ = child.kill().and_then(|()| child.wait());
                    Some(Ended::TimedOut)
                }
                None => None,
            };
            if let Some(ended) = ended {
                *held = None;
                return Ok(ended);
            }
            drop(held);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Ends the process and waits for it; whether it still ran.
    pub fn end(&self) -> bool {
        let Some(mut child) = self.lock().take() else { return false };
        let ran = matches!(child.try_wait(), Ok(None));
        let _ = child.kill().and_then(|()| child.wait());
        ran
    }

    fn lock(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a process ended.
pub enum Ended {
    /// By itself.
    Exited(ExitStatus),
    /// It was killed after its time was over.
    TimedOut,
}

/// Starts a process and waits for it.
///
/// # Errors
/// When it cannot be started.
pub fn wait(command: &mut Command, timeout: Duration, running: &Running) -> std::io::Result<Ended> {
    running.start(command)?;
    running.finish(timeout)
}
