//! An X-Y chart: curves and points over a horizontal and a vertical axis.

use super::axis::ChartAxis;
use super::chart_frame::{
    DRAWING_MARGIN_PIXELS, TEXT_LINE_HEIGHT_PIXELS, TitleAndSubtitle, draw_horizontal_axis,
    draw_title_and_legend, height_of_title_and_legend,
};
use super::colour::ChartColour;
use super::drawing_shapes::{CHART_FONT_SIZE_PIXELS, HorizontalTextAnchor, PictureOfShapes};
use super::font::text_width_with_margin;
use super::scale::AxisScale;

/// Width of the drawing of an X-Y chart, and height of the area between its axes, in pixels.
const DEFAULT_CHART_WIDTH_AND_PLOT_HEIGHT: (f64, f64) = (480.0, 210.0);
/// Width of an X-Y chart that fills an HTML page, and height of the area between its axes, in
/// pixels.
const WIDE_CHART_WIDTH_AND_PLOT_HEIGHT: (f64, f64) = (660.0, 380.0);

/// Body of an X-Y chart: curves and points over two axes.
#[derive(Debug, Clone, PartialEq)]
pub struct XyChart {
    /// The horizontal axis.
    pub horizontal_axis: ChartAxis,
    /// The vertical axis.
    pub vertical_axis: ChartAxis,
    /// The data series of the chart, each drawn in the colour with its own number.
    pub series: Vec<CurveOrPointSeries>,
    /// Reference lines that are drawn in the plot, such as a limit.
    pub reference_lines: Vec<ReferenceLine>,
    /// Whether the chart fills the width of an HTML page.
    pub fills_page_width: bool,
}

/// Marks of one series.
#[derive(Debug, Clone, PartialEq)]
pub struct CurveOrPointSeries {
    /// Name in the legend.
    pub legend_name: String,
    /// Index of the colour in which the series is drawn.
    pub colour_number: usize,
    /// Whether a line joins the marks of the series; if so, the marks are in the order of x.
    pub joined_by_lines: bool,
    pub marks: Vec<PointWithRange>,
}

/// A point of a chart series: x, y, and the range of y over its samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PointWithRange {
    /// Horizontal position.
    pub x: f64,
    /// Vertical position.
    pub y: f64,
    /// Smallest and greatest y of the point; both equal y if the spread is unknown.
    pub y_range: (f64, f64),
}

impl PointWithRange {
    /// A point of a chart series without a spread.
    pub const fn point_without_range(x: f64, y: f64) -> PointWithRange {
        Self { x, y, y_range: (y, y) }
    }
}

/// A reference line in a chart, such as a limit, to compare the data with.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceLine {
    /// Name in the legend.
    pub legend_name: String,
    /// Corners of the reference line, in the order of x.
    pub line_corners: Vec<(f64, f64)>,
}

pub fn layout_xy_chart(lines: TitleAndSubtitle<'_>, body: &XyChart) -> PictureOfShapes {
    let (width, field) = if body.fills_page_width {
        WIDE_CHART_WIDTH_AND_PLOT_HEIGHT
    } else {
        DEFAULT_CHART_WIDTH_AND_PLOT_HEIGHT
    };
    // Neighbouring reference lines alternate between two shades of grey.
    let tone = |i: usize| {
        if i.is_multiple_of(2) { ChartColour::TextAndAxes } else { ChartColour::SecondaryText }
    };
    let guides = body.reference_lines.iter().enumerate();
    let guides = guides.map(|(i, guide)| (guide.legend_name.as_str(), tone(i)));
    let series = body.series.iter();
    let series = series.map(|series| {
        (series.legend_name.as_str(), ChartColour::SeriesByNumber(series.colour_number))
    });
    let legend: Vec<(&str, ChartColour)> = series.chain(guides).collect();
    let height =
        height_of_title_and_legend(lines, &legend, width) + TEXT_LINE_HEIGHT_PIXELS + field + 48.0;
    let mut picture = PictureOfShapes::without_shapes(width, height);
    let top = draw_title_and_legend(&mut picture, lines, &legend) + TEXT_LINE_HEIGHT_PIXELS;
    let bottom = top + field;
    let marks = || body.series.iter().flat_map(|series| &series.marks);
    let corners = || body.reference_lines.iter().flat_map(|guide| &guide.line_corners);
    let values = marks().flat_map(|mark| [mark.y, mark.y_range.0, mark.y_range.1]);
    let values = values.chain(corners().map(|(_, y)| *y));
    let y = body.vertical_axis.scale_covering_values(values, (bottom, top));
    let ticks = body.vertical_axis.ticks_with_texts(&y, 5);
    let widest = ticks
        .iter()
        .map(|(_, text)| text_width_with_margin(text, CHART_FONT_SIZE_PIXELS))
        .fold(0.0, f64::max);
    let (left, right) = (DRAWING_MARGIN_PIXELS + widest + 6.0, width - DRAWING_MARGIN_PIXELS - 8.0);
    let values = marks().map(|mark| mark.x).chain(corners().map(|(x, _)| *x));
    let x = body.horizontal_axis.scale_covering_values(values, (left, right));
    draw_horizontal_axis(
        &mut picture,
        &body.horizontal_axis,
        &x,
        (top, bottom),
        f64::midpoint(left, right),
    );
    for (value, text) in &ticks {
        let Some(at) = y.pixel_of_value(*value) else { continue };
        picture.add_line_through_points(vec![(left, at), (right, at)], ChartColour::GridLines, 1.0);
        picture.add_normal_text(
            (left - 6.0, at),
            text,
            ChartColour::SecondaryText,
            HorizontalTextAnchor::TextEnd,
        );
    }
    picture.add_normal_text(
        (DRAWING_MARGIN_PIXELS, top - TEXT_LINE_HEIGHT_PIXELS * 0.7),
        &body.vertical_axis.axis_name,
        ChartColour::TextAndAxes,
        HorizontalTextAnchor::TextStart,
    );
    picture.add_line_through_points(
        vec![(left, top), (left, bottom), (right, bottom)],
        ChartColour::SecondaryText,
        1.0,
    );
    for (i, guide) in body.reference_lines.iter().enumerate() {
        let points = guide.line_corners.iter();
        let points = points
            .filter_map(|(gx, gy)| Some((x.pixel_of_value(*gx)?, y.pixel_of_value(*gy)?)))
            .collect();
        picture.add_line_through_points(points, tone(i), 1.5);
    }
    body.series.iter().for_each(|series| draw_curve_series(&mut picture, series, (&x, &y)));
    picture
}

fn draw_curve_series(
    picture: &mut PictureOfShapes,
    series: &CurveOrPointSeries,
    (x, y): (&AxisScale, &AxisScale),
) {
    let colour = ChartColour::SeriesByNumber(series.colour_number);
    let place =
        |mark: &PointWithRange| Some((x.pixel_of_value(mark.x)?, y.pixel_of_value(mark.y)?));
    if series.joined_by_lines {
        let points: Vec<(f64, f64)> = series.marks.iter().filter_map(place).collect();
        if points.len() > 1 {
            picture.add_line_through_points(points, colour, 2.0);
        }
    }
    for mark in &series.marks {
        let Some((px, py)) = place(mark) else { continue };
        if let (Some(low), Some(high)) =
            (y.clamped_pixel_of_value(mark.y_range.0), y.clamped_pixel_of_value(mark.y_range.1))
            && low - high > 6.0
        {
            picture.add_line_through_points(vec![(px, low), (px, high)], colour, 1.0);
            for end in [low, high] {
                picture.add_line_through_points(
                    vec![(px - 3.0, end), (px + 3.0, end)],
                    colour,
                    1.0,
                );
            }
        }
        picture.add_dot_or_ring((px, py), 3.0, colour, true);
    }
}
