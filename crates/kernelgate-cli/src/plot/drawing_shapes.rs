//! A drawing as shapes in pixels, independent of the format.

use super::colour::PurposeColour;
use super::font::text_width;

/// Shapes in the order in which they are drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct VectorPicture {
    /// Width in pixels.
    pub width: f64,
    /// Height in pixels.
    pub height: f64,
    pub shapes: Vec<PictureShape>,
}

/// A shape of a picture; x points to the right, y points down.
#[derive(Debug, Clone, PartialEq)]
pub enum PictureShape {
    /// Points that are joined by a line.
    Line {
        points: Vec<(f64, f64)>,
        /// Colour of the line.
        colour: PurposeColour,
        /// Width of the line.
        width: f64,
    },
    /// A filled rectangle.
    Rect {
        /// Left edge.
        x: f64,
        /// Top edge.
        y: f64,
        /// Extent to the right.
        width: f64,
        /// Extent downwards.
        height: f64,
        /// Colour of the rectangle.
        colour: PurposeColour,
    },
    /// A dot, either filled or drawn as a ring.
    Dot {
        /// Horizontal position of the dot's middle.
        x: f64,
        /// Vertical position of the text's middle.
        y: f64,
        /// Radius of the dot.
        radius: f64,
        /// Colour of the dot.
        colour: PurposeColour,
        /// Whether the dot is a filled disc rather than a ring.
        filled: bool,
    },
    /// A text on one line, centred on its y.
    Text {
        /// Horizontal position of the text: its start, middle or end, as `anchor` states.
        x: f64,
        /// Vertical position of the middle of the text.
        y: f64,
        text: String,
        /// Size of the text.
        size: f64,
        /// Colour of the text.
        colour: PurposeColour,
        /// Which part of the text lies at x: start, middle or end.
        anchor: TextAnchor,
        /// Whether the text is a title, which is bold.
        bold: bool,
    },
}

/// The part of a text that lies at its x.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextAnchor {
    Start,
    Middle,
    End,
}

/// Size of texts in pixels, except titles.
pub const TEXT_SIZE: f64 = 14.0;
pub const TITLE_FONT_SIZE: f64 = 17.0;

impl VectorPicture {
    /// A picture without shapes.
    pub const fn new(width: f64, height: f64) -> Self {
        Self { width, height, shapes: Vec::new() }
    }

    /// Adds a line.
    pub fn line(&mut self, points: Vec<(f64, f64)>, colour: PurposeColour, width: f64) {
        self.shapes.push(PictureShape::Line { points, colour, width });
    }

    /// Adds a filled rectangle.
    pub fn add_rectangle(
        &mut self,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        colour: PurposeColour,
    ) {
        self.shapes.push(PictureShape::Rect { x, y, width, height, colour });
    }

    /// Adds a dot.
    pub fn dot(&mut self, (x, y): (f64, f64), radius: f64, colour: PurposeColour, filled: bool) {
        self.shapes.push(PictureShape::Dot { x, y, radius, colour, filled });
    }

    /// Adds a text of the usual size.
    pub fn add_text(
        &mut self,
        (x, y): (f64, f64),
        text: &str,
        colour: PurposeColour,
        anchor: TextAnchor,
    ) {
        if !text.is_empty() {
            let (text, size, bold) = (text.to_owned(), TEXT_SIZE, false);
            self.shapes.push(PictureShape::Text { x, y, text, size, colour, anchor, bold });
        }
    }

    pub fn add_title(&mut self, (x, y): (f64, f64), text: &str) {
        let (text, size, bold) = (text.to_owned(), TITLE_FONT_SIZE, true);
        let (colour, anchor) = (PurposeColour::Ink, TextAnchor::Start);
        self.shapes.push(PictureShape::Text { x, y, text, size, colour, anchor, bold });
    }
}

/// Largest number of lines of one text.
const MAX_TITLE_LINES: usize = 4;

/// Wraps a text to a width in pixels, at words, or within an id at its parts if a word is too wide.
/// A text that is longer than [`MAX_TITLE_LINES`], or has no parts, lacks its middle.
pub fn wrapped_text(text: &str, size: f64, width: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let whole = text_width(word, size) <= width;
        let is_end = |c| !whole && matches!(c, '_' | '/');
        for (i, part) in word.split_inclusive(is_end).enumerate() {
            let space = if i == 0 { " " } else { "" };
            let full = lines.len() == MAX_TITLE_LINES;
            match lines.last_mut() {
                Some(line)
                    if full || text_width(&format!("{line}{space}{part}"), size) <= width =>
                {
                    line.push_str(space);
                    line.push_str(part);
                }
                _ => lines.push(part.to_owned()),
            }
        }
    }
    lines.iter().map(|line| fitted_text(line, size, width)).collect()
}

/// Shortens a text that is wider than `width` pixels by replacing its middle.
pub fn fitted_text(text: &str, size: f64, width: f64) -> String {
    if text_width(text, size) <= width {
        return text.to_owned();
    }
    let chars: Vec<char> = text.chars().collect();
    let with = |kept: usize| -> String {
        let (head, tail) = (kept - kept / 2, kept / 2);
        chars[..head].iter().chain(&['…']).chain(&chars[chars.len() - tail..]).collect()
    };
    let fits = |kept: usize| text_width(&with(kept), size) <= width;
    // The largest number of characters that fits, found by bisection.
    let (mut low, mut high) = (0, chars.len());
    while low + 1 < high {
        let middle = usize::midpoint(low, high);
        if fits(middle) { low = middle } else { high = middle }
    }
    with(low)
}
