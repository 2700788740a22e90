//! Access-policy windows: what L2 does with a launch's accesses to a range of memory.

use cudarc::driver::sys;

/// How L2 treats the lines that a launch touches in a window of addresses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum L2LineTreatment {
    /// L2 prefers to keep this share of the window's lines (at most 1), each time the same lines.
    Keep(f32),
    /// Lines get normal priority again, whichever priority an earlier launch set.
    Release,
}

/// A range of memory for whose accesses L2 has a policy during a launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct L2Window {
    /// Start address.
    pub address: u64,
    /// Length of the window, bytes.
    pub bytes: usize,
    /// How L2 treats lines in the window.
    pub lines: L2LineTreatment,
}

impl L2Window {
    /// Copy of the window whose lines L2 may evict like any other.
    pub const fn without_persistence(self) -> Self {
        Self { lines: L2LineTreatment::Release, ..self }
    }

    /// The L2 access window as a launch attribute.
    pub(crate) fn launch_attribute(self) -> sys::CUlaunchAttribute {
        use sys::CUaccessProperty_enum::{
            CU_ACCESS_PROPERTY_NORMAL as NORMAL, CU_ACCESS_PROPERTY_PERSISTING as PERSISTING,
        };
        let (hit_ratio, hit) = match self.lines {
            L2LineTreatment::Keep(share) => (share, PERSISTING),
            L2LineTreatment::Release => (1.0, NORMAL),
        };
        let window = sys::CUaccessPolicyWindow {
            base_ptr: self.address as *mut _,
            num_bytes: self.bytes,
            hitRatio: hit_ratio,
            hitProp: hit,
            missProp: NORMAL,
        };
        sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { accessPolicyWindow: window },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launch_attribute_of_a_window_has_its_address_size_and_share() {
        use sys::CUaccessProperty_enum as Property;
        let window = L2Window { address: 4096, bytes: 512, lines: L2LineTreatment::Keep(0.25) };
        let found = |window: L2Window| {
            let attribute = window.launch_attribute();
            assert_eq!(
                attribute.id,
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
            );
            // SAFETY: the attribute's id determines which field of the union was written.
            let value = unsafe { attribute.value.accessPolicyWindow };
            (value.base_ptr as u64, value.num_bytes, value.hitRatio, value.hitProp, value.missProp)
        };
        let normal = Property::CU_ACCESS_PROPERTY_NORMAL;
        assert_eq!(
            found(window),
            (4096, 512, 0.25, Property::CU_ACCESS_PROPERTY_PERSISTING, normal)
        );
        assert_eq!(found(window.without_persistence()), (4096, 512, 1.0, normal, normal));
    }
}
