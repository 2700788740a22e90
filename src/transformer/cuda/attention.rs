//! Attention between the projections of the language model on the GPU: unfused with the scores in
//! memory, or the fused kernels of the attention family.

use super::kernels::softmax;
use super::network::{BYTES_PER_F32, LanguageModelProgramBuilder};
use super::rung_choices::AttentionOfRung;
use crate::attention::cuda::{
    AttentionBackwardLayout, AttentionBackwardPointers, AttentionBackwardScratchPointers,
    AttentionForwardLayout, AttentionForwardPointers, AttentionShape, AttentionTensorStrides,
    append_attention_backward, append_attention_forward,
};
use crate::transformer::shape::LanguageModelShape;
use kernelgate::backend::program::{MemoryPurpose, RegionPointer, int_operand, long_operand};
use kernelgate::workload::Dtype;
use kernelgate_cuda::libraries::gemm::{GemmMatrixDtype, GemmSpec};

/// Shape of the language model's causal attention, in the terms of the attention family's kernels.
pub const fn attention_shape_of_model(shape: &LanguageModelShape) -> AttentionShape {
    AttentionShape {
        batch: shape.batch,
        query_heads: shape.heads,
        key_value_heads: shape.heads,
        queries_per_head: shape.context_tokens,
        keys_per_head: shape.context_tokens,
        head_dim: shape.elements_per_head(),
        causal: true,
        dtype: shape.dtype,
    }
}

/// Memory layout of attention whose q, k and v are packed in one tensor `[T, 3·d]`, and whose
/// output is `[T, d]`.
fn packed_qkv_forward_layout(shape: &LanguageModelShape) -> AttentionForwardLayout {
    let (head, row) = (shape.elements_per_head() as u64, 3 * shape.model_width as u64);
    let packed = AttentionTensorStrides {
        batch_stride_elements: shape.context_tokens as u64 * row,
        head_stride_elements: head,
        row_stride_elements: row,
    };
    let dense = AttentionForwardLayout::forward_layout_dense_bshd(&attention_shape_of_model(shape));
    AttentionForwardLayout { q: packed, k: packed, v: packed, ..dense }
}

/// Addresses of the matrices of all heads and sequences, as an operand of GEMMs that are batched
/// over heads.
struct BatchedHeadOperand {
    /// Device address of the first head's matrix of the first sequence.
    first_head_matrix: RegionPointer,
    /// Distance in elements from one row of a head's matrix to the next.
    row_stride_elements: usize,
    /// Distance in elements from one head's matrix to the next.
    head_stride_elements: usize,
    /// Distance in bytes from one sequence's matrices to those of the next sequence.
    sequence_stride_bytes: usize,
}

impl LanguageModelProgramBuilder {
    /// Adds the memory regions that attention keeps for `layers` layers, and, for unfused
    /// attention, a region for the scores.
    pub fn declare_attention_regions(&mut self, layers: usize) {
        let LanguageModelShape { heads, context_tokens: context, dtype, .. } = self.shape;
        let rows = heads * self.shape.tokens_in_batch();
        let purpose = MemoryPurpose::Activations;
        match self.attention {
            AttentionOfRung::UnfusedAttention => {
                let bytes = dtype.bytes_per_element() * rows * context;
                self.declare_region_of_layers("probabilities", purpose, bytes, layers);
                self.declare_activation_region("scores", BYTES_PER_F32 * rows * context);
            }
            AttentionOfRung::FusedAttention(_) => {
                self.declare_region_of_layers("lse", purpose, BYTES_PER_F32 * rows, layers)
            }
        }
    }

    /// Operand for the queries (0), keys (1) or values (2) of all heads in a packed tensor `[T,
    /// 3·d]`.
    fn operand_of_packed_qkv(
        &self,
        qkv: RegionPointer,
        q_k_or_v_index: usize,
    ) -> BatchedHeadOperand {
        let element = self.shape.dtype.bytes_per_element();
        BatchedHeadOperand {
            first_head_matrix: qkv.offset_by(q_k_or_v_index * self.shape.model_width * element),
            row_stride_elements: 3 * self.shape.model_width,
            head_stride_elements: self.shape.elements_per_head(),
            sequence_stride_bytes: self.shape.context_tokens * 3 * self.shape.model_width * element,
        }
    }

    /// Operand for the heads in an unpacked tensor `[T, d]`, such as the attention output.
    fn operand_of_attention_output(&self, tensor: RegionPointer) -> BatchedHeadOperand {
        let LanguageModelShape { model_width: d, context_tokens: context, dtype, .. } = self.shape;
        let sequence = context * d * dtype.bytes_per_element();
        BatchedHeadOperand {
            first_head_matrix: tensor,
            row_stride_elements: d,
            head_stride_elements: self.shape.elements_per_head(),
            sequence_stride_bytes: sequence,
        }
    }

    /// Operand for the heads in a tensor of scores or probabilities `[batch, heads, context,
    /// context]`.
    fn operand_of_score_tensor(
        &self,
        tensor: RegionPointer,
        bytes_per_element: usize,
    ) -> BatchedHeadOperand {
        let LanguageModelShape { heads, context_tokens: context, .. } = self.shape;
        let head = context * context;
        BatchedHeadOperand {
            first_head_matrix: tensor,
            row_stride_elements: context,
            head_stride_elements: head,
            sequence_stride_bytes: heads * head * bytes_per_element,
        }
    }

    /// Adds a GEMM that is batched over all heads, one launch for each sequence.
    fn add_gemms_batched_over_heads(&mut self, spec: GemmSpec, [a, b, d]: [BatchedHeadOperand; 3]) {
        let spec = GemmSpec {
            batch_count: self.shape.heads,
            lda: Some(a.row_stride_elements),
            ldb: Some(b.row_stride_elements),
            ldd: Some(d.row_stride_elements),
            batch_stride_a: Some(a.head_stride_elements),
            batch_stride_b: Some(b.head_stride_elements),
            batch_stride_d: Some(d.head_stride_elements),
            min_address_alignment_bytes: match self.shape.context_tokens.is_multiple_of(8) {
                true => 16,
                false => self.shape.dtype.bytes_per_element() as u32,
            },
            ..spec
        };
        for sequence in 0..self.shape.batch {
            let at = |matrix: &BatchedHeadOperand| {
                matrix.first_head_matrix.offset_by(sequence * matrix.sequence_stride_bytes)
            };
            self.add_gemm_in_main_lane(spec, [at(&a), at(&b), at(&d)]);
        }
    }

    /// Adds the launches of a layer's attention, from its rotated `qkv` to `attended`.
    pub fn add_attention_of_layer(&mut self, layer: usize) {
        let [qkv, attended] = ["qkv", "attended"].map(|name| self.activation_address(name, layer));
        self.program.begin_named_range("scaled_dot_product_attention");
        match self.attention {
            AttentionOfRung::UnfusedAttention => self.add_unfused_attention(layer, qkv, attended),
            AttentionOfRung::FusedAttention(_) => {
                let [q, k, v] = [0, 1, 2]
                    .map(|operand| self.operand_of_packed_qkv(qkv, operand).first_head_matrix);
                let lse = self.has_backward_pass().then(|| self.activation_address("lse", layer));
                let pointers = AttentionForwardPointers { q, k, v, out: attended, lse };
                let (shape, layout) =
                    (attention_shape_of_model(&self.shape), packed_qkv_forward_layout(&self.shape));
                append_attention_forward(&mut self.program, &shape, &layout, &pointers);
            }
        }
        self.program.end_innermost_range();
    }

    fn add_unfused_attention(&mut self, layer: usize, qkv: RegionPointer, attended: RegionPointer) {
        let (context, head_dim) = (self.shape.context_tokens, self.shape.elements_per_head());
        let element = self.shape.dtype.bytes_per_element();
        let scores = self.program.pointer_to("scores");
        let probabilities = self.activation_address("probabilities", layer);
        self.program.begin_named_range("computing_attention_scores");
        let spec = GemmSpec {
            b_transposed: true,
            d: GemmMatrixDtype::F32,
            ..self.gemm_spec_in_model_dtype(context, context, head_dim)
        };
        let matrices = [
            self.operand_of_packed_qkv(qkv, 0),
            self.operand_of_packed_qkv(qkv, 1),
            self.operand_of_score_tensor(scores, BYTES_PER_F32),
        ];
        self.add_gemms_batched_over_heads(spec, matrices);
        self.program.end_innermost_range();
        self.program.begin_named_range("computing_softmax");
        let (rows, scale) = self.score_row_count_and_scale();
        self.add_launch_with_pdl(
            self.softmax_forward_and_backward_kernels()[0],
            (scores, probabilities, long_operand(rows), int_operand(context), scale),
        );
        self.program.end_innermost_range();
        self.program.begin_named_range("final_matmul");
        let spec = self.gemm_spec_in_model_dtype(context, head_dim, context);
        let matrices = [
            self.operand_of_score_tensor(probabilities, element),
            self.operand_of_packed_qkv(qkv, 2),
            self.operand_of_attention_output(attended),
        ];
        self.add_gemms_batched_over_heads(spec, matrices);
        self.program.end_innermost_range();
    }

    /// Number of rows of all score matrices, and the factor 1 / sqrt(head dimension) of the scores.
    fn score_row_count_and_scale(&self) -> (usize, f32) {
        let rows = self.shape.heads * self.shape.tokens_in_batch();
        (rows, 1.0 / (self.shape.elements_per_head() as f32).sqrt())
    }

    /// Kernels of the causal softmax and of its backward: over f32 scores for bf16 models, else
    /// over scores in the dtype.
    fn softmax_forward_and_backward_kernels(
        &self,
    ) -> [&'static kernelgate_cuda::KernelSpec<LanguageModelShape>; 2] {
        match self.shape.dtype {
            Dtype::Bf16 => [
                &softmax::CAUSAL_SOFTMAX_OF_F32_KERNEL,
                &softmax::CAUSAL_SOFTMAX_BACKWARD_OF_F32_KERNEL,
            ],
            _ => [&softmax::CAUSAL_SOFTMAX_KERNEL, &softmax::CAUSAL_SOFTMAX_BACKWARD_KERNEL],
        }
    }

    /// Adds the scratch memory regions of the attention backward to the program; for fused
    /// attention, returns pointers to these regions.
    pub fn declare_attention_backward_regions(
        &mut self,
    ) -> Option<AttentionBackwardScratchPointers> {
        let LanguageModelShape { heads, context_tokens: context, dtype, .. } = self.shape;
        match self.attention {
            AttentionOfRung::UnfusedAttention => {
                let bytes =
                    dtype.bytes_per_element() * heads * self.shape.tokens_in_batch() * context;
                self.program.add_scratch("grad_scores", MemoryPurpose::Gradients, bytes);
                None
            }
            AttentionOfRung::FusedAttention(_) => {
                let shape = attention_shape_of_model(&self.shape);
                Some(AttentionBackwardScratchPointers::add_backward_scratch_regions(
                    &mut self.program,
                    &shape,
                ))
            }
        }
    }

    /// Adds the launches of a layer's attention backward, which computes the gradient of rotated
    /// `qkv` from that of `attended`.
    pub fn add_attention_backward_of_layer(
        &mut self,
        layer: usize,
        scratch: Option<AttentionBackwardScratchPointers>,
        grad_attended: RegionPointer,
        grad_qkv: RegionPointer,
    ) {
        let [qkv, attended] = ["qkv", "attended"].map(|name| self.activation_address(name, layer));
        self.program.begin_named_range("scaled_dot_product_attention_backward");
        match (self.attention, scratch) {
            (AttentionOfRung::FusedAttention(order), Some(scratch)) => {
                let [q, k, v] = [0, 1, 2]
                    .map(|operand| self.operand_of_packed_qkv(qkv, operand).first_head_matrix);
                let [grad_q, grad_k, grad_v] = [0, 1, 2]
                    .map(|operand| self.operand_of_packed_qkv(grad_qkv, operand).first_head_matrix);
                let (out, lse, grad_out) =
                    (attended, self.activation_address("lse", layer), grad_attended);
                let pointers = AttentionBackwardPointers {
                    q,
                    k,
                    v,
                    out,
                    lse,
                    grad_out,
                    grad_q,
                    grad_k,
                    grad_v,
                    scratch,
                };
                let layout = AttentionBackwardLayout::gradients_like_tensors(
                    packed_qkv_forward_layout(&self.shape),
                );
                let shape = attention_shape_of_model(&self.shape);
                append_attention_backward(&mut self.program, &shape, &layout, order, &pointers);
            }
            _ => self.add_unfused_attention_backward(layer, qkv, grad_attended, grad_qkv),
        }
        self.program.end_innermost_range();
    }

    fn add_unfused_attention_backward(
        &mut self,
        layer: usize,
        qkv: RegionPointer,
        grad_attended: RegionPointer,
        grad_qkv: RegionPointer,
    ) {
        let (context, head_dim) = (self.shape.context_tokens, self.shape.elements_per_head());
        let element = self.shape.dtype.bytes_per_element();
        let [grad_p, grad_scores] =
            ["scores", "grad_scores"].map(|name| self.program.pointer_to(name));
        let p = self.activation_address("probabilities", layer);
        let of_scores = self.gemm_spec_in_model_dtype(context, context, head_dim);
        let of_heads = self.gemm_spec_in_model_dtype(context, head_dim, context);
        let transposed = GemmSpec { a_transposed: true, ..of_heads };
        let matrices = [
            self.operand_of_score_tensor(p, element),
            self.operand_of_attention_output(grad_attended),
            self.operand_of_packed_qkv(grad_qkv, 2),
        ];
        self.add_gemms_batched_over_heads(transposed, matrices);
        let spec = GemmSpec { b_transposed: true, d: GemmMatrixDtype::F32, ..of_scores };
        let matrices = [
            self.operand_of_attention_output(grad_attended),
            self.operand_of_packed_qkv(qkv, 2),
            self.operand_of_score_tensor(grad_p, BYTES_PER_F32),
        ];
        self.add_gemms_batched_over_heads(spec, matrices);
        let (rows, scale) = self.score_row_count_and_scale();
        self.add_launch_with_pdl(
            self.softmax_forward_and_backward_kernels()[1],
            (p, grad_p, grad_scores, long_operand(rows), int_operand(context), scale),
        );
        let matrices = [
            self.operand_of_score_tensor(grad_scores, element),
            self.operand_of_packed_qkv(qkv, 1),
            self.operand_of_packed_qkv(grad_qkv, 0),
        ];
        self.add_gemms_batched_over_heads(of_heads, matrices);
        let matrices = [
            self.operand_of_score_tensor(grad_scores, element),
            self.operand_of_packed_qkv(qkv, 0),
            self.operand_of_packed_qkv(grad_qkv, 1),
        ];
        self.add_gemms_batched_over_heads(transposed, matrices);
    }
}
