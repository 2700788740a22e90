//! A training step: the forward pass, gradients from the last layer to the first, AdamW.

use super::kernels::{adamw, embedding, loss, norm, swiglu};
use super::network::{F32, Network, rounded};
use super::rung::{Attention, Schedule};
use crate::attention::cuda::ScratchPointers;
use crate::transformer::shape::{NEXT_STATE, Shape, Weight};
use kernelgate::backend::program::{
    Lane, MemoryUse, NULL, Operand, Operands, Pointer, Program, int, ints, long,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::GemmSpec;

/// AdamW of the matrices of a layer.
const LAYER_ADAMW: KernelSpec<Shape> = KernelSpec {
    blocks: |shape| (adamw::ADAMW.blocks)(&Shape { layers: 1, vocabulary: 0, ..*shape }),
    ..adamw::ADAMW
};

/// AdamW of the head.
const HEAD_ADAMW: KernelSpec<Shape> = KernelSpec {
    blocks: |shape| {
        let Shape { vocabulary, .. } = *shape;
        (adamw::ADAMW.blocks)(&Shape { layers: 0, vocabulary: vocabulary.div_ceil(2), ..*shape })
    },
    ..adamw::ADAMW
};

/// AdamW of embedding and gains.
const VECTOR_ADAMW: KernelSpec<Shape> = KernelSpec {
    blocks: |shape| {
        let vocabulary = (shape.vocabulary + 2 * shape.layers).div_ceil(2);
        (adamw::ADAMW.blocks)(&Shape { layers: 0, vocabulary, ..*shape })
    },
    ..adamw::ADAMW
};

/// The state after a step, and the losses before it.
pub fn step(shape: &Shape, attention: Attention, schedule: Schedule) -> Program {
    let mut program = Program::new();
    let state = F32 * shape.parameters();
    let weights = match shape.dtype {
        Dtype::Bf16 => {
            // The step before rounded the weights from them.
            program.loaded_input("parameters", MemoryUse::Momentum, state);
            program.packed("weights", MemoryUse::Weights, state / 2, |inputs| {
                rounded(inputs.f32("parameters"))
            })
        }
        _ => program.input("parameters", MemoryUse::Weights, state),
    };
    for name in ["first_moments", "second_moments"] {
        program.input(name, MemoryUse::Momentum, state);
    }
    program.input("steps", MemoryUse::Inputs, F32);
    let logits = shape.tokens() * shape.padded() * shape.dtype.bytes();
    program.scratch("logits", MemoryUse::Activations, logits);
    let network = Network::new(program, shape, attention, weights, true);
    let mut training = Training::new(network, schedule);
    training.write();
    training.network.program
}

/// A step while it is written.
struct Training {
    network: Network,
    scratch: Option<ScratchPointers>,
    schedule: Schedule,
    /// The lane of gradients of matrices.
    products: Lane,
    /// The lane of updates.
    updates: Lane,
}

impl Training {
    /// Declares gradients and the next state.
    fn new(mut network: Network, schedule: Schedule) -> Self {
        let shape = network.shape;
        let Shape { d, ff, dtype, .. } = shape;
        let (tokens, element) = (shape.tokens(), dtype.bytes());
        for (name, bytes) in [
            ("grad_vectors", F32 * shape.matrices() * d),
            ("grad_matrices", element * (shape.rows() - shape.matrices()) * d),
            ("grad_x", F32 * tokens * d),
            ("grad_input", element * tokens * d),
            ("grad_hidden", element * tokens * ff),
            ("grad_attended", element * tokens * d),
            ("grad_gains", F32 * shape.norms() * norm::norm_blocks(&shape) * d),
        ] {
            network.program.scratch(name, MemoryUse::Gradients, bytes);
        }
        // What GEMMs of a side lane read is not overwritten.
        let sets = match schedule {
            Schedule::Serial => 1,
            Schedule::Overlapped => shape.layers,
        };
        for set in 0..sets {
            for (name, bytes) in [
                ("grad_mlp", element * d),
                ("grad_gate_up", element * 2 * ff),
                ("grad_middle", element * d),
                ("grad_qkv", element * 3 * d),
            ] {
                let name = format!("{name}_{set}");
                network.program.scratch(name, MemoryUse::Gradients, tokens * bytes);
            }
        }
        for name in NEXT_STATE {
            network.program.output(name, [shape.rows(), d], Dtype::F32);
        }
        if dtype == Dtype::Bf16 {
            let bytes = element * shape.parameters();
            network.program.scratch("next_weights", MemoryUse::Weights, bytes);
        }
        let scratch = network.declare_attention_backward();
        let [products, updates] = match schedule {
            Schedule::Serial => [Lane::MAIN; 2],
            Schedule::Overlapped => [(); 2].map(|()| network.program.lane()),
        };
        Self { network, scratch, schedule, products, updates }
    }

    /// A gradient that GEMMs of a layer read.
    fn layer_gradient(&self, name: &str, layer: usize) -> Pointer {
        let set = if self.schedule == Schedule::Serial { 0 } else { layer };
        self.at(&format!("{name}_{set}"))
    }

    /// Makes later steps of a side lane wait for another lane.
    fn wait(&mut self, waiting: Lane, on: Lane) {
        if waiting != on {
            self.network.program.wait(waiting, on);
        }
    }

    fn at(&self, name: &str) -> Pointer {
        self.network.program.at(name)
    }

    fn write(&mut self) {
        let scale = 1.0 / self.network.shape.tokens() as f32;
        self.network.forward(|network| {
            let sizes = ints([network.shape.vocabulary, network.shape.padded()]);
            let arguments = ("logits", "targets", "token_losses", "logits", sizes, scale);
            network.launch(&loss::LOSS, arguments);
        });
        self.network.program.begin("backward");
        self.head_backward();
        self.update_matrices(&HEAD_ADAMW, Weight::Head, self.network.shape.vocabulary);
        for layer in (0..self.network.shape.layers).rev() {
            self.mlp_backward(layer);
            self.attention_backward(layer);
            let rows = 4 * self.network.shape.d + 3 * self.network.shape.ff;
            self.update_matrices(&LAYER_ADAMW, Weight::Qkv(layer), rows);
        }
        self.vector_gradients();
        self.network.program.end();
        self.network.program.begin("optimizer");
        self.update();
        self.network.program.end();
    }

    /// The gradient of a matrix.
    fn gradient(&self, weight: Weight) -> Pointer {
        let shape = self.network.shape;
        let row = shape.rows_of(weight).first - shape.matrices();
        self.at("grad_matrices").plus(row * shape.d * shape.dtype.bytes())
    }

    /// The gradient of a matrix of so many rows: the sum over tokens of products of `left`, of which
    /// rows begin `stride` elements apart, and `right [T, d]`.
    fn products(&mut self, weight: Weight, left: Pointer, stride: usize, right: Pointer) {
        let shape = self.network.shape;
        let rows = shape.rows_of(weight).rows;
        let spec = GemmSpec {
            a_transposed: true,
            lda: Some(stride),
            ..self.network.spec(rows, shape.d, shape.tokens())
        };
        let to = self.gradient(weight);
        self.wait(self.products, Lane::MAIN);
        self.network.program.gemm(self.products, spec, [left, right, to]);
    }

    fn head_backward(&mut self) {
        let shape = self.network.shape;
        let Shape { d, vocabulary, layers, .. } = shape;
        self.network.program.begin("head_backward");
        let [logits, input] = ["logits", "head_input"].map(|name| self.at(name));
        self.products(Weight::Head, logits, shape.padded(), input);
        let head = self.network.weight(Weight::Head);
        let spec = GemmSpec {
            lda: Some(shape.padded()),
            ..self.network.spec(shape.tokens(), d, vocabulary)
        };
        let grad = self.at("grad_input");
        self.network.multiply(spec, [logits, head, grad]);
        let x = self.network.activation("x", layers);
        let rounded = self.layer_gradient("grad_mlp", layers - 1).into();
        self.norm_backward(2 * layers, x, NULL, rounded);
        self.network.program.end();
    }

    /// Adds the gradient through a norm, of `grad_input`, to that of the residual stream, and rounds
    /// the sum for the GEMMs of the branch before it.
    fn norm_backward(&mut self, norm: usize, x: Pointer, residual: Operand, rounded: Operand) {
        let shape = self.network.shape;
        let d = shape.d;
        let partials = norm * norm::norm_blocks(&shape) * d * F32;
        let partials = self.at("grad_gains").plus(partials);
        let (roots, gain) = (self.network.roots(norm), self.network.gain(norm));
        let grads = ("grad_input", residual, "grad_x", rounded, partials);
        let sizes = (long(shape.tokens()), int(d));
        self.network.launch(&norm::BACKWARD, (x, roots, gain, grads, sizes));
    }

    fn mlp_backward(&mut self, layer: usize) {
        let Shape { d, ff, .. } = self.network.shape;
        let tokens = self.network.shape.tokens();
        self.network.program.begin("mlp_backward");
        let [grad_hidden, grad_input] = ["grad_hidden", "grad_input"].map(|name| self.at(name));
        let [grad, grad_gate_up, grad_middle] = ["grad_mlp", "grad_gate_up", "grad_middle"]
            .map(|name| self.layer_gradient(name, layer));
        let [hidden, gate_up, input, middle] = ["hidden", "gate_up", "mlp_input", "middle"]
            .map(|name| self.network.activation(name, layer));
        self.products(Weight::Down(layer), hidden, ff, grad);
        let down = self.network.weight(Weight::Down(layer));
        let spec = GemmSpec { b_transposed: true, ..self.network.spec(tokens, ff, d) };
        self.network.multiply(spec, [grad, down, grad_hidden]);
        let sizes = (long(tokens), int(ff));
        self.network.launch(&swiglu::BACKWARD, (gate_up, grad_hidden, grad_gate_up, sizes));
        self.products(Weight::GateUp(layer), grad_gate_up, 2 * ff, input);
        let weights = self.network.weight(Weight::GateUp(layer));
        let spec = self.network.spec(tokens, d, 2 * ff);
        self.network.multiply(spec, [grad_gate_up, weights, grad_input]);
        let residual = self.at("grad_x").into();
        self.norm_backward(2 * layer + 1, middle, residual, grad_middle.into());
        self.network.program.end();
    }

    fn attention_backward(&mut self, layer: usize) {
        let d = self.network.shape.d;
        let tokens = self.network.shape.tokens();
        self.network.program.begin("attention_backward");
        let [grad_attended, grad_input] = ["grad_attended", "grad_input"].map(|name| self.at(name));
        let [grad, grad_qkv] =
            ["grad_middle", "grad_qkv"].map(|name| self.layer_gradient(name, layer));
        let [attended, input, x] =
            ["attended", "qkv_input", "x"].map(|name| self.network.activation(name, layer));
        self.products(Weight::Out(layer), grad, d, attended);
        let out = self.network.weight(Weight::Out(layer));
        let spec = self.network.spec(tokens, d, d);
        self.network.multiply(spec, [grad, out, grad_attended]);
        self.network.attention_backward(layer, self.scratch, grad_attended, grad_qkv);
        self.network.rotate(grad_qkv, -1.0);
        self.products(Weight::Qkv(layer), grad_qkv, 3 * d, input);
        let weights = self.network.weight(Weight::Qkv(layer));
        let spec = self.network.spec(tokens, d, 3 * d);
        self.network.multiply(spec, [grad_qkv, weights, grad_input]);
        let residual = self.at("grad_x").into();
        let before = layer.checked_sub(1);
        let rounded = before.map_or(NULL, |layer| self.layer_gradient("grad_mlp", layer).into());
        self.norm_backward(2 * layer, x, residual, rounded);
        self.network.program.end();
    }

    /// Gradients of the embedding and of all gains.
    fn vector_gradients(&mut self) {
        let shape = self.network.shape;
        let Shape { d, vocabulary, .. } = shape;
        self.network.program.begin("vector_gradients");
        let sizes = (long(shape.tokens()), ints([d, vocabulary]));
        let arguments = ("tokens", "grad_x", "grad_vectors", sizes);
        self.network.launch(&embedding::GRADIENT, arguments);
        let gains = self.at("grad_vectors").plus(F32 * vocabulary * d);
        let sizes = ints([norm::norm_blocks(&shape), d]);
        self.network.launch(&norm::GAIN_GRADIENT, ("grad_gains", gains, sizes));
        self.network.program.end();
    }

    /// AdamW of everything that no update of a side lane has done.
    fn update(&mut self) {
        let shape = self.network.shape;
        self.wait(Lane::MAIN, self.products);
        let vectors = shape.matrices() * shape.d;
        let (kernel, elements) = match self.schedule {
            Schedule::Overlapped => (&VECTOR_ADAMW, vectors),
            Schedule::Serial => (&adamw::ADAMW, shape.parameters()),
        };
        let gradients = ("grad_vectors", "grad_matrices", "steps");
        self.update_rows(kernel, 0, gradients, [vectors, elements], Lane::MAIN);
        self.wait(Lane::MAIN, self.updates);
    }

    /// AdamW of matrices whose gradients are there, in the lane of updates.
    fn update_matrices(&mut self, kernel: &KernelSpec<Shape>, first: Weight, rows: usize) {
        if self.schedule == Schedule::Overlapped {
            let gradient = self.gradient(first);
            let row = self.network.shape.rows_of(first).first;
            self.wait(self.updates, self.products);
            let elements = [0, rows * self.network.shape.d];
            self.update_rows(
                kernel,
                row,
                ("grad_vectors", gradient, "steps"),
                elements,
                self.updates,
            );
        }
    }

    /// AdamW from a row of the arena on: so many elements with f32 gradients, and in all.
    fn update_rows(
        &mut self,
        kernel: &KernelSpec<Shape>,
        row: usize,
        gradients: impl Operands,
        elements: [usize; 2],
        lane: Lane,
    ) {
        let shape = self.network.shape;
        let from = |name: &str, element: usize| self.at(name).plus(row * shape.d * element);
        let state = ["parameters", "first_moments", "second_moments"].map(|name| from(name, F32));
        let next = NEXT_STATE.map(|name| from(name, F32));
        let copy = match shape.dtype {
            Dtype::Bf16 => from("next_weights", shape.dtype.bytes()).into(),
            _ => NULL,
        };
        let [rate, decay] = adamw::RATES;
        let arguments = (state, gradients, next, copy, elements.map(long), rate, decay);
        let launch = self.network.program.kernel(kernel, &shape, arguments);
        self.network.program.add(launch.in_lane(lane).programmatic());
    }
}
