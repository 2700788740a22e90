//! Access-policy windows: the priority in the L2 cache of the lines in a range of device memory
//! during a launch.

use cudarc::driver::sys;

/// The L2 priority of the cache lines in the window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum L2LinePriority {
    /// L2 prefers to keep this share of the window's lines (0 to 1), and always the same lines.
    PersistShareOfLines(f32),
    /// The window's lines get normal priority again, whatever priority an earlier launch set.
    NormalPriority,
}

/// A range of device memory whose lines get a priority in the L2 cache during a launch
/// (access-policy window).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct L2AccessPolicyWindow {
    /// Start address.
    pub start_address: u64,
    /// Length of the window in bytes.
    pub window_bytes: usize,
    /// Priority in L2 of the lines in the window.
    pub line_priority: L2LinePriority,
}

impl L2AccessPolicyWindow {
    /// Returns the same range with normal priority, so that L2 may evict its lines like any others.
    pub const fn with_normal_priority(self) -> Self {
        Self { line_priority: L2LinePriority::NormalPriority, ..self }
    }

    /// Converts the L2 access-policy window into a launch attribute of the driver API.
    pub(crate) fn as_launch_attribute(self) -> sys::CUlaunchAttribute {
        use sys::CUaccessProperty_enum::{
            CU_ACCESS_PROPERTY_NORMAL as NORMAL, CU_ACCESS_PROPERTY_PERSISTING as PERSISTING,
        };
        let (hit_ratio, hit) = match self.line_priority {
            L2LinePriority::PersistShareOfLines(share) => (share, PERSISTING),
            L2LinePriority::NormalPriority => (1.0, NORMAL),
        };
        let window = sys::CUaccessPolicyWindow {
            base_ptr: self.start_address as *mut _,
            num_bytes: self.window_bytes,
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
    fn the_launch_attribute_of_an_l2_window_has_its_address_size_and_share() {
        use sys::CUaccessProperty_enum as Property;
        let window = L2AccessPolicyWindow {
            start_address: 4096,
            window_bytes: 512,
            line_priority: L2LinePriority::PersistShareOfLines(0.25),
        };
        let found = |window: L2AccessPolicyWindow| {
            let attribute = window.as_launch_attribute();
            assert_eq!(
                attribute.id,
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
            );
            // SAFETY: the attribute's id says which field of the union was written.
            let value = unsafe { attribute.value.accessPolicyWindow };
            (value.base_ptr as u64, value.num_bytes, value.hitRatio, value.hitProp, value.missProp)
        };
        let normal = Property::CU_ACCESS_PROPERTY_NORMAL;
        assert_eq!(
            found(window),
            (4096, 512, 0.25, Property::CU_ACCESS_PROPERTY_PERSISTING, normal)
        );
        assert_eq!(found(window.with_normal_priority()), (4096, 512, 1.0, normal, normal));
    }
}
