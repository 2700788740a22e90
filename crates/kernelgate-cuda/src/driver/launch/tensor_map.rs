//! Tensor maps: how a copy engine finds boxes of a tensor (`common/tensor_copy.cuh`).
//!
//! This module supports only the swizzle that `wgmma` reads, and tensors of one rank.

use std::ffi::c_void;

use cudarc::driver::sys;

use crate::BackendError;
use crate::driver::driver_error::failed;

/// Element type of a tensor whose boxes are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorMapElement {
    /// 16-bit floats with the exponent range of f32 (bfloat16).
    Bf16,
    /// IEEE half.
    F16,
    /// Anything of 8 bits.
    Byte,
}

impl TensorMapElement {
    const fn element_bytes(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::Byte => 1,
        }
    }
}

/// Largest number of bytes of a box's row, which is swizzled.
const MAX_BOX_ROW_BYTES: u64 = 128;
/// Largest number of rows of a tensor-copy box.
const MAX_BOX_ROWS: u32 = 256;

/// Alignment of addresses and strides that a copy engine reads, bytes.
pub const COPY_ALIGNMENT: u64 = 16;
/// Exclusive upper limit of strides in a tensor map, bytes.
const STRIDE_LIMIT: u64 = 1 << 40;

/// A tensor `[batches][matrices][rows][columns]` with contiguous columns, of which boxes of 128
/// bytes of columns are copied. In shared memory a row of a box has its 16-byte chunks XOR-swizzled
/// by the row's last three bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorBoxes {
    /// Element type of the tensor, which sets the bytes of a box's row.
    pub element: TensorMapElement,
    /// Batches, matrices, rows and columns; columns are a multiple of a box's.
    pub extents: [u64; 4],
    /// Elements from a batch, a matrix and a row to the next one, in any order of size.
    pub strides: [u64; 3],
    /// Rows of a box, at most 256.
    pub box_rows: u32,
}

/// Arguments of the driver's tensor-map encoder: innermost dimension first, strides in bytes
/// without that of the columns.
#[derive(Debug, PartialEq, Eq)]
struct TensorMapEncoding {
    extents: [u64; 4],
    strides: [u64; 3],
    box_extents: [u32; 4],
}

impl TensorBoxes {
    /// Encodes the map of a tensor at an address: 128 bytes, a parameter of a kernel.
    ///
    /// # Errors
    /// Fails if the tensor is invalid, or the driver refuses.
    pub fn encode_map(&self, address: u64) -> Result<[u8; 128], BackendError> {
        let TensorMapEncoding { extents, strides, box_extents } =
            self.tensor_map_encoding(address).map_err(|problem| {
                BackendError::Launch(format!("failed to map {:?}: {problem}", self.extents))
            })?;
        let element = match self.element {
            TensorMapElement::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            TensorMapElement::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            TensorMapElement::Byte => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        };
        let steps = [1; 4];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have as many entries as the rank requires and outlive the call, which
        // only writes the map; the call does not access the address.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                element,
                extents.len() as u32,
                address as *mut c_void,
                extents.as_ptr(),
                strides.as_ptr(),
                box_extents.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(|error| failed(&format!("map {:?}", self.extents), &error))?;
        Ok(bytemuck::cast(map.opaque))
    }

    const fn columns_per_box(&self) -> u64 {
        MAX_BOX_ROW_BYTES / self.element.element_bytes()
    }

    fn tensor_map_encoding(&self, address: u64) -> Result<TensorMapEncoding, String> {
        let [batches, matrices, rows, columns] = self.extents;
        let of_box = self.columns_per_box();
        if columns == 0 || !columns.is_multiple_of(of_box) {
            return Err(format!("{columns} columns are no multiple of {of_box}"));
        }
        if self.box_rows == 0 || self.box_rows > MAX_BOX_ROWS {
            return Err(format!("a box has 1 to {MAX_BOX_ROWS} rows, not {}", self.box_rows));
        }
        if !address.is_multiple_of(COPY_ALIGNMENT) {
            return Err(format!("address {address:#x} is no multiple of {COPY_ALIGNMENT}"));
        }
        let [batch, matrix, row] = self.strides.map(|stride| stride * self.element.element_bytes());
        let mut strides = [(rows, row), (matrices, matrix), (batches, batch)];
        for (extent, stride) in &mut strides {
            if *extent == 1 {
                // Copies do not use the stride of an extent of one, but the encoder checks it.
                *stride = columns * self.element.element_bytes();
            }
            if !stride.is_multiple_of(COPY_ALIGNMENT) || *stride >= STRIDE_LIMIT {
                return Err(format!(
                    "a stride of {stride} bytes is no multiple of {COPY_ALIGNMENT} below 2^40"
                ));
            }
        }
        Ok(TensorMapEncoding {
            extents: [columns, rows, matrices, batches],
            strides: strides.map(|(_, stride)| stride),
            box_extents: [of_box as u32, self.box_rows, 1, 1],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;
    use crate::{Arguments, Launch, PreparedLaunch, Source};

    /// Tensor boxes of one batch with two matrices whose rows alternate:
    /// `[rows][matrices][columns]`.
    const TEST_TENSOR_BOXES: TensorBoxes = TensorBoxes {
        element: TensorMapElement::Bf16,
        extents: [1, 2, 5, 64],
        strides: [640, 64, 128],
        box_rows: 8,
    };

    #[test]
    fn tensor_map_strides_are_in_bytes_innermost_first() {
        let batches = TensorBoxes { extents: [3, 2, 5, 64], ..TEST_TENSOR_BOXES };
        assert_eq!(
            batches.tensor_map_encoding(0x1000),
            Ok(TensorMapEncoding {
                extents: [64, 5, 2, 3],
                strides: [256, 128, 1280],
                box_extents: [64, 8, 1, 1]
            })
        );
        // The batch is the only one, so its stride to a next batch is unused.
        let only = TensorBoxes { strides: [7, 64, 128], ..TEST_TENSOR_BOXES };
        assert_eq!(only.tensor_map_encoding(0x1000).unwrap().strides, [256, 128, 128]);
    }

    #[test]
    fn tensor_addresses_and_strides_must_be_multiples_of_sixteen_bytes() {
        let refused = |boxes: TensorBoxes, address| boxes.tensor_map_encoding(address).unwrap_err();
        assert_eq!(refused(TEST_TENSOR_BOXES, 0x1008), "address 0x1008 is no multiple of 16");
        assert_eq!(
            refused(TensorBoxes { strides: [640, 64, 130], ..TEST_TENSOR_BOXES }, 0),
            "a stride of 260 bytes is no multiple of 16 below 2^40"
        );
        let far = TensorBoxes { strides: [640, 1 << 40, 128], ..TEST_TENSOR_BOXES };
        assert!(refused(far, 0).ends_with("below 2^40"));
    }

    #[test]
    fn tensor_boxes_that_no_copy_supports_are_refused() {
        let refused = |boxes: TensorBoxes| boxes.tensor_map_encoding(0).unwrap_err();
        assert_eq!(
            refused(TensorBoxes { extents: [1, 2, 5, 65], ..TEST_TENSOR_BOXES }),
            "65 columns are no multiple of 64"
        );
        assert_eq!(
            refused(TensorBoxes { element: TensorMapElement::Byte, ..TEST_TENSOR_BOXES }),
            "64 columns are no multiple of 128"
        );
        assert_eq!(
            refused(TensorBoxes { box_rows: 257, ..TEST_TENSOR_BOXES }),
            "a box has 1 to 256 rows, not 257"
        );
    }

    const TENSOR_MAP_KERNEL: &str = r#"
#include "common/bulk.cuh"
#include "common/memory.cuh"
#include "common/tensor_copy.cuh"
extern "C" __global__ void unswizzled(const __grid_constant__ TensorMap map, u16* out) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ u64 barrier;
  const u32 full = shared_address(&barrier), base = shared_address(shared);
  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    barrier_init_fence();
    barrier_expect(full, 8 * 128);
    copy_box(base, map, {0, 0, 1, 0}, full);
  }
  __syncthreads();
  barrier_wait(full, 0);
  for (u32 i = threadIdx.x; i < 8 * 64; i += blockDim.x)
    out[i] = *reinterpret_cast<u16*>(shared + swizzled<128>(i / 64, i % 64 / 8) + i % 8 * 2);
}
"#;

    #[test]
    fn a_copied_box_is_swizzled_with_zeros_outside_the_tensor() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        if !device.supports_clusters().unwrap() {
            eprintln!("skipped: needs sm_90 or later");
            return;
        }
        let values: Vec<u8> = (1..=2 * 5 * 64u16).flat_map(u16::to_ne_bytes).collect();
        let tensor = device.upload(&values).unwrap();
        let out = device.allocate(8 * 128).unwrap();
        let kernel = device
            .kernel(&Source::new("tensor_map", TENSOR_MAP_KERNEL).build(&[]), "unswizzled")
            .unwrap();
        let parameters = Arguments::new()
            .bytes(&TEST_TENSOR_BOXES.encode_map(tensor.address()).unwrap())
            .address(out.address());
        let dims = Launch { shared_bytes: 1024, ..Launch::new([1, 1, 1], [128, 1, 1]) };
        PreparedLaunch::new(&device, kernel, dims, parameters).unwrap().launch().unwrap();
        let mut copied = vec![0; 8 * 128];
        out.download(&mut copied).unwrap();
        // The test's second matrix has five rows in a box of eight: every second row in memory.
        for (row, bytes) in copied[..5 * 128].chunks(128).enumerate() {
            assert_eq!(bytes, &values[(2 * row + 1) * 128..][..128], "row {row}");
        }
        assert!(copied[5 * 128..].iter().all(|&byte| byte == 0));
    }
}
