//! GEMM kernels for sm_90a whose fused epilogue replaces the elementwise kernel that otherwise
//! follows the GEMM.

use super::row::EXAMPLE_MODEL_SHAPE;
use crate::kernel_files::source_of_kernel_file;
use crate::transformer::shape::LanguageModelShape;
use kernelgate::backend::program::{
    LaunchArgument, LaunchArgumentList, RegionPointer, int_operands, tensor_map_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::spec::KernelSpec;
use kernelgate_cuda::{RequiredArchitecture, TensorMapElement, TensorWithTmaBoxes};

pub const EPILOGUE_GEMM_KERNELS: &[KernelSpec<EpilogueGemmParameters>] =
    &[SWIGLU_EPILOGUE_GEMM, SWIGLU_BACKWARD_EPILOGUE_GEMM, ROPE_EPILOGUE_GEMM];

/// Parameters of a GEMM with a fused epilogue: the model's shape and the device's number of
/// multiprocessors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpilogueGemmParameters {
    /// Sizes and dtype of the language model whose GEMM it is.
    pub shape: LanguageModelShape,
    /// Number of multiprocessors of the device; each multiprocessor runs one block of the GEMM.
    pub multiprocessors: usize,
    /// Whether the SwiGLU kernel also stores gates and ups, which a backward pass reads.
    pub stores_gates_and_ups: bool,
}

/// Architecture for which the epilogue GEMM kernels are compiled, because they use `wgmma`.
pub const WGMMA_GPU_ARCHITECTURE: &str = "sm_90a";

/// Number of elements along the inner dimension k in one step of the GEMM's main loop.
const K_ELEMENTS_PER_STEP: usize = 64;
/// Threads of a block of the epilogue GEMMs: two warpgroups that compute and one that copies
/// operands.
const EPILOGUE_GEMM_BLOCK_THREADS: usize = 384;
/// Number of warps of a block that store results, each through its own slice of shared memory.
const RESULT_STORING_WARPS: usize = 8;

/// Tile of the GEMM x wᵀ that a block computes at a time, and its pipeline stages in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EpilogueGemmTile {
    tile_rows: usize,
    tile_columns: usize,
    /// Number of main-loop steps whose operands are in shared memory at the same time.
    pipeline_stages: usize,
    /// Number of result columns that a warp stores at a time.
    columns_per_warp_store: usize,
}

const TILE_128_BY_256: EpilogueGemmTile = EpilogueGemmTile {
    tile_rows: 128,
    tile_columns: 256,
    pipeline_stages: 4,
    columns_per_warp_store: 128,
};
/// Tile sizes for which the SwiGLU GEMM is compiled. A launch uses the tile size with the fewest
/// elements for the busiest block, so that the fewest multiprocessors idle at the end; of equal
/// ones, the first.
const SWIGLU_TILE_SIZES: [EpilogueGemmTile; 2] = [
    TILE_128_BY_256,
    EpilogueGemmTile {
        tile_rows: 256,
        tile_columns: 160,
        pipeline_stages: 4,
        columns_per_warp_store: 16,
    },
];
const SWIGLU_BACKWARD_TILE_SIZES: [EpilogueGemmTile; 3] = [
    EpilogueGemmTile { columns_per_warp_store: 32, ..TILE_128_BY_256 },
    EpilogueGemmTile {
        tile_rows: 128,
        tile_columns: 192,
        pipeline_stages: 5,
        columns_per_warp_store: 64,
    },
    EpilogueGemmTile {
        tile_rows: 128,
        tile_columns: 160,
        pipeline_stages: 6,
        columns_per_warp_store: 32,
    },
];
const ROPE_TILE_SIZES: [EpilogueGemmTile; 3] = [
    TILE_128_BY_256,
    EpilogueGemmTile {
        tile_rows: 128,
        tile_columns: 192,
        pipeline_stages: 5,
        columns_per_warp_store: 48,
    },
    EpilogueGemmTile {
        tile_rows: 128,
        tile_columns: 144,
        pipeline_stages: 6,
        columns_per_warp_store: 48,
    },
];

impl EpilogueGemmTile {
    fn best_tile_for_swiglu(product: &EpilogueGemmParameters) -> Self {
        Self::tile_with_least_work_per_block(
            &SWIGLU_TILE_SIZES,
            product,
            2 * product.shape.swiglu_hidden_width,
        )
    }

    fn best_tile_for_swiglu_backward(product: &EpilogueGemmParameters) -> Self {
        Self::tile_with_least_work_per_block(
            &SWIGLU_BACKWARD_TILE_SIZES,
            product,
            product.shape.swiglu_hidden_width,
        )
    }

    fn best_tile_for_rope(product: &EpilogueGemmParameters) -> Self {
        Self::tile_with_least_work_per_block(
            &ROPE_TILE_SIZES,
            product,
            3 * product.shape.model_width,
        )
    }

    fn tile_with_least_work_per_block(
        tiles: &[Self],
        product: &EpilogueGemmParameters,
        columns: usize,
    ) -> Self {
        let elements_a_block = |tile: &&Self| {
            tile.tile_count_of_result(product, columns).div_ceil(product.multiprocessors)
                * tile.tile_rows
                * tile.tile_columns
        };
        *tiles.iter().min_by_key(elements_a_block).expect("each kernel has tiles")
    }

    const fn tile_count_of_result(
        &self,
        product: &EpilogueGemmParameters,
        columns: usize,
    ) -> usize {
        product.shape.tokens_in_batch().div_ceil(self.tile_rows)
            * columns.div_ceil(self.tile_columns)
    }

    const fn shared_bytes_per_block(&self) -> usize {
        let slice = 16 * 2 * (self.columns_per_warp_store + 8);
        let stage = (self.tile_rows + self.tile_columns) * 2 * K_ELEMENTS_PER_STEP;
        self.pipeline_stages * (stage + 16) + RESULT_STORING_WARPS * slice
    }

    /// Macros that select the element type and the tile size; `own` is a macro that only this
    /// kernel has.
    fn element_and_tile_macros(&self, own: Option<String>) -> Vec<String> {
        let extents = [("ROWS", self.tile_rows), ("COLUMNS", self.tile_columns)];
        let extents = extents.map(|(name, extent)| format!("TILE_{name}={extent}"));
        ["ELEMENT_BF16".to_owned()].into_iter().chain(extents).chain(own).collect()
    }

    fn pipeline_size_macros(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("THREADS", EPILOGUE_GEMM_BLOCK_THREADS),
            ("STAGES", self.pipeline_stages),
            ("SLICE_COLUMNS", self.columns_per_warp_store),
            ("SHARED_BYTES", self.shared_bytes_per_block()),
        ]
    }

    /// Grid with one block for each multiprocessor, or for each tile of the result if there are
    /// fewer tiles.
    fn grid_of_persistent_blocks(
        &self,
        product: &EpilogueGemmParameters,
        columns: usize,
    ) -> [usize; 3] {
        [self.tile_count_of_result(product, columns).min(product.multiprocessors), 1, 1]
    }
}

const GEMM_THAT_STORES_GATES_AND_UPS: EpilogueGemmParameters = EpilogueGemmParameters {
    shape: EXAMPLE_MODEL_SHAPE,
    multiprocessors: 132,
    stores_gates_and_ups: true,
};
const GEMM_THAT_STORES_NO_GATES_AND_UPS: EpilogueGemmParameters =
    EpilogueGemmParameters { stores_gates_and_ups: false, ..GEMM_THAT_STORES_GATES_AND_UPS };
/// Example GEMM parameters with which the second tile size is chosen, so that it is compiled too.
const GEMM_OF_SECOND_TILE_SIZE: EpilogueGemmParameters = EpilogueGemmParameters {
    shape: LanguageModelShape { context_tokens: 1024, ..EXAMPLE_MODEL_SHAPE },
    ..GEMM_THAT_STORES_NO_GATES_AND_UPS
};
const GEMM_OF_XL_MODEL: EpilogueGemmParameters = EpilogueGemmParameters {
    shape: LanguageModelShape {
        model_width: 1600,
        swiglu_hidden_width: 6400,
        heads: 25,
        context_tokens: 1024,
        ..EXAMPLE_MODEL_SHAPE
    },
    ..GEMM_THAT_STORES_NO_GATES_AND_UPS
};
/// Example model shape with heads of 128 elements, for which the RoPE GEMM is compiled too.
const EXAMPLE_WITH_HEADS_OF_128: LanguageModelShape =
    LanguageModelShape { heads: 6, ..EXAMPLE_MODEL_SHAPE };

/// Kernel of the GEMM that computes gates and ups, with SwiGLU in its epilogue.
pub const SWIGLU_EPILOGUE_GEMM: KernelSpec<EpilogueGemmParameters> = KernelSpec {
    macro_definitions: |product| {
        EpilogueGemmTile::best_tile_for_swiglu(product).element_and_tile_macros(Some(format!(
            "SAVED={}",
            u8::from(product.stores_gates_and_ups)
        )))
    },
    constant_macros: |product| {
        EpilogueGemmTile::best_tile_for_swiglu(product).pipeline_size_macros()
    },
    dynamic_shared_bytes: |product| {
        EpilogueGemmTile::best_tile_for_swiglu(product).shared_bytes_per_block()
    },
    required_architecture: RequiredArchitecture::ExactArchitecture(WGMMA_GPU_ARCHITECTURE),
    listed_build_parameters: || {
        vec![
            GEMM_THAT_STORES_GATES_AND_UPS,
            GEMM_THAT_STORES_NO_GATES_AND_UPS,
            EpilogueGemmParameters { stores_gates_and_ups: true, ..GEMM_OF_XL_MODEL },
            GEMM_OF_XL_MODEL,
        ]
    },
    ..KernelSpec::new(
        source_of_kernel_file("transformer/gemm_swiglu"),
        "transformer_gemm_swiglu",
        EPILOGUE_GEMM_BLOCK_THREADS,
        |product| {
            EpilogueGemmTile::best_tile_for_swiglu(product)
                .grid_of_persistent_blocks(product, 2 * product.shape.swiglu_hidden_width)
        },
    )
};

/// Kernel of the GEMM that computes the gradient of the hidden layer, with SwiGLU's gradient in its
/// epilogue.
pub const SWIGLU_BACKWARD_EPILOGUE_GEMM: KernelSpec<EpilogueGemmParameters> = KernelSpec {
    macro_definitions: |product| {
        EpilogueGemmTile::best_tile_for_swiglu_backward(product).element_and_tile_macros(None)
    },
    constant_macros: |product| {
        EpilogueGemmTile::best_tile_for_swiglu_backward(product).pipeline_size_macros()
    },
    dynamic_shared_bytes: |product| {
        EpilogueGemmTile::best_tile_for_swiglu_backward(product).shared_bytes_per_block()
    },
    required_architecture: RequiredArchitecture::ExactArchitecture(WGMMA_GPU_ARCHITECTURE),
    listed_build_parameters: || {
        vec![GEMM_THAT_STORES_GATES_AND_UPS, GEMM_OF_SECOND_TILE_SIZE, GEMM_OF_XL_MODEL]
    },
    ..KernelSpec::new(
        source_of_kernel_file("transformer/gemm_swiglu_backward"),
        "transformer_gemm_swiglu_backward",
        EPILOGUE_GEMM_BLOCK_THREADS,
        |product| {
            EpilogueGemmTile::best_tile_for_swiglu_backward(product)
                .grid_of_persistent_blocks(product, product.shape.swiglu_hidden_width)
        },
    )
};

/// Kernel of the GEMM that computes queries, keys and values, with rotary position embedding in its
/// epilogue.
pub const ROPE_EPILOGUE_GEMM: KernelSpec<EpilogueGemmParameters> = KernelSpec {
    macro_definitions: |product| {
        EpilogueGemmTile::best_tile_for_rope(product).element_and_tile_macros(Some(format!(
            "HEAD_DIM={}",
            product.shape.elements_per_head()
        )))
    },
    constant_macros: |product| EpilogueGemmTile::best_tile_for_rope(product).pipeline_size_macros(),
    dynamic_shared_bytes: |product| {
        EpilogueGemmTile::best_tile_for_rope(product).shared_bytes_per_block()
    },
    required_architecture: RequiredArchitecture::ExactArchitecture(WGMMA_GPU_ARCHITECTURE),
    listed_build_parameters: || {
        vec![
            GEMM_THAT_STORES_NO_GATES_AND_UPS,
            GEMM_OF_SECOND_TILE_SIZE,
            GEMM_OF_XL_MODEL,
            EpilogueGemmParameters {
                shape: EXAMPLE_WITH_HEADS_OF_128,
                ..GEMM_THAT_STORES_NO_GATES_AND_UPS
            },
        ]
    },
    ..KernelSpec::new(
        source_of_kernel_file("transformer/gemm_rope"),
        "transformer_gemm_rope",
        EPILOGUE_GEMM_BLOCK_THREADS,
        |product| {
            EpilogueGemmTile::best_tile_for_rope(product)
                .grid_of_persistent_blocks(product, 3 * product.shape.model_width)
        },
    )
};

impl EpilogueGemmParameters {
    /// Whether the epilogue GEMM kernels support all GEMMs of a language model of this shape: bf16,
    /// and sizes that fit the kernels' steps.
    pub fn supports_model_shape(shape: &LanguageModelShape) -> bool {
        let of_steps = shape.model_width.is_multiple_of(K_ELEMENTS_PER_STEP)
            && shape.swiglu_hidden_width.is_multiple_of(8);
        shape.dtype == Dtype::Bf16 && of_steps && shape.elements_per_head().is_multiple_of(8)
    }

    /// Arguments of the kernel [`SWIGLU_EPILOGUE_GEMM`]: x `[tokens, d]`, weights w `[2, ff, d]`,
    /// results h and gate_up.
    pub fn swiglu_kernel_arguments(
        &self,
        [x, w, h, gate_up]: [RegionPointer; 4],
    ) -> impl LaunchArgumentList {
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. } = self.shape;
        let maps =
            self.tma_maps_of_x_and_w(&EpilogueGemmTile::best_tile_for_swiglu(self), x, w, [2, ff]);
        (maps, h, gate_up, int_operands([self.shape.tokens_in_batch(), ff, d]))
    }

    /// Arguments of the kernel [`SWIGLU_BACKWARD_EPILOGUE_GEMM`]: x `[tokens, d]`, weights w `[ff,
    /// d]`, saved gates and ups, and their gradients.
    pub fn swiglu_backward_kernel_arguments(
        &self,
        [x, w, gate_up, grad_gate_up]: [RegionPointer; 4],
    ) -> impl LaunchArgumentList {
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. } = self.shape;
        let maps = self.tma_maps_of_x_and_w(
            &EpilogueGemmTile::best_tile_for_swiglu_backward(self),
            x,
            w,
            [1, ff],
        );
        (maps, gate_up, grad_gate_up, int_operands([self.shape.tokens_in_batch(), ff, d]))
    }

    /// Arguments of the kernel [`ROPE_EPILOGUE_GEMM`]: x `[tokens, d]`, weights w `[3 d, d]`,
    /// result qkv, and the table of rotations.
    pub fn rope_kernel_arguments(
        &self,
        [x, w, qkv, table]: [RegionPointer; 4],
    ) -> impl LaunchArgumentList {
        let LanguageModelShape { model_width: d, context_tokens: context, .. } = self.shape;
        let maps =
            self.tma_maps_of_x_and_w(&EpilogueGemmTile::best_tile_for_rope(self), x, w, [1, 3 * d]);
        (maps, qkv, table, int_operands([self.shape.tokens_in_batch(), 3 * d, d, context]))
    }

    /// TMA tensor maps of a GEMM's operands: of x, with one box for each tile, and of the matrices
    /// of w, with two boxes for each tile.
    fn tma_maps_of_x_and_w(
        &self,
        tile: &EpilogueGemmTile,
        x: RegionPointer,
        w: RegionPointer,
        extents: [usize; 2],
    ) -> [LaunchArgument; 2] {
        let map = |at, [matrices, rows]: [usize; 2], box_rows| {
            let [matrices, rows, d] =
                [matrices, rows, self.shape.model_width].map(|extent| extent as u64);
            let tensor = TensorWithTmaBoxes {
                element: TensorMapElement::Bf16,
                extents: [1, matrices, rows, d],
                strides: [matrices * rows * d, rows * d, d],
                rows_per_box: box_rows as u32,
            };
            tensor_map_operand(at, tensor)
        };
        [
            map(x, [1, self.shape.tokens_in_batch()], tile.tile_rows),
            map(w, extents, tile.tile_columns / 2),
        ]
    }
}
