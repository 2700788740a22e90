//! `kernelgate list`: workloads with their axes, implementations, and the selected cases.

use serde::Serialize;

use super::choice::Choice;
use super::output::{Format, print_json};
use kernelgate::display::table::Table;
use kernelgate::exit::Exit;
use kernelgate::workload::axis::Values;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Debug, Serialize)]
struct Listed {
    case: String,
    /// Whether it can run here, or why not.
    status: String,
    matmul_flops: u64,
    bytes: u64,
    host_bytes: u64,
    /// Declared by GPU implementations; absent where nothing is declared.
    device_bytes: Option<u64>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Exit> {
    let suites = kernelgate_suite::all();
    let place = arguments.choice.wanted().place(suites.iter().map(AsRef::as_ref))?;
    let selection = arguments.choice.select(&suites, &place)?;
    let mut listed = Vec::new();
    for group in &selection.groups {
        let problem = group.bound.problem();
        let work = problem.work();
        listed.extend(group.cases.iter().map(|case| Listed {
            case: case.id.clone(),
            status: "runs here".to_owned(),
            matmul_flops: work.matmul_flops(),
            bytes: work.total_bytes(),
            host_bytes: problem.host_bytes(),
            device_bytes: group.bound.device_bytes(case.index),
        }));
    }
    listed.extend(selection.skipped.iter().map(|(id, reason)| Listed {
        case: id.clone(),
        status: format!("skipped: {reason}"),
        matmul_flops: 0,
        bytes: 0,
        host_bytes: 0,
        device_bytes: None,
    }));
    if arguments.format == Format::Json {
        print_json(&listed)?;
        return Ok(Exit::Fine);
    }
    if arguments.choice.filter.is_none() && arguments.format == Format::Text {
        for suite in &suites {
            println!("{}: {}", suite.name(), suite.about());
            for axis in suite.axes() {
                let values = match axis.values {
                    Values::Number => "a number".to_owned(),
                    Values::OneOf(words) => words.join(" "),
                };
                println!("    axis {:<9} {values}: {}", axis.name, axis.about);
            }
            for row in suite.implementations() {
                println!("    {:<14} {}", row.name, row.about);
            }
        }
        println!();
    }
    let mut table = Table::new(&["case", "work", "memory", "GPU memory", "status"]);
    for case in &listed {
        let (work, memory) = match (case.matmul_flops, case.bytes) {
            (0, 0) => ("-".to_owned(), "-".to_owned()),
            (0, bytes) => (kernelgate::display::bytes(bytes), kernelgate::display::bytes(case.host_bytes)),
            (flops, _) => (format!("{:.2} GFLOP", flops as f64 / 1e9), kernelgate::display::bytes(case.host_bytes)),
        };
        let device_memory = case.device_bytes.map_or_else(|| "-".to_owned(), kernelgate::display::bytes);
        table.row(vec![case.case.clone(), work, memory, device_memory, case.status.clone()]);
    }
    println!("{}", if arguments.format == Format::Markdown { table.markdown() } else { table.text() });
    Ok(Exit::Fine)
}
