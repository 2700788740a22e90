//! Tensors out of a safetensors file.
//!
//! The format is read here, because its crate would bring four others to every outside package: the
//! length of a header in eight bytes, the header as JSON with dtype, shape and offsets of each
//! tensor, then the elements. Deliberately absent: writing, and files larger than memory.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use serde::Deserialize;
use serde_json::Value;

use crate::workload::{Data, Tensor};
use kernelgate_cuda::regular_file;

/// A tensor's place in a file.
#[derive(Deserialize)]
pub(super) struct Entry {
    dtype: String,
    pub(super) shape: Vec<usize>,
    data_offsets: [usize; 2],
}

/// A file that was read.
pub struct SafeTensors {
    pub(super) entries: BTreeMap<String, Entry>,
    bytes: Vec<u8>,
    /// Where the elements begin.
    elements: usize,
}

impl SafeTensors {
    /// Reads a file.
    ///
    /// # Errors
    /// A fragment, without the file's name: it cannot be read, or is no such file.
    pub fn read(path: &Path) -> Result<Self, String> {
        let bytes = regular_file::read(path).map_err(|cause| cause.to_string())?;
        Self::parse(bytes).map_err(|why| format!("no safetensors file ({why})"))
    }

    fn parse(bytes: Vec<u8>) -> Result<Self, String> {
        let (length, rest) = bytes.split_first_chunk().ok_or("it is too short")?;
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let (header, elements) =
            rest.split_at_checked(length).ok_or("its header is longer than the file")?;
        let mut header: BTreeMap<String, Value> =
            serde_json::from_slice(header).map_err(|cause| cause.to_string())?;
        header.remove("__metadata__");
        let entry = |(name, value)| Ok((name, serde_json::from_value(value)?));
        let entries: Result<_, serde_json::Error> = header.into_iter().map(entry).collect();
        let entries: BTreeMap<String, Entry> = entries.map_err(|cause| cause.to_string())?;
        let end = entries.values().map(|entry| entry.data_offsets[1]).max().unwrap_or_default();
        if end != elements.len() {
            return Err(format!("its elements are {} bytes, and not {end}", elements.len()));
        }
        let elements = bytes.len() - elements.len();
        Ok(Self { entries, bytes, elements })
    }

    /// Names of its tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The tensor of a name, which has this shape.
    ///
    /// # Errors
    /// A fragment that names it: it is missing, or of another shape or a dtype that no row computes.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, String> {
        let entry = self.entries.get(name).ok_or_else(|| format!("no tensor `{name}`"))?;
        if entry.shape != shape {
            return Err(format!("`{name}` has the shape {:?}, not {shape:?}", entry.shape));
        }
        self.of(entry).map_err(|why| format!("`{name}` {why}"))
    }

    /// A tensor, where its dtype is known here.
    pub(super) fn of(&self, entry: &Entry) -> Result<Tensor, String> {
        fn all<const N: usize, T>(bytes: &[u8], of: fn([u8; N]) -> T) -> Vec<T> {
            bytes.as_chunks::<N>().0.iter().map(|bytes| of(*bytes)).collect()
        }
        let [from, to] = entry.data_offsets;
        let elements = &self.bytes[self.elements..];
        let bytes = elements.get(from..to).ok_or("lies beyond the end of the file")?;
        let data = match &*entry.dtype {
            "F64" => Data::F64(all(bytes, f64::from_le_bytes)),
            "F32" => Data::F32(all(bytes, f32::from_le_bytes)),
            "F16" => Data::F16(all(bytes, f16::from_le_bytes)),
            "BF16" => Data::Bf16(all(bytes, bf16::from_le_bytes)),
            "I8" => Data::I8(all(bytes, i8::from_le_bytes)),
            other => return Err(format!("is {other}, which no row computes")),
        };
        let elements = entry.shape.iter().try_fold(1, |all: usize, &of| all.checked_mul(of));
        if elements != Some(data.len()) {
            return Err(format!("has {} elements, and the shape {:?}", data.len(), entry.shape));
        }
        Ok(Tensor::new(entry.shape.clone(), data))
    }
}
