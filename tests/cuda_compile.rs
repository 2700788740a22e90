//! Tests that compile the benchmark suite's CUDA kernels by NVRTC, without a GPU. Without the NVRTC
//! library, which `kernelgate doctor --fetch-nvrtc` fetches, the compile tests skip and print the
//! reason.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use kernelgate::record::resources;
use kernelgate_cuda::compiler::cubin;
use kernelgate_cuda::compiler::nvrtc::{
    KernelCompileError, compile_source_text_with_nvrtc, compile_to_cubin_or_ptx,
    found_nvrtc_version, nvrtc_supports_architecture,
};
use kernelgate_cuda::compiler::source::{KernelBuild, NamedKernelFile, headers_named_in_text};
use kernelgate_cuda::spec::ListedKernelBuild;
use kernelgate_cuda::{RequiredArchitecture, Source};
use rayon::prelude::*;

/// Lists the CUDA kernels of all families, with the embedded texts of their files.
fn list_kernels_with_embedded_files() -> Vec<ListedKernelBuild> {
    const EMBEDDED_KERNEL_FILES: &[NamedKernelFile] = kernelgate_suite::kernel_files!("../kernels");
    kernelgate_suite::list_kernels_of_all_families()
        .into_iter()
        .map(|kernel| kernel.with_embedded_files(EMBEDDED_KERNEL_FILES))
        .collect()
}

/// Whether the NVRTC compiler can be loaded; prints a message if not.
fn is_nvrtc_available() -> bool {
    match found_nvrtc_version() {
        Ok(_) => true,
        Err(error) => {
            assert!(matches!(error, KernelCompileError::NvrtcNotFound), "{error}");
            assert!(
                std::env::var_os("REQUIRE_NVRTC").is_none(),
                "REQUIRE_NVRTC is set, but {error}"
            );
            eprintln!("skipped: {error}");
            false
        }
    }
}

/// Every distinct compilation with the architecture that its kernels require; all kernels of one
/// compilation must require the same architecture.
fn builds_with_required_architecture() -> BTreeMap<KernelBuild, RequiredArchitecture> {
    let mut builds = BTreeMap::new();
    for kernel in list_kernels_with_embedded_files() {
        let requires = *builds.entry(kernel.build.clone()).or_insert(kernel.required_architecture);
        assert_eq!(
            requires,
            kernel.required_architecture,
            "{}: kernels of one file require the same",
            kernel.kernel_name_in_records()
        );
    }
    builds
}

#[test]
fn registers_and_shared_memory_of_a_known_kernel_are_reported() {
    if !is_nvrtc_available() {
        return;
    }
    let name = "st_bif/forward_vectorized ELEMENT_F32";
    let listed = list_kernels_with_embedded_files()
        .into_iter()
        .find(|kernel| kernel.kernel_name_in_records() == name)
        .unwrap();
    let compiled = compile_to_cubin_or_ptx(&listed.build, "sm_90a").unwrap();
    let facts =
        cubin::resources_of_kernels_in_cubin(&compiled.cubin_or_ptx, &compiled.compiler_log)
            .unwrap();
    let kernel = &facts["st_bif_forward_vectorized"];
    assert!((32..=64).contains(&kernel.registers_per_thread), "{kernel:?}");
    assert_eq!(
        (kernel.spill_store_bytes, kernel.stack_bytes_per_thread, kernel.static_shared_bytes),
        (0, 0, 0)
    );
    assert!(
        kernel.instruction_count_by_class["fp32"] > 100
            && kernel.instruction_count_by_class["load_global"] > 0
            && kernel.instruction_count_by_class["store_global"] > 0
    );
    assert_eq!(kernel.instruction_count, kernel.instruction_count_by_class.values().sum::<u32>());
}

#[test]
fn the_kernel_of_the_shortest_example_bench_compiles() {
    if !is_nvrtc_available() {
        return;
    }
    let example = include_str!("../examples/own_kernel.rs");
    let source = example.split_once("r#\"").unwrap().1.split_once("\"#").unwrap().0;
    let options = ["--gpu-architecture=sm_90a".to_owned()];
    compile_source_text_with_nvrtc("saxpy", source, &[], &options, "sm_90a").unwrap();
}

#[test]
fn kernels_compile_with_timers_of_their_stages() {
    if !is_nvrtc_available() {
        return;
    }
    let clocked: Vec<KernelBuild> = list_kernels_with_embedded_files()
        .into_iter()
        .filter_map(|kernel| kernel.build_with_stage_clocks)
        .collect();
    assert!(!clocked.is_empty(), "no row names stages");
    assert!(clocked.iter().any(source_uses_wgmma), "no clocks beside tensor instructions");
    clocked.par_iter().for_each(|build| {
        let compiled = compile_to_cubin_or_ptx(build, "sm_90a").unwrap();
        assert!(
            !log_reports_serialized_wgmma(&compiled.compiler_log),
            "{}: {}",
            build.kernel_build_name(),
            compiled.compiler_log
        );
        let counters = b"kernelgate_stages\0";
        let has_counters =
            compiled.cubin_or_ptx.windows(counters.len()).any(|found| found == counters);
        assert!(has_counters, "{} counts nothing", build.kernel_build_name());
    });
}

/// Whether the source text of a build contains warpgroup MMA (wgmma) instructions.
fn source_uses_wgmma(build: &KernelBuild) -> bool {
    let used = |text: &str| text.contains("wgmma.mma_async");
    used(&build.source_text_with_padding())
        || build.included_headers().iter().any(|(_, text)| used(text))
}

/// Whether the ptxas log warns that wgmma instructions were serialized, because ptxas cannot prove
/// them independent or lacks registers. The test matches the words of the ptxas warning, because
/// its code differs by the cause.
fn log_reports_serialized_wgmma(log: &str) -> bool {
    log.contains("serialized")
}

/// PTX kernel with two wgmma instructions whose accumulator the threads read before the wait.
const PTX_READING_ACCUMULATOR_BEFORE_WAIT: &str = r#"
#include "common/wgmma/tile.cuh"
extern "C" __global__ void early(float* out, u32 shared) {
  float sum[16] = {};
  wgmma_fence();
  wgmma(sum, wgmma_operand_descriptor(shared), wgmma_operand_descriptor(shared));
#if EARLY
  sum[0] *= out[1];
#endif
  wgmma(sum, wgmma_operand_descriptor(shared), wgmma_operand_descriptor(shared));
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < 16; ++i) out[i] = sum[i];
}
"#;

#[test]
fn ptxas_reports_an_accumulator_that_is_read_before_its_wgmma_wait() {
    if !is_nvrtc_available() {
        return;
    }
    let headers = headers_named_in_text(PTX_READING_ACCUMULATOR_BEFORE_WAIT, &[]);
    let log = |early: &str| {
        let options = ["--gpu-architecture=sm_90a".to_owned(), format!("-DEARLY={early}")];
        compile_source_text_with_nvrtc(
            "mine/early",
            PTX_READING_ACCUMULATOR_BEFORE_WAIT,
            &headers,
            &options,
            "sm_90a",
        )
        .unwrap()
        .compiler_log
    };
    assert!(log_reports_serialized_wgmma(&log("1")), "{}", log("1"));
    assert!(!log_reports_serialized_wgmma(&log("0")), "{}", log("0"));
}

#[test]
fn ptxas_serializes_no_wgmma_of_the_suites_kernels() {
    if !is_nvrtc_available() {
        return;
    }
    let users: Vec<KernelBuild> =
        builds_with_required_architecture().into_keys().filter(source_uses_wgmma).collect();
    let families = [
        "attention/forward",
        "attention/backward",
        "denoise",
        "measure",
        "resnet18",
        "transformer",
    ];
    for family in families {
        assert!(
            users.iter().any(|build| build.source.kernel_file_name.starts_with(family)),
            "{family}"
        );
    }
    let fp8 =
        |build: &KernelBuild| build.macros_in_build_name.iter().any(|define| define == "FP8=1");
    assert!(users.iter().any(fp8), "no build in fp8");
    let serialized: Vec<String> = users
        .par_iter()
        .filter_map(|build| {
            let log = compile_to_cubin_or_ptx(build, "sm_90a").unwrap().compiler_log;
            log_reports_serialized_wgmma(&log)
                .then(|| format!("{}: {log}", build.kernel_build_name()))
        })
        .collect();
    assert!(serialized.is_empty(), "{serialized:#?}");
}

#[test]
fn the_instruction_mix_shows_which_kernels_use_tensor_cores_or_not() {
    if !is_nvrtc_available() {
        return;
    }
    for build in builds_with_required_architecture()
        .into_keys()
        .filter(|build| build.kernel_build_name().ends_with("DTYPE=Bf16 HEAD_DIM=64 CAUSAL=0"))
    {
        let compiled = compile_to_cubin_or_ptx(&build, "sm_90a").unwrap();
        let facts =
            cubin::resources_of_kernels_in_cubin(&compiled.cubin_or_ptx, &compiled.compiler_log)
                .unwrap();
        let tensor: u32 = facts
            .values()
            .filter_map(|kernel| kernel.instruction_count_by_class.get("tensor"))
            .sum();
        assert_eq!(
            tensor > 0,
            build.source.kernel_file_name.ends_with("mma"),
            "{}: {tensor}",
            build.kernel_build_name()
        );
    }
}

#[test]
fn kernels_require_exactly_the_architecture_that_their_files_need() {
    if !is_nvrtc_available() {
        return;
    }
    let mut files = Vec::new();
    let mut wrong: Vec<String> = Vec::new();
    let builds = builds_with_required_architecture();
    let mut cases = Vec::new();
    for (build, requires) in &builds {
        let of_file = (build.source.kernel_file_name, *requires);
        let first = !files.contains(&of_file);
        files.push(of_file);
        match requires {
            // No kernel of the suite supports an architecture below sm_80. One build of each file
            // is compiled for this test, because all builds of a file have the same architecture
            // needs.
            RequiredArchitecture::AtLeastCapability(80)
            | RequiredArchitecture::CapabilityRange(80, 90)
                if first =>
            {
                cases.push((build, "sm_80", true))
            }
            RequiredArchitecture::AtLeastCapability(90) if first => {
                cases.extend([(build, "sm_90", true), (build, "sm_80", false)])
            }
            RequiredArchitecture::ExactArchitecture("sm_90a") if first => {
                cases.push((build, "sm_90", false))
            }
            RequiredArchitecture::AtLeastCapability(80 | 90)
            | RequiredArchitecture::CapabilityRange(80, 90)
            | RequiredArchitecture::ExactArchitecture("sm_90a") => {}
            other => panic!("{}: no case for {other}", build.kernel_build_name()),
        }
    }
    wrong.par_extend(cases.into_par_iter().filter_map(|(build, arch, compiles)| {
        let result = compile_to_cubin_or_ptx(build, arch).map(drop);
        (result.is_ok() != compiles)
            .then(|| format!("{} for {arch}: {result:?}", build.kernel_build_name()))
    }));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn kernels_that_an_architecture_does_not_support_are_not_compiled_for_it() {
    if !is_nvrtc_available() {
        return;
    }
    let some = |kernel: &ListedKernelBuild| {
        ["measure/spin", "denoise/fused_rows MODEL=Tiny", "denoise/persistent MODEL=Pi05"]
            .contains(&kernel.build.kernel_build_name().as_str())
    };
    let kernels: Vec<_> = list_kernels_with_embedded_files().into_iter().filter(some).collect();
    assert_eq!(kernels.len(), 4);
    let compiled =
        resources::compile_kernels_and_read_resources(&kernels, "sm_90").unwrap().resources;
    let persistent = ("denoise/persistent MODEL=Pi05".to_owned(), "needs sm_90a".to_owned());
    assert_eq!(compiled.unsupported_kernels, [persistent].into());
    let recorded: Vec<_> = compiled.kernels.keys().cloned().collect();
    let rows = ["begin", "end"]
        .map(|part| format!("denoise/fused_rows MODEL=Tiny: denoise_fused_rows_{part}"));
    assert_eq!(recorded, [&rows[..], &["measure/spin".to_owned()]].concat());
    // The test data has a kernel specification whose kernel is missing from the file, and a kernel
    // in the file without a specification.
    let mut misspelt =
        kernels.iter().find(|kernel| kernel.kernel_symbol == "measure_spin").unwrap().clone();
    misspelt.kernel_symbol = "measure_spinn";
    let error = resources::compile_kernels_and_read_resources(&[misspelt], "sm_90").unwrap_err();
    assert_eq!(
        error.to_string(),
        "measure/spin holds no kernel measure_spinn, which a row is about"
    );
    let begin =
        kernels.iter().find(|kernel| kernel.kernel_symbol == "denoise_fused_rows_begin").unwrap();
    let error = resources::compile_kernels_and_read_resources(std::slice::from_ref(begin), "sm_90")
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "kernel denoise_fused_rows_end of denoise/fused_rows MODEL=Tiny has no row"
    );
}

#[test]
fn a_kernel_with_a_compile_error_is_reported_with_the_nvrtc_log() {
    if !is_nvrtc_available() {
        return;
    }
    let options = ["--gpu-architecture=sm_90a".to_owned()];
    let error = compile_source_text_with_nvrtc(
        "mine/broken",
        "extern \"C\" __global__ void broken() { undefined_thing(); }",
        &[],
        &options,
        "sm_90a",
    )
    .unwrap_err();
    let text = error.to_string();
    let (message, log) = text.split_once('\n').unwrap();
    assert_eq!(message, "kernel mine/broken does not compile for sm_90a:");
    assert!(log.contains("undefined_thing"), "{text}");
    let build = Source::new("mine/fine", "extern \"C\" __global__ void fine() {}").with_macros(&[]);
    let text = compile_to_cubin_or_ptx(&build, "sm_1").unwrap_err().to_string();
    assert!(text.contains("mine/fine") && text.contains("sm_1"), "{text}");
}

#[test]
fn a_virtual_architecture_compiles_to_ptx_instead_of_a_cubin() {
    if !is_nvrtc_available() {
        return;
    }
    let build =
        Source::new("mine/empty", "extern \"C\" __global__ void empty() {}").with_macros(&[]);
    let compiled = compile_to_cubin_or_ptx(&build, "compute_80").unwrap();
    let (zero, ptx) = compiled.cubin_or_ptx.split_last().unwrap();
    let text = String::from_utf8_lossy(ptx);
    assert!(
        *zero == 0 && text.contains(".target sm_80") && text.contains(".entry empty"),
        "{text}"
    );
    assert_eq!(
        (nvrtc_supports_architecture("sm_90a"), nvrtc_supports_architecture("sm_31")),
        (Ok(true), Ok(false))
    );
}
