//! The multilayer perceptron on the GPU: library GEMMs, and a kernel for each step between the
//! GEMMs.

mod per_op;

use super::definition::{MlpBackward, MlpForward};
use crate::family::{check_dtype, per_op_and_graph};
use kernelgate::backend::Implementation;
use kernelgate::workload::Dtype;
use kernelgate_cuda::spec::{ListedKernel, list_kernel_rows};

/// All kernels of the perceptron family.
pub fn kernels() -> Vec<ListedKernel> {
    list_kernel_rows(per_op::KERNELS)
}

/// Ladder of the perceptron's forward pass.
pub const FORWARD: &[Implementation<MlpForward>] = &per_op_and_graph(
    "a launch an operation from the host, GEMMs by cuBLASLt",
    |problem: &MlpForward| check_dtype(problem.shape.dtype, Dtype::Bf16),
    |problem: &MlpForward| per_op::forward_program(&problem.shape),
);

/// Ladder of the perceptron's backward pass.
pub const BACKWARD: &[Implementation<MlpBackward>] = &per_op_and_graph(
    "a launch an operation from the host, GEMMs with transposed operands by cuBLASLt",
    |problem: &MlpBackward| check_dtype(problem.shape.dtype, Dtype::Bf16),
    |problem: &MlpBackward| per_op::backward_program(&problem.shape),
);

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::gpu_tests::{lock_first_gpu, prepare_row};
    use crate::kernel_tests::check_program_launches;
    use crate::mlp::shape::MlpShape;
    use kernelgate::verify::launch_and_verify;
    use kernelgate::workload::Problem;
    use kernelgate_cuda::Device;

    const TEST_SHAPE: MlpShape = MlpShape { b: 72, i: 40, h: 104, c: 24, dtype: Dtype::Bf16 };

    #[test]
    fn mlp_launches_have_the_arguments_of_their_kernels() {
        for program in [per_op::forward_program(&TEST_SHAPE), per_op::backward_program(&TEST_SHAPE)]
        {
            assert_eq!(program.check(), Ok(()));
            check_program_launches(&program);
        }
    }

    #[test]
    fn the_declared_memory_is_that_of_all_regions_and_the_workspace() {
        let inputs = MlpBackward { shape: TEST_SHAPE }.inputs(1);
        let program = per_op::backward_program(&TEST_SHAPE);
        for (name, bytes) in program.regions().filter(|(name, _)| inputs.get(name).is_some()) {
            assert_eq!(inputs.tensor(name).bytes(), bytes, "{name}");
        }
        assert!(program.device_bytes() > per_op::forward_program(&TEST_SHAPE).device_bytes());
    }

    #[test]
    fn mlp_rows_agree_with_the_reference_on_a_gpu() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        check_rows_against_reference(FORWARD, &MlpForward { shape: TEST_SHAPE }, &device);
        check_rows_against_reference(BACKWARD, &MlpBackward { shape: TEST_SHAPE }, &device);
    }

    fn check_rows_against_reference<P: Problem>(
        rows: &[Implementation<P>],
        problem: &P,
        device: &Arc<Device>,
    ) {
        let inputs = problem.inputs(3);
        let expected = problem.reference(&inputs);
        for row in rows {
            let Some(mut task) = prepare_row(row, problem, &inputs, device) else { continue };
            let found = launch_and_verify(&mut task, &expected, problem.tolerance());
            assert!(found.is_ok(), "{}: {found:?}", row.name);
        }
    }
}
