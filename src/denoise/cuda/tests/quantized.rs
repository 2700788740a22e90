//! Tests of denoising implementations (rows) whose weights are quantised.

use super::*;

const QUANTISED_FORMATS_WITH_BITS_AND_KERNEL: [(LayerWeightFormat, usize, &str); 2] = [
    (LayerWeightFormat::Fp8, 8, "denoise_per_op_dequantize"),
    (LayerWeightFormat::Int4, 4, "denoise_per_op_dequantize_int4"),
];

#[test]
fn rows_for_quantised_weights_are_those_of_operations_and_the_persistent_kernel() {
    let names = |problem: &DenoiseLoop| {
        rows_that_support_problem(CUDA_DENOISE_LOOP_LADDER, problem)
            .iter()
            .map(|row| row.implementation_name)
            .collect::<Vec<_>>()
    };
    for (weights, bits, dequantize) in QUANTISED_FORMATS_WITH_BITS_AND_KERNEL {
        let full =
            loop_with_weight_format(bf16_denoise_loop(PI05_EXPERT_MODEL, 50, 968, 10), weights);
        let tiny = loop_with_weight_format(bf16_denoise_loop(TINY_TEST_MODEL, 7, 13, 3), weights);
        assert_eq!(names(&full), ["cuda/per_op", "cuda/graph", "cuda/persistent"]);
        assert_eq!(
            (CUDA_DENOISE_LOOP_LADDER[2].supports)(&full),
            Err("takes bf16 weights only".to_owned())
        );
        assert_eq!(names(&tiny), ["cuda/per_op", "cuda/graph"]);
        // The rung `per_op` dequantises weights before each GEMM of a layer; the persistent kernel
        // decodes them as it reads them.
        let dequantizing = |program: &LaunchProgram| {
            kernel_launches_in_program(program)
                .filter(|launch| launch.default_kernel().kernel_symbol == dequantize)
                .count()
        };
        let [plain, ..] = one_program_of_each_rung(&DenoiseStepOrLoop::from(&bf16_denoise_loop(
            TINY_TEST_MODEL,
            7,
            13,
            3,
        )));
        let [per_op, .., persistent] = one_program_of_each_rung(&DenoiseStepOrLoop::from(&tiny));
        assert_eq!((dequantizing(&plain), dequantizing(&per_op)), (0, 3 * 2 * 7));
        let last = &kernel_launches_in_program(&persistent).last().unwrap().default_kernel().build;
        assert!(last.macros_outside_build_name.contains(&("WEIGHT_BITS", bits)));
    }
}

/// Compares loops at the kernel's size limits with the fp64 loop of the quantised weights.
fn assert_quantised_rows_agree_with_reference(weights: LayerWeightFormat) {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problems = [
        bf16_denoise_loop(TINY_TEST_MODEL, 7, 13, 3),
        bf16_denoise_loop(TINY_TEST_MODEL, 50, 968, 10),
        bf16_denoise_loop(FULL_WIDTH_TWO_LAYER_MODEL, 50, 968, 2),
        bf16_denoise_loop(FULL_WIDTH_TWO_LAYER_MODEL, 56, 968, 1),
        bf16_denoise_loop(FULL_WIDTH_TWO_LAYER_MODEL, 1, 1023, 1),
        bf16_denoise_loop(FULL_WIDTH_TWO_LAYER_MODEL, 5, 3, 1),
        bf16_denoise_loop(FULL_WIDTH_TWO_LAYER_MODEL, 33, 500, 1),
        bf16_denoise_loop(
            ExpertDimensions { layer_count: 3, ..FULL_WIDTH_TWO_LAYER_MODEL },
            10,
            712,
            3,
        ),
        bf16_denoise_loop(
            ExpertDimensions { layer_count: 1, ..FULL_WIDTH_TWO_LAYER_MODEL },
            17,
            111,
            37,
        ),
    ];
    for plain in problems {
        let problem = loop_with_weight_format(plain, weights);
        let DenoiseLoop {
            expert: DenoiseParameters { action_tokens: s, prefix_tokens: p, model, .. },
            euler_steps: steps,
        } = problem;
        let name = format!(
            "{weights:?} {} depth={} s={s} p={p} steps={steps}",
            model.model_name, model.layer_count
        );
        verify_two_launches_of_each_row(
            rows_that_support_problem(CUDA_DENOISE_LOOP_LADDER, &problem),
            &problem,
            &device,
            &name,
        );
    }
}

#[test]
fn fp8_rows_agree_with_the_loop_of_the_quantised_weights() {
    assert_quantised_rows_agree_with_reference(LayerWeightFormat::Fp8);
}

#[test]
fn int4_rows_agree_with_the_loop_of_the_quantised_weights() {
    assert_quantised_rows_agree_with_reference(LayerWeightFormat::Int4);
}

/// Maximum number of attempts to prepare the rows that use cuBLASLt until both give the same bits.
/// Each preparation selects the algorithms that are clearly faster at that time, and different
/// algorithms sum in different orders. Wrongly decoded weights never give the same bits.
const MAX_PREPARATION_ATTEMPTS: usize = 8;

/// Rows with quantised weights must give the same bits as their bf16 rows on the dequantised
/// weights.
#[test]
fn quantised_rows_give_the_bits_of_their_dequantised_weights() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let sizes = [(50, 968, 3), (9, 40, 2)];
    for (weights, (s, p, steps)) in
        QUANTISED_FORMATS_WITH_BITS_AND_KERNEL.iter().flat_map(|f| sizes.map(|sizes| (f.0, sizes)))
    {
        let plain = bf16_denoise_loop(
            ExpertDimensions { layer_count: 3, ..FULL_WIDTH_TWO_LAYER_MODEL },
            s,
            p,
            steps,
        );
        let problem = loop_with_weight_format(plain, weights);
        let inputs = problem.inputs(27);
        let quantized = problem.expert.inputs_rounded_to_weight_format(&inputs);
        for row in [&CUDA_DENOISE_LOOP_LADDER[0], &CUDA_DENOISE_LOOP_LADDER[5]] {
            let actions = |(problem, inputs): (DenoiseLoop, &Tensors)| {
                let mut task = prepare_row_or_skip_unsupported(row, &problem, inputs, &device)?;
                task.launch_once().unwrap();
                Some(task.outputs_on_host().unwrap().tensor("actions").as_bytes().to_vec())
            };
            let choices = if row.implementation_name == "cuda/persistent" {
                1
            } else {
                MAX_PREPARATION_ATTEMPTS
            };
            let same =
                (0..choices).any(|_| actions((problem, &inputs)) == actions((plain, &quantized)));
            assert!(same, "{} {weights:?} s={s} p={p} steps={steps}", row.implementation_name);
        }
    }
}
