//! Formats the phases of a traced network as JSON.

use serde_json::{Value, json};

use super::{
    AttentionKernels, AttentionOperation, KernelsOfAttentionOperation, MeanKernelUsePerPass,
    MeanPhaseTimesPerPass, PhasesOfNetwork, kernel_time_share_by_work_class,
};

impl MeanKernelUsePerPass {
    /// Converts this value to JSON.
    pub fn kernel_use_to_json(&self) -> Value {
        json!({
            "name": self.name,
            "kind": self.class.printed_work_class_label(),
            "launches": self.launches,
            "kernel_ns": self.kernel_ns,
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
        let idle = self.idle.iter();
        let idle: Vec<Value> = idle
            .map(|(cause, ns)| json!({ "cause": cause.idle_cause_json_key(), "idle_ns": ns }))
            .collect();
        json!({
            "phase": self.phase.printed_phase_label(),
            "passes": self.passes,
            "host_ns": self.host_ns,
            "busy_ns": self.busy_ns,
            "idle_ns": self.idle_ns,
            "idle": idle,
            "kernels": self.kernels.iter().map(MeanKernelUsePerPass::kernel_use_to_json).collect::<Vec<_>>(),
            "kinds": work_class_shares_to_json(&self.kernels),
        })
    }
}

impl AttentionKernels {
    /// Converts this value to JSON.
    pub fn attention_to_json(&self) -> Value {
        let operation = |operation: AttentionOperation| {
            let KernelsOfAttentionOperation { kernels, kernel_ns, flops } =
                self.kernels_of_attention_operation(operation);
            json!({
                "operation": operation.printed_attention_operation(),
                "kernels": kernels,
                "kernel_ns": kernel_ns,
                "flops": flops,
            })
        };
        let operations =
            [AttentionOperation::Scores, AttentionOperation::Softmax, AttentionOperation::Values];
        json!({
            "operations": operations.map(operation),
            "softmax_time_over_products": self.softmax_time_by_products_time(),
            "product_flops_over_softmax": self.products_flops_by_softmax_flops(),
        })
    }
}

impl PhasesOfNetwork {
    /// Converts this value to JSON.
    pub fn network_phases_to_json(&self) -> Value {
        let step = self.kernels_of_training_step();
        let trains = self.has_backward_phase();
        json!({
            "passes": self.forward_passes,
            "outside_share": self.kernel_share_outside_phases,
            "phases": self.phases.iter().map(MeanPhaseTimesPerPass::phase_to_json).collect::<Vec<_>>(),
            "training_kinds": trains.then(|| work_class_shares_to_json(&step)),
            "largest_training_kernel": step.first().filter(|_| trains).map(MeanKernelUsePerPass::kernel_use_to_json),
            "attention": self.attention.as_ref().map(AttentionKernels::attention_to_json),
        })
    }
}
