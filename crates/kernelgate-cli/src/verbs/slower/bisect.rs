//! `kernelgate bisect`: finds the first slower commit, by paired comparisons.

use std::time::Duration;

use crate::bisect::{self, Bisection, BisectionRequest, SearchEnd};
use crate::compare::progress::parse_duration;
use crate::compare::{ComparisonRequest, PlanBasis, SideSource};
use crate::report;
use crate::verbs::shared::comparison::ComparisonFlags;
use crate::verbs::shared::output::{OutputFormat, print_json};
use crate::verbs::shared::refusal::Refusal;
use crate::verbs::shared::settings::refuse_injected_changes;
use kernelgate::display::terminal;
use kernelgate::exit::ExitReason;
use kernelgate::record::BaselineStore;
use kernelgate::record::text::printable_on_terminal;

#[derive(Debug, clap::Args)]
pub struct BisectArguments {
    /// Id of the case
    case: String,
    /// Revision at which the case was not slow
    #[arg(long, value_name = "REV")]
    good: String,
    /// Revision at which the case is slow; a descendant of the good one
    #[arg(long, value_name = "REV", default_value = "HEAD")]
    bad: String,
    /// Time limit of the first comparison of a commit; a second and a third, if needed, take twice
    /// and four times as long
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    budget: Duration,
    #[command(flatten)]
    flags: ComparisonFlags,
    /// Continue the last search, which was interrupted
    #[arg(long)]
    resume: bool,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

pub fn run(arguments: &BisectArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    refuse_injected_changes()?;
    let basis = PlanBasis::Calibration(store.clone());
    let folder = store.work.join("bisect");
    let comparison = ComparisonRequest {
        base: SideSource::Revision(arguments.good.clone()),
        head: SideSource::Revision(arguments.bad.clone()),
        ..arguments.flags.request(store, basis, arguments.budget, folder)?
    };
    let request = BisectionRequest {
        good: arguments.good.clone(),
        bad: arguments.bad.clone(),
        case: arguments.case.clone(),
        comparison,
        resume: arguments.resume,
    };
    let found = bisect::run(&request).map_err(Refusal::or_error)?;
    let text = report::bisection::text(&found);
    match arguments.format {
        OutputFormat::Json => print_json(&found)?,
        OutputFormat::Text => terminal::print_wrapped(&printable_on_terminal(&text)),
        OutputFormat::Markdown => println!("{}", report::bisection::markdown(&text)),
    }
    Ok(bisection_exit(&found))
}

/// The exit code: success if one commit was found and confirmed; a search that cannot name one is
/// inconclusive.
fn bisection_exit(bisection: &Bisection) -> ExitReason {
    match &bisection.ended {
        SearchEnd::Found(found)
            if found.is_confirmed() && found.last_good + 1 == found.first_bad =>
        {
            ExitReason::Fine
        }
        SearchEnd::Found(_) | SearchEnd::EndsUndecided(_) => ExitReason::Inconclusive,
        SearchEnd::NoDifference(_) | SearchEnd::EndUnusable(_) => ExitReason::Refused,
    }
}
