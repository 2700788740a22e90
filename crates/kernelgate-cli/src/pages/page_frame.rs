//! Builds the frame of an HTML page: one file with its style and script, a light and a dark theme,
//! and tables that can be sorted and searched. `maud` escapes every text that does not come from
//! kernelgate itself.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::charts::{ChartWithFileName, ChartsOfOneKind};
use crate::plot::{ChartDrawingError, colour};
use kernelgate::display::harmless_text::EscapedForHtml;
use kernelgate::display::table::AlignedTextTable;

const PAGE_STYLE_SHEET: &str = include_str!("page.css");
const PAGE_SCRIPT: &str = include_str!("page.js");
/// Number of rows from which a table on an HTML page has a search field.
const MIN_TABLE_ROWS_FOR_SEARCH: usize = 12;

/// A section of an HTML page, with its anchor and title for the page's navigation.
pub struct HtmlPageSection {
    /// Name of the section in links to it, made of letters and `-`.
    pub anchor: &'static str,
    pub title: &'static str,
    /// HTML content of the page section.
    pub section_html: Markup,
}

impl HtmlPageSection {
    /// Makes a section of an HTML page.
    pub const fn with_anchor_and_title(
        anchor: &'static str,
        title: &'static str,
        body: Markup,
    ) -> Self {
        Self { anchor, title, section_html: body }
    }
}

/// Builds a complete HTML page; `lead` comes before its sections.
pub fn build_html_page(title: &str, lead: &Markup, sections: &[HtmlPageSection]) -> String {
    let style = format!("{PAGE_STYLE_SHEET}\n{}", dark_theme_css_of_charts());
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                // The content security policy forbids the page to load anything, whatever a text on
                // it contains.
                meta http-equiv="Content-Security-Policy"
                    content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";
                title { (printable_on_page(title)) }
                style { (PreEscaped(style)) }
            }
            body {
                header {
                    h1 { (printable_on_page(title)) }
                    button id="theme" type="button" { "dark / light" }
                }
                (lead)
                nav {
                    @for section in sections { a href={ "#" (section.anchor) } { (section.title) } }
                }
                main {
                    @for section in sections {
                        section id=(section.anchor) { h2 { (section.title) } (section.section_html) }
                    }
                }
                footer { "kernelgate " (env!("CARGO_PKG_VERSION")) }
                script { (PreEscaped(PAGE_SCRIPT)) }
            }
        }
    };
    page.into_string()
}

/// Returns CSS rules that replace the charts' colours by those of the dark theme, if the reader's
/// system or choice is dark.
fn dark_theme_css_of_charts() -> String {
    let rules = |theme: &str| -> String {
        let each = colour::light_and_dark_hex_colours().map(|(light, dark)| {
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

/// Makes text from others safe to show on an HTML page: control characters are replaced; `maud`
/// escapes the HTML markup.
pub fn printable_on_page(text: &str) -> String {
    EscapedForHtml(text).to_string()
}

/// Builds an HTML list of facts, each with its name and text.
pub fn facts_list(facts: &[(&str, String)]) -> Markup {
    html! {
        dl { @for (name, words) in facts { div { dt { (name) } dd { (printable_on_page(words)) } } } }
    }
}

/// Builds the HTML of charts side by side, with the number of charts that were skipped. The charts
/// are SVG from `plotters`, which escapes their texts.
pub fn charts_side_by_side(gallery: &ChartsOfOneKind) -> Result<Markup, ChartDrawingError> {
    let drawn: Vec<(&ChartWithFileName, bool, String)> = gallery
        .figures
        .iter()
        .map(|figure| Ok((figure, figure.chart.needs_page_width(), figure.chart.render_svg()?)))
        .collect::<Result<_, ChartDrawingError>>()?;
    Ok(html! {
        div class="gallery" {
            @for (figure, broad, svg) in &drawn {
                figure class=[broad.then_some("broad")] aria-label=(printable_on_page(&figure.chart.chart_title)) {
                    (PreEscaped(svg))
                }
            }
        }
        @if gallery.omitted_charts > 0 {
            p class="note" { (gallery.omitted_charts) " more charts are skipped for length; the tables have their numbers." }
        }
    })
}

/// Builds an HTML table whose first column is left-aligned and whose other columns are
/// right-aligned. The rows for whose index `marked` returns true are highlighted.
pub fn html_table(header: &[&str], rows: &[Vec<String>], marked: impl Fn(usize) -> bool) -> Markup {
    html_table_with_row_classes(header, rows, |i| marked(i).then_some("best"))
}

/// Builds an [`html_table`] in which each row can have a CSS class.
pub fn html_table_with_row_classes(
    header: &[&str],
    rows: &[Vec<String>],
    class: impl Fn(usize) -> Option<&'static str>,
) -> Markup {
    html! {
        @if rows.len() >= MIN_TABLE_ROWS_FOR_SEARCH {
            input class="search" type="search" placeholder="search" aria-label="search";
        }
        div class="wide" {
            table {
                thead { tr { @for title in header { th { (title) } } } }
                tbody {
                    @for (i, row) in rows.iter().enumerate() {
                        tr class=[class(i)] {
                            @for (column, cell) in row.iter().enumerate() {
                                td { @if column == 0 { (case_id_with_line_breaks(cell)) } @else { (printable_on_page(cell)) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Builds the HTML of a case id that may be broken across lines only after `/` and `_`.
fn case_id_with_line_breaks(id: &str) -> Markup {
    html! { @for part in printable_on_page(id).split_inclusive(['/', '_']) { (part) wbr; } }
}

/// Converts a table for the terminal into an HTML table.
pub fn html_table_from_terminal_table(of: &AlignedTextTable) -> Markup {
    let header: Vec<&str> = of.column_names().iter().map(String::as_str).collect();
    html_table(&header, of.rows(), |_| false)
}

/// Builds an HTML list with one item for each line of text.
pub fn html_list_of_lines(lines: &[String]) -> Markup {
    html! { ul { @for line in lines { li { (printable_on_page(line)) } } } }
}
