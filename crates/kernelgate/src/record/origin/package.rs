//! Identifies the Cargo package whose benches a run measured. Several packages may share one target
//! folder, and thus the folder of run records.

use std::fmt;
use std::io::Read as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::record::files::text::join_lines_with_spaces;
use kernelgate_cuda::regular_file;

const CARGO_MANIFEST_FILE_NAME: &str = "Cargo.toml";
/// Size of the largest `Cargo.toml` that is read completely, bytes.
const MAX_CARGO_MANIFEST_BYTES: u64 = 1 << 20;

/// A Cargo package. Name and manifest path of a Cargo package; they are equal in all checkouts of
/// the package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CargoPackageId {
    /// Name of the package.
    pub name: String,
    /// Path of the package's manifest relative to the root of its workspace, such as
    /// "crates/layernorm/Cargo.toml".
    #[serde(rename = "manifest")]
    pub manifest_path: String,
}

impl CargoPackageId {
    /// Returns the package whose manifest is in a folder; `None` if there is no manifest, or one
    /// without package, as at some workspace roots.
    pub fn in_folder(root: &Path) -> Option<CargoPackageId> {
        let root = std::path::absolute(root).ok()?;
        let name = package_name_in_manifest(&read_cargo_manifest(&root)?)?;
        let is_workspace = |folder: &&Path| {
            read_cargo_manifest(folder).is_some_and(|it| manifest_has_workspace_table(&it))
        };
        let workspace = root.ancestors().find(is_workspace).unwrap_or(&root);
        let folder = root.strip_prefix(workspace).unwrap_or(Path::new(""));
        let manifest = folder.join(CARGO_MANIFEST_FILE_NAME).to_string_lossy().replace('\\', "/");
        Some(Self {
            name: join_lines_with_spaces(&name),
            manifest_path: join_lines_with_spaces(&manifest),
        })
    }
}

/// "layernorm (crates/layernorm/Cargo.toml)".
impl fmt::Display for CargoPackageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.manifest_path)
    }
}

fn read_cargo_manifest(folder: &Path) -> Option<String> {
    let mut text = String::new();
    let file =
        regular_file::open_file_unless_device_or_pipe(&folder.join(CARGO_MANIFEST_FILE_NAME))
            .ok()?;
    file.take(MAX_CARGO_MANIFEST_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Returns each line of a Cargo manifest, with the header of the TOML table that contains the line.
fn manifest_lines_with_table(manifest: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut table = "";
    manifest.lines().map(str::trim).map(move |line| {
        if line.starts_with('[') {
            table = line.split(']').next().unwrap_or_default().trim_matches(['[', ' ']);
        }
        (table, line)
    })
}

/// Returns the value of `name` in the manifest's table `package`, in the format that `cargo new`
/// writes.
fn package_name_in_manifest(manifest: &str) -> Option<String> {
    let of_package = manifest_lines_with_table(manifest).filter(|(table, _)| *table == "package");
    let mut values = of_package.filter_map(|(_, line)| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "name").then_some(value)
    });
    let quoted = values.next()?.trim().strip_prefix(['"', '\''])?;
    Some(quoted.split(['"', '\'']).next()?.to_owned())
}

fn manifest_has_workspace_table(manifest: &str) -> bool {
    manifest_lines_with_table(manifest)
        .any(|(table, _)| table == "workspace" || table.starts_with("workspace."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_cargo_manifest(folder: &Path, manifest: &str) {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(CARGO_MANIFEST_FILE_NAME), manifest).unwrap();
    }

    #[test]
    fn a_member_package_is_named_with_its_path_in_the_workspace() {
        let folder = tempfile::tempdir().unwrap();
        let member = folder.path().join("crates").join("member");
        write_cargo_manifest(folder.path(), "[workspace]\nmembers = [\"crates/*\"]\n");
        write_cargo_manifest(
            &member,
            "# name = \"no\"\n[package]\nname = \"member\" # ours\n[lib]\nname = \"x\"\n",
        );
        assert_eq!(CargoPackageId::in_folder(folder.path()), None);
        assert_eq!(
            CargoPackageId::in_folder(&member).unwrap().to_string(),
            "member (crates/member/Cargo.toml)"
        );
        write_cargo_manifest(folder.path(), "[package]\nname='root'\n\n[workspace.dependencies]\n");
        assert_eq!(
            CargoPackageId::in_folder(folder.path()).unwrap().to_string(),
            "root (Cargo.toml)"
        );
        assert_eq!(
            CargoPackageId::in_folder(&member).unwrap().manifest_path,
            "crates/member/Cargo.toml"
        );
    }

    #[test]
    fn a_package_without_a_workspace_is_its_own_root() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(CargoPackageId::in_folder(folder.path()), None);
        write_cargo_manifest(folder.path(), "[ package ]\nversion = \"1\"\nname = \"alone\"\n");
        assert_eq!(
            CargoPackageId::in_folder(folder.path()).unwrap().to_string(),
            "alone (Cargo.toml)"
        );
        write_cargo_manifest(folder.path(), "[package]\nname.workspace = true\n");
        assert_eq!(CargoPackageId::in_folder(folder.path()), None);
    }
}
