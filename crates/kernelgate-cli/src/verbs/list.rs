//! `kernelgate list`: workloads with their axes, implementations, and the selected cases.

use kernelgate::display;
use kernelgate::display::table::Table;
use kernelgate::exit::Exit;
use kernelgate::protocol::{Action, ListedCase, ListedProblem, Listing, ResponseBody};
use kernelgate::record::Store;
use serde::Serialize;

use super::choice::{Choice, unexpected};
use super::output::{OutputFormat, print_json};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
}

/// A case as JSON has it.
#[derive(Debug, Serialize)]
struct JsonCase<'a> {
    bench: &'a str,
    case: &'a str,
    /// Whether it can run here, or why not.
    status: String,
    matmul_flops: u64,
    bytes: u64,
    host_bytes: u64,
    /// Declared by GPU implementations; absent where nothing is declared.
    device_bytes: Option<u64>,
}

pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    let mut listings: Vec<(String, Listing)> = Vec::new();
    for (bench, answer) in arguments.choice.ask(store, &Action::List)? {
        let ResponseBody::List(listing) = answer else { return Err(unexpected(&bench)) };
        listings.push((bench, listing));
    }
    let cases = || {
        listings
            .iter()
            .flat_map(|(bench, listing)| listing.cases.iter().map(move |case| (bench, case)))
    };
    if arguments.format == OutputFormat::Json {
        print_json(&cases().map(|(bench, case)| listed(bench, case)).collect::<Vec<_>>())?;
        return Ok(Exit::Fine);
    }
    if arguments.choice.filter.is_none() && arguments.format == OutputFormat::Text {
        listings.iter().flat_map(|(_, listing)| &listing.workloads).for_each(print_workload);
        println!();
    }
    let mut table = Table::new(&["case", "work", "memory", "GPU memory", "status"]);
    for (_, case) in cases() {
        let (work, memory) = match (case.matmul_flops, case.bytes) {
            (0, 0) => ("-".to_owned(), "-".to_owned()),
            (0, bytes) => (display::bytes(bytes), display::bytes(case.host_bytes)),
            (flops, _) => {
                (format!("{:.2} GFLOP", flops as f64 / 1e9), display::bytes(case.host_bytes))
            }
        };
        let device_memory = case.device_bytes.map_or_else(|| "-".to_owned(), display::bytes);
        table.row(vec![case.case.clone(), work, memory, device_memory, status(case)]);
    }
    println!(
        "{}",
        if arguments.format == OutputFormat::Markdown { table.markdown() } else { table.text() }
    );
    Ok(Exit::Fine)
}

fn print_workload(workload: &ListedProblem) {
    println!("{}: {}", workload.name, workload.about);
    for [name, values, about] in &workload.axes {
        println!("    axis {name:<9} {values}: {about}");
    }
    for row in &workload.implementations {
        println!("    {:<14} {}", row.name, row.about);
    }
}

fn listed<'a>(bench: &'a str, case: &'a ListedCase) -> JsonCase<'a> {
    let ListedCase { matmul_flops, bytes, host_bytes, device_bytes, .. } = *case;
    JsonCase {
        bench,
        case: &case.case,
        status: status(case),
        matmul_flops,
        bytes,
        host_bytes,
        device_bytes,
    }
}

fn status(case: &ListedCase) -> String {
    case.reason
        .as_ref()
        .map_or_else(|| "runs here".to_owned(), |reason| format!("skipped: {reason}"))
}
