//! GEMMs of sm_90a whose epilogue is the kernel that follows a product elsewhere.

use super::row::SMALL;
use crate::kernel_files::kernel_file;
use crate::transformer::shape::Shape;
use kernelgate::backend::program::{Operand, Operands, Pointer, boxes, int_operands};
use kernelgate::workload::Dtype;
use kernelgate_cuda::spec::KernelSpec;
use kernelgate_cuda::{RequiredArchitecture, TensorBoxes, TensorMapElement};

/// The kernels.
pub const KERNELS: &[KernelSpec<Product>] = &[SWIGLU, SWIGLU_BACKWARD, ROPE];

/// The problem and the device of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// Extents of the model.
    pub shape: Shape,
    /// Multiprocessors of the device, each of which has a block.
    pub multiprocessors: usize,
    /// Whether gates and ups are written too.
    pub saved: bool,
}

/// Architecture of the kernels, for `wgmma`.
pub const ARCHITECTURE: &str = "sm_90a";

/// Elements of k of a step.
const DEPTH: usize = 64;
/// Two warpgroups compute, a third one copies.
const THREADS: usize = 384;
/// Warps that store, each with a slice of shared memory.
const STORING_WARPS: usize = 8;

/// A tile of x w^T, and its copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    rows: usize,
    columns: usize,
    /// Steps in shared memory.
    stages: usize,
    /// Columns of the result that a warp stores at a time.
    slice: usize,
}

const USUAL: Tile = Tile { rows: 128, columns: 256, stages: 4, slice: 128 };
/// Tiles of each kernel. A product has the one with the least work of a block, which is the one that
/// leaves the fewest multiprocessors idle at the end; of several the first, which is the faster one.
const SWIGLU_TILES: [Tile; 2] = [USUAL, Tile { rows: 256, columns: 160, stages: 4, slice: 16 }];
const SWIGLU_BACKWARD_TILES: [Tile; 3] = [
    Tile { slice: 32, ..USUAL },
    Tile { rows: 128, columns: 192, stages: 5, slice: 64 },
    Tile { rows: 128, columns: 160, stages: 6, slice: 32 },
];
const ROPE_TILES: [Tile; 3] = [
    USUAL,
    Tile { rows: 128, columns: 192, stages: 5, slice: 48 },
    Tile { rows: 128, columns: 144, stages: 6, slice: 48 },
];

impl Tile {
    fn swiglu(product: &Product) -> Self {
        Self::best(&SWIGLU_TILES, product, 2 * product.shape.ff)
    }

    fn swiglu_backward(product: &Product) -> Self {
        Self::best(&SWIGLU_BACKWARD_TILES, product, product.shape.ff)
    }

    fn rope(product: &Product) -> Self {
        Self::best(&ROPE_TILES, product, 3 * product.shape.d)
    }

    fn best(tiles: &[Self], product: &Product, columns: usize) -> Self {
        let elements_a_block = |tile: &&Self| {
            tile.count(product, columns).div_ceil(product.multiprocessors)
                * tile.rows
                * tile.columns
        };
        *tiles.iter().min_by_key(elements_a_block).expect("each kernel has tiles")
    }

    const fn count(&self, product: &Product, columns: usize) -> usize {
        product.shape.tokens().div_ceil(self.rows) * columns.div_ceil(self.columns)
    }

    const fn shared_bytes(&self) -> usize {
        let slice = 16 * 2 * (self.slice + 8);
        let stage = (self.rows + self.columns) * 2 * DEPTH;
        self.stages * (stage + 16) + STORING_WARPS * slice
    }

    /// Macros of a build, and those that only its kernel has.
    fn defines(&self, own: Option<String>) -> Vec<String> {
        let extents = [("ROWS", self.rows), ("COLUMNS", self.columns)];
        let extents = extents.map(|(name, extent)| format!("TILE_{name}={extent}"));
        ["ELEMENT_BF16".to_owned()].into_iter().chain(extents).chain(own).collect()
    }

    fn constants(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("THREADS", THREADS),
            ("STAGES", self.stages),
            ("SLICE_COLUMNS", self.slice),
            ("SHARED_BYTES", self.shared_bytes()),
        ]
    }

    /// A block for each multiprocessor, if there are as many tiles.
    fn blocks(&self, product: &Product, columns: usize) -> [usize; 3] {
        [self.count(product, columns).min(product.multiprocessors), 1, 1]
    }
}

const SAVING: Product = Product { shape: SMALL, multiprocessors: 132, saved: true };
const NOT_SAVING: Product = Product { saved: false, ..SAVING };
/// Products with the other tiles.
const LONG: Product = Product { shape: Shape { context: 1024, ..SMALL }, ..NOT_SAVING };
const XL: Product =
    Product { shape: Shape { d: 1600, ff: 6400, heads: 25, context: 1024, ..SMALL }, ..NOT_SAVING };
/// Heads of 128.
const WIDE: Shape = Shape { heads: 6, ..SMALL };

/// SwiGLU of the product with gate and up.
pub const SWIGLU: KernelSpec<Product> = KernelSpec {
    defines: |product| {
        Tile::swiglu(product).defines(Some(format!("SAVED={}", u8::from(product.saved))))
    },
    constants: |product| Tile::swiglu(product).constants(),
    shared_bytes: |product| Tile::swiglu(product).shared_bytes(),
    requires: RequiredArchitecture::Exactly(ARCHITECTURE),
    variants: || vec![SAVING, NOT_SAVING, Product { saved: true, ..XL }, XL],
    ..KernelSpec::new(
        kernel_file(
            "transformer/gemm_swiglu",
            include_str!("../../../../kernels/transformer/gemm_swiglu.cu"),
        ),
        "transformer_gemm_swiglu",
        THREADS,
        |product| Tile::swiglu(product).blocks(product, 2 * product.shape.ff),
    )
};

/// SwiGLU's gradient of the product that gives the gradient of the hidden layer.
pub const SWIGLU_BACKWARD: KernelSpec<Product> = KernelSpec {
    defines: |product| Tile::swiglu_backward(product).defines(None),
    constants: |product| Tile::swiglu_backward(product).constants(),
    shared_bytes: |product| Tile::swiglu_backward(product).shared_bytes(),
    requires: RequiredArchitecture::Exactly(ARCHITECTURE),
    variants: || vec![SAVING, LONG, XL],
    ..KernelSpec::new(
        kernel_file(
            "transformer/gemm_swiglu_backward",
            include_str!("../../../../kernels/transformer/gemm_swiglu_backward.cu"),
        ),
        "transformer_gemm_swiglu_backward",
        THREADS,
        |product| Tile::swiglu_backward(product).blocks(product, product.shape.ff),
    )
};

/// Rotary embedding of the product with queries, keys and values.
pub const ROPE: KernelSpec<Product> = KernelSpec {
    defines: |product| {
        Tile::rope(product).defines(Some(format!("HEAD_DIM={}", product.shape.head_dim())))
    },
    constants: |product| Tile::rope(product).constants(),
    shared_bytes: |product| Tile::rope(product).shared_bytes(),
    requires: RequiredArchitecture::Exactly(ARCHITECTURE),
    variants: || vec![NOT_SAVING, LONG, XL, Product { shape: WIDE, ..NOT_SAVING }],
    ..KernelSpec::new(
        kernel_file(
            "transformer/gemm_rope",
            include_str!("../../../../kernels/transformer/gemm_rope.cu"),
        ),
        "transformer_gemm_rope",
        THREADS,
        |product| Tile::rope(product).blocks(product, 3 * product.shape.d),
    )
};

impl Product {
    /// Whether the kernels compute these products.
    pub fn computes(shape: &Shape) -> bool {
        let of_steps = shape.d.is_multiple_of(DEPTH) && shape.ff.is_multiple_of(8);
        shape.dtype == Dtype::Bf16 && of_steps && shape.head_dim().is_multiple_of(8)
    }

    /// Arguments of [`SWIGLU`]: x `[tokens, d]`, w `[2, ff, d]`.
    pub fn swiglu(&self, [x, w, h, gate_up]: [Pointer; 4]) -> impl Operands {
        let Shape { d, ff, .. } = self.shape;
        let maps = self.maps(&Tile::swiglu(self), x, w, [2, ff]);
        (maps, h, gate_up, int_operands([self.shape.tokens(), ff, d]))
    }

    /// Arguments of [`SWIGLU_BACKWARD`]: x `[tokens, d]`, w `[ff, d]`.
    pub fn swiglu_backward(&self, [x, w, gate_up, grad_gate_up]: [Pointer; 4]) -> impl Operands {
        let Shape { d, ff, .. } = self.shape;
        let maps = self.maps(&Tile::swiglu_backward(self), x, w, [1, ff]);
        (maps, gate_up, grad_gate_up, int_operands([self.shape.tokens(), ff, d]))
    }

    /// Arguments of [`ROPE`]: x `[tokens, d]`, w `[3 d, d]`.
    pub fn rope(&self, [x, w, qkv, table]: [Pointer; 4]) -> impl Operands {
        let Shape { d, context, .. } = self.shape;
        let maps = self.maps(&Tile::rope(self), x, w, [1, 3 * d]);
        (maps, qkv, table, int_operands([self.shape.tokens(), 3 * d, d, context]))
    }

    /// Maps of x, a box a tile, and of matrices of w, two boxes a tile.
    fn maps(&self, tile: &Tile, x: Pointer, w: Pointer, extents: [usize; 2]) -> [Operand; 2] {
        let map = |at, [matrices, rows]: [usize; 2], box_rows| {
            let [matrices, rows, d] = [matrices, rows, self.shape.d].map(|extent| extent as u64);
            let tensor = TensorBoxes {
                element: TensorMapElement::Bf16,
                extents: [1, matrices, rows, d],
                strides: [matrices * rows * d, rows * d, d],
                box_rows: box_rows as u32,
            };
            boxes(at, tensor)
        };
        [map(x, [1, self.shape.tokens()], tile.rows), map(w, extents, tile.columns / 2)]
    }
}
