//! `kernelgate profile`: what the time of a case goes to: on a GPU by kernel, as the hardware recorded
//! it, elsewhere by phase, as the host's clock has it.

use std::path::PathBuf;

use kernelgate::display::table::Table;
use kernelgate::display::{terminal, time};
use kernelgate::exit::Exit;
use kernelgate::protocol::{Action, CaseStatus, ProfiledCase, ResponseBody};
use kernelgate::record::Store;

use super::choice::{Choice, unexpected};
use super::output::{OutputFormat, json, print_json, write_all};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// How to print
    #[arg(long, value_enum, default_value = "text")]
    format: OutputFormat,
    /// Also write profile.txt, profile.md and profile.json into this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    let mut profiled: Vec<ProfiledCase> = Vec::new();
    for (bench, answer) in arguments.choice.ask(store, &Action::Profile)? {
        let ResponseBody::Profile(cases) = answer else { return Err(unexpected(&bench)) };
        profiled.extend(cases);
    }
    match arguments.format {
        OutputFormat::Json => print_json(&profiled)?,
        format => format.print(text(&profiled, format, terminal::columns()).trim_end()),
    }
    if let Some(folder) = &arguments.out {
        let files = [
            ("profile.txt", text(&profiled, OutputFormat::Text, None)),
            ("profile.md", text(&profiled, OutputFormat::Markdown, None)),
            ("profile.json", json(&profiled)?),
        ];
        write_all(folder, files)?;
    }
    let with = |status| profiled.iter().any(|case| case.status == status);
    anyhow::ensure!(
        with(CaseStatus::Ok) || with(CaseStatus::Failed),
        "nothing was profiled: every case was skipped"
    );
    Ok(if with(CaseStatus::Failed) { Exit::Inconclusive } else { Exit::Fine })
}

fn text(profiled: &[ProfiledCase], format: OutputFormat, columns: Option<usize>) -> String {
    let shown = |table: &Table| match format {
        OutputFormat::Markdown => table.markdown(),
        _ => table.text_within(columns),
    };
    profiled.iter().map(|case| case_text(case, format, &shown)).collect()
}

fn case_text(
    case: &ProfiledCase,
    format: OutputFormat,
    shown: &dyn Fn(&Table) -> String,
) -> String {
    if !case.phases.is_empty() {
        return phases_text(case, format, shown);
    }
    let Some(summary) = &case.summary else {
        let reason = format.words(case.reason.as_deref().unwrap_or_default());
        return format!("{}\n    {}: {reason}\n\n", case.case, case.status.name());
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
    let table = shown(&table);
    let idle = summary.span_ns.saturating_sub(summary.busy_ns);
    format!(
        "{}\n{table}\n{} from the first kernel's start to the last one's end, {} ({:.1}%) with \
         none running\n\n",
        case.case,
        time(summary.span_ns as f64),
        time(idle as f64),
        100.0 * idle as f64 / summary.span_ns as f64
    )
}

/// The phases of a case, and what they are.
fn phases_text(
    case: &ProfiledCase,
    format: OutputFormat,
    shown: &dyn Fn(&Table) -> String,
) -> String {
    let mut table =
        Table::new(&["phase", "times", "total", "each", "shortest", "longest", "threads busy"]);
    for phase in &case.phases {
        table.row(vec![
            phase.name.clone(),
            phase.count.to_string(),
            time(phase.total_ns),
            time(phase.total_ns / phase.count.max(1) as f64),
            time(phase.shortest_ns),
            time(phase.longest_ns),
            phase.busy_threads.map_or_else(|| "-".to_owned(), |busy| format!("{busy:.2}")),
        ]);
    }
    let table = shown(&table);
    let note = case.reason.as_deref().map(|note| format!("; {}", format.words(note)));
    format!(
        "{}\n{table}\nwall time of the host; launch: the call and the wait for its end, after \
         others; threads busy: CPU time over wall time{}\n\n",
        case.case,
        note.unwrap_or_default()
    )
}
