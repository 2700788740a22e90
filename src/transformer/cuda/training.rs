//! A training step as a program: the forward pass, gradients from the last layer to the first,
//! AdamW in place.
//!
//! Gradients of matrices are computed for a group of layers at once, in batched GEMMs, because
//! those of a single layer do not fill a GPU.

use std::ops::Range;

use super::kernels::{adamw, embedding, gemm, loss, norm, swiglu};
use super::network::{F32_BYTES, NetworkProgram, round_to_bf16_bytes};
use super::rung_choices::{GradientSchedule, RungKernels};
use crate::attention::cuda::ScratchPointers;
use crate::transformer::shape::{LmShape, STATE_INPUTS, STATE_OUTPUTS, Weight};
use kernelgate::backend::program::{
    Lane, MemoryPurpose, NULL, Operand, Operands, Pointer, Program, int, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::libraries::gemm::GemmSpec;

/// Program of a training step, which updates the state in place and returns the losses before the
/// step.
pub fn step_program(
    shape: &LmShape,
    kernels: impl Into<RungKernels>,
    schedule: GradientSchedule,
) -> Program {
    let mut program = Program::new();
    let rounds = shape.dtype == Dtype::Bf16;
    for (name, next) in STATE_INPUTS.into_iter().zip(STATE_OUTPUTS) {
        let weights = name == STATE_INPUTS[0] && !rounds;
        let purpose = if weights { MemoryPurpose::Weights } else { MemoryPurpose::Momentum };
        program.add_state(name, next, purpose, [shape.arena_rows(), shape.d], Dtype::F32);
    }
    // The previous step rounded the weights from the parameters.
    let weights = match shape.dtype {
        Dtype::Bf16 => {
            let bytes = shape.dtype.bytes() * shape.parameter_count();
            let weights = program.add_packed("weights", MemoryPurpose::Weights, bytes, |inputs| {
                round_to_bf16_bytes(inputs.f32("parameters"))
            });
            program.mark_updated(weights);
            weights
        }
        _ => program.at("parameters"),
    };
    program.add_input("steps", MemoryPurpose::Inputs, F32_BYTES);
    let logits = shape.token_count() * shape.padded_vocabulary() * shape.dtype.bytes();
    program.add_scratch("logits", MemoryPurpose::Activations, logits);
    let network = NetworkProgram::new(program, shape, kernels.into(), weights, true);
    let mut training = TrainingStepWriter::new(network, schedule);
    training.write_training_step();
    training.network.program
}

/// A training step while its launches are added.
struct TrainingStepWriter {
    network: NetworkProgram,
    scratch: Option<ScratchPointers>,
    /// Number of layers whose matrix gradients are computed together.
    group: usize,
    /// Number of layers whose gradients of activations are kept: two groups, or all layers.
    kept: usize,
    /// Lane of the GEMMs that compute gradients of matrices.
    products: Lane,
    /// Lane of the AdamW updates.
    updates: Lane,
    /// Lanes that wait for the GEMMs which read a group's gradients of activations, one for even
    /// groups and one for odd groups. The list is empty if one lane has all GEMMs.
    readers: Vec<Lane>,
}

impl TrainingStepWriter {
    /// Declares the regions of gradients.
    fn new(mut network: NetworkProgram, schedule: GradientSchedule) -> Self {
        let shape = network.shape;
        let LmShape { d, ff, dtype, layers, .. } = shape;
        let (tokens, element) = (shape.token_count(), dtype.bytes());
        for (name, bytes) in [
            ("grad_vectors", F32_BYTES * shape.first_matrix_row() * d),
            ("grad_matrices", element * (shape.arena_rows() - shape.first_matrix_row()) * d),
            ("grad_x", F32_BYTES * tokens * d),
            ("grad_input", element * tokens * d),
            ("grad_hidden", element * tokens * ff),
            ("grad_attended", element * tokens * d),
            ("grad_gains", F32_BYTES * shape.norm_count() * norm::norm_backward_blocks(&shape) * d),
        ] {
            network.program.add_scratch(name, MemoryPurpose::Gradients, bytes);
        }
        let group = match schedule {
            GradientSchedule::Serial => 1,
            GradientSchedule::Overlapped { group } => group.min(layers),
        };
        let kept = if group == layers { layers } else { 2 * group };
        for (name, columns) in
            [("grad_mlp", d), ("grad_gate_up", 2 * ff), ("grad_middle", d), ("grad_qkv", 3 * d)]
        {
            network.declare_layers(
                name,
                MemoryPurpose::Gradients,
                element * tokens * columns,
                kept,
            );
        }
        let scratch = network.declare_attention_backward();
        let [products, updates] = match schedule {
            GradientSchedule::Serial => [Lane::MAIN_LANE; 2],
            GradientSchedule::Overlapped { .. } => [(); 2].map(|()| network.program.lane()),
        };
        let readers = match schedule {
            GradientSchedule::Serial => vec![],
            GradientSchedule::Overlapped { .. } => {
                (0..kept / group).map(|_| network.program.lane()).collect()
            }
        };
        Self { network, scratch, group, kept, products, updates, readers }
    }

    /// Address of a gradient of a layer's activations, which the GEMMs of its group read.
    fn layer_gradient(&self, name: &str, layer: usize) -> Pointer {
        self.at(name).offset_by(layer % self.kept * self.network.stride_bytes(name))
    }

    /// Makes later launches of a lane wait for another lane.
    fn make_lane_wait(&mut self, waiting: Lane, on: Lane) {
        if waiting != on {
            self.network.program.wait(waiting, on);
        }
    }

    fn at(&self, name: &str) -> Pointer {
        self.network.program.at(name)
    }

    fn write_training_step(&mut self) {
        let scale = 1.0 / self.network.shape.token_count() as f32;
        self.network.add_forward_pass(|network| {
            let sizes = int_operands([network.shape.vocabulary, network.shape.padded_vocabulary()]);
            let arguments = ("logits", "targets", "token_losses", "logits", sizes, scale);
            network.add_launch(&loss::LOSS_KERNEL, arguments);
        });
        self.network.program.begin_range("backward");
        self.add_output_head_backward();
        let vocabulary = self.network.shape.vocabulary;
        self.add_updates_in_own_lane(Weight::Head, vocabulary);
        let mut end = self.network.shape.layers;
        while end > 0 {
            let group = (end - 1) / self.group * self.group..end;
            for layer in group.clone().rev() {
                if layer == group.start {
                    self.wait_before_overwriting_layer(layer);
                }
                self.add_mlp_backward(layer);
                self.add_attention_layer_backward(layer);
            }
            self.add_matrix_gradients(&group);
            end = group.start;
        }
        self.add_embedding_and_gain_gradients();
        self.network.program.end_range();
        self.network.program.begin_range("optimizer");
        self.add_adamw_updates();
        self.network.program.end_range();
    }

    /// Waits for the GEMMs of a side lane that read the previous group's gradients, because this
    /// layer begins to overwrite them.
    fn wait_before_overwriting_layer(&mut self, layer: usize) {
        let read = layer / self.group + 1;
        if !self.readers.is_empty() && read * self.group < self.network.shape.layers {
            let reader = self.readers[read % self.readers.len()];
            self.network.program.wait(Lane::MAIN_LANE, reader);
        }
    }

    /// Address of the gradient of a matrix.
    fn gradient(&self, weight: Weight) -> Pointer {
        let shape = self.network.shape;
        let row = shape.arena_rows_of_weight(weight).first - shape.first_matrix_row();
        self.at("grad_matrices").offset_by(row * shape.d * shape.dtype.bytes())
    }

    /// Specification of the GEMM that computes the gradient of a matrix. The GEMM sums over tokens
    /// the products of columns of `[T, columns]` and of `[T, d]`.
    fn weight_gradient_gemm(&self, weight: Weight, columns: usize) -> GemmSpec {
        let shape = self.network.shape;
        let rows = shape.arena_rows_of_weight(weight).rows;
        GemmSpec {
            a_transposed: true,
            lda: Some(columns),
            ..self.network.gemm_spec(rows, shape.d, shape.token_count())
        }
    }

    /// Adds the gradients of the matrices of a group of layers, with one GEMM for each kind of
    /// matrix, and their update.
    fn add_matrix_gradients(&mut self, group: &Range<usize>) {
        let shape = self.network.shape;
        let LmShape { d, ff, .. } = shape;
        let first = group.start;
        let layer_rows = 4 * d + 3 * ff;
        self.network.program.begin_range("matrix_gradients");
        self.make_lane_wait(self.products, Lane::MAIN_LANE);
        let activation =
            |name| (self.network.activation(name, first), self.network.stride_bytes(name));
        let gradient = |name| (self.layer_gradient(name, first), self.network.stride_bytes(name));
        let products = [
            (Weight::Down(first), ff, activation("hidden"), gradient("grad_mlp")),
            (Weight::GateUp(first), 2 * ff, gradient("grad_gate_up"), activation("mlp_input")),
            (Weight::Out(first), d, gradient("grad_middle"), activation("attended")),
            (Weight::Qkv(first), 3 * d, gradient("grad_qkv"), activation("qkv_input")),
        ];
        for (weight, columns, (left, left_stride), (right, right_stride)) in products {
            let spec = GemmSpec {
                batch_count: group.len(),
                stride_a: Some(left_stride / shape.dtype.bytes()),
                stride_b: Some(right_stride / shape.dtype.bytes()),
                stride_d: Some(layer_rows * d),
                ..self.weight_gradient_gemm(weight, columns)
            };
            let to = self.gradient(weight);
            self.network.program.gemm(self.products, spec, [left, right, to]);
        }
        if !self.readers.is_empty() {
            let reader = self.readers[first / self.group % self.readers.len()];
            self.network.program.wait(reader, self.products);
        }
        self.network.program.end_range();
        self.add_updates_in_own_lane(Weight::Qkv(first), group.len() * layer_rows);
    }

    fn add_output_head_backward(&mut self) {
        let shape = self.network.shape;
        let LmShape { d, vocabulary, layers, .. } = shape;
        self.network.program.begin_range("head_backward");
        let [logits, input] = ["logits", "head_input"].map(|name| self.at(name));
        let (spec, to) = (
            self.weight_gradient_gemm(Weight::Head, shape.padded_vocabulary()),
            self.gradient(Weight::Head),
        );
        self.make_lane_wait(self.products, Lane::MAIN_LANE);
        self.network.program.gemm(self.products, spec, [logits, input, to]);
        let head = self.network.weight(Weight::Head);
        let spec = GemmSpec {
            lda: Some(shape.padded_vocabulary()),
            ..self.network.gemm_spec(shape.token_count(), d, vocabulary)
        };
        let grad = self.at("grad_input");
        self.network.add_gemm(spec, [logits, head, grad]);
        let x = self.network.activation("x", layers);
        let rounded = self.layer_gradient("grad_mlp", layers - 1).into();
        self.add_norm_backward(2 * layers, x, NULL, rounded);
        self.network.program.end_range();
    }

    /// Adds the gradient through a norm, from `grad_input`, to that of the residual stream, and
    /// rounds the sum for the GEMMs of the branch before the norm.
    fn add_norm_backward(&mut self, norm: usize, x: Pointer, residual: Operand, rounded: Operand) {
        let shape = self.network.shape;
        let d = shape.d;
        let partials = norm * norm::norm_backward_blocks(&shape) * d * F32_BYTES;
        let partials = self.at("grad_gains").offset_by(partials);
        let (roots, gain) = (self.network.inverse_roots(norm), self.network.gain_pointer(norm));
        let grads = ("grad_input", residual, "grad_x", rounded, partials);
        let sizes = (long_operand(shape.token_count()), int(d));
        self.network.add_launch(&norm::NORM_BACKWARD_KERNEL, (x, roots, gain, grads, sizes));
    }

    fn add_mlp_backward(&mut self, layer: usize) {
        let LmShape { d, ff, .. } = self.network.shape;
        let tokens = self.network.shape.token_count();
        self.network.program.begin_range("mlp_backward");
        let [grad_hidden, grad_input] = ["grad_hidden", "grad_input"].map(|name| self.at(name));
        let [grad, grad_gate_up, grad_middle] = ["grad_mlp", "grad_gate_up", "grad_middle"]
            .map(|name| self.layer_gradient(name, layer));
        let [gate_up, middle] =
            ["gate_up", "middle"].map(|name| self.network.activation(name, layer));
        let down = self.network.weight(Weight::Down(layer));
        if let Some(product) = self.network.epilogue_gemm_if_used() {
            let operands = product.swiglu_backward([grad, down, gate_up, grad_gate_up]);
            let launch =
                self.network.program.kernel_launch(&gemm::SWIGLU_BACKWARD_GEMM, &product, operands);
            self.network.program.add(launch.programmatic());
        } else {
            let spec = GemmSpec { b_transposed: true, ..self.network.gemm_spec(tokens, ff, d) };
            self.network.add_gemm(spec, [grad, down, grad_hidden]);
            let sizes = (long_operand(tokens), int(ff));
            self.network.add_launch(
                &swiglu::SWIGLU_BACKWARD_KERNEL,
                (gate_up, grad_hidden, grad_gate_up, sizes),
            );
        }
        let weights = self.network.weight(Weight::GateUp(layer));
        let spec = self.network.gemm_spec(tokens, d, 2 * ff);
        self.network.add_gemm(spec, [grad_gate_up, weights, grad_input]);
        let residual = self.at("grad_x").into();
        self.add_norm_backward(2 * layer + 1, middle, residual, grad_middle.into());
        self.network.program.end_range();
    }

    fn add_attention_layer_backward(&mut self, layer: usize) {
        let d = self.network.shape.d;
        let tokens = self.network.shape.token_count();
        self.network.program.begin_range("attention_backward");
        let [grad_attended, grad_input] = ["grad_attended", "grad_input"].map(|name| self.at(name));
        let [grad, grad_qkv] =
            ["grad_middle", "grad_qkv"].map(|name| self.layer_gradient(name, layer));
        let x = self.network.activation("x", layer);
        let out = self.network.weight(Weight::Out(layer));
        let spec = self.network.gemm_spec(tokens, d, d);
        self.network.add_gemm(spec, [grad, out, grad_attended]);
        self.network.attention_backward(layer, self.scratch, grad_attended, grad_qkv);
        self.network.add_rotation(grad_qkv, -1.0);
        let weights = self.network.weight(Weight::Qkv(layer));
        let spec = self.network.gemm_spec(tokens, d, 3 * d);
        self.network.add_gemm(spec, [grad_qkv, weights, grad_input]);
        let residual = self.at("grad_x").into();
        let before = layer.checked_sub(1);
        let rounded = before.map_or(NULL, |layer| self.layer_gradient("grad_mlp", layer).into());
        self.add_norm_backward(2 * layer, x, residual, rounded);
        self.network.program.end_range();
    }

    /// Adds the launches of the gradients of the embedding and of all gains.
    fn add_embedding_and_gain_gradients(&mut self) {
        let shape = self.network.shape;
        let LmShape { d, vocabulary, .. } = shape;
        self.network.program.begin_range("vector_gradients");
        let sizes = (long_operand(shape.token_count()), int_operands([d, vocabulary]));
        let arguments = ("tokens", "grad_x", "grad_vectors", sizes);
        self.network.add_launch(&embedding::EMBEDDING_GRADIENT_KERNEL, arguments);
        let gains = self.at("grad_vectors").offset_by(F32_BYTES * vocabulary * d);
        let sizes = int_operands([norm::norm_backward_blocks(&shape), d]);
        self.network.add_launch(&norm::GAIN_GRADIENT_KERNEL, ("grad_gains", gains, sizes));
        self.network.program.end_range();
    }

    /// Adds AdamW of embedding and gains, and of all matrices if a single lane has everything.
    fn add_adamw_updates(&mut self) {
        let shape = self.network.shape;
        self.make_lane_wait(Lane::MAIN_LANE, self.products);
        let rows = match self.updates {
            Lane::MAIN_LANE => shape.arena_rows(),
            _ => shape.first_matrix_row(),
        };
        let gradients = ("grad_vectors", "grad_matrices", "steps");
        self.add_update_of_rows(0..rows, gradients, Lane::MAIN_LANE);
        self.make_lane_wait(Lane::MAIN_LANE, self.updates);
        for reader in std::mem::take(&mut self.readers) {
            self.network.program.wait(Lane::MAIN_LANE, reader);
        }
    }

    /// Adds AdamW, in the lane of updates, for matrices whose gradients are complete and which no
    /// later GEMM reads.
    fn add_updates_in_own_lane(&mut self, first: Weight, rows: usize) {
        if self.updates == Lane::MAIN_LANE {
            return;
        }
        let gradient = self.gradient(first);
        let row = self.network.shape.arena_rows_of_weight(first).first;
        self.make_lane_wait(self.updates, self.products);
        self.make_lane_wait(self.updates, Lane::MAIN_LANE);
        // Ranges of phases follow one another and are not nested.
        self.network.program.end_range();
        self.network.program.begin_range("optimizer");
        self.add_update_of_rows(row..row + rows, ("grad_vectors", gradient, "steps"), self.updates);
        self.network.program.end_range();
        self.network.program.begin_range("backward");
    }

    /// Adds AdamW of a range of rows of the arena. The vectors, which come first in the arena, have
    /// f32 gradients.
    fn add_update_of_rows(&mut self, rows: Range<usize>, gradients: impl Operands, lane: Lane) {
        let shape = self.network.shape;
        let from =
            |name: &str, element: usize| self.at(name).offset_by(rows.start * shape.d * element);
        let state = STATE_INPUTS.map(|name| from(name, F32_BYTES));
        let copy = match shape.dtype {
            Dtype::Bf16 => from("weights", shape.dtype.bytes()).into(),
            _ => NULL,
        };
        let vectors = shape.first_matrix_row().saturating_sub(rows.start) * shape.d;
        let elements = [vectors, rows.len() * shape.d].map(long_operand);
        let [rate, decay] = adamw::ADAMW_RATES;
        let arguments = (state, gradients, state, copy, elements, rate, decay);
        // Model shape with about the same number of rows: two for each row of the vocabulary, and
        // the gain of the head.
        let updated = LmShape { layers: 0, vocabulary: rows.len().div_ceil(2), ..shape };
        let launch = self.network.program.kernel_launch(&adamw::ADAMW_KERNEL, &updated, arguments);
        self.network.program.add(launch.in_lane(lane).programmatic());
    }
}
