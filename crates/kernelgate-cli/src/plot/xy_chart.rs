//! A chart body of curves and points over two axes.

use super::axis::ChartAxis;
use super::chart_frame::{
    DRAWING_MARGIN, TEXT_LINE_HEIGHT, TitleLines, draw_axis_below, draw_title_and_legend,
    title_and_legend_height,
};
use super::colour::PurposeColour;
use super::drawing_shapes::{TEXT_SIZE, TextAnchor, VectorPicture};
use super::font::text_width;
use super::scale::ChartScale;

/// Size of the drawing, and of the area between the axes.
const DEFAULT_CHART_SIZE: (f64, f64) = (480.0, 210.0);
/// Size of a drawing with the width of a page.
const FULL_WIDTH_CHART_SIZE: (f64, f64) = (660.0, 380.0);

/// Curves and points over two axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Xy {
    /// The horizontal axis.
    pub x: ChartAxis,
    /// The vertical axis.
    pub y: ChartAxis,
    /// The series of data, each with a colour of its own.
    pub series: Vec<CurveSeries>,
    /// Reference lines behind the data.
    pub guides: Vec<GuideLine>,
    /// Whether the chart has the width of a page.
    pub broad: bool,
}

/// Marks of one series.
#[derive(Debug, Clone, PartialEq)]
pub struct CurveSeries {
    /// Name in the legend.
    pub name: String,
    /// Number of the colour of the series.
    pub colour: usize,
    /// Whether a line joins the marks, which are then in order of x.
    pub joined: bool,
    pub marks: Vec<CurveMark>,
}

/// A point of a curve: a value with its spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurveMark {
    /// Horizontal position.
    pub x: f64,
    /// Vertical position.
    pub y: f64,
    /// Smallest and greatest y; both equal y if no spread is known.
    pub range: (f64, f64),
}

impl CurveMark {
    /// A point without a spread.
    pub const fn at(x: f64, y: f64) -> CurveMark {
        Self { x, y, range: (y, y) }
    }
}

/// A line to compare data with, such as a limit.
#[derive(Debug, Clone, PartialEq)]
pub struct GuideLine {
    /// Name in the legend.
    pub name: String,
    /// Corners of the line, in order of x.
    pub points: Vec<(f64, f64)>,
}

pub fn layout(lines: TitleLines<'_>, body: &Xy) -> VectorPicture {
    let (width, field) = if body.broad { FULL_WIDTH_CHART_SIZE } else { DEFAULT_CHART_SIZE };
    // Neighbouring guide lines have different tones.
    let tone =
        |i: usize| if i.is_multiple_of(2) { PurposeColour::Ink } else { PurposeColour::Muted };
    let guides = body.guides.iter().enumerate();
    let guides = guides.map(|(i, guide)| (guide.name.as_str(), tone(i)));
    let series = body.series.iter();
    let series = series.map(|series| (series.name.as_str(), PurposeColour::Series(series.colour)));
    let legend: Vec<(&str, PurposeColour)> = series.chain(guides).collect();
    let height = title_and_legend_height(lines, &legend, width) + TEXT_LINE_HEIGHT + field + 48.0;
    let mut picture = VectorPicture::new(width, height);
    let top = draw_title_and_legend(&mut picture, lines, &legend) + TEXT_LINE_HEIGHT;
    let bottom = top + field;
    let marks = || body.series.iter().flat_map(|series| &series.marks);
    let corners = || body.guides.iter().flat_map(|guide| &guide.points);
    let values = marks().flat_map(|mark| [mark.y, mark.range.0, mark.range.1]);
    let values = values.chain(corners().map(|(_, y)| *y));
    let y = body.y.scale(values, (bottom, top));
    let ticks = body.y.ticks_on(&y, 5);
    let widest = ticks.iter().map(|(_, text)| text_width(text, TEXT_SIZE)).fold(0.0, f64::max);
    let (left, right) = (DRAWING_MARGIN + widest + 6.0, width - DRAWING_MARGIN - 8.0);
    let values = marks().map(|mark| mark.x).chain(corners().map(|(x, _)| *x));
    let x = body.x.scale(values, (left, right));
    draw_axis_below(&mut picture, &body.x, &x, (top, bottom), f64::midpoint(left, right));
    for (value, text) in &ticks {
        let Some(at) = y.at(*value) else { continue };
        picture.line(vec![(left, at), (right, at)], PurposeColour::Grid, 1.0);
        picture.add_text((left - 6.0, at), text, PurposeColour::Muted, TextAnchor::End);
    }
    picture.add_text(
        (DRAWING_MARGIN, top - TEXT_LINE_HEIGHT * 0.7),
        &body.y.label,
        PurposeColour::Ink,
        TextAnchor::Start,
    );
    picture.line(vec![(left, top), (left, bottom), (right, bottom)], PurposeColour::Muted, 1.0);
    for (i, guide) in body.guides.iter().enumerate() {
        let points = guide.points.iter();
        let points = points.filter_map(|(gx, gy)| Some((x.at(*gx)?, y.at(*gy)?))).collect();
        picture.line(points, tone(i), 1.5);
    }
    body.series.iter().for_each(|series| draw_series(&mut picture, series, (&x, &y)));
    picture
}

fn draw_series(
    picture: &mut VectorPicture,
    series: &CurveSeries,
    (x, y): (&ChartScale, &ChartScale),
) {
    let colour = PurposeColour::Series(series.colour);
    let place = |mark: &CurveMark| Some((x.at(mark.x)?, y.at(mark.y)?));
    if series.joined {
        let points: Vec<(f64, f64)> = series.marks.iter().filter_map(place).collect();
        if points.len() > 1 {
            picture.line(points, colour, 2.0);
        }
    }
    for mark in &series.marks {
        let Some((px, py)) = place(mark) else { continue };
        if let (Some(low), Some(high)) = (y.within(mark.range.0), y.within(mark.range.1))
            && low - high > 6.0
        {
            picture.line(vec![(px, low), (px, high)], colour, 1.0);
            for end in [low, high] {
                picture.line(vec![(px - 3.0, end), (px + 3.0, end)], colour, 1.0);
            }
        }
        picture.dot((px, py), 3.0, colour, true);
    }
}
