//! `kernelgate verify`: every selected case against the fp64 reference, and on request all tensors as safetensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use safetensors::tensor::TensorView;
use serde::Serialize;

use super::choice::{Choice, each_implementation};
use super::output::{Format, print_json};
use kernelgate::backend::{BackendError, Target};
use kernelgate::display::table::Table;
use kernelgate::exit::Exit;
use kernelgate::harness::cases::{Case, Group};
use kernelgate::harness::problem::{Ready, Setback};
use kernelgate::record::file;
use kernelgate::verify::{Comparison, repeats};
use kernelgate::workload::{Dtype, Tensor};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// Seed of the random inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write inputs, outputs and reference of each case to DIR/CASE.safetensors
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Debug, Serialize)]
struct Verified {
    case: String,
    /// "ok", "failed" or "skipped".
    status: &'static str,
    checked: u64,
    total: u64,
    max_error: f64,
    relative_l2: f64,
    /// Whether a second launch gave the same bits: a fact, not a verdict. Absent where the case did not pass.
    repeatable: Option<bool>,
    /// Why it failed or was skipped.
    reason: Option<String>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Exit> {
    let suites = kernelgate_suite::all();
    let wanted = arguments.choice.wanted();
    let place = wanted.place(suites.iter().map(AsRef::as_ref))?;
    let selection = arguments.choice.select(&suites, &place)?;
    let target = wanted.open(&place)?;
    if let Some(folder) = &arguments.dump {
        std::fs::create_dir_all(folder).with_context(|| format!("failed to write {}", folder.display()))?;
    }
    let (outcomes, lost) = each_implementation(&selection, arguments.seed, "verifying", |group, case, ready| {
        verify_case(arguments, group, case, ready, &target)
    })?;
    if lost {
        // A lost device gives nothing back, and may never answer: it is left to the end of the process.
        std::mem::forget(target);
    }
    let rows: Vec<Verified> = outcomes.into_iter().map(|(case, outcome)| row(&case, outcome)).collect();
    let failed = rows.iter().filter(|row| row.status == "failed").count();
    match arguments.format {
        Format::Json => print_json(&rows)?,
        format @ (Format::Text | Format::Markdown) => {
            let mut table = Table::new(&["case", "status", "checked", "max error", "relative L2", "same bits again"]);
            for row in &rows {
                table.row(cells(row));
            }
            println!("{}", if arguments.format == Format::Text { table.text() } else { table.markdown() });
            for row in rows.iter().filter(|row| row.status == "failed") {
                println!("FAILED {}: {}", row.case, format.words(row.reason.as_deref().unwrap_or_default()));
            }
            let count = |status| rows.iter().filter(|row| row.status == status).count();
            println!("{} ok, {failed} failed, {} skipped", count("ok"), count("skipped"));
        }
    }
    anyhow::ensure!(rows.iter().any(|row| row.status != "skipped"), "nothing was verified: every case was skipped");
    Ok(if failed > 0 { Exit::Regression } else { Exit::Fine })
}

fn verify_case(
    arguments: &Arguments,
    group: &Group<'_>,
    case: &Case,
    ready: &Ready,
    target: &Target,
) -> anyhow::Result<Result<(Comparison, bool), Setback>> {
    let (mut executable, comparison) = match ready.verify(group, case, target) {
        Ok(verified) => verified,
        Err(setback) => return Ok(Err(setback)),
    };
    let repeatable = match repeats(executable.as_mut()) {
        Ok(repeatable) => repeatable,
        Err(lost @ BackendError::Lost(_)) => {
            std::mem::forget(executable);
            return Ok(Err(Setback::Lost(lost.to_string())));
        }
        Err(error) => return Ok(Err(Setback::Fail(format!("second launch: {error}")))),
    };
    if let Some(folder) = &arguments.dump {
        let outputs = executable.outputs().map_err(anyhow::Error::from)?;
        let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
        tensors.extend(ready.inputs.iter().map(|(name, tensor)| (format!("input/{name}"), tensor.clone())));
        tensors.extend(outputs.iter().map(|(name, tensor)| (format!("output/{name}"), tensor.clone())));
        for (i, expected) in ready.expected.iter().enumerate() {
            let Some(rows) = &expected.rows else {
                tensors.insert(format!("expected/{}", expected.name), Tensor::new(expected.shape.clone(), expected.values.clone()));
                continue;
            };
            // An output may have several references, each for some of its rows, which are named beside the values.
            let part = ready.expected[..i].iter().filter(|earlier| earlier.name == expected.name).count();
            let indices: Vec<f64> = rows.iter().map(|&row| row as f64).collect();
            let values = Tensor::new([rows.len(), expected.row_len()], expected.values.clone());
            tensors.insert(format!("expected/{}/{part}/values", expected.name), values);
            tensors.insert(format!("expected/{}/{part}/rows", expected.name), Tensor::new([rows.len()], indices.into()));
        }
        dump(&folder.join(format!("{}.safetensors", case.id.replace('/', "_"))), &case.id, &tensors)?;
    }
    Ok(Ok((comparison, repeatable)))
}

/// Writes the file beside its place and renames it: a full disk leaves no half of one.
fn dump(path: &Path, case: &str, tensors: &BTreeMap<String, Tensor>) -> anyhow::Result<()> {
    let context = || format!("failed to write {}", path.display());
    let temporary = file::temporary_beside(path).with_context(context)?.into_temp_path();
    let views = tensors
        .iter()
        .map(|(name, tensor)| {
            Ok((name.as_str(), TensorView::new(safetensors_dtype(tensor.dtype()), tensor.shape().to_vec(), tensor.as_bytes())?))
        })
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
        .with_context(context)?;
    let metadata = Some([("case".to_owned(), case.to_owned())].into());
    safetensors::serialize_to_file(views, metadata, &temporary).with_context(context)?;
    temporary.persist(path).with_context(context)?;
    Ok(())
}

fn safetensors_dtype(dtype: Dtype) -> safetensors::Dtype {
    match dtype {
        Dtype::F64 => safetensors::Dtype::F64,
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F16 => safetensors::Dtype::F16,
        Dtype::Bf16 => safetensors::Dtype::BF16,
        Dtype::I8 => safetensors::Dtype::I8,
    }
}

fn row(case: &str, outcome: Result<(Comparison, bool), Setback>) -> Verified {
    let (status, (comparison, repeatable), reason) = match outcome {
        Ok((comparison, repeatable)) => ("ok", (comparison, Some(repeatable)), None),
        Err(Setback::Fail(reason) | Setback::Lost(reason)) => ("failed", Default::default(), Some(reason)),
        Err(Setback::Skip(reason)) => ("skipped", Default::default(), Some(reason)),
    };
    let Comparison { checked, total, max_error, relative_l2 } = comparison;
    Verified { case: case.to_owned(), status, checked, total, max_error, relative_l2, repeatable, reason }
}

fn cells(row: &Verified) -> Vec<String> {
    let dash = || "-".to_owned();
    let (checked, max_error, relative_l2) = match row.status {
        "ok" if row.max_error == 0.0 => (dash(), "exact".to_owned(), "exact".to_owned()),
        "ok" => (dash(), format!("{:.1e}", row.max_error), format!("{:.1e}", row.relative_l2)),
        _ => (dash(), dash(), dash()),
    };
    let checked =
        if row.status == "ok" { format!("{:.4}%", 100.0 * row.checked as f64 / row.total.max(1) as f64) } else { checked };
    let status = match (row.status, &row.reason) {
        ("skipped", Some(reason)) => format!("skipped: {reason}"),
        (status, _) => status.to_owned(),
    };
    let repeatable = row.repeatable.map_or_else(dash, |repeatable| if repeatable { "yes" } else { "no" }.to_owned());
    vec![row.case.clone(), status, checked, max_error, relative_l2, repeatable]
}
