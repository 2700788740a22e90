//! Common parts of pages: one file with its style and script, a light and a dark theme, tables that
//! can be sorted and searched. Every text that comes from elsewhere is escaped by `maud`.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::charts::{ChartFigure, ChartGallery};
use crate::plot::{PlotError, colour};
use kernelgate::display::harmless_text::HtmlText;
use kernelgate::display::table::TextTable;

const PAGE_STYLE: &str = include_str!("page.css");
const PAGE_SCRIPT: &str = include_str!("page.js");
/// Number of rows from which a table has a search field.
const MIN_ROWS_FOR_SEARCH: usize = 12;

/// A part of a page, with its entry in the contents.
pub struct PageSection {
    /// Anchor of the section in links: letters and `-`.
    pub anchor: &'static str,
    pub title: &'static str,
    /// Content of the section.
    pub body: Markup,
}

impl PageSection {
    /// Makes one section of an HTML page.
    pub const fn new(anchor: &'static str, title: &'static str, body: Markup) -> Self {
        Self { anchor, title, body }
    }
}

/// A whole page; `lead` comes before its sections.
pub fn page(title: &str, lead: &Markup, sections: &[PageSection]) -> String {
    let style = format!("{PAGE_STYLE}\n{}", dark_plot_style());
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                // The policy forbids the page to fetch anything, whatever a text contains.
                meta http-equiv="Content-Security-Policy"
                    content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";
                title { (printable(title)) }
                style { (PreEscaped(style)) }
            }
            body {
                header {
                    h1 { (printable(title)) }
                    button id="theme" type="button" { "dark / light" }
                }
                (lead)
                nav {
                    @for section in sections { a href={ "#" (section.anchor) } { (section.title) } }
                }
                main {
                    @for section in sections {
                        section id=(section.anchor) { h2 { (section.title) } (section.body) }
                    }
                }
                footer { "kernelgate " (env!("CARGO_PKG_VERSION")) }
                script { (PreEscaped(PAGE_SCRIPT)) }
            }
        }
    };
    page.into_string()
}

/// CSS rules that give charts the colours of the dark theme for readers who prefer it.
fn dark_plot_style() -> String {
    let rules = |theme: &str| -> String {
        let each = colour::light_and_dark_colours().map(|(light, dark)| {
            format!(
                "{theme} svg [fill=\"{light}\"]{{fill:{dark}}}{theme} svg [stroke=\"{light}\"]{{stroke:{dark}}}"
            )
        });
        each.collect::<Vec<_>>().join("\n")
    };
    format!(
        "@media screen and (prefers-color-scheme: dark) {{\n{}\n}}\n@media screen {{\n{}\n}}",
        rules(":root:not([data-theme=light])"),
        rules(":root[data-theme=dark]")
    )
}

/// Makes text that others wrote printable on a page: `maud` escapes the HTML markup in the text.
pub fn printable(text: &str) -> String {
    HtmlText(text).to_string()
}

/// Facts as a list of names and words.
pub fn facts(facts: &[(&str, String)]) -> Markup {
    html! {
        dl { @for (name, words) in facts { div { dt { (name) } dd { (printable(words)) } } } }
    }
}

/// Charts side by side, as many as fit, with the number of skipped ones. The drawings are SVG of
/// `plotters`, whose texts are escaped.
pub fn chart_gallery(gallery: &ChartGallery) -> Result<Markup, PlotError> {
    let drawn: Vec<(&ChartFigure, bool, String)> = gallery
        .figures
        .iter()
        .map(|figure| Ok((figure, figure.chart.needs_page_width(), figure.chart.svg()?)))
        .collect::<Result<_, PlotError>>()?;
    Ok(html! {
        div class="gallery" {
            @for (figure, broad, svg) in &drawn {
                figure class=[broad.then_some("broad")] aria-label=(printable(&figure.chart.title)) {
                    (PreEscaped(svg))
                }
            }
        }
        @if gallery.left_out > 0 {
            p class="note" { (gallery.left_out) " more charts are skipped for length; the tables have their numbers." }
        }
    })
}

/// A table, with the first column left-aligned and the others right-aligned. Rows whose number is
/// `marked` are highlighted.
pub fn table(header: &[&str], rows: &[Vec<String>], marked: impl Fn(usize) -> bool) -> Markup {
    table_with_classes(header, rows, |i| marked(i).then_some("best"))
}

/// [`table`] whose rows have classes of the style sheet.
pub fn table_with_classes(
    header: &[&str],
    rows: &[Vec<String>],
    class: impl Fn(usize) -> Option<&'static str>,
) -> Markup {
    html! {
        @if rows.len() >= MIN_ROWS_FOR_SEARCH {
            input class="search" type="search" placeholder="search" aria-label="search";
        }
        div class="wide" {
            table {
                thead { tr { @for title in header { th { (title) } } } }
                tbody {
                    @for (i, row) in rows.iter().enumerate() {
                        tr class=[class(i)] {
                            @for (column, cell) in row.iter().enumerate() {
                                td { @if column == 0 { (breakable_case_id(cell)) } @else { (printable(cell)) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// An id that may be broken after `/` and `_` only, if its column is wide enough.
fn breakable_case_id(id: &str) -> Markup {
    html! { @for part in printable(id).split_inclusive(['/', '_']) { (part) wbr; } }
}

/// Converts a table of the terminal into one of a page.
pub fn table_from_terminal(of: &TextTable) -> Markup {
    let header: Vec<&str> = of.column_names().iter().map(String::as_str).collect();
    table(&header, of.rows(), |_| false)
}

/// Formats lines of text as an HTML list.
pub fn lines(lines: &[String]) -> Markup {
    html! { ul { @for line in lines { li { (printable(line)) } } } }
}
