//! Tests of rows whose weights are quantised.

use super::*;

const FORMATS: [(WeightFormat, usize, &str); 2] = [
    (WeightFormat::Fp8, 8, "denoise_per_op_dequantize"),
    (WeightFormat::Int4, 4, "denoise_per_op_dequantize_int4"),
];

#[test]
fn rows_for_quantised_weights_are_those_of_operations_and_the_persistent_kernel() {
    let names = |problem: &DenoiseLoop| {
        supporting_rows(LOOP, problem).iter().map(|row| row.name).collect::<Vec<_>>()
    };
    for (weights, bits, dequantize) in FORMATS {
        let full = with_weights(denoise_loop_of(PI05_MODEL, 50, 968, 10), weights);
        let tiny = with_weights(denoise_loop_of(TINY_MODEL, 7, 13, 3), weights);
        assert_eq!(names(&full), ["cuda/per_op", "cuda/graph", "cuda/persistent"]);
        assert_eq!((LOOP[2].supports)(&full), Err("takes bf16 weights only".to_owned()));
        assert_eq!(names(&tiny), ["cuda/per_op", "cuda/graph"]);
        // `per_op` dequantises before each GEMM of a layer; the persistent kernel decodes as it
        // reads.
        let dequantizing = |program: &Program| {
            kernel_launches_of(program)
                .filter(|launch| launch.kernel().symbol == dequantize)
                .count()
        };
        let [plain, ..] = programs_of_run(&ExpertRun::from(&denoise_loop_of(TINY_MODEL, 7, 13, 3)));
        let [per_op, .., persistent] = programs_of_run(&ExpertRun::from(&tiny));
        assert_eq!((dequantizing(&plain), dequantizing(&per_op)), (0, 3 * 2 * 7));
        let last = &kernel_launches_of(&persistent).last().unwrap().kernel().build;
        assert!(last.constants.contains(&("WEIGHT_BITS", bits)));
    }
}

/// Compares loops at the kernel's size limits with the fp64 loop of the quantised weights.
fn rows_agree(weights: WeightFormat) {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problems = [
        denoise_loop_of(TINY_MODEL, 7, 13, 3),
        denoise_loop_of(TINY_MODEL, 50, 968, 10),
        denoise_loop_of(SHALLOW_MODEL, 50, 968, 2),
        denoise_loop_of(SHALLOW_MODEL, 56, 968, 1),
        denoise_loop_of(SHALLOW_MODEL, 1, 1023, 1),
        denoise_loop_of(SHALLOW_MODEL, 5, 3, 1),
        denoise_loop_of(SHALLOW_MODEL, 33, 500, 1),
        denoise_loop_of(ExpertModel { depth: 3, ..SHALLOW_MODEL }, 10, 712, 3),
        denoise_loop_of(ExpertModel { depth: 1, ..SHALLOW_MODEL }, 17, 111, 37),
    ];
    for plain in problems {
        let problem = with_weights(plain, weights);
        let DenoiseLoop { expert: ActionExpertShape { s, p, model, .. }, steps } = problem;
        let name =
            format!("{weights:?} {} depth={} s={s} p={p} steps={steps}", model.name, model.depth);
        check(supporting_rows(LOOP, &problem), &problem, &device, &name);
    }
}

#[test]
fn fp8_rows_agree_with_the_loop_of_the_quantised_weights() {
    rows_agree(WeightFormat::Fp8);
}

#[test]
fn int4_rows_agree_with_the_loop_of_the_quantised_weights() {
    rows_agree(WeightFormat::Int4);
}

/// Maximum number of attempts to prepare the rows that use cuBLASLt until both give the same bits.
/// Each preparation selects the algorithms that are clearly faster at that time, and different
/// algorithms sum in different orders. Wrongly decoded weights never give the same bits.
const CHOICES: usize = 8;

/// Rows with quantised weights must give the same bits as their bf16 rows on the dequantised
/// weights.
#[test]
fn rows_decode_to_the_bit() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let sizes = [(50, 968, 3), (9, 40, 2)];
    for (weights, (s, p, steps)) in FORMATS.iter().flat_map(|f| sizes.map(|sizes| (f.0, sizes))) {
        let plain = denoise_loop_of(ExpertModel { depth: 3, ..SHALLOW_MODEL }, s, p, steps);
        let problem = with_weights(plain, weights);
        let inputs = problem.inputs(27);
        let quantized = problem.expert.dequantised_inputs(&inputs);
        for row in [&LOOP[0], &LOOP[5]] {
            let actions = |(problem, inputs): (DenoiseLoop, &Tensors)| {
                let mut task = prepare_row(row, &problem, inputs, &device)?;
                task.launch().unwrap();
                Some(task.outputs().unwrap().tensor("actions").as_bytes().to_vec())
            };
            let choices = if row.name == "cuda/persistent" { 1 } else { CHOICES };
            let same =
                (0..choices).any(|_| actions((problem, &inputs)) == actions((plain, &quantized)));
            assert!(same, "{} {weights:?} s={s} p={p} steps={steps}", row.name);
        }
    }
}
