//! Attention by cuDNN: the forward and backward operation graphs that cuDNN's fused attention
//! engines recognise.
//!
//! cuDNN's fused engines match a pattern: operations, types and even scalars without effect must be
//! those that the engines expect. cuDNN's heuristic then selects the fused kernels. The cuDNN
//! backward reads the outputs of kernelgate's own forward, as all other backward implementations
//! do.

use std::sync::Arc;

use super::backward::saved_forward::upload_inputs_and_run_forward;
use super::backward::{allocate_gradients_of_q_k_v, device_bytes_of_backward_tensors};
use super::forward::fused_forward_device_bytes;
use super::forward::mma::FORWARD_FLASH_MMA_KERNEL;
use super::launch::{
    AttentionExtents, allocate_attention_output, name_q_k_v_inputs, upload_named_inputs,
};
use crate::attention::definition::{AttentionForward, AttentionParameters};
use crate::attention::gradients::AttentionBackward;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{BackendError, Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::libraries::cudnn::api::{
    self, CudnnDataType, CudnnPointwiseMode, CudnnReductionOperator,
};
use kernelgate_cuda::libraries::cudnn::graph::TensorExtentsAndStrides;
use kernelgate_cuda::libraries::cudnn::{
    CudnnGraphTensor, CudnnOperationGraphBuilder, CudnnUnsupported,
};
use kernelgate_cuda::observe::range::run_within_named_range;
use kernelgate_cuda::{Device, DeviceBuffer};

/// Last cuDNN version (9.15) whose backward needs a padding mask if 128 does not divide s;
/// kernelgate declines such problems up to this version.
const LAST_CUDNN_VERSION_NEEDING_S_MULTIPLE_OF_128: usize = 91_500;

/// Implementation of attention forward by the cuDNN library.
pub const CUDNN_FORWARD_IMPLEMENTATION: Implementation<AttentionForward> = Implementation {
    implementation_name: "cuda/cudnn",
    description: "the library's fused attention, by its own heuristic: the peer",
    supports: |problem| check_problem_against_cudnn_limits(&problem.attention),
    prepare: PrepareFunction::CudaWithDeclaredMemory {
        device_bytes: fused_forward_device_bytes,
        prepare: prepare_cudnn_forward_task,
    },
};

/// Implementation of attention backward by the cuDNN library.
pub const CUDNN_BACKWARD_IMPLEMENTATION: Implementation<AttentionBackward> = Implementation {
    implementation_name: "cuda/cudnn",
    description: "the library's fused gradients, by its own heuristic: the peer",
    supports: |problem| {
        check_problem_against_cudnn_limits(&problem.attention)?;
        AttentionExtents::from(&problem.attention).check_equal_key_and_query_counts()
    },
    prepare: PrepareFunction::CudaWithDeclaredMemory {
        device_bytes: cudnn_backward_device_bytes,
        prepare: prepare_cudnn_backward_task,
    },
};

/// Bytes of the fp32 row sums, of the fp32 accumulator of dq, and of the tensors of the backward.
/// cuDNN's engine needs a workspace in addition.
fn cudnn_backward_device_bytes(problem: &AttentionBackward) -> u64 {
    let extents = AttentionExtents::from(&problem.attention);
    device_bytes_of_backward_tensors(&extents)
        + cudnn_row_sum_bytes(&extents)
        + cudnn_dq_accumulator_bytes(&extents)
}

fn cudnn_row_sum_bytes(extents: &AttentionExtents) -> u64 {
    4 * extents.queries_of_all_heads()
}

fn cudnn_dq_accumulator_bytes(extents: &AttentionExtents) -> u64 {
    4 * extents.queries_of_all_heads() * extents.head_dim as u64
}

/// Checks the dtype, sizes and mask of an attention problem against the limits of the cuDNN
/// implementation. Whether cuDNN itself supports a problem is known only after building the
/// execution plan.
fn check_problem_against_cudnn_limits(attention: &AttentionParameters) -> Result<(), String> {
    AttentionExtents::from(attention)
        .check_dtype_size_and_grid_support(&[FORWARD_FLASH_MMA_KERNEL])?;
    if attention.keys_per_head == 1 {
        Err("needs more than one key".to_owned())
    } else if attention.causal_keys_before_first_query() > 0 {
        Err("is asked for masks of as many keys as queries only".to_owned())
    } else {
        Ok(())
    }
}

fn prepare_cudnn_forward_task(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let graph = CudnnForwardGraph::build_cudnn_forward_graph(&problem.attention)?;
    let [q, k, v] = upload_named_inputs(device, inputs, ["q", "k", "v"])?;
    let out = allocate_attention_output(device, "out", &problem.attention)?;
    let memory = [
        (graph.q, q.device_address()),
        (graph.k, k.device_address()),
        (graph.v, v.device_address()),
        (graph.out, out.address()),
    ];
    let plan = graph.graph.into_execution_plan(device, &memory)?;
    Ok(CudaTask::new(device, name_q_k_v_inputs([&q, &k, &v]), vec![out], move |_| {
        let _alive = (&q, &k, &v);
        run_within_named_range("forward", || plan.enqueue_cudnn_plan())
    }))
}

fn prepare_cudnn_backward_task(
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = AttentionExtents::from(&problem.attention);
    if api::found_cudnn_version()? <= LAST_CUDNN_VERSION_NEEDING_S_MULTIPLE_OF_128
        && extents.queries_per_head % 128 != 0
    {
        return Err(CudnnUnsupported(
            "cuDNN after 9.15 is needed where 128 does not divide s".to_owned(),
        )
        .into());
    }
    let graph = CudnnBackwardGraph::build_cudnn_backward_graph(&problem.attention)?;
    let saved = upload_inputs_and_run_forward(&problem.attention, inputs, device)?;
    let sums =
        super::launch::allocate_uninitialised_scratch(device, cudnn_row_sum_bytes(&extents))?;
    let accumulator = super::launch::allocate_uninitialised_scratch(
        device,
        cudnn_dq_accumulator_bytes(&extents),
    )?;
    let outputs = allocate_gradients_of_q_k_v(device, &problem.attention)?;
    let memory = [
        (graph.q, saved.q.device_address()),
        (graph.k, saved.k.device_address()),
        (graph.v, saved.v.device_address()),
        (graph.grad_out, saved.grad_out.device_address()),
        (graph.out, saved.out.device_address()),
        (graph.lse, saved.lse.device_address()),
        (graph.sums, sums.device_address()),
        (graph.grad_q_accumulator, accumulator.device_address()),
        (graph.grad_q, outputs[0].address()),
        (graph.grad_k, outputs[1].address()),
        (graph.grad_v, outputs[2].address()),
    ];
    let plan = graph.graph.into_execution_plan(device, &memory)?;
    let inputs = saved.output_gradient_as_replaceable_input();
    let alive: (_, [DeviceBuffer; 2]) = (saved, [sums, accumulator]);
    Ok(CudaTask::new(device, inputs, outputs, move |_| {
        let _alive = &alive;
        run_within_named_range("backward", || plan.enqueue_cudnn_plan())
    }))
}

/// Tensor layouts of an attention problem, and the operations that both the forward and the
/// backward cuDNN graph contain.
struct CudnnAttentionLayouts {
    /// Layout of q and of each tensor of its shape, `[b, h, s, d]`.
    query_layout: TensorExtentsAndStrides,
    /// Layout of keys and values, `[b, h_kv, keys, d]`.
    key_value_layout: TensorExtentsAndStrides,
    /// Layout of the scores, `[b, h, s, keys]`.
    score_layout: TensorExtentsAndStrides,
    /// Layout of one number for each query, `[b, h, s, 1]`.
    layout_of_number_per_query: TensorExtentsAndStrides,
    /// Type of queries, keys, values and gradients in memory.
    tensor_data_type: CudnnDataType,
    causal: bool,
    softmax_scale: f32,
}

impl CudnnAttentionLayouts {
    fn cudnn_layouts_of_attention(attention: &AttentionParameters) -> Self {
        let [b, h, s, d] = attention.query_and_output_shape().map(|extent| extent as i64);
        Self {
            query_layout: TensorExtentsAndStrides::contiguous_for_extents([b, h, s, d]),
            key_value_layout: TensorExtentsAndStrides::contiguous_for_extents(
                attention.key_value_shape().map(|extent| extent as i64),
            ),
            score_layout: TensorExtentsAndStrides::contiguous_for_extents([
                b,
                h,
                s,
                attention.keys_per_head as i64,
            ]),
            layout_of_number_per_query: TensorExtentsAndStrides::contiguous_for_extents([
                b, h, s, 1,
            ]),
            tensor_data_type: if attention.dtype == Dtype::F16 {
                CudnnDataType::F16
            } else {
                CudnnDataType::Bf16
            },
            causal: attention.causal,
            softmax_scale: attention.single_head_parameters().softmax_scale() as f32,
        }
    }

    /// Adds to the cuDNN graph the GEMM a · bᵀ that sums over the head dimension, with a result of
    /// shape `[b, h, s, keys]`. The caller must already have described operand `b` to the graph as
    /// transposed.
    fn add_inner_product_gemm_to_graph(
        &self,
        graph: &mut CudnnOperationGraphBuilder,
        a: CudnnGraphTensor,
        b: CudnnGraphTensor,
    ) -> Result<CudnnGraphTensor, CudnnUnsupported> {
        let scores = graph.add_virtual_tensor(self.score_layout, CudnnDataType::F32)?;
        graph.add_matmul(a, b, scores)?;
        Ok(scores)
    }

    /// Adds the causal mask to the cuDNN graph: the result is score x, or -∞ where the mask hides
    /// the key.
    fn add_causal_mask_to_graph(
        &self,
        graph: &mut CudnnOperationGraphBuilder,
        x: CudnnGraphTensor,
    ) -> Result<CudnnGraphTensor, CudnnUnsupported> {
        if !self.causal {
            return Ok(x);
        }
        let query = graph.add_virtual_tensor(self.score_layout, CudnnDataType::I32)?;
        graph.add_index_along_axis(2, x, query)?;
        let key = graph.add_virtual_tensor(self.score_layout, CudnnDataType::I32)?;
        graph.add_index_along_axis(3, x, key)?;
        let seen = graph.add_virtual_tensor(self.score_layout, CudnnDataType::Boolean)?;
        graph.add_greater_or_equal(query, key, seen)?;
        let hidden = graph.add_scalar_constant(f32::NEG_INFINITY)?;
        add_virtual_fp32_pointwise_to_graph(
            graph,
            CudnnPointwiseMode::Select,
            &[x, hidden, seen],
            self.score_layout,
        )
    }
}

/// Adds to the cuDNN graph the pointwise operation `mode(inputs)` in fp32, whose result is virtual,
/// hence never in device memory.
fn add_virtual_fp32_pointwise_to_graph(
    graph: &mut CudnnOperationGraphBuilder,
    mode: CudnnPointwiseMode,
    inputs: &[CudnnGraphTensor],
    layout: TensorExtentsAndStrides,
) -> Result<CudnnGraphTensor, CudnnUnsupported> {
    let y = graph.add_virtual_tensor(layout, CudnnDataType::F32)?;
    graph.add_pointwise_in_fp32(mode, inputs, y)?;
    Ok(y)
}

/// cuDNN graph of the attention forward, `softmax(q kᵀ · scale) v`.
struct CudnnForwardGraph {
    graph: CudnnOperationGraphBuilder,
    q: CudnnGraphTensor,
    k: CudnnGraphTensor,
    v: CudnnGraphTensor,
    out: CudnnGraphTensor,
}

impl CudnnForwardGraph {
    fn build_cudnn_forward_graph(
        attention: &AttentionParameters,
    ) -> Result<Self, CudnnUnsupported> {
        let shapes = CudnnAttentionLayouts::cudnn_layouts_of_attention(attention);
        let mut graph = CudnnOperationGraphBuilder::default();
        let g = &mut graph;
        let q = g.add_memory_tensor(shapes.query_layout, shapes.tensor_data_type)?;
        let k = g.add_memory_tensor(
            shapes.key_value_layout.with_last_axes_exchanged(),
            shapes.tensor_data_type,
        )?;
        let v = g.add_memory_tensor(shapes.key_value_layout, shapes.tensor_data_type)?;
        let out = g.add_memory_tensor(shapes.query_layout, shapes.tensor_data_type)?;

        let scores = shapes.add_inner_product_gemm_to_graph(g, q, k)?;
        let scale = g.add_scalar_constant(shapes.softmax_scale)?;
        let scores = add_virtual_fp32_pointwise_to_graph(
            g,
            CudnnPointwiseMode::Multiply,
            &[scores, scale],
            shapes.score_layout,
        )?;
        let scores = shapes.add_causal_mask_to_graph(g, scores)?;

        let top = g.add_virtual_tensor(shapes.layout_of_number_per_query, CudnnDataType::F32)?;
        g.add_reduction(CudnnReductionOperator::Maximum, scores, top)?;
        let below = add_virtual_fp32_pointwise_to_graph(
            g,
            CudnnPointwiseMode::Subtract,
            &[scores, top],
            shapes.score_layout,
        )?;
        let weights = add_virtual_fp32_pointwise_to_graph(
            g,
            CudnnPointwiseMode::Exponential,
            &[below],
            shapes.score_layout,
        )?;
        let sum = g.add_virtual_tensor(shapes.layout_of_number_per_query, CudnnDataType::F32)?;
        g.add_reduction(CudnnReductionOperator::Add, weights, sum)?;
        // The log-sum-exp is part of the pattern that cuDNN's forward engine matches, even if no
        // backward reads it.
        let logarithm = add_virtual_fp32_pointwise_to_graph(
            g,
            CudnnPointwiseMode::NaturalLogarithm,
            &[sum],
            shapes.layout_of_number_per_query,
        )?;
        add_virtual_fp32_pointwise_to_graph(
            g,
            CudnnPointwiseMode::Add,
            &[top, logarithm],
            shapes.layout_of_number_per_query,
        )?;
        let probabilities = g.add_virtual_tensor(shapes.score_layout, shapes.tensor_data_type)?;
        g.add_pointwise_in_fp32(CudnnPointwiseMode::DivideXByB, &[weights, sum], probabilities)?;
        g.add_matmul(probabilities, v, out)?;
        Ok(Self { graph, q, k, v, out })
    }
}

/// cuDNN graph of the attention backward, which computes the gradients from the saved output and
/// log-sum-exp.
struct CudnnBackwardGraph {
    graph: CudnnOperationGraphBuilder,
    q: CudnnGraphTensor,
    k: CudnnGraphTensor,
    v: CudnnGraphTensor,
    grad_out: CudnnGraphTensor,
    out: CudnnGraphTensor,
    lse: CudnnGraphTensor,
    sums: CudnnGraphTensor,
    grad_q_accumulator: CudnnGraphTensor,
    grad_q: CudnnGraphTensor,
    grad_k: CudnnGraphTensor,
    grad_v: CudnnGraphTensor,
}

impl CudnnBackwardGraph {
    fn build_cudnn_backward_graph(
        attention: &AttentionParameters,
    ) -> Result<Self, CudnnUnsupported> {
        use CudnnPointwiseMode::{Exponential, Multiply, Subtract};
        let shapes = CudnnAttentionLayouts::cudnn_layouts_of_attention(attention);
        let (vectors, pairs) = (shapes.query_layout, shapes.score_layout);
        let (rows, stored) = (shapes.layout_of_number_per_query, shapes.tensor_data_type);
        let mut graph = CudnnOperationGraphBuilder::default();
        let g = &mut graph;
        let q = g.add_memory_tensor(vectors, stored)?;
        let k = g.add_memory_tensor(vectors.with_last_axes_exchanged(), stored)?;
        let v = g.add_memory_tensor(vectors.with_last_axes_exchanged(), stored)?;
        let [grad_out, out] =
            [g.add_memory_tensor(vectors, stored)?, g.add_memory_tensor(vectors, stored)?];
        let lse = g.add_memory_tensor(rows, CudnnDataType::F32)?;
        let sums = g.add_memory_tensor(rows, CudnnDataType::F32)?;
        let accumulator = g.add_memory_tensor(vectors, CudnnDataType::F32)?;
        let [grad_q, grad_k, grad_v] = [
            g.add_memory_tensor(vectors, stored)?,
            g.add_memory_tensor(vectors, stored)?,
            g.add_memory_tensor(vectors, stored)?,
        ];

        // This part of the cuDNN backward graph computes the row sums of dout · out. The
        // multiplication by one stands in the place of the dropout scale that cuDNN's pattern
        // expects.
        let product = add_virtual_fp32_pointwise_to_graph(g, Multiply, &[grad_out, out], vectors)?;
        let sum = g.add_virtual_tensor(rows, CudnnDataType::F32)?;
        g.add_reduction(CudnnReductionOperator::Add, product, sum)?;
        let one = g.add_scalar_constant(1.0)?;
        g.add_pointwise_in_fp32(Multiply, &[sum, one], sums)?;

        // Operations of this part: the cuDNN backward graph computes P = exp(q kᵀ · scale - lse)
        // and dv = Pᵀ dout.
        let scale = g.add_scalar_constant(shapes.softmax_scale)?;
        let scores = shapes.add_inner_product_gemm_to_graph(g, q, k)?;
        let scores = add_virtual_fp32_pointwise_to_graph(g, Multiply, &[scores, scale], pairs)?;
        let below = add_virtual_fp32_pointwise_to_graph(g, Subtract, &[scores, lse], pairs)?;
        let below = shapes.add_causal_mask_to_graph(g, below)?;
        let probabilities = add_virtual_fp32_pointwise_to_graph(g, Exponential, &[below], pairs)?;
        let transposed = g.add_virtual_tensor(pairs.with_last_axes_exchanged(), stored)?;
        g.add_reshape(probabilities, transposed)?;
        g.add_matmul(transposed, grad_out, grad_v)?;

        // This part of the cuDNN backward graph computes dS = P ∘ (dout vᵀ - row sums) · scale and
        // dk = dSᵀ q.
        let grad = shapes.add_inner_product_gemm_to_graph(g, grad_out, v)?;
        let grad = add_virtual_fp32_pointwise_to_graph(g, Subtract, &[grad, sums], pairs)?;
        let grad = add_virtual_fp32_pointwise_to_graph(g, Multiply, &[grad, probabilities], pairs)?;
        let grad = add_virtual_fp32_pointwise_to_graph(g, Multiply, &[grad, scale], pairs)?;
        let transposed = g.add_virtual_tensor(pairs.with_last_axes_exchanged(), stored)?;
        g.add_reshape(grad, transposed)?;
        g.add_matmul(transposed, q, grad_k)?;

        // This part of the cuDNN backward graph computes dq = dS k, summed in an fp32 buffer in
        // device memory.
        let keys = g.add_virtual_tensor(vectors, CudnnDataType::F32)?;
        g.add_reshape(k, keys)?;
        g.add_matmul(grad, keys, accumulator)?;
        g.add_pointwise_in_fp32(CudnnPointwiseMode::Identity, &[accumulator], grad_q)?;
        let grad_q_accumulator = accumulator;
        Ok(Self {
            graph,
            q,
            k,
            v,
            grad_out,
            out,
            lse,
            sums,
            grad_q_accumulator,
            grad_q,
            grad_k,
            grad_v,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cudnn_accepts_the_attention_forward_and_backward_graphs() {
        if let Err(refusal) = api::found_cudnn_version() {
            eprintln!("skipped: {refusal}");
            return;
        }
        for (d, causal) in [(64, false), (128, true)] {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let attention = AttentionParameters {
                    dtype,
                    ..super::super::tests::bf16_attention_without_grouped_heads(
                        2, 3, 256, d, causal,
                    )
                };
                // The test needs no GPU: it checks that cuDNN accepts every operation and the whole
                // graph as well-formed.
                let forward = CudnnForwardGraph::build_cudnn_forward_graph(&attention)
                    .and_then(|made| made.graph.operation_graph_descriptor(None).map(drop));
                assert_eq!(forward, Ok(()), "{attention:?}");
                let backward = CudnnBackwardGraph::build_cudnn_backward_graph(&attention)
                    .and_then(|made| made.graph.operation_graph_descriptor(None).map(drop));
                assert_eq!(backward, Ok(()), "{attention:?}");
            }
        }
    }
}
