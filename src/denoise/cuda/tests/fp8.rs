//! Rows whose weights are quantised.

use super::*;

#[test]
fn rows_for_fp8_are_those_of_operations_and_the_persistent_kernel() {
    let names = |problem: &DenoiseLoop| {
        supporting(LOOP, problem).iter().map(|row| row.name).collect::<Vec<_>>()
    };
    let full = in_fp8(looped(PI05, 50, 968, 10));
    assert_eq!(names(&full), ["cuda/per_op", "cuda/graph", "cuda/persistent"]);
    assert_eq!((LOOP[2].supports)(&full), Err("takes bf16 weights only".to_owned()));
    assert_eq!(names(&in_fp8(looped(TINY, 7, 13, 3))), ["cuda/per_op", "cuda/graph"]);
    // A dequantisation before each GEMM of a layer; the persistent kernel decodes as it reads.
    let launches = |plan: &LaunchPlan, symbol: &str| {
        let named = |written: &&Written| matches!(written, Written::Launch { kernel, .. } if kernel.symbol == symbol);
        plan.written.iter().filter(named).count()
    };
    let dequantize = "denoise_per_op_dequantize";
    let [(plain, _), ..] = plans(&ExpertRun::from(&looped(TINY, 7, 13, 3)));
    let run = ExpertRun::from(&in_fp8(looped(TINY, 7, 13, 3)));
    let [(per_op, _), _, (persistent, _)] = plans(&run);
    assert_eq!((launches(&plain, dequantize), launches(&per_op, dequantize)), (0, 3 * 2 * 7));
    let Some(Written::Launch { kernel, .. }) =
        persistent.written.iter().rfind(|written| matches!(written, Written::Launch { .. }))
    else {
        panic!("the loop is launched")
    };
    let items = Items { model: PI05, items: 1, layers: 1 };
    assert!((kernel.constants)(&items).contains(&("WEIGHT_BITS", 8)));
}

#[test]
fn fp8_rows_agree_with_the_loop_of_the_quantised_weights() {
    let Some((device, _alone)) = gpu() else { return };
    let problems = [
        looped(TINY, 7, 13, 3),
        looped(TINY, 50, 968, 10),
        looped(SHALLOW, 50, 968, 2),
        looped(SHALLOW, 56, 968, 1),
        looped(SHALLOW, 1, 1023, 1),
        looped(SHALLOW, 33, 500, 1),
        looped(Model { depth: 3, ..SHALLOW }, 10, 712, 3),
        looped(Model { depth: 1, ..SHALLOW }, 17, 111, 37),
    ];
    for plain in problems {
        let problem = in_fp8(plain);
        let DenoiseLoop { expert: ExpertShape { s, p, model, .. }, steps } = problem;
        let name = format!("fp8 {} depth={} s={s} p={p} steps={steps}", model.name, model.depth);
        let rows = supporting(LOOP, &problem);
        check(rows, &problem, &device, &name);
    }
}

#[test]
fn the_persistent_kernel_decodes_fp8_to_the_bit() {
    let Some((device, _alone)) = gpu() else { return };
    for (s, p, steps) in [(50, 968, 3), (9, 40, 2)] {
        let plain = looped(Model { depth: 3, ..SHALLOW }, s, p, steps);
        let problem = in_fp8(plain);
        let inputs = problem.inputs(27);
        let quantized = problem.expert.effective(&inputs);
        let outputs: Vec<_> = [(problem, &inputs), (plain, &quantized)]
            .into_iter()
            .filter_map(|(problem, inputs)| {
                let mut task = prepare(&LOOP[5], &problem, inputs, &device)?;
                task.launch().unwrap();
                Some(task.outputs().unwrap().tensor("actions").as_bytes().to_vec())
            })
            .collect();
        assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "s={s} p={p} steps={steps}");
    }
}
