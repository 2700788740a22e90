//! The embedded font, and how wide texts are in it.

use std::sync::Once;

use plotters::style::{FontDesc, FontFamily, FontStyle};

/// What an SVG asks the reader's system for, and the embedded font is registered as.
const FAMILY: &str = "sans-serif";
/// The reader's font may be wider than the embedded one by this.
const WIDER: f64 = 1.2;

/// The embedded font is registered once a process.
pub fn font(size: f64, bold: bool) -> FontDesc<'static> {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        let regular = ttf_noto_sans::REGULAR;
        // Fails for bytes that are no font only, and then texts have no size.
        let _ = plotters::style::register_font(FAMILY, FontStyle::Normal, regular);
    });
    let style = if bold { FontStyle::Bold } else { FontStyle::Normal };
    FontDesc::new(FontFamily::SansSerif, size, style)
}

/// Pixels that a text may take.
pub fn text_width(text: &str, size: f64) -> f64 {
    let measured = font(size, false).box_size(text).map_or(0, |(width, _)| width);
    f64::from(measured) * WIDER
}
