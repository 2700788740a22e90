//! Mutations of a text or of bytes: deterministic, each from a number.

use std::ops::Range;

use rand::rand_core::SeedableRng;
use rand::{RngExt as _, seq::IndexedRandom as _};
use rand_chacha::ChaCha8Rng;

/// Syntax of the input files of a fuzzed reader, which decides how the files are mutated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FuzzInputSyntax {
    /// JSON: values and members are replaced, removed, repeated and exchanged.
    Json,
    /// Text of lines, such as TOML, CSV and output of a program. Mutations change its words and
    /// lines.
    TextLines,
    /// Inputs of any other syntax: mutations change arbitrary bytes.
    ArbitraryBytes,
}

/// An input that a reader accepts, with the pieces that mutations work on.
pub struct FuzzSeedFile {
    /// Name of the seed file in the reader's corpus.
    pub corpus_file_name: String,
    content_bytes: Vec<u8>,
    syntax: FuzzInputSyntax,
    /// Byte ranges of the values of a JSON input, or of the words of a text.
    value_byte_ranges: Vec<Range<usize>>,
    /// Byte ranges of JSON members and list items with the comma behind them, or of the lines of a
    /// text.
    member_or_line_ranges: Vec<Range<usize>>,
}

/// Unusual JSON values, which file readers seldom meet.
const RARE_INPUT_VALUES: [&str; 44] = [
    "-1",
    "0",
    "-0.0",
    "1",
    "1e308",
    "-1e308",
    "1e309",
    "1e-320",
    "0.1",
    "NaN",
    "Infinity",
    "-inf",
    "null",
    "true",
    "false",
    "\"\"",
    "[]",
    "{}",
    "[null]",
    "[1e300,-1]",
    "{\"a\":1}",
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "4294967295",
    "4294967296",
    "2147483648",
    "65536",
    "1e18",
    "1e19",
    "4503599627370497.5",
    "\"\\u001b[2J\"",
    "\"\\u202e\"",
    "\"\\ud800\"",
    "\"../../x\"",
    "\"a/b\"",
    "\"=cmd|' /C calc'!A0\"",
    "\"@all\"",
    "\"<script>\"",
    "\"NaN\"",
    "\"-1\"",
    "1.",
];

/// Extreme values that overwrite bytes of lengths, counts and offsets in an input.
const EXTREME_VALUES_TO_WRITE: [u64; 10] =
    [0, 1, 0x7f, 0x80, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, i64::MAX as u64, u64::MAX];

impl FuzzSeedFile {
    pub fn new(name: &str, syntax: FuzzInputSyntax, bytes: Vec<u8>) -> Self {
        let (values, members) = match syntax {
            FuzzInputSyntax::Json => value_and_member_ranges_in_json(&bytes),
            FuzzInputSyntax::TextLines => {
                (word_ranges_in_text(&bytes), line_ranges_in_text(&bytes))
            }
            FuzzInputSyntax::ArbitraryBytes => (Vec::new(), Vec::new()),
        };
        Self {
            corpus_file_name: name.to_owned(),
            content_bytes: bytes,
            syntax,
            value_byte_ranges: values,
            member_or_line_ranges: members,
        }
    }

    pub fn content_bytes(&self) -> &[u8] {
        &self.content_bytes
    }

    /// Returns mutation `number` of the seed file, which has one or two changes.
    pub fn mutated_bytes(&self, number: u64) -> Vec<u8> {
        let mut random = ChaCha8Rng::seed_from_u64(number);
        let mut bytes = self.bytes_with_one_change(&mut random);
        match random.random_range(0..8) {
            0 => change_random_bytes(&mut bytes, &mut random),
            1 => {
                bytes = Self::new(&self.corpus_file_name, self.syntax, bytes)
                    .bytes_with_one_change(&mut random)
            }
            _ => {}
        }
        bytes
    }

    fn bytes_with_one_change(&self, random: &mut ChaCha8Rng) -> Vec<u8> {
        let mut bytes = self.content_bytes.clone();
        let (Some(value), Some(member)) = (
            self.value_byte_ranges.choose(random).cloned(),
            self.member_or_line_ranges.choose(random).cloned(),
        ) else {
            change_random_bytes(&mut bytes, random);
            return bytes;
        };
        match random.random_range(0..24) {
            0..=11 => drop(
                bytes.splice(value.clone(), unusual_json_value(&self.content_bytes[value], random)),
            ),
            12..=15 => drop(bytes.drain(member)),
            16..=17 => {
                let again = bytes[member.clone()].to_vec();
                drop(bytes.splice(member.end..member.end, again));
            }
            18..=20 => {
                let other = self.value_byte_ranges.choose(random).cloned().unwrap_or(value.clone());
                let other = self.content_bytes[other].to_vec();
                drop(bytes.splice(value, other));
            }
            21 => bytes.truncate(random.random_range(0..=bytes.len())),
            _ => change_random_bytes(&mut bytes, random),
        }
        bytes
    }
}

/// Returns an unusual JSON value that replaces `value` in a mutated input.
fn unusual_json_value(value: &[u8], random: &mut ChaCha8Rng) -> Vec<u8> {
    let number: Option<f64> = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
    let text = |text: String| format!("\"{text}\"").into_bytes();
    match (random.random_range(0..12), number) {
        (0, _) => text("x".repeat(10_000)),
        (1, _) => text("é\\u0000\\n\\t\\u009b".repeat(20)),
        (2, _) => [vec![b'['; 200], vec![b']'; 200]].concat(),
        (3, _) => random.random::<u64>().to_string().into_bytes(),
        (4, _) => format!("{:e}", f64::from_bits(random.random())).into_bytes(),
        (5, Some(number)) => (-number).to_string().into_bytes(),
        (6, Some(number)) => (number * 1e6).to_string().into_bytes(),
        (7, Some(number)) => (number + 1.0).to_string().into_bytes(),
        (8, Some(number)) => (number * 1e-6).to_string().into_bytes(),
        (9, _) => {
            // One character of the JSON value becomes another character.
            let mut changed = value.to_vec();
            if let Some(byte) = changed.choose_random_element_mut(random) {
                *byte = *b"0a-\"{}[],:/\\\n\x1b".choose(random).unwrap();
            }
            changed
        }
        _ => RARE_INPUT_VALUES.choose(random).unwrap().as_bytes().to_vec(),
    }
}

trait ChooseRandomElement {
    fn choose_random_element_mut(&mut self, random: &mut ChaCha8Rng) -> Option<&mut u8>;
}

impl ChooseRandomElement for Vec<u8> {
    fn choose_random_element_mut(&mut self, random: &mut ChaCha8Rng) -> Option<&mut u8> {
        let at = random.random_range(0..self.len().max(1));
        self.get_mut(at)
    }
}

/// Changes arbitrary bytes.
pub fn change_random_bytes(bytes: &mut Vec<u8>, random: &mut ChaCha8Rng) {
    let length = bytes.len();
    let at = random.random_range(0..=length);
    let end = (at + random.random_range(0..64_usize)).min(length);
    let extreme = *EXTREME_VALUES_TO_WRITE.choose(random).unwrap();
    match random.random_range(0..10) {
        0 => bytes.truncate(at),
        1 => drop(bytes.drain(at..end)),
        2 => {
            let again = bytes[at..end].to_vec();
            drop(bytes.splice(at..at, again));
        }
        3 => drop(bytes.splice(at..at, (0..8).map(|_| random.random::<u8>()))),
        4 => bytes[at..end].fill(extreme as u8),
        5 | 6 => {
            let width = *[1, 2, 4, 8].choose(random).unwrap();
            let at = if random.random() { at / width * width } else { at };
            for (to, from) in bytes.iter_mut().skip(at).zip(&extreme.to_le_bytes()[..width]) {
                *to = *from;
            }
        }
        7 => {
            let from = random.random_range(0..=length - (end - at));
            bytes.copy_within(at..end, from);
        }
        _ => {
            for _ in 0..random.random_range(1..4) {
                let bit = 1 << random.random_range(0..8);
                if let Some(byte) = bytes.choose_random_element_mut(random) {
                    *byte ^= bit;
                }
            }
        }
    }
}

/// Positions of values and members in a JSON text, valid or not.
fn value_and_member_ranges_in_json(bytes: &[u8]) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
    let (mut values, mut members) = (Vec::new(), Vec::new());
    // Start of each open JSON container, and start of the member in it.
    let mut open: Vec<(usize, usize)> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        at += 1;
        match bytes[start] {
            b'{' | b'[' => open.push((start, at)),
            b'}' | b']' => {
                if let Some((from, member)) = open.pop() {
                    members.push(member..start);
                    values.push(from..at);
                }
            }
            b',' => {
                if let Some((_, member)) = open.last_mut() {
                    members.push(*member..at);
                    *member = at;
                }
            }
            b'"' => {
                while at < bytes.len() && bytes[at] != b'"' {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
                at = (at + 1).min(bytes.len());
                values.push(start..at);
            }
            byte if byte.is_ascii_alphanumeric() || byte == b'-' => {
                let ends = |byte: &u8| matches!(byte, b',' | b'}' | b']' | b'\n' | b' ');
                at += bytes[at..].iter().position(ends).unwrap_or(bytes.len() - at);
                values.push(start..at);
            }
            _ => {}
        }
    }
    (values, members)
}

fn word_ranges_in_text(bytes: &[u8]) -> Vec<Range<usize>> {
    let separator =
        |byte: &u8| !byte.is_ascii_alphanumeric() && !matches!(byte, b'.' | b'-' | b'_');
    let mut at = 0;
    let mut words = Vec::new();
    for word in bytes.split(separator) {
        if !word.is_empty() {
            words.push(at..at + word.len());
        }
        at += word.len() + 1;
    }
    words
}

fn line_ranges_in_text(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut at = 0;
    let line = |line: &[u8]| {
        let start = at;
        at += line.len();
        start..at
    };
    bytes.split_inclusive(|byte| *byte == b'\n').map(line).collect()
}
