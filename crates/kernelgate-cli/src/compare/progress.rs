//! Shows the progress of a comparison: one line that changes on a terminal, plain lines elsewhere.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

pub use kernelgate::display::duration::{duration_text as duration, parse as parse_duration};
use kernelgate::record::text::printable_on_terminal;

/// Time between lines that stay, for text that changes often.
const PROGRESS_LINE_INTERVAL: Duration = Duration::from_secs(15);

/// Prints to standard error. A progress text may come from other programs, such as a bench process.
#[derive(Clone)]
pub struct ComparisonProgress {
    line: Option<ProgressBar>,
    /// Label of the task of which this progress is a part; with a label, details are shown only in
    /// the line that is updated in place.
    within: Option<String>,
    /// Lines that were printed once and are not printed again.
    said: Arc<Mutex<BTreeSet<String>>>,
    /// Time at which the last progress line was printed.
    latest: Arc<Mutex<Option<Instant>>>,
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
        Self { line, within: None, said: Arc::default(), latest: Arc::default() }
    }
}

impl ComparisonProgress {
    /// Progress of a part of a task: it is shown as a detail, after the label.
    pub fn progress_of_part(&self, label: &str) -> Self {
        Self { within: Some(label.to_owned()), ..self.clone() }
    }

    /// Shows the current step, which replaces the line before on a terminal.
    pub fn show_step(&self, text: &str) {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        let text = printable_on_terminal(text);
        match (&self.line, &self.within) {
            (Some(line), None) => line.set_message(text.into_owned()),
            (None, None) => eprintln!("{text}"),
            (Some(line), Some(label)) => line.set_message(format!("{label}; {text}")),
            (None, Some(_)) => {}
        }
    }

    /// Prints a line that stays on the terminal, unless details are silenced.
    pub fn detail(&self, text: &str) {
        match self.within {
            Some(_) => self.show_step(text),
            None => self.say(text),
        }
    }

    /// Progress that changes often: without a terminal, a line comes at most every 15 s.
    pub fn print_often(&self, text: &str) {
        let latest = *self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if self.line.is_some() || latest.is_none_or(|at| at.elapsed() >= PROGRESS_LINE_INTERVAL) {
            self.show_step(text);
        }
    }

    /// Prints a line above the progress bar.
    pub fn say(&self, text: &str) {
        let text = printable_on_terminal(text);
        match &self.line {
            Some(line) => line.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Prints a line unless it was printed before.
    pub fn print_once(&self, text: &str) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.insert(text.to_owned()) {
            self.say(text);
        }
    }

    pub fn end_progress_line(&self) {
        if let Some(line) = &self.line {
            line.finish_and_clear();
        }
    }
}
