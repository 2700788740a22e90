//! From blocks to verdicts.

use super::{Observed, Outcome, Plan};

/// Decides what the blocks so far allow to decide.
pub fn decide(cases: &Observed, plan: &Plan, last: bool) -> Outcome {
    let _ = (cases, plan, last);
    Outcome { decisions: Vec::new(), undecided: Vec::new(), null_fired: Vec::new(), environment_sound: true }
}
