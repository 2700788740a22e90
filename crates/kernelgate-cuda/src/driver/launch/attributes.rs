//! Attributes of a kernel launch as structs of the CUDA driver API.

use cudarc::driver::sys::{CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue};

/// Launch attribute for programmatic dependent launch: the kernel's blocks may start while the
/// previous kernel on the stream still runs.
pub(crate) const fn programmatic_dependent_launch_attribute() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

/// Launch attribute for a cooperative launch, in which all blocks of the grid are resident at the
/// same time.
pub(crate) const fn cooperative_launch_attribute() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        pad: [0; 4],
        value: CUlaunchAttributeValue { cooperative: 1 },
    }
}

/// Launch attribute for thread-block clusters of x, y and z blocks.
pub(crate) const fn cluster_dimension_attribute([x, y, z]: [u32; 3]) -> CUlaunchAttribute {
    use cudarc::driver::sys::CUlaunchAttributeValue_union__bindgen_ty_1 as Extents;
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { clusterDim: Extents { x, y, z } },
    }
}
