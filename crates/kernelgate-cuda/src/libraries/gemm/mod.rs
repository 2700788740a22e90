//! GEMMs of row-major matrices by cuBLASLt, for implementations that call the library.
//!
//! [`GemmSpec`] describes a GEMM, [`PreparedGemm`] holds cuBLASLt's algorithms for the GEMM, and
//! [`GemmOperandAddresses`] are the device addresses for a launch. Algorithms are chosen while a
//! case is prepared; launching a GEMM allocates nothing and can be captured into a graph.

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

pub use dtype::GemmMatrixDtype;
pub use epilogue::{GemmEpilogue, GemmEpilogueActivation};
pub use error::GemmError;
pub use operands::GemmOperandAddresses;
pub use spec::{GemmScalesPresent, GemmSpec};

use super::lt::{self, Attribute};
use crate::BackendError;
use crate::driver::graph::ExecutableCudaGraph;
use crate::driver::stream::event::TimingEventPool;
use crate::library::{self, NvidiaLibrary};
use crate::{Device, DeviceBuffer};

/// Default number of bytes of workspace in device memory for the GEMMs of each lane.
pub const DEFAULT_GEMM_WORKSPACE_BYTES: usize = 16 << 20;

/// Number of bytes at the end of the first lane's workspace that are divided into pieces, each for
/// one launch.
const BYTES_DIVIDED_INTO_WORKSPACE_PIECES: usize = 2 << 20;
/// Alignment of workspace pieces, bytes.
const WORKSPACE_PIECE_ALIGNMENT_BYTES: usize = 256;
/// Size of the largest workspace piece, bytes.
const MAX_BYTES_OF_WORKSPACE_PIECE: usize = 64 << 10;

/// The cuBLASLt library on one GPU with several lanes, each a stream with a workspace, so that
/// GEMMs in different lanes may run at the same time.
pub struct CublasLtLanes {
    device: Arc<Device>,
    handle: lt::CublasLtObject,
    lanes: Vec<StreamWithGemmWorkspace>,
    workspace_bytes: usize,
    /// Bytes of the first lane's workspace that are already given to single launches.
    used_workspace_bytes: Cell<usize>,
}

/// A stream with a workspace for cuBLASLt; the first lane has the device's own stream.
struct StreamWithGemmWorkspace {
    stream: Arc<CudaStream>,
    workspace: DeviceBuffer,
}

impl CublasLtLanes {
    /// Opens cuBLASLt with `lanes` lanes, at least one, each with the default size of workspace.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if cuBLASLt is missing; with another error if
    /// cuBLASLt fails or too little device memory is free.
    pub fn open_cublaslt_with_default_workspace(
        device: &Arc<Device>,
        lanes: usize,
    ) -> Result<Rc<CublasLtLanes>, BackendError> {
        Self::open_cublaslt_with_workspace(device, lanes, DEFAULT_GEMM_WORKSPACE_BYTES)
    }

    /// Opens cuBLASLt with `lanes` lanes, at least one, each with a workspace of this size.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`] if cuBLASLt is missing; with another error if
    /// cuBLASLt fails or too little device memory is free.
    pub fn open_cublaslt_with_workspace(
        device: &Arc<Device>,
        lanes: usize,
        workspace_bytes: usize,
    ) -> Result<Rc<CublasLtLanes>, BackendError> {
        require_cublaslt().map_err(BackendError::Unsupported)?;
        let lane = |number: usize| {
            let stream = if number == 0 {
                Arc::clone(device.stream())
            } else {
                device.create_another_stream()?
            };
            Ok(StreamWithGemmWorkspace { stream, workspace: device.allocate(workspace_bytes)? })
        };
        let lanes = (0..lanes.max(1)).map(lane).collect::<Result<_, BackendError>>()?;
        let handle =
            lt::create_cublaslt_handle().map_err(GemmError::error_for_cublaslt_action("open"))?;
        let (device, used_bytes) = (Arc::clone(device), Cell::new(0));
        Ok(Rc::new(Self {
            device,
            handle,
            lanes,
            workspace_bytes,
            used_workspace_bytes: used_bytes,
        }))
    }

    /// Address range of the workspace pieces, each of which belongs to one launch. Some GEMM
    /// algorithms clear their workspace first; the clears in this range may be moved before all
    /// launches of a graph.
    pub fn address_range_of_workspace_pieces(&self) -> Range<u64> {
        let end = self.lanes[0].workspace.device_address() + self.workspace_bytes as u64;
        end - self.bytes_for_workspace_pieces() as u64..end
    }

    const fn bytes_for_workspace_pieces(&self) -> usize {
        if self.workspace_bytes > 2 * BYTES_DIVIDED_INTO_WORKSPACE_PIECES {
            BYTES_DIVIDED_INTO_WORKSPACE_PIECES
        } else {
            0
        }
    }

    /// Bytes of workspace that all launches of a lane share.
    const fn shared_workspace_bytes(&self) -> usize {
        self.workspace_bytes - self.bytes_for_workspace_pieces()
    }

    /// Takes a piece of this size from the first lane's workspace, and returns its address; `None`
    /// if the piece is too large or no room is left.
    fn take_workspace_piece_address(&self, bytes: usize) -> Option<u64> {
        let used_bytes = self.used_workspace_bytes.get();
        let end = used_bytes + bytes.next_multiple_of(WORKSPACE_PIECE_ALIGNMENT_BYTES);
        let fits = (1..=MAX_BYTES_OF_WORKSPACE_PIECE).contains(&bytes)
            && end <= self.bytes_for_workspace_pieces();
        fits.then(|| {
            self.used_workspace_bytes.set(end);
            self.address_range_of_workspace_pieces().start + used_bytes as u64
        })
    }

    /// The CUDA stream on which the GEMMs of a lane run.
    pub fn cuda_stream_of_lane(&self, lane: usize) -> &Arc<CudaStream> {
        &self.lanes[lane].stream
    }
}

/// Checks that the cuBLASLt library is installed; the error text says how to install it.
///
/// # Errors
/// The error text is advice on how to install cuBLASLt.
pub fn require_cublaslt() -> Result<(), String> {
    let missing = || {
        format!(
            "{} is missing: {}",
            NvidiaLibrary::CublasLt.library_name_in_messages(),
            NvidiaLibrary::CublasLt.advice_to_install_library()
        )
    };
    library::open_library_once(NvidiaLibrary::CublasLt).map(drop).ok_or_else(missing)
}

impl Drop for CublasLtLanes {
    fn drop(&mut self) {
        // SAFETY: the handle is destroyed only once, and no GEMM uses it any more, because each
        // GEMM keeps the lanes alive.
        unsafe { lt::destroy_cublaslt_object(lt::CublasLtObjectKind::LibraryHandle, self.handle) };
    }
}

/// A GEMM, or a batch of equal GEMMs, with the algorithms that cuBLASLt proposes and the one that
/// is used.
pub struct PreparedGemm {
    blas: Rc<CublasLtLanes>,
    spec: GemmSpec,
    gemm_description: lt::CublasLtObject,
    /// cuBLASLt's layouts of its matrices A, B, C and D; the layout of C is null if it equals that
    /// of D.
    layouts: [lt::CublasLtObject; 4],
    proposed_algorithms: Vec<lt::ProposedGemmAlgorithm>,
    chosen_algorithm_index: usize,
    sanitizer_gemm: Option<GemmUnderSanitizer>,
}

/// How GEMMs run under compute-sanitizer, from the variable `KERNELGATE_GEMMS`. The sanitizer does
/// not see the bulk-copy stores of cuBLASLt's kernels and would report every read of D, so D is
/// filled with NaN first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GemmUnderSanitizer {
    /// With `KERNELGATE_GEMMS=seen`, the result D is filled with NaN and then computed.
    FillResultThenCompute,
    /// With `KERNELGATE_GEMMS=none`, D is only filled with NaN and not computed, so results that
    /// depend on D are wrong. Under the tool racecheck 2025.3, cuBLASLt's kernels crash or take
    /// minutes.
    OnlyFillResult,
}

impl GemmUnderSanitizer {
    fn parse_kernelgate_gemms_value(text: &str) -> Result<Option<GemmUnderSanitizer>, GemmError> {
        match text {
            "" => Ok(None),
            "seen" => Ok(Some(Self::FillResultThenCompute)),
            "none" => Ok(Some(Self::OnlyFillResult)),
            other => Err(GemmError::InvalidGemmsVariable(other.to_owned())),
        }
    }
}

/// Time relative to cuBLASLt's first algorithm below which another algorithm is chosen; a smaller
/// gain could be noise, so that two processes would choose differently.
const MAX_TIME_RATIO_TO_REPLACE_FIRST: f64 = 0.97;
/// Number of times that each algorithm is timed; its shortest time counts.
const ALGORITHM_TIMING_ROUNDS: usize = 3;

impl PreparedGemm {
    /// Describes a GEMM to cuBLASLt and requests its algorithms; the first one is used until
    /// another one is chosen.
    ///
    /// # Errors
    /// Fails if the specification is invalid, or cuBLASLt fails or has no algorithm for the GEMM.
    pub fn gemm_with_proposed_algorithms(
        blas: &Rc<CublasLtLanes>,
        spec: GemmSpec,
    ) -> Result<Self, GemmError> {
        spec.check_gemm_spec()?;
        // From here on, the destructor destroys the objects of cuBLASLt, even after an error.
        let mut gemm = Self {
            blas: Rc::clone(blas),
            spec,
            gemm_description: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 4],
            proposed_algorithms: Vec::new(),
            chosen_algorithm_index: 0,
            sanitizer_gemm: GemmUnderSanitizer::parse_kernelgate_gemms_value(
                &blas.device.options().sanitizer_gemms_setting,
            )?,
        };
        gemm.create_matmul_description()?;
        gemm.create_matrix_layouts()?;
        gemm.proposed_algorithms = gemm.request_proposed_algorithms()?;
        Ok(gemm)
    }

    /// Specification of the GEMM.
    pub const fn gemm_spec(&self) -> &GemmSpec {
        &self.spec
    }

    /// Number of algorithms that cuBLASLt proposes for the GEMM.
    pub fn proposed_algorithm_count(&self) -> usize {
        self.proposed_algorithms.len()
    }

    fn create_matmul_description(&mut self) -> Result<(), GemmError> {
        use Attribute as At;
        let spec = self.spec;
        let failed = || GemmError::error_for_cublaslt_action("describe a GEMM");
        self.gemm_description = lt::create_gemm_description(
            spec.cublas_compute_type(),
            spec.cublaslt_alpha_and_beta().scalar_data_type(),
        )
        .map_err(failed())?;
        // Whether cuBLASLt's A or B is transposed, as CUBLAS_OP_T or CUBLAS_OP_N; cuBLASLt's A is B
        // here, because its matrices are column-major.
        let operations = [
            (At::CUBLASLT_MATMUL_DESC_TRANSA, spec.b_transposed),
            (At::CUBLASLT_MATMUL_DESC_TRANSB, spec.a_transposed),
        ];
        for (attribute, transposed) in operations {
            self.set_description_attribute(attribute, i32::from(transposed))?;
        }
        if spec.epilogue != GemmEpilogue::NoEpilogue {
            self.set_description_attribute(
                At::CUBLASLT_MATMUL_DESC_EPILOGUE,
                spec.epilogue.cublaslt_epilogue(),
            )?;
        }
        if spec.bias_element_count_unless_none().is_some() && spec.a.is_fp8() {
            self.set_description_attribute(
                At::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                spec.dtype_of_bias_and_its_gradient().cublaslt_data_type(),
            )?;
        }
        if let Some(ld) = spec.aux_row_stride_in_elements_or_bits() {
            self.set_description_attribute(At::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ld as i64)?;
            if spec.batch_count > 1 {
                let stride = (spec.m * ld) as i64;
                self.set_description_attribute(
                    At::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE,
                    stride,
                )?;
            }
        }
        // cuBLASLt proposes algorithms only if the pointers of the description are set, so
        // placeholders are used here; each launch sets its own pointers.
        let placeholder = Some(self.blas.lanes[0].workspace.device_address());
        let placeholders = GemmOperandAddresses {
            bias: placeholder,
            aux_matrix: placeholder,
            scale_a: placeholder,
            scale_b: placeholder,
            scale_d: placeholder,
            amax_d: placeholder,
            ..GemmOperandAddresses::default()
        };
        self.set_operand_pointers_in_description(&placeholders)
    }

    fn set_description_attribute<T: Copy>(
        &self,
        attribute: Attribute,
        value: T,
    ) -> Result<(), GemmError> {
        // SAFETY: the description is alive, and every caller passes the type that cublasLt.h
        // defines for the attribute.
        unsafe { lt::set_gemm_description_attribute(self.gemm_description, attribute, value) }
            .map_err(GemmError::error_for_cublaslt_action("describe a GEMM"))
    }

    fn set_operand_pointers_in_description(
        &self,
        operands: &GemmOperandAddresses,
    ) -> Result<(), GemmError> {
        let pointers = operands.bias_aux_and_scale_pointer_attributes(&self.spec)?;
        pointers
            .into_iter()
            .flatten()
            .try_for_each(|(attribute, address)| self.set_description_attribute(attribute, address))
    }

    fn create_matrix_layouts(&mut self) -> Result<(), GemmError> {
        let spec::ColumnMajorLayouts { a, b, c, d } = self.spec.column_major_layouts();
        let count = self.spec.batch_count;
        let different = (c != d).then_some(c);
        for (object, layout) in self.layouts.iter_mut().zip([Some(a), Some(b), different, Some(d)])
        {
            let Some(layout) = layout else { continue };
            let (rows, columns) = (layout.rows as u64, layout.columns as u64);
            *object = lt::create_column_major_layout(
                layout.dtype.cublaslt_data_type(),
                rows,
                columns,
                layout.ld as i64,
            )
            .map_err(GemmError::error_for_cublaslt_action("describe a matrix"))?;
            if count > 1 {
                // SAFETY: the matrix layout was created above and is alive.
                unsafe {
                    lt::set_batch_of_matrix_layout(
                        *object,
                        count as i32,
                        layout.batch_stride as i64,
                    )
                }
                .map_err(GemmError::error_for_cublaslt_action("describe a batch"))?;
            }
        }
        Ok(())
    }

    /// Handles of the layouts of cuBLASLt's matrices A, B, C and D.
    const fn handles_of_four_layouts(&self) -> [lt::CublasLtObject; 4] {
        let [a, b, c, d] = self.layouts;
        [a, b, if c.is_null() { d } else { c }, d]
    }

    fn request_proposed_algorithms(&self) -> Result<Vec<lt::ProposedGemmAlgorithm>, GemmError> {
        let GemmSpec { m, n, k, min_address_alignment_bytes: alignment, .. } = self.spec;
        let preference = lt::AlgorithmLimits {
            max_workspace_bytes: self.blas.shared_workspace_bytes(),
            alignment_bytes: (alignment != spec::DEFAULT_MATRIX_ALIGNMENT).then_some(alignment),
        };
        // SAFETY: the handle, the description and the layouts are alive as long as this object.
        let proposed = unsafe {
            lt::propose_gemm_algorithms(
                self.blas.handle,
                self.gemm_description,
                self.handles_of_four_layouts(),
                preference,
            )
        };
        proposed.map_err(|status| match status {
            lt::CublasLtError::NOT_SUPPORTED => {
                GemmError::NoGemmAlgorithmProposed { m, n, k, status }
            }
            status => {
                GemmError::CublasLtCallFailed { failed_action: "propose an algorithm", status }
            }
        })
    }

    /// Times every proposed algorithm as a graph of one launch for each of these operands, and from
    /// now on uses the fastest algorithm. With many different operands, the caches are as cold as
    /// in a network, where the GEMM is one of many.
    ///
    /// The timed launches overwrite the result matrix D. Under compute-sanitizer, nothing is timed
    /// and cuBLASLt's first algorithm is used.
    ///
    /// # Errors
    /// Fails if the GPU returns an error. An algorithm that fails to run is skipped.
    pub fn time_and_choose_algorithm(
        &mut self,
        operands: &[GemmOperandAddresses],
    ) -> Result<(), BackendError> {
        if self.sanitizer_gemm.is_some() {
            return Ok(());
        }
        let device = Arc::clone(&self.blas.device);
        let events = TimingEventPool::event_pool_on_device_stream(&device, 2)?;
        let mut times = Vec::new();
        let used_bytes = self.blas.used_workspace_bytes.get();
        for algorithm in 0..self.proposed_algorithms.len() {
            self.chosen_algorithm_index = algorithm;
            self.blas.used_workspace_bytes.set(used_bytes);
            let operands: Vec<_> =
                operands.iter().map(|operands| self.with_workspace_piece(operands)).collect();
            let enqueue =
                || operands.iter().try_for_each(|operands| self.enqueue_gemm_in_lane(0, operands));
            // Each algorithm is launched once before its capture, because code cannot be loaded
            // during a capture.
            if enqueue().is_err() {
                times.push(f64::INFINITY);
                continue;
            }
            device.synchronize()?;
            let graph = ExecutableCudaGraph::capture_with_clears_moved_first(
                &device,
                self.blas.address_range_of_workspace_pieces(),
                enqueue,
            )?;
            let mut fastest = f64::INFINITY;
            for _ in 0..ALGORITHM_TIMING_ROUNDS {
                events.enqueue_event(0)?;
                graph.launch_graph_on_stream()?;
                events.enqueue_event(1)?;
                device.synchronize()?;
                fastest = f64::min(fastest, events.ns_between_events(0, 1)?);
            }
            times.push(fastest);
        }
        self.blas.used_workspace_bytes.set(used_bytes);
        self.chosen_algorithm_index = index_of_clearly_fastest_algorithm(&times);
        Ok(())
    }

    /// Returns the operands with a piece of workspace for this launch alone, if the chosen
    /// algorithm needs little workspace.
    pub fn with_workspace_piece(&self, operands: &GemmOperandAddresses) -> GemmOperandAddresses {
        let bytes = self
            .proposed_algorithms
            .get(self.chosen_algorithm_index)
            .map_or(0, |chosen| chosen.workspace_bytes);
        GemmOperandAddresses {
            workspace: self.blas.take_workspace_piece_address(bytes),
            ..*operands
        }
    }

    /// Enqueues the GEMM on the stream of a lane; the operands must be valid until the GEMM has
    /// been computed.
    ///
    /// # Errors
    /// Fails if the address of an operand is missing, or cuBLASLt refuses the GEMM.
    pub fn enqueue_gemm_in_lane(
        &self,
        lane: usize,
        operands: &GemmOperandAddresses,
    ) -> Result<(), BackendError> {
        if self.sanitizer_gemm.is_some() {
            self.fill_result_with_nan(lane, operands)?;
        }
        if self.sanitizer_gemm == Some(GemmUnderSanitizer::OnlyFillResult) {
            return Ok(());
        }
        self.enqueue_gemm_with_proposed_algorithm(self.chosen_algorithm_index, lane, operands)
    }

    /// Enqueues the GEMM on the stream of a lane with one of the proposed algorithms.
    ///
    /// # Errors
    /// Fails if the address of an operand is missing, or cuBLASLt refuses the GEMM.
    pub(super) fn enqueue_gemm_with_proposed_algorithm(
        &self,
        algorithm: usize,
        lane: usize,
        operands: &GemmOperandAddresses,
    ) -> Result<(), BackendError> {
        let lane = &self.blas.lanes[lane];
        self.set_operand_pointers_in_description(operands)?;
        let &GemmOperandAddresses {
            matrix_a: a,
            matrix_b: b,
            matrix_c: c,
            matrix_d: d,
            workspace,
            ..
        } = operands;
        let algorithm = self.proposed_algorithms.get(algorithm);
        let launch = lt::CublasLtMatmulArguments {
            handle: self.blas.handle,
            gemm_description: self.gemm_description,
            alpha_and_beta: self.spec.cublaslt_alpha_and_beta(),
            matrices: [b, a, c.unwrap_or(d), d],
            layouts: self.handles_of_four_layouts(),
            algorithm: algorithm.map_or(std::ptr::null(), |it| std::ptr::from_ref(&it.algorithm)),
            workspace_address_and_bytes: match (workspace, algorithm) {
                (Some(own), Some(algorithm)) => (own, algorithm.workspace_bytes),
                _ => (lane.workspace.device_address(), self.blas.shared_workspace_bytes()),
            },
            stream: lane.stream.cu_stream().cast(),
        };
        // SAFETY: handle, description, layouts and algorithm belong together; the workspace lives
        // as long as `self`; the operand addresses are used only on the device.
        let launched = unsafe { lt::enqueue_cublaslt_matmul(launch) };
        Ok(launched.map_err(GemmError::error_for_cublaslt_action("launch a GEMM"))?)
    }

    /// Fills the result matrices D with NaN, but not the gaps between rows and matrices; does
    /// nothing if D also holds C.
    fn fill_result_with_nan(
        &self,
        lane: usize,
        operands: &GemmOperandAddresses,
    ) -> Result<(), BackendError> {
        if self.spec.beta != 0.0 && operands.matrix_c.is_none_or(|c| c == operands.matrix_d) {
            return Ok(());
        }
        let stream = self.blas.lanes[lane].stream.cu_stream();
        let (d, element) =
            (self.spec.column_major_layouts().d, self.spec.d.size_of_element_in_bytes());
        for index in 0..self.spec.batch_count {
            let address = operands.matrix_d + (index * d.batch_stride * element) as u64;
            // SAFETY: D is a device address with room for the result matrices.
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
            .map_err(|error| BackendError::ComputationFailed(format!("fill a result: {error}")))?;
        }
        Ok(())
    }
}

/// Index of the algorithm with the shortest time; index 0 unless another algorithm is clearly
/// faster.
fn index_of_clearly_fastest_algorithm(times: &[f64]) -> usize {
    let Some(&first) = times.first() else { return 0 };
    let (best, &time) =
        times.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).expect("there is a first");
    if time < MAX_TIME_RATIO_TO_REPLACE_FIRST * first { best } else { 0 }
}

impl Drop for PreparedGemm {
    fn drop(&mut self) {
        // SAFETY: each object of cuBLASLt is destroyed only once; objects that were not created are
        // null.
        unsafe {
            self.layouts.into_iter().for_each(|layout| {
                lt::destroy_cublaslt_object(lt::CublasLtObjectKind::MatrixLayout, layout)
            });
            lt::destroy_cublaslt_object(
                lt::CublasLtObjectKind::GemmDescription,
                self.gemm_description,
            );
        }
    }
}
