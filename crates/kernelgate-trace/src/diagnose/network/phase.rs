//! Recognises the phases of a network by range names that programs use, and by those of PyTorch's
//! autograd and optimizers.

/// A phase of a training step of a neural network; a forward pass alone is inference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TrainingPhase {
    /// Outputs and loss.
    Forward,
    /// Gradients.
    Backward,
    /// The optimizer phase, which updates the parameters.
    Optimizer,
}

/// Whether a range encloses a whole training phase, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeEnclosesPhaseOrPart {
    /// A range that the program opened around the whole phase.
    AroundWholePhase,
    /// A range that the framework opened, or that the program opened around a part of the phase.
    AroundPartOfPhase,
}

impl TrainingPhase {
    /// All training phases, in the order in which a training step executes them.
    pub const ALL_TRAINING_PHASES: [Self; 3] = [Self::Forward, Self::Backward, Self::Optimizer];

    /// Returns the printed label of an attention operation.
    pub const fn printed_phase_label(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
        }
    }

    pub fn phase_and_extent_from_range_name(
        name: &str,
    ) -> Option<(TrainingPhase, RangeEnclosesPhaseOrPart)> {
        let framework = [
            ("autograd::engine::evaluate_function", Self::Backward),
            ("Optimizer.step#", Self::Optimizer),
            ("Optimizer.zero_grad#", Self::Optimizer),
        ];
        if let Some((_, phase)) = framework.iter().find(|(start, _)| name.starts_with(start)) {
            return Some((*phase, RangeEnclosesPhaseOrPart::AroundPartOfPhase));
        }
        let name = lower_case_with_underscores(name);
        let name = name.trim_end_matches(|c: char| !c.is_ascii_alphabetic());
        let phase = match name {
            "forward" | "forward_step" | "fwd" => Self::Forward,
            "backward" | "backward_step" | "bwd" => Self::Backward,
            "optimizer" | "optimizer.step" => Self::Optimizer,
            name if name.ends_with("forward_pass") => Self::Forward,
            name if name.ends_with("backward_pass") => Self::Backward,
            name if name.ends_with("optimizer_step") => Self::Optimizer,
            name if name.ends_with("_backward") => {
                return Some((Self::Backward, RangeEnclosesPhaseOrPart::AroundPartOfPhase));
            }
            _ => return None,
        };
        Some((phase, RangeEnclosesPhaseOrPart::AroundWholePhase))
    }
}

/// An operation of attention that programs enclose in a range of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttentionOperation {
    /// Queries times keys.
    ScoresMatmul,
    /// Softmax of the scores.
    Softmax,
    /// Probabilities times values.
    ValuesMatmul,
}

impl AttentionOperation {
    /// Returns the attention operation that a range encloses, by the range names of the profiling
    /// guide.
    pub fn attention_operation_from_range_name(name: &str) -> Option<Self> {
        let name = lower_case_with_underscores(name);
        let named = |part: &str| name.contains(part);
        match () {
            () if named("attention_scores") => Some(Self::ScoresMatmul),
            () if named("computing_softmax") => Some(Self::Softmax),
            () if named("final_matmul") => Some(Self::ValuesMatmul),
            () => None,
        }
    }

    /// Returns the printed label of a training phase.
    pub const fn printed_attention_operation(self) -> &'static str {
        match self {
            Self::ScoresMatmul => "scores",
            Self::Softmax => "softmax",
            Self::ValuesMatmul => "values",
        }
    }
}

/// Returns a name in lower case, with `_` in place of blanks and hyphens.
fn lower_case_with_underscores(name: &str) -> String {
    name.trim().to_ascii_lowercase().replace([' ', '-'], "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn training_phases_are_recognised_by_usual_range_names() {
        let phase =
            |name| TrainingPhase::phase_and_extent_from_range_name(name).map(|(phase, _)| phase);
        for name in ["forward", "Forward", "forward pass", "Forward_7", "Model_Forward_Pass"] {
            assert_eq!(phase(name), Some(TrainingPhase::Forward), "{name}");
        }
        let autograd = "autograd::engine::evaluate_function: MmBackward0";
        assert_eq!(
            TrainingPhase::phase_and_extent_from_range_name(autograd),
            Some((TrainingPhase::Backward, RangeEnclosesPhaseOrPart::AroundPartOfPhase))
        );
        assert_eq!(phase("Optimizer.step#AdamW.step"), Some(TrainingPhase::Optimizer));
        assert_eq!(
            TrainingPhase::phase_and_extent_from_range_name("Layer_2_Backward"),
            Some((TrainingPhase::Backward, RangeEnclosesPhaseOrPart::AroundPartOfPhase))
        );
        for name in ["layer_forward", "MmBackward0", "step", "optimizer_state", ""] {
            assert_eq!(phase(name), None, "{name}");
        }
    }

    #[test]
    fn attention_operations_are_recognised_by_range_names() {
        let operation = AttentionOperation::attention_operation_from_range_name;
        assert_eq!(operation("computing attention scores"), Some(AttentionOperation::ScoresMatmul));
        assert_eq!(operation("computing_softmax"), Some(AttentionOperation::Softmax));
        assert_eq!(operation("computing final matmul"), Some(AttentionOperation::ValuesMatmul));
        assert_eq!(operation("aten::softmax"), None);
    }
}
