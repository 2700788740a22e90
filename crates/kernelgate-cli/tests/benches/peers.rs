//! `kernelgate peers` from outside: with a recorded GPU run, and a script in the place of Python.

#![cfg(unix)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const FORWARD: &str = "st_bif/forward/n33554432_t8_level8_f32_int8";

/// Runs `kernelgate peers` on the recorded run, with a "Python" that prints these lines, and
/// returns its exit code and text.
fn peers(run: &str, answer: &str, line: &str) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    let session = folder.path().join("runs/s");
    std::fs::create_dir_all(&session).unwrap();
    std::fs::write(session.join("st_bif.json"), run).unwrap();
    let python = folder.path().join("python");
    std::fs::write(
        &python,
        format!(
            "#!/bin/sh\ncat > {0}/asked\necho $CUDA_VISIBLE_DEVICES >> {0}/asked\n{answer}\n",
            folder.path().display()
        ),
    )
    .unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let benches = crate::package::Package::new();
    let output = Command::new(env!("CARGO_BIN_EXE_kernelgate"))
        .arg("peers")
        .args(line.split_whitespace())
        .args(["--records", folder.path().join("runs").to_str().unwrap()])
        .args(benches.dir().split(' '))
        .env("KERNELGATE_PYTHON", &python)
        .current_dir(folder.path())
        .output()
        .unwrap();
    let requested = std::fs::read_to_string(folder.path().join("asked")).unwrap_or_default();
    let text = format!(
        "{}\n{}\n{requested}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(!text.contains("panicked at"), "{text}");
    (output.status.code().unwrap(), text)
}

fn recorded() -> String {
    std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture/gpu_run.json"),
    )
    .unwrap()
}

fn environment(device: &str) -> String {
    format!(r#"echo '{{"torch": "2.11", "device": "{device}"}}'"#)
}

/// A shell command that prints the answer of a peer program for one peer of one problem.
fn line(id: &str, peer: &str, rest: &str) -> String {
    format!(r#"echo '{{"id": "{id}", "peer": "{peer}", {rest}}}'"#)
}

#[track_caller]
fn expect((code, text): &(i32, String), expected: i32, words: &[&str]) {
    assert_eq!(*code, expected, "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "`{word}` is not in:\n{text}"));
}

#[test]
fn peers_are_shown_beside_our_fastest_row() {
    let result = line(
        FORWARD,
        "torch/compile",
        r#""about": "a", "median_ns": 614200.0, "power": "steady", "clock_mhz": 1430.0"#,
    );
    let failed = line(FORWARD, "spikingjelly", r#""about": "b", "error": "not installed""#);
    let answer = [environment("NVIDIA H200"), result, failed].join("\n");
    let outcome = peers(&recorded(), &answer, "forward");
    // 614.2 µs against 307.1 µs of vectorized; fused is slower and is not shown; the backward was
    // filtered out.
    expect(
        &outcome,
        0,
        &[
            "torch/compile",
            "cuda/vectorized",
            "2.00x",
            "steady",
            "97.",
            "not installed",
            r#""spikes":"int8""#,
            "GPU-b0e5e641",
        ],
    );
    assert!(!outcome.1.contains("cuda/fused") && !outcome.1.contains("backward"), "{}", outcome.1);
}

#[test]
fn peers_of_a_run_over_two_gpus_see_both_and_stand_beside_the_library() {
    let mut run: serde_json::Value = serde_json::from_str(&recorded()).unwrap();
    let mut second = run["environment"]["gpus"][0].clone();
    second["uuid"] = "GPU-ffffffff-0000-0000-0000-000000000000".into();
    run["environment"]["gpus"].as_array_mut().unwrap().push(second);
    let mut case = run["cases"][format!("{FORWARD}/cuda/fused/hot")].clone();
    case["implementation"] = "cuda/nccl".into();
    run["cases"][format!("{FORWARD}/cuda/nccl/hot")] = case;
    let result = line(FORWARD, "torch", r#""about": "a", "median_ns": 614200.0"#);
    let answer = [environment("NVIDIA H200"), result].join("\n");
    let outcome = peers(&run.to_string(), &answer, "forward");
    let cards = ["GPU-b0e5e641", ",GPU-ffffffff-0000"];
    expect(&outcome, 0, &["cuda/vectorized", "cuda/nccl", cards[0], cards[1]]);
}

#[test]
fn every_family_has_its_program() {
    let id = "denoise/loop/pi05_s50_p968_steps10_bf16";
    let mut run: serde_json::Value = serde_json::from_str(&recorded()).unwrap();
    let mut case = run["cases"][format!("{FORWARD}/cuda/fused/hot")].clone();
    case["implementation"] = "cuda/fused_overlap".into();
    case["problem"] =
        serde_json::json!({"model": "pi05", "s": "50", "p": "968", "steps": "10", "dtype": "bf16"});
    case["workload"] = "denoise/loop".into();
    run["cases"][format!("{id}/cuda/fused_overlap/hot")] = case;
    let result = line(id, "torch/cuda_graph", r#""about": "a", "median_ns": 30600000.0"#);
    let answer = [environment("NVIDIA H200"), result].join("\n");
    expect(
        &peers(&run.to_string(), &answer, "denoise"),
        0,
        &["torch/cuda_graph", "cuda/fused_overlap", r#""steps":"10""#],
    );
    expect(
        &peers(&run.to_string(), "echo nonsense", "denoise"),
        2,
        &["peers/denoise.py", "nonsense"],
    );
}

#[test]
fn a_peer_on_another_device_is_refused() {
    expect(
        &peers(&recorded(), &environment("NVIDIA A100"), ""),
        4,
        &["NVIDIA H200", "NVIDIA A100"],
    );
}

#[test]
fn errors_of_peer_programs_are_named() {
    expect(&peers(&recorded(), "echo nonsense", ""), 2, &["peers/st_bif.py", "nonsense"]);
    expect(
        &peers(&recorded(), "echo 'No module named torch' >&2; exit 1", ""),
        2,
        &["No module named torch"],
    );
    expect(
        &peers(&recorded(), "", "--python /nowhere/python"),
        2,
        &["/nowhere/python", "--python"],
    );
    expect(&peers(&recorded(), "", "nothing_like_this"), 2, &["cargo bench"]);
    expect(&peers(&recorded(), "", "("), 2, &["regular expression"]);
    let stranger = environment("NVIDIA H200")
        + "\necho '{\"id\": \"x\", \"peer\": \"p\", \"about\": \"a\", \"median_ns\": 1.0}'";
    expect(&peers(&recorded(), &stranger, ""), 2, &["was not asked"]);
}

#[test]
fn timed_peers_are_shown_even_if_the_rest_fails() {
    let result = line(FORWARD, "torch/compile", r#""about": "a", "median_ns": 614200.0"#);
    let begun = [environment("NVIDIA H200"), result, "printf '{\"id\": \"st'".to_owned()];
    let stuck = [&begun[..], &["sleep 600".to_owned()]].concat().join("\n");
    let shown = ["torch/compile", "2.00x", "not all: ", "gave no answer within 1 s (--wait"];
    expect(&peers(&recorded(), &stuck, "forward --wait 1s"), 2, &shown);
    let json = peers(&recorded(), &stuck, "forward --wait 1s --format json");
    expect(&json, 2, &["\"ended_early\": \"peers/st_bif.py", "\"peer_ns\": 614200.0"]);
    let dies = [&begun[..], &["echo CUDA error >&2; exit 1".to_owned()]].concat().join("\n");
    expect(&peers(&recorded(), &dies, "forward"), 2, &["2.00x", "not all: ", "CUDA error"]);
    // The peer program sends Ctrl-C to the program.
    let signal = "kill -INT $PPID; sleep 600".to_owned();
    let interrupted = [&begun[..], &[signal]].concat().join("\n");
    let shown = ["2.00x", "not all: interrupted, with peers/st_bif.py at work"];
    expect(&peers(&recorded(), &interrupted, "forward"), 130, &shown);
}

#[test]
fn a_peer_program_that_hangs_is_ended_with_what_it_started() {
    let pid = tempfile::NamedTempFile::new().unwrap();
    let hangs = format!("sleep 600 &\necho $! > {}\nwait", pid.path().display());
    expect(&peers(&recorded(), &hangs, "--wait 1s"), 2, &["gave no answer within 1 s (--wait"]);
    let pid = std::fs::read_to_string(pid.path()).unwrap();
    let alive = || {
        let status = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        status.is_ok_and(|status| !status.contains(") Z ") && !status.contains(") X "))
    };
    let pause = || std::thread::sleep(std::time::Duration::from_millis(10));
    assert!((0..400).any(|_| {
        pause();
        !alive()
    }));
    let flood = "head -c 10000000 /dev/zero";
    expect(&peers(&recorded(), flood, ""), 2, &["printed more than 8388608 bytes, the limit"]);
}

#[test]
fn a_run_on_the_cpu_has_no_peers() {
    let mut run: serde_json::Value = serde_json::from_str(&recorded()).unwrap();
    run["environment"]["gpus"][0]["uuid"] = "0,1 --all".into();
    expect(&peers(&run.to_string(), "", ""), 2, &["the run's GPU `0,1 --all` is no id of one"]);
    run["environment"].as_object_mut().unwrap().remove("gpus");
    expect(&peers(&run.to_string(), "", ""), 2, &["no hot GPU case"]);
}
