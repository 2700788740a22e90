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

const HEAT_MAP_CELL_HEIGHT_PIXELS: f64 = 26.0;
/// Smallest and largest width of a heat map's cell, pixels.
const HEAT_MAP_CELL_WIDTH_RANGE_PIXELS: (f64, f64) = (74.0, 150.0);
/// Number of the first colour step that is so dark that its text must be light.
const FIRST_STEP_WITH_LIGHT_TEXT: usize = 4;

/// The data of a heat map: a table whose cells are coloured by their value.
#[derive(Debug, Clone, PartialEq)]
pub struct HeatMapData {
    /// Titles above the columns of the heat map.
    pub column_titles: Vec<String>,
    /// Texts to the left of the heat map's rows.
    pub row_labels: Vec<String>,
    /// Values of the heat map, row by row; `None` for a missing value.
    pub cell_values: Vec<Vec<Option<f64>>>,
    /// Unit in which the cell values of the heat map are printed.
    pub quantity: PlottedUnit,
    /// Names of the axis that runs to the right and of the axis that runs down.
    pub x_and_y_axis_names: (String, String),
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
        (width - 2.0, HEAT_MAP_CELL_HEIGHT_PIXELS - 2.0),
        ChartColour::HeatMapStep(step),
    );
    let ink = if step >= FIRST_STEP_WITH_LIGHT_TEXT {
        ChartColour::TextOnDarkCell
    } else {
        ChartColour::TextOnLightCell
    };
    let middle = (at.0 + width / 2.0, at.1 + HEAT_MAP_CELL_HEIGHT_PIXELS / 2.0);
    picture.add_normal_text(middle, text, ink, HorizontalTextAnchor::TextMiddle);
}

pub fn heat_map_picture(lines: TitleAndSubtitle<'_>, body: &HeatMapData) -> PictureOfShapes {
    let widest = |texts: &[String]| {
        texts
            .iter()
            .map(|text| text_width_with_margin(text, CHART_FONT_SIZE_PIXELS))
            .fold(0.0, f64::max)
    };
    let labels = widest(&body.row_labels).min(260.0);
    let cell = (widest(&body.column_titles) + 10.0)
        .clamp(HEAT_MAP_CELL_WIDTH_RANGE_PIXELS.0, HEAT_MAP_CELL_WIDTH_RANGE_PIXELS.1);
    let left = DRAWING_MARGIN_PIXELS + labels + 10.0;
    let table = left + cell * body.column_titles.len() as f64 + DRAWING_MARGIN_PIXELS;
    let width = table.max(480.0);
    let rows = HEAT_MAP_CELL_HEIGHT_PIXELS * body.row_labels.len() as f64;
    let columns: Vec<Vec<String>> = body
        .column_titles
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
    let names =
        format!("right: {}; down: {}", body.x_and_y_axis_names.0, body.x_and_y_axis_names.1);
    picture.add_normal_text(
        (DRAWING_MARGIN_PIXELS, top - above + 0.4 * TEXT_LINE_HEIGHT_PIXELS),
        &names,
        ChartColour::TextAndAxes,
        HorizontalTextAnchor::TextStart,
    );
    let values = || body.cell_values.iter().flatten().flatten().copied();
    let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    for (i, name) in columns.iter().enumerate() {
        let x = left + cell * (i as f64 + 0.5);
        for (above, line) in name.iter().rev().enumerate() {
            let y = top - (0.6 + above as f64) * TEXT_LINE_HEIGHT_PIXELS;
            picture.add_normal_text(
                (x, y),
                line,
                ChartColour::SecondaryText,
                HorizontalTextAnchor::TextMiddle,
            );
        }
    }
    for (i, (name, cells)) in body.row_labels.iter().zip(&body.cell_values).enumerate() {
        let y = top + HEAT_MAP_CELL_HEIGHT_PIXELS * i as f64;
        picture.add_normal_text(
            (left - 10.0, y + HEAT_MAP_CELL_HEIGHT_PIXELS / 2.0),
            &shorten_text_to_width(name, CHART_FONT_SIZE_PIXELS, labels),
            ChartColour::SecondaryText,
            HorizontalTextAnchor::TextEnd,
        );
        for (column, value) in cells.iter().enumerate() {
            let x = left + cell * column as f64;
            let middle = (x + cell / 2.0, y + HEAT_MAP_CELL_HEIGHT_PIXELS / 2.0);
            let Some(value) = value else {
                picture.add_normal_text(
                    middle,
                    "-",
                    ChartColour::SecondaryText,
                    HorizontalTextAnchor::TextMiddle,
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
