//! Output and exit code of a process, for comparison with snapshots.

use std::process::Output;

use regex::Regex;

/// Output and exit code of a process.
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Outcome {
    /// Checks the exit code, and that no thread panicked.
    #[track_caller]
    pub fn exits(&self, code: i32) -> &Self {
        let all = self.all();
        assert_eq!(self.code, Some(code), "{all}");
        assert!(!all.contains("panicked at"), "{all}");
        self
    }

    /// Message of a process that ends with this code and prints nothing to standard output, for a
    /// snapshot.
    #[track_caller]
    pub fn refusal(&self, code: i32) -> String {
        self.exits(code);
        assert_eq!(self.stdout, "", "{}", self.stderr);
        normalized(self.stderr.trim())
    }

    /// Exit code and both output streams, for a snapshot.
    pub fn text(&self) -> String {
        let mut text = format!("exit {}\n", self.code.unwrap_or(-1));
        text += self.stdout.trim();
        if !self.stderr.trim().is_empty() {
            text += &format!("\n-- stderr\n{}", self.stderr.trim());
        }
        normalized(&text)
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|why| panic!("{why}: {}", self.all()))
    }

    /// Both output streams.
    pub fn all(&self) -> String {
        format!("{}\n{}", self.stdout, self.stderr)
    }
}

/// Replaces the parts of a text that differ from run to run: temporary folders, dates, commits,
/// measured numbers, the machine, and the lines of Cargo.
pub fn normalized(text: &str) -> String {
    [
        (r"(/[\w.+-]+)*/\.tmp\w{6}\b", "FOLDER"),
        (r"(?m)^ +(Compiling|Finished|Running|Executable|Locking|Blocking|Adding) .*(\n|$)", ""),
        (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "INSTANT"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "DATE"),
        (r"\d{4}-\d\d-\d\d", "DAY"),
        (r"(?m)^(cpu|simd|memory|load|governor|library|gpu|kernels|tool|counters|setting) .*(\n {2,}.*)*", "$1 HERE"),
        (r"[^\n,\x22:]+, \d+ cores, \d+ threads", "DEVICE"),
        (r"INSTANT, [^\n]*, \d+ threads", "INSTANT, DEVICE"),
        (r"(?m)^DEVICE; host \w+", "DEVICE; host HOST"),
        (r"worst at [^\n]*", "worst at PLACE"),
        (r"merged-[0-9a-f]{8}", "merged-HASH"),
        (r"baselines/[\w.-]+/", "baselines/DEVICE/"),
        (r"[\w.-]+/(a|main)\b", "DEVICE/$1"),
        (r"\b[0-9a-f]{16,64}\b", "HASH"),
        (r"\b\d+(\.\d+)? (ns|µs|ms|s|%|GB/s|MB/s|kB/s|kB|MB|GB|GFLOP/s|MFLOP/s)\b", "N $2"),
        (r"±\s*\d+(\.\d+)?%", "±N%"),
        (r"\d+\.\d+e-?\d+", "N"),
        (r"(\S) {2,}", "$1  "),
        (r"-{2,}", "--"),
    ]
    .iter()
    .fold(text.to_owned(), |text, (from, to)| {
        Regex::new(from).unwrap().replace_all(&text, *to).into_owned()
    })
}
