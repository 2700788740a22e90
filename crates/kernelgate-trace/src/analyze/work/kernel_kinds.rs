//! Classifies GPU kernels by the name of their function: matrix products, attention, normalisation
//! and others.
//!
//! The words of this module are from kernel names of NVIDIA's and AMD's libraries, PyTorch, Triton,
//! TensorRT-LLM and XLA. Template arguments and parameter types are ignored, except if a library's
//! launcher has the kernel itself as template argument (`cutlass::Kernel<…>`). Module `classes`
//! decides whether a kernel communicates, and by which library.

use crate::analyze::classes::{CommunicationLibraryAndCollective, function_name_with_namespaces};

/// Kind of work that a GPU kernel does, as far as the kernel's name shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KernelWorkClass {
    Attention,
    /// Matrix multiplication and convolution.
    Matmul,
    Softmax,
    Normalisation,
    Reduction,
    /// Communication between devices.
    Communication,
    /// Copies, concatenations, gathers.
    DataMovement,
    /// Optimizer steps.
    OptimizerStep,
    /// A kernel that computes a function of each element separately.
    Elementwise,
    Pooling,
    /// Kernels that sort, scan or select elements.
    Sorting,
    /// A kernel of a kind without its own variant, or whose name does not show its kind.
    OtherOrUnknown,
}

impl KernelWorkClass {
    /// Returns the kind of work of a kernel from its demangled name.
    pub fn work_class_from_kernel_name(name: &str) -> KernelWorkClass {
        if CommunicationLibraryAndCollective::communication_from_kernel_name(name).is_some() {
            return Self::Communication;
        }
        let function = function_name_with_namespaces(name);
        if let Some(class) = class_of_compiler_generated_kernel(&function) {
            return class;
        }
        let class = kernel_class_by_name_words(&function);
        if let Some(arguments) = actual_kernel_of_launcher(&function, name) {
            return kernel_class_by_name_words(arguments).or(class).unwrap_or(Self::OtherOrUnknown);
        }
        let copies = || name.contains("direct_copy_kernel").then_some(Self::DataMovement);
        match class {
            Some(Self::Elementwise) => copies().unwrap_or(Self::Elementwise),
            class => class.unwrap_or(Self::OtherOrUnknown),
        }
    }

    /// Returns the label of the kind of kernel work in printed output.
    pub fn printed_work_class_label(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Matmul => "matmul",
            Self::Softmax => "softmax",
            Self::Normalisation => "normalisation",
            Self::Reduction => "reduction",
            Self::Communication => "communication",
            Self::DataMovement => "data movement",
            Self::OptimizerStep => "optimizer",
            Self::Elementwise => "elementwise",
            Self::Pooling => "pooling",
            Self::Sorting => "sorting",
            Self::OtherOrUnknown => "other",
        }
    }
}

/// Launcher functions of libraries, whose first template argument that is a name names the actual
/// kernel.
const KERNEL_LAUNCHER_FUNCTIONS: &[&str] = &[
    "cutlass::Kernel",
    "cutlass::Kernel2",
    "cutlass::device_kernel",
    "ck_tile::kentry",
    "ck_tile::kentry_pt",
    "Kernel",
    "Kernel2",
];

/// Returns the name of the actual kernel, which is the first named template argument of a launcher
/// function; `None` for other functions.
fn actual_kernel_of_launcher<'a>(function: &str, name: &'a str) -> Option<&'a str> {
    if !KERNEL_LAUNCHER_FUNCTIONS.contains(&function) {
        return None;
    }
    let arguments = name.split_once('<')?.1;
    let words = arguments.split([',', '<', '(', '>', ' ']);
    words.into_iter().find(|word| word.starts_with(|c: char| c.is_alphabetic() || c == '_'))
}

/// Returns the kind of work of a kernel that torch.compile, Triton or XLA generated, from the parts
/// of its name.
fn class_of_compiler_generated_kernel(function: &str) -> Option<KernelWorkClass> {
    use KernelWorkClass::{
        Attention, DataMovement, Elementwise, Matmul, Normalisation, Reduction, Softmax, Sorting,
    };
    let has = |word: &str| function.contains(word);
    let any = |words: &[&str]| words.iter().any(|word| has(word));
    if let Some(rest) = function.strip_prefix("triton_") {
        let products = ["mm", "bmm", "addmm", "baddbmm", "convolution", "gemm"];
        let product = rest.split(['_', '.']).any(|word| products.contains(&word));
        return match rest.split('_').next() {
            Some("poi" | "for") => Some(Elementwise),
            Some("tem") if any(&["attention", "sdpa"]) => Some(Attention),
            Some("tem") => Some(Matmul),
            Some("red" | "per") if has("softmax") || has("amax") && has("exp") => Some(Softmax),
            Some("red" | "per") if any(&["rsqrt", "_norm", "batch_norm"]) => Some(Normalisation),
            Some("red" | "per") => Some(Reduction),
            Some("spl") => Some(Sorting),
            _ if product => Some(Matmul),
            _ => None,
        };
    }
    // XLA names a fused kernel after the kind of fusion and its root operation.
    let xla = has("fusion") || function.starts_with("wrapped_");
    let moves =
        ["transpose", "concatenate", "copy", "slice", "gather", "scatter", "broadcast", "pad"];
    match () {
        () if !xla || any(&["attention", "flash"]) => None,
        () if any(&["gemm", "dot", "convolution", "cublas"]) => Some(Matmul),
        () if has("softmax") => Some(Softmax),
        () if has("reduce") => Some(Reduction),
        () if any(&moves) => Some(DataMovement),
        () if function.starts_with("sort") => Some(Sorting),
        () if any(&["loop_", "input_", "wrapped_"]) || function.starts_with("fusion") => {
            Some(Elementwise)
        }
        () => None,
    }
}

struct KernelClassNameWords {
    class: KernelWorkClass,
    /// Texts of which one must occur anywhere in the lower-case function name, namespaces included.
    substrings: &'static [&'static str],
    /// Words of which one must be a whole word of the name, between separators or camel-case
    /// boundaries.
    whole_words: &'static [&'static str],
}

/// A kernel function gets the first class in this table of which a word matches its name.
const NAME_WORDS_BY_KERNEL_CLASS: &[KernelClassNameWords] = &[
    KernelClassNameWords {
        class: KernelWorkClass::Attention,
        substrings: &[
            "flash",
            "fmha",
            "attention",
            "attn",
            "sdpa",
            "gemm_softmax_gemm",
            "bwd_kernel_dk_dv",
            "bwd_kernel_dq",
            "bwd_preprocess",
            "xqa",
            "mmha",
            "multihead",
        ],
        whole_words: &["mha", "mla", "gqa", "mqa", "sage"],
    },
    KernelClassNameWords {
        class: KernelWorkClass::Softmax,
        substrings: &["softmax"],
        whole_words: &[],
    },
    KernelClassNameWords {
        class: KernelWorkClass::OptimizerStep,
        substrings: &["multi_tensor_apply", "optimizer", "adamw", "lamb_", "adafactor"],
        whole_words: &["adam", "sgd", "adagrad", "rmsprop", "lion"],
    },
    KernelClassNameWords {
        class: KernelWorkClass::Pooling,
        substrings: &["pooling", "pool2d", "pool3d"],
        whole_words: &["pool"],
    },
    KernelClassNameWords {
        class: KernelWorkClass::Matmul,
        substrings: &[
            "gemm",
            "gemv",
            "matmul",
            "nvjet",
            "marlin",
            "moe_stage",
            "cutlass",
            "xmma",
            "splitkreduce",
            "split_k_reduce",
            "cijk_",
            "scudnn",
            "hcudnn",
            "icudnn",
            "convolve",
            "convolution",
            "conv1d",
            "conv2d",
            "conv3d",
            "winograd",
            "dgrad",
            "wgrad",
            "fprop",
            "miopensp3asmconv",
            "miopengcnasmconv",
            "miopenconv",
            "igemm",
            "fused_moe",
            "fmoe",
            "grouped_mm",
        ],
        whole_words: &[
            "conv", "mm", "bmm", "addmm", "dgemm", "trsm", "syrk", "symm", "wmma", "mma",
        ],
    },
    KernelClassNameWords {
        class: KernelWorkClass::Normalisation,
        substrings: &[
            "layernorm",
            "layer_norm",
            "rmsnorm",
            "rms_norm",
            "batchnorm",
            "batch_norm",
            "groupnorm",
            "group_norm",
            "instancenorm",
            "instance_norm",
            "normaliz",
            "normalis",
            "bn_fw",
            "bn_bw",
            "welford",
            "rowwisemoments",
            "gammabeta",
        ],
        whole_words: &["norm", "ln", "rms"],
    },
    KernelClassNameWords {
        class: KernelWorkClass::Sorting,
        substrings: &["topk", "top_k", "radix", "argsort", "sort_", "prefix_sum", "cumsum"],
        whole_words: &["sort", "scan", "unique", "nonzero", "select"],
    },
    KernelClassNameWords {
        class: KernelWorkClass::Reduction,
        substrings: &[
            "reduce",
            "reduction",
            "nll_loss",
            "cross_entropy",
            "dot_kernel",
            "asum",
            "nrm2",
        ],
        whole_words: &["sum", "mean", "argmax", "argmin", "histogram", "loss"],
    },
    KernelClassNameWords {
        class: KernelWorkClass::DataMovement,
        substrings: &[
            "copy",
            "gather",
            "scatter",
            "transpose",
            "permute",
            "memcpy",
            "memset",
            "embedding",
            "im2col",
            "col2im",
            "tonhwc",
            "tonchw",
            "reshape_and_cache",
            "concat",
            "catarray",
            "moe_align",
            "fillfunctor",
        ],
        whole_words: &[
            "cat", "index", "fill", "pack", "unpack", "pad", "roll", "flip", "clone", "embed",
        ],
    },
    KernelClassNameWords {
        class: KernelWorkClass::Elementwise,
        substrings: &[
            "elementwise",
            "pointwise",
            "arange",
            "dropout",
            "act_and_mul",
            "silu",
            "gelu",
            "swiglu",
            "sigmoid",
            "rotary",
            "quantize",
            "quant_",
            "convert",
            "bernoulli",
            "distribution",
        ],
        whole_words: &[
            "add", "mul", "sub", "div", "relu", "exp", "tanh", "rope", "cast", "clamp", "axpy",
            "saxpy", "daxpy", "scal", "bias",
        ],
    },
];

/// Returns the first kind of work of which a function name, without arguments, contains a word.
fn kernel_class_by_name_words(function: &str) -> Option<KernelWorkClass> {
    let lower = function.to_ascii_lowercase();
    let words = lower_case_words_of_name(function);
    let found = |of: &&KernelClassNameWords| {
        of.substrings.iter().any(|part| lower.contains(part))
            || of.whole_words.iter().any(|whole| words.iter().any(|word| word == whole))
    };
    NAME_WORDS_BY_KERNEL_CLASS.iter().find(found).map(|of| of.class)
}

/// Splits a name at separators and camel-case boundaries to lower-case words without digits, such
/// as `cudnn::nchwToNhwcKernel_v2` to `cudnn`, `nchw`, `to`, `nhwc`, `kernel`, `v`.
fn lower_case_words_of_name(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = ' ';
    for c in name.chars() {
        let boundary =
            !c.is_ascii_alphabetic() || c.is_ascii_uppercase() && before.is_ascii_lowercase();
        if boundary {
            words.push(String::new());
        }
        if c.is_ascii_alphabetic()
            && let Some(word) = words.last_mut()
        {
            word.push(c.to_ascii_lowercase());
        }
        before = c;
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::KernelWorkClass::{
        Attention, Communication, DataMovement, Elementwise, Matmul, Normalisation, OptimizerStep,
        OtherOrUnknown, Pooling, Reduction, Softmax, Sorting,
    };
    use super::*;

    fn assert_work_classes_of_kernels(all: &[(&str, KernelWorkClass)]) {
        for (name, class) in all {
            assert_eq!(KernelWorkClass::work_class_from_kernel_name(name), *class, "{name}");
        }
    }

    #[test]
    fn kernels_of_nvidia_libraries_are_classified_by_name() {
        assert_work_classes_of_kernels(&[
            ("ampere_sgemm_128x64_tn", Matmul),
            ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", Matmul),
            (
                "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
                Matmul,
            ),
            ("sm80_xmma_fprop_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", Matmul),
            (
                "void cutlass::Kernel<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(T1::Params)",
                Matmul,
            ),
            (
                "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>(T1::Params)",
                Matmul,
            ),
            ("cudnn_ampere_scudnn_128x64_relu_xregs_large_nn_v1", Matmul),
            (
                "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3>(int, float const *)",
                Matmul,
            ),
            ("void marlin::Marlin<__half, 4>(int4 const *)", Matmul),
            ("void gemvx::kernel<int, int, float, float>(cublasGemvParamsEx<int>)", Matmul),
            ("void cublasLt::splitKreduce_kernel<32, 16>(cublasSplitKParams<float>)", Matmul),
            ("void dot_kernel<float, 128, 0>(cublasDotParams<float>)", Reduction),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", Attention),
            (
                "void cudnn::ops::nchwToNhwcKernel<float, float, float, false>(float const *)",
                DataMovement,
            ),
            (
                "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512>(cudnnTensorStruct)",
                Normalisation,
            ),
            ("bn_bw_1C11_kernel_new<float, float, float2, 32, true, 1>", Normalisation),
            ("void cub::DeviceRadixSortOnesweepKernel<Policy, false, int>(int)", Sorting),
        ]);
    }

    #[test]
    fn kernels_of_amd_libraries_are_classified_by_name() {
        assert_work_classes_of_kernels(&[
            ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN", Matmul),
            ("igemm_fwd_gtcx3_nhwc_bf16", Matmul),
            ("ck_moe_stage1_kernel<BF16, 128, 128>", Matmul),
            ("miopenSp3AsmConv_v30_3_1_gfx94x_fp32_f2x3_stride1", Matmul),
            ("MIOpenBatchNormFwdTrainSpatial", Normalisation),
            ("void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm>(ck::Argument)", Matmul),
            (
                "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::Pipeline>>(x)",
                Attention,
            ),
            ("attn_fwd", Attention),
            ("bwd_kernel_dk_dv.kd", Attention),
            ("void sgl_hip::activation::act_and_mul_kernel<bf16>(ParamsForNormalize)", Elementwise),
        ]);
    }

    #[test]
    fn kernels_of_frameworks_are_classified_by_name() {
        assert_work_classes_of_kernels(&[
            (
                "void flash::flash_fwd_kernel<cutlass::bfloat16_t>(flash::Flash_fwd_params)",
                Attention,
            ),
            (
                "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<x>>>(T1)",
                Attention,
            ),
            ("fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64Persistent", Attention),
            ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256", Matmul),
            ("triton_red_fused_add_mean_mul_pow_rsqrt_0", Normalisation),
            ("triton_per_fused__softmax_add_3", Softmax),
            ("triton_per_fused_sum_2", Reduction),
            ("triton_poi_fused_addmm_relu_1", Elementwise),
            ("triton_tem_fused_mm_7", Matmul),
            ("triton_mm_plus", Matmul),
            ("triton_tem_fused_flex_attention_1", Attention),
            ("gemm_fusion_dot_general_744", Matmul),
            ("loop_add_fusion", Elementwise),
            ("input_reduce_fusion_3", Reduction),
            ("loop_dynamic_update_slice_fusion", DataMovement),
            ("fusion_12", Elementwise),
            ("wrapped_transpose", DataMovement),
            (
                "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>(int)",
                Elementwise,
            ),
            (
                "void at::native::elementwise_kernel<128, direct_copy_kernel_cuda()>(int)",
                DataMovement,
            ),
            ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(T3)", Reduction),
            (
                "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 4>(x)",
                DataMovement,
            ),
            (
                "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<foreach>(int)",
                OptimizerStep,
            ),
            ("transformer_embed", DataMovement),
            ("transformer_loss_forward", Reduction),
            ("max_pool_forward_nchw", Pooling),
            ("softmax_warp_forward<float>", Softmax),
            ("void vllm::rms_norm_kernel<c10::BFloat16>(x)", Normalisation),
            ("fused_moe_kernel", Matmul),
        ]);
    }

    #[test]
    fn communication_kernels_have_a_class_of_their_own() {
        assert_work_classes_of_kernels(&[
            (
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)",
                Communication,
            ),
            (
                "void c10d::symmetric_memory::multimem_all_reduce_kernel<float, 8>(void *)",
                Communication,
            ),
            ("nvshmemi_alltoall_kernel", Communication),
        ]);
    }

    #[test]
    fn parameter_types_do_not_decide_the_class_of_a_kernel() {
        assert_work_classes_of_kernels(&[
            ("vecAdd(ConversionParams)", Elementwise),
            ("fft2d_c2r_32x32<float>(float2 *, cudnn::reduced_divisor)", OtherOrUnknown),
            ("my_solver(catalog::Entry)", OtherOrUnknown),
            ("my_solver<cutlass::gemm::GemmShape<1, 2, 3>>(flash::Params)", OtherOrUnknown),
            ("act_and_mul(ParamsForNormalize)", Elementwise),
            ("convert_layout(Softmax)", Elementwise),
            ("normal_and_transform(float *)", OtherOrUnknown),
            ("my_kernel", OtherOrUnknown),
        ]);
    }
}
