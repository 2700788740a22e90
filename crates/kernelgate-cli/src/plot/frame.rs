//! Common parts of charts: title, legend, and the axis below.

use super::axis::Axis;
use super::colour::Colour;
use super::picture::{TEXT, TITLE_FONT_SIZE, TextAnchor, VectorPicture, fitted, wrapped};
use super::scale::Scale;
use super::text::text_width;

/// Title and subtitle.
pub type Lines<'a> = (&'a str, &'a str);

/// Margin around a drawing.
pub const MARGIN: f64 = 12.0;
/// Distance between two lines of text, pixels.
pub const LINE: f64 = 18.0;
/// Smallest distance between the texts of two ticks.
const TICK_TEXT_DISTANCE: f64 = 10.0;

/// Draws title and legend, and returns where the area below them begins. An entry of the legend is
/// its text and its colour.
pub fn head(
    picture: &mut VectorPicture,
    (title, subtitle): Lines<'_>,
    legend: &[(&str, Colour)],
) -> f64 {
    let room = picture.width - 2.0 * MARGIN;
    let mut y = MARGIN - LINE / 2.0;
    for line in wrapped(title, TITLE_FONT_SIZE, room) {
        y += LINE;
        picture.add_title((MARGIN, y), &line);
    }
    for line in wrapped(subtitle, TEXT, room).iter().filter(|line| !line.is_empty()) {
        y += LINE;
        picture.text((MARGIN, y), line, Colour::Muted, TextAnchor::Start);
    }
    let mut x = f64::INFINITY;
    for (name, colour) in legend {
        let name = fitted(name, TEXT, room - 16.0);
        let width = 16.0 + text_width(&name, TEXT);
        if x + width > picture.width - MARGIN {
            (x, y) = (MARGIN, y + LINE);
        }
        picture.add_rectangle((x, y - 5.0), (11.0, 11.0), *colour);
        picture.text((x + 16.0, y), &name, Colour::Ink, TextAnchor::Start);
        x += width + 14.0;
    }
    y + LINE
}

/// Height of a chart's title and legend, pixels.
pub fn title_and_legend_height(lines: Lines<'_>, legend: &[(&str, Colour)], width: f64) -> f64 {
    head(&mut VectorPicture::new(width, 0.0), lines, legend)
}

/// Draws the ticks of a horizontal axis and their texts below `bottom`, except texts that would
/// touch, grid lines up to `top`, and the axis name.
pub fn draw_axis_below(
    picture: &mut VectorPicture,
    axis: &Axis,
    scale: &Scale,
    (top, bottom): (f64, f64),
    middle: f64,
) {
    let mut taken = f64::NEG_INFINITY;
    for (value, text) in axis.ticks_on(scale, 6) {
        let Some(x) = scale.at(value) else { continue };
        picture.line(vec![(x, top), (x, bottom)], Colour::Grid, 1.0);
        let half = text_width(&text, TEXT) / 2.0;
        let x = x.clamp(half, (picture.width - half).max(half));
        if x - half < taken + TICK_TEXT_DISTANCE {
            continue;
        }
        taken = x + half;
        picture.text((x, bottom + 12.0), &text, Colour::Muted, TextAnchor::Middle);
    }
    picture.text((middle, bottom + 30.0), &axis.label, Colour::Ink, TextAnchor::Middle);
}
