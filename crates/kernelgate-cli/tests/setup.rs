//! Verbs for the first minutes: `init`, `completions`, `diff`, `--version`.

use std::path::Path;

use crate::outputs::{both_streams, snapshot};
use crate::package::{Outcome, Package};

/// A package of one member, or a workspace of two.
fn workspace(members: &[&str]) -> Package {
    let package = Package::new();
    let write = |name: &str, text: String| {
        let path = package.path(name);
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
    std::fs::create_dir(package.path(".git")).unwrap();
    package
}

fn init(package: &Package, flags: &str) -> Outcome {
    let mut command =
        package.command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), &format!("init {flags}"));
    command.env_remove("CARGO_MANIFEST_DIR").output().unwrap().into()
}

#[test]
fn init_writes_bench_manifest_and_workflow_once() {
    let package = workspace(&["mine"]);
    let read = |name: &str| std::fs::read_to_string(package.path(name)).unwrap_or_default();
    let before = read("mine/Cargo.toml");
    let shown = init(&package, "--dry-run");
    snapshot("setup", "init", &both_streams(&shown));
    assert_eq!(read("mine/Cargo.toml"), before);
    assert!(!package.path("mine/benches").exists());

    init(&package, "").expect(0, &["next: cargo bench --bench kernels", "--path CLONE/crates"]);
    assert!(read("mine/benches/kernels.rs").contains("Harness::new(\"kernels\""));
    assert!(read("mine/Cargo.toml").contains("[dev-dependencies]\nkernelgate = "));
    assert!(read(".github/workflows/perf.yml").contains("working-directory: mine"));

    let written = read("mine/Cargo.toml");
    init(&package, "").expect(2, &["kernels.rs exists: nothing was written"]);
    assert_eq!(read("mine/Cargo.toml"), written);
}

#[test]
fn init_in_a_workspace_of_several_packages_asks_for_one() {
    let package = workspace(&["one", "two"]);
    init(&package, "").expect(2, &["pass --package with one of one, two"]);
    init(&package, "--package three").expect(2, &["no such package"]);
    init(&package, "--package two --no-workflow").expect(0, &["two/benches/kernels.rs"]);
    assert!(!package.path(".github").exists());
}

#[test]
fn a_diff_of_two_runs_has_changes_and_no_verdict() {
    let package = Package::new();
    for session in ["before", "after"] {
        assert!(package.bench_command(session, "").output().unwrap().status.success());
        package.set_times(&package.record(session), 200_000.0);
    }
    package.set_case_times(&package.record("after"), "n64", 300_000.0);
    let outcome = package.kernelgate("diff before after");
    outcome.expect(0, &["+50.0%", "+0.0%", "not a verdict"]);
    package.kernelgate("diff before nothing").expect(2, &["nothing"]);
}

#[test]
fn completions_and_version_name_the_program() {
    let package = Package::new();
    package.kernelgate("completions bash").expect(0, &["_kernelgate()", "completions"]);
    package.kernelgate("completions none").expect(2, &["invalid value 'none'"]);
    package.kernelgate("--version").expect(0, &["kernelgate 0.1.0 ("]);
}
