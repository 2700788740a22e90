//! Attention as steps of a program: kernels and addresses of its launches are fixed when the
//! program is loaded.

use super::call::{
    AttentionTechnique, BackwardAddresses, ForwardAddresses, QueryGradientSumOrder,
    ScratchAddresses,
};
use super::launches::{BackwardCall, ForwardCall};
use super::layout::{AttentionShape, BackwardLayout, ForwardLayout};
use kernelgate::backend::program::{Lane, MemoryPurpose, Pointer, Program};

/// Pointers to the tensors of an attention forward.
#[derive(Debug, Clone, Copy)]
pub struct ForwardPointers {
    /// Queries.
    pub q: Pointer,
    /// Keys.
    pub k: Pointer,
    /// Values.
    pub v: Pointer,
    /// Output.
    pub out: Pointer,
    /// Natural logarithm of each row's sum of exponentials, if a backward pass follows.
    pub lse: Option<Pointer>,
}

/// Pointers to the tensors and scratch memory of an attention backward.
#[derive(Debug, Clone, Copy)]
pub struct BackwardPointers {
    /// Queries.
    pub q: Pointer,
    /// Keys.
    pub k: Pointer,
    /// Values.
    pub v: Pointer,
    /// Output of the forward pass.
    pub out: Pointer,
    /// Log-sum-exp of the rows, as the forward pass wrote it.
    pub lse: Pointer,
    /// Gradient of the output.
    pub grad_out: Pointer,
    /// Gradient of the queries, written.
    pub grad_q: Pointer,
    /// Gradient of the keys, written.
    pub grad_k: Pointer,
    /// Gradient of the values, written.
    pub grad_v: Pointer,
    /// Scratch memory of the backward, which all layers of a program share.
    pub scratch: ScratchPointers,
}

/// Scratch memory of all attention backwards of one shape in a program.
#[derive(Debug, Clone, Copy)]
pub struct ScratchPointers {
    any: Pointer,
    zeroed: Pointer,
}

impl ScratchPointers {
    /// Declares the regions `attention_scratch` and `attention_zeros`, large enough for any device.
    pub fn declare_scratch_regions(program: &mut Program, shape: &AttentionShape) -> Self {
        let bytes = BackwardCall::max_scratch_bytes(shape);
        let zeroed = bytes.zeroed as usize;
        Self {
            any: program.add_scratch(
                "attention_scratch",
                MemoryPurpose::Workspace,
                bytes.any as usize,
            ),
            zeroed: program.add_packed(
                "attention_zeros",
                MemoryPurpose::Workspace,
                zeroed,
                move |_| vec![0; zeroed],
            ),
        }
    }
}

/// Appends an attention forward to the program's first lane, by the fastest technique of the device
/// that loads the program.
pub fn append_attention_forward(
    program: &mut Program,
    shape: &AttentionShape,
    layout: &ForwardLayout,
    pointers: &ForwardPointers,
) {
    let ForwardPointers { q, k, v, out, lse } = *pointers;
    let (shape, layout) = (*shape, *layout);
    let all: Vec<Pointer> = [q, k, v, out].into_iter().chain(lse).collect();
    program.call(Lane::MAIN_LANE, &all, move |site| {
        let technique = AttentionTechnique::fastest_on_device(site.device, &shape)?;
        let forward = ForwardCall::new(site.device, &shape, &layout, technique)?;
        let (&[q, k, v, out], lse) =
            site.addresses.split_first_chunk().expect("an address a pointer");
        let lse = lse.first().copied();
        let launches = forward.prepare_launches(&ForwardAddresses { q, k, v, out, lse })?;
        Ok(Box::new(move || launches.launch()))
    });
}

/// Appends an attention backward to the program's first lane, by the fastest technique of the
/// device that loads the program.
pub fn append_attention_backward(
    program: &mut Program,
    shape: &AttentionShape,
    layout: &BackwardLayout,
    order: QueryGradientSumOrder,
    pointers: &BackwardPointers,
) {
    let BackwardPointers { q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v, scratch } =
        *pointers;
    let (shape, layout) = (*shape, *layout);
    let tensors = [q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v];
    let all = [&tensors[..], &[scratch.any, scratch.zeroed]].concat();
    program.call(Lane::MAIN_LANE, &all, move |site| {
        let technique = AttentionTechnique::fastest_on_device(site.device, &shape)?;
        let backward = BackwardCall::new(site.device, &shape, &layout, technique, order)?;
        let [q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v, any, zeroed] =
            site.addresses.try_into().expect("an address a pointer");
        let addresses = BackwardAddresses { q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v };
        let launches = backward.prepare_launches(&addresses, &ScratchAddresses { any, zeroed })?;
        Ok(Box::new(move || launches.launch()))
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cuda::tests::bf16_attention;
    use crate::attention::definition::Attention;
    use crate::attention::gradients::AttentionBackward;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::backend::program::{Capture, ProgramStep};
    use kernelgate::verify::launch_and_verify;
    use kernelgate::workload::Problem;

    /// Program of an attention forward and its backward over dense tensors.
    fn attention_training_step(attention: &Attention, order: QueryGradientSumOrder) -> Program {
        let mut program = Program::new();
        let shape = AttentionShape::from(attention);
        let layout = ForwardLayout::strides_of_bhsd(&shape);
        let bytes = |extents: [usize; 4]| 2 * extents.iter().product::<usize>();
        let (queries, keys) = (attention.shape(), attention.key_value_shape());
        let [q, k, v, grad_out] = [("q", queries), ("k", keys), ("v", keys), ("grad_out", queries)]
            .map(|(name, extents)| program.add_input(name, MemoryPurpose::Inputs, bytes(extents)));
        let out = program.add_scratch("out", MemoryPurpose::Activations, bytes(queries));
        let lse = program.add_scratch(
            "lse",
            MemoryPurpose::Activations,
            4 * bytes(queries) / (2 * attention.d),
        );
        let [grad_q, grad_k, grad_v] = [("grad_q", queries), ("grad_k", keys), ("grad_v", keys)]
            .map(|(name, extents)| program.add_output(name, extents, attention.output_dtype_of()));
        let scratch = ScratchPointers::declare_scratch_regions(&mut program, &shape);
        let forward = ForwardPointers { q, k, v, out, lse: Some(lse) };
        append_attention_forward(&mut program, &shape, &layout, &forward);
        let backward =
            BackwardPointers { q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v, scratch };
        append_attention_backward(
            &mut program,
            &shape,
            &BackwardLayout::gradients_like_tensors(layout),
            order,
            &backward,
        );
        program
    }

    #[test]
    fn a_program_with_attention_declares_its_tensors_and_scratch_memory() {
        let attention = bf16_attention(2, 4, 100, 128, true);
        let program = attention_training_step(&attention, QueryGradientSumOrder::Any);
        assert_eq!(program.check(), Ok(()));
        assert_eq!(
            program.steps().iter().filter(|step| matches!(step, ProgramStep::Call { .. })).count(),
            2
        );
        let scratch = BackwardCall::max_scratch_bytes(&AttentionShape::from(&attention));
        let tensors = 8 * (2 * 4 * 100 * 128 * 2);
        let lse = 2 * 4 * 100 * 4;
        assert_eq!(program.device_bytes(), tensors + lse + scratch.any + scratch.zeroed);
    }

    #[test]
    fn a_captured_training_step_agrees_with_the_reference() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let wgmma = device.facts().arch == "sm_90a";
        for (h_kv, order) in [
            (6, QueryGradientSumOrder::Any),
            (2, QueryGradientSumOrder::Any),
            (6, QueryGradientSumOrder::Fixed),
            (2, QueryGradientSumOrder::Fixed),
        ] {
            if !wgmma && (h_kv, order) != (6, QueryGradientSumOrder::Any) {
                continue;
            }
            let attention = Attention { h_kv, ..bf16_attention(2, 6, 333, 64, true) };
            let problem = AttentionBackward { attention };
            let inputs = problem.inputs(28);
            let program = attention_training_step(&attention, order);
            let mut task = program.into_task(&device, &inputs, Capture::Graph).unwrap();
            let expected = problem.reference(&inputs);
            for launch in 1..=2 {
                let result = launch_and_verify(&mut task, &expected, problem.tolerance());
                let name = format!("{h_kv} heads of keys, {order:?}, launch {launch}");
                assert!(result.is_ok(), "{name}: {}", result.unwrap_err());
            }
        }
    }
}
