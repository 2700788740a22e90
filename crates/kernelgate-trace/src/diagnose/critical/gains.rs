//! The critical path of a trace and the gains of changes, as a diagnosis holds them. Absent: the
//! replay that computes gains (`critical`).

/// A change of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Faster {
    /// A kernel takes half as long.
    Kernel(String),
    /// Launch calls take no time.
    Launches,
    /// The host does not wait for the GPU.
    Waits,
    /// Communication takes no time.
    Communication,
    /// Copies take no time.
    Copies,
    /// Page migrations take no time, nor the part of kernels beside them.
    Migrations,
}

impl Faster {
    /// Label in printed output.
    pub fn label(&self) -> String {
        match self {
            Self::Kernel(name) => format!("half the time of {name}"),
            Self::Launches => "launch calls that take no time".to_owned(),
            Self::Waits => "a host that does not wait for the GPU".to_owned(),
            Self::Communication => "communication that takes no time".to_owned(),
            Self::Copies => "copies that take no time".to_owned(),
            Self::Migrations => "page migrations that take no time".to_owned(),
        }
    }
}

/// The gain of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangeGain {
    /// The change.
    pub change: Faster,
    /// The recorded time that the change removes, nanoseconds; `None` where it has no sum.
    pub removed_ns: Option<i64>,
    /// Nanoseconds that the trace is shorter.
    pub gain_ns: i64,
}

/// The critical path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CriticalPath {
    /// Time from the first start to the last end, nanoseconds.
    pub total_ns: i64,
    /// Segments of the critical path by kind, the longest first; they add up to the total.
    pub segments: Vec<(String, i64)>,
    /// Gains of changes, the largest first.
    pub gains: Vec<ChangeGain>,
}
