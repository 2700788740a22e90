//! `kernelgate resources`: what the compiler makes of every kernel, and a gate on it that needs no GPU.

use super::output::{Format, print_json};
use crate::gate::resources::{Outcome, compare};
use kernelgate::display::table::Table;
use kernelgate::exit::Exit;
use kernelgate::record::resources::{self, Resources};
use kernelgate::record::{Store, file};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Only kernels whose build name contains this
    filter: Option<String>,
    /// Architecture to compile for (repeatable)
    #[arg(long, value_name = "ARCH", default_value = "sm_90a")]
    arch: Vec<String>,
    /// Record the result in baselines/resources/ARCH.json
    #[arg(long, conflicts_with_all = ["filter", "check"])]
    save: bool,
    /// Compare with the record: exit 1 when a kernel spills, loses occupancy or grows
    #[arg(long, conflicts_with = "filter")]
    check: bool,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    let mut exit = Exit::Fine;
    for arch in &arguments.arch {
        // Architecture names become file names.
        anyhow::ensure!(
            arch.strip_prefix("sm_").is_some_and(|number| !number.is_empty() && number.chars().all(|c| c.is_ascii_alphanumeric())),
            "--arch takes a real architecture such as sm_90a, not `{arch}`"
        );
        let path = store.baselines.join("resources").join(format!("{arch}.json"));
        let failed_to = |error| anyhow::anyhow!("failed to {error}");
        let base: Option<Resources> = if arguments.check { Some(file::read(&path).map_err(failed_to)?) } else { None };
        let resources = compile_all(arch, arguments.filter.as_deref().unwrap_or_default())?;
        if arguments.save {
            file::write(&path, &resources).map_err(failed_to)?;
            println!("{} kernels to {}", resources.kernels.len(), path.display());
            continue;
        }
        match base {
            Some(base) => {
                let outcome = compare(&base, &resources);
                exit = exit.max(outcome.exit());
                print_outcome(&outcome, arguments.format)?;
            }
            None => print_resources(&resources, arguments.format)?,
        }
    }
    Ok(exit)
}

/// Compiles every kernel whose build's name contains that, and says which of them the architecture does not run.
///
/// # Errors
/// When there is none, or [`resources::compile`] fails.
fn compile_all(arch: &str, filter: &str) -> anyhow::Result<Resources> {
    let kernels: Vec<_> = kernelgate_suite::kernels().into_iter().filter(|kernel| kernel.build.name().contains(filter)).collect();
    anyhow::ensure!(!kernels.is_empty(), "no kernel's build name contains `{filter}`");
    let compiled = resources::compile(&kernels, arch)?;
    for left_out in &compiled.left_out {
        eprintln!("{arch}: left out: {left_out}");
    }
    Ok(compiled.resources)
}

fn print_resources(resources: &Resources, format: Format) -> anyhow::Result<()> {
    if format == Format::Json {
        return print_json(resources);
    }
    let mut table =
        Table::new(&["kernel", "registers", "spills", "stack", "shared", "block", "occupancy", "instructions", "main classes"]);
    for (name, kernel) in &resources.kernels {
        let mut mix: Vec<(&String, &u32)> = kernel.facts.mix.iter().collect();
        mix.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
        let classes = mix.iter().take(3).map(|(class, count)| format!("{class} {count}")).collect::<Vec<_>>().join(", ");
        table.row(vec![
            name.clone(),
            kernel.facts.registers.to_string(),
            (kernel.facts.spill_store_bytes + kernel.facts.spill_load_bytes).to_string(),
            kernel.facts.stack_bytes.to_string(),
            (kernel.facts.shared_bytes + kernel.dynamic_shared_bytes).to_string(),
            kernel.block.to_string(),
            kernel.occupancy_percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent}%")),
            kernel.facts.instructions.to_string(),
            classes,
        ]);
    }
    println!("{}, NVRTC {}", resources.arch, resources.compiler);
    println!("{}", if format == Format::Markdown { table.markdown() } else { table.text() });
    Ok(())
}

fn print_outcome(outcome: &Outcome, format: Format) -> anyhow::Result<()> {
    if format == Format::Json {
        return print_json(outcome);
    }
    let bullet = if format == Format::Markdown { "- " } else { "" };
    if let Some(refused) = &outcome.refused {
        println!("{}: refused: {refused}", outcome.arch);
        return Ok(());
    }
    let worse = outcome.changes.iter().filter(|change| change.worse).count();
    println!(
        "{}: {} kernels compared, {worse} findings, {} other changes",
        outcome.arch,
        outcome.compared,
        outcome.changes.len() - worse
    );
    for change in outcome.changes.iter().filter(|change| change.worse) {
        println!("{bullet}{}", format.words(&format!("WORSE {}: {}", change.kernel, change.what)));
    }
    for change in outcome.changes.iter().filter(|change| !change.worse) {
        println!("{bullet}{}", format.words(&format!("{}: {}", change.kernel, change.what)));
    }
    Ok(())
}
