//! The language model's forward pass as a GPU program, and the memory regions of the forward and
//! backward passes.
//!
//! A training step keeps the activations of every layer in separate regions; a forward pass alone
//! reuses one layer's regions.

use std::collections::BTreeMap;

use super::kernels::gemm::{self, EpilogueGemmParameters};
use super::kernels::{embedding, loss, norm, rope, swiglu};
use super::rung_choices::{AttentionOfRung, EpilogueGemmChoice, RungKernelChoice};
use crate::parallel;
use crate::transformer::shape::{LanguageModelShape, ParameterTensor};
use half::bf16;
use kernelgate::backend::program::{
    LaunchArgumentList, LaunchProgram, MemoryPurpose, ProgramLane, RegionPointer, int_operand,
    int_operands, long_operand,
};
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;
use kernelgate_cuda::libraries::gemm::{GemmMatrixDtype, GemmOperandAddresses, GemmSpec};

/// Bytes of an f32 element, as the residual stream and AdamW's state have.
pub const BYTES_PER_F32: usize = Dtype::F32.bytes_per_element();

/// Builder of a language model's GPU program: the program so far, and what its launches need to
/// know.
pub struct LanguageModelProgramBuilder {
    pub program: LaunchProgram,
    pub shape: LanguageModelShape,
    pub attention: AttentionOfRung,
    epilogue_gemms: EpilogueGemmChoice,
    /// Whether a backward pass follows the forward pass, so that activations of all layers are
    /// kept.
    training: bool,
    /// Device address of the arena with the weights, in the model's dtype, that GEMMs read.
    weight_arena: RegionPointer,
    /// Distance in bytes from one layer's tensor to the next, for each region that holds the
    /// tensors of several layers.
    bytes_between_layers: BTreeMap<&'static str, usize>,
}

/// Alignment in bytes of each layer's tensor in a region, as GEMMs expect it of their operands.
const LAYER_TENSOR_ALIGNMENT_BYTES: usize = 256;

/// Program that computes the language model's logits and losses.
pub fn language_model_forward_program(
    shape: &LanguageModelShape,
    kernels: impl Into<RungKernelChoice>,
) -> LaunchProgram {
    let mut program = LaunchProgram::new();
    let bytes = shape.number_of_parameters() * shape.dtype.bytes_per_element();
    let weights = program.add_input("parameters", MemoryPurpose::Weights, bytes);
    let logits = [shape.batch, shape.context_tokens, shape.padded_logit_columns()];
    program.add_output("logits", logits, shape.dtype);
    let mut network = LanguageModelProgramBuilder::with_inputs_and_activations(
        program,
        shape,
        kernels.into(),
        weights,
        false,
    );
    network.add_whole_forward_pass(|network| {
        let sizes =
            int_operands([network.shape.vocabulary_size, network.shape.padded_logit_columns()]);
        network.add_launch_with_pdl(
            &loss::TOKEN_LOSS_KERNEL,
            ("logits", "targets", "token_losses", sizes),
        );
    });
    network.program
}

impl LanguageModelProgramBuilder {
    /// Adds regions for inputs, activations and the loss to a program that already has the regions
    /// `weights` and `logits`.
    pub fn with_inputs_and_activations(
        program: LaunchProgram,
        shape: &LanguageModelShape,
        kernels: RungKernelChoice,
        weights: RegionPointer,
        training: bool,
    ) -> Self {
        let RungKernelChoice { attention, epilogue_gemms } = kernels;
        let (shape, strides) = (*shape, BTreeMap::new());
        let mut network = Self {
            program,
            shape,
            attention,
            epilogue_gemms,
            training,
            weight_arena: weights,
            bytes_between_layers: strides,
        };
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, layers, .. } = shape;
        let (tokens, element) = (shape.tokens_in_batch(), shape.dtype.bytes_per_element());
        for name in ["tokens", "targets"] {
            network.program.add_input(name, MemoryPurpose::Inputs, BYTES_PER_F32 * tokens);
        }
        network.program.add_output("loss", [shape.batch, 1], Dtype::F32);
        let table = BYTES_PER_F32 * shape.context_tokens * shape.elements_per_head();
        network.program.add_packed_from_inputs(
            "rotations",
            MemoryPurpose::Weights,
            table,
            move |_| {
                rope::rope_cosine_and_sine_table(&shape)
                    .into_iter()
                    .flat_map(f32::to_ne_bytes)
                    .collect()
            },
        );
        network
            .declare_activation_region("roots", BYTES_PER_F32 * shape.number_of_norms() * tokens);
        network.declare_activation_region("token_losses", BYTES_PER_F32 * tokens);
        network.declare_activation_region("head_input", element * tokens * d);
        let kept = if training { layers } else { 1 };
        // The output head reads the residual stream after the last layer, so training keeps one
        // stream more than there are layers.
        let streams = if training { layers + 1 } else { 1 };
        network.declare_region_of_layers(
            "x",
            MemoryPurpose::Activations,
            BYTES_PER_F32 * tokens * d,
            streams,
        );
        for (name, bytes) in [
            ("qkv_input", element * d),
            ("qkv", element * 3 * d),
            ("attended", element * d),
            ("middle", BYTES_PER_F32 * d),
            ("mlp_input", element * d),
            ("gate_up", element * 2 * ff),
            ("hidden", element * ff),
        ] {
            network.declare_region_of_layers(
                name,
                MemoryPurpose::Activations,
                tokens * bytes,
                kept,
            );
        }
        network.declare_attention_regions(kept);
        network
    }

    /// Adds a region that holds a tensor of `bytes` bytes for each of several layers, each aligned
    /// to 256 bytes.
    pub fn declare_region_of_layers(
        &mut self,
        name: &'static str,
        purpose: MemoryPurpose,
        bytes: usize,
        layers: usize,
    ) {
        let stride = bytes.next_multiple_of(LAYER_TENSOR_ALIGNMENT_BYTES);
        self.program.add_scratch(name, purpose, stride * layers);
        self.bytes_between_layers.insert(name, stride);
    }

    /// Distance in bytes from one layer's tensor to that of the next layer in the named region.
    pub fn bytes_between_layers(&self, name: &str) -> usize {
        *self.bytes_between_layers.get(name).expect("declared for each layer")
    }

    /// Adds one scratch region for an activation that is not divided by layers.
    pub fn declare_activation_region(&mut self, name: &str, bytes: usize) {
        self.program.add_scratch(name.to_owned(), MemoryPurpose::Activations, bytes);
    }

    /// Whether a backward pass follows the forward pass.
    pub const fn has_backward_pass(&self) -> bool {
        self.training
    }

    /// Device address of a layer's activation in the named region.
    pub fn activation_address(&self, name: &str, layer: usize) -> RegionPointer {
        let at = self.program.pointer_to(name);
        if self.training { at.offset_by(layer * self.bytes_between_layers(name)) } else { at }
    }

    /// Device address of a parameter tensor in the arena of weights that GEMMs read.
    pub fn weight_address(&self, weight: ParameterTensor) -> RegionPointer {
        let row = self.shape.model_width * self.shape.dtype.bytes_per_element();
        self.weight_arena.offset_by(self.shape.arena_rows_of_tensor(weight).first_arena_row * row)
    }

    /// Device address of the gain vector of RMSNorm number `norm`.
    pub fn gain_address(&self, norm: usize) -> RegionPointer {
        self.weight_address(ParameterTensor::RmsNormGains)
            .offset_by(norm * self.shape.model_width * self.shape.dtype.bytes_per_element())
    }

    /// Device address of the inverse root mean squares of the rows of RMSNorm number `norm`.
    pub fn inverse_rms_address(&self, norm: usize) -> RegionPointer {
        self.program
            .pointer_to("roots")
            .offset_by(norm * BYTES_PER_F32 * self.shape.tokens_in_batch())
    }

    /// Adds the launch of a kernel, with programmatic dependent launch (PDL), to the program.
    pub fn add_launch_with_pdl(
        &mut self,
        kernel: &KernelSpec<LanguageModelShape>,
        arguments: impl LaunchArgumentList,
    ) {
        let launch = self.program.make_kernel_launch(kernel, &self.shape, arguments);
        self.program.add_prepared_launch(launch.with_programmatic_dependent_launch());
    }

    /// Specification of a GEMM whose matrices all have the model's dtype.
    pub fn gemm_spec_in_model_dtype(&self, m: usize, n: usize, k: usize) -> GemmSpec {
        let dtype = match self.shape.dtype {
            Dtype::Bf16 => GemmMatrixDtype::Bf16,
            _ => GemmMatrixDtype::F32,
        };
        // Operands in the parameter arena begin at whole rows of d elements, which limits their
        // alignment.
        let row = self.shape.model_width * self.shape.dtype.bytes_per_element();
        let alignment = 1 << row.trailing_zeros().min(8);
        GemmSpec { min_address_alignment_bytes: alignment, ..GemmSpec::new(m, n, k, dtype, dtype) }
    }

    /// Adds a GEMM D = op(A)·op(B) to the main lane of the program.
    pub fn add_gemm_in_main_lane(&mut self, spec: GemmSpec, operands: [RegionPointer; 3]) {
        self.program.add_gemm(ProgramLane::MAIN_LANE, spec, operands);
    }

    /// Adds a GEMM D = op(A)·op(B) + C whose C and D are f32.
    fn add_gemm_plus_f32_matrix(&mut self, spec: GemmSpec, [a, b, c, d]: [RegionPointer; 4]) {
        let spec = GemmSpec { d: GemmMatrixDtype::F32, beta: 1.0, ..spec };
        let operands = GemmOperandAddresses {
            matrix_c: Some(c),
            ..GemmOperandAddresses::gemm_operands_from_a_b_d(a, b, d)
        };
        self.program.add_gemm(ProgramLane::MAIN_LANE, spec, operands);
    }

    /// Adds the launches of the whole forward pass; the function `loss` adds the launch of the
    /// token losses.
    pub fn add_whole_forward_pass(&mut self, loss: impl FnOnce(&mut Self)) {
        self.program.begin_named_range("forward");
        let LanguageModelShape { vocabulary_size: vocabulary, model_width: d, layers, .. } =
            self.shape;
        let tokens = self.shape.tokens_in_batch();
        let (table, x) =
            (self.weight_address(ParameterTensor::TokenEmbedding), self.activation_address("x", 0));
        self.program.begin_named_range("embedding");
        let sizes = (long_operand(tokens), int_operands([d, vocabulary]));
        self.add_launch_with_pdl(&embedding::TOKEN_EMBEDDING_KERNEL, ("tokens", table, x, sizes));
        self.program.end_innermost_range();
        for layer in 0..layers {
            self.add_attention_block_of_layer(layer);
            self.add_swiglu_block_of_layer(layer);
        }
        self.program.begin_named_range("head");
        let [x, input] =
            [self.activation_address("x", layers), self.program.pointer_to("head_input")];
        self.add_rms_norm_launch(2 * layers, x, input);
        let spec = GemmSpec {
            b_transposed: true,
            ldd: Some(self.shape.padded_logit_columns()),
            ..self.gemm_spec_in_model_dtype(tokens, vocabulary, d)
        };
        let logits = self.program.pointer_to("logits");
        self.add_gemm_in_main_lane(
            spec,
            [input, self.weight_address(ParameterTensor::LogitProjection), logits],
        );
        self.program.end_innermost_range();
        self.program.begin_named_range("cross_entropy");
        loss(self);
        let context = self.shape.context_tokens;
        self.add_launch_with_pdl(
            &loss::MEAN_LOSS_OF_SEQUENCE_KERNEL,
            ("token_losses", "loss", int_operand(context)),
        );
        self.program.end_innermost_range();
        self.program.end_innermost_range();
    }

    fn add_rms_norm_launch(&mut self, norm: usize, x: RegionPointer, to: RegionPointer) {
        let (gain, roots, d) =
            (self.gain_address(norm), self.inverse_rms_address(norm), self.shape.model_width);
        self.add_launch_with_pdl(&norm::RMS_NORM_KERNEL, (x, gain, to, roots, int_operand(d)));
    }

    fn add_attention_block_of_layer(&mut self, layer: usize) {
        let (d, tokens) = (self.shape.model_width, self.shape.tokens_in_batch());
        self.program.begin_named_range("attention");
        let [x, input, qkv, attended, middle] = ["x", "qkv_input", "qkv", "attended", "middle"]
            .map(|name| self.activation_address(name, layer));
        self.add_rms_norm_launch(2 * layer, x, input);
        self.add_qkv_projection_and_rotation(layer, input, qkv);
        self.add_attention_of_layer(layer);
        let spec = GemmSpec { b_transposed: true, ..self.gemm_spec_in_model_dtype(tokens, d, d) };
        self.add_gemm_plus_f32_matrix(
            spec,
            [
                attended,
                self.weight_address(ParameterTensor::AttentionOutputProjectionOfLayer(layer)),
                x,
                middle,
            ],
        );
        self.program.end_innermost_range();
    }

    /// Adds a layer's projection of queries, keys and values, and the rotary embedding of queries
    /// and keys.
    fn add_qkv_projection_and_rotation(
        &mut self,
        layer: usize,
        input: RegionPointer,
        qkv: RegionPointer,
    ) {
        let d = self.shape.model_width;
        let (tokens, w) = (
            self.shape.tokens_in_batch(),
            self.weight_address(ParameterTensor::QkvProjectionOfLayer(layer)),
        );
        if let Some(product) = self.epilogue_gemm_parameters_if_used() {
            let operands = product.rope_kernel_arguments([
                input,
                w,
                qkv,
                self.program.pointer_to("rotations"),
            ]);
            let launch =
                self.program.make_kernel_launch(&gemm::ROPE_EPILOGUE_GEMM, &product, operands);
            return self.program.add_prepared_launch(launch.with_programmatic_dependent_launch());
        }
        let spec =
            GemmSpec { b_transposed: true, ..self.gemm_spec_in_model_dtype(tokens, 3 * d, d) };
        self.add_gemm_in_main_lane(spec, [input, w, qkv]);
        self.add_rope_launch(qkv, 1.0);
    }

    /// Parameters of the GEMMs with fused epilogues, if this rung uses them on this device.
    pub fn epilogue_gemm_parameters_if_used(&self) -> Option<EpilogueGemmParameters> {
        let EpilogueGemmChoice::OwnGemmsWithEpilogues { multiprocessors } = self.epilogue_gemms
        else {
            return None;
        };
        Some(EpilogueGemmParameters {
            shape: self.shape,
            multiprocessors,
            stores_gates_and_ups: self.training,
        })
    }

    /// Adds the launch that rotates queries and keys in place (RoPE): `direction` 1 is forward, -1
    /// the inverse rotation.
    pub fn add_rope_launch(&mut self, qkv: RegionPointer, direction: f32) {
        let LanguageModelShape { model_width: d, heads, context_tokens: context, .. } = self.shape;
        let sizes = int_operands([context, heads, self.shape.elements_per_head(), 3 * d]);
        let tokens = long_operand(self.shape.tokens_in_batch());
        self.add_launch_with_pdl(
            &rope::ROTATE_QUERIES_AND_KEYS_KERNEL,
            (qkv, "rotations", qkv, tokens, sizes, direction),
        );
    }

    fn add_swiglu_block_of_layer(&mut self, layer: usize) {
        let LanguageModelShape { model_width: d, swiglu_hidden_width: ff, .. } = self.shape;
        let tokens = self.shape.tokens_in_batch();
        self.program.begin_named_range("mlp");
        let [middle, input, gate_up, hidden] = ["middle", "mlp_input", "gate_up", "hidden"]
            .map(|name| self.activation_address(name, layer));
        let next = self.activation_address("x", layer + 1);
        self.add_rms_norm_launch(2 * layer + 1, middle, input);
        let w = self.weight_address(ParameterTensor::GateUpProjectionOfLayer(layer));
        if let Some(product) = self.epilogue_gemm_parameters_if_used() {
            let operands = product.swiglu_kernel_arguments([input, w, hidden, gate_up]);
            let launch =
                self.program.make_kernel_launch(&gemm::SWIGLU_EPILOGUE_GEMM, &product, operands);
            self.program.add_prepared_launch(launch.with_programmatic_dependent_launch());
        } else {
            let spec =
                GemmSpec { b_transposed: true, ..self.gemm_spec_in_model_dtype(tokens, 2 * ff, d) };
            self.add_gemm_in_main_lane(spec, [input, w, gate_up]);
            self.add_launch_with_pdl(
                &swiglu::SWIGLU_FORWARD_KERNEL,
                (gate_up, hidden, long_operand(tokens), int_operand(ff)),
            );
        }
        let spec = self.gemm_spec_in_model_dtype(tokens, d, ff);
        self.add_gemm_plus_f32_matrix(
            spec,
            [
                hidden,
                self.weight_address(ParameterTensor::DownProjectionOfLayer(layer)),
                middle,
                next,
            ],
        );
        self.program.end_innermost_range();
    }
}

/// Rounds an f32 parameter arena to bf16 and returns the bytes.
pub fn round_f32_parameters_to_bf16_bytes(parameters: &[f32]) -> Vec<u8> {
    const ELEMENTS_PER_ROUNDING_TASK: usize = 1 << 20;
    let mut rounded = vec![0; 2 * parameters.len()];
    parallel::process_chunks_in_parallel(
        &mut rounded,
        2 * ELEMENTS_PER_ROUNDING_TASK,
        &|number, to| {
            for (to, x) in
                to.chunks_exact_mut(2).zip(&parameters[number * ELEMENTS_PER_ROUNDING_TASK..])
            {
                to.copy_from_slice(&bf16::from_f32(*x).to_ne_bytes());
            }
        },
    );
    rounded
}
