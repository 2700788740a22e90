//! The host's ceilings: memory traffic with one thread and with all of them, and multiply-adds.

use std::hint::black_box;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use pulp::{Arch, Simd, WithSimd};

use super::best_pass::PassWindows;
use super::{CaseWork, DeviceLimits, MemoryLimit, MemoryTraffic};

const FLOAT_BYTES: u64 = size_of::<f32>() as u64;
/// Passes of each traffic that are measured at length, the fastest in a brief trial first.
const LONG_TRIAL_PASSES: usize = 3;

impl DeviceLimits {
    /// Measures the ceilings of the host that limit any of these works, on the threads that rows
    /// use. Takes about a fifth of a second for each distinct traffic.
    pub fn measure_cpu(works: &[CaseWork]) -> DeviceLimits {
        let mut limits = Self::default();
        limits
            .memory
            .extend(MemoryTraffic::distinct_of_works(works).into_iter().map(measure_memory_limit));
        if works.iter().any(|of| of.work.matmul_flops() > 0) {
            let unit = crate::workload::FlopUnit::Matmul.name();
            limits.flops_per_s.insert(format!("{unit} f32"), super::cpu_matmul::flops_per_s());
        }
        limits
    }
}

/// One way to move the bytes of a launch on the host.
#[derive(Clone, Copy)]
struct CpuPass {
    threads: PassThreads,
    moves: PassMoves,
}

/// Threads of a pass. Waiting for the other threads may take longer than a small pass on one
/// thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PassThreads {
    One,
    All,
}

/// Instructions of a pass.
#[derive(Clone, Copy)]
enum PassMoves {
    /// Reads everything, then writes everything, with vectors of the widest kind.
    Apart,
    /// Copies the bytes that are both read and written with vectors, and reads or writes all other
    /// bytes.
    Copy,
    /// Copies, reads and writes with the C library's functions, which bypass the caches when that
    /// is faster.
    LibraryCopy,
    /// Copies, reads and writes with the C library's functions in pieces that fit L2, for which it
    /// uses other instructions.
    LibraryPieces,
}

impl CpuPass {
    const ALL: [Self; 8] = [
        Self { threads: PassThreads::One, moves: PassMoves::Apart },
        Self { threads: PassThreads::One, moves: PassMoves::Copy },
        Self { threads: PassThreads::One, moves: PassMoves::LibraryCopy },
        Self { threads: PassThreads::One, moves: PassMoves::LibraryPieces },
        Self { threads: PassThreads::All, moves: PassMoves::Apart },
        Self { threads: PassThreads::All, moves: PassMoves::Copy },
        Self { threads: PassThreads::All, moves: PassMoves::LibraryCopy },
        Self { threads: PassThreads::All, moves: PassMoves::LibraryPieces },
    ];

    fn name(self) -> String {
        let threads = match self.threads {
            PassThreads::One => "1 thread".to_owned(),
            PassThreads::All => format!("{} threads", rayon::current_num_threads()),
        };
        let moves = match self.moves {
            PassMoves::Apart => "reads, then writes",
            PassMoves::Copy => "copy by vectors",
            PassMoves::LibraryCopy => "copy by the C library",
            PassMoves::LibraryPieces => "copy by the C library in pieces",
        };
        format!("{threads}, {moves}")
    }
}

fn measure_memory_limit(traffic: MemoryTraffic) -> MemoryLimit {
    let mut slices =
        [ThreadSlices::new(traffic, 1), ThreadSlices::new(traffic, rayon::current_num_threads())];
    let mut measured_s = |pass: CpuPass, windows: PassWindows| match pass.threads {
        PassThreads::One => slices[0].on_one_s(pass.moves, windows),
        PassThreads::All => slices[1].on_all_s(pass.moves, windows),
    };
    let mut tried: Vec<(f64, CpuPass)> = CpuPass::ALL
        .into_iter()
        .map(|pass| (measured_s(pass, PassWindows::FEW_WINDOWS), pass))
        .collect();
    tried.sort_by(|one, other| one.0.total_cmp(&other.0));
    for (seconds, pass) in tried.iter_mut().take(LONG_TRIAL_PASSES) {
        *seconds = seconds.min(measured_s(*pass, PassWindows::CEILING_WINDOWS));
    }
    tried.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (seconds, pass) = tried[0];
    MemoryLimit { traffic, time_ns: seconds * 1e9, pass: pass.name() }
}

/// Memory of a pass, a slice for each thread: each thread's slice stays in the caches of its core.
struct ThreadSlices(Vec<Mutex<ThreadSlice>>);

struct ThreadSlice {
    source: PageAlignedFloats,
    target: PageAlignedFloats,
}

/// Floats in a piece of 256 KiB.
const PIECE_FLOATS: usize = 1 << 16;
/// Bytes of a page: buffers of other programs begin at one or at a part of one, and a vector that
/// crosses a cache line takes longer.
const PAGE_BYTES: usize = 4096;

/// Floats whose memory begins at the start of a page.
struct PageAlignedFloats {
    all: Vec<f32>,
    begin: usize,
    len: usize,
}

impl PageAlignedFloats {
    fn new(len: usize) -> Self {
        let all = vec![0.5; len + PAGE_BYTES / FLOAT_BYTES as usize];
        let begin = all.as_ptr().align_offset(PAGE_BYTES).min(all.len() - len);
        Self { all, begin, len }
    }

    fn read(&self) -> &[f32] {
        &self.all[self.begin..][..self.len]
    }

    fn write(&mut self) -> &mut [f32] {
        &mut self.all[self.begin..][..self.len]
    }
}

impl ThreadSlices {
    fn new(traffic: MemoryTraffic, threads: usize) -> Self {
        let part = |bytes: u64, thread: usize| {
            let floats = bytes.div_ceil(FLOAT_BYTES) as usize;
            let range: Range<usize> = floats * thread / threads..floats * (thread + 1) / threads;
            PageAlignedFloats::new(range.len())
        };
        let slice = |thread| ThreadSlice {
            source: part(traffic.read_bytes, thread),
            target: part(traffic.write_bytes, thread),
        };
        Self((0..threads).map(|thread| Mutex::new(slice(thread))).collect())
    }

    /// Seconds of the fastest memory pass on one thread.
    fn on_one_s(&mut self, moves: PassMoves, windows: PassWindows) -> f64 {
        let slice = self.0[0].get_mut().unwrap_or_else(PoisonError::into_inner);
        windows.fastest_s(|| slice.run(moves))
    }

    /// Seconds of the fastest memory pass on all threads.
    fn on_all_s(&self, moves: PassMoves, windows: PassWindows) -> f64 {
        windows.fastest_on_all_s(|thread| {
            self.0[thread].lock().unwrap_or_else(PoisonError::into_inner).run(moves);
        })
    }
}

impl ThreadSlice {
    fn run(&mut self, moves: PassMoves) {
        let (source, target) = (self.source.read(), self.target.write());
        let both = match moves {
            PassMoves::Apart => 0,
            PassMoves::Copy | PassMoves::LibraryCopy | PassMoves::LibraryPieces => {
                source.len().min(target.len())
            }
        };
        let (copied, read) = source.split_at(both);
        let (copy, written) = target.split_at_mut(both);
        let arch = Arch::new();
        match moves {
            PassMoves::Apart => {}
            PassMoves::Copy => arch.dispatch(CopyPass { source: copied, target: copy }),
            PassMoves::LibraryCopy => copy.copy_from_slice(copied),
            PassMoves::LibraryPieces => copy
                .chunks_mut(PIECE_FLOATS)
                .zip(copied.chunks(PIECE_FLOATS))
                .for_each(|(to, from)| to.copy_from_slice(from)),
        }
        black_box(arch.dispatch(ReadPass(read)));
        match moves {
            // Every byte is written with one value by a call of `memset`.
            PassMoves::LibraryCopy | PassMoves::LibraryPieces => {
                bytemuck::cast_slice_mut::<f32, u8>(written).fill(0x3f)
            }
            PassMoves::Apart | PassMoves::Copy => arch.dispatch(WritePass(written)),
        }
        black_box(&target);
    }
}

/// Number of independent vectors in flight: so many that loads bound the time, not additions.
const UNROLLED_VECTORS: usize = 8;

/// Sum of floats.
struct ReadPass<'a>(&'a [f32]);

impl WithSimd for ReadPass<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let (vectors, tail) = S::as_simd_f32s(self.0);
        let mut sums = [simd.splat_f32s(0.0); UNROLLED_VECTORS];
        let (groups, rest) = vectors.as_chunks::<UNROLLED_VECTORS>();
        for group in groups {
            for (sum, &vector) in sums.iter_mut().zip(group) {
                *sum = simd.add_f32s(*sum, vector);
            }
        }
        for &vector in rest {
            sums[0] = simd.add_f32s(sums[0], vector);
        }
        let all = sums.into_iter().reduce(|one, other| simd.add_f32s(one, other));
        all.map_or(0.0, |all| simd.reduce_sum_f32s(all)) + tail.iter().sum::<f32>()
    }
}

/// Fills floats.
struct WritePass<'a>(&'a mut [f32]);

impl WithSimd for WritePass<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (vectors, tail) = S::as_mut_simd_f32s(self.0);
        let value = simd.splat_f32s(black_box(0.75));
        let (groups, rest) = vectors.as_chunks_mut::<UNROLLED_VECTORS>();
        groups.iter_mut().for_each(|group| *group = [value; UNROLLED_VECTORS]);
        rest.fill(value);
        tail.fill(0.75);
    }
}

/// Copies floats.
struct CopyPass<'a> {
    source: &'a [f32],
    target: &'a mut [f32],
}

impl WithSimd for CopyPass<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Adding zero keeps the compiler from replacing the loop by a call of the C library.
        let zero = simd.splat_f32s(black_box(0.0));
        let (from, from_tail) = S::as_simd_f32s(self.source);
        let (to, to_tail) = S::as_mut_simd_f32s(self.target);
        let (from_groups, from_rest) = from.as_chunks::<UNROLLED_VECTORS>();
        let (to_groups, to_rest) = to.as_chunks_mut::<UNROLLED_VECTORS>();
        for (to, from) in to_groups.iter_mut().zip(from_groups) {
            *to = from.map(|vector| simd.add_f32s(vector, zero));
        }
        to_rest.copy_from_slice(from_rest);
        to_tail.copy_from_slice(from_tail);
    }
}
