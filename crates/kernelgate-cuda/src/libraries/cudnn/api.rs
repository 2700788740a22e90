//! Calls cuDNN's backend interface, which consists of opaque descriptors with numbered attributes.
//! The numbers of descriptors and attributes are those of `cudnn_graph.h`, version 9.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};

use crate::BackendError;
use crate::Device;
use crate::library::{self, NvidiaLibrary};

/// Oldest supported cuDNN version (9.11); earlier versions would need workarounds for masks and
/// accumulators.
const OLDEST_SUPPORTED_CUDNN: usize = 91_100;

/// A pointer as cuDNN passes it: to a descriptor, to a handle, or to device memory.
pub type CudnnRawPointer = *mut c_void;

/// The reason why cuDNN cannot compute an operation graph: cuDNN is missing, too old, or returned
/// an error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CudnnUnsupported(pub String);

impl From<CudnnUnsupported> for BackendError {
    fn from(refusal: CudnnUnsupported) -> Self {
        Self::Unsupported(refusal.0)
    }
}

/// Kind of a cuDNN backend descriptor, with cuDNN's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CudnnDescriptorKind {
    /// Descriptor of the mode and the precision of a pointwise operation.
    Pointwise = 0,
    /// Descriptor of an engine (implementation) with its settings.
    EngineConfig = 3,
    /// Descriptor of a query for engines that can compute an operation graph.
    Heuristics = 4,
    /// Descriptor of an execution plan.
    ExecutionPlan = 5,
    /// Descriptor of a pointwise operation with its tensors.
    PointwiseOperation = 13,
    /// Descriptor of a graph of operations.
    OperationGraph = 15,
    /// Descriptor of the addresses that an execution plan uses: tensors, scalars and workspace.
    VariantPack = 16,
    /// Descriptor of a tensor's extents, strides and element type.
    Tensor = 17,
    /// Descriptor of the precision of a GEMM.
    Matmul = 18,
    /// A GEMM of tensors.
    MatmulOperation = 19,
    /// Descriptor of the operator and the precision of a reduction.
    Reduction = 21,
    /// Descriptor of a reduction with its tensors.
    ReductionOperation = 22,
    /// Descriptor of an operation that reads a tensor with another shape or axis order.
    ReshapeOperation = 31,
}

/// Attribute of a cuDNN backend descriptor, named as in `cudnn_graph.h`, with cuDNN's number.
#[expect(missing_docs, reason = "cuDNN documents its attributes")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CudnnAttribute {
    PointwiseMode = 0,
    PointwiseMathPrecision = 1,
    PointwiseAxis = 9,
    HeuristicsMode = 200,
    HeuristicsOperationGraph = 201,
    HeuristicsResults = 202,
    PlanHandle = 400,
    PlanEngineConfig = 401,
    PlanWorkspaceSize = 402,
    PointwiseOperationDescriptor = 750,
    PointwiseOperationX = 751,
    PointwiseOperationB = 752,
    PointwiseOperationY = 753,
    PointwiseOperationAlpha1 = 754,
    PointwiseOperationAlpha2 = 755,
    PointwiseOperationT = 758,
    OperationGraphHandle = 800,
    GraphOperations = 801,
    TensorByteAlignment = 900,
    TensorDataType = 901,
    TensorDimensions = 902,
    TensorStrides = 903,
    TensorUniqueId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    PackUniqueIds = 1000,
    PackDataPointers = 1001,
    PackWorkspace = 1003,
    MatmulComputeType = 1500,
    MatmulOperationA = 1520,
    MatmulOperationB = 1521,
    MatmulOperationC = 1522,
    MatmulOperationDescriptor = 1523,
    ReductionOperator = 1600,
    ReductionComputeType = 1601,
    ReductionOperationX = 1610,
    ReductionOperationY = 1611,
    ReductionOperationDescriptor = 1612,
    ReshapeOperationX = 2200,
    ReshapeOperationY = 2201,
}

/// cuDNN's type of a tensor's elements, or of the arithmetic of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CudnnDataType {
    /// 32-bit floats.
    F32 = 0,
    /// IEEE 16-bit floats.
    F16 = 2,
    /// 32-bit signed integers.
    I32 = 4,
    /// bfloat16.
    Bf16 = 9,
    /// Booleans of one byte each.
    Boolean = 11,
}

/// Function of a cuDNN pointwise operation on up to three inputs x, b and t.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CudnnPointwiseMode {
    /// x + b.
    Add = 0,
    /// x · b.
    Multiply = 1,
    /// x / b.
    DivideXByB = 6,
    /// x - b.
    Subtract = 9,
    /// Natural exponential of x.
    Exponential = 13,
    /// Natural logarithm of x.
    NaturalLogarithm = 15,
    /// x.
    Identity = 21,
    /// x >= b.
    GreaterOrEqual = 303,
    /// Index of each element of x along one axis.
    GenerateIndex = 501,
    /// The element of x where t is true, else the element of b.
    Select = 601,
}

/// Function by which a cuDNN reduction combines elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CudnnReductionOperator {
    /// Sum of the elements.
    Add = 0,
    /// Largest element.
    Maximum = 3,
}

/// Number of heuristic mode A, which cuDNN recommends for the choice of an engine.
const CUDNN_HEURISTIC_MODE_A: u32 = 3;

/// Value of a cuDNN attribute, with its type.
#[derive(Clone, Copy)]
pub enum CudnnAttributeValue<'a> {
    /// CUDNN_TYPE_HANDLE.
    Handle(&'a CudnnHandle),
    /// CUDNN_TYPE_DATA_TYPE.
    DataType(CudnnDataType),
    /// CUDNN_TYPE_BOOLEAN.
    Boolean(bool),
    /// CUDNN_TYPE_INT64.
    Integers(&'a [i64]),
    /// CUDNN_TYPE_FLOAT.
    Float(f32),
    /// CUDNN_TYPE_VOID_PTR.
    Pointers(&'a [CudnnRawPointer]),
    /// A value of type CUDNN_TYPE_HEUR_MODE: the heuristic mode that cuDNN recommends.
    RecommendedHeuristicMode,
    /// CUDNN_TYPE_POINTWISE_MODE.
    PointwiseMode(CudnnPointwiseMode),
    /// CUDNN_TYPE_BACKEND_DESCRIPTOR.
    Descriptors(&'a [&'a CudnnDescriptor]),
    /// CUDNN_TYPE_REDUCTION_OPERATOR_TYPE.
    ReductionOperator(CudnnReductionOperator),
}

const CUDNN_TYPE_INT64: u32 = 3;
const CUDNN_TYPE_DESCRIPTOR: u32 = 15;

/// Pointers to functions of the cuDNN library; they return a status code, of which 0 means success.
struct CudnnFunctions {
    create: unsafe extern "C" fn(*mut CudnnRawPointer) -> c_int,
    destroy: unsafe extern "C" fn(CudnnRawPointer) -> c_int,
    set_stream: unsafe extern "C" fn(CudnnRawPointer, CudnnRawPointer) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_last_error_text: unsafe extern "C" fn(*mut c_char, usize),
    create_descriptor: unsafe extern "C" fn(u32, *mut CudnnRawPointer) -> c_int,
    destroy_descriptor: unsafe extern "C" fn(CudnnRawPointer) -> c_int,
    set_attribute: unsafe extern "C" fn(CudnnRawPointer, u32, u32, i64, *const c_void) -> c_int,
    get_attribute:
        unsafe extern "C" fn(CudnnRawPointer, u32, u32, i64, *mut i64, *mut c_void) -> c_int,
    finalize_descriptor: unsafe extern "C" fn(CudnnRawPointer) -> c_int,
    execute: unsafe extern "C" fn(CudnnRawPointer, CudnnRawPointer, CudnnRawPointer) -> c_int,
    cudnn_version_number: usize,
}

/// Version of the found cuDNN library as a number: 91400 is 9.14.0.
///
/// # Errors
/// Fails if cuDNN is missing or too old.
pub fn found_cudnn_version() -> Result<usize, CudnnUnsupported> {
    Ok(cudnn_functions()?.cudnn_version_number)
}

fn cudnn_functions() -> Result<&'static CudnnFunctions, CudnnUnsupported> {
    static API: OnceLock<Result<CudnnFunctions, CudnnUnsupported>> = OnceLock::new();
    API.get_or_init(load_cudnn_functions).as_ref().map_err(Clone::clone)
}

fn load_cudnn_functions() -> Result<CudnnFunctions, CudnnUnsupported> {
    for library in [NvidiaLibrary::CublasLt, NvidiaLibrary::Cudnn] {
        library::open_library_once(library).ok_or_else(|| {
            CudnnUnsupported(format!(
                "needs {}: {}",
                library.library_name_in_messages(),
                library.advice_to_install_library()
            ))
        })?;
    }
    // SAFETY: the function types are those of cuDNN 9's headers, where enumerations are unsigned
    // ints and a status is an int.
    unsafe {
        let version: unsafe extern "C" fn() -> usize = find_cudnn_function(c"cudnnGetVersion")?;
        let runtime: unsafe extern "C" fn() -> usize =
            find_cudnn_function(c"cudnnGetCudartVersion")?;
        let (version, runtime) = (version(), runtime());
        if version < OLDEST_SUPPORTED_CUDNN {
            let show = |version: usize| format!("{}.{}", version / 10_000, version / 100 % 100);
            return Err(CudnnUnsupported(format!(
                "needs cuDNN {} or later, here is {}",
                show(OLDEST_SUPPORTED_CUDNN),
                show(version)
            )));
        }
        // A cuDNN library built for another major version of CUDA would load the cuBLASLt of that
        // version.
        let cuda = library::cuda_major_of_libraries() as usize;
        if runtime / 1000 != cuda {
            return Err(CudnnUnsupported(format!(
                "needs a cuDNN for CUDA {cuda}, {} is for {}",
                library::open_library_once(NvidiaLibrary::Cudnn)
                    .map_or("here".into(), |it| it.path_or_library_name.to_string_lossy()),
                runtime / 1000
            )));
        }
        Ok(CudnnFunctions {
            create: find_cudnn_function(c"cudnnCreate")?,
            destroy: find_cudnn_function(c"cudnnDestroy")?,
            set_stream: find_cudnn_function(c"cudnnSetStream")?,
            error_string: find_cudnn_function(c"cudnnGetErrorString")?,
            get_last_error_text: find_cudnn_function(c"cudnnGetLastErrorString")?,
            create_descriptor: find_cudnn_function(c"cudnnBackendCreateDescriptor")?,
            destroy_descriptor: find_cudnn_function(c"cudnnBackendDestroyDescriptor")?,
            set_attribute: find_cudnn_function(c"cudnnBackendSetAttribute")?,
            get_attribute: find_cudnn_function(c"cudnnBackendGetAttribute")?,
            finalize_descriptor: find_cudnn_function(c"cudnnBackendFinalize")?,
            execute: find_cudnn_function(c"cudnnBackendExecute")?,
            cudnn_version_number: version,
        })
    }
}

/// Finds a function of the cuDNN library by its name.
///
/// # Safety
/// The caller guarantees that `F` is the type of the cuDNN function with this name.
unsafe fn find_cudnn_function<F: Copy>(name: &CStr) -> Result<F, CudnnUnsupported> {
    // SAFETY: the caller guarantees that `F` is the type of the cuDNN function with this name.
    unsafe { library::typed_library_function(NvidiaLibrary::Cudnn, name) }
        .ok_or_else(|| CudnnUnsupported(format!("this cuDNN has no {}", name.to_string_lossy())))
}

impl CudnnFunctions {
    /// Turns a cuDNN status code into an error that names the failed action and contains cuDNN's
    /// message.
    fn check_cudnn_status(
        &self,
        status: c_int,
        action: impl FnOnce() -> String,
    ) -> Result<(), CudnnUnsupported> {
        if status == 0 {
            return Ok(());
        }
        let mut message = [0 as c_char; 512];
        // SAFETY: the status is one of cuDNN's, and the buffer is passed with its size, so that
        // cuDNN ends the text with a zero.
        let (name, detail) = unsafe {
            (self.get_last_error_text)(message.as_mut_ptr(), message.len());
            message[message.len() - 1] = 0;
            (CStr::from_ptr((self.error_string)(status)), CStr::from_ptr(message.as_ptr()))
        };
        let (name, detail) = (name.to_string_lossy(), detail.to_string_lossy());
        let detail =
            if detail.trim().is_empty() { String::new() } else { format!(": {}", detail.trim()) };
        Err(CudnnUnsupported(format!("cuDNN refused to {} ({name}{detail})", action())))
    }
}

/// A cuDNN handle whose work runs on the stream of a device.
pub struct CudnnHandle {
    raw: CudnnRawPointer,
    api: &'static CudnnFunctions,
    /// The device is kept, because its CUDA stream must outlive the cuDNN handle.
    _device: Arc<Device>,
}

impl CudnnHandle {
    /// Creates a cuDNN handle and sets it to the device's stream.
    ///
    /// # Errors
    /// Fails if cuDNN is missing or too old, or cannot use the device.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudnnUnsupported> {
        let api = cudnn_functions()?;
        device
            .context()
            .bind_to_thread()
            .map_err(|_| CudnnUnsupported("cuDNN cannot use the device's context".to_owned()))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is valid, and the device's context is current.
        api.check_cudnn_status(unsafe { (api.create)(&raw mut raw) }, || {
            "open the device".to_owned()
        })?;
        let handle = Self { raw, api, _device: Arc::clone(device) };
        // SAFETY: the handle and the stream are alive; a stream of the CUDA runtime is also a
        // stream of the driver.
        api.check_cudnn_status(
            unsafe { (api.set_stream)(raw, device.stream().cu_stream().cast()) },
            || "use the stream".to_owned(),
        )?;
        Ok(handle)
    }
}

impl Drop for CudnnHandle {
    fn drop(&mut self) {
        // SAFETY: the handle was made by cudnnCreate and is destroyed once.
        unsafe { (self.api.destroy)(self.raw) };
    }
}

/// A cuDNN backend descriptor, which is destroyed when dropped.
pub struct CudnnDescriptor {
    raw: CudnnRawPointer,
    kind: CudnnDescriptorKind,
    api: &'static CudnnFunctions,
}

impl CudnnDescriptor {
    /// Creates a cuDNN backend descriptor without attributes.
    ///
    /// # Errors
    /// Fails if cuDNN is missing or does not know this kind of descriptor.
    pub fn new(kind: CudnnDescriptorKind) -> Result<Self, CudnnUnsupported> {
        let api = cudnn_functions()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
        api.check_cudnn_status(
            unsafe { (api.create_descriptor)(kind as u32, &raw mut raw) },
            || format!("make a descriptor of {kind:?}"),
        )?;
        Ok(Self { raw, kind, api })
    }

    /// Creates a cuDNN backend descriptor, sets these attributes, and finalizes the descriptor.
    pub fn create_and_finalize_descriptor(
        kind: CudnnDescriptorKind,
        attributes: &[(CudnnAttribute, CudnnAttributeValue<'_>)],
    ) -> Result<CudnnDescriptor, CudnnUnsupported> {
        let descriptor = Self::new(kind)?;
        for (attribute, value) in attributes {
            descriptor.set_descriptor_attribute(*attribute, *value)?;
        }
        // SAFETY: the cuDNN descriptor is alive.
        descriptor.api.check_cudnn_status(
            unsafe { (descriptor.api.finalize_descriptor)(descriptor.raw) },
            || format!("take the {kind:?}"),
        )?;
        Ok(descriptor)
    }

    fn set_descriptor_attribute(
        &self,
        attribute: CudnnAttribute,
        value: CudnnAttributeValue<'_>,
    ) -> Result<(), CudnnUnsupported> {
        let action = || format!("set {attribute:?} of {:?}", self.kind);
        let set = |kind: u32, count: usize, values: *const c_void| {
            // SAFETY: the descriptor is alive, and `values` points to `count` values of this type,
            // which cuDNN copies.
            let status = unsafe {
                (self.api.set_attribute)(self.raw, attribute as u32, kind, count as i64, values)
            };
            self.api.check_cudnn_status(status, action)
        };
        let one = |kind: u32, number: u32| set(kind, 1, (&raw const number).cast());
        match value {
            CudnnAttributeValue::Handle(handle) => set(0, 1, (&raw const handle.raw).cast()),
            CudnnAttributeValue::DataType(data_type) => one(1, data_type as u32),
            CudnnAttributeValue::Boolean(flag) => set(2, 1, (&raw const flag).cast()),
            CudnnAttributeValue::Integers(integers) => {
                set(CUDNN_TYPE_INT64, integers.len(), integers.as_ptr().cast())
            }
            CudnnAttributeValue::Float(float) => set(4, 1, (&raw const float).cast()),
            CudnnAttributeValue::Pointers(pointers) => {
                set(6, pointers.len(), pointers.as_ptr().cast())
            }
            CudnnAttributeValue::RecommendedHeuristicMode => one(8, CUDNN_HEURISTIC_MODE_A),
            CudnnAttributeValue::PointwiseMode(mode) => one(14, mode as u32),
            CudnnAttributeValue::ReductionOperator(operator) => one(18, operator as u32),
            CudnnAttributeValue::Descriptors(descriptors) => {
                let raw: Vec<CudnnRawPointer> =
                    descriptors.iter().map(|descriptor| descriptor.raw).collect();
                set(CUDNN_TYPE_DESCRIPTOR, raw.len(), raw.as_ptr().cast())
            }
        }
    }

    /// Reads an integer attribute that cuDNN computed, such as the size of a workspace.
    ///
    /// # Errors
    /// Fails if the descriptor has no such attribute.
    pub fn read_integer_attribute(
        &self,
        attribute: CudnnAttribute,
    ) -> Result<i64, CudnnUnsupported> {
        let (mut count, mut value) = (0i64, 0i64);
        // SAFETY: the descriptor is alive, and the buffer has room for the one value that is
        // requested.
        let status = unsafe {
            (self.api.get_attribute)(
                self.raw,
                attribute as u32,
                CUDNN_TYPE_INT64,
                1,
                &raw mut count,
                (&raw mut value).cast(),
            )
        };
        self.api.check_cudnn_status(status, || format!("query {attribute:?}"))?;
        Ok(value)
    }

    /// Reads the descriptors in an attribute that cuDNN computed, such as the engines for a graph,
    /// the best one first.
    ///
    /// # Errors
    /// Fails if the attribute has no descriptors.
    pub fn read_descriptors_attribute(
        &self,
        attribute: CudnnAttribute,
        kind: CudnnDescriptorKind,
    ) -> Result<Vec<CudnnDescriptor>, CudnnUnsupported> {
        let mut count = 0i64;
        let get = |room: i64, count: &mut i64, values: *mut c_void| {
            // SAFETY: the descriptor is alive, and `values` has room for the requested number of
            // descriptors.
            let status = unsafe {
                (self.api.get_attribute)(
                    self.raw,
                    attribute as u32,
                    CUDNN_TYPE_DESCRIPTOR,
                    room,
                    count,
                    values,
                )
            };
            self.api.check_cudnn_status(status, || format!("query {attribute:?}"))
        };
        get(0, &mut count, std::ptr::null_mut())?;
        let descriptors = (0..count).map(|_| Self::new(kind)).collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<CudnnRawPointer> =
            descriptors.iter().map(|descriptor| descriptor.raw).collect();
        get(raw.len() as i64, &mut count, raw.as_mut_ptr().cast())?;
        Ok(descriptors.into_iter().take(count.max(0) as usize).collect())
    }
}

impl Drop for CudnnDescriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor was made by cudnnBackendCreateDescriptor and is destroyed once.
        unsafe { (self.api.destroy_descriptor)(self.raw) };
    }
}

/// Enqueues an execution plan on the stream of the cuDNN handle.
///
/// # Safety
/// The caller guarantees that the pack was made for this plan, and that all its addresses stay
/// valid until the work has finished.
pub unsafe fn enqueue_execution_plan(
    handle: &CudnnHandle,
    plan: &CudnnDescriptor,
    pack: &CudnnDescriptor,
) -> Result<(), BackendError> {
    // SAFETY: the handle, the plan and the pack are alive, and the caller guarantees that the
    // pack's addresses are valid.
    let status = unsafe { (handle.api.execute)(handle.raw, plan.raw, pack.raw) };
    handle
        .api
        .check_cudnn_status(status, || "run the plan".to_owned())
        .map_err(|refusal| BackendError::ComputationFailed(refusal.0))
}
