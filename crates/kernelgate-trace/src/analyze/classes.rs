//! Classifies each GPU operation of a trace: compute, communication, copy, page migration, memset
//! or whole graph.
//!
//! Kernels are classified by the name of their function alone, because template arguments and
//! parameters may name other functions' types. This module does not determine what a compute kernel
//! computes; `kernel_kinds` does.

use crate::analyze::operations::{AllGpuOperations, GpuOperationId, GpuOperationKind};
use crate::model::Trace;
pub use crate::model::collective::CollectiveKind;
use crate::model::interned_names::InternedNameId;

/// Class of a GPU operation in a trace: compute, whole graph, communication, page migration, copy
/// or memset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OperationClass {
    /// A kernel that computes, and does not communicate.
    ComputeKernel,
    /// A launch of a whole CUDA graph of which the trace does not record the single kernels.
    CudaGraphLaunch,
    /// A kernel or a copy that exchanges data with other GPUs.
    Communication,
    /// A migration of pages of managed memory, which the driver moves on demand.
    PageMigration,
    /// A copy of memory that the traced program requested.
    Copy,
    /// A memset: memory is filled with one value.
    Memset,
}

impl OperationClass {
    /// All operation classes; where operations of several classes run at the same time, the time
    /// counts for the first class in this order.
    pub const ALL_OPERATION_CLASSES: [Self; 6] = [
        Self::ComputeKernel,
        Self::CudaGraphLaunch,
        Self::Communication,
        Self::PageMigration,
        Self::Copy,
        Self::Memset,
    ];

    /// Returns the label of the operation class or communication library in printed output.
    pub const fn printed_operation_class(self) -> &'static str {
        match self {
            Self::ComputeKernel => "compute",
            Self::CudaGraphLaunch => "graph, recorded whole",
            Self::Communication => "communication",
            Self::PageMigration => "page migration",
            Self::Copy => "copy",
            Self::Memset => "memset",
        }
    }
}

/// Library that moves data between GPUs, as far as the names of kernels, copies and ranges
/// distinguish libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CommunicationLibrary {
    /// NCCL and RCCL, whose kernels have the same names.
    NcclOrRccl,
    /// NVSHMEM and libraries that communicate through it.
    Nvshmem,
    /// All-reduce and exchange kernels that come with frameworks such as PyTorch or vLLM.
    FrameworkKernels,
    /// Copies by MPI, which were launched inside NVTX ranges named after MPI calls.
    Mpi,
    /// Copies from the memory of one GPU to the memory of another GPU.
    PeerCopies,
}

impl CommunicationLibrary {
    /// Returns the label of this value in printed output.
    pub const fn printed_communication_library(self) -> &'static str {
        match self {
            Self::NcclOrRccl => "NCCL/RCCL",
            Self::Nvshmem => "NVSHMEM",
            Self::FrameworkKernels => "custom",
            Self::Mpi => "MPI",
            Self::PeerCopies => "peer",
        }
    }
}

/// The library and the collective operation of a kernel or copy that communicates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommunicationLibraryAndCollective {
    pub library: CommunicationLibrary,
    pub collective: CollectiveKind,
}

/// Words in lower case by which a kernel's function name shows a communication library; the first
/// library with a matching word is chosen.
const KERNEL_NAME_WORDS_BY_LIBRARY: &[(CommunicationLibrary, &[&str])] = &[
    (
        CommunicationLibrary::NcclOrRccl,
        &["nccldevkernel", "ncclkernel", "rccldevkernel", "rcclkernel", "msccl"],
    ),
    (
        CommunicationLibrary::Nvshmem,
        &["nvshmem", "rocshmem", "ep::internode::", "ep::internode_ll::", "ep::intranode::"],
    ),
    (
        CommunicationLibrary::FrameworkKernels,
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

impl CommunicationLibraryAndCollective {
    /// Returns the communication of a kernel from its demangled name; `None` if the kernel
    /// computes.
    pub fn communication_from_kernel_name(name: &str) -> Option<CommunicationLibraryAndCollective> {
        let function = function_name_with_namespaces(name).to_ascii_lowercase();
        let found = |(_, words): &&(CommunicationLibrary, &[&str])| {
            words.iter().any(|w| function.contains(w))
        };
        let (library, _) = KERNEL_NAME_WORDS_BY_LIBRARY.iter().find(found)?;
        Some(Self { library: *library, collective: CollectiveKind::from_kernel_name(&function) })
    }

    /// Returns the communication of copies that were launched inside an NVTX range named after an
    /// MPI call, such as `MPI_Allreduce`.
    pub fn communication_from_mpi_range_name(
        name: &str,
    ) -> Option<CommunicationLibraryAndCollective> {
        let call = name.rsplit(':').next()?.trim().strip_prefix("MPI_")?;
        Some(Self {
            library: CommunicationLibrary::Mpi,
            collective: CollectiveKind::from_kernel_name(call),
        })
    }
}

/// Brackets of a demangled name that are open at the current character; `<` and `>` inside other
/// brackets may compare numbers.
#[derive(Debug, Default)]
pub struct OpenNameBrackets {
    open_brackets: Vec<char>,
    previous_character: char,
}

impl OpenNameBrackets {
    /// Returns whether no bracket of the name is open.
    pub fn are_all_brackets_closed(&self) -> bool {
        self.open_brackets.is_empty()
    }

    /// Takes the next character of the name; returns whether the character is outside all brackets
    /// and not itself a bracket.
    pub fn take_character_and_check_outside(&mut self, character: char) -> bool {
        let before = std::mem::replace(&mut self.previous_character, character);
        let named = before.is_ascii_alphanumeric() || ['_', ':'].contains(&before);
        match character {
            '(' | '[' | '{' => self.open_brackets.push(character),
            '<' if self.open_brackets.is_empty() || named => self.open_brackets.push(character),
            '>' if self.open_brackets.last() == Some(&'<') && before != '-' => {
                _ = self.open_brackets.pop()
            }
            ')' | ']' | '}' => {
                // A closing bracket also closes every `<` after its opening bracket, because such a
                // `<` compares numbers.
                while self.open_brackets.pop().is_some_and(|open| open == '<') {}
            }
            '<' | '>' => {}
            _ => return self.open_brackets.is_empty(),
        }
        false
    }
}

/// Returns a demangled name without return type, template arguments and parameters; its namespaces
/// are kept.
pub fn function_name_with_namespaces(name: &str) -> String {
    let mut function = String::new();
    let mut brackets = OpenNameBrackets::default();
    let mut rest = name;
    while let Some(character) = rest.chars().next() {
        // Anonymous namespaces are removed from the name, because they look like argument lists.
        let anonymous =
            ["(anonymous namespace)::", "<unnamed>::"].iter().find(|word| rest.starts_with(**word));
        if let Some(word) = anonymous {
            rest = &rest[word.len()..];
            continue;
        }
        if character == '(' && brackets.are_all_brackets_closed() && !function.is_empty() {
            break;
        }
        match brackets.take_character_and_check_outside(character) {
            true if character == ' ' => function.clear(),
            true => function.push(character),
            false => {}
        }
        rest = &rest[character.len_utf8()..];
    }
    if function.is_empty() { name.to_owned() } else { function }
}

/// Returns whether copies with this label are page migrations of unified memory, which no host call
/// launches.
pub fn is_page_migration_label(label: &str) -> bool {
    let label = label.to_ascii_lowercase();
    label.starts_with("unified") || label.contains("uvm")
}

/// Returns the communication of copies with this label, if the copies go from one GPU to another.
fn communication_of_copies_with_label(label: &str) -> Option<CommunicationLibraryAndCollective> {
    let (library, collective) = (CommunicationLibrary::PeerCopies, CollectiveKind::SendRecv);
    ["Peer-to-Peer", "CUDA_MEMCPY_KIND_PTOP"]
        .contains(&label)
        .then_some(CommunicationLibraryAndCollective { library, collective })
}

/// The class and the communication of each GPU operation of a trace.
#[derive(Debug, Clone)]
pub struct OperationClassesOfTrace<'a> {
    operations: AllGpuOperations<'a>,
    trace: &'a Trace,
    /// Communication of each kernel function, by function number; `None` if the function computes.
    collective_of_kernel: Vec<Option<CommunicationLibraryAndCollective>>,
    /// Labels of copies that are page migrations.
    page_migration_names: Vec<InternedNameId>,
    /// Labels of copies from GPU to GPU, each with its library and collective.
    peer_copy_names: Vec<(InternedNameId, CommunicationLibraryAndCollective)>,
    /// For each copy, the MPI collective in whose range the copy was launched; empty if the trace
    /// has no MPI range.
    collective_of_copy: Vec<Option<CommunicationLibraryAndCollective>>,
}

impl<'a> OperationClassesOfTrace<'a> {
    /// Classifies by names.
    pub fn classify_operations_by_name(trace: &'a Trace) -> Self {
        let communication = |function: &crate::model::gpu::KernelFunctionName| {
            CommunicationLibraryAndCollective::communication_from_kernel_name(
                trace.names.text_of_name(function.demangled_name),
            )
        };
        let mut labels = trace.copies.direction_label.clone();
        labels.sort_unstable();
        labels.dedup();
        let peer = |&label: &InternedNameId| {
            Some((label, communication_of_copies_with_label(trace.names.text_of_name(label))?))
        };
        let peers = labels.iter().filter_map(peer).collect();
        labels.retain(|&label| is_page_migration_label(trace.names.text_of_name(label)));
        Self {
            operations: AllGpuOperations::number_operations_of_trace(trace),
            trace,
            collective_of_kernel: trace.functions.iter().map(communication).collect(),
            page_migration_names: labels,
            peer_copy_names: peers,
            collective_of_copy: Vec::new(),
        }
    }

    /// Also classifies a copy as communication if `in_range` finds an MPI range around its launch.
    pub fn classify_copies_in_mpi_ranges(
        mut self,
        in_range: impl Fn(GpuOperationId) -> Option<CommunicationLibraryAndCollective>,
    ) -> Self {
        let first = self.trace.kernels.on_gpu.operation_count();
        let copy = |row: usize| in_range(u32::try_from(first + row).ok()?);
        self.collective_of_copy =
            (0..self.trace.copies.on_gpu.operation_count()).map(copy).collect();
        self
    }

    pub fn class_of_gpu_operation(&self, id: GpuOperationId) -> OperationClass {
        match self.operations.kind_and_table_row(id) {
            (GpuOperationKind::Kernel | GpuOperationKind::Copy, _)
                if self.communication_of_operation(id).is_some() =>
            {
                OperationClass::Communication
            }
            (GpuOperationKind::Kernel, _) => OperationClass::ComputeKernel,
            (GpuOperationKind::Copy, row)
                if self.page_migration_names.contains(&self.trace.copies.direction_label[row]) =>
            {
                OperationClass::PageMigration
            }
            (GpuOperationKind::Copy, _) => OperationClass::Copy,
            (GpuOperationKind::Memset, _) => OperationClass::Memset,
            (GpuOperationKind::CudaGraphLaunch, _) => OperationClass::CudaGraphLaunch,
        }
    }

    /// Returns library and collective of an operation; `None` if the operation does not
    /// communicate.
    pub fn communication_of_operation(
        &self,
        id: GpuOperationId,
    ) -> Option<CommunicationLibraryAndCollective> {
        match self.operations.kind_and_table_row(id) {
            (GpuOperationKind::Kernel, row) => {
                self.collective_of_kernel[self.trace.kernels.function_index.at(row) as usize]
            }
            (GpuOperationKind::Copy, row) => {
                self.collective_of_copy.get(row).copied().flatten().or_else(|| {
                    let label = self.trace.copies.direction_label[row];
                    self.peer_copy_names
                        .iter()
                        .find(|(peer, _)| *peer == label)
                        .map(|(_, found)| *found)
                })
            }
            _ => None,
        }
    }

    /// Returns library and collective of a kernel function; `None` if the function computes.
    pub fn communication_of_kernel_function(
        &self,
        function: u32,
    ) -> Option<CommunicationLibraryAndCollective> {
        self.collective_of_kernel[function as usize]
    }

    /// Number of page migrations in the trace.
    pub fn page_migration_count(&self) -> usize {
        let kinds = &self.trace.copies.direction_label;
        match self.page_migration_names.is_empty() {
            true => 0,
            false => kinds.iter().filter(|kind| self.page_migration_names.contains(kind)).count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_name_has_no_types_and_keeps_its_namespaces() {
        assert_eq!(
            function_name_with_namespaces("ampere_sgemm_128x64_tn"),
            "ampere_sgemm_128x64_tn"
        );
        assert_eq!(
            function_name_with_namespaces(
                "void c10d::symmetric_memory::(anonymous namespace)::one_shot<float, 8>(float *)"
            ),
            "c10d::symmetric_memory::one_shot"
        );
        assert_eq!(
            function_name_with_namespaces("void <unnamed>::softmax<float>(float *)"),
            "softmax"
        );
        assert_eq!(
            function_name_with_namespaces("std::enable_if<(bool)1, void>::type f<int>(int)"),
            "f"
        );
        assert_eq!(
            function_name_with_namespaces(
                "std::enable_if<(((8)>(0)))&&T<B>::exists, void>::type v::norm<B, 8>(B *)"
            ),
            "v::norm"
        );
        assert_eq!(function_name_with_namespaces("(odd)"), "(odd)");
        assert_eq!(function_name_with_namespaces(""), "");
    }

    #[test]
    fn a_kernel_is_communication_only_by_its_function_name() {
        let found = |name: &str| {
            let of_name = CommunicationLibraryAndCollective::communication_from_kernel_name(name)?;
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
            assert_eq!(found(name), Some((CommunicationLibrary::NcclOrRccl, collective)), "{name}");
        }
        let custom = [
            "void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 8>(void *)",
            "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData *)",
            "void tensorrt_llm::kernels::oneShotAllReduceKernel<float, 4>(Params)",
        ];
        for name in custom {
            assert_eq!(
                found(name),
                Some((CommunicationLibrary::FrameworkKernels, AllReduce)),
                "{name}"
            );
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
    fn an_mpi_range_name_gives_its_collective() {
        let found = |name: &str| {
            CommunicationLibraryAndCollective::communication_from_mpi_range_name(name)
                .map(|found| found.collective)
        };
        assert_eq!(found("MPI_Allreduce"), Some(CollectiveKind::AllReduce));
        assert_eq!(found("MPI:MPI_Isend"), Some(CollectiveKind::SendRecv));
        assert_eq!(found("forward"), None);
    }

    #[test]
    fn copies_between_gpus_and_barrier_kernels_are_communication() {
        let copy = communication_of_copies_with_label("Peer-to-Peer").unwrap();
        assert_eq!(
            (copy.library, copy.collective),
            (CommunicationLibrary::PeerCopies, CollectiveKind::SendRecv)
        );
        assert_eq!(communication_of_copies_with_label("Device-to-Device"), None);
        let barrier = CommunicationLibraryAndCollective::communication_from_kernel_name(
            "attention_ring_barrier",
        )
        .unwrap();
        assert_eq!(barrier.collective, CollectiveKind::Barrier);
    }

    #[test]
    fn copies_of_unified_memory_are_page_migrations() {
        assert!(is_page_migration_label("Unified Host-to-Device"));
        assert!(is_page_migration_label("CUDA_MEMCPY_KIND_UVM_DTOH"));
        assert!(!is_page_migration_label("Host-to-Device"));
    }
}
