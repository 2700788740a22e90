//! The deadline of a time budget, after which no case begins.

use std::time::{Duration, Instant};

use jiff::Timestamp;

use crate::display::duration;
use crate::record::ProcessRun;
use crate::record::run::NOT_RUN_PREFIX;

/// The time at which a budget ends.
#[derive(Debug, Clone, Copy)]
pub struct TimeBudgetDeadline {
    budget: Duration,
    end: Instant,
}

impl TimeBudgetDeadline {
    /// The deadline of a budget of which `used` has passed already.
    pub fn after_budget(budget: Duration, used: Duration) -> TimeBudgetDeadline {
        Self { budget, end: Instant::now() + budget.saturating_sub(used) }
    }

    /// Reason why no further case begins; `None` while there is time left.
    pub fn passed_reason(&self) -> Option<String> {
        let text = || {
            format!(
                "{NOT_RUN_PREFIX}the budget of {} is used up",
                duration::duration_text(self.budget)
            )
        };
        (Instant::now() >= self.end).then(text)
    }
}

/// Time since the first of these runs began: benches of one `cargo bench` share a budget.
pub fn time_since_first_bench(runs: &[ProcessRun]) -> Duration {
    let starts = runs.iter().filter_map(|run| run.started.parse::<Timestamp>().ok());
    let first = starts.min().map(|first| Timestamp::now().duration_since(first));
    first.and_then(|used| Duration::try_from(used).ok()).unwrap_or_default()
}
