//! `kernelgate bisect`: finds the first slower commit between two revisions by comparing builds.

use std::time::Duration;

use crate::bisect::{self, BisectionEnd, BisectionRequest, BisectionResult};
use crate::compare::progress::parse_duration;
use crate::compare::{BuildComparisonRequest, ComparedSideSource, TestPlanBasis};
use crate::report;
use crate::verbs::shared::comparison::ComparisonCommandFlags;
use crate::verbs::shared::output::{OutputFormat, print_as_json};
use crate::verbs::shared::refusal::RefusalToCompare;
use crate::verbs::shared::settings::refuse_injection_variables_of_user;
use kernelgate::display::terminal;
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::RecordFoldersOfPackage;
use kernelgate::record::text::clean_message_for_terminal;

#[derive(Debug, clap::Args)]
pub struct BisectCommandArguments {
    /// Id of the case
    #[arg(id = "case", value_name = "CASE")]
    case_id: String,
    /// Revision at which the case was not slow yet
    #[arg(id = "good", long = "good", value_name = "REV")]
    good_revision: String,
    /// Revision at which the case is slow; a descendant of the good revision
    #[arg(id = "bad", long = "bad", value_name = "REV", default_value = "HEAD")]
    slow_revision: String,
    /// Time limit of the first comparison of a commit; a second and a third comparison, if needed,
    /// may take twice and four times as long
    #[arg(long = "budget", value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    first_comparison_time_limit: Duration,
    #[command(flatten)]
    flags: ComparisonCommandFlags,
    /// Continue the last search, which was interrupted
    #[arg(id = "resume", long = "resume")]
    resumes_bisection: bool,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

pub fn run_bisect_command(
    arguments: &BisectCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    refuse_injection_variables_of_user()?;
    let basis = TestPlanBasis::CalibrationOfDevice(store.clone());
    let folder = store.generated_files_folder.join("bisect");
    let comparison = BuildComparisonRequest {
        base: ComparedSideSource::GitRevision(arguments.good_revision.clone()),
        head: ComparedSideSource::GitRevision(arguments.slow_revision.clone()),
        ..arguments.flags.self_comparison_request(
            store,
            basis,
            arguments.first_comparison_time_limit,
            folder,
        )?
    };
    let request = BisectionRequest {
        good_revision: arguments.good_revision.clone(),
        bad_revision: arguments.slow_revision.clone(),
        case_id: arguments.case_id.clone(),
        comparison,
        resume_interrupted_bisection: arguments.resumes_bisection,
    };
    let found = bisect::bisect_slowdown(&request).map_err(RefusalToCompare::from_compare_error)?;
    let text = report::bisection::bisection_report_text(&found);
    match arguments.format {
        OutputFormat::Json => print_as_json(&found)?,
        OutputFormat::Text => {
            terminal::print_broken_to_terminal_width(&clean_message_for_terminal(&text))
        }
        OutputFormat::Markdown => {
            println!("{}", report::bisection::report_as_markdown_code_block(&text))
        }
    }
    Ok(exit_reason_of_bisection(&found))
}

/// The exit code of a bisection: success if one commit was found and confirmed; inconclusive if no
/// single commit could be confirmed.
fn exit_reason_of_bisection(bisection: &BisectionResult) -> ProcessExitReason {
    match &bisection.bisection_end {
        BisectionEnd::SlowdownFound(found)
            if found.is_slowdown_confirmed()
                && found.last_good_position + 1 == found.first_bad_position =>
        {
            ProcessExitReason::Success
        }
        BisectionEnd::SlowdownFound(_) | BisectionEnd::GoodAndBadEndUndecided(_) => {
            ProcessExitReason::Inconclusive
        }
        BisectionEnd::BadEndNotSlower(_) | BisectionEnd::BadEndUnmeasurable(_) => {
            ProcessExitReason::ResultsNotComparable
        }
    }
}
