//! `kernelgate init`: adds a bench, its lines in the manifest, and a workflow. Existing files are
//! never overwritten, and if any file cannot be written none is.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use kernelgate::exit::ExitReason;
use kernelgate::record::file;
use kernelgate::record::text::printable_path;

use crate::benches::package::{self, WorkspaceMember};

/// Source of the bench in the README.
const BENCH_TEMPLATE: &str = include_str!("../../templates/bench.rs");
/// Name of the bench target in the README.
const DEFAULT_BENCH_NAME: &str = "own_kernel";
const WORKFLOW_TEMPLATE: &str = include_str!("../../templates/perf.yml");
/// Placeholder for the package's folder in the workflow file.
const PACKAGE_FOLDER_PLACEHOLDER: &str = "PACKAGE_FOLDER";
/// Largest `Cargo.toml` that is read, bytes.
const MAX_MANIFEST: u64 = 1 << 20;

#[derive(Debug, clap::Args)]
pub struct InitArguments {
    /// Package to add the bench to; required in a workspace of several packages
    #[arg(long, value_name = "NAME")]
    package: Option<String>,
    /// Name of the bench
    #[arg(long, value_name = "NAME", default_value = "kernels", value_parser = bench_name)]
    bench: String,
    /// Folder of the crate `kernelgate` in a clone, in place of the registry; needed until the
    /// crate is published
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,
    /// Write no GitHub workflow
    #[arg(long)]
    no_workflow: bool,
    /// Print the files and write none
    #[arg(long)]
    dry_run: bool,
}

/// A file to write, with its text.
struct NewFileContents {
    path: PathBuf,
    text: String,
}

pub fn run(arguments: &InitArguments) -> anyhow::Result<ExitReason> {
    let folder = std::env::current_dir()?;
    let member = package::find_member(&folder, arguments.package.as_deref())?;
    let root = member.folder();
    let mut new = vec![NewFileContents {
        path: root.join("benches").join(format!("{}.rs", arguments.bench)),
        text: BENCH_TEMPLATE.replace(DEFAULT_BENCH_NAME, &arguments.bench),
    }];
    if !arguments.no_workflow {
        let repository = root.ancestors().find(|it| it.join(".git").exists()).unwrap_or(root);
        let relative = root.strip_prefix(repository).ok().and_then(Path::to_str);
        let relative = relative.filter(|it| !it.is_empty()).unwrap_or(".");
        new.push(NewFileContents {
            path: repository.join(".github/workflows/perf.yml"),
            text: WORKFLOW_TEMPLATE.replace(PACKAGE_FOLDER_PLACEHOLDER, relative),
        });
    }
    for NewFileContents { path, .. } in &new {
        ensure!(!path.exists(), "{} exists: nothing was written", printable_path(path));
    }
    let dependency = dependency_line(arguments.path.as_deref())?;
    let manifest = NewFileContents {
        text: manifest_with_bench(&member, &arguments.bench, &dependency)?,
        path: member.manifest_path,
    };
    new.push(manifest);
    if arguments.dry_run {
        for NewFileContents { path, text } in &new {
            println!("# {}\n{text}", printable_path(path));
        }
        return Ok(ExitReason::Fine);
    }
    file::replace_files(new.iter().map(|it| (it.path.as_path(), it.text.as_str())))?;
    for NewFileContents { path, .. } in &new {
        println!("wrote {}", printable_path(path));
    }
    println!("next: cargo bench --bench {}", arguments.bench);
    if arguments.path.is_none() {
        println!(
            "if cargo finds no crate kernelgate, name a clone: --path CLONE/crates/kernelgate"
        );
    }
    Ok(ExitReason::Fine)
}

/// Checks a name that becomes a file, a Cargo target and an identifier.
fn bench_name(name: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let begins = name.starts_with(|c: char| c.is_ascii_lowercase());
    (begins && name.len() <= 64 && name.chars().all(plain))
        .then(|| name.to_owned())
        .ok_or_else(|| "use lowercase letters, digits and `_`".to_owned())
}

/// The line of the manifest that adds the dependency. A path is absolute, because `compare` builds
/// revisions in other folders.
fn dependency_line(clone: Option<&Path>) -> anyhow::Result<String> {
    let Some(folder) = clone else {
        return Ok(format!("kernelgate = \"{}\"", env!("CARGO_PKG_VERSION")));
    };
    let shown = printable_path(folder);
    let folder = folder.canonicalize().with_context(|| format!("--path {shown}"))?;
    ensure!(folder.join("Cargo.toml").is_file(), "--path {shown}: no Cargo.toml there");
    // JSON's quotes and escapes are valid in TOML.
    let quoted = serde_json::to_string(&folder.display().to_string())?;
    Ok(format!("kernelgate = {{ path = {quoted} }}"))
}

/// The manifest's text with the dependency and the bench added.
fn manifest_with_bench(
    member: &WorkspaceMember,
    bench: &str,
    dependency: &str,
) -> anyhow::Result<String> {
    let path = &member.manifest_path;
    let shown = printable_path(path).to_string();
    let text = file::read_untrusted_text(path, MAX_MANIFEST).with_context(|| shown.clone())?;
    let before: toml::Table = toml::from_str(&text).with_context(|| shown.clone())?;
    let named = |table: &str, name: &str| {
        before.get(table).and_then(toml::Value::as_table).is_some_and(|it| it.contains_key(name))
    };
    let mut added = text.clone();
    if !named("dev-dependencies", "kernelgate") && !named("dependencies", "kernelgate") {
        added = with_line_in_table(&added, "dev-dependencies", dependency);
    }
    let has_library = before.contains_key("lib") || member.folder().join("src/lib.rs").is_file();
    if has_library && !named("lib", "bench") {
        added = with_line_in_table(&added, "lib", "bench = false");
    }
    added.push_str(&format!("\n[[bench]]\nname = \"{bench}\"\nharness = false\n"));
    // The manifest was edited as text, so the result is parsed again: it must be a manifest with
    // this bench.
    let after: toml::Table = toml::from_str(&added).with_context(|| {
        format!("{shown}: its tables leave no place for a bench; add it by hand")
    })?;
    let benches = after.get("bench").and_then(toml::Value::as_array);
    let same = |it: &&toml::Value| it.get("name").and_then(toml::Value::as_str) == Some(bench);
    match benches.map_or(0, |all| all.iter().filter(same).count()) {
        1 => Ok(added),
        _ => bail!("{shown} has a bench `{bench}`: nothing was written"),
    }
}

/// Adds a line to a table of a TOML text; a missing table is appended.
fn with_line_in_table(text: &str, table: &str, line: &str) -> String {
    let header = format!("[{table}]");
    let place = text.lines().position(|it| it.trim() == header);
    let Some(place) = place else {
        return format!("{}\n\n{header}\n{line}\n", text.trim_end());
    };
    let mut lines: Vec<&str> = text.lines().collect();
    lines.insert(place + 1, line);
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_package(text: &str) -> (tempfile::TempDir, WorkspaceMember) {
        let folder = tempfile::tempdir().unwrap();
        let manifest_path = folder.path().join("Cargo.toml");
        std::fs::write(&manifest_path, text).unwrap();
        std::fs::create_dir(folder.path().join("src")).unwrap();
        std::fs::write(folder.path().join("src/lib.rs"), "").unwrap();
        (folder, WorkspaceMember { name: "a".to_owned(), manifest_path })
    }

    const DEPENDENCY_LINE: &str = "kernelgate = \"1\"";

    #[test]
    fn init_adds_lines_to_existing_tables_and_appends_missing_tables() {
        let (_folder, member) =
            test_package("[package]\nname = \"a\"\n\n[dev-dependencies]\nx = \"1\"\n");
        let text = manifest_with_bench(&member, "kernels", DEPENDENCY_LINE).unwrap();
        let expected = "[package]\nname = \"a\"\n\n[dev-dependencies]\nkernelgate = \"1\"\nx = \"1\"\n\n\
                        [lib]\nbench = false\n\n[[bench]]\nname = \"kernels\"\nharness = false\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn init_refuses_the_name_of_an_existing_bench() {
        let (folder, member) =
            test_package("[package]\nname = \"a\"\n[[bench]]\nname = \"kernels\"\n");
        let error =
            manifest_with_bench(&member, "kernels", DEPENDENCY_LINE).unwrap_err().to_string();
        let folder = folder.path().to_str().unwrap();
        insta::assert_snapshot!(error.replace(folder, "FOLDER"), @"FOLDER/Cargo.toml has a bench `kernels`: nothing was written");
    }

    #[test]
    fn init_refuses_names_that_no_bench_target_can_have() {
        for name in ["", "9a", "../x", "A", "a-b"] {
            assert!(bench_name(name).is_err(), "{name}");
        }
        assert_eq!(bench_name("my_kernels2"), Ok("my_kernels2".to_owned()));
    }
}
