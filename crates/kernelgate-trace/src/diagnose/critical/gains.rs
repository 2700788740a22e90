//! Critical path of a trace, and gains of hypothetical changes, as a diagnosis stores them. The
//! parent module `critical` computes the gains by replays.

/// A hypothetical change that makes a part of the traced program faster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HypotheticalSpeedup {
    /// In the hypothetical replay, all launches of the named kernel take half their time.
    HalvedKernelTime(String),
    /// In the hypothetical replay, the host's launch calls take no time.
    NoLaunchCallTime,
    /// In the hypothetical replay, the host never waits for the GPU.
    NoHostWaits,
    /// In the hypothetical replay, communication takes no time.
    NoCommunicationTime,
    /// In the hypothetical replay, copies take no time.
    NoCopyTime,
    /// In the hypothetical replay, page migrations take no time, and neither do the parts of
    /// kernels that run during migrations.
    NoPageMigrationTime,
}

impl HypotheticalSpeedup {
    /// Returns the label of the hypothetical change in printed output.
    pub fn printed_speedup_label(&self) -> String {
        match self {
            Self::HalvedKernelTime(name) => format!("half the time of {name}"),
            Self::NoLaunchCallTime => "launch calls that take no time".to_owned(),
            Self::NoHostWaits => "a host that does not wait for the GPU".to_owned(),
            Self::NoCommunicationTime => "communication that takes no time".to_owned(),
            Self::NoCopyTime => "copies that take no time".to_owned(),
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
    pub critical_path_ns: i64,
    /// Nanoseconds of the critical path by kind of segment, the longest first; they add up to the
    /// path's length.
    pub critical_path_ns_by_segment_kind: Vec<(String, i64)>,
    /// Gains of hypothetical changes of the program, the largest first.
    pub gains: Vec<SpeedupWithGain>,
}
