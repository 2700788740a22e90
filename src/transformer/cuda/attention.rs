//! Attention between the projections of the language model: three operations with the scores in
//! memory, or the fused kernels of the attention family.

use super::kernels::softmax;
use super::network::{F32_BYTES, NetworkProgram};
use super::rung_choices::RungAttention;
use crate::attention::cuda::{
    AttentionShape, BackwardLayout, BackwardPointers, ForwardLayout, ForwardPointers,
    ScratchPointers, Strides, append_attention_backward, append_attention_forward,
};
use crate::transformer::shape::LmShape;
use kernelgate::backend::program::{MemoryPurpose, Pointer, int, long_operand};
use kernelgate::workload::Dtype;
use kernelgate_cuda::libraries::gemm::{GemmSpec, MatrixDtype};

/// Shape of this attention for the kernels of the attention family.
pub const fn attention_shape(shape: &LmShape) -> AttentionShape {
    AttentionShape {
        batch: shape.batch,
        heads: shape.heads,
        key_heads: shape.heads,
        queries: shape.context,
        keys: shape.context,
        head_dim: shape.head_dim(),
        causal: true,
        dtype: shape.dtype,
    }
}

/// Layout with queries, keys and values packed in one tensor, and the output `[T, d]`.
fn packed_attention_layout(shape: &LmShape) -> ForwardLayout {
    let (head, row) = (shape.head_dim() as u64, 3 * shape.d as u64);
    let packed = Strides { batch: shape.context as u64 * row, head, row };
    let dense = ForwardLayout::strides_of_bshd(&attention_shape(shape));
    ForwardLayout { q: packed, k: packed, v: packed, ..dense }
}

/// Matrices of all heads of a sequence, as an operand of a batched GEMM.
struct HeadMatrix {
    /// Address of the first head of the first sequence.
    first: Pointer,
    /// Distance in elements from a row to the next one.
    row: usize,
    /// Distance in elements from a head to the next one.
    head: usize,
    /// Distance in bytes from a sequence to the next one.
    sequence: usize,
}

impl NetworkProgram {
    /// Declares the memory that attention keeps for `layers` layers, and the scores if they are in
    /// memory.
    pub fn declare_attention(&mut self, layers: usize) {
        let LmShape { heads, context, dtype, .. } = self.shape;
        let rows = heads * self.shape.token_count();
        let purpose = MemoryPurpose::Activations;
        match self.attention {
            RungAttention::Unfused => {
                let bytes = dtype.bytes() * rows * context;
                self.declare_layers("probabilities", purpose, bytes, layers);
                self.declare_activation("scores", F32_BYTES * rows * context);
            }
            RungAttention::Fused(_) => {
                self.declare_layers("lse", purpose, F32_BYTES * rows, layers)
            }
        }
    }

    /// Queries (0), keys (1) or values (2) of a packed tensor, as a GEMM operand.
    fn packed_qkv_part(&self, qkv: Pointer, operand: usize) -> HeadMatrix {
        let element = self.shape.dtype.bytes();
        HeadMatrix {
            first: qkv.offset_by(operand * self.shape.d * element),
            row: 3 * self.shape.d,
            head: self.shape.head_dim(),
            sequence: self.shape.context * 3 * self.shape.d * element,
        }
    }

    /// A tensor `[T, d]` as a GEMM operand.
    fn unpacked_output(&self, tensor: Pointer) -> HeadMatrix {
        let LmShape { d, context, dtype, .. } = self.shape;
        let sequence = context * d * dtype.bytes();
        HeadMatrix { first: tensor, row: d, head: self.shape.head_dim(), sequence }
    }

    /// A tensor `[batch, heads, context, context]` as a GEMM operand.
    fn square_score_tensor(&self, tensor: Pointer, element: usize) -> HeadMatrix {
        let LmShape { heads, context, .. } = self.shape;
        let head = context * context;
        HeadMatrix { first: tensor, row: context, head, sequence: heads * head * element }
    }

    /// Adds a batched GEMM of every head, with one launch for each sequence.
    fn multiply_heads(&mut self, spec: GemmSpec, [a, b, d]: [HeadMatrix; 3]) {
        let spec = GemmSpec {
            batch_count: self.shape.heads,
            lda: Some(a.row),
            ldb: Some(b.row),
            ldd: Some(d.row),
            stride_a: Some(a.head),
            stride_b: Some(b.head),
            stride_d: Some(d.head),
            alignment: match self.shape.context.is_multiple_of(8) {
                true => 16,
                false => self.shape.dtype.bytes() as u32,
            },
            ..spec
        };
        for sequence in 0..self.shape.batch {
            let at = |matrix: &HeadMatrix| matrix.first.offset_by(sequence * matrix.sequence);
            self.add_gemm(spec, [at(&a), at(&b), at(&d)]);
        }
    }

    /// Adds the attention of a layer, from its rotated `qkv` to `attended`.
    pub fn add_layer_attention(&mut self, layer: usize) {
        let [qkv, attended] = ["qkv", "attended"].map(|name| self.activation(name, layer));
        self.program.begin_range("scaled_dot_product_attention");
        match self.attention {
            RungAttention::Unfused => self.attend_with_three_kernels(layer, qkv, attended),
            RungAttention::Fused(_) => {
                let [q, k, v] = [0, 1, 2].map(|operand| self.packed_qkv_part(qkv, operand).first);
                let lse = self.is_training().then(|| self.activation("lse", layer));
                let pointers = ForwardPointers { q, k, v, out: attended, lse };
                let (shape, layout) =
                    (attention_shape(&self.shape), packed_attention_layout(&self.shape));
                append_attention_forward(&mut self.program, &shape, &layout, &pointers);
            }
        }
        self.program.end_range();
    }

    fn attend_with_three_kernels(&mut self, layer: usize, qkv: Pointer, attended: Pointer) {
        let (context, head_dim) = (self.shape.context, self.shape.head_dim());
        let element = self.shape.dtype.bytes();
        let scores = self.program.at("scores");
        let probabilities = self.activation("probabilities", layer);
        self.program.begin_range("computing_attention_scores");
        let spec = GemmSpec {
            b_transposed: true,
            d: MatrixDtype::F32,
            ..self.gemm_spec(context, context, head_dim)
        };
        let matrices = [
            self.packed_qkv_part(qkv, 0),
            self.packed_qkv_part(qkv, 1),
            self.square_score_tensor(scores, F32_BYTES),
        ];
        self.multiply_heads(spec, matrices);
        self.program.end_range();
        self.program.begin_range("computing_softmax");
        let (rows, scale) = self.score_rows_and_factor();
        self.add_launch(
            self.softmax_kernels()[0],
            (scores, probabilities, long_operand(rows), int(context), scale),
        );
        self.program.end_range();
        self.program.begin_range("final_matmul");
        let spec = self.gemm_spec(context, head_dim, context);
        let matrices = [
            self.square_score_tensor(probabilities, element),
            self.packed_qkv_part(qkv, 2),
            self.unpacked_output(attended),
        ];
        self.multiply_heads(spec, matrices);
        self.program.end_range();
    }

    /// Number of rows of scores, and the factor of the scores.
    fn score_rows_and_factor(&self) -> (usize, f32) {
        let rows = self.shape.heads * self.shape.token_count();
        (rows, 1.0 / (self.shape.head_dim() as f32).sqrt())
    }

    /// Kernels of the softmax and of its backward.
    fn softmax_kernels(&self) -> [&'static kernelgate_cuda::KernelSpec<LmShape>; 2] {
        match self.shape.dtype {
            Dtype::Bf16 => {
                [&softmax::SOFTMAX_OF_F32_KERNEL, &softmax::SOFTMAX_BACKWARD_OF_F32_KERNEL]
            }
            _ => [&softmax::SOFTMAX_KERNEL, &softmax::SOFTMAX_BACKWARD_KERNEL],
        }
    }

    /// Declares the scratch memory of the attention backward.
    pub fn declare_attention_backward(&mut self) -> Option<ScratchPointers> {
        let LmShape { heads, context, dtype, .. } = self.shape;
        match self.attention {
            RungAttention::Unfused => {
                let bytes = dtype.bytes() * heads * self.shape.token_count() * context;
                self.program.add_scratch("grad_scores", MemoryPurpose::Gradients, bytes);
                None
            }
            RungAttention::Fused(_) => {
                let shape = attention_shape(&self.shape);
                Some(ScratchPointers::declare_scratch_regions(&mut self.program, &shape))
            }
        }
    }

    /// Adds the attention backward, which computes the gradient of rotated `qkv` from that of
    /// `attended`.
    pub fn attention_backward(
        &mut self,
        layer: usize,
        scratch: Option<ScratchPointers>,
        grad_attended: Pointer,
        grad_qkv: Pointer,
    ) {
        let [qkv, attended] = ["qkv", "attended"].map(|name| self.activation(name, layer));
        self.program.begin_range("scaled_dot_product_attention_backward");
        match (self.attention, scratch) {
            (RungAttention::Fused(order), Some(scratch)) => {
                let [q, k, v] = [0, 1, 2].map(|operand| self.packed_qkv_part(qkv, operand).first);
                let [grad_q, grad_k, grad_v] =
                    [0, 1, 2].map(|operand| self.packed_qkv_part(grad_qkv, operand).first);
                let (out, lse, grad_out) = (attended, self.activation("lse", layer), grad_attended);
                let pointers = BackwardPointers {
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
                let layout =
                    BackwardLayout::gradients_like_tensors(packed_attention_layout(&self.shape));
                let shape = attention_shape(&self.shape);
                append_attention_backward(&mut self.program, &shape, &layout, order, &pointers);
            }
            _ => self.unfused_backward(layer, qkv, grad_attended, grad_qkv),
        }
        self.program.end_range();
    }

    fn unfused_backward(
        &mut self,
        layer: usize,
        qkv: Pointer,
        grad_attended: Pointer,
        grad_qkv: Pointer,
    ) {
        let (context, head_dim) = (self.shape.context, self.shape.head_dim());
        let element = self.shape.dtype.bytes();
        let [grad_p, grad_scores] = ["scores", "grad_scores"].map(|name| self.program.at(name));
        let p = self.activation("probabilities", layer);
        let of_scores = self.gemm_spec(context, context, head_dim);
        let of_heads = self.gemm_spec(context, head_dim, context);
        let transposed = GemmSpec { a_transposed: true, ..of_heads };
        let matrices = [
            self.square_score_tensor(p, element),
            self.unpacked_output(grad_attended),
            self.packed_qkv_part(grad_qkv, 2),
        ];
        self.multiply_heads(transposed, matrices);
        let spec = GemmSpec { b_transposed: true, d: MatrixDtype::F32, ..of_scores };
        let matrices = [
            self.unpacked_output(grad_attended),
            self.packed_qkv_part(qkv, 2),
            self.square_score_tensor(grad_p, F32_BYTES),
        ];
        self.multiply_heads(spec, matrices);
        let (rows, scale) = self.score_rows_and_factor();
        self.add_launch(
            self.softmax_kernels()[1],
            (p, grad_p, grad_scores, long_operand(rows), int(context), scale),
        );
        let matrices = [
            self.square_score_tensor(grad_scores, element),
            self.packed_qkv_part(qkv, 1),
            self.packed_qkv_part(grad_qkv, 0),
        ];
        self.multiply_heads(of_heads, matrices);
        let matrices = [
            self.square_score_tensor(grad_scores, element),
            self.packed_qkv_part(qkv, 0),
            self.packed_qkv_part(grad_qkv, 1),
        ];
        self.multiply_heads(transposed, matrices);
    }
}
