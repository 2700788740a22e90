//! Attention by cuDNN: the forward and backward graphs that its fused attention engines recognise.
//!
//! The engines match a pattern: operations, types and even scalars without effect must be those
//! that the engines expect. cuDNN's heuristic then selects the fused kernels. The backward starts
//! from the outputs of our forward, as all other backward rows do.

use std::sync::Arc;

use super::backward::saved_forward::save_forward_outputs;
use super::backward::{allocate_gradients, tensor_bytes_of_backward};
use super::forward::fused_device_bytes;
use super::forward::mma::FLASH_MMA_KERNEL;
use super::launch::{Extents, allocate_output, qkv, upload_inputs};
use crate::attention::definition::{Attention, AttentionForward};
use crate::attention::gradients::AttentionBackward;
use kernelgate::backend::cuda::CudaTask;
use kernelgate::backend::{BackendError, Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::libraries::cudnn::api::{
    self, CudnnDataType, CudnnPointwiseMode, OperationDescriptor,
};
use kernelgate_cuda::libraries::cudnn::graph::TensorLayout;
use kernelgate_cuda::libraries::cudnn::{CudnnOperationGraph, CudnnRefusal, GraphTensor};
use kernelgate_cuda::observe::range::within_range;
use kernelgate_cuda::{Device, DeviceBuffer};

/// Last cuDNN version whose backward needs a padding mask if s is not a multiple of 128; such a
/// mask is not implemented here.
const LAST_VERSION_WITHOUT_TAILS: usize = 91_500;

/// Row of attention forward by cuDNN.
pub const FORWARD: Implementation<AttentionForward> = Implementation {
    name: "cuda/cudnn",
    about: "the library's fused attention, by its own heuristic: the peer",
    supports: |problem| check_cudnn_support(&problem.attention),
    prepare: Prepare::CudaWithin { device_bytes: fused_device_bytes, prepare: cudnn_forward_task },
};

/// Row of attention backward by cuDNN.
pub const BACKWARD: Implementation<AttentionBackward> = Implementation {
    name: "cuda/cudnn",
    about: "the library's fused gradients, by its own heuristic: the peer",
    supports: |problem| {
        check_cudnn_support(&problem.attention)?;
        Extents::from(&problem.attention).check_equal_rows_and_heads()
    },
    prepare: Prepare::CudaWithin {
        device_bytes: cudnn_backward_bytes,
        prepare: cudnn_backward_task,
    },
};

/// Bytes of the fp32 row sums, of the fp32 accumulator of dq, and of the buffers that every
/// backward row has. cuDNN's engine needs a workspace in addition.
fn cudnn_backward_bytes(problem: &AttentionBackward) -> u64 {
    let extents = Extents::from(&problem.attention);
    tensor_bytes_of_backward(&extents) + row_sum_bytes(&extents) + dq_accumulator_bytes(&extents)
}

fn row_sum_bytes(extents: &Extents) -> u64 {
    4 * extents.query_rows()
}

fn dq_accumulator_bytes(extents: &Extents) -> u64 {
    4 * extents.query_rows() * extents.d as u64
}

/// Checks whether cuDNN is loaded and may support the problem. Whether cuDNN supports a problem is
/// known only after building its plan.
fn check_cudnn_support(attention: &Attention) -> Result<(), String> {
    Extents::from(attention).check_support(&[FLASH_MMA_KERNEL])?;
    if attention.keys == 1 {
        Err("needs more than one key".to_owned())
    } else if attention.keys_before_first_query() > 0 {
        Err("is asked for masks of as many keys as queries only".to_owned())
    } else {
        Ok(())
    }
}

fn cudnn_forward_task(
    problem: &AttentionForward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let graph = ForwardGraph::new(&problem.attention)?;
    let [q, k, v] = upload_inputs(device, inputs, ["q", "k", "v"])?;
    let out = allocate_output(device, "out", &problem.attention)?;
    let memory = [
        (graph.q, q.address()),
        (graph.k, k.address()),
        (graph.v, v.address()),
        (graph.out, out.address()),
    ];
    let plan = graph.graph.into_execution_plan(device, &memory)?;
    Ok(CudaTask::new(device, qkv([&q, &k, &v]), vec![out], move |_| {
        let _alive = (&q, &k, &v);
        within_range("forward", || plan.launch_plan())
    }))
}

fn cudnn_backward_task(
    problem: &AttentionBackward,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let extents = Extents::from(&problem.attention);
    if api::cudnn_version()? <= LAST_VERSION_WITHOUT_TAILS && extents.s % 128 != 0 {
        return Err(CudnnRefusal(
            "cuDNN after 9.15 is needed where 128 does not divide s".to_owned(),
        )
        .into());
    }
    let graph = BackwardGraph::new(&problem.attention)?;
    let saved = save_forward_outputs(&problem.attention, inputs, device)?;
    let sums = super::launch::allocate_scratch(device, row_sum_bytes(&extents))?;
    let accumulator = super::launch::allocate_scratch(device, dq_accumulator_bytes(&extents))?;
    let outputs = allocate_gradients(device, &problem.attention)?;
    let memory = [
        (graph.q, saved.q.address()),
        (graph.k, saved.k.address()),
        (graph.v, saved.v.address()),
        (graph.grad_out, saved.grad_out.address()),
        (graph.out, saved.out.address()),
        (graph.lse, saved.lse.address()),
        (graph.sums, sums.address()),
        (graph.accumulator, accumulator.address()),
        (graph.grad_q, outputs[0].address()),
        (graph.grad_k, outputs[1].address()),
        (graph.grad_v, outputs[2].address()),
    ];
    let plan = graph.graph.into_execution_plan(device, &memory)?;
    let inputs = saved.inputs_of_every_launch();
    let alive: (_, [DeviceBuffer; 2]) = (saved, [sums, accumulator]);
    Ok(CudaTask::new(device, inputs, outputs, move |_| {
        let _alive = &alive;
        within_range("backward", || plan.launch_plan())
    }))
}

/// Layouts of a problem's tensors, and graph operations that forward and backward share.
struct CudnnShapes {
    /// Layout of the queries, `[b, h, s, d]`.
    vectors: TensorLayout,
    /// Layout of keys and values, `[b, h_kv, keys, d]`.
    keys: TensorLayout,
    /// Layout of the scores, `[b, h, s, keys]`.
    pairs: TensorLayout,
    /// Layout of one number for each query, `[b, h, s, 1]`.
    rows: TensorLayout,
    /// Type of queries, keys, values and gradients in memory.
    stored: CudnnDataType,
    causal: bool,
    scale: f32,
}

impl CudnnShapes {
    fn new(attention: &Attention) -> Self {
        let [b, h, s, d] = attention.shape().map(|extent| extent as i64);
        Self {
            vectors: TensorLayout::contiguous([b, h, s, d]),
            keys: TensorLayout::contiguous(attention.key_value_shape().map(|extent| extent as i64)),
            pairs: TensorLayout::contiguous([b, h, s, attention.keys as i64]),
            rows: TensorLayout::contiguous([b, h, s, 1]),
            stored: if attention.dtype == Dtype::F16 {
                CudnnDataType::F16
            } else {
                CudnnDataType::Bf16
            },
            causal: attention.causal,
            scale: attention.head().scale() as f32,
        }
    }

    /// Adds the GEMM a · bᵀ over the head dimension to the graph. Operand `b` must already be
    /// described as transposed.
    fn inner_products(
        &self,
        graph: &mut CudnnOperationGraph,
        a: GraphTensor,
        b: GraphTensor,
    ) -> Result<GraphTensor, CudnnRefusal> {
        let scores = graph.add_virtual_tensor(self.pairs, CudnnDataType::F32)?;
        graph.add_matmul(a, b, scores)?;
        Ok(scores)
    }

    /// Adds the mask to the graph: x, or -∞ if the mask hides the key.
    fn mask_scores(
        &self,
        graph: &mut CudnnOperationGraph,
        x: GraphTensor,
    ) -> Result<GraphTensor, CudnnRefusal> {
        if !self.causal {
            return Ok(x);
        }
        let query = graph.add_virtual_tensor(self.pairs, CudnnDataType::I32)?;
        graph.index(2, x, query)?;
        let key = graph.add_virtual_tensor(self.pairs, CudnnDataType::I32)?;
        graph.index(3, x, key)?;
        let seen = graph.add_virtual_tensor(self.pairs, CudnnDataType::Boolean)?;
        graph.add_greater_or_equal(query, key, seen)?;
        let hidden = graph.add_scalar_tensor(f32::NEG_INFINITY)?;
        pointwise_in_fp32(graph, CudnnPointwiseMode::Select, &[x, hidden, seen], self.pairs)
    }
}

/// Adds the pointwise operation `mode(inputs)` in fp32, whose result stays out of memory.
fn pointwise_in_fp32(
    graph: &mut CudnnOperationGraph,
    mode: CudnnPointwiseMode,
    inputs: &[GraphTensor],
    layout: TensorLayout,
) -> Result<GraphTensor, CudnnRefusal> {
    let y = graph.add_virtual_tensor(layout, CudnnDataType::F32)?;
    graph.add_pointwise(mode, inputs, y)?;
    Ok(y)
}

/// cuDNN graph of the forward, `softmax(q kᵀ · scale) v`.
struct ForwardGraph {
    graph: CudnnOperationGraph,
    q: GraphTensor,
    k: GraphTensor,
    v: GraphTensor,
    out: GraphTensor,
}

impl ForwardGraph {
    fn new(attention: &Attention) -> Result<Self, CudnnRefusal> {
        let shapes = CudnnShapes::new(attention);
        let mut graph = CudnnOperationGraph::default();
        let g = &mut graph;
        let q = g.add_memory_tensor(shapes.vectors, shapes.stored)?;
        let k = g.add_memory_tensor(shapes.keys.transposed_layout(), shapes.stored)?;
        let v = g.add_memory_tensor(shapes.keys, shapes.stored)?;
        let out = g.add_memory_tensor(shapes.vectors, shapes.stored)?;

        let scores = shapes.inner_products(g, q, k)?;
        let scale = g.add_scalar_tensor(shapes.scale)?;
        let scores =
            pointwise_in_fp32(g, CudnnPointwiseMode::Multiply, &[scores, scale], shapes.pairs)?;
        let scores = shapes.mask_scores(g, scores)?;

        let top = g.add_virtual_tensor(shapes.rows, CudnnDataType::F32)?;
        g.add_reduction(OperationDescriptor::Maximum, scores, top)?;
        let below =
            pointwise_in_fp32(g, CudnnPointwiseMode::Subtract, &[scores, top], shapes.pairs)?;
        let weights =
            pointwise_in_fp32(g, CudnnPointwiseMode::Exponential, &[below], shapes.pairs)?;
        let sum = g.add_virtual_tensor(shapes.rows, CudnnDataType::F32)?;
        g.add_reduction(OperationDescriptor::Add, weights, sum)?;
        // The log-sum-exp is part of the pattern that the engine matches, even if it is not needed.
        let logarithm = pointwise_in_fp32(g, CudnnPointwiseMode::Logarithm, &[sum], shapes.rows)?;
        pointwise_in_fp32(g, CudnnPointwiseMode::Add, &[top, logarithm], shapes.rows)?;
        let probabilities = g.add_virtual_tensor(shapes.pairs, shapes.stored)?;
        g.add_pointwise(CudnnPointwiseMode::Divide, &[weights, sum], probabilities)?;
        g.add_matmul(probabilities, v, out)?;
        Ok(Self { graph, q, k, v, out })
    }
}

/// cuDNN graph of the backward, which computes the gradients from the saved output and log-sum-exp.
struct BackwardGraph {
    graph: CudnnOperationGraph,
    q: GraphTensor,
    k: GraphTensor,
    v: GraphTensor,
    grad_out: GraphTensor,
    out: GraphTensor,
    lse: GraphTensor,
    sums: GraphTensor,
    accumulator: GraphTensor,
    grad_q: GraphTensor,
    grad_k: GraphTensor,
    grad_v: GraphTensor,
}

impl BackwardGraph {
    fn new(attention: &Attention) -> Result<Self, CudnnRefusal> {
        let shapes = CudnnShapes::new(attention);
        let CudnnShapes { vectors, pairs, rows, stored, .. } = shapes;
        let mut graph = CudnnOperationGraph::default();
        let g = &mut graph;
        let q = g.add_memory_tensor(vectors, stored)?;
        let k = g.add_memory_tensor(vectors.transposed_layout(), stored)?;
        let v = g.add_memory_tensor(vectors.transposed_layout(), stored)?;
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

        // Row sums of dout · out. The factor of one stands in the place of a dropout scale.
        let product =
            pointwise_in_fp32(g, CudnnPointwiseMode::Multiply, &[grad_out, out], vectors)?;
        let sum = g.add_virtual_tensor(rows, CudnnDataType::F32)?;
        g.add_reduction(OperationDescriptor::Add, product, sum)?;
        let one = g.add_scalar_tensor(1.0)?;
        g.add_pointwise(CudnnPointwiseMode::Multiply, &[sum, one], sums)?;

        // Operations of this part: P = exp(q kᵀ · scale - lse); dv = Pᵀ dout.
        let scale = g.add_scalar_tensor(shapes.scale)?;
        let scores = shapes.inner_products(g, q, k)?;
        let scores = pointwise_in_fp32(g, CudnnPointwiseMode::Multiply, &[scores, scale], pairs)?;
        let below = pointwise_in_fp32(g, CudnnPointwiseMode::Subtract, &[scores, lse], pairs)?;
        let below = shapes.mask_scores(g, below)?;
        let probabilities = pointwise_in_fp32(g, CudnnPointwiseMode::Exponential, &[below], pairs)?;
        let transposed = g.add_virtual_tensor(pairs.transposed_layout(), stored)?;
        g.add_reshape(probabilities, transposed)?;
        g.add_matmul(transposed, grad_out, grad_v)?;

        // This part of the graph computes dS = P ∘ (dout vᵀ - row sums) · scale and dk = dSᵀ q.
        let grad = shapes.inner_products(g, grad_out, v)?;
        let grad = pointwise_in_fp32(g, CudnnPointwiseMode::Subtract, &[grad, sums], pairs)?;
        let grad =
            pointwise_in_fp32(g, CudnnPointwiseMode::Multiply, &[grad, probabilities], pairs)?;
        let grad = pointwise_in_fp32(g, CudnnPointwiseMode::Multiply, &[grad, scale], pairs)?;
        let transposed = g.add_virtual_tensor(pairs.transposed_layout(), stored)?;
        g.add_reshape(grad, transposed)?;
        g.add_matmul(transposed, q, grad_k)?;

        // This part of the graph computes dq = dS k, summed in fp32 in memory.
        let keys = g.add_virtual_tensor(vectors, CudnnDataType::F32)?;
        g.add_reshape(k, keys)?;
        g.add_matmul(grad, keys, accumulator)?;
        g.add_pointwise(CudnnPointwiseMode::Identity, &[accumulator], grad_q)?;
        Ok(Self { graph, q, k, v, grad_out, out, lse, sums, accumulator, grad_q, grad_k, grad_v })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cudnn_accepts_the_attention_graphs() {
        if let Err(refusal) = api::cudnn_version() {
            eprintln!("skipped: {refusal}");
            return;
        }
        for (d, causal) in [(64, false), (128, true)] {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let attention = Attention {
                    dtype,
                    ..super::super::tests::bf16_attention(2, 3, 256, d, causal)
                };
                // The test runs without a device: it checks that every operation, and the whole
                // graph, is well-formed.
                let forward = ForwardGraph::new(&attention)
                    .and_then(|made| made.graph.operation_graph(None).map(drop));
                assert_eq!(forward, Ok(()), "{attention:?}");
                let backward = BackwardGraph::new(&attention)
                    .and_then(|made| made.graph.operation_graph(None).map(drop));
                assert_eq!(backward, Ok(()), "{attention:?}");
            }
        }
    }
}
