//! Reads the imports of a Rust source file from its text. The import parser suffices for this
//! workspace's style, in which paths begin with `crate::` or `super::`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Lists the Rust source files below a folder, without test files.
pub fn rust_files_without_tests_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_test =
            path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"));
        if path.is_dir() {
            // Folders named target are skipped, because they hold build outputs of example
            // packages.
            if !path.ends_with("target") {
                files.extend(rust_files_without_tests_below(&path));
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") && !is_test {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// Source text of a file up to its tests, without comments and without the module paths in
/// visibilities such as `pub(in path)`.
pub fn code_without_tests_and_comments(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default().to_owned();
    text.lines()
        .map(|line| without_path_in_visibility(line.split("//").next().unwrap_or_default()))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Replaces `pub(in path)` in a line by `pub(crate)`, because a visibility does not import its
/// module.
fn without_path_in_visibility(line: &str) -> String {
    let named = line.split_once("pub(in ").and_then(|(before, rest)| {
        rest.split_once(')').map(|(_, behind)| format!("{before}pub(crate){behind}"))
    });
    named.unwrap_or_else(|| line.to_owned())
}

/// Words that directly follow a path prefix, such as `crate::`, where it begins a path.
pub fn words_after_path_prefix<'a>(
    text: &'a str,
    prefix: &'a str,
) -> impl Iterator<Item = &'a str> {
    text.match_indices(prefix).filter_map(move |(at, _)| {
        let boundary = text[..at]
            .chars()
            .next_back()
            .is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != ':');
        let rest = &text[at + prefix.len()..];
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        boundary.then_some(&rest[..end])
    })
}

/// Returns the Rust module path of a source file, which is `record::run` for `record/run.rs`,
/// `record` for `record/mod.rs`, and empty for `lib.rs`.
pub fn module_path_of_file(file: &str) -> String {
    let path = file.trim_end_matches(".rs").trim_end_matches("/mod");
    if ["lib", "main", "mod"].contains(&path) { String::new() } else { path.replace('/', "::") }
}

/// Modules that another module's code uses: all paths from `crate` or `super`, and the paths
/// through which a `mod.rs` uses its children. Declarations of child modules and `pub use` of their
/// items do not count as uses.
pub fn modules_used_by_code(
    module: &str,
    code: &str,
    modules: &BTreeSet<String>,
) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let here: Vec<&str> = module.split("::").filter(|part| !part.is_empty()).collect();
    let statements =
        code.split(';').filter(|statement| !statement.trim_start().starts_with("pub use "));
    for statement in statements {
        for (at, path) in rust_paths_with_byte_positions(statement) {
            let mut base = here.clone();
            let mut parts: Vec<&str> = path.split("::").collect();
            match parts.first() {
                Some(&"crate") => base.clear(),
                Some(&"super") => drop(base.pop()),
                // In this case the path of the `use` begins with a child module of the current
                // module.
                _ if modules.contains(&[&here[..], &parts[..1]].concat().join("::")) => {
                    parts.insert(0, "self")
                }
                _ => continue,
            }
            parts.remove(0);
            while parts.first() == Some(&"super") {
                base.pop();
                parts.remove(0);
            }
            let before_list = [base, parts].concat();
            for list in continuations_in_brace_list(&statement[at..], path.len()) {
                let whole: Vec<&str> = before_list.iter().copied().chain(list).collect();
                let longest = (1..=whole.len())
                    .rev()
                    .map(|len| whole[..len].join("::"))
                    .find(|known| modules.contains(known));
                found.extend(longest.filter(|used| used != module));
            }
        }
    }
    found
}

/// Each path of words joined by `::` in a text, with its byte position.
fn rust_paths_with_byte_positions(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let starts = text.char_indices().filter(move |&(at, c)| {
        word(c)
            && text[..at].chars().next_back().is_none_or(|before| !word(before) && before != ':')
    });
    starts.filter_map(move |(at, _)| {
        let rest = &text[at..];
        let end = rest.find(|c: char| !word(c) && c != ':').unwrap_or(rest.len());
        let path = rest[..end].trim_end_matches(':');
        path.contains("::")
            .then_some((at, path))
            .or_else(|| rest[end..].starts_with('{').then_some((at, path)))
    })
}

/// Possible continuations of a path: an empty one, or the entries of the list in braces after the
/// path.
fn continuations_in_brace_list(text: &str, path_len: usize) -> Vec<Vec<&str>> {
    let Some(list) = text[path_len..].strip_prefix("::{") else { return vec![vec![]] };
    let (mut depth, mut names, mut start) = (0, Vec::new(), 0);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                names.push(&list[start..at]);
                start = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names.into_iter().map(words_of_list_entry).collect()
}

/// Words of one entry of a brace list, up to a nested list and without the name after `as`.
fn words_of_list_entry(entry: &str) -> Vec<&str> {
    let path = entry
        .trim()
        .split("::{")
        .next()
        .unwrap_or_default()
        .split(" as ")
        .next()
        .unwrap_or_default();
    path.split("::").filter(|part| !part.is_empty() && *part != "self").collect()
}
