//! The font that charts embed: computes the widths of texts, and draws texts as pixels for PNG
//! files.

use std::sync::LazyLock;

use ab_glyph::{Font, FontRef, PxScale, ScaleFont, point};

/// Factor by which the font of the reader's browser may be wider than the embedded font.
const READER_FONT_MAX_WIDTH_RATIO: f32 = 1.2;

static CHART_FONT: LazyLock<Option<FontRef<'static>>> =
    LazyLock::new(|| FontRef::try_from_slice(ttf_noto_sans::REGULAR).ok());

/// Converts a font size in pixels, as SVG uses it, to the scale of the font library.
fn font_library_scale(font: &impl Font, size: f64) -> PxScale {
    let em = font.units_per_em().unwrap_or(1000.0);
    PxScale::from(size as f32 * font.height_unscaled() / em)
}

fn width_in_embedded_font(font: &FontRef<'_>, text: &str, size: f64) -> f32 {
    let font = font.as_scaled(font_library_scale(font, size));
    text.chars().map(|c| font.h_advance(font.glyph_id(c))).sum()
}

/// Returns the width in pixels that a text may take in the reader's font, with a margin.
pub fn text_width_with_margin(text: &str, size: f64) -> f64 {
    f64::from(
        CHART_FONT.as_ref().map_or(0.0, |font| width_in_embedded_font(font, text, size))
            * READER_FONT_MAX_WIDTH_RATIO,
    )
}

/// An RGB image with three bytes per pixel.
pub struct RgbImageBuffer<'a> {
    /// RGB bytes of the image, row by row.
    pub rgb_bytes: &'a mut [u8],
    /// Width of the image in pixels.
    pub width_pixels: usize,
}

impl RgbImageBuffer<'_> {
    /// Draws a text vertically centred on `y`; the fraction `before` of the text's width lies left
    /// of `x`.
    pub fn draw_text_as_pixels(
        &mut self,
        text: &str,
        (x, y): (f64, f64),
        (size, before): (f64, f32),
        colour: [u8; 3],
    ) {
        let Some(font) = CHART_FONT.as_ref() else { return };
        let scale = font_library_scale(font, size);
        let scaled = font.as_scaled(scale);
        let mut left = x as f32 - before * width_in_embedded_font(font, text, size);
        let baseline = y as f32 + 0.36 * size as f32;
        for c in text.chars() {
            let id = scaled.glyph_id(c);
            let glyph = id.with_scale_and_position(scale, point(left, baseline));
            left += scaled.h_advance(id);
            let Some(outline) = font.outline_glyph(glyph) else { continue };
            let corner = outline.px_bounds().min;
            outline.draw(|right, down, share| {
                let at = (corner.x as i64 + i64::from(right), corner.y as i64 + i64::from(down));
                self.blend_colour_into_pixel(at, colour, share);
            });
        }
    }

    fn blend_colour_into_pixel(&mut self, (x, y): (i64, i64), colour: [u8; 3], share: f32) {
        let (Ok(x), Ok(y)) = (usize::try_from(x), usize::try_from(y)) else { return };
        if x >= self.width_pixels {
            return;
        }
        let start = 3 * (y * self.width_pixels + x);
        let Some(pixel) = self.rgb_bytes.get_mut(start..start + 3) else { return };
        for (old, new) in pixel.iter_mut().zip(colour) {
            let (old_f, new_f) = (f32::from(*old), f32::from(new));
            *old = (old_f + (new_f - old_f) * share.clamp(0.0, 1.0)).round() as u8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_darkens_exactly_the_pixels_that_its_measured_size_covers() {
        let (width, height) = (100, 20);
        let mut bytes = vec![255; 3 * width * height];
        let wide = text_width_with_margin("1.5 ms", 12.0);
        assert!((20.0..80.0).contains(&wide), "{wide}");
        RgbImageBuffer { rgb_bytes: &mut bytes, width_pixels: width }.draw_text_as_pixels(
            "1.5 ms",
            (10.0, 10.0),
            (12.0, 0.0),
            [0; 3],
        );
        let dark: Vec<usize> =
            (0..width * height).filter(|at| bytes[3 * at] < 128).map(|at| at % width).collect();
        assert!(dark.len() > 20, "{dark:?}");
        let (first, last) = (dark.iter().min().unwrap(), dark.iter().max().unwrap());
        assert!(*first >= 9 && (*last as f64) < 10.0 + wide, "{first} to {last}");
        // In this part of the test, the text begins outside of the image; drawing its outer pixels
        // must not panic.
        RgbImageBuffer { rgb_bytes: &mut bytes, width_pixels: width }.draw_text_as_pixels(
            "1.5 ms",
            (95.0, -3.0),
            (12.0, 0.5),
            [0; 3],
        );
    }
}
