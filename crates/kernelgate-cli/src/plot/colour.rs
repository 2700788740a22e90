//! The colours of charts: SVG is drawn with the light theme, and a dark page replaces each light
//! colour by its dark counterpart.

/// A colour of a chart, named by its purpose and not by its hue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChartColour {
    /// The background.
    Background,
    /// Texts and axes.
    TextAndAxes,
    /// Texts that matter less than others, in a lighter colour.
    SecondaryText,
    /// Grid lines.
    GridLines,
    /// Colour of a data series, numbered from 0; from [`NUMBER_OF_SERIES_COLOURS`] on the colours
    /// repeat.
    SeriesByNumber(usize),
    /// Colour step of a heat map from 0 (least) to [`NUMBER_OF_HEAT_MAP_COLOURS`] - 1 (most), equal
    /// in both themes.
    HeatMapStep(usize),
    /// Colour of text on a dark cell of a heat map.
    TextOnDarkCell,
    /// Colour of text on a light cell of a heat map.
    TextOnLightCell,
}

/// Number of colours of data series before they repeat; the first ten are distinguishable with any
/// kind of colour vision.
pub const NUMBER_OF_SERIES_COLOURS: usize = 12;
/// Number of colour steps of a heat map.
pub const NUMBER_OF_HEAT_MAP_COLOURS: usize = 7;

/// Light and dark variant of each colour as RGB bytes, at the index that
/// [`ChartColour::index_in_colour_table`] returns. No light colour occurs twice, because a dark
/// page replaces colours by looking up the light colour.
const LIGHT_AND_DARK_COLOUR_TABLE: [([u8; 3], [u8; 3]); 4 + NUMBER_OF_SERIES_COLOURS] = [
    ([0xff, 0xff, 0xff], [0x16, 0x1b, 0x22]),
    ([0x1f, 0x23, 0x28], [0xe6, 0xed, 0xf3]),
    ([0x59, 0x63, 0x6e], [0x9d, 0xa7, 0xb3]),
    ([0xdd, 0xe1, 0xe6], [0x30, 0x36, 0x3d]),
    ([0x00, 0x72, 0xb2], [0x58, 0xa6, 0xff]),
    ([0xd5, 0x5e, 0x00], [0xff, 0x9b, 0x50]),
    ([0x00, 0x8a, 0x64], [0x3f, 0xc9, 0x9b]),
    ([0xb8, 0x4e, 0x8f], [0xf0, 0x8c, 0xc8]),
    ([0x8a, 0x6d, 0x00], [0xe3, 0xc0, 0x3c]),
    ([0x6f, 0x52, 0xc4], [0xb3, 0x9d, 0xff]),
    ([0x00, 0x86, 0xa3], [0x4f, 0xcf, 0xe6]),
    ([0xa3, 0x3a, 0x3a], [0xff, 0x8e, 0x8e]),
    ([0x4d, 0x7d, 0x1d], [0x9c, 0xd0, 0x5f]),
    ([0x7a, 0x5a, 0x48], [0xd0, 0xb0, 0x9c]),
    ([0x2b, 0x3a, 0x8c], [0x7b, 0x8c, 0xf0]),
    ([0xc2, 0x18, 0x5b], [0xff, 0x5c, 0x9a]),
];

const HEAT_MAP_COLOUR_TABLE: [[u8; 3]; NUMBER_OF_HEAT_MAP_COLOURS] = [
    [0xea, 0xf3, 0xfa],
    [0xc9, 0xdf, 0xf0],
    [0x9c, 0xc6, 0xe2],
    [0x66, 0xa7, 0xd1],
    [0x38, 0x86, 0xbd],
    [0x19, 0x64, 0xa0],
    [0x0a, 0x3f, 0x73],
];

impl ChartColour {
    const fn index_in_colour_table(self) -> Option<usize> {
        match self {
            Self::Background => Some(0),
            Self::TextAndAxes => Some(1),
            Self::SecondaryText => Some(2),
            Self::GridLines => Some(3),
            Self::SeriesByNumber(number) => Some(4 + number % NUMBER_OF_SERIES_COLOURS),
            Self::HeatMapStep(_) | Self::TextOnDarkCell | Self::TextOnLightCell => None,
        }
    }

    /// Returns red, green and blue of the colour in the light theme, each from 0 to 255.
    pub const fn light_theme_rgb(self) -> [u8; 3] {
        match (self.index_in_colour_table(), self) {
            (Some(index), _) => LIGHT_AND_DARK_COLOUR_TABLE[index].0,
            (None, Self::HeatMapStep(step)) => {
                HEAT_MAP_COLOUR_TABLE[if step < NUMBER_OF_HEAT_MAP_COLOURS {
                    step
                } else {
                    NUMBER_OF_HEAT_MAP_COLOURS - 1
                }]
            }
            (None, Self::TextOnDarkCell) => [0xfd, 0xfd, 0xfd],
            (None, _) => [0x11, 0x11, 0x11],
        }
    }
}

/// Formats a colour as `plotters` writes it in SVG: "#0072B2".
pub fn rgb_as_hex([red, green, blue]: [u8; 3]) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// Returns each colour of the light theme with its counterpart in the dark theme, as hexadecimal
/// texts.
pub fn light_and_dark_hex_colours() -> impl Iterator<Item = (String, String)> {
    LIGHT_AND_DARK_COLOUR_TABLE.iter().map(|(light, dark)| (rgb_as_hex(*light), rgb_as_hex(*dark)))
}
