//! Draws a heat map: a table whose cells are coloured by their value.

use super::chart_frame::{
    DRAWING_MARGIN_PIXELS, TEXT_LINE_HEIGHT_PIXELS, TitleAndSubtitle, draw_title_and_legend,
    height_of_title_and_legend,
};
use super::colour::{ChartColour, NUMBER_OF_HEAT_MAP_COLOURS};
use super::drawing_shapes::{
    CHART_FONT_SIZE_PIXELS, HorizontalTextAnchor, PictureOfShapes, shorten_text_to_width,
    wrap_text_to_width,
};
use super::font::text_width_with_margin;
use super::quantity::PlottedUnit;

const CELL_HEIGHT_PIXELS: f64 = 26.0;
/// Smallest and largest width of a heat map's cell, pixels.
const CELL_WIDTH_RANGE_PIXELS: (f64, f64) = (74.0, 150.0);
/// Number of the first colour step that is so dark that its text must be light.
const FIRST_STEP_WITH_LIGHT_TEXT: usize = 4;

/// The data of a heat map: a table whose cells are coloured by their value.
#[derive(Debug, Clone, PartialEq)]
pub struct HeatMapData {
    /// Texts above the columns.
    pub columns: Vec<String>,
    /// Texts to the left of the heat map's rows.
    pub rows: Vec<String>,
    /// Values of the heat map, row by row; `None` for a missing value.
    pub cells: Vec<Vec<Option<f64>>>,
    /// Quantity of the values.
    pub quantity: PlottedUnit,
    /// Names of the axis that runs to the right and of the axis that runs down.
    pub axis_names: (String, String),
}

/// Draws one cell of a heat map with its value's text. `at` is the cell's upper left corner and
/// `width` its width in pixels; `share` is 0 for the smallest and 1 for the largest value.
fn draw_heat_map_cell(
    picture: &mut PictureOfShapes,
    at: (f64, f64),
    width: f64,
    share: f64,
    text: &str,
) {
    let step =
        if share.is_finite() { (share * NUMBER_OF_HEAT_MAP_COLOURS as f64) as usize } else { 0 };
    let step = step.min(NUMBER_OF_HEAT_MAP_COLOURS - 1);
    picture.add_filled_rectangle(
        (at.0 + 1.0, at.1 + 1.0),
        (width - 2.0, CELL_HEIGHT_PIXELS - 2.0),
        ChartColour::Step(step),
    );
    let ink =
        if step >= FIRST_STEP_WITH_LIGHT_TEXT { ChartColour::OnDark } else { ChartColour::OnLight };
    let middle = (at.0 + width / 2.0, at.1 + CELL_HEIGHT_PIXELS / 2.0);
    picture.add_normal_text(middle, text, ink, HorizontalTextAnchor::Middle);
}

pub fn heat_map_picture(lines: TitleAndSubtitle<'_>, body: &HeatMapData) -> PictureOfShapes {
    let widest = |texts: &[String]| {
        texts
            .iter()
            .map(|text| text_width_with_margin(text, CHART_FONT_SIZE_PIXELS))
            .fold(0.0, f64::max)
    };
    let labels = widest(&body.rows).min(260.0);
    let cell =
        (widest(&body.columns) + 10.0).clamp(CELL_WIDTH_RANGE_PIXELS.0, CELL_WIDTH_RANGE_PIXELS.1);
    let left = DRAWING_MARGIN_PIXELS + labels + 10.0;
    let table = left + cell * body.columns.len() as f64 + DRAWING_MARGIN_PIXELS;
    let width = table.max(480.0);
    let rows = CELL_HEIGHT_PIXELS * body.rows.len() as f64;
    let columns: Vec<Vec<String>> = body
        .columns
        .iter()
        .map(|name| wrap_text_to_width(name, CHART_FONT_SIZE_PIXELS, cell - 4.0))
        .collect();
    let above =
        TEXT_LINE_HEIGHT_PIXELS * (1 + columns.iter().map(Vec::len).max().unwrap_or(1)) as f64;
    let mut picture = PictureOfShapes::without_shapes(
        width,
        height_of_title_and_legend(lines, &[], width) + above + rows + DRAWING_MARGIN_PIXELS,
    );
    let top = draw_title_and_legend(&mut picture, lines, &[]) + above;
    let names = format!("right: {}; down: {}", body.axis_names.0, body.axis_names.1);
    picture.add_normal_text(
        (DRAWING_MARGIN_PIXELS, top - above + 0.4 * TEXT_LINE_HEIGHT_PIXELS),
        &names,
        ChartColour::Ink,
        HorizontalTextAnchor::Start,
    );
    let values = || body.cells.iter().flatten().flatten().copied();
    let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    for (i, name) in columns.iter().enumerate() {
        let x = left + cell * (i as f64 + 0.5);
        for (above, line) in name.iter().rev().enumerate() {
            let y = top - (0.6 + above as f64) * TEXT_LINE_HEIGHT_PIXELS;
            picture.add_normal_text((x, y), line, ChartColour::Muted, HorizontalTextAnchor::Middle);
        }
    }
    for (i, (name, cells)) in body.rows.iter().zip(&body.cells).enumerate() {
        let y = top + CELL_HEIGHT_PIXELS * i as f64;
        picture.add_normal_text(
            (left - 10.0, y + CELL_HEIGHT_PIXELS / 2.0),
            &shorten_text_to_width(name, CHART_FONT_SIZE_PIXELS, labels),
            ChartColour::Muted,
            HorizontalTextAnchor::End,
        );
        for (column, value) in cells.iter().enumerate() {
            let x = left + cell * column as f64;
            let middle = (x + cell / 2.0, y + CELL_HEIGHT_PIXELS / 2.0);
            let Some(value) = value else {
                picture.add_normal_text(
                    middle,
                    "-",
                    ChartColour::Muted,
                    HorizontalTextAnchor::Middle,
                );
                continue;
            };
            let share = (value / least).ln() / (most / least).ln();
            let text = body.quantity.short_text_with_unit(*value);
            draw_heat_map_cell(&mut picture, (x, y), cell, share, &text);
        }
    }
    picture
}
