//! Sends requests in kernelgate's bench protocol to bench executables, as JSON files, and reads the
//! JSON responses.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use kernelgate::display;
use kernelgate::protocol::{
    self, BenchRequestFile, BenchResponseFile, RequestedBenchAction, ResponseToBenchAction,
};
use kernelgate::record::file;
use kernelgate::record::text::{clean_message_for_terminal, shortened_quotation};

use super::cargo::BenchExecutable;
use super::child_process::{ChildProcessEnd, SharedChildProcess, memory_kill_reason_text};
use super::find::UsableAndUnusableBenches;
use super::process_output::FailureLineCollector;

/// Largest number of bytes of a bench's standard error that kernelgate prints; kernelgate drops
/// later output and prints one line about the dropped rest.
pub const MAX_PRINTED_STDERR_BYTES: u64 = 1 << 20;
/// Largest response file or record file of a bench that kernelgate reads, bytes; ten thousand cases
/// take about a tenth of this size.
const MAX_BENCH_RESPONSE_BYTES: u64 = 256_000_000;
/// Largest number of similar case ids that the error message suggests ("did you mean") if no case
/// matches the requested id.
const MAX_SUGGESTED_CASE_IDS: usize = 3;
/// After a bench process has ended, kernelgate waits this long for the rest of its standard error.
const STDERR_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Settings that all requests of one kernelgate command to bench executables share.
#[derive(Clone)]
pub struct BenchRequestSettings<'a> {
    /// Environment variables that kernelgate sets for each bench executable.
    pub bench_variables: BTreeMap<String, String>,
    /// Criterion's filter.
    pub criterion_filter: Option<&'a str>,
    /// Time after which kernelgate treats a bench process without a response as hung and kills it.
    pub response_timeout: Duration,
    /// Handle of the running bench process, shared with the code that kills the process after
    /// Ctrl-C.
    pub running_child: &'a SharedChildProcess,
}

/// Error: no bench executable has any case that the command requests.
#[derive(Debug, thiserror::Error)]
#[error("{no_match_reason}; {similar_cases_hint}")]
pub struct NoMatchingCaseError {
    no_match_reason: String,
    similar_cases_hint: String,
}

/// Sends one request to every bench executable, one after the other, and returns each bench's name
/// with its response. The returned responses exclude bench executables that have none of the
/// requested cases.
pub fn request_from_all_benches(
    found: &UsableAndUnusableBenches,
    asking: &BenchRequestSettings<'_>,
    action: &RequestedBenchAction,
) -> anyhow::Result<Vec<(String, ResponseToBenchAction)>> {
    let mut answers = Vec::new();
    request_from_each_bench(found, asking, action, |bench, answer| {
        answers.push((bench.to_owned(), answer));
        Ok(())
    })?;
    Ok(answers)
}

/// Sends the request to one bench executable after the other; the callback `answered` gets each
/// bench's response at once, so that a later failure or Ctrl-C loses no earlier response. Bench
/// executables without a requested case have no response.
///
/// # Errors
/// Fails if a bench executable crashes, hangs or refuses the request, no bench executable has a
/// requested case, or the callback `answered` fails.
pub fn request_from_each_bench(
    found: &UsableAndUnusableBenches,
    asking: &BenchRequestSettings<'_>,
    action: &RequestedBenchAction,
    mut answered: impl FnMut(&str, ResponseToBenchAction) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (mut have_answered, mut reasons, mut close) = (false, Vec::new(), Vec::new());
    for executable in &found.usable_executables {
        let BenchResponseAndDeath { body, bench_death_message: death } =
            request_and_wait_for_bench_end(executable, asking, action)?;
        match body {
            ResponseToBenchAction::NoMatchingCase {
                no_match_reason: reason,
                similar_case_ids: ids,
            } => {
                reasons.push(reason);
                close.extend(ids);
            }
            ResponseToBenchAction::ActionImpossible(reason) => {
                anyhow::bail!("bench `{}`: {reason}", executable.bench_name)
            }
            answer => {
                have_answered = true;
                answered(&executable.bench_name, answer)?;
            }
        }
        if let Some(how) = death {
            anyhow::bail!("bench `{}` {how}", executable.bench_name);
        }
    }
    if !have_answered {
        close.truncate(MAX_SUGGESTED_CASE_IDS);
        let hint = match close.is_empty() {
            true => "`kernelgate list` shows the cases".to_owned(),
            false => format!("did you mean {}?", close.join(" or ")),
        };
        match reasons.into_iter().next() {
            Some(reason) => {
                return Err(NoMatchingCaseError {
                    no_match_reason: reason,
                    similar_cases_hint: hint,
                }
                .into());
            }
            None => anyhow::bail!("no bench has a case; {hint}"),
        }
    }
    Ok(())
}

/// Sends a request to one bench executable and waits for its response.
pub fn request_from_one_bench(
    executable: &BenchExecutable,
    asking: &BenchRequestSettings<'_>,
    action: &RequestedBenchAction,
) -> anyhow::Result<ResponseToBenchAction> {
    let BenchResponseAndDeath { body, bench_death_message: death } =
        request_and_wait_for_bench_end(executable, asking, action)?;
    match death {
        None => Ok(body),
        Some(how) => Err(anyhow::anyhow!("bench `{}` {how}", executable.bench_name)),
    }
}

/// Response of a bench to one request, and how the bench process ended if its exit status was not
/// 0.
struct BenchResponseAndDeath {
    body: ResponseToBenchAction,
    bench_death_message: Option<String>,
}

/// Starts one bench executable with a request, waits until its process has ended, and reads its
/// response file.
fn request_and_wait_for_bench_end(
    executable: &BenchExecutable,
    asking: &BenchRequestSettings<'_>,
    action: &RequestedBenchAction,
) -> anyhow::Result<BenchResponseAndDeath> {
    let bench = &executable.bench_name;
    let folder = tempfile::tempdir().context("failed to make a folder for a request")?;
    let (request, response) =
        (folder.path().join("request.json"), folder.path().join("response.json"));
    file::write_record_without_sync(
        &request,
        &BenchRequestFile { response_path: response.clone(), action: action.clone() },
    )?;
    let mut command = executable_command_for_request(executable, asking, &request);
    let running = asking.running_child;
    let (_, said) = running
        .start_child_process(&mut command)
        .with_context(|| format!("bench `{bench}` does not start"))?;
    let (sender, receiver) = std::sync::mpsc::channel();
    // The thread that reads the bench's standard error is not joined: a process that the bench left
    // behind may hold the pipe open for ever.
    std::thread::spawn(move || sender.send(said.map(print_bench_stderr).unwrap_or_default()));
    let ended = running
        .wait_or_kill_at_timeout(asking.response_timeout)
        .with_context(|| format!("bench `{bench}` was lost"))?;
    let last = receiver.recv_timeout(STDERR_DRAIN_TIMEOUT).unwrap_or_default();
    check_bench_file_size(&response).map_err(|why| anyhow::anyhow!("bench `{bench}`: {why}"))?;
    match file::read_record::<BenchResponseFile>(&response) {
        Ok(response) if response.bench_name != *bench => {
            let (other, path) =
                (shortened_quotation(&response.bench_name), executable.executable_path.display());
            Err(anyhow::anyhow!("{path}: its response has bench `{other}`, not `{bench}`"))
        }
        Ok(response) => {
            let death = match ended {
                ChildProcessEnd::Exited(status) if status.success() => None,
                ChildProcessEnd::Exited(status) => {
                    Some(format!("answered, then ended with {status}"))
                }
                ChildProcessEnd::KilledAtTimeout => Some(format!(
                    "answered, but did not end within {} s (--wait sets this)",
                    asking.response_timeout.as_secs()
                )),
                ChildProcessEnd::KilledAboveMemoryBytes(limit) => {
                    Some(format!("answered, then was {}", memory_kill_reason_text(limit)))
                }
            };
            Ok(BenchResponseAndDeath { body: response.answer, bench_death_message: death })
        }
        Err(error) if !error.is_because_file_is_missing() => {
            Err(anyhow::anyhow!("bench `{bench}`: {error}"))
        }
        Err(_) => {
            let how = match ended {
                ChildProcessEnd::Exited(status) => format!("ended with {status} and no response"),
                ChildProcessEnd::KilledAtTimeout => format!(
                    "gave no response within {} s (--wait sets this)",
                    asking.response_timeout.as_secs()
                ),
                ChildProcessEnd::KilledAboveMemoryBytes(limit) => {
                    format!("was {}", memory_kill_reason_text(limit))
                }
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

/// Checks that a response file or record file of a bench has at most `MAX_BENCH_RESPONSE_BYTES`
/// bytes.
pub fn check_bench_file_size(path: &Path) -> Result<(), String> {
    match std::fs::metadata(path) {
        Ok(facts) if facts.len() > MAX_BENCH_RESPONSE_BYTES => Err(format!(
            "what it wrote, {}, is over the limit of {}",
            display::decimal_byte_size_text(facts.len()),
            display::decimal_byte_size_text(MAX_BENCH_RESPONSE_BYTES)
        )),
        _ => Ok(()),
    }
}

fn executable_command_for_request(
    executable: &BenchExecutable,
    asking: &BenchRequestSettings<'_>,
    request: &Path,
) -> Command {
    let mut command = Command::new(&executable.executable_path);
    command.args(["--bench", "--quiet", "--noplot", "--discard-baseline"]);
    if let Some(filter) = asking.criterion_filter {
        command.arg("--").arg(filter);
    }
    command.envs(&asking.bench_variables).env(protocol::REQUEST_PATH_VARIABLE, request);
    command.env_remove("KERNELGATE_DELAY").env("CARGO_MANIFEST_DIR", &executable.package_root);
    if executable.package_root.is_dir() {
        command.current_dir(&executable.package_root);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Prints a bench's standard error up to a byte limit, reads the rest so that the bench does not
/// block, and returns the lines that explain a failure.
fn print_bench_stderr(said: impl Read) -> Vec<String> {
    let mut said = BufReader::new(said);
    let mut last = FailureLineCollector::default();
    let mut line = Vec::new();
    let mut read_bytes = 0;
    loop {
        line.clear();
        let read = said.by_ref().take(MAX_PRINTED_STDERR_BYTES).read_until(b'\n', &mut line);
        if !matches!(read, Ok(1..)) {
            return last
                .into_failure_lines()
                .iter()
                .map(|line| shortened_quotation(line).into_owned())
                .collect();
        }
        let before = read_bytes;
        read_bytes += line.len() as u64;
        if read_bytes <= MAX_PRINTED_STDERR_BYTES {
            let text = String::from_utf8_lossy(&line);
            let text = clean_message_for_terminal(text.trim_end());
            eprintln!("{text}");
            last.add_process_output_line(&text);
        } else if before <= MAX_PRINTED_STDERR_BYTES {
            eprintln!(
                "(it prints more than {MAX_PRINTED_STDERR_BYTES} bytes: the rest is dropped)"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shell script of a test bench: copies the prepared file `answer` to the path where the
    /// request wants the response.
    const COPY_ANSWER_SCRIPT: &str =
        r#"cp answer "$(sed -n 's/.*"response": *"\([^"]*\)".*/\1/p' "$KERNELGATE_REQUEST")""#;

    /// Test helper: makes a bench executable that is a shell script.
    fn shell_script_bench(folder: &Path, name: &str, script: &str) -> BenchExecutable {
        use std::os::unix::fs::PermissionsExt;

        let path = folder.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        BenchExecutable {
            bench_name: name.to_owned(),
            executable_path: path,
            package_root: folder.to_owned(),
        }
    }

    fn request_settings_without_filter(running: &SharedChildProcess) -> BenchRequestSettings<'_> {
        BenchRequestSettings {
            bench_variables: BTreeMap::new(),
            criterion_filter: None,
            response_timeout: Duration::from_secs(60),
            running_child: running,
        }
    }

    /// The test has two benches, each a two-line shell script: the first answers, the second fails.
    #[test]
    fn answers_of_earlier_benches_are_kept_if_a_later_bench_fails() {
        let folder = tempfile::tempdir().unwrap();
        let executable = |name, script| shell_script_bench(folder.path(), name, script);
        let answer = ResponseToBenchAction::Verify(Vec::new());
        let response = BenchResponseFile { bench_name: "first".to_owned(), answer: answer.clone() };
        file::write_record_atomically(&folder.path().join("answer"), &response).unwrap();
        let executables =
            vec![executable("first", COPY_ANSWER_SCRIPT), executable("second", "exit 7")];
        let found = UsableAndUnusableBenches {
            usable_executables: executables,
            unusable_benches_with_reason: Vec::new(),
        };
        let running = SharedChildProcess::default();
        let asking = request_settings_without_filter(&running);
        let mut answered = Vec::new();
        let outcome = request_from_each_bench(
            &found,
            &asking,
            &RequestedBenchAction::ListCases,
            |bench, answer| {
                answered.push((bench.to_owned(), answer));
                Ok(())
            },
        );
        let why = outcome.unwrap_err().to_string();
        insta::assert_snapshot!(why, @"bench `second` ended with exit status: 7 and no response");
        assert_eq!(answered, [("first".to_owned(), answer)]);
    }

    #[test]
    fn a_bench_that_dies_after_writing_its_response_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let answer = ResponseToBenchAction::Verify(Vec::new());
        let response = BenchResponseFile { bench_name: "dies".to_owned(), answer: answer.clone() };
        file::write_record_atomically(&folder.path().join("answer"), &response).unwrap();
        let script = format!("{COPY_ANSWER_SCRIPT}\nkill -SEGV $$");
        let executable = shell_script_bench(folder.path(), "dies", &script);
        let running = SharedChildProcess::default();
        let asking = request_settings_without_filter(&running);
        let found = UsableAndUnusableBenches {
            usable_executables: vec![executable],
            unusable_benches_with_reason: Vec::new(),
        };
        let mut answered = Vec::new();
        let outcome = request_from_each_bench(
            &found,
            &asking,
            &RequestedBenchAction::ListCases,
            |_, answer| {
                answered.push(answer);
                Ok(())
            },
        );
        let why = outcome.unwrap_err().to_string();
        insta::assert_snapshot!(why, @"bench `dies` answered, then ended with signal: 11 (SIGSEGV)");
        assert_eq!(answered, [answer], "the answer is kept");
    }

    #[test]
    fn a_response_above_the_size_limit_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(MAX_BENCH_RESPONSE_BYTES).unwrap();
        assert_eq!(check_bench_file_size(file.path()), Ok(()));
        file.as_file().set_len(MAX_BENCH_RESPONSE_BYTES + 1).unwrap();
        let why = "what it wrote, 256 MB, is over the limit of 256 MB".to_owned();
        assert_eq!(check_bench_file_size(file.path()), Err(why));
        assert_eq!(check_bench_file_size(&file.path().join("none")), Ok(()));
    }

    #[test]
    fn bench_output_is_captured_up_to_a_limit_and_drained_to_its_end() {
        let lines: String = (0..10).map(|i| format!("line {i}\n")).collect();
        assert_eq!(print_bench_stderr(lines.as_bytes()), ["line 6", "line 7", "line 8", "line 9"]);
        let flood = [
            b"first\n".as_slice(),
            &vec![b'x'; 3 * MAX_PRINTED_STDERR_BYTES as usize],
            b"\nlast\n",
        ]
        .concat();
        assert_eq!(print_bench_stderr(&flood[..]), ["first"]);
        let line = vec![b'x'; MAX_PRINTED_STDERR_BYTES as usize - 1];
        assert_eq!(print_bench_stderr(&line[..]), [format!("{}…", "x".repeat(200))]);
    }
}
