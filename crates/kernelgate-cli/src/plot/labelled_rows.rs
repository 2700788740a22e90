//! Draws a chart of labelled rows over one horizontal axis, with bars, intervals, dots or time
//! spans in each row.

use super::axis::ChartAxis;
use super::chart_frame::{
    DRAWING_MARGIN_PIXELS, TEXT_LINE_HEIGHT_PIXELS, TitleAndSubtitle, draw_horizontal_axis,
    draw_title_and_legend, height_of_title_and_legend,
};
use super::colour::ChartColour;
use super::drawing_shapes::{
    CHART_FONT_SIZE_PIXELS, HorizontalTextAnchor, PictureOfShapes, wrap_text_to_width,
};
use super::font::text_width_with_margin;
use super::scale::AxisScale;

/// Width of the chart of rows that an HTML page with a text width of 700 pixels shows unscaled,
/// pixels.
const ROWS_CHART_WIDTH_PIXELS: f64 = 660.0;
/// Height of a row of the chart, in pixels.
const CHART_ROW_HEIGHT_PIXELS: f64 = 20.0;
/// Smallest width of the data area of a chart of rows, pixels; if labels would leave less, they are
/// wrapped.
const MIN_DATA_AREA_WIDTH_PIXELS: f64 = 180.0;

/// The data of a chart of labelled rows over one horizontal axis.
#[derive(Debug, Clone, PartialEq)]
pub struct LabelledRowsChart {
    /// The horizontal axis.
    pub horizontal_axis: ChartAxis,
    /// Legend: the meaning of each mark colour, by its number; may be empty.
    pub mark_colour_legend: Vec<String>,
    /// Rows of the chart from top to bottom.
    pub rows: Vec<ChartRowWithLabel>,
    /// Value at which a vertical line crosses all rows, such as 1 for "no change"; `None` for no
    /// line.
    pub vertical_line_value: Option<f64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ChartRowWithLabel {
    /// Label to the left of the row.
    pub row_label: String,
    /// Text to the right of the row, which states its value.
    pub value_text: String,
    pub marks: Vec<MarkInChartRow>,
}

/// A mark in a row of a chart; the last number of most variants is the number of its colour.
#[derive(Debug, Clone, PartialEq)]
pub enum MarkInChartRow {
    /// A bar from the lower end of the axis to a value.
    BarToValue(f64, usize),
    /// An interval as a line from the first to the third value, with a dot at the second.
    IntervalWithCentreDot(f64, f64, f64, usize),
    /// A rectangle from one value to another, as high as the row.
    RectangleBetweenValues(f64, f64, usize),
    /// A ring (small circle) at each of several values.
    RingsAtValues(Vec<f64>, usize),
    /// A short vertical line in the colour of text, such as for a limit.
    VerticalTickAtValue(f64),
}

impl MarkInChartRow {
    /// Returns the values on the axis that the mark covers.
    fn values_on_axis(&self) -> Vec<f64> {
        match self {
            Self::BarToValue(to, _) | Self::VerticalTickAtValue(to) => vec![*to],
            Self::IntervalWithCentreDot(low, at, high, _) => vec![*low, *at, *high],
            Self::RectangleBetweenValues(from, to, _) => vec![*from, *to],
            Self::RingsAtValues(values, _) => values.clone(),
        }
    }
}

pub fn labelled_rows_picture(
    lines: TitleAndSubtitle<'_>,
    body: &LabelledRowsChart,
) -> PictureOfShapes {
    let legend = body.mark_colour_legend.iter().enumerate();
    let legend: Vec<(&str, ChartColour)> =
        legend.map(|(i, name)| (name.as_str(), ChartColour::SeriesByNumber(i))).collect();
    let widest = |texts: &mut dyn Iterator<Item = &String>| {
        texts.map(|text| text_width_with_margin(text, CHART_FONT_SIZE_PIXELS)).fold(0.0, f64::max)
    };
    let values = widest(&mut body.rows.iter().map(|row| &row.value_text));
    let right = ROWS_CHART_WIDTH_PIXELS - DRAWING_MARGIN_PIXELS - values - 10.0;
    let room = right - MIN_DATA_AREA_WIDTH_PIXELS - 10.0 - DRAWING_MARGIN_PIXELS;
    let labels: Vec<Vec<String>> = body
        .rows
        .iter()
        .map(|row| wrap_text_to_width(&row.row_label, CHART_FONT_SIZE_PIXELS, room))
        .collect();
    let left = DRAWING_MARGIN_PIXELS + widest(&mut labels.iter().flatten()) + 10.0;
    let height = |label: &Vec<String>| {
        CHART_ROW_HEIGHT_PIXELS + TEXT_LINE_HEIGHT_PIXELS * label.len().saturating_sub(1) as f64
    };
    let rows: f64 = labels.iter().map(height).sum();
    let mut picture = PictureOfShapes::without_shapes(
        ROWS_CHART_WIDTH_PIXELS,
        height_of_title_and_legend(lines, &legend, ROWS_CHART_WIDTH_PIXELS) + rows + 8.0 + 48.0,
    );
    let top = draw_title_and_legend(&mut picture, lines, &legend);
    let bottom = top + rows + 8.0;
    let all = body.rows.iter().flat_map(|row| &row.marks).flat_map(MarkInChartRow::values_on_axis);
    let scale = body
        .horizontal_axis
        .scale_covering_values(all.chain(body.vertical_line_value), (left, right));
    draw_horizontal_axis(
        &mut picture,
        &body.horizontal_axis,
        &scale,
        (top, bottom),
        f64::midpoint(left, right),
    );
    if let Some(x) = body.vertical_line_value.and_then(|origin| scale.pixel_of_value(origin)) {
        picture.add_line_through_points(
            vec![(x, top), (x, bottom)],
            ChartColour::SecondaryText,
            1.5,
        );
    }
    let mut end = top + 4.0;
    for (row, label) in body.rows.iter().zip(&labels) {
        let y = end + height(label) / 2.0;
        end += height(label);
        for (i, line) in label.iter().enumerate() {
            let below = TEXT_LINE_HEIGHT_PIXELS * (i as f64 - (label.len() - 1) as f64 / 2.0);
            picture.add_normal_text(
                (left - 10.0, y + below),
                line,
                ChartColour::TextAndAxes,
                HorizontalTextAnchor::TextEnd,
            );
        }
        row.marks.iter().for_each(|mark| draw_mark_in_row(&mut picture, mark, &scale, (left, y)));
        picture.add_normal_text(
            (right + 10.0, y),
            &row.value_text,
            ChartColour::SecondaryText,
            HorizontalTextAnchor::TextStart,
        );
    }
    picture.add_line_through_points(
        vec![(left, top), (left, bottom), (right, bottom)],
        ChartColour::SecondaryText,
        1.0,
    );
    picture
}

fn draw_mark_in_row(
    picture: &mut PictureOfShapes,
    mark: &MarkInChartRow,
    scale: &AxisScale,
    (left, y): (f64, f64),
) {
    let half = CHART_ROW_HEIGHT_PIXELS / 2.0 - 4.0;
    match mark {
        MarkInChartRow::BarToValue(to, colour) => {
            if let Some(x) = scale.clamped_pixel_of_value(*to) {
                picture.add_filled_rectangle(
                    (left, y - half),
                    (x - left, 2.0 * half),
                    ChartColour::SeriesByNumber(*colour),
                );
            }
        }
        MarkInChartRow::IntervalWithCentreDot(low, at, high, colour) => {
            let colour = ChartColour::SeriesByNumber(*colour);
            if let (Some(low), Some(high)) =
                (scale.clamped_pixel_of_value(*low), scale.clamped_pixel_of_value(*high))
            {
                picture.add_line_through_points(vec![(low, y), (high, y)], colour, 2.0);
            }
            if let Some(x) = scale.pixel_of_value(*at) {
                picture.add_dot_or_ring((x, y), 4.0, colour, true);
            }
        }
        MarkInChartRow::RectangleBetweenValues(from, to, colour) => {
            if let (Some(from), Some(to)) =
                (scale.clamped_pixel_of_value(*from), scale.clamped_pixel_of_value(*to))
            {
                let size = ((to - from).max(1.0), 2.0 * half);
                picture.add_filled_rectangle(
                    (from, y - half),
                    size,
                    ChartColour::SeriesByNumber(*colour),
                );
            }
        }
        MarkInChartRow::RingsAtValues(values, colour) => {
            for x in values.iter().filter_map(|value| scale.pixel_of_value(*value)) {
                picture.add_dot_or_ring((x, y), 3.0, ChartColour::SeriesByNumber(*colour), false);
            }
        }
        MarkInChartRow::VerticalTickAtValue(at) => {
            if let Some(x) = scale.clamped_pixel_of_value(*at) {
                picture.add_line_through_points(
                    vec![
                        (x, y - CHART_ROW_HEIGHT_PIXELS / 2.0 + 1.0),
                        (x, y + CHART_ROW_HEIGHT_PIXELS / 2.0 - 1.0),
                    ],
                    ChartColour::TextAndAxes,
                    2.0,
                );
            }
        }
    }
}

/// Largest number of rows of a bar or interval chart, so that a reader can survey it.
pub const MAX_ROWS_PER_ROW_CHART: usize = 60;
