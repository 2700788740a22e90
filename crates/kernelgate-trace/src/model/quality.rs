//! Counts and lists data that is missing from a trace, and implausible data.

/// Longest plausible duration of a range or GPU operation, in nanoseconds: 26 days.
const MAX_PLAUSIBLE_DURATION_NS: i64 = 1 << 51;

/// Largest plausible absolute time in nanoseconds (146 years), so that the difference of two times
/// does not overflow 64 bits.
pub(crate) const MAX_PLAUSIBLE_TIME_NS: i64 = 1 << 62;

/// Whether a time in nanoseconds is small enough that differences of times do not overflow.
pub(crate) fn is_plausible_time_ns(ns: &i64) -> bool {
    ns.unsigned_abs() < MAX_PLAUSIBLE_TIME_NS.unsigned_abs()
}

/// Data that is missing from a trace, and implausible data. Counts are of records.
#[derive(Debug, Clone, Default)]
pub struct MissingAndImplausibleTraceData {
    /// Tables or fields that the trace file lacks, by their names in the file format.
    pub missing_tables_or_fields: Vec<String>,
    /// Parts of the trace file that kernelgate could not read completely, with the reason.
    pub unreadable_parts: Vec<String>,
    /// Messages of the profiler in the trace, such as dropped records or unavailable counters.
    pub profiler_messages: Vec<String>,
    /// How kernelgate interpreted the trace file, if several interpretations were possible.
    pub interpretation_notes: Vec<String>,
    /// Number of records that the profiler reports as dropped.
    pub dropped_records: u64,
    /// Number of ranges that were never closed; kernelgate ends these ranges at the last time of
    /// the trace.
    pub unclosed_ranges: u64,
    /// Number of records whose end is before their start; kernelgate sets their end to their start.
    pub spans_with_reversed_times: u64,
    /// Number of GPU operations whose start and end are 0; kernelgate skips these operations.
    pub operations_without_times: u64,
    /// Number of trace events that are not valid JSON; kernelgate skips these events.
    pub invalid_json_events: u64,
    /// Number of texts in the trace that are not valid UTF-8.
    pub invalid_utf8_texts: u64,
    /// Number of implausible values: correlation ids beyond 32 bits, times beyond 146 years, and
    /// durations above 26 days, which kernelgate sets to zero.
    pub implausible_value_count: u64,
    /// Start and end of each span in which the profiler itself was working, in nanoseconds on the
    /// trace's clock.
    pub profiler_overhead_spans: Vec<(i64, i64)>,
}

impl MissingAndImplausibleTraceData {
    /// Adds the counts and messages from another part of the same trace.
    pub(crate) fn add_counts_and_messages(&mut self, other: Self) {
        self.missing_tables_or_fields.extend(other.missing_tables_or_fields);
        self.unreadable_parts.extend(other.unreadable_parts);
        self.profiler_messages.extend(other.profiler_messages);
        self.interpretation_notes.extend(other.interpretation_notes);
        self.dropped_records += other.dropped_records;
        self.unclosed_ranges += other.unclosed_ranges;
        self.spans_with_reversed_times += other.spans_with_reversed_times;
        self.operations_without_times += other.operations_without_times;
        self.invalid_json_events += other.invalid_json_events;
        self.invalid_utf8_texts += other.invalid_utf8_texts;
        self.implausible_value_count += other.implausible_value_count;
        self.profiler_overhead_spans.extend(other.profiler_overhead_spans);
    }

    /// Returns a time in nanoseconds if it is plausible; counts an implausible time and returns
    /// `None`.
    pub(crate) fn plausible_time_or_count_as_odd(&mut self, ns: Option<i64>) -> Option<i64> {
        let time = ns.filter(is_plausible_time_ns);
        self.implausible_value_count += u64::from(time != ns);
        time
    }

    /// Replaces the end of a span by its start, and counts the span, if the end is before the start
    /// or the span exceeds 26 days.
    pub(crate) fn plausible_span_end_or_start(&mut self, start: i64, end: i64) -> i64 {
        if end < start {
            self.spans_with_reversed_times += 1;
            return start;
        }
        if end.checked_sub(start).is_none_or(|length| length > MAX_PLAUSIBLE_DURATION_NS) {
            self.implausible_value_count += 1;
            return start;
        }
        end
    }

    /// Returns a correlation id of 32 bits; a larger id is counted and replaced by 0, which matches
    /// no launch call.
    pub(crate) fn correlation_id_or_zero(&mut self, id: Option<i64>) -> u32 {
        // Profilers write -1, as 32 or 64 bits, if an operation has no correlation id.
        let Some(id) = id.filter(|&id| id != -1) else { return 0 };
        u32::try_from(id).unwrap_or_else(|_| {
            self.implausible_value_count += 1;
            0
        })
    }

    /// Counts a text that is not valid UTF-8.
    pub(crate) fn count_invalid_utf8(&mut self, bytes: &[u8]) {
        self.invalid_utf8_texts += u64::from(std::str::from_utf8(bytes).is_err());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plausible_times_are_kept_and_odd_times_are_counted() {
        let mut quality = MissingAndImplausibleTraceData::default();
        for time in [0, -5, MAX_PLAUSIBLE_TIME_NS - 1, 1 - MAX_PLAUSIBLE_TIME_NS] {
            assert_eq!(quality.plausible_time_or_count_as_odd(Some(time)), Some(time));
        }
        assert_eq!(
            (quality.plausible_time_or_count_as_odd(None), quality.implausible_value_count),
            (None, 0)
        );
        for odd in [MAX_PLAUSIBLE_TIME_NS, -MAX_PLAUSIBLE_TIME_NS, i64::MIN, i64::MAX] {
            assert_eq!(quality.plausible_time_or_count_as_odd(Some(odd)), None);
        }
        assert_eq!(quality.implausible_value_count, 4);
    }

    #[test]
    fn spans_of_more_than_26_days_end_at_their_start() {
        let mut quality = MissingAndImplausibleTraceData::default();
        let month = MAX_PLAUSIBLE_DURATION_NS;
        assert_eq!(quality.plausible_span_end_or_start(5, 9), 9);
        assert_eq!(quality.plausible_span_end_or_start(-month, 0), 0);
        assert_eq!((quality.spans_with_reversed_times, quality.implausible_value_count), (0, 0));
        assert_eq!(quality.plausible_span_end_or_start(9, 5), 9);
        assert_eq!(quality.plausible_span_end_or_start(0, month + 1), 0);
        assert_eq!(quality.plausible_span_end_or_start(i64::MIN, i64::MAX), i64::MIN);
        assert_eq!((quality.spans_with_reversed_times, quality.implausible_value_count), (1, 2));
    }
}
