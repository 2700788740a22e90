//! Imports of a source file, read from its text. The parser is sufficient for this workspace's
//! style, in which paths begin with `crate::` or `super::`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The source files below a folder, without those of tests.
pub fn source_files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_test =
            path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"));
        if path.is_dir() {
            // Build outputs are not sources: an example is a package with a target folder.
            if !path.ends_with("target") {
                files.extend(source_files_below(&path));
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") && !is_test {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// Code of a file up to its tests, without comments and without the modules that visibilities name.
pub fn code_without_tests(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default().to_owned();
    text.lines()
        .map(|line| without_visibility(line.split("//").next().unwrap_or_default()))
        .collect::<Vec<_>>()
        .join("\n")
}

/// A line in which `pub(in path)` is `pub(crate)`: a visibility is not a use of the module.
fn without_visibility(line: &str) -> String {
    let named = line.split_once("pub(in ").and_then(|(before, rest)| {
        rest.split_once(')').map(|(_, behind)| format!("{before}pub(crate){behind}"))
    });
    named.unwrap_or_else(|| line.to_owned())
}

/// The words that follow a prefix at the start of a path.
pub fn words_after_prefix<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
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

/// The Rust module to which a file belongs: `record::run` for `record/run.rs`, `record` for
/// `record/mod.rs`, and an empty text for `lib.rs`.
pub fn module_of_file(file: &str) -> String {
    let path = file.trim_end_matches(".rs").trim_end_matches("/mod");
    if ["lib", "main", "mod"].contains(&path) { String::new() } else { path.replace('/', "::") }
}

/// The other modules that a module uses: every path from `crate` or `super`, and the paths through
/// which a `mod.rs` uses its children. A declaration of a child module and a `pub use` of its items
/// do not count as uses.
pub fn used_modules(module: &str, code: &str, modules: &BTreeSet<String>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let here: Vec<&str> = module.split("::").filter(|part| !part.is_empty()).collect();
    let statements =
        code.split(';').filter(|statement| !statement.trim_start().starts_with("pub use "));
    for statement in statements {
        for (at, path) in paths_with_positions(statement) {
            let mut base = here.clone();
            let mut parts: Vec<&str> = path.split("::").collect();
            match parts.first() {
                Some(&"crate") => base.clear(),
                Some(&"super") => drop(base.pop()),
                // A child of this module.
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
            for list in path_ends(&statement[at..], path.len()) {
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

/// Each path in a text with its position: words joined by `::`.
fn paths_with_positions(text: &str) -> impl Iterator<Item = (usize, &str)> {
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

/// Rest of a path: nothing, or the names of the list in braces after it.
fn path_ends(text: &str, path_len: usize) -> Vec<Vec<&str>> {
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
    names.into_iter().map(words_of_entry).collect()
}

/// The words of one entry of a list, up to a list inside it and without its new name.
fn words_of_entry(entry: &str) -> Vec<&str> {
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
