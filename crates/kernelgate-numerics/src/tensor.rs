//! Host tensors, in which benchmark cases exchange inputs, reference results and outputs. No
//! arithmetic here.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

/// Element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// 8-byte float, used only for references.
    F64,
    /// 4-byte float.
    F32,
    /// 2-byte IEEE float.
    F16,
    /// 2-byte brain float.
    Bf16,
    /// 1-byte float of 4 exponent and 3 mantissa bits (e4m3), which only operands of GEMMs have. A
    /// `Tensor` of fp8 values holds their bytes as [`Dtype::I8`].
    Fp8,
    /// Signed byte: spikes.
    I8,
}

impl Dtype {
    /// Bytes an element.
    pub const fn bytes_per_element(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8 | Self::I8 => 1,
        }
    }

    /// Bits of the significand of the dtype, the implicit bit included; 0 for integers.
    pub const fn significand_bits(self) -> u32 {
        match self {
            Self::F64 => 53,
            Self::F32 => 24,
            Self::F16 => 11,
            Self::Bf16 => 8,
            Self::Fp8 => 4,
            Self::I8 => 0,
        }
    }

    /// Largest relative error of rounding a number to the dtype; 0 for integers.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            Self::I8 => 0.0,
            float => 0.5f64.powi(float.significand_bits() as i32),
        }
    }

    /// Name of the dtype in case ids and record files.
    pub const fn dtype_name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::I8 => "i8",
        }
    }

    /// Returns the dtype of tensors with a name, such as "f32"; `None` for other texts.
    pub fn parse_dtype_name(name: &str) -> Option<Dtype> {
        [Self::F64, Self::F32, Self::F16, Self::Bf16, Self::I8]
            .into_iter()
            .find(|dtype| dtype.dtype_name() == name)
    }
}

/// Elements of a host tensor, of one dtype, in row-major order.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum TensorData {
    F64(Vec<f64>),
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    I8(Vec<i8>),
}

impl TensorData {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F64(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::I8(values) => values.len(),
        }
    }

    /// Returns whether the tensor data has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A dense row-major tensor in host memory, with its shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    data: TensorData,
}

impl Tensor {
    /// Makes a tensor from its shape and its elements.
    ///
    /// # Panics
    /// Panics if the shape does not hold exactly the elements: a fault of the calling code, not of
    /// input.
    pub fn new(shape: impl Into<Vec<usize>>, data: TensorData) -> Self {
        let tensor = Self { shape: shape.into(), data };
        assert_eq!(
            tensor.shape.iter().product::<usize>(),
            tensor.len(),
            "shape {:?} against elements",
            tensor.shape
        );
        tensor
    }

    /// Creates a tensor whose elements are all the poison value (NaN, or -128 for integers), so
    /// that an element that an implementation did not write is detected. Saturation to int8 gives
    /// -127 or 127, never -128.
    pub fn filled_with_poison(shape: impl Into<Vec<usize>>, dtype: Dtype) -> Tensor {
        let mut tensor = Self::filled_with_zeros(shape, dtype);
        tensor.overwrite_with_poison();
        tensor
    }

    /// Creates a tensor of zeros, for a copy that is about to overwrite every element.
    pub fn filled_with_zeros(shape: impl Into<Vec<usize>>, dtype: Dtype) -> Tensor {
        let shape = shape.into();
        let len = shape.iter().product();
        let data = match dtype {
            Dtype::F64 => TensorData::F64(vec![0.0; len]),
            Dtype::F32 => TensorData::F32(vec![0.0; len]),
            // The system provides pages of integer zeros at the first access, which is by the
            // thread that overwrites them.
            Dtype::F16 => TensorData::F16(vec![0_u16; len].reinterpret_into()),
            Dtype::Bf16 => TensorData::Bf16(vec![0_u16; len].reinterpret_into()),
            Dtype::Fp8 | Dtype::I8 => TensorData::I8(vec![0; len]),
        };
        Self { shape, data }
    }

    /// Overwrites every element of the tensor with the poison value of
    /// [`Tensor::filled_with_poison`].
    pub fn overwrite_with_poison(&mut self) {
        match &mut self.data {
            TensorData::F64(values) => values.fill(f64::NAN),
            TensorData::F32(values) => values.fill(f32::NAN),
            TensorData::F16(values) => values.fill(f16::NAN),
            TensorData::Bf16(values) => values.fill(bf16::NAN),
            TensorData::I8(values) => values.fill(i8::MIN),
        }
    }

    /// Extent of each axis of the tensor, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements.
    pub fn tensor_data(&self) -> &TensorData {
        &self.data
    }

    /// Returns the tensor's elements for writing.
    pub fn tensor_data_mut(&mut self) -> &mut TensorData {
        &mut self.data
    }

    /// Returns the elements of the tensor without its shape.
    pub fn into_tensor_data(self) -> TensorData {
        self.data
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Returns whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        match self.data {
            TensorData::F64(_) => Dtype::F64,
            TensorData::F32(_) => Dtype::F32,
            TensorData::F16(_) => Dtype::F16,
            TensorData::Bf16(_) => Dtype::Bf16,
            TensorData::I8(_) => Dtype::I8,
        }
    }

    /// Returns the size of the tensor's elements in bytes.
    pub fn size_in_bytes(&self) -> usize {
        self.len() * self.dtype().bytes_per_element()
    }

    /// Returns the elements `from..from + len` converted to f64, which is exact for every dtype.
    pub fn elements_to_f64(&self, from: usize, len: usize) -> Vec<f64> {
        let range = from..from + len;
        match &self.data {
            TensorData::F64(values) => values[range].to_vec(),
            TensorData::F32(values) => values[range].iter().map(|&x| f64::from(x)).collect(),
            TensorData::F16(values) => values[range].iter().map(|x| x.to_f64()).collect(),
            TensorData::Bf16(values) => values[range].iter().map(|x| x.to_f64()).collect(),
            TensorData::I8(values) => values[range].iter().map(|&x| f64::from(x)).collect(),
        }
    }

    /// Calls `f` for consecutive blocks of the elements `from..from + len`: with the block's offset
    /// from `from`, and its elements as f64. The conversion to f64 is exact, as in
    /// [`Self::elements_to_f64`], and allocates nothing for the whole tensor.
    pub fn for_each_block_as_f64(&self, from: usize, len: usize, f: &mut dyn FnMut(usize, &[f64])) {
        /// Number of elements that are converted to f64 at a time: few enough for the L1 cache.
        const ELEMENTS_PER_F64_BLOCK: usize = 1024;
        let (mut block, mut halves) =
            ([0.0f64; ELEMENTS_PER_F64_BLOCK], [0.0f32; ELEMENTS_PER_F64_BLOCK]);
        for start in (0..len).step_by(ELEMENTS_PER_F64_BLOCK) {
            let count = ELEMENTS_PER_F64_BLOCK.min(len - start);
            let range = from + start..from + start + count;
            let (block, halves) = (&mut block[..count], &mut halves[..count]);
            let widen = |block: &mut [f64], values: &[f32]| {
                block.iter_mut().zip(values).for_each(|(to, &x)| *to = f64::from(x));
            };
            match &self.data {
                TensorData::F64(values) => block.copy_from_slice(&values[range]),
                TensorData::F32(values) => widen(block, &values[range]),
                TensorData::F16(values) => {
                    values[range].convert_to_f32_slice(halves);
                    widen(block, halves);
                }
                TensorData::Bf16(values) => {
                    values[range].convert_to_f32_slice(halves);
                    widen(block, halves);
                }
                TensorData::I8(values) => {
                    block.iter_mut().zip(&values[range]).for_each(|(to, &x)| *to = f64::from(x));
                }
            }
            f(start, block);
        }
    }

    /// Returns whether the elements `from..from + len` contain neither NaN nor infinity.
    pub fn are_elements_finite(&self, from: usize, len: usize) -> bool {
        // The loop has no early exit, so that it vectorises.
        fn all_without_early_exit<T>(values: &[T], finite: impl Fn(&T) -> bool) -> bool {
            values.iter().fold(true, |all, value| all & finite(value))
        }
        let range = from..from + len;
        match &self.data {
            TensorData::F64(values) => all_without_early_exit(&values[range], |x| x.is_finite()),
            TensorData::F32(values) => all_without_early_exit(&values[range], |x| x.is_finite()),
            TensorData::F16(values) => all_without_early_exit(&values[range], |x| x.is_finite()),
            TensorData::Bf16(values) => all_without_early_exit(&values[range], |x| x.is_finite()),
            TensorData::I8(_) => true,
        }
    }

    /// Returns the bytes of the elements as they lie in memory, in the host's byte order.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.data {
            TensorData::F64(values) => bytemuck::cast_slice(values),
            TensorData::F32(values) => bytemuck::cast_slice(values),
            TensorData::F16(values) => bytemuck::cast_slice(values),
            TensorData::Bf16(values) => bytemuck::cast_slice(values),
            TensorData::I8(values) => bytemuck::cast_slice(values),
        }
    }

    /// Returns the bytes of the tensor's elements for writing, in the host's byte order.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.data {
            TensorData::F64(values) => bytemuck::cast_slice_mut(values),
            TensorData::F32(values) => bytemuck::cast_slice_mut(values),
            TensorData::F16(values) => bytemuck::cast_slice_mut(values),
            TensorData::Bf16(values) => bytemuck::cast_slice_mut(values),
            TensorData::I8(values) => bytemuck::cast_slice_mut(values),
        }
    }
}

impl From<Vec<f32>> for TensorData {
    fn from(values: Vec<f32>) -> Self {
        Self::F32(values)
    }
}

impl From<Vec<f64>> for TensorData {
    fn from(values: Vec<f64>) -> Self {
        Self::F64(values)
    }
}

impl From<Vec<i8>> for TensorData {
    fn from(values: Vec<i8>) -> Self {
        Self::I8(values)
    }
}

/// Host tensors of one benchmark case by name, in order of the names. A clone of `Tensors` shares
/// the elements with its original until a tensor of either is written (copy on write).
///
/// ```
/// use kernelgate_numerics::tensor::{Dtype, Tensors};
///
/// let inputs = Tensors::new().with_tensor("x", [2, 2], vec![1.0_f32, 2.0, 3.0, 4.0]);
/// assert_eq!(inputs.f32_elements("x")[3], 4.0);
/// assert_eq!(inputs.tensor("x").shape(), [2, 2]);
/// let outputs = Tensors::new().with_output("y", [4], Dtype::F32);
/// assert_eq!(outputs.tensor("y").dtype(), Dtype::F32);
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tensors(BTreeMap<String, Arc<Tensor>>);

impl Tensors {
    /// No tensors yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the name of the first tensor whose memory is shared with another `Tensors`.
    pub fn first_tensor_with_shared_memory(&self) -> Option<&str> {
        let mut tensors = self.0.iter();
        tensors.find(|(_, tensor)| Arc::strong_count(tensor) > 1).map(|(name, _)| name.as_str())
    }

    /// Adds a tensor with a name, and returns all tensors, for chaining.
    pub fn with_tensor(
        mut self,
        name: &str,
        shape: impl Into<Vec<usize>>,
        data: impl Into<TensorData>,
    ) -> Tensors {
        self.insert(name, Tensor::new(shape, data.into()));
        self
    }

    /// Adds an output tensor with a name, filled with poison, and returns all tensors, for
    /// chaining.
    pub fn with_output(mut self, name: &str, shape: impl Into<Vec<usize>>, dtype: Dtype) -> Self {
        self.insert(name, Tensor::filled_with_poison(shape, dtype));
        self
    }

    /// Adds a tensor.
    pub fn insert(&mut self, name: &str, tensor: Tensor) {
        self.0.insert(name.to_owned(), Arc::new(tensor));
    }

    /// Removes the tensor with a name and returns it, if it exists.
    pub fn take(&mut self, name: &str) -> Option<Tensor> {
        self.0.remove(name).map(Arc::unwrap_or_clone)
    }

    /// Returns the tensors with the given names; their elements are shared, not copied.
    pub fn select_tensors_by_name(&self, names: &[&str]) -> Self {
        let named = self.0.iter().filter(|(name, _)| names.contains(&name.as_str()));
        Self(named.map(|(name, tensor)| (name.clone(), Arc::clone(tensor))).collect())
    }

    /// Returns these tensors, where tensors of `others` replace those with the same names; elements
    /// are shared, not copied.
    pub fn with_tensors_replaced_by(&self, others: &Self) -> Self {
        Self(self.0.clone().into_iter().chain(others.0.clone()).collect())
    }

    /// Returns the tensor with the given name, if it exists.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name).map(Arc::as_ref)
    }

    /// Returns the tensor with the given name; panics if it does not exist.
    ///
    /// # Panics
    /// Panics if the tensor does not exist: the caller and the workload disagree about their own
    /// tensors.
    pub fn tensor(&self, name: &str) -> &Tensor {
        self.get(name).unwrap_or_else(|| panic!("tensor `{name}` is part of the workload"))
    }

    /// Returns the tensor with the given name for writing; panics if it does not exist. Panics as
    /// [`Tensors::tensor`].
    pub fn tensor_mut(&mut self, name: &str) -> &mut Tensor {
        let tensor = self.0.get_mut(name);
        Arc::make_mut(tensor.unwrap_or_else(|| panic!("tensor `{name}` is part of the workload")))
    }

    /// The f32 elements of the tensor with the given name.
    ///
    /// # Panics
    /// Panics if the tensor does not exist, or is not f32.
    pub fn f32_elements(&self, name: &str) -> &[f32] {
        match self.tensor(name).tensor_data() {
            TensorData::F32(values) => values,
            _ => panic!("tensor `{name}` is f32"),
        }
    }

    /// Returns the f32 elements of the tensor with the given name for writing. Panics as
    /// [`Tensors::f32_elements`].
    pub fn f32_mut(&mut self, name: &str) -> &mut [f32] {
        match self.tensor_mut(name).tensor_data_mut() {
            TensorData::F32(values) => values,
            _ => panic!("tensor `{name}` is f32"),
        }
    }

    /// Iterates over names and tensors, in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|(name, tensor)| (name.as_str(), tensor.as_ref()))
    }

    /// Iterates over names and tensors for writing, in order of the names.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut Tensor)> {
        self.0.iter_mut().map(|(name, tensor)| (name.as_str(), Arc::make_mut(tensor)))
    }

    /// Returns the size of all tensors' elements in bytes.
    pub fn size_in_bytes(&self) -> usize {
        self.0.values().map(|tensor| tensor.size_in_bytes()).sum()
    }
}

/// Splits a row-major `[rows, row_elements]` slice into column blocks of `width`; returns for each
/// block its piece of every row.
///
/// Tasks that each take one column block write disjoint elements. `row_elements` and `width` are at
/// least 1.
pub fn split_rows_into_column_blocks<T>(
    values: &mut [T],
    row_len: usize,
    width: usize,
) -> Vec<Vec<&mut [T]>> {
    let mut blocks: Vec<Vec<&mut [T]>> = (0..row_len.div_ceil(width)).map(|_| Vec::new()).collect();
    for row in values.chunks_mut(row_len) {
        for (block, piece) in blocks.iter_mut().zip(row.chunks_mut(width)) {
            block.push(piece);
        }
    }
    blocks
}
