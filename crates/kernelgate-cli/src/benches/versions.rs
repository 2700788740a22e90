//! Asks an executable for the versions of the protocol that it speaks.

use std::io::Read;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use kernelgate::display;
use kernelgate::protocol;

use super::child_process::{ChildProcess, ProcessEnd, memory_kill_reason};

/// Timeout of the question for protocol versions, unless the caller sets a shorter one.
pub const VERSION_TIMEOUT: Duration = Duration::from_secs(20);
/// Largest part of an answer that is read; an answer has a few lines, but benches of other kinds
/// list their cases.
const MAX_ANSWER_BYTES: usize = 1 << 16;
/// Largest number of bytes that an executable may print after its version.
const MAX_PRINTED_BYTES: u64 = 8 << 20;
/// Time in which the rest of an answer must arrive once the process has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The reason why an executable did not state its protocol versions.
#[derive(Debug, thiserror::Error)]
pub enum VersionQueryError {
    /// Error: the executable could not be started, or its process was lost.
    #[error("it does not start: {0}")]
    Start(std::io::Error),
    /// The executable hangs.
    #[error("no answer within {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// Error: the executable took too much memory.
    #[error("{0}")]
    OverMemory(String),
    /// The executable printed more than a list of versions can have.
    #[error("asked for its version it printed more than {}", display::byte_text(MAX_PRINTED_BYTES))]
    TooLong,
    /// Error: the executable ended with a failure status.
    #[error("asked for its version it ended with {0}")]
    Ended(ExitStatus),
    /// Error: the executable printed something other than its version.
    #[error("it does not speak the kernelgate protocol")]
    None,
    /// Error: the executable is the program kernelgate itself, which is not a bench.
    #[error("it is the kernelgate program")]
    IsProgram,
}

/// Runs an executable to ask it for the oldest and the newest version that it speaks.
pub fn ask_version_range(
    path: &Path,
    timeout: Duration,
    running: &ChildProcess,
) -> Result<(u64, u64), VersionQueryError> {
    let mut command = Command::new(path);
    // A bench with another harness lists its cases, or ends because it does not know the flag;
    // either way it measures nothing.
    command.arg("--list").env(protocol::REQUEST_VARIABLE, protocol::VERSION_QUESTION);
    command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::piped());
    let (stdout, _) = running.start_process(&mut command).map_err(VersionQueryError::Start)?;
    let (sender, receiver) = std::sync::mpsc::channel();
    // The thread is not joined: a process that the bench left behind may hold the stream open for
    // ever.
    std::thread::spawn(move || sender.send(stdout.map(read_start).unwrap_or_default()));
    let ended = running.wait_for_end(timeout).map_err(VersionQueryError::Start)?;
    let (bytes, too_long) = receiver.recv_timeout(DRAIN_TIMEOUT).unwrap_or_default();
    match ended {
        _ if too_long => Err(VersionQueryError::TooLong),
        ProcessEnd::TimedOut => Err(VersionQueryError::TimedOut(timeout)),
        ProcessEnd::OverMemory(limit) => {
            Err(VersionQueryError::OverMemory(memory_kill_reason(limit)))
        }
        ProcessEnd::Exited(status) if !status.success() => Err(VersionQueryError::Ended(status)),
        ProcessEnd::Exited(_) => {
            let text = String::from_utf8_lossy(&bytes);
            if text.trim_end() == super::PROGRAM_MARK {
                return Err(VersionQueryError::IsProgram);
            }
            protocol::parse_version_answer(&text).ok_or(VersionQueryError::None)
        }
    }
}

/// Returns the start of a program's output, and whether the output was too long: then the stream is
/// closed, which ends most programs.
fn read_start(mut stream: impl Read) -> (Vec<u8>, bool) {
    let mut start = Vec::new();
    let read = stream.by_ref().take(MAX_ANSWER_BYTES as u64).read_to_end(&mut start);
    let more = std::io::copy(&mut stream.take(MAX_PRINTED_BYTES + 1), &mut std::io::sink());
    (start, read.is_ok() && more.is_ok_and(|more| more > MAX_PRINTED_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_beyond_the_limit_is_reported_as_too_long() {
        let answer = b"kernelgate-protocol 1-2\n";
        assert_eq!(read_start(&answer[..]), (answer.to_vec(), false));
        let listed = [&answer[..], &vec![b'x'; 1 << 20]].concat();
        assert_eq!(read_start(&listed[..]), (listed[..MAX_ANSWER_BYTES].to_vec(), false));
        let (start, too_long) = read_start(std::io::repeat(b'x'));
        assert!(too_long && start.len() == MAX_ANSWER_BYTES);
    }

    #[test]
    fn endless_output_is_distinguished_from_a_hang() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("flood");
        std::fs::write(&path, "#!/bin/sh\nexec yes\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        let outcome =
            ask_version_range(&path, Duration::from_secs(600), &ChildProcess::in_process_groups());
        let why = outcome.unwrap_err().to_string();
        assert_eq!(why, "asked for its version it printed more than 8.39 MB");
    }
}
