//! Softmax against the matrix products of attention: time beside floating-point operations.

use hashbrown::HashMap;

use super::phase::AttentionOperation;
use crate::analyze::launches::NO_CALL;
use crate::analyze::work::operator_work;
use crate::diagnose::trace_facts::DiagnosisContext;

/// Operations on a score: largest, difference, exponential, sum, division.
const SOFTMAX_FLOPS_PER_SCORE: f64 = 5.0;

/// Kernels of an operation of attention in all forward passes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AttentionOperationUse {
    /// Number of kernels.
    pub kernels: usize,
    /// Total time of the operation's kernels, nanoseconds.
    pub kernel_ns: i64,
    /// Floating-point operations that the mathematics needs; absent where neither shapes nor work
    /// were recorded.
    pub flops: Option<f64>,
}

/// Attention in three operations.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttentionUse {
    /// Scores, softmax and values.
    pub operations: [AttentionOperationUse; 3],
}

impl AttentionUse {
    pub const fn use_of_operation(&self, operation: AttentionOperation) -> &AttentionOperationUse {
        &self.operations[operation as usize]
    }

    fn matrix_product_uses(&self) -> [&AttentionOperationUse; 2] {
        [AttentionOperation::Scores, AttentionOperation::Values].map(|of| self.use_of_operation(of))
    }

    /// Time of both products and softmax, in nanoseconds.
    pub fn kernel_ns(&self) -> i64 {
        self.operations.iter().map(|of| of.kernel_ns).sum()
    }

    /// Time of softmax over the time of both matrix products.
    #[allow(clippy::cast_precision_loss)]
    pub fn softmax_over_products_time(&self) -> Option<f64> {
        let products: i64 = self.matrix_product_uses().iter().map(|of| of.kernel_ns).sum();
        let softmax = self.use_of_operation(AttentionOperation::Softmax).kernel_ns;
        (products > 0).then(|| softmax as f64 / products as f64)
    }

    /// FLOPs of both matrix products over the FLOPs of softmax.
    pub fn matmul_over_softmax_flops(&self) -> Option<f64> {
        let [scores, values] = self.matrix_product_uses().map(|of| of.flops);
        let softmax = self.use_of_operation(AttentionOperation::Softmax).flops?;
        (softmax > 0.0).then_some((scores? + values?) / softmax)
    }

    /// Kernels whose operation is known by row; `None` where softmax or products have none.
    pub(super) fn new(
        context: &DiagnosisContext<'_>,
        operation_of: impl Fn(usize) -> Option<AttentionOperation>,
    ) -> Option<Self> {
        let on_gpu = &context.trace.kernels.on_gpu;
        let mut found = Self::default();
        let mut shapes = AttentionShapes::default();
        for row in 0..on_gpu.len() {
            let Some(operation) = operation_of(row) else { continue };
            let sum = &mut found.operations[operation as usize];
            sum.kernels += 1;
            sum.kernel_ns += on_gpu.length(row);
            shapes.add(context, row, operation);
        }
        if found.operations.iter().any(|of| of.kernels == 0) {
            return None;
        }
        let flops = declared_attention(context).or_else(|| shapes.flops_by_operation());
        for (of, flops) in found.operations.iter_mut().zip(flops.into_iter().flatten()) {
            of.flops = Some(flops);
        }
        Some(found)
    }
}

/// Operations by the work that a recording declares for its parts, of all launches.
fn declared_attention(context: &DiagnosisContext<'_>) -> Option<[f64; 3]> {
    let mut flops = [0.0; 3];
    for part in &context.trace.parts {
        let name = part.range.rsplit('/').next().unwrap_or_default();
        if let Some(operation) = AttentionOperation::phase_of_range(name) {
            let count: f64 = part.work.flops.iter().map(|(_, count)| count).sum();
            flops[operation as usize] += count * context.recorded_step_count() as f64;
        }
    }
    flops.iter().all(|count| *count > 0.0).then_some(flops)
}

/// Operations by the shapes of matrix products.
#[derive(Default)]
struct AttentionShapes {
    /// Ranges that are products: operation, FLOPs, and how many factors an output adds up.
    products: HashMap<u32, (AttentionOperation, f64, f64)>,
}

impl AttentionShapes {
    /// Adds the innermost product around a kernel's launch.
    fn add(&mut self, context: &DiagnosisContext<'_>, row: usize, operation: AttentionOperation) {
        let kept = &context.host.kept;
        let mut at = kept.of_operation.get(row).map_or(NO_CALL, |(range, _)| *range);
        while let Some(range) = kept.ranges.get(at as usize) {
            let name = context.trace.names.text(context.host.paths.name(range.path));
            let inputs = range.inputs.checked_sub(1);
            let inputs = inputs.and_then(|index| context.trace.inputs.get(index as usize));
            let names = &context.trace.names;
            let depth = inputs.and_then(|of| operator_work::matmul_inner_size(name, of, names));
            let work = inputs.and_then(|of| operator_work::work_of_operator(name, of, names));
            if let Some((depth, work)) = depth.zip(work) {
                self.products.insert(at, (operation, work.flops, depth));
                return;
            }
            at = range.around;
        }
    }

    fn flops_by_operation(&self) -> Option<[f64; 3]> {
        let mut flops = [0.0; 3];
        for &(operation, count, depth) in self.products.values() {
            flops[operation as usize] += count;
            if operation == AttentionOperation::Scores {
                let scores = count / (2.0 * depth);
                flops[AttentionOperation::Softmax as usize] += SOFTMAX_FLOPS_PER_SCORE * scores;
            }
        }
        flops.iter().all(|count| *count > 0.0).then_some(flops)
    }
}
