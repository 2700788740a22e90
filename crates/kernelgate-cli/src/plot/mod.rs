//! This module holds charts as plain data, computes their layout in pixels, and draws them as SVG
//! and PNG with the `plotters` crate.
//!
//! The [`ChartBody`] of a [`TitledChart`] is one of three: curves and points over two axes,
//! labelled rows over one axis, or a heat map (a table of coloured cells). The layout turns a
//! [`TitledChart`] into a [`PictureOfShapes`], a list of shapes in pixels; SVG and PNG are both
//! drawn from the [`PictureOfShapes`], so the two files cannot differ. One font file is embedded in
//! the program: it measures the width of every chart text and draws the texts of a PNG; an SVG uses
//! a system font of its reader.
//!
//! This module neither chooses charts (the module `pages` does) nor has themes: an SVG contains the
//! colours of the light theme, which an HTML page maps to its own theme ([`colour`]).

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
pub use drawing_shapes::{HorizontalTextAnchor, PictureOfShapes, PictureShape};
pub use heat_map::HeatMapData;
pub use labelled_rows::{
    ChartRowWithLabel, LabelledRowsChart, MAX_ROWS_PER_ROW_CHART, MarkInChartRow,
};
pub use quantity::PlottedUnit;
pub use render::ChartDrawingError;
pub use scale::AxisScaleKind;
pub use xy_chart::{CurveOrPointSeries, PointWithRange, ReferenceLine, XyChart};

/// A chart: a drawing below a title and a subtitle.
#[derive(Debug, Clone, PartialEq)]
pub struct TitledChart {
    /// First line.
    pub chart_title: String,
    /// Subtitle of the chart, its second line, in a lighter colour; may be empty.
    pub chart_subtitle: String,
    /// The drawing.
    pub body: ChartBody,
}

/// The drawing of a chart: curves, rows or a heat map.
#[derive(Debug, Clone, PartialEq)]
pub enum ChartBody {
    /// Curves and points.
    Xy(XyChart),
    Rows(LabelledRowsChart),
    /// A table of colours.
    Heat(HeatMapData),
}

impl TitledChart {
    /// Computes the position in pixels of every line, text and point of the chart.
    pub fn layout_as_vector_picture(&self) -> PictureOfShapes {
        let lines = (self.chart_title.as_str(), self.chart_subtitle.as_str());
        match &self.body {
            ChartBody::Xy(body) => xy_chart::layout_xy_chart(lines, body),
            ChartBody::Rows(body) => labelled_rows::labelled_rows_picture(lines, body),
            ChartBody::Heat(body) => heat_map::heat_map_picture(lines, body),
        }
    }

    /// Whether the chart needs the full width of an HTML page.
    pub const fn needs_page_width(&self) -> bool {
        match &self.body {
            ChartBody::Xy(body) => body.fills_page_width,
            ChartBody::Rows(_) => true,
            // A heat map of more than five columns would be shrunk in a gallery of charts until its
            // texts are too small.
            ChartBody::Heat(body) => body.column_titles.len() > 5,
        }
    }

    /// Renders the chart as an SVG document, which can be embedded in an HTML page.
    pub fn render_svg(&self) -> Result<String, ChartDrawingError> {
        render::picture_to_svg(&self.layout_as_vector_picture())
    }

    /// Renders the chart as a PNG image, with two pixels for each pixel of the layout.
    pub fn render_png(&self) -> Result<Vec<u8>, ChartDrawingError> {
        render::picture_to_png(&self.layout_as_vector_picture())
    }
}

#[cfg(test)]
mod tests;
