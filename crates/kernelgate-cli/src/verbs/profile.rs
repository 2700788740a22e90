//! `kernelgate profile`: what the GPU's time of a case goes to, kernel by kernel, as the hardware
//! recorded it.

use kernelgate::display::table::Table;
use kernelgate::display::time;
use kernelgate::exit::Exit;
use kernelgate::protocol::{Action, CaseStatus, ProfiledCase, ResponseBody};
use kernelgate::record::Store;

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

pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    let mut profiled: Vec<ProfiledCase> = Vec::new();
    for (bench, answer) in arguments.choice.ask(store, &Action::Profile)? {
        let ResponseBody::Profile(cases) = answer else { return Err(unexpected(&bench)) };
        profiled.extend(cases);
    }
    match arguments.format {
        OutputFormat::Json => print_json(&profiled)?,
        format => profiled.iter().for_each(|case| print(case, format)),
    }
    let with = |status| profiled.iter().any(|case| case.status == status);
    anyhow::ensure!(
        with(CaseStatus::Ok) || with(CaseStatus::Failed),
        "nothing was profiled: every case was skipped"
    );
    Ok(if with(CaseStatus::Failed) { Exit::Inconclusive } else { Exit::Fine })
}

fn print(case: &ProfiledCase, format: OutputFormat) {
    println!("{}", case.case);
    let Some(summary) = &case.summary else {
        println!(
            "    {}: {}\n",
            case.status.name(),
            format.words(case.reason.as_deref().unwrap_or_default())
        );
        return;
    };
    let mut table =
        Table::new(&["kernel", "launches", "total", "of the span", "each", "shortest", "longest"]);
    for kernel in &summary.kernels {
        table.row(vec![
            kernel.name.clone(),
            kernel.count.to_string(),
            time(kernel.total_ns as f64),
            format!("{:.1}%", 100.0 * kernel.total_ns as f64 / summary.span_ns as f64),
            time(kernel.total_ns as f64 / kernel.count as f64),
            time(kernel.shortest_ns as f64),
            time(kernel.longest_ns as f64),
        ]);
    }
    println!("{}", if format == OutputFormat::Markdown { table.markdown() } else { table.text() });
    let idle = summary.span_ns.saturating_sub(summary.busy_ns);
    println!(
        "{} from the first kernel's start to the last one's end, {} ({:.1}%) with none running\n",
        time(summary.span_ns as f64),
        time(idle as f64),
        100.0 * idle as f64 / summary.span_ns as f64
    );
}
