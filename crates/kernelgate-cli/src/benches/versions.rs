//! Which versions of the protocol an executable speaks.

use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use kernelgate::protocol;
use kernelgate::record::trial_request;

use super::child::{Ended, Running, over_memory, wait};

/// Timeout of an executable that is asked, where none was given.
pub const TIMEOUT: Duration = Duration::from_secs(20);
/// An answer is a few lines.
const MAX_BYTES: u64 = 1 << 16;

/// Why an executable gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// There is no place for what it says.
    #[error("no temporary file for its answer: {0}")]
    Temporary(std::io::Error),
    /// It does not start, or was lost.
    #[error("it does not start: {0}")]
    Start(std::io::Error),
    /// It hangs.
    #[error("no answer within {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// It takes too much memory.
    #[error("{0}")]
    OverMemory(String),
    /// It ended with an error.
    #[error("asked for its version it ended with {0}")]
    Ended(ExitStatus),
    /// What it said is no answer.
    #[error("it answers none")]
    None,
    /// It is this program, which is no bench.
    #[error("it is the kernelgate program")]
    IsProgram,
}

/// Runs an executable to ask it: the oldest and the newest version that it speaks.
///
/// # Errors
/// Why it gave no answer.
pub fn ask(path: &Path, timeout: Duration, running: &Running) -> Result<(u64, u64), AskError> {
    let output = tempfile::NamedTempFile::new().map_err(AskError::Temporary)?;
    let into = output.reopen().map_err(AskError::Temporary)?;
    let mut command = Command::new(path);
    // A bench of another kind lists its cases, or ends at a flag that it does not know; it measures
    // nothing.
    command
        .arg("--list")
        .env(protocol::VARIABLE, protocol::QUESTION)
        .env("KERNELGATE_TRIAL", trial_request::QUESTION);
    command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(into);
    match wait(&mut command, timeout, running).map_err(AskError::Start)? {
        Ended::TimedOut => Err(AskError::TimedOut(timeout)),
        Ended::OverMemory(limit) => Err(AskError::OverMemory(over_memory(limit))),
        Ended::Exited(status) if !status.success() => Err(AskError::Ended(status)),
        Ended::Exited(_) => {
            let mut bytes = Vec::new();
            let read = std::io::Read::take(output.as_file(), MAX_BYTES);
            std::io::Read::read_to_end(&mut { read }, &mut bytes).map_err(AskError::Temporary)?;
            let text = String::from_utf8_lossy(&bytes);
            if text.trim_end() == super::PROGRAM {
                return Err(AskError::IsProgram);
            }
            let before = trial_request::parse_answer(&text).map(|version| (1, version));
            protocol::parse_answer(&text).or(before).ok_or(AskError::None)
        }
    }
}

/// The newest version that an executable and this program speak.
pub fn common((oldest, newest): (u64, u64)) -> Option<u64> {
    let version = newest.min(protocol::VERSIONS.1);
    (version >= oldest.max(protocol::VERSIONS.0)).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_both_is_spoken() {
        let newest = protocol::VERSIONS.1;
        assert_eq!(common((1, 1)), Some(1));
        assert_eq!(common((1, newest)), Some(newest));
        assert_eq!(common((2, newest + 5)), Some(newest));
        assert_eq!(common((newest + 1, newest + 5)), None);
    }
}
