//! Generates the page of record formats from the source of the types that serde writes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use syn::{Attribute, Fields, GenericArgument, Item, Meta, PathArguments, Type};

/// Files that a user may keep or commit. Files of other types are only exchanged between processes
/// of one program version.
const RECORD_TYPES_OF_USER_FILES: [&str; 7] = [
    "BenchProcessRun",
    "BaselineFile",
    "ComparisonTrialsFile",
    "GateCalibration",
    "OutputErrorsOfExecutable",
    "MachineHardware",
    "KernelResourcesFile",
];
const CRATES_WITH_RECORD_TYPES: [&str; 3] = ["kernelgate", "kernelgate-cuda", "kernelgate-cli"];

/// The types of the workspace that serde writes, each with its file, and the records among them.
#[derive(Default)]
struct ParsedRustTypes {
    types_by_name: BTreeMap<String, Vec<(PathBuf, Item)>>,
    record_schemas_by_type: BTreeMap<String, String>,
}

impl ParsedRustTypes {
    fn parse_types_of_crates() -> Self {
        let mut types = Self::default();
        for name in CRATES_WITH_RECORD_TYPES {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src");
            types.parse_files_in_folder(&source);
        }
        types
    }

    fn parse_files_in_folder(&mut self, folder: &Path) {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                self.parse_files_in_folder(&entry);
            } else if entry.extension().is_some_and(|it| it == "rs") && !entry.ends_with("tests.rs")
            {
                let file = syn::parse_file(&std::fs::read_to_string(&entry).unwrap()).unwrap();
                file.items.into_iter().for_each(|item| self.add_type(&entry, item));
            }
        }
    }

    fn add_type(&mut self, file: &Path, item: Item) {
        let (name, attributes) = match &item {
            Item::Struct(it) => (&it.ident, &it.attrs),
            Item::Enum(it) => (&it.ident, &it.attrs),
            Item::Type(it) => (&it.ident, &it.attrs),
            Item::Impl(it) => {
                let of_record = it
                    .trait_
                    .as_ref()
                    .is_some_and(|(_, name, _)| last_path_segment(name) == "RecordFileType");
                if let (true, Type::Path(own)) = (of_record, &*it.self_ty) {
                    self.record_schemas_by_type
                        .insert(last_path_segment(&own.path), schema_and_version_of_record(it));
                }
                return;
            }
            _ => return,
        };
        if matches!(item, Item::Type(_))
            || tokens_of_attributes(attributes, "derive").contains("Serialize")
        {
            self.types_by_name.entry(name.to_string()).or_default().push((file.to_owned(), item));
        }
    }

    /// The type of that name nearest to a file that mentions it.
    fn find_nearest_type(&self, name: &str, from: &Path) -> Option<&(PathBuf, Item)> {
        let shared = |file: &Path| {
            file.components().zip(from.components()).take_while(|(a, b)| a == b).count()
        };
        self.types_by_name.get(name)?.iter().max_by_key(|(file, _)| shared(file))
    }
}

fn last_path_segment(path: &syn::Path) -> String {
    path.segments.last().unwrap().ident.to_string()
}

/// Schema and version of a record, from its implementation.
fn schema_and_version_of_record(implementation: &syn::ItemImpl) -> String {
    let mut constants = BTreeMap::new();
    for item in &implementation.items {
        if let syn::ImplItem::Const(it) = item
            && let syn::Expr::Lit(value) = &it.expr
        {
            let text = match &value.lit {
                syn::Lit::Str(text) => text.value(),
                syn::Lit::Int(number) => number.to_string(),
                _ => continue,
            };
            constants.insert(it.ident.to_string(), text);
        }
    }
    let [kind, schema, version] =
        ["FILE_KIND", "SCHEMA", "SCHEMA_VERSION"].map(|name| &constants[name]);
    format!("## {kind}\n\n`schema` is `{schema}`, `schema_version` {version}. ")
}

/// The tokens of all attributes of a name.
fn tokens_of_attributes(attributes: &[Attribute], name: &str) -> String {
    let of_name = attributes.iter().filter(|it| it.path().is_ident(name));
    let lists = of_name.filter_map(|it| it.meta.require_list().ok());
    lists.map(|list| list.tokens.to_string()).collect::<Vec<_>>().join(", ")
}

/// The value of a key of serde's attributes: `rename = "…"`.
fn value_of_serde_attribute(attributes: &[Attribute], key: &str) -> Option<String> {
    let text = tokens_of_attributes(attributes, "serde");
    let after = text.split(&format!("{key} = \"")).nth(1)?;
    after.split('"').next().map(str::to_owned)
}

/// First sentence of a doc comment, without links to Rust's documentation.
fn first_sentence_of_doc_comment(attributes: &[Attribute]) -> String {
    let mut text = String::new();
    for attribute in attributes.iter().filter(|it| it.path().is_ident("doc")) {
        if let Meta::NameValue(pair) = &attribute.meta
            && let syn::Expr::Lit(value) = &pair.value
            && let syn::Lit::Str(line) = &value.lit
        {
            text = format!("{text}{}", line.value());
            if line.value().is_empty() {
                break;
            }
        }
    }
    let first = text.trim().split_inclusive(". ").next().unwrap_or_default().trim();
    let link = regex::Regex::new(r"\[(`[^`]*`)\](\([^)]*\))?").unwrap();
    link.replace_all(first, "$1").replace('|', "\\|")
}

/// The page of record formats while it is written: each mentioned type gets a section, in the order
/// of the mentions.
struct RecordReferencePage<'a> {
    types: &'a ParsedRustTypes,
    queued_type_names: BTreeSet<String>,
    types_to_describe: Vec<(String, PathBuf)>,
}

impl RecordReferencePage<'_> {
    /// A type as JSON has it.
    fn describe_type_as_json(&mut self, kind: &Type, file: &Path) -> String {
        let path = match kind {
            Type::Path(path) => path.path.segments.last().unwrap(),
            Type::Array(array) => {
                return format!("array of {}", self.describe_type_as_json(&array.elem, file));
            }
            Type::Tuple(tuple) => {
                let parts: Vec<_> =
                    tuple.elems.iter().map(|it| self.describe_type_as_json(it, file)).collect();
                return format!("[{}]", parts.join(", "));
            }
            _ => panic!("a field of {} has a type without JSON", file.display()),
        };
        let mut arguments = Vec::new();
        if let PathArguments::AngleBracketed(all) = &path.arguments {
            for argument in &all.args {
                if let GenericArgument::Type(inner) = argument {
                    arguments.push(self.describe_type_as_json(inner, file));
                }
            }
        }
        let name = path.ident.to_string();
        match (name.as_str(), arguments.as_slice()) {
            ("String" | "PathBuf", []) => "string".to_owned(),
            ("bool", []) => "boolean".to_owned(),
            ("f64" | "f32", []) => "number".to_owned(),
            ("u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64", []) => "integer".to_owned(),
            ("Option", [inner]) => format!("{inner} or null"),
            ("Vec" | "BTreeSet", [inner]) => format!("array of {inner}"),
            ("BTreeMap", [_, value]) => format!("object of {value}"),
            (_, []) => self.describe_named_type_as_json(&name, file),
            _ => panic!("{name} of {} has no JSON type here", file.display()),
        }
    }

    fn describe_named_type_as_json(&mut self, name: &str, file: &Path) -> String {
        let Some((at, item)) = self.types.find_nearest_type(name, file) else {
            return format!("`{name}`");
        };
        let attributes = match item {
            Item::Type(alias) => return self.describe_type_as_json(&alias.ty, at),
            Item::Struct(it) => &it.attrs,
            Item::Enum(it) => &it.attrs,
            _ => return format!("`{name}`"),
        };
        if let Some(wire) = value_of_serde_attribute(attributes, "into") {
            return self.describe_type_as_json(&syn::parse_str(&wire).unwrap(), at);
        }
        if self.queued_type_names.insert(name.to_owned()) {
            self.types_to_describe.push((name.to_owned(), at.clone()));
        }
        format!("[{name}](#{})", name.to_lowercase())
    }

    /// The fields of a struct or the values of an enum, as a table.
    fn append_table_of_type(&mut self, text: &mut String, name: &str, file: &Path) {
        let types = self.types;
        match &types.find_nearest_type(name, file).unwrap() {
            (at, Item::Struct(it)) => {
                let _ = writeln!(
                    text,
                    "{}\n\n| field | type | meaning |\n|---|---|---|",
                    first_sentence_of_doc_comment(&it.attrs)
                );
                self.append_rows_of_fields(text, &it.fields, at, "");
            }
            (at, Item::Enum(it)) => {
                let _ = writeln!(
                    text,
                    "{}\n\n| value | type | meaning |\n|---|---|---|",
                    first_sentence_of_doc_comment(&it.attrs)
                );
                let case = value_of_serde_attribute(&it.attrs, "rename_all").unwrap_or_default();
                let tag = value_of_serde_attribute(&it.attrs, "tag");
                for variant in &it.variants {
                    let name =
                        value_of_serde_attribute(&variant.attrs, "rename").unwrap_or_else(|| {
                            apply_serde_rename_all(&variant.ident.to_string(), &case)
                        });
                    let tag = tag.as_ref().map_or(String::new(), |tag| format!("{tag}: "));
                    let kind = match &variant.fields {
                        Fields::Unnamed(it) => self.describe_type_as_json(&it.unnamed[0].ty, at),
                        Fields::Named(_) => "object".to_owned(),
                        Fields::Unit => "string".to_owned(),
                    };
                    let _ = writeln!(
                        text,
                        "| `{tag}{name}` | {kind} | {} |",
                        first_sentence_of_doc_comment(&variant.attrs)
                    );
                    self.append_rows_of_fields(text, &variant.fields, at, &format!("{name}."));
                }
            }
            _ => panic!("{name} is no struct and no enum"),
        }
        text.push('\n');
    }

    fn append_rows_of_fields(
        &mut self,
        text: &mut String,
        fields: &Fields,
        file: &Path,
        prefix: &str,
    ) {
        let named = fields.iter().filter(|field| field.ident.is_some());
        for field in named.filter(|field| tokens_of_attributes(&field.attrs, "serde") != "skip") {
            let name = value_of_serde_attribute(&field.attrs, "rename")
                .unwrap_or_else(|| field.ident.as_ref().unwrap().to_string());
            let mut kind = self.describe_type_as_json(&field.ty, file);
            if tokens_of_attributes(&field.attrs, "serde").contains("skip_serializing_if") {
                let always = match &field.ty {
                    Type::Path(path) if last_path_segment(&path.path) == "Option" => {
                        kind.strip_suffix(" or null")
                    }
                    _ => None,
                };
                kind = format!("{}, optional", always.unwrap_or(&kind));
            }
            let _ = writeln!(
                text,
                "| `{prefix}{name}` | {kind} | {} |",
                first_sentence_of_doc_comment(&field.attrs)
            );
        }
    }
}

/// The name of a variant under serde's `rename_all`.
fn apply_serde_rename_all(name: &str, case: &str) -> String {
    let separator = match case {
        "snake_case" => "_",
        "kebab-case" => "-",
        "lowercase" => "",
        _ => return name.to_owned(),
    };
    let mut text = String::new();
    for letter in name.chars() {
        if letter.is_uppercase() && !text.is_empty() {
            text.push_str(separator);
        }
        text.extend(letter.to_lowercase());
    }
    text
}

#[test]
fn the_page_of_records_has_every_field() {
    let types = ParsedRustTypes::parse_types_of_crates();
    let mut page = RecordReferencePage {
        types: &types,
        queued_type_names: BTreeSet::new(),
        types_to_describe: Vec::new(),
    };
    let mut text = "Files of kernelgate are JSON objects with `schema` and `schema_version` beside the fields.\n\
                    A baseline has a `checksum` too. An \"optional\" field is absent if it has no value.\n\n"
        .to_owned();
    for name in RECORD_TYPES_OF_USER_FILES {
        text.push_str(&types.record_schemas_by_type[name]);
        page.queued_type_names.insert(name.to_owned());
        page.append_table_of_type(&mut text, name, Path::new(""));
    }
    while !page.types_to_describe.is_empty() {
        for (name, file) in std::mem::take(&mut page.types_to_describe) {
            let _ = write!(text, "## {name}\n\n");
            page.append_table_of_type(&mut text, &name, &file);
        }
    }
    super::compare_or_update_reference_page("records.md", "Record formats", &text);
}
