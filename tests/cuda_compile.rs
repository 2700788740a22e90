//! Compiles kernels without a GPU. Compiling needs NVRTC (`kernelgate doctor --fetch-nvrtc` fetches
//! it); without NVRTC the tests skip with a reason.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use kernelgate::record::resources;
use kernelgate_cuda::compiler::cubin;
use kernelgate_cuda::compiler::nvrtc::{
    CompileError, compile_source_text, compile_to_cubin, installed_nvrtc_version, nvrtc_supports,
};
use kernelgate_cuda::compiler::source::{KernelBuild, KernelFile, included_headers};
use kernelgate_cuda::spec::ListedKernel;
use kernelgate_cuda::{RequiredArchitecture, Source};
use rayon::prelude::*;

/// All kernels, with the text of their files.
fn kernels() -> Vec<ListedKernel> {
    const FILES: &[KernelFile] = kernelgate_suite::kernel_files!("../kernels");
    kernelgate_suite::kernels().into_iter().map(|kernel| kernel.with_files(FILES)).collect()
}

/// Whether NVRTC is available; prints a message if it is not.
fn is_compiler_available() -> bool {
    match installed_nvrtc_version() {
        Ok(_) => true,
        Err(error) => {
            assert!(matches!(error, CompileError::Missing), "{error}");
            assert!(
                std::env::var_os("REQUIRE_NVRTC").is_none(),
                "REQUIRE_NVRTC is set, but {error}"
            );
            eprintln!("skipped: {error}");
            false
        }
    }
}

/// Every build with the most that one of its kernels requires; they lie in one file, which compiles
/// as a whole or not at all.
fn builds_with_requirements() -> BTreeMap<KernelBuild, RequiredArchitecture> {
    let mut builds = BTreeMap::new();
    for kernel in kernels() {
        let requires = *builds.entry(kernel.build.clone()).or_insert(kernel.requires);
        assert_eq!(
            requires,
            kernel.requires,
            "{}: kernels of one file require the same",
            kernel.name()
        );
    }
    builds
}

#[test]
fn the_resources_of_a_known_kernel_have_known_values() {
    if !is_compiler_available() {
        return;
    }
    let name = "st_bif/forward_vectorized ELEMENT_F32";
    let listed = kernels().into_iter().find(|kernel| kernel.name() == name).unwrap();
    let compiled = compile_to_cubin(&listed.build, "sm_90a").unwrap();
    let facts = cubin::kernel_facts(&compiled.cubin, &compiled.log).unwrap();
    let kernel = &facts["st_bif_forward_vectorized"];
    assert!((32..=64).contains(&kernel.registers), "{kernel:?}");
    assert_eq!((kernel.spill_store_bytes, kernel.stack_bytes, kernel.shared_bytes), (0, 0, 0));
    assert!(
        kernel.mix["fp32"] > 100 && kernel.mix["load_global"] > 0 && kernel.mix["store_global"] > 0
    );
    assert_eq!(kernel.instructions, kernel.mix.values().sum::<u32>());
}

#[test]
fn the_kernel_of_the_shortest_bench_compiles() {
    if !is_compiler_available() {
        return;
    }
    let example = include_str!("../examples/own_kernel.rs");
    let source = example.split_once("r#\"").unwrap().1.split_once("\"#").unwrap().0;
    let options = ["--gpu-architecture=sm_90a".to_owned()];
    compile_source_text("saxpy", source, &[], &options, "sm_90a").unwrap();
}

#[test]
fn kernels_compile_with_clocks_of_their_stages() {
    if !is_compiler_available() {
        return;
    }
    let clocked: Vec<KernelBuild> =
        kernels().into_iter().filter_map(|kernel| kernel.with_clocks).collect();
    assert!(!clocked.is_empty(), "no row names stages");
    assert!(clocked.iter().any(uses_wgmma), "no clocks beside tensor instructions");
    clocked.par_iter().for_each(|build| {
        let compiled = compile_to_cubin(build, "sm_90a").unwrap();
        assert!(!serializes(&compiled.log), "{}: {}", build.name(), compiled.log);
        let counters = b"kernelgate_stages\0";
        let has_counters = compiled.cubin.windows(counters.len()).any(|found| found == counters);
        assert!(has_counters, "{} counts nothing", build.name());
    });
}

/// Whether a build uses warpgroup MMA, by the text that is compiled.
fn uses_wgmma(build: &KernelBuild) -> bool {
    let used = |text: &str| text.contains("wgmma.mma_async");
    used(&build.compiled_text()) || build.headers_of_build().iter().any(|(_, text)| used(text))
}

/// Whether the assembler serialized tensor instructions, because it cannot prove them independent
/// or has no registers for them. The code of this assembler warning differs by the cause, its words
/// do not.
fn serializes(log: &str) -> bool {
    log.contains("serialized")
}

/// Two tensor instructions, and before the wait an accumulator that the threads read.
const READ_BEFORE_THE_WAIT: &str = r#"
#include "common/wgmma/tile.cuh"
extern "C" __global__ void early(float* out, u32 shared) {
  float sum[16] = {};
  wgmma_fence();
  wgmma(sum, operand(shared), operand(shared));
#if EARLY
  sum[0] *= out[1];
#endif
  wgmma(sum, operand(shared), operand(shared));
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < 16; ++i) out[i] = sum[i];
}
"#;

#[test]
fn an_accumulator_read_before_its_wgmma_wait_is_reported() {
    if !is_compiler_available() {
        return;
    }
    let headers = included_headers(READ_BEFORE_THE_WAIT, &[]);
    let log = |early: &str| {
        let options = ["--gpu-architecture=sm_90a".to_owned(), format!("-DEARLY={early}")];
        compile_source_text("mine/early", READ_BEFORE_THE_WAIT, &headers, &options, "sm_90a")
            .unwrap()
            .log
    };
    assert!(serializes(&log("1")), "{}", log("1"));
    assert!(!serializes(&log("0")), "{}", log("0"));
}

#[test]
fn warpgroup_gemms_overlap_with_the_code_after_them() {
    if !is_compiler_available() {
        return;
    }
    let users: Vec<KernelBuild> =
        builds_with_requirements().into_keys().filter(uses_wgmma).collect();
    let families = [
        "attention/forward",
        "attention/backward",
        "denoise",
        "measure",
        "resnet18",
        "transformer",
    ];
    for family in families {
        assert!(users.iter().any(|build| build.source.file.starts_with(family)), "{family}");
    }
    let fp8 = |build: &KernelBuild| build.defines.iter().any(|define| define == "FP8=1");
    assert!(users.iter().any(fp8), "no build in fp8");
    let serialized: Vec<String> = users
        .par_iter()
        .filter_map(|build| {
            let log = compile_to_cubin(build, "sm_90a").unwrap().log;
            serializes(&log).then(|| format!("{}: {log}", build.name()))
        })
        .collect();
    assert!(serialized.is_empty(), "{serialized:#?}");
}

#[test]
fn the_instruction_mix_shows_which_kernels_use_tensor_cores() {
    if !is_compiler_available() {
        return;
    }
    for build in builds_with_requirements()
        .into_keys()
        .filter(|build| build.name().ends_with("DTYPE=Bf16 HEAD_DIM=64 CAUSAL=0"))
    {
        let compiled = compile_to_cubin(&build, "sm_90a").unwrap();
        let facts = cubin::kernel_facts(&compiled.cubin, &compiled.log).unwrap();
        let tensor: u32 = facts.values().filter_map(|kernel| kernel.mix.get("tensor")).sum();
        assert_eq!(tensor > 0, build.source.file.ends_with("mma"), "{}: {tensor}", build.name());
    }
}

#[test]
fn rows_require_exactly_the_architecture_that_their_kernel_files_need() {
    if !is_compiler_available() {
        return;
    }
    let mut files = Vec::new();
    let mut wrong: Vec<String> = Vec::new();
    let builds = builds_with_requirements();
    let mut cases = Vec::new();
    for (build, requires) in &builds {
        let of_file = (build.source.file, *requires);
        let first = !files.contains(&of_file);
        files.push(of_file);
        match requires {
            // No kernel supports less than sm_80. One build of a file shows the file's needs; every
            // build is compiled where its resources are checked.
            RequiredArchitecture::AtLeast(80) | RequiredArchitecture::Between(80, 90) if first => {
                cases.push((build, "sm_80", true))
            }
            RequiredArchitecture::AtLeast(90) if first => {
                cases.extend([(build, "sm_90", true), (build, "sm_80", false)])
            }
            RequiredArchitecture::Exactly("sm_90a") if first => cases.push((build, "sm_90", false)),
            RequiredArchitecture::AtLeast(80 | 90)
            | RequiredArchitecture::Between(80, 90)
            | RequiredArchitecture::Exactly("sm_90a") => {}
            other => panic!("{}: no case for {other}", build.name()),
        }
    }
    wrong.par_extend(cases.into_par_iter().filter_map(|(build, arch, compiles)| {
        let result = compile_to_cubin(build, arch).map(drop);
        (result.is_ok() != compiles).then(|| format!("{} for {arch}: {result:?}", build.name()))
    }));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn kernels_that_an_architecture_does_not_support_are_skipped_for_it() {
    if !is_compiler_available() {
        return;
    }
    let some = |kernel: &ListedKernel| {
        ["measure/spin", "denoise/fused_rows MODEL=Tiny", "denoise/persistent MODEL=Pi05"]
            .contains(&kernel.build.name().as_str())
    };
    let kernels: Vec<_> = kernels().into_iter().filter(some).collect();
    assert_eq!(kernels.len(), 4);
    let compiled = resources::compile_resources(&kernels, "sm_90").unwrap().resources;
    let persistent = ("denoise/persistent MODEL=Pi05".to_owned(), "needs sm_90a".to_owned());
    assert_eq!(compiled.left_out, [persistent].into());
    let recorded: Vec<_> = compiled.kernels.keys().cloned().collect();
    let rows = ["begin", "end"]
        .map(|part| format!("denoise/fused_rows MODEL=Tiny: denoise_fused_rows_{part}"));
    assert_eq!(recorded, [&rows[..], &["measure/spin".to_owned()]].concat());
    // A row without a kernel, and a kernel without a row.
    let mut misspelt =
        kernels.iter().find(|kernel| kernel.symbol == "measure_spin").unwrap().clone();
    misspelt.symbol = "measure_spinn";
    let error = resources::compile_resources(&[misspelt], "sm_90").unwrap_err();
    assert_eq!(
        error.to_string(),
        "measure/spin holds no kernel measure_spinn, which a row is about"
    );
    let begin = kernels.iter().find(|kernel| kernel.symbol == "denoise_fused_rows_begin").unwrap();
    let error = resources::compile_resources(std::slice::from_ref(begin), "sm_90").unwrap_err();
    assert_eq!(
        error.to_string(),
        "kernel denoise_fused_rows_end of denoise/fused_rows MODEL=Tiny has no row"
    );
}

#[test]
fn a_kernel_that_does_not_compile_is_reported_with_the_compiler_log() {
    if !is_compiler_available() {
        return;
    }
    let options = ["--gpu-architecture=sm_90a".to_owned()];
    let error = compile_source_text(
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
    let build = Source::new("mine/fine", "extern \"C\" __global__ void fine() {}").build(&[]);
    let text = compile_to_cubin(&build, "sm_1").unwrap_err().to_string();
    assert!(text.contains("mine/fine") && text.contains("sm_1"), "{text}");
}

#[test]
fn a_virtual_architecture_compiles_to_ptx() {
    if !is_compiler_available() {
        return;
    }
    let build = Source::new("mine/empty", "extern \"C\" __global__ void empty() {}").build(&[]);
    let compiled = compile_to_cubin(&build, "compute_80").unwrap();
    let (zero, ptx) = compiled.cubin.split_last().unwrap();
    let text = String::from_utf8_lossy(ptx);
    assert!(
        *zero == 0 && text.contains(".target sm_80") && text.contains(".entry empty"),
        "{text}"
    );
    assert_eq!((nvrtc_supports("sm_90a"), nvrtc_supports("sm_31")), (Ok(true), Ok(false)));
}
