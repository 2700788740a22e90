//! Tensors in host memory, in which inputs, references and outputs are exchanged. No arithmetic
//! here.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

/// Element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// 8-byte float: references only.
    F64,
    /// 4-byte float.
    F32,
    /// 2-byte IEEE float.
    F16,
    /// 2-byte brain float.
    Bf16,
    /// 1-byte float of 4 exponent and 3 mantissa bits (e4m3): operands of GEMMs. No tensor has the
    /// dtype fp8: its bytes are held as [`Dtype::I8`].
    Fp8,
    /// Signed byte: spikes.
    I8,
}

impl Dtype {
    /// Bytes an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8 | Self::I8 => 1,
        }
    }

    /// Bits of the significand, the implicit one included; 0 of integers.
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

    /// Largest relative error of rounding to the dtype; 0 for integers.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            Self::I8 => 0.0,
            float => 0.5f64.powi(float.significand_bits() as i32),
        }
    }

    /// Returns the dtype's name in ids and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::I8 => "i8",
        }
    }

    /// The dtype of tensors with a name, such as "f32".
    pub fn parse(name: &str) -> Option<Dtype> {
        [Self::F64, Self::F32, Self::F16, Self::Bf16, Self::I8]
            .into_iter()
            .find(|dtype| dtype.name() == name)
    }
}

/// Elements of a tensor, of one dtype, in row-major order.
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

    /// Returns whether the tensor has no elements.
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

    /// A tensor whose elements are all the poison value: NaN, or -128 for integers, so that an
    /// element that was not written is seen: saturation gives 127.
    pub fn poisoned(shape: impl Into<Vec<usize>>, dtype: Dtype) -> Tensor {
        let mut tensor = Self::zeroed(shape, dtype);
        tensor.poison();
        tensor
    }

    /// A tensor of zeros, for a copy that is about to overwrite every element.
    pub fn zeroed(shape: impl Into<Vec<usize>>, dtype: Dtype) -> Tensor {
        let shape = shape.into();
        let len = shape.iter().product();
        let data = match dtype {
            Dtype::F64 => TensorData::F64(vec![0.0; len]),
            Dtype::F32 => TensorData::F32(vec![0.0; len]),
            // Pages of integer zeros are provided by the system at the first access: by the thread
            // that overwrites them.
            Dtype::F16 => TensorData::F16(vec![0_u16; len].reinterpret_into()),
            Dtype::Bf16 => TensorData::Bf16(vec![0_u16; len].reinterpret_into()),
            Dtype::Fp8 | Dtype::I8 => TensorData::I8(vec![0; len]),
        };
        Self { shape, data }
    }

    /// Overwrites every element of the tensor with the poison of [`Tensor::poisoned`].
    pub fn poison(&mut self) {
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

    /// The elements, to write.
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

    /// Whether there is no element.
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

    /// Size of the elements.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype().bytes()
    }

    /// Elements `from..from + len` as f64, exact for every dtype.
    pub fn to_f64(&self, from: usize, len: usize) -> Vec<f64> {
        let range = from..from + len;
        match &self.data {
            TensorData::F64(values) => values[range].to_vec(),
            TensorData::F32(values) => values[range].iter().map(|&x| f64::from(x)).collect(),
            TensorData::F16(values) => values[range].iter().map(|x| x.to_f64()).collect(),
            TensorData::Bf16(values) => values[range].iter().map(|x| x.to_f64()).collect(),
            TensorData::I8(values) => values[range].iter().map(|&x| f64::from(x)).collect(),
        }
    }

    /// Calls `f` with the elements `from..from + len` as f64, some at a time and in order, and
    /// where these begin, counted from `from`. Converts elements to f64 as [`Self::to_f64`] does,
    /// but in blocks, without an allocation for the whole tensor.
    pub fn for_each_f64_block(&self, from: usize, len: usize, f: &mut dyn FnMut(usize, &[f64])) {
        /// Elements converted at a time: few enough for the nearest cache.
        const CONVERTED_BLOCK: usize = 1024;
        let (mut block, mut halves) = ([0.0f64; CONVERTED_BLOCK], [0.0f32; CONVERTED_BLOCK]);
        for start in (0..len).step_by(CONVERTED_BLOCK) {
            let count = CONVERTED_BLOCK.min(len - start);
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

    /// Whether the elements `from..from + len` are numbers, not NaN or infinite.
    pub fn are_all_finite(&self, from: usize, len: usize) -> bool {
        // The loop has no early exit, so that it vectorises.
        fn all<T>(values: &[T], finite: impl Fn(&T) -> bool) -> bool {
            values.iter().fold(true, |all, value| all & finite(value))
        }
        let range = from..from + len;
        match &self.data {
            TensorData::F64(values) => all(&values[range], |x| x.is_finite()),
            TensorData::F32(values) => all(&values[range], |x| x.is_finite()),
            TensorData::F16(values) => all(&values[range], |x| x.is_finite()),
            TensorData::Bf16(values) => all(&values[range], |x| x.is_finite()),
            TensorData::I8(_) => true,
        }
    }

    /// The elements as they lie in memory, in the host's byte order.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.data {
            TensorData::F64(values) => bytemuck::cast_slice(values),
            TensorData::F32(values) => bytemuck::cast_slice(values),
            TensorData::F16(values) => bytemuck::cast_slice(values),
            TensorData::Bf16(values) => bytemuck::cast_slice(values),
            TensorData::I8(values) => bytemuck::cast_slice(values),
        }
    }

    /// The elements as they lie in memory, to write.
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

/// Tensors by name, in the order of the names. A clone shares the elements until one of the two is
/// written.
///
/// ```
/// use kernelgate_numerics::tensor::{Dtype, Tensors};
///
/// let inputs = Tensors::new().with("x", [2, 2], vec![1.0_f32, 2.0, 3.0, 4.0]);
/// assert_eq!(inputs.f32("x")[3], 4.0);
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

    /// The first tensor whose memory is shared with another owner.
    pub fn first_shared_tensor(&self) -> Option<&str> {
        let mut tensors = self.0.iter();
        tensors.find(|(_, tensor)| Arc::strong_count(tensor) > 1).map(|(name, _)| name.as_str())
    }

    /// Adds a tensor under a name, for chaining.
    pub fn with(
        mut self,
        name: &str,
        shape: impl Into<Vec<usize>>,
        data: impl Into<TensorData>,
    ) -> Tensors {
        self.insert(name, Tensor::new(shape, data.into()));
        self
    }

    /// Adds a poisoned output tensor under a name, for chaining.
    pub fn with_output(mut self, name: &str, shape: impl Into<Vec<usize>>, dtype: Dtype) -> Self {
        self.insert(name, Tensor::poisoned(shape, dtype));
        self
    }

    /// Adds a tensor.
    pub fn insert(&mut self, name: &str, tensor: Tensor) {
        self.0.insert(name.to_owned(), Arc::new(tensor));
    }

    /// Takes a tensor out, if there is one of that name.
    pub fn take(&mut self, name: &str) -> Option<Tensor> {
        self.0.remove(name).map(Arc::unwrap_or_clone)
    }

    /// The tensors with the given names; elements are shared, not copied.
    pub fn select_named(&self, names: &[&str]) -> Self {
        let named = self.0.iter().filter(|(name, _)| names.contains(&name.as_str()));
        Self(named.map(|(name, tensor)| (name.clone(), Arc::clone(tensor))).collect())
    }

    /// Returns these tensors with those of `others` in place of tensors with the same names; data
    /// is shared, not copied.
    pub fn replaced_by(&self, others: &Self) -> Self {
        Self(self.0.clone().into_iter().chain(others.0.clone()).collect())
    }

    /// The tensor with the given name, if it exists.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name).map(Arc::as_ref)
    }

    /// The tensor with the given name; panics if it does not exist.
    ///
    /// # Panics
    /// Panics if it does not exist: the caller and the workload disagree about their own tensors.
    pub fn tensor(&self, name: &str) -> &Tensor {
        self.get(name).unwrap_or_else(|| panic!("tensor `{name}` is part of the workload"))
    }

    /// The tensor with the given name for writing; panics if it does not exist. Panics as
    /// [`Tensors::tensor`].
    pub fn tensor_mut(&mut self, name: &str) -> &mut Tensor {
        let tensor = self.0.get_mut(name);
        Arc::make_mut(tensor.unwrap_or_else(|| panic!("tensor `{name}` is part of the workload")))
    }

    /// The f32 elements of the tensor with the given name.
    ///
    /// # Panics
    /// Panics if the tensor does not exist, or is not f32.
    pub fn f32(&self, name: &str) -> &[f32] {
        match self.tensor(name).tensor_data() {
            TensorData::F32(values) => values,
            _ => panic!("tensor `{name}` is f32"),
        }
    }

    /// The f32 elements of a tensor, to write. Panics as [`Tensors::f32`].
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

    /// Names and tensors in name order, to write.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut Tensor)> {
        self.0.iter_mut().map(|(name, tensor)| (name.as_str(), Arc::make_mut(tensor)))
    }

    /// Size of all elements.
    pub fn bytes(&self) -> usize {
        self.0.values().map(|tensor| tensor.bytes()).sum()
    }
}

/// Splits a row-major `[rows, row_elements]` slice into column blocks of `width`: for each block,
/// its piece of every row.
///
/// Divides a matrix into columns, so that tasks own disjoint columns. `row_elements` and `width`
/// are at least 1.
pub fn split_columns<T>(values: &mut [T], row_len: usize, width: usize) -> Vec<Vec<&mut [T]>> {
    let mut blocks: Vec<Vec<&mut [T]>> = (0..row_len.div_ceil(width)).map(|_| Vec::new()).collect();
    for row in values.chunks_mut(row_len) {
        for (block, piece) in blocks.iter_mut().zip(row.chunks_mut(width)) {
            block.push(piece);
        }
    }
    blocks
}
