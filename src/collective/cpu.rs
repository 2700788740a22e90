//! Collectives between GPUs (sum, gather, broadcast, send), computed on the CPU: the message of
//! each rank is a tensor in host memory.

use super::definition::{ExchangeKind, ExchangeProblem, INPUT_NAMES, OUTPUT_NAMES};
use crate::family::check_problem_dtype_is_computed;
use crate::parallel;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, PrepareFunction};
use kernelgate::workload::{Dtype, Tensors};

/// Number of elements that one parallel CPU task of a collective sums or copies.
const ELEMENTS_PER_CPU_TASK: usize = 1 << 14;

/// The one CPU implementation of all collectives: all-reduce, all-gather, reduce-scatter, broadcast
/// and send.
pub const CPU_EXCHANGE_ROWS: &[Implementation<ExchangeProblem>] = &[Implementation {
    implementation_name: "cpu",
    description: "sums and copies on all threads",
    supports: |problem| check_problem_dtype_is_computed(problem.dtype, Dtype::F32),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let problem = *problem;
        let outputs = (0..problem.gpus).fold(Tensors::new(), |outputs, rank| {
            match problem.output_elements_of_rank(rank) {
                Some(len) => outputs.with_output(OUTPUT_NAMES[rank], [len], Dtype::F32),
                None => outputs,
            }
        });
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            compute_exchange_on_cpu(&problem, inputs, outputs)
        })
    }),
}];

fn compute_exchange_on_cpu(problem: &ExchangeProblem, inputs: &Tensors, outputs: &mut Tensors) {
    let names = (0..problem.gpus).filter(|&rank| problem.input_elements_of_rank(rank).is_some());
    let parts: Vec<&[f32]> = names.map(|rank| inputs.f32_elements(INPUT_NAMES[rank])).collect();
    for rank in (0..problem.gpus).filter(|&rank| problem.output_elements_of_rank(rank).is_some()) {
        let y = outputs.f32_mut(OUTPUT_NAMES[rank]);
        let part = y.len();
        parallel::process_chunks_in_parallel(y, ELEMENTS_PER_CPU_TASK, &|number, y| {
            let at = number * ELEMENTS_PER_CPU_TASK;
            for (i, y) in (at..).zip(y) {
                *y = match problem.kind {
                    ExchangeKind::AllReduce => parts.iter().map(|x| x[i]).sum(),
                    ExchangeKind::ReduceScatter => parts.iter().map(|x| x[rank * part + i]).sum(),
                    ExchangeKind::AllGather => parts[i / parts[0].len()][i % parts[0].len()],
                    ExchangeKind::Broadcast | ExchangeKind::Send => parts[0][i],
                };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tests::assert_cpu_row_agrees_with_reference;

    #[test]
    fn cpu_exchanges_agree_with_the_reference() {
        let kinds = [
            ExchangeKind::AllReduce,
            ExchangeKind::AllGather,
            ExchangeKind::ReduceScatter,
            ExchangeKind::Broadcast,
        ];
        for gpus in [2, 4, 8] {
            for kind in kinds {
                assert_cpu_row_agrees_with_reference(
                    &CPU_EXCHANGE_ROWS[0],
                    &ExchangeProblem { kind, gpus, message_elements: 40_008, dtype: Dtype::F32 },
                );
            }
        }
        let dtype = Dtype::F32;
        assert_cpu_row_agrees_with_reference(
            &CPU_EXCHANGE_ROWS[0],
            &ExchangeProblem { kind: ExchangeKind::Send, gpus: 2, message_elements: 8, dtype },
        );
    }
}
