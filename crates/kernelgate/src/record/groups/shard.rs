//! Defines a shard: the part k of n of the problems of a bench, which several processes or machines
//! share.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Most shards.
const MAX_NUMBER_OF_SHARDS: u32 = 1000;

/// One of `shard_count` parts which together contain every piece of work exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ShardOfWork {
    /// Which, from 1.
    #[serde(rename = "index")]
    pub index_from_one: u32,
    /// Number of shards.
    #[serde(rename = "count")]
    pub shard_count: u32,
}

impl ShardOfWork {
    /// Returns this shard's items of a list that all shards have in the same order: one item in
    /// every `shard_count`.
    pub fn items_of_shard_in_turn<T>(
        self,
        items: impl IntoIterator<Item = T>,
    ) -> impl Iterator<Item = T> {
        let (skipped, step) =
            (self.index_from_one.saturating_sub(1) as usize, self.shard_count.max(1) as usize);
        items.into_iter().skip(skipped).step_by(step)
    }

    /// Fails if the shard's index is not between 1 and the number of shards, or there are too many
    /// shards.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_shard_index_and_count(self) -> Result<(), String> {
        if (1..=self.shard_count).contains(&self.index_from_one)
            && self.shard_count <= MAX_NUMBER_OF_SHARDS
        {
            return Ok(());
        }
        Err(format!("shard {self}"))
    }

    /// Returns the text of the shard for file names, such as "2-of-4".
    pub fn label_for_file_name(self) -> String {
        format!("{}-of-{}", self.index_from_one, self.shard_count)
    }
}

/// Reason why a text such as "5/4" does not describe a shard.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShardParseError {
    /// The text does not have the form 1/4.
    #[error("`{0}`: a shard is 1/4, 2/4, … of at most {MAX_NUMBER_OF_SHARDS}")]
    WrongForm(String),
    /// The number of shards in the text is zero or too large.
    #[error(
        "`{parsed_text}`: the number of shards is from 1 to {MAX_NUMBER_OF_SHARDS}, not {shard_count}"
    )]
    InvalidShardCount {
        /// The text that could not be parsed.
        parsed_text: String,
        /// Number of shards in the text.
        shard_count: u32,
    },
    /// The shard's index in the text is zero or exceeds the number of shards.
    #[error(
        "`{parsed_text}`: a shard is 1/{shard_count} to {shard_count}/{shard_count}; shards are counted from 1"
    )]
    ShardIndexOutOfRange {
        /// The text that could not be parsed.
        parsed_text: String,
        /// Number of shards in the text.
        shard_count: u32,
    },
}

impl FromStr for ShardOfWork {
    type Err = ShardParseError;

    fn from_str(text: &str) -> Result<Self, ShardParseError> {
        let numbers = text
            .split_once('/')
            .and_then(|(index, count)| Some((index.parse().ok()?, count.parse().ok()?)));
        let (index, count) = numbers.ok_or_else(|| ShardParseError::WrongForm(text.to_owned()))?;
        let text = || text.to_owned();
        if !(1..=MAX_NUMBER_OF_SHARDS).contains(&count) {
            return Err(ShardParseError::InvalidShardCount {
                parsed_text: text(),
                shard_count: count,
            });
        }
        if !(1..=count).contains(&index) {
            return Err(ShardParseError::ShardIndexOutOfRange {
                parsed_text: text(),
                shard_count: count,
            });
        }
        Ok(Self { index_from_one: index, shard_count: count })
    }
}

/// "2/4".
impl fmt::Display for ShardOfWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index_from_one, self.shard_count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_indices_are_counted_from_one() {
        let last = ShardOfWork { index_from_one: 4, shard_count: 4 };
        assert_eq!(("4/4".parse(), last.to_string()), (Ok(last), "4/4".to_owned()));
        for (bad, why) in [
            ("", "``: a shard is 1/4, 2/4, … of at most 1000"),
            ("1", "`1`: a shard is 1/4, 2/4, … of at most 1000"),
            ("a/b", "`a/b`: a shard is 1/4, 2/4, … of at most 1000"),
            ("-1/2", "`-1/2`: a shard is 1/4, 2/4, … of at most 1000"),
            ("0/4", "`0/4`: a shard is 1/4 to 4/4; shards are counted from 1"),
            ("5/4", "`5/4`: a shard is 1/4 to 4/4; shards are counted from 1"),
            ("1/0", "`1/0`: the number of shards is from 1 to 1000, not 0"),
            ("0/0", "`0/0`: the number of shards is from 1 to 1000, not 0"),
            ("1/1001", "`1/1001`: the number of shards is from 1 to 1000, not 1001"),
        ] {
            let message = bad.parse::<ShardOfWork>().unwrap_err().to_string();
            assert_eq!(message, why);
        }
    }

    #[test]
    fn each_list_item_belongs_to_exactly_one_shard() {
        let dealt = |index| {
            ShardOfWork { index_from_one: index, shard_count: 3 }
                .items_of_shard_in_turn(0..7)
                .collect::<Vec<_>>()
        };
        assert_eq!([1, 2, 3].map(dealt), [vec![0, 3, 6], vec![1, 4], vec![2, 5]]);
    }
}
