//! `kernelgate compare`: compares two builds, whose processes are interleaved until every case is
//! decided.

use kernelgate::record::text::{printable_on_terminal, printable_path};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;

use super::resources::check_architecture_name;
use super::verdict::{VerdictFormat, VerdictOutput};
use crate::compare::progress::parse_duration;
use crate::compare::{self, ComparisonOutcome, ComparisonRequest, PlanBasis, SideSource};
use crate::gate::rules::rules_file::MAX_RULE_RATIO;
use crate::report::formats::metrics;
use crate::report::{comparison, verdicts};
use crate::verbs::shared::comparison::ComparisonFlags;
use crate::verbs::shared::output::{arguments_of_process, print_json, shell_command_line};
use crate::verbs::shared::refusal::Refusal;
use crate::verbs::shared::settings::{check_flag_range, refuse_injected_changes};
use kernelgate::display::terminal;
use kernelgate::exit::ExitReason;
use kernelgate::harness::filter::CaseFilter;
use kernelgate::record::{BaselineStore, file};

#[derive(Debug, clap::Args)]
pub struct CompareArguments {
    /// Use only cases whose id matches this regular expression
    filter: Option<String>,
    /// Revision to compare with: any that git knows
    #[arg(long, value_name = "REV", required_unless_present = "base_dir")]
    base: Option<String>,
    /// Revision to judge [default: the working tree with uncommitted changes]
    #[arg(long, value_name = "REV")]
    head: Option<String>,
    /// Folder with the bench executables of the base, in place of a build
    #[arg(long, value_name = "DIR", conflicts_with = "base")]
    base_dir: Option<PathBuf>,
    /// Folder with the bench executables of the head, in place of a build
    #[arg(long, value_name = "DIR", conflicts_with = "head")]
    head_dir: Option<PathBuf>,
    /// Exclude this untracked file or folder from the working tree's side (repeatable); files that
    /// .gitignore names are always excluded
    #[arg(long, value_name = "PATH")]
    leave_out: Vec<PathBuf>,
    /// Time limit of the measurement, after which undecided cases are inconclusive. The
    /// confirmation of slower cases may take as long again
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    budget: Duration,
    #[command(flatten)]
    flags: ComparisonFlags,
    /// Ratio of a case's errors against the reference above which they have grown [default: 1.5]
    #[arg(long, value_name = "RATIO")]
    growth: Option<f64>,
    /// Also time cases whose executable is the same file on both sides, byte by byte
    #[arg(long)]
    time_identical: bool,
    /// Time only cases whose kernels or launches changed, or are unknown. Host code is not compared
    #[arg(long)]
    affected: bool,
    /// List the kernels that differ when they are compiled for this architecture, and time nothing
    /// (repeatable); needs NVRTC and no GPU
    #[arg(
        long,
        value_name = "ARCH",
        conflicts_with_all = ["affected", "resume", "shard_output", "build_only", "out"]
    )]
    kernels: Vec<String>,
    /// Do not profile both builds if a case got slower
    #[arg(long)]
    no_profile: bool,
    /// Continue the last comparison, which was interrupted
    #[arg(long)]
    resume: bool,
    /// File of the shard that `--shard` measures, for `kernelgate merge` [default: I-of-N.json in
    /// kernelgate/compare/shards/ of the target folder]
    #[arg(long, value_name = "FILE")]
    shard_output: Option<PathBuf>,
    /// Build both sides into DIR/base and DIR/head, and compare nothing; --base-dir and --head-dir
    /// read these folders, also on another machine
    #[arg(long, value_name = "DIR", conflicts_with_all = ["resume", "shard_output"])]
    build_only: Option<PathBuf>,
    #[command(flatten)]
    output: VerdictOutput,
}

/// Prints the kernels that differ between the builds. Passes if each architecture has a compared
/// kernel.
fn list_changed_kernels(
    request: &ComparisonRequest,
    arguments: &CompareArguments,
) -> anyhow::Result<ExitReason> {
    let kernels = compare::list_kernels(request, &arguments.kernels)?;
    let lines: Vec<String> = kernels.iter().flat_map(comparison::kernels).collect();
    match arguments.output.verdict_format() {
        VerdictFormat::Json => print_json(&serde_json::json!({ "kernels": kernels }))?,
        _ => terminal::print_wrapped(&printable_on_terminal(&lines.join("\n"))),
    }
    let compared = kernels.iter().all(|it| it.same + it.changed.len() > 0);
    Ok(if compared { ExitReason::Fine } else { ExitReason::Inconclusive })
}

/// Absolute paths, because git runs in another folder.
fn absolute_path_list(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let here = std::env::current_dir().context("failed to find the working folder")?;
    Ok(paths.iter().map(|path| here.join(path)).collect())
}

fn source(folder: Option<&PathBuf>, revision: Option<&String>) -> SideSource {
    match (folder, revision) {
        (Some(folder), _) => SideSource::Folder(folder.clone()),
        (_, Some(revision)) => SideSource::Revision(revision.clone()),
        _ => SideSource::WorkTree,
    }
}

pub fn run(arguments: &CompareArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    refuse_injected_changes()?;
    CaseFilter::parse(arguments.filter.as_deref(), false)?;
    check_flag_range("--growth", arguments.growth, 1.0..=MAX_RULE_RATIO)?;
    for arch in &arguments.kernels {
        check_architecture_name("--kernels", arch)?;
        let format = arguments.output.verdict_format();
        let has_form = matches!(format, VerdictFormat::Text | VerdictFormat::Json);
        anyhow::ensure!(has_form, "--kernels prints text or JSON only");
    }
    let (flags, shard) = (&arguments.flags, arguments.flags.settings.shard());
    let folder = store.work.join("compare");
    let folder = shard.map_or(folder.clone(), |shard| folder.join(shard.shard_file_label()));
    let basis = PlanBasis::Calibration(store.clone());
    let mut request = ComparisonRequest {
        base: source(arguments.base_dir.as_ref(), arguments.base.as_ref()),
        head: source(arguments.head_dir.as_ref(), arguments.head.as_ref()),
        shard,
        filter: arguments.filter.clone(),
        settings: flags.settings.variables(),
        time_identical: arguments.time_identical,
        affected: arguments.affected,
        profile_slower: !arguments.no_profile,
        resume: arguments.resume,
        leave_out: absolute_path_list(&arguments.leave_out)?,
        ..flags.request(store, basis, arguments.budget, folder)?
    };
    request.plan.asked.growth = arguments.growth;
    if let Some(output) = &arguments.build_only {
        compare::build_sides_once(&request, output)?;
        eprintln!("built into base/ and head/ of {}", printable_path(output));
        return Ok(ExitReason::Fine);
    }
    arguments.output.check()?;
    if !arguments.kernels.is_empty() {
        return list_changed_kernels(&request, arguments);
    }
    let ComparisonOutcome { comparison: outcome, shard: kept } =
        compare::run(&request).map_err(Refusal::or_error)?;
    let again = shell_command_line(arguments_of_process(), &["--format", "--out"], &["--resume"]);
    let mut summary = verdicts::summary(&outcome, &again);
    let own = || store.package.as_ref().map(|package| package.name.clone());
    summary.package = flags.package.clone().or_else(own);
    arguments.output.print_and_write(
        &verdicts::text(&outcome, terminal::terminal_columns()),
        &summary,
        &outcome,
        &metrics::metrics_of_comparison(&outcome),
    )?;
    let Some(kept) = kept else { return Ok(outcome.exit()) };
    let usual = || {
        store.work.join("compare/shards").join(format!("{}.json", kept.shard.shard_file_label()))
    };
    let path = arguments.shard_output.clone().unwrap_or_else(usual);
    file::write(&path, &*kept)?;
    eprintln!(
        "shard {} in {}: `kernelgate merge` decides when all {} are there",
        kept.shard,
        printable_path(&path),
        kept.shard.count
    );
    Ok(ExitReason::Fine)
}
