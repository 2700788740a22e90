//! Exchanges between GPUs, computed on the CPU: the ranks are tensors in one memory.

use super::definition::{ExchangeKind, ExchangeProblem, INPUT_NAMES, OUTPUT_NAMES};
use crate::family::check_dtype;
use crate::parallel;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};

/// Number of elements that one CPU task sums or copies.
const ELEMENTS_PER_TASK: usize = 1 << 14;

/// The CPU row of all exchanges (sum, gather, broadcast, send).
pub const EXCHANGE_ROWS: &[Implementation<ExchangeProblem>] = &[Implementation {
    name: "cpu",
    about: "sums and copies on all threads",
    supports: |problem| check_dtype(problem.dtype, Dtype::F32),
    prepare: Prepare::Cpu(|problem, inputs| {
        let problem = *problem;
        let outputs = (0..problem.gpus).fold(Tensors::new(), |outputs, rank| {
            match problem.output_elements(rank) {
                Some(len) => outputs.with_output(OUTPUT_NAMES[rank], [len], Dtype::F32),
                None => outputs,
            }
        });
        CpuTask::new(inputs, outputs, move |inputs, outputs| {
            exchange_on_cpu(&problem, inputs, outputs)
        })
    }),
}];

fn exchange_on_cpu(problem: &ExchangeProblem, inputs: &Tensors, outputs: &mut Tensors) {
    let names = (0..problem.gpus).filter(|&rank| problem.input_elements(rank).is_some());
    let parts: Vec<&[f32]> = names.map(|rank| inputs.f32(INPUT_NAMES[rank])).collect();
    for rank in (0..problem.gpus).filter(|&rank| problem.output_elements(rank).is_some()) {
        let y = outputs.f32_mut(OUTPUT_NAMES[rank]);
        let part = y.len();
        parallel::for_each_chunk(y, ELEMENTS_PER_TASK, &|number, y| {
            let at = number * ELEMENTS_PER_TASK;
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
    use crate::cpu_tests::check_row_against_reference;

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
                check_row_against_reference(
                    &EXCHANGE_ROWS[0],
                    &ExchangeProblem { kind, gpus, elements: 40_008, dtype: Dtype::F32 },
                );
            }
        }
        let dtype = Dtype::F32;
        check_row_against_reference(
            &EXCHANGE_ROWS[0],
            &ExchangeProblem { kind: ExchangeKind::Send, gpus: 2, elements: 8, dtype },
        );
    }
}
