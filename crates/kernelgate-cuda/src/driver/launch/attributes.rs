//! Attributes of a kernel launch in the driver's form.

use cudarc::driver::sys::{CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue};

/// Programmatic dependent launch: blocks may start while the kernel before it still runs.
pub(crate) const fn programmatic_launch_attribute() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

/// Launch attribute of a cooperative launch: all blocks are resident at once.
pub(crate) const fn cooperative_attribute() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        pad: [0; 4],
        value: CUlaunchAttributeValue { cooperative: 1 },
    }
}

/// Makes the launch attribute for clusters of x, y and z blocks.
pub(crate) const fn cluster_attribute([x, y, z]: [u32; 3]) -> CUlaunchAttribute {
    use cudarc::driver::sys::CUlaunchAttributeValue_union__bindgen_ty_1 as Extents;
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { clusterDim: Extents { x, y, z } },
    }
}
