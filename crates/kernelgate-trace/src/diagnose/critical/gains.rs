//! Critical path of a trace, and gains of hypothetical changes, as a diagnosis stores them. The
//! parent module `critical` computes the gains by replays.

/// A hypothetical change that makes a part of the traced program faster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HypotheticalSpeedup {
    /// All launches of the named kernel take half their time.
    Kernel(String),
    /// The host's launch calls take no time.
    Launches,
    /// The host never waits for the GPU.
    Waits,
    /// Communication takes no time.
    Communication,
    /// Copies take no time.
    Copies,
    /// Page migrations take no time, and neither do the parts of kernels that run during
    /// migrations.
    NoPageMigrationTime,
}

impl HypotheticalSpeedup {
    /// Returns the label of this value in printed output.
    pub fn printed_speedup_label(&self) -> String {
        match self {
            Self::Kernel(name) => format!("half the time of {name}"),
            Self::Launches => "launch calls that take no time".to_owned(),
            Self::Waits => "a host that does not wait for the GPU".to_owned(),
            Self::Communication => "communication that takes no time".to_owned(),
            Self::Copies => "copies that take no time".to_owned(),
            Self::NoPageMigrationTime => "page migrations that take no time".to_owned(),
        }
    }
}

/// A hypothetical change, and the time by which it shortens the trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpeedupWithGain {
    pub change: HypotheticalSpeedup,
    /// Recorded time that the change removes from operations, nanoseconds; `None` if the change
    /// does not shorten operations.
    pub operation_ns_removed_by_change: Option<i64>,
    /// Nanoseconds by which the replayed trace is shorter with the change.
    pub gain_ns: i64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CriticalPathAndGains {
    /// Length of the critical path, nanoseconds: from the trace's first start to its last end.
    pub total_ns: i64,
    /// Nanoseconds of the critical path by kind of segment, the longest first; they add up to the
    /// path's length.
    pub segments: Vec<(String, i64)>,
    /// Gains of hypothetical changes of the program, the largest first.
    pub gains: Vec<SpeedupWithGain>,
}
