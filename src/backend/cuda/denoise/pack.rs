//! Weights as the fused products take them (`kernels/denoise/skinny_gemm.cuh`): packed once, on the host, while a case is prepared.
//!
//! `[layer][tile of 64 columns][k / group][group rows of k][64]`, 16-byte chunks of eight columns XOR-swizzled by row. A group is up to 64
//! rows, of one block's slice of k.

use rayon::prelude::*;

use super::buffers::Region;
use crate::workload::denoise::model::Model;
use crate::workload::{Dtype, Tensors};

/// Columns of a tile, and of a chunk.
const TILE: usize = 64;
const CHUNK: usize = 8;
const CHUNK_BYTES: usize = 16;

/// The order of the columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// As they are.
    Plain,
    /// Heads of so many columns of q, k and v; eight columns beside the eight half a head further, with which they rotate.
    Rotating(usize),
    /// Eight of one matrix beside eight of the other.
    Alternating,
}

/// A packed region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packing {
    /// Its name.
    pub name: &'static str,
    /// The inputs in it, `[layers][k][columns]` each.
    pub inputs: &'static [&'static str],
    /// Their columns.
    columns: Vec<usize>,
    /// k, and among how many blocks it is split.
    depth: usize,
    split: usize,
    layers: usize,
    order: Order,
}

/// All of a model; the splits are those of `kernels/denoise/fused_project.cu`.
pub fn packings(model: &Model) -> Vec<Packing> {
    let Model { width, depth: layers, mlp, heads, head_dim, .. } = *model;
    let queries = heads * head_dim;
    let plain = |name, inputs, depth, columns, split, layers| Packing {
        name,
        inputs,
        columns: vec![columns],
        depth,
        split,
        layers,
        order: Order::Plain,
    };
    vec![
        Packing {
            name: "qkv_proj",
            inputs: &["q_proj", "k_proj", "v_proj"],
            columns: vec![queries, head_dim, head_dim],
            depth: width,
            split: 4,
            layers,
            order: Order::Rotating(head_dim),
        },
        Packing {
            name: "gate_up_proj",
            inputs: &["gate_proj", "up_proj"],
            columns: vec![mlp, mlp],
            depth: width,
            split: 2,
            layers,
            order: Order::Alternating,
        },
        plain("o_proj", &["o_proj"], queries, width, 8, layers),
        plain("down_proj", &["down_proj"], mlp, width, 8, layers),
        plain("time_in", &["time_in"], width, width, 4, 1),
        plain("time_out", &["time_out"], width, width, 4, 1),
        plain("style1", &["style1"], width, 3 * width, 4, layers),
        plain("style2", &["style2"], width, 3 * width, 4, layers),
        plain("final_style", &["final_style"], width, 3 * width, 4, 1),
    ]
}

impl Packing {
    /// Its name and bytes.
    pub fn region(&self) -> Region {
        (self.name, self.layers * self.layer_bytes())
    }

    fn layer_bytes(&self) -> usize {
        self.depth * self.columns.iter().sum::<usize>() * Dtype::Bf16.bytes()
    }

    /// Rows of k that lie together.
    fn group(&self) -> usize {
        ((self.depth / 16).div_ceil(self.split) * 16).min(64)
    }

    /// Input and first column of a chunk.
    fn source(&self, chunk: usize) -> (usize, usize) {
        match self.order {
            Order::Plain => (0, chunk * CHUNK),
            Order::Alternating => (chunk % 2, chunk / 2 * CHUNK),
            Order::Rotating(head) => {
                let (of_head, in_head) = (chunk / (head / CHUNK), chunk % (head / CHUNK));
                let first = of_head * head + in_head % 2 * (head / 2) + in_head / 2 * CHUNK;
                match first.checked_sub(self.columns[0]) {
                    None => (0, first),
                    Some(first) if first < head => (1, first),
                    Some(first) => (2, first - head),
                }
            }
        }
    }

    /// The packed bytes.
    pub fn pack(&self, tensors: &Tensors) -> Vec<u8> {
        let inputs: Vec<&[u8]> = self.inputs.iter().map(|name| tensors.tensor(name).as_bytes()).collect();
        let row_bytes = TILE * Dtype::Bf16.bytes();
        let group = self.group();
        let mut packed = vec![0; self.layers * self.layer_bytes()];
        let tiles = self.layer_bytes() / (self.depth * row_bytes);
        // A tile is all of k for its columns.
        packed.par_chunks_exact_mut(self.depth * row_bytes).enumerate().for_each(|(index, to)| {
            let (layer, tile) = (index / tiles, index % tiles);
            for (k, to) in to.chunks_exact_mut(row_bytes).enumerate() {
                for chunk in 0..TILE / CHUNK {
                    let (input, column) = self.source(tile * (TILE / CHUNK) + chunk);
                    let from = ((layer * self.depth + k) * self.columns[input] + column) * Dtype::Bf16.bytes();
                    let at = (chunk ^ (k % group % 8)) * CHUNK_BYTES;
                    to[at..at + CHUNK_BYTES].copy_from_slice(&inputs[input][from..from + CHUNK_BYTES]);
                }
            }
        });
        packed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::denoise::model::{PI05, TINY};

    #[test]
    fn every_column_is_packed_once() {
        for model in [PI05, TINY] {
            for packing in packings(&model) {
                let columns: usize = packing.columns.iter().sum();
                let mut chunks: Vec<_> = (0..columns / CHUNK).map(|chunk| packing.source(chunk)).collect();
                chunks.sort_unstable();
                let all: Vec<_> = packing
                    .columns
                    .iter()
                    .enumerate()
                    .flat_map(|(input, &columns)| (0..columns).step_by(CHUNK).map(move |column| (input, column)))
                    .collect();
                assert_eq!(chunks, all, "{} of {}", packing.name, model.name);
                assert_eq!(columns % TILE, 0, "{}", packing.name);
            }
        }
    }

    #[test]
    fn columns_that_belong_together_are_neighbours() {
        let packings = packings(&PI05);
        let source = |name: &str, chunk| packings.iter().find(|packing| packing.name == name).unwrap().source(chunk);
        // The second head of q, then k and v behind the eight heads of q.
        assert_eq!([32, 33, 34].map(|chunk| source("qkv_proj", chunk)), [(0, 256), (0, 256 + 128), (0, 256 + 8)]);
        assert_eq!([256, 257, 288, 319].map(|chunk| source("qkv_proj", chunk)), [(1, 0), (1, 128), (2, 0), (2, 248)]);
        assert_eq!([0, 1, 2].map(|chunk| source("gate_up_proj", chunk)), [(0, 0), (1, 0), (0, 8)]);
    }
}
