//! Functions of cuDNN's back-end interface, which has opaque descriptors with numbered attributes.
//! Numbers of cuDNN's descriptors and attributes, as in `cudnn_graph.h`, version 9.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, OnceLock};

use crate::BackendError;
use crate::Device;
use crate::library::{self, RequiredLibrary};

/// Oldest version that is used: earlier ones need workarounds for masks and accumulators.
const OLDEST_CUDNN: usize = 91_100;

/// A pointer as cuDNN hands it out: to a descriptor, a handle, or device memory.
pub type RawPtr = *mut c_void;

/// Reason why cuDNN cannot compute an operation: it is missing, too old, or refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CudnnRefusal(pub String);

impl From<CudnnRefusal> for BackendError {
    fn from(refusal: CudnnRefusal) -> Self {
        Self::Unsupported(refusal.0)
    }
}

/// Kind of a cuDNN descriptor, by cuDNN's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CudnnDescriptorKind {
    /// Descriptor of a pointwise operation's mode and precision.
    Pointwise = 0,
    /// Descriptor of an engine with its settings.
    EngineConfig = 3,
    /// A query for engines that can compute a graph.
    Heuristics = 4,
    /// Descriptor of an executable plan.
    ExecutionPlan = 5,
    /// Descriptor of a pointwise operation on tensors.
    PointwiseOperation = 13,
    /// Descriptor of a graph of operations.
    OperationGraph = 15,
    /// Descriptor of the addresses of a plan's tensors.
    VariantPack = 16,
    /// Descriptor of the extents, strides and type of a tensor.
    Tensor = 17,
    /// Precision of a GEMM.
    Matmul = 18,
    /// A GEMM of tensors.
    MatmulOperation = 19,
    /// Descriptor of a reduction's operator and precision.
    Reduction = 21,
    /// Descriptor of a reduction of a tensor.
    ReductionOperation = 22,
    /// Descriptor of an operation that shows a tensor in another shape or order.
    ReshapeOperation = 31,
}

/// An attribute of a cuDNN descriptor, named as `cudnn_graph.h` names it.
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
    GraphHandle = 800,
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

/// Type of a tensor's elements, or of a computation.
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
    /// Truth values, one byte each.
    Boolean = 11,
}

/// Function of a pointwise operation on x, b and t.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CudnnPointwiseMode {
    /// x + b.
    Add = 0,
    /// x · b.
    Multiply = 1,
    /// x / b.
    Divide = 6,
    /// x - b.
    Subtract = 9,
    /// Natural exponential of x.
    Exponential = 13,
    /// Natural logarithm of x.
    Logarithm = 15,
    /// x.
    Identity = 21,
    /// x >= b.
    GreaterOrEqual = 303,
    /// The element's index along an axis of x.
    Index = 501,
    /// Pointwise mode: element of x where t is true, else element of b.
    Select = 601,
}

/// Function of a reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum OperationDescriptor {
    /// Sum of the elements.
    Add = 0,
    /// Largest element.
    Maximum = 3,
}

/// Number of the heuristic that cuDNN recommends.
const CUDNN_HEURISTIC_MODE_A: u32 = 3;

/// A value of an attribute, with its type.
#[derive(Clone, Copy)]
pub enum CudnnAttributeValue<'a> {
    /// CUDNN_TYPE_HANDLE.
    Handle(&'a CudnnHandle),
    /// CUDNN_TYPE_DATA_TYPE.
    DataType(CudnnDataType),
    /// CUDNN_TYPE_BOOLEAN.
    Flag(bool),
    /// CUDNN_TYPE_INT64.
    Integers(&'a [i64]),
    /// CUDNN_TYPE_FLOAT.
    Float(f32),
    /// CUDNN_TYPE_VOID_PTR.
    Pointers(&'a [RawPtr]),
    /// CUDNN_TYPE_HEUR_MODE, the recommended one.
    Heuristic,
    /// CUDNN_TYPE_POINTWISE_MODE.
    Mode(CudnnPointwiseMode),
    /// CUDNN_TYPE_BACKEND_DESCRIPTOR.
    Descriptors(&'a [&'a CudnnDescriptor]),
    /// CUDNN_TYPE_REDUCTION_OPERATOR_TYPE.
    Operator(OperationDescriptor),
}

const CUDNN_TYPE_INT64: u32 = 3;
const CUDNN_TYPE_DESCRIPTOR: u32 = 15;

/// cuDNN's functions. cuDNN's status code 0 means success.
struct CudnnApi {
    create: unsafe extern "C" fn(*mut RawPtr) -> c_int,
    destroy: unsafe extern "C" fn(RawPtr) -> c_int,
    set_stream: unsafe extern "C" fn(RawPtr, RawPtr) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(*mut c_char, usize),
    create_descriptor: unsafe extern "C" fn(u32, *mut RawPtr) -> c_int,
    destroy_descriptor: unsafe extern "C" fn(RawPtr) -> c_int,
    set_attribute: unsafe extern "C" fn(RawPtr, u32, u32, i64, *const c_void) -> c_int,
    get_attribute: unsafe extern "C" fn(RawPtr, u32, u32, i64, *mut i64, *mut c_void) -> c_int,
    finalize: unsafe extern "C" fn(RawPtr) -> c_int,
    execute: unsafe extern "C" fn(RawPtr, RawPtr, RawPtr) -> c_int,
    version: usize,
}

/// Version of the cuDNN library as a number: 91400 is 9.14.0.
///
/// # Errors
/// Fails if cuDNN is missing or too old.
pub fn cudnn_version() -> Result<usize, CudnnRefusal> {
    Ok(cudnn_api()?.version)
}

fn cudnn_api() -> Result<&'static CudnnApi, CudnnRefusal> {
    static API: OnceLock<Result<CudnnApi, CudnnRefusal>> = OnceLock::new();
    API.get_or_init(load_cudnn).as_ref().map_err(Clone::clone)
}

fn load_cudnn() -> Result<CudnnApi, CudnnRefusal> {
    for library in [RequiredLibrary::CublasLt, RequiredLibrary::Cudnn] {
        library::load_once(library).ok_or_else(|| {
            CudnnRefusal(format!("needs {}: {}", library.name(), library.install_advice()))
        })?;
    }
    // SAFETY: the function types are those of cuDNN 9's headers, where enumerations are unsigned
    // and a status is an int.
    unsafe {
        let version: unsafe extern "C" fn() -> usize = cudnn_function(c"cudnnGetVersion")?;
        let runtime: unsafe extern "C" fn() -> usize = cudnn_function(c"cudnnGetCudartVersion")?;
        let (version, runtime) = (version(), runtime());
        if version < OLDEST_CUDNN {
            let show = |version: usize| format!("{}.{}", version / 10_000, version / 100 % 100);
            return Err(CudnnRefusal(format!(
                "needs cuDNN {} or later, here is {}",
                show(OLDEST_CUDNN),
                show(version)
            )));
        }
        // A cuDNN built for another CUDA would load that CUDA's cuBLASLt.
        let cuda = library::cuda_major_to_use() as usize;
        if runtime / 1000 != cuda {
            return Err(CudnnRefusal(format!(
                "needs a cuDNN for CUDA {cuda}, {} is for {}",
                library::load_once(RequiredLibrary::Cudnn)
                    .map_or("here".into(), |it| it.file.to_string_lossy()),
                runtime / 1000
            )));
        }
        Ok(CudnnApi {
            create: cudnn_function(c"cudnnCreate")?,
            destroy: cudnn_function(c"cudnnDestroy")?,
            set_stream: cudnn_function(c"cudnnSetStream")?,
            error_string: cudnn_function(c"cudnnGetErrorString")?,
            last_error: cudnn_function(c"cudnnGetLastErrorString")?,
            create_descriptor: cudnn_function(c"cudnnBackendCreateDescriptor")?,
            destroy_descriptor: cudnn_function(c"cudnnBackendDestroyDescriptor")?,
            set_attribute: cudnn_function(c"cudnnBackendSetAttribute")?,
            get_attribute: cudnn_function(c"cudnnBackendGetAttribute")?,
            finalize: cudnn_function(c"cudnnBackendFinalize")?,
            execute: cudnn_function(c"cudnnBackendExecute")?,
            version,
        })
    }
}

/// Looks up a function of the cuDNN library.
///
/// # Safety
/// The caller chooses `F` as the type of the function with that name.
unsafe fn cudnn_function<F: Copy>(name: &CStr) -> Result<F, CudnnRefusal> {
    // SAFETY: the caller's promise.
    unsafe { library::typed_function(RequiredLibrary::Cudnn, name) }
        .ok_or_else(|| CudnnRefusal(format!("this cuDNN has no {}", name.to_string_lossy())))
}

impl CudnnApi {
    /// Turns a status into an error with the failed action and cuDNN's message.
    fn check(&self, status: c_int, action: impl FnOnce() -> String) -> Result<(), CudnnRefusal> {
        if status == 0 {
            return Ok(());
        }
        let mut message = [0 as c_char; 512];
        // SAFETY: a status of cuDNN's own, and a buffer with its size, which cuDNN ends with a
        // zero.
        let (name, detail) = unsafe {
            (self.last_error)(message.as_mut_ptr(), message.len());
            message[message.len() - 1] = 0;
            (CStr::from_ptr((self.error_string)(status)), CStr::from_ptr(message.as_ptr()))
        };
        let (name, detail) = (name.to_string_lossy(), detail.to_string_lossy());
        let detail =
            if detail.trim().is_empty() { String::new() } else { format!(": {}", detail.trim()) };
        Err(CudnnRefusal(format!("cuDNN refused to {} ({name}{detail})", action())))
    }
}

/// A cuDNN context that works on a device's stream.
pub struct CudnnHandle {
    raw: RawPtr,
    api: &'static CudnnApi,
    /// The CUDA stream must outlive the cuDNN handle.
    _device: Arc<Device>,
}

impl CudnnHandle {
    /// Opens one.
    ///
    /// # Errors
    /// Fails if the library is missing or old, or cannot use the device.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudnnRefusal> {
        let api = cudnn_api()?;
        device
            .context()
            .bind_to_thread()
            .map_err(|_| CudnnRefusal("cuDNN cannot use the device's context".to_owned()))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is valid, and the device's context is current.
        api.check(unsafe { (api.create)(&raw mut raw) }, || "open the device".to_owned())?;
        let handle = Self { raw, api, _device: Arc::clone(device) };
        // SAFETY: handle and stream are alive; a runtime stream is a driver stream.
        api.check(unsafe { (api.set_stream)(raw, device.stream().cu_stream().cast()) }, || {
            "use the stream".to_owned()
        })?;
        Ok(handle)
    }
}

impl Drop for CudnnHandle {
    fn drop(&mut self) {
        // SAFETY: the handle was made by cudnnCreate and is destroyed once.
        unsafe { (self.api.destroy)(self.raw) };
    }
}

/// A descriptor of cuDNN's, destroyed when dropped.
pub struct CudnnDescriptor {
    raw: RawPtr,
    kind: CudnnDescriptorKind,
    api: &'static CudnnApi,
}

impl CudnnDescriptor {
    /// Makes an empty descriptor.
    ///
    /// # Errors
    /// Fails if the library is missing or does not know the kind.
    pub fn new(kind: CudnnDescriptorKind) -> Result<Self, CudnnRefusal> {
        let api = cudnn_api()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the call gets a pointer to a local variable, which is valid during the call.
        api.check(unsafe { (api.create_descriptor)(kind as u32, &raw mut raw) }, || {
            format!("make a descriptor of {kind:?}")
        })?;
        Ok(Self { raw, kind, api })
    }

    /// Makes a descriptor with these attributes, finalized for use.
    pub fn finished_descriptor(
        kind: CudnnDescriptorKind,
        attributes: &[(CudnnAttribute, CudnnAttributeValue<'_>)],
    ) -> Result<CudnnDescriptor, CudnnRefusal> {
        let descriptor = Self::new(kind)?;
        for (attribute, value) in attributes {
            descriptor.set_attribute(*attribute, *value)?;
        }
        // SAFETY: the cuDNN descriptor is alive.
        descriptor.api.check(unsafe { (descriptor.api.finalize)(descriptor.raw) }, || {
            format!("take the {kind:?}")
        })?;
        Ok(descriptor)
    }

    fn set_attribute(
        &self,
        attribute: CudnnAttribute,
        value: CudnnAttributeValue<'_>,
    ) -> Result<(), CudnnRefusal> {
        let action = || format!("set {attribute:?} of {:?}", self.kind);
        let set = |kind: u32, count: usize, values: *const c_void| {
            // SAFETY: the descriptor is alive; `values` points at `count` values of that type,
            // which cuDNN copies.
            let status = unsafe {
                (self.api.set_attribute)(self.raw, attribute as u32, kind, count as i64, values)
            };
            self.api.check(status, action)
        };
        let one = |kind: u32, number: u32| set(kind, 1, (&raw const number).cast());
        match value {
            CudnnAttributeValue::Handle(handle) => set(0, 1, (&raw const handle.raw).cast()),
            CudnnAttributeValue::DataType(data_type) => one(1, data_type as u32),
            CudnnAttributeValue::Flag(flag) => set(2, 1, (&raw const flag).cast()),
            CudnnAttributeValue::Integers(integers) => {
                set(CUDNN_TYPE_INT64, integers.len(), integers.as_ptr().cast())
            }
            CudnnAttributeValue::Float(float) => set(4, 1, (&raw const float).cast()),
            CudnnAttributeValue::Pointers(pointers) => {
                set(6, pointers.len(), pointers.as_ptr().cast())
            }
            CudnnAttributeValue::Heuristic => one(8, CUDNN_HEURISTIC_MODE_A),
            CudnnAttributeValue::Mode(mode) => one(14, mode as u32),
            CudnnAttributeValue::Operator(operator) => one(18, operator as u32),
            CudnnAttributeValue::Descriptors(descriptors) => {
                let raw: Vec<RawPtr> =
                    descriptors.iter().map(|descriptor| descriptor.raw).collect();
                set(CUDNN_TYPE_DESCRIPTOR, raw.len(), raw.as_ptr().cast())
            }
        }
    }

    /// Reads an integer attribute that cuDNN computed.
    ///
    /// # Errors
    /// Fails if the descriptor has no such attribute.
    pub fn integer(&self, attribute: CudnnAttribute) -> Result<i64, CudnnRefusal> {
        let (mut count, mut value) = (0i64, 0i64);
        // SAFETY: the descriptor is alive, and there is room for the one value that is asked for.
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
        self.api.check(status, || format!("query {attribute:?}"))?;
        Ok(value)
    }

    /// Descriptors that cuDNN worked out, best first.
    ///
    /// # Errors
    /// Fails if it has none.
    pub fn read_descriptors(
        &self,
        attribute: CudnnAttribute,
        kind: CudnnDescriptorKind,
    ) -> Result<Vec<CudnnDescriptor>, CudnnRefusal> {
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
            self.api.check(status, || format!("query {attribute:?}"))
        };
        get(0, &mut count, std::ptr::null_mut())?;
        let descriptors = (0..count).map(|_| Self::new(kind)).collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<RawPtr> = descriptors.iter().map(|descriptor| descriptor.raw).collect();
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

/// Enqueues a plan on the handle's stream.
///
/// # Safety
/// The pack was made for the plan, and every address in it is alive until the work has finished.
pub unsafe fn execute_plan(
    handle: &CudnnHandle,
    plan: &CudnnDescriptor,
    pack: &CudnnDescriptor,
) -> Result<(), BackendError> {
    // SAFETY: handle, plan and pack are alive; the caller promises the validity of the addresses.
    let status = unsafe { (handle.api.execute)(handle.raw, plan.raw, pack.raw) };
    handle
        .api
        .check(status, || "run the plan".to_owned())
        .map_err(|refusal| BackendError::Launch(refusal.0))
}
