//! Scans a record file before it is read, for its schema, a hash of its values, and text or names
//! that must be refused. The scan keeps no values in memory, however large the file is.

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::record::text;

/// Facts that one scan of a record file found.
#[derive(Default)]
pub(super) struct RecordFileScan {
    /// Value of the field `schema`, if it is a string.
    pub schema_name: Option<String>,
    /// Value of the field `schema_version`, if it is an integer of at least 0.
    pub schema_version: Option<u64>,
    /// Value of the field `checksum`, if the file contains it.
    pub checksum: Option<Value>,
    /// Whether the names in every object are sorted; otherwise the hash of this scan cannot be
    /// compared with the checksum.
    pub json_keys_are_sorted: bool,
    /// Description of the first text with a forbidden control character, or of the first object
    /// with a repeated name.
    pub refused_text: Option<String>,
    hasher: Option<Xxh3Default>,
    /// Buffer for the JSON text of the value that is hashed next.
    json_text_buffer: Vec<u8>,
}

impl RecordFileScan {
    /// Scans one JSON value to its end. The parameter `kind` names the record in errors, `free`
    /// lists the fields that may contain any text, and `sealed` requests the hash.
    ///
    /// # Errors
    /// Fails if the input is not JSON.
    pub fn scan_record_json<'de, D: Deserializer<'de>>(
        input: D,
        kind: &str,
        free: &[&str],
        sealed: bool,
    ) -> Result<RecordFileScan, D::Error> {
        let hasher = sealed.then(Xxh3Default::new);
        let mut scanned = Self { json_keys_are_sorted: true, hasher, ..Self::default() };
        JsonValueToScan {
            scanned: &mut scanned,
            field_name: Some(kind),
            fields_with_any_characters: free,
            is_top_level: true,
        }
        .deserialize(input)?;
        Ok(scanned)
    }

    /// Returns the hash of all values except the checksum; `None` if it was not requested, or if
    /// names were not sorted.
    pub fn hash_of_values_hex(&self) -> Option<String> {
        let hasher = self.hasher.as_ref().filter(|_| self.json_keys_are_sorted)?;
        Some(format!("{:032x}", hasher.digest128()))
    }

    fn add_text_to_hash(&mut self, text: &str) {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(text.as_bytes());
        }
    }

    /// Adds a JSON value to the hash, as the text that `serde_json::Value` prints.
    fn add_json_value_to_hash(&mut self, value: &impl serde::Serialize) {
        if let Some(hasher) = &mut self.hasher {
            self.json_text_buffer.clear();
            // Writing JSON to memory cannot fail, because numbers that were read from JSON are
            // finite.
            let _ = serde_json::to_writer(&mut self.json_text_buffer, value);
            hasher.update(&self.json_text_buffer);
        }
    }

    fn refuse_forbidden_text(&mut self, string: &str, what: impl FnOnce() -> String) {
        if self.refused_text.is_none()
            && let Err(problem) = text::refuse_control_characters(string)
        {
            self.refused_text = Some(format!("{} {problem}", what()));
        }
    }
}

/// The place in a record file at which the scan reads the next JSON value.
struct JsonValueToScan<'a> {
    scanned: &'a mut RecordFileScan,
    /// Name of the field that contains the value; `None` if the field may contain any text.
    field_name: Option<&'a str>,
    fields_with_any_characters: &'a [&'a str],
    /// Whether the value is the whole document.
    is_top_level: bool,
}

impl<'de> DeserializeSeed<'de> for JsonValueToScan<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<(), D::Error> {
        input.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for JsonValueToScan<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("any JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.scanned.add_text_to_hash(if value { "true" } else { "false" });
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.scanned.add_json_value_to_hash(&value);
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.scanned.add_json_value_to_hash(&value);
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.scanned.add_json_value_to_hash(&value);
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.scanned.add_text_to_hash("null");
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        if let Some(field) = self.field_name {
            self.scanned.refuse_forbidden_text(value, || format!("{field}:"));
        }
        self.scanned.add_json_value_to_hash(&value);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Self { scanned, field_name, fields_with_any_characters, .. } = self;
        let mut before = "[";
        loop {
            // Only after an item was read is it known that a comma precedes it, because the list
            // may have ended.
            let node = ListItemToScan {
                preceding_separator: before,
                list_item: JsonValueToScan {
                    scanned,
                    field_name,
                    fields_with_any_characters,
                    is_top_level: false,
                },
            };
            if items.next_element_seed(node)?.is_none() {
                break;
            }
            before = ",";
        }
        scanned.add_text_to_hash(if before == "[" { "[]" } else { "]" });
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let Self {
            scanned,
            field_name: field,
            fields_with_any_characters: free,
            is_top_level: top,
        } = self;
        scanned.add_text_to_hash("{");
        let mut last: Option<String> = None;
        let (mut names, mut ordered) = (Vec::new(), true);
        let mut comma = "";
        while let Some(name) = fields.next_key::<String>()? {
            ordered &= last.as_ref().is_none_or(|last| *last < name);
            names.push(xxh3_64(name.as_bytes()));
            if top && name == "checksum" {
                scanned.checksum = Some(fields.next_value()?);
                last = Some(name);
                continue;
            }
            scanned.add_text_to_hash(comma);
            comma = ",";
            scanned.add_json_value_to_hash(&name);
            scanned.add_text_to_hash(":");
            if top && (name == "schema" || name == "schema_version") {
                let value: Value = fields.next_value()?;
                scanned.add_json_value_to_hash(&value);
                match name.as_str() {
                    "schema" => scanned.schema_name = value.as_str().map(str::to_owned),
                    _ => scanned.schema_version = value.as_u64(),
                }
            } else {
                scanned.refuse_forbidden_text(&name, || "the name".to_owned());
                let field = field.filter(|_| !free.contains(&name.as_str())).map(|_| &*name);
                fields.next_value_seed(JsonValueToScan {
                    scanned,
                    field_name: field,
                    fields_with_any_characters: free,
                    is_top_level: false,
                })?;
            }
            last = Some(name);
        }
        scanned.add_text_to_hash("}");
        if !ordered {
            scanned.json_keys_are_sorted = false;
            names.sort_unstable();
            if scanned.refused_text.is_none() && names.windows(2).any(|pair| pair[0] == pair[1]) {
                scanned.refused_text =
                    Some(format!("{} has a name twice", field.unwrap_or("a field")));
            }
        }
        Ok(())
    }
}

/// An item of a JSON list, with the bracket or comma that precedes it in the hashed text.
struct ListItemToScan<'a> {
    preceding_separator: &'static str,
    list_item: JsonValueToScan<'a>,
}

impl<'de> DeserializeSeed<'de> for ListItemToScan<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<(), D::Error> {
        self.list_item.scanned.add_text_to_hash(self.preceding_separator);
        self.list_item.deserialize(input)
    }
}
