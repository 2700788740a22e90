//! Stores objects of one type as columns in JSON: a fact that all objects share is written once,
//! any other fact as a list with one entry per object. For `#[serde(with = "json_columns")]`.
//!
//! ```json
//! {"keys": ["a", "b"], "same": {"power.state": "steady"}, "each": {"median_ns": [1.5, 1.6]}}
//! ```
//!
//! The name of a fact is the path of field names that leads to the fact, joined by dots. A fact
//! that an object lacks is `null` in its column.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::{DeserializeOwned, Deserializer, Error as _};
use serde::ser::Error as _;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

/// Largest number of JSON values that a file in column form may expand to, so that a small file
/// cannot demand much memory.
const MAX_VALUES_EXPANDED_FROM_COLUMNS: usize = 1 << 22;

/// Objects of one type in column form, as a file contains them.
#[derive(Serialize, Deserialize)]
struct ObjectsAsColumns {
    #[serde(rename = "keys")]
    row_keys: Vec<String>,
    #[serde(rename = "same")]
    shared_facts: BTreeMap<String, Value>,
    #[serde(rename = "each")]
    differing_facts: BTreeMap<String, Vec<Value>>,
}

/// Serialises objects in column form.
///
/// # Errors
/// Fails if an object cannot be written as JSON.
pub fn serialize<T: Serialize, S: Serializer>(
    objects: &BTreeMap<String, T>,
    output: S,
) -> Result<S::Ok, S::Error> {
    let mut rows = Vec::with_capacity(objects.len());
    for object in objects.values() {
        let mut facts = BTreeMap::new();
        collect_leaf_values_by_path(
            "",
            serde_json::to_value(object).map_err(S::Error::custom)?,
            &mut facts,
        );
        rows.push(facts);
    }
    let names: BTreeSet<&String> = rows.iter().flat_map(BTreeMap::keys).collect();
    let keys = objects.keys().cloned().collect();
    let mut columns = ObjectsAsColumns {
        row_keys: keys,
        shared_facts: BTreeMap::new(),
        differing_facts: BTreeMap::new(),
    };
    for name in names {
        let column: Vec<Value> =
            rows.iter().map(|facts| facts.get(name).cloned().unwrap_or_default()).collect();
        if column.iter().all(|value| *value == column[0]) {
            columns.shared_facts.insert(name.clone(), column[0].clone());
        } else {
            columns.differing_facts.insert(name.clone(), column);
        }
    }
    columns.serialize(output)
}

/// Adds the leaf values (facts) of a JSON value to the map `facts`, by their field names joined
/// with dots.
fn collect_leaf_values_by_path(name: &str, value: Value, facts: &mut BTreeMap<String, Value>) {
    match value {
        // An empty object is stored as one fact, because it has no fields.
        Value::Object(fields) if name.is_empty() || can_join_field_names_by_dots(&fields) => {
            for (field, value) in fields {
                let name = if name.is_empty() { field } else { format!("{name}.{field}") };
                collect_leaf_values_by_path(&name, value, facts);
            }
        }
        Value::Null => {}
        value => drop(facts.insert(name.to_owned(), value)),
    }
}

/// Deserialises objects from column form.
///
/// # Errors
/// Fails if a column is not as long as the list of keys, a key occurs twice, or an object is not
/// one of the type.
pub fn deserialize<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    input: D,
) -> Result<BTreeMap<String, T>, D::Error> {
    let ObjectsAsColumns { row_keys: keys, shared_facts: same, differing_facts: each } =
        ObjectsAsColumns::deserialize(input)?;
    if let Some((name, column)) = each.iter().find(|(_, column)| column.len() != keys.len()) {
        let problem = format!("{} values of {name} for {} keys", column.len(), keys.len());
        return Err(D::Error::custom(problem));
    }
    let values: usize = same.values().map(count_json_values).sum();
    if values.saturating_mul(keys.len()) > MAX_VALUES_EXPANDED_FROM_COLUMNS {
        return Err(D::Error::custom(format!("{values} values for each of {} keys", keys.len())));
    }
    let mut columns: Vec<_> =
        each.into_iter().map(|(name, column)| (name, column.into_iter())).collect();
    let mut objects = BTreeMap::new();
    for key in keys {
        let mut object = Map::new();
        for (name, value) in &same {
            insert_at_dotted_path(&mut object, name, value.clone()).map_err(D::Error::custom)?;
        }
        for (name, column) in &mut columns {
            let value = column.next().unwrap_or_default();
            insert_at_dotted_path(&mut object, name, value).map_err(D::Error::custom)?;
        }
        let object = serde_json::from_value(Value::Object(object))
            .map_err(|problem| D::Error::custom(format!("{key}: {problem}")))?;
        if objects.contains_key(&key) {
            return Err(D::Error::custom(format!("{key} twice")));
        }
        objects.insert(key, object);
    }
    Ok(objects)
}

/// Returns whether the fields of an object can be joined by dots: the object has fields, and no
/// name is empty or contains a dot.
fn can_join_field_names_by_dots(fields: &Map<String, Value>) -> bool {
    !fields.is_empty() && fields.keys().all(|field| !field.is_empty() && !field.contains('.'))
}

fn count_json_values(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(count_json_values).sum::<usize>(),
        Value::Object(fields) => 1 + fields.values().map(count_json_values).sum::<usize>(),
        _ => 1,
    }
}

/// Inserts a fact into nested objects, at the field names that its name joins by dots.
fn insert_at_dotted_path(
    object: &mut Map<String, Value>,
    name: &str,
    value: Value,
) -> Result<(), String> {
    if value.is_null() {
        return Ok(());
    }
    let Some((field, rest)) = name.split_once('.') else {
        object.insert(name.to_owned(), value);
        return Ok(());
    };
    let inner = object.entry(field).or_insert_with(|| Value::Object(Map::new()));
    let inner = inner.as_object_mut().ok_or_else(|| format!("{name} and {field}"))?;
    insert_at_dotted_path(inner, rest, value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct ObjectsInColumnForm {
        #[serde(with = "super")]
        rows: BTreeMap<String, RowWithOptionalFields>,
    }

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct RowWithOptionalFields {
        time_ns: f64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        power: Option<PowerFieldsOfRow>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        range: Vec<u32>,
        by_output: BTreeMap<String, u32>,
    }

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct PowerFieldsOfRow {
        state: String,
        at_cap: bool,
    }

    fn row_with_time_and_cap(time_ns: f64, at_cap: Option<bool>) -> RowWithOptionalFields {
        let power = at_cap.map(|at_cap| PowerFieldsOfRow { state: "steady".to_owned(), at_cap });
        RowWithOptionalFields { time_ns, power, range: vec![1, 2], by_output: BTreeMap::new() }
    }

    #[test]
    fn objects_stored_as_columns_are_read_back_unchanged() {
        let mut one = row_with_time_and_cap(1.5, Some(true));
        one.by_output.insert("grad.q".to_owned(), 3);
        let all = [
            ("a", one),
            ("b", row_with_time_and_cap(2.0, Some(false))),
            ("c", row_with_time_and_cap(2.5, None)),
        ];
        for count in 0..=3 {
            let rows = all[..count].iter().map(|(key, row)| (key.to_string(), row.clone()));
            let table = ObjectsInColumnForm { rows: rows.collect() };
            let text = serde_json::to_string(&table).unwrap();
            assert_eq!(
                serde_json::from_str::<ObjectsInColumnForm>(&text).unwrap(),
                table,
                "{text}"
            );
        }
    }

    #[test]
    fn a_fact_shared_by_all_objects_is_stored_once() {
        let rows = [
            ("a".to_owned(), row_with_time_and_cap(1.5, Some(true))),
            ("b".to_owned(), row_with_time_and_cap(2.5, Some(true))),
        ];
        let text = serde_json::to_value(ObjectsInColumnForm { rows: rows.into() }).unwrap()["rows"]
            .to_string();
        let expected = r#"{"each":{"time_ns":[1.5,2.5]},"keys":["a","b"],"same":{"by_output":{},"power.at_cap":true,"power.state":"steady","range":[1,2]}}"#;
        assert_eq!(text, expected);
    }

    #[test]
    fn columns_that_contradict_each_other_are_refused() {
        let same = r#""same": {"time_ns": 1, "by_output": {}}"#;
        let read = |columns: &str| {
            let text = format!("{{\"rows\": {{{columns}}}}}");
            serde_json::from_str::<ObjectsInColumnForm>(&text).unwrap_err().to_string()
        };
        for (columns, problem) in [
            (
                format!(r#""keys": ["a"], {same}, "each": {{"range": [[1], [2]]}}"#),
                "2 values of range for 1 keys at line 1 column 97",
            ),
            (format!(r#""keys": ["a", "a"], {same}, "each": {{}}"#), "a twice at line 1 column 83"),
            (
                format!(r#""keys": ["a"], {same}, "each": {{"time_ns.x": [1]}}"#),
                "time_ns.x and time_ns at line 1 column 94",
            ),
            (
                r#""keys": ["a"], "same": {"by_output": {}}, "each": {}"#.to_owned(),
                "a: missing field `time_ns` at line 1 column 64",
            ),
        ] {
            assert_eq!(read(&columns), problem);
        }
        let keys: Vec<String> = (0..3000).map(|key| format!("\"{key}\"")).collect();
        let many = vec!["1"; 3000].join(", ");
        let same = format!(r#""same": {{"time_ns": 1, "by_output": {{}}, "range": [{many}]}}"#);
        let problem = read(&format!(r#""keys": [{}], {same}, "each": {{}}"#, keys.join(", ")));
        assert_eq!(problem, "3003 values for each of 3000 keys at line 1 column 31974");
    }
}
