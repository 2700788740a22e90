//! Bench executables in their side's folder, and which of them take part.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::CompareError;
use crate::benches::{mark, versions};
use kernelgate::protocol;
use kernelgate::record::file::content_hash;

/// A bench executable in its side's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstalledBench {
    /// File name below `bin/`: the bench's name.
    pub bench: String,
    /// Content hash.
    pub hash: String,
    /// Newest version of the protocol that it and this program speak.
    pub version: u64,
}

/// The executables of a side.
#[derive(Debug, Clone, Default)]
pub struct InstalledBenches {
    /// Those that take trial requests, by name.
    pub ours: BTreeMap<String, InstalledBench>,
    /// Executables without this harness, by name, with the reason for leaving them alone.
    pub foreign: BTreeMap<String, String>,
    /// Every name that was found, wanted or not.
    pub names: Vec<String>,
}

/// Puts executables into `side/bin` and asks each whether it takes trial requests. To ask is to run
/// it, so only those are asked whose file holds the mark of this harness, and those wanted by name.
///
/// # Errors
/// When one of this harness knows no trials ([`CompareError::Refused`]) or cannot be copied.
pub fn install(
    side: &Path,
    found: &BTreeMap<String, PathBuf>,
    label: &str,
    wanted: &[String],
) -> Result<InstalledBenches, CompareError> {
    let bin = side.join("bin");
    let io = |path: &Path, cause: std::io::Error| CompareError::io("write", path, &cause);
    std::fs::create_dir_all(&bin).map_err(|cause| io(&bin, cause))?;
    let mut executables =
        InstalledBenches { names: found.keys().cloned().collect(), ..InstalledBenches::default() };
    for (bench, path) in
        found.iter().filter(|(bench, _)| wanted.is_empty() || wanted.contains(bench))
    {
        let marked = mark::is_in(path);
        if let Some(reason) = unmarked(&marked, bench).filter(|_| wanted.is_empty()) {
            executables.foreign.insert(bench.clone(), reason);
            continue;
        }
        let spoken = versions::ask(path);
        let version = match spoken.clone().map(versions::common) {
            Ok(Some(version)) => version,
            Err(why) if why == versions::IS_PROGRAM => continue,
            Err(_) if !matches!(marked, Ok(true)) => {
                let reason = "asked by --bench, it did not answer as a bench of this harness does";
                executables.foreign.insert(bench.clone(), reason.to_owned());
                continue;
            }
            _ => {
                return Err(CompareError::Refused {
                    field: "protocol".to_owned(),
                    side: format!("{label}, bench `{bench}`"),
                    found: spoken.map_or_else(
                        |why| format!("unknown ({why})"),
                        |(oldest, newest)| format!("{oldest} to {newest}"),
                    ),
                    wanted: format!("{} to {}", protocol::VERSIONS.0, protocol::VERSIONS.1),
                });
            }
        };
        let at = bin.join(bench);
        // A link where the file system allows, so that a later build does not change what is
        // compared.
        let _ = std::fs::remove_file(&at);
        if std::fs::hard_link(path, &at).is_err() {
            std::fs::copy(path, &at).map_err(|cause| io(&at, cause))?;
        }
        let hash =
            content_hash(&at).map_err(|error| CompareError::Usage(format!("failed to {error}")))?;
        executables
            .ours
            .insert(bench.clone(), InstalledBench { bench: bench.clone(), hash, version });
    }
    Ok(executables)
}

/// Why an executable is not run to ask it; none where its file holds the mark.
fn unmarked(marked: &std::io::Result<bool>, bench: &str) -> Option<String> {
    let why = match marked {
        Ok(true) => return None,
        Ok(false) => "its file has no mark of this harness".to_owned(),
        Err(cause) => format!("its file cannot be read ({cause})"),
    };
    Some(format!("{why}, so it was not run; `--bench {bench}` runs it all the same"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::benches::prebuilt::prebuilt;

    #[cfg(unix)]
    #[test]
    fn what_has_no_mark_is_run_only_where_it_is_named() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (side, ran) = (folder.path().join("side"), folder.path().join("ran"));
        let script = folder.path().join("innocent");
        // It mentions the variable that executables of an earlier version are known by.
        let text = format!("#!/bin/sh\n: KERNELGATE_SESSION\necho > {}\n", ran.display());
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let found = prebuilt(folder.path()).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["innocent"]);
        let installed = install(&side, &found, "base", &[]).unwrap();
        assert!(!ran.exists() && installed.ours.is_empty());
        let why = &installed.foreign["innocent"];
        assert!(why.contains("no mark") && why.contains("`--bench innocent`"), "{why}");
        let installed = install(&side, &found, "base", &["innocent".to_owned()]).unwrap();
        assert!(ran.exists() && installed.ours.is_empty());
        assert!(installed.foreign["innocent"].contains("did not answer"));
    }
}
