//! The exchanges on the host, whose ranks are tensors of one memory.

use super::definition::{Exchange, INPUTS, Kind, OUTPUTS};
use crate::parallel;
use kernelgate::backend::cpu::CpuTask;
use kernelgate::backend::{Implementation, Prepare};
use kernelgate::workload::{Dtype, Tensors};

/// Elements of a task.
const ELEMENTS: usize = 1 << 14;

/// The row of every exchange.
pub const ROWS: &[Implementation<Exchange>] = &[Implementation {
    name: "cpu",
    about: "sums and copies on all threads",
    supports: |problem| match problem.dtype {
        Dtype::F32 => Ok(()),
        _ => Err("computes f32 only".to_owned()),
    },
    prepare: Prepare::Cpu(|problem, inputs| {
        let problem = *problem;
        let outputs =
            (0..problem.gpus).fold(Tensors::new(), |outputs, rank| match problem.output(rank) {
                Some(len) => outputs.with_output(OUTPUTS[rank], [len], Dtype::F32),
                None => outputs,
            });
        CpuTask::new(inputs, outputs, move |inputs, outputs| exchange(&problem, inputs, outputs))
    }),
}];

fn exchange(problem: &Exchange, inputs: &Tensors, outputs: &mut Tensors) {
    let names = (0..problem.gpus).filter(|&rank| problem.input(rank).is_some());
    let parts: Vec<&[f32]> = names.map(|rank| inputs.f32(INPUTS[rank])).collect();
    for rank in (0..problem.gpus).filter(|&rank| problem.output(rank).is_some()) {
        let y = outputs.f32_mut(OUTPUTS[rank]);
        let part = y.len();
        parallel::chunks_mut(y, ELEMENTS, &|number, y| {
            let at = number * ELEMENTS;
            for (i, y) in (at..).zip(y) {
                *y = match problem.kind {
                    Kind::AllReduce => parts.iter().map(|x| x[i]).sum(),
                    Kind::ReduceScatter => parts.iter().map(|x| x[rank * part + i]).sum(),
                    Kind::AllGather => parts[i / parts[0].len()][i % parts[0].len()],
                    Kind::Broadcast | Kind::Send => parts[0][i],
                };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tests::agrees;

    #[test]
    fn agrees_with_the_reference_for_each_exchange() {
        let kinds = [Kind::AllReduce, Kind::AllGather, Kind::ReduceScatter, Kind::Broadcast];
        for gpus in [2, 4, 8] {
            for kind in kinds {
                agrees(&ROWS[0], &Exchange { kind, gpus, elements: 40_008, dtype: Dtype::F32 });
            }
        }
        let dtype = Dtype::F32;
        agrees(&ROWS[0], &Exchange { kind: Kind::Send, gpus: 2, elements: 8, dtype });
    }
}
