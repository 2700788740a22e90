//! A chart as a list of shapes with pixel coordinates, from which SVG and PNG are drawn.

use super::colour::ChartColour;
use super::font::text_width_with_margin;

/// A picture that consists of shapes in the order in which they are drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct PictureOfShapes {
    /// Width in pixels.
    pub width_pixels: f64,
    /// Height in pixels.
    pub height_pixels: f64,
    pub shapes: Vec<PictureShape>,
}

/// A shape of a picture, with pixel coordinates: x points to the right, y points down.
#[derive(Debug, Clone, PartialEq)]
pub enum PictureShape {
    /// A line through several points.
    Polyline {
        corners: Vec<(f64, f64)>,
        /// Colour of the polyline.
        line_colour: ChartColour,
        /// Width of the line in pixels.
        line_width_pixels: f64,
    },
    /// A filled rectangle.
    FilledRectangle {
        /// Left edge.
        left_pixels: f64,
        /// Top edge.
        top_pixels: f64,
        /// Width of the rectangle in pixels.
        width_pixels: f64,
        /// Extent downwards.
        height_pixels: f64,
        /// Colour of the rectangle.
        fill_colour: ChartColour,
    },
    /// A dot, which is a filled disc or a ring.
    DiscOrRing {
        /// Horizontal position of the dot's centre, pixels.
        centre_x_pixels: f64,
        /// Vertical position of the dot's centre, pixels.
        centre_y_pixels: f64,
        /// Radius of the dot in pixels.
        radius_pixels: f64,
        /// Colour of the dot.
        dot_colour: ChartColour,
        /// Whether the dot is a filled disc (true) or a ring (false).
        is_filled_disc: bool,
    },
    /// A text on one line, vertically centred on its y coordinate.
    SingleLineText {
        /// Horizontal position of the text's start, middle or end (as `anchor` states), pixels.
        anchor_x_pixels: f64,
        /// Vertical position of the middle of the text, pixels.
        middle_y_pixels: f64,
        text: String,
        /// Font size of the text in pixels.
        font_size_pixels: f64,
        /// Colour of the text shape.
        text_colour: ChartColour,
        /// Whether the start, middle or end of the text lies at x.
        anchor: HorizontalTextAnchor,
        /// Whether the text is bold, as titles are.
        is_bold: bool,
    },
}

/// The part of a text (start, middle or end) that lies at its x coordinate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HorizontalTextAnchor {
    TextStart,
    TextMiddle,
    TextEnd,
}

/// Font size of all texts of a chart except the title, pixels.
pub const CHART_FONT_SIZE_PIXELS: f64 = 14.0;
pub const CHART_TITLE_FONT_SIZE_PIXELS: f64 = 17.0;

impl PictureOfShapes {
    /// A picture without shapes.
    pub const fn without_shapes(width: f64, height: f64) -> Self {
        Self { width_pixels: width, height_pixels: height, shapes: Vec::new() }
    }

    /// Adds a line.
    pub fn add_line_through_points(
        &mut self,
        points: Vec<(f64, f64)>,
        colour: ChartColour,
        width: f64,
    ) {
        self.shapes.push(PictureShape::Polyline {
            corners: points,
            line_colour: colour,
            line_width_pixels: width,
        });
    }

    /// Adds a filled rectangle.
    pub fn add_filled_rectangle(
        &mut self,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        colour: ChartColour,
    ) {
        self.shapes.push(PictureShape::FilledRectangle {
            left_pixels: x,
            top_pixels: y,
            width_pixels: width,
            height_pixels: height,
            fill_colour: colour,
        });
    }

    /// Adds a dot.
    pub fn add_dot_or_ring(
        &mut self,
        (x, y): (f64, f64),
        radius: f64,
        colour: ChartColour,
        filled: bool,
    ) {
        self.shapes.push(PictureShape::DiscOrRing {
            centre_x_pixels: x,
            centre_y_pixels: y,
            radius_pixels: radius,
            dot_colour: colour,
            is_filled_disc: filled,
        });
    }

    /// Adds a text of the normal font size to the picture.
    pub fn add_normal_text(
        &mut self,
        (x, y): (f64, f64),
        text: &str,
        colour: ChartColour,
        anchor: HorizontalTextAnchor,
    ) {
        if !text.is_empty() {
            let (text, size, bold) = (text.to_owned(), CHART_FONT_SIZE_PIXELS, false);
            self.shapes.push(PictureShape::SingleLineText {
                anchor_x_pixels: x,
                middle_y_pixels: y,
                text,
                font_size_pixels: size,
                text_colour: colour,
                anchor,
                is_bold: bold,
            });
        }
    }

    pub fn add_title_text(&mut self, (x, y): (f64, f64), text: &str) {
        let (text, size, bold) = (text.to_owned(), CHART_TITLE_FONT_SIZE_PIXELS, true);
        let (colour, anchor) = (ChartColour::TextAndAxes, HorizontalTextAnchor::TextStart);
        self.shapes.push(PictureShape::SingleLineText {
            anchor_x_pixels: x,
            middle_y_pixels: y,
            text,
            font_size_pixels: size,
            text_colour: colour,
            anchor,
            is_bold: bold,
        });
    }
}

/// Largest number of lines into which a text is wrapped.
const MAX_LINES_OF_WRAPPED_TEXT: usize = 4;

/// Wraps a text into lines of at most `width` pixels, between words, or after `_` and `/` within a
/// word that is too wide. If a text needs more than [`MAX_LINES_OF_WRAPPED_TEXT`] lines or a part
/// is too wide, the middle of its last line is replaced by an ellipsis.
pub fn wrap_text_to_width(text: &str, size: f64, width: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let whole = text_width_with_margin(word, size) <= width;
        let is_end = |c| !whole && matches!(c, '_' | '/');
        for (i, part) in word.split_inclusive(is_end).enumerate() {
            let space = if i == 0 { " " } else { "" };
            let full = lines.len() == MAX_LINES_OF_WRAPPED_TEXT;
            match lines.last_mut() {
                Some(line)
                    if full
                        || text_width_with_margin(&format!("{line}{space}{part}"), size)
                            <= width =>
                {
                    line.push_str(space);
                    line.push_str(part);
                }
                _ => lines.push(part.to_owned()),
            }
        }
    }
    lines.iter().map(|line| shorten_text_to_width(line, size, width)).collect()
}

/// Shortens a text that is wider than `width` pixels by replacing its middle by an ellipsis.
pub fn shorten_text_to_width(text: &str, size: f64, width: f64) -> String {
    if text_width_with_margin(text, size) <= width {
        return text.to_owned();
    }
    let chars: Vec<char> = text.chars().collect();
    let with = |kept: usize| -> String {
        let (head, tail) = (kept - kept / 2, kept / 2);
        chars[..head].iter().chain(&['…']).chain(&chars[chars.len() - tail..]).collect()
    };
    let fits = |kept: usize| text_width_with_margin(&with(kept), size) <= width;
    // The largest number of characters that fits into the width is found by bisection.
    let (mut low, mut high) = (0, chars.len());
    while low + 1 < high {
        let middle = usize::midpoint(low, high);
        if fits(middle) { low = middle } else { high = middle }
    }
    with(low)
}
