//! docs/guides/first-kernel.md shows examples/first_kernel.rs, piece by piece and whole, and the
//! README begins with examples/own_kernel.rs. The compiler checks the examples, these tests the pages.

#![allow(clippy::unwrap_used)]

use std::path::Path;

/// The code of a page's fences of that language, in order.
fn fences(page: &str, language: &str) -> Vec<String> {
    let opening = format!("```{language}\n");
    let code = |piece: &str| piece.split("\n```").next().unwrap().to_owned();
    page.split(&opening).skip(1).map(code).collect()
}

/// Text without blank lines, which separate the pieces.
fn dense(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.trim().is_empty()).collect()
}

#[test]
fn the_first_guide_shows_its_example() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let page = read("docs/guides/first-kernel.md");
    let rust = fences(&page, "rust").join("\n");
    assert_eq!(dense(&rust), dense(&read("examples/first_kernel.rs")));
    assert_eq!(dense(&fences(&page, "cuda").join("\n")), dense(&read("examples/saxpy.cu")));
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
