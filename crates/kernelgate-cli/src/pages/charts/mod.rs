//! Charts of measurements. A chart that would show nothing is not drawn; charts that are skipped
//! because there are too many are counted, and the tables contain their numbers.

mod curves;
mod heat_maps;
mod history;
mod implementation_bars;
mod peers;
mod roofline;
mod runs;
mod speed;

pub use curves::curve_charts;
pub use heat_maps::heat_map_charts;
pub use history::history_charts;
pub use implementation_bars::ladder_charts;
pub use peers::peer_comparison_charts;
pub use roofline::roofline_chart_of_cases;
pub use runs::charts_of_differences_between_runs;
pub use speed::{cold_against_hot_cache_charts, error_against_speed_charts};

use crate::plot::TitledChart;

/// A chart with the name stem of its image files.
#[derive(Debug, Clone, PartialEq)]
pub struct ChartWithFileName {
    /// Stem of the names of the chart's files, made of letters, digits, `-` and `_`.
    pub file_name_stem: String,
    pub chart: TitledChart,
}

impl ChartWithFileName {
    /// Makes a chart whose files are named after these words.
    pub fn with_file_name_from_words(words: &[&str], chart: TitledChart) -> Self {
        let words =
            words.iter().map(|word| text_as_file_name_part(word)).filter(|word| !word.is_empty());
        Self { file_name_stem: words.collect::<Vec<_>>().join("-"), chart }
    }
}

/// Charts of one kind, such as curves or heat maps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChartsOfOneKind {
    pub figures: Vec<ChartWithFileName>,
    /// Number of charts that were not drawn because there are too many.
    pub omitted_charts: usize,
}

impl ChartsOfOneKind {
    /// Adds these charts if the number of charts then does not exceed `most`; otherwise counts all
    /// of them as skipped.
    fn add_all_or_skip(&mut self, most: usize, figures: Vec<ChartWithFileName>) {
        if self.figures.len() + figures.len() <= most {
            self.figures.extend(figures);
        } else {
            self.omitted_charts += figures.len();
        }
    }
}

/// Turns a text into a part of a file name: other characters than letters and digits become `_`.
fn text_as_file_name_part(text: &str) -> String {
    const MAX_FILE_NAME_PART_CHARACTERS: usize = 60;
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let mut stem: String = text.chars().map(plain).take(MAX_FILE_NAME_PART_CHARACTERS).collect();
    while stem.contains("__") {
        stem = stem.replace("__", "_");
    }
    stem.trim_matches('_').to_owned()
}
