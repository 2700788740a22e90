//! Charts as data, which are laid out here and drawn by `plotters` as SVG and PNG.
//!
//! The [`ChartBody`] of a [`ChartWithTitle`] is curves and points over two axes, labelled rows over
//! one axis, or a table of colours. The layout turns it into a [`VectorPicture`], a list of shapes
//! in pixels, from which both formats are drawn, so that they cannot differ. One font is embedded:
//! it measures every text and draws the texts of a PNG; an SVG uses a font of the reader's system.
//!
//! This module neither chooses charts (`pages` does) nor has themes: a drawing has the colours of
//! the light theme, which a page maps ([`colour`]).

mod axis;
mod chart_frame;
pub mod colour;
mod drawing_shapes;
mod font;
mod heat_map;
mod labelled_rows;
mod quantity;
mod render;
mod scale;
mod xy_chart;

pub use axis::ChartAxis;
pub use drawing_shapes::{PictureShape, TextAnchor, VectorPicture};
pub use heat_map::HeatMap;
pub use labelled_rows::{ChartRowMark, LabelledRow, LabelledRows, MAX_ROWS};
pub use quantity::PlottedUnit;
pub use render::PlotError;
pub use scale::ScaleKind;
pub use xy_chart::{CurveMark, CurveSeries, GuideLine, Xy};

/// A chart: one drawing with its title.
#[derive(Debug, Clone, PartialEq)]
pub struct ChartWithTitle {
    /// First line.
    pub title: String,
    /// Second line, in a lighter colour; may be empty.
    pub subtitle: String,
    /// The drawing.
    pub body: ChartBody,
}

/// The drawing of a chart: curves, rows or a heat map.
#[derive(Debug, Clone, PartialEq)]
pub enum ChartBody {
    /// Curves and points.
    Xy(Xy),
    Rows(LabelledRows),
    /// A table of colours.
    Heat(HeatMap),
}

impl ChartWithTitle {
    /// Positions of all lines, texts and points.
    pub fn layout(&self) -> VectorPicture {
        let lines = (self.title.as_str(), self.subtitle.as_str());
        match &self.body {
            ChartBody::Xy(body) => xy_chart::layout(lines, body),
            ChartBody::Rows(body) => labelled_rows::layout(lines, body),
            ChartBody::Heat(body) => heat_map::layout(lines, body),
        }
    }

    /// Whether the chart needs the width of a page.
    pub const fn needs_page_width(&self) -> bool {
        match &self.body {
            ChartBody::Xy(body) => body.broad,
            ChartBody::Rows(_) => true,
            // A wide heat map would be shrunk in the gallery until its texts are too small.
            ChartBody::Heat(body) => body.columns.len() > 5,
        }
    }

    /// The chart as an SVG document, which can be embedded in an HTML page.
    pub fn svg(&self) -> Result<String, PlotError> {
        render::svg(&self.layout())
    }

    /// The chart as a PNG image, with two pixels for each of the layout.
    pub fn png(&self) -> Result<Vec<u8>, PlotError> {
        render::png(&self.layout())
    }
}

#[cfg(test)]
mod tests;
