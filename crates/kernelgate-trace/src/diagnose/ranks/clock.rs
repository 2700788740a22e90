//! Clocks of ranks: lines that may drift, in the time of the job. The search for clock differences
//! is in another module (`join`).

/// A difference of clocks that may drift.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ClockDifference {
    pub(super) at: i64,
    pub(super) offset: i64,
    pub(super) slope: f64,
}

impl ClockDifference {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    pub(super) fn offset_at(&self, time: i64) -> i64 {
        self.offset + ((time - self.at) as f64 * self.slope).round() as i64
    }
}

/// The clock of a rank: how far it is ahead of the job's clock.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RankClock {
    line: ClockDifference,
    pub(super) spread_ns: i64,
}

impl RankClock {
    /// The clock behind a link from this one, or in front of it where `sign` is -1.
    pub(super) fn clock_behind_link(
        self,
        ahead: ClockDifference,
        spread_ns: i64,
        sign: i64,
    ) -> Self {
        #[allow(clippy::cast_precision_loss)]
        let slope = self.line.slope + sign as f64 * ahead.slope;
        let at = ahead.at;
        let offset = self.line.offset_at(at) + sign * ahead.offset;
        Self {
            line: ClockDifference { at, offset, slope },
            spread_ns: self.spread_ns.max(spread_ns),
        }
    }

    /// Nanoseconds by which the rank's clock is ahead of the job's clock at that time.
    pub(super) fn ns_ahead_of_job_clock(&self, time: i64) -> i64 {
        self.line.offset_at(time)
    }

    /// Converts a time of the rank's clock to the job's time.
    pub(super) fn job_time(&self, time: i64) -> i64 {
        time - self.line.offset_at(time)
    }
}

/// The value of the median rank; of two ranks the smaller value, so that one rank is compared with
/// the other rank.
pub(super) fn median_rank_value(values: impl Iterator<Item = i64>) -> i64 {
    let mut values: Vec<i64> = values.collect();
    values.sort_unstable();
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}
