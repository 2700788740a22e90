//! The two-layer perceptron on the GPU: cuBLASLt GEMMs, and one kernel for each step between the
//! GEMMs.

mod per_op;

use super::definition::{MlpBackward, MlpForward};
use crate::family::{check_problem_dtype_is_computed, per_op_and_graph_rows};
use kernelgate::backend::Implementation;
use kernelgate::workload::Dtype;
use kernelgate_cuda::spec::{ListedKernelBuild, list_kernel_rows};

/// Lists all CUDA kernels of the perceptron family.
pub fn list_mlp_kernels() -> Vec<ListedKernelBuild> {
    list_kernel_rows(per_op::PER_OP_MLP_KERNELS)
}

/// GPU implementations of the perceptron's forward pass: launches one by one, and the same launches
/// as a CUDA graph.
pub const CUDA_MLP_FORWARD_LADDER: &[Implementation<MlpForward>] = &per_op_and_graph_rows(
    "a launch an operation from the host, GEMMs by cuBLASLt",
    |problem: &MlpForward| check_problem_dtype_is_computed(problem.shape.dtype, Dtype::Bf16),
    |problem: &MlpForward| per_op::mlp_forward_program(&problem.shape),
);

/// GPU implementations of the perceptron's backward pass: launches one by one, and the same
/// launches as a CUDA graph.
pub const CUDA_MLP_BACKWARD_LADDER: &[Implementation<MlpBackward>] = &per_op_and_graph_rows(
    "a launch an operation from the host, GEMMs with transposed operands by cuBLASLt",
    |problem: &MlpBackward| check_problem_dtype_is_computed(problem.shape.dtype, Dtype::Bf16),
    |problem: &MlpBackward| per_op::mlp_backward_program(&problem.shape),
);

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::gpu_tests::{lock_first_gpu, prepare_row_or_skip_unsupported};
    use crate::kernel_tests::assert_launches_match_kernel_parameters;
    use crate::mlp::shape::PerceptronSizes;
    use kernelgate::verify::launch_twice_and_compare_with_reference;
    use kernelgate::workload::Problem;
    use kernelgate_cuda::Device;

    const SMALL_BF16_MLP_SHAPE: PerceptronSizes = PerceptronSizes {
        batch_rows: 72,
        input_elements: 40,
        hidden_elements: 104,
        classes: 24,
        dtype: Dtype::Bf16,
    };

    #[test]
    fn mlp_launches_have_the_arguments_that_their_kernels_declare() {
        for program in [
            per_op::mlp_forward_program(&SMALL_BF16_MLP_SHAPE),
            per_op::mlp_backward_program(&SMALL_BF16_MLP_SHAPE),
        ] {
            assert_eq!(program.check(), Ok(()));
            assert_launches_match_kernel_parameters(&program);
        }
    }

    #[test]
    fn declared_mlp_memory_is_that_of_all_regions_and_the_gemm_workspace() {
        let inputs = MlpBackward { shape: SMALL_BF16_MLP_SHAPE }.inputs(1);
        let program = per_op::mlp_backward_program(&SMALL_BF16_MLP_SHAPE);
        for (name, bytes) in
            program.names_and_bytes_of_regions().filter(|(name, _)| inputs.get(name).is_some())
        {
            assert_eq!(inputs.tensor(name).size_in_bytes(), bytes, "{name}");
        }
        assert!(
            program.device_bytes()
                > per_op::mlp_forward_program(&SMALL_BF16_MLP_SHAPE).device_bytes()
        );
    }

    #[test]
    fn mlp_rows_agree_with_the_reference_on_a_gpu() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        assert_rows_agree_with_reference_on_gpu(
            CUDA_MLP_FORWARD_LADDER,
            &MlpForward { shape: SMALL_BF16_MLP_SHAPE },
            &device,
        );
        assert_rows_agree_with_reference_on_gpu(
            CUDA_MLP_BACKWARD_LADDER,
            &MlpBackward { shape: SMALL_BF16_MLP_SHAPE },
            &device,
        );
    }

    fn assert_rows_agree_with_reference_on_gpu<P: Problem>(
        rows: &[Implementation<P>],
        problem: &P,
        device: &Arc<Device>,
    ) {
        let inputs = problem.inputs(3);
        let expected = problem.reference(&inputs);
        for row in rows {
            let Some(mut task) = prepare_row_or_skip_unsupported(row, problem, &inputs, device)
            else {
                continue;
            };
            let found =
                launch_twice_and_compare_with_reference(&mut task, &expected, problem.tolerance());
            assert!(found.is_ok(), "{}: {found:?}", row.implementation_name);
        }
    }
}
