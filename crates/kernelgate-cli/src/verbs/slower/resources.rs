//! `kernelgate resources`: prints the registers, spills and instructions of every kernel of the
//! package's benches, and checks them against a record without a GPU.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use kernelgate::display::counted_noun;
use kernelgate::display::table::TextTable;
use kernelgate::exit::ExitReason;
use kernelgate::harness::filter::CaseFilter;
use kernelgate::protocol::{BenchResponseBody, RequestedAction};
use kernelgate::record::BaselineStore;
use kernelgate::record::resources::{KernelResources, RunResources};
use kernelgate::record::text::printable_path;
use kernelgate_cuda::architecture;

use crate::benches::bench_requests::{self, RequestSettings};
use crate::benches::child_process::ChildProcess;
use crate::benches::find::FoundBenches;
use crate::compare::progress::parse_duration;
use crate::gate::kernels::resources::{ResourcesOutcome, compare_resources, keep_listed_kernels};
use crate::verbs::shared::bench_flags::BenchFlags;
use crate::verbs::shared::case_selection::unexpected_response;
use crate::verbs::shared::interrupt;
use crate::verbs::shared::output::{OutputFormat, json};

#[derive(Debug, clap::Args)]
pub struct ResourcesArguments {
    /// Use only kernels whose name matches this regular expression
    filter: Option<String>,
    /// Architecture to compile for (repeatable); JSON of several is a list
    #[arg(long, value_name = "ARCH", default_value = "sm_90a")]
    arch: Vec<String>,
    /// Record the result in baselines/resources/ARCH.json
    #[arg(long, conflicts_with_all = ["filter", "check"])]
    save: bool,
    /// Compare with the record; exit with 1 if a kernel spills more, loses occupancy, grows, or its
    /// tensor instructions no longer overlap
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    benches: BenchFlags,
    /// Time after which a bench that has given no response is ended
    #[arg(long, value_name = "TIME", default_value = "30m", value_parser = parse_duration)]
    wait: Duration,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

pub fn run(arguments: &ResourcesArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    let filter = CaseFilter::parse(arguments.filter.as_deref(), false)?;
    let mut bases: BTreeMap<&str, RunResources> = BTreeMap::new();
    for arch in &arguments.arch {
        check_architecture_name("--arch", arch)?;
        if arguments.check {
            // The resource record is read before anything is built.
            let mut base = RunResources::read(&path(store, arch)).map_err(|error| {
                let advice = match error.is_not_found() {
                    true => format!(": `kernelgate resources --arch {arch} --save` makes a record"),
                    false => String::new(),
                };
                anyhow::anyhow!("{error}{advice}")
            })?;
            keep_matching_kernels(&mut base, &filter);
            bases.insert(arch, base);
        }
    }
    let running = interrupt::watched_processes()?;
    let found = arguments.benches.find(&store.root, &running)?;
    let (mut exit, mut outcomes, mut listed) = (ExitReason::Fine, Vec::new(), Vec::new());
    for arch in &arguments.arch {
        let mut resources = compile_all_kernels(&found, arch, arguments, &running)?;
        if arguments.save {
            let path = path(store, arch);
            resources.write(&path)?;
            let kernels = counted_noun(resources.kernels.len(), "kernel");
            println!("recorded in {}: {kernels}", printable_path(&path));
            continue;
        }
        keep_matching_kernels(&mut resources, &filter);
        let text = arguments.filter.as_deref().unwrap_or_default();
        let none = resources.kernels.is_empty() && resources.left_out.is_empty();
        anyhow::ensure!(!none, "no kernel's name matches `{text}`");
        if let Some(base) = bases.get_mut(arch.as_str()) {
            if arguments.benches.names_some() {
                keep_listed_kernels(base, &resources);
            }
            let outcome = compare_resources(base, &resources);
            exit = exit.more_severe(outcome.exit());
            if arguments.format != OutputFormat::Json {
                print_resource_changes(&outcome, arguments.format);
            }
            outcomes.push(outcome);
        } else {
            if arguments.format != OutputFormat::Json {
                print_resources(&resources, arguments.format);
            }
            listed.push(resources);
        }
    }
    if arguments.format == OutputFormat::Json {
        print!("{}{}", json_document(&outcomes)?, json_document(&listed)?);
    }
    Ok(exit)
}

/// The document of one architecture, or a list of several: one JSON document either way, empty
/// without a document.
fn json_document(documents: &[impl serde::Serialize]) -> anyhow::Result<String> {
    match documents {
        [] => Ok(String::new()),
        [only] => json(only),
        several => json(&several),
    }
}

/// Refuses a text that cannot name an architecture, because such names become file names.
pub fn check_architecture_name(flag: &str, arch: &str) -> anyhow::Result<()> {
    let is_known = architecture::capability_number(arch).is_some();
    anyhow::ensure!(is_known, "{flag} takes a real architecture such as sm_90a, not `{arch}`");
    Ok(())
}

/// Keeps the kernels, and the builds that do not run, whose names match.
fn keep_matching_kernels(resources: &mut RunResources, filter: &CaseFilter) {
    resources.kernels.retain(|name, _| filter.matches_id(name));
    resources.left_out.retain(|name, _| filter.matches_id(name));
}

pub fn path(store: &BaselineStore, arch: &str) -> std::path::PathBuf {
    store.baselines.join("resources").join(format!("{arch}.json"))
}

/// Makes every bench compile its kernels for an architecture, and prints the builds that cannot run
/// on it. Several benches may list the same kernels.
fn compile_all_kernels(
    found: &FoundBenches,
    arch: &str,
    arguments: &ResourcesArguments,
    running: &ChildProcess,
) -> anyhow::Result<RunResources> {
    let (settings, timeout) = (BTreeMap::new(), arguments.wait);
    let asking = RequestSettings { settings, filter: None, timeout, running };
    let (arch, filter) = (arch.to_owned(), arguments.filter.clone());
    let action = RequestedAction::Resources { arch: arch.clone(), filter };
    let mut all: Option<RunResources> = None;
    let mut left_out: Vec<String> = Vec::new();
    for (bench, answer) in bench_requests::ask_all_benches(found, &asking, &action)? {
        let BenchResponseBody::Resources(report) = answer else {
            return Err(unexpected_response(&bench));
        };
        left_out.extend(report.left_out);
        let Some(all) = &mut all else {
            all = Some(report.resources);
            continue;
        };
        all.left_out.extend(report.resources.left_out);
        let (one, other) = (&all.compiler, &report.resources.compiler);
        anyhow::ensure!(
            one == other,
            "bench `{bench}` compiles by NVRTC {other}, the others by {one}"
        );
        for (name, kernel) in report.resources.kernels {
            let twice: Option<KernelResources> = all.kernels.insert(name.clone(), kernel.clone());
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

fn print_resources(resources: &RunResources, format: OutputFormat) {
    let mut table = TextTable::new(&[
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
        let mut mix: Vec<(&String, &u32)> = kernel.facts.mix.iter().collect();
        mix.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        let classes = mix
            .iter()
            .take(3)
            .map(|(class, count)| format!("{class} {count}"))
            .collect::<Vec<_>>()
            .join(", ");
        table.row(vec![
            name.clone(),
            kernel.facts.registers.to_string(),
            (kernel.facts.spill_store_bytes + kernel.facts.spill_load_bytes).to_string(),
            kernel.facts.stack_bytes.to_string(),
            (kernel.facts.shared_bytes + kernel.dynamic_shared_bytes).to_string(),
            kernel.block.to_string(),
            kernel
                .occupancy_percent
                .map_or_else(|| "-".to_owned(), |percent| format!("{percent}%")),
            kernel.facts.instructions.to_string(),
            classes,
        ]);
    }
    println!("{}, NVRTC {}", resources.arch, resources.compiler);
    println!("{}", format.table(&table));
    for (name, kernel) in &resources.kernels {
        if let Some(loss) = &kernel.facts.performance_loss {
            println!("{}", format.words(&format!("{name}: {loss}")));
        }
    }
}

fn print_resource_changes(outcome: &ResourcesOutcome, format: OutputFormat) {
    let bullet = if format == OutputFormat::Markdown { "- " } else { "" };
    if let Some(refused) = &outcome.refused {
        println!("{}: refused: {refused}", outcome.arch);
        return;
    }
    let worse = outcome.changes.iter().filter(|change| change.worse).count();
    println!(
        "{}: {} kernels compared, {worse} findings, {} other changes",
        outcome.arch,
        outcome.compared,
        outcome.changes.len() - worse
    );
    if outcome.nothing_in_common {
        println!(
            "{bullet}{}: inconclusive: no kernel is both in the record and in what was compiled",
            outcome.arch
        );
    }
    for (worse, word) in [(true, "WORSE "), (false, "")] {
        for change in outcome.changes.iter().filter(|change| change.worse == worse) {
            let text = format!("{word}{}: {}", change.kernel, change.what);
            println!("{bullet}{}", format.words(&text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_of_several_architectures_form_one_json_document() {
        assert_eq!(json_document(&["a"; 0]).unwrap(), "");
        assert_eq!(json_document(&["a"]).unwrap(), "\"a\"\n");
        let both: Vec<String> = serde_json::from_str(&json_document(&["a", "b"]).unwrap()).unwrap();
        assert_eq!(both, ["a", "b"]);
    }
}
