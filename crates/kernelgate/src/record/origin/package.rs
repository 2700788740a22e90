//! The Cargo package whose benches a run measured. Packages may share a target folder, and with it
//! the folder of runs.

use std::fmt;
use std::io::Read as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::record::files::text::on_one_line;
use kernelgate_cuda::regular_file;

const MANIFEST_FILE: &str = "Cargo.toml";
/// Longest `Cargo.toml` that is read, bytes.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// A Cargo package. All checkouts of a package count as the same package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CargoPackage {
    /// Name of the package.
    pub name: String,
    /// Manifest of the package, relative to the root of the workspace:
    /// "crates/layernorm/Cargo.toml".
    pub manifest: String,
}

impl CargoPackage {
    /// The package whose manifest lies in a folder; `None` without a manifest, or if the manifest
    /// has no package, as at the root of a workspace.
    pub fn at(root: &Path) -> Option<CargoPackage> {
        let root = std::path::absolute(root).ok()?;
        let name = package_name(&manifest_text(&root)?)?;
        let is_workspace =
            |folder: &&Path| manifest_text(folder).is_some_and(|it| has_workspace_table(&it));
        let workspace = root.ancestors().find(is_workspace).unwrap_or(&root);
        let folder = root.strip_prefix(workspace).unwrap_or(Path::new(""));
        let manifest = folder.join(MANIFEST_FILE).to_string_lossy().replace('\\', "/");
        Some(Self { name: on_one_line(&name), manifest: on_one_line(&manifest) })
    }
}

/// "layernorm (crates/layernorm/Cargo.toml)".
impl fmt::Display for CargoPackage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.manifest)
    }
}

fn manifest_text(folder: &Path) -> Option<String> {
    let mut text = String::new();
    let file = regular_file::open_regular_file(&folder.join(MANIFEST_FILE)).ok()?;
    file.take(MAX_MANIFEST_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Header of the table that each line of a manifest belongs to, and the line.
fn manifest_lines(manifest: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut table = "";
    manifest.lines().map(str::trim).map(move |line| {
        if line.starts_with('[') {
            table = line.split(']').next().unwrap_or_default().trim_matches(['[', ' ']);
        }
        (table, line)
    })
}

/// Value of `name` in the manifest's table `package`, as `cargo new` writes it.
fn package_name(manifest: &str) -> Option<String> {
    let of_package = manifest_lines(manifest).filter(|(table, _)| *table == "package");
    let mut values = of_package.filter_map(|(_, line)| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "name").then_some(value)
    });
    let quoted = values.next()?.trim().strip_prefix(['"', '\''])?;
    Some(quoted.split(['"', '\'']).next()?.to_owned())
}

fn has_workspace_table(manifest: &str) -> bool {
    manifest_lines(manifest)
        .any(|(table, _)| table == "workspace" || table.starts_with("workspace."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, manifest: &str) {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(MANIFEST_FILE), manifest).unwrap();
    }

    #[test]
    fn a_member_package_is_named_with_its_path_in_the_workspace() {
        let folder = tempfile::tempdir().unwrap();
        let member = folder.path().join("crates").join("member");
        write(folder.path(), "[workspace]\nmembers = [\"crates/*\"]\n");
        write(
            &member,
            "# name = \"no\"\n[package]\nname = \"member\" # ours\n[lib]\nname = \"x\"\n",
        );
        assert_eq!(CargoPackage::at(folder.path()), None);
        assert_eq!(
            CargoPackage::at(&member).unwrap().to_string(),
            "member (crates/member/Cargo.toml)"
        );
        write(folder.path(), "[package]\nname='root'\n\n[workspace.dependencies]\n");
        assert_eq!(CargoPackage::at(folder.path()).unwrap().to_string(), "root (Cargo.toml)");
        assert_eq!(CargoPackage::at(&member).unwrap().manifest, "crates/member/Cargo.toml");
    }

    #[test]
    fn a_package_without_a_workspace_is_its_own_root() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(CargoPackage::at(folder.path()), None);
        write(folder.path(), "[ package ]\nversion = \"1\"\nname = \"alone\"\n");
        assert_eq!(CargoPackage::at(folder.path()).unwrap().to_string(), "alone (Cargo.toml)");
        write(folder.path(), "[package]\nname.workspace = true\n");
        assert_eq!(CargoPackage::at(folder.path()), None);
    }
}
