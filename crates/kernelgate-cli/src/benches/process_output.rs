//! Output of a process: read to its end, so that the process never blocks, and kept up to a limit,
//! so that it costs neither memory nor disk.

use std::io::Read;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// Bytes at the end of a stream that are kept.
const KEPT_END_BYTES: usize = 1 << 16;
/// Bytes at the start of a stream that are kept.
pub const KEPT_START_BYTES: usize = 8 << 20;
/// Time in which the rest of the output must arrive once the process has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Which part of a process's output stream is kept.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum KeptOutput {
    /// Keep the first [`KEPT_START_BYTES`] of the stream.
    Start,
    /// Keep about the last 64 KiB of the stream.
    End,
}

/// The captured text of a stream that has ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CapturedText {
    /// The captured bytes.
    pub kept: Vec<u8>,
    /// Whether the stream had more bytes than were captured.
    pub cut: bool,
    /// Length of the stream.
    pub bytes: u64,
}

/// Reads a stream to its end on a thread of its own.
pub fn drain_on_thread(
    mut stream: impl Read + Send + 'static,
    keep: KeptOutput,
) -> Receiver<CapturedText> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut all, mut piece) = (CapturedText::default(), vec![0; KEPT_END_BYTES]);
        while let Ok(count @ 1..) = stream.read(&mut piece) {
            all.bytes += count as u64;
            match keep {
                KeptOutput::Start => {
                    let room = KEPT_START_BYTES.saturating_sub(all.kept.len());
                    all.kept.extend_from_slice(&piece[..count.min(room)]);
                    all.cut |= count > room;
                }
                KeptOutput::End => {
                    all.kept.extend_from_slice(&piece[..count]);
                    let over = all.kept.len().saturating_sub(KEPT_END_BYTES);
                    all.kept.drain(..over);
                    all.cut |= over > 0;
                }
            }
        }
        // Sending fails if the stream was held open for longer than the receiver waited.
        let _ = sender.send(all);
    });
    receiver
}

/// Number of lines of a failed process's output that are shown.
const SHOWN_LINES: usize = 4;

/// Lines of a process's output that explain its failure: the message of its last panic without the
/// backtrace, or its last lines if it did not panic or printed more afterwards.
#[derive(Default)]
pub struct FailureLines {
    lines: Vec<String>,
    place: OutputSection,
}

/// Section of a failed process's output, such as its backtrace.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum OutputSection {
    /// Output before any panic.
    #[default]
    Ordinary,
    /// Message of a panic.
    Message,
    /// Text after the message: backtrace and notes of the runtime.
    Backtrace,
}

impl FailureLines {
    /// Adds the next line.
    pub fn push(&mut self, line: &str) {
        let text = line.trim();
        if text.is_empty() {
            return;
        }
        if text.starts_with("thread '") && text.contains(" panicked at ") {
            (self.place, self.lines) = (OutputSection::Message, vec![line.to_owned()]);
            return;
        }
        let starts_trace = text == "stack backtrace:" || text.starts_with("note: run with `RUST_B");
        match self.place {
            OutputSection::Message | OutputSection::Backtrace if starts_trace => {
                self.place = OutputSection::Backtrace
            }
            // The start of a message is more informative than its end.
            OutputSection::Message if self.lines.len() == SHOWN_LINES => {}
            OutputSection::Backtrace if is_backtrace_line(text) => {}
            _ => {
                if self.place == OutputSection::Backtrace {
                    self.place = OutputSection::Ordinary;
                    self.lines.clear();
                }
                if self.lines.len() == SHOWN_LINES {
                    self.lines.remove(0);
                }
                self.lines.push(line.to_owned());
            }
        }
    }

    pub fn into_lines(self) -> Vec<String> {
        self.lines
    }
}

/// Returns whether a line belongs to a backtrace: "5: criterion::analysis::common", "at
/// src/lib.rs:1:2", or the note at its end.
fn is_backtrace_line(text: &str) -> bool {
    let number = text.split_once(':').map(|(number, _)| number);
    number.is_some_and(|number| number.parse::<u32>().is_ok())
        || text.starts_with("at ")
        || text.starts_with("note: Some details are omitted")
}

/// Waits for the captured output of a process that has ended. The wait for the output is limited,
/// because processes that the bench left behind may hold its streams open.
pub fn wait_for_captured_text(stream: Option<Receiver<CapturedText>>) -> CapturedText {
    stream.and_then(|stream| stream.recv_timeout(DRAIN_TIMEOUT).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure_lines(text: &str) -> Vec<String> {
        let mut lines = FailureLines::default();
        text.lines().for_each(|line| lines.push(line));
        lines.into_lines()
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
            assert_eq!(failure_lines(&format!("Benchmarking a\n\n{panicked}{end}")), message);
        }
        assert_eq!(failure_lines(&format!("{panicked}{trace}error: a\nb")), ["error: a", "b"]);
        let twice = failure_lines(&format!("{}{hint}{panicked}", panicked.replace("zero", "one")));
        assert_eq!(twice, message);
        assert_eq!(failure_lines("1\n2\n3\n4\n5"), ["2", "3", "4", "5"]);
        let long: String = (0..9).map(|i| format!("line {i}\n")).collect();
        assert_eq!(failure_lines(&format!("{panicked}{long}"))[3], "line 1");
    }

    #[test]
    fn only_the_start_or_the_end_of_a_long_output_is_kept() {
        let flood: Vec<u8> = (0..3 * KEPT_START_BYTES).map(|i| (i / 1000) as u8).collect();
        let kept =
            |keep| drain_on_thread(std::io::Cursor::new(flood.clone()), keep).recv().unwrap();
        let (start, end) = (kept(KeptOutput::Start), kept(KeptOutput::End));
        assert!(start.cut && start.kept == flood[..KEPT_START_BYTES]);
        assert_eq!([start.bytes, end.bytes], [flood.len() as u64; 2]);
        assert!(end.cut && end.kept == flood[flood.len() - KEPT_END_BYTES..]);
        let whole = drain_on_thread(&b"all of it"[..], KeptOutput::Start).recv().unwrap();
        assert_eq!(whole, CapturedText { kept: b"all of it".to_vec(), cut: false, bytes: 9 });
    }
}
