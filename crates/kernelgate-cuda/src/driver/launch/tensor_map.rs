//! Encodes TMA tensor maps, with which kernels copy boxes of a tensor (`common/tensor_copy.cuh`).
//!
//! This module supports only the 128-byte swizzle that `wgmma` reads, and only tensors of four
//! dimensions.

use std::ffi::c_void;

use cudarc::driver::sys;

use crate::BackendError;
use crate::driver::driver_error::error_for_failed_action;

/// Element type of a tensor of which TMA copies boxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorMapElement {
    /// 16-bit floats with the exponent range of f32 (bfloat16).
    Bf16,
    /// IEEE half.
    F16,
    /// Any element type of 8 bits.
    AnyEightBitType,
}

impl TensorMapElement {
    const fn bytes_of_element(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::AnyEightBitType => 1,
        }
    }
}

/// Largest number of bytes in a row of a TMA box with the 128-byte swizzle.
const MAX_TMA_BOX_ROW_BYTES: u64 = 128;
/// Largest number of rows of a TMA box.
const MAX_TMA_BOX_ROWS: u32 = 256;

/// Alignment in bytes of the addresses and strides that TMA accepts.
pub const TMA_ALIGNMENT_BYTES: u64 = 16;
/// Exclusive upper limit of strides in a tensor map, in bytes.
const TENSOR_MAP_STRIDE_LIMIT_BYTES: u64 = 1 << 40;

/// A tensor `[batches][matrices][rows][columns]` with contiguous columns, of which TMA copies boxes
/// with rows of 128 bytes. In shared memory, each row of a box has its 16-byte chunks XOR-swizzled
/// by row % 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorWithTmaBoxes {
    /// Element type of the tensor, which decides how many columns are in a 128-byte row of a box.
    pub element: TensorMapElement,
    /// Number of batches, matrices, rows and columns; the columns are a multiple of the columns of
    /// a box.
    pub extents: [u64; 4],
    /// Distance in elements from a batch, a matrix and a row to the next one; the distances may
    /// have any order of size.
    pub strides: [u64; 3],
    /// Number of rows of a box, 1 to 256.
    pub rows_per_box: u32,
}

/// Arguments of the driver's tensor-map encoder: dimensions from the innermost on, and strides in
/// bytes without that of the innermost.
#[derive(Debug, PartialEq, Eq)]
struct TensorMapEncoderArguments {
    extents: [u64; 4],
    strides: [u64; 3],
    box_extents: [u32; 4],
}

impl TensorWithTmaBoxes {
    /// Encodes the TMA map of the tensor at this device address: 128 bytes, which a kernel takes as
    /// a parameter.
    ///
    /// # Errors
    /// Fails if TMA does not support the tensor's extents, strides or address, or if the driver
    /// refuses.
    pub fn encode_tensor_map_at(&self, address: u64) -> Result<[u8; 128], BackendError> {
        let TensorMapEncoderArguments { extents, strides, box_extents } =
            self.tensor_map_encoder_arguments(address).map_err(|problem| {
                BackendError::ComputationFailed(format!(
                    "failed to map {:?}: {problem}",
                    self.extents
                ))
            })?;
        let element = match self.element {
            TensorMapElement::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            TensorMapElement::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            TensorMapElement::AnyEightBitType => {
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8
            }
        };
        let steps = [1; 4];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have as many entries as the tensor has dimensions and outlive the
        // call; the call writes only the map and does not access the address.
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
        .map_err(|error| error_for_failed_action(&format!("map {:?}", self.extents), &error))?;
        Ok(bytemuck::cast(map.opaque))
    }

    const fn columns_per_tma_box(&self) -> u64 {
        MAX_TMA_BOX_ROW_BYTES / self.element.bytes_of_element()
    }

    fn tensor_map_encoder_arguments(
        &self,
        address: u64,
    ) -> Result<TensorMapEncoderArguments, String> {
        let [batches, matrices, rows, columns] = self.extents;
        let of_box = self.columns_per_tma_box();
        if columns == 0 || !columns.is_multiple_of(of_box) {
            return Err(format!("{columns} columns are no multiple of {of_box}"));
        }
        if self.rows_per_box == 0 || self.rows_per_box > MAX_TMA_BOX_ROWS {
            return Err(format!(
                "a box has 1 to {MAX_TMA_BOX_ROWS} rows, not {}",
                self.rows_per_box
            ));
        }
        if !address.is_multiple_of(TMA_ALIGNMENT_BYTES) {
            return Err(format!("address {address:#x} is no multiple of {TMA_ALIGNMENT_BYTES}"));
        }
        let [batch, matrix, row] =
            self.strides.map(|stride| stride * self.element.bytes_of_element());
        let mut strides = [(rows, row), (matrices, matrix), (batches, batch)];
        for (extent, stride) in &mut strides {
            if *extent == 1 {
                // TMA does not use the stride of a dimension with extent 1, but the driver's
                // encoder checks its value.
                *stride = columns * self.element.bytes_of_element();
            }
            if !stride.is_multiple_of(TMA_ALIGNMENT_BYTES)
                || *stride >= TENSOR_MAP_STRIDE_LIMIT_BYTES
            {
                return Err(format!(
                    "a stride of {stride} bytes is no multiple of {TMA_ALIGNMENT_BYTES} below 2^40"
                ));
            }
        }
        Ok(TensorMapEncoderArguments {
            extents: [columns, rows, matrices, batches],
            strides: strides.map(|(_, stride)| stride),
            box_extents: [of_box as u32, self.rows_per_box, 1, 1],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lock_first_gpu;
    use crate::{KernelArgumentList, Launch, PreparedLaunch, Source};

    /// A test tensor of one batch with two matrices whose rows alternate in memory, as
    /// `[rows][matrices][columns]`.
    const TEST_TENSOR: TensorWithTmaBoxes = TensorWithTmaBoxes {
        element: TensorMapElement::Bf16,
        extents: [1, 2, 5, 64],
        strides: [640, 64, 128],
        rows_per_box: 8,
    };

    #[test]
    fn tensor_map_strides_are_in_bytes_from_the_innermost_dimension() {
        let batches = TensorWithTmaBoxes { extents: [3, 2, 5, 64], ..TEST_TENSOR };
        assert_eq!(
            batches.tensor_map_encoder_arguments(0x1000),
            Ok(TensorMapEncoderArguments {
                extents: [64, 5, 2, 3],
                strides: [256, 128, 1280],
                box_extents: [64, 8, 1, 1]
            })
        );
        // With a single batch, the stride to the next batch is not used.
        let only = TensorWithTmaBoxes { strides: [7, 64, 128], ..TEST_TENSOR };
        assert_eq!(only.tensor_map_encoder_arguments(0x1000).unwrap().strides, [256, 128, 128]);
    }

    #[test]
    fn tensor_addresses_and_strides_must_be_multiples_of_sixteen_bytes() {
        let refused = |boxes: TensorWithTmaBoxes, address| {
            boxes.tensor_map_encoder_arguments(address).unwrap_err()
        };
        assert_eq!(refused(TEST_TENSOR, 0x1008), "address 0x1008 is no multiple of 16");
        assert_eq!(
            refused(TensorWithTmaBoxes { strides: [640, 64, 130], ..TEST_TENSOR }, 0),
            "a stride of 260 bytes is no multiple of 16 below 2^40"
        );
        let far = TensorWithTmaBoxes { strides: [640, 1 << 40, 128], ..TEST_TENSOR };
        assert!(refused(far, 0).ends_with("below 2^40"));
    }

    #[test]
    fn tensor_boxes_that_tma_does_not_support_are_refused() {
        let refused =
            |boxes: TensorWithTmaBoxes| boxes.tensor_map_encoder_arguments(0).unwrap_err();
        assert_eq!(
            refused(TensorWithTmaBoxes { extents: [1, 2, 5, 65], ..TEST_TENSOR }),
            "65 columns are no multiple of 64"
        );
        assert_eq!(
            refused(TensorWithTmaBoxes {
                element: TensorMapElement::AnyEightBitType,
                ..TEST_TENSOR
            }),
            "64 columns are no multiple of 128"
        );
        assert_eq!(
            refused(TensorWithTmaBoxes { rows_per_box: 257, ..TEST_TENSOR }),
            "a box has 1 to 256 rows, not 257"
        );
    }

    const TENSOR_MAP_TEST_KERNEL_SOURCE: &str = r#"
#include "common/bulk.cuh"
#include "common/memory.cuh"
#include "common/tensor_copy.cuh"
extern "C" __global__ void unswizzled(const __grid_constant__ TensorMap map, u16* out) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ u64 barrier;
  const u32 full = shared_address(&barrier), base = shared_address(shared);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_bytes(full, 8 * 128);
    tma_load_box(base, map, {0, 0, 1, 0}, full);
  }
  __syncthreads();
  mbarrier_wait(full, 0);
  for (u32 i = threadIdx.x; i < 8 * 64; i += blockDim.x)
    out[i] = *reinterpret_cast<u16*>(shared + swizzled_chunk_offset<128>(i / 64, i % 64 / 8) + i % 8 * 2);
}
"#;

    #[test]
    fn tma_swizzles_a_box_and_writes_zeros_outside_the_tensor() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        if !device.supports_thread_block_clusters().unwrap() {
            eprintln!("skipped: needs sm_90 or later");
            return;
        }
        let values: Vec<u8> = (1..=2 * 5 * 64u16).flat_map(u16::to_ne_bytes).collect();
        let tensor = device.upload(&values).unwrap();
        let out = device.allocate(8 * 128).unwrap();
        let kernel = device
            .load_kernel(
                &Source::new("tensor_map", TENSOR_MAP_TEST_KERNEL_SOURCE).with_macros(&[]),
                "unswizzled",
            )
            .unwrap();
        let parameters = KernelArgumentList::new()
            .with_struct_bytes(&TEST_TENSOR.encode_tensor_map_at(tensor.device_address()).unwrap())
            .with_address(out.device_address());
        let dims = Launch { dynamic_shared_bytes: 1024, ..Launch::new([1, 1, 1], [128, 1, 1]) };
        PreparedLaunch::check_and_prepare(&device, kernel, dims, parameters)
            .unwrap()
            .enqueue()
            .unwrap();
        let mut copied = vec![0; 8 * 128];
        out.download_first_bytes(&mut copied).unwrap();
        // The second test matrix has five rows, every second row in memory; the box has eight rows.
        for (row, bytes) in copied[..5 * 128].chunks(128).enumerate() {
            assert_eq!(bytes, &values[(2 * row + 1) * 128..][..128], "row {row}");
        }
        assert!(copied[5 * 128..].iter().all(|&byte| byte == 0));
    }
}
