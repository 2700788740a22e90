//! Reads tensors from a safetensors file.
//!
//! kernelgate parses the format itself, because the crate `safetensors` would add four
//! dependencies; a file contains an eight-byte header length, a JSON header (dtype, shape and
//! offsets), and the elements. The module neither writes safetensors files nor reads files that are
//! larger than memory.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::workload::{Tensor, TensorData};
use kernelgate_cuda::regular_file;

/// Offsets, shape and dtype of one tensor in a safetensors file.
#[derive(Deserialize)]
pub(super) struct SafetensorsEntry {
    dtype: String,
    pub(super) shape: Vec<usize>,
    data_offsets: [usize; 2],
}

impl SafetensorsEntry {
    /// Number of bits per element; `None` if kernelgate does not know the dtype.
    fn bits_per_element(&self) -> Option<usize> {
        Some(match &*self.dtype {
            "F4" => 4,
            "F6_E2M3" | "F6_E3M2" => 6,
            "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => 8,
            "I16" | "U16" | "F16" | "BF16" => 16,
            "I32" | "U32" | "F32" => 32,
            "I64" | "U64" | "F64" | "C64" => 64,
            _ => return None,
        })
    }

    /// Number of bytes of the tensor's elements; `None` on overflow.
    fn byte_count_for_element_bits(&self, bits: usize) -> Option<usize> {
        let all = self.shape.iter().try_fold(bits, |all, &of| all.checked_mul(of))?;
        Some(all.div_ceil(8))
    }
}

/// Shortens a tensor name to 100 characters for an error message.
fn shorten_tensor_name(name: &str) -> String {
    name.chars().take(100).collect()
}

/// Checks that the tensors follow each other without gaps from the first to the last byte of the
/// data, and that each has the bytes of its shape.
fn check_tensors_fill_data_without_gaps(
    entries: &BTreeMap<String, SafetensorsEntry>,
    end: usize,
) -> Result<(), String> {
    let mut by_place: Vec<_> = entries.iter().collect();
    by_place.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut at = 0;
    for (name, entry) in by_place {
        let [from, to] = entry.data_offsets;
        if from != at || to < from {
            return Err(format!(
                "its tensor `{}` lies at {from} to {to}, where the one before ends at {at}",
                shorten_tensor_name(name)
            ));
        }
        if to > end {
            return Err(format!(
                "its elements are {end} bytes, and its tensor `{}` ends at {to}",
                shorten_tensor_name(name)
            ));
        }
        if let Some(bits) = entry.bits_per_element()
            && entry.byte_count_for_element_bits(bits) != Some(to - from)
        {
            return Err(format!(
                "its tensor `{}` has {} bytes, which is not the shape {:?} of {}",
                shorten_tensor_name(name),
                to - from,
                entry.shape,
                entry.dtype
            ));
        }
        at = to;
    }
    if at == end {
        return Ok(());
    }
    Err(format!("its elements are {end} bytes, and its tensors end at {at}"))
}

/// The JSON header of a safetensors file; a duplicate tensor name is an error.
struct SafetensorsHeaderByName(BTreeMap<String, Value>);

impl<'de> Deserialize<'de> for SafetensorsHeaderByName {
    fn deserialize<D: Deserializer<'de>>(header: D) -> Result<Self, D::Error> {
        struct RejectDuplicateNamesVisitor;
        impl<'de> Visitor<'de> for RejectDuplicateNamesVisitor {
            type Value = SafetensorsHeaderByName;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut fields: A,
            ) -> Result<SafetensorsHeaderByName, A::Error> {
                let mut header = BTreeMap::new();
                while let Some((name, value)) = fields.next_entry::<String, Value>()? {
                    if header.contains_key(&name) {
                        let twice = format!("it has `{}` twice", shorten_tensor_name(&name));
                        return Err(A::Error::custom(twice));
                    }
                    header.insert(name, value);
                }
                Ok(SafetensorsHeaderByName(header))
            }
        }
        header.deserialize_map(RejectDuplicateNamesVisitor)
    }
}

/// The parsed header and the bytes of a safetensors file.
pub struct SafeTensorsFile {
    pub(super) entries: BTreeMap<String, SafetensorsEntry>,
    file_bytes: Vec<u8>,
    /// Byte offset in the file at which the tensors' elements begin.
    elements_byte_offset: usize,
}

impl SafeTensorsFile {
    /// Reads and checks a safetensors file.
    ///
    /// # Errors
    /// A message without the file's name: the file cannot be read, or has another format.
    pub fn read_and_check(path: &Path) -> Result<SafeTensorsFile, String> {
        let bytes = regular_file::read_file_unless_device_or_pipe(path)
            .map_err(|cause| cause.to_string())?;
        Self::parse_and_check(bytes).map_err(|why| format!("no safetensors file ({why})"))
    }

    fn parse_and_check(bytes: Vec<u8>) -> Result<SafeTensorsFile, String> {
        let (length, rest) = bytes.split_first_chunk().ok_or("it is too short")?;
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let (header, elements) =
            rest.split_at_checked(length).ok_or("its header is longer than the file")?;
        let SafetensorsHeaderByName(mut header) =
            serde_json::from_slice(header).map_err(|cause| cause.to_string())?;
        header.remove("__metadata__");
        let entry = |(name, value)| Ok((name, serde_json::from_value(value)?));
        let entries: Result<_, serde_json::Error> = header.into_iter().map(entry).collect();
        let entries: BTreeMap<String, SafetensorsEntry> =
            entries.map_err(|cause| cause.to_string())?;
        check_tensors_fill_data_without_gaps(&entries, elements.len())?;
        let elements = bytes.len() - elements.len();
        Ok(Self { entries, file_bytes: bytes, elements_byte_offset: elements })
    }

    /// Names of the tensors in the file, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns the tensor with this name and shape.
    ///
    /// # Errors
    /// The error is a fragment of a message: the tensor is missing, or has another shape or an
    /// unsupported dtype.
    pub fn tensor_with_name_and_shape(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<Tensor, String> {
        let entry = self.entries.get(name).ok_or_else(|| format!("no tensor `{name}`"))?;
        if entry.shape != shape {
            return Err(format!("`{name}` has the shape {:?}, not {shape:?}", entry.shape));
        }
        self.decode_entry(entry).map_err(|why| format!("`{name}` {why}"))
    }

    /// Decodes the elements of a tensor; fails for dtypes other than F64, F32, F16, BF16 and I8.
    pub(super) fn decode_entry(&self, entry: &SafetensorsEntry) -> Result<Tensor, String> {
        fn decode_little_endian_elements<const N: usize, T>(
            bytes: &[u8],
            of: fn([u8; N]) -> T,
        ) -> Vec<T> {
            bytes.as_chunks::<N>().0.iter().map(|bytes| of(*bytes)).collect()
        }
        let [from, to] = entry.data_offsets;
        let elements = &self.file_bytes[self.elements_byte_offset..];
        let bytes = elements.get(from..to).ok_or("lies beyond the end of the file")?;
        let data = match &*entry.dtype {
            "F64" => TensorData::F64(decode_little_endian_elements(bytes, f64::from_le_bytes)),
            "F32" => TensorData::F32(decode_little_endian_elements(bytes, f32::from_le_bytes)),
            "F16" => TensorData::F16(decode_little_endian_elements(bytes, f16::from_le_bytes)),
            "BF16" => TensorData::Bf16(decode_little_endian_elements(bytes, bf16::from_le_bytes)),
            "I8" => TensorData::I8(decode_little_endian_elements(bytes, i8::from_le_bytes)),
            other => return Err(format!("is {other}, which no row computes")),
        };
        let elements = entry.shape.iter().try_fold(1, |all: usize, &of| all.checked_mul(of));
        if elements != Some(data.len()) {
            return Err(format!("has {} elements, and the shape {:?}", data.len(), entry.shape));
        }
        Ok(Tensor::new(entry.shape.clone(), data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_header_with_zero_elements(header: &str, elements: usize) -> Result<(), String> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + elements, 0);
        SafeTensorsFile::parse_and_check(bytes).map(drop)
    }

    #[test]
    fn tensors_must_fill_the_file_without_gaps() {
        let header_of = |tensors: &[(&str, &str, &str, [usize; 2])]| {
            let each = tensors.iter().map(|(name, dtype, shape, [from, to])| {
                format!(
                    r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#
                )
            });
            format!("{{{}}}", each.collect::<Vec<_>>().join(","))
        };
        let (x, y) = (("x", "F32", "[4]", [0, 16]), ("y", "I8", "[2,1]", [16, 18]));
        let empty = ("e", "F32", "[0,3]", [16, 16]);
        assert_eq!(parse_header_with_zero_elements(&header_of(&[y, empty, x]), 18), Ok(()));
        assert_eq!(parse_header_with_zero_elements("{}", 0), Ok(()));
        let padded = format!("{}   ", header_of(&[x, ("z", "F4", "[3]", [16, 18])]));
        assert_eq!(parse_header_with_zero_elements(&padded, 18), Ok(()));
        let other = ("z", "UNKNOWN", "[3]", [16, 18]);
        assert_eq!(parse_header_with_zero_elements(&header_of(&[x, other]), 18), Ok(()));
        for (tensors, elements, wanted) in [
            (
                &[("x", "F32", "[4]", [0, 17])][..],
                17,
                "its tensor `x` has 17 bytes, which is not the shape [4] of F32",
            ),
            (
                &[x, ("y", "I8", "[2]", [15, 17])],
                17,
                "its tensor `y` lies at 15 to 17, where the one before ends at 16",
            ),
            (
                &[x, ("y", "I8", "[2]", [17, 19])],
                19,
                "its tensor `y` lies at 17 to 19, where the one before ends at 16",
            ),
            (
                &[("x", "F32", "[4]", [1, 17])],
                17,
                "its tensor `x` lies at 1 to 17, where the one before ends at 0",
            ),
            (
                &[("x", "I8", "[1]", [0, 0])],
                0,
                "its tensor `x` has 0 bytes, which is not the shape [1] of I8",
            ),
            (
                &[("x", "I8", "[2]", [2, 0])],
                0,
                "its tensor `x` lies at 2 to 0, where the one before ends at 0",
            ),
            (&[x], 15, "its elements are 15 bytes, and its tensor `x` ends at 16"),
            (&[x], 17, "its elements are 17 bytes, and its tensors end at 16"),
            (&[x, x], 16, "it has `x` twice at line 1 column 109"),
            (
                &[("x", "F64", "[4611686018427387904,4]", [0, 8])],
                8,
                "its tensor `x` has 8 bytes, which is not the shape [4611686018427387904, 4] of F64",
            ),
        ] {
            let error = parse_header_with_zero_elements(&header_of(tensors), elements).unwrap_err();
            assert_eq!(error, wanted);
        }
        assert_eq!(
            parse_header_with_zero_elements("[]", 0).unwrap_err(),
            "invalid type: sequence, expected tensors by name at line 1 column 0"
        );
    }
}
