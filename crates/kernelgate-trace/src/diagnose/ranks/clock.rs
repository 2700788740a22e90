//! Clocks of the ranks of a job: differences between two clocks that may drift, and conversion to
//! the job's common time. The module `join_ranks` finds the clock differences.

/// Difference between two clocks as a line over time, because one clock may drift against the
/// other.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LinearClockOffset {
    pub(super) reference_time_ns: i64,
    pub(super) offset_at_reference_ns: i64,
    pub(super) drift_ns_per_ns: f64,
}

impl LinearClockOffset {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    pub(super) fn clock_offset_at(&self, time: i64) -> i64 {
        self.offset_at_reference_ns
            + ((time - self.reference_time_ns) as f64 * self.drift_ns_per_ns).round() as i64
    }
}

/// Clock of a rank: the line of nanoseconds by which it is ahead of the job's common clock.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ClockOfRank {
    ns_ahead_of_job_clock_line: LinearClockOffset,
    pub(super) alignment_deviation_ns: i64,
}

impl ClockOfRank {
    /// Returns the clock of a rank that is linked to this one; `sign` is 1 if `ahead` says how far
    /// that clock is ahead of this one, otherwise -1.
    pub(super) fn clock_of_linked_rank(
        self,
        ahead: LinearClockOffset,
        spread_ns: i64,
        sign: i64,
    ) -> Self {
        #[allow(clippy::cast_precision_loss)]
        let slope =
            self.ns_ahead_of_job_clock_line.drift_ns_per_ns + sign as f64 * ahead.drift_ns_per_ns;
        let at = ahead.reference_time_ns;
        let offset = self.ns_ahead_of_job_clock_line.clock_offset_at(at)
            + sign * ahead.offset_at_reference_ns;
        Self {
            ns_ahead_of_job_clock_line: LinearClockOffset {
                reference_time_ns: at,
                offset_at_reference_ns: offset,
                drift_ns_per_ns: slope,
            },
            alignment_deviation_ns: self.alignment_deviation_ns.max(spread_ns),
        }
    }

    /// Nanoseconds by which the rank's clock is ahead of the job's common clock at `time`.
    pub(super) fn ns_ahead_of_job_clock(&self, time: i64) -> i64 {
        self.ns_ahead_of_job_clock_line.clock_offset_at(time)
    }

    /// Converts a time of the rank's clock to the job's common time.
    pub(super) fn rank_time_to_job_time(&self, time: i64) -> i64 {
        time - self.ns_ahead_of_job_clock_line.clock_offset_at(time)
    }
}

/// Returns the median of the values of all ranks; of two ranks the smaller value, so that the other
/// rank is compared with it.
pub(super) fn median_value_of_ranks(values: impl Iterator<Item = i64>) -> i64 {
    let mut values: Vec<i64> = values.collect();
    values.sort_unstable();
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}
