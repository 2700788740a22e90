//! Every kernel of the family: its file and how many blocks it takes.

use crate::denoise::model::{Model, PI05, TINY};
use crate::kernels::source;
use kernelgate_cuda::compiler::source::Build;

/// A kernel: its symbol, its file, and its blocks in x, y and z for so many items (rows or elements, as the kernel counts).
pub struct Launch {
    pub symbol: &'static str,
    file: &'static str,
    pub blocks: fn(&Model, usize) -> [usize; 3],
    /// Where blocks wait for each other, all have to run at once: the blocks of a cluster of them. The GPU has to be this process' own meanwhile.
    pub together: Option<usize>,
}

const fn launch(symbol: &'static str, file: &'static str, blocks: fn(&Model, usize) -> [usize; 3]) -> Launch {
    Launch { symbol, file, blocks, together: None }
}

/// A thread an item.
fn each(_: &Model, items: usize) -> [usize; 3] {
    [items.div_ceil(256), 1, 1]
}

/// A block a row.
fn row(_: &Model, rows: usize) -> [usize; 3] {
    [rows, 1, 1]
}

/// A cluster of `split` blocks a tile of columns and 64 rows.
fn tiles(tiles: usize, split: usize, rows: usize) -> [usize; 3] {
    [tiles * split, rows.div_ceil(64), 1]
}

/// The kernels.
pub const LAUNCHES: &[Launch] = &[
    launch("denoise_per_op_embed", "denoise/per_op", |model, rows| [embed_blocks(model) * rows, 1, 1]),
    launch("denoise_per_op_bias", "denoise/per_op", each),
    launch("denoise_per_op_cast", "denoise/per_op", each),
    launch("denoise_per_op_copy", "denoise/per_op", each),
    launch("denoise_per_op_angles", "denoise/per_op", each),
    launch("denoise_per_op_norm", "denoise/per_op", row),
    launch("denoise_per_op_modulate", "denoise/per_op", each),
    launch("denoise_per_op_residual", "denoise/per_op", each),
    launch("denoise_per_op_rope", "denoise/per_op", each),
    launch("denoise_per_op_concat", "denoise/per_op", each),
    launch("denoise_per_op_softmax", "denoise/per_op", row),
    launch("denoise_per_op_gelu", "denoise/per_op", each),
    launch("denoise_per_op_action_out", "denoise/per_op", row),
    launch("denoise_per_op_euler", "denoise/per_op", each),
    launch("denoise_fused_project_time", "denoise/fused_project", |model, rows| tiles(model.width / 64, 4, rows)),
    launch("denoise_fused_project_style", "denoise/fused_project", |model, rows| tiles(3 * model.width / 64, 4, rows)),
    launch("denoise_fused_project_qkv", "denoise/fused_project", |model, rows| {
        tiles((model.heads + 2) * model.head_dim / 64, 4, rows)
    }),
    launch("denoise_fused_project_out", "denoise/fused_project", |model, rows| tiles(model.width / 64, 8, rows)),
    launch("denoise_fused_project_gate_up", "denoise/fused_project", |model, rows| tiles(model.mlp / 32, 2, rows)),
    launch("denoise_fused_project_down", "denoise/fused_project", |model, rows| tiles(model.width / 64, 8, rows)),
    launch("denoise_fused_attention", "denoise/fused_attention", |_, rows| [rows.div_ceil(32) * 8, 1, 1]),
    launch("denoise_fused_rows_begin", "denoise/fused_rows", row),
    launch("denoise_fused_rows_end", "denoise/fused_rows", row),
    launch("denoise_persistent_shift", "denoise/persistent", |_, columns| [columns / 256, 1, 1]),
    Launch { together: Some(8), ..launch("denoise_persistent", "denoise/persistent", |_, _| [120, 1, 1]) },
];

/// The macro of the fused kernels for a model, whatever its depth; `None` where there is none.
pub fn compiled_for(model: &Model) -> Option<&'static str> {
    let same = |known: &Model| Model { name: model.name, depth: model.depth, ..*known } == *model;
    [(PI05, "MODEL=Pi05"), (TINY, "MODEL=Tiny")].into_iter().find(|(known, _)| same(known)).map(|(_, define)| define)
}

/// Blocks of `denoise_per_op_embed` a row.
pub const fn embed_blocks(model: &Model) -> usize {
    (model.width / 2).div_ceil(256)
}

impl Launch {
    /// The row of that symbol.
    pub fn of(symbol: &str) -> &'static Self {
        LAUNCHES.iter().find(|launch| launch.symbol == symbol).expect("the kernel is listed in LAUNCHES")
    }

    /// The build that holds it for a model; only the fused files depend on it.
    pub fn build(&self, model: &Model) -> Build {
        let define = compiled_for(model).filter(|_| self.file != "denoise/per_op");
        source(self.file).build(define.as_slice())
    }
}

/// Blocks as a launch takes them, if a grid holds so many.
pub fn grid(blocks: [usize; 3]) -> Option<(u32, u32, u32)> {
    const MOST: [usize; 3] = [i32::MAX as usize, 65_535, 65_535];
    let fits = blocks.iter().zip(MOST).all(|(&blocks, most)| (1..=most).contains(&blocks));
    fits.then(|| (blocks[0] as u32, blocks[1] as u32, blocks[2] as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{builds, launch_of};

    #[test]
    fn every_kernel_is_of_a_build_and_has_a_block_size() {
        let builds = builds();
        for launch in LAUNCHES {
            let persistent = launch.file == "denoise/persistent";
            let threads = if launch.symbol == "denoise_persistent" { 384 } else { 256 };
            for model in if persistent { vec![PI05] } else { vec![PI05, TINY] } {
                let build = launch.build(&model);
                assert!(builds.contains(&build), "{}", build.name());
                assert_eq!(launch_of(&build, launch.symbol).map(|(block, _)| block), Some(threads), "{}", launch.symbol);
                assert!(build.source.text.contains(&format!("{}(", launch.symbol)), "{}", launch.symbol);
            }
        }
    }

    #[test]
    fn products_fill_the_multiprocessors() {
        let blocks = |symbol: &str, rows| (Launch::of(symbol).blocks)(&PI05, rows);
        assert_eq!(blocks("denoise_fused_project_qkv", 50), [160, 1, 1]);
        assert_eq!(blocks("denoise_fused_project_out", 50), [128, 1, 1]);
        assert_eq!(blocks("denoise_fused_project_gate_up", 50), [256, 1, 1]);
        assert_eq!(blocks("denoise_fused_project_down", 65), [128, 2, 1]);
        assert_eq!(blocks("denoise_fused_attention", 400), [104, 1, 1]);
        assert_eq!(blocks("denoise_per_op_embed", 10), [20, 1, 1]);
        assert_eq!((Launch::of("denoise_fused_project_qkv").blocks)(&TINY, 7), [4, 1, 1]);
    }

    #[test]
    fn shared_memory_is_what_the_tiles_take() {
        // Up to four panels of x, the weights, the parts that the cluster sends.
        let bytes = |depth: usize, split: usize| {
            let slice = (depth / 16).div_ceil(split) * 16;
            let groups = slice / slice.min(64);
            (groups.min(4) * 64 * 128 + slice * 64 * 2 + 64 * 64 * 4) as u32
        };
        let attention = |model: &Model| {
            let row = (2 * model.head_dim).max(128);
            ((32 + 128 + 128) * row + 32 * 256) as u32
        };
        for model in [PI05, TINY] {
            let declared = |symbol: &str| launch_of(&Launch::of(symbol).build(&model), symbol).unwrap().1;
            let queries = model.heads * model.head_dim;
            assert_eq!(declared("denoise_fused_project_qkv"), bytes(model.width, 4));
            assert_eq!(declared("denoise_fused_project_time"), bytes(model.width, 4));
            assert_eq!(declared("denoise_fused_project_style"), bytes(model.width, 4));
            assert_eq!(declared("denoise_fused_project_out"), bytes(queries, 8));
            assert_eq!(declared("denoise_fused_project_gate_up"), bytes(model.width, 2));
            assert_eq!(declared("denoise_fused_project_down"), bytes(model.mlp, 8));
            assert_eq!(declared("denoise_fused_attention"), attention(&model));
        }
    }

    #[test]
    fn a_grid_has_bounds() {
        assert_eq!(grid([3, 2, 1]), Some((3, 2, 1)));
        assert_eq!(grid([1, 70_000, 1]), None);
        assert_eq!(grid([0, 1, 1]), None);
    }
}
