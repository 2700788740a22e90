//! The deadline of a bench run's time budget, after which no further case begins.

use std::time::{Duration, Instant};

use jiff::Timestamp;

use crate::display::duration;
use crate::record::BenchProcessRun;
use crate::record::run::NOT_RUN_REASON_PREFIX;

/// The time at which the budget of a bench run ends.
#[derive(Debug, Clone, Copy)]
pub struct TimeBudgetDeadline {
    time_budget: Duration,
    budget_end: Instant,
}

impl TimeBudgetDeadline {
    /// Computes the deadline of a time budget of which `used` has already passed.
    pub fn from_budget_and_used_time(budget: Duration, used: Duration) -> TimeBudgetDeadline {
        Self { time_budget: budget, budget_end: Instant::now() + budget.saturating_sub(used) }
    }

    /// Why no further case begins; `None` while the budget has time left.
    pub fn reason_if_over(&self) -> Option<String> {
        let text = || {
            format!(
                "{NOT_RUN_REASON_PREFIX}the budget of {} is used up",
                duration::duration_text(self.time_budget)
            )
        };
        (Instant::now() >= self.budget_end).then(text)
    }
}

/// Time since the first of these runs began, because all benches of one `cargo bench` invocation
/// share a budget.
pub fn time_since_first_run_began(runs: &[BenchProcessRun]) -> Duration {
    let starts = runs.iter().filter_map(|run| run.start_time.parse::<Timestamp>().ok());
    let first = starts.min().map(|first| Timestamp::now().duration_since(first));
    first.and_then(|used| Duration::try_from(used).ok()).unwrap_or_default()
}
