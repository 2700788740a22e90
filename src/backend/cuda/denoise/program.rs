//! A list of launches, written once and walked each time: kernels, library products, named ranges.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use super::buffers::Buffers;
use super::launch::{Launch, grid};
use crate::backend::BackendError;
use crate::backend::cuda::blas::{Blas, Gemm, Spec};
use crate::backend::cuda::device::{Argument, Device, Kernel, Shape};
use crate::backend::cuda::range::Range;
use crate::workload::denoise::model::Model;

/// One entry; kernels and products by their number.
enum Op {
    Launch { kernel: usize, shape: Shape, arguments: Vec<Argument>, overlapping: bool },
    Product { product: usize, x: u64, w: u64, y: u64 },
    Begin(String),
    End,
}

/// The list, with everything that it launches and the memory it works on.
pub struct Program {
    ops: Vec<Op>,
    kernels: Vec<Kernel>,
    products: Vec<Gemm>,
    _memory: Buffers,
}

impl Program {
    /// Enqueues all of it.
    ///
    /// # Errors
    /// When a launch is refused.
    pub fn enqueue(&self) -> Result<(), BackendError> {
        let mut ranges = Vec::new();
        for op in &self.ops {
            match op {
                // SAFETY: whoever wrote the program vouched for the arguments; the memory lives in it, the outputs beside it in the task.
                Op::Launch { kernel, shape, arguments, overlapping: true } => unsafe {
                    self.kernels[*kernel].launch_overlapping(*shape, arguments)?;
                },
                // SAFETY: as above.
                Op::Launch { kernel, shape, arguments, overlapping: false } => unsafe {
                    self.kernels[*kernel].launch(*shape, arguments)?
                },
                // SAFETY: as above.
                Op::Product { product, x, w, y } => unsafe { self.products[*product].launch(*x, *w, *y)? },
                Op::Begin(name) => ranges.push(Range::new(name)),
                Op::End => drop(ranges.pop()),
            }
        }
        Ok(())
    }
}

/// Writes a program.
pub struct Writer<'a> {
    device: &'a Arc<Device>,
    model: Model,
    blas: Option<Rc<Blas>>,
    overlapping: bool,
    ops: Vec<Op>,
    kernels: Vec<Kernel>,
    numbers: BTreeMap<&'static str, (usize, u32, u32)>,
    products: Vec<Gemm>,
    specs: Vec<Spec>,
}

impl<'a> Writer<'a> {
    /// An empty program with the library, which products need.
    pub fn with_products(device: &'a Arc<Device>, model: Model, blas: Rc<Blas>) -> Self {
        Self { blas: Some(blas), ..Self::new(device, model, false) }
    }

    /// An empty program; if wanted, the fused kernels begin while the kernel before them ends.
    pub fn new(device: &'a Arc<Device>, model: Model, overlapping: bool) -> Self {
        Self {
            device,
            model,
            blas: None,
            overlapping,
            ops: Vec::new(),
            kernels: Vec::new(),
            numbers: BTreeMap::new(),
            products: Vec::new(),
            specs: Vec::new(),
        }
    }

    /// Adds a kernel for so many items.
    ///
    /// # Safety
    /// The arguments are the kernel's, in order, of memory that the finished program or its task keeps.
    ///
    /// # Errors
    /// When it does not compile or load, or no grid holds so many blocks.
    pub unsafe fn launch(&mut self, symbol: &'static str, items: usize, arguments: &[Argument]) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_stack(symbol, items, 1, arguments) }
    }

    /// The same for so many layers at once.
    ///
    /// # Safety
    /// As [`Self::launch`].
    ///
    /// # Errors
    /// As [`Self::launch`].
    pub unsafe fn launch_stack(
        &mut self,
        symbol: &'static str,
        items: usize,
        layers: usize,
        arguments: &[Argument],
    ) -> Result<(), BackendError> {
        let launch = Launch::of(symbol);
        let (kernel, block, shared_bytes) = match self.numbers.get(symbol) {
            Some(&number) => number,
            None => {
                let build = launch.build(&self.model);
                let (block, shared_bytes) = build.launch_of(symbol).expect("every denoise kernel is listed among the sources");
                let kernel = self.device.kernel(&build, symbol)?;
                if shared_bytes > 0 {
                    kernel.allow_shared(shared_bytes)?;
                }
                self.kernels.push(kernel);
                let number = (self.kernels.len() - 1, block, shared_bytes);
                self.numbers.insert(symbol, number);
                number
            }
        };
        let [x, y, _] = (launch.blocks)(&self.model, items);
        let grid =
            grid([x, y, layers]).ok_or_else(|| BackendError::Launch(format!("{symbol} needs more blocks than a grid holds")))?;
        // The others do not wait for what is before them.
        let overlapping = self.overlapping && symbol.starts_with("denoise_fused_");
        let shape = Shape { grid, block, shared_bytes };
        self.ops.push(Op::Launch { kernel, shape, arguments: arguments.to_vec(), overlapping });
        Ok(())
    }

    /// Adds a product of the matrices at these addresses.
    ///
    /// # Safety
    /// The matrices are as the spec says, in memory that the finished program or its task keeps; y overlaps neither x nor w.
    ///
    /// # Errors
    /// When the library fails or knows no algorithm.
    pub unsafe fn product(&mut self, spec: Spec, x: u64, w: u64, y: u64) -> Result<(), BackendError> {
        let product = match self.specs.iter().position(|known| *known == spec) {
            Some(product) => product,
            None => {
                let blas = self.blas.as_ref().expect("a program with products was given the library");
                self.products.push(Gemm::new(blas, spec)?);
                self.specs.push(spec);
                self.products.len() - 1
            }
        };
        self.ops.push(Op::Product { product, x, w, y });
        Ok(())
    }

    /// Begins a named range.
    pub fn begin(&mut self, name: impl Into<String>) {
        self.ops.push(Op::Begin(name.into()));
    }

    /// Ends the range begun last.
    pub fn end(&mut self) {
        self.ops.push(Op::End);
    }

    /// The program, which keeps the memory.
    pub fn finish(self, memory: Buffers) -> Program {
        let Self { ops, kernels, products, .. } = self;
        Program { ops, kernels, products, _memory: memory }
    }
}
