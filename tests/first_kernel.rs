//! docs/guides/first-kernel.md shows examples/first_kernel.rs, piece by piece and whole, and the
//! README begins with examples/own_kernel.rs. The compiler checks the examples, these tests the
//! pages. Other Rust code on a page consists of lines of examples and of documentation tests.

#![allow(clippy::unwrap_used)]

use std::path::Path;

/// The code of a page's fences of that language, in order.
fn code_fences_of_language(page: &str, language: &str) -> Vec<String> {
    let opening = format!("```{language}\n");
    let code = |piece: &str| piece.split("\n```").next().unwrap().to_owned();
    page.split(&opening).skip(1).map(code).collect()
}

/// Lines of a text that are not blank: pieces of code are compared without blank lines between
/// them.
fn without_blank_lines(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.trim().is_empty()).collect()
}

#[test]
fn the_first_guide_shows_its_example() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let page = read("docs/guides/first-kernel.md");
    let rust = code_fences_of_language(&page, "rust").join("\n");
    assert_eq!(without_blank_lines(&rust), without_blank_lines(&read("examples/first_kernel.rs")));
    assert_eq!(
        without_blank_lines(&code_fences_of_language(&page, "cuda").join("\n")),
        without_blank_lines(&read("examples/saxpy.cu"))
    );
}

#[test]
fn the_readme_begins_with_the_shortest_bench() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let example = read("examples/own_kernel.rs");
    let page = read("README.md");
    let first = page.split("\n```").nth(1).unwrap();
    assert_eq!(first.trim_end(), format!("rust\n{}", example.trim_end()));
    assert!(example.lines().count() <= 30);
}

#[test]
fn the_bench_of_init_is_the_shortest_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let template = read("crates/kernelgate-cli/templates/bench.rs");
    assert_eq!(template, read("examples/own_kernel.rs"));
}

/// A line without indentation and without the mark of a documentation comment.
fn without_comment_mark(line: &str) -> &str {
    line.trim().trim_start_matches("//!").trim()
}

/// Lines of code of the files with an ending below a folder.
fn code_lines_below(folder: &Path, ending: &str, lines: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            code_lines_below(&entry, ending, lines);
        } else if entry.extension().is_some_and(|it| it == ending) {
            let text = std::fs::read_to_string(entry).unwrap();
            lines.extend(text.lines().map(|line| without_comment_mark(line).to_owned()));
        }
    }
}

#[test]
fn code_on_documentation_pages_is_compiled_by_a_named_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut compiled, mut pages) = (Vec::new(), 0);
    code_lines_below(&root.join("examples"), "rs", &mut compiled);
    code_lines_below(&root.join("crates/kernelgate/src"), "rs", &mut compiled);
    for folder in ["docs", "docs/guides", "docs/concepts"] {
        for page in std::fs::read_dir(root.join(folder)).unwrap() {
            let path = page.unwrap().path();
            if path.extension().is_none_or(|it| it != "md") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for code in code_fences_of_language(&text, "rust") {
                pages += 1;
                for line in without_blank_lines(&code) {
                    let is_compiled = compiled.iter().any(|it| it == without_comment_mark(line));
                    assert!(is_compiled, "{}: no example has the line `{line}`", path.display());
                }
            }
        }
    }
    assert!(pages >= 6, "{pages} blocks of code on pages");
}
