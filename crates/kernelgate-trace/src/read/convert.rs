//! Converts Nsight Systems reports (`.nsys-rep`) to SQLite by running `nsys export`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::error::TraceError;

/// Runs `nsys export` and returns the path of the SQLite export, with the temporary folder that is
/// deleted when the first value drops.
pub(super) fn export_nsys_report_to_sqlite(path: &Path) -> Result<(TempDir, PathBuf), TraceError> {
    let folder = tempfile::tempdir().map_err(TraceError::unreadable_file_error(path))?;
    let export = folder.path().join("trace.sqlite");
    let mut command = Command::new("nsys");
    command.args(["export", "--type", "sqlite", "--force-overwrite", "true", "--output"]);
    command.arg(&export).arg(path).stdout(Stdio::null());
    let by_hand = format!(
        "nsys export --type sqlite --output {} {}",
        path.with_extension("sqlite").display(),
        path.display()
    );
    run_nsys_export(path, command, &by_hand)?;
    Ok((folder, export))
}

fn run_nsys_export(path: &Path, mut command: Command, by_hand: &str) -> Result<(), TraceError> {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.stdin(Stdio::null()).stderr(Stdio::piped()).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let words = String::from_utf8_lossy(&output.stderr);
            let last = words.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
            Err(TraceError::trace_must_be_converted_error(
                path,
                format!("`{by_hand}` failed: {last}"),
            ))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(TraceError::trace_must_be_converted_error(
                path,
                format!("`{name}` is not installed here; where it is, run: {by_hand}"),
            ))
        }
        Err(error) => Err(TraceError::trace_must_be_converted_error(
            path,
            format!("{name} did not start: {error}"),
        )),
    }
}
