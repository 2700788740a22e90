//! Common parts of charts: title, legend, and the axis below.

use super::axis::ChartAxis;
use super::colour::PurposeColour;
use super::drawing_shapes::{
    TEXT_SIZE, TITLE_FONT_SIZE, TextAnchor, VectorPicture, fitted_text, wrapped_text,
};
use super::font::text_width;
use super::scale::ChartScale;

/// Title and subtitle.
pub type TitleLines<'a> = (&'a str, &'a str);

/// Margin around a drawing.
pub const DRAWING_MARGIN: f64 = 12.0;
/// Distance between two lines of text, pixels.
pub const TEXT_LINE_HEIGHT: f64 = 18.0;
/// Smallest distance between the texts of two ticks.
const TICK_TEXT_DISTANCE: f64 = 10.0;

/// Draws title and legend, and returns where the area below them begins. An entry of the legend is
/// its text and its colour.
pub fn draw_title_and_legend(
    picture: &mut VectorPicture,
    (title, subtitle): TitleLines<'_>,
    legend: &[(&str, PurposeColour)],
) -> f64 {
    let room = picture.width - 2.0 * DRAWING_MARGIN;
    let mut y = DRAWING_MARGIN - TEXT_LINE_HEIGHT / 2.0;
    for line in wrapped_text(title, TITLE_FONT_SIZE, room) {
        y += TEXT_LINE_HEIGHT;
        picture.add_title((DRAWING_MARGIN, y), &line);
    }
    for line in wrapped_text(subtitle, TEXT_SIZE, room).iter().filter(|line| !line.is_empty()) {
        y += TEXT_LINE_HEIGHT;
        picture.add_text((DRAWING_MARGIN, y), line, PurposeColour::Muted, TextAnchor::Start);
    }
    let mut x = f64::INFINITY;
    for (name, colour) in legend {
        let name = fitted_text(name, TEXT_SIZE, room - 16.0);
        let width = 16.0 + text_width(&name, TEXT_SIZE);
        if x + width > picture.width - DRAWING_MARGIN {
            (x, y) = (DRAWING_MARGIN, y + TEXT_LINE_HEIGHT);
        }
        picture.add_rectangle((x, y - 5.0), (11.0, 11.0), *colour);
        picture.add_text((x + 16.0, y), &name, PurposeColour::Ink, TextAnchor::Start);
        x += width + 14.0;
    }
    y + TEXT_LINE_HEIGHT
}

/// Height of a chart's title and legend, pixels.
pub fn title_and_legend_height(
    lines: TitleLines<'_>,
    legend: &[(&str, PurposeColour)],
    width: f64,
) -> f64 {
    draw_title_and_legend(&mut VectorPicture::new(width, 0.0), lines, legend)
}

/// Draws the ticks of a horizontal axis and their texts below `bottom`, except texts that would
/// touch, grid lines up to `top`, and the axis name.
pub fn draw_axis_below(
    picture: &mut VectorPicture,
    axis: &ChartAxis,
    scale: &ChartScale,
    (top, bottom): (f64, f64),
    middle: f64,
) {
    let mut taken = f64::NEG_INFINITY;
    for (value, text) in axis.ticks_on(scale, 6) {
        let Some(x) = scale.at(value) else { continue };
        picture.line(vec![(x, top), (x, bottom)], PurposeColour::Grid, 1.0);
        let half = text_width(&text, TEXT_SIZE) / 2.0;
        let x = x.clamp(half, (picture.width - half).max(half));
        if x - half < taken + TICK_TEXT_DISTANCE {
            continue;
        }
        taken = x + half;
        picture.add_text((x, bottom + 12.0), &text, PurposeColour::Muted, TextAnchor::Middle);
    }
    picture.add_text((middle, bottom + 30.0), &axis.label, PurposeColour::Ink, TextAnchor::Middle);
}
