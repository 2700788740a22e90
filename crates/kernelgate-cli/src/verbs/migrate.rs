//! `kernelgate baseline migrate`: files of older versions in the form that is written now.

use std::path::{Path, PathBuf};

use super::lock::locked;
use crate::gate::baseline::figures;
use kernelgate::display;
use kernelgate::exit::Exit;
use kernelgate::record::file::{self, Record as _};
use kernelgate::record::text::{printable, printable_path};
use kernelgate::record::{Baseline, Store};

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The files [default: every baseline of the package]
    files: Vec<PathBuf>,
}

pub fn run(arguments: &Arguments, store: &Store) -> anyhow::Result<Exit> {
    let all = || -> anyhow::Result<Vec<PathBuf>> {
        Ok(store.baseline_files()?.into_iter().map(|(.., path)| path).collect())
    };
    let files = if arguments.files.is_empty() { all()? } else { arguments.files.clone() };
    anyhow::ensure!(!files.is_empty(), "no baselines in {}", store.baselines.display());
    // One that cannot be used says so, and the others are migrated all the same.
    let mut broken = false;
    for path in &files {
        match migrate(path) {
            Ok(said) => println!("{}", printable(&said)),
            Err(error) => {
                broken = true;
                eprintln!("error: {}", printable(&format!("{error:#}")));
            }
        }
    }
    Ok(if broken { Exit::Usage } else { Exit::Fine })
}

/// Writes a file anew, once what the gate uses of it was found to be the same; what was done.
fn migrate(path: &Path) -> anyhow::Result<String> {
    let failed_to = |error| anyhow::anyhow!("failed to {error}");
    let path = &file::followed(path);
    // Where there is no such file, to read it says so best.
    let _lock = path.is_file().then(|| locked(path)).transpose()?;
    let before: Baseline = file::read(path).map_err(failed_to)?;
    let (found, newest) = (file::version::<Baseline>(path), Baseline::VERSION);
    if found == Some(newest) {
        return Ok(format!("{}: as it is, in version {newest}", path.display()));
    }
    let sealed = file::has_checksum(path);
    let size = || std::fs::metadata(path).map_or(0, |facts| facts.len());
    let bytes_before = size();
    // Read back from where nobody looks, before the file is replaced.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let beside = tempfile::tempdir_in(folder.unwrap_or(Path::new(".")))?;
    let trial = beside.path().join("migrated.json");
    file::write(&trial, &before).map_err(failed_to)?;
    let after: Baseline = file::read(&trial).map_err(failed_to)?;
    anyhow::ensure!(
        figures(&before) == figures(&after) && before == after,
        "{}: what the gate uses would change: the file is as it was",
        path.display()
    );
    file::write(path, &before).map_err(failed_to)?;
    if !sealed {
        eprintln!(
            "warning: {} had no checksum, so that nobody knows whether it was edited: it was \
             taken as it was, and has one now",
            printable_path(path)
        );
    }
    let runs = before.cases.values().flat_map(|case| case.runs.values());
    Ok(format!(
        "{}: version {} to {newest}, {} to {}; {} cases, {} runs: {} samples became {} medians \
         and spreads; every figure that the gate uses is as before, bit by bit",
        path.display(),
        found.unwrap_or_default(),
        display::bytes(bytes_before),
        display::bytes(size()),
        before.cases.len(),
        before.runs.len(),
        runs.clone().fold(0, |sum: u64, run| sum.saturating_add(run.samples)),
        runs.count(),
    ))
}
