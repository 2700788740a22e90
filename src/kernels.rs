//! The kernels of the suite, embedded: sources, the headers they share, and the builds (macros, launch shape) that are made of them.

use kernelgate_cuda::Source;
use kernelgate_cuda::compiler::source::Build;
use kernelgate_cuda::instruments;

const ST_BIF_HEADERS: &[(&str, &str)] = &[
    ("st_bif/columns.cuh", include_str!("../kernels/st_bif/columns.cuh")),
    ("st_bif/neuron.cuh", include_str!("../kernels/st_bif/neuron.cuh")),
];

const ATTENTION_HEADERS: &[(&str, &str)] = &[
    ("attention/shape.cuh", include_str!("../kernels/attention/shape.cuh")),
    ("attention/warp_gemm.cuh", include_str!("../kernels/attention/warp_gemm.cuh")),
];

const DENOISE_HEADERS: &[(&str, &str)] = &[
    ("denoise/actions.cuh", include_str!("../kernels/denoise/actions.cuh")),
    ("denoise/model.cuh", include_str!("../kernels/denoise/model.cuh")),
    ("denoise/panel.cuh", include_str!("../kernels/denoise/panel.cuh")),
    ("denoise/persistent.cuh", include_str!("../kernels/denoise/persistent.cuh")),
    ("denoise/persistent_attention.cuh", include_str!("../kernels/denoise/persistent_attention.cuh")),
    ("denoise/skinny_gemm.cuh", include_str!("../kernels/denoise/skinny_gemm.cuh")),
];

/// Kernel files by `family/implementation`.
const SOURCES: &[Source] = &[
    Source::new("st_bif/forward_per_step", include_str!("../kernels/st_bif/forward_per_step.cu")).with_headers(ST_BIF_HEADERS),
    Source::new("st_bif/forward_fused", include_str!("../kernels/st_bif/forward_fused.cu")).with_headers(ST_BIF_HEADERS),
    Source::new("st_bif/forward_vectorized", include_str!("../kernels/st_bif/forward_vectorized.cu")).with_headers(ST_BIF_HEADERS),
    Source::new("st_bif/forward_packed", include_str!("../kernels/st_bif/forward_packed.cu")).with_headers(ST_BIF_HEADERS),
    Source::new("st_bif/backward_saved", include_str!("../kernels/st_bif/backward_saved.cu")).with_headers(ST_BIF_HEADERS),
    Source::new("st_bif/backward_replay", include_str!("../kernels/st_bif/backward_replay.cu")).with_headers(ST_BIF_HEADERS),
    Source::new("st_bif/backward_replay_any", include_str!("../kernels/st_bif/backward_replay_any.cu"))
        .with_headers(ST_BIF_HEADERS),
    Source::new("attention/forward_naive", include_str!("../kernels/attention/forward_naive.cu")).with_headers(ATTENTION_HEADERS),
    Source::new("attention/forward_tiled", include_str!("../kernels/attention/forward_tiled.cu")).with_headers(ATTENTION_HEADERS),
    Source::new("attention/forward_flash", include_str!("../kernels/attention/forward_flash.cu")).with_headers(ATTENTION_HEADERS),
    Source::new("attention/forward_flash_mma", include_str!("../kernels/attention/forward_flash_mma.cu"))
        .with_headers(ATTENTION_HEADERS),
    Source::new("attention/backward_naive", include_str!("../kernels/attention/backward_naive.cu")).with_headers(ATTENTION_HEADERS),
    Source::new("attention/backward_flash_mma", include_str!("../kernels/attention/backward_flash_mma.cu"))
        .with_headers(ATTENTION_HEADERS),
    Source::new("denoise/per_op", include_str!("../kernels/denoise/per_op.cu")).with_headers(DENOISE_HEADERS),
    Source::new("denoise/fused_attention", include_str!("../kernels/denoise/fused_attention.cu")).with_headers(DENOISE_HEADERS),
    Source::new("denoise/fused_project", include_str!("../kernels/denoise/fused_project.cu")).with_headers(DENOISE_HEADERS),
    Source::new("denoise/fused_rows", include_str!("../kernels/denoise/fused_rows.cu")).with_headers(DENOISE_HEADERS),
    Source::new("denoise/persistent", include_str!("../kernels/denoise/persistent.cu")).with_headers(DENOISE_HEADERS),
];

/// A kernel file of the suite.
pub fn source(file: &str) -> Source {
    let found = SOURCES.iter().find(|source| source.file == file);
    *found.expect("the file is listed in SOURCES")
}

/// Which macros a file is built with: the product of these lists.
const MACROS: &[(&str, &[&[&str]])] = &[
    ("st_bif/forward_per_step", &[ELEMENTS]),
    ("st_bif/forward_fused", &[ELEMENTS]),
    ("st_bif/forward_vectorized", &[ELEMENTS]),
    ("st_bif/forward_packed", &[ELEMENTS]),
    ("st_bif/backward_saved", &[ELEMENTS]),
    ("st_bif/backward_replay", &[ELEMENTS, &["STEPS=4", "STEPS=8", "STEPS=16"]]),
    ("st_bif/backward_replay_any", &[ELEMENTS]),
    ("attention/forward_naive", ATTENTION),
    ("attention/forward_tiled", ATTENTION),
    ("attention/forward_flash", ATTENTION),
    ("attention/forward_flash_mma", ATTENTION),
    ("attention/backward_naive", ATTENTION),
    ("attention/backward_flash_mma", ATTENTION),
    ("denoise/fused_attention", &[MODELS]),
    ("denoise/fused_project", &[MODELS]),
    ("denoise/fused_rows", &[MODELS]),
    ("denoise/persistent", &[&["MODEL=Pi05"]]),
];

const ELEMENTS: &[&str] = &["ELEMENT_F32", "ELEMENT_F16", "ELEMENT_BF16"];
const MODELS: &[&str] = &["MODEL=Pi05", "MODEL=Tiny"];
const ATTENTION: &[&[&str]] = &[&["DTYPE=Bf16", "DTYPE=F16"], &["HEAD_DIM=64", "HEAD_DIM=128"], &["CAUSAL=0", "CAUSAL=1"]];

/// How a kernel is launched, as far as occupancy depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Symbol in the cubin.
    pub symbol: &'static str,
    /// Threads a block.
    pub block: u32,
    /// Dynamic shared memory a block, bytes: with HEAD_DIM=64 or MODEL=Tiny (or no such macro), and with HEAD_DIM=128 or MODEL=Pi05.
    pub dynamic_shared: [u32; 2],
}

const fn launch(symbol: &'static str, block: u32, dynamic_shared: [u32; 2]) -> Launch {
    Launch { symbol, block, dynamic_shared }
}

/// Every kernel that the builds contain.
const LAUNCHES: &[Launch] = &[
    launch("st_bif_forward_per_step", 256, [0, 0]),
    launch("st_bif_forward_fused", 256, [0, 0]),
    launch("st_bif_forward_vectorized", 128, [0, 0]),
    launch("st_bif_forward_packed", 128, [0, 0]),
    launch("st_bif_backward_saved", 128, [0, 0]),
    launch("st_bif_backward_replay", 128, [0, 0]),
    launch("st_bif_backward_replay_any", 64, [0, 0]),
    launch("attention_forward_naive_scores", 256, [0, 0]),
    launch("attention_forward_naive_softmax", 256, [0, 0]),
    launch("attention_forward_naive_values", 256, [0, 0]),
    launch("attention_forward_tiled_scores", 256, [0, 0]),
    launch("attention_forward_tiled_softmax", 256, [0, 0]),
    launch("attention_forward_tiled_values", 256, [0, 0]),
    launch("attention_forward_flash", 256, [52_224, 87_040]),
    launch("attention_forward_flash_mma", 128, [49_152, 98_304]),
    launch("attention_backward_naive_delta", 256, [0, 0]),
    launch("attention_backward_naive_scores", 256, [0, 0]),
    launch("attention_backward_naive_dq", 256, [0, 0]),
    launch("attention_backward_naive_dkv", 256, [0, 0]),
    launch("attention_backward_flash_mma_prepare", 256, [0, 0]),
    launch("attention_backward_flash_mma", 256, [198_656, 181_248]),
    launch("attention_backward_flash_mma_finish", 256, [0, 0]),
    launch("denoise_per_op_embed", 256, [0, 0]),
    launch("denoise_per_op_bias", 256, [0, 0]),
    launch("denoise_per_op_cast", 256, [0, 0]),
    launch("denoise_per_op_copy", 256, [0, 0]),
    launch("denoise_per_op_angles", 256, [0, 0]),
    launch("denoise_per_op_norm", 256, [0, 0]),
    launch("denoise_per_op_modulate", 256, [0, 0]),
    launch("denoise_per_op_residual", 256, [0, 0]),
    launch("denoise_per_op_rope", 256, [0, 0]),
    launch("denoise_per_op_concat", 256, [0, 0]),
    launch("denoise_per_op_softmax", 256, [0, 0]),
    launch("denoise_per_op_gelu", 256, [0, 0]),
    launch("denoise_per_op_action_out", 256, [0, 0]),
    launch("denoise_per_op_euler", 256, [0, 0]),
    launch("denoise_fused_attention", 256, [45_056, 155_648]),
    launch("denoise_fused_project_qkv", 256, [26_624, 81_920]),
    launch("denoise_fused_project_out", 256, [26_624, 81_920]),
    launch("denoise_fused_project_gate_up", 256, [28_672, 114_688]),
    launch("denoise_fused_project_down", 256, [26_624, 114_688]),
    launch("denoise_fused_project_time", 256, [26_624, 81_920]),
    launch("denoise_fused_project_style", 256, [26_624, 81_920]),
    launch("denoise_fused_rows_begin", 256, [0, 0]),
    launch("denoise_fused_rows_end", 256, [0, 0]),
    launch("denoise_persistent", 384, [0, 231_424]),
    launch("denoise_persistent_shift", 256, [0, 67_584]),
    launch("measure_blocker", 1, [0, 0]),
    launch("measure_clock_probe", 1, [0, 0]),
    launch("measure_copy_bandwidth", 128, [0, 0]),
    launch("measure_empty", 32, [0, 0]),
    launch("measure_flush_l2", 512, [0, 0]),
    launch("measure_read_bandwidth", 1024, [0, 0]),
    launch("measure_spin", 1, [0, 0]),
    launch("measure_write_bandwidth", 256, [0, 0]),
];

/// Threads a block and dynamic shared bytes of one of the build's kernels.
pub fn launch_of(build: &Build, symbol: &str) -> Option<(u32, u32)> {
    let launch = LAUNCHES.iter().find(|launch| launch.symbol == symbol)?;
    let wide = build.defines.iter().any(|define| ["HEAD_DIM=128", "MODEL=Pi05"].contains(&define.as_str()));
    Some((launch.block, launch.dynamic_shared[usize::from(wide)]))
}

/// Every build that the harness may make of the embedded kernels.
pub fn builds() -> Vec<Build> {
    let mut builds = Vec::new();
    for source in SOURCES.iter().chain(instruments::SOURCES) {
        let lists = MACROS.iter().find(|(name, _)| *name == source.file).map_or(&[][..], |(_, lists)| lists);
        let mut defines = vec![Vec::new()];
        for list in lists {
            defines = defines
                .iter()
                .flat_map(|chosen: &Vec<String>| list.iter().map(|define| [chosen.clone(), vec![(*define).to_owned()]].concat()))
                .collect();
        }
        builds.extend(defines.into_iter().map(|defines| Build { source: *source, defines }));
    }
    builds
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_kernel_file_is_embedded() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut files = Vec::new();
        for folder in std::fs::read_dir(&root).unwrap() {
            for file in std::fs::read_dir(folder.unwrap().path()).unwrap() {
                let path = file.unwrap().path();
                files.push(path.strip_prefix(&root).unwrap().to_string_lossy().into_owned());
            }
        }
        let sources = SOURCES.iter().map(|source| format!("{}.cu", source.file));
        let headers = [ST_BIF_HEADERS, ATTENTION_HEADERS, DENOISE_HEADERS].concat();
        let mut embedded: Vec<String> = sources.chain(headers.iter().map(|(name, _)| (*name).to_owned())).collect();
        files.sort();
        embedded.sort();
        assert_eq!(files, embedded);
    }

    #[test]
    fn builds_are_the_products_of_their_macros() {
        let builds = builds();
        let names: Vec<String> = builds.iter().map(Build::name).collect();
        assert_eq!(names.iter().filter(|name| name.starts_with("attention/forward_flash_mma ")).count(), 8);
        assert!(names.contains(&"st_bif/backward_replay ELEMENT_F16 STEPS=8".to_owned()));
        assert!(names.contains(&"measure/empty".to_owned()));
        assert!(MACROS.iter().all(|(file, _)| SOURCES.iter().any(|source| source.file == *file)));
    }
}
