//! The critical path of a trace, and the gains of hypothetical changes, as stored in a diagnosis.
//! The replay that computes the gains is in another module (`critical`).

/// A hypothetical change of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FasterPart {
    /// The named kernel takes half as long.
    Kernel(String),
    /// Launch calls of the host take no time.
    Launches,
    /// The host does not wait for the GPU.
    Waits,
    /// Communication takes no time.
    Communication,
    /// Copies take no time.
    Copies,
    /// Page migrations take no time, nor do kernels that run beside migrations.
    Migrations,
}

impl FasterPart {
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

/// The time that a hypothetical change would save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangeGain {
    pub change: FasterPart,
    /// The recorded time that the change removes, nanoseconds; `None` where it has no sum.
    pub removed_ns: Option<i64>,
    /// Nanoseconds by which the change shortens the trace.
    pub gain_ns: i64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CriticalPath {
    /// Time from the first start to the last end, nanoseconds.
    pub total_ns: i64,
    /// Segments of the critical path by kind, the longest first; they add up to the total.
    pub segments: Vec<(String, i64)>,
    /// Gains of hypothetical changes, the largest first.
    pub gains: Vec<ChangeGain>,
}
