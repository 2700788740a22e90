//! `kernelgate resources`: prints the registers, spills and instructions of every kernel of the
//! package's benches, and checks them against a record without a GPU.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use kernelgate::display::counted_noun;
use kernelgate::display::table::AlignedTextTable;
use kernelgate::exit::ProcessExitReason;
use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::protocol::{RequestedBenchAction, ResponseToBenchAction};
use kernelgate::record::RecordFoldersOfPackage;
use kernelgate::record::resources::{ResourcesOfAllKernels, ResourcesOfKernel};
use kernelgate::record::text::path_for_terminal;
use kernelgate_cuda::architecture;

use crate::benches::bench_requests::{self, BenchRequestSettings};
use crate::benches::child_process::SharedChildProcess;
use crate::benches::find::UsableAndUnusableBenches;
use crate::compare::progress::parse_duration;
use crate::gate::kernels::resources::{
    KernelResourceCheckResult, compare_resources_with_record, retain_kernels_listed_by_benches,
};
use crate::verbs::shared::bench_flags::BenchExecutableFlags;
use crate::verbs::shared::case_selection::error_for_unexpected_response;
use crate::verbs::shared::interrupt;
use crate::verbs::shared::output::{OutputFormat, json_safe_for_terminals};

#[derive(Debug, clap::Args)]
pub struct ResourcesCommandArguments {
    /// Use only kernels whose name matches this regular expression
    #[arg(id = "filter", value_name = "FILTER")]
    kernel_name_regex: Option<String>,
    /// Architecture for which kernels are compiled (repeatable); the JSON of several architectures
    /// is a list
    #[arg(id = "arch", long = "arch", value_name = "ARCH", default_value = "sm_90a")]
    architectures: Vec<String>,
    /// Record the resources of the kernels in baselines/resources/ARCH.json
    #[arg(id = "save", long = "save", conflicts_with_all = ["filter", "check"])]
    saves_resources_record: bool,
    /// Compare the resources with the record; exit with 1 if a kernel spills more, loses occupancy,
    /// grows, or its tensor instructions no longer overlap
    #[arg(id = "check", long = "check")]
    checks_against_record: bool,
    #[command(flatten)]
    benches: BenchExecutableFlags,
    /// Time after which a bench process that gives no response is killed
    #[arg(id = "wait", long = "wait", value_name = "TIME", default_value = "30m", value_parser = parse_duration)]
    bench_response_timeout: Duration,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

pub fn run_resources_command(
    arguments: &ResourcesCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let filter =
        CaseIdFilter::parse_exact_id_or_regex(arguments.kernel_name_regex.as_deref(), false)?;
    let mut bases: BTreeMap<&str, ResourcesOfAllKernels> = BTreeMap::new();
    for arch in &arguments.architectures {
        require_architecture_name("--arch", arch)?;
        if arguments.checks_against_record {
            // The recorded resources are read before any bench is built, so that a broken record is
            // reported at once.
            let mut base =
                ResourcesOfAllKernels::read_resources_file(&resources_record_path(store, arch))
                    .map_err(|error| {
                        let advice = match error.is_because_file_is_missing() {
                            true => format!(
                                ": `kernelgate resources --arch {arch} --save` makes a record"
                            ),
                            false => String::new(),
                        };
                        anyhow::anyhow!("{error}{advice}")
                    })?;
            keep_kernels_that_match_filter(&mut base, &filter);
            bases.insert(arch, base);
        }
    }
    let running = interrupt::kill_child_and_exit_on_interrupt()?;
    let found = arguments.benches.find_selected_benches(&store.package_root, &running)?;
    let (mut exit, mut outcomes, mut listed) = (ProcessExitReason::Success, Vec::new(), Vec::new());
    for arch in &arguments.architectures {
        let mut resources = compile_kernels_of_all_benches(&found, arch, arguments, &running)?;
        if arguments.saves_resources_record {
            let path = resources_record_path(store, arch);
            resources.write_resources_file(&path)?;
            let kernels = counted_noun(resources.kernels.len(), "kernel");
            println!("recorded in {}: {kernels}", path_for_terminal(&path));
            continue;
        }
        keep_kernels_that_match_filter(&mut resources, &filter);
        let text = arguments.kernel_name_regex.as_deref().unwrap_or_default();
        let none = resources.kernels.is_empty() && resources.unsupported_kernels.is_empty();
        anyhow::ensure!(!none, "no kernel's name matches `{text}`");
        if let Some(base) = bases.get_mut(arch.as_str()) {
            if arguments.benches.selects_some_benches() {
                retain_kernels_listed_by_benches(base, &resources);
            }
            let outcome = compare_resources_with_record(base, &resources);
            exit = exit.more_severe(outcome.exit_reason());
            if arguments.format != OutputFormat::Json {
                print_changes_of_kernel_resources(&outcome, arguments.format);
            }
            outcomes.push(outcome);
        } else {
            if arguments.format != OutputFormat::Json {
                print_kernel_resources(&resources, arguments.format);
            }
            listed.push(resources);
        }
    }
    if arguments.format == OutputFormat::Json {
        print!("{}{}", json_object_or_list(&outcomes)?, json_object_or_list(&listed)?);
    }
    Ok(exit)
}

/// One JSON document: an object for one architecture, a list for several architectures, an empty
/// text for none.
fn json_object_or_list(documents: &[impl serde::Serialize]) -> anyhow::Result<String> {
    match documents {
        [] => Ok(String::new()),
        [only] => json_safe_for_terminals(only),
        several => json_safe_for_terminals(&several),
    }
}

/// Returns an error for a text that is not a GPU architecture, because architecture names become
/// file names.
pub fn require_architecture_name(flag: &str, arch: &str) -> anyhow::Result<()> {
    let is_known = architecture::compute_capability_number(arch).is_some();
    anyhow::ensure!(is_known, "{flag} takes a real architecture such as sm_90a, not `{arch}`");
    Ok(())
}

/// Keeps only kernels whose names match the filter, also among the kernels that cannot run on the
/// architecture.
fn keep_kernels_that_match_filter(resources: &mut ResourcesOfAllKernels, filter: &CaseIdFilter) {
    resources.kernels.retain(|name, _| filter.selects_case_id(name));
    resources.unsupported_kernels.retain(|name, _| filter.selects_case_id(name));
}

pub fn resources_record_path(store: &RecordFoldersOfPackage, arch: &str) -> std::path::PathBuf {
    store.baselines_folder.join("resources").join(format!("{arch}.json"))
}

/// Asks every bench to compile its kernels for one architecture, and prints which kernels cannot
/// run on it. Several benches may list the same kernel, which must then have the same resources in
/// all of them.
fn compile_kernels_of_all_benches(
    found: &UsableAndUnusableBenches,
    arch: &str,
    arguments: &ResourcesCommandArguments,
    running: &SharedChildProcess,
) -> anyhow::Result<ResourcesOfAllKernels> {
    let (settings, timeout) = (BTreeMap::new(), arguments.bench_response_timeout);
    let asking = BenchRequestSettings {
        bench_variables: settings,
        criterion_filter: None,
        response_timeout: timeout,
        running_child: running,
    };
    let (arch, filter) = (arch.to_owned(), arguments.kernel_name_regex.clone());
    let action = RequestedBenchAction::ReportKernelResources {
        gpu_architecture: arch.clone(),
        kernel_name_regex: filter,
    };
    let mut all: Option<ResourcesOfAllKernels> = None;
    let mut left_out: Vec<String> = Vec::new();
    for (bench, answer) in bench_requests::request_from_all_benches(found, &asking, &action)? {
        let ResponseToBenchAction::Resources(report) = answer else {
            return Err(error_for_unexpected_response(&bench));
        };
        left_out.extend(report.builds_unfit_for_architecture);
        let Some(all) = &mut all else {
            all = Some(report.resources);
            continue;
        };
        all.unsupported_kernels.extend(report.resources.unsupported_kernels);
        let (one, other) = (&all.compiler, &report.resources.compiler);
        anyhow::ensure!(
            one == other,
            "bench `{bench}` compiles by NVRTC {other}, the others by {one}"
        );
        for (name, kernel) in report.resources.kernels {
            let twice: Option<ResourcesOfKernel> = all.kernels.insert(name.clone(), kernel.clone());
            let same = twice.is_none_or(|twice| twice == kernel);
            anyhow::ensure!(
                same,
                "bench `{bench}` has another kernel of the name `{name}` than an earlier bench"
            );
        }
    }
    left_out.sort();
    left_out.dedup();
    left_out.iter().for_each(|line| eprintln!("{arch}: skipped: {line}"));
    all.context("no bench lists a kernel")
}

fn print_kernel_resources(resources: &ResourcesOfAllKernels, format: OutputFormat) {
    let mut table = AlignedTextTable::new(&[
        "kernel",
        "registers",
        "spills",
        "stack",
        "shared",
        "block",
        "occupancy",
        "instructions",
        "main classes",
    ]);
    for (name, kernel) in &resources.kernels {
        let mut mix: Vec<(&String, &u32)> =
            kernel.facts.instruction_count_by_class.iter().collect();
        mix.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        let classes = mix
            .iter()
            .take(3)
            .map(|(class, count)| format!("{class} {count}"))
            .collect::<Vec<_>>()
            .join(", ");
        table.add_row(vec![
            name.clone(),
            kernel.facts.registers_per_thread.to_string(),
            (kernel.facts.spill_store_bytes + kernel.facts.spill_load_bytes).to_string(),
            kernel.facts.stack_bytes_per_thread.to_string(),
            (kernel.facts.static_shared_bytes + kernel.dynamic_shared_bytes).to_string(),
            kernel.threads_per_block.to_string(),
            kernel
                .occupancy_percent
                .map_or_else(|| "-".to_owned(), |percent| format!("{percent}%")),
            kernel.facts.instruction_count.to_string(),
            classes,
        ]);
    }
    println!("{}, NVRTC {}", resources.arch, resources.compiler);
    println!("{}", format.format_table(&table));
    for (name, kernel) in &resources.kernels {
        if let Some(loss) = &kernel.facts.performance_loss_warning {
            println!("{}", format.escape_foreign_text(&format!("{name}: {loss}")));
        }
    }
}

fn print_changes_of_kernel_resources(outcome: &KernelResourceCheckResult, format: OutputFormat) {
    let bullet = if format == OutputFormat::Markdown { "- " } else { "" };
    if let Some(refused) = &outcome.why_not_comparable {
        println!("{}: refused: {refused}", outcome.gpu_architecture);
        return;
    }
    let worse = outcome.changes.iter().filter(|change| change.fails_resource_check).count();
    println!(
        "{}: {} kernels compared, {worse} findings, {} other changes",
        outcome.gpu_architecture,
        outcome.compared_kernels,
        outcome.changes.len() - worse
    );
    if outcome.no_common_kernel {
        println!(
            "{bullet}{}: inconclusive: no kernel is both in the record and in what was compiled",
            outcome.gpu_architecture
        );
    }
    for (worse, word) in [(true, "WORSE "), (false, "")] {
        for change in outcome.changes.iter().filter(|change| change.fails_resource_check == worse) {
            let text = format!("{word}{}: {}", change.kernel_name, change.resource_change_text);
            println!("{bullet}{}", format.escape_foreign_text(&text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_of_several_architectures_form_one_json_document() {
        assert_eq!(json_object_or_list(&["a"; 0]).unwrap(), "");
        assert_eq!(json_object_or_list(&["a"]).unwrap(), "\"a\"\n");
        let both: Vec<String> =
            serde_json::from_str(&json_object_or_list(&["a", "b"]).unwrap()).unwrap();
        assert_eq!(both, ["a", "b"]);
    }
}
