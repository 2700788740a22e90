//! Output and exit code of a process, for comparison with snapshots.

use std::process::Output;
use std::sync::LazyLock;

use regex::{Captures, Regex};

/// Output and exit code of a process.
pub struct ProcessOutcome {
    pub exit_code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for ProcessOutcome {
    fn from(output: Output) -> Self {
        Self {
            exit_code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl ProcessOutcome {
    /// Checks the exit code, and that no thread panicked.
    #[track_caller]
    pub fn assert_exit(&self, code: i32) -> &Self {
        let all = self.stdout_and_stderr();
        assert_eq!(self.exit_code, Some(code), "{all}");
        assert!(!all.contains("panicked at"), "{all}");
        self
    }

    /// Message of a process that ends with this code and prints nothing to standard output, for a
    /// snapshot.
    #[track_caller]
    pub fn refusal_message(&self, code: i32) -> String {
        self.assert_exit(code);
        assert_eq!(self.stdout, "", "{}", self.stderr);
        redact_varying_parts(self.stderr.trim())
    }

    /// Error message of a process that ends with this code, without the lines about its progress
    /// before it and those of Cargo after it, for a snapshot.
    #[track_caller]
    pub fn error_message(&self, code: i32) -> String {
        let is_of_cargo = |line: &&str| line.starts_with("error: bench failed");
        let lines = self.assert_exit(code).stderr.lines().take_while(|line| !is_of_cargo(line));
        let lines: Vec<&str> = lines.collect();
        let is_first = |line: &&str| line.starts_with("error: ") || line.starts_with("refused: ");
        let from = lines.iter().position(is_first);
        let from = from.unwrap_or_else(|| panic!("no error: {}", self.stdout_and_stderr()));
        redact_varying_parts(lines[from..].join("\n").trim())
    }

    /// Exit code and both output streams, for a snapshot.
    pub fn text_for_snapshot(&self) -> String {
        let mut text = format!("exit {}\n", self.exit_code.unwrap_or(-1));
        text += self.stdout.trim();
        if !self.stderr.trim().is_empty() {
            text += &format!("\n-- stderr\n{}", self.stderr.trim());
        }
        redact_varying_parts(&text)
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn stdout_as_json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|why| panic!("{why}: {}", self.stdout_and_stderr()))
    }

    /// Cases of a list, of verifications, verdicts or runs as JSON, in its order.
    #[track_caller]
    pub fn json_case_ids(&self) -> Vec<String> {
        fn collect_case_ids(value: &serde_json::Value, found: &mut Vec<String>) {
            match value {
                serde_json::Value::Array(values) => {
                    values.iter().for_each(|it| collect_case_ids(it, found))
                }
                serde_json::Value::Object(fields) => {
                    if let Some(case) = fields.get("case").and_then(|case| case.as_str()) {
                        found.push(case.to_owned());
                    } else if let Some(cases) = fields.get("cases").and_then(|it| it.as_object()) {
                        found.extend(cases.keys().cloned());
                    } else {
                        fields.values().for_each(|it| collect_case_ids(it, found));
                    }
                }
                _ => {}
            }
        }
        let mut found = Vec::new();
        collect_case_ids(&self.stdout_as_json(), &mut found);
        found
    }

    /// Verdicts of the report of a gate or comparison as JSON, in its order.
    #[track_caller]
    pub fn json_verdicts(&self) -> Vec<String> {
        let rows = self.stdout_as_json()["judged"].take();
        let verdicts = rows.as_array().unwrap().iter().map(|row| row["verdict"].as_str().unwrap());
        verdicts.map(str::to_owned).collect()
    }

    /// Both output streams.
    pub fn stdout_and_stderr(&self) -> String {
        format!("{}\n{}", self.stdout, self.stderr)
    }
}

/// Parts of texts that differ from run to run, and what replaces them.
static VARYING_PARTS_WITH_PLACEHOLDERS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    let pairs = [
        (r"(/[\w.+�-]+)*/\.tmp\w{6}\b", "FOLDER"),
        (r"\.kernelgate-\w{6}\b", ".kernelgate-TEMPORARY"),
        (r"\b0x[0-9a-f]{6,}", "ADDRESS"),
        (r"\.rs:\d+(:\d+)?", ".rs:LINE"),
        (r"(Gnuplot not found|took \d|Blocking waiting)[^\n]*(\n|$)", ""),
        (r"\n?Warning: It is not recommended to reduce nresamples[^\n]*(\n|$)", ""),
        (r" *(Compiling \S+ v\d|Finished `|Running (benches|src|unittests)\b)[^\n]*(\n|$)", ""),
        (r"[^\n]*co-running processes[^\n]*(\n|$)", ""),
        (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "INSTANT"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "DATE"),
        (r"\d{4}-\d\d-\d\d", "DAY"),
        (r"\b\d{8}T\d{6}Z-\d+", "SESSION"),
        (
            r"(?m)^(cpu|simd|memory|load|governor|library|gpu|kernels|tool|counters|setting) .*(\n {2,}.*)*",
            "$1 HERE",
        ),
        (r"[^\n,\x22:]+, \d+ cores, \d+ threads", "DEVICE"),
        (r"on cpu \([^\n]*, \d+ threads\)", "on cpu (DEVICE)"),
        (r"for [\w.-]+ in FOLDER", "for DEVICE in FOLDER"),
        (r"INSTANT, [^\n]*, \d+ threads", "INSTANT, DEVICE"),
        (r"(?m)^DEVICE; host \w+", "DEVICE; host HOST"),
        (r"worst at [^\n\x22]*", "worst at PLACE"),
        (r"thread 'main' \(\d+\)", "thread 'main'"),
        (r"merged-[0-9a-f]{8}", "merged-HASH"),
        (r"baselines/[\w.-]+/", "baselines/DEVICE/"),
        (r"[\w.-]+/(a|main)\b", "DEVICE/$1"),
        (r"\b[0-9a-f]{12}\b", "COMMIT"),
        (r"(HEAD|working tree|COMMIT) \([0-9a-f]{8}\)", "$1 (COMMIT)"),
        (r"\b[0-9a-f]{8}\+changes", "COMMIT+changes"),
        (r"-?\d+\.\d{9,}", "N"),
        (r"\b[0-9a-f]{16,64}\b", "HASH"),
        (
            r"((within|after) )?\b\d+(\.\d+)? (ns|µs|ms|s|%|GB/s|MB/s|kB/s|kB|MB|GB|GFLOP/s|MFLOP/s)\b",
            "${1}N $4",
        ),
        (r"±\s*\d+(\.\d+)?%", "±N%"),
        // Under load, a time that is usually microseconds may be measured in nanoseconds or
        // milliseconds, so its unit is replaced.
        (r"\bN (ns|ms)(\s+±)", "N µs$2"),
        (r"\d+\.\d+e-?\d+", "N"),
        (r"(\S) {2,}", "$1  "),
        (r"-{2,}", "--"),
    ];
    pairs.map(|(from, to)| (Regex::new(from).unwrap(), to)).into()
});

/// Replaces the parts of a text that differ from run to run: temporary folders, dates, commits,
/// measured numbers, the machine, its load, and lines of Cargo and Criterion.
pub fn redact_varying_parts(text: &str) -> String {
    // Two kinds of numbers are kept: limits in whole seconds, which are not measured, and the
    // largest 64-bit number.
    let is_limit = |it: &str| it.starts_with(['w', 'a']) && it.ends_with(" s") && !it.contains('.');
    let is_kept = |it: &str| is_limit(it) || it == u64::MAX.to_string();
    // The length of the temporary folder's path decides where a long command line is wrapped, so
    // the wrapping is removed.
    let text = text.replace(" \\\n  ", " ");
    VARYING_PARTS_WITH_PLACEHOLDERS.iter().fold(text, |text, (from, to)| {
        let replaced = |found: &Captures<'_>| {
            let mut replaced = String::new();
            found.expand(to, &mut replaced);
            if is_kept(&found[0]) { found[0].to_owned() } else { replaced }
        };
        from.replace_all(&text, replaced).into_owned()
    })
}
