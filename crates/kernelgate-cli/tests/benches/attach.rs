//! The examples of attached rows in a package of their own: they build, are listed and skipped
//! without a GPU, and have verified times with one. Examples that need another cudarc, or CubeCL,
//! are built and run in packages of their own (`ci/examples`).

#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;

use crate::package::outcome::redact_varying_parts;
use crate::package::outside::TempCargoPackage;
use crate::package::{ProcessOutcome, lines_with_word, rustc_flags_linking_libraries};

const ATTACHED_EXAMPLES_FOLDER: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/attached");

fn read_example_file(file: &str) -> String {
    std::fs::read_to_string(Path::new(ATTACHED_EXAMPLES_FOLDER).join(file)).unwrap()
}

fn package_with_attached_benches(benches: &[&str]) -> TempCargoPackage {
    let outside = TempCargoPackage::new(&[]);
    let mut manifest = "[package]\nname = \"attached\"\nversion = \"0.1.0\"\nedition = \
                        \"2024\"\n[lib]\nbench = false\n[profile.bench]\ndebug = false\n"
        .to_owned();
    for bench in benches {
        manifest += &format!("[[bench]]\nname = \"{bench}\"\nharness = false\n");
        outside.write_file(
            &format!("benches/{bench}.rs"),
            &read_example_file(&format!("benches/{bench}.rs")),
        );
    }
    outside.write_file("Cargo.toml", &manifest);
    for file in ["build.rs", "src/lib.rs", "kernels/axpy.c", "kernels/axpy.ptx"] {
        outside.write_file(file, &read_example_file(file));
    }
    let cubin = "kernels/axpy.sm_90.cubin";
    std::fs::copy(Path::new(ATTACHED_EXAMPLES_FOLDER).join(cubin), outside.package_path(cubin))
        .unwrap();
    outside
}

fn run_program_in_package(outside: &TempCargoPackage, program: &str, line: &str) -> ProcessOutcome {
    let mut command: Command = outside.package_command(program, line);
    command.env(
        "CARGO_ENCODED_RUSTFLAGS",
        rustc_flags_linking_libraries(&["kernelgate", "libloading"]),
    );
    command.output().unwrap().into()
}

#[test]
fn examples_are_short() {
    for bench in ["other_cudarc", "c_library", "cubin", "../../cubecl/benches/cubecl"] {
        let text = read_example_file(&format!("benches/{bench}.rs"));
        let code = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with("//"));
        assert!(code.count() < 30, "{bench}");
        assert!(text.lines().all(|line| line.len() <= 100), "{bench}");
    }
}

#[test]
fn attached_rows_are_listed_and_timed_where_there_is_a_gpu() {
    let outside = package_with_attached_benches(&["c_library", "cubin"]);
    let list = run_program_in_package(&outside, env!("CARGO_BIN_EXE_kernelgate"), "list");
    insta::assert_snapshot!(lines_with_word(&list.assert_exit(0).stdout, "cuda/c"), @r"
    cuda/c_library attached
    cuda/cubin     attached
    attached/axpy/n16777216/cuda/c_library/hot, and 3 more
    ");
    let (on_gpu, arch) = match kernelgate_cuda::testing::lock_first_gpu() {
        Some((device, _alone)) => (true, device.gpu_properties().kernel_architecture.clone()),
        None => (false, String::new()),
    };
    if !on_gpu {
        return;
    }
    let bench = |name: &str| {
        let line = format!("bench --offline --bench {name} -- --quick --noplot");
        run_program_in_package(&outside, env!("CARGO"), &line)
    };
    let timed = bench("c_library");
    eprintln!("{}", timed.stdout);
    timed.assert_exit(0);
    let cubin = bench("cubin");
    cubin.assert_exit(0);
    // The example's cubin is for sm_90, so the case is skipped on a card of another architecture.
    let shown = cubin.stdout.contains("attached/axpy/n16777216/cuda/cubin/hot");
    assert_eq!(shown, arch.starts_with("sm_90"), "{}", cubin.stdout_and_stderr());
}

/// Tests the first bench example of the README, and a copy that names a tensor which its definition
/// lacks.
#[test]
fn the_shortest_bench_runs_or_skips_and_its_mistakes_need_no_gpu() {
    let code = include_str!("../../../../examples/own_kernel.rs");
    let unknown = code.replace(r#"["x", "y", "out"], |at"#, r#"["x", "z", "out"], |at"#);
    let outside = TempCargoPackage::new(&[("own_kernel", code), ("unknown", &unknown)]);
    let bench = |name: &str| -> ProcessOutcome {
        let line = format!("bench --offline --bench {name} -- --quick --noplot");
        outside.package_command(env!("CARGO"), &line).output().unwrap().into()
    };
    let on_gpu = kernelgate_cuda::testing::lock_first_gpu();
    let complete = bench("own_kernel");
    let skipped =
        complete.assert_exit(0).stdout.lines().any(|line| line.starts_with("skipped 3: no GPU"));
    assert_eq!(skipped, on_gpu.is_none(), "{}", complete.stdout_and_stderr());
    let unknown = bench("unknown");
    insta::assert_snapshot!(unknown.error_message(2), @"error: example/own_kernel/n1048576: the row `cuda/saxpy` takes a tensor `z`, the definition has `x`, `y`, `out`");
}

/// Source of a bench with a CPU workload that has no reference.
const BENCH_WITHOUT_REFERENCE_SOURCE: &str = r#"
use std::process::ExitCode;
use kernelgate::prelude::*;
use kernelgate::workload::SourceOfExpectedOutputs;

struct Scale { n: usize }

impl Problem for Scale {
    fn inputs(&self, seed: u64) -> Tensors {
        Tensors::new().with_tensor("x", [self.n], random::normal_values(seed, "x", self.n))
    }
    fn reference(&self, _: &Tensors) -> Vec<Expected> { Vec::new() }
    fn source_of_expected_outputs(&self) -> SourceOfExpectedOutputs { SourceOfExpectedOutputs::NotCompared }
    fn work(&self) -> Work { Work::default() }
    fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-3, relative_l2: 1e-3 } }
    fn host_memory_bytes(&self) -> u64 { self.n as u64 * 16 }
}

const SCALE: Workload<Scale> = Workload {
    name: "unknown/scale", about: "y = a x", revision: 1,
    axes: &[Axis::number("n", "elements")],
    default_selection_lines: &["n=4096"], accelerator_selection_lines: &[], thorough_selection_lines: &[],
    bind: |point| Ok(Scale { n: point.number("n")? }),
};

const ROWS: &[Implementation<Scale>] = &[Implementation {
    implementation_name: "cpu", description: "scales", supports: |_| Ok(()),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let outputs = Tensors::new().with_output("y", [problem.n], Dtype::F32);
        CpuTask::new(inputs, outputs, |inputs, outputs| {
            outputs.f32_mut("y").iter_mut().zip(inputs.f32_elements("x")).for_each(|(y, x)| *y = A * x);
        })
    }),
}];

const A: f32 = 2.0;

fn main() -> ExitCode { Harness::new("unknown", vec![join_workload_with_implementations(&SCALE, ROWS)]).main() }
"#;

#[test]
fn a_filter_for_one_bench_is_not_an_error_in_another() {
    let other = BENCH_WITHOUT_REFERENCE_SOURCE.replace("unknown/scale", "other/scale");
    let outside =
        TempCargoPackage::new(&[("first", BENCH_WITHOUT_REFERENCE_SOURCE), ("second", &other)]);
    let line = "bench --offline -- --quick --noplot --backend cpu other/scale";
    let both: ProcessOutcome =
        outside.package_command(env!("CARGO"), line).output().unwrap().into();
    let messages = format!("{}{}", both.assert_exit(0).stdout, both.stderr);
    insta::assert_snapshot!(lines_with_word(&messages, "other/scale"), @r"
    other/scale/n4096
    unverified, nothing says whether the outputs are right: other/scale/n4096/cpu/hot
    computed from inputs that were read before timing: a remembered result would pass: other/scale/n4096/cpu/hot
    unknown: no case matches `other/scale`; `--list` shows the cases
    [1/1] other/scale/n4096/cpu/hot
    ");
}

#[test]
fn an_unverified_row_is_marked_and_compared_with_the_build_before() {
    let outside = TempCargoPackage::new(&[("unknown", BENCH_WITHOUT_REFERENCE_SOURCE)]);
    outside.write_file(".gitignore", "target\n");
    outside.commit_all_files();
    let kernelgate = |line: &str| outside.run_kernelgate(line);
    insta::assert_snapshot!(kernelgate("verify --backend cpu").text_for_snapshot(), @r"
    exit 0
    case  status  checked  max error  relative L2  same bits again
    unknown/scale/n4096/cpu/hot  unverified  0%  -  -  yes
    1 ok, 0 failed, 0 skipped
    -- stderr
    verifying unknown/scale/n4096/cpu/hot
    ");
    let bench = "bench --offline --bench unknown -- --quick --noplot --backend cpu";
    let timed: ProcessOutcome =
        outside.package_command(env!("CARGO"), bench).output().unwrap().into();
    insta::assert_snapshot!(lines_with_word(&timed.assert_exit(0).stdout, "unverified"), @"unverified, nothing says whether the outputs are right: unknown/scale/n4096/cpu/hot");

    let compare = "compare --base HEAD --backend cpu --relative 2 --tolerated 4 --max-blocks 1 \
                   --case-time 0.02s --format json";
    // The head's outputs are within the tolerance of the base's outputs, so the case counts as
    // verified.
    outside.write_file(
        "benches/unknown.rs",
        &BENCH_WITHOUT_REFERENCE_SOURCE.replace("A: f32 = 2.0", "A: f32 = 2.0001"),
    );
    let json = kernelgate(compare).stdout_as_json();
    assert_eq!(json["unverified"], serde_json::json!([]), "{json}");
    outside.write_file(
        "benches/unknown.rs",
        &BENCH_WITHOUT_REFERENCE_SOURCE.replace("A: f32 = 2.0", "A: f32 = 2.1"),
    );
    let wrong = kernelgate(compare).assert_exit(1).stdout_as_json();
    insta::assert_snapshot!(redact_varying_parts(&format!("{:#}", wrong["failed"])), @r#"
    {
      "unknown/scale/n4096/cpu/hot": {
        "kind": "too_far",
        "names": {
          "output": "y"
        },
        "numbers": {
          "actual": N,
          "expected": N,
          "max_error": N,
          "max_error_allowed": 0.001,
          "relative_l2": N,
          "relative_l2_allowed": 0.001,
          "worst": 2241.0
        },
        "text": "against the outputs of the base's build: output `y`: max error N (allowed 1e-3), relative L2 N (allowed 1e-3); worst at PLACE"
      }
    }
    "#);
}
