//! GEMMs of row-major matrices by cuBLASLt, for implementations that stand on the library.
//!
//! [`GemmSpec`] describes a GEMM, [`PreparedGemm`] holds the library's algorithms for it, and
//! [`GemmOperands`] are the addresses of a launch. Everything is described and chosen while a case
//! is prepared; launching allocates nothing and can be captured.

mod dtype;
mod epilogue;
mod error;
mod operands;
mod spec;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::{CudaStream, sys};

pub use dtype::MatrixDtype;
pub use epilogue::{GemmActivation, GemmEpilogue};
pub use error::GemmError;
pub use operands::GemmOperands;
pub use spec::{GemmScales, GemmSpec};

use super::lt::{self, Attribute};
use crate::BackendError;
use crate::driver::graph::ExecutableGraph;
use crate::driver::stream::event::EventPool;
use crate::library::{self, RequiredLibrary};
use crate::{Device, DeviceBuffer};

/// Device memory that the library may use during a GEMM, for each lane.
pub const GEMM_WORKSPACE_BYTES: usize = 16 << 20;

/// The end of the first lane's workspace is divided into pieces for one launch each.
const WORKSPACE_BYTES_FOR_PIECES: usize = 2 << 20;
/// Alignment of pieces, bytes.
const WORKSPACE_PIECE_ALIGNMENT: usize = 256;
/// Largest piece, bytes.
const MAX_WORKSPACE_PIECE_BYTES: usize = 64 << 10;

/// The cuBLASLt library on one GPU, with lanes (streams that run GEMMs concurrently): GEMMs in
/// different lanes may run concurrently.
pub struct CublasLtLanes {
    device: Arc<Device>,
    handle: lt::CublasLtHandle,
    lanes: Vec<GemmLane>,
    workspace_bytes: usize,
    /// Bytes of the workspace that launches use.
    used_bytes: Cell<usize>,
}

/// A stream with a cuBLASLt workspace; the first lane has the GPU's own stream.
struct GemmLane {
    stream: Arc<CudaStream>,
    workspace: DeviceBuffer,
}

impl CublasLtLanes {
    /// Opens cuBLASLt with `lanes` lanes (streams with workspaces), at least one lane.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if it is missing, or if it fails or memory is
    /// short.
    pub fn open(device: &Arc<Device>, lanes: usize) -> Result<Rc<CublasLtLanes>, BackendError> {
        Self::with_workspace(device, lanes, GEMM_WORKSPACE_BYTES)
    }

    /// Opens the library with a workspace of another size in each lane.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if it is missing, or if it fails or memory is
    /// short.
    pub fn with_workspace(
        device: &Arc<Device>,
        lanes: usize,
        workspace_bytes: usize,
    ) -> Result<Rc<CublasLtLanes>, BackendError> {
        check_available().map_err(BackendError::Unsupported)?;
        let lane = |number: usize| {
            let stream =
                if number == 0 { Arc::clone(device.stream()) } else { device.create_stream()? };
            Ok(GemmLane { stream, workspace: device.allocate(workspace_bytes)? })
        };
        let lanes = (0..lanes.max(1)).map(lane).collect::<Result<_, BackendError>>()?;
        let handle = lt::create_handle().map_err(GemmError::library_error("open"))?;
        let (device, used_bytes) = (Arc::clone(device), Cell::new(0));
        Ok(Rc::new(Self { device, handle, lanes, workspace_bytes, used_bytes }))
    }

    /// Device memory that is divided into workspaces of one launch each. Some GEMM algorithms clear
    /// their workspace first, and these clears may be enqueued before all launches.
    pub fn workspace_memory(&self) -> Range<u64> {
        let end = self.lanes[0].workspace.address() + self.workspace_bytes as u64;
        end - self.workspace_bytes_for_pieces() as u64..end
    }

    const fn workspace_bytes_for_pieces(&self) -> usize {
        if self.workspace_bytes > 2 * WORKSPACE_BYTES_FOR_PIECES {
            WORKSPACE_BYTES_FOR_PIECES
        } else {
            0
        }
    }

    /// Bytes of workspace that launches of a lane share.
    const fn shared_bytes(&self) -> usize {
        self.workspace_bytes - self.workspace_bytes_for_pieces()
    }

    /// Takes a piece of the workspace with the given size, if the workspace has room.
    fn take_workspace_piece(&self, bytes: usize) -> Option<u64> {
        let used_bytes = self.used_bytes.get();
        let end = used_bytes + bytes.next_multiple_of(WORKSPACE_PIECE_ALIGNMENT);
        let fits = (1..=MAX_WORKSPACE_PIECE_BYTES).contains(&bytes)
            && end <= self.workspace_bytes_for_pieces();
        fits.then(|| {
            self.used_bytes.set(end);
            self.workspace_memory().start + used_bytes as u64
        })
    }

    /// Returns the CUDA stream on which the GEMMs of a lane run.
    pub fn stream_of_lane(&self, lane: usize) -> &Arc<CudaStream> {
        &self.lanes[lane].stream
    }
}

/// Checks that the cuBLASLt library is installed.
///
/// # Errors
/// How to get it.
pub fn check_available() -> Result<(), String> {
    let missing = || {
        format!(
            "{} is missing: {}",
            RequiredLibrary::CublasLt.name(),
            RequiredLibrary::CublasLt.install_advice()
        )
    };
    library::load_once(RequiredLibrary::CublasLt).map(drop).ok_or_else(missing)
}

impl Drop for CublasLtLanes {
    fn drop(&mut self) {
        // SAFETY: destroyed once; every GEMM of it holds a count and is gone.
        unsafe { lt::destroy_object(lt::LtObjectKind::Handle, self.handle) };
    }
}

/// A GEMM, or a batch of GEMMs, with the algorithms that the library proposes; one of them is used.
pub struct PreparedGemm {
    blas: Rc<CublasLtLanes>,
    spec: GemmSpec,
    description: lt::CublasLtHandle,
    /// Layouts of the library's A, B, C and D; C is null if it has D's layout.
    layouts: [lt::CublasLtHandle; 4],
    algorithms: Vec<lt::ProposedAlgorithm>,
    chosen: usize,
    tool: Option<SanitizerTreatment>,
}

/// How GEMMs run under compute-sanitizer, as `KERNELGATE_GEMMS` selects. The sanitizer does not see
/// stores of cuBLASLt's kernels by bulk copies and would report every read of D, so D is filled
/// with NaN first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SanitizerTreatment {
    /// `seen`: filled, then computed.
    Seen,
    /// `none`: With `none`, D is only filled, so that results computed from D are wrong. Under
    /// racecheck 2025.3 cuBLASLt's kernels crash, or take minutes.
    None,
}

impl SanitizerTreatment {
    fn parse(text: &str) -> Result<Option<SanitizerTreatment>, GemmError> {
        match text {
            "" => Ok(None),
            "seen" => Ok(Some(Self::Seen)),
            "none" => Ok(Some(Self::None)),
            other => Err(GemmError::Variable(other.to_owned())),
        }
    }
}

/// Relative time below which another algorithm than the library's first is chosen: a smaller gain
/// could be noise, and the next process could choose differently.
const CLEARLY_FASTER_TIME_RATIO: f64 = 0.97;
/// Number of rounds in which algorithms are timed; the fastest counts.
const TIMING_ROUNDS: usize = 3;

impl PreparedGemm {
    /// Describes a GEMM and requests its algorithms; the library's first is used until another one
    /// is chosen.
    ///
    /// # Errors
    /// Fails if the description is wrong, the library fails or knows no algorithm.
    pub fn new(blas: &Rc<CublasLtLanes>, spec: GemmSpec) -> Result<Self, GemmError> {
        spec.check()?;
        // From here on, the destructor frees the objects of the library.
        let mut gemm = Self {
            blas: Rc::clone(blas),
            spec,
            description: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 4],
            algorithms: Vec::new(),
            chosen: 0,
            tool: SanitizerTreatment::parse(&blas.device.options().gemms)?,
        };
        gemm.describe_gemm()?;
        gemm.describe_layouts()?;
        gemm.algorithms = gemm.propose_algorithms()?;
        Ok(gemm)
    }

    /// Specification of the GEMM.
    pub const fn gemm_spec(&self) -> &GemmSpec {
        &self.spec
    }

    /// Number of algorithms that cuBLASLt proposes for the GEMM.
    pub fn proposed_algorithm_count(&self) -> usize {
        self.algorithms.len()
    }

    fn describe_gemm(&mut self) -> Result<(), GemmError> {
        use Attribute as At;
        let spec = self.spec;
        let failed = || GemmError::library_error("describe a GEMM");
        self.description =
            lt::describe_gemm(spec.compute_type(), spec.alpha_and_beta().data_type())
                .map_err(failed())?;
        // Operation of a matrix, CUBLAS_OP_T or CUBLAS_OP_N, a 32-bit enumeration; the library's A
        // is this B.
        let operations = [
            (At::CUBLASLT_MATMUL_DESC_TRANSA, spec.b_transposed),
            (At::CUBLASLT_MATMUL_DESC_TRANSB, spec.a_transposed),
        ];
        for (attribute, transposed) in operations {
            self.set_attribute(attribute, i32::from(transposed))?;
        }
        if spec.epilogue != GemmEpilogue::None {
            self.set_attribute(
                At::CUBLASLT_MATMUL_DESC_EPILOGUE,
                spec.epilogue.library_epilogue(),
            )?;
        }
        if spec.bias_element_count().is_some() && spec.a.is_fp8() {
            self.set_attribute(
                At::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                spec.bias_dtype().data_type(),
            )?;
        }
        if let Some(ld) = spec.aux_leading_dimension() {
            self.set_attribute(At::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ld as i64)?;
            if spec.batch_count > 1 {
                let stride = (spec.m * ld) as i64;
                self.set_attribute(At::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, stride)?;
            }
        }
        // The library proposes algorithms for a description whose pointers are set; a launch sets
        // its own.
        let placeholder = Some(self.blas.lanes[0].workspace.address());
        let placeholders = GemmOperands {
            bias: placeholder,
            aux: placeholder,
            scale_a: placeholder,
            scale_b: placeholder,
            scale_d: placeholder,
            amax_d: placeholder,
            ..GemmOperands::default()
        };
        self.set_operand_pointers(&placeholders)
    }

    fn set_attribute<T: Copy>(&self, attribute: Attribute, value: T) -> Result<(), GemmError> {
        // SAFETY: the description is alive; every caller passes the type that cublasLt.h names for
        // the attribute.
        unsafe { lt::set_gemm_attribute(self.description, attribute, value) }
            .map_err(GemmError::library_error("describe a GEMM"))
    }

    fn set_operand_pointers(&self, operands: &GemmOperands) -> Result<(), GemmError> {
        let pointers = operands.pointer_attributes(&self.spec)?;
        pointers
            .into_iter()
            .flatten()
            .try_for_each(|(attribute, address)| self.set_attribute(attribute, address))
    }

    fn describe_layouts(&mut self) -> Result<(), GemmError> {
        let spec::ColumnMajorLayouts { a, b, c, d } = self.spec.column_major_layouts();
        let count = self.spec.batch_count;
        let different = (c != d).then_some(c);
        for (object, layout) in self.layouts.iter_mut().zip([Some(a), Some(b), different, Some(d)])
        {
            let Some(layout) = layout else { continue };
            let (rows, columns) = (layout.rows as u64, layout.columns as u64);
            *object = lt::matrix_layout(layout.dtype.data_type(), rows, columns, layout.ld as i64)
                .map_err(GemmError::library_error("describe a matrix"))?;
            if count > 1 {
                // SAFETY: the layout was made above and is alive.
                unsafe { lt::make_batch_layout(*object, count as i32, layout.batch_stride as i64) }
                    .map_err(GemmError::library_error("describe a batch"))?;
            }
        }
        Ok(())
    }

    /// Layout handles of the four matrices A, B, C and D.
    const fn all_layout_handles(&self) -> [lt::CublasLtHandle; 4] {
        let [a, b, c, d] = self.layouts;
        [a, b, if c.is_null() { d } else { c }, d]
    }

    fn propose_algorithms(&self) -> Result<Vec<lt::ProposedAlgorithm>, GemmError> {
        let GemmSpec { m, n, k, alignment, .. } = self.spec;
        let preference = lt::AlgorithmPreference {
            workspace_bytes: self.blas.shared_bytes(),
            alignment: (alignment != spec::DEFAULT_MATRIX_ALIGNMENT).then_some(alignment),
        };
        // SAFETY: the handle, the description and the layouts are alive as long as this object.
        let proposed = unsafe {
            lt::propose_algorithms(
                self.blas.handle,
                self.description,
                self.all_layout_handles(),
                preference,
            )
        };
        proposed.map_err(|status| match status {
            lt::LtError::NOT_SUPPORTED => GemmError::NoAlgorithm { m, n, k, status },
            status => GemmError::Library { action: "propose an algorithm", status },
        })
    }

    /// Times every proposed algorithm on all of these operands, as a graph of launches one after
    /// the other, and uses the fastest from now on. With many different operands, caches are as
    /// cold as when the GEMM is one of many in a network.
    ///
    /// The launches overwrite D. Under a tool nothing is timed and the library's first algorithm is
    /// kept.
    ///
    /// # Errors
    /// Fails if the device fails. An algorithm that fails to run is skipped.
    pub fn choose_fastest_algorithm(
        &mut self,
        operands: &[GemmOperands],
    ) -> Result<(), BackendError> {
        if self.tool.is_some() {
            return Ok(());
        }
        let device = Arc::clone(&self.blas.device);
        let events = EventPool::new(&device, 2)?;
        let mut times = Vec::new();
        let used_bytes = self.blas.used_bytes.get();
        for algorithm in 0..self.algorithms.len() {
            self.chosen = algorithm;
            self.blas.used_bytes.set(used_bytes);
            let operands: Vec<_> =
                operands.iter().map(|operands| self.with_own_workspace(operands)).collect();
            let enqueue =
                || operands.iter().try_for_each(|operands| self.launch_in_lane(0, operands));
            // One launch first: code that it loads cannot be loaded during a capture.
            if enqueue().is_err() {
                times.push(f64::INFINITY);
                continue;
            }
            device.synchronize()?;
            let graph = ExecutableGraph::capture_clearing_first(
                &device,
                self.blas.workspace_memory(),
                enqueue,
            )?;
            let mut fastest = f64::INFINITY;
            for _ in 0..TIMING_ROUNDS {
                events.record_event(0)?;
                graph.launch()?;
                events.record_event(1)?;
                device.synchronize()?;
                fastest = f64::min(fastest, events.elapsed_ns(0, 1)?);
            }
            times.push(fastest);
        }
        self.blas.used_bytes.set(used_bytes);
        self.chosen = fastest_algorithm(&times);
        Ok(())
    }

    /// Returns operands with a workspace for this launch alone, if its algorithm needs little.
    pub fn with_own_workspace(&self, operands: &GemmOperands) -> GemmOperands {
        let bytes = self.algorithms.get(self.chosen).map_or(0, |chosen| chosen.workspace_bytes);
        GemmOperands { workspace: self.blas.take_workspace_piece(bytes), ..*operands }
    }

    /// Enqueues the GEMM in a lane; the operands are alive until it has been computed.
    ///
    /// # Errors
    /// Fails if an operand is missing, or the library refuses.
    pub fn launch_in_lane(&self, lane: usize, operands: &GemmOperands) -> Result<(), BackendError> {
        if self.tool.is_some() {
            self.fill_result_with_nan(lane, operands)?;
        }
        if self.tool == Some(SanitizerTreatment::None) {
            return Ok(());
        }
        self.launch_algorithm(self.chosen, lane, operands)
    }

    /// Enqueues the GEMM by one of its algorithms.
    ///
    /// # Errors
    /// Fails if an operand is missing, or the library refuses.
    pub(super) fn launch_algorithm(
        &self,
        algorithm: usize,
        lane: usize,
        operands: &GemmOperands,
    ) -> Result<(), BackendError> {
        let lane = &self.blas.lanes[lane];
        self.set_operand_pointers(operands)?;
        let &GemmOperands { a, b, c, d, workspace, .. } = operands;
        let algorithm = self.algorithms.get(algorithm);
        let launch = lt::CublasLtLaunch {
            handle: self.blas.handle,
            description: self.description,
            scalars: self.spec.alpha_and_beta(),
            matrices: [b, a, c.unwrap_or(d), d],
            layouts: self.all_layout_handles(),
            algorithm: algorithm.map_or(std::ptr::null(), |it| std::ptr::from_ref(&it.algorithm)),
            workspace: match (workspace, algorithm) {
                (Some(own), Some(algorithm)) => (own, algorithm.workspace_bytes),
                _ => (lane.workspace.address(), self.blas.shared_bytes()),
            },
            stream: lane.stream.cu_stream().cast(),
        };
        // SAFETY: handle, description, layouts and algorithm belong together; the workspace lives
        // as long as `self`; the operands are addresses on the device and used there only.
        let launched = unsafe { lt::enqueue_matmul(launch) };
        Ok(launched.map_err(GemmError::library_error("launch a GEMM"))?)
    }

    /// Fills D with NaN, unless it holds C: the gaps between rows and matrices stay.
    fn fill_result_with_nan(
        &self,
        lane: usize,
        operands: &GemmOperands,
    ) -> Result<(), BackendError> {
        if self.spec.beta != 0.0 && operands.c.is_none_or(|c| c == operands.d) {
            return Ok(());
        }
        let stream = self.blas.lanes[lane].stream.cu_stream();
        let (d, element) = (self.spec.column_major_layouts().d, self.spec.d.element_bytes());
        for index in 0..self.spec.batch_count {
            let address = operands.d + (index * d.batch_stride * element) as u64;
            // SAFETY: D is an address on the device with room for the result.
            unsafe {
                sys::cuMemsetD2D8Async(
                    address,
                    d.ld * element,
                    0xff,
                    d.rows * element,
                    d.columns,
                    stream,
                )
            }
            .result()
            .map_err(|error| BackendError::Launch(format!("fill a result: {error}")))?;
        }
        Ok(())
    }
}

/// Index of the fastest algorithm; the first one unless another is clearly faster.
fn fastest_algorithm(times: &[f64]) -> usize {
    let Some(&first) = times.first() else { return 0 };
    let (best, &time) =
        times.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).expect("there is a first");
    if time < CLEARLY_FASTER_TIME_RATIO * first { best } else { 0 }
}

impl Drop for PreparedGemm {
    fn drop(&mut self) {
        // SAFETY: each object is destroyed once, if it was made.
        unsafe {
            self.layouts
                .into_iter()
                .for_each(|layout| lt::destroy_object(lt::LtObjectKind::Layout, layout));
            lt::destroy_object(lt::LtObjectKind::Description, self.description);
        }
    }
}
