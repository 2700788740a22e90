//! Functions of the opened cuBLASLt library that are called here; they are equal in CUDA 12 and 13.
//! The argument types of functions are those of cuBLASLt's header.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::cublaslt::sys;

pub use sys::cublasComputeType_t as Compute;
pub use sys::cublasLtEpilogue_t as Epilogue;
pub use sys::cublasLtMatmulAlgo_t as Algorithm;
pub use sys::cublasLtMatmulDescAttributes_t as Attribute;
pub use sys::cudaDataType_t as DataType;

use crate::library::{self, RequiredLibrary};

/// Object that the library creates and destroys: a handle, a description, a layout, a preference.
pub type CublasLtHandle = *mut c_void;

/// Error of cuBLASLt with its status code. These enumeration values have the same numbers in every
/// version of cuBLASLt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LtError(c_int);

impl LtError {
    /// Status code: cuBLASLt does not support the operation, in general or on this GPU.
    pub const NOT_SUPPORTED: LtError = Self(15);
    /// Status code: the library is missing, or lacks a function.
    pub const NO_FUNCTION: LtError = Self(-1);
}

impl std::fmt::Display for LtError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self.0 {
            -1 => "the library lacks a function",
            1 => "CUBLAS_STATUS_NOT_INITIALIZED",
            3 => "CUBLAS_STATUS_ALLOC_FAILED",
            7 => "CUBLAS_STATUS_INVALID_VALUE",
            8 => "CUBLAS_STATUS_ARCH_MISMATCH",
            11 => "CUBLAS_STATUS_MAPPING_ERROR",
            13 => "CUBLAS_STATUS_EXECUTION_FAILED",
            14 => "CUBLAS_STATUS_INTERNAL_ERROR",
            15 => "CUBLAS_STATUS_NOT_SUPPORTED",
            16 => "CUBLAS_STATUS_LICENSE_ERROR",
            status => return write!(f, "status {status}"),
        };
        f.write_str(name)
    }
}

/// An algorithm as the library proposes it (`cublasLtMatmulHeuristicResult_t`).
#[repr(C)]
#[derive(Clone, Copy)]
struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// Sets an attribute of an object: the object, the attribute, the value, its size.
type SetAttribute<A> = unsafe extern "C" fn(CublasLtHandle, A, *const c_void, usize) -> c_int;
type DestroyFunction = unsafe extern "C" fn(CublasLtHandle) -> c_int;

struct CublasLtApi {
    create: unsafe extern "C" fn(*mut CublasLtHandle) -> c_int,
    destroy: DestroyFunction,
    create_layout: unsafe extern "C" fn(*mut CublasLtHandle, DataType, u64, u64, i64) -> c_int,
    destroy_layout: DestroyFunction,
    set_layout: SetAttribute<sys::cublasLtMatrixLayoutAttribute_t>,
    create_description: unsafe extern "C" fn(*mut CublasLtHandle, Compute, DataType) -> c_int,
    destroy_description: DestroyFunction,
    set_description: SetAttribute<Attribute>,
    create_preference: unsafe extern "C" fn(*mut CublasLtHandle) -> c_int,
    destroy_preference: DestroyFunction,
    set_preference: SetAttribute<sys::cublasLtMatmulPreferenceAttributes_t>,
    propose: unsafe extern "C" fn(
        CublasLtHandle,
        CublasLtHandle,
        CublasLtHandle,
        CublasLtHandle,
        CublasLtHandle,
        CublasLtHandle,
        CublasLtHandle,
        c_int,
        *mut HeuristicResult,
        *mut c_int,
    ) -> c_int,
    matmul: unsafe extern "C" fn(
        CublasLtHandle,
        CublasLtHandle,
        *const c_void,
        *const c_void,
        CublasLtHandle,
        *const c_void,
        CublasLtHandle,
        *const c_void,
        *const c_void,
        CublasLtHandle,
        *mut c_void,
        CublasLtHandle,
        *const Algorithm,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> c_int,
}

fn cublaslt_api() -> Result<&'static CublasLtApi, LtError> {
    static API: OnceLock<Option<CublasLtApi>> = OnceLock::new();
    API.get_or_init(load_cublaslt).as_ref().ok_or(LtError::NO_FUNCTION)
}

fn load_cublaslt() -> Option<CublasLtApi> {
    let library = RequiredLibrary::CublasLt;
    // SAFETY: the function types are those of `cublasLt.h`, which are the same from CUDA 12 to 13:
    // objects are pointers, and results are enumerations with the size of an int.
    unsafe {
        Some(CublasLtApi {
            create: library::typed_function(library, c"cublasLtCreate")?,
            destroy: library::typed_function(library, c"cublasLtDestroy")?,
            create_layout: library::typed_function(library, c"cublasLtMatrixLayoutCreate")?,
            destroy_layout: library::typed_function(library, c"cublasLtMatrixLayoutDestroy")?,
            set_layout: library::typed_function(library, c"cublasLtMatrixLayoutSetAttribute")?,
            create_description: library::typed_function(library, c"cublasLtMatmulDescCreate")?,
            destroy_description: library::typed_function(library, c"cublasLtMatmulDescDestroy")?,
            set_description: library::typed_function(library, c"cublasLtMatmulDescSetAttribute")?,
            create_preference: library::typed_function(library, c"cublasLtMatmulPreferenceCreate")?,
            destroy_preference: library::typed_function(
                library,
                c"cublasLtMatmulPreferenceDestroy",
            )?,
            set_preference: library::typed_function(
                library,
                c"cublasLtMatmulPreferenceSetAttribute",
            )?,
            propose: library::typed_function(library, c"cublasLtMatmulAlgoGetHeuristic")?,
            matmul: library::typed_function(library, c"cublasLtMatmul")?,
        })
    }
}

const fn check_status(status: c_int) -> Result<(), LtError> {
    if status == 0 { Ok(()) } else { Err(LtError(status)) }
}

/// Returns the object that `make` creates at the given address.
fn create_object(
    make: impl FnOnce(*mut CublasLtHandle) -> c_int,
) -> Result<CublasLtHandle, LtError> {
    let mut object = ptr::null_mut();
    check_status(make(&raw mut object)).map(|()| object)
}

/// Opens the library for the device whose context is current.
///
/// # Errors
/// Fails if cuBLASLt is missing or reports an error.
pub fn create_handle() -> Result<CublasLtHandle, LtError> {
    let api = cublaslt_api()?;
    // SAFETY: the address of the new handle is valid.
    create_object(|handle| unsafe { (api.create)(handle) })
}

/// Describes a column-major matrix.
///
/// # Errors
/// Fails if the library is missing or fails.
pub fn matrix_layout(
    dtype: DataType,
    rows: u64,
    columns: u64,
    stride: i64,
) -> Result<CublasLtHandle, LtError> {
    let api = cublaslt_api()?;
    // SAFETY: the address is valid.
    create_object(|layout| unsafe { (api.create_layout)(layout, dtype, rows, columns, stride) })
}

/// Makes a matrix layout the layout of a batch of `count` matrices, whose first elements are
/// `stride` apart.
///
/// # Safety
/// The layout is alive.
///
/// # Errors
/// Fails if the library is missing or fails.
pub unsafe fn make_batch_layout(
    layout: CublasLtHandle,
    count: i32,
    stride: i64,
) -> Result<(), LtError> {
    use sys::cublasLtMatrixLayoutAttribute_t::{
        CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as COUNT,
        CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as STRIDE,
    };
    let api = cublaslt_api()?;
    // SAFETY: the caller's promise; the attributes are of those types and copied.
    unsafe {
        check_status((api.set_layout)(
            layout,
            COUNT,
            (&raw const count).cast(),
            size_of_val(&count),
        ))?;
        check_status((api.set_layout)(
            layout,
            STRIDE,
            (&raw const stride).cast(),
            size_of_val(&stride),
        ))
    }
}

/// Describes a GEMM without epilogue, of matrices that are not transposed.
///
/// # Errors
/// Fails if the library is missing or fails.
pub fn describe_gemm(compute: Compute, scalars: DataType) -> Result<CublasLtHandle, LtError> {
    let api = cublaslt_api()?;
    // SAFETY: the address is valid.
    create_object(|description| unsafe { (api.create_description)(description, compute, scalars) })
}

/// Sets an attribute of a GEMM description.
///
/// # Safety
/// The description is alive, and the library's attribute is of type `T`.
///
/// # Errors
/// Fails if the library is missing or refuses.
pub unsafe fn set_gemm_attribute<T: Copy>(
    description: CublasLtHandle,
    attribute: Attribute,
    value: T,
) -> Result<(), LtError> {
    let api = cublaslt_api()?;
    // SAFETY: the caller promises valid objects; cuBLASLt copies the value.
    check_status(unsafe {
        (api.set_description)(description, attribute, (&raw const value).cast(), size_of::<T>())
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LtObjectKind {
    /// Object from [`create_handle`].
    Handle,
    /// Object from [`matrix_layout`].
    Layout,
    /// Object from [`describe_gemm`].
    Description,
}

/// Destroys an object, if it was made.
///
/// # Safety
/// The object is null; or it is alive, of the given kind, and not used again.
pub unsafe fn destroy_object(kind: LtObjectKind, object: CublasLtHandle) {
    let (false, Ok(api)) = (object.is_null(), cublaslt_api()) else { return };
    let destroy = match kind {
        LtObjectKind::Handle => api.destroy,
        LtObjectKind::Layout => api.destroy_layout,
        LtObjectKind::Description => api.destroy_description,
    };
    // SAFETY: the caller's promise.
    unsafe { destroy(object) };
}

/// Algorithms asked for.
const MAX_ALGORITHMS: usize = 8;

/// Limits on the algorithms that the library may propose.
#[derive(Debug, Clone, Copy)]
pub struct AlgorithmPreference {
    /// Most workspace, bytes.
    pub workspace_bytes: usize,
    /// Alignment of all matrices, bytes; `None` for the library's default, 256.
    pub alignment: Option<u32>,
}

/// An algorithm that cuBLASLt proposes, and the workspace that it needs.
#[derive(Clone, Copy)]
pub struct ProposedAlgorithm {
    pub algorithm: Algorithm,
    pub workspace_bytes: usize,
}

/// The algorithms that cuBLASLt proposes for matrices of these layouts (a, b, c, d), the most
/// promising first; at least one algorithm.
///
/// # Safety
/// The handle, the description and the layouts are alive.
///
/// # Errors
/// Fails if the library fails or knows none.
pub unsafe fn propose_algorithms(
    handle: CublasLtHandle,
    description: CublasLtHandle,
    [a, b, c, d]: [CublasLtHandle; 4],
    AlgorithmPreference { workspace_bytes, alignment }: AlgorithmPreference,
) -> Result<Vec<ProposedAlgorithm>, LtError> {
    use sys::cublasLtMatmulPreferenceAttributes_t::{
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as MAX_WORKSPACE,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES as ALIGNMENT_A,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES as ALIGNMENT_B,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES as ALIGNMENT_C,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES as ALIGNMENT_D,
    };
    let api = cublaslt_api()?;
    // SAFETY: the address is valid.
    let preference = create_object(|preference| unsafe { (api.create_preference)(preference) })?;
    let blank = HeuristicResult {
        algorithm: Algorithm { data: [0; 8] },
        workspace_bytes: 0,
        state: 0,
        waves: 0.0,
        reserved: [0; 4],
    };
    let (mut proposals, mut count) = ([blank; MAX_ALGORITHMS], 0);
    // SAFETY: the caller's objects are alive; the attributes are a size_t and u32s and are copied;
    // the array has room for the requested proposals.
    let outcome = unsafe {
        let value = (&raw const workspace_bytes).cast();
        let mut set = (api.set_preference)(preference, MAX_WORKSPACE, value, size_of::<usize>());
        for attribute in [ALIGNMENT_A, ALIGNMENT_B, ALIGNMENT_C, ALIGNMENT_D] {
            let Some(bytes) = alignment.filter(|_| set == 0) else { break };
            let value = (&raw const bytes).cast();
            set = (api.set_preference)(preference, attribute, value, size_of::<u32>());
        }
        let proposed = (api.propose)(
            handle,
            description,
            a,
            b,
            c,
            d,
            preference,
            MAX_ALGORITHMS as c_int,
            proposals.as_mut_ptr(),
            &raw mut count,
        );
        let destroyed = (api.destroy_preference)(preference);
        check_status(set).and(check_status(proposed)).and(check_status(destroyed))
    };
    outcome?;
    let proposals = &proposals[..MAX_ALGORITHMS.min(count.max(0) as usize)];
    let algorithms: Vec<_> = proposals
        .iter()
        .filter(|proposal| proposal.state == 0)
        .map(|&HeuristicResult { algorithm, workspace_bytes, .. }| ProposedAlgorithm {
            algorithm,
            workspace_bytes,
        })
        .collect();
    if algorithms.is_empty() { Err(LtError::NOT_SUPPORTED) } else { Ok(algorithms) }
}

/// Factors of the product and of C, of the type that the description names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AlphaAndBeta {
    /// alpha and beta for sums in f32.
    F32([f32; 2]),
    /// alpha and beta for sums in i32.
    I32([i32; 2]),
}

impl AlphaAndBeta {
    /// Data type of the GEMM's scalars alpha and beta.
    pub const fn data_type(&self) -> DataType {
        match self {
            Self::F32(_) => DataType::CUDA_R_32F,
            Self::I32(_) => DataType::CUDA_R_32I,
        }
    }

    fn alpha_and_beta_addresses(&self) -> [*const c_void; 2] {
        match self {
            Self::F32([alpha, beta]) => [ptr::from_ref(alpha).cast(), ptr::from_ref(beta).cast()],
            Self::I32([alpha, beta]) => [ptr::from_ref(alpha).cast(), ptr::from_ref(beta).cast()],
        }
    }
}

/// A GEMM to be enqueued: d = alpha · a·b + beta · c.
#[derive(Clone, Copy)]
pub struct CublasLtLaunch {
    /// Handle from [`create_handle`].
    pub handle: CublasLtHandle,
    /// Description from [`describe_gemm`].
    pub description: CublasLtHandle,
    pub scalars: AlphaAndBeta,
    /// Device addresses of a, b, c and d.
    pub matrices: [u64; 4],
    /// Layouts of a, b, c and d.
    pub layouts: [CublasLtHandle; 4],
    /// Algorithm for the GEMM; a null pointer lets cuBLASLt choose.
    pub algorithm: *const Algorithm,
    /// Device address and size of the workspace, bytes.
    pub workspace: (u64, usize),
    pub stream: *mut c_void,
}

/// Enqueues a GEMM.
///
/// # Safety
/// Everything in it belongs together and is alive, the matrices until they have been multiplied;
/// the scalars are of the description's type.
pub unsafe fn enqueue_matmul(launch: CublasLtLaunch) -> Result<(), LtError> {
    let api = cublaslt_api()?;
    let [alpha, beta] = launch.scalars.alpha_and_beta_addresses();
    let [a, b, c, d] = launch.matrices.map(|address| address as *mut c_void);
    let [a_layout, b_layout, c_layout, d_layout] = launch.layouts;
    // SAFETY: the caller's promise; the scalars are read during the call.
    check_status(unsafe {
        (api.matmul)(
            launch.handle,
            launch.description,
            alpha,
            a,
            a_layout,
            b,
            b_layout,
            beta,
            c,
            c_layout,
            d,
            d_layout,
            launch.algorithm,
            launch.workspace.0 as *mut c_void,
            launch.workspace.1,
            launch.stream,
        )
    })
}
