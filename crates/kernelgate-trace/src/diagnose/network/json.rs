//! The phases of a network as JSON.

use serde_json::{Value, json};

use super::{
    AttentionOperation, AttentionOperationUse, AttentionUse, KernelUsePerPass, NetworkPhases,
    PhaseUsePerPass, time_share_by_class,
};

impl KernelUsePerPass {
    /// Converts to JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "kind": self.class.label(),
            "launches": self.launches,
            "kernel_ns": self.kernel_ns,
        })
    }
}

/// The part of the time of kernels by kind.
fn class_shares_json(kernels: &[KernelUsePerPass]) -> Value {
    let shares = time_share_by_class(kernels).into_iter();
    shares.map(|(class, share)| json!({ "kind": class.label(), "share": share })).collect()
}

impl PhaseUsePerPass {
    fn to_json(&self) -> Value {
        let idle = self.idle.iter();
        let idle: Vec<Value> =
            idle.map(|(cause, ns)| json!({ "cause": cause.json_key(), "idle_ns": ns })).collect();
        json!({
            "phase": self.phase.label(),
            "passes": self.passes,
            "host_ns": self.host_ns,
            "busy_ns": self.busy_ns,
            "idle_ns": self.idle_ns,
            "idle": idle,
            "kernels": self.kernels.iter().map(KernelUsePerPass::to_json).collect::<Vec<_>>(),
            "kinds": class_shares_json(&self.kernels),
        })
    }
}

impl AttentionUse {
    /// Converts to JSON.
    pub fn to_json(&self) -> Value {
        let operation = |operation: AttentionOperation| {
            let AttentionOperationUse { kernels, kernel_ns, flops } =
                self.use_of_operation(operation);
            json!({
                "operation": operation.label(),
                "kernels": kernels,
                "kernel_ns": kernel_ns,
                "flops": flops,
            })
        };
        let operations =
            [AttentionOperation::Scores, AttentionOperation::Softmax, AttentionOperation::Values];
        json!({
            "operations": operations.map(operation),
            "softmax_time_over_products": self.softmax_over_products_time(),
            "product_flops_over_softmax": self.matmul_over_softmax_flops(),
        })
    }
}

impl NetworkPhases {
    /// Converts to JSON.
    pub fn to_json(&self) -> Value {
        let step = self.step_kernels();
        let trains = self.trains();
        json!({
            "passes": self.passes,
            "outside_share": self.outside,
            "phases": self.phases.iter().map(PhaseUsePerPass::to_json).collect::<Vec<_>>(),
            "training_kinds": trains.then(|| class_shares_json(&step)),
            "largest_training_kernel": step.first().filter(|_| trains).map(KernelUsePerPass::to_json),
            "attention": self.attention.as_ref().map(AttentionUse::to_json),
        })
    }
}
