//! Which versions of the protocol an executable speaks.

use std::io::Read;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use kernelgate::display;
use kernelgate::protocol;

use super::child::{Ended, Running, over_memory};

/// Timeout of an executable that is asked, where none was given.
pub const TIMEOUT: Duration = Duration::from_secs(20);
/// What is read of an answer, which is a few lines; benches of other kinds list their cases.
const MAX_BYTES: usize = 1 << 16;
/// What may come after that.
const MAX_PRINTED: u64 = 8 << 20;
/// Time for the rest of an answer to arrive once the process has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Why an executable gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// It does not start, or was lost.
    #[error("it does not start: {0}")]
    Start(std::io::Error),
    /// It hangs.
    #[error("no answer within {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// It takes too much memory.
    #[error("{0}")]
    OverMemory(String),
    /// It prints without end.
    #[error("asked for its version it printed more than {}", display::bytes(MAX_PRINTED))]
    TooLong,
    /// It ended with an error.
    #[error("asked for its version it ended with {0}")]
    Ended(ExitStatus),
    /// It printed something else.
    #[error("it does not speak the kernelgate protocol")]
    None,
    /// It is this program, which is no bench.
    #[error("it is the kernelgate program")]
    IsProgram,
}

/// Runs an executable to ask it: the oldest and the newest version that it speaks.
pub fn ask(path: &Path, timeout: Duration, running: &Running) -> Result<(u64, u64), AskError> {
    let mut command = Command::new(path);
    // A bench of another kind lists its cases, or ends at a flag that it does not know; it measures
    // nothing.
    command.arg("--list").env(protocol::VARIABLE, protocol::QUESTION);
    command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(Stdio::piped());
    let (stdout, _) = running.start(&mut command).map_err(AskError::Start)?;
    let (sender, receiver) = std::sync::mpsc::channel();
    // Not joined: what the bench left behind may hold the stream open for ever.
    std::thread::spawn(move || sender.send(stdout.map(start_of).unwrap_or_default()));
    let ended = running.finish(timeout).map_err(AskError::Start)?;
    let (bytes, too_long) = receiver.recv_timeout(DRAIN_TIMEOUT).unwrap_or_default();
    match ended {
        _ if too_long => Err(AskError::TooLong),
        Ended::TimedOut => Err(AskError::TimedOut(timeout)),
        Ended::OverMemory(limit) => Err(AskError::OverMemory(over_memory(limit))),
        Ended::Exited(status) if !status.success() => Err(AskError::Ended(status)),
        Ended::Exited(_) => {
            let text = String::from_utf8_lossy(&bytes);
            if text.trim_end() == super::PROGRAM {
                return Err(AskError::IsProgram);
            }
            protocol::parse_answer(&text).ok_or(AskError::None)
        }
    }
}

/// The start of what it prints, and whether it prints too much: then the stream is closed, which
/// ends most programs.
fn start_of(mut stream: impl Read) -> (Vec<u8>, bool) {
    let mut start = Vec::new();
    let read = stream.by_ref().take(MAX_BYTES as u64).read_to_end(&mut start);
    let more = std::io::copy(&mut stream.take(MAX_PRINTED + 1), &mut std::io::sink());
    (start, read.is_ok() && more.is_ok_and(|more| more > MAX_PRINTED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_flood_the_start_is_read_and_the_rest_is_too_long() {
        let answer = b"kernelgate-protocol 1-2\n";
        assert_eq!(start_of(&answer[..]), (answer.to_vec(), false));
        let listed = [&answer[..], &vec![b'x'; 1 << 20]].concat();
        assert_eq!(start_of(&listed[..]), (listed[..MAX_BYTES].to_vec(), false));
        let (start, too_long) = start_of(std::io::repeat(b'x'));
        assert!(too_long && start.len() == MAX_BYTES);
    }

    #[cfg(unix)]
    #[test]
    fn a_bench_that_prints_without_end_is_told_from_one_that_hangs() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("flood");
        std::fs::write(&path, "#!/bin/sh\nexec yes\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        let outcome = ask(&path, Duration::from_secs(600), &Running::in_groups());
        let why = outcome.unwrap_err().to_string();
        assert_eq!(why, "asked for its version it printed more than 8.39 MB");
    }
}
