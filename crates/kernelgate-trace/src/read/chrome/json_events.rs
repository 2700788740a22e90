//! Reads the events of a JSON file one by one, even if some of them are not valid JSON.
//!
//! PyTorch writes the source lines of stack frames as they are, with raw control characters and
//! quotation marks. A broken event is skipped, and reading continues with the next event.

use std::borrow::Cow;
use std::io::Read;

use serde::de::IgnoredAny;

use super::event::ChromeEvent;

/// Number of bytes that are read at a time.
const READ_CHUNK: usize = 1 << 18;
/// Bytes of the longest event or field.
const MAX_EVENT_BYTES: usize = 64 << 20;
/// Fields by which a file describes itself, and its devices; others are skipped.
const DESCRIBING_FIELDS: &[&str] = &[
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
/// JSON keys with which an event may begin.
const EVENT_KEYS: &[&[u8]] = &[
    b"ph", b"cat", b"name", b"pid", b"tid", b"ts", b"dur", b"id", b"args", b"s", b"bp", b"cname",
    b"tts",
];

/// A part of a Chrome trace file: an event or a field.
pub(super) enum ChromePart<'a> {
    /// A field beside the events, with its value as written.
    Field(&'a str, &'a str),
    Event(&'a ChromeEvent<'a>),
    /// An element of the events that is well-formed and not an event.
    Other,
}

/// Summary of a file.
#[derive(Debug, Default)]
pub(super) struct FileContents {
    /// Whether the document has an array of events.
    pub has_events: bool,
    /// Events with texts that are not UTF-8.
    pub invalid: u64,
    /// Number of events that are not valid JSON.
    pub broken: u64,
    /// Reason why reading ended before the end of the file.
    pub error: Option<String>,
}

/// Reads a file to its end, or up to the first broken part.
pub(super) fn read_document(source: impl Read, each: impl FnMut(ChromePart<'_>)) -> FileContents {
    let window = FileWindow { source, bytes: Vec::new(), at: 0, ended: false, failed: None };
    let mut document = ChromeDocument { window, each, contents: FileContents::default() };
    let outcome = document.read_whole_document();
    document.contents.error = outcome.err();
    document.contents
}

/// Part of a trace file that is in memory.
struct FileWindow<R> {
    source: R,
    bytes: Vec<u8>,
    /// Index of the next byte that is parsed.
    at: usize,
    ended: bool,
    /// Reason why the end of the file cannot be read.
    failed: Option<String>,
}

impl<R: Read> FileWindow<R> {
    fn rest_of_buffer(&self) -> &[u8] {
        &self.bytes[self.at..]
    }

    /// Reads on; `false` at the end of the file. The buffer doubles, so that a long value is parsed
    /// again a few times only.
    fn read_more_of_file(&mut self) -> Result<bool, String> {
        if self.ended {
            return Ok(false);
        }
        self.bytes.drain(..self.at);
        self.at = 0;
        let length = self.bytes.len();
        if length > MAX_EVENT_BYTES {
            return Err(format!("a value of more than {} MiB", MAX_EVENT_BYTES >> 20));
        }
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let chunk = length.max(READ_CHUNK) as u64;
        let read = (&mut self.source).take(chunk).read_to_end(&mut self.bytes);
        self.failed = read.err().map(|error| error.to_string());
        match &self.failed {
            // Bytes before the error are parsed first.
            Some(failed) if self.bytes.len() == length => Err(failed.clone()),
            _ => {
                self.ended = self.bytes.len() == length;
                Ok(!self.ended)
            }
        }
    }

    /// Returns the next byte that is not white space, without consuming it.
    fn peek_byte(&mut self) -> Result<Option<u8>, String> {
        loop {
            let spaces = leading_spaces(self.rest_of_buffer());
            self.at += spaces;
            if let Some(&byte) = self.rest_of_buffer().first() {
                return Ok(Some(byte));
            }
            if !self.read_more_of_file()? {
                return Ok(None);
            }
        }
    }

    /// Takes the next byte that is not white space.
    fn next(&mut self) -> Result<Option<u8>, String> {
        let byte = self.peek_byte()?;
        self.at += usize::from(byte.is_some());
        Ok(byte)
    }

    /// The length of the next value, which is in memory afterwards.
    fn buffer_next_value(&mut self) -> Result<usize, String> {
        loop {
            match value_length(self.rest_of_buffer()) {
                Ok(length) if self.at + length < self.bytes.len() || self.ended => {
                    return Ok(length);
                }
                Err(error) if !error.is_eof() => return Err(error.to_string()),
                outcome => {
                    if !self.read_more_of_file()? {
                        return outcome.map_err(|error| error.to_string());
                    }
                }
            }
        }
    }

    /// Skips a value without keeping it, however long it is.
    fn skip_value(&mut self) -> Result<(), String> {
        let (mut depth, mut text, mut escaped) = (0usize, false, false);
        self.peek_byte()?;
        loop {
            for (index, &byte) in self.rest_of_buffer().iter().enumerate() {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' if text => escaped = true,
                    b'"' => text = !text,
                    _ if text => {}
                    b'{' | b'[' => depth += 1,
                    b'}' | b']' | b',' if depth == 0 => {
                        self.at += index;
                        return Ok(());
                    }
                    b'}' | b']' => depth -= 1,
                    _ => {}
                }
            }
            self.at = self.bytes.len();
            if !self.read_more_of_file()? {
                return Err("the file ends within a value".to_owned());
            }
        }
    }

    /// Returns where the event that begins here ends, and where the next one or the end of the
    /// array begins.
    fn find_event_boundary(&mut self) -> Result<Option<EventBoundary>, String> {
        // Enough to recognise a boundary that is only partly in memory.
        const READ_MARGIN: usize = 256;
        let mut from = 0;
        loop {
            let rest = self.rest_of_buffer();
            if let Some(found) = find_event_boundary(rest, from) {
                return Ok(Some(found));
            }
            from = rest.len().saturating_sub(READ_MARGIN);
            if !self.read_more_of_file()? {
                return Ok(None);
            }
        }
    }
}

fn leading_spaces(bytes: &[u8]) -> usize {
    bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

/// Length of the JSON value at the start of `bytes`.
fn value_length(bytes: &[u8]) -> serde_json::Result<usize> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<IgnoredAny>();
    match values.next() {
        Some(Ok(_)) => Ok(values.byte_offset()),
        Some(Err(error)) => Err(error),
        None => serde_json::from_slice::<IgnoredAny>(b"").map(|_| 0),
    }
}

/// Position where a broken event ends.
struct EventBoundary {
    /// Index after the closing bracket of the broken event.
    end: usize,
    /// At the next event, or at the bracket that closes the array.
    next: usize,
}

/// Finds the first closing bracket behind which an event begins or the array ends.
fn find_event_boundary(bytes: &[u8], from: usize) -> Option<EventBoundary> {
    let behind = |at: usize| at + leading_spaces(&bytes[at..]);
    let byte = |at: usize| bytes.get(at).copied();
    let closing = bytes.iter().enumerate().skip(from).filter(|&(_, &byte)| byte == b'}');
    for (index, _) in closing {
        let next = behind(index + 1);
        let found = match byte(next) {
            Some(b',') => Some(behind(next + 1)).filter(|&at| begins_chrome_event(&bytes[at..])),
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
            return Some(EventBoundary { end: index + 1, next });
        }
    }
    None
}

/// Returns whether bytes begin as `{"ph":`, with any key of an event.
fn begins_chrome_event(bytes: &[u8]) -> bool {
    let Some(inside) = bytes.strip_prefix(b"{") else { return false };
    let Some(text) = inside[leading_spaces(inside)..].strip_prefix(b"\"") else { return false };
    EVENT_KEYS.iter().any(|key| {
        let colon = text.strip_prefix(*key).and_then(|rest| rest.strip_prefix(b"\""));
        colon.is_some_and(|rest| rest[leading_spaces(rest)..].starts_with(b":"))
    })
}

/// Result of parsing one event.
enum EventStep {
    /// The event was passed on, and has this length in bytes.
    Read(usize),
    /// The end of the event is not in memory.
    CutOff,
    /// The event is not valid JSON.
    Broken,
}

fn parse_step<R: Read>(window: &FileWindow<R>, each: &mut impl FnMut(ChromePart<'_>)) -> EventStep {
    let rest = window.rest_of_buffer();
    let mut values = serde_json::Deserializer::from_slice(rest).into_iter::<ChromeEvent<'_>>();
    match values.next() {
        Some(Ok(event)) => {
            let length = values.byte_offset();
            match rest.get(length + leading_spaces(&rest[length..])) {
                Some(b',' | b']') => {}
                None if window.ended => {}
                None => return EventStep::CutOff,
                // The last bracket of the event lies inside a text.
                Some(_) => return EventStep::Broken,
            }
            each(ChromePart::Event(&event));
            EventStep::Read(length)
        }
        Some(Err(error)) if error.is_data() => match value_length(rest) {
            Ok(length) => {
                each(ChromePart::Other);
                EventStep::Read(length)
            }
            Err(error) if error.is_eof() => EventStep::CutOff,
            Err(_) => EventStep::Broken,
        },
        Some(Err(error)) if !error.is_eof() => EventStep::Broken,
        Some(Err(_)) | None => EventStep::CutOff,
    }
}

struct ChromeDocument<R, F> {
    window: FileWindow<R>,
    each: F,
    contents: FileContents,
}

impl<R: Read, F: FnMut(ChromePart<'_>)> ChromeDocument<R, F> {
    fn read_whole_document(&mut self) -> Result<(), String> {
        self.window.peek_byte()?;
        if self.window.rest_of_buffer().starts_with(b"\xef\xbb\xbf") {
            self.window.at += 3;
        }
        match self.window.next()? {
            Some(b'[') => self.read_event_array(),
            Some(b'{') => self.read_fields(),
            _ => Err("expected an object with `traceEvents`, or an array of events".to_owned()),
        }
    }

    fn read_fields(&mut self) -> Result<(), String> {
        if self.window.peek_byte()? == Some(b'}') {
            return Ok(());
        }
        loop {
            self.window.peek_byte()?;
            let length = self.window.buffer_next_value()?;
            let key = serde_json::from_slice::<String>(&self.window.rest_of_buffer()[..length])
                .map_err(|error| error.to_string())?;
            self.window.at += length;
            if self.window.next()? != Some(b':') {
                return Err(format!("expected a value of `{key}`"));
            }
            match key.as_str() {
                "traceEvents" => match self.window.next()? {
                    Some(b'[') => self.read_event_array()?,
                    _ => return Err("`traceEvents` is not an array of events".to_owned()),
                },
                key if DESCRIBING_FIELDS.contains(&key) => {
                    self.window.peek_byte()?;
                    let length = self.window.buffer_next_value()?;
                    let value = String::from_utf8_lossy(&self.window.rest_of_buffer()[..length]);
                    (self.each)(ChromePart::Field(key, &value));
                    self.window.at += length;
                }
                _ => self.window.skip_value()?,
            }
            match self.window.next()? {
                Some(b',') => {}
                Some(b'}') => return Ok(()),
                _ => return Err("the file ends before its last bracket".to_owned()),
            }
        }
    }

    /// Reads the events after the opening bracket of their array, and the closing bracket.
    fn read_event_array(&mut self) -> Result<(), String> {
        self.contents.has_events = true;
        loop {
            match self.window.peek_byte()? {
                Some(b']') => {
                    self.window.at += 1;
                    return Ok(());
                }
                Some(b',') => self.window.at += 1,
                Some(b'{') => self.read_event()?,
                Some(_) => self.skip_other_element()?,
                None => return Err("the array of events has no end".to_owned()),
            }
        }
    }

    /// An element that is not an object.
    fn skip_other_element(&mut self) -> Result<(), String> {
        let length = self.window.buffer_next_value()?;
        (self.each)(ChromePart::Other);
        self.window.at += length;
        Ok(())
    }

    fn read_event(&mut self) -> Result<(), String> {
        loop {
            match parse_step(&self.window, &mut self.each) {
                EventStep::Read(length) => {
                    self.window.at += length;
                    return Ok(());
                }
                EventStep::CutOff if !self.window.ended => {
                    self.window.read_more_of_file()?;
                }
                EventStep::CutOff | EventStep::Broken => return self.skip_broken_event(),
            }
        }
    }

    /// Skips an event that is not JSON, unless only its texts are not UTF-8.
    fn skip_broken_event(&mut self) -> Result<(), String> {
        let Some(EventBoundary { end, next }) = self.window.find_event_boundary()? else {
            let why =
                value_length(self.window.rest_of_buffer()).err().map(|error| error.to_string());
            self.window.at = self.window.bytes.len();
            return Err(why.unwrap_or_else(|| "the file ends within an event".to_owned()));
        };
        let text = String::from_utf8_lossy(&self.window.rest_of_buffer()[..end]);
        match serde_json::from_str::<ChromeEvent<'_>>(&text) {
            Ok(event) => {
                (self.each)(ChromePart::Event(&event));
                // A character that is cut by the end of the buffer also looks broken.
                self.contents.invalid += u64::from(matches!(text, Cow::Owned(_)));
            }
            Err(_) => self.contents.broken += 1,
        }
        self.window.at += next;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of the events of a text, read in small pieces, and what it consists of.
    fn event_names(text: &[u8]) -> (Vec<String>, FileContents) {
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
        let contents = read_document(SlowReader(text), |part| {
            if let ChromePart::Event(event) = part {
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
        let (names, contents) = event_names(text);
        assert_eq!(names, ["first", "second"]);
        assert_eq!((contents.broken, contents.invalid), (2, 0));
        assert_eq!(contents.error, None);
    }

    #[test]
    fn a_trace_event_with_control_characters_is_skipped() {
        let text = b"[{\"name\": \"a\x01b\nc\"}, {\"name\": \"\xff\"}, {\"name\": \"d\"}]";
        let (names, contents) = event_names(text);
        assert_eq!(names, ["\u{fffd}", "d"]);
        assert_eq!((contents.broken, contents.invalid), (1, 1));
        assert_eq!(contents.error, None);
    }

    #[test]
    fn a_truncated_trace_reports_where_reading_ended() {
        let (read, contents) = event_names(br#"{"traceEvents": [{"name": "a"}, {"name": "b"#);
        assert_eq!(read, ["a"]);
        assert!(contents.error.is_some_and(|error| error.contains("EOF")));
        let (read, contents) = event_names(br#"[{"name": "a"}"#);
        assert_eq!(read, ["a"]);
        assert!(contents.error.is_some_and(|error| error.contains("no end")));
    }
}
