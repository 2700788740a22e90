//! Tests that docs/guides/first-kernel.md shows examples/first_kernel.rs, piece by piece and whole,
//! and that the README begins with examples/own_kernel.rs. The Rust compiler checks the examples;
//! these tests check that the documentation pages show them. All other Rust code on a documentation
//! page must consist of lines of examples and of documentation tests.

#![allow(clippy::unwrap_used)]

use std::path::Path;

/// Contents of the code fences of one language on a Markdown page, in order.
fn code_fences_of_language(page: &str, language: &str) -> Vec<String> {
    let opening = format!("```{language}\n");
    let code = |piece: &str| piece.split("\n```").next().unwrap().to_owned();
    page.split(&opening).skip(1).map(code).collect()
}

/// Lines of a text without the blank ones, because pieces of code are compared without blank lines
/// between them.
fn nonblank_lines(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.trim().is_empty()).collect()
}

#[test]
fn the_first_kernel_guide_shows_its_example_completely() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let page = read("docs/guides/first-kernel.md");
    let rust = code_fences_of_language(&page, "rust").join("\n");
    assert_eq!(nonblank_lines(&rust), nonblank_lines(&read("examples/first_kernel.rs")));
    assert_eq!(
        nonblank_lines(&code_fences_of_language(&page, "cuda").join("\n")),
        nonblank_lines(&read("examples/saxpy.cu"))
    );
}

#[test]
fn the_readme_begins_with_the_shortest_example_bench() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let example = read("examples/own_kernel.rs");
    let page = read("README.md");
    let first = page.split("\n```").nth(1).unwrap();
    assert_eq!(first.trim_end(), format!("rust\n{}", example.trim_end()));
    assert!(example.lines().count() <= 30);
}

#[test]
fn the_bench_that_init_writes_is_the_shortest_example() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let template = read("crates/kernelgate-cli/templates/bench.rs");
    assert_eq!(template, read("examples/own_kernel.rs"));
}

/// Trims the indentation of a line and the mark of a documentation comment.
fn trim_indentation_and_comment_mark(line: &str) -> &str {
    line.trim().trim_start_matches("//!").trim()
}

/// Collects the code lines of all files with this name ending below a folder.
fn collect_code_lines_of_files(folder: &Path, ending: &str, lines: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            collect_code_lines_of_files(&entry, ending, lines);
        } else if entry.extension().is_some_and(|it| it == ending) {
            let text = std::fs::read_to_string(entry).unwrap();
            lines.extend(
                text.lines().map(|line| trim_indentation_and_comment_mark(line).to_owned()),
            );
        }
    }
}

#[test]
fn code_on_documentation_pages_consists_of_compiled_lines() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut compiled, mut pages) = (Vec::new(), 0);
    collect_code_lines_of_files(&root.join("examples"), "rs", &mut compiled);
    collect_code_lines_of_files(&root.join("crates/kernelgate/src"), "rs", &mut compiled);
    for folder in ["docs", "docs/guides", "docs/concepts"] {
        for page in std::fs::read_dir(root.join(folder)).unwrap() {
            let path = page.unwrap().path();
            if path.extension().is_none_or(|it| it != "md") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for code in code_fences_of_language(&text, "rust") {
                pages += 1;
                for line in nonblank_lines(&code) {
                    let is_compiled =
                        compiled.iter().any(|it| it == trim_indentation_and_comment_mark(line));
                    assert!(is_compiled, "{}: no example has the line `{line}`", path.display());
                }
            }
        }
    }
    assert!(pages >= 6, "{pages} blocks of code on pages");
}
