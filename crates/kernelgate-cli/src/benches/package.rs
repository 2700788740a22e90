//! Describes the Cargo package in the current folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kernelgate::record::BaselineStore;
use serde::Deserialize;

use super::cargo;
use crate::commands;

/// The part of `cargo metadata`'s output that is needed here.
#[derive(Deserialize)]
struct CargoMetadata {
    packages: Vec<MetadataPackage>,
    workspace_root: PathBuf,
    target_directory: PathBuf,
}

#[derive(Deserialize)]
struct MetadataPackage {
    name: String,
    manifest_path: PathBuf,
    #[serde(default)]
    targets: Vec<MetadataTarget>,
}

/// A build target of a package.
#[derive(Deserialize)]
struct MetadataTarget {
    name: String,
    kind: Vec<String>,
    #[serde(default, rename = "required-features")]
    required_features: Vec<String>,
}

/// Folders of the files of the package around a folder. In a workspace that is the member whose
/// folder is nearest upwards, else the root; the target folder is cargo's. Without a package or
/// without cargo, the folder itself is used.
pub fn store(folder: &Path) -> BaselineStore {
    match cargo_metadata(folder) {
        Some(metadata) => {
            let roots =
                metadata.packages.iter().filter_map(|package| package.manifest_path.parent());
            let nearest = roots
                .filter(|root| folder.starts_with(root))
                .max_by_key(|root| root.components().count());
            BaselineStore::at(
                nearest.unwrap_or(&metadata.workspace_root),
                &metadata.target_directory,
            )
        }
        None => BaselineStore::around_folder(folder),
    }
}

/// Returns the folders of baselines of the workspace's other packages.
pub fn other_baselines(store: &BaselineStore) -> Vec<PathBuf> {
    let packages =
        cargo_metadata(&store.root).map(|metadata| metadata.packages).unwrap_or_default();
    let folders = packages.iter().filter_map(|package| package.manifest_path.parent());
    let baselines = folders.map(|folder| folder.join("baselines"));
    baselines.filter(|folder| *folder != store.baselines && folder.is_dir()).collect()
}

/// Benches of the package in a folder that cargo skips silently because a feature is off: by name,
/// with the features that each needs.
pub fn unbuilt_benches(folder: &Path) -> BTreeMap<String, String> {
    let packages = cargo_metadata(folder).map(|metadata| metadata.packages).unwrap_or_default();
    let real = |folder: &Path| folder.canonicalize().ok();
    let own =
        packages.into_iter().filter(|it| it.manifest_path.parent().and_then(real) == real(folder));
    let benches = own.flat_map(|package| package.targets).filter(|target| {
        target.kind.iter().any(|kind| kind == "bench") && !target.required_features.is_empty()
    });
    let why = |target: MetadataTarget| {
        let features = target.required_features.join(",");
        (target.name, format!("Cargo builds it only with `--features {features}`"))
    };
    benches.map(why).collect()
}

/// A package of a Cargo workspace.
#[derive(Debug)]
pub struct WorkspaceMember {
    /// Name of the package.
    pub name: String,
    /// Path of the member's `Cargo.toml`.
    pub manifest_path: PathBuf,
}

impl WorkspaceMember {
    /// The folder of the member's manifest.
    pub fn folder(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(Path::new("."))
    }
}

/// The package of a name in the workspace around a folder. Without a name, returns the package
/// whose folder is the nearest one upwards, or the only package.
///
/// # Errors
/// Fails if there is no such package, or several without a name.
pub fn find_member(
    folder: &Path,
    name: Option<&str>,
) -> Result<WorkspaceMember, PackageLookupError> {
    let packages = cargo_metadata(folder).ok_or(PackageLookupError::NoPackage)?.packages;
    let members = packages
        .into_iter()
        .map(|MetadataPackage { name, manifest_path, .. }| WorkspaceMember { name, manifest_path });
    let mut members: Vec<WorkspaceMember> = members.collect();
    let names = members.iter().map(|member| member.name.clone()).collect();
    let found = match name {
        Some(name) => members.iter().position(|member| member.name == name),
        None if members.len() == 1 => Some(0),
        None => members.iter().position(|member| member.folder() == folder),
    };
    let missing = name.map_or(PackageLookupError::Ambiguous(names), |name| {
        PackageLookupError::Unknown(name.to_owned())
    });
    found.map(|index| members.swap_remove(index)).ok_or(missing)
}

/// The reason why no package was found.
#[derive(Debug, thiserror::Error)]
pub enum PackageLookupError {
    /// Neither the folder nor a parent folder has a manifest, or cargo cannot read it.
    #[error("no package here: run `cargo init` first, or check `cargo metadata`")]
    NoPackage,
    /// The workspace has no package of that name.
    #[error("--package {0}: the workspace has no such package")]
    Unknown(String),
    /// The workspace has several packages, and none was named.
    #[error("the workspace has several packages: pass --package with one of {}", .0.join(", "))]
    Ambiguous(Vec<String>),
}

/// Returns whether a folder or one of its parents has a `Cargo.toml`.
pub fn has_manifest(folder: &Path) -> bool {
    folder.ancestors().any(|folder| folder.join("Cargo.toml").is_file())
}

/// Returns the message that a folder belongs to no package.
pub fn no_package_message(folder: &Path) -> String {
    format!("no package here: neither {} nor a folder above it has a Cargo.toml", folder.display())
}

/// Runs `cargo metadata`. Returns `None` without a manifest upwards, or if cargo cannot read it: a
/// later build then reports the reason.
fn cargo_metadata(folder: &Path) -> Option<CargoMetadata> {
    has_manifest(folder).then_some(())?;
    let mut command = Command::new(cargo::cargo_program());
    command
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(folder)
        .env_remove("CARGO_MANIFEST_DIR");
    commands::print_command(&command);
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    serde_json::from_slice(&output.stdout).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, file: &str, text: &str) {
        let path = folder.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn a_member_package_has_its_own_baselines_and_the_workspaces_target_folder() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        write(&root, "Cargo.toml", "[workspace]\nmembers = [\"member\"]\nresolver = \"3\"\n");
        write(
            &root,
            "member/Cargo.toml",
            "[package]\nname = \"member\"\nversion = \"0.1.0\"\nedition = \"2024\"\n",
        );
        write(&root, "member/src/lib.rs", "");
        let folders = |folder: &Path| (store(folder).baselines, store(folder).root);
        let member = root.join("member");
        assert_eq!(folders(&member.join("src")), (member.join("baselines"), member.clone()));
        assert_eq!(folders(&root), (root.join("baselines"), root.clone()));
        assert_eq!(store(&member).runs, store(&root).runs);
    }
}
