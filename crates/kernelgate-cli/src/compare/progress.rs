//! Shows the progress of a comparison on standard error: on a terminal one line that is updated in
//! place, elsewhere plain lines.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

pub use kernelgate::display::duration::{duration_text as duration, parse as parse_duration};
use kernelgate::record::text::clean_message_for_terminal;

/// Without a terminal, a progress text that changes often is printed at most once in this time.
const MIN_INTERVAL_OF_PROGRESS_LINES: Duration = Duration::from_secs(15);

/// Prints a comparison's progress to standard error, without control characters, because a text may
/// come from another program such as a bench process.
#[derive(Clone)]
pub struct ComparisonProgressDisplay {
    progress_line: Option<ProgressBar>,
    /// Label of the larger task (such as a calibration) that this comparison is part of; with a
    /// label, details appear only in the line that is updated in place.
    label_of_larger_task: Option<String>,
    /// Lines that [`print_line_once`](Self::print_line_once) has printed, so that they are not
    /// printed again.
    lines_printed_once: Arc<Mutex<BTreeSet<String>>>,
    /// Time at which the progress display last showed the current step.
    last_step_time: Arc<Mutex<Option<Instant>>>,
}

impl Default for ComparisonProgressDisplay {
    fn default() -> Self {
        let line = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner} {wide_msg}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner());
            let line = ProgressBar::new_spinner().with_style(style);
            line.enable_steady_tick(Duration::from_millis(200));
            line
        });
        Self {
            progress_line: line,
            label_of_larger_task: None,
            lines_printed_once: Arc::default(),
            last_step_time: Arc::default(),
        }
    }
}

impl ComparisonProgressDisplay {
    /// Returns a display for one part of a larger task: its details appear only in the line that is
    /// updated in place, after the label.
    pub fn for_part_of_task(&self, label: &str) -> Self {
        Self { label_of_larger_task: Some(label.to_owned()), ..self.clone() }
    }

    /// Shows the current step: on a terminal it replaces the previous step, elsewhere it is printed
    /// as a line.
    pub fn show_current_step(&self, text: &str) {
        *self.last_step_time.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        let text = clean_message_for_terminal(text);
        match (&self.progress_line, &self.label_of_larger_task) {
            (Some(line), None) => line.set_message(text.into_owned()),
            (None, None) => eprintln!("{text}"),
            (Some(line), Some(label)) => line.set_message(format!("{label}; {text}")),
            (None, Some(_)) => {}
        }
    }

    /// Prints a detail as a line that stays on the terminal, or only as the current step if the
    /// comparison is part of a larger task.
    pub fn print_detail(&self, text: &str) {
        match self.label_of_larger_task {
            Some(_) => self.show_current_step(text),
            None => self.print_line(text),
        }
    }

    /// Shows a step that changes often: on a terminal always, elsewhere at most every 15 s.
    pub fn show_frequent_step(&self, text: &str) {
        let latest = *self.last_step_time.lock().unwrap_or_else(PoisonError::into_inner);
        if self.progress_line.is_some()
            || latest.is_none_or(|at| at.elapsed() >= MIN_INTERVAL_OF_PROGRESS_LINES)
        {
            self.show_current_step(text);
        }
    }

    /// Prints a line above the progress line; the printed line stays.
    pub fn print_line(&self, text: &str) {
        let text = clean_message_for_terminal(text);
        match &self.progress_line {
            Some(line) => line.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Prints a line above the progress line unless an equal line was printed before.
    pub fn print_line_once(&self, text: &str) {
        let mut said = self.lines_printed_once.lock().unwrap_or_else(PoisonError::into_inner);
        if said.insert(text.to_owned()) {
            self.print_line(text);
        }
    }

    pub fn clear_progress_line(&self) {
        if let Some(line) = &self.progress_line {
            line.finish_and_clear();
        }
    }
}
