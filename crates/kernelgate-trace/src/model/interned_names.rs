//! Interned texts: each text is stored once, however many rows use it.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// A text in [`TraceNames`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NameId(pub(crate) u32);

/// All texts of a trace, stored one after the other in one buffer.
#[derive(Debug, Clone, Default)]
pub struct TraceNames {
    text: String,
    /// End position of each text in the buffer.
    ends: Vec<usize>,
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl TraceNames {
    /// The name of a text, the same for the same text.
    pub fn intern_text(&mut self, text: &str) -> NameId {
        let hash = self.hasher.hash_one(text);
        let (all, ends) = (&self.text, &self.ends);
        if let Some(&known) =
            self.index.find(hash, |&known| slice_by_ends(all, ends, known) == text)
        {
            return NameId(known);
        }
        let new = u32::try_from(self.ends.len()).expect("a trace has fewer than 2^32 texts");
        self.text.push_str(text);
        self.ends.push(self.text.len());
        let (all, ends, hasher) = (&self.text, &self.ends, &self.hasher);
        self.index
            .insert_unique(hash, new, |&known| hasher.hash_one(slice_by_ends(all, ends, known)));
        NameId(new)
    }

    /// The name of bytes that should be UTF-8; other bytes become U+FFFD.
    pub fn intern_bytes(&mut self, bytes: &[u8]) -> NameId {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.intern_text(text),
            Err(_) => self.intern_text(&String::from_utf8_lossy(bytes)),
        }
    }

    /// The name of a text that was interned before.
    pub fn find(&self, text: &str) -> Option<NameId> {
        let hash = self.hasher.hash_one(text);
        self.index
            .find(hash, |&known| slice_by_ends(&self.text, &self.ends, known) == text)
            .map(|&known| NameId(known))
    }

    /// The text that a name refers to.
    pub fn text(&self, name: NameId) -> &str {
        slice_by_ends(&self.text, &self.ends, name.0)
    }

    /// Number of interned texts.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether no text is stored.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

fn slice_by_ends<'a>(all: &'a str, ends: &[usize], index: u32) -> &'a str {
    let index = index as usize;
    let start = if index == 0 { 0 } else { ends[index - 1] };
    &all[start..ends[index]]
}

/// `step_12/layer_3` as `step_#/layer_#`: ranges that repeat with other numbers in their names.
pub fn without_numbers_in_name(path: &str) -> String {
    let mut text = String::new();
    for c in path.chars() {
        match c {
            '0'..='9' if text.ends_with('#') => {}
            '0'..='9' => text.push('#'),
            c => text.push(c),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn equal_texts_of_a_trace_share_one_name() {
        let mut names = TraceNames::default();
        let all: Vec<NameId> =
            (0..5000).map(|i| names.intern_text(&format!("kernel {i}"))).collect();
        let empty = names.intern_text("");
        assert_eq!(names.len(), 5001);
        for (i, &name) in all.iter().enumerate() {
            assert_eq!(names.text(name), format!("kernel {i}"));
            assert_eq!(names.intern_text(&format!("kernel {i}")), name);
        }
        assert_eq!(names.text(empty), "");
        assert_eq!(names.find("kernel 17"), Some(all[17]));
        assert_eq!(names.find("kernel"), None);
        let broken = names.intern_bytes(b"half \xc3");
        assert_eq!(names.text(broken), "half \u{fffd}");
    }

    #[test]
    fn names_that_differ_only_in_numbers_share_a_pattern() {
        assert_eq!(without_numbers_in_name("step_12/layer_3/mlp"), "step_#/layer_#/mlp");
        assert_eq!(without_numbers_in_name("Forward"), "Forward");
    }
}
