//! The deadline of a time budget, after which no case begins.

use std::path::Path;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use crate::display::duration;
use crate::record::run::NOT_RUN_PREFIX;
use crate::record::{ProcessRun, file};

/// The time at which a budget ends.
#[derive(Debug, Clone, Copy)]
pub struct TimeBudgetDeadline {
    budget: Duration,
    end: Instant,
}

impl TimeBudgetDeadline {
    /// The deadline of a budget of which `used` has passed already.
    pub fn deadline_after(budget: Duration, used: Duration) -> Self {
        Self { budget, end: Instant::now() + budget.saturating_sub(used) }
    }

    /// Why nothing more begins; none while there is time.
    pub fn passed_reason(&self) -> Option<String> {
        let text =
            || format!("{NOT_RUN_PREFIX}the budget of {} is used up", duration::text(self.budget));
        (Instant::now() >= self.end).then(text)
    }
}

/// Time since the first bench of an invocation began to run, by the records in its session's
/// folder: benches of one `cargo bench` share a budget.
pub fn time_since_first_bench(invocation: &str, folder: &Path) -> Duration {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let runs = files.filter_map(|entry| file::read::<ProcessRun>(&entry.path()).ok());
    let of_it = runs.filter(|run| run.invocation.as_deref() == Some(invocation));
    let starts = of_it.filter_map(|run| run.started.parse::<Timestamp>().ok());
    let first = starts.min().map(|first| Timestamp::now().duration_since(first));
    first.and_then(|used| Duration::try_from(used).ok()).unwrap_or_default()
}
