//! The phases of a network as JSON.

use serde_json::{Value, json};

use super::{
    Attention, AttentionOperation, KernelUse, Network, OperationUse, PhaseUse, class_shares,
};

impl KernelUse {
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
fn shares_to_json(kernels: &[KernelUse]) -> Value {
    let shares = class_shares(kernels).into_iter();
    shares.map(|(class, share)| json!({ "kind": class.label(), "share": share })).collect()
}

impl PhaseUse {
    fn to_json(&self) -> Value {
        let idle = self.idle.iter();
        let idle: Vec<Value> =
            idle.map(|(cause, ns)| json!({ "cause": cause.key(), "idle_ns": ns })).collect();
        json!({
            "phase": self.phase.label(),
            "passes": self.passes,
            "host_ns": self.host_ns,
            "busy_ns": self.busy_ns,
            "idle_ns": self.idle_ns,
            "idle": idle,
            "kernels": self.kernels.iter().map(KernelUse::to_json).collect::<Vec<_>>(),
            "kinds": shares_to_json(&self.kernels),
        })
    }
}

impl Attention {
    /// Converts to JSON.
    pub fn to_json(&self) -> Value {
        let operation = |operation: AttentionOperation| {
            let OperationUse { kernels, kernel_ns, flops } = self.operation(operation);
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
            "softmax_time_over_products": self.time_ratio(),
            "product_flops_over_softmax": self.flop_ratio(),
        })
    }
}

impl Network {
    /// Converts to JSON.
    pub fn to_json(&self) -> Value {
        let step = self.step();
        let trains = self.trains();
        json!({
            "passes": self.passes,
            "outside_share": self.outside,
            "phases": self.phases.iter().map(PhaseUse::to_json).collect::<Vec<_>>(),
            "training_kinds": trains.then(|| shares_to_json(&step)),
            "largest_training_kernel": step.first().filter(|_| trains).map(KernelUse::to_json),
            "attention": self.attention.as_ref().map(Attention::to_json),
        })
    }
}
