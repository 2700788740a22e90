//! Which cases a verb is about, and going through them.

use std::time::Duration;

use kernelgate::harness::HarnessError;
use kernelgate::harness::cases::{self, Case, Group, Selection};
use kernelgate::harness::filter::Filter;
use kernelgate::harness::place::{BackendName, DEFAULT_TIMEOUT_S, Place, Wanted};
use kernelgate::harness::problem::{Ready, Setback};
use kernelgate::suite::Suite;
use kernelgate::workload::{Effort, Override};

/// Which cases a verb is about.
#[derive(Debug, clap::Args)]
pub struct Choice {
    /// Only cases whose id matches this regular expression
    pub filter: Option<String>,
    /// Which cases: quick and default are the same handful, thorough is the whole sweep
    #[arg(long, env = "KERNELGATE_EFFORT", value_enum, default_value = "default")]
    pub effort: kernelgate::harness::args::EffortName,
    /// Replace an axis' values, for example --axis s=512,777 (repeatable)
    #[arg(long, env = "KERNELGATE_AXIS", value_name = "AXIS=VALUE[,VALUE]", value_delimiter = ' ')]
    pub axis: Vec<Override>,
    /// Where to run: auto is the GPU if there is one, else the CPU
    #[arg(long, env = "KERNELGATE_BACKEND", value_enum, default_value = "auto")]
    pub backend: BackendName,
    /// Which GPU, counted from 0
    #[arg(long, env = "KERNELGATE_DEVICE", value_name = "NUMBER")]
    pub device: Option<usize>,
}

impl Choice {
    /// Where the cases would run.
    pub const fn wanted(&self) -> Wanted {
        Wanted { backend: self.backend, device: self.device, patience: Duration::from_secs(DEFAULT_TIMEOUT_S) }
    }

    /// The selection among these suites. A filter that matches no default case is tried on the whole sweep.
    pub fn select<'a>(&self, suites: &'a [Box<dyn Suite>], place: &Place) -> Result<Selection<'a>, HarnessError> {
        let all = || suites.iter().map(AsRef::as_ref);
        cases::check_overrides(all(), &self.axis)?;
        let filter = Filter::parse(self.filter.as_deref(), false)?;
        let selection = cases::select(all(), self.effort.into(), place, &self.axis, &filter)?;
        if !selection.matched_nothing() {
            return Ok(selection);
        }
        let selection = cases::select(all(), Effort::Thorough, place, &self.axis, &filter)?;
        if selection.matched_nothing() {
            return Err(match filter.text() {
                Some(text) => cases::nothing_matches(text, all()),
                None => cases::nothing_has(&self.axis),
            });
        }
        Ok(selection)
    }
}

/// What came of each case, by its id.
pub type Outcomes<T> = Vec<(String, Result<T, Setback>)>;

/// Goes through a selection, one case an implementation (what is right hot is right cold, and has the same kernels), then through what
/// was skipped: what came of each case, and whether the GPU was lost, after which nothing runs any more.
///
/// # Errors
/// Those of `one`.
pub fn each_implementation<T>(
    selection: &Selection<'_>,
    seed: u64,
    doing: &str,
    mut one: impl FnMut(&Group<'_>, &Case, &Ready) -> anyhow::Result<Result<T, Setback>>,
) -> anyhow::Result<(Outcomes<T>, bool)> {
    let mut outcomes = Vec::new();
    let mut lost: Option<String> = None;
    for group in &selection.groups {
        let ready = match &lost {
            Some(lost) => Err(Setback::Fail(lost.clone())),
            None => Ready::new(group, seed),
        };
        for case in group.cases.chunk_by(|a, b| a.index == b.index).map(|cases| &cases[0]) {
            let outcome = match (&ready, &lost) {
                (_, Some(lost)) => Err(Setback::Fail(lost.clone())),
                (Err(setback), None) => Err(setback.clone()),
                (Ok(ready), None) => {
                    eprintln!("{doing} {}", case.id);
                    one(group, case, ready)?
                }
            };
            if matches!(outcome, Err(Setback::Lost(_))) {
                lost = Some(format!("not run: {} lost the GPU", case.id));
            }
            outcomes.push((case.id.clone(), outcome));
        }
    }
    let skipped = selection.skipped.iter().map(|(id, reason)| (id.clone(), Err(Setback::Skip(reason.clone()))));
    outcomes.extend(skipped);
    Ok((outcomes, lost.is_some()))
}
