//! GEMMs of row-major matrices by cuBLASLt, for implementations that stand on the library.
//!
//! Everything is described and chosen while a case is prepared; launching allocates nothing and can
//! be captured.

use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result};

use super::cublaslt::failed;
use super::lt::{self, LtError};
use crate::BackendError;
use crate::driver::event::EventPool;
use crate::driver::graph::Graph;
use crate::library::{self, Library};
use crate::{Buffer, Device};

/// Device memory that the library may use during a GEMM, for each lane.
pub const WORKSPACE_BYTES: usize = 16 << 20;

/// The library on one device, with lanes: GEMMs in different lanes may run concurrently.
pub struct Blas {
    device: Arc<Device>,
    handle: lt::Object,
    lanes: Vec<Lane>,
}

/// A stream with a workspace; the first is the device's stream.
struct Lane {
    stream: Arc<CudaStream>,
    workspace: Buffer,
}

impl Blas {
    /// Opens the library with so many lanes, at least one.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] where it is missing; when it fails or memory is short.
    pub fn open(device: &Arc<Device>, lanes: usize) -> Result<Rc<Self>, BackendError> {
        available().map_err(BackendError::Unsupported)?;
        let lane = |number: usize| {
            let stream =
                if number == 0 { Arc::clone(device.stream()) } else { device.another_stream()? };
            Ok(Lane { stream, workspace: device.allocate(WORKSPACE_BYTES)? })
        };
        let lanes = (0..lanes.max(1)).map(lane).collect::<Result<_, BackendError>>()?;
        let handle = lt::create().map_err(failed("open"))?;
        Ok(Rc::new(Self { device: Arc::clone(device), handle, lanes }))
    }

    /// The stream of a lane.
    pub fn stream(&self, lane: usize) -> &Arc<CudaStream> {
        &self.lanes[lane].stream
    }
}

/// Whether the library is there.
///
/// # Errors
/// How to get it.
pub fn available() -> Result<(), String> {
    let missing =
        || format!("{} is missing: {}", Library::CublasLt.name(), Library::CublasLt.advice());
    library::load(Library::CublasLt).map(drop).ok_or_else(missing)
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: destroyed once; every GEMM of it holds a count and is gone.
        unsafe { lt::destroy(lt::Kind::Handle, self.handle) };
    }
}

/// What a GEMM computes: y `[rows, columns]` = x `[rows, depth]` · w, bf16 with f32 sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// Rows of x and y.
    pub rows: usize,
    /// Columns of y.
    pub columns: usize,
    /// Columns of x.
    pub depth: usize,
    /// Whether w lies as `[columns, depth]`, else as `[depth, columns]`.
    pub transposed: bool,
    /// Whether y is f32, else bf16.
    pub wide: bool,
}

/// GEMMs of one shape in one launch: their matrices follow each other in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Batch {
    /// How many.
    pub count: usize,
    /// Factor of every result.
    pub scale: f32,
    /// Whether 16-bit matrices are f16, else bf16.
    pub half: bool,
}

/// One GEMM, or a batch, and the algorithms that the library proposes for it, of which one is used.
pub struct Gemm {
    blas: Rc<Blas>,
    description: lt::Object,
    scale: f32,
    /// Of w, x and y as the library sees them: column-major, so transposed.
    layouts: [lt::Object; 3],
    algorithms: Vec<lt::Algorithm>,
    chosen: usize,
    y_bytes: usize,
    tool: Option<Tool>,
}

/// What is done for compute-sanitizer, by `KERNELGATE_GEMMS`. It does not see the stores of
/// cuBLASLt's kernels by bulk copies, and would report every read of y: y is filled with NaN first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tool {
    /// `seen`: filled, then computed.
    Seen,
    /// `none`: filled only, so that what is computed of it is wrong. Under racecheck 2025.3 those
    /// kernels break down, or take minutes.
    None,
}

impl Tool {
    fn asked() -> Result<Option<Self>, BackendError> {
        match std::env::var("KERNELGATE_GEMMS").unwrap_or_default().as_str() {
            "" => Ok(None),
            "seen" => Ok(Some(Self::Seen)),
            "none" => Ok(Some(Self::None)),
            other => Err(BackendError::Launch(format!(
                "KERNELGATE_GEMMS takes `seen` or `none`, not `{other}`"
            ))),
        }
    }
}

/// How much faster another algorithm than the library's first must be to be chosen: less could be
/// noise, and the choice another one in the next process.
const CLEARLY_FASTER: f64 = 0.97;
/// Rounds of which the fastest counts.
const ROUNDS: usize = 3;

impl Gemm {
    /// Describes a GEMM and asks for its algorithms; the library's first is used until another one
    /// is chosen.
    ///
    /// # Errors
    /// When the library fails or knows no algorithm.
    pub fn new(blas: &Rc<Blas>, spec: Spec) -> Result<Self, BackendError> {
        Self::batched(blas, spec, Batch { count: 1, scale: 1.0, half: false })
    }

    /// The same for a batch of them.
    ///
    /// # Errors
    /// As [`Self::new`]; [`BackendError::Unsupported`] where the library knows no algorithm.
    pub fn batched(blas: &Rc<Blas>, spec: Spec, batch: Batch) -> Result<Self, BackendError> {
        use lt::DataType::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
        let Spec { rows, columns, depth, transposed, wide } = spec;
        // From here on the destructor gives back what was made.
        let mut gemm = Self {
            blas: Rc::clone(blas),
            description: std::ptr::null_mut(),
            scale: batch.scale,
            layouts: [std::ptr::null_mut(); 3],
            algorithms: Vec::new(),
            chosen: 0,
            y_bytes: batch.count * rows * columns * if wide { 4 } else { 2 },
            tool: Tool::asked()?,
        };
        let compute = lt::Compute::CUBLAS_COMPUTE_32F;
        gemm.description =
            lt::description(compute, CUDA_R_32F, transposed).map_err(failed("describe a GEMM"))?;
        // A row-major matrix is a column-major one of swapped extents: yᵀ = wᵀ·xᵀ.
        let (w_rows, w_columns) = if transposed { (depth, columns) } else { (columns, depth) };
        let narrow = if batch.half { CUDA_R_16F } else { CUDA_R_16BF };
        let output = if wide { CUDA_R_32F } else { narrow };
        for (layout, (dtype, rows, columns)) in gemm.layouts.iter_mut().zip([
            (narrow, w_rows, w_columns),
            (narrow, depth, rows),
            (output, columns, rows),
        ]) {
            *layout = lt::layout(dtype, rows as u64, columns as u64, rows as i64)
                .map_err(failed("describe a matrix"))?;
            if batch.count > 1 {
                // SAFETY: the layout was made above and is alive.
                unsafe { lt::batch(*layout, batch.count as i32, (rows * columns) as i64) }
                    .map_err(failed("describe a batch"))?;
            }
        }
        // SAFETY: handle, description and layouts were made above and are alive.
        let proposed =
            unsafe { lt::propose(blas.handle, gemm.description, gemm.layouts, WORKSPACE_BYTES) };
        gemm.algorithms = known(proposed, &spec)?;
        Ok(gemm)
    }

    /// Times every algorithm on all of these (x, w, y), one after the other as a graph, and keeps
    /// the fastest from here on. Many different operands are as cold as they will be when the
    /// GEMM is one of many.
    ///
    /// The contents of y are lost. Under a tool nothing is timed and the library's first is kept.
    ///
    /// # Errors
    /// When the device fails. An algorithm that does not run is passed over.
    pub fn choose(&mut self, operands: &[[u64; 3]]) -> Result<(), BackendError> {
        if self.tool.is_some() {
            return Ok(());
        }
        let device = Arc::clone(&self.blas.device);
        let events = EventPool::new(&device, 2)?;
        let mut times = Vec::new();
        for algorithm in 0..self.algorithms.len() {
            self.chosen = algorithm;
            let enqueue = || operands.iter().try_for_each(|&[x, w, y]| self.launch(0, x, w, y));
            // One launch first: what it loads cannot be loaded during a capture.
            if enqueue().is_err() {
                times.push(f64::INFINITY);
                continue;
            }
            device.synchronize()?;
            let graph = Graph::capture(&device, enqueue)?;
            let mut fastest = f64::INFINITY;
            for _ in 0..ROUNDS {
                events.record(0)?;
                graph.launch()?;
                events.record(1)?;
                device.synchronize()?;
                fastest = f64::min(fastest, events.elapsed_ns(0, 1)?);
            }
            times.push(fastest);
        }
        self.chosen = fastest(&times);
        Ok(())
    }

    /// Enqueues it in a lane: device addresses of x, w and y, matrices as described, alive until
    /// the GEMM has been computed; y overlaps neither x nor w.
    ///
    /// # Errors
    /// When the library refuses.
    pub fn launch(&self, lane: usize, x: u64, w: u64, y: u64) -> Result<(), BackendError> {
        let lane = &self.blas.lanes[lane];
        if self.tool.is_some() {
            // SAFETY: y is an address on the device with room for the result.
            unsafe { result::memset_d8_async(y, 0xff, self.y_bytes, lane.stream.cu_stream()) }
                .map_err(|error| BackendError::Launch(format!("fill a result: {error}")))?;
        }
        if self.tool == Some(Tool::None) {
            return Ok(());
        }
        let launch = lt::Launch {
            handle: self.blas.handle,
            description: self.description,
            scale: self.scale,
            matrices: [w, x, y],
            layouts: self.layouts,
            algorithm: self
                .algorithms
                .get(self.chosen)
                .map_or(std::ptr::null(), std::ptr::from_ref),
            workspace: (lane.workspace.address(), WORKSPACE_BYTES),
            stream: lane.stream.cu_stream().cast(),
        };
        // SAFETY: handle, description, layouts and algorithm belong together; the workspace lives
        // as long as `self`; x, w and y are addresses on the device and used there only.
        unsafe { lt::matmul(launch) }.map_err(failed("launch a GEMM"))
    }
}

/// The algorithms that the library proposed.
///
/// # Errors
/// [`BackendError::Unsupported`] with the library's status where it has none; when it fails.
fn known(
    proposed: Result<Vec<lt::Algorithm>, LtError>,
    spec: &Spec,
) -> Result<Vec<lt::Algorithm>, BackendError> {
    let Spec { rows, columns, depth, .. } = spec;
    match proposed {
        Err(refused @ LtError::NOT_SUPPORTED) => Err(BackendError::Unsupported(format!(
            "cuBLASLt has no algorithm for a GEMM of {rows} x {columns}, k = {depth}: {refused}"
        ))),
        proposed => proposed.map_err(failed("propose an algorithm")),
    }
}

/// The first, unless another one is clearly faster.
fn fastest(times: &[f64]) -> usize {
    let Some(&first) = times.first() else { return 0 };
    let (best, &time) =
        times.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).expect("there is a first");
    if time < CLEARLY_FASTER * first { best } else { 0 }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        // SAFETY: each is destroyed once, if it was made.
        unsafe {
            self.layouts.into_iter().for_each(|layout| lt::destroy(lt::Kind::Layout, layout));
            lt::destroy(lt::Kind::Description, self.description);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gemm_that_the_library_refuses_is_skipped_with_its_words_and_a_failure_is_none() {
        let spec = Spec { rows: 8, columns: 64, depth: 3, transposed: false, wide: false };
        let refused = known(Err(LtError::NOT_SUPPORTED), &spec).unwrap_err();
        let words = "cuBLASLt has no algorithm for a GEMM of 8 x 64, k = 3: \
                     CUBLAS_STATUS_NOT_SUPPORTED";
        assert!(matches!(&refused, BackendError::Unsupported(why) if why == words), "{refused}");
        let failed = known(Err(LtError::NO_FUNCTION), &spec).unwrap_err();
        assert!(matches!(&failed, BackendError::Launch(why) if why.contains("lacks a function")));
        assert!(known(Ok(Vec::new()), &spec).unwrap().is_empty());
    }

    #[test]
    fn the_first_algorithm_stays_unless_another_is_clearly_faster() {
        assert_eq!(fastest(&[]), 0);
        assert_eq!(fastest(&[100.0, 98.0, 101.0]), 0);
        assert_eq!(fastest(&[100.0, 98.0, 90.0]), 2);
        assert_eq!(fastest(&[f64::INFINITY, 98.0]), 1);
    }
}
