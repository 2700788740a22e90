//! Tests of the verbs and flags that a new user calls first: `init`, `completions`, `--version`.

use std::path::Path;

use crate::outputs::{assert_text_snapshot, exit_code_and_both_streams};
use crate::package::{ProcessOutcome, TempPackage};

/// Makes a package if there is one member, or else a workspace of two packages.
fn package_or_workspace(members: &[&str]) -> TempPackage {
    let package = TempPackage::new();
    let write = |name: &str, text: String| {
        let path = package.package_path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let listed = members.iter().map(|member| format!("\"{member}\"")).collect::<Vec<_>>();
    write(
        "Cargo.toml",
        format!("[workspace]\nresolver = \"3\"\nmembers = [{}]\n", listed.join(", ")),
    );
    for member in members {
        write(
            &format!("{member}/Cargo.toml"),
            format!("[package]\nname = \"{member}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n"),
        );
        write(&format!("{member}/src/lib.rs"), String::new());
    }
    std::fs::create_dir(package.package_path(".git")).unwrap();
    package
}

fn run_init_verb(package: &TempPackage, flags: &str) -> ProcessOutcome {
    let mut command = package
        .package_command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), &format!("init {flags}"));
    command.env_remove("CARGO_MANIFEST_DIR").output().unwrap().into()
}

#[test]
fn init_writes_bench_manifest_and_workflow_once() {
    let package = package_or_workspace(&["mine"]);
    let read = |name: &str| std::fs::read_to_string(package.package_path(name)).unwrap_or_default();
    let before = read("mine/Cargo.toml");
    let shown = run_init_verb(&package, "--dry-run");
    assert_text_snapshot("setup", "init", &exit_code_and_both_streams(&shown));
    assert_eq!(read("mine/Cargo.toml"), before);
    assert!(!package.package_path("mine/benches").exists());

    run_init_verb(&package, "").assert_exit(0);
    assert!(read("mine/benches/kernels.rs").contains("Harness::new(\"kernels\""));
    assert!(read("mine/Cargo.toml").contains("[dev-dependencies]\nkernelgate = "));
    assert!(read(".github/workflows/perf.yml").contains("working-directory: mine"));

    let written = read("mine/Cargo.toml");
    insta::assert_snapshot!(run_init_verb(&package, "").refusal_message(2), @"error: FOLDER/mine/benches/kernels.rs exists: nothing was written");
    assert_eq!(read("mine/Cargo.toml"), written);
}

#[test]
fn init_in_a_workspace_of_several_packages_asks_for_one() {
    let package = package_or_workspace(&["one", "two"]);
    insta::assert_snapshot!(run_init_verb(&package, "").refusal_message(2), @"error: the workspace has several packages: pass --package with one of one, two");
    insta::assert_snapshot!(run_init_verb(&package, "--package three").refusal_message(2), @"error: --package three: the workspace has no such package");
    run_init_verb(&package, "--package two --no-workflow").assert_exit(0);
    assert!(package.package_path("two/benches/kernels.rs").is_file());
    assert!(!package.package_path(".github").exists());
}

#[test]
fn completions_and_version_name_the_program() {
    let package = TempPackage::new();
    let bash = package.run_kernelgate("completions bash");
    assert!(bash.assert_exit(0).stdout.contains("_kernelgate()"), "{}", bash.stdout);
    insta::assert_snapshot!(package.run_kernelgate("completions none").refusal_message(2), @r"
    error: invalid value 'none' for '<SHELL>'
      [possible values: bash, elvish, fish, powershell, zsh]

    For more information, try '--help'.
    ");
    let version = package.run_kernelgate("--version");
    let (name, commit) = version.assert_exit(0).stdout.split_once(" (").unwrap();
    assert_eq!(name, concat!("kernelgate ", env!("CARGO_PKG_VERSION")));
    assert!(commit.ends_with(")\n"), "{commit}");
}
