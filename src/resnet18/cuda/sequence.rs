//! A list of launches, written once while a case is prepared and walked by every launch: kernels,
//! library GEMMs, named ranges; and the device memory that they work on.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use kernelgate::backend::BackendError;
use kernelgate_cuda::architecture::overlaps_launches;
use kernelgate_cuda::libraries::gemm::{Blas, Gemm, GemmOperands, GemmSpec};
use kernelgate_cuda::observe::range::Range;
use kernelgate_cuda::{Argument, Buffer, Device, KernelSpec, LaunchAttributes, LoadedKernel};

/// One entry.
enum Step {
    Launch { kernel: LoadedKernel, arguments: Vec<Argument>, attributes: LaunchAttributes },
    Gemm(Rc<Gemm>, GemmOperands),
    Begin(String),
    End,
}

/// The list, with the memory that it works on.
pub struct Sequence {
    device: Arc<Device>,
    memory: Memory,
    blas: Rc<Blas>,
    gemms: Vec<(GemmSpec, Rc<Gemm>)>,
    steps: Vec<Step>,
}

impl Sequence {
    /// An empty one.
    ///
    /// # Errors
    /// Where the GEMM library is missing.
    pub fn new(device: &Arc<Device>, memory: Memory) -> Result<Self, BackendError> {
        let blas = Blas::open(device, 1)?;
        Ok(Self { device: Arc::clone(device), memory, blas, gemms: Vec::new(), steps: Vec::new() })
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Its memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Adds a kernel.
    ///
    /// # Errors
    /// When it does not compile or load, or the grid does not hold its blocks.
    pub fn launch<P>(
        &mut self,
        kernel: &KernelSpec<P>,
        p: &P,
        arguments: &[Argument],
    ) -> Result<(), BackendError> {
        self.launch_with(kernel, p, arguments, false)
    }

    /// Adds a kernel that begins by waiting for those before it: with programmatic dependent launch
    /// where the device has it, which is from sm_90 on.
    ///
    /// # Errors
    /// As [`Self::launch`].
    pub fn launch_early<P>(
        &mut self,
        kernel: &KernelSpec<P>,
        p: &P,
        arguments: &[Argument],
    ) -> Result<(), BackendError> {
        self.launch_with(kernel, p, arguments, overlaps_launches(&self.device.facts().arch))
    }

    fn launch_with<P>(
        &mut self,
        kernel: &KernelSpec<P>,
        p: &P,
        arguments: &[Argument],
        programmatic: bool,
    ) -> Result<(), BackendError> {
        let kernel = kernel.load(&self.device, p)?;
        let attributes = LaunchAttributes { programmatic, ..LaunchAttributes::default() };
        self.steps.push(Step::Launch { kernel, arguments: arguments.to_vec(), attributes });
        Ok(())
    }

    /// Adds a GEMM of matrices at these addresses, with the algorithm that is fastest on them.
    ///
    /// # Errors
    /// When the library knows no algorithm.
    pub fn gemm(&mut self, spec: GemmSpec, [a, b, d]: [u64; 3]) -> Result<(), BackendError> {
        let operands = GemmOperands::new(a, b, d);
        let gemm = match self.gemms.iter().find(|(known, _)| *known == spec) {
            Some((_, gemm)) => Rc::clone(gemm),
            None => {
                let mut gemm = Gemm::new(&self.blas, spec)?;
                gemm.choose(&[operands])?;
                let gemm = Rc::new(gemm);
                self.gemms.push((spec, Rc::clone(&gemm)));
                gemm
            }
        };
        self.steps.push(Step::Gemm(gemm, operands));
        Ok(())
    }

    /// Begins a named range.
    pub fn begin(&mut self, name: impl Into<String>) {
        self.steps.push(Step::Begin(name.into()));
    }

    /// Ends the range begun last.
    pub fn end(&mut self) {
        self.steps.push(Step::End);
    }

    /// Enqueues all of it.
    ///
    /// # Errors
    /// When a launch is refused.
    pub fn enqueue(&self) -> Result<(), BackendError> {
        let mut ranges = Vec::new();
        for step in &self.steps {
            match step {
                Step::Launch { kernel, arguments, attributes } => {
                    kernel.launch_with(*attributes, arguments)?
                }
                Step::Gemm(gemm, operands) => gemm.launch(0, operands)?,
                Step::Begin(name) => ranges.push(Range::new(name)),
                Step::End => drop(ranges.pop()),
            }
        }
        Ok(())
    }
}

/// What writes a sequence.
pub trait SequenceWriter {
    /// The sequence.
    fn sequence(&mut self) -> &mut Sequence;

    /// Writes inside a named range.
    ///
    /// # Errors
    /// Those of what is written.
    fn ranged(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut Self) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        self.sequence().begin(name);
        write(self)?;
        self.sequence().end();
        Ok(())
    }
}

/// A named piece of device memory and its bytes.
pub type Region = (String, usize);

/// Device memory by name.
#[derive(Default)]
pub struct Memory(BTreeMap<String, Buffer>);

impl Memory {
    /// Allocates these regions, and uploads the contents of others.
    ///
    /// # Errors
    /// When device memory is short.
    pub fn new(
        device: &Device,
        scratch: Vec<Region>,
        contents: Vec<(String, Vec<u8>)>,
    ) -> Result<Self, BackendError> {
        let mut memory = Self::default();
        for (name, bytes) in scratch {
            memory.0.insert(name, device.allocate(bytes)?);
        }
        memory.upload(device, contents)?;
        Ok(memory)
    }

    /// Adds regions with these contents.
    ///
    /// # Errors
    /// When device memory is short.
    pub fn upload(
        &mut self,
        device: &Device,
        contents: Vec<(String, Vec<u8>)>,
    ) -> Result<(), BackendError> {
        for (name, bytes) in contents {
            self.0.insert(name, device.upload(&bytes)?);
        }
        Ok(())
    }

    /// Every region and its bytes.
    pub fn regions(&self) -> impl Iterator<Item = (&str, usize)> {
        self.0.iter().map(|(name, buffer)| (name.as_str(), buffer.bytes()))
    }

    /// Where a region begins, if there is one of that name.
    pub fn find(&self, name: &str) -> Option<u64> {
        self.0.get(name).map(Buffer::address)
    }

    /// A region.
    pub fn buffer(&self, name: &str) -> &Buffer {
        self.0.get(name).unwrap_or_else(|| panic!("region `{name}` is part of the run"))
    }

    /// Where a region begins.
    pub fn address(&self, name: &str) -> u64 {
        self.buffer(name).address()
    }

    /// A region as an argument.
    pub fn at(&self, name: &str) -> Argument {
        Argument::Address(self.address(name))
    }

    /// The same, so many bytes further.
    pub fn behind(&self, name: &str, bytes: usize) -> Argument {
        Argument::Address(self.address(name) + bytes as u64)
    }
}
