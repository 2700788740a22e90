//! The class of each operation: compute, communication, copy, page migration, set or whole graph.
//!
//! Kernels are classified by the name of their function alone: template arguments and parameters
//! name types. This module does not determine what a compute kernel computes (`kernel_kinds` does).

use crate::analyze::operations::{AllOperations, OperationId, OperationKind};
use crate::model::Trace;
pub use crate::model::collective::CollectiveKind;
use crate::model::interned_names::NameId;

/// Class of a GPU operation: compute, communication, copy, memset or migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OperationClass {
    /// A kernel that computes.
    Compute,
    /// A launch of a whole graph whose kernels were not recorded.
    Graph,
    /// A kernel or a copy that exchanges data with other ranks.
    Communication,
    /// Pages of managed memory that the driver moves on demand.
    Migration,
    /// A copy of memory that the program requested.
    Copy,
    /// A memset: memory is filled with one value.
    Set,
}

impl OperationClass {
    /// Every class, in the order in which concurrent operations hide each other.
    pub const ALL_CLASSES: [Self; 6] =
        [Self::Compute, Self::Graph, Self::Communication, Self::Migration, Self::Copy, Self::Set];

    /// Label in printed output.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Graph => "graph, recorded whole",
            Self::Communication => "communication",
            Self::Migration => "page migration",
            Self::Copy => "copy",
            Self::Set => "memset",
        }
    }
}

/// A library that moves data between GPUs, as far as kernel names distinguish libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CommunicationLibrary {
    /// NCCL and RCCL, whose kernels have the same names.
    Nccl,
    /// NVSHMEM and its users.
    Nvshmem,
    /// All-reduce and exchange kernels that come with frameworks.
    Custom,
    /// Communication by MPI, whose copies lie inside MPI's ranges.
    Mpi,
    /// Copies from the memory of one GPU to the memory of another GPU.
    Peer,
}

impl CommunicationLibrary {
    /// Label in printed output.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Nccl => "NCCL/RCCL",
            Self::Nvshmem => "NVSHMEM",
            Self::Custom => "custom",
            Self::Mpi => "MPI",
            Self::Peer => "peer",
        }
    }
}

/// The library and the collective operation of a communicating kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommunicationKind {
    pub library: CommunicationLibrary,
    pub collective: CollectiveKind,
}

/// Words of function names, in lower case, by library; the first match decides.
const LIBRARY_NAME_WORDS: &[(CommunicationLibrary, &[&str])] = &[
    (
        CommunicationLibrary::Nccl,
        &["nccldevkernel", "ncclkernel", "rccldevkernel", "rcclkernel", "msccl"],
    ),
    (
        CommunicationLibrary::Nvshmem,
        &["nvshmem", "rocshmem", "ep::internode::", "ep::internode_ll::", "ep::intranode::"],
    ),
    (
        CommunicationLibrary::Custom,
        &[
            "multimem_",
            "allreduce",
            "all_reduce",
            "cross_device_reduce",
            "all_gather",
            "allgather",
            "reduce_scatter",
            "reducescatter",
            "all_to_all",
            "alltoall",
            "all2all",
            "userbuffers_",
            "symmetric_memory::",
            "_barrier",
        ],
    ),
];

impl CommunicationKind {
    /// Communication of a kernel by its demangled name; `None` if the kernel computes.
    pub fn from_kernel_name(name: &str) -> Option<CommunicationKind> {
        let function = short_function_name(name).to_ascii_lowercase();
        let found = |(_, words): &&(CommunicationLibrary, &[&str])| {
            words.iter().any(|w| function.contains(w))
        };
        let (library, _) = LIBRARY_NAME_WORDS.iter().find(found)?;
        Some(Self { library: *library, collective: CollectiveKind::from_name(&function) })
    }

    /// Returns the communication of copies inside an MPI range, such as `MPI_Allreduce`.
    pub fn from_range_name(name: &str) -> Option<CommunicationKind> {
        let call = name.rsplit(':').next()?.trim().strip_prefix("MPI_")?;
        Some(Self {
            library: CommunicationLibrary::Mpi,
            collective: CollectiveKind::from_name(call),
        })
    }
}

/// Brackets of a kernel name that are open; `<` and `>` inside others may compare numbers.
#[derive(Debug, Default)]
pub struct OpenBrackets {
    open: Vec<char>,
    before: char,
}

impl OpenBrackets {
    /// Whether none is open.
    pub fn are_all_closed(&self) -> bool {
        self.open.is_empty()
    }

    /// Returns whether the next character, not itself a bracket, is outside of all brackets.
    pub fn is_outside(&mut self, character: char) -> bool {
        let before = std::mem::replace(&mut self.before, character);
        let named = before.is_ascii_alphanumeric() || ['_', ':'].contains(&before);
        match character {
            '(' | '[' | '{' => self.open.push(character),
            '<' if self.open.is_empty() || named => self.open.push(character),
            '>' if self.open.last() == Some(&'<') && before != '-' => _ = self.open.pop(),
            ')' | ']' | '}' => {
                // A `<` that is a comparison has no closing bracket.
                while self.open.pop().is_some_and(|open| open == '<') {}
            }
            '<' | '>' => {}
            _ => return self.open.is_empty(),
        }
        false
    }
}

/// A demangled name without return type, template arguments and parameters, its namespaces
/// included.
pub fn short_function_name(name: &str) -> String {
    let mut function = String::new();
    let mut brackets = OpenBrackets::default();
    let mut rest = name;
    while let Some(character) = rest.chars().next() {
        // Anonymous namespaces look like argument lists, so they are removed from names.
        let anonymous =
            ["(anonymous namespace)::", "<unnamed>::"].iter().find(|word| rest.starts_with(**word));
        if let Some(word) = anonymous {
            rest = &rest[word.len()..];
            continue;
        }
        if character == '(' && brackets.are_all_closed() && !function.is_empty() {
            break;
        }
        match brackets.is_outside(character) {
            true if character == ' ' => function.clear(),
            true => function.push(character),
            false => {}
        }
        rest = &rest[character.len_utf8()..];
    }
    if function.is_empty() { name.to_owned() } else { function }
}

/// Returns whether copies with this label are migrations of unified memory, which no call launches.
pub fn is_migration(label: &str) -> bool {
    let label = label.to_ascii_lowercase();
    label.starts_with("unified") || label.contains("uvm")
}

/// Returns the communication of copies with this label, if they go from one GPU to another.
fn communication_of_copies(label: &str) -> Option<CommunicationKind> {
    let (library, collective) = (CommunicationLibrary::Peer, CollectiveKind::SendRecv);
    ["Peer-to-Peer", "CUDA_MEMCPY_KIND_PTOP"]
        .contains(&label)
        .then_some(CommunicationKind { library, collective })
}

/// The classes of the operations of a trace.
#[derive(Debug, Clone)]
pub struct OperationClasses<'a> {
    all: AllOperations<'a>,
    trace: &'a Trace,
    /// Communication that each kernel function does, by function number.
    kernels: Vec<Option<CommunicationKind>>,
    /// The labels of copies that are migrations.
    migrations: Vec<NameId>,
    /// Labels of copies from GPU to GPU, each with its kind of communication.
    peers: Vec<(NameId, CommunicationKind)>,
    /// By copy, the collective of MPI around its launch; empty where no range is one of MPI.
    copies: Vec<Option<CommunicationKind>>,
}

impl<'a> OperationClasses<'a> {
    /// Classifies by names.
    pub fn new(trace: &'a Trace) -> Self {
        let communication = |function: &crate::model::gpu::KernelFunction| {
            CommunicationKind::from_kernel_name(trace.names.text(function.demangled))
        };
        let mut labels = trace.copies.kind.clone();
        labels.sort_unstable();
        labels.dedup();
        let peer =
            |&label: &NameId| Some((label, communication_of_copies(trace.names.text(label))?));
        let peers = labels.iter().filter_map(peer).collect();
        labels.retain(|&label| is_migration(trace.names.text(label)));
        Self {
            all: AllOperations::new(trace),
            trace,
            kernels: trace.functions.iter().map(communication).collect(),
            migrations: labels,
            peers,
            copies: Vec::new(),
        }
    }

    /// Counts copies as communication where `in_range` finds a range of MPI around their launch.
    pub fn with_mpi_ranges(
        mut self,
        in_range: impl Fn(OperationId) -> Option<CommunicationKind>,
    ) -> Self {
        let first = self.trace.kernels.on_gpu.len();
        let copy = |row: usize| in_range(u32::try_from(first + row).ok()?);
        self.copies = (0..self.trace.copies.on_gpu.len()).map(copy).collect();
        self
    }

    pub fn class_of_operation(&self, id: OperationId) -> OperationClass {
        match self.all.kind_and_row(id) {
            (OperationKind::Kernel | OperationKind::Copy, _)
                if self.communication_of_operation(id).is_some() =>
            {
                OperationClass::Communication
            }
            (OperationKind::Kernel, _) => OperationClass::Compute,
            (OperationKind::Copy, row)
                if self.migrations.contains(&self.trace.copies.kind[row]) =>
            {
                OperationClass::Migration
            }
            (OperationKind::Copy, _) => OperationClass::Copy,
            (OperationKind::Set, _) => OperationClass::Set,
            (OperationKind::Graph, _) => OperationClass::Graph,
        }
    }

    /// Library and kind of an operation's communication; `None` if the operation does not
    /// communicate.
    pub fn communication_of_operation(&self, id: OperationId) -> Option<CommunicationKind> {
        match self.all.kind_and_row(id) {
            (OperationKind::Kernel, row) => {
                self.kernels[self.trace.kernels.function.at(row) as usize]
            }
            (OperationKind::Copy, row) => self.copies.get(row).copied().flatten().or_else(|| {
                let label = self.trace.copies.kind[row];
                self.peers.iter().find(|(peer, _)| *peer == label).map(|(_, found)| *found)
            }),
            _ => None,
        }
    }

    /// Library and kind of the communication of a kernel function.
    pub fn communication_of(&self, function: u32) -> Option<CommunicationKind> {
        self.kernels[function as usize]
    }

    /// Number of operations that are page migrations.
    pub fn migration_count(&self) -> usize {
        let kinds = &self.trace.copies.kind;
        match self.migrations.is_empty() {
            true => 0,
            false => kinds.iter().filter(|kind| self.migrations.contains(kind)).count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_readable_function_name_has_no_types_and_keeps_namespaces() {
        assert_eq!(short_function_name("ampere_sgemm_128x64_tn"), "ampere_sgemm_128x64_tn");
        assert_eq!(
            short_function_name(
                "void c10d::symmetric_memory::(anonymous namespace)::one_shot<float, 8>(float *)"
            ),
            "c10d::symmetric_memory::one_shot"
        );
        assert_eq!(short_function_name("void <unnamed>::softmax<float>(float *)"), "softmax");
        assert_eq!(short_function_name("std::enable_if<(bool)1, void>::type f<int>(int)"), "f");
        assert_eq!(
            short_function_name(
                "std::enable_if<(((8)>(0)))&&T<B>::exists, void>::type v::norm<B, 8>(B *)"
            ),
            "v::norm"
        );
        assert_eq!(short_function_name("(odd)"), "(odd)");
        assert_eq!(short_function_name(""), "");
    }

    #[test]
    fn a_kernel_is_communication_only_by_its_function_name() {
        let found = |name: &str| {
            let of_name = CommunicationKind::from_kernel_name(name)?;
            Some((of_name.library, of_name.collective))
        };
        use CollectiveKind::{AllGather, AllReduce, AllToAll, ReduceScatter, SendRecv, Unknown};
        let nccl = [
            (
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                AllReduce,
            ),
            ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long)", AllGather),
            ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", ReduceScatter),
            ("ncclDevKernel_SendRecv(x)", SendRecv),
            ("ncclDevKernel_Generic_4(x)", Unknown),
        ];
        for (name, collective) in nccl {
            assert_eq!(found(name), Some((CommunicationLibrary::Nccl, collective)), "{name}");
        }
        let custom = [
            "void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 8>(void *)",
            "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData *)",
            "void tensorrt_llm::kernels::oneShotAllReduceKernel<float, 4>(Params)",
        ];
        for name in custom {
            assert_eq!(found(name), Some((CommunicationLibrary::Custom, AllReduce)), "{name}");
        }
        let nvshmem = [
            "nvshmemi_alltoall_kernel<int>(int)",
            "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16 *)",
            "void dpsk::ep::internode::dispatch<false, 8>(int4*, float*)",
            "void deep_ep::internode_ll::dispatch<true, 7168>(void*)",
        ];
        for name in nvshmem {
            assert_eq!(found(name), Some((CommunicationLibrary::Nvshmem, AllToAll)), "{name}");
        }
        let compute = [
            "void at::native::reduce_kernel<512, 1, ReduceOp<float>>(T3)",
            "void cublasLt::splitKreduce_kernel<32, 16>(cublasSplitKParams<float>)",
            "void fused_gemm<ncclDevKernel_AllReduce>(ncclComm *)",
            "void scatter_reduce(float *)",
            "void deep_ep::layout::get_dispatch_layout<256>(long const*)",
            "void moe::step::internodes(int)",
        ];
        for name in compute {
            assert_eq!(found(name), None, "{name}");
        }
    }

    #[test]
    fn an_mpi_range_is_named_after_its_collective() {
        let found =
            |name: &str| CommunicationKind::from_range_name(name).map(|found| found.collective);
        assert_eq!(found("MPI_Allreduce"), Some(CollectiveKind::AllReduce));
        assert_eq!(found("MPI:MPI_Isend"), Some(CollectiveKind::SendRecv));
        assert_eq!(found("forward"), None);
    }

    #[test]
    fn copies_between_gpus_and_barrier_kernels_count_as_communication() {
        let copy = communication_of_copies("Peer-to-Peer").unwrap();
        assert_eq!(
            (copy.library, copy.collective),
            (CommunicationLibrary::Peer, CollectiveKind::SendRecv)
        );
        assert_eq!(communication_of_copies("Device-to-Device"), None);
        let barrier = CommunicationKind::from_kernel_name("attention_ring_barrier").unwrap();
        assert_eq!(barrier.collective, CollectiveKind::Barrier);
    }

    #[test]
    fn copies_of_unified_memory_count_as_migrations() {
        assert!(is_migration("Unified Host-to-Device"));
        assert!(is_migration("CUDA_MEMCPY_KIND_UVM_DTOH"));
        assert!(!is_migration("Host-to-Device"));
    }
}
