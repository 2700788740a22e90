//! Passes that move as many bytes as a case declares: the memory ceiling of that case. This module
//! does not choose the fastest memory pass.

use std::fmt;

use crate::driver::launch::shape::Launch;
use crate::{BackendError, Device, DeviceBuffer, KernelArgument, KernelSpec, LoadedKernel, Source};

/// The rows.
pub(super) const TRAFFIC_KERNELS: &[KernelSpec<MemoryPass>] = &[TRAFFIC_KERNEL];

const TRAFFIC_KERNEL: KernelSpec<MemoryPass> = KernelSpec {
    defines: |pass| {
        let past_l1 = (pass.load == LoadCaching::L2).then_some("PAST_L1");
        let kept = (pass.store == StoreCaching::Kept).then_some("STORES_KEPT");
        let order = match pass.order {
            ReadWriteOrder::Together => None,
            ReadWriteOrder::WritesFirst => Some("WRITES_FIRST"),
            ReadWriteOrder::ReadersFirst => Some("READERS_FIRST"),
        };
        let planes = (pass.apart == ThreadPacketDistance::Plane).then_some("PLANES");
        let macros = [past_l1, kept, order, planes].into_iter().flatten().map(str::to_owned);
        let sizes = [format!("THREADS={}", pass.threads), format!("PACKETS={}", pass.packets)];
        sizes.into_iter().chain(macros).collect()
    },
    variants: || {
        let mut variants: Vec<MemoryPass> = Vec::new();
        for pass in MemoryPass::ALL {
            if variants.iter().all(|known| {
                TRAFFIC_KERNEL.build_for_parameters(known)
                    != TRAFFIC_KERNEL.build_for_parameters(&pass)
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

/// Bytes that a thread moves at once.
const TRAFFIC_PACKET_BYTES: u64 = 16;
/// Largest number of packets of a buffer: the kernel counts them in 32 bits, up to one share behind
/// the last packet.
const MAX_PACKETS: u64 = 1 << 31;
/// Number of threads that a multiprocessor can hold.
const RESIDENT_THREADS: usize = 2048;

/// A memory pass: one way to read and write bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPass {
    threads: usize,
    /// Number of 16-byte packets that a thread reads before it uses the first packet.
    packets: usize,
    load: LoadCaching,
    store: StoreCaching,
    order: ReadWriteOrder,
    blocks: BlockCount,
    apart: ThreadPacketDistance,
}

/// Which caches a load fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoadCaching {
    AllCaches,
    L2,
}

/// How L2 treats a written line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreCaching {
    Kept,
    EvictedFirst,
}

/// How reading and writing are divided among thread blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadWriteOrder {
    /// Each thread block reads its share of the data and then writes a share.
    Together,
    /// Each block writes a share, then reads one: no write waits for a read.
    WritesFirst,
    /// The first blocks read, and all later blocks write.
    ReadersFirst,
}

/// Number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockCount {
    /// The grid covers one round of packets for each thread: thread blocks do not loop over their
    /// reads.
    Covering,
    /// The launch has as many blocks as fit on the multiprocessors.
    Resident,
}

/// Distance of the packets that a thread reads together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ThreadPacketDistance {
    Block,
    /// Packets of a thread are one plane apart, with one plane for each packet of a thread; for
    /// memory passes whose grid covers the range.
    Plane,
}

impl MemoryPass {
    /// Passes that are tried. With 64-bit indices and for 26 combinations of bytes and cache state
    /// on an H200, the best of twenty of these was within 0.8 % of the best of 152 passes. Blocks
    /// that write between others that read gain at most 0.5 %; bulk copies are slower everywhere,
    /// by 1 to 60 %.
    pub const ALL: [Self; 23] = {
        use BlockCount::{Covering, Resident};
        use LoadCaching::{AllCaches, L2};
        use ReadWriteOrder::{ReadersFirst, Together, WritesFirst};
        use StoreCaching::{EvictedFirst, Kept};
        [
            Self::new(128, 1, AllCaches, Kept, Together, Covering),
            Self::new(256, 1, AllCaches, Kept, Together, Covering),
            Self::new(256, 1, AllCaches, Kept, Together, Resident),
            Self::new(128, 4, AllCaches, Kept, Together, Covering),
            Self::new(256, 8, L2, Kept, Together, Covering),
            Self::new(256, 8, L2, EvictedFirst, Together, Covering),
            Self::new(256, 2, AllCaches, EvictedFirst, Together, Covering),
            Self::new(128, 2, L2, EvictedFirst, Together, Covering),
            Self::new(256, 2, L2, Kept, Together, Covering),
            Self::new(256, 4, AllCaches, EvictedFirst, Together, Resident),
            Self::new(128, 2, AllCaches, Kept, ReadersFirst, Covering),
            Self::new(128, 8, AllCaches, Kept, ReadersFirst, Covering),
            Self::new(128, 4, L2, Kept, ReadersFirst, Covering),
            Self::new(256, 4, L2, Kept, ReadersFirst, Covering),
            Self::new(128, 2, AllCaches, EvictedFirst, ReadersFirst, Covering),
            Self::new(256, 2, AllCaches, EvictedFirst, ReadersFirst, Covering),
            Self::new(128, 4, AllCaches, EvictedFirst, ReadersFirst, Resident),
            Self::new(256, 2, AllCaches, EvictedFirst, WritesFirst, Covering),
            Self::new(256, 4, AllCaches, EvictedFirst, WritesFirst, Covering),
            Self::new(256, 4, AllCaches, Kept, WritesFirst, Resident),
            Self::new(256, 2, AllCaches, Kept, WritesFirst, Covering).in_separate_planes(),
            Self::new(256, 4, AllCaches, EvictedFirst, WritesFirst, Covering).in_separate_planes(),
            Self::new(256, 4, AllCaches, EvictedFirst, Together, Covering).in_separate_planes(),
        ]
    };

    const fn new(
        threads: usize,
        packets: usize,
        load: LoadCaching,
        store: StoreCaching,
        order: ReadWriteOrder,
        blocks: BlockCount,
    ) -> Self {
        Self { threads, packets, load, store, order, blocks, apart: ThreadPacketDistance::Block }
    }

    const fn in_separate_planes(self) -> Self {
        Self { apart: ThreadPacketDistance::Plane, ..self }
    }
}

impl fmt::Display for MemoryPass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { threads, packets, load, store, order, blocks, apart } = self;
        write!(f, "{threads} threads x {packets} packets")?;
        let words = [
            (*load == LoadCaching::L2).then_some("past L1"),
            (*store == StoreCaching::EvictedFirst).then_some("evict first"),
            (*order == ReadWriteOrder::WritesFirst).then_some("writes first"),
            (*order == ReadWriteOrder::ReadersFirst).then_some("readers first"),
            (*blocks == BlockCount::Resident).then_some("resident"),
            (*apart == ThreadPacketDistance::Plane).then_some("in planes"),
        ];
        words.into_iter().flatten().try_for_each(|word| write!(f, ", {word}"))
    }
}

/// Number of thread blocks of a launch by their role. Unless readers come first, each thread block
/// reads and writes.
#[derive(Debug, PartialEq, Eq)]
struct ReaderAndWriterBlocks {
    readers: u64,
    writers: u64,
}

impl ReaderAndWriterBlocks {
    fn new(pass: &MemoryPass, reads: u64, writes: u64, multiprocessors: u64) -> Self {
        let round = (pass.threads * pass.packets) as u64;
        let work = match pass.order {
            ReadWriteOrder::Together | ReadWriteOrder::WritesFirst => reads.max(writes),
            ReadWriteOrder::ReadersFirst => reads + writes,
        };
        let resident = (RESIDENT_THREADS / pass.threads) as u64 * multiprocessors;
        let blocks = match pass.blocks {
            BlockCount::Covering => work.div_ceil(round),
            BlockCount::Resident => resident.min(work.div_ceil(pass.threads as u64)),
        };
        let blocks = blocks.max(1);
        let share = |packets: u64| match packets {
            0 => 0,
            packets => (blocks * packets / work.max(1)).max(1),
        };
        match pass.order {
            ReadWriteOrder::Together | ReadWriteOrder::WritesFirst => {
                Self { readers: blocks, writers: blocks }
            }
            ReadWriteOrder::ReadersFirst => Self { readers: share(reads), writers: share(writes) },
        }
    }

    fn block_count(&self, order: ReadWriteOrder) -> u64 {
        match order {
            ReadWriteOrder::Together | ReadWriteOrder::WritesFirst => self.readers,
            ReadWriteOrder::ReadersFirst => self.readers + self.writers,
        }
    }
}

/// Two device buffers, and the kernels that read the first buffer and write the second.
pub struct TrafficPasses {
    kernels: Vec<(MemoryPass, LoadedKernel)>,
    source: DeviceBuffer,
    target: DeviceBuffer,
    guard: DeviceBuffer,
    multiprocessors: u64,
}

/// Bytes that a pass moves, and their offset in both buffers: the position of data decides how well
/// it fits L2.
#[derive(Debug, Clone, Copy)]
pub struct TrafficBytes {
    /// Bytes read, rounded up to whole packets.
    pub read_bytes: u64,
    /// Bytes written, rounded up to whole packets.
    pub write_bytes: u64,
    /// Offset in both buffers at which the traffic begins, bytes; a multiple of 16.
    pub offset: u64,
}

impl TrafficPasses {
    /// Compiles the memory-pass kernels, fills the source buffer with repetitions of `pattern`
    /// (random numbers, because zeros are faster), and allocates the target buffer, for passes of
    /// at most the given number of bytes each, including the offset.
    ///
    /// # Errors
    /// Fails if a kernel does not compile or memory is short.
    pub fn new(
        device: &Device,
        (read_bytes, write_bytes): (u64, u64),
        pattern: &[u8],
    ) -> Result<Self, BackendError> {
        let load = |pass| Ok((pass, TRAFFIC_KERNEL.compile_and_load(device, &pass)?));
        let room = |bytes: u64| (packets_of_bytes(bytes).max(1) * TRAFFIC_PACKET_BYTES) as usize;
        Ok(Self {
            kernels: MemoryPass::ALL.into_iter().map(load).collect::<Result<_, BackendError>>()?,
            source: device.allocate_repeated(pattern, room(read_bytes))?,
            target: device.allocate(room(write_bytes))?,
            guard: device.upload(&[0; 4])?,
            multiprocessors: u64::from(device.facts().multiprocessors),
        })
    }

    /// Reads and writes bytes.
    ///
    /// # Errors
    /// Fails if the launch is refused, or a buffer is smaller.
    pub fn launch_pass(&self, pass: MemoryPass, moved: TrafficBytes) -> Result<(), BackendError> {
        let (reads, writes) =
            (packets_of_bytes(moved.read_bytes), packets_of_bytes(moved.write_bytes));
        let fits = |buffer: &DeviceBuffer, packets| {
            packets < MAX_PACKETS
                && moved.offset + packets * TRAFFIC_PACKET_BYTES <= buffer.bytes() as u64
        };
        let kernel = self.kernels.iter().find(|(known, _)| *known == pass);
        let Some((_, kernel)) =
            kernel.filter(|_| fits(&self.source, reads) && fits(&self.target, writes))
        else {
            return Err(BackendError::Launch(format!("no pass ({pass}) for {moved:?}")));
        };
        let roles = ReaderAndWriterBlocks::new(&pass, reads, writes, self.multiprocessors);
        let launch = Launch::with_blocks(
            [roles.block_count(pass.order) as usize, 1, 1],
            pass.threads as u32,
        )?;
        let plane = match pass.apart {
            ThreadPacketDistance::Block => 0,
            ThreadPacketDistance::Plane => reads.div_ceil(pass.packets as u64),
        };
        let number = |count: u64| KernelArgument::U32(count as u32);
        let share = |packets: u64, blocks: u64| number(packets.div_ceil(blocks.max(1)));
        let read_in_turn = if plane > 0 { plane } else { reads };
        let at = |buffer: &DeviceBuffer| KernelArgument::Address(buffer.address() + moved.offset);
        let arguments = [
            at(&self.source),
            number(reads),
            number(plane),
            share(read_in_turn, roles.readers),
            number(roles.readers),
            at(&self.target),
            number(writes),
            share(writes, roles.writers),
            KernelArgument::U32(0x9e37_79b9),
            // The kernel writes its sum if it equals this number, so that the compiler cannot drop
            // the loads.
            KernelArgument::U32(0xdead_beef),
            KernelArgument::from(&self.guard),
        ];
        kernel.loaded_kernel().launch(launch, &arguments)
    }
}

const fn packets_of_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(TRAFFIC_PACKET_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;

    #[test]
    fn reader_and_writer_blocks_are_as_many_as_their_packets_need() {
        let roles = |order, blocks, reads, writes| {
            let pass = MemoryPass::new(128, 4, LoadCaching::L2, StoreCaching::Kept, order, blocks);
            let ReaderAndWriterBlocks { readers, writers } =
                ReaderAndWriterBlocks::new(&pass, reads, writes, 132);
            [readers, writers]
        };
        let covering = |order| roles(order, BlockCount::Covering, 512 * 30, 512 * 10);
        assert_eq!(covering(ReadWriteOrder::Together), [30, 30]);
        assert_eq!(covering(ReadWriteOrder::WritesFirst), [30, 30]);
        assert_eq!(covering(ReadWriteOrder::ReadersFirst), [30, 10]);
        let resident = BlockCount::Resident;
        assert_eq!(roles(ReadWriteOrder::ReadersFirst, resident, 1 << 20, 1 << 20), [1056, 1056]);
        assert_eq!(roles(ReadWriteOrder::Together, resident, 256, 1), [2, 2]);
        assert_eq!(roles(ReadWriteOrder::ReadersFirst, resident, 0, 0), [0, 0]);
        // A few bytes written have a block of their own.
        assert_eq!(
            roles(ReadWriteOrder::ReadersFirst, BlockCount::Covering, 1 << 20, 1),
            [2048, 1]
        );
    }

    #[test]
    fn a_memory_pass_writes_all_of_its_bytes_and_none_behind_them() {
        let Some((device, _one_at_a_time)) = lock_first_gpu() else { return };
        const BUFFER_BYTES: u64 = 16 * 4096;
        let traffic =
            TrafficPasses::new(&device, (BUFFER_BYTES, BUFFER_BYTES), &[7; 1 << 10]).unwrap();
        for pass in MemoryPass::ALL {
            for (read_bytes, write_bytes) in
                [(BUFFER_BYTES, 16 * 1021), (16 * 1021, 16 * 4095), (160, 16)]
            {
                let moved = |offset| TrafficBytes { read_bytes, write_bytes, offset };
                traffic.target.fill(0xff).unwrap();
                traffic.launch_pass(pass, moved(0)).unwrap();
                device.synchronize().unwrap();
                let mut now = vec![0; BUFFER_BYTES as usize];
                traffic.target.download(&mut now).unwrap();
                let (inside, behind) = now.split_at(write_bytes as usize);
                let changed = inside.chunks(16).all(|packet| packet != [0xff; 16]);
                assert!(changed && behind.iter().all(|byte| *byte == 0xff), "{pass}");
                assert!(traffic.launch_pass(pass, moved(BUFFER_BYTES)).is_err());
            }
        }
    }
}
