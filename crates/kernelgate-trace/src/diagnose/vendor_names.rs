//! Words for tools, options and API functions in a diagnosis, chosen by the trace's GPU vendor and
//! recorder.

use crate::model::{Trace, TraceRecorder, TracedDevice};

/// The vendor of the GPUs in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuVendor {
    /// CUDA.
    Nvidia,
    /// HIP.
    Amd,
}

/// GPU vendor and recorder of a trace, which select the terms and advice in a diagnosis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceVendorAndRecorder {
    /// The vendor of the GPUs in the trace.
    pub vendor: GpuVendor,
    /// The profiler that recorded the trace.
    pub recorder: TraceRecorder,
}

/// Substrings that identify AMD GPUs in device names.
const AMD_DEVICE_NAME_PARTS: &[&str] = &["AMD", "Instinct", "Radeon", "gfx"];
/// Names of API functions that exist only in AMD's HIP.
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

/// Whether the name of a traced device shows an AMD GPU.
pub(super) fn is_amd_device_name(device: &TracedDevice) -> bool {
    AMD_DEVICE_NAME_PARTS.iter().any(|part| device.device_name.contains(part))
}

impl TraceVendorAndRecorder {
    /// Detects the GPU vendor from device names, or from called API functions if no device is
    /// named.
    pub fn from_names_in_trace(trace: &Trace) -> Self {
        let called = || {
            HIP_ONLY_FUNCTIONS
                .iter()
                .any(|function| trace.names.find_interned_text(function).is_some())
        };
        let amd = trace.devices.iter().any(is_amd_device_name)
            || (trace.devices.iter().all(|device| device.device_name.is_empty()) && called());
        let vendor = if amd { GpuVendor::Amd } else { GpuVendor::Nvidia };
        Self { vendor, recorder: trace.recorder }
    }

    fn text_for_vendor(self, nvidia: &'static str, amd: &'static str) -> &'static str {
        match self.vendor {
            GpuVendor::Nvidia => nvidia,
            GpuVendor::Amd => amd,
        }
    }

    /// The GPU vendor's term for a captured graph of launches: "CUDA graph" or "HIP graph".
    pub fn cuda_or_hip_graph_term(self) -> &'static str {
        self.text_for_vendor("CUDA graph", "HIP graph")
    }

    /// The GPU vendor's term for a group of threads that run in lockstep: "warp" or "wavefront".
    pub fn warp_or_wavefront_term(self) -> &'static str {
        self.text_for_vendor("warp", "wavefront")
    }

    /// The GPU vendor's term for streaming multiprocessors: "multiprocessors" or "compute units".
    pub fn multiprocessors_or_compute_units_term(self) -> &'static str {
        self.text_for_vendor("multiprocessors", "compute units")
    }

    /// Names the API call or PyTorch option that allocates page-locked host memory.
    pub fn pinned_memory_allocation_advice(self) -> &'static str {
        match (self.recorder, self.vendor) {
            (TraceRecorder::PytorchOrChromeTrace, _) => "pin_memory=True and non_blocking=True",
            (_, GpuVendor::Nvidia) => "cudaHostAlloc, or pin_memory=True in PyTorch",
            (_, GpuVendor::Amd) => "hipHostMalloc, or pin_memory=True in PyTorch",
        }
    }

    /// Names the API calls that move managed memory pages to a device before kernels use the pages.
    pub fn managed_memory_prefetch_advice(self) -> &'static str {
        self.text_for_vendor(
            "cudaMemPrefetchAsync, cudaMemAdvise",
            "hipMemPrefetchAsync, hipMemAdvise",
        )
    }

    /// Returns advice on how to record GPU operations together with the host API calls that
    /// launched them.
    pub fn advice_to_record_launch_calls(self) -> &'static str {
        match (self.recorder, self.vendor) {
            (TraceRecorder::NsightSystems, _) => "record with nsys profile --trace=cuda,nvtx",
            (TraceRecorder::PytorchOrChromeTrace, _) => {
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

    /// Returns advice on how to record the kernels' grid and block sizes and the device
    /// descriptions.
    pub fn advice_to_record_launch_shapes(self) -> &'static str {
        match (self.recorder, self.vendor) {
            (_, GpuVendor::Amd) => {
                "record with rocprofv3 --kernel-trace, which has grid and workgroup"
            }
            (TraceRecorder::PytorchOrChromeTrace, _) => {
                "record with a version of PyTorch whose profiler writes grid, block and \
                 deviceProperties, or with nsys profile --trace=cuda"
            }
            _ => "record with nsys profile --trace=cuda, and export with --type sqlite",
        }
    }

    /// Returns advice on how to record allocations.
    pub fn advice_to_record_allocations(self) -> &'static str {
        match (self.recorder, self.vendor) {
            (TraceRecorder::KernelgateCupti, _) => "record with kernelgate profile",
            (TraceRecorder::PytorchOrChromeTrace, _) | (_, GpuVendor::Amd) => {
                "record with torch.profiler.profile(profile_memory=True)"
            }
            _ => "record with nsys profile --cuda-memory-usage=true",
        }
    }

    /// Returns advice on how to record migrations and page faults of managed memory; empty for AMD,
    /// where no recorder records them.
    pub fn advice_to_record_page_migrations(self) -> &'static str {
        let nsys = "record with nsys profile --cuda-um-gpu-page-faults=true \
                    --cuda-um-cpu-page-faults=true";
        self.text_for_vendor(nsys, "")
    }

    /// Returns advice on how to record samples of hardware counters along the timeline.
    pub fn advice_to_sample_hardware_counters(self) -> &'static str {
        match (self.recorder, self.vendor) {
            (_, GpuVendor::Amd) => "sample with rocprofv3 --pmc, or rocprof-compute profile",
            (TraceRecorder::NsightSystems, _) => "record with --gpu-metrics-devices=all",
            _ => "record with nsys profile --gpu-metrics-devices=all",
        }
    }

    /// Returns advice on how to profile hardware counters of single kernel launches.
    pub fn advice_to_profile_single_kernel_launches(self) -> &'static str {
        self.text_for_vendor(
            "measure with: ncu --csv --page details --clock-control none --set full -k regex:KERNEL \
             PROGRAM > ncu.csv",
            "measure with: rocprof-compute profile -n NAME -- PROGRAM",
        )
    }

    /// Name of the GPU vendor's profiler that shows why the instructions of a kernel stall.
    pub fn kernel_profiler_name(self) -> &'static str {
        self.text_for_vendor("ncu", "rocprof-compute")
    }

    /// Returns advice on how to record the kernels inside a CUDA graph one by one.
    pub fn advice_to_record_graph_nodes(self) -> &'static str {
        match self.recorder {
            TraceRecorder::NsightSystems => {
                "record with --cuda-graph-trace=node to see the kernels in graphs; it costs time a \
                 node"
            }
            _ => "record the nodes of graphs to see their kernels",
        }
    }
}
