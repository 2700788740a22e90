//! Which versions of the protocol an executable speaks.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use kernelgate::protocol;
use kernelgate::record::trial_request;

use super::child::{Ended, Running, wait};

/// An executable that does not answer by then speaks none.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Why the program itself is no bench.
pub const IS_PROGRAM: &str = "it is the kernelgate program";
/// An answer is a few lines.
const MAX_BYTES: u64 = 1 << 16;

/// Runs an executable to ask it: the oldest and the newest version that it speaks.
///
/// # Errors
/// Why it gave no answer, a fragment.
pub fn ask(path: &Path) -> Result<(u64, u64), String> {
    let output = tempfile::NamedTempFile::new()
        .map_err(|cause| format!("no temporary file for its answer: {cause}"))?;
    let into =
        output.reopen().map_err(|cause| format!("no temporary file for its answer: {cause}"))?;
    let mut command = Command::new(path);
    // A bench of another kind lists its cases, or ends at a flag that it does not know; it measures
    // nothing.
    command
        .arg("--list")
        .env(protocol::VARIABLE, protocol::QUESTION)
        .env("KERNELGATE_TRIAL", trial_request::QUESTION);
    command.stdin(Stdio::null()).stderr(Stdio::null()).stdout(into);
    let ended = wait(&mut command, TIMEOUT, &Running::default())
        .map_err(|cause| format!("it does not start: {cause}"))?;
    match ended {
        Ended::TimedOut => Err(format!("no answer within {} s", TIMEOUT.as_secs())),
        Ended::Exited(status) if !status.success() => {
            Err(format!("asked for its version it ended with {status}"))
        }
        Ended::Exited(_) => {
            let mut bytes = Vec::new();
            let read = std::io::Read::take(output.as_file(), MAX_BYTES);
            std::io::Read::read_to_end(&mut { read }, &mut bytes)
                .map_err(|cause| format!("its answer cannot be read: {cause}"))?;
            let text = String::from_utf8_lossy(&bytes);
            if text.trim_end() == super::PROGRAM {
                return Err(IS_PROGRAM.to_owned());
            }
            let before = trial_request::parse_answer(&text).map(|version| (1, version));
            protocol::parse_answer(&text).or(before).ok_or_else(|| "it answers none".to_owned())
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
