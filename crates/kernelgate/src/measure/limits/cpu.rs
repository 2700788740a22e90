//! Measures the host's performance ceilings: memory traffic on one thread and on all threads, and
//! fp32 multiply-adds.

use std::hint::black_box;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use pulp::{Arch, Simd, WithSimd};

use super::best_pass::TimingWindowBudget;
use super::{
    DeclaredMemoryTraffic, DeclaredWorkAndCacheState, MeasuredDeviceLimits, MeasuredMemoryLimit,
};

const F32_BYTES: u64 = size_of::<f32>() as u64;
/// Number of memory passes that are measured at length: the fastest of a brief trial, for each
/// amount of memory traffic.
const FASTEST_PASSES_MEASURED_AT_LENGTH: usize = 3;

impl MeasuredDeviceLimits {
    /// Measures those ceilings of the host that bound these works, on the threads of the rayon
    /// pool, which rows use too. The measurement takes about a fifth of a second for each distinct
    /// memory traffic.
    pub fn measure_host_limits(works: &[DeclaredWorkAndCacheState]) -> MeasuredDeviceLimits {
        let mut limits = Self::default();
        limits.memory.extend(
            DeclaredMemoryTraffic::distinct_traffics_of_works(works)
                .into_iter()
                .map(measure_host_memory_limit),
        );
        if works.iter().any(|of| of.work.matmul_flops() > 0) {
            let unit = crate::workload::FlopUnit::Matmul.hardware_unit_name();
            limits
                .flops_per_s
                .insert(format!("{unit} f32"), super::cpu_matmul::measure_host_f32_flops_per_s());
        }
        limits
    }
}

/// One way in which the host moves the bytes of a launch, to measure its memory ceiling: the
/// threads and the instructions.
#[derive(Clone, Copy)]
struct HostMemoryPass {
    threads: ThreadsOfMemoryPass,
    moves: InstructionsOfMemoryPass,
}

/// Host threads that run a memory pass. A pass on one thread can be faster than one on all threads
/// if little memory is moved, because threads wait for each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ThreadsOfMemoryPass {
    OneThread,
    AllThreads,
}

/// Instructions with which a memory pass moves bytes.
#[derive(Clone, Copy)]
enum InstructionsOfMemoryPass {
    /// Reads all bytes to read, then writes all bytes to write, with the widest SIMD vectors.
    AllReadsThenAllWrites,
    /// Copies, with SIMD vectors, as many bytes as are both read and written, then reads or writes
    /// the rest.
    SimdCopy,
    /// Copies with the C library's `memcpy`, which may bypass the caches, then reads or writes the
    /// rest.
    WholeMemcpy,
    /// Copies with the C library in pieces that fit the L2 cache, for which `memcpy` uses other
    /// instructions, then reads or writes the rest.
    MemcpyInPieces,
}

impl HostMemoryPass {
    const ALL_HOST_MEMORY_PASSES: [Self; 8] = [
        Self {
            threads: ThreadsOfMemoryPass::OneThread,
            moves: InstructionsOfMemoryPass::AllReadsThenAllWrites,
        },
        Self { threads: ThreadsOfMemoryPass::OneThread, moves: InstructionsOfMemoryPass::SimdCopy },
        Self {
            threads: ThreadsOfMemoryPass::OneThread,
            moves: InstructionsOfMemoryPass::WholeMemcpy,
        },
        Self {
            threads: ThreadsOfMemoryPass::OneThread,
            moves: InstructionsOfMemoryPass::MemcpyInPieces,
        },
        Self {
            threads: ThreadsOfMemoryPass::AllThreads,
            moves: InstructionsOfMemoryPass::AllReadsThenAllWrites,
        },
        Self {
            threads: ThreadsOfMemoryPass::AllThreads,
            moves: InstructionsOfMemoryPass::SimdCopy,
        },
        Self {
            threads: ThreadsOfMemoryPass::AllThreads,
            moves: InstructionsOfMemoryPass::WholeMemcpy,
        },
        Self {
            threads: ThreadsOfMemoryPass::AllThreads,
            moves: InstructionsOfMemoryPass::MemcpyInPieces,
        },
    ];

    fn name_for_report(self) -> String {
        let threads = match self.threads {
            ThreadsOfMemoryPass::OneThread => "1 thread".to_owned(),
            ThreadsOfMemoryPass::AllThreads => format!("{} threads", rayon::current_num_threads()),
        };
        let moves = match self.moves {
            InstructionsOfMemoryPass::AllReadsThenAllWrites => "reads, then writes",
            InstructionsOfMemoryPass::SimdCopy => "copy by vectors",
            InstructionsOfMemoryPass::WholeMemcpy => "copy by the C library",
            InstructionsOfMemoryPass::MemcpyInPieces => "copy by the C library in pieces",
        };
        format!("{threads}, {moves}")
    }
}

fn measure_host_memory_limit(traffic: DeclaredMemoryTraffic) -> MeasuredMemoryLimit {
    let mut slices = [
        MemorySlicesOfThreads::allocate_for_traffic(traffic, 1),
        MemorySlicesOfThreads::allocate_for_traffic(traffic, rayon::current_num_threads()),
    ];
    let mut measured_s = |pass: HostMemoryPass, windows: TimingWindowBudget| match pass.threads {
        ThreadsOfMemoryPass::OneThread => slices[0].time_pass_on_one_thread_s(pass.moves, windows),
        ThreadsOfMemoryPass::AllThreads => {
            slices[1].time_pass_on_all_threads_s(pass.moves, windows)
        }
    };
    let mut tried: Vec<(f64, HostMemoryPass)> = HostMemoryPass::ALL_HOST_MEMORY_PASSES
        .into_iter()
        .map(|pass| (measured_s(pass, TimingWindowBudget::BRIEF_TRIAL_BUDGET), pass))
        .collect();
    tried.sort_by(|one, other| one.0.total_cmp(&other.0));
    for (seconds, pass) in tried.iter_mut().take(FASTEST_PASSES_MEASURED_AT_LENGTH) {
        *seconds = seconds.min(measured_s(*pass, TimingWindowBudget::CEILING_BUDGET));
    }
    tried.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (seconds, pass) = tried[0];
    MeasuredMemoryLimit {
        traffic,
        fastest_pass_ns: seconds * 1e9,
        fastest_pass: pass.name_for_report(),
    }
}

/// Memory of a pass, divided into one slice for each thread, so that a thread's slice stays in the
/// caches of its core.
struct MemorySlicesOfThreads(Vec<Mutex<SourceAndTargetOfThread>>);

struct SourceAndTargetOfThread {
    source: PageAlignedFloatBuffer,
    destination: PageAlignedFloatBuffer,
}

/// Number of f32 values in a piece of 256 KiB.
const FLOATS_PER_COPIED_PIECE: usize = 1 << 16;
/// Alignment of the buffers, bytes: programs usually allocate large buffers at page boundaries, and
/// a vector that crosses a cache line takes longer.
const BUFFER_ALIGNMENT_BYTES: usize = 4096;

/// A buffer of f32 values that begins at a page boundary.
struct PageAlignedFloatBuffer {
    allocated_floats: Vec<f32>,
    aligned_start_index: usize,
    aligned_len: usize,
}

impl PageAlignedFloatBuffer {
    fn with_floats(len: usize) -> Self {
        let all = vec![0.5; len + BUFFER_ALIGNMENT_BYTES / F32_BYTES as usize];
        let begin = all.as_ptr().align_offset(BUFFER_ALIGNMENT_BYTES).min(all.len() - len);
        Self { allocated_floats: all, aligned_start_index: begin, aligned_len: len }
    }

    fn as_floats(&self) -> &[f32] {
        &self.allocated_floats[self.aligned_start_index..][..self.aligned_len]
    }

    fn as_floats_mut(&mut self) -> &mut [f32] {
        &mut self.allocated_floats[self.aligned_start_index..][..self.aligned_len]
    }
}

impl MemorySlicesOfThreads {
    fn allocate_for_traffic(traffic: DeclaredMemoryTraffic, threads: usize) -> Self {
        let part = |bytes: u64, thread: usize| {
            let floats = bytes.div_ceil(F32_BYTES) as usize;
            let range: Range<usize> = floats * thread / threads..floats * (thread + 1) / threads;
            PageAlignedFloatBuffer::with_floats(range.len())
        };
        let slice = |thread| SourceAndTargetOfThread {
            source: part(traffic.read_bytes, thread),
            destination: part(traffic.write_bytes, thread),
        };
        Self((0..threads).map(|thread| Mutex::new(slice(thread))).collect())
    }

    /// Returns the seconds of the memory pass on one thread in its fastest timing window.
    fn time_pass_on_one_thread_s(
        &mut self,
        moves: InstructionsOfMemoryPass,
        windows: TimingWindowBudget,
    ) -> f64 {
        let slice = self.0[0].get_mut().unwrap_or_else(PoisonError::into_inner);
        windows.fastest_pass_on_this_thread_s(|| slice.run_memory_pass(moves))
    }

    /// Returns the seconds of the memory pass on all threads in its fastest timing window.
    fn time_pass_on_all_threads_s(
        &self,
        moves: InstructionsOfMemoryPass,
        windows: TimingWindowBudget,
    ) -> f64 {
        windows.fastest_pass_on_all_threads_s(|thread| {
            self.0[thread].lock().unwrap_or_else(PoisonError::into_inner).run_memory_pass(moves);
        })
    }
}

impl SourceAndTargetOfThread {
    fn run_memory_pass(&mut self, moves: InstructionsOfMemoryPass) {
        let (source, target) = (self.source.as_floats(), self.destination.as_floats_mut());
        let both = match moves {
            InstructionsOfMemoryPass::AllReadsThenAllWrites => 0,
            InstructionsOfMemoryPass::SimdCopy
            | InstructionsOfMemoryPass::WholeMemcpy
            | InstructionsOfMemoryPass::MemcpyInPieces => source.len().min(target.len()),
        };
        let (copied, read) = source.split_at(both);
        let (copy, written) = target.split_at_mut(both);
        let arch = Arch::new();
        match moves {
            InstructionsOfMemoryPass::AllReadsThenAllWrites => {}
            InstructionsOfMemoryPass::SimdCopy => {
                arch.dispatch(SimdCopyPass { source: copied, destination: copy })
            }
            InstructionsOfMemoryPass::WholeMemcpy => copy.copy_from_slice(copied),
            InstructionsOfMemoryPass::MemcpyInPieces => copy
                .chunks_mut(FLOATS_PER_COPIED_PIECE)
                .zip(copied.chunks(FLOATS_PER_COPIED_PIECE))
                .for_each(|(to, from)| to.copy_from_slice(from)),
        }
        black_box(arch.dispatch(SimdReadPass(read)));
        match moves {
            // All bytes get one value, so that the compiler calls `memset` of the C library.
            InstructionsOfMemoryPass::WholeMemcpy | InstructionsOfMemoryPass::MemcpyInPieces => {
                bytemuck::cast_slice_mut::<f32, u8>(written).fill(0x3f)
            }
            InstructionsOfMemoryPass::AllReadsThenAllWrites
            | InstructionsOfMemoryPass::SimdCopy => arch.dispatch(SimdWritePass(written)),
        }
        black_box(&target);
    }
}

/// Number of independent SIMD vectors that a loop handles at once, so that loads, not additions,
/// bound its time.
const SIMD_VECTORS_PER_LOOP_STEP: usize = 8;

/// Sum of floats.
struct SimdReadPass<'a>(&'a [f32]);

impl WithSimd for SimdReadPass<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        let (vectors, tail) = S::as_simd_f32s(self.0);
        let mut sums = [simd.splat_f32s(0.0); SIMD_VECTORS_PER_LOOP_STEP];
        let (groups, rest) = vectors.as_chunks::<SIMD_VECTORS_PER_LOOP_STEP>();
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
struct SimdWritePass<'a>(&'a mut [f32]);

impl WithSimd for SimdWritePass<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (vectors, tail) = S::as_mut_simd_f32s(self.0);
        let value = simd.splat_f32s(black_box(0.75));
        let (groups, rest) = vectors.as_chunks_mut::<SIMD_VECTORS_PER_LOOP_STEP>();
        groups.iter_mut().for_each(|group| *group = [value; SIMD_VECTORS_PER_LOOP_STEP]);
        rest.fill(value);
        tail.fill(0.75);
    }
}

/// Copies floats.
struct SimdCopyPass<'a> {
    source: &'a [f32],
    destination: &'a mut [f32],
}

impl WithSimd for SimdCopyPass<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Adding zero prevents the compiler from replacing the SIMD loop by a call of `memcpy`.
        let zero = simd.splat_f32s(black_box(0.0));
        let (from, from_tail) = S::as_simd_f32s(self.source);
        let (to, to_tail) = S::as_mut_simd_f32s(self.destination);
        let (from_groups, from_rest) = from.as_chunks::<SIMD_VECTORS_PER_LOOP_STEP>();
        let (to_groups, to_rest) = to.as_chunks_mut::<SIMD_VECTORS_PER_LOOP_STEP>();
        for (to, from) in to_groups.iter_mut().zip(from_groups) {
            *to = from.map(|vector| simd.add_f32s(vector, zero));
        }
        to_rest.copy_from_slice(from_rest);
        to_tail.copy_from_slice(from_tail);
    }
}
