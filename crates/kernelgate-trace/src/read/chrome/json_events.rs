//! Streams the events of a Chrome trace file, and skips events that are not valid JSON.
//!
//! PyTorch writes source lines into the JSON without escaping control characters and quotation
//! marks. The reader skips an event that is invalid JSON, and continues with the next event.

use std::borrow::Cow;
use std::io::Read;

use serde::de::IgnoredAny;

use super::event::ChromeTraceEvent;

/// Minimum number of bytes that one read requests from the trace file.
const MIN_FILE_READ_BYTES: usize = 1 << 18;
/// Maximum size of one event or field of a Chrome trace file, in bytes.
const MAX_EVENT_OR_FIELD_BYTES: usize = 64 << 20;
/// Top-level fields of a Chrome trace file that kernelgate keeps, such as versions and devices;
/// other fields are skipped.
const KEPT_TOP_LEVEL_FIELDS: &[&str] = &[
    "deviceProperties",
    "schemaVersion",
    "traceName",
    "host_name",
    "trace_id",
    "distributedInfo",
    "cuda_driver_version",
    "cuda_runtime_version",
    "hip_driver_version",
    "hip_runtime_version",
    "profile_memory",
    "record_shapes",
    "with_flops",
    "with_modules",
    "with_stack",
];
/// JSON keys with which a trace event may begin; they identify the next event after an invalid one.
const FIRST_KEYS_OF_EVENTS: &[&[u8]] = &[
    b"ph", b"cat", b"name", b"pid", b"tid", b"ts", b"dur", b"id", b"args", b"s", b"bp", b"cname",
    b"tts",
];

/// A piece of a Chrome trace file that the reader passes on: an event or a top-level field.
pub(super) enum ChromeFilePart<'a> {
    /// A top-level field beside the event array: its key and its value as raw JSON.
    TopLevelField(&'a str, &'a str),
    Event(&'a ChromeTraceEvent<'a>),
    /// An element of the event array that is valid JSON but not an event.
    NonEventElement,
}

/// Result of reading a Chrome trace file: whether it has events, counts of invalid events, and the
/// error.
#[derive(Debug, Default)]
pub(super) struct ChromeFileReadSummary {
    /// Whether the file has an event array.
    pub has_event_array: bool,
    /// Number of events with texts that are not valid UTF-8.
    pub invalid_utf8_events: u64,
    /// Number of events that are not valid JSON.
    pub invalid_json_events: u64,
    /// Why reading ended before the end of the file; `None` if the whole file was read.
    pub read_error: Option<String>,
}

/// Reads a Chrome trace file until its end or the first error from which the reader cannot recover,
/// and passes each event and field to `each`.
pub(super) fn stream_chrome_events_and_fields(
    source: impl Read,
    each: impl FnMut(ChromeFilePart<'_>),
) -> ChromeFileReadSummary {
    let window = TraceFileBuffer {
        source,
        buffered_bytes: Vec::new(),
        parse_offset: 0,
        file_end_reached: false,
        read_error: None,
    };
    let mut document = ChromeDocumentReader {
        file_buffer: window,
        visit_event_or_field: each,
        read_summary: ChromeFileReadSummary::default(),
    };
    let outcome = document.read_chrome_document();
    document.read_summary.read_error = outcome.err();
    document.read_summary
}

/// The bytes of the trace file that are currently in memory.
struct TraceFileBuffer<R> {
    source: R,
    buffered_bytes: Vec<u8>,
    /// Offset in the buffer of the next byte to parse.
    parse_offset: usize,
    file_end_reached: bool,
    /// The read error of the file, reported after the bytes before it are parsed.
    read_error: Option<String>,
}

impl<R: Read> TraceFileBuffer<R> {
    fn unparsed_bytes(&self) -> &[u8] {
        &self.buffered_bytes[self.parse_offset..]
    }

    /// Reads more bytes of the file into the buffer; returns `false` at the end of the file. The
    /// number of bytes per read doubles with the buffer, so that a long value is parsed only a few
    /// times.
    fn read_more_of_trace_file(&mut self) -> Result<bool, String> {
        if self.file_end_reached {
            return Ok(false);
        }
        self.buffered_bytes.drain(..self.parse_offset);
        self.parse_offset = 0;
        let length = self.buffered_bytes.len();
        if length > MAX_EVENT_OR_FIELD_BYTES {
            return Err(format!("a value of more than {} MiB", MAX_EVENT_OR_FIELD_BYTES >> 20));
        }
        if let Some(failed) = &self.read_error {
            return Err(failed.clone());
        }
        let chunk = length.max(MIN_FILE_READ_BYTES) as u64;
        let read = (&mut self.source).take(chunk).read_to_end(&mut self.buffered_bytes);
        self.read_error = read.err().map(|error| error.to_string());
        match &self.read_error {
            // Bytes that were read before the error are parsed before the error is reported.
            Some(failed) if self.buffered_bytes.len() == length => Err(failed.clone()),
            _ => {
                self.file_end_reached = self.buffered_bytes.len() == length;
                Ok(!self.file_end_reached)
            }
        }
    }

    /// Returns the next byte that is not white space, without consuming the byte.
    fn peek_non_space_byte(&mut self) -> Result<Option<u8>, String> {
        loop {
            let spaces = count_leading_spaces(self.unparsed_bytes());
            self.parse_offset += spaces;
            if let Some(&byte) = self.unparsed_bytes().first() {
                return Ok(Some(byte));
            }
            if !self.read_more_of_trace_file()? {
                return Ok(None);
            }
        }
    }

    /// Consumes and returns the next byte that is not white space.
    fn consume_non_space_byte(&mut self) -> Result<Option<u8>, String> {
        let byte = self.peek_non_space_byte()?;
        self.parse_offset += usize::from(byte.is_some());
        Ok(byte)
    }

    /// Reads until the next JSON value is completely in the buffer, and returns its length in
    /// bytes.
    fn buffer_next_json_value(&mut self) -> Result<usize, String> {
        loop {
            match json_value_length(self.unparsed_bytes()) {
                Ok(length)
                    if self.parse_offset + length < self.buffered_bytes.len()
                        || self.file_end_reached =>
                {
                    return Ok(length);
                }
                Err(error) if !error.is_eof() => return Err(error.to_string()),
                outcome => {
                    if !self.read_more_of_trace_file()? {
                        return outcome.map_err(|error| error.to_string());
                    }
                }
            }
        }
    }

    /// Skips a JSON value of any length without keeping its bytes in memory.
    fn skip_json_value(&mut self) -> Result<(), String> {
        let (mut depth, mut text, mut escaped) = (0usize, false, false);
        self.peek_non_space_byte()?;
        loop {
            for (index, &byte) in self.unparsed_bytes().iter().enumerate() {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' if text => escaped = true,
                    b'"' => text = !text,
                    _ if text => {}
                    b'{' | b'[' => depth += 1,
                    b'}' | b']' | b',' if depth == 0 => {
                        self.parse_offset += index;
                        return Ok(());
                    }
                    b'}' | b']' => depth -= 1,
                    _ => {}
                }
            }
            self.parse_offset = self.buffered_bytes.len();
            if !self.read_more_of_trace_file()? {
                return Err("the file ends within a value".to_owned());
            }
        }
    }

    /// Finds where the current, invalid event ends, and where the next event begins or the event
    /// array ends.
    fn read_until_event_boundary(&mut self) -> Result<Option<EndOfBrokenEvent>, String> {
        // Search starts this many bytes before the previous end of the buffer, because a boundary
        // may have been cut there.
        const BOUNDARY_SEARCH_OVERLAP_BYTES: usize = 256;
        let mut from = 0;
        loop {
            let rest = self.unparsed_bytes();
            if let Some(found) = find_end_of_broken_event(rest, from) {
                return Ok(Some(found));
            }
            from = rest.len().saturating_sub(BOUNDARY_SEARCH_OVERLAP_BYTES);
            if !self.read_more_of_trace_file()? {
                return Ok(None);
            }
        }
    }
}

fn count_leading_spaces(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

/// Length in bytes of the JSON value at the start of `bytes`.
fn json_value_length(bytes: &[u8]) -> serde_json::Result<usize> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<IgnoredAny>();
    match values.next() {
        Some(Ok(_)) => Ok(values.byte_offset()),
        Some(Err(error)) => Err(error),
        None => serde_json::from_slice::<IgnoredAny>(b"").map(|_| 0),
    }
}

/// Offsets in a trace file at which an invalid event ends and reading continues.
struct EndOfBrokenEvent {
    /// Offset after the closing brace of the invalid event.
    end_offset: usize,
    /// Offset of the next event, or of the bracket that closes the event array.
    next_event_offset: usize,
}

/// Finds the first closing brace after which another event begins or the event array ends.
fn find_end_of_broken_event(bytes: &[u8], from: usize) -> Option<EndOfBrokenEvent> {
    let behind = |at: usize| at + count_leading_spaces(&bytes[at..]);
    let byte = |at: usize| bytes.get(at).copied();
    let closing = bytes.iter().enumerate().skip(from).filter(|&(_, &byte)| byte == b'}');
    for (index, _) in closing {
        let next = behind(index + 1);
        let found = match byte(next) {
            Some(b',') => Some(behind(next + 1)).filter(|&at| begins_with_event_key(&bytes[at..])),
            Some(b']') => {
                let after = behind(next + 1);
                let closes = match byte(after) {
                    None | Some(b'}') => true,
                    Some(b',') => byte(behind(after + 1)) == Some(b'"'),
                    Some(_) => false,
                };
                closes.then_some(next)
            }
            _ => None,
        };
        if let Some(next) = found {
            return Some(EndOfBrokenEvent { end_offset: index + 1, next_event_offset: next });
        }
    }
    None
}

/// Whether bytes begin with `{"ph":` or with an opening brace and another key of trace events.
fn begins_with_event_key(bytes: &[u8]) -> bool {
    let Some(inside) = bytes.strip_prefix(b"{") else { return false };
    let Some(text) = inside[count_leading_spaces(inside)..].strip_prefix(b"\"") else {
        return false;
    };
    FIRST_KEYS_OF_EVENTS.iter().any(|key| {
        let colon = text.strip_prefix(*key).and_then(|rest| rest.strip_prefix(b"\""));
        colon.is_some_and(|rest| rest[count_leading_spaces(rest)..].starts_with(b":"))
    })
}

/// Result of parsing one trace event from the buffer.
enum EventParseOutcome {
    /// The event was parsed and passed to the caller; the number is its length in bytes.
    EventRead(usize),
    /// The buffer ends before the event ends.
    BufferEndsEarly,
    /// The event is not valid JSON.
    InvalidJson,
}

fn parse_buffered_event<R: Read>(
    window: &TraceFileBuffer<R>,
    each: &mut impl FnMut(ChromeFilePart<'_>),
) -> EventParseOutcome {
    let rest = window.unparsed_bytes();
    let mut values = serde_json::Deserializer::from_slice(rest).into_iter::<ChromeTraceEvent<'_>>();
    match values.next() {
        Some(Ok(event)) => {
            let length = values.byte_offset();
            match rest.get(length + count_leading_spaces(&rest[length..])) {
                Some(b',' | b']') => {}
                None if window.file_end_reached => {}
                None => return EventParseOutcome::BufferEndsEarly,
                // An unescaped quotation mark made the parser end the event inside a text.
                Some(_) => return EventParseOutcome::InvalidJson,
            }
            each(ChromeFilePart::Event(&event));
            EventParseOutcome::EventRead(length)
        }
        Some(Err(error)) if error.is_data() => match json_value_length(rest) {
            Ok(length) => {
                each(ChromeFilePart::NonEventElement);
                EventParseOutcome::EventRead(length)
            }
            Err(error) if error.is_eof() => EventParseOutcome::BufferEndsEarly,
            Err(_) => EventParseOutcome::InvalidJson,
        },
        Some(Err(error)) if !error.is_eof() => EventParseOutcome::InvalidJson,
        Some(Err(_)) | None => EventParseOutcome::BufferEndsEarly,
    }
}

struct ChromeDocumentReader<R, F> {
    file_buffer: TraceFileBuffer<R>,
    visit_event_or_field: F,
    read_summary: ChromeFileReadSummary,
}

impl<R: Read, F: FnMut(ChromeFilePart<'_>)> ChromeDocumentReader<R, F> {
    fn read_chrome_document(&mut self) -> Result<(), String> {
        self.file_buffer.peek_non_space_byte()?;
        if self.file_buffer.unparsed_bytes().starts_with(b"\xef\xbb\xbf") {
            self.file_buffer.parse_offset += 3;
        }
        match self.file_buffer.consume_non_space_byte()? {
            Some(b'[') => self.read_event_array(),
            Some(b'{') => self.read_top_level_fields(),
            _ => Err("expected an object with `traceEvents`, or an array of events".to_owned()),
        }
    }

    fn read_top_level_fields(&mut self) -> Result<(), String> {
        if self.file_buffer.peek_non_space_byte()? == Some(b'}') {
            return Ok(());
        }
        loop {
            self.file_buffer.peek_non_space_byte()?;
            let length = self.file_buffer.buffer_next_json_value()?;
            let key =
                serde_json::from_slice::<String>(&self.file_buffer.unparsed_bytes()[..length])
                    .map_err(|error| error.to_string())?;
            self.file_buffer.parse_offset += length;
            if self.file_buffer.consume_non_space_byte()? != Some(b':') {
                return Err(format!("expected a value of `{key}`"));
            }
            match key.as_str() {
                "traceEvents" => match self.file_buffer.consume_non_space_byte()? {
                    Some(b'[') => self.read_event_array()?,
                    _ => return Err("`traceEvents` is not an array of events".to_owned()),
                },
                key if KEPT_TOP_LEVEL_FIELDS.contains(&key) => {
                    self.file_buffer.peek_non_space_byte()?;
                    let length = self.file_buffer.buffer_next_json_value()?;
                    let value =
                        String::from_utf8_lossy(&self.file_buffer.unparsed_bytes()[..length]);
                    (self.visit_event_or_field)(ChromeFilePart::TopLevelField(key, &value));
                    self.file_buffer.parse_offset += length;
                }
                _ => self.file_buffer.skip_json_value()?,
            }
            match self.file_buffer.consume_non_space_byte()? {
                Some(b',') => {}
                Some(b'}') => return Ok(()),
                _ => return Err("the file ends before its last bracket".to_owned()),
            }
        }
    }

    /// Reads the events of the array after its opening bracket, and consumes the closing bracket.
    fn read_event_array(&mut self) -> Result<(), String> {
        self.read_summary.has_event_array = true;
        loop {
            match self.file_buffer.peek_non_space_byte()? {
                Some(b']') => {
                    self.file_buffer.parse_offset += 1;
                    return Ok(());
                }
                Some(b',') => self.file_buffer.parse_offset += 1,
                Some(b'{') => self.read_or_skip_event()?,
                Some(_) => self.skip_non_object_element()?,
                None => return Err("the array of events has no end".to_owned()),
            }
        }
    }

    /// Skips an element of the event array that is not a JSON object.
    fn skip_non_object_element(&mut self) -> Result<(), String> {
        let length = self.file_buffer.buffer_next_json_value()?;
        (self.visit_event_or_field)(ChromeFilePart::NonEventElement);
        self.file_buffer.parse_offset += length;
        Ok(())
    }

    fn read_or_skip_event(&mut self) -> Result<(), String> {
        loop {
            match parse_buffered_event(&self.file_buffer, &mut self.visit_event_or_field) {
                EventParseOutcome::EventRead(length) => {
                    self.file_buffer.parse_offset += length;
                    return Ok(());
                }
                EventParseOutcome::BufferEndsEarly if !self.file_buffer.file_end_reached => {
                    self.file_buffer.read_more_of_trace_file()?;
                }
                EventParseOutcome::BufferEndsEarly | EventParseOutcome::InvalidJson => {
                    return self.skip_or_repair_broken_event();
                }
            }
        }
    }

    /// Skips an event that is invalid JSON; an event that is invalid only as UTF-8 is passed on
    /// with replacement characters.
    fn skip_or_repair_broken_event(&mut self) -> Result<(), String> {
        let Some(EndOfBrokenEvent { end_offset: end, next_event_offset: next }) =
            self.file_buffer.read_until_event_boundary()?
        else {
            let why = json_value_length(self.file_buffer.unparsed_bytes())
                .err()
                .map(|error| error.to_string());
            self.file_buffer.parse_offset = self.file_buffer.buffered_bytes.len();
            return Err(why.unwrap_or_else(|| "the file ends within an event".to_owned()));
        };
        let text = String::from_utf8_lossy(&self.file_buffer.unparsed_bytes()[..end]);
        match serde_json::from_str::<ChromeTraceEvent<'_>>(&text) {
            Ok(event) => {
                (self.visit_event_or_field)(ChromeFilePart::Event(&event));
                // A multi-byte character that the buffer's end cuts also makes the parser report
                // invalid JSON.
                self.read_summary.invalid_utf8_events += u64::from(matches!(text, Cow::Owned(_)));
            }
            Err(_) => self.read_summary.invalid_json_events += 1,
        }
        self.file_buffer.parse_offset += next;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a test document in pieces of at most seven bytes; returns the names of its events and
    /// the summary of the read.
    fn read_event_names_in_small_pieces(text: &[u8]) -> (Vec<String>, ChromeFileReadSummary) {
        struct SlowReader<'a>(&'a [u8]);
        impl Read for SlowReader<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
                let length = buffer.len().min(7).min(self.0.len());
                buffer[..length].copy_from_slice(&self.0[..length]);
                self.0 = &self.0[length..];
                Ok(length)
            }
        }
        let mut names = Vec::new();
        let contents = stream_chrome_events_and_fields(SlowReader(text), |part| {
            if let ChromeFilePart::Event(event) = part {
                names.push(event.name.clone().into_owned());
            }
        });
        (names, contents)
    }

    #[test]
    fn reading_continues_with_the_next_event_after_a_broken_one() {
        let text = br#"{"a": [{"x": "]}"}], "traceEvents": [
            {"ph": "X", "name": "first"},
            {"ph": "X", "name": "say "hello", or "}, {" even"},
            {"ph": "X", "name": "second", "args": {"k": "},{ \" "}}, {"ph": "X", "name": "a"b"} ], "z": 1}"#;
        let (names, contents) = read_event_names_in_small_pieces(text);
        assert_eq!(names, ["first", "second"]);
        assert_eq!((contents.invalid_json_events, contents.invalid_utf8_events), (2, 0));
        assert_eq!(contents.read_error, None);
    }

    #[test]
    fn control_characters_break_an_event_but_invalid_utf8_does_not() {
        let text = b"[{\"name\": \"a\x01b\nc\"}, {\"name\": \"\xff\"}, {\"name\": \"d\"}]";
        let (names, contents) = read_event_names_in_small_pieces(text);
        assert_eq!(names, ["\u{fffd}", "d"]);
        assert_eq!((contents.invalid_json_events, contents.invalid_utf8_events), (1, 1));
        assert_eq!(contents.read_error, None);
    }

    #[test]
    fn a_truncated_trace_reports_where_reading_ended() {
        let (read, contents) =
            read_event_names_in_small_pieces(br#"{"traceEvents": [{"name": "a"}, {"name": "b"#);
        assert_eq!(read, ["a"]);
        assert!(contents.read_error.is_some_and(|error| error.contains("EOF")));
        let (read, contents) = read_event_names_in_small_pieces(br#"[{"name": "a"}"#);
        assert_eq!(read, ["a"]);
        assert!(contents.read_error.is_some_and(|error| error.contains("no end")));
    }
}
