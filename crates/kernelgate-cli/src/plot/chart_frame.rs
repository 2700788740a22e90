//! Draws the parts that all charts share: title, legend, and the horizontal axis below the data.

use super::axis::ChartAxis;
use super::colour::ChartColour;
use super::drawing_shapes::{
    CHART_FONT_SIZE_PIXELS, CHART_TITLE_FONT_SIZE_PIXELS, HorizontalTextAnchor, PictureOfShapes,
    shorten_text_to_width, wrap_text_to_width,
};
use super::font::text_width_with_margin;
use super::scale::AxisScale;

/// Title and subtitle.
pub type TitleAndSubtitle<'a> = (&'a str, &'a str);

/// Margin around a chart's drawing, in pixels.
pub const DRAWING_MARGIN_PIXELS: f64 = 12.0;
/// Distance between the middles of two lines of text in a chart, pixels.
pub const TEXT_LINE_HEIGHT_PIXELS: f64 = 18.0;
/// Smallest horizontal distance between the texts of two ticks, pixels.
const MIN_TICK_TEXT_DISTANCE_PIXELS: f64 = 10.0;

/// Draws a chart's title, subtitle and legend, and returns the y coordinate at which the area below
/// them begins. Each entry of the chart's legend has a text and a colour.
pub fn draw_title_and_legend(
    picture: &mut PictureOfShapes,
    (title, subtitle): TitleAndSubtitle<'_>,
    legend: &[(&str, ChartColour)],
) -> f64 {
    let room = picture.width_pixels - 2.0 * DRAWING_MARGIN_PIXELS;
    let mut y = DRAWING_MARGIN_PIXELS - TEXT_LINE_HEIGHT_PIXELS / 2.0;
    for line in wrap_text_to_width(title, CHART_TITLE_FONT_SIZE_PIXELS, room) {
        y += TEXT_LINE_HEIGHT_PIXELS;
        picture.add_title_text((DRAWING_MARGIN_PIXELS, y), &line);
    }
    for line in wrap_text_to_width(subtitle, CHART_FONT_SIZE_PIXELS, room)
        .iter()
        .filter(|line| !line.is_empty())
    {
        y += TEXT_LINE_HEIGHT_PIXELS;
        picture.add_normal_text(
            (DRAWING_MARGIN_PIXELS, y),
            line,
            ChartColour::SecondaryText,
            HorizontalTextAnchor::TextStart,
        );
    }
    let mut x = f64::INFINITY;
    for (name, colour) in legend {
        let name = shorten_text_to_width(name, CHART_FONT_SIZE_PIXELS, room - 16.0);
        let width = 16.0 + text_width_with_margin(&name, CHART_FONT_SIZE_PIXELS);
        if x + width > picture.width_pixels - DRAWING_MARGIN_PIXELS {
            (x, y) = (DRAWING_MARGIN_PIXELS, y + TEXT_LINE_HEIGHT_PIXELS);
        }
        picture.add_filled_rectangle((x, y - 5.0), (11.0, 11.0), *colour);
        picture.add_normal_text(
            (x + 16.0, y),
            &name,
            ChartColour::TextAndAxes,
            HorizontalTextAnchor::TextStart,
        );
        x += width + 14.0;
    }
    y + TEXT_LINE_HEIGHT_PIXELS
}

/// Returns the height of a chart's title, subtitle and legend at a given width, pixels.
pub fn height_of_title_and_legend(
    lines: TitleAndSubtitle<'_>,
    legend: &[(&str, ChartColour)],
    width: f64,
) -> f64 {
    draw_title_and_legend(&mut PictureOfShapes::without_shapes(width, 0.0), lines, legend)
}

/// Draws a horizontal axis: its name, the tick texts below `bottom` unless they would touch each
/// other, and vertical grid lines up to `top`.
pub fn draw_horizontal_axis(
    picture: &mut PictureOfShapes,
    axis: &ChartAxis,
    scale: &AxisScale,
    (top, bottom): (f64, f64),
    middle: f64,
) {
    let mut taken = f64::NEG_INFINITY;
    for (value, text) in axis.ticks_with_texts(scale, 6) {
        let Some(x) = scale.pixel_of_value(value) else { continue };
        picture.add_line_through_points(vec![(x, top), (x, bottom)], ChartColour::GridLines, 1.0);
        let half = text_width_with_margin(&text, CHART_FONT_SIZE_PIXELS) / 2.0;
        let x = x.clamp(half, (picture.width_pixels - half).max(half));
        if x - half < taken + MIN_TICK_TEXT_DISTANCE_PIXELS {
            continue;
        }
        taken = x + half;
        picture.add_normal_text(
            (x, bottom + 12.0),
            &text,
            ChartColour::SecondaryText,
            HorizontalTextAnchor::TextMiddle,
        );
    }
    picture.add_normal_text(
        (middle, bottom + 30.0),
        &axis.axis_name,
        ChartColour::TextAndAxes,
        HorizontalTextAnchor::TextMiddle,
    );
}
