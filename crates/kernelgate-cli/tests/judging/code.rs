//! `kernelgate compare --kernels`: lists the kernels whose machine code differs between two builds,
//! without a GPU.

#![cfg(unix)]

use crate::package::scratch::{SCRATCH_BENCH_SOURCE, TempRepository};
use crate::package::{TempPackage, lines_with_word};
use kernelgate_cuda::compiler::nvrtc;
use serde_json::json;

/// A kernel with 48 values a thread, all live across a barrier. With two blocks of 1024 threads on
/// a multiprocessor a thread has 32 registers, so most of the values spill.
const SPILLING_KERNEL_SOURCE: &str = r#"
extern "C" __global__ __launch_bounds__(1024, BLOCKS) void scratch(float* x) {
    float a[48];
    #pragma unroll
    for (int i = 0; i < 48; ++i) a[i] = x[threadIdx.x + i * 1024];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 48; ++i) x[threadIdx.x + i * 1024] = a[i] * a[(i * 7 + 5) % 48];
}
extern "C" __global__ void scratch_other(float* x) { x[threadIdx.x] *= 2.0f; }
"#;

/// Source of the scratch bench with a CUDA file of two kernels; `blocks` is the minimum number of
/// blocks per multiprocessor of the first kernel.
fn bench_source_with_two_kernels(blocks: usize) -> String {
    let row = |symbol: &str| {
        format!(
            "cuda::KernelSpec {{ listed_build_parameters: || vec![()], ..cuda::KernelSpec::new(
                cuda::Source::new(\"scratch\", TEXT), \"{symbol}\", 1024, |()| [1, 1, 1]) }}"
        )
    };
    let rows = ["scratch", "scratch_other"].map(row).join(", ");
    let text = SPILLING_KERNEL_SOURCE.replace("BLOCKS", &blocks.to_string());
    let listed = format!("kernels(kernelgate_cuda::spec::list_kernel_rows(&[{rows}])).main()");
    format!(
        "const TEXT: &str = r#\"{text}\"#;\n{}",
        SCRATCH_BENCH_SOURCE.replace(".main()", &format!(".{listed}"))
    )
}

#[test]
fn a_spill_between_two_builds_is_found_without_a_gpu() {
    if let Err(error) = nvrtc::found_nvrtc_version() {
        println!("skipped: {error}");
        return;
    }
    let scratch = TempRepository::new();
    scratch.write_file("benches/spin.rs", &bench_source_with_two_kernels(1));
    scratch.commit_sources("kernels");
    scratch.write_file("benches/spin.rs", &bench_source_with_two_kernels(2));
    let outcome = scratch.run_comparison("--base main --kernels sm_90a --format json");
    assert_eq!(lines_with_word(&outcome.assert_exit(0).stderr, "round 1"), "");
    let result = outcome.stdout_as_json();
    let kernels = &result["kernels"][0];
    assert_eq!((&kernels["arch"], &kernels["same"]), (&"sm_90a".into(), &1.into()), "{kernels}");
    let changed = kernels["changed"].as_object().unwrap();
    assert_eq!(changed.keys().collect::<Vec<_>>(), ["scratch"]);
    let words = changed["scratch"].as_str().unwrap();
    let spills = words.split(", ").find_map(|it| it.strip_prefix("spill stores 0 -> "));
    assert!(spills.is_some_and(|it| it != "0") && words.contains("-> 32"), "{words}");
    assert_eq!(kernels["not_compared"], json!({}));
}

#[test]
fn a_missing_record_is_reported_with_the_command_that_makes_it() {
    let package = TempPackage::new();
    let checked = package.run_kernelgate("resources --check --arch sm_80");
    insta::assert_snapshot!(checked.refusal_message(2), @"error: failed to read FOLDER/baselines/DEVICE/sm_80.json: No such file or directory (os error 2): `kernelgate resources --arch sm_80 --save` makes a record");
}

#[test]
fn a_wrong_architecture_is_refused_before_anything_is_built() {
    let package = TempPackage::new();
    let mut refusals = String::new();
    for arch in ["sm_90A", "90a", "compute_90", "sm_xx", "../x", "sm_90af", "sm_+90", ""] {
        let outcome = package.run_kernelgate(&format!("compare --base main --kernels={arch}"));
        refusals += &format!("{}\n", outcome.refusal_message(2));
    }
    insta::assert_snapshot!(refusals, @r"
    error: --kernels takes a real architecture such as sm_90a, not `sm_90A`
    error: --kernels takes a real architecture such as sm_90a, not `90a`
    error: --kernels takes a real architecture such as sm_90a, not `compute_90`
    error: --kernels takes a real architecture such as sm_90a, not `sm_xx`
    error: --kernels takes a real architecture such as sm_90a, not `../x`
    error: --kernels takes a real architecture such as sm_90a, not `sm_90af`
    error: --kernels takes a real architecture such as sm_90a, not `sm_+90`
    error: --kernels takes a real architecture such as sm_90a, not ``
    ");
}
