//! Compares all recorded neural networks: host and device time, largest kernels, inference and
//! training, attention, and utilization.
//!
//! A network is a case whose recording has training or inference phases
//! (`kernelgate_trace::diagnose::network`).

mod charts;
mod tables;

pub use charts::network_chart_files;
pub use tables::all_network_tables_text;

use kernelgate::protocol::CuptiCaseRecording;
use kernelgate::workload::ThroughputItemUnit;
use kernelgate_trace::diagnose::network::{
    MeanKernelUsePerPass, PhasesOfNetwork, TrainingPhase, total_kernel_ns_per_pass,
};
use kernelgate_trace::diagnose::{KernelWorkClass, RangeTreeRow, TraceDiagnosis};
use serde_json::{Value, json};

use crate::report::utilization::MatrixThroughputShare;

/// A recorded neural network; its times are those of one launch, in nanoseconds.
pub struct RecordedNetwork {
    /// Id of the case.
    pub case_id: String,
    /// Workload family, operation and axes: the first three parts of the case id.
    problem_id: String,
    /// Implementation and cache state: the rest of the case id.
    implementation_and_cache_state: String,
    network: PhasesOfNetwork,
    /// Host time of one launch, from before the first launch to the end of a wait after all
    /// launches, divided by their number.
    host_ns_per_launch: f64,
    /// Host time of the call that launches the network, nanoseconds.
    host_launch_call_ns: f64,
    /// Time from the first start to the last end of an operation on the GPU, over all launches,
    /// divided by their number.
    gpu_span_ns_per_launch: f64,
    /// The part of `gpu_span_ns_per_launch` in which any operation ran on the GPU.
    gpu_busy_ns_per_launch: f64,
    /// Time from the first start to the last end of the GPU operations of one launch, in
    /// nanoseconds.
    single_launch_gpu_span_ns: f64,
    /// Time per launch in which the GPU was idle between operations, by cause, the longest first.
    idle_ns_by_cause: Vec<(String, f64)>,
    samples_per_s: Option<f64>,
    sample_unit: ThroughputItemUnit,
    utilization: MatrixThroughputShare,
    /// Text of the published peak throughput on which the utilization is based.
    published_peak_text: Option<String>,
}

impl RecordedNetwork {
    /// Makes the numbers of a network from its recording; `None` if the recording has no phases, or
    /// nothing ran on the GPU.
    pub fn from_case_recording(
        recording: &CuptiCaseRecording,
        tree: &[RangeTreeRow],
        diagnosis: &TraceDiagnosis,
    ) -> Option<Self> {
        let network = diagnosis.network.clone()?;
        let (all, device) = (tree.first()?, diagnosis.gpu_use_by_process.first()?);
        let step = tree.iter().find(|of| {
            of.depth == 1 && of.range_name == CuptiCaseRecording::RANGE_NAME_OF_LAUNCH
        })?;
        let launches = f64::from(recording.recorded_launches.max(1));
        let each = |ns: i64| ns as f64 / launches;
        let launch_ns = step.total_gpu_span_ns as f64 / step.ranges_with_operations.max(1) as f64;
        let mut parts = recording.case_id.splitn(4, '/');
        let problem: Vec<&str> = parts.by_ref().take(3).collect();
        let rate = |unit: &str| {
            let limit = recording.limits.iter().find(|limit| limit.deciding_ceiling == unit)?;
            Some(
                *recording.work.flops_by_unit_and_dtype.get(unit)? as f64
                    / limit.shortest_launch_ns
                    * 1e9,
            )
        };
        let name = &recording.device.gpu_model_name;
        let causes = device.idle_gaps.idle_time_by_cause.iter();
        Some(Self {
            problem_id: problem.join("/"),
            implementation_and_cache_state: parts.next().unwrap_or_default().to_owned(),
            network,
            host_ns_per_launch: recording.recorded_launches_wall_ns as f64 / launches,
            host_launch_call_ns: each(step.total_host_ns.unwrap_or(0)),
            gpu_span_ns_per_launch: each(all.total_gpu_span_ns),
            gpu_busy_ns_per_launch: each(all.gpu_busy_ns),
            single_launch_gpu_span_ns: launch_ns,
            idle_ns_by_cause: causes
                .map(|cause| {
                    (cause.kind.printed_idle_cause().to_owned(), each(cause.total_idle_ns))
                })
                .collect(),
            samples_per_s: recording
                .items_per_launch
                .map(|samples| samples as f64 * 1e9 / launch_ns),
            sample_unit: recording.sample_unit,
            utilization: MatrixThroughputShare::utilization_of_launch(
                &recording.work,
                name,
                rate,
                launch_ns,
            ),
            published_peak_text: crate::report::utilization::published_peak_throughput_text(
                &recording.work,
                name,
            ),
            case_id: recording.case_id.clone(),
        })
    }

    fn kernels_of_forward_phase(&self) -> &[MeanKernelUsePerPass] {
        self.network.times_of_phase(TrainingPhase::Forward).map_or(&[], |phase| &phase.kernels)
    }

    /// Share of the GPU's busy time that a phase takes, 0 to 1.
    fn share_of_busy_time_in_phase(&self, phase: TrainingPhase) -> Option<f64> {
        let all: f64 = self.network.phases.iter().map(|of| of.busy_ns_per_pass).sum();
        self.network.times_of_phase(phase).map(|of| of.busy_ns_per_pass / all.max(1.0))
    }

    /// Kernels of the separately recorded inference case of the same network, else of the forward
    /// pass within the training step.
    fn inference_kernels<'a>(&'a self, all: &'a [Self]) -> &'a [MeanKernelUsePerPass] {
        if !self.network.has_backward_phase() {
            return self.kernels_of_forward_phase();
        }
        let partner = all.iter().find(|other| {
            !other.network.has_backward_phase() && self.differs_only_in_operation(other)
        });
        partner.unwrap_or(self).kernels_of_forward_phase()
    }

    /// Whether two cases differ only in the operation of the family, such as inference and
    /// training.
    fn differs_only_in_operation(&self, other: &Self) -> bool {
        let split = |problem: &str| -> Option<(String, String)> {
            let mut parts = problem.splitn(3, '/');
            Some((parts.next()?.to_owned(), parts.nth(1)?.to_owned()))
        };
        self.implementation_and_cache_state == other.implementation_and_cache_state
            && split(&self.problem_id) == split(&other.problem_id)
    }

    /// Time per forward pass of attention's kernels: one fused kernel, or the three operations of
    /// unfused attention.
    fn attention_kernel_time_ns(&self) -> Option<f64> {
        let passes = self.network.forward_passes.max(1) as f64;
        let unfused = self
            .network
            .attention
            .as_ref()
            .map(|of| of.total_attention_kernel_ns() as f64 / passes);
        let fused = || {
            let fused = self
                .kernels_of_forward_phase()
                .iter()
                .filter(|of| of.class == KernelWorkClass::Attention);
            Some(fused.map(|of| of.kernel_ns_per_pass).sum::<f64>()).filter(|ns| *ns > 0.0)
        };
        unfused.or_else(fused)
    }

    /// The case of the same problem whose attention runs as three separate operations.
    fn case_with_unfused_attention<'a>(&self, all: &'a [Self]) -> Option<&'a Self> {
        let same = |of: &&Self| of.problem_id == self.problem_id && of.network.attention.is_some();
        all.iter().find(same)
    }

    /// The numbers of the network as JSON; `all` are the networks that the same command recorded.
    pub fn network_numbers_as_json(&self, all: &[Self]) -> Value {
        let idle: Vec<Value> = self
            .idle_ns_by_cause
            .iter()
            .map(|(cause, ns)| json!({ "cause": cause, "idle_ns": ns }))
            .collect();
        let inference = self.inference_kernels(all);
        let step = self.network.kernels_of_training_step();
        let same = |of: &MeanKernelUsePerPass| {
            inference.first().is_some_and(|first| first.kernel_name == of.kernel_name)
        };
        let share = |kernels: &[MeanKernelUsePerPass]| {
            let matmul = kernels.iter().filter(|of| of.class == KernelWorkClass::Matmul);
            matmul.map(|of| of.kernel_ns_per_pass).sum::<f64>()
                / total_kernel_ns_per_pass(kernels).max(1.0)
        };
        let trains = self.network.has_backward_phase();
        let unfused =
            self.case_with_unfused_attention(all).and_then(Self::attention_kernel_time_ns);
        json!({
            "wall_ns": self.host_ns_per_launch,
            "launching_ns": self.host_launch_call_ns,
            "device_ns": self.gpu_span_ns_per_launch,
            "busy_ns": self.gpu_busy_ns_per_launch,
            "launch_ns": self.single_launch_gpu_span_ns,
            "idle": idle,
            "samples_per_s": self.samples_per_s,
            "model_flop_utilization": {
                "of_published_peak": self.utilization.share_of_published_peak,
                "published_peak": self.published_peak_text,
                "of_measured_peak": self.utilization.share_of_measured_peak,
            },
            "optimizer_share": self.share_of_busy_time_in_phase(TrainingPhase::Optimizer),
            "largest_kernel_is_that_of_inference":
                step.first().filter(|_| trains).map(same),
            "matmul_share_of_inference": share(inference),
            "matmul_share_of_training": trains.then(|| share(&step)),
            "attention_ns": self.attention_kernel_time_ns(),
            "attention_of_unfused_row_ns": unfused,
        })
    }
}
