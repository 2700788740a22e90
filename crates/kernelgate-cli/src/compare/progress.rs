//! What a person sees while a comparison runs: one line that changes on a terminal, plain lines
//! elsewhere.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use kernelgate::record::text::printable;

/// Prints to standard error. What it is given may be what others wrote, such as a bench process.
#[derive(Clone)]
pub struct ComparisonProgress {
    line: Option<ProgressBar>,
    /// What all of it is a part of; then only a line that changes tells details.
    within: Option<String>,
}

impl Default for ComparisonProgress {
    fn default() -> Self {
        let line = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner} {wide_msg}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner());
            let line = ProgressBar::new_spinner().with_style(style);
            line.enable_steady_tick(Duration::from_millis(200));
            line
        });
        Self { line, within: None }
    }
}

impl ComparisonProgress {
    /// For what is a part of something: its progress is a detail, after the label.
    pub fn within(&self, label: &str) -> Self {
        Self { line: self.line.clone(), within: Some(label.to_owned()) }
    }

    /// What is going on: replaces the line before on a terminal.
    pub fn now(&self, text: &str) {
        let text = printable(text);
        match (&self.line, &self.within) {
            (Some(line), None) => line.set_message(text.into_owned()),
            (None, None) => eprintln!("{text}"),
            (Some(line), Some(label)) => line.set_message(format!("{label}; {text}")),
            (None, Some(_)) => {}
        }
    }

    /// Something that stays to be read, unless it is a detail.
    pub fn detail(&self, text: &str) {
        match self.within {
            Some(_) => self.now(text),
            None => self.say(text),
        }
    }

    /// A detail that is only worth a line that changes.
    pub fn passing(&self, text: &str) {
        if let Some(line) = &self.line {
            line.set_message(printable(text).into_owned());
        }
    }

    /// Something that stays to be read.
    pub fn say(&self, text: &str) {
        let text = printable(text);
        match &self.line {
            Some(line) => line.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// No more.
    pub fn end(&self) {
        if let Some(line) = &self.line {
            line.finish_and_clear();
        }
    }
}

/// "1 h 5 min", "3 min", "40 s".
pub fn duration(duration: Duration) -> String {
    match duration.as_secs() {
        seconds if seconds < 100 => format!("{seconds} s"),
        seconds if seconds < 5400 => format!("{} min", seconds.div_ceil(60)),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// "90s", "5m", "1h", or plain seconds.
///
/// # Errors
/// When it is none of these.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, scale) = match text.strip_suffix(['s', 'm', 'h']) {
        Some(number) => (
            number,
            text.chars().last().map_or(1.0, |unit| {
                if unit == 's' {
                    1.0
                } else if unit == 'm' {
                    60.0
                } else {
                    3600.0
                }
            }),
        ),
        None => (text, 1.0),
    };
    let seconds = number
        .parse::<f64>()
        .ok()
        .map(|number| number * scale)
        .filter(|seconds| (0.01..1e7).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("`{text}`: a time is 90s, 5m or 1h"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_shown() {
        for (text, seconds) in
            [("90s", 90.0), ("5m", 300.0), ("1.5h", 5400.0), ("20", 20.0), ("0.05s", 0.05)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_secs_f64(seconds)));
        }
        for bad in ["", "m", "-5m", "0", "5d", "nan", "1e99"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
        let shown = [59, 150, 4000, 8000].map(|seconds| duration(Duration::from_secs(seconds)));
        assert_eq!(shown, ["59 s", "3 min", "67 min", "2 h 13 min"]);
    }
}
