//! Missing and implausible parts of a trace.

/// Longest plausible span of a range or operation: 26 days.
const MAX_SPAN_NS: i64 = 1 << 51;

/// Times must be nearer to zero than this (146 years), so that the difference of any two is a valid
/// number.
pub(crate) const TIME_LIMIT_NS: i64 = 1 << 62;

/// Whether a number is a plausible time, in nanoseconds.
pub(crate) fn is_plausible_time(ns: &i64) -> bool {
    ns.unsigned_abs() < TIME_LIMIT_NS.unsigned_abs()
}

/// Missing and odd parts of a trace. Counts are of records.
#[derive(Debug, Clone, Default)]
pub struct TraceQuality {
    /// Tables or fields that the file lacks, by the name of the format.
    pub missing: Vec<String>,
    /// Parts of the file that could not be read completely, with the reason.
    pub unreadable: Vec<String>,
    /// The profiler's own reports: dropped records, counters that were not available.
    pub messages: Vec<String>,
    /// How the reader interpreted the file, if several interpretations were possible.
    pub notes: Vec<String>,
    /// Records that the recorder says it lost.
    pub dropped: u64,
    /// Ranges that were never closed; they end at the last time of the trace.
    pub unclosed_ranges: u64,
    /// Records whose end is before their start; their end is taken as their start.
    pub backwards: u64,
    /// Operations of the GPU without times (start and end 0); skipped.
    pub without_times: u64,
    /// Events that are not valid JSON; skipped.
    pub broken_events: u64,
    /// Number of texts that were not valid UTF-8.
    pub invalid_texts: u64,
    /// Values that do not fit the format, such as a correlation id beyond 32 bits or a time beyond
    /// 146 years; the end of a span of more than 26 days, which is taken as its start.
    pub odd_values: u64,
    /// Spans in which the profiler says that it worked itself, in nanoseconds of the trace.
    pub overhead: Vec<(i64, i64)>,
}

impl TraceQuality {
    /// Adds the findings of another part of the trace.
    pub(crate) fn add_quality_of(&mut self, other: Self) {
        self.missing.extend(other.missing);
        self.unreadable.extend(other.unreadable);
        self.messages.extend(other.messages);
        self.notes.extend(other.notes);
        self.dropped += other.dropped;
        self.unclosed_ranges += other.unclosed_ranges;
        self.backwards += other.backwards;
        self.without_times += other.without_times;
        self.broken_events += other.broken_events;
        self.invalid_texts += other.invalid_texts;
        self.odd_values += other.odd_values;
        self.overhead.extend(other.overhead);
    }

    /// A time in nanoseconds; an impossible one is counted, and `None`.
    pub(crate) fn time(&mut self, ns: Option<i64>) -> Option<i64> {
        let time = ns.filter(is_plausible_time);
        self.odd_values += u64::from(time != ns);
        time
    }

    /// Corrects the end of a span: not before its start, and not later than any profile can have
    /// recorded.
    pub(crate) fn plausible_span_end(&mut self, start: i64, end: i64) -> i64 {
        if end < start {
            self.backwards += 1;
            return start;
        }
        if end.checked_sub(start).is_none_or(|length| length > MAX_SPAN_NS) {
            self.odd_values += 1;
            return start;
        }
        end
    }

    /// A correlation id; what does not fit is counted and joins with nothing.
    pub(crate) fn correlation(&mut self, id: Option<i64>) -> u32 {
        // Recorders write -1, as 32 or 64 bits, for "none".
        let Some(id) = id.filter(|&id| id != -1) else { return 0 };
        u32::try_from(id).unwrap_or_else(|_| {
            self.odd_values += 1;
            0
        })
    }

    /// A text that may not be UTF-8.
    pub(crate) fn text(&mut self, bytes: &[u8]) {
        self.invalid_texts += u64::from(std::str::from_utf8(bytes).is_err());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_of_times_are_stored_and_missing_times_are_counted() {
        let mut quality = TraceQuality::default();
        for time in [0, -5, TIME_LIMIT_NS - 1, 1 - TIME_LIMIT_NS] {
            assert_eq!(quality.time(Some(time)), Some(time));
        }
        assert_eq!((quality.time(None), quality.odd_values), (None, 0));
        for odd in [TIME_LIMIT_NS, -TIME_LIMIT_NS, i64::MIN, i64::MAX] {
            assert_eq!(quality.time(Some(odd)), None);
        }
        assert_eq!(quality.odd_values, 4);
    }

    #[test]
    fn a_span_end_is_accepted_only_within_the_length_of_a_profile() {
        let mut quality = TraceQuality::default();
        let month = MAX_SPAN_NS;
        assert_eq!(quality.plausible_span_end(5, 9), 9);
        assert_eq!(quality.plausible_span_end(-month, 0), 0);
        assert_eq!((quality.backwards, quality.odd_values), (0, 0));
        assert_eq!(quality.plausible_span_end(9, 5), 9);
        assert_eq!(quality.plausible_span_end(0, month + 1), 0);
        assert_eq!(quality.plausible_span_end(i64::MIN, i64::MAX), i64::MIN);
        assert_eq!((quality.backwards, quality.odd_values), (1, 2));
    }
}
