//! Asks a bench executable which versions of kernelgate's bench protocol it speaks.

use std::io::Read;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use kernelgate::display;
use kernelgate::protocol;

use super::child_process::{ChildProcessEnd, SharedChildProcess, memory_kill_reason_text};

/// Longest time for a bench executable to answer which protocol versions it speaks, unless the
/// caller sets a shorter timeout.
pub const PROTOCOL_VERSION_QUERY_TIMEOUT: Duration = Duration::from_secs(20);
/// Number of bytes of the answer to a version query that kernelgate keeps; an answer is one short
/// line, but benches of other harnesses list their cases.
const MAX_PROTOCOL_VERSION_ANSWER_BYTES: usize = 1 << 16;
/// Largest number of further bytes that an executable may print after the kept start of its answer
/// to a version query.
const MAX_BYTES_AFTER_PROTOCOL_VERSION_ANSWER: u64 = 8 << 20;
/// After the queried process has ended, kernelgate waits this long for the rest of its answer to
/// the version query.
const PROTOCOL_VERSION_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The reason why an executable did not state which versions of kernelgate's bench protocol it
/// speaks.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolVersionQueryError {
    /// Error: the queried executable could not be started, or waiting for its process failed.
    #[error("it does not start: {0}")]
    CannotStart(std::io::Error),
    /// The executable hangs.
    #[error("no answer within {} s", .0.as_secs_f64())]
    NoAnswerInTime(Duration),
    /// Error: kernelgate killed the queried executable because it took too much memory.
    #[error("{0}")]
    KilledOverMemory(String),
    /// Error: the executable printed far more than an answer to the version query.
    #[error(
        "asked for its version it printed more than {}",
        display::decimal_byte_size_text(MAX_BYTES_AFTER_PROTOCOL_VERSION_ANSWER)
    )]
    AnswerTooLong,
    /// Error: the executable ended the version query with a failure status.
    #[error("asked for its version it ended with {0}")]
    EndedWithFailure(ExitStatus),
    /// Error: the executable printed something other than its protocol versions, so it does not
    /// speak kernelgate's bench protocol.
    #[error("it does not speak the kernelgate protocol")]
    NoVersionsInAnswer,
    /// Error: the queried executable is the program kernelgate itself, which is not a bench.
    #[error("it is the kernelgate program")]
    IsKernelgateProgram,
}

/// Runs an executable with the version query, and returns the oldest and the newest version of
/// kernelgate's bench protocol that it speaks.
pub fn query_bench_protocol_versions(
    path: &Path,
    timeout: Duration,
    running: &SharedChildProcess,
) -> Result<(u64, u64), ProtocolVersionQueryError> {
    let mut command = Command::new(path);
    // Because of `--list`, a bench with another harness only lists its cases, or refuses the flag;
    // in both cases it measures nothing.
    command.arg("--list").env(protocol::REQUEST_PATH_VARIABLE, protocol::PROTOCOL_VERSION_QUESTION);
    command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::piped());
    let (stdout, _) = running
        .start_child_process(&mut command)
        .map_err(ProtocolVersionQueryError::CannotStart)?;
    let (sender, receiver) = std::sync::mpsc::channel();
    // The thread that reads the answer is not joined: a process that the executable left behind may
    // hold the pipe open for ever.
    std::thread::spawn(move || {
        sender.send(stdout.map(read_start_of_version_answer).unwrap_or_default())
    });
    let ended =
        running.wait_or_kill_at_timeout(timeout).map_err(ProtocolVersionQueryError::CannotStart)?;
    let (bytes, too_long) =
        receiver.recv_timeout(PROTOCOL_VERSION_DRAIN_TIMEOUT).unwrap_or_default();
    match ended {
        _ if too_long => Err(ProtocolVersionQueryError::AnswerTooLong),
        ChildProcessEnd::KilledAtTimeout => Err(ProtocolVersionQueryError::NoAnswerInTime(timeout)),
        ChildProcessEnd::KilledAboveMemoryBytes(limit) => {
            Err(ProtocolVersionQueryError::KilledOverMemory(memory_kill_reason_text(limit)))
        }
        ChildProcessEnd::Exited(status) if !status.success() => {
            Err(ProtocolVersionQueryError::EndedWithFailure(status))
        }
        ChildProcessEnd::Exited(_) => {
            let text = String::from_utf8_lossy(&bytes);
            if text.trim_end() == super::KERNELGATE_PROGRAM_VERSION_ANSWER {
                return Err(ProtocolVersionQueryError::IsKernelgateProgram);
            }
            protocol::parse_protocol_version_answer(&text)
                .ok_or(ProtocolVersionQueryError::NoVersionsInAnswer)
        }
    }
}

/// Reads a limited start of a program's output, and returns it with whether the output was too
/// long; closing the stream then ends most programs.
fn read_start_of_version_answer(mut stream: impl Read) -> (Vec<u8>, bool) {
    let mut start = Vec::new();
    let read =
        stream.by_ref().take(MAX_PROTOCOL_VERSION_ANSWER_BYTES as u64).read_to_end(&mut start);
    let more = std::io::copy(
        &mut stream.take(MAX_BYTES_AFTER_PROTOCOL_VERSION_ANSWER + 1),
        &mut std::io::sink(),
    );
    (start, read.is_ok() && more.is_ok_and(|more| more > MAX_BYTES_AFTER_PROTOCOL_VERSION_ANSWER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlong_version_answer_is_reported_as_too_long() {
        let answer = b"kernelgate-protocol 1-2\n";
        assert_eq!(read_start_of_version_answer(&answer[..]), (answer.to_vec(), false));
        let listed = [&answer[..], &vec![b'x'; 1 << 20]].concat();
        assert_eq!(
            read_start_of_version_answer(&listed[..]),
            (listed[..MAX_PROTOCOL_VERSION_ANSWER_BYTES].to_vec(), false)
        );
        let (start, too_long) = read_start_of_version_answer(std::io::repeat(b'x'));
        assert!(too_long && start.len() == MAX_PROTOCOL_VERSION_ANSWER_BYTES);
    }

    #[test]
    fn endless_output_is_distinguished_from_a_hung_bench() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("flood");
        std::fs::write(&path, "#!/bin/sh\nexec yes\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        let outcome = query_bench_protocol_versions(
            &path,
            Duration::from_secs(600),
            &SharedChildProcess::with_own_process_groups(),
        );
        let why = outcome.unwrap_err().to_string();
        assert_eq!(why, "asked for its version it printed more than 8.39 MB");
    }
}
