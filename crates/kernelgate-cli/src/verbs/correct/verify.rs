//! `kernelgate verify`: every selected case against the fp64 reference, and on request all tensors
//! as safetensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use kernelgate::display::table::TextTable;
use kernelgate::exit::ExitReason;
use kernelgate::protocol::{BenchResponseBody, CaseStatus, RequestedAction, VerifiedCase};
use kernelgate::record::text::printable_path;
use kernelgate::record::{
    BaselineStore, Environment, Provenance, Shard, current_timestamp, file, tensors,
};
use kernelgate::workload::{Dtype, Tensors};
use safetensors::tensor::TensorView;

use super::numerics;
use super::verified::VerifiedCases;
use crate::fleet::verification::VerificationShard;
use crate::verbs::shared::case_selection::{BenchClient, CaseSelection, unexpected_response};
use crate::verbs::shared::output::{OutputFormat, print_json};

#[derive(Debug, clap::Args)]
pub struct VerifyArguments {
    #[command(flatten)]
    choice: CaseSelection,
    /// Write inputs, outputs and reference of each case to DIR/CASE.safetensors
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Number of seeds to verify with; the errors are recorded. `baseline add` adds them to a
    /// baseline, and `gate` compares them with it
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 1,
        conflicts_with = "dump",
        value_parser = clap::value_parser!(u64).range(1..=64)
    )]
    seeds: u64,
    /// File of the shard that `--shard` verifies, for `kernelgate merge` [default: I-of-N.json in
    /// kernelgate/verify/ of the target folder]
    #[arg(long, value_name = "FILE")]
    shard_output: Option<PathBuf>,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

pub fn run(arguments: &VerifyArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    let context = |folder: &Path| format!("failed to write {}", folder.display());
    let raw = match &arguments.dump {
        Some(folder) => {
            std::fs::create_dir_all(folder).with_context(|| context(folder))?;
            // The raw files are written in the target folder, which needs as much room anyway.
            Some(file::temporary_folder(folder).with_context(|| context(folder))?)
        }
        None => None,
    };
    // The path is absolute, because the bench runs in another folder.
    let dump = raw.as_ref().map(|(raw, _held)| raw.path().canonicalize()).transpose()?;
    if let Some(folder) = dump.as_ref().filter(|folder| folder.to_str().is_none()) {
        anyhow::bail!("--dump: {} is not UTF-8, which a request cannot name", folder.display());
    }
    let client = arguments.choice.bench_client(store)?;
    let verified = if arguments.seeds > 1 {
        numerics::record_errors(&client, store, arguments.seeds)?
    } else {
        verify_once(&client, &RequestedAction::Verify { dump })?
    };
    let VerifiedCases { rows, broken } = verified;
    let dumped = match (&arguments.dump, &raw) {
        (Some(folder), Some((raw, _held))) => dump_all_cases(folder, raw.path(), &rows),
        _ => Ok(()),
    };
    let broken = broken.or(dumped.err());
    if let Some(shard) = arguments.choice.shard() {
        let usual = || store.work.join("verify").join(format!("{}.json", shard.shard_file_label()));
        let path = arguments.shard_output.clone().unwrap_or_else(usual);
        let record =
            verification_shard(arguments, (&client, store), (shard, broken.is_none()), &rows)?;
        file::write(&path, &record)?;
        eprintln!("shard {shard} in {}: `kernelgate merge` takes it", printable_path(&path));
    }
    let exit = print_verified_cases(&rows, arguments.format, &arguments.choice.shard_words())?;
    if let Some(broken) = broken {
        return Err(broken);
    }
    let any = rows.iter().any(|row| row.status != CaseStatus::Skipped);
    // A shard without cases passes, because another shard may have them; a shard whose cases are
    // all skipped does not pass.
    let other_shards = rows.is_empty() && arguments.choice.shard().is_some();
    anyhow::ensure!(any || other_shards, "nothing was verified: every case was skipped");
    Ok(exit)
}

/// Prints verified cases; the text `suffix` follows their number.
///
/// # Errors
/// Fails if the cases cannot be written as JSON.
pub fn print_verified_cases(
    rows: &[VerifiedCase],
    format: OutputFormat,
    suffix: &str,
) -> anyhow::Result<ExitReason> {
    let failed = rows.iter().filter(|row| row.status == CaseStatus::Failed).count();
    match format {
        OutputFormat::Json => print_json(&rows)?,
        OutputFormat::Text | OutputFormat::Markdown => {
            let mut table = TextTable::new(&[
                "case",
                "status",
                "checked",
                "max error",
                "relative L2",
                "same bits again",
            ]);
            // Reasons are too long for cells: each distinct reason follows the table once.
            let ran = rows.iter().filter(|row| row.status != CaseStatus::Skipped);
            ran.for_each(|row| table.row(verified_cells(row)));
            if !table.is_empty() {
                println!("{}", format.table(&table));
            }
            for (reason, ids) in skips_by_reason(rows) {
                let more = match ids.len() - 1 {
                    0 => String::new(),
                    more => format!(", and {more} more"),
                };
                let (count, reason) = (ids.len(), format.words(reason));
                let id = format.words(ids[0]);
                format.print(&format!("skipped {count}: {reason}: {id}{more}"));
            }
            for row in rows.iter().filter(|row| row.status == CaseStatus::Failed) {
                let reason = row.reason.as_deref().unwrap_or_default();
                let reason = format.words(reason);
                let id = format.words(&row.case);
                format.print(&format!("FAILED {id}: {reason}"));
            }
            let count = |status| rows.iter().filter(|row| row.status == status).count();
            println!(
                "{} ok, {failed} failed, {} skipped{}",
                count(CaseStatus::Ok),
                count(CaseStatus::Skipped),
                suffix
            );
        }
    }
    Ok(if failed > 0 { ExitReason::Regression } else { ExitReason::Fine })
}

/// The record of a shard, complete if every bench answered.
fn verification_shard(
    arguments: &VerifyArguments,
    (client, store): (&BenchClient<'_>, &BaselineStore),
    (shard, complete): (Shard, bool),
    rows: &[VerifiedCase],
) -> anyhow::Result<VerificationShard> {
    let choice = &arguments.choice;
    let mut facts: Vec<String> = Vec::new();
    client.each_of_all_shards(&RequestedAction::List, |bench, answer| {
        let BenchResponseBody::List(listing) = answer else {
            return Err(unexpected_response(bench));
        };
        facts.push(bench.to_owned());
        facts.extend(listing.cases.into_iter().map(|case| case.case));
        Ok(())
    })?;
    let mut environment = Environment::cpu();
    client.each_of_all_shards(&RequestedAction::Environment, |bench, answer| {
        let BenchResponseBody::Environment(found) = answer else {
            return Err(unexpected_response(bench));
        };
        environment = *found;
        Ok(())
    })?;
    let mut identity = choice.variables();
    identity.retain(|name, _| name != "KERNELGATE_SHARD" && name != "KERNELGATE_DEVICE");
    identity.insert("filter".to_owned(), choice.filter.clone().unwrap_or_default());
    identity.insert("seeds".to_owned(), arguments.seeds.to_string());
    for executable in &client.found.executables {
        let hash = file::content_hash_of_file(&executable.path)?;
        let name = format!("{}{}", VerificationShard::EXECUTABLE_HASH_NAME, executable.bench);
        identity.insert(name, hash);
    }
    Ok(VerificationShard {
        shard,
        plan: file::hash_of_all(facts.iter().map(String::as_str)),
        complete,
        ended: current_timestamp(),
        environment,
        provenance: Provenance::detect_from_git(&store.root),
        identity,
        rows: rows.to_vec(),
    })
}

/// Verifies the cases once with the chosen seed.
fn verify_once(
    client: &BenchClient<'_>,
    action: &RequestedAction,
) -> anyhow::Result<VerifiedCases> {
    let mut rows: Vec<VerifiedCase> = Vec::new();
    let outcome = client.ask_each(client.verification_seeds(1)[0], action, |bench, answer| {
        let BenchResponseBody::Verify(verified) = answer else {
            return Err(unexpected_response(bench));
        };
        rows.extend(verified);
        Ok(())
    });
    VerifiedCases::new(rows, outcome)
}

/// Writes a file with the tensors of each case that is right.
fn dump_all_cases(folder: &Path, raw: &Path, rows: &[VerifiedCase]) -> anyhow::Result<()> {
    let mut cases: BTreeMap<String, &str> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.status == CaseStatus::Ok) {
        let name = row.case.replace('/', "_");
        if let Some(other) = cases.insert(name.clone(), &row.case) {
            let both = format!("{other} and {}", row.case);
            anyhow::bail!("--dump: {both} have one file name: choose one of them by a filter");
        }
        let path = raw.join(format!("{name}.tensors"));
        let tensors = tensors::read(&path).with_context(|| {
            format!("--dump: the tensors of {} were not written to {}", row.case, folder.display())
        })?;
        write_safetensors(&folder.join(format!("{name}.safetensors")), &row.case, &tensors)?;
        std::fs::remove_file(&path)
            .with_context(|| format!("failed to remove {}", path.display()))?;
    }
    Ok(())
}

/// Writes a temporary file in the same folder and renames it, so that a full disk leaves no
/// incomplete file.
fn write_safetensors(path: &Path, case: &str, tensors: &Tensors) -> anyhow::Result<()> {
    let context = || format!("failed to write {}", path.display());
    let temporary = file::temporary_beside(path).with_context(context)?;
    let views = tensors
        .iter()
        .map(|(name, tensor)| {
            Ok((
                name,
                TensorView::new(
                    safetensors_dtype(tensor.dtype()),
                    tensor.shape().to_vec(),
                    tensor.as_bytes(),
                )?,
            ))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
        .with_context(context)?;
    let metadata = Some([("case".to_owned(), case.to_owned())].into());
    safetensors::serialize_to_file(views, metadata, temporary.path()).with_context(context)?;
    temporary.persist(path).with_context(context)?;
    Ok(())
}

fn safetensors_dtype(dtype: Dtype) -> safetensors::Dtype {
    match dtype {
        Dtype::F64 => safetensors::Dtype::F64,
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F16 => safetensors::Dtype::F16,
        Dtype::Bf16 => safetensors::Dtype::BF16,
        Dtype::Fp8 | Dtype::I8 => safetensors::Dtype::I8,
    }
}

/// Skipped cases, grouped by the reason of the skip.
fn skips_by_reason(rows: &[VerifiedCase]) -> BTreeMap<&str, Vec<&str>> {
    let mut grouped: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.status == CaseStatus::Skipped) {
        let reason = row.reason.as_deref().unwrap_or_default();
        grouped.entry(reason).or_default().push(&row.case);
    }
    grouped
}

fn verified_cells(row: &VerifiedCase) -> Vec<String> {
    let dash = || "-".to_owned();
    let (checked, max_error, relative_l2) = match row.status {
        CaseStatus::Ok if row.max_error == 0.0 => (dash(), "exact".to_owned(), "exact".to_owned()),
        CaseStatus::Ok => {
            (dash(), format!("{:.1e}", row.max_error), format!("{:.1e}", row.relative_l2))
        }
        _ => (dash(), dash(), dash()),
    };
    if row.status == CaseStatus::Ok && row.checked == 0 {
        // A case without a reference was only checked for finite elements.
        let repeatable = row.repeatable.map_or("-", |same| if same { "yes" } else { "no" });
        let cells = [&row.case, "unverified", "0%", "-", "-", repeatable];
        return cells.map(str::to_owned).into();
    }
    let checked = if row.status == CaseStatus::Ok {
        format!("{:.4}%", 100.0 * row.checked as f64 / row.total.max(1) as f64)
    } else {
        checked
    };
    let status = row.status.name().to_owned();
    let repeatable = row
        .repeatable
        .map_or_else(dash, |repeatable| if repeatable { "yes" } else { "no" }.to_owned());
    vec![row.case.clone(), status, checked, max_error, relative_l2, repeatable]
}
