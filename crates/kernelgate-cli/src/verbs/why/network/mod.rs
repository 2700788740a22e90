//! Comparisons over all recorded networks: host against device, the largest kernels, inference
//! against training, attention, utilization.
//!
//! A network is a case whose recording has phases (`kernelgate_trace::diagnose::network`).

mod charts;
mod tables;

pub use charts::chart_files;
pub use tables::text;

use kernelgate::protocol::CaseRecording;
use kernelgate::workload::SampleUnit;
use kernelgate_trace::diagnose::network::{
    KernelUsePerPass, NetworkPhases, TrainingPhase, total_kernel_ns,
};
use kernelgate_trace::diagnose::{KernelClass, RangeTreeNode, TraceDiagnosis};
use serde_json::{Value, json};

use crate::report::utilization::ModelUtilization;

/// A recorded network; times are of one launch, in nanoseconds.
pub struct RecordedNetwork {
    /// Id of the case.
    pub case: String,
    /// Family, operation and axes in the id.
    problem: String,
    /// Implementation and cache state in the case id.
    row: String,
    network: NetworkPhases,
    /// Time by the host's timer, with a wait at the end of all launches.
    wall_ns: f64,
    /// Host time of the launch call alone, nanoseconds.
    launching_ns: f64,
    /// Time from the first start to the last end on the device, over all launches, divided by their
    /// number.
    device_ns: f64,
    /// The part of that time in which an operation ran.
    busy_ns: f64,
    /// Time from the first start to the last end of one launch.
    launch_ns: f64,
    /// Time in which the device was idle between operations, by cause, the longest first.
    idle: Vec<(String, f64)>,
    samples_per_s: Option<f64>,
    sample_unit: SampleUnit,
    utilization: ModelUtilization,
    /// The published peak on which the utilization is based.
    published: Option<String>,
}

impl RecordedNetwork {
    /// The network of a recording; `None` without phases, or if nothing ran.
    pub fn new(
        recording: &CaseRecording,
        tree: &[RangeTreeNode],
        diagnosis: &TraceDiagnosis,
    ) -> Option<Self> {
        let network = diagnosis.network.clone()?;
        let (all, device) = (tree.first()?, diagnosis.devices.first()?);
        let step =
            tree.iter().find(|of| of.depth == 1 && of.name == CaseRecording::LAUNCH_RANGE)?;
        let launches = f64::from(recording.steps.max(1));
        let each = |ns: i64| ns as f64 / launches;
        let launch_ns = step.span_ns as f64 / step.times.max(1) as f64;
        let mut parts = recording.case.splitn(4, '/');
        let problem: Vec<&str> = parts.by_ref().take(3).collect();
        let rate = |unit: &str| {
            let limit = recording.limits.iter().find(|limit| limit.by == unit)?;
            Some(*recording.work.flops.get(unit)? as f64 / limit.time_ns * 1e9)
        };
        let name = &recording.device.name;
        let causes = device.gaps.causes.iter();
        Some(Self {
            problem: problem.join("/"),
            row: parts.next().unwrap_or_default().to_owned(),
            network,
            wall_ns: recording.wall_ns as f64 / launches,
            launching_ns: each(step.host_ns.unwrap_or(0)),
            device_ns: each(all.span_ns),
            busy_ns: each(all.busy_ns),
            launch_ns,
            idle: causes
                .map(|cause| (cause.kind.label().to_owned(), each(cause.total_ns)))
                .collect(),
            samples_per_s: recording.samples.map(|samples| samples as f64 * 1e9 / launch_ns),
            sample_unit: recording.sample_unit,
            utilization: ModelUtilization::new(&recording.work, name, rate, launch_ns),
            published: crate::report::utilization::published_peak_text(&recording.work, name),
            case: recording.case.clone(),
        })
    }

    fn forward(&self) -> &[KernelUsePerPass] {
        self.network.use_in_phase(TrainingPhase::Forward).map_or(&[], |phase| &phase.kernels)
    }

    /// Share of a phase in the busy time, 0 to 1.
    fn phase_share(&self, phase: TrainingPhase) -> Option<f64> {
        let all: f64 = self.network.phases.iter().map(|of| of.busy_ns).sum();
        self.network.use_in_phase(phase).map(|of| of.busy_ns / all.max(1.0))
    }

    /// Kernels of inference, from the row's recorded forward pass or from the forward pass within
    /// the training step.
    fn inference<'a>(&'a self, all: &'a [Self]) -> &'a [KernelUsePerPass] {
        if !self.network.trains() {
            return self.forward();
        }
        let partner = all
            .iter()
            .find(|other| !other.network.trains() && self.differs_in_operation_only(other));
        partner.unwrap_or(self).forward()
    }

    /// Whether only the operation of the family differs.
    fn differs_in_operation_only(&self, other: &Self) -> bool {
        let split = |problem: &str| -> Option<(String, String)> {
            let mut parts = problem.splitn(3, '/');
            Some((parts.next()?.to_owned(), parts.nth(1)?.to_owned()))
        };
        self.row == other.row && split(&self.problem) == split(&other.problem)
    }

    /// Time of attention's kernels in the forward pass, fused or as three operations.
    fn attention_time_ns(&self) -> Option<f64> {
        let passes = self.network.passes.max(1) as f64;
        let unfused = self.network.attention.as_ref().map(|of| of.kernel_ns() as f64 / passes);
        let fused = || {
            let fused = self.forward().iter().filter(|of| of.class == KernelClass::Attention);
            Some(fused.map(|of| of.kernel_ns).sum::<f64>()).filter(|ns| *ns > 0.0)
        };
        unfused.or_else(fused)
    }

    /// The unfused row of the same problem.
    fn unfused<'a>(&self, all: &'a [Self]) -> Option<&'a Self> {
        let same = |of: &&Self| of.problem == self.problem && of.network.attention.is_some();
        all.iter().find(same)
    }

    /// Returns the numbers as JSON; `all` are the cases of the same command.
    pub fn json(&self, all: &[Self]) -> Value {
        let idle: Vec<Value> =
            self.idle.iter().map(|(cause, ns)| json!({ "cause": cause, "idle_ns": ns })).collect();
        let inference = self.inference(all);
        let step = self.network.step_kernels();
        let same =
            |of: &KernelUsePerPass| inference.first().is_some_and(|first| first.name == of.name);
        let share = |kernels: &[KernelUsePerPass]| {
            let matmul = kernels.iter().filter(|of| of.class == KernelClass::Matmul);
            matmul.map(|of| of.kernel_ns).sum::<f64>() / total_kernel_ns(kernels).max(1.0)
        };
        let trains = self.network.trains();
        let unfused = self.unfused(all).and_then(Self::attention_time_ns);
        json!({
            "wall_ns": self.wall_ns,
            "launching_ns": self.launching_ns,
            "device_ns": self.device_ns,
            "busy_ns": self.busy_ns,
            "launch_ns": self.launch_ns,
            "idle": idle,
            "samples_per_s": self.samples_per_s,
            "model_flop_utilization": {
                "of_published_peak": self.utilization.of_published,
                "published_peak": self.published,
                "of_measured_peak": self.utilization.of_measured,
            },
            "optimizer_share": self.phase_share(TrainingPhase::Optimizer),
            "largest_kernel_is_that_of_inference":
                step.first().filter(|_| trains).map(same),
            "matmul_share_of_inference": share(inference),
            "matmul_share_of_training": trains.then(|| share(&step)),
            "attention_ns": self.attention_time_ns(),
            "attention_of_unfused_row_ns": unfused,
        })
    }
}
