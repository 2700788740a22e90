//! Functions of the opened cuBLASLt library that this crate calls; their signatures are equal in
//! CUDA 12 and 13. The argument types of the function pointers are those of cuBLASLt's header.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::cublaslt::sys;

pub use sys::cublasComputeType_t as Compute;
pub use sys::cublasLtEpilogue_t as Epilogue;
pub use sys::cublasLtMatmulAlgo_t as Algorithm;
pub use sys::cublasLtMatmulDescAttributes_t as Attribute;
pub use sys::cudaDataType_t as DataType;

use crate::library::{self, NvidiaLibrary};

/// Pointer to an object that cuBLASLt creates and destroys: a handle, a GEMM description, a matrix
/// layout or a preference.
pub type CublasLtObject = *mut c_void;

/// Error of a cuBLASLt call: the status code that the call returned. cuBLASLt's status codes have
/// the same numbers in every version of cuBLASLt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CublasLtError(c_int);

impl CublasLtError {
    /// Status code: cuBLASLt does not support the operation, in general or on this GPU.
    pub const NOT_SUPPORTED: CublasLtError = Self(15);
    /// Error, not from cuBLASLt itself: the library is missing, or lacks a function.
    pub const LIBRARY_OR_FUNCTION_MISSING: CublasLtError = Self(-1);
}

impl std::fmt::Display for CublasLtError {
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

/// GEMM algorithm as cuBLASLt's heuristic proposes it (`cublasLtMatmulHeuristicResult_t`).
#[repr(C)]
#[derive(Clone, Copy)]
struct CublasLtHeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    status: c_int,
    wave_count: f32,
    reserved: [c_int; 4],
}

/// Function of cuBLASLt that sets an attribute of an object; parameters: the object, the attribute,
/// the value, its size in bytes.
type SetAttributeFunction<A> =
    unsafe extern "C" fn(CublasLtObject, A, *const c_void, usize) -> c_int;
type DestroyObjectFunction = unsafe extern "C" fn(CublasLtObject) -> c_int;

struct CublasLtFunctions {
    create_handle: unsafe extern "C" fn(*mut CublasLtObject) -> c_int,
    destroy_handle: DestroyObjectFunction,
    create_layout: unsafe extern "C" fn(*mut CublasLtObject, DataType, u64, u64, i64) -> c_int,
    destroy_layout: DestroyObjectFunction,
    set_layout_attribute: SetAttributeFunction<sys::cublasLtMatrixLayoutAttribute_t>,
    create_description: unsafe extern "C" fn(*mut CublasLtObject, Compute, DataType) -> c_int,
    destroy_description: DestroyObjectFunction,
    set_description_attribute: SetAttributeFunction<Attribute>,
    create_preference: unsafe extern "C" fn(*mut CublasLtObject) -> c_int,
    destroy_preference: DestroyObjectFunction,
    set_preference_attribute: SetAttributeFunction<sys::cublasLtMatmulPreferenceAttributes_t>,
    propose: unsafe extern "C" fn(
        CublasLtObject,
        CublasLtObject,
        CublasLtObject,
        CublasLtObject,
        CublasLtObject,
        CublasLtObject,
        CublasLtObject,
        c_int,
        *mut CublasLtHeuristicResult,
        *mut c_int,
    ) -> c_int,
    matmul: unsafe extern "C" fn(
        CublasLtObject,
        CublasLtObject,
        *const c_void,
        *const c_void,
        CublasLtObject,
        *const c_void,
        CublasLtObject,
        *const c_void,
        *const c_void,
        CublasLtObject,
        *mut c_void,
        CublasLtObject,
        *const Algorithm,
        *mut c_void,
        usize,
        *mut c_void,
    ) -> c_int,
}

fn cublaslt_functions() -> Result<&'static CublasLtFunctions, CublasLtError> {
    static API: OnceLock<Option<CublasLtFunctions>> = OnceLock::new();
    API.get_or_init(load_cublaslt_functions)
        .as_ref()
        .ok_or(CublasLtError::LIBRARY_OR_FUNCTION_MISSING)
}

fn load_cublaslt_functions() -> Option<CublasLtFunctions> {
    let library = NvidiaLibrary::CublasLt;
    // SAFETY: the function types are those of `cublasLt.h`, which are the same from CUDA 12 to 13:
    // objects are pointers, and results are enumerations with the size of an int.
    unsafe {
        Some(CublasLtFunctions {
            create_handle: library::typed_library_function(library, c"cublasLtCreate")?,
            destroy_handle: library::typed_library_function(library, c"cublasLtDestroy")?,
            create_layout: library::typed_library_function(library, c"cublasLtMatrixLayoutCreate")?,
            destroy_layout: library::typed_library_function(
                library,
                c"cublasLtMatrixLayoutDestroy",
            )?,
            set_layout_attribute: library::typed_library_function(
                library,
                c"cublasLtMatrixLayoutSetAttribute",
            )?,
            create_description: library::typed_library_function(
                library,
                c"cublasLtMatmulDescCreate",
            )?,
            destroy_description: library::typed_library_function(
                library,
                c"cublasLtMatmulDescDestroy",
            )?,
            set_description_attribute: library::typed_library_function(
                library,
                c"cublasLtMatmulDescSetAttribute",
            )?,
            create_preference: library::typed_library_function(
                library,
                c"cublasLtMatmulPreferenceCreate",
            )?,
            destroy_preference: library::typed_library_function(
                library,
                c"cublasLtMatmulPreferenceDestroy",
            )?,
            set_preference_attribute: library::typed_library_function(
                library,
                c"cublasLtMatmulPreferenceSetAttribute",
            )?,
            propose: library::typed_library_function(library, c"cublasLtMatmulAlgoGetHeuristic")?,
            matmul: library::typed_library_function(library, c"cublasLtMatmul")?,
        })
    }
}

const fn check_cublaslt_status(status: c_int) -> Result<(), CublasLtError> {
    if status == 0 { Ok(()) } else { Err(CublasLtError(status)) }
}

/// Calls `make` with an address and returns the cuBLASLt object that `make` stores there.
fn create_cublaslt_object(
    make: impl FnOnce(*mut CublasLtObject) -> c_int,
) -> Result<CublasLtObject, CublasLtError> {
    let mut object = ptr::null_mut();
    check_cublaslt_status(make(&raw mut object)).map(|()| object)
}

/// Creates a cuBLASLt handle for the device whose context is current.
///
/// # Errors
/// Fails if cuBLASLt is missing or reports an error.
pub fn create_cublaslt_handle() -> Result<CublasLtObject, CublasLtError> {
    let api = cublaslt_functions()?;
    // SAFETY: the address to which cuBLASLt writes the new handle is valid.
    create_cublaslt_object(|handle| unsafe { (api.create_handle)(handle) })
}

/// Creates cuBLASLt's description of a column-major matrix; `stride` is its leading dimension in
/// elements.
///
/// # Errors
/// Fails if the library is missing or fails.
pub fn create_column_major_layout(
    dtype: DataType,
    rows: u64,
    columns: u64,
    stride: i64,
) -> Result<CublasLtObject, CublasLtError> {
    let api = cublaslt_functions()?;
    // SAFETY: the address to which cuBLASLt writes the new layout is valid.
    create_cublaslt_object(|layout| unsafe {
        (api.create_layout)(layout, dtype, rows, columns, stride)
    })
}

/// Makes a matrix layout the layout of a batch of `count` matrices, whose first elements are
/// `stride` elements apart.
///
/// # Safety
/// The layout is alive.
///
/// # Errors
/// Fails if the library is missing or fails.
pub unsafe fn set_batch_of_matrix_layout(
    layout: CublasLtObject,
    count: i32,
    stride: i64,
) -> Result<(), CublasLtError> {
    use sys::cublasLtMatrixLayoutAttribute_t::{
        CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as COUNT,
        CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as STRIDE,
    };
    let api = cublaslt_functions()?;
    // SAFETY: the caller keeps the layout alive; the attributes have the types of `count` and
    // `stride`, and cuBLASLt copies them.
    unsafe {
        check_cublaslt_status((api.set_layout_attribute)(
            layout,
            COUNT,
            (&raw const count).cast(),
            size_of_val(&count),
        ))?;
        check_cublaslt_status((api.set_layout_attribute)(
            layout,
            STRIDE,
            (&raw const stride).cast(),
            size_of_val(&stride),
        ))
    }
}

/// Creates cuBLASLt's description of a GEMM without epilogue, of matrices that are not transposed.
///
/// # Errors
/// Fails if the library is missing or fails.
pub fn create_gemm_description(
    compute: Compute,
    scalars: DataType,
) -> Result<CublasLtObject, CublasLtError> {
    let api = cublaslt_functions()?;
    // SAFETY: the address to which cuBLASLt writes the new description is valid.
    create_cublaslt_object(|description| unsafe {
        (api.create_description)(description, compute, scalars)
    })
}

/// Sets an attribute of cuBLASLt's description of a GEMM.
///
/// # Safety
/// The description is alive, and the library's attribute is of type `T`.
///
/// # Errors
/// Fails if the library is missing or refuses.
pub unsafe fn set_gemm_description_attribute<T: Copy>(
    description: CublasLtObject,
    attribute: Attribute,
    value: T,
) -> Result<(), CublasLtError> {
    let api = cublaslt_functions()?;
    // SAFETY: the caller keeps the description alive and passes the attribute's type; cuBLASLt
    // copies the value.
    check_cublaslt_status(unsafe {
        (api.set_description_attribute)(
            description,
            attribute,
            (&raw const value).cast(),
            size_of::<T>(),
        )
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CublasLtObjectKind {
    /// Object from [`create_cublaslt_handle`].
    LibraryHandle,
    /// Object from [`create_column_major_layout`].
    MatrixLayout,
    /// Object from [`create_gemm_description`].
    GemmDescription,
}

/// Destroys a cuBLASLt object; does nothing for a null pointer.
///
/// # Safety
/// The object is null; or it is alive, of the given kind, and not used again.
pub unsafe fn destroy_cublaslt_object(kind: CublasLtObjectKind, object: CublasLtObject) {
    let (false, Ok(api)) = (object.is_null(), cublaslt_functions()) else { return };
    let destroy = match kind {
        CublasLtObjectKind::LibraryHandle => api.destroy_handle,
        CublasLtObjectKind::MatrixLayout => api.destroy_layout,
        CublasLtObjectKind::GemmDescription => api.destroy_description,
    };
    // SAFETY: the caller guarantees that the object is alive, of this kind, and not used again.
    unsafe { destroy(object) };
}

/// Algorithms asked for.
const MAX_PROPOSED_ALGORITHMS: usize = 8;

/// Limits on the GEMM algorithms that cuBLASLt may propose: workspace and matrix alignment.
#[derive(Debug, Clone, Copy)]
pub struct AlgorithmLimits {
    /// Most workspace, bytes.
    pub max_workspace_bytes: usize,
    /// Alignment of the addresses of all matrices, bytes; `None` for cuBLASLt's default, 256.
    pub alignment_bytes: Option<u32>,
}

/// A GEMM algorithm that cuBLASLt proposes, and the workspace bytes that it needs.
#[derive(Clone, Copy)]
pub struct ProposedGemmAlgorithm {
    pub algorithm: Algorithm,
    pub workspace_bytes: usize,
}

/// Returns at least one GEMM algorithm that cuBLASLt proposes for matrices of these layouts (a, b,
/// c, d), the most promising first.
///
/// # Safety
/// The handle, the description and the layouts are alive.
///
/// # Errors
/// Fails if cuBLASLt fails or proposes no algorithm.
pub unsafe fn propose_gemm_algorithms(
    handle: CublasLtObject,
    description: CublasLtObject,
    [a, b, c, d]: [CublasLtObject; 4],
    AlgorithmLimits { max_workspace_bytes: workspace_bytes, alignment_bytes: alignment }: AlgorithmLimits,
) -> Result<Vec<ProposedGemmAlgorithm>, CublasLtError> {
    use sys::cublasLtMatmulPreferenceAttributes_t::{
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as MAX_WORKSPACE,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES as ALIGNMENT_A,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES as ALIGNMENT_B,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES as ALIGNMENT_C,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES as ALIGNMENT_D,
    };
    let api = cublaslt_functions()?;
    // SAFETY: the address to which cuBLASLt writes the new preference object is valid.
    let preference =
        create_cublaslt_object(|preference| unsafe { (api.create_preference)(preference) })?;
    let blank = CublasLtHeuristicResult {
        algorithm: Algorithm { data: [0; 8] },
        workspace_bytes: 0,
        status: 0,
        wave_count: 0.0,
        reserved: [0; 4],
    };
    let (mut proposals, mut count) = ([blank; MAX_PROPOSED_ALGORITHMS], 0);
    // SAFETY: the caller's objects are alive; the attributes are a size_t and u32s and are copied;
    // the array has room for the requested proposals.
    let outcome = unsafe {
        let value = (&raw const workspace_bytes).cast();
        let mut set =
            (api.set_preference_attribute)(preference, MAX_WORKSPACE, value, size_of::<usize>());
        for attribute in [ALIGNMENT_A, ALIGNMENT_B, ALIGNMENT_C, ALIGNMENT_D] {
            let Some(bytes) = alignment.filter(|_| set == 0) else { break };
            let value = (&raw const bytes).cast();
            set = (api.set_preference_attribute)(preference, attribute, value, size_of::<u32>());
        }
        let proposed = (api.propose)(
            handle,
            description,
            a,
            b,
            c,
            d,
            preference,
            MAX_PROPOSED_ALGORITHMS as c_int,
            proposals.as_mut_ptr(),
            &raw mut count,
        );
        let destroyed = (api.destroy_preference)(preference);
        check_cublaslt_status(set)
            .and(check_cublaslt_status(proposed))
            .and(check_cublaslt_status(destroyed))
    };
    outcome?;
    let proposals = &proposals[..MAX_PROPOSED_ALGORITHMS.min(count.max(0) as usize)];
    let algorithms: Vec<_> = proposals
        .iter()
        .filter(|proposal| proposal.status == 0)
        .map(|&CublasLtHeuristicResult { algorithm, workspace_bytes, .. }| ProposedGemmAlgorithm {
            algorithm,
            workspace_bytes,
        })
        .collect();
    if algorithms.is_empty() { Err(CublasLtError::NOT_SUPPORTED) } else { Ok(algorithms) }
}

/// GEMM factors alpha and beta, in the scalar type that cuBLASLt's description of the GEMM names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GemmAlphaAndBeta {
    /// Values of alpha and beta for a GEMM that sums in f32.
    F32AlphaBeta([f32; 2]),
    /// Values of alpha and beta for a GEMM that sums in i32.
    I32AlphaBeta([i32; 2]),
}

impl GemmAlphaAndBeta {
    /// Data type of alpha and beta, as cuBLASLt's description of the GEMM names it.
    pub const fn scalar_data_type(&self) -> DataType {
        match self {
            Self::F32AlphaBeta(_) => DataType::CUDA_R_32F,
            Self::I32AlphaBeta(_) => DataType::CUDA_R_32I,
        }
    }

    fn alpha_and_beta_addresses(&self) -> [*const c_void; 2] {
        match self {
            Self::F32AlphaBeta([alpha, beta]) => {
                [ptr::from_ref(alpha).cast(), ptr::from_ref(beta).cast()]
            }
            Self::I32AlphaBeta([alpha, beta]) => {
                [ptr::from_ref(alpha).cast(), ptr::from_ref(beta).cast()]
            }
        }
    }
}

/// Arguments of a cuBLASLt call that enqueues a GEMM: d = alpha · a·b + beta · c.
#[derive(Clone, Copy)]
pub struct CublasLtMatmulArguments {
    /// Handle from [`create_cublaslt_handle`].
    pub handle: CublasLtObject,
    /// Description from [`create_gemm_description`].
    pub gemm_description: CublasLtObject,
    pub alpha_and_beta: GemmAlphaAndBeta,
    /// Device addresses of the matrices a, b, c and d.
    pub matrices: [u64; 4],
    /// cuBLASLt layouts of the matrices a, b, c and d.
    pub layouts: [CublasLtObject; 4],
    /// Algorithm for the GEMM; if the pointer is null, cuBLASLt chooses an algorithm.
    pub algorithm: *const Algorithm,
    /// Device address of the GEMM's workspace, and its size in bytes.
    pub workspace_address_and_bytes: (u64, usize),
    pub stream: *mut c_void,
}

/// Enqueues a GEMM by `cublasLtMatmul`.
///
/// # Safety
/// All handles, layouts and addresses in `launch` belong together and are alive, the matrices until
/// they have been multiplied; the scalars are of the description's type.
pub unsafe fn enqueue_cublaslt_matmul(
    launch: CublasLtMatmulArguments,
) -> Result<(), CublasLtError> {
    let api = cublaslt_functions()?;
    let [alpha, beta] = launch.alpha_and_beta.alpha_and_beta_addresses();
    let [a, b, c, d] = launch.matrices.map(|address| address as *mut c_void);
    let [a_layout, b_layout, c_layout, d_layout] = launch.layouts;
    // SAFETY: the caller keeps all objects alive; cuBLASLt reads alpha and beta during the call.
    check_cublaslt_status(unsafe {
        (api.matmul)(
            launch.handle,
            launch.gemm_description,
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
            launch.workspace_address_and_bytes.0 as *mut c_void,
            launch.workspace_address_and_bytes.1,
            launch.stream,
        )
    })
}
