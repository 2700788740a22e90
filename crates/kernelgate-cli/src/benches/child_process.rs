//! A child process that another thread can end, and that is never waited for without a limit.

use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::commands;
use kernelgate::display;
use kernelgate::record::environment::available_host_memory;

/// Time between two polls of a process: short against its run time, long against the cost of a
/// poll.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time between two readings of a process's memory, which cost more than a poll.
const MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Handle of the running child process, shared with the code that may end it.
#[derive(Clone, Default)]
pub struct ChildProcess {
    child: Arc<Mutex<Option<Child>>>,
    /// Whether each child process leads its own process group.
    groups: bool,
}

impl ChildProcess {
    /// Makes a handle whose processes each lead a process group. The group ends with its process,
    /// so that no child survives unless it made a session of its own. Ctrl-C in a terminal does not
    /// reach such a process group: the caller must watch for Ctrl-C and end the process.
    pub fn in_process_groups() -> Self {
        Self { groups: true, ..Self::default() }
    }

    /// Ends the process that runs, and lets no other start: for a program that is about to end.
    pub fn kill_all(&self) {
        let mut child = self.lock();
        if let Some(child) = child.as_mut() {
            self.end_child(child);
        }
        std::mem::forget(child);
    }

    /// Starts a child process and returns its output streams, if the command pipes them.
    pub fn start_process(
        &self,
        command: &mut Command,
    ) -> std::io::Result<(Option<ChildStdout>, Option<ChildStderr>)> {
        let mut held = self.lock();
        if self.groups {
            std::os::unix::process::CommandExt::process_group(command, 0);
        }
        commands::print_command(command);
        let mut child = command.spawn()?;
        let streams = (child.stdout.take(), child.stderr.take());
        *held = Some(child);
        Ok(streams)
    }

    /// Waits until the started process ends or the timeout passes.
    pub fn wait_for_end(&self, timeout: Duration) -> std::io::Result<ProcessEnd> {
        // The free memory: a process that takes more drives the machine into swapping, or has the
        // system end some process.
        self.finish_within(timeout, available_host_memory())
    }

    /// Waits until the process ends, and kills it at the timeout or if it uses more than `memory`
    /// bytes.
    pub fn finish_within(&self, timeout: Duration, memory: u64) -> std::io::Result<ProcessEnd> {
        let started = Instant::now();
        let mut looked = started;
        loop {
            let mut held = self.lock();
            let Some(child) = held.as_mut() else { return Ok(ProcessEnd::TimedOut) };
            let ended = if has_exited(child)? {
                // The process id is still in use, so it cannot name another process group.
                self.end_group(child);
                Some(ProcessEnd::Exited(child.wait()?))
            } else if started.elapsed() > timeout {
                self.end_child(child);
                Some(ProcessEnd::TimedOut)
            } else if looked.elapsed() > MEMORY_POLL_INTERVAL {
                looked = Instant::now();
                let over = resident_bytes(child.id()) > memory;
                over.then(|| {
                    self.end_child(child);
                    ProcessEnd::OverMemory(memory)
                })
            } else {
                None
            };
            if let Some(ended) = ended {
                *held = None;
                return Ok(ended);
            }
            drop(held);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Asks the child process to end, as Ctrl-C does.
    pub fn interrupt(&self) {
        if let Some(child) = self.lock().as_ref()
            && let Some(process) =
                i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw)
        {
            let _ = rustix::process::kill_process(process, rustix::process::Signal::INT);
        }
    }

    /// Kills the child process and waits for its end; returns whether it was still running.
    pub fn kill_and_wait(&self) -> bool {
        let Some(mut child) = self.lock().take() else { return false };
        let ran = matches!(has_exited(&mut child), Ok(false));
        self.end_child(&mut child);
        ran
    }

    /// Ends a child process that was not waited for yet, and its process group.
    fn end_child(&self, child: &mut Child) {
        self.end_group(child);
        let _ = child.kill().and_then(|()| child.wait());
    }

    /// Ends the group of a process that was not waited for yet.
    fn end_group(&self, child: &Child) {
        if self.groups
            && let Some(group) =
                i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw)
        {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a process has ended; its id stays in use until it is waited for.
fn has_exited(child: &mut Child) -> std::io::Result<bool> {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
        return Ok(child.try_wait()?.is_some());
    };
    let looks = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(pid), looks)?.is_some())
}

/// The ways in which a child process can end.
pub enum ProcessEnd {
    /// The child process ended by itself.
    Exited(ExitStatus),
    /// The process was killed after its timeout.
    TimedOut,
    /// The child process was killed because it took more memory than this many bytes.
    OverMemory(u64),
}

/// The reason why a process was killed for taking more memory than the limit, as a fragment of a
/// sentence.
pub fn memory_kill_reason(limit: u64) -> String {
    format!("killed: it took more than {} of memory, all that was free", display::byte_text(limit))
}

/// Returns the memory of a process and its descendants, bytes; 0 if the system does not report it,
/// as on systems other than Linux. Memory that several processes share is counted once for each of
/// them.
#[expect(clippy::disallowed_methods, reason = "a file of the system")]
fn resident_bytes(process: u32) -> u64 {
    let own = || {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kibibytes| kibibytes << 10)
    };
    let started = child_process_ids(process).into_iter().map(resident_bytes);
    own().unwrap_or_default() + started.sum::<u64>()
}

/// Ids of the running child processes of a process.
#[expect(clippy::disallowed_methods, reason = "files of the system")]
fn child_process_ids(process: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let children_of = |thread: std::fs::DirEntry| {
        std::fs::read_to_string(thread.path().join("children")).unwrap_or_default()
    };
    let lists: Vec<String> = threads.flatten().map(children_of).collect();
    lists.iter().flat_map(|text| text.split_whitespace()).flat_map(str::parse).collect()
}

/// Starts a child process and waits for it.
pub fn start_and_wait(
    command: &mut Command,
    timeout: Duration,
    running: &ChildProcess,
) -> std::io::Result<ProcessEnd> {
    running.start_process(command)?;
    running.wait_for_end(timeout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_above_its_memory_limit_is_killed() {
        let running = ChildProcess::in_process_groups();
        // Starts a process of a few megabytes that does not end by itself.
        let start = || running.start_process(Command::new("sleep").arg("600")).map(drop).unwrap();
        start();
        let ended = running.finish_within(Duration::from_secs(60), 1000).unwrap();
        assert!(matches!(ended, ProcessEnd::OverMemory(1000)));
        insta::assert_snapshot!(memory_kill_reason(1000), @"killed: it took more than 1.00 kB of memory, all that was free");
        start();
        let ended = running.finish_within(2 * MEMORY_POLL_INTERVAL, 1 << 40).unwrap();
        assert!(matches!(ended, ProcessEnd::TimedOut));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_of_descendants_counts_toward_a_process_limit() {
        const TEST_MEMORY_LIMIT: u64 = 100 << 20;
        let running = ChildProcess::in_process_groups();
        // Here the program `tail` holds its input in memory forever, because the input never ends.
        let hoards = "(head -c 200000000 /dev/zero; sleep 600) | tail -c 200000000 > /dev/null";
        running.start_process(Command::new("sh").args(["-c", hoards])).unwrap();
        let ended = running.finish_within(Duration::from_secs(60), TEST_MEMORY_LIMIT).unwrap();
        assert!(matches!(ended, ProcessEnd::OverMemory(TEST_MEMORY_LIMIT)));
    }

    #[test]
    fn descendants_are_killed_when_the_process_ends() {
        let alive = |process: &str| {
            // A zombie that nobody has waited for yet is dead.
            let status = std::fs::read_to_string(format!("/proc/{process}/stat"));
            status.is_ok_and(|text| !text.contains(") Z ") && !text.contains(") X "))
        };
        // The test ends the process, or the process ends by itself.
        let cases = [("wait", Duration::ZERO, None), ("exit 7", Duration::from_secs(60), Some(7))];
        for (then, timeout, code) in cases {
            let folder = tempfile::tempdir().unwrap();
            let pid = folder.path().join("pid");
            let mut command = Command::new("sh");
            command.args(["-c", &format!("sleep 600 & echo $! > \"$0\"; {then}")]).arg(&pid);
            let running = ChildProcess::in_process_groups();
            running.start_process(&mut command).unwrap();
            let grandchild = loop {
                match std::fs::read_to_string(&pid).ok().filter(|text| text.ends_with('\n')) {
                    Some(text) => break text.trim().to_owned(),
                    None => std::thread::sleep(POLL_INTERVAL),
                }
            };
            assert!(!cfg!(target_os = "linux") || alive(&grandchild));
            match running.wait_for_end(timeout).unwrap() {
                ProcessEnd::Exited(status) => assert_eq!(status.code(), code),
                ProcessEnd::TimedOut => assert_eq!(code, None),
                ProcessEnd::OverMemory(_) => panic!("it takes no memory"),
            }
            let mut looks = 0..400;
            while alive(&grandchild) {
                assert!(looks.next().is_some(), "{then}: the process that it started still runs");
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }
}
