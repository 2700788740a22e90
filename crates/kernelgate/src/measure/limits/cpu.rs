//! The host's ceilings: memory traffic with one thread and with all of them, and multiply-adds.

use std::hint::black_box;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use pulp::{Arch, Simd, WithSimd};

use super::fastest::Windows;
use super::{CaseWork, Limits, MemoryLimit, Traffic};

/// Bytes of a float.
const FLOAT: u64 = size_of::<f32>() as u64;
/// Passes of each traffic that are measured at length, the fastest in a brief trial first.
const CONTESTANTS: usize = 3;

impl Limits {
    /// Measures those ceilings of the host that bound any of the works, on the threads that rows
    /// use. Takes about a fifth of a second for each distinct traffic.
    pub fn measure_cpu(works: &[CaseWork]) -> Self {
        let mut limits = Self::default();
        limits.memory.extend(Traffic::distinct(works).into_iter().map(memory_limit));
        if works.iter().any(|of| of.work.matmul_flops() > 0) {
            let unit = crate::workload::Unit::Matmul.name();
            limits.flops_per_s.insert(format!("{unit} f32"), super::cpu_matmul::flops_per_s());
        }
        limits
    }
}

/// One way to move the bytes of a launch on the host.
#[derive(Clone, Copy)]
struct Pass {
    threads: Threads,
    moves: Moves,
}

/// Threads of a pass. Waiting for the others may take longer than a small pass on one thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Threads {
    One,
    All,
}

/// Instructions of a pass.
#[derive(Clone, Copy)]
enum Moves {
    /// Reads everything, then writes everything, with vectors of the widest kind.
    Apart,
    /// Copies the bytes that are both read and written with such vectors, and reads or writes the
    /// rest.
    Copy,
    /// Copies, reads and writes with the C library's functions, which bypass the caches when that
    /// is faster.
    LibraryCopy,
    /// Copies, reads and writes with the C library's functions in pieces that fit L2, for which it
    /// uses other instructions.
    LibraryPieces,
}

impl Pass {
    const ALL: [Self; 8] = [
        Self { threads: Threads::One, moves: Moves::Apart },
        Self { threads: Threads::One, moves: Moves::Copy },
        Self { threads: Threads::One, moves: Moves::LibraryCopy },
        Self { threads: Threads::One, moves: Moves::LibraryPieces },
        Self { threads: Threads::All, moves: Moves::Apart },
        Self { threads: Threads::All, moves: Moves::Copy },
        Self { threads: Threads::All, moves: Moves::LibraryCopy },
        Self { threads: Threads::All, moves: Moves::LibraryPieces },
    ];

    fn name(self) -> String {
        let threads = match self.threads {
            Threads::One => "1 thread".to_owned(),
            Threads::All => format!("{} threads", rayon::current_num_threads()),
        };
        let moves = match self.moves {
            Moves::Apart => "reads, then writes",
            Moves::Copy => "copy by vectors",
            Moves::LibraryCopy => "copy by the C library",
            Moves::LibraryPieces => "copy by the C library in pieces",
        };
        format!("{threads}, {moves}")
    }
}

fn memory_limit(traffic: Traffic) -> MemoryLimit {
    let mut slices = [Slices::new(traffic, 1), Slices::new(traffic, rayon::current_num_threads())];
    let mut measured_s = |pass: Pass, windows: Windows| match pass.threads {
        Threads::One => slices[0].on_one_s(pass.moves, windows),
        Threads::All => slices[1].on_all_s(pass.moves, windows),
    };
    let mut tried: Vec<(f64, Pass)> =
        Pass::ALL.into_iter().map(|pass| (measured_s(pass, Windows::FEW), pass)).collect();
    tried.sort_by(|one, other| one.0.total_cmp(&other.0));
    for (seconds, pass) in tried.iter_mut().take(CONTESTANTS) {
        *seconds = seconds.min(measured_s(*pass, Windows::MANY));
    }
    tried.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (seconds, pass) = tried[0];
    MemoryLimit { traffic, time_ns: seconds * 1e9, pass: pass.name() }
}

/// Memory of a pass, a slice for each thread: each thread's slice stays in the caches of its core.
struct Slices(Vec<Mutex<Slice>>);

struct Slice {
    source: Floats,
    target: Floats,
}

/// Floats of a piece: 256 KiB.
const PIECE: usize = 1 << 16;
/// Bytes of a page: buffers of other programs begin at one or at a part of one, and a vector that
/// crosses a cache line takes longer.
const PAGE: usize = 4096;

/// Floats that begin at a page.
struct Floats {
    all: Vec<f32>,
    begin: usize,
    len: usize,
}

impl Floats {
    fn new(len: usize) -> Self {
        let all = vec![0.5; len + PAGE / FLOAT as usize];
        let begin = all.as_ptr().align_offset(PAGE).min(all.len() - len);
        Self { all, begin, len }
    }

    fn read(&self) -> &[f32] {
        &self.all[self.begin..][..self.len]
    }

    fn write(&mut self) -> &mut [f32] {
        &mut self.all[self.begin..][..self.len]
    }
}

impl Slices {
    fn new(traffic: Traffic, threads: usize) -> Self {
        let part = |bytes: u64, thread: usize| {
            let floats = bytes.div_ceil(FLOAT) as usize;
            let range: Range<usize> = floats * thread / threads..floats * (thread + 1) / threads;
            Floats::new(range.len())
        };
        let slice = |thread| Slice {
            source: part(traffic.read_bytes, thread),
            target: part(traffic.write_bytes, thread),
        };
        Self((0..threads).map(|thread| Mutex::new(slice(thread))).collect())
    }

    /// Seconds of the fastest pass on one thread.
    fn on_one_s(&mut self, moves: Moves, windows: Windows) -> f64 {
        let slice = self.0[0].get_mut().unwrap_or_else(PoisonError::into_inner);
        windows.fastest_s(|| slice.run(moves))
    }

    /// Seconds of the fastest pass on all threads.
    fn on_all_s(&self, moves: Moves, windows: Windows) -> f64 {
        windows.fastest_on_all_s(|thread| {
            self.0[thread].lock().unwrap_or_else(PoisonError::into_inner).run(moves);
        })
    }
}

impl Slice {
    fn run(&mut self, moves: Moves) {
        let (source, target) = (self.source.read(), self.target.write());
        let both = match moves {
            Moves::Apart => 0,
            Moves::Copy | Moves::LibraryCopy | Moves::LibraryPieces => {
                source.len().min(target.len())
            }
        };
        let (copied, read) = source.split_at(both);
        let (copy, written) = target.split_at_mut(both);
        let arch = Arch::new();
        match moves {
            Moves::Apart => {}
            Moves::Copy => arch.dispatch(Copy { source: copied, target: copy }),
            Moves::LibraryCopy => copy.copy_from_slice(copied),
            Moves::LibraryPieces => copy
                .chunks_mut(PIECE)
                .zip(copied.chunks(PIECE))
                .for_each(|(to, from)| to.copy_from_slice(from)),
        }
        black_box(arch.dispatch(Read(read)));
        match moves {
            // Every byte is written with one value by a call of `memset`.
            Moves::LibraryCopy | Moves::LibraryPieces => {
                bytemuck::cast_slice_mut::<f32, u8>(written).fill(0x3f)
            }
            Moves::Apart | Moves::Copy => arch.dispatch(Write(written)),
        }
        black_box(&target);
    }
}

/// Independent vectors in flight: enough that loads bound, not additions.
const UNROLL: usize = 8;

/// Sum of floats.
struct Read<'a>(&'a [f32]);

impl WithSimd for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let (vectors, tail) = S::as_simd_f32s(self.0);
        let mut sums = [simd.splat_f32s(0.0); UNROLL];
        let (groups, rest) = vectors.as_chunks::<UNROLL>();
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
struct Write<'a>(&'a mut [f32]);

impl WithSimd for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (vectors, tail) = S::as_mut_simd_f32s(self.0);
        let value = simd.splat_f32s(black_box(0.75));
        let (groups, rest) = vectors.as_chunks_mut::<UNROLL>();
        groups.iter_mut().for_each(|group| *group = [value; UNROLL]);
        rest.fill(value);
        tail.fill(0.75);
    }
}

/// Copies floats.
struct Copy<'a> {
    source: &'a [f32],
    target: &'a mut [f32],
}

impl WithSimd for Copy<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Without an addition the compiler calls the C library.
        let zero = simd.splat_f32s(black_box(0.0));
        let (from, from_tail) = S::as_simd_f32s(self.source);
        let (to, to_tail) = S::as_mut_simd_f32s(self.target);
        let (from_groups, from_rest) = from.as_chunks::<UNROLL>();
        let (to_groups, to_rest) = to.as_chunks_mut::<UNROLL>();
        for (to, from) in to_groups.iter_mut().zip(from_groups) {
            *to = from.map(|vector| simd.add_f32s(vector, zero));
        }
        to_rest.copy_from_slice(from_rest);
        to_tail.copy_from_slice(from_tail);
    }
}
