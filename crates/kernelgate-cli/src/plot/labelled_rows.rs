//! Labelled rows over one axis: bars, intervals, points, spans of time.

use super::axis::ChartAxis;
use super::chart_frame::{
    DRAWING_MARGIN, TEXT_LINE_HEIGHT, TitleLines, draw_axis_below, draw_title_and_legend,
    title_and_legend_height,
};
use super::colour::PurposeColour;
use super::drawing_shapes::{TEXT_SIZE, TextAnchor, VectorPicture, wrapped_text};
use super::font::text_width;
use super::scale::ChartScale;

/// Width that a page of 700 pixels shows at full size.
const ROWS_WIDTH: f64 = 660.0;
/// Height of a row.
const ROW: f64 = 20.0;
/// Smallest width of the area right of the labels; if it would be less, labels take more lines.
const MIN_DRAWING_WIDTH: f64 = 180.0;

/// A chart body of labelled rows over one axis.
#[derive(Debug, Clone, PartialEq)]
pub struct LabelledRows {
    /// The horizontal axis.
    pub axis: ChartAxis,
    /// Meanings of the colours, by number; may be empty.
    pub legend: Vec<String>,
    /// Rows of the chart from top to bottom.
    pub rows: Vec<LabelledRow>,
    /// Value at which a vertical line crosses all rows, such as "no change".
    pub origin: Option<f64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct LabelledRow {
    /// Text to the left of the row.
    pub label: String,
    /// Value in words, right of the row.
    pub value: String,
    pub marks: Vec<ChartRowMark>,
}

/// A mark in a row; colours by number.
#[derive(Debug, Clone, PartialEq)]
pub enum ChartRowMark {
    /// A bar from the axis' lower end to a value.
    Bar(f64, usize),
    /// A mark for an interval between two values, with a dot in it.
    Interval(f64, f64, f64, usize),
    /// A span between two values, as high as the row.
    Span(f64, f64, usize),
    /// A mark with a dot for each value.
    Dots(Vec<f64>, usize),
    /// A short vertical line in the colour of text, such as a limit.
    Tick(f64),
}

impl ChartRowMark {
    /// Values of the mark on the axis.
    fn values(&self) -> Vec<f64> {
        match self {
            Self::Bar(to, _) | Self::Tick(to) => vec![*to],
            Self::Interval(low, at, high, _) => vec![*low, *at, *high],
            Self::Span(from, to, _) => vec![*from, *to],
            Self::Dots(values, _) => values.clone(),
        }
    }
}

pub fn layout(lines: TitleLines<'_>, body: &LabelledRows) -> VectorPicture {
    let legend = body.legend.iter().enumerate();
    let legend: Vec<(&str, PurposeColour)> =
        legend.map(|(i, name)| (name.as_str(), PurposeColour::Series(i))).collect();
    let widest = |texts: &mut dyn Iterator<Item = &String>| {
        texts.map(|text| text_width(text, TEXT_SIZE)).fold(0.0, f64::max)
    };
    let values = widest(&mut body.rows.iter().map(|row| &row.value));
    let right = ROWS_WIDTH - DRAWING_MARGIN - values - 10.0;
    let room = right - MIN_DRAWING_WIDTH - 10.0 - DRAWING_MARGIN;
    let labels: Vec<Vec<String>> =
        body.rows.iter().map(|row| wrapped_text(&row.label, TEXT_SIZE, room)).collect();
    let left = DRAWING_MARGIN + widest(&mut labels.iter().flatten()) + 10.0;
    let height =
        |label: &Vec<String>| ROW + TEXT_LINE_HEIGHT * label.len().saturating_sub(1) as f64;
    let rows: f64 = labels.iter().map(height).sum();
    let mut picture = VectorPicture::new(
        ROWS_WIDTH,
        title_and_legend_height(lines, &legend, ROWS_WIDTH) + rows + 8.0 + 48.0,
    );
    let top = draw_title_and_legend(&mut picture, lines, &legend);
    let bottom = top + rows + 8.0;
    let all = body.rows.iter().flat_map(|row| &row.marks).flat_map(ChartRowMark::values);
    let scale = body.axis.scale(all.chain(body.origin), (left, right));
    draw_axis_below(&mut picture, &body.axis, &scale, (top, bottom), f64::midpoint(left, right));
    if let Some(x) = body.origin.and_then(|origin| scale.at(origin)) {
        picture.line(vec![(x, top), (x, bottom)], PurposeColour::Muted, 1.5);
    }
    let mut end = top + 4.0;
    for (row, label) in body.rows.iter().zip(&labels) {
        let y = end + height(label) / 2.0;
        end += height(label);
        for (i, line) in label.iter().enumerate() {
            let below = TEXT_LINE_HEIGHT * (i as f64 - (label.len() - 1) as f64 / 2.0);
            picture.add_text((left - 10.0, y + below), line, PurposeColour::Ink, TextAnchor::End);
        }
        row.marks.iter().for_each(|mark| draw_mark(&mut picture, mark, &scale, (left, y)));
        picture.add_text((right + 10.0, y), &row.value, PurposeColour::Muted, TextAnchor::Start);
    }
    picture.line(vec![(left, top), (left, bottom), (right, bottom)], PurposeColour::Muted, 1.0);
    picture
}

fn draw_mark(
    picture: &mut VectorPicture,
    mark: &ChartRowMark,
    scale: &ChartScale,
    (left, y): (f64, f64),
) {
    let half = ROW / 2.0 - 4.0;
    match mark {
        ChartRowMark::Bar(to, colour) => {
            if let Some(x) = scale.within(*to) {
                picture.add_rectangle(
                    (left, y - half),
                    (x - left, 2.0 * half),
                    PurposeColour::Series(*colour),
                );
            }
        }
        ChartRowMark::Interval(low, at, high, colour) => {
            let colour = PurposeColour::Series(*colour);
            if let (Some(low), Some(high)) = (scale.within(*low), scale.within(*high)) {
                picture.line(vec![(low, y), (high, y)], colour, 2.0);
            }
            if let Some(x) = scale.at(*at) {
                picture.dot((x, y), 4.0, colour, true);
            }
        }
        ChartRowMark::Span(from, to, colour) => {
            if let (Some(from), Some(to)) = (scale.within(*from), scale.within(*to)) {
                let size = ((to - from).max(1.0), 2.0 * half);
                picture.add_rectangle((from, y - half), size, PurposeColour::Series(*colour));
            }
        }
        ChartRowMark::Dots(values, colour) => {
            for x in values.iter().filter_map(|value| scale.at(*value)) {
                picture.dot((x, y), 3.0, PurposeColour::Series(*colour), false);
            }
        }
        ChartRowMark::Tick(at) => {
            if let Some(x) = scale.within(*at) {
                picture.line(
                    vec![(x, y - ROW / 2.0 + 1.0), (x, y + ROW / 2.0 - 1.0)],
                    PurposeColour::Ink,
                    2.0,
                );
            }
        }
    }
}

/// Largest number of rows of a chart that a reader can survey.
pub const MAX_ROWS: usize = 60;
