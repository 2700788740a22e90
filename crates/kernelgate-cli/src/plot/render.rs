//! Draws pictures with `plotters`.

use plotters::backend::{BitMapBackend, DrawingBackend, SVGBackend};
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontDesc, FontFamily, FontStyle, RGBColor, ShapeStyle, TextStyle};

use super::colour::ChartColour;
use super::drawing_shapes::{HorizontalTextAnchor, PictureOfShapes, PictureShape};
use super::font::RgbImageBuffer;
use kernelgate::record::text::clean_message_for_terminal;

/// The reason why a chart could not be drawn as SVG or PNG.
#[derive(Debug, thiserror::Error)]
pub enum ChartDrawingError {
    /// The drawing library failed.
    #[error("failed to draw a plot: {0}")]
    DrawingLibraryFailed(String),
    /// The PNG encoder failed.
    #[error("failed to write a plot as PNG: {0}")]
    PngEncodingFailed(#[from] png::EncodingError),
}

/// Number of PNG pixels along each side of one layout pixel.
const PNG_PIXELS_PER_LAYOUT_PIXEL: f64 = 2.0;
/// Renders a picture as the text of an SVG document.
pub fn picture_to_svg(picture: &PictureOfShapes) -> Result<String, ChartDrawingError> {
    let mut text = String::new();
    let size = (picture.width_pixels.ceil() as u32, picture.height_pixels.ceil() as u32);
    draw_picture_with_plotters(SVGBackend::with_string(&mut text, size), picture, 1.0, true)?;
    // Removes default opacities and line breaks, which plotters adds to SVG; chart texts cannot
    // contain the removed strings, because quotation marks and `>` are escaped in texts.
    Ok(text.replace(" opacity=\"1\"", "").replace(">\n", ">").replace("\n</text>", "</text>"))
}

/// Renders a picture as the bytes of a PNG image.
pub fn picture_to_png(picture: &PictureOfShapes) -> Result<Vec<u8>, ChartDrawingError> {
    let pixels = |length: f64| (length * PNG_PIXELS_PER_LAYOUT_PIXEL).ceil() as u32;
    let (width, height) = (pixels(picture.width_pixels), pixels(picture.height_pixels));
    let mut buffer = vec![0xff; 3 * width as usize * height as usize];
    // The embedded font draws the texts of a PNG, because the text feature of plotters would change
    // the font of Criterion's own plots in the same build.
    draw_picture_with_plotters(
        BitMapBackend::with_buffer(&mut buffer, (width, height)),
        picture,
        PNG_PIXELS_PER_LAYOUT_PIXEL,
        false,
    )?;
    let mut pixels = RgbImageBuffer { rgb_bytes: &mut buffer, width_pixels: width as usize };
    for shape in &picture.shapes {
        if let PictureShape::SingleLineText {
            anchor_x_pixels: x,
            middle_y_pixels: y,
            text,
            font_size_pixels: size,
            text_colour: colour,
            anchor,
            ..
        } = shape
        {
            let before = match anchor {
                HorizontalTextAnchor::TextStart => 0.0,
                HorizontalTextAnchor::TextMiddle => 0.5,
                HorizontalTextAnchor::TextEnd => 1.0,
            };
            let at = (x * PNG_PIXELS_PER_LAYOUT_PIXEL, y * PNG_PIXELS_PER_LAYOUT_PIXEL);
            pixels.draw_text_as_pixels(
                &clean_message_for_terminal(text),
                at,
                (size * PNG_PIXELS_PER_LAYOUT_PIXEL, before),
                colour.light_theme_rgb(),
            );
        }
    }
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_compression(png::Compression::Fast);
    encoder.write_header()?.write_image_data(&buffer)?;
    Ok(out)
}

fn rgb_of_purpose_colour(colour: ChartColour) -> RGBColor {
    let [red, green, blue] = colour.light_theme_rgb();
    RGBColor(red, green, blue)
}

fn draw_picture_with_plotters<B: DrawingBackend>(
    backend: B,
    picture: &PictureOfShapes,
    scale: f64,
    with_texts: bool,
) -> Result<(), ChartDrawingError> {
    let area = backend.into_drawing_area();
    let is_drawn =
        |shape: &&PictureShape| with_texts || !matches!(shape, PictureShape::SingleLineText { .. });
    let all = || {
        area.fill(&rgb_of_purpose_colour(ChartColour::Background))?;
        let mut shapes = picture.shapes.iter().filter(is_drawn);
        shapes.try_for_each(|shape| draw_shape_with_plotters(&area, shape, scale))?;
        area.present()
    };
    all().map_err(|error| ChartDrawingError::DrawingLibraryFailed(error.to_string()))
}

type PlottersDrawResult<B> =
    Result<(), plotters::drawing::DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

fn draw_shape_with_plotters<B: DrawingBackend>(
    area: &DrawingArea<B, plotters::coord::Shift>,
    shape: &PictureShape,
    scale: f64,
) -> PlottersDrawResult<B> {
    let px = |length: f64| (length * scale).round() as i32;
    let style = |colour: ChartColour, filled: bool, width: f64| ShapeStyle {
        color: rgb_of_purpose_colour(colour).into(),
        filled,
        stroke_width: (width * scale).round().max(1.0) as u32,
    };
    match shape {
        PictureShape::Polyline {
            corners: points,
            line_colour: colour,
            line_width_pixels: width,
        } => {
            let points: Vec<(i32, i32)> = points.iter().map(|(x, y)| (px(*x), px(*y))).collect();
            area.draw(&PathElement::new(points, style(*colour, false, *width)))
        }
        PictureShape::FilledRectangle {
            left_pixels: x,
            top_pixels: y,
            width_pixels: width,
            height_pixels: height,
            fill_colour: colour,
        } => {
            let corners = [(px(*x), px(*y)), (px(x + width), px(y + height))];
            area.draw(&Rectangle::new(corners, style(*colour, true, 1.0)))
        }
        PictureShape::DiscOrRing {
            centre_x_pixels: x,
            centre_y_pixels: y,
            radius_pixels: radius,
            dot_colour: colour,
            is_filled_disc: filled,
        } => area.draw(&Circle::new((px(*x), px(*y)), px(*radius), style(*colour, *filled, 1.5))),
        PictureShape::SingleLineText {
            anchor_x_pixels: x,
            middle_y_pixels: y,
            text,
            font_size_pixels: size,
            text_colour: colour,
            anchor,
            is_bold: bold,
        } => {
            let horizontal = match anchor {
                HorizontalTextAnchor::TextStart => HPos::Left,
                HorizontalTextAnchor::TextMiddle => HPos::Center,
                HorizontalTextAnchor::TextEnd => HPos::Right,
            };
            let colour = rgb_of_purpose_colour(*colour);
            let weight = if *bold { FontStyle::Bold } else { FontStyle::Normal };
            let style = TextStyle::from(FontDesc::new(FontFamily::SansSerif, size * scale, weight))
                .color(&colour)
                .pos(Pos::new(horizontal, VPos::Center));
            area.draw(&Text::new(
                clean_message_for_terminal(text).into_owned(),
                (px(*x), px(*y)),
                style,
            ))
        }
    }
}
