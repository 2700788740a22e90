//! `kernelgate init`: adds an example bench to a package, the lines for the bench to `Cargo.toml`,
//! and a CI workflow. `kernelgate init` never overwrites an existing file, and writes either all
//! files or none.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::file;
use kernelgate::record::text::path_for_terminal;

use crate::benches::package::{self, CargoWorkspacePackage};

/// Source of the example bench that `kernelgate init` writes; the README shows the same source.
const EXAMPLE_BENCH_SOURCE: &str = include_str!("../../templates/bench.rs");
/// Name of the bench target that `kernelgate init` adds if no name is given; the README uses it
/// too.
const DEFAULT_BENCH_NAME: &str = "own_kernel";
const CI_WORKFLOW_TEMPLATE: &str = include_str!("../../templates/perf.yml");
/// Placeholder in the template of the CI workflow, replaced by the package's folder.
const PACKAGE_FOLDER_PLACEHOLDER: &str = "PACKAGE_FOLDER";
/// Largest size in bytes of a `Cargo.toml` that is read.
const MAX_CARGO_TOML_BYTES: u64 = 1 << 20;

#[derive(Debug, clap::Args)]
pub struct InitCommandArguments {
    /// Package to which the bench is added; required in a workspace of several packages
    #[arg(id = "package", long = "package", value_name = "NAME")]
    package_name: Option<String>,
    /// Name of the bench
    #[arg(id = "bench", long = "bench", value_name = "NAME", default_value = "kernels", value_parser = check_bench_name)]
    new_bench_name: String,
    /// Folder of the crate `kernelgate` in a git clone, used in place of the crates.io version;
    /// needed until the crate is published
    #[arg(id = "path", long = "path", value_name = "DIR")]
    kernelgate_crate_folder: Option<PathBuf>,
    /// Write no GitHub workflow
    #[arg(long = "no-workflow")]
    skips_github_workflow: bool,
    /// Print the files of the new bench and write none
    #[arg(long)]
    dry_run: bool,
}

/// A file that `kernelgate init` writes, with its path and text.
struct FileToWrite {
    path_to_write: PathBuf,
    text_to_write: String,
}

pub fn run_init_command(arguments: &InitCommandArguments) -> anyhow::Result<ProcessExitReason> {
    let folder = std::env::current_dir()?;
    let member = package::find_workspace_member(&folder, arguments.package_name.as_deref())?;
    let root = member.package_folder();
    let mut new = vec![FileToWrite {
        path_to_write: root.join("benches").join(format!("{}.rs", arguments.new_bench_name)),
        text_to_write: EXAMPLE_BENCH_SOURCE.replace(DEFAULT_BENCH_NAME, &arguments.new_bench_name),
    }];
    if !arguments.skips_github_workflow {
        let repository = root.ancestors().find(|it| it.join(".git").exists()).unwrap_or(root);
        let relative = root.strip_prefix(repository).ok().and_then(Path::to_str);
        let relative = relative.filter(|it| !it.is_empty()).unwrap_or(".");
        new.push(FileToWrite {
            path_to_write: repository.join(".github/workflows/perf.yml"),
            text_to_write: CI_WORKFLOW_TEMPLATE.replace(PACKAGE_FOLDER_PLACEHOLDER, relative),
        });
    }
    for FileToWrite { path_to_write: path, .. } in &new {
        ensure!(!path.exists(), "{} exists: nothing was written", path_for_terminal(path));
    }
    let dependency = kernelgate_dependency_line(arguments.kernelgate_crate_folder.as_deref())?;
    let manifest = FileToWrite {
        text_to_write: cargo_toml_with_bench(&member, &arguments.new_bench_name, &dependency)?,
        path_to_write: member.manifest_path,
    };
    new.push(manifest);
    if arguments.dry_run {
        for FileToWrite { path_to_write: path, text_to_write: text } in &new {
            println!("# {}\n{text}", path_for_terminal(path));
        }
        return Ok(ProcessExitReason::Success);
    }
    file::replace_files_after_writing_all(
        new.iter().map(|it| (it.path_to_write.as_path(), it.text_to_write.as_str())),
    )?;
    for FileToWrite { path_to_write: path, .. } in &new {
        println!("wrote {}", path_for_terminal(path));
    }
    println!("next: cargo bench --bench {}", arguments.new_bench_name);
    if arguments.kernelgate_crate_folder.is_none() {
        println!(
            "if cargo finds no crate kernelgate, name a clone: --path CLONE/crates/kernelgate"
        );
    }
    Ok(ProcessExitReason::Success)
}

/// Checks that a name can be a file name, a Cargo bench target and a Rust identifier.
fn check_bench_name(name: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let begins = name.starts_with(|c: char| c.is_ascii_lowercase());
    (begins && name.len() <= 64 && name.chars().all(plain))
        .then(|| name.to_owned())
        .ok_or_else(|| "use lowercase letters, digits and `_`".to_owned())
}

/// The line of `Cargo.toml` that adds kernelgate as a dependency. The path of a local clone is
/// written as an absolute path, because `kernelgate compare` builds revisions in other folders.
fn kernelgate_dependency_line(clone: Option<&Path>) -> anyhow::Result<String> {
    let Some(folder) = clone else {
        return Ok(format!("kernelgate = \"{}\"", env!("CARGO_PKG_VERSION")));
    };
    let shown = path_for_terminal(folder);
    let folder = folder.canonicalize().with_context(|| format!("--path {shown}"))?;
    ensure!(folder.join("Cargo.toml").is_file(), "--path {shown}: no Cargo.toml there");
    // A string with JSON's quotes and escapes is also a valid TOML string.
    let quoted = serde_json::to_string(&folder.display().to_string())?;
    Ok(format!("kernelgate = {{ path = {quoted} }}"))
}

/// Returns the text of `Cargo.toml` with the dependency on kernelgate and the bench target added.
fn cargo_toml_with_bench(
    member: &CargoWorkspacePackage,
    bench: &str,
    dependency: &str,
) -> anyhow::Result<String> {
    let path = &member.manifest_path;
    let shown = path_for_terminal(path).to_string();
    let text = file::read_untrusted_text_up_to(path, MAX_CARGO_TOML_BYTES)
        .with_context(|| shown.clone())?;
    let before: toml::Table = toml::from_str(&text).with_context(|| shown.clone())?;
    let named = |table: &str, name: &str| {
        before.get(table).and_then(toml::Value::as_table).is_some_and(|it| it.contains_key(name))
    };
    let mut added = text.clone();
    if !named("dev-dependencies", "kernelgate") && !named("dependencies", "kernelgate") {
        added = add_line_to_toml_table(&added, "dev-dependencies", dependency);
    }
    let has_library =
        before.contains_key("lib") || member.package_folder().join("src/lib.rs").is_file();
    if has_library && !named("lib", "bench") {
        added = add_line_to_toml_table(&added, "lib", "bench = false");
    }
    added.push_str(&format!("\n[[bench]]\nname = \"{bench}\"\nharness = false\n"));
    // `Cargo.toml` was edited as text, so the result is parsed to check that it is valid and has
    // the new bench target.
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

/// Adds a line at the start of a table of a TOML text; a missing table is appended to the text.
fn add_line_to_toml_table(text: &str, table: &str, line: &str) -> String {
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

    fn package_with_cargo_toml(text: &str) -> (tempfile::TempDir, CargoWorkspacePackage) {
        let folder = tempfile::tempdir().unwrap();
        let manifest_path = folder.path().join("Cargo.toml");
        std::fs::write(&manifest_path, text).unwrap();
        std::fs::create_dir(folder.path().join("src")).unwrap();
        std::fs::write(folder.path().join("src/lib.rs"), "").unwrap();
        (folder, CargoWorkspacePackage { package_name: "a".to_owned(), manifest_path })
    }

    const KERNELGATE_DEPENDENCY_LINE: &str = "kernelgate = \"1\"";

    #[test]
    fn init_adds_lines_to_existing_tables_and_appends_missing_tables() {
        let (_folder, member) =
            package_with_cargo_toml("[package]\nname = \"a\"\n\n[dev-dependencies]\nx = \"1\"\n");
        let text = cargo_toml_with_bench(&member, "kernels", KERNELGATE_DEPENDENCY_LINE).unwrap();
        let expected = "[package]\nname = \"a\"\n\n[dev-dependencies]\nkernelgate = \"1\"\nx = \"1\"\n\n\
                        [lib]\nbench = false\n\n[[bench]]\nname = \"kernels\"\nharness = false\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn init_refuses_the_name_of_an_existing_bench() {
        let (folder, member) =
            package_with_cargo_toml("[package]\nname = \"a\"\n[[bench]]\nname = \"kernels\"\n");
        let error = cargo_toml_with_bench(&member, "kernels", KERNELGATE_DEPENDENCY_LINE)
            .unwrap_err()
            .to_string();
        let folder = folder.path().to_str().unwrap();
        insta::assert_snapshot!(error.replace(folder, "FOLDER"), @"FOLDER/Cargo.toml has a bench `kernels`: nothing was written");
    }

    #[test]
    fn init_refuses_names_that_no_bench_target_can_have() {
        for name in ["", "9a", "../x", "A", "a-b"] {
            assert!(check_bench_name(name).is_err(), "{name}");
        }
        assert_eq!(check_bench_name("my_kernels2"), Ok("my_kernels2".to_owned()));
    }
}
