//! The NVTX ranges of a bench binary, as a listening tool sees them.

#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;

#[test]
fn a_tool_sees_session_case_warm_up_and_samples() {
    let folder = tempfile::tempdir().unwrap();
    let (tool, log) = (folder.path().join("listener.so"), folder.path().join("log"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture/nvtx_listener.c");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let compiled = Command::new(compiler)
        .args(["-shared", "-fPIC", "-o"])
        .arg(&tool)
        .arg(source)
        .status()
        .unwrap();
    assert!(compiled.success());
    let program =
        Path::new(env!("CARGO_BIN_EXE_kernelgate")).parent().unwrap().join("examples/fixture");
    assert!(
        program.is_file(),
        "{} is missing: run the whole `cargo test`, or `cargo build --examples` first",
        program.display()
    );
    let output = Command::new(program)
        .args([
            "--bench",
            "--noplot",
            "--warm-up-time",
            "0.01",
            "--measurement-time",
            "0.05",
            "--sample-size",
            "10",
            "n64_none",
        ])
        .current_dir(folder.path())
        .env("CARGO_MANIFEST_DIR", folder.path())
        .env("CARGO_TARGET_DIR", folder.path().join("target"))
        .env("NVTX_INJECTION64_PATH", &tool)
        .env("NVTX_LISTENER_LOG", &log)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&log).unwrap();
    let mut depth = 0;
    let mut ranges = Vec::new();
    for line in text.lines() {
        if line == "-" {
            depth -= 1;
        } else {
            ranges.push((depth, line));
            depth += 1;
        }
    }
    assert_eq!(depth, 0, "every range ends:\n{text}");
    assert_eq!(ranges[0], (0, "fixture"));
    assert_eq!(ranges[1], (1, "fixture/spin/n64_none/cpu/hot"));
    assert!(
        ranges[2..].iter().all(|range| [(2, "warm-up"), (2, "sample")].contains(range)),
        "{ranges:?}"
    );
    assert!(ranges[2..].contains(&(2, "warm-up")));
    // Criterion does not mark the end of its warm-up, so the last warm-up range may be called a
    // sample.
    assert!(ranges.iter().filter(|range| **range == (2, "sample")).count() >= 10, "{ranges:?}");
}
