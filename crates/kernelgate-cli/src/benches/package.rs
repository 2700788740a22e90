//! Finds the Cargo package and workspace of a folder, and the package's folder of baselines, by
//! `cargo metadata`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kernelgate::record::RecordFoldersOfPackage;
use serde::Deserialize;

use super::cargo;
use crate::commands;

/// The fields of `cargo metadata`'s JSON output that kernelgate uses.
#[derive(Deserialize)]
struct CargoMetadataOutput {
    packages: Vec<CargoMetadataPackage>,
    workspace_root: PathBuf,
    target_directory: PathBuf,
}

#[derive(Deserialize)]
struct CargoMetadataPackage {
    #[serde(rename = "name")]
    package_name: String,
    manifest_path: PathBuf,
    #[serde(default)]
    targets: Vec<CargoMetadataTarget>,
}

/// A build target of a Cargo package (library, binary, bench), as `cargo metadata` lists it.
#[derive(Deserialize)]
struct CargoMetadataTarget {
    #[serde(rename = "name")]
    target_name: String,
    #[serde(rename = "kind")]
    target_kinds: Vec<String>,
    #[serde(default, rename = "required-features")]
    required_features: Vec<String>,
}

/// Returns the folders of the baselines and run records of the package that contains a folder. In a
/// workspace, the baselines lie in the nearest enclosing member package, else in the workspace's
/// root; run records lie in cargo's target folder. If the folder belongs to no Cargo package or
/// cargo fails, baselines and run records lie in the folder itself.
pub fn baseline_store_of_package(folder: &Path) -> RecordFoldersOfPackage {
    match read_cargo_metadata(folder) {
        Some(metadata) => {
            let roots =
                metadata.packages.iter().filter_map(|package| package.manifest_path.parent());
            let nearest = roots
                .filter(|root| folder.starts_with(root))
                .max_by_key(|root| root.components().count());
            RecordFoldersOfPackage::for_package_root(
                nearest.unwrap_or(&metadata.workspace_root),
                &metadata.target_directory,
            )
        }
        None => RecordFoldersOfPackage::record_folders_of_package_around_folder(folder),
    }
}

/// Returns the existing `baselines` folders of the workspace's other packages.
pub fn baseline_folders_of_other_packages(store: &RecordFoldersOfPackage) -> Vec<PathBuf> {
    let packages = read_cargo_metadata(&store.package_root)
        .map(|metadata| metadata.packages)
        .unwrap_or_default();
    let folders = packages.iter().filter_map(|package| package.manifest_path.parent());
    let baselines = folders.map(|folder| folder.join("baselines"));
    baselines.filter(|folder| *folder != store.baselines_folder && folder.is_dir()).collect()
}

/// Returns the benches of the package in this folder that need Cargo features, by bench name, each
/// with a message that names the features; cargo skips such benches silently.
pub fn benches_that_need_features(folder: &Path) -> BTreeMap<String, String> {
    let packages =
        read_cargo_metadata(folder).map(|metadata| metadata.packages).unwrap_or_default();
    let real = |folder: &Path| folder.canonicalize().ok();
    let own =
        packages.into_iter().filter(|it| it.manifest_path.parent().and_then(real) == real(folder));
    let benches = own.flat_map(|package| package.targets).filter(|target| {
        target.target_kinds.iter().any(|kind| kind == "bench")
            && !target.required_features.is_empty()
    });
    let why = |target: CargoMetadataTarget| {
        let features = target.required_features.join(",");
        (target.target_name, format!("Cargo builds it only with `--features {features}`"))
    };
    benches.map(why).collect()
}

/// A package of a Cargo workspace, with its name and `Cargo.toml`.
#[derive(Debug)]
pub struct CargoWorkspacePackage {
    /// Name of the Cargo package.
    pub package_name: String,
    /// Path of the `Cargo.toml` of this package.
    pub manifest_path: PathBuf,
}

impl CargoWorkspacePackage {
    /// Folder that contains this package's `Cargo.toml`.
    pub fn package_folder(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(Path::new("."))
    }
}

/// Finds the package with this name in the Cargo workspace that contains a folder. Without a name,
/// returns the workspace's only package, or the package in exactly this folder.
///
/// # Errors
/// Fails if the workspace has no package of that name, or several packages and no name was given.
pub fn find_workspace_member(
    folder: &Path,
    name: Option<&str>,
) -> Result<CargoWorkspacePackage, PackageLookupError> {
    let packages =
        read_cargo_metadata(folder).ok_or(PackageLookupError::NoCargoPackageInFolder)?.packages;
    let members = packages.into_iter().map(
        |CargoMetadataPackage { package_name: name, manifest_path, .. }| CargoWorkspacePackage {
            package_name: name,
            manifest_path,
        },
    );
    let mut members: Vec<CargoWorkspacePackage> = members.collect();
    let names = members.iter().map(|member| member.package_name.clone()).collect();
    let found = match name {
        Some(name) => members.iter().position(|member| member.package_name == name),
        None if members.len() == 1 => Some(0),
        None => members.iter().position(|member| member.package_folder() == folder),
    };
    let missing = name.map_or(PackageLookupError::SeveralPackages(names), |name| {
        PackageLookupError::UnknownPackage(name.to_owned())
    });
    found.map(|index| members.swap_remove(index)).ok_or(missing)
}

/// The reason why no package of a Cargo workspace was found or selected.
#[derive(Debug, thiserror::Error)]
pub enum PackageLookupError {
    /// Neither the folder nor a parent folder has a `Cargo.toml`, or cargo cannot read it.
    #[error("no package here: run `cargo init` first, or check `cargo metadata`")]
    NoCargoPackageInFolder,
    /// The Cargo workspace has no package of the requested name.
    #[error("--package {0}: the workspace has no such package")]
    UnknownPackage(String),
    /// The Cargo workspace has several packages, and the user named none.
    #[error("the workspace has several packages: pass --package with one of {}", .0.join(", "))]
    SeveralPackages(Vec<String>),
}

/// Returns whether a folder or one of its parent folders has a `Cargo.toml`.
pub fn is_in_a_cargo_package(folder: &Path) -> bool {
    folder.ancestors().any(|folder| folder.join("Cargo.toml").is_file())
}

/// Returns the error message that a folder belongs to no Cargo package.
pub fn not_in_a_package_message(folder: &Path) -> String {
    format!("no package here: neither {} nor a folder above it has a Cargo.toml", folder.display())
}

/// Runs `cargo metadata` in a folder; returns `None` if no `Cargo.toml` encloses the folder or
/// cargo fails, because a later build reports the reason.
fn read_cargo_metadata(folder: &Path) -> Option<CargoMetadataOutput> {
    is_in_a_cargo_package(folder).then_some(())?;
    let mut command = Command::new(cargo::cargo_program_path());
    command
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(folder)
        .env_remove("CARGO_MANIFEST_DIR");
    commands::print_command_if_verbose(&command);
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    serde_json::from_slice(&output.stdout).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_test_file(folder: &Path, file: &str, text: &str) {
        let path = folder.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn a_member_package_has_its_own_baselines_and_the_workspaces_target_folder() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        write_test_file(
            &root,
            "Cargo.toml",
            "[workspace]\nmembers = [\"member\"]\nresolver = \"3\"\n",
        );
        write_test_file(
            &root,
            "member/Cargo.toml",
            "[package]\nname = \"member\"\nversion = \"0.1.0\"\nedition = \"2024\"\n",
        );
        write_test_file(&root, "member/src/lib.rs", "");
        let folders = |folder: &Path| {
            (
                baseline_store_of_package(folder).baselines_folder,
                baseline_store_of_package(folder).package_root,
            )
        };
        let member = root.join("member");
        assert_eq!(folders(&member.join("src")), (member.join("baselines"), member.clone()));
        assert_eq!(folders(&root), (root.join("baselines"), root.clone()));
        assert_eq!(
            baseline_store_of_package(&member).runs_folder,
            baseline_store_of_package(&root).runs_folder
        );
    }
}
