//! A list of launches, written once and walked each time: kernels, library GEMMs, named ranges.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use super::buffers::Buffers;
use super::row::Items;
use crate::denoise::model::Model;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{self, Input};
use kernelgate_cuda::architecture::overlaps_launches;
use kernelgate_cuda::driver::event::Crossing;
use kernelgate_cuda::driver::persistence::SetAside;
use kernelgate_cuda::driver::window::Window;
use kernelgate_cuda::libraries::gemm::{Blas, Gemm, GemmOperands, GemmSpec};
use kernelgate_cuda::observe::range::Range;
use kernelgate_cuda::{Argument, Device, KernelSpec, LaunchAttributes, LoadedKernel};

/// Most launches of a GEMM by which its algorithm is chosen: a step's, where there are more.
const MAX_TIMED: usize = 40;

type DenoiseKernel = KernelSpec<Items>;

/// One entry; kernels and GEMMs by their number.
enum Op {
    Launch { kernel: usize, arguments: Vec<Argument>, attributes: LaunchAttributes },
    Gemm { lane: usize, gemm: usize, x: u64, w: u64, y: u64 },
    Cross { crossing: usize, from: usize, to: usize },
    Begin(String),
    End,
}

/// The list, with everything that it launches and the memory it works on.
pub struct LaunchSequence {
    ops: Vec<Op>,
    kernels: Vec<LoadedKernel>,
    gemms: Vec<Gemm>,
    blas: Option<Rc<Blas>>,
    crossings: Vec<Crossing>,
    memory: Buffers,
    _set_aside: Option<SetAside>,
}

impl LaunchSequence {
    /// What every launch reads anew: the noise. Weights and caches are read as they were when this
    /// was prepared, some of them packed.
    pub fn launch_inputs(&self) -> [Input; 1] {
        cuda::inputs([("x", self.memory.noise())])
    }

    /// Enqueues all of it.
    ///
    /// # Errors
    /// When a launch is refused.
    pub fn enqueue(&self) -> Result<(), BackendError> {
        let mut ranges = Vec::new();
        for op in &self.ops {
            match op {
                Op::Launch { kernel, arguments, attributes } => {
                    self.kernels[*kernel].launch_with(*attributes, arguments)?
                }
                Op::Gemm { lane, gemm, x, w, y } => {
                    self.gemms[*gemm].launch(*lane, &GemmOperands::new(*x, *w, *y))?
                }
                Op::Cross { crossing, from, to } => {
                    let blas = self.blas.as_ref().expect("lanes are the library's");
                    self.crossings[*crossing].mark(blas.stream(*from))?;
                    self.crossings[*crossing].hold(blas.stream(*to))?;
                }
                Op::Begin(name) => ranges.push(Range::new(name)),
                Op::End => drop(ranges.pop()),
            }
        }
        Ok(())
    }
}

/// A launch as it is written down.
#[derive(Debug, Clone)]
pub enum Written {
    /// A kernel for so many items, of so many layers, and what L2 is to do with a range of what it
    /// reads.
    Launch {
        kernel: &'static DenoiseKernel,
        items: usize,
        layers: usize,
        arguments: Vec<Argument>,
        window: Option<Window>,
    },
    /// A GEMM of the matrices at these addresses, in a lane; kernels are in the first.
    Gemm { lane: usize, spec: GemmSpec, x: u64, w: u64, y: u64 },
    /// Later work in one lane waits for the work that is in another so far.
    Cross { from: usize, to: usize },
    /// A named range begins.
    Begin(String),
    /// The range begun last ends.
    End,
}

/// What a program will do, before anything is compiled: writing it needs addresses only.
#[derive(Default)]
pub struct LaunchPlan {
    pub written: Vec<Written>,
}

impl LaunchPlan {
    /// Adds a kernel for so many items: its arguments in order, of memory that the finished program
    /// or its task keeps.
    pub fn launch(&mut self, kernel: &'static DenoiseKernel, items: usize, arguments: &[Argument]) {
        self.launch_stack(kernel, items, 1, arguments)
    }

    /// The same with a window.
    pub fn launch_within(
        &mut self,
        kernel: &'static DenoiseKernel,
        items: usize,
        arguments: &[Argument],
        window: Option<Window>,
    ) {
        self.written.push(Written::Launch {
            kernel,
            items,
            layers: 1,
            arguments: arguments.to_vec(),
            window,
        });
    }

    /// The same for so many layers at once.
    pub fn launch_stack(
        &mut self,
        kernel: &'static DenoiseKernel,
        items: usize,
        layers: usize,
        arguments: &[Argument],
    ) {
        self.written.push(Written::Launch {
            kernel,
            items,
            layers,
            arguments: arguments.to_vec(),
            window: None,
        });
    }

    /// Adds a GEMM of the matrices at these addresses, in a lane. They are as the spec says and
    /// live as a launch's; y overlaps neither x nor w, and nothing that may run concurrently
    /// uses y.
    pub fn gemm(&mut self, lane: usize, spec: GemmSpec, x: u64, w: u64, y: u64) {
        self.written.push(Written::Gemm { lane, spec, x, w, y });
    }

    /// Makes later work in lane `to` wait for the work that is in lane `from` so far. At the end
    /// the first lane must have waited for all others.
    pub fn cross(&mut self, from: usize, to: usize) {
        self.written.push(Written::Cross { from, to });
    }

    /// Begins a named range.
    pub fn begin(&mut self, name: impl Into<String>) {
        self.written.push(Written::Begin(name.into()));
    }

    /// Ends the range begun last.
    pub fn end(&mut self) {
        self.written.push(Written::End);
    }

    /// Compiles, loads and describes everything in it. The program keeps the memory and what it has
    /// set aside of L2; GEMMs need the library. If `programmatic`, kernels are launched with PDL
    /// where the device has it, which is from sm_90 on.
    ///
    /// # Errors
    /// When a kernel does not compile or load, a grid cannot hold its blocks, or the library knows
    /// no algorithm.
    pub fn finish(
        self,
        device: &Arc<Device>,
        model: &Model,
        blas: Option<&Rc<Blas>>,
        programmatic: bool,
        memory: Buffers,
        set_aside: Option<SetAside>,
    ) -> Result<LaunchSequence, BackendError> {
        let programmatic = programmatic && overlaps_launches(&device.facts().arch);
        let mut program = LaunchSequence {
            ops: Vec::new(),
            kernels: Vec::new(),
            gemms: Vec::new(),
            blas: blas.cloned(),
            crossings: Vec::new(),
            memory,
            _set_aside: set_aside,
        };
        let mut loaded: BTreeMap<(&'static str, usize, usize), usize> = BTreeMap::new();
        let mut described: Vec<GemmSpec> = Vec::new();
        for written in self.written {
            program.ops.push(match written {
                Written::Begin(name) => Op::Begin(name),
                Written::End => Op::End,
                Written::Cross { from, to } => {
                    program.crossings.push(Crossing::new(device)?);
                    Op::Cross { crossing: program.crossings.len() - 1, from, to }
                }
                Written::Launch { kernel, items, layers, arguments, window } => {
                    let number = match loaded.get(&(kernel.symbol, items, layers)) {
                        Some(&known) => known,
                        None => {
                            program.kernels.push(
                                kernel.load(device, &Items { model: *model, items, layers })?,
                            );
                            let number = program.kernels.len() - 1;
                            loaded.insert((kernel.symbol, items, layers), number);
                            number
                        }
                    };
                    Op::Launch {
                        kernel: number,
                        arguments,
                        attributes: LaunchAttributes {
                            programmatic,
                            window,
                            ..LaunchAttributes::default()
                        },
                    }
                }
                Written::Gemm { lane, spec, x, w, y } => {
                    let gemm = match described.iter().position(|known| *known == spec) {
                        Some(gemm) => gemm,
                        None => {
                            let blas = blas.expect("a program with GEMMs was given the library");
                            program.gemms.push(Gemm::new(blas, spec)?);
                            described.push(spec);
                            described.len() - 1
                        }
                    };
                    Op::Gemm { lane, gemm, x, w, y }
                }
            });
        }
        // Every GEMM is timed on all that it multiplies here: layer after layer of weights, as in
        // the program.
        for (number, gemm) in program.gemms.iter_mut().enumerate() {
            let operands: Vec<GemmOperands> = program
                .ops
                .iter()
                .filter_map(|op| match *op {
                    Op::Gemm { gemm, x, w, y, .. } if gemm == number => {
                        Some(GemmOperands::new(x, w, y))
                    }
                    _ => None,
                })
                .take(MAX_TIMED)
                .collect();
            gemm.choose(&operands)?;
        }
        Ok(program)
    }
}
