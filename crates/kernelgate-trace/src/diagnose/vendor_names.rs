//! Names of tools, options and functions for the vendor and the recorder of a trace.

use crate::model::{Trace, TraceRecorder, TracedDevice};

/// The vendor of the trace's GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuVendor {
    /// CUDA.
    Nvidia,
    /// HIP.
    Amd,
}

/// GPU vendor and recorder of a trace, which decide about words and advice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TracePlatform {
    /// The maker of the devices.
    pub vendor: GpuVendor,
    /// Recorder that wrote the trace.
    pub recorder: TraceRecorder,
}

/// Parts of the names of AMD's devices.
const AMD_DEVICE_WORDS: &[&str] = &["AMD", "Instinct", "Radeon", "gfx"];
/// Names of functions that only AMD's HIP has.
const HIP_ONLY_FUNCTIONS: &[&str] = &[
    "hipLaunchKernel",
    "hipModuleLaunchKernel",
    "hipExtModuleLaunchKernel",
    "hipGraphLaunch",
    "hipMemcpyAsync",
    "hipMemcpyWithStream",
    "hipDeviceSynchronize",
    "hipStreamSynchronize",
];

/// Whether the device is a GPU of AMD.
pub(super) fn is_amd_device(device: &TracedDevice) -> bool {
    AMD_DEVICE_WORDS.iter().any(|part| device.name.contains(part))
}

impl TracePlatform {
    /// Finds vendor and recorder from the names in a trace.
    pub fn new(trace: &Trace) -> Self {
        let called =
            || HIP_ONLY_FUNCTIONS.iter().any(|function| trace.names.find(function).is_some());
        let amd = trace.devices.iter().any(is_amd_device)
            || (trace.devices.iter().all(|device| device.name.is_empty()) && called());
        let vendor = if amd { GpuVendor::Amd } else { GpuVendor::Nvidia };
        Self { vendor, recorder: trace.recorder }
    }

    fn pick(self, nvidia: &'static str, amd: &'static str) -> &'static str {
        match self.vendor {
            GpuVendor::Nvidia => nvidia,
            GpuVendor::Amd => amd,
        }
    }

    /// A graph of launches.
    pub fn graph_term(self) -> &'static str {
        self.pick("CUDA graph", "HIP graph")
    }

    /// The vendor's word for threads that run in lockstep: "warp".
    pub fn warp_term(self) -> &'static str {
        self.pick("warp", "wavefront")
    }

    /// A group of cores that share registers.
    pub fn multiprocessor_term(self) -> &'static str {
        self.pick("multiprocessors", "compute units")
    }

    /// Advice on how to allocate page-locked memory.
    pub fn pinned_memory_advice(self) -> &'static str {
        match (self.recorder, self.vendor) {
            (TraceRecorder::Chrome, _) => "pin_memory=True and non_blocking=True",
            (_, GpuVendor::Nvidia) => "cudaHostAlloc, or pin_memory=True in PyTorch",
            (_, GpuVendor::Amd) => "hipHostMalloc, or pin_memory=True in PyTorch",
        }
    }

    /// How to move managed pages before they are used.
    pub fn prefetch_advice(self) -> &'static str {
        self.pick("cudaMemPrefetchAsync, cudaMemAdvise", "hipMemPrefetchAsync, hipMemAdvise")
    }

    /// Advice on how to record GPU operations and the calls that launch them.
    pub fn record_launches_advice(self) -> &'static str {
        match (self.recorder, self.vendor) {
            (TraceRecorder::NsightSystems, _) => "record with nsys profile --trace=cuda,nvtx",
            (TraceRecorder::Chrome, _) => {
                "record with torch.profiler.profile(activities=[ProfilerActivity.CPU, \
                 ProfilerActivity.CUDA])"
            }
            (TraceRecorder::NsightCompute, _) => {
                "record a timeline with nsys profile --trace=cuda,nvtx"
            }
            (_, GpuVendor::Amd) => "record with rocprofv3 --runtime-trace",
            (_, GpuVendor::Nvidia) => "record with kernelgate profile, or nsys --trace=cuda,nvtx",
        }
    }

    /// How to record launch shapes and the description of the devices.
    pub fn record_shapes_advice(self) -> &'static str {
        match (self.recorder, self.vendor) {
            (_, GpuVendor::Amd) => {
                "record with rocprofv3 --kernel-trace, which has grid and workgroup"
            }
            (TraceRecorder::Chrome, _) => {
                "record with a version of PyTorch whose profiler writes grid, block and \
                 deviceProperties, or with nsys profile --trace=cuda"
            }
            _ => "record with nsys profile --trace=cuda, and export with --type sqlite",
        }
    }

    /// How to record allocations.
    pub fn record_memory_advice(self) -> &'static str {
        match (self.recorder, self.vendor) {
            (TraceRecorder::Cupti, _) => "record with kernelgate profile",
            (TraceRecorder::Chrome, _) | (_, GpuVendor::Amd) => {
                "record with torch.profiler.profile(profile_memory=True)"
            }
            _ => "record with nsys profile --cuda-memory-usage=true",
        }
    }

    /// Advice on how to record migrations and faults of managed pages; empty if no recorder can.
    pub fn record_migrations_advice(self) -> &'static str {
        let nsys = "record with nsys profile --cuda-um-gpu-page-faults=true \
                    --cuda-um-cpu-page-faults=true";
        self.pick(nsys, "")
    }

    /// Advice on how to sample hardware counters over time.
    pub fn sample_counters_advice(self) -> &'static str {
        match (self.recorder, self.vendor) {
            (_, GpuVendor::Amd) => "sample with rocprofv3 --pmc, or rocprof-compute profile",
            (TraceRecorder::NsightSystems, _) => "record with --gpu-metrics-devices=all",
            _ => "record with nsys profile --gpu-metrics-devices=all",
        }
    }

    /// Advice on how to profile single kernel launches.
    pub fn profile_single_launches_advice(self) -> &'static str {
        self.pick(
            "measure with: ncu --csv --page details --clock-control none --set full -k regex:KERNEL \
             PROGRAM > ncu.csv",
            "measure with: rocprof-compute profile -n NAME -- PROGRAM",
        )
    }

    /// The tool that shows why instructions stall.
    pub fn kernel_profiler_name(self) -> &'static str {
        self.pick("ncu", "rocprof-compute")
    }

    /// How to see the kernels inside graphs.
    pub fn advice_to_trace_graph_nodes(self) -> &'static str {
        match self.recorder {
            TraceRecorder::NsightSystems => {
                "record with --cuda-graph-trace=node to see the kernels in graphs; it costs time a \
                 node"
            }
            _ => "record the nodes of graphs to see their kernels",
        }
    }
}
