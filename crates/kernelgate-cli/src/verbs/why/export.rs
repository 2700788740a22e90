//! `kernelgate export`: writes a trace as a timeline for Perfetto or Chrome's trace viewer.

use std::io::{BufWriter, ErrorKind, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::file;
use kernelgate::record::text::path_for_terminal;
use kernelgate_trace::export;
use kernelgate_trace::read::WantedTraceParts;

use super::trace_file;
use crate::verbs::shared::output::refuse_to_overwrite_input;

#[derive(Debug, Args)]
pub struct ExportCommandArguments {
    /// A trace: an SQLite export or report of Nsight Systems, JSON of PyTorch's profiler (.gz too)
    #[arg(id = "trace", value_name = "TRACE")]
    trace_file: PathBuf,
    /// The viewer's format
    #[arg(long, value_enum, default_value_t)]
    format: TimelineFormat,
    /// Use only GPU work that was launched inside ranges of this path, or of a path with this end;
    /// `*` matches any text
    #[arg(id = "range", long = "range", value_name = "PATH")]
    range_path_pattern: Option<String>,
    /// File to which the timeline is written [default: standard output]
    #[arg(id = "out", long = "out", value_name = "FILE")]
    timeline_output_file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum TimelineFormat {
    /// Chrome's JSON trace format, for ui.perfetto.dev and chrome://tracing
    #[default]
    Perfetto,
}

pub fn run_export_command(arguments: &ExportCommandArguments) -> anyhow::Result<ProcessExitReason> {
    if let Some(out) = &arguments.timeline_output_file {
        refuse_to_overwrite_input("--out", out, &arguments.trace_file)?;
    }
    let tables = WantedTraceParts { reads_everything_else: false, ..WantedTraceParts::ALL };
    let trace = trace_file::read_trace_inside_range(
        &arguments.trace_file,
        &tables,
        arguments.range_path_pattern.as_deref(),
    )?;
    let TimelineFormat::Perfetto = arguments.format;
    match &arguments.timeline_output_file {
        None => {
            let written =
                export::write_perfetto_json(&trace, &mut BufWriter::new(std::io::stdout().lock()));
            if written.as_ref().is_err_and(|error| error.kind() == ErrorKind::BrokenPipe) {
                std::process::exit(ProcessExitReason::BROKEN_PIPE_EXIT_CODE);
            }
            written.context("failed to write to standard output")?;
        }
        Some(out) => {
            let failed = || format!("--out: failed to write {}", out.display());
            // The timeline is written to a temporary file and renamed at the end, because an
            // incomplete timeline would look complete.
            let mut file =
                BufWriter::new(file::create_temporary_file_beside(out).with_context(failed)?);
            export::write_perfetto_json(&trace, &mut file)
                .and_then(|()| file.flush())
                .with_context(failed)?;
            let whole = file.into_inner().map_err(|error| error.into_error());
            let renamed = whole.and_then(|file| file.persist(out).map_err(|error| error.error));
            renamed.with_context(failed)?;
            println!("{}: open it at https://ui.perfetto.dev", path_for_terminal(out));
        }
    }
    Ok(ProcessExitReason::Success)
}
