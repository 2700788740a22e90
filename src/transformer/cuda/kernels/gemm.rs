//! GEMMs of sm_90a whose epilogue replaces the kernel that otherwise follows a GEMM.

use super::row::SMALL;
use crate::kernel_files::kernel_file;
use crate::transformer::shape::LmShape;
use kernelgate::backend::program::{Operand, Operands, Pointer, int_operands, tensor_boxes};
use kernelgate::workload::Dtype;
use kernelgate_cuda::spec::KernelSpec;
use kernelgate_cuda::{RequiredArchitecture, TensorBoxes, TensorMapElement};

pub const KERNELS: &[KernelSpec<EpilogueGemm>] = &[SWIGLU_GEMM, SWIGLU_BACKWARD_GEMM, ROPE_GEMM];

/// Parameters of a GEMM with an epilogue: the model's extents and the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpilogueGemm {
    /// Extents of the model.
    pub shape: LmShape,
    /// Number of multiprocessors of the device; each runs one block.
    pub multiprocessors: usize,
    /// Whether the kernel also writes gates and ups, which a backward pass needs.
    pub saved: bool,
}

/// Architecture for which the kernels are compiled, because of `wgmma`.
pub const WGMMA_ARCHITECTURE: &str = "sm_90a";

/// Number of elements along k in one step.
const DEPTH_PER_STEP: usize = 64;
/// Threads of a block: two warpgroups that compute and one that copies.
const THREADS: usize = 384;
/// Number of warps that store results, each with a slice of shared memory.
const STORING_WARP_COUNT: usize = 8;

/// Tile of a GEMM x w^T, and its stages in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GemmTile {
    rows: usize,
    columns: usize,
    /// Number of steps whose operands are in shared memory.
    stages: usize,
    /// Number of result columns that a warp stores at a time.
    slice: usize,
}

const USUAL_TILE: GemmTile = GemmTile { rows: 128, columns: 256, stages: 4, slice: 128 };
/// Tile sizes of the SwiGLU kernel. A launch uses the tile size with the least work for a block,
/// because it leaves the fewest multiprocessors idle at the end; if several are equal, the first of
/// them, which is the fastest.
const SWIGLU_TILES: [GemmTile; 2] =
    [USUAL_TILE, GemmTile { rows: 256, columns: 160, stages: 4, slice: 16 }];
const SWIGLU_BACKWARD_TILES: [GemmTile; 3] = [
    GemmTile { slice: 32, ..USUAL_TILE },
    GemmTile { rows: 128, columns: 192, stages: 5, slice: 64 },
    GemmTile { rows: 128, columns: 160, stages: 6, slice: 32 },
];
const ROPE_TILES: [GemmTile; 3] = [
    USUAL_TILE,
    GemmTile { rows: 128, columns: 192, stages: 5, slice: 48 },
    GemmTile { rows: 128, columns: 144, stages: 6, slice: 48 },
];

impl GemmTile {
    fn best_swiglu_tile(product: &EpilogueGemm) -> Self {
        Self::best_tile(&SWIGLU_TILES, product, 2 * product.shape.ff)
    }

    fn swiglu_backward(product: &EpilogueGemm) -> Self {
        Self::best_tile(&SWIGLU_BACKWARD_TILES, product, product.shape.ff)
    }

    fn best_rope_tile(product: &EpilogueGemm) -> Self {
        Self::best_tile(&ROPE_TILES, product, 3 * product.shape.d)
    }

    fn best_tile(tiles: &[Self], product: &EpilogueGemm, columns: usize) -> Self {
        let elements_a_block = |tile: &&Self| {
            tile.tile_count(product, columns).div_ceil(product.multiprocessors)
                * tile.rows
                * tile.columns
        };
        *tiles.iter().min_by_key(elements_a_block).expect("each kernel has tiles")
    }

    const fn tile_count(&self, product: &EpilogueGemm, columns: usize) -> usize {
        product.shape.token_count().div_ceil(self.rows) * columns.div_ceil(self.columns)
    }

    const fn shared_bytes(&self) -> usize {
        let slice = 16 * 2 * (self.slice + 8);
        let stage = (self.rows + self.columns) * 2 * DEPTH_PER_STEP;
        self.stages * (stage + 16) + STORING_WARP_COUNT * slice
    }

    /// Macros of a build; `own` is the macro that only this kernel has.
    fn defines(&self, own: Option<String>) -> Vec<String> {
        let extents = [("ROWS", self.rows), ("COLUMNS", self.columns)];
        let extents = extents.map(|(name, extent)| format!("TILE_{name}={extent}"));
        ["ELEMENT_BF16".to_owned()].into_iter().chain(extents).chain(own).collect()
    }

    fn kernel_macros(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("THREADS", THREADS),
            ("STAGES", self.stages),
            ("SLICE_COLUMNS", self.slice),
            ("SHARED_BYTES", self.shared_bytes()),
        ]
    }

    /// Grid with one block for each multiprocessor, or for each tile if there are fewer.
    fn block_grid(&self, product: &EpilogueGemm, columns: usize) -> [usize; 3] {
        [self.tile_count(product, columns).min(product.multiprocessors), 1, 1]
    }
}

const SAVING_GEMM: EpilogueGemm = EpilogueGemm { shape: SMALL, multiprocessors: 132, saved: true };
const GEMM_WITHOUT_SAVING: EpilogueGemm = EpilogueGemm { saved: false, ..SAVING_GEMM };
/// GEMM parameters for which the second tile size is used.
const LONG_GEMM: EpilogueGemm =
    EpilogueGemm { shape: LmShape { context: 1024, ..SMALL }, ..GEMM_WITHOUT_SAVING };
const XL: EpilogueGemm = EpilogueGemm {
    shape: LmShape { d: 1600, ff: 6400, heads: 25, context: 1024, ..SMALL },
    ..GEMM_WITHOUT_SAVING
};
/// Model shape with heads of 128 elements.
const WIDE: LmShape = LmShape { heads: 6, ..SMALL };

/// Kernel of the GEMM with gate and up, with SwiGLU in its epilogue.
pub const SWIGLU_GEMM: KernelSpec<EpilogueGemm> = KernelSpec {
    defines: |product| {
        GemmTile::best_swiglu_tile(product)
            .defines(Some(format!("SAVED={}", u8::from(product.saved))))
    },
    constants: |product| GemmTile::best_swiglu_tile(product).kernel_macros(),
    shared_bytes: |product| GemmTile::best_swiglu_tile(product).shared_bytes(),
    requires: RequiredArchitecture::Exactly(WGMMA_ARCHITECTURE),
    variants: || vec![SAVING_GEMM, GEMM_WITHOUT_SAVING, EpilogueGemm { saved: true, ..XL }, XL],
    ..KernelSpec::new(
        kernel_file("transformer/gemm_swiglu"),
        "transformer_gemm_swiglu",
        THREADS,
        |product| GemmTile::best_swiglu_tile(product).block_grid(product, 2 * product.shape.ff),
    )
};

/// Kernel of the GEMM that computes the gradient of the hidden layer, with SwiGLU's gradient in its
/// epilogue.
pub const SWIGLU_BACKWARD_GEMM: KernelSpec<EpilogueGemm> = KernelSpec {
    defines: |product| GemmTile::swiglu_backward(product).defines(None),
    constants: |product| GemmTile::swiglu_backward(product).kernel_macros(),
    shared_bytes: |product| GemmTile::swiglu_backward(product).shared_bytes(),
    requires: RequiredArchitecture::Exactly(WGMMA_ARCHITECTURE),
    variants: || vec![SAVING_GEMM, LONG_GEMM, XL],
    ..KernelSpec::new(
        kernel_file("transformer/gemm_swiglu_backward"),
        "transformer_gemm_swiglu_backward",
        THREADS,
        |product| GemmTile::swiglu_backward(product).block_grid(product, product.shape.ff),
    )
};

/// Kernel of the GEMM that computes queries, keys and values, with rotary embedding in its
/// epilogue.
pub const ROPE_GEMM: KernelSpec<EpilogueGemm> = KernelSpec {
    defines: |product| {
        GemmTile::best_rope_tile(product)
            .defines(Some(format!("HEAD_DIM={}", product.shape.head_dim())))
    },
    constants: |product| GemmTile::best_rope_tile(product).kernel_macros(),
    shared_bytes: |product| GemmTile::best_rope_tile(product).shared_bytes(),
    requires: RequiredArchitecture::Exactly(WGMMA_ARCHITECTURE),
    variants: || {
        vec![
            GEMM_WITHOUT_SAVING,
            LONG_GEMM,
            XL,
            EpilogueGemm { shape: WIDE, ..GEMM_WITHOUT_SAVING },
        ]
    },
    ..KernelSpec::new(
        kernel_file("transformer/gemm_rope"),
        "transformer_gemm_rope",
        THREADS,
        |product| GemmTile::best_rope_tile(product).block_grid(product, 3 * product.shape.d),
    )
};

impl EpilogueGemm {
    /// Whether the epilogue kernels support all GEMMs of a language model of this shape.
    pub fn supports_shape(shape: &LmShape) -> bool {
        let of_steps = shape.d.is_multiple_of(DEPTH_PER_STEP) && shape.ff.is_multiple_of(8);
        shape.dtype == Dtype::Bf16 && of_steps && shape.head_dim().is_multiple_of(8)
    }

    /// Arguments of [`SWIGLU_GEMM`]: x `[tokens, d]`, w `[2, ff, d]`.
    pub fn swiglu_arguments(&self, [x, w, h, gate_up]: [Pointer; 4]) -> impl Operands {
        let LmShape { d, ff, .. } = self.shape;
        let maps = self.operand_tensor_maps(&GemmTile::best_swiglu_tile(self), x, w, [2, ff]);
        (maps, h, gate_up, int_operands([self.shape.token_count(), ff, d]))
    }

    /// Arguments of [`SWIGLU_BACKWARD_GEMM`]: x `[tokens, d]`, w `[ff, d]`.
    pub fn swiglu_backward(&self, [x, w, gate_up, grad_gate_up]: [Pointer; 4]) -> impl Operands {
        let LmShape { d, ff, .. } = self.shape;
        let maps = self.operand_tensor_maps(&GemmTile::swiglu_backward(self), x, w, [1, ff]);
        (maps, gate_up, grad_gate_up, int_operands([self.shape.token_count(), ff, d]))
    }

    /// Arguments of [`ROPE_GEMM`]: x `[tokens, d]`, w `[3 d, d]`.
    pub fn rope_arguments(&self, [x, w, qkv, table]: [Pointer; 4]) -> impl Operands {
        let LmShape { d, context, .. } = self.shape;
        let maps = self.operand_tensor_maps(&GemmTile::best_rope_tile(self), x, w, [1, 3 * d]);
        (maps, qkv, table, int_operands([self.shape.token_count(), 3 * d, d, context]))
    }

    /// Tensor maps of x, with one box for each tile, and of the matrices of w, with two boxes for
    /// each tile.
    fn operand_tensor_maps(
        &self,
        tile: &GemmTile,
        x: Pointer,
        w: Pointer,
        extents: [usize; 2],
    ) -> [Operand; 2] {
        let map = |at, [matrices, rows]: [usize; 2], box_rows| {
            let [matrices, rows, d] = [matrices, rows, self.shape.d].map(|extent| extent as u64);
            let tensor = TensorBoxes {
                element: TensorMapElement::Bf16,
                extents: [1, matrices, rows, d],
                strides: [matrices * rows * d, rows * d, d],
                box_rows: box_rows as u32,
            };
            tensor_boxes(at, tensor)
        };
        [map(x, [1, self.shape.token_count()], tile.rows), map(w, extents, tile.columns / 2)]
    }
}
