//! Sends requests to bench executables and reads their responses.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use kernelgate::display;
use kernelgate::protocol::{self, BenchRequest, BenchResponse, BenchResponseBody, RequestedAction};
use kernelgate::record::file;
use kernelgate::record::text::{printable_on_terminal, start_of_quotation};

use super::cargo::BenchExecutable;
use super::child_process::{ChildProcess, ProcessEnd, memory_kill_reason};
use super::find::FoundBenches;
use super::process_output::FailureLines;

/// Largest output of a bench that is printed, bytes; further output is dropped, and a line states
/// that.
pub const MAX_MESSAGE_BYTES: u64 = 1 << 20;
/// Largest response or record that is read, bytes: ten thousand cases take a tenth of this.
const MAX_RESPONSE_BYTES: u64 = 256_000_000;
/// Number of similar case ids that an error message lists.
const MAX_SIMILAR_CASE_IDS: usize = 3;
/// Time in which the rest of a bench's output must arrive once the bench has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Settings that all requests of a command share.
#[derive(Clone)]
pub struct RequestSettings<'a> {
    /// Settings of the bench executables, as environment variables.
    pub settings: BTreeMap<String, String>,
    /// Criterion's filter.
    pub filter: Option<&'a str>,
    /// Time after which a bench is treated as hung.
    pub timeout: Duration,
    /// The running bench process, shared with the code that may end it.
    pub running: &'a ChildProcess,
}

/// Error: no bench executable has a requested case.
#[derive(Debug, thiserror::Error)]
#[error("{reason}; {hint}")]
pub struct NoMatchingCase {
    reason: String,
    hint: String,
}

/// Sends a request to every executable and returns the answers by bench. The answers exclude
/// executables without a requested case.
pub fn ask_all_benches(
    found: &FoundBenches,
    asking: &RequestSettings<'_>,
    action: &RequestedAction,
) -> anyhow::Result<Vec<(String, BenchResponseBody)>> {
    let mut answers = Vec::new();
    ask_each_bench(found, asking, action, |bench, answer| {
        answers.push((bench.to_owned(), answer));
        Ok(())
    })?;
    Ok(answers)
}

/// Sends the request to one executable after the other; `answered` gets each bench with its
/// response at once, so that no response is lost if the next bench fails or the user interrupts.
/// Executables without a requested case are skipped.
///
/// # Errors
/// Fails if an executable breaks, hangs or cannot do the action on this machine, no executable has
/// a requested case, or `answered` fails.
pub fn ask_each_bench(
    found: &FoundBenches,
    asking: &RequestSettings<'_>,
    action: &RequestedAction,
    mut answered: impl FnMut(&str, BenchResponseBody) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (mut have_answered, mut reasons, mut close) = (false, Vec::new(), Vec::new());
    for executable in &found.executables {
        let BenchAnswer { body, death } = ask_and_wait(executable, asking, action)?;
        match body {
            BenchResponseBody::NoMatch { reason, close: ids } => {
                reasons.push(reason);
                close.extend(ids);
            }
            BenchResponseBody::Refused(reason) => {
                anyhow::bail!("bench `{}`: {reason}", executable.bench)
            }
            answer => {
                have_answered = true;
                answered(&executable.bench, answer)?;
            }
        }
        if let Some(how) = death {
            anyhow::bail!("bench `{}` {how}", executable.bench);
        }
    }
    if !have_answered {
        close.truncate(MAX_SIMILAR_CASE_IDS);
        let hint = match close.is_empty() {
            true => "`kernelgate list` shows the cases".to_owned(),
            false => format!("did you mean {}?", close.join(" or ")),
        };
        match reasons.into_iter().next() {
            Some(reason) => return Err(NoMatchingCase { reason, hint }.into()),
            None => anyhow::bail!("no bench has a case; {hint}"),
        }
    }
    Ok(())
}

/// Asks one executable.
pub fn ask_one_bench(
    executable: &BenchExecutable,
    asking: &RequestSettings<'_>,
    action: &RequestedAction,
) -> anyhow::Result<BenchResponseBody> {
    let BenchAnswer { body, death } = ask_and_wait(executable, asking, action)?;
    match death {
        None => Ok(body),
        Some(how) => Err(anyhow::anyhow!("bench `{}` {how}", executable.bench)),
    }
}

/// A response, and how the process ended if it did not exit with 0.
struct BenchAnswer {
    body: BenchResponseBody,
    death: Option<String>,
}

/// Sends a request to one executable and waits until it has ended.
fn ask_and_wait(
    executable: &BenchExecutable,
    asking: &RequestSettings<'_>,
    action: &RequestedAction,
) -> anyhow::Result<BenchAnswer> {
    let bench = &executable.bench;
    let folder = tempfile::tempdir().context("failed to make a folder for a request")?;
    let (request, response) =
        (folder.path().join("request.json"), folder.path().join("response.json"));
    file::write_unsynced(
        &request,
        &BenchRequest { response: response.clone(), action: action.clone() },
    )?;
    let mut command = request_command(executable, asking, &request);
    let running = asking.running;
    let (_, said) = running
        .start_process(&mut command)
        .with_context(|| format!("bench `{bench}` does not start"))?;
    let (sender, receiver) = std::sync::mpsc::channel();
    // The thread is not joined: a process that the bench left behind may hold the stream open for
    // ever.
    std::thread::spawn(move || sender.send(said.map(print_messages).unwrap_or_default()));
    let ended = running
        .wait_for_end(asking.timeout)
        .with_context(|| format!("bench `{bench}` was lost"))?;
    let last = receiver.recv_timeout(DRAIN_TIMEOUT).unwrap_or_default();
    check_file_size(&response).map_err(|why| anyhow::anyhow!("bench `{bench}`: {why}"))?;
    match file::read::<BenchResponse>(&response) {
        Ok(response) if response.bench != *bench => {
            let (other, path) = (start_of_quotation(&response.bench), executable.path.display());
            Err(anyhow::anyhow!("{path}: its response has bench `{other}`, not `{bench}`"))
        }
        Ok(response) => {
            let death = match ended {
                ProcessEnd::Exited(status) if status.success() => None,
                ProcessEnd::Exited(status) => Some(format!("answered, then ended with {status}")),
                ProcessEnd::TimedOut => Some(format!(
                    "answered, but did not end within {} s (--wait sets this)",
                    asking.timeout.as_secs()
                )),
                ProcessEnd::OverMemory(limit) => {
                    Some(format!("answered, then was {}", memory_kill_reason(limit)))
                }
            };
            Ok(BenchAnswer { body: response.answer, death })
        }
        Err(error) if !error.is_not_found() => Err(anyhow::anyhow!("bench `{bench}`: {error}")),
        Err(_) => {
            let how = match ended {
                ProcessEnd::Exited(status) => format!("ended with {status} and no response"),
                ProcessEnd::TimedOut => format!(
                    "gave no response within {} s (--wait sets this)",
                    asking.timeout.as_secs()
                ),
                ProcessEnd::OverMemory(limit) => format!("was {}", memory_kill_reason(limit)),
            };
            let last = if last.is_empty() {
                String::new()
            } else {
                format!("; it said last: {}", last.join("; "))
            };
            Err(anyhow::anyhow!("bench `{bench}` {how}{last}"))
        }
    }
}

/// Checks that a file of a bench is not longer than the limit.
pub fn check_file_size(path: &Path) -> Result<(), String> {
    match std::fs::metadata(path) {
        Ok(facts) if facts.len() > MAX_RESPONSE_BYTES => Err(format!(
            "what it wrote, {}, is over the limit of {}",
            display::byte_text(facts.len()),
            display::byte_text(MAX_RESPONSE_BYTES)
        )),
        _ => Ok(()),
    }
}

fn request_command(
    executable: &BenchExecutable,
    asking: &RequestSettings<'_>,
    request: &Path,
) -> Command {
    let mut command = Command::new(&executable.path);
    command.args(["--bench", "--quiet", "--noplot", "--discard-baseline"]);
    if let Some(filter) = asking.filter {
        command.arg("--").arg(filter);
    }
    command.envs(&asking.settings).env(protocol::REQUEST_VARIABLE, request);
    command.env_remove("KERNELGATE_DELAY").env("CARGO_MANIFEST_DIR", &executable.root);
    if executable.root.is_dir() {
        command.current_dir(&executable.root);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Prints the output of a bench up to a limit, reads the rest so that the bench does not block, and
/// returns the last lines.
fn print_messages(said: impl Read) -> Vec<String> {
    let mut said = BufReader::new(said);
    let mut last = FailureLines::default();
    let mut line = Vec::new();
    let mut read_bytes = 0;
    loop {
        line.clear();
        let read = said.by_ref().take(MAX_MESSAGE_BYTES).read_until(b'\n', &mut line);
        if !matches!(read, Ok(1..)) {
            return last
                .into_lines()
                .iter()
                .map(|line| start_of_quotation(line).into_owned())
                .collect();
        }
        let before = read_bytes;
        read_bytes += line.len() as u64;
        if read_bytes <= MAX_MESSAGE_BYTES {
            let text = String::from_utf8_lossy(&line);
            let text = printable_on_terminal(text.trim_end());
            eprintln!("{text}");
            last.push(&text);
        } else if before <= MAX_MESSAGE_BYTES {
            eprintln!("(it prints more than {MAX_MESSAGE_BYTES} bytes: the rest is dropped)");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies the file `answer` to where the request wants the response.
    const COPY_ANSWER: &str =
        r#"cp answer "$(sed -n 's/.*"response": *"\([^"]*\)".*/\1/p' "$KERNELGATE_REQUEST")""#;

    /// A bench executable that is a shell script.
    fn shell_bench(folder: &Path, name: &str, script: &str) -> BenchExecutable {
        use std::os::unix::fs::PermissionsExt;

        let path = folder.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        BenchExecutable { bench: name.to_owned(), path, root: folder.to_owned() }
    }

    fn settings_without_filter(running: &ChildProcess) -> RequestSettings<'_> {
        RequestSettings {
            settings: BTreeMap::new(),
            filter: None,
            timeout: Duration::from_secs(60),
            running,
        }
    }

    /// Two benches of two lines of shell: the first answers, the second fails.
    #[test]
    fn answers_of_earlier_benches_are_kept_if_a_later_bench_fails() {
        let folder = tempfile::tempdir().unwrap();
        let executable = |name, script| shell_bench(folder.path(), name, script);
        let answer = BenchResponseBody::Verify(Vec::new());
        let response = BenchResponse { bench: "first".to_owned(), answer: answer.clone() };
        file::write(&folder.path().join("answer"), &response).unwrap();
        let executables = vec![executable("first", COPY_ANSWER), executable("second", "exit 7")];
        let found = FoundBenches { executables, left_alone: Vec::new() };
        let running = ChildProcess::default();
        let asking = settings_without_filter(&running);
        let mut answered = Vec::new();
        let outcome = ask_each_bench(&found, &asking, &RequestedAction::List, |bench, answer| {
            answered.push((bench.to_owned(), answer));
            Ok(())
        });
        let why = outcome.unwrap_err().to_string();
        insta::assert_snapshot!(why, @"bench `second` ended with exit status: 7 and no response");
        assert_eq!(answered, [("first".to_owned(), answer)]);
    }

    #[test]
    fn a_bench_that_dies_after_writing_its_answer_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let answer = BenchResponseBody::Verify(Vec::new());
        let response = BenchResponse { bench: "dies".to_owned(), answer: answer.clone() };
        file::write(&folder.path().join("answer"), &response).unwrap();
        let script = format!("{COPY_ANSWER}\nkill -SEGV $$");
        let executable = shell_bench(folder.path(), "dies", &script);
        let running = ChildProcess::default();
        let asking = settings_without_filter(&running);
        let found = FoundBenches { executables: vec![executable], left_alone: Vec::new() };
        let mut answered = Vec::new();
        let outcome = ask_each_bench(&found, &asking, &RequestedAction::List, |_, answer| {
            answered.push(answer);
            Ok(())
        });
        let why = outcome.unwrap_err().to_string();
        insta::assert_snapshot!(why, @"bench `dies` answered, then ended with signal: 11 (SIGSEGV)");
        assert_eq!(answered, [answer], "the answer is kept");
    }

    #[test]
    fn a_response_above_the_size_limit_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MAX_RESPONSE_BYTES).unwrap();
        assert_eq!(check_file_size(file.path()), Ok(()));
        file.as_file().set_len(MAX_RESPONSE_BYTES + 1).unwrap();
        let why = "what it wrote, 256 MB, is over the limit of 256 MB".to_owned();
        assert_eq!(check_file_size(file.path()), Err(why));
        assert_eq!(check_file_size(&file.path().join("none")), Ok(()));
    }

    #[test]
    fn bench_output_is_captured_up_to_a_limit_and_drained_to_its_end() {
        let lines: String = (0..10).map(|i| format!("line {i}\n")).collect();
        assert_eq!(print_messages(lines.as_bytes()), ["line 6", "line 7", "line 8", "line 9"]);
        let flood =
            [b"first\n".as_slice(), &vec![b'x'; 3 * MAX_MESSAGE_BYTES as usize], b"\nlast\n"]
                .concat();
        assert_eq!(print_messages(&flood[..]), ["first"]);
        let line = vec![b'x'; MAX_MESSAGE_BYTES as usize - 1];
        assert_eq!(print_messages(&line[..]), [format!("{}…", "x".repeat(200))]);
    }
}
