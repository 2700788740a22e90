//! A table whose cells are coloured by their value.

use super::chart_frame::{
    DRAWING_MARGIN, TEXT_LINE_HEIGHT, TitleLines, draw_title_and_legend, title_and_legend_height,
};
use super::colour::{HEAT_STEPS, PurposeColour};
use super::drawing_shapes::{TEXT_SIZE, TextAnchor, VectorPicture, fitted_text, wrapped_text};
use super::font::text_width;
use super::quantity::PlottedUnit;

const CELL_HEIGHT: f64 = 26.0;
/// Smallest and greatest width of a heat map's cell, pixels.
const CELL_WIDTH_RANGE: (f64, f64) = (74.0, 150.0);
/// First colour step that is dark.
const FIRST_DARK_STEP: usize = 4;

/// A table whose cells are coloured by their value.
#[derive(Debug, Clone, PartialEq)]
pub struct HeatMap {
    /// Texts above the columns.
    pub columns: Vec<String>,
    /// Texts to the left of the heat map's rows.
    pub rows: Vec<String>,
    /// Values of the heat map row by row; `None` for a missing value.
    pub cells: Vec<Vec<Option<f64>>>,
    /// Quantity of the values.
    pub quantity: PlottedUnit,
    /// Names of the axes to the right, and down.
    pub names: (String, String),
}

pub fn layout(lines: TitleLines<'_>, body: &HeatMap) -> VectorPicture {
    let widest =
        |texts: &[String]| texts.iter().map(|text| text_width(text, TEXT_SIZE)).fold(0.0, f64::max);
    let labels = widest(&body.rows).min(260.0);
    let cell = (widest(&body.columns) + 10.0).clamp(CELL_WIDTH_RANGE.0, CELL_WIDTH_RANGE.1);
    let left = DRAWING_MARGIN + labels + 10.0;
    let table = left + cell * body.columns.len() as f64 + DRAWING_MARGIN;
    let width = table.max(480.0);
    let rows = CELL_HEIGHT * body.rows.len() as f64;
    let columns: Vec<Vec<String>> =
        body.columns.iter().map(|name| wrapped_text(name, TEXT_SIZE, cell - 4.0)).collect();
    let above = TEXT_LINE_HEIGHT * (1 + columns.iter().map(Vec::len).max().unwrap_or(1)) as f64;
    let mut picture = VectorPicture::new(
        width,
        title_and_legend_height(lines, &[], width) + above + rows + DRAWING_MARGIN,
    );
    let top = draw_title_and_legend(&mut picture, lines, &[]) + above;
    let names = format!("right: {}; down: {}", body.names.0, body.names.1);
    picture.add_text(
        (DRAWING_MARGIN, top - above + 0.4 * TEXT_LINE_HEIGHT),
        &names,
        PurposeColour::Ink,
        TextAnchor::Start,
    );
    let values = || body.cells.iter().flatten().flatten().copied();
    let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    for (i, name) in columns.iter().enumerate() {
        let x = left + cell * (i as f64 + 0.5);
        for (above, line) in name.iter().rev().enumerate() {
            let y = top - (0.6 + above as f64) * TEXT_LINE_HEIGHT;
            picture.add_text((x, y), line, PurposeColour::Muted, TextAnchor::Middle);
        }
    }
    for (i, (name, cells)) in body.rows.iter().zip(&body.cells).enumerate() {
        let y = top + CELL_HEIGHT * i as f64;
        picture.add_text(
            (left - 10.0, y + CELL_HEIGHT / 2.0),
            &fitted_text(name, TEXT_SIZE, labels),
            PurposeColour::Muted,
            TextAnchor::End,
        );
        for (column, value) in cells.iter().enumerate() {
            let x = left + cell * column as f64;
            let middle = (x + cell / 2.0, y + CELL_HEIGHT / 2.0);
            let Some(value) = value else {
                picture.add_text(middle, "-", PurposeColour::Muted, TextAnchor::Middle);
                continue;
            };
            let share = (value / least).ln() / (most / least).ln();
            let step = if share.is_finite() { (share * HEAT_STEPS as f64) as usize } else { 0 };
            let step = step.min(HEAT_STEPS - 1);
            picture.add_rectangle(
                (x + 1.0, y + 1.0),
                (cell - 2.0, CELL_HEIGHT - 2.0),
                PurposeColour::Step(step),
            );
            let ink = if step >= FIRST_DARK_STEP {
                PurposeColour::OnDark
            } else {
                PurposeColour::OnLight
            };
            picture.add_text(middle, &body.quantity.text(*value), ink, TextAnchor::Middle);
        }
    }
    picture
}
