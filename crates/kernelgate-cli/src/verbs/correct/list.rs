//! `kernelgate list`: prints the workloads of a package with their axes and implementations, and
//! the selected cases.

use std::collections::BTreeMap;

use kernelgate::display;
use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::terminal;
use kernelgate::exit::ProcessExitReason;
use kernelgate::protocol::{
    BenchListResponse, ListedBenchCase, ListedWorkload, RequestedBenchAction, ResponseToBenchAction,
};
use kernelgate::record::RecordFoldersOfPackage;
use serde::Serialize;

use crate::verbs::shared::case_selection::{CaseSelectionFlags, error_for_unexpected_response};
use crate::verbs::shared::output::{OutputFormat, print_as_json};

/// Width in columns of the printed descriptions if the output is not a terminal.
const DESCRIPTION_COLUMNS_WITHOUT_TERMINAL: usize = 100;

#[derive(Debug, clap::Args)]
pub struct ListCommandArguments {
    #[command(flatten)]
    choice: CaseSelectionFlags,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

/// A case in the JSON output of `kernelgate list`.
#[derive(Debug, Serialize)]
struct ListedCaseJson<'a> {
    #[serde(rename = "bench")]
    bench_name: &'a str,
    #[serde(rename = "case")]
    case_id: &'a str,
    /// The text "runs here" if the case can run on this machine, else "skipped: " and the reason.
    #[serde(rename = "status")]
    runs_here_or_skip_reason: String,
    matmul_flops: u64,
    #[serde(rename = "bytes")]
    min_bytes_moved: u64,
    #[serde(rename = "host_bytes")]
    host_memory_bytes: u64,
    /// Bytes of GPU memory that the implementation declares for the case; `None` if nothing is
    /// declared.
    #[serde(rename = "device_bytes")]
    declared_device_memory_bytes: Option<u64>,
}

pub fn run_list_command(
    arguments: &ListCommandArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    let mut listings: Vec<(String, BenchListResponse)> = Vec::new();
    for (bench, answer) in
        arguments.choice.answers_of_package_benches(store, &RequestedBenchAction::ListCases)?
    {
        let ResponseToBenchAction::List(listing) = answer else {
            return Err(error_for_unexpected_response(&bench));
        };
        listings.push((bench, listing));
    }
    let cases = || {
        listings
            .iter()
            .flat_map(|(bench, listing)| listing.cases.iter().map(move |case| (bench, case)))
    };
    if arguments.format == OutputFormat::Json {
        print_as_json(
            &cases().map(|(bench, case)| listed_case_json(bench, case)).collect::<Vec<_>>(),
        )?;
        return Ok(ProcessExitReason::Success);
    }
    if arguments.choice.case_id_regex.is_none() && arguments.format == OutputFormat::Text {
        listings
            .iter()
            .flat_map(|(_, listing)| &listing.workloads)
            .for_each(print_workload_with_axes);
        println!();
    }
    let (runs, skipped): (Vec<_>, Vec<_>) =
        cases().map(|(_, case)| case).partition(|case| case.reason_not_runnable.is_none());
    if !runs.is_empty() {
        let table = work_and_memory_table(&runs);
        println!("{}", arguments.format.format_table(&table));
        println!("\n{}", LEGEND_OF_WORK_AND_MEMORY_COLUMNS);
    }
    let verb = if runs.len() == 1 { "runs" } else { "run" };
    let cases = display::counted_noun(runs.len(), "case");
    println!("{cases} {verb} here{}", arguments.choice.shard_note_after_case_count());
    let (never, not_here): (Vec<_>, Vec<_>) =
        skipped.into_iter().partition(|case| case.runs_on_no_machine);
    for (reason, ids) in skipped_cases_by_reason(&not_here) {
        let more = match ids.len() - 1 {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        let (count, reason) = (ids.len(), arguments.format.escape_foreign_text(reason));
        let id = arguments.format.escape_foreign_text(ids[0]);
        arguments.format.print_wrapped_lines(&format!("skipped {count}: {reason}\n    {id}{more}"));
    }
    if !never.is_empty() {
        println!(
            "{} more combinations are not supported by their implementation: --format json has \
             them",
            never.len()
        );
    }
    Ok(ProcessExitReason::Success)
}

/// Legend of the work and memory columns that `kernelgate list` prints.
const LEGEND_OF_WORK_AND_MEMORY_COLUMNS: &str = "work: of GEMMs, else fewest bytes moved; memory: of the host at the peak;\nGPU memory: as the implementation declares it";

fn work_and_memory_table(cases: &[&ListedBenchCase]) -> AlignedTextTable {
    let on_gpu = cases.iter().any(|case| case.declared_device_memory_bytes.is_some());
    let columns = ["case", "work", "memory", "GPU memory"];
    let mut table = AlignedTextTable::new(if on_gpu { &columns } else { &columns[..3] });
    for case in cases {
        let work = match (case.matmul_flops_per_launch, case.min_bytes_per_launch) {
            (0, 0) => "-".to_owned(),
            (0, bytes) => display::decimal_byte_size_text(bytes),
            (flops, _) => format!("{:.2} GFLOP", flops as f64 / 1e9),
        };
        let mut cells = vec![
            case.case_id.clone(),
            work,
            display::decimal_byte_size_text(case.peak_host_memory_bytes),
        ];
        if on_gpu {
            cells.push(
                case.declared_device_memory_bytes
                    .map_or_else(|| "-".to_owned(), display::decimal_byte_size_text),
            );
        }
        table.add_row(cells);
    }
    table
}

/// Groups skipped cases by the reason of the skip, so that a host without a GPU gets one line for
/// all its GPU cases.
fn skipped_cases_by_reason<'a>(cases: &[&'a ListedBenchCase]) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut grouped: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for case in cases {
        let reason = case.reason_not_runnable.as_deref().unwrap_or_default();
        grouped.entry(reason).or_default().push(&case.case_id);
    }
    grouped
}

fn print_workload_with_axes(workload: &ListedWorkload) {
    let columns = terminal::terminal_columns().unwrap_or(DESCRIPTION_COLUMNS_WITHOUT_TERMINAL);
    let wrapped = |text: &str, indent| terminal::break_line_to_columns(text, indent, columns);
    println!("{}", wrapped(&format!("{}: {}", workload.workload_name, workload.description), 4));
    for [name, values, about] in &workload.axes {
        println!("{}", wrapped(&format!("    axis {name:<9} {values}: {about}"), 19));
    }
    for row in &workload.implementations {
        println!(
            "{}",
            wrapped(&format!("    {:<14} {}", row.implementation_name, row.description), 19)
        );
    }
}

fn listed_case_json<'a>(bench: &'a str, case: &'a ListedBenchCase) -> ListedCaseJson<'a> {
    let ListedBenchCase {
        matmul_flops_per_launch: matmul_flops,
        min_bytes_per_launch: bytes,
        peak_host_memory_bytes: host_bytes,
        declared_device_memory_bytes,
        ..
    } = *case;
    ListedCaseJson {
        bench_name: bench,
        case_id: &case.case_id,
        runs_here_or_skip_reason: match &case.reason_not_runnable {
            Some(reason) => format!("skipped: {reason}"),
            None => "runs here".to_owned(),
        },
        matmul_flops,
        min_bytes_moved: bytes,
        host_memory_bytes: host_bytes,
        declared_device_memory_bytes,
    }
}
