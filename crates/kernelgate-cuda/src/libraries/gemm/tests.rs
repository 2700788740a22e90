//! Tests that compare cuBLASLt GEMMs with fp64, with operands whose products and sums every dtype
//! holds exactly. The tests need a GPU and cuBLASLt, and skip combinations that cuBLASLt does not
//! support on this GPU.

use super::*;
use crate::testing::lock_first_gpu;

use GemmMatrixDtype::{Bf16, E4m3, E5m2, F16, F32, I8, I32};

#[test]
fn first_gemm_algorithm_stays_unless_another_is_clearly_faster() {
    assert_eq!(index_of_clearly_fastest_algorithm(&[]), 0);
    assert_eq!(index_of_clearly_fastest_algorithm(&[100.0, 98.0, 101.0]), 0);
    assert_eq!(index_of_clearly_fastest_algorithm(&[100.0, 98.0, 90.0]), 2);
    assert_eq!(index_of_clearly_fastest_algorithm(&[f64::INFINITY, 98.0]), 1);
}

#[test]
fn a_gemm_launch_without_a_needed_operand_names_it() {
    let epilogue = GemmEpilogue::Activation {
        function: GemmEpilogueActivation::Relu,
        adds_bias: true,
        stores_auxiliary_matrix: true,
    };
    let scales = GemmScalesPresent { has_a_scale: true, ..GemmScalesPresent::default() };
    let spec = GemmSpec { epilogue, scales, ..GemmSpec::new(16, 16, 16, E4m3, Bf16) };
    let mut operands = GemmOperandAddresses::gemm_operands_from_a_b_d(1, 2, 3);
    for name in ["the bias", "aux", "A's scale"] {
        assert_eq!(
            operands.bias_aux_and_scale_pointer_attributes(&spec),
            Err(GemmError::MissingOperand(name))
        );
        match name {
            "the bias" => operands.bias = Some(4),
            "aux" => operands.aux_matrix = Some(5),
            _ => operands.scale_a = Some(6),
        }
    }
    let set: Vec<_> = operands
        .bias_aux_and_scale_pointer_attributes(&spec)
        .unwrap()
        .into_iter()
        .flatten()
        .collect();
    use Attribute as At;
    assert_eq!(
        set,
        [
            (At::CUBLASLT_MATMUL_DESC_BIAS_POINTER, 4),
            (At::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, 5),
            // cuBLASLt's matrix B is this crate's matrix A, because cuBLASLt is column-major.
            (At::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, 6),
        ]
    );
    let plain = GemmSpec::new(16, 16, 16, Bf16, Bf16);
    assert_eq!(
        operands.bias_aux_and_scale_pointer_attributes(&plain).unwrap(),
        [None; 6],
        "others are ignored"
    );
}

/// Returns the numbers of exponent bits and of significand bits of a float dtype; `None` for an
/// integer dtype.
const fn exponent_and_significand_bits(dtype: GemmMatrixDtype) -> Option<(u32, u32)> {
    match dtype {
        Bf16 => Some((8, 7)),
        F16 => Some((5, 10)),
        F32 => Some((8, 23)),
        E4m3 => Some((4, 3)),
        E5m2 => Some((5, 2)),
        I8 | I32 => None,
    }
}

/// Encodes a value that the dtype holds exactly as the bits of the dtype.
fn dtype_bits_of_value(value: f64, dtype: GemmMatrixDtype) -> u32 {
    let Some((exponent_bits, significand_bits)) = exponent_and_significand_bits(dtype) else {
        return value as i32 as u32;
    };
    if value == 0.0 {
        return 0;
    }
    let exponent = value.abs().log2().floor();
    let significand = (value.abs() / exponent.exp2() - 1.0) * f64::from(1u32 << significand_bits);
    assert_eq!(significand.fract(), 0.0, "{value} in {dtype}");
    let bias = (1i32 << (exponent_bits - 1)) - 1;
    let sign = u32::from(value < 0.0) << (exponent_bits + significand_bits);
    sign | ((exponent as i32 + bias) as u32) << significand_bits | significand as u32
}

fn value_of_dtype_bits(code: u32, dtype: GemmMatrixDtype) -> f64 {
    let Some((exponent_bits, significand_bits)) = exponent_and_significand_bits(dtype) else {
        return f64::from(code as i32);
    };
    let bias = (1i32 << (exponent_bits - 1)) - 1;
    let significand = f64::from(code & ((1 << significand_bits) - 1));
    let fraction = significand / f64::from(1u32 << significand_bits);
    let exponent = (code >> significand_bits & ((1 << exponent_bits) - 1)) as i32;
    let sign = if code >> (exponent_bits + significand_bits) & 1 == 1 { -1.0 } else { 1.0 };
    match exponent {
        0 => sign * fraction * f64::from(1 - bias).exp2(),
        _ => sign * (1.0 + fraction) * f64::from(exponent - bias).exp2(),
    }
}

#[test]
fn test_conversions_of_values_to_dtype_bits_are_right() {
    assert_eq!(dtype_bits_of_value(-1.5, F32), (-1.5f32).to_bits());
    assert_eq!(
        [
            dtype_bits_of_value(448.0, E4m3),
            dtype_bits_of_value(-2.25, E4m3),
            dtype_bits_of_value(1.0, E5m2)
        ],
        [0x7e, 0xc1, 0x3c]
    );
    assert_eq!([dtype_bits_of_value(1.0, F16), dtype_bits_of_value(-2.0, Bf16)], [0x3c00, 0xc000]);
    for dtype in [Bf16, F16, F32, E4m3, E5m2] {
        for x in [0.0, 1.0, -1.5, 4.0] {
            assert_eq!(value_of_dtype_bits(dtype_bits_of_value(x, dtype), dtype), x, "{dtype}");
        }
    }
    assert_eq!(value_of_dtype_bits(dtype_bits_of_value(-3.0, I32), I32), -3.0);
}

fn encode_values_in_dtype(values: &[f64], dtype: GemmMatrixDtype) -> Vec<u8> {
    let size = dtype.size_of_element_in_bytes();
    values
        .iter()
        .flat_map(|&x| dtype_bits_of_value(x, dtype).to_le_bytes()[..size].to_vec())
        .collect()
}

fn decode_values_of_dtype(bytes: &[u8], dtype: GemmMatrixDtype) -> Vec<f64> {
    let word = |chunk: &[u8]| {
        let mut word = [0; 4];
        word[..chunk.len()].copy_from_slice(chunk);
        u32::from_le_bytes(word)
    };
    bytes
        .chunks(dtype.size_of_element_in_bytes())
        .map(|chunk| value_of_dtype_bits(word(chunk), dtype))
        .collect()
}

/// Random whole numbers from -2 to 2; different seeds give different numbers.
fn random_whole_numbers(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let number = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % 5
    };
    std::iter::repeat_with(number).take(count).map(|number| number as f64 - 2.0).collect()
}

/// Computes the index in memory of an element of a batch of matrices from batch, row and column.
#[derive(Clone, Copy)]
struct MatrixElementIndexing {
    transposed: bool,
    leading_dimension: usize,
    batch_stride: usize,
}

impl MatrixElementIndexing {
    const fn element_index(self, batch: usize, row: usize, column: usize) -> usize {
        let (row, column) = if self.transposed { (column, row) } else { (row, column) };
        batch * self.batch_stride + row * self.leading_dimension + column
    }
}

/// A GEMM under test, with its operands on the host and on the device.
struct GemmUnderTest {
    spec: GemmSpec,
    host: [Vec<f64>; 3],
    bias: Vec<f64>,
    buffers: [DeviceBuffer; 4],
    bias_buffer: DeviceBuffer,
    aux_matrix: DeviceBuffer,
    blas: Rc<CublasLtLanes>,
}

impl GemmUnderTest {
    /// `None` without cuBLASLt.
    fn gemm_fixture_for_spec(device: &Arc<Device>, spec: GemmSpec) -> Option<Self> {
        let blas = match CublasLtLanes::open_cublaslt_with_default_workspace(device, 1) {
            Err(BackendError::Unsupported(reason)) => {
                eprintln!("skipped: {reason}");
                return None;
            }
            blas => blas.unwrap(),
        };
        let spec::ColumnMajorLayouts { a, b, c, d } = spec.column_major_layouts();
        let elements = |layout: spec::ColumnMajorLayout| {
            (spec.batch_count - 1) * layout.batch_stride + layout.ld * layout.columns
        };
        let host =
            [(b, 1), (a, 2), (c, 3)].map(|(it, seed)| random_whole_numbers(elements(it), seed));
        let upload =
            |values: &[f64], dtype| device.upload(&encode_values_in_dtype(values, dtype)).unwrap();
        let buffers = [
            upload(&host[0], spec.a),
            upload(&host[1], spec.b),
            upload(&host[2], spec.dtype_of_c()),
            device.allocate(elements(d) * spec.d.size_of_element_in_bytes()).unwrap(),
        ];
        let bias = random_whole_numbers(spec.bias_element_count_unless_none().unwrap_or(1), 4);
        let bias_buffer = upload(&bias, spec.dtype_of_bias_and_its_gradient());
        let aux = device.allocate(spec.aux_matrix_bytes_of_whole_batch().unwrap_or(1)).unwrap();
        Some(Self { spec, host, bias, buffers, bias_buffer, aux_matrix: aux, blas })
    }

    fn addresses_of_gemm_operands(&self) -> GemmOperandAddresses {
        let [a, b, c, d] = [0, 1, 2, 3].map(|index| self.buffers[index].device_address());
        GemmOperandAddresses {
            matrix_c: Some(c),
            bias: Some(self.bias_buffer.device_address()),
            aux_matrix: Some(self.aux_matrix.device_address()),
            ..GemmOperandAddresses::gemm_operands_from_a_b_d(a, b, d)
        }
    }

    /// Measures which of cuBLASLt's proposed algorithms is fastest, then launches the GEMM once.
    /// Returns false if cuBLASLt has no algorithm for this GEMM on this GPU.
    fn choose_algorithm_and_launch_gemm(&self, operands: &GemmOperandAddresses) -> bool {
        let mut gemm = match PreparedGemm::gemm_with_proposed_algorithms(&self.blas, self.spec) {
            Err(error) if error.means_unsupported_gemm() => {
                eprintln!("skipped: {:?}: {error}", self.spec);
                return false;
            }
            gemm => gemm.unwrap(),
        };
        gemm.time_and_choose_algorithm(std::slice::from_ref(operands)).unwrap();
        gemm.enqueue_gemm_in_lane(0, operands).unwrap();
        true
    }

    fn element_indexing_of_matrix(&self, matrix: char) -> MatrixElementIndexing {
        let spec::ColumnMajorLayouts { a, b, c, d } = self.spec.column_major_layouts();
        let (layout, transposed) = match matrix {
            'A' => (b, self.spec.a_transposed),
            'B' => (a, self.spec.b_transposed),
            'C' => (c, false),
            _ => (d, false),
        };
        MatrixElementIndexing {
            transposed,
            leading_dimension: layout.ld,
            batch_stride: layout.batch_stride,
        }
    }

    /// Returns the expected alpha·A·B + beta·C at one element, computed in fp64 on the host.
    fn expected_gemm_element(&self, batch: usize, row: usize, column: usize) -> f64 {
        let (at_a, at_b, at_c) = (
            self.element_indexing_of_matrix('A'),
            self.element_indexing_of_matrix('B'),
            self.element_indexing_of_matrix('C'),
        );
        let [a, b, c] = &self.host;
        let terms = (0..self.spec.k).map(|index| {
            a[at_a.element_index(batch, row, index)] * b[at_b.element_index(batch, index, column)]
        });
        let sum: f64 = terms.sum();
        f64::from(self.spec.alpha) * sum
            + f64::from(self.spec.beta) * c[at_c.element_index(batch, row, column)]
    }

    fn download_values_as_f64(&self, buffer: &DeviceBuffer, dtype: GemmMatrixDtype) -> Vec<f64> {
        let mut bytes = vec![0; buffer.size_in_bytes()];
        buffer.download_first_bytes(&mut bytes).unwrap();
        decode_values_of_dtype(&bytes, dtype)
    }

    /// Compares every element of D with its expected value in fp64; an expected NaN accepts any
    /// result.
    fn assert_result_within_tolerance(
        &self,
        tolerance: f64,
        expected: impl Fn(usize, usize, usize) -> f64,
    ) {
        let (found, place) = (
            self.download_values_as_f64(&self.buffers[3], self.spec.d),
            self.element_indexing_of_matrix('D'),
        );
        for batch in 0..self.spec.batch_count {
            for (row, column) in
                (0..self.spec.m).flat_map(|row| (0..self.spec.n).map(move |column| (row, column)))
            {
                let (found, expected) =
                    (found[place.element_index(batch, row, column)], expected(batch, row, column));
                assert!(
                    expected.is_nan()
                        || (found - expected).abs() <= tolerance * expected.abs().max(1.0),
                    "{:?}: [{batch}, {row}, {column}]: {found} and not {expected}",
                    self.spec
                );
            }
        }
    }
}

/// Launches a GEMM and asserts that D equals alpha·A·B + beta·C exactly.
fn assert_gemm_equals_fp64(device: &Arc<Device>, spec: GemmSpec) {
    let Some(fixture) = GemmUnderTest::gemm_fixture_for_spec(device, spec) else { return };
    if fixture.choose_algorithm_and_launch_gemm(&fixture.addresses_of_gemm_operands()) {
        fixture.assert_result_within_tolerance(0.0, |batch, row, column| {
            fixture.expected_gemm_element(batch, row, column)
        });
    }
}

const TRANSPOSITIONS_OF_A_AND_B: [[bool; 2]; 4] =
    [[false, false], [false, true], [true, false], [true, true]];

#[test]
fn gemms_of_transposed_operands_equal_fp64_in_every_dtype() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (inputs, d, tf32) in [
        (Bf16, F32, false),
        (Bf16, Bf16, false),
        (F16, F16, false),
        (F16, F32, false),
        (F32, F32, false),
        (F32, F32, true),
    ] {
        for [a_transposed, b_transposed] in TRANSPOSITIONS_OF_A_AND_B {
            let spec = GemmSpec::new(24, 40, 32, inputs, d);
            assert_gemm_equals_fp64(
                &device,
                GemmSpec { rounds_inputs_to_tf32: tf32, a_transposed, b_transposed, ..spec },
            );
        }
    }
}

#[test]
fn gemms_with_gaps_and_small_alignments_equal_fp64() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for [a_transposed, b_transposed] in TRANSPOSITIONS_OF_A_AND_B {
        let (lda, ldb) = (Some(48), Some(56));
        let gaps = GemmSpec {
            lda,
            ldb,
            ldc: Some(72),
            ldd: Some(64),
            beta: 2.0,
            ..GemmSpec::new(24, 40, 32, Bf16, F32)
        };
        assert_gemm_equals_fp64(&device, GemmSpec { a_transposed, b_transposed, ..gaps });
        // Matrices with rows of 5, 3 and 7 elements, which are not aligned to 16 bytes.
        let odd = GemmSpec { min_address_alignment_bytes: 4, ..GemmSpec::new(5, 7, 3, F32, F32) };
        assert_gemm_equals_fp64(&device, GemmSpec { a_transposed, b_transposed, ..odd });
    }
}

#[test]
fn gemm_scales_the_product_by_alpha_and_c_by_beta() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let spec = GemmSpec { alpha: 0.5, beta: -3.0, ..GemmSpec::new(32, 16, 64, F16, F32) };
    assert_gemm_equals_fp64(&device, spec);
    // C is D.
    let Some(fixture) = GemmUnderTest::gemm_fixture_for_spec(&device, spec) else { return };
    let gemm = PreparedGemm::gemm_with_proposed_algorithms(&fixture.blas, spec).unwrap();
    let operands = GemmOperandAddresses { matrix_c: None, ..fixture.addresses_of_gemm_operands() };
    fixture.buffers[3]
        .overwrite_first_bytes_from_host(&encode_values_in_dtype(&fixture.host[2], F32))
        .unwrap();
    gemm.enqueue_gemm_in_lane(0, &operands).unwrap();
    fixture.assert_result_within_tolerance(0.0, |batch, row, column| {
        fixture.expected_gemm_element(batch, row, column)
    });
}

#[test]
fn gemm_batches_with_gaps_and_shared_operands_equal_fp64() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let batch = GemmSpec { batch_count: 3, ..GemmSpec::new(16, 24, 32, Bf16, F32) };
    assert_gemm_equals_fp64(&device, batch);
    assert_gemm_equals_fp64(&device, GemmSpec { batch_stride_b: Some(0), beta: 1.0, ..batch });
    assert_gemm_equals_fp64(
        &device,
        GemmSpec { batch_stride_a: Some(640), batch_stride_d: Some(512), ..batch },
    );
    // Matrices of a tensor `[rows, heads, columns]`: the matrix of each head begins within a row of
    // the leading dimension.
    let heads = GemmSpec { lda: Some(96), batch_stride_a: Some(32), ..batch };
    assert_gemm_equals_fp64(&device, GemmSpec { ldd: Some(72), batch_stride_d: Some(24), ..heads });
}

#[test]
fn integer_and_fp8_gemms_equal_fp64() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let library_order = |b, spec: GemmSpec| GemmSpec { b, b_transposed: true, ..spec };
    assert_gemm_equals_fp64(&device, library_order(I8, GemmSpec::new(32, 64, 128, I8, I32)));
    for (a, b, d) in [(E4m3, E4m3, Bf16), (E4m3, E5m2, F32), (E5m2, E4m3, F16)] {
        assert_gemm_equals_fp64(&device, library_order(b, GemmSpec::new(32, 64, 128, a, d)));
    }
    // Some GPUs lack transposed fp8 or integer GEMMs; the test skips a transposition that cuBLASLt
    // does not support.
    for [a_transposed, b_transposed] in TRANSPOSITIONS_OF_A_AND_B {
        let spec = GemmSpec::new(32, 64, 128, E4m3, Bf16);
        assert_gemm_equals_fp64(&device, GemmSpec { a_transposed, b_transposed, ..spec });
    }
}

#[test]
fn fp8_gemm_scales_are_applied_and_amax_is_written() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let spec = GemmSpec {
        b_transposed: true,
        scales: GemmScalesPresent {
            has_a_scale: true,
            has_b_scale: true,
            has_d_scale: true,
            writes_amax_of_d: true,
        },
        ..GemmSpec::new(32, 64, 16, E4m3, E4m3)
    };
    let Some(fixture) = GemmUnderTest::gemm_fixture_for_spec(&device, spec) else { return };
    let scalar = |x: f32| device.upload(&x.to_le_bytes()).unwrap();
    let [a, b, d, amax] = [0.5, 4.0, 0.25, 0.0].map(scalar);
    let operands = GemmOperandAddresses {
        scale_a: Some(a.device_address()),
        scale_b: Some(b.device_address()),
        scale_d: Some(d.device_address()),
        amax_d: Some(amax.device_address()),
        ..fixture.addresses_of_gemm_operands()
    };
    if !fixture.choose_algorithm_and_launch_gemm(&operands) {
        return;
    }
    let scaled = |batch, row, column| 0.5 * 4.0 * fixture.expected_gemm_element(batch, row, column);
    // D has the dtype E4M3, with three bits of mantissa, so the tolerance is 1/16.
    fixture.assert_result_within_tolerance(1.0 / 16.0, |batch, row, column| {
        0.25 * scaled(batch, row, column)
    });
    let all = (0..32).flat_map(|row| (0..64).map(move |column| (row, column)));
    let largest = all.map(|(row, column)| scaled(0, row, column).abs()).fold(0.0, f64::max);
    assert_eq!(fixture.download_values_as_f64(&amax, F32), [largest]);
}

/// Returns GELU in its tanh form at `x`, and its derivative.
fn gelu_and_derivative(x: f64) -> (f64, f64) {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    let tanh = (c * (x + 0.044715 * x.powi(3))).tanh();
    let slope = c * (1.0 + 3.0 * 0.044715 * x * x) * (1.0 - tanh * tanh);
    (0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * slope)
}

/// Returns ReLU at `x` and its derivative, which is NaN at zero.
fn relu_and_derivative(x: f64) -> (f64, f64) {
    match x.partial_cmp(&0.0) {
        Some(std::cmp::Ordering::Greater) => (x, 1.0),
        Some(std::cmp::Ordering::Less) => (0.0, 0.0),
        _ => (0.0, f64::NAN),
    }
}

#[test]
fn a_gemm_epilogue_adds_the_bias_to_every_row() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (inputs, d) in [(Bf16, Bf16), (F16, F32), (F32, F32)] {
        let spec =
            GemmSpec { epilogue: GemmEpilogue::Bias, ..GemmSpec::new(32, 48, 16, inputs, d) };
        let Some(fixture) = GemmUnderTest::gemm_fixture_for_spec(&device, spec) else { return };
        if fixture.choose_algorithm_and_launch_gemm(&fixture.addresses_of_gemm_operands()) {
            fixture.assert_result_within_tolerance(0.0, |batch, row, column| {
                fixture.expected_gemm_element(batch, row, column) + fixture.bias[column]
            });
        }
    }
}

#[test]
fn gemm_activations_and_their_gradients_agree_with_fp64() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for (function, exact) in [
        (GemmEpilogueActivation::Relu, relu_and_derivative as fn(f64) -> (f64, f64)),
        (GemmEpilogueActivation::Gelu, gelu_and_derivative),
    ] {
        for (bias, aux) in [(false, false), (true, false), (false, true), (true, true)] {
            let epilogue = GemmEpilogue::Activation {
                function,
                adds_bias: bias,
                stores_auxiliary_matrix: aux,
            };
            // An alpha of 0.125 keeps the argument of the activation function near zero.
            let spec = GemmSpec { alpha: 0.125, epilogue, ..GemmSpec::new(32, 48, 16, Bf16, Bf16) };
            let Some(forward) = GemmUnderTest::gemm_fixture_for_spec(&device, spec) else { return };
            if !forward.choose_algorithm_and_launch_gemm(&forward.addresses_of_gemm_operands()) {
                continue;
            }
            let argument = |batch, row, column| {
                let bias = if bias { forward.bias[column] } else { 0.0 };
                forward.expected_gemm_element(batch, row, column) + bias
            };
            // The result D is bf16, and the argument of the activation function is an f32, so the
            // tolerance is 1/128.
            forward.assert_result_within_tolerance(1.0 / 128.0, |batch, row, column| {
                exact(argument(batch, row, column)).0
            });
            if aux {
                for bias_gradient in [false, true] {
                    let epilogue = GemmEpilogue::ActivationGradient {
                        function,
                        stores_bias_gradient: bias_gradient,
                    };
                    check_gemm_activation_gradient(&device, epilogue, &forward, |row, column| {
                        exact(argument(0, row, column)).1
                    });
                }
            }
        }
    }
}

/// Launches a GEMM whose epilogue is the gradient of an activation, with the auxiliary matrix from
/// the forward GEMM, and checks it.
fn check_gemm_activation_gradient(
    device: &Arc<Device>,
    epilogue: GemmEpilogue,
    forward: &GemmUnderTest,
    derivative: impl Fn(usize, usize) -> f64,
) {
    let GemmSpec { m, n, .. } = forward.spec;
    let spec = GemmSpec {
        alpha: 0.125,
        epilogue,
        b_transposed: true,
        ..GemmSpec::new(m, n, 24, Bf16, Bf16)
    };
    let Some(fixture) = GemmUnderTest::gemm_fixture_for_spec(device, spec) else { return };
    let operands = GemmOperandAddresses {
        aux_matrix: Some(forward.aux_matrix.device_address()),
        ..fixture.addresses_of_gemm_operands()
    };
    if !fixture.choose_algorithm_and_launch_gemm(&operands) {
        return;
    }
    let gradient =
        |row, column| fixture.expected_gemm_element(0, row, column) * derivative(row, column);
    // The forward GEMM stores the argument of GELU as bf16, so the tolerance is 1/32.
    let tolerance = 1.0 / 32.0;
    fixture.assert_result_within_tolerance(tolerance, |_, row, column| gradient(row, column));
    if spec.bias_element_count_unless_none().is_some() {
        let sums = fixture
            .download_values_as_f64(&fixture.bias_buffer, spec.dtype_of_bias_and_its_gradient());
        for (column, &found) in sums.iter().enumerate() {
            let (mut sum, mut allowed) = (0.0, tolerance);
            for row in 0..m {
                let (term, product) =
                    (gradient(row, column), fixture.expected_gemm_element(0, row, column));
                if term.is_nan() {
                    // An undefined derivative of the activation may be computed as any value from 0
                    // to 1, which widens the tolerance of the sum.
                    allowed += product.abs();
                } else {
                    sum += term;
                    allowed += tolerance * term.abs();
                }
            }
            assert!((found - sum).abs() <= allowed, "[{column}]: {found} and not {sum}");
        }
    }
}

#[test]
fn gemm_bias_gradients_sum_an_operand_over_k() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for epilogue in [GemmEpilogue::BiasGradientFromA, GemmEpilogue::BiasGradientFromB] {
        for [a_transposed, b_transposed] in TRANSPOSITIONS_OF_A_AND_B {
            let spec = GemmSpec {
                epilogue,
                a_transposed,
                b_transposed,
                ..GemmSpec::new(32, 48, 64, Bf16, Bf16)
            };
            let Some(fixture) = GemmUnderTest::gemm_fixture_for_spec(&device, spec) else { return };
            if !fixture.choose_algorithm_and_launch_gemm(&fixture.addresses_of_gemm_operands()) {
                continue;
            }
            let (at_a, at_b) =
                (fixture.element_indexing_of_matrix('A'), fixture.element_indexing_of_matrix('B'));
            let [a, b, _] = &fixture.host;
            let found = fixture.download_values_as_f64(
                &fixture.bias_buffer,
                spec.dtype_of_bias_and_its_gradient(),
            );
            for (index, found) in found.into_iter().enumerate() {
                let sum: f64 = match epilogue {
                    GemmEpilogue::BiasGradientFromA => {
                        (0..64).map(|k| a[at_a.element_index(0, index, k)]).sum()
                    }
                    _ => (0..64).map(|k| b[at_b.element_index(0, k, index)]).sum(),
                };
                assert_eq!(found, sum, "{spec:?}: [{index}]");
            }
        }
    }
}
