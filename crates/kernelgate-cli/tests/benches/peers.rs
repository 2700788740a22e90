//! Tests of `kernelgate peers` as a process, with a recorded GPU run and a script in the place of
//! Python.

#![cfg(unix)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::package::ProcessOutcome;
use crate::package::outcome::redact_varying_parts;

const FORWARD_PROBLEM_ID: &str = "st_bif/forward/n33554432_t8_level8_f32_int8";

/// Runs `kernelgate peers` on the recorded run, with a "Python" that prints these lines.
fn run_peers_with_fake_python(run: &str, answer: &str, line: &str) -> ProcessOutcome {
    run_peers_and_return_request(run, answer, line).0
}

/// Runs `kernelgate peers` as above, and also returns the request that the fake Python got and the
/// GPUs that it may use.
fn run_peers_and_return_request(run: &str, answer: &str, line: &str) -> (ProcessOutcome, String) {
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
    let benches = crate::package::TempPackage::new();
    let output = Command::new(env!("CARGO_BIN_EXE_kernelgate"))
        .arg("peers")
        .args(line.split_whitespace())
        .args(["--records", folder.path().join("runs").to_str().unwrap()])
        .args(benches.bench_folder_flags().split(' '))
        .env("KERNELGATE_PYTHON", &python)
        .current_dir(folder.path())
        .output()
        .unwrap();
    let requested = std::fs::read_to_string(folder.path().join("asked")).unwrap_or_default();
    (output.into(), requested)
}

fn recorded_gpu_run_text() -> String {
    std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture/gpu_run.json"),
    )
    .unwrap()
}

fn echo_peer_environment(device: &str) -> String {
    format!(r#"echo '{{"torch": "2.11", "device": "{device}"}}'"#)
}

/// A shell command that prints the answer of a peer program for one peer of one problem.
fn echo_peer_time(id: &str, peer: &str, rest: &str) -> String {
    format!(r#"echo '{{"id": "{id}", "peer": "{peer}", {rest}}}'"#)
}

#[test]
fn peers_are_shown_beside_our_fastest_row() {
    let result = echo_peer_time(
        FORWARD_PROBLEM_ID,
        "torch/compile",
        r#""about": "a", "median_ns": 614200.0, "power": "steady", "clock_mhz": 1430.0"#,
    );
    let failed = echo_peer_time(
        FORWARD_PROBLEM_ID,
        "spikingjelly",
        r#""about": "b", "error": "not installed""#,
    );
    let answer = [echo_peer_environment("NVIDIA H200"), result, failed].join("\n");
    let (outcome, request) =
        run_peers_and_return_request(&recorded_gpu_run_text(), &answer, "forward");
    // The peer's 614.2 µs stand beside 307.1 µs of the row vectorized; the row fused is slower, so
    // it is not shown; the filter excludes the backward case.
    insta::assert_snapshot!(outcome.text_for_snapshot(), @r"
    exit 0
    NVIDIA H200, COMMIT+changes; peers: device NVIDIA H200, torch 2.11

    problem  peer  its time  power  ours  our time  ratio  of limit
    st_bif/forward/n33554432_t8_level8_f32_int8  torch/compile  N µs  steady  cuda/vectorized  N µs  2.00x  97.3%
    st_bif/forward/n33554432_t8_level8_f32_int8  spikingjelly  -  -  cuda/vectorized  N µs  -  97.3%

    ratio: the peer's time over ours; above 1 ours is faster
    no time for spikingjelly on st_bif/forward/n33554432_t8_level8_f32_int8: not installed
    -- stderr
    timing the peers of 1 st_bif problems
    ");
    insta::assert_snapshot!(request, @r#"[{"id":"st_bif/forward/n33554432_t8_level8_f32_int8","workload":"st_bif/forward","axes":{"dtype":"f32","level":"8","n":"33554432","spikes":"int8","t":"8"}}]GPU-b0e5e641-f958-7f88-4d2c-be86c83f9897"#);
}

#[test]
fn peers_of_a_run_over_two_gpus_see_both_and_stand_beside_the_library() {
    let mut run: serde_json::Value = serde_json::from_str(&recorded_gpu_run_text()).unwrap();
    let mut second = run["environment"]["gpus"][0].clone();
    second["uuid"] = "GPU-ffffffff-0000-0000-0000-000000000000".into();
    run["environment"]["gpus"].as_array_mut().unwrap().push(second);
    let mut case = run["cases"][format!("{FORWARD_PROBLEM_ID}/cuda/fused/hot")].clone();
    case["implementation"] = "cuda/nccl".into();
    run["cases"][format!("{FORWARD_PROBLEM_ID}/cuda/nccl/hot")] = case;
    let result =
        echo_peer_time(FORWARD_PROBLEM_ID, "torch", r#""about": "a", "median_ns": 614200.0"#);
    let answer = [echo_peer_environment("NVIDIA H200"), result].join("\n");
    let (outcome, request) = run_peers_and_return_request(&run.to_string(), &answer, "forward");
    insta::assert_snapshot!(outcome.text_for_snapshot(), @r"
    exit 0
    NVIDIA H200, COMMIT+changes; peers: device NVIDIA H200, torch 2.11

    problem  peer  its time  power  ours  our time  ratio  of limit
    st_bif/forward/n33554432_t8_level8_f32_int8  torch  N µs  -  cuda/vectorized  N µs  2.00x  97.3%
    st_bif/forward/n33554432_t8_level8_f32_int8  torch  N µs  -  cuda/nccl  N µs  1.27x  61.6%

    ratio: the peer's time over ours; above 1 ours is faster
    -- stderr
    timing the peers of 1 st_bif problems
    ");
    let first = run["environment"]["gpus"][0]["uuid"].as_str().unwrap();
    let both = format!("{first},GPU-ffffffff-0000-0000-0000-000000000000");
    assert_eq!(request.rsplit(']').next().unwrap().trim(), both);
}

#[test]
fn every_family_has_its_program() {
    let id = "denoise/loop/pi05_s50_p968_steps10_bf16";
    let mut run: serde_json::Value = serde_json::from_str(&recorded_gpu_run_text()).unwrap();
    let mut case = run["cases"][format!("{FORWARD_PROBLEM_ID}/cuda/fused/hot")].clone();
    case["implementation"] = "cuda/fused_overlap".into();
    case["problem"] =
        serde_json::json!({"model": "pi05", "s": "50", "p": "968", "steps": "10", "dtype": "bf16"});
    case["workload"] = "denoise/loop".into();
    run["cases"][format!("{id}/cuda/fused_overlap/hot")] = case;
    let result = echo_peer_time(id, "torch/cuda_graph", r#""about": "a", "median_ns": 30600000.0"#);
    let answer = [echo_peer_environment("NVIDIA H200"), result].join("\n");
    let (outcome, request) = run_peers_and_return_request(&run.to_string(), &answer, "denoise");
    insta::assert_snapshot!(outcome.text_for_snapshot(), @r"
    exit 0
    NVIDIA H200, COMMIT+changes; peers: device NVIDIA H200, torch 2.11

    problem  peer  its time  power  ours  our time  ratio  of limit
    denoise/loop/pi05_s50_p968_steps10_bf16  torch/cuda_graph  N ms  -  cuda/fused_overlap  N µs  63.27x  61.6%

    ratio: the peer's time over ours; above 1 ours is faster
    -- stderr
    timing the peers of 1 denoise problems
    ");
    insta::assert_snapshot!(request.lines().next().unwrap(), @r#"[{"id":"denoise/loop/pi05_s50_p968_steps10_bf16","workload":"denoise/loop","axes":{"dtype":"bf16","model":"pi05","p":"968","s":"50","steps":"10"}}]GPU-b0e5e641-f958-7f88-4d2c-be86c83f9897"#);
    let wrong = run_peers_with_fake_python(&run.to_string(), "echo nonsense", "denoise");
    insta::assert_snapshot!(wrong.refusal_message(2), @r"
    timing the peers of 1 denoise problems
    error: peers/denoise.py printed what is no result: nonsense: expected ident at line 1 column 2
    ");
}

#[test]
fn a_peer_on_another_device_is_refused() {
    let outcome = run_peers_with_fake_python(
        &recorded_gpu_run_text(),
        &echo_peer_environment("NVIDIA A100"),
        "",
    );
    insta::assert_snapshot!(outcome.refusal_message(4), @r"
    timing the peers of 2 st_bif problems
    refused: the run was on NVIDIA H200, the peers on NVIDIA A100
    ");
}

#[test]
fn errors_of_peer_programs_are_named() {
    let stranger = echo_peer_environment("NVIDIA H200")
        + "\necho '{\"id\": \"x\", \"peer\": \"p\", \"about\": \"a\", \"median_ns\": 1.0}'";
    let mut refusals = String::new();
    for (answer, line) in [
        ("echo nonsense", ""),
        ("echo 'No module named torch' >&2; exit 1", ""),
        ("", "--python /nowhere/python"),
        ("", "nothing_like_this"),
        ("", "("),
        (&*stranger, ""),
        ("head -c 10000000 /dev/zero", ""),
    ] {
        refusals += &format!(
            "{}\n",
            run_peers_with_fake_python(&recorded_gpu_run_text(), answer, line).refusal_message(2)
        );
    }
    insta::assert_snapshot!(refusals, @r"
    timing the peers of 2 st_bif problems
    error: peers/st_bif.py printed what is no result: nonsense: expected ident at line 1 column 2
    timing the peers of 2 st_bif problems
    error: peers/st_bif.py under FOLDER/python: No module named torch
    timing the peers of 2 st_bif problems
    error: failed to start /nowhere/python: --python names the one that has PyTorch: No such file or directory (os error 2)
    error: no hot GPU case of the last run has a peer: run `cargo bench` on a GPU first, or widen the filter
    error: the filter is not a regular expression: regex parse error:
        (
        ^
    error: unclosed group
    timing the peers of 2 st_bif problems
    error: peers/st_bif.py answers for x, which it was not asked
    timing the peers of 2 st_bif problems
    error: peers/st_bif.py printed more than 8388608 bytes, the limit
    ");
}

#[test]
fn timed_peers_are_shown_even_if_the_rest_fails() {
    let result = echo_peer_time(
        FORWARD_PROBLEM_ID,
        "torch/compile",
        r#""about": "a", "median_ns": 614200.0"#,
    );
    let begun = [echo_peer_environment("NVIDIA H200"), result, "printf '{\"id\": \"st'".to_owned()];
    let then = |last: &str| [&begun[..], &[last.to_owned()]].concat().join("\n");
    let stuck = run_peers_with_fake_python(
        &recorded_gpu_run_text(),
        &then("sleep 600"),
        "forward --wait 1s",
    );
    insta::assert_snapshot!(stuck.text_for_snapshot(), @r"
    exit 2
    NVIDIA H200, COMMIT+changes; peers: device NVIDIA H200, torch 2.11

    problem  peer  its time  power  ours  our time  ratio  of limit
    st_bif/forward/n33554432_t8_level8_f32_int8  torch/compile  N µs  -  cuda/vectorized  N µs  2.00x  97.3%

    ratio: the peer's time over ours; above 1 ours is faster
    not all: peers/st_bif.py under FOLDER/python gave no answer within 1 s (--wait sets this)
    -- stderr
    timing the peers of 1 st_bif problems
    error: peers/st_bif.py under FOLDER/python gave no answer within 1 s (--wait sets this)
    ");
    for (last, code, why) in [
        ("echo CUDA error >&2; exit 1", 2, "peers/st_bif.py under FOLDER/python: CUDA error"),
        // The peer program sends an interrupt (Ctrl-C) to kernelgate.
        ("kill -INT $PPID; sleep 600", 130, "interrupted, with peers/st_bif.py at work"),
    ] {
        let json = run_peers_with_fake_python(
            &recorded_gpu_run_text(),
            &then(last),
            "forward --format json",
        )
        .assert_exit(code)
        .stdout_as_json();
        assert_eq!(json["rows"][0]["peer_ns"], 614_200.0, "{json}");
        let ended_early = json["ended_early"].as_str().unwrap();
        assert_eq!(redact_varying_parts(ended_early), why);
    }
}

#[test]
fn a_hanging_peer_program_is_killed_with_its_children() {
    let pid = tempfile::NamedTempFile::new().unwrap();
    let hangs = format!("sleep 600 &\necho $! > {}\nwait", pid.path().display());
    insta::assert_snapshot!(run_peers_with_fake_python(&recorded_gpu_run_text(), &hangs, "--wait 1s").refusal_message(2), @r"
    timing the peers of 2 st_bif problems
    error: peers/st_bif.py under FOLDER/python gave no answer within 1 s (--wait sets this)
    ");
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
}

#[test]
fn a_run_on_the_cpu_has_no_peers() {
    let mut run: serde_json::Value = serde_json::from_str(&recorded_gpu_run_text()).unwrap();
    run["environment"]["gpus"][0]["uuid"] = "0,1 --all".into();
    insta::assert_snapshot!(run_peers_with_fake_python(&run.to_string(), "", "").refusal_message(2), @"error: the run's GPU `0,1 --all` is no id of one");
    run["environment"].as_object_mut().unwrap().remove("gpus");
    insta::assert_snapshot!(run_peers_with_fake_python(&run.to_string(), "", "").refusal_message(2), @"error: no hot GPU case of the last run has a peer: run `cargo bench` on a GPU first, or widen the filter");
}
