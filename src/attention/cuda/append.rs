//! Adds attention to a kernelgate program as steps; loading the program fixes the kernels and the
//! tensor addresses of their launches.

use super::call::{
    AttentionBackwardAddresses, AttentionForwardAddresses, AttentionGemmTechnique,
    AttentionScratchAddresses, QueryGradientSumOrder,
};
use super::launches::{AttentionBackwardCall, AttentionForwardCall};
use super::layout::{AttentionBackwardLayout, AttentionForwardLayout, AttentionShape};
use kernelgate::backend::program::{LaunchProgram, MemoryPurpose, ProgramLane, RegionPointer};

/// Pointers of a program's memory regions to the tensors of an attention forward.
#[derive(Debug, Clone, Copy)]
pub struct AttentionForwardPointers {
    /// Queries of the attention.
    pub q: RegionPointer,
    /// Keys of the attention.
    pub k: RegionPointer,
    /// Value tensor v of the attention.
    pub v: RegionPointer,
    /// Output of the attention.
    pub out: RegionPointer,
    /// Region for the natural logarithm of each row's sum of exponentials, if a backward pass
    /// follows.
    pub lse: Option<RegionPointer>,
}

/// Pointers of a program's memory regions to the tensors and scratch memory of an attention
/// backward.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBackwardPointers {
    /// Queries of the attention.
    pub q: RegionPointer,
    /// Keys of the attention.
    pub k: RegionPointer,
    /// Values of the attention.
    pub v: RegionPointer,
    /// Output of the attention forward, which the backward reads.
    pub out: RegionPointer,
    /// Log-sum-exp of the score rows that the attention forward wrote, which the backward reads.
    pub lse: RegionPointer,
    /// Gradient of the output.
    pub grad_out: RegionPointer,
    /// Gradient of the queries, which the backward writes.
    pub grad_q: RegionPointer,
    /// Gradient of the keys, which the backward writes.
    pub grad_k: RegionPointer,
    /// Gradient of the values, which the backward writes.
    pub grad_v: RegionPointer,
    /// Scratch memory of the attention backward, which all layers of a program share.
    pub scratch: AttentionBackwardScratchPointers,
}

/// Pointers to the scratch memory that all attention backwards of one shape in a program share.
#[derive(Debug, Clone, Copy)]
pub struct AttentionBackwardScratchPointers {
    unzeroed_scratch: RegionPointer,
    zeroed_scratch: RegionPointer,
}

impl AttentionBackwardScratchPointers {
    /// Adds the memory regions `attention_scratch` and `attention_zeros` to the program, large
    /// enough for an attention backward on any device.
    pub fn add_backward_scratch_regions(
        program: &mut LaunchProgram,
        shape: &AttentionShape,
    ) -> Self {
        let bytes = AttentionBackwardCall::max_backward_scratch_bytes(shape);
        let zeroed = bytes.zeroed_scratch_bytes as usize;
        Self {
            unzeroed_scratch: program.add_scratch(
                "attention_scratch",
                MemoryPurpose::Workspace,
                bytes.uninitialised_scratch_bytes as usize,
            ),
            zeroed_scratch: program.add_packed_from_inputs(
                "attention_zeros",
                MemoryPurpose::Workspace,
                zeroed,
                move |_| vec![0; zeroed],
            ),
        }
    }
}

/// Appends an attention forward to the program's first lane; the device that loads the program
/// determines its technique, the fastest supported one.
pub fn append_attention_forward(
    program: &mut LaunchProgram,
    shape: &AttentionShape,
    layout: &AttentionForwardLayout,
    pointers: &AttentionForwardPointers,
) {
    let AttentionForwardPointers { q, k, v, out, lse } = *pointers;
    let (shape, layout) = (*shape, *layout);
    let all: Vec<RegionPointer> = [q, k, v, out].into_iter().chain(lse).collect();
    program.add_launch_of_other_code(ProgramLane::MAIN_LANE, &all, move |site| {
        let technique = AttentionGemmTechnique::fastest_technique_on_device(site.device, &shape)?;
        let forward = AttentionForwardCall::compile_and_load_attention_forward(
            site.device,
            &shape,
            &layout,
            technique,
        )?;
        let (&[q, k, v, out], lse) =
            site.device_addresses.split_first_chunk().expect("an address a pointer");
        let lse = lse.first().copied();
        let launches = forward.prepare_forward_launch_at_addresses(&AttentionForwardAddresses {
            q_address: q,
            k_address: k,
            v_address: v,
            out_address: out,
            lse_address: lse,
        })?;
        Ok(Box::new(move || launches.enqueue_all_launches()))
    });
}

/// Appends an attention backward to the program's first lane; the device that loads the program
/// determines its technique, the fastest supported one.
pub fn append_attention_backward(
    program: &mut LaunchProgram,
    shape: &AttentionShape,
    layout: &AttentionBackwardLayout,
    order: QueryGradientSumOrder,
    pointers: &AttentionBackwardPointers,
) {
    let AttentionBackwardPointers { q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v, scratch } =
        *pointers;
    let (shape, layout) = (*shape, *layout);
    let tensors = [q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v];
    let all = [&tensors[..], &[scratch.unzeroed_scratch, scratch.zeroed_scratch]].concat();
    program.add_launch_of_other_code(ProgramLane::MAIN_LANE, &all, move |site| {
        let technique = AttentionGemmTechnique::fastest_technique_on_device(site.device, &shape)?;
        let backward = AttentionBackwardCall::compile_and_load_attention_backward(
            site.device,
            &shape,
            &layout,
            technique,
            order,
        )?;
        let [q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v, any, zeroed] =
            site.device_addresses.try_into().expect("an address a pointer");
        let addresses = AttentionBackwardAddresses {
            q_address: q,
            k_address: k,
            v_address: v,
            out_address: out,
            lse_address: lse,
            grad_out_address: grad_out,
            grad_q_address: grad_q,
            grad_k_address: grad_k,
            grad_v_address: grad_v,
        };
        let launches = backward.prepare_backward_launches_at_addresses(
            &addresses,
            &AttentionScratchAddresses {
                uninitialised_scratch_address: any,
                zeroed_scratch_address: zeroed,
            },
        )?;
        Ok(Box::new(move || launches.enqueue_all_launches()))
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::cuda::tests::bf16_attention_without_grouped_heads;
    use crate::attention::definition::AttentionParameters;
    use crate::attention::gradients::AttentionBackward;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::backend::program::{ProgramLaunchMode, ProgramStep};
    use kernelgate::verify::launch_twice_and_compare_with_reference;
    use kernelgate::workload::Problem;

    /// Returns a program of one attention forward and its backward over dense tensors.
    fn attention_forward_and_backward_program(
        attention: &AttentionParameters,
        order: QueryGradientSumOrder,
    ) -> LaunchProgram {
        let mut program = LaunchProgram::new();
        let shape = AttentionShape::from(attention);
        let layout = AttentionForwardLayout::forward_layout_dense_bhsd(&shape);
        let bytes = |extents: [usize; 4]| 2 * extents.iter().product::<usize>();
        let (queries, keys) = (attention.query_and_output_shape(), attention.key_value_shape());
        let [q, k, v, grad_out] = [("q", queries), ("k", keys), ("v", keys), ("grad_out", queries)]
            .map(|(name, extents)| program.add_input(name, MemoryPurpose::Inputs, bytes(extents)));
        let out = program.add_scratch("out", MemoryPurpose::Activations, bytes(queries));
        let lse = program.add_scratch(
            "lse",
            MemoryPurpose::Activations,
            4 * bytes(queries) / (2 * attention.head_dim),
        );
        let [grad_q, grad_k, grad_v] = [("grad_q", queries), ("grad_k", keys), ("grad_v", keys)]
            .map(|(name, extents)| {
                program.add_output(name, extents, attention.attention_output_dtype())
            });
        let scratch =
            AttentionBackwardScratchPointers::add_backward_scratch_regions(&mut program, &shape);
        let forward = AttentionForwardPointers { q, k, v, out, lse: Some(lse) };
        append_attention_forward(&mut program, &shape, &layout, &forward);
        let backward = AttentionBackwardPointers {
            q,
            k,
            v,
            out,
            lse,
            grad_out,
            grad_q,
            grad_k,
            grad_v,
            scratch,
        };
        append_attention_backward(
            &mut program,
            &shape,
            &AttentionBackwardLayout::gradients_like_tensors(layout),
            order,
            &backward,
        );
        program
    }

    #[test]
    fn an_attention_program_counts_the_bytes_of_tensors_and_scratch() {
        let attention = bf16_attention_without_grouped_heads(2, 4, 100, 128, true);
        let program = attention_forward_and_backward_program(
            &attention,
            QueryGradientSumOrder::AnyKeyBlockOrder,
        );
        assert_eq!(program.check(), Ok(()));
        assert_eq!(
            program
                .steps()
                .iter()
                .filter(|step| matches!(step, ProgramStep::LaunchOfOtherCode { .. }))
                .count(),
            2
        );
        let scratch =
            AttentionBackwardCall::max_backward_scratch_bytes(&AttentionShape::from(&attention));
        let tensors = 8 * (2 * 4 * 100 * 128 * 2);
        let lse = 2 * 4 * 100 * 4;
        assert_eq!(
            program.device_bytes(),
            tensors + lse + scratch.uninitialised_scratch_bytes + scratch.zeroed_scratch_bytes
        );
    }

    #[test]
    fn gradients_of_a_captured_attention_program_agree_with_the_reference() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let wgmma = device.gpu_properties().kernel_architecture == "sm_90a";
        for (h_kv, order) in [
            (6, QueryGradientSumOrder::AnyKeyBlockOrder),
            (2, QueryGradientSumOrder::AnyKeyBlockOrder),
            (6, QueryGradientSumOrder::FixedKeyBlockOrder),
            (2, QueryGradientSumOrder::FixedKeyBlockOrder),
        ] {
            if !wgmma && (h_kv, order) != (6, QueryGradientSumOrder::AnyKeyBlockOrder) {
                continue;
            }
            let attention = AttentionParameters {
                key_value_heads: h_kv,
                ..bf16_attention_without_grouped_heads(2, 6, 333, 64, true)
            };
            let problem = AttentionBackward { attention };
            let inputs = problem.inputs(28);
            let program = attention_forward_and_backward_program(&attention, order);
            let mut task =
                program.into_task(&device, &inputs, ProgramLaunchMode::CapturedGraph).unwrap();
            let expected = problem.reference(&inputs);
            for launch in 1..=2 {
                let result = launch_twice_and_compare_with_reference(
                    &mut task,
                    &expected,
                    problem.tolerance(),
                );
                let name = format!("{h_kv} heads of keys, {order:?}, launch {launch}");
                assert!(result.is_ok(), "{name}: {}", result.unwrap_err());
            }
        }
    }
}
