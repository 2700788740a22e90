//! Interned texts: each text is stored once, however many rows use it.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// A text in [`InternedTraceNames`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct InternedNameId(pub(crate) u32);

/// All interned texts of a trace, concatenated in one buffer.
#[derive(Debug, Clone, Default)]
pub struct InternedTraceNames {
    concatenated_texts: String,
    /// End offset of each interned text in the buffer, in bytes.
    text_end_offsets: Vec<usize>,
    id_by_text_hash: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl InternedTraceNames {
    /// Stores the text if it is new, and returns its id; equal texts have equal ids.
    pub fn intern_text(&mut self, text: &str) -> InternedNameId {
        let hash = self.hasher.hash_one(text);
        let (all, ends) = (&self.concatenated_texts, &self.text_end_offsets);
        if let Some(&known) = self
            .id_by_text_hash
            .find(hash, |&known| concatenated_text_at_index(all, ends, known) == text)
        {
            return InternedNameId(known);
        }
        let new =
            u32::try_from(self.text_end_offsets.len()).expect("a trace has fewer than 2^32 texts");
        self.concatenated_texts.push_str(text);
        self.text_end_offsets.push(self.concatenated_texts.len());
        let (all, ends, hasher) = (&self.concatenated_texts, &self.text_end_offsets, &self.hasher);
        self.id_by_text_hash.insert_unique(hash, new, |&known| {
            hasher.hash_one(concatenated_text_at_index(all, ends, known))
        });
        InternedNameId(new)
    }

    /// Stores bytes as text and returns the id of the text; invalid UTF-8 is replaced by U+FFFD.
    pub fn intern_bytes_as_text(&mut self, bytes: &[u8]) -> InternedNameId {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.intern_text(text),
            Err(_) => self.intern_text(&String::from_utf8_lossy(bytes)),
        }
    }

    /// Returns the id of a text, or `None` if the text was never interned.
    pub fn find_interned_text(&self, text: &str) -> Option<InternedNameId> {
        let hash = self.hasher.hash_one(text);
        self.id_by_text_hash
            .find(hash, |&known| {
                concatenated_text_at_index(&self.concatenated_texts, &self.text_end_offsets, known)
                    == text
            })
            .map(|&known| InternedNameId(known))
    }

    /// Returns the text that is interned under this id.
    pub fn text_of_name(&self, name: InternedNameId) -> &str {
        concatenated_text_at_index(&self.concatenated_texts, &self.text_end_offsets, name.0)
    }

    /// Number of interned texts.
    pub fn interned_text_count(&self) -> usize {
        self.text_end_offsets.len()
    }

    /// Whether no text is interned.
    pub fn has_no_text(&self) -> bool {
        self.text_end_offsets.is_empty()
    }
}

fn concatenated_text_at_index<'a>(all: &'a str, ends: &[usize], index: u32) -> &'a str {
    let index = index as usize;
    let start = if index == 0 { 0 } else { ends[index - 1] };
    &all[start..ends[index]]
}

/// Replaces each run of digits by `#`: `step_12/layer_3` becomes `step_#/layer_#`, so that repeated
/// ranges share one name.
pub fn replace_digits_by_number_sign(path: &str) -> String {
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
    fn equal_texts_are_interned_under_one_id() {
        let mut names = InternedTraceNames::default();
        let all: Vec<InternedNameId> =
            (0..5000).map(|i| names.intern_text(&format!("kernel {i}"))).collect();
        let empty = names.intern_text("");
        assert_eq!(names.interned_text_count(), 5001);
        for (i, &name) in all.iter().enumerate() {
            assert_eq!(names.text_of_name(name), format!("kernel {i}"));
            assert_eq!(names.intern_text(&format!("kernel {i}")), name);
        }
        assert_eq!(names.text_of_name(empty), "");
        assert_eq!(names.find_interned_text("kernel 17"), Some(all[17]));
        assert_eq!(names.find_interned_text("kernel"), None);
        let broken = names.intern_bytes_as_text(b"half \xc3");
        assert_eq!(names.text_of_name(broken), "half \u{fffd}");
    }

    #[test]
    fn names_that_differ_only_in_digits_become_equal() {
        assert_eq!(replace_digits_by_number_sign("step_12/layer_3/mlp"), "step_#/layer_#/mlp");
        assert_eq!(replace_digits_by_number_sign("Forward"), "Forward");
    }
}
