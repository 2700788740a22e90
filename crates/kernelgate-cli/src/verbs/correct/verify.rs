//! `kernelgate verify`: compares the output of every selected case with its fp64 reference, and can
//! write all tensors of the cases as safetensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use kernelgate::display::table::AlignedTextTable;
use kernelgate::exit::ProcessExitReason;
use kernelgate::protocol::{
    BenchCaseStatus, CaseVerificationResponse, RequestedBenchAction, ResponseToBenchAction,
};
use kernelgate::record::text::path_for_terminal;
use kernelgate::record::{
    CommitAndChanges, RecordFoldersOfPackage, RunEnvironment, ShardOfWork,
    current_time_for_records, file, tensors,
};
use kernelgate::workload::{Dtype, Tensors};
use safetensors::tensor::TensorView;

use super::numerics;
use super::verified::PartialVerification;
use crate::fleet::verification::VerificationShardRecord;
use crate::verbs::shared::case_selection::{
    BenchClient, CaseSelectionFlags, error_for_unexpected_response,
};
use crate::verbs::shared::output::{OutputFormat, print_as_json};

#[derive(Debug, clap::Args)]
pub struct VerifyCommandArguments {
    #[command(flatten)]
    choice: CaseSelectionFlags,
    /// Write inputs, outputs and reference of each case to DIR/CASE.safetensors
    #[arg(id = "dump", long = "dump", value_name = "DIR")]
    dump_folder: Option<PathBuf>,
    /// Number of seeds of input data to verify with; the output errors are recorded. `baseline add`
    /// stores the recorded errors in a baseline, and `gate` compares later errors with them
    #[arg(id = "seeds",
        long = "seeds",
        value_name = "COUNT",
        default_value_t = 1,
        conflicts_with = "dump",
        value_parser = clap::value_parser!(u64).range(1..=64)
    )]
    seed_count: u64,
    /// File of the shard that `--shard` verifies, for `kernelgate merge` [default:
    /// kernelgate/verify/I-of-N.json in cargo's target folder]
    #[arg(id = "shard_output", long = "shard-output", value_name = "FILE")]
    shard_output_file: Option<PathBuf>,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

pub fn run_verify_command(
    arguments: &VerifyCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let context = |folder: &Path| format!("failed to write {}", folder.display());
    let raw = match &arguments.dump_folder {
        Some(folder) => {
            std::fs::create_dir_all(folder).with_context(|| context(folder))?;
            // The bench writes raw tensors to a temporary folder inside the `--dump` folder, which
            // needs as much free space for the safetensors anyway.
            Some(file::create_temporary_folder_in(folder).with_context(|| context(folder))?)
        }
        None => None,
    };
    // The path of the dump folder is absolute, because a bench process runs in another working
    // folder.
    let dump = raw.as_ref().map(|(raw, _held)| raw.path().canonicalize()).transpose()?;
    if let Some(folder) = dump.as_ref().filter(|folder| folder.to_str().is_none()) {
        anyhow::bail!("--dump: {} is not UTF-8, which a request cannot name", folder.display());
    }
    let client = arguments.choice.bench_client(store)?;
    let verified = if arguments.seed_count > 1 {
        numerics::verify_and_record_errors_of_seeds(&client, store, arguments.seed_count)?
    } else {
        verify_with_single_seed(&client, &RequestedBenchAction::VerifyCases { dump_folder: dump })?
    };
    let PartialVerification { rows, error_that_ended_early: broken } = verified;
    let dumped = match (&arguments.dump_folder, &raw) {
        (Some(folder), Some((raw, _held))) => {
            convert_dumps_to_safetensors(folder, raw.path(), &rows)
        }
        _ => Ok(()),
    };
    let broken = broken.or(dumped.err());
    if let Some(shard) = arguments.choice.requested_shard() {
        let usual = || {
            store
                .generated_files_folder
                .join("verify")
                .join(format!("{}.json", shard.label_for_file_name()))
        };
        let path = arguments.shard_output_file.clone().unwrap_or_else(usual);
        let record = verification_record_of_shard(
            arguments,
            (&client, store),
            (shard, broken.is_none()),
            &rows,
        )?;
        file::write_record_atomically(&path, &record)?;
        eprintln!("shard {shard} in {}: `kernelgate merge` takes it", path_for_terminal(&path));
    }
    let exit = print_verified_cases(
        &rows,
        arguments.format,
        &arguments.choice.shard_note_after_case_count(),
    )?;
    if let Some(broken) = broken {
        return Err(broken);
    }
    let any = rows.iter().any(|row| row.status != BenchCaseStatus::Skipped);
    // `verify` passes for a shard that has no case, because other shards have the cases, but not
    // for a shard whose cases are all skipped.
    let other_shards = rows.is_empty() && arguments.choice.requested_shard().is_some();
    anyhow::ensure!(any || other_shards, "nothing was verified: every case was skipped");
    Ok(exit)
}

/// Prints a table or JSON of the verified cases; the text `suffix` follows the line with their
/// counts.
///
/// # Errors
/// Fails if the cases cannot be written as JSON.
pub fn print_verified_cases(
    rows: &[CaseVerificationResponse],
    format: OutputFormat,
    suffix: &str,
) -> anyhow::Result<ProcessExitReason> {
    let failed = rows.iter().filter(|row| row.status == BenchCaseStatus::Failed).count();
    match format {
        OutputFormat::Json => print_as_json(&rows)?,
        OutputFormat::Text | OutputFormat::Markdown => {
            let mut table = AlignedTextTable::new(&[
                "case",
                "status",
                "checked",
                "max error",
                "relative L2",
                "same bits again",
            ]);
            // Reasons of skips are too long for table cells: each distinct reason is printed once,
            // below the table.
            let ran = rows.iter().filter(|row| row.status != BenchCaseStatus::Skipped);
            ran.for_each(|row| table.add_row(table_cells_of_verified_case(row)));
            if !table.has_no_rows() {
                println!("{}", format.format_table(&table));
            }
            for (reason, ids) in skipped_verifications_by_reason(rows) {
                let more = match ids.len() - 1 {
                    0 => String::new(),
                    more => format!(", and {more} more"),
                };
                let (count, reason) = (ids.len(), format.escape_foreign_text(reason));
                let id = format.escape_foreign_text(ids[0]);
                format.print_wrapped_lines(&format!("skipped {count}: {reason}: {id}{more}"));
            }
            for row in rows.iter().filter(|row| row.status == BenchCaseStatus::Failed) {
                let reason = row.failure_or_skip_reason.as_deref().unwrap_or_default();
                let reason = format.escape_foreign_text(reason);
                let id = format.escape_foreign_text(&row.case_id);
                format.print_wrapped_lines(&format!("FAILED {id}: {reason}"));
            }
            let count = |status| rows.iter().filter(|row| row.status == status).count();
            println!(
                "{} ok, {failed} failed, {} skipped{}",
                count(BenchCaseStatus::Ok),
                count(BenchCaseStatus::Skipped),
                suffix
            );
        }
    }
    Ok(if failed > 0 { ProcessExitReason::Regression } else { ProcessExitReason::Success })
}

/// The verification record of one shard, marked as complete if every bench answered.
fn verification_record_of_shard(
    arguments: &VerifyCommandArguments,
    (client, store): (&BenchClient<'_>, &RecordFoldersOfPackage),
    (shard, complete): (ShardOfWork, bool),
    rows: &[CaseVerificationResponse],
) -> anyhow::Result<VerificationShardRecord> {
    let choice = &arguments.choice;
    let mut facts: Vec<String> = Vec::new();
    client.send_request_for_all_shards(&RequestedBenchAction::ListCases, |bench, answer| {
        let ResponseToBenchAction::List(listing) = answer else {
            return Err(error_for_unexpected_response(bench));
        };
        facts.push(bench.to_owned());
        facts.extend(listing.cases.into_iter().map(|case| case.case_id));
        Ok(())
    })?;
    let mut environment = RunEnvironment::environment_of_process_on_cpu();
    client.send_request_for_all_shards(
        &RequestedBenchAction::ReportEnvironment,
        |bench, answer| {
            let ResponseToBenchAction::Environment(found) = answer else {
                return Err(error_for_unexpected_response(bench));
            };
            environment = *found;
            Ok(())
        },
    )?;
    let mut identity = choice.bench_environment_variables();
    identity.retain(|name, _| name != "KERNELGATE_SHARD" && name != "KERNELGATE_DEVICE");
    identity.insert("filter".to_owned(), choice.case_id_regex.clone().unwrap_or_default());
    identity.insert("seeds".to_owned(), arguments.seed_count.to_string());
    for executable in &client.found_benches.usable_executables {
        let hash = file::file_content_hash_hex(&executable.executable_path)?;
        let name = format!(
            "{}{}",
            VerificationShardRecord::EXECUTABLE_HASH_NAME_PREFIX,
            executable.bench_name
        );
        identity.insert(name, hash);
    }
    Ok(VerificationShardRecord {
        shard,
        plan_hash: file::hash_of_texts_hex(facts.iter().map(String::as_str)),
        every_bench_answered: complete,
        verification_end_time: current_time_for_records(),
        environment,
        provenance: CommitAndChanges::from_git_or_variable(&store.package_root),
        verification_identity_facts: identity,
        rows: rows.to_vec(),
    })
}

/// Verifies the selected cases with one seed of input data.
fn verify_with_single_seed(
    client: &BenchClient<'_>,
    action: &RequestedBenchAction,
) -> anyhow::Result<PartialVerification> {
    let mut rows: Vec<CaseVerificationResponse> = Vec::new();
    let outcome = client.send_request_with_seed_to_each_bench(
        client.seeds_for_verification(1)[0],
        action,
        |bench, answer| {
            let ResponseToBenchAction::Verify(verified) = answer else {
                return Err(error_for_unexpected_response(bench));
            };
            rows.extend(verified);
            Ok(())
        },
    );
    PartialVerification::from_rows_and_outcome(rows, outcome)
}

/// Converts the raw tensors of each case with a correct output to a safetensors file.
fn convert_dumps_to_safetensors(
    folder: &Path,
    raw: &Path,
    rows: &[CaseVerificationResponse],
) -> anyhow::Result<()> {
    let mut cases: BTreeMap<String, &str> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.status == BenchCaseStatus::Ok) {
        let name = row.case_id.replace('/', "_");
        if let Some(other) = cases.insert(name.clone(), &row.case_id) {
            let both = format!("{other} and {}", row.case_id);
            anyhow::bail!("--dump: {both} have one file name: choose one of them by a filter");
        }
        let path = raw.join(format!("{name}.tensors"));
        let tensors = tensors::read_tensor_file(&path).with_context(|| {
            format!(
                "--dump: the tensors of {} were not written to {}",
                row.case_id,
                folder.display()
            )
        })?;
        write_tensors_as_safetensors(
            &folder.join(format!("{name}.safetensors")),
            &row.case_id,
            &tensors,
        )?;
        std::fs::remove_file(&path)
            .with_context(|| format!("failed to remove {}", path.display()))?;
    }
    Ok(())
}

/// Writes a temporary file beside the safetensors file and renames it at the end, so that a full
/// disk leaves no incomplete file.
fn write_tensors_as_safetensors(path: &Path, case: &str, tensors: &Tensors) -> anyhow::Result<()> {
    let context = || format!("failed to write {}", path.display());
    let temporary = file::create_temporary_file_beside(path).with_context(context)?;
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

/// Ids of skipped cases, grouped by the reason of the skip.
fn skipped_verifications_by_reason(rows: &[CaseVerificationResponse]) -> BTreeMap<&str, Vec<&str>> {
    let mut grouped: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.status == BenchCaseStatus::Skipped) {
        let reason = row.failure_or_skip_reason.as_deref().unwrap_or_default();
        grouped.entry(reason).or_default().push(&row.case_id);
    }
    grouped
}

fn table_cells_of_verified_case(row: &CaseVerificationResponse) -> Vec<String> {
    let dash = || "-".to_owned();
    let (checked, max_error, relative_l2) = match row.status {
        BenchCaseStatus::Ok if row.max_error_over_max_reference == 0.0 => {
            (dash(), "exact".to_owned(), "exact".to_owned())
        }
        BenchCaseStatus::Ok => (
            dash(),
            format!("{:.1e}", row.max_error_over_max_reference),
            format!("{:.1e}", row.relative_l2_error),
        ),
        _ => (dash(), dash(), dash()),
    };
    if row.status == BenchCaseStatus::Ok && row.compared_elements == 0 {
        // A case without a reference was checked only for NaN and infinite output elements.
        let repeatable =
            row.repeated_launch_is_bit_equal.map_or("-", |same| if same { "yes" } else { "no" });
        let cells = [&row.case_id, "unverified", "0%", "-", "-", repeatable];
        return cells.map(str::to_owned).into();
    }
    let checked = if row.status == BenchCaseStatus::Ok {
        format!("{:.4}%", 100.0 * row.compared_elements as f64 / row.output_elements.max(1) as f64)
    } else {
        checked
    };
    let status = row.status.name_in_responses().to_owned();
    let repeatable = row
        .repeated_launch_is_bit_equal
        .map_or_else(dash, |repeatable| if repeatable { "yes" } else { "no" }.to_owned());
    vec![row.case_id.clone(), status, checked, max_error, relative_l2, repeatable]
}
