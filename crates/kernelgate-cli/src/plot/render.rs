//! Draws pictures with `plotters`.

use plotters::backend::{BitMapBackend, DrawingBackend, SVGBackend};
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontDesc, FontFamily, FontStyle, RGBColor, ShapeStyle, TextStyle};

use super::colour::PurposeColour;
use super::drawing_shapes::{PictureShape, TextAnchor, VectorPicture};
use super::font::PixelImage;
use kernelgate::record::text::printable_on_terminal;

/// The reason why a chart could not be drawn.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// The drawing library failed.
    #[error("failed to draw a plot: {0}")]
    Draw(String),
    /// The PNG encoder failed.
    #[error("failed to write a plot as PNG: {0}")]
    Png(#[from] png::EncodingError),
}

/// Pixels of a PNG for each of the picture.
const PNG_SCALE: f64 = 2.0;
/// Draws a picture as an SVG document.
pub fn svg(picture: &VectorPicture) -> Result<String, PlotError> {
    let mut text = String::new();
    let size = (picture.width.ceil() as u32, picture.height.ceil() as u32);
    draw_picture(SVGBackend::with_string(&mut text, size), picture, 1.0, true)?;
    // The default opacity of every shape is not needed; texts hold neither plain quotation marks
    // nor `>`.
    Ok(text.replace(" opacity=\"1\"", "").replace(">\n", ">").replace("\n</text>", "</text>"))
}

/// Draws a picture as a PNG image.
pub fn png(picture: &VectorPicture) -> Result<Vec<u8>, PlotError> {
    let pixels = |length: f64| (length * PNG_SCALE).ceil() as u32;
    let (width, height) = (pixels(picture.width), pixels(picture.height));
    let mut buffer = vec![0xff; 3 * width as usize * height as usize];
    // Texts are drawn by our own font, because plotters' feature for texts would take the font away
    // from Criterion's plots.
    draw_picture(
        BitMapBackend::with_buffer(&mut buffer, (width, height)),
        picture,
        PNG_SCALE,
        false,
    )?;
    let mut pixels = PixelImage { bytes: &mut buffer, width: width as usize };
    for shape in &picture.shapes {
        if let PictureShape::Text { x, y, text, size, colour, anchor, .. } = shape {
            let before = match anchor {
                TextAnchor::Start => 0.0,
                TextAnchor::Middle => 0.5,
                TextAnchor::End => 1.0,
            };
            let at = (x * PNG_SCALE, y * PNG_SCALE);
            pixels.draw_text(
                &printable_on_terminal(text),
                at,
                (size * PNG_SCALE, before),
                colour.rgb(),
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

fn rgb(colour: PurposeColour) -> RGBColor {
    let [red, green, blue] = colour.rgb();
    RGBColor(red, green, blue)
}

fn draw_picture<B: DrawingBackend>(
    backend: B,
    picture: &VectorPicture,
    scale: f64,
    with_texts: bool,
) -> Result<(), PlotError> {
    let area = backend.into_drawing_area();
    let is_drawn =
        |shape: &&PictureShape| with_texts || !matches!(shape, PictureShape::Text { .. });
    let all = || {
        area.fill(&rgb(PurposeColour::Paper))?;
        let mut shapes = picture.shapes.iter().filter(is_drawn);
        shapes.try_for_each(|shape| draw_shape(&area, shape, scale))?;
        area.present()
    };
    all().map_err(|error| PlotError::Draw(error.to_string()))
}

type DrawResult<B> =
    Result<(), plotters::drawing::DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

fn draw_shape<B: DrawingBackend>(
    area: &DrawingArea<B, plotters::coord::Shift>,
    shape: &PictureShape,
    scale: f64,
) -> DrawResult<B> {
    let px = |length: f64| (length * scale).round() as i32;
    let style = |colour: PurposeColour, filled: bool, width: f64| ShapeStyle {
        color: rgb(colour).into(),
        filled,
        stroke_width: (width * scale).round().max(1.0) as u32,
    };
    match shape {
        PictureShape::Line { points, colour, width } => {
            let points: Vec<(i32, i32)> = points.iter().map(|(x, y)| (px(*x), px(*y))).collect();
            area.draw(&PathElement::new(points, style(*colour, false, *width)))
        }
        PictureShape::Rect { x, y, width, height, colour } => {
            let corners = [(px(*x), px(*y)), (px(x + width), px(y + height))];
            area.draw(&Rectangle::new(corners, style(*colour, true, 1.0)))
        }
        PictureShape::Dot { x, y, radius, colour, filled } => {
            area.draw(&Circle::new((px(*x), px(*y)), px(*radius), style(*colour, *filled, 1.5)))
        }
        PictureShape::Text { x, y, text, size, colour, anchor, bold } => {
            let horizontal = match anchor {
                TextAnchor::Start => HPos::Left,
                TextAnchor::Middle => HPos::Center,
                TextAnchor::End => HPos::Right,
            };
            let colour = rgb(*colour);
            let weight = if *bold { FontStyle::Bold } else { FontStyle::Normal };
            let style = TextStyle::from(FontDesc::new(FontFamily::SansSerif, size * scale, weight))
                .color(&colour)
                .pos(Pos::new(horizontal, VPos::Center));
            area.draw(&Text::new(printable_on_terminal(text).into_owned(), (px(*x), px(*y)), style))
        }
    }
}
