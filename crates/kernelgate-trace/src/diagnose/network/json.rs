//! Formats the phases of a traced network as JSON.

use serde_json::{Value, json};

use super::{
    AttentionKernels, AttentionOperation, KernelsOfAttentionOperation, MeanKernelUsePerPass,
    MeanPhaseTimesPerPass, PhasesOfNetwork, kernel_time_share_by_work_class,
};

impl MeanKernelUsePerPass {
    /// Converts the mean use of one kernel per pass to JSON.
    pub fn kernel_use_to_json(&self) -> Value {
        json!({
            "name": self.kernel_name,
            "kind": self.class.printed_work_class_label(),
            "launches": self.launches_per_pass,
            "kernel_ns": self.kernel_ns_per_pass,
        })
    }
}

/// Converts the share of the kernel time of each kind of work.
fn work_class_shares_to_json(kernels: &[MeanKernelUsePerPass]) -> Value {
    let shares = kernel_time_share_by_work_class(kernels).into_iter();
    shares
        .map(|(class, share)| json!({ "kind": class.printed_work_class_label(), "share": share }))
        .collect()
}

impl MeanPhaseTimesPerPass {
    fn phase_to_json(&self) -> Value {
        let idle = self.idle_ns_by_cause.iter();
        let idle: Vec<Value> = idle
            .map(|(cause, ns)| json!({ "cause": cause.idle_cause_json_key(), "idle_ns": ns }))
            .collect();
        json!({
            "phase": self.phase.printed_phase_label(),
            "passes": self.passes,
            "host_ns": self.host_ns_per_pass,
            "busy_ns": self.busy_ns_per_pass,
            "idle_ns": self.idle_ns_per_pass,
            "idle": idle,
            "kernels": self.kernels.iter().map(MeanKernelUsePerPass::kernel_use_to_json).collect::<Vec<_>>(),
            "kinds": work_class_shares_to_json(&self.kernels),
        })
    }
}

impl AttentionKernels {
    /// Converts the kernel times of attention to JSON.
    pub fn attention_to_json(&self) -> Value {
        let operation = |operation: AttentionOperation| {
            let KernelsOfAttentionOperation { kernels, total_kernel_ns: kernel_ns, flops } =
                self.kernels_of_attention_operation(operation);
            json!({
                "operation": operation.printed_attention_operation(),
                "kernels": kernels,
                "kernel_ns": kernel_ns,
                "flops": flops,
            })
        };
        let operations = [
            AttentionOperation::ScoresMatmul,
            AttentionOperation::Softmax,
            AttentionOperation::ValuesMatmul,
        ];
        json!({
            "operations": operations.map(operation),
            "softmax_time_over_products": self.softmax_to_matmul_time_ratio(),
            "product_flops_over_softmax": self.matmul_to_softmax_flops_ratio(),
        })
    }
}

impl PhasesOfNetwork {
    /// Converts the phases of a traced network to JSON.
    pub fn network_phases_to_json(&self) -> Value {
        let step = self.kernels_of_training_step();
        let trains = self.has_backward_phase();
        json!({
            "passes": self.forward_passes,
            "outside_share": self.kernel_time_share_outside_phases,
            "phases": self.phases.iter().map(MeanPhaseTimesPerPass::phase_to_json).collect::<Vec<_>>(),
            "training_kinds": trains.then(|| work_class_shares_to_json(&step)),
            "largest_training_kernel": step.first().filter(|_| trains).map(MeanKernelUsePerPass::kernel_use_to_json),
            "attention": self.attention.as_ref().map(AttentionKernels::attention_to_json),
        })
    }
}
