//! Handle of a child process that another thread can kill, and that kernelgate always waits for
//! with a timeout.

use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::commands;
use kernelgate::display;
use kernelgate::record::environment::available_host_memory_bytes;

/// Interval at which kernelgate polls whether a child process has ended: short against the
/// process's run time, long against the cost of a poll.
const PROCESS_END_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Interval at which kernelgate reads the memory use of a child process; reading memory costs more
/// than polling for the end.
const MEMORY_USE_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Handle of the running child process, shared with the thread that may kill the process, for
/// example after Ctrl-C.
#[derive(Clone, Default)]
pub struct SharedChildProcess {
    child: Arc<Mutex<Option<Child>>>,
    /// Whether each child process that this handle starts leads its own process group.
    uses_process_groups: bool,
}

impl SharedChildProcess {
    /// Makes a handle whose child processes each lead their own process group. kernelgate kills a
    /// child's process group when the child ends, so that no descendant survives unless it started
    /// its own session. Ctrl-C in a terminal does not reach a child process in its own process
    /// group: the caller must watch for Ctrl-C and kill the child.
    pub fn with_own_process_groups() -> Self {
        Self { uses_process_groups: true, ..Self::default() }
    }

    /// Kills the running child process, and prevents this handle from starting another one: used
    /// when kernelgate itself is about to exit.
    pub fn kill_child_and_block_new_ones(&self) {
        let mut child = self.lock_child();
        if let Some(child) = child.as_mut() {
            self.kill_child_with_group(child);
        }
        std::mem::forget(child);
    }

    /// Starts a child process and returns its standard output and standard error, if the command
    /// pipes them.
    pub fn start_child_process(
        &self,
        command: &mut Command,
    ) -> std::io::Result<(Option<ChildStdout>, Option<ChildStderr>)> {
        let mut held = self.lock_child();
        if self.uses_process_groups {
            std::os::unix::process::CommandExt::process_group(command, 0);
        }
        commands::print_command_if_verbose(command);
        let mut child = command.spawn()?;
        let streams = (child.stdout.take(), child.stderr.take());
        *held = Some(child);
        Ok(streams)
    }

    /// Waits until the started child process ends; kills the process at the timeout or if it uses
    /// more than the host's available memory.
    pub fn wait_or_kill_at_timeout(&self, timeout: Duration) -> std::io::Result<ChildProcessEnd> {
        // The memory limit is the host's available memory: a process that takes more drives the
        // machine into swapping, or makes the kernel's OOM killer end some process.
        self.wait_or_kill_at_limits(timeout, available_host_memory_bytes())
    }

    /// Waits until the child process ends, and kills it at the timeout or if it and its descendants
    /// use more than `memory` bytes.
    pub fn wait_or_kill_at_limits(
        &self,
        timeout: Duration,
        memory: u64,
    ) -> std::io::Result<ChildProcessEnd> {
        let started = Instant::now();
        let mut looked = started;
        loop {
            let mut held = self.lock_child();
            let Some(child) = held.as_mut() else { return Ok(ChildProcessEnd::KilledAtTimeout) };
            let ended = if has_exited_without_reaping(child)? {
                // The child has not been reaped yet, so its process id cannot have been reused for
                // another process group.
                self.kill_process_group(child);
                Some(ChildProcessEnd::Exited(child.wait()?))
            } else if started.elapsed() > timeout {
                self.kill_child_with_group(child);
                Some(ChildProcessEnd::KilledAtTimeout)
            } else if looked.elapsed() > MEMORY_USE_POLL_INTERVAL {
                looked = Instant::now();
                let over = resident_bytes_with_descendants(child.id()) > memory;
                over.then(|| {
                    self.kill_child_with_group(child);
                    ChildProcessEnd::KilledAboveMemoryBytes(memory)
                })
            } else {
                None
            };
            if let Some(ended) = ended {
                *held = None;
                return Ok(ended);
            }
            drop(held);
            std::thread::sleep(PROCESS_END_POLL_INTERVAL);
        }
    }

    /// Sends SIGINT to the child process, as Ctrl-C does.
    pub fn interrupt_child(&self) {
        if let Some(child) = self.lock_child().as_ref()
            && let Some(process) =
                i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw)
        {
            let _ = rustix::process::kill_process(process, rustix::process::Signal::INT);
        }
    }

    /// Kills the child process and waits for its end; returns whether the process was still running
    /// before.
    pub fn kill_child_and_wait(&self) -> bool {
        let Some(mut child) = self.lock_child().take() else { return false };
        let ran = matches!(has_exited_without_reaping(&mut child), Ok(false));
        self.kill_child_with_group(&mut child);
        ran
    }

    /// Kills a child process that was not reaped yet, and its process group.
    fn kill_child_with_group(&self, child: &mut Child) {
        self.kill_process_group(child);
        let _ = child.kill().and_then(|()| child.wait());
    }

    /// Kills the process group of a child process that was not reaped yet.
    fn kill_process_group(&self, child: &Child) {
        if self.uses_process_groups
            && let Some(group) =
                i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw)
        {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }

    fn lock_child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether a child process has exited, without reaping it, so that its process id stays in
/// use.
fn has_exited_without_reaping(child: &mut Child) -> std::io::Result<bool> {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
        return Ok(child.try_wait()?.is_some());
    };
    let looks = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(pid), looks)?.is_some())
}

/// The ways in which the wait for a child process ends: the process exited, or kernelgate killed
/// it.
pub enum ChildProcessEnd {
    /// The child process ended by itself, with this exit status.
    Exited(ExitStatus),
    /// kernelgate killed the child process because it did not end within its timeout.
    KilledAtTimeout,
    /// kernelgate killed the child process because it and its descendants used more than this many
    /// bytes of memory.
    KilledAboveMemoryBytes(u64),
}

/// Text for an error message: kernelgate killed a process because the process took more memory than
/// this limit of bytes.
pub fn memory_kill_reason_text(limit: u64) -> String {
    format!(
        "killed: it took more than {} of memory, all that was free",
        display::decimal_byte_size_text(limit)
    )
}

/// Returns the resident memory of a process and all its descendants, bytes, from `/proc`; 0 on
/// systems other than Linux. Resident pages that several processes share are counted once for each
/// process.
#[expect(clippy::disallowed_methods, reason = "a file of the system")]
fn resident_bytes_with_descendants(process: u32) -> u64 {
    let own = || {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kibibytes| kibibytes << 10)
    };
    let started = child_process_ids(process).into_iter().map(resident_bytes_with_descendants);
    own().unwrap_or_default() + started.sum::<u64>()
}

/// Returns the ids of the running child processes of a process, from `/proc`.
#[expect(clippy::disallowed_methods, reason = "files of the system")]
fn child_process_ids(process: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let children_of = |thread: std::fs::DirEntry| {
        std::fs::read_to_string(thread.path().join("children")).unwrap_or_default()
    };
    let lists: Vec<String> = threads.flatten().map(children_of).collect();
    lists.iter().flat_map(|text| text.split_whitespace()).flat_map(str::parse).collect()
}

/// Starts a child process and waits until it ends; kills the process at the timeout or the memory
/// limit.
pub fn run_child_process_to_end(
    command: &mut Command,
    timeout: Duration,
    running: &SharedChildProcess,
) -> std::io::Result<ChildProcessEnd> {
    running.start_child_process(command)?;
    running.wait_or_kill_at_timeout(timeout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_above_its_memory_limit_is_killed() {
        let running = SharedChildProcess::with_own_process_groups();
        // The test starts a shell process of a few megabytes that does not end by itself.
        let start =
            || running.start_child_process(Command::new("sleep").arg("600")).map(drop).unwrap();
        start();
        let ended = running.wait_or_kill_at_limits(Duration::from_secs(60), 1000).unwrap();
        assert!(matches!(ended, ChildProcessEnd::KilledAboveMemoryBytes(1000)));
        insta::assert_snapshot!(memory_kill_reason_text(1000), @"killed: it took more than 1.00 kB of memory, all that was free");
        start();
        let ended = running.wait_or_kill_at_limits(2 * MEMORY_USE_POLL_INTERVAL, 1 << 40).unwrap();
        assert!(matches!(ended, ChildProcessEnd::KilledAtTimeout));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_of_descendants_counts_toward_a_process_limit() {
        const TEST_MEMORY_LIMIT_BYTES: u64 = 100 << 20;
        let running = SharedChildProcess::with_own_process_groups();
        // In this test, `tail` keeps all its input in memory and its input never ends, so its
        // memory grows until it is killed.
        let hoards = "(head -c 200000000 /dev/zero; sleep 600) | tail -c 200000000 > /dev/null";
        running.start_child_process(Command::new("sh").args(["-c", hoards])).unwrap();
        let ended = running
            .wait_or_kill_at_limits(Duration::from_secs(60), TEST_MEMORY_LIMIT_BYTES)
            .unwrap();
        assert!(matches!(ended, ChildProcessEnd::KilledAboveMemoryBytes(TEST_MEMORY_LIMIT_BYTES)));
    }

    #[test]
    fn descendants_are_killed_when_the_process_ends() {
        let alive = |process: &str| {
            // The test counts a zombie process, which nobody has reaped yet, as dead.
            let status = std::fs::read_to_string(format!("/proc/{process}/stat"));
            status.is_ok_and(|text| !text.contains(") Z ") && !text.contains(") X "))
        };
        // The descendant must be dead whether kernelgate killed its parent or the parent ended by
        // itself.
        let cases = [("wait", Duration::ZERO, None), ("exit 7", Duration::from_secs(60), Some(7))];
        for (then, timeout, code) in cases {
            let folder = tempfile::tempdir().unwrap();
            let pid = folder.path().join("pid");
            let mut command = Command::new("sh");
            command.args(["-c", &format!("sleep 600 & echo $! > \"$0\"; {then}")]).arg(&pid);
            let running = SharedChildProcess::with_own_process_groups();
            running.start_child_process(&mut command).unwrap();
            let grandchild = loop {
                match std::fs::read_to_string(&pid).ok().filter(|text| text.ends_with('\n')) {
                    Some(text) => break text.trim().to_owned(),
                    None => std::thread::sleep(PROCESS_END_POLL_INTERVAL),
                }
            };
            assert!(!cfg!(target_os = "linux") || alive(&grandchild));
            match running.wait_or_kill_at_timeout(timeout).unwrap() {
                ChildProcessEnd::Exited(status) => assert_eq!(status.code(), code),
                ChildProcessEnd::KilledAtTimeout => assert_eq!(code, None),
                ChildProcessEnd::KilledAboveMemoryBytes(_) => panic!("it takes no memory"),
            }
            let mut looks = 0..400;
            while alive(&grandchild) {
                assert!(looks.next().is_some(), "{then}: the process that it started still runs");
                std::thread::sleep(PROCESS_END_POLL_INTERVAL);
            }
        }
    }
}
