//! Kernels that read and write as many bytes of device memory as a case declares, to measure the
//! shortest possible time for that traffic. This module does not choose the fastest of the memory
//! passes.

use std::fmt;

use crate::driver::launch::shape::Launch;
use crate::{
    BackendError, Device, DeviceBuffer, KernelArgument, KernelSpec, LoadedKernelWithLaunch, Source,
};

/// The memory-pass kernel; the parameter of its specification is the variant of the pass.
pub(super) const MEMORY_PASS_KERNELS: &[KernelSpec<MemoryPassVariant>] = &[MEMORY_PASS_KERNEL];

const MEMORY_PASS_KERNEL: KernelSpec<MemoryPassVariant> = KernelSpec {
    macro_definitions: |pass| {
        let past_l1 = (pass.load_policy == LoadCachePolicy::OnlyL2).then_some("PAST_L1");
        let kept = (pass.store_policy == StoreCachePolicy::KeptInL2).then_some("STORES_KEPT");
        let order = match pass.read_write_division {
            ReadWriteDivision::BlockReadsBeforeItWrites => None,
            ReadWriteDivision::WriterBlocksFirst => Some("WRITES_FIRST"),
            ReadWriteDivision::ReaderBlocksFirst => Some("READERS_FIRST"),
        };
        let planes =
            (pass.packet_distance == DistanceOfThreadPackets::OnePlaneApart).then_some("PLANES");
        let macros = [past_l1, kept, order, planes].into_iter().flatten().map(str::to_owned);
        let sizes = [
            format!("THREADS={}", pass.threads_per_block),
            format!("PACKETS={}", pass.packets_per_thread),
        ];
        sizes.into_iter().chain(macros).collect()
    },
    listed_build_parameters: || {
        let mut variants: Vec<MemoryPassVariant> = Vec::new();
        for pass in MemoryPassVariant::ALL_TRIED_PASSES {
            if variants.iter().all(|known| {
                MEMORY_PASS_KERNEL.build_for_parameters(known)
                    != MEMORY_PASS_KERNEL.build_for_parameters(&pass)
            }) {
                variants.push(pass);
            }
        }
        variants
    },
    ..KernelSpec::new(
        Source::new("measure/traffic", include_str!("../../kernels/measure/traffic.cu")),
        "measure_traffic",
        256,
        |_| [1, 1, 1],
    )
};

/// Bytes that one load or store instruction of a thread moves.
const BYTES_PER_PACKET: u64 = 16;
/// Largest number of packets of a buffer, because the kernel counts packets in 32 bits, up to one
/// share behind the last packet.
const MAX_PACKETS_OF_BUFFER: u64 = 1 << 31;
/// Number of threads that can be resident on a multiprocessor.
const RESIDENT_THREADS_PER_MULTIPROCESSOR: usize = 2048;

/// A memory pass: one of several ways for a kernel to read and write the same bytes, which differ
/// in speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPassVariant {
    threads_per_block: usize,
    /// Number of 16-byte packets that a thread loads before it uses the first one.
    packets_per_thread: usize,
    load_policy: LoadCachePolicy,
    store_policy: StoreCachePolicy,
    read_write_division: ReadWriteDivision,
    grid_size: GridSizeChoice,
    packet_distance: DistanceOfThreadPackets,
}

/// Which caches a load of the memory pass fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoadCachePolicy {
    AllCaches,
    OnlyL2,
}

/// Priority in L2 of the lines that the memory pass writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreCachePolicy {
    KeptInL2,
    EvictedFirstFromL2,
}

/// How the thread blocks of a memory pass divide reading and writing among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadWriteDivision {
    /// Each thread block first reads its share of the source and then writes its share of the
    /// target.
    BlockReadsBeforeItWrites,
    /// Each thread block first writes its share of the target and then reads its share of the
    /// source, so that no store waits for a load.
    WriterBlocksFirst,
    /// The first thread blocks only read, and all later thread blocks only write.
    ReaderBlocksFirst,
}

/// Number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GridSizeChoice {
    /// The grid has as many blocks as needed for each thread to load its packets once, without a
    /// loop.
    GridCoversAllPackets,
    /// The grid has as many blocks as fit on the multiprocessors at the same time.
    AllBlocksResident,
}

/// Distance between the packets that a thread loads together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DistanceOfThreadPackets {
    OneBlockApart,
    /// Packets of a thread are one plane apart, with one plane for each packet of a thread; for
    /// passes whose grid covers all packets.
    OnePlaneApart,
}

impl MemoryPassVariant {
    /// Variants of the memory pass that kernelgate tries. On an H200, for 26 combinations of bytes
    /// and cache state, the best of twenty of these passes was within 0.8 % of the best of 152
    /// passes. Variants not listed: writing blocks between reading blocks gain at most 0.5 %; bulk
    /// copies are slower everywhere, by 1 to 60 %.
    pub const ALL_TRIED_PASSES: [Self; 23] = {
        use GridSizeChoice::{AllBlocksResident, GridCoversAllPackets};
        use LoadCachePolicy::{AllCaches, OnlyL2};
        use ReadWriteDivision::{BlockReadsBeforeItWrites, ReaderBlocksFirst, WriterBlocksFirst};
        use StoreCachePolicy::{EvictedFirstFromL2, KeptInL2};
        [
            Self::variant_with_packets_block_apart(
                128,
                1,
                AllCaches,
                KeptInL2,
                BlockReadsBeforeItWrites,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                1,
                AllCaches,
                KeptInL2,
                BlockReadsBeforeItWrites,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                1,
                AllCaches,
                KeptInL2,
                BlockReadsBeforeItWrites,
                AllBlocksResident,
            ),
            Self::variant_with_packets_block_apart(
                128,
                4,
                AllCaches,
                KeptInL2,
                BlockReadsBeforeItWrites,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                8,
                OnlyL2,
                KeptInL2,
                BlockReadsBeforeItWrites,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                8,
                OnlyL2,
                EvictedFirstFromL2,
                BlockReadsBeforeItWrites,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                2,
                AllCaches,
                EvictedFirstFromL2,
                BlockReadsBeforeItWrites,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                128,
                2,
                OnlyL2,
                EvictedFirstFromL2,
                BlockReadsBeforeItWrites,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                2,
                OnlyL2,
                KeptInL2,
                BlockReadsBeforeItWrites,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                4,
                AllCaches,
                EvictedFirstFromL2,
                BlockReadsBeforeItWrites,
                AllBlocksResident,
            ),
            Self::variant_with_packets_block_apart(
                128,
                2,
                AllCaches,
                KeptInL2,
                ReaderBlocksFirst,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                128,
                8,
                AllCaches,
                KeptInL2,
                ReaderBlocksFirst,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                128,
                4,
                OnlyL2,
                KeptInL2,
                ReaderBlocksFirst,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                4,
                OnlyL2,
                KeptInL2,
                ReaderBlocksFirst,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                128,
                2,
                AllCaches,
                EvictedFirstFromL2,
                ReaderBlocksFirst,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                2,
                AllCaches,
                EvictedFirstFromL2,
                ReaderBlocksFirst,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                128,
                4,
                AllCaches,
                EvictedFirstFromL2,
                ReaderBlocksFirst,
                AllBlocksResident,
            ),
            Self::variant_with_packets_block_apart(
                256,
                2,
                AllCaches,
                EvictedFirstFromL2,
                WriterBlocksFirst,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                4,
                AllCaches,
                EvictedFirstFromL2,
                WriterBlocksFirst,
                GridCoversAllPackets,
            ),
            Self::variant_with_packets_block_apart(
                256,
                4,
                AllCaches,
                KeptInL2,
                WriterBlocksFirst,
                AllBlocksResident,
            ),
            Self::variant_with_packets_block_apart(
                256,
                2,
                AllCaches,
                KeptInL2,
                WriterBlocksFirst,
                GridCoversAllPackets,
            )
            .with_packets_one_plane_apart(),
            Self::variant_with_packets_block_apart(
                256,
                4,
                AllCaches,
                EvictedFirstFromL2,
                WriterBlocksFirst,
                GridCoversAllPackets,
            )
            .with_packets_one_plane_apart(),
            Self::variant_with_packets_block_apart(
                256,
                4,
                AllCaches,
                EvictedFirstFromL2,
                BlockReadsBeforeItWrites,
                GridCoversAllPackets,
            )
            .with_packets_one_plane_apart(),
        ]
    };

    const fn variant_with_packets_block_apart(
        threads: usize,
        packets: usize,
        load: LoadCachePolicy,
        store: StoreCachePolicy,
        order: ReadWriteDivision,
        blocks: GridSizeChoice,
    ) -> Self {
        Self {
            threads_per_block: threads,
            packets_per_thread: packets,
            load_policy: load,
            store_policy: store,
            read_write_division: order,
            grid_size: blocks,
            packet_distance: DistanceOfThreadPackets::OneBlockApart,
        }
    }

    const fn with_packets_one_plane_apart(self) -> Self {
        Self { packet_distance: DistanceOfThreadPackets::OnePlaneApart, ..self }
    }
}

impl fmt::Display for MemoryPassVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            threads_per_block: threads,
            packets_per_thread: packets,
            load_policy: load,
            store_policy: store,
            read_write_division: order,
            grid_size: blocks,
            packet_distance: apart,
        } = self;
        write!(f, "{threads} threads x {packets} packets")?;
        let words = [
            (*load == LoadCachePolicy::OnlyL2).then_some("past L1"),
            (*store == StoreCachePolicy::EvictedFirstFromL2).then_some("evict first"),
            (*order == ReadWriteDivision::WriterBlocksFirst).then_some("writes first"),
            (*order == ReadWriteDivision::ReaderBlocksFirst).then_some("readers first"),
            (*blocks == GridSizeChoice::AllBlocksResident).then_some("resident"),
            (*apart == DistanceOfThreadPackets::OnePlaneApart).then_some("in planes"),
        ];
        words.into_iter().flatten().try_for_each(|word| write!(f, ", {word}"))
    }
}

/// Number of thread blocks of a memory pass that read, and number of those that write. Unless
/// readers come first, each thread block both reads and writes.
#[derive(Debug, PartialEq, Eq)]
struct ReaderAndWriterBlocks {
    reader_blocks: u64,
    writer_blocks: u64,
}

impl ReaderAndWriterBlocks {
    fn blocks_for_memory_pass(
        pass: &MemoryPassVariant,
        reads: u64,
        writes: u64,
        multiprocessors: u64,
    ) -> Self {
        let round = (pass.threads_per_block * pass.packets_per_thread) as u64;
        let work = match pass.read_write_division {
            ReadWriteDivision::BlockReadsBeforeItWrites | ReadWriteDivision::WriterBlocksFirst => {
                reads.max(writes)
            }
            ReadWriteDivision::ReaderBlocksFirst => reads + writes,
        };
        let resident =
            (RESIDENT_THREADS_PER_MULTIPROCESSOR / pass.threads_per_block) as u64 * multiprocessors;
        let blocks = match pass.grid_size {
            GridSizeChoice::GridCoversAllPackets => work.div_ceil(round),
            GridSizeChoice::AllBlocksResident => {
                resident.min(work.div_ceil(pass.threads_per_block as u64))
            }
        };
        let blocks = blocks.max(1);
        let share = |packets: u64| match packets {
            0 => 0,
            packets => (blocks * packets / work.max(1)).max(1),
        };
        match pass.read_write_division {
            ReadWriteDivision::BlockReadsBeforeItWrites | ReadWriteDivision::WriterBlocksFirst => {
                Self { reader_blocks: blocks, writer_blocks: blocks }
            }
            ReadWriteDivision::ReaderBlocksFirst => {
                Self { reader_blocks: share(reads), writer_blocks: share(writes) }
            }
        }
    }

    fn total_block_count(&self, order: ReadWriteDivision) -> u64 {
        match order {
            ReadWriteDivision::BlockReadsBeforeItWrites | ReadWriteDivision::WriterBlocksFirst => {
                self.reader_blocks
            }
            ReadWriteDivision::ReaderBlocksFirst => self.reader_blocks + self.writer_blocks,
        }
    }
}

/// A source buffer and a target buffer in device memory, and the kernels of all memory passes.
pub struct MemoryPassKernelsAndBuffers {
    kernels: Vec<(MemoryPassVariant, LoadedKernelWithLaunch)>,
    source_buffer: DeviceBuffer,
    target_buffer: DeviceBuffer,
    never_written_output: DeviceBuffer,
    multiprocessor_count: u64,
}

/// The bytes that a memory pass reads and writes, and where they begin; their place in the buffers
/// influences how well they fit L2.
#[derive(Debug, Clone, Copy)]
pub struct BytesOfMemoryPass {
    /// Bytes read, rounded up to whole 16-byte packets.
    pub read_bytes: u64,
    /// Bytes written, rounded up to whole 16-byte packets.
    pub write_bytes: u64,
    /// Offset in bytes, in both buffers, at which reading and writing begin; a multiple of 16.
    pub offset_bytes: u64,
}

impl MemoryPassKernelsAndBuffers {
    /// Compiles all memory passes, allocates both buffers for at most these numbers of bytes, and
    /// fills the source with repetitions of `pattern`, random numbers.
    ///
    /// # Errors
    /// Fails if a kernel does not compile or too little device memory is free.
    pub fn compile_memory_passes_and_allocate(
        device: &Device,
        (read_bytes, write_bytes): (u64, u64),
        pattern: &[u8],
    ) -> Result<Self, BackendError> {
        let load = |pass| Ok((pass, MEMORY_PASS_KERNEL.compile_and_load(device, &pass)?));
        let room = |bytes: u64| (packets_for_bytes(bytes).max(1) * BYTES_PER_PACKET) as usize;
        Ok(Self {
            kernels: MemoryPassVariant::ALL_TRIED_PASSES
                .into_iter()
                .map(load)
                .collect::<Result<_, BackendError>>()?,
            source_buffer: device.allocate_with_repeated_pattern(pattern, room(read_bytes))?,
            target_buffer: device.allocate(room(write_bytes))?,
            never_written_output: device.upload(&[0; 4])?,
            multiprocessor_count: u64::from(device.gpu_properties().multiprocessor_count),
        })
    }

    /// Enqueues the kernel of a memory pass, which reads and writes these bytes.
    ///
    /// # Errors
    /// Fails if the driver refuses the launch, or a buffer is smaller than the bytes to move.
    pub fn enqueue_memory_pass(
        &self,
        pass: MemoryPassVariant,
        moved: BytesOfMemoryPass,
    ) -> Result<(), BackendError> {
        let (reads, writes) =
            (packets_for_bytes(moved.read_bytes), packets_for_bytes(moved.write_bytes));
        let fits = |buffer: &DeviceBuffer, packets| {
            packets < MAX_PACKETS_OF_BUFFER
                && moved.offset_bytes + packets * BYTES_PER_PACKET <= buffer.size_in_bytes() as u64
        };
        let kernel = self.kernels.iter().find(|(known, _)| *known == pass);
        let Some((_, kernel)) = kernel
            .filter(|_| fits(&self.source_buffer, reads) && fits(&self.target_buffer, writes))
        else {
            return Err(BackendError::ComputationFailed(format!("no pass ({pass}) for {moved:?}")));
        };
        let roles = ReaderAndWriterBlocks::blocks_for_memory_pass(
            &pass,
            reads,
            writes,
            self.multiprocessor_count,
        );
        let launch = Launch::with_grid_of_blocks(
            [roles.total_block_count(pass.read_write_division) as usize, 1, 1],
            pass.threads_per_block as u32,
        )?;
        let plane = match pass.packet_distance {
            DistanceOfThreadPackets::OneBlockApart => 0,
            DistanceOfThreadPackets::OnePlaneApart => {
                reads.div_ceil(pass.packets_per_thread as u64)
            }
        };
        let number = |count: u64| KernelArgument::U32(count as u32);
        let share = |packets: u64, blocks: u64| number(packets.div_ceil(blocks.max(1)));
        let read_in_turn = if plane > 0 { plane } else { reads };
        let at = |buffer: &DeviceBuffer| {
            KernelArgument::DeviceAddress(buffer.device_address() + moved.offset_bytes)
        };
        let arguments = [
            at(&self.source_buffer),
            number(reads),
            number(plane),
            share(read_in_turn, roles.reader_blocks),
            number(roles.reader_blocks),
            at(&self.target_buffer),
            number(writes),
            share(writes, roles.writer_blocks),
            KernelArgument::U32(0x9e37_79b9),
            // The kernel writes its xor only if it equals this number, so that the compiler cannot
            // remove the loads.
            KernelArgument::U32(0xdead_beef),
            KernelArgument::from(&self.never_written_output),
        ];
        kernel.loaded_kernel().launch(launch, &arguments)
    }
}

const fn packets_for_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(BYTES_PER_PACKET)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;

    #[test]
    fn reader_and_writer_blocks_are_as_many_as_their_packets_need() {
        let roles = |order, blocks, reads, writes| {
            let pass = MemoryPassVariant::variant_with_packets_block_apart(
                128,
                4,
                LoadCachePolicy::OnlyL2,
                StoreCachePolicy::KeptInL2,
                order,
                blocks,
            );
            let ReaderAndWriterBlocks { reader_blocks: readers, writer_blocks: writers } =
                ReaderAndWriterBlocks::blocks_for_memory_pass(&pass, reads, writes, 132);
            [readers, writers]
        };
        let covering =
            |order| roles(order, GridSizeChoice::GridCoversAllPackets, 512 * 30, 512 * 10);
        assert_eq!(covering(ReadWriteDivision::BlockReadsBeforeItWrites), [30, 30]);
        assert_eq!(covering(ReadWriteDivision::WriterBlocksFirst), [30, 30]);
        assert_eq!(covering(ReadWriteDivision::ReaderBlocksFirst), [30, 10]);
        let resident = GridSizeChoice::AllBlocksResident;
        assert_eq!(
            roles(ReadWriteDivision::ReaderBlocksFirst, resident, 1 << 20, 1 << 20),
            [1056, 1056]
        );
        assert_eq!(roles(ReadWriteDivision::BlockReadsBeforeItWrites, resident, 256, 1), [2, 2]);
        assert_eq!(roles(ReadWriteDivision::ReaderBlocksFirst, resident, 0, 0), [0, 0]);
        // Even a few written bytes get a writing block of their own.
        assert_eq!(
            roles(
                ReadWriteDivision::ReaderBlocksFirst,
                GridSizeChoice::GridCoversAllPackets,
                1 << 20,
                1
            ),
            [2048, 1]
        );
    }

    #[test]
    fn a_memory_pass_writes_all_of_its_bytes_and_none_behind_them() {
        let Some((device, _one_at_a_time)) = lock_first_gpu() else { return };
        const TEST_BUFFER_BYTES: u64 = 16 * 4096;
        let traffic = MemoryPassKernelsAndBuffers::compile_memory_passes_and_allocate(
            &device,
            (TEST_BUFFER_BYTES, TEST_BUFFER_BYTES),
            &[7; 1 << 10],
        )
        .unwrap();
        for pass in MemoryPassVariant::ALL_TRIED_PASSES {
            for (read_bytes, write_bytes) in
                [(TEST_BUFFER_BYTES, 16 * 1021), (16 * 1021, 16 * 4095), (160, 16)]
            {
                let moved =
                    |offset| BytesOfMemoryPass { read_bytes, write_bytes, offset_bytes: offset };
                traffic.target_buffer.fill_all_bytes(0xff).unwrap();
                traffic.enqueue_memory_pass(pass, moved(0)).unwrap();
                device.synchronize().unwrap();
                let mut now = vec![0; TEST_BUFFER_BYTES as usize];
                traffic.target_buffer.download_first_bytes(&mut now).unwrap();
                let (inside, behind) = now.split_at(write_bytes as usize);
                let changed = inside.chunks(16).all(|packet| packet != [0xff; 16]);
                assert!(changed && behind.iter().all(|byte| *byte == 0xff), "{pass}");
                assert!(traffic.enqueue_memory_pass(pass, moved(TEST_BUFFER_BYTES)).is_err());
            }
        }
    }
}
