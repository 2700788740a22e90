//! Scans a record file once before it is read: its envelope, a hash of its values, and the first
//! refused text or name. The pass keeps no values in memory, whatever the file's size.

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::record::text;

/// Result of scanning a record file once.
#[derive(Default)]
pub(super) struct ScannedFile {
    /// Value of `schema`, if that is a string.
    pub schema: Option<String>,
    /// Value of `schema_version`, if that is a number from 0.
    pub version: Option<u64>,
    /// Value of the field `checksum`, if the file has one.
    pub checksum: Option<Value>,
    /// Whether the names in every object are sorted as this library sorts them: only then does the
    /// hash cover the values.
    pub ordered: bool,
    /// The first text with a forbidden control character, or the first object that has a name
    /// twice.
    pub refused: Option<String>,
    hasher: Option<Xxh3Default>,
    /// Canonical JSON text of the record, of which the hash is computed.
    text: Vec<u8>,
}

impl ScannedFile {
    /// Reads one JSON value to its end and scans it. `kind` names the record in errors, `free`
    /// lists the fields that may hold any text, and `sealed` requests the hash.
    ///
    /// # Errors
    /// Fails if the input is not JSON.
    pub fn scan_json<'de, D: Deserializer<'de>>(
        input: D,
        kind: &str,
        free: &[&str],
        sealed: bool,
    ) -> Result<ScannedFile, D::Error> {
        let hasher = sealed.then(Xxh3Default::new);
        let mut scanned = Self { ordered: true, hasher, ..Self::default() };
        ScannedNode { scanned: &mut scanned, field: Some(kind), free, top: true }
            .deserialize(input)?;
        Ok(scanned)
    }

    /// Hash of the values without the checksum; `None` if it was not requested, or if the names
    /// were not in order.
    pub fn hash(&self) -> Option<String> {
        let hasher = self.hasher.as_ref().filter(|_| self.ordered)?;
        Some(format!("{:032x}", hasher.digest128()))
    }

    fn hash_text(&mut self, text: &str) {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(text.as_bytes());
        }
    }

    /// Appends a JSON value in the form in which `Value` prints it.
    fn append_json(&mut self, value: &impl serde::Serialize) {
        if let Some(hasher) = &mut self.hasher {
            self.text.clear();
            // Writing to memory does not fail, and numbers that were read are finite.
            let _ = serde_json::to_writer(&mut self.text, value);
            hasher.update(&self.text);
        }
    }

    fn check(&mut self, string: &str, what: impl FnOnce() -> String) {
        if self.refused.is_none()
            && let Err(problem) = text::check_plain_text(string)
        {
            self.refused = Some(format!("{} {problem}", what()));
        }
    }
}

/// A value of the file on the path that is read.
struct ScannedNode<'a> {
    scanned: &'a mut ScannedFile,
    /// Name of the field that holds the value; `None` if the field may hold any text.
    field: Option<&'a str>,
    free: &'a [&'a str],
    /// Whether the node is the whole document.
    top: bool,
}

impl<'de> DeserializeSeed<'de> for ScannedNode<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<(), D::Error> {
        input.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ScannedNode<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("any JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.scanned.hash_text(if value { "true" } else { "false" });
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.scanned.append_json(&value);
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.scanned.append_json(&value);
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.scanned.append_json(&value);
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.scanned.hash_text("null");
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        if let Some(field) = self.field {
            self.scanned.check(value, || format!("{field}:"));
        }
        self.scanned.append_json(&value);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Self { scanned, field, free, .. } = self;
        let mut before = "[";
        loop {
            // Whether a comma is needed is known only after the next item was read.
            let node =
                ScannedItem { before, node: ScannedNode { scanned, field, free, top: false } };
            if items.next_element_seed(node)?.is_none() {
                break;
            }
            before = ",";
        }
        scanned.hash_text(if before == "[" { "[]" } else { "]" });
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let Self { scanned, field, free, top } = self;
        scanned.hash_text("{");
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
            scanned.hash_text(comma);
            comma = ",";
            scanned.append_json(&name);
            scanned.hash_text(":");
            if top && (name == "schema" || name == "schema_version") {
                let value: Value = fields.next_value()?;
                scanned.append_json(&value);
                match name.as_str() {
                    "schema" => scanned.schema = value.as_str().map(str::to_owned),
                    _ => scanned.version = value.as_u64(),
                }
            } else {
                scanned.check(&name, || "the name".to_owned());
                let field = field.filter(|_| !free.contains(&name.as_str())).map(|_| &*name);
                fields.next_value_seed(ScannedNode { scanned, field, free, top: false })?;
            }
            last = Some(name);
        }
        scanned.hash_text("}");
        if !ordered {
            scanned.ordered = false;
            names.sort_unstable();
            if scanned.refused.is_none() && names.windows(2).any(|pair| pair[0] == pair[1]) {
                scanned.refused = Some(format!("{} has a name twice", field.unwrap_or("a field")));
            }
        }
        Ok(())
    }
}

/// An item of a JSON list, with the text before it.
struct ScannedItem<'a> {
    before: &'static str,
    node: ScannedNode<'a>,
}

impl<'de> DeserializeSeed<'de> for ScannedItem<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<(), D::Error> {
        self.node.scanned.hash_text(self.before);
        self.node.deserialize(input)
    }
}
