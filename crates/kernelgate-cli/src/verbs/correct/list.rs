//! `kernelgate list`: workloads with their axes, implementations, and the selected cases.

use std::collections::BTreeMap;

use kernelgate::display;
use kernelgate::display::table::TextTable;
use kernelgate::display::terminal;
use kernelgate::exit::ExitReason;
use kernelgate::protocol::{
    BenchListing, BenchResponseBody, ListedCase, ListedProblem, RequestedAction,
};
use kernelgate::record::BaselineStore;
use serde::Serialize;

use crate::verbs::shared::case_selection::{CaseSelection, unexpected_response};
use crate::verbs::shared::output::{OutputFormat, print_json};

/// Width of descriptions if output is not a terminal.
const COLUMNS: usize = 100;

#[derive(Debug, clap::Args)]
pub struct ListArguments {
    #[command(flatten)]
    choice: CaseSelection,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

/// A case in the JSON output of `kernelgate list`.
#[derive(Debug, Serialize)]
struct ListedCaseJson<'a> {
    bench: &'a str,
    case: &'a str,
    /// Text "ok" if the case can run on this machine, or the reason why not.
    status: String,
    matmul_flops: u64,
    bytes: u64,
    host_bytes: u64,
    /// Device memory that GPU implementations declare; absent if nothing is declared.
    device_bytes: Option<u64>,
}

pub fn run(arguments: &ListArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    let mut listings: Vec<(String, BenchListing)> = Vec::new();
    for (bench, answer) in arguments.choice.ask_package(store, &RequestedAction::List)? {
        let BenchResponseBody::List(listing) = answer else {
            return Err(unexpected_response(&bench));
        };
        listings.push((bench, listing));
    }
    let cases = || {
        listings
            .iter()
            .flat_map(|(bench, listing)| listing.cases.iter().map(move |case| (bench, case)))
    };
    if arguments.format == OutputFormat::Json {
        print_json(
            &cases().map(|(bench, case)| listed_case_json(bench, case)).collect::<Vec<_>>(),
        )?;
        return Ok(ExitReason::Fine);
    }
    if arguments.choice.filter.is_none() && arguments.format == OutputFormat::Text {
        listings.iter().flat_map(|(_, listing)| &listing.workloads).for_each(print_workload);
        println!();
    }
    let (runs, skipped): (Vec<_>, Vec<_>) =
        cases().map(|(_, case)| case).partition(|case| case.reason.is_none());
    if !runs.is_empty() {
        let table = listed_table(&runs);
        println!("{}", arguments.format.table(&table));
        println!("\n{}", WORK_COLUMN_LEGEND);
    }
    let verb = if runs.len() == 1 { "runs" } else { "run" };
    let cases = display::counted_noun(runs.len(), "case");
    println!("{cases} {verb} here{}", arguments.choice.shard_words());
    let (never, not_here): (Vec<_>, Vec<_>) =
        skipped.into_iter().partition(|case| case.unsupported);
    for (reason, ids) in cases_by_skip_reason(&not_here) {
        let more = match ids.len() - 1 {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        let (count, reason) = (ids.len(), arguments.format.words(reason));
        let id = arguments.format.words(ids[0]);
        arguments.format.print(&format!("skipped {count}: {reason}\n    {id}{more}"));
    }
    if !never.is_empty() {
        println!(
            "{} more combinations are not supported by their implementation: --format json has \
             them",
            never.len()
        );
    }
    Ok(ExitReason::Fine)
}

/// Meaning of the columns.
const WORK_COLUMN_LEGEND: &str = "work: of GEMMs, else fewest bytes moved; memory: of the host at the peak;\nGPU memory: as the implementation declares it";

fn listed_table(cases: &[&ListedCase]) -> TextTable {
    let on_gpu = cases.iter().any(|case| case.device_bytes.is_some());
    let columns = ["case", "work", "memory", "GPU memory"];
    let mut table = TextTable::new(if on_gpu { &columns } else { &columns[..3] });
    for case in cases {
        let work = match (case.matmul_flops, case.bytes) {
            (0, 0) => "-".to_owned(),
            (0, bytes) => display::byte_text(bytes),
            (flops, _) => format!("{:.2} GFLOP", flops as f64 / 1e9),
        };
        let mut cells = vec![case.case.clone(), work, display::byte_text(case.host_bytes)];
        if on_gpu {
            cells.push(case.device_bytes.map_or_else(|| "-".to_owned(), display::byte_text));
        }
        table.row(cells);
    }
    table
}

/// Joins cases with the same reason in one line: on a host without a GPU, all GPU rows.
fn cases_by_skip_reason<'a>(cases: &[&'a ListedCase]) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut grouped: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for case in cases {
        let reason = case.reason.as_deref().unwrap_or_default();
        grouped.entry(reason).or_default().push(&case.case);
    }
    grouped
}

fn print_workload(workload: &ListedProblem) {
    let columns = terminal::terminal_columns().unwrap_or(COLUMNS);
    let wrapped = |text: &str, indent| terminal::wrap_terminal_line(text, indent, columns);
    println!("{}", wrapped(&format!("{}: {}", workload.name, workload.about), 4));
    for [name, values, about] in &workload.axes {
        println!("{}", wrapped(&format!("    axis {name:<9} {values}: {about}"), 19));
    }
    for row in &workload.implementations {
        println!("{}", wrapped(&format!("    {:<14} {}", row.name, row.about), 19));
    }
}

fn listed_case_json<'a>(bench: &'a str, case: &'a ListedCase) -> ListedCaseJson<'a> {
    let ListedCase { matmul_flops, bytes, host_bytes, device_bytes, .. } = *case;
    ListedCaseJson {
        bench,
        case: &case.case,
        status: match &case.reason {
            Some(reason) => format!("skipped: {reason}"),
            None => "runs here".to_owned(),
        },
        matmul_flops,
        bytes,
        host_bytes,
        device_bytes,
    }
}
