//! Captures the output stream of a child process: a thread reads the stream to its end so that the
//! process never blocks, and keeps a limited number of bytes.

use std::io::Read;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// Number of bytes that are kept from the end of a process's output stream.
const KEPT_BYTES_AT_STREAM_END: usize = 1 << 16;
/// Number of bytes that are kept from the start of a process's output stream.
pub const KEPT_BYTES_AT_STREAM_START: usize = 8 << 20;
/// After a child process has ended, kernelgate waits this long for the rest of the process's
/// output.
const OUTPUT_DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Which part of a process's output stream is kept if the stream is long: its start or its end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum KeptPartOfOutput {
    /// Keep the first [`KEPT_BYTES_AT_STREAM_START`] bytes of the output stream.
    KeepStreamStart,
    /// Keep the last 64 KiB of the output stream.
    KeepStreamEnd,
}

/// The kept bytes of a process's output stream after the stream has ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CapturedOutput {
    /// The bytes that were kept of the captured output.
    pub kept_bytes: Vec<u8>,
    /// Whether the output stream had more bytes than were kept.
    pub output_truncated: bool,
    /// Number of bytes that the process wrote to the stream.
    pub stream_total_bytes: u64,
}

/// Reads a process's output stream to its end on a new thread, and returns the channel that
/// receives the captured part.
pub fn capture_stream_on_thread(
    mut stream: impl Read + Send + 'static,
    keep: KeptPartOfOutput,
) -> Receiver<CapturedOutput> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut all, mut piece) = (CapturedOutput::default(), vec![0; KEPT_BYTES_AT_STREAM_END]);
        while let Ok(count @ 1..) = stream.read(&mut piece) {
            all.stream_total_bytes += count as u64;
            match keep {
                KeptPartOfOutput::KeepStreamStart => {
                    let room = KEPT_BYTES_AT_STREAM_START.saturating_sub(all.kept_bytes.len());
                    all.kept_bytes.extend_from_slice(&piece[..count.min(room)]);
                    all.output_truncated |= count > room;
                }
                KeptPartOfOutput::KeepStreamEnd => {
                    all.kept_bytes.extend_from_slice(&piece[..count]);
                    let over = all.kept_bytes.len().saturating_sub(KEPT_BYTES_AT_STREAM_END);
                    all.kept_bytes.drain(..over);
                    all.output_truncated |= over > 0;
                }
            }
        }
        // Sending the captured output fails if the receiver stopped waiting because a process held
        // the stream open too long.
        let _ = sender.send(all);
    });
    receiver
}

/// Largest number of lines of a failed process's output that an error message shows.
const MAX_FAILURE_LINES: usize = 4;

/// Collects the lines of a process's output that explain its failure: the message of its last panic
/// without the backtrace, or else its last lines.
#[derive(Default)]
pub struct FailureLineCollector {
    failure_lines: Vec<String>,
    output_section: FailedOutputSection,
}

/// Section of a failed process's output to which the next line belongs: ordinary output, panic
/// message or backtrace.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum FailedOutputSection {
    /// The next line belongs to output before any panic.
    #[default]
    BeforePanic,
    /// The next line belongs to the message of a panic.
    PanicMessage,
    /// Text after the panic message: the backtrace and the Rust runtime's notes.
    PanicBacktrace,
}

impl FailureLineCollector {
    /// Adds the next line of the failed process's output.
    pub fn add_process_output_line(&mut self, line: &str) {
        let text = line.trim();
        if text.is_empty() {
            return;
        }
        if text.starts_with("thread '") && text.contains(" panicked at ") {
            (self.output_section, self.failure_lines) =
                (FailedOutputSection::PanicMessage, vec![line.to_owned()]);
            return;
        }
        let starts_trace = text == "stack backtrace:" || text.starts_with("note: run with `RUST_B");
        match self.output_section {
            FailedOutputSection::PanicMessage | FailedOutputSection::PanicBacktrace
                if starts_trace =>
            {
                self.output_section = FailedOutputSection::PanicBacktrace
            }
            // If a panic message exceeds the line limit, its first lines are kept, because its
            // start is more informative than its end.
            FailedOutputSection::PanicMessage if self.failure_lines.len() == MAX_FAILURE_LINES => {}
            FailedOutputSection::PanicBacktrace if is_backtrace_line(text) => {}
            _ => {
                if self.output_section == FailedOutputSection::PanicBacktrace {
                    self.output_section = FailedOutputSection::BeforePanic;
                    self.failure_lines.clear();
                }
                if self.failure_lines.len() == MAX_FAILURE_LINES {
                    self.failure_lines.remove(0);
                }
                self.failure_lines.push(line.to_owned());
            }
        }
    }

    pub fn into_failure_lines(self) -> Vec<String> {
        self.failure_lines
    }
}

/// Returns whether a line belongs to a Rust backtrace, such as "5: criterion::analysis::common",
/// "at src/lib.rs:1:2", or the closing note.
fn is_backtrace_line(text: &str) -> bool {
    let number = text.split_once(':').map(|(number, _)| number);
    number.is_some_and(|number| number.parse::<u32>().is_ok())
        || text.starts_with("at ")
        || text.starts_with("note: Some details are omitted")
}

/// Waits for the captured output of a process that has ended, for a limited time. The wait for
/// captured output has a timeout, because a descendant that outlives the bench may hold the stream
/// open.
pub fn wait_for_captured_output(stream: Option<Receiver<CapturedOutput>>) -> CapturedOutput {
    stream.and_then(|stream| stream.recv_timeout(OUTPUT_DRAIN_TIMEOUT).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure_lines_of_output(text: &str) -> Vec<String> {
        let mut lines = FailureLineCollector::default();
        text.lines().for_each(|line| lines.add_process_output_line(line));
        lines.into_failure_lines()
    }

    #[test]
    fn a_panic_message_is_shown_without_its_backtrace() {
        let panicked = "thread 'main' (7) panicked at src/lib.rs:1:2:\nBatch size is zero.\n";
        let trace = "stack backtrace:\n   0: std::panicking\n             at /rustc/x.rs:1:2\n  1: main\n\
                     note: Some details are omitted, run with `RUST_BACKTRACE=full`.\n";
        let hint =
            "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n";
        let message = ["thread 'main' (7) panicked at src/lib.rs:1:2:", "Batch size is zero."];
        for end in ["", trace, hint] {
            assert_eq!(
                failure_lines_of_output(&format!("Benchmarking a\n\n{panicked}{end}")),
                message
            );
        }
        assert_eq!(
            failure_lines_of_output(&format!("{panicked}{trace}error: a\nb")),
            ["error: a", "b"]
        );
        let twice = failure_lines_of_output(&format!(
            "{}{hint}{panicked}",
            panicked.replace("zero", "one")
        ));
        assert_eq!(twice, message);
        assert_eq!(failure_lines_of_output("1\n2\n3\n4\n5"), ["2", "3", "4", "5"]);
        let long: String = (0..9).map(|i| format!("line {i}\n")).collect();
        assert_eq!(failure_lines_of_output(&format!("{panicked}{long}"))[3], "line 1");
    }

    #[test]
    fn only_the_start_or_end_of_long_output_is_kept() {
        let flood: Vec<u8> =
            (0..3 * KEPT_BYTES_AT_STREAM_START).map(|i| (i / 1000) as u8).collect();
        let kept = |keep| {
            capture_stream_on_thread(std::io::Cursor::new(flood.clone()), keep).recv().unwrap()
        };
        let (start, end) =
            (kept(KeptPartOfOutput::KeepStreamStart), kept(KeptPartOfOutput::KeepStreamEnd));
        assert!(start.output_truncated && start.kept_bytes == flood[..KEPT_BYTES_AT_STREAM_START]);
        assert_eq!([start.stream_total_bytes, end.stream_total_bytes], [flood.len() as u64; 2]);
        assert!(
            end.output_truncated
                && end.kept_bytes == flood[flood.len() - KEPT_BYTES_AT_STREAM_END..]
        );
        let whole = capture_stream_on_thread(&b"all of it"[..], KeptPartOfOutput::KeepStreamStart)
            .recv()
            .unwrap();
        assert_eq!(
            whole,
            CapturedOutput {
                kept_bytes: b"all of it".to_vec(),
                output_truncated: false,
                stream_total_bytes: 9
            }
        );
    }
}
