//! Compares softmax with the matrix products of attention in a traced network: time and
//! floating-point operations.

use hashbrown::HashMap;

use super::phase::AttentionOperation;
use crate::analyze::launches::NO_LAUNCH_CALL;
use crate::analyze::work::operator_work;
use crate::diagnose::trace_facts::DiagnosisContext;

/// Floating-point operations of softmax on one attention score: maximum, difference, exponential,
/// sum, division.
const SOFTMAX_FLOPS_PER_ATTENTION_SCORE: f64 = 5.0;

/// Kernels of one attention operation (scores, softmax or values) in all forward passes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct KernelsOfAttentionOperation {
    /// Number of kernels.
    pub kernels: usize,
    /// Total time of the attention operation's kernels, nanoseconds.
    pub total_kernel_ns: i64,
    /// Floating-point operations that the attention operation needs; `None` if neither shapes nor
    /// declared work were recorded.
    pub flops: Option<f64>,
}

/// Kernels of attention in the forward passes, by the three operations of attention.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttentionKernels {
    /// Kernels that compute scores, softmax and values, in this order.
    pub operations: [KernelsOfAttentionOperation; 3],
}

impl AttentionKernels {
    pub const fn kernels_of_attention_operation(
        &self,
        operation: AttentionOperation,
    ) -> &KernelsOfAttentionOperation {
        &self.operations[operation as usize]
    }

    fn kernels_of_both_matrix_products(&self) -> [&KernelsOfAttentionOperation; 2] {
        [AttentionOperation::ScoresMatmul, AttentionOperation::ValuesMatmul]
            .map(|of| self.kernels_of_attention_operation(of))
    }

    /// Total kernel time of attention's two matrix products and softmax, nanoseconds.
    pub fn total_attention_kernel_ns(&self) -> i64 {
        self.operations.iter().map(|of| of.total_kernel_ns).sum()
    }

    /// Kernel time of softmax divided by the kernel time of both matrix products of attention.
    #[allow(clippy::cast_precision_loss)]
    pub fn softmax_to_matmul_time_ratio(&self) -> Option<f64> {
        let products: i64 =
            self.kernels_of_both_matrix_products().iter().map(|of| of.total_kernel_ns).sum();
        let softmax =
            self.kernels_of_attention_operation(AttentionOperation::Softmax).total_kernel_ns;
        (products > 0).then(|| softmax as f64 / products as f64)
    }

    /// FLOPs of both matrix products of attention divided by the FLOPs of softmax.
    pub fn matmul_to_softmax_flops_ratio(&self) -> Option<f64> {
        let [scores, values] = self.kernels_of_both_matrix_products().map(|of| of.flops);
        let softmax = self.kernels_of_attention_operation(AttentionOperation::Softmax).flops?;
        (softmax > 0.0).then_some((scores? + values?) / softmax)
    }

    /// Sums the kernels whose attention operation `operation_of` knows by kernel row; `None` if one
    /// of the three operations has no kernel.
    pub(super) fn sum_attention_kernels(
        context: &DiagnosisContext<'_>,
        operation_of: impl Fn(usize) -> Option<AttentionOperation>,
    ) -> Option<Self> {
        let on_gpu = &context.trace.kernels.on_gpu;
        let mut found = Self::default();
        let mut shapes = AttentionProductsByShape::default();
        for row in 0..on_gpu.operation_count() {
            let Some(operation) = operation_of(row) else { continue };
            let sum = &mut found.operations[operation as usize];
            sum.kernels += 1;
            sum.total_kernel_ns += on_gpu.operation_duration_ns(row);
            shapes.add_product_around_kernel_launch(context, row, operation);
        }
        if found.operations.iter().any(|of| of.kernels == 0) {
            return None;
        }
        let flops = declared_flops_by_attention_operation(context)
            .or_else(|| shapes.flops_by_attention_operation());
        for (of, flops) in found.operations.iter_mut().zip(flops.into_iter().flatten()) {
            of.flops = Some(flops);
        }
        Some(found)
    }
}

/// FLOPs of each attention operation in all launches, from the work that the recorded program
/// declared for its parts.
fn declared_flops_by_attention_operation(context: &DiagnosisContext<'_>) -> Option<[f64; 3]> {
    let mut flops = [0.0; 3];
    for part in &context.trace.declared_parts {
        let name = part.range_path_suffix.rsplit('/').next().unwrap_or_default();
        if let Some(operation) = AttentionOperation::attention_operation_from_range_name(name) {
            let count: f64 = part.work.flops_by_unit_and_dtype.iter().map(|(_, count)| count).sum();
            flops[operation as usize] += count * context.number_of_recorded_case_launches() as f64;
        }
    }
    flops.iter().all(|count| *count > 0.0).then_some(flops)
}

/// Matrix products of attention, whose FLOPs follow from the recorded shapes of framework
/// operators.
#[derive(Default)]
struct AttentionProductsByShape {
    /// By number of the operator's range: attention operation, FLOPs, and number of products that
    /// each output sums.
    product_flops_and_depth_by_range: HashMap<u32, (AttentionOperation, f64, f64)>,
}

impl AttentionProductsByShape {
    /// Adds the innermost matrix-product operator around the launch of an attention kernel.
    fn add_product_around_kernel_launch(
        &mut self,
        context: &DiagnosisContext<'_>,
        row: usize,
        operation: AttentionOperation,
    ) {
        let kept = &context.host_summary.kept_ranges;
        let mut at =
            kept.range_and_call_of_operation.get(row).map_or(NO_LAUNCH_CALL, |(range, _)| *range);
        while let Some(range) = kept.ranges.get(at as usize) {
            let name = context
                .trace
                .names
                .text_of_name(context.host_summary.paths.last_name_of_path(range.path));
            let inputs = range.operator_inputs_number.checked_sub(1);
            let inputs = inputs.and_then(|index| context.trace.operator_inputs.get(index as usize));
            let names = &context.trace.names;
            let depth =
                inputs.and_then(|of| operator_work::inner_size_of_matmul_operator(name, of, names));
            let work = inputs.and_then(|of| operator_work::work_of_operator_call(name, of, names));
            if let Some((depth, work)) = depth.zip(work) {
                self.product_flops_and_depth_by_range
                    .insert(at, (operation, work.matrix_flops, depth));
                return;
            }
            at = range.enclosing_range_number;
        }
    }

    fn flops_by_attention_operation(&self) -> Option<[f64; 3]> {
        let mut flops = [0.0; 3];
        for &(operation, count, depth) in self.product_flops_and_depth_by_range.values() {
            flops[operation as usize] += count;
            if operation == AttentionOperation::ScoresMatmul {
                let scores = count / (2.0 * depth);
                flops[AttentionOperation::Softmax as usize] +=
                    SOFTMAX_FLOPS_PER_ATTENTION_SCORE * scores;
            }
        }
        flops.iter().all(|count| *count > 0.0).then_some(flops)
    }
}
