//! What the attention kernels are compiled for, how many blocks each takes, and what they can hold.

use std::sync::Arc;

use crate::attention::components;
use crate::attention::definition::Attention;
use crate::kernels::{launch_of, source};
use kernelgate::backend::BackendError;
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::compiler::source::Build;
use kernelgate_cuda::{Argument, Buffer, Device, Kernel, LaunchShape};

/// Bytes of a stored query, key or value element: the kernels know 16-bit types only.
pub const ELEMENT_BYTES: u64 = 2;

/// Most bytes of fp32 scores for a rung that keeps them in memory: beyond, a launch takes seconds and shows nothing new.
const MOST_SCORE_BYTES: u64 = 2 << 30;

/// What builds, launch shapes and memory depend on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extents {
    /// b·h.
    pub heads: usize,
    /// Queries and keys of a head.
    pub s: usize,
    /// Elements of a head: 64 or 128.
    pub d: usize,
    /// Whether query i sees keys 0..=i only.
    pub causal: bool,
    /// Dtype of inputs and outputs.
    pub dtype: Dtype,
}

impl From<&Attention> for Extents {
    fn from(attention: &Attention) -> Self {
        let Attention { b, h, s, d, causal, dtype, .. } = *attention;
        Self { heads: b * h, s, d, causal, dtype }
    }
}

impl From<&components::Shape> for Extents {
    fn from(shape: &components::Shape) -> Self {
        let components::Shape { b, h, s, d, dtype } = *shape;
        // The softmax has no d; its kernel comes with those that have.
        Self { heads: b * h, s, d: d.max(64), causal: false, dtype }
    }
}

/// A kernel: its symbol, its file, and its blocks in x, y and z.
struct Launch {
    symbol: &'static str,
    file: &'static str,
    blocks: fn(&Extents) -> [usize; 3],
}

const fn launch(symbol: &'static str, file: &'static str, blocks: fn(&Extents) -> [usize; 3]) -> Launch {
    Launch { symbol, file, blocks }
}

/// Every kernel of the family.
const LAUNCHES: &[Launch] = &[
    launch("attention_forward_naive_scores", "attention/forward_naive", |e| [e.s.div_ceil(16), e.s.div_ceil(16), e.heads]),
    launch("attention_forward_naive_softmax", "attention/forward_naive", |e| [e.heads * e.s, 1, 1]),
    launch("attention_forward_naive_values", "attention/forward_naive", |e| [e.s.div_ceil(256 / e.d), e.heads, 1]),
    launch("attention_forward_tiled_scores", "attention/forward_tiled", |e| [e.s.div_ceil(64), e.s.div_ceil(64), e.heads]),
    launch("attention_forward_tiled_softmax", "attention/forward_tiled", |e| [e.heads * e.s, 1, 1]),
    launch("attention_forward_tiled_values", "attention/forward_tiled", |e| [e.s.div_ceil(64), e.d / 64, e.heads]),
    launch("attention_forward_flash", "attention/forward_flash", |e| [e.s.div_ceil(64) * e.heads, 1, 1]),
    launch("attention_forward_flash_mma", "attention/forward_flash_mma", |e| [e.s.div_ceil(128) * e.heads, 1, 1]),
    launch("attention_backward_naive_delta", "attention/backward_naive", |e| [(e.heads * e.s).div_ceil(8), 1, 1]),
    launch("attention_backward_naive_scores", "attention/backward_naive", |e| [e.s.div_ceil(16), e.s.div_ceil(16), e.heads]),
    launch("attention_backward_naive_dq", "attention/backward_naive", |e| [e.s.div_ceil(256 / e.d), e.heads, 1]),
    launch("attention_backward_naive_dkv", "attention/backward_naive", |e| [e.s.div_ceil(256 / e.d), e.heads, 1]),
    launch("attention_backward_flash_mma_prepare", "attention/backward_flash_mma", |e| {
        // d / 8 threads a row.
        [(e.padded_rows() * (e.d / 8)).div_ceil(256), 1, 1]
    }),
    launch("attention_backward_flash_mma", "attention/backward_flash_mma", |e| [e.s.div_ceil(128) * e.heads, 1, 1]),
    launch("attention_backward_flash_mma_finish", "attention/backward_flash_mma", |e| {
        // Sixteen warps a step, eight a block.
        [(e.padded_rows() / e.step() * 16).div_ceil(8), 1, 1]
    }),
];

impl Extents {
    /// Bytes of one tensor of queries, keys or values.
    pub const fn vector_bytes(&self) -> u64 {
        self.rows() * self.d as u64 * ELEMENT_BYTES
    }

    /// Queries of all heads.
    pub const fn rows(&self) -> u64 {
        (self.heads * self.s) as u64
    }

    /// Query-key pairs of all heads, masked ones too.
    pub const fn pairs(&self) -> u64 {
        self.rows() * self.s as u64
    }

    /// Queries that a step of `backward_flash_mma` takes.
    pub const fn step(&self) -> usize {
        if self.d == 64 { 128 } else { 64 }
    }

    /// Queries of all heads, each head padded to whole steps of `backward_flash_mma`.
    pub const fn padded_rows(&self) -> usize {
        self.heads * self.s.div_ceil(self.step()) * self.step()
    }

    /// Whether these kernels compute it.
    ///
    /// # Errors
    /// The reason why not, a fragment.
    pub fn supported(&self, symbols: &[&str]) -> Result<(), String> {
        if !matches!(self.dtype, Dtype::Bf16 | Dtype::F16) {
            return Err("computes bf16 and f16 only".to_owned());
        }
        let counted = i32::try_from(self.s).is_ok() && i32::try_from(self.heads).is_ok();
        let fits = |symbol: &&str| grid(&(row(symbol).blocks)(self)).is_some();
        if counted && symbols.iter().all(fits) { Ok(()) } else { Err("needs more blocks than a grid holds".to_owned()) }
    }

    /// [`Self::supported`] for kernels with the scores in device memory.
    ///
    /// # Errors
    /// As there; also when the scores are too many.
    pub fn supported_with_scores(&self, symbols: &[&str]) -> Result<(), String> {
        self.supported(symbols)?;
        let bytes = 4 * self.pairs();
        if bytes <= MOST_SCORE_BYTES {
            return Ok(());
        }
        let gigabytes = |bytes: u64| bytes as f64 / 1e9;
        Err(format!("keeps {:.1} GB of scores in memory, {:.1} GB at most", gigabytes(bytes), gigabytes(MOST_SCORE_BYTES)))
    }

    /// Compiles, loads and shapes a kernel.
    ///
    /// # Errors
    /// When it does not compile or load.
    pub fn step_of(&self, device: &Device, symbol: &str) -> Result<Step, BackendError> {
        let row = row(symbol);
        let build = self.build(row.file);
        let (block, shared_bytes) = launch_of(&build, symbol).expect("every attention kernel is listed among the sources");
        let grid = grid(&(row.blocks)(self)).ok_or_else(|| BackendError::Launch("more blocks than a grid holds".to_owned()))?;
        let kernel = device.kernel(&build, symbol)?;
        if shared_bytes > 0 {
            kernel.allow_shared(shared_bytes)?;
        }
        Ok(Step { kernel, shape: LaunchShape { grid, block, shared_bytes } })
    }

    /// The macros of `kernels/attention/shape.cuh`.
    fn build(&self, file: &'static str) -> Build {
        let dtype = if self.dtype == Dtype::F16 { "DTYPE=F16" } else { "DTYPE=Bf16" };
        let (d, causal) = (format!("HEAD_DIM={}", self.d), format!("CAUSAL={}", u8::from(self.causal)));
        source(file).build(&[dtype, &d, &causal])
    }

    /// `seqlen`, as every kernel takes it.
    pub const fn seqlen(&self) -> Argument {
        Argument::I32(self.s as i32)
    }

    /// `batch_heads`, as some kernels take it.
    pub const fn batch_heads(&self) -> Argument {
        Argument::I32(self.heads as i32)
    }
}

/// A loaded kernel with its launch shape.
pub struct Step {
    kernel: Kernel,
    shape: LaunchShape,
}

impl Step {
    /// Launches it.
    ///
    /// # Errors
    /// When the launch is refused.
    pub fn launch(&self, arguments: &[Argument]) -> Result<(), BackendError> {
        self.kernel.launch(self.shape, arguments)
    }
}

/// Copies inputs to the device, in the order of the names.
///
/// # Errors
/// When device memory is short or a copy fails.
pub fn upload<const N: usize>(device: &Arc<Device>, inputs: &Tensors, names: [&str; N]) -> Result<[Buffer; N], BackendError> {
    let buffers = names.iter().map(|name| device.upload(inputs.tensor(name).as_bytes())).collect::<Result<Vec<_>, _>>()?;
    Ok(buffers.try_into().ok().expect("a buffer a name"))
}

/// Scratch memory of that many bytes.
///
/// # Errors
/// When device memory is short.
pub fn scratch(device: &Device, bytes: u64) -> Result<Buffer, BackendError> {
    device.allocate(usize::try_from(bytes).expect("more memory than a process addresses"))
}

fn row(symbol: &str) -> &'static Launch {
    LAUNCHES.iter().find(|launch| launch.symbol == symbol).expect("the kernel is listed in LAUNCHES")
}

/// Blocks as a launch takes them, if a grid holds so many.
fn grid(blocks: &[usize; 3]) -> Option<(u32, u32, u32)> {
    const MOST: [usize; 3] = [i32::MAX as usize, 65_535, 65_535];
    let fits = blocks.iter().zip(MOST).all(|(&blocks, most)| (1..=most).contains(&blocks));
    fits.then(|| (blocks[0] as u32, blocks[1] as u32, blocks[2] as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::builds;

    const SMALL: Extents = Extents { heads: 6, s: 200, d: 64, causal: true, dtype: Dtype::Bf16 };

    #[test]
    fn every_kernel_is_of_a_build_and_has_a_block_size() {
        let builds = builds();
        for launch in LAUNCHES {
            for d in [64, 128] {
                for (causal, dtype) in [(false, Dtype::F16), (true, Dtype::Bf16)] {
                    let build = Extents { d, causal, dtype, ..SMALL }.build(launch.file);
                    assert!(builds.contains(&build), "{}", build.name());
                    assert!(launch_of(&build, launch.symbol).is_some(), "{}", launch.symbol);
                    assert!(build.source.text.contains(&format!("{}(", launch.symbol)), "{}", launch.symbol);
                }
            }
        }
    }

    #[test]
    fn blocks_cover_rows_tiles_and_padding() {
        let blocks = |symbol: &str, extents: &Extents| (row(symbol).blocks)(extents);
        let wide = Extents { d: 128, ..SMALL };
        assert_eq!(blocks("attention_forward_naive_scores", &SMALL), [13, 13, 6]);
        assert_eq!(blocks("attention_forward_naive_softmax", &SMALL), [1200, 1, 1]);
        assert_eq!(blocks("attention_forward_naive_values", &SMALL), [50, 6, 1]);
        assert_eq!(blocks("attention_forward_naive_values", &wide), [100, 6, 1]);
        assert_eq!(blocks("attention_forward_tiled_values", &wide), [4, 2, 6]);
        assert_eq!(blocks("attention_forward_flash", &SMALL), [24, 1, 1]);
        assert_eq!(blocks("attention_forward_flash_mma", &SMALL), [12, 1, 1]);
        // 200 rows are two steps of 128, or four of 64.
        assert_eq!((SMALL.padded_rows(), wide.padded_rows()), (6 * 256, 6 * 256));
        assert_eq!(blocks("attention_backward_flash_mma_prepare", &SMALL), [6 * 256 * 8 / 256, 1, 1]);
        assert_eq!(blocks("attention_backward_flash_mma_finish", &SMALL), [6 * 2 * 2, 1, 1]);
        assert_eq!(blocks("attention_backward_flash_mma_finish", &wide), [6 * 4 * 2, 1, 1]);
    }

    #[test]
    fn what_the_kernels_cannot_do_has_a_reason() {
        let flash = &["attention_forward_flash_mma"][..];
        assert_eq!(SMALL.supported(flash), Ok(()));
        let f32 = Extents { dtype: Dtype::F32, ..SMALL };
        assert_eq!(f32.supported(flash), Err("computes bf16 and f16 only".to_owned()));
        let many = Extents { heads: 70_000, ..SMALL };
        assert_eq!(many.supported(flash), Ok(()));
        assert_eq!(many.supported(&["attention_forward_naive_values"]), Err("needs more blocks than a grid holds".to_owned()));
        let long = Extents { heads: 16, s: 16_384, d: 128, ..SMALL };
        let reason = long.supported_with_scores(&["attention_forward_naive_values"]).unwrap_err();
        assert_eq!(reason, "keeps 17.2 GB of scores in memory, 2.1 GB at most");
        assert_eq!(Extents { heads: 512, s: 1024, ..SMALL }.supported_with_scores(flash), Ok(()));
    }
}
