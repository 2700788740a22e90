//! Compiling kernels without a GPU. Needs NVRTC (`ci/cuda-compiler` fetches it); skips with a reason where it is missing.

#![allow(clippy::unwrap_used)]

use kernelgate_cuda::Source;
use kernelgate_cuda::compiler::cubin;
use kernelgate_cuda::compiler::nvrtc::{CompileError, compile, compile_text, version};
use kernelgate_suite::builds;

/// Whether NVRTC is there; says so when it is not.
fn compiler() -> bool {
    match version() {
        Ok(_) => true,
        Err(error) => {
            assert!(matches!(error, CompileError::Missing), "{error}");
            assert!(std::env::var_os("REQUIRE_NVRTC").is_none(), "REQUIRE_NVRTC is set, but {error}");
            eprintln!("skipped: {error}");
            false
        }
    }
}

#[test]
fn facts_of_a_known_kernel() {
    if !compiler() {
        return;
    }
    let name = "st_bif/forward_vectorized ELEMENT_F32";
    let build = builds().into_iter().find(|build| build.name() == name).unwrap();
    let compiled = compile(&build, "sm_90a").unwrap();
    let facts = cubin::facts(&compiled.cubin, &compiled.log).unwrap();
    let kernel = &facts["st_bif_forward_vectorized"];
    assert!((32..=64).contains(&kernel.registers), "{kernel:?}");
    assert_eq!((kernel.spill_store_bytes, kernel.stack_bytes, kernel.shared_bytes), (0, 0, 0));
    assert!(kernel.mix["fp32"] > 100 && kernel.mix["load_global"] > 0 && kernel.mix["store_global"] > 0);
    assert_eq!(kernel.instructions, kernel.mix.values().sum::<u32>());
}

#[test]
fn tensor_cores_show_in_the_mix_of_the_kernels_that_use_them() {
    if !compiler() {
        return;
    }
    for build in builds().into_iter().filter(|build| build.name().ends_with("DTYPE=Bf16 HEAD_DIM=64 CAUSAL=0")) {
        let compiled = compile(&build, "sm_90a").unwrap();
        let facts = cubin::facts(&compiled.cubin, &compiled.log).unwrap();
        let tensor: u32 = facts.values().filter_map(|kernel| kernel.mix.get("tensor")).sum();
        assert_eq!(tensor > 0, build.source.file.ends_with("_mma"), "{}: {tensor}", build.name());
    }
}

#[test]
fn a_kernel_that_does_not_compile_is_named_with_the_log() {
    if !compiler() {
        return;
    }
    let options = ["--gpu-architecture=sm_90a".to_owned()];
    let error =
        compile_text("mine/broken", "extern \"C\" __global__ void broken() { undefined_thing(); }", &[], &options, "sm_90a")
            .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("kernel mine/broken does not compile for sm_90a") && text.contains("undefined_thing"), "{text}");
    let build = Source::new("mine/fine", "extern \"C\" __global__ void fine() {}").build(&[]);
    let text = compile(&build, "sm_1").unwrap_err().to_string();
    assert!(text.contains("mine/fine") && text.contains("sm_1"), "{text}");
}
