//! Which kernels differ between the builds, whether or not there is a GPU: every bench of both sides
//! compiles its kernels for a stated architecture, by NVRTC.

use super::Engine;
use crate::compare::session::Bench;
use crate::compare::sides::install::Driver;
use crate::compare::trials::by_protocol;
use crate::gate::kernels::code::KernelsCompared;
use crate::gate::paired::Arm;
use kernelgate::protocol::{Action, ResourcesReport, ResponseBody};

impl Engine<'_> {
    /// The kernels of these benches, for each architecture that was asked for.
    pub(super) fn kernels(&self, benches: &[Bench]) -> Vec<KernelsCompared> {
        let of = |arch: &String| {
            let mut all = KernelsCompared { arch: arch.clone(), ..KernelsCompared::default() };
            for bench in benches {
                let compiled = [Arm::Base, Arm::Head].map(|arm| self.compiled(arm, bench, arch));
                match compiled {
                    [Ok(base), Ok(head)] => all.add(&base, &head),
                    [Err(why), _] | [_, Err(why)] => {
                        all.not_compared.insert(bench.name.clone(), why);
                    }
                }
            }
            all
        };
        self.request.kernels.iter().map(of).collect()
    }

    fn compiled(&self, arm: Arm, bench: &Bench, arch: &str) -> Result<ResourcesReport, String> {
        if bench.driver == Driver::Criterion {
            return Err("it uses Criterion alone".to_owned());
        }
        self.progress.now(&format!("compiling the kernels of {} for {arch}", bench.name));
        let request = self.trial_request(bench, arm, "kernels".to_owned(), bench.cases.clone());
        let trial = self.trial(arm, &bench.name, &request, bench.timeout)?;
        let action = Action::Resources { arch: arch.to_owned(), filter: None };
        match by_protocol::ask(&self.setup(), &trial, action)? {
            ResponseBody::Resources(report) => Ok(report),
            _ => Err("it answered something else than it was asked".to_owned()),
        }
    }
}
