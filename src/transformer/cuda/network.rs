//! The forward pass as a program, and the memory regions of all passes.
//!
//! A training step keeps the activations of every layer in separate regions; a forward pass alone
//! has only one set.

use std::collections::BTreeMap;

use super::kernels::gemm::{self, EpilogueGemm};
use super::kernels::{embedding, loss, norm, rope, swiglu};
use super::rung_choices::{GemmEpilogues, RungAttention, RungKernels};
use crate::parallel;
use crate::transformer::shape::{LmShape, Weight};
use half::bf16;
use kernelgate::backend::program::{
    Lane, MemoryPurpose, Operands, Pointer, Program, int, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmOperands, GemmSpec, MatrixDtype};

/// Bytes of an element of the residual stream, and of the state of AdamW.
pub const F32_BYTES: usize = Dtype::F32.bytes();

/// Program of a rung while its launches are added.
pub struct NetworkProgram {
    pub program: Program,
    pub shape: LmShape,
    pub attention: RungAttention,
    products: GemmEpilogues,
    /// Whether the program continues with a backward pass.
    training: bool,
    /// Arena of the weights that GEMMs read.
    weights: Pointer,
    /// Distance in bytes from one layer's tensor to the next, for regions that hold the tensors of
    /// several layers.
    strides: BTreeMap<&'static str, usize>,
}

/// Alignment in bytes of the tensors of layers, as GEMMs expect it of their operands.
const LAYER_ALIGNMENT: usize = 256;

/// Program that computes logits and losses.
pub fn forward_program(shape: &LmShape, kernels: impl Into<RungKernels>) -> Program {
    let mut program = Program::new();
    let bytes = shape.parameter_count() * shape.dtype.bytes();
    let weights = program.add_input("parameters", MemoryPurpose::Weights, bytes);
    let logits = [shape.batch, shape.context, shape.padded_vocabulary()];
    program.add_output("logits", logits, shape.dtype);
    let mut network = NetworkProgram::new(program, shape, kernels.into(), weights, false);
    network.add_forward_pass(|network| {
        let sizes = int_operands([network.shape.vocabulary, network.shape.padded_vocabulary()]);
        network
            .add_launch(&loss::LOSS_FORWARD_KERNEL, ("logits", "targets", "token_losses", sizes));
    });
    network.program
}

impl NetworkProgram {
    /// Declares inputs, activations and the loss; `weights` and `logits` must be declared before.
    pub fn new(
        program: Program,
        shape: &LmShape,
        kernels: RungKernels,
        weights: Pointer,
        training: bool,
    ) -> Self {
        let RungKernels { attention, products } = kernels;
        let (shape, strides) = (*shape, BTreeMap::new());
        let mut network = Self { program, shape, attention, products, training, weights, strides };
        let LmShape { d, ff, layers, .. } = shape;
        let (tokens, element) = (shape.token_count(), shape.dtype.bytes());
        for name in ["tokens", "targets"] {
            network.program.add_input(name, MemoryPurpose::Inputs, F32_BYTES * tokens);
        }
        network.program.add_output("loss", [shape.batch, 1], Dtype::F32);
        let table = F32_BYTES * shape.context * shape.head_dim();
        network.program.add_packed("rotations", MemoryPurpose::Weights, table, move |_| {
            rope::rotary_table(&shape).into_iter().flat_map(f32::to_ne_bytes).collect()
        });
        network.declare_activation("roots", F32_BYTES * shape.norm_count() * tokens);
        network.declare_activation("token_losses", F32_BYTES * tokens);
        network.declare_activation("head_input", element * tokens * d);
        let kept = if training { layers } else { 1 };
        // The model's head reads the last residual stream.
        let streams = if training { layers + 1 } else { 1 };
        network.declare_layers("x", MemoryPurpose::Activations, F32_BYTES * tokens * d, streams);
        for (name, bytes) in [
            ("qkv_input", element * d),
            ("qkv", element * 3 * d),
            ("attended", element * d),
            ("middle", F32_BYTES * d),
            ("mlp_input", element * d),
            ("gate_up", element * 2 * ff),
            ("hidden", element * ff),
        ] {
            network.declare_layers(name, MemoryPurpose::Activations, tokens * bytes, kept);
        }
        network.declare_attention(kept);
        network
    }

    /// Declares a region with a tensor of `bytes` bytes for each of several layers.
    pub fn declare_layers(
        &mut self,
        name: &'static str,
        purpose: MemoryPurpose,
        bytes: usize,
        layers: usize,
    ) {
        let stride = bytes.next_multiple_of(LAYER_ALIGNMENT);
        self.program.add_scratch(name, purpose, stride * layers);
        self.strides.insert(name, stride);
    }

    /// Distance in bytes from a layer's tensor to that of the next layer.
    pub fn stride_bytes(&self, name: &str) -> usize {
        *self.strides.get(name).expect("declared for each layer")
    }

    /// Declares the region of an activation.
    pub fn declare_activation(&mut self, name: &str, bytes: usize) {
        self.program.add_scratch(name.to_owned(), MemoryPurpose::Activations, bytes);
    }

    /// Whether a backward pass follows.
    pub const fn is_training(&self) -> bool {
        self.training
    }

    /// Address of an activation of a layer.
    pub fn activation(&self, name: &str, layer: usize) -> Pointer {
        let at = self.program.at(name);
        if self.training { at.offset_by(layer * self.stride_bytes(name)) } else { at }
    }

    /// Address of a tensor of weights.
    pub fn weight(&self, weight: Weight) -> Pointer {
        let row = self.shape.d * self.shape.dtype.bytes();
        self.weights.offset_by(self.shape.arena_rows_of_weight(weight).first * row)
    }

    /// Address of the gain of a norm.
    pub fn gain_pointer(&self, norm: usize) -> Pointer {
        self.weight(Weight::Gains).offset_by(norm * self.shape.d * self.shape.dtype.bytes())
    }

    /// Address of the inverse root mean squares of a norm.
    pub fn inverse_roots(&self, norm: usize) -> Pointer {
        self.program.at("roots").offset_by(norm * F32_BYTES * self.shape.token_count())
    }

    /// Adds the launch of a kernel with PDL.
    pub fn add_launch(&mut self, kernel: &KernelSpec<LmShape>, arguments: impl Operands) {
        let launch = self.program.kernel_launch(kernel, &self.shape, arguments);
        self.program.add(launch.programmatic());
    }

    /// Specification of a GEMM of matrices in the dtype.
    pub fn gemm_spec(&self, m: usize, n: usize, k: usize) -> GemmSpec {
        let dtype = match self.shape.dtype {
            Dtype::Bf16 => MatrixDtype::Bf16,
            _ => MatrixDtype::F32,
        };
        // Tensors of the parameter arena begin at whole rows.
        let row = self.shape.d * self.shape.dtype.bytes();
        let alignment = 1 << row.trailing_zeros().min(8);
        GemmSpec { alignment, ..GemmSpec::new(m, n, k, dtype, dtype) }
    }

    /// Adds a GEMM D = op(A)·op(B).
    pub fn add_gemm(&mut self, spec: GemmSpec, operands: [Pointer; 3]) {
        self.program.gemm(Lane::MAIN_LANE, spec, operands);
    }

    /// Adds a GEMM D = op(A)·op(B) + C in f32.
    fn multiply_and_add(&mut self, spec: GemmSpec, [a, b, c, d]: [Pointer; 4]) {
        let spec = GemmSpec { d: MatrixDtype::F32, beta: 1.0, ..spec };
        let operands = GemmOperands { c: Some(c), ..GemmOperands::new(a, b, d) };
        self.program.gemm(Lane::MAIN_LANE, spec, operands);
    }

    /// Adds the whole forward pass; `loss` adds the losses of the tokens.
    pub fn add_forward_pass(&mut self, loss: impl FnOnce(&mut Self)) {
        self.program.begin_range("forward");
        let LmShape { vocabulary, d, layers, .. } = self.shape;
        let tokens = self.shape.token_count();
        let (table, x) = (self.weight(Weight::Embedding), self.activation("x", 0));
        self.program.begin_range("embedding");
        let sizes = (long_operand(tokens), int_operands([d, vocabulary]));
        self.add_launch(&embedding::EMBED_KERNEL, ("tokens", table, x, sizes));
        self.program.end_range();
        for layer in 0..layers {
            self.attention_block(layer);
            self.mlp_block(layer);
        }
        self.program.begin_range("head");
        let [x, input] = [self.activation("x", layers), self.program.at("head_input")];
        self.add_rms_norm(2 * layers, x, input);
        let spec = GemmSpec {
            b_transposed: true,
            ldd: Some(self.shape.padded_vocabulary()),
            ..self.gemm_spec(tokens, vocabulary, d)
        };
        let logits = self.program.at("logits");
        self.add_gemm(spec, [input, self.weight(Weight::Head), logits]);
        self.program.end_range();
        self.program.begin_range("cross_entropy");
        loss(self);
        let context = self.shape.context;
        self.add_launch(&loss::MEAN_LOSS_KERNEL, ("token_losses", "loss", int(context)));
        self.program.end_range();
        self.program.end_range();
    }

    fn add_rms_norm(&mut self, norm: usize, x: Pointer, to: Pointer) {
        let (gain, roots, d) = (self.gain_pointer(norm), self.inverse_roots(norm), self.shape.d);
        self.add_launch(&norm::NORM_KERNEL, (x, gain, to, roots, int(d)));
    }

    fn attention_block(&mut self, layer: usize) {
        let (d, tokens) = (self.shape.d, self.shape.token_count());
        self.program.begin_range("attention");
        let [x, input, qkv, attended, middle] = ["x", "qkv_input", "qkv", "attended", "middle"]
            .map(|name| self.activation(name, layer));
        self.add_rms_norm(2 * layer, x, input);
        self.add_qkv_projection(layer, input, qkv);
        self.add_layer_attention(layer);
        let spec = GemmSpec { b_transposed: true, ..self.gemm_spec(tokens, d, d) };
        self.multiply_and_add(spec, [attended, self.weight(Weight::Out(layer)), x, middle]);
        self.program.end_range();
    }

    /// Adds the projection to queries, keys and values of a layer, and their rotation.
    fn add_qkv_projection(&mut self, layer: usize, input: Pointer, qkv: Pointer) {
        let d = self.shape.d;
        let (tokens, w) = (self.shape.token_count(), self.weight(Weight::Qkv(layer)));
        if let Some(product) = self.epilogue_gemm_if_used() {
            let operands = product.rope_arguments([input, w, qkv, self.program.at("rotations")]);
            let launch = self.program.kernel_launch(&gemm::ROPE_GEMM, &product, operands);
            return self.program.add(launch.programmatic());
        }
        let spec = GemmSpec { b_transposed: true, ..self.gemm_spec(tokens, 3 * d, d) };
        self.add_gemm(spec, [input, w, qkv]);
        self.add_rotation(qkv, 1.0);
    }

    /// Kernels that replace a GEMM and the kernel after it, if they are used.
    pub fn epilogue_gemm_if_used(&self) -> Option<EpilogueGemm> {
        let GemmEpilogues::WithEpilogues { multiprocessors } = self.products else { return None };
        Some(EpilogueGemm { shape: self.shape, multiprocessors, saved: self.training })
    }

    /// Adds the rotation of queries and keys in place, forward or back.
    pub fn add_rotation(&mut self, qkv: Pointer, direction: f32) {
        let LmShape { d, heads, context, .. } = self.shape;
        let sizes = int_operands([context, heads, self.shape.head_dim(), 3 * d]);
        let tokens = long_operand(self.shape.token_count());
        self.add_launch(&rope::ROPE_KERNEL, (qkv, "rotations", qkv, tokens, sizes, direction));
    }

    fn mlp_block(&mut self, layer: usize) {
        let LmShape { d, ff, .. } = self.shape;
        let tokens = self.shape.token_count();
        self.program.begin_range("mlp");
        let [middle, input, gate_up, hidden] =
            ["middle", "mlp_input", "gate_up", "hidden"].map(|name| self.activation(name, layer));
        let next = self.activation("x", layer + 1);
        self.add_rms_norm(2 * layer + 1, middle, input);
        let w = self.weight(Weight::GateUp(layer));
        if let Some(product) = self.epilogue_gemm_if_used() {
            let operands = product.swiglu_arguments([input, w, hidden, gate_up]);
            let launch = self.program.kernel_launch(&gemm::SWIGLU_GEMM, &product, operands);
            self.program.add(launch.programmatic());
        } else {
            let spec = GemmSpec { b_transposed: true, ..self.gemm_spec(tokens, 2 * ff, d) };
            self.add_gemm(spec, [input, w, gate_up]);
            self.add_launch(
                &swiglu::SWIGLU_KERNEL,
                (gate_up, hidden, long_operand(tokens), int(ff)),
            );
        }
        let spec = self.gemm_spec(tokens, d, ff);
        self.multiply_and_add(spec, [hidden, self.weight(Weight::Down(layer)), middle, next]);
        self.program.end_range();
    }
}

/// Rounds an f32 arena to bf16 and returns the bytes.
pub fn round_to_bf16_bytes(parameters: &[f32]) -> Vec<u8> {
    const ROUNDED_ELEMENTS_PER_TASK: usize = 1 << 20;
    let mut rounded = vec![0; 2 * parameters.len()];
    parallel::for_each_chunk(&mut rounded, 2 * ROUNDED_ELEMENTS_PER_TASK, &|number, to| {
        for (to, x) in to.chunks_exact_mut(2).zip(&parameters[number * ROUNDED_ELEMENTS_PER_TASK..])
        {
            to.copy_from_slice(&bf16::from_f32(*x).to_ne_bytes());
        }
    });
    rounded
}
