//! Charts of measurements. A chart without information is not drawn; charts that are skipped for
//! length are counted, and the tables have their numbers.

mod curves;
mod heat_maps;
mod history;
mod implementation_bars;
mod peers;
mod roofline;
mod runs;
mod speed;

pub use curves::curves;
pub use heat_maps::heat_maps;
pub use history::history;
pub use implementation_bars::ladder_charts;
pub use peers::peers;
pub use roofline::roofline_figure;
pub use runs::run_distributions;
pub use speed::{cold_cache_charts, errors};

use crate::plot::ChartWithTitle;

/// A chart with the name of its files.
#[derive(Debug, Clone, PartialEq)]
pub struct ChartFigure {
    /// Stem of the files: letters, digits, `-` and `_`.
    pub name: String,
    pub chart: ChartWithTitle,
}

impl ChartFigure {
    /// A chart with files named after these words.
    pub fn new(words: &[&str], chart: ChartWithTitle) -> Self {
        let words = words.iter().map(|word| file_name_stem(word)).filter(|word| !word.is_empty());
        Self { name: words.collect::<Vec<_>>().join("-"), chart }
    }
}

/// Charts of one kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChartGallery {
    pub figures: Vec<ChartFigure>,
    /// Number of charts that were skipped because there were too many.
    pub left_out: usize,
}

impl ChartGallery {
    /// Adds all of the charts if there is room for them, else none.
    fn add(&mut self, most: usize, figures: Vec<ChartFigure>) {
        if self.figures.len() + figures.len() <= most {
            self.figures.extend(figures);
        } else {
            self.left_out += figures.len();
        }
    }
}

/// Turns a text into a part of a file's name.
fn file_name_stem(text: &str) -> String {
    const MAX_FILE_STEM: usize = 60;
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let mut stem: String = text.chars().map(plain).take(MAX_FILE_STEM).collect();
    while stem.contains("__") {
        stem = stem.replace("__", "_");
    }
    stem.trim_matches('_').to_owned()
}
