//! A training step of the language model as a GPU program: the forward pass, gradients from the
//! last layer to the first, AdamW in place.
//!
//! Weight gradients are computed for a group of layers at once in batched GEMMs, because those of a
//! single layer do not fill a GPU.

use std::ops::Range;

use super::kernels::{adamw, embedding, gemm, loss, norm, swiglu};
use super::network::{
    BYTES_PER_F32, LanguageModelProgramBuilder, round_f32_parameters_to_bf16_bytes,
};
use super::rung_choices::{RungKernelChoice, WeightGradientSchedule};
use crate::attention::cuda::AttentionBackwardScratchPointers;
use crate::transformer::shape::{
    LanguageModelShape, ParameterTensor, TRAINING_STATE_INPUTS, TRAINING_STATE_OUTPUTS,
};
use kernelgate::backend::program::{
    LaunchArgument, LaunchArgumentList, LaunchProgram, MemoryPurpose, NULL, ProgramLane,
    RegionPointer, int_operand, int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::libraries::gemm::GemmSpec;

/// GPU program of a training step, which updates parameters and moments in place and returns the
/// losses before the update.
pub fn training_step_program(
    shape: &LanguageModelShape,
    kernels: impl Into<RungKernelChoice>,
    schedule: WeightGradientSchedule,
) -> LaunchProgram {
    let mut program = LaunchProgram::new();
    let rounds = shape.dtype == Dtype::Bf16;
    for (name, next) in TRAINING_STATE_INPUTS.into_iter().zip(TRAINING_STATE_OUTPUTS) {
        let weights = name == TRAINING_STATE_INPUTS[0] && !rounds;
        let purpose = if weights { MemoryPurpose::Weights } else { MemoryPurpose::Momentum };
        program.add_state_updated_in_place(
            name,
            next,
            purpose,
            [shape.rows_in_parameter_arena(), shape.model_width],
            Dtype::F32,
        );
    }
    // The bf16 weights are an input of the training step, because the AdamW kernel of the previous
    // step already rounded them from the parameters.
    let weights = match shape.dtype {
        Dtype::Bf16 => {
            let bytes = shape.dtype.bytes_per_element() * shape.number_of_parameters();
            let weights = program.add_packed_from_inputs(
                "weights",
                MemoryPurpose::Weights,
                bytes,
                |inputs| round_f32_parameters_to_bf16_bytes(inputs.f32_elements("parameters")),
            );
            program.mark_packed_contents_updated(weights);
            weights
        }
        _ => program.pointer_to("parameters"),
    };
    program.add_input("steps", MemoryPurpose::Inputs, BYTES_PER_F32);
    let logits =
        shape.tokens_in_batch() * shape.padded_logit_columns() * shape.dtype.bytes_per_element();
    program.add_scratch("logits", MemoryPurpose::Activations, logits);
    let network = LanguageModelProgramBuilder::with_inputs_and_activations(
        program,
        shape,
        kernels.into(),
        weights,
        true,
    );
    let mut training = TrainingStepProgramBuilder::with_gradient_regions(network, schedule);
    training.add_all_launches_of_training_step();
    training.network.program
}

/// Builder of a training step's GPU program, while its launches are added.
struct TrainingStepProgramBuilder {
    network: LanguageModelProgramBuilder,
    scratch: Option<AttentionBackwardScratchPointers>,
    /// Number of layers in a group whose weight gradients are computed together in batched GEMMs.
    layers_per_gradient_group: usize,
    /// Number of layers whose activation gradients are kept in memory: two groups of layers, or all
    /// layers.
    layers_with_kept_gradients: usize,
    /// Lane (parallel branch of the program) of the GEMMs that compute weight gradients.
    weight_gradient_lane: ProgramLane,
    /// Lane (parallel branch of the program) of the AdamW updates.
    adamw_lane: ProgramLane,
    /// Lanes that mark when the GEMMs have read a group's activation gradients: one lane for even
    /// groups and one for odd groups. The list of marking lanes is empty if all launches are in the
    /// main lane.
    gradient_reader_lanes: Vec<ProgramLane>,
}

impl TrainingStepProgramBuilder {
    /// Adds the memory regions of all gradients to the program.
    fn with_gradient_regions(
        mut network: LanguageModelProgramBuilder,
        schedule: WeightGradientSchedule,
    ) -> Self {
        let shape = network.shape;
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, dtype, layers, .. } =
            shape;
        let (tokens, element) = (shape.tokens_in_batch(), dtype.bytes_per_element());
        for (name, bytes) in [
            ("grad_vectors", BYTES_PER_F32 * shape.first_arena_row_of_matrices() * d),
            (
                "grad_matrices",
                element
                    * (shape.rows_in_parameter_arena() - shape.first_arena_row_of_matrices())
                    * d,
            ),
            ("grad_x", BYTES_PER_F32 * tokens * d),
            ("grad_input", element * tokens * d),
            ("grad_hidden", element * tokens * ff),
            ("grad_attended", element * tokens * d),
            (
                "grad_gains",
                BYTES_PER_F32
                    * shape.number_of_norms()
                    * norm::norm_backward_block_count(&shape)
                    * d,
            ),
        ] {
            network.program.add_scratch(name, MemoryPurpose::Gradients, bytes);
        }
        let group = match schedule {
            WeightGradientSchedule::SerialLaunches => 1,
            WeightGradientSchedule::OverlapsActivationGradients {
                layers_per_gradient_group: group,
            } => group.min(layers),
        };
        let kept = if group == layers { layers } else { 2 * group };
        for (name, columns) in
            [("grad_mlp", d), ("grad_gate_up", 2 * ff), ("grad_middle", d), ("grad_qkv", 3 * d)]
        {
            network.declare_region_of_layers(
                name,
                MemoryPurpose::Gradients,
                element * tokens * columns,
                kept,
            );
        }
        let scratch = network.declare_attention_backward_regions();
        let [products, updates] = match schedule {
            WeightGradientSchedule::SerialLaunches => [ProgramLane::MAIN_LANE; 2],
            WeightGradientSchedule::OverlapsActivationGradients { .. } => {
                [(); 2].map(|()| network.program.add_lane())
            }
        };
        let readers = match schedule {
            WeightGradientSchedule::SerialLaunches => vec![],
            WeightGradientSchedule::OverlapsActivationGradients { .. } => {
                (0..kept / group).map(|_| network.program.add_lane()).collect()
            }
        };
        Self {
            network,
            scratch,
            layers_per_gradient_group: group,
            layers_with_kept_gradients: kept,
            weight_gradient_lane: products,
            adamw_lane: updates,
            gradient_reader_lanes: readers,
        }
    }

    /// Device address of a gradient of a layer's activations, which the weight-gradient GEMMs of
    /// the layer's group read.
    fn address_of_activation_gradient(&self, name: &str, layer: usize) -> RegionPointer {
        self.pointer_to(name).offset_by(
            layer % self.layers_with_kept_gradients * self.network.bytes_between_layers(name),
        )
    }

    /// Makes later launches of the lane `waiting` wait for the launches of the lane `on` so far.
    fn make_later_launches_wait_for_lane(&mut self, waiting: ProgramLane, on: ProgramLane) {
        if waiting != on {
            self.network.program.make_lane_wait_for_lane(waiting, on);
        }
    }

    fn pointer_to(&self, name: &str) -> RegionPointer {
        self.network.program.pointer_to(name)
    }

    fn add_all_launches_of_training_step(&mut self) {
        let scale = 1.0 / self.network.shape.tokens_in_batch() as f32;
        self.network.add_whole_forward_pass(|network| {
            let sizes =
                int_operands([network.shape.vocabulary_size, network.shape.padded_logit_columns()]);
            let arguments = ("logits", "targets", "token_losses", "logits", sizes, scale);
            network.add_launch_with_pdl(&loss::LOSS_AND_LOGIT_GRADIENT_KERNEL, arguments);
        });
        self.network.program.begin_named_range("backward");
        self.add_backward_pass_of_output_head();
        let vocabulary = self.network.shape.vocabulary_size;
        self.add_concurrent_update_of_matrices(ParameterTensor::LogitProjection, vocabulary);
        let mut end = self.network.shape.layers;
        while end > 0 {
            let group =
                (end - 1) / self.layers_per_gradient_group * self.layers_per_gradient_group..end;
            for layer in group.clone().rev() {
                if layer == group.start {
                    self.wait_for_readers_of_overwritten_gradients(layer);
                }
                self.add_backward_pass_of_swiglu_block(layer);
                self.add_backward_pass_of_attention_block(layer);
            }
            self.add_weight_gradients_and_update_of_group(&group);
            end = group.start;
        }
        self.add_gradients_of_embedding_and_gains();
        self.network.program.end_innermost_range();
        self.network.program.begin_named_range("optimizer");
        self.add_final_adamw_update();
        self.network.program.end_innermost_range();
    }

    /// Makes the main lane wait until a side lane's GEMMs have read the activation gradients that
    /// this layer begins to overwrite.
    fn wait_for_readers_of_overwritten_gradients(&mut self, layer: usize) {
        let read = layer / self.layers_per_gradient_group + 1;
        if !self.gradient_reader_lanes.is_empty()
            && read * self.layers_per_gradient_group < self.network.shape.layers
        {
            let reader = self.gradient_reader_lanes[read % self.gradient_reader_lanes.len()];
            self.network.program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, reader);
        }
    }

    /// Device address of the gradient of a weight matrix.
    fn address_of_weight_gradient(&self, weight: ParameterTensor) -> RegionPointer {
        let shape = self.network.shape;
        let row = shape.arena_rows_of_tensor(weight).first_arena_row
            - shape.first_arena_row_of_matrices();
        self.pointer_to("grad_matrices")
            .offset_by(row * shape.model_width * shape.dtype.bytes_per_element())
    }

    /// Specification of the GEMM that computes the gradient of a weight matrix. The weight-gradient
    /// GEMM multiplies the transposed `[T, columns]` by `[T, d]`, a sum over the T tokens.
    fn weight_gradient_gemm_spec(&self, weight: ParameterTensor, columns: usize) -> GemmSpec {
        let shape = self.network.shape;
        let rows = shape.arena_rows_of_tensor(weight).arena_row_count;
        GemmSpec {
            a_transposed: true,
            lda: Some(columns),
            ..self.network.gemm_spec_in_model_dtype(
                rows,
                shape.model_width,
                shape.tokens_in_batch(),
            )
        }
    }

    /// Adds the weight-gradient GEMMs of a group of layers, one batched GEMM for each kind of
    /// matrix, and the AdamW update of the group.
    fn add_weight_gradients_and_update_of_group(&mut self, group: &Range<usize>) {
        let shape = self.network.shape;
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. } = shape;
        let first = group.start;
        let layer_rows = 4 * d + 3 * ff;
        self.network.program.begin_named_range("matrix_gradients");
        self.make_later_launches_wait_for_lane(self.weight_gradient_lane, ProgramLane::MAIN_LANE);
        let activation = |name| {
            (self.network.activation_address(name, first), self.network.bytes_between_layers(name))
        };
        let gradient = |name| {
            (
                self.address_of_activation_gradient(name, first),
                self.network.bytes_between_layers(name),
            )
        };
        let products = [
            (
                ParameterTensor::DownProjectionOfLayer(first),
                ff,
                activation("hidden"),
                gradient("grad_mlp"),
            ),
            (
                ParameterTensor::GateUpProjectionOfLayer(first),
                2 * ff,
                gradient("grad_gate_up"),
                activation("mlp_input"),
            ),
            (
                ParameterTensor::AttentionOutputProjectionOfLayer(first),
                d,
                gradient("grad_middle"),
                activation("attended"),
            ),
            (
                ParameterTensor::QkvProjectionOfLayer(first),
                3 * d,
                gradient("grad_qkv"),
                activation("qkv_input"),
            ),
        ];
        for (weight, columns, (left, left_stride), (right, right_stride)) in products {
            let spec = GemmSpec {
                batch_count: group.len(),
                batch_stride_a: Some(left_stride / shape.dtype.bytes_per_element()),
                batch_stride_b: Some(right_stride / shape.dtype.bytes_per_element()),
                batch_stride_d: Some(layer_rows * d),
                ..self.weight_gradient_gemm_spec(weight, columns)
            };
            let to = self.address_of_weight_gradient(weight);
            self.network.program.add_gemm(self.weight_gradient_lane, spec, [left, right, to]);
        }
        if !self.gradient_reader_lanes.is_empty() {
            let reader = self.gradient_reader_lanes
                [first / self.layers_per_gradient_group % self.gradient_reader_lanes.len()];
            self.network.program.make_lane_wait_for_lane(reader, self.weight_gradient_lane);
        }
        self.network.program.end_innermost_range();
        self.add_concurrent_update_of_matrices(
            ParameterTensor::QkvProjectionOfLayer(first),
            group.len() * layer_rows,
        );
    }

    fn add_backward_pass_of_output_head(&mut self) {
        let shape = self.network.shape;
        let LanguageModelShape { model_width: d, vocabulary_size: vocabulary, layers, .. } = shape;
        self.network.program.begin_named_range("head_backward");
        let [logits, input] = ["logits", "head_input"].map(|name| self.pointer_to(name));
        let (spec, to) = (
            self.weight_gradient_gemm_spec(
                ParameterTensor::LogitProjection,
                shape.padded_logit_columns(),
            ),
            self.address_of_weight_gradient(ParameterTensor::LogitProjection),
        );
        self.make_later_launches_wait_for_lane(self.weight_gradient_lane, ProgramLane::MAIN_LANE);
        self.network.program.add_gemm(self.weight_gradient_lane, spec, [logits, input, to]);
        let head = self.network.weight_address(ParameterTensor::LogitProjection);
        let spec = GemmSpec {
            lda: Some(shape.padded_logit_columns()),
            ..self.network.gemm_spec_in_model_dtype(shape.tokens_in_batch(), d, vocabulary)
        };
        let grad = self.pointer_to("grad_input");
        self.network.add_gemm_in_main_lane(spec, [logits, head, grad]);
        let x = self.network.activation_address("x", layers);
        let rounded = self.address_of_activation_gradient("grad_mlp", layers - 1).into();
        self.add_rms_norm_backward_launch(2 * layers, x, NULL, rounded);
        self.network.program.end_innermost_range();
    }

    /// Adds the launch of an RMSNorm's backward pass, which adds the gradient `grad_input` to that
    /// of the residual stream and rounds the sum for the GEMMs of the preceding branch.
    fn add_rms_norm_backward_launch(
        &mut self,
        norm: usize,
        x: RegionPointer,
        residual: LaunchArgument,
        rounded: LaunchArgument,
    ) {
        let shape = self.network.shape;
        let d = shape.model_width;
        let partials = norm * norm::norm_backward_block_count(&shape) * d * BYTES_PER_F32;
        let partials = self.pointer_to("grad_gains").offset_by(partials);
        let (roots, gain) =
            (self.network.inverse_rms_address(norm), self.network.gain_address(norm));
        let grads = ("grad_input", residual, "grad_x", rounded, partials);
        let sizes = (long_operand(shape.tokens_in_batch()), int_operand(d));
        self.network
            .add_launch_with_pdl(&norm::RMS_NORM_BACKWARD_KERNEL, (x, roots, gain, grads, sizes));
    }

    fn add_backward_pass_of_swiglu_block(&mut self, layer: usize) {
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. } = self.network.shape;
        let tokens = self.network.shape.tokens_in_batch();
        self.network.program.begin_named_range("mlp_backward");
        let [grad_hidden, grad_input] =
            ["grad_hidden", "grad_input"].map(|name| self.pointer_to(name));
        let [grad, grad_gate_up, grad_middle] = ["grad_mlp", "grad_gate_up", "grad_middle"]
            .map(|name| self.address_of_activation_gradient(name, layer));
        let [gate_up, middle] =
            ["gate_up", "middle"].map(|name| self.network.activation_address(name, layer));
        let down = self.network.weight_address(ParameterTensor::DownProjectionOfLayer(layer));
        if let Some(product) = self.network.epilogue_gemm_parameters_if_used() {
            let operands =
                product.swiglu_backward_kernel_arguments([grad, down, gate_up, grad_gate_up]);
            let launch = self.network.program.make_kernel_launch(
                &gemm::SWIGLU_BACKWARD_EPILOGUE_GEMM,
                &product,
                operands,
            );
            self.network.program.add_prepared_launch(launch.with_programmatic_dependent_launch());
        } else {
            let spec = GemmSpec {
                b_transposed: true,
                ..self.network.gemm_spec_in_model_dtype(tokens, ff, d)
            };
            self.network.add_gemm_in_main_lane(spec, [grad, down, grad_hidden]);
            let sizes = (long_operand(tokens), int_operand(ff));
            self.network.add_launch_with_pdl(
                &swiglu::SWIGLU_BACKWARD_KERNEL,
                (gate_up, grad_hidden, grad_gate_up, sizes),
            );
        }
        let weights = self.network.weight_address(ParameterTensor::GateUpProjectionOfLayer(layer));
        let spec = self.network.gemm_spec_in_model_dtype(tokens, d, 2 * ff);
        self.network.add_gemm_in_main_lane(spec, [grad_gate_up, weights, grad_input]);
        let residual = self.pointer_to("grad_x").into();
        self.add_rms_norm_backward_launch(2 * layer + 1, middle, residual, grad_middle.into());
        self.network.program.end_innermost_range();
    }

    fn add_backward_pass_of_attention_block(&mut self, layer: usize) {
        let d = self.network.shape.model_width;
        let tokens = self.network.shape.tokens_in_batch();
        self.network.program.begin_named_range("attention_backward");
        let [grad_attended, grad_input] =
            ["grad_attended", "grad_input"].map(|name| self.pointer_to(name));
        let [grad, grad_qkv] = ["grad_middle", "grad_qkv"]
            .map(|name| self.address_of_activation_gradient(name, layer));
        let x = self.network.activation_address("x", layer);
        let out =
            self.network.weight_address(ParameterTensor::AttentionOutputProjectionOfLayer(layer));
        let spec = self.network.gemm_spec_in_model_dtype(tokens, d, d);
        self.network.add_gemm_in_main_lane(spec, [grad, out, grad_attended]);
        self.network.add_attention_backward_of_layer(layer, self.scratch, grad_attended, grad_qkv);
        self.network.add_rope_launch(grad_qkv, -1.0);
        let weights = self.network.weight_address(ParameterTensor::QkvProjectionOfLayer(layer));
        let spec = self.network.gemm_spec_in_model_dtype(tokens, d, 3 * d);
        self.network.add_gemm_in_main_lane(spec, [grad_qkv, weights, grad_input]);
        let residual = self.pointer_to("grad_x").into();
        let before = layer.checked_sub(1);
        let rounded = before
            .map_or(NULL, |layer| self.address_of_activation_gradient("grad_mlp", layer).into());
        self.add_rms_norm_backward_launch(2 * layer, x, residual, rounded);
        self.network.program.end_innermost_range();
    }

    /// Adds the launches that compute the gradients of the embedding and of all RMSNorm gains.
    fn add_gradients_of_embedding_and_gains(&mut self) {
        let shape = self.network.shape;
        let LanguageModelShape { model_width: d, vocabulary_size: vocabulary, .. } = shape;
        self.network.program.begin_named_range("vector_gradients");
        let sizes = (long_operand(shape.tokens_in_batch()), int_operands([d, vocabulary]));
        let arguments = ("tokens", "grad_x", "grad_vectors", sizes);
        self.network
            .add_launch_with_pdl(&embedding::FIXED_ORDER_EMBEDDING_GRADIENT_KERNEL, arguments);
        let gains = self.pointer_to("grad_vectors").offset_by(BYTES_PER_F32 * vocabulary * d);
        let sizes = int_operands([norm::norm_backward_block_count(&shape), d]);
        self.network
            .add_launch_with_pdl(&norm::SUM_GAIN_GRADIENTS_KERNEL, ("grad_gains", gains, sizes));
        self.network.program.end_innermost_range();
    }

    /// Adds the last AdamW launch: of embedding and gains, or of all parameters if all launches are
    /// in the main lane.
    fn add_final_adamw_update(&mut self) {
        let shape = self.network.shape;
        self.make_later_launches_wait_for_lane(ProgramLane::MAIN_LANE, self.weight_gradient_lane);
        let rows = match self.adamw_lane {
            ProgramLane::MAIN_LANE => shape.rows_in_parameter_arena(),
            _ => shape.first_arena_row_of_matrices(),
        };
        let gradients = ("grad_vectors", "grad_matrices", "steps");
        self.add_adamw_launch_for_arena_rows(0..rows, gradients, ProgramLane::MAIN_LANE);
        self.make_later_launches_wait_for_lane(ProgramLane::MAIN_LANE, self.adamw_lane);
        for reader in std::mem::take(&mut self.gradient_reader_lanes) {
            self.network.program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, reader);
        }
    }

    /// Adds the AdamW launch, in the lane of updates, of matrices whose gradients are complete and
    /// which no later GEMM reads.
    fn add_concurrent_update_of_matrices(&mut self, first: ParameterTensor, rows: usize) {
        if self.adamw_lane == ProgramLane::MAIN_LANE {
            return;
        }
        let gradient = self.address_of_weight_gradient(first);
        let row = self.network.shape.arena_rows_of_tensor(first).first_arena_row;
        self.make_later_launches_wait_for_lane(self.adamw_lane, self.weight_gradient_lane);
        self.make_later_launches_wait_for_lane(self.adamw_lane, ProgramLane::MAIN_LANE);
        // The NVTX ranges of phases follow one another and are not nested.
        self.network.program.end_innermost_range();
        self.network.program.begin_named_range("optimizer");
        self.add_adamw_launch_for_arena_rows(
            row..row + rows,
            ("grad_vectors", gradient, "steps"),
            self.adamw_lane,
        );
        self.network.program.end_innermost_range();
        self.network.program.begin_named_range("backward");
    }

    /// Adds the AdamW launch for a range of rows of the parameter arena. Embedding and gains, which
    /// come first in the parameter arena, have f32 gradients; matrices have gradients in the
    /// model's dtype.
    fn add_adamw_launch_for_arena_rows(
        &mut self,
        rows: Range<usize>,
        gradients: impl LaunchArgumentList,
        lane: ProgramLane,
    ) {
        let shape = self.network.shape;
        let from = |name: &str, element: usize| {
            self.pointer_to(name).offset_by(rows.start * shape.model_width * element)
        };
        let state = TRAINING_STATE_INPUTS.map(|name| from(name, BYTES_PER_F32));
        let copy = match shape.dtype {
            Dtype::Bf16 => from("weights", shape.dtype.bytes_per_element()).into(),
            _ => NULL,
        };
        let vectors =
            shape.first_arena_row_of_matrices().saturating_sub(rows.start) * shape.model_width;
        let elements = [vectors, rows.len() * shape.model_width].map(long_operand);
        let [rate, decay] = adamw::ADAMW_LEARNING_RATE_AND_WEIGHT_DECAY;
        let arguments = (state, gradients, state, copy, elements, rate, decay);
        // Stand-in model shape with about as many arena rows as the update, from which the AdamW
        // kernel computes its grid.
        let updated =
            LanguageModelShape { layers: 0, vocabulary_size: rows.len().div_ceil(2), ..shape };
        let launch = self.network.program.make_kernel_launch(
            &adamw::ADAMW_UPDATE_KERNEL,
            &updated,
            arguments,
        );
        self.network
            .program
            .add_prepared_launch(launch.moved_to_lane(lane).with_programmatic_dependent_launch());
    }
}
