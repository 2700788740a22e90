//! A part of the work, so that several processes, or machines, share it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::record::files::file::text_hash;

/// Most shards.
const MAX: u32 = 1000;

/// One of several parts that together have every piece of the work once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shard {
    /// Which, from 1.
    pub index: u32,
    /// Of how many.
    pub count: u32,
}

impl Shard {
    /// Whether a problem, `workload/problem`, belongs to it, with all of its implementations, which
    /// share inputs and reference. The name alone decides, so that a problem stays in its shard
    /// whatever other problems there are.
    pub fn has(self, problem: &str) -> bool {
        let hash = text_hash(problem);
        let number = u64::from_str_radix(hash.get(..15).unwrap_or_default(), 16);
        number.is_ok_and(|number| number % u64::from(self.count) == u64::from(self.index - 1))
    }

    /// Its items of a list that every shard has in the same order: each `count`-th.
    pub fn deal<T>(self, items: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
        let (skipped, step) = (self.index.saturating_sub(1) as usize, self.count.max(1) as usize);
        items.into_iter().skip(skipped).step_by(step)
    }

    /// What deserialising does not enforce.
    ///
    /// # Errors
    /// A fragment that says what is wrong.
    pub fn validate(self) -> Result<(), String> {
        if (1..=self.count).contains(&self.index) && self.count <= MAX {
            return Ok(());
        }
        Err(format!("shard {self}"))
    }

    /// "2-of-4", for names of files.
    pub fn label(self) -> String {
        format!("{}-of-{}", self.index, self.count)
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/').and_then(|(index, count)| {
            let shard = Self { index: index.parse().ok()?, count: count.parse().ok()? };
            shard.validate().ok().map(|()| shard)
        });
        parts.ok_or_else(|| format!("`{text}`: a shard is 1/4, 2/4, … of at most {MAX}"))
    }
}

/// "2/4".
impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_counted_from_one() {
        let last = Shard { index: 4, count: 4 };
        assert_eq!(("4/4".parse(), last.to_string()), (Ok(last), "4/4".to_owned()));
        for bad in ["", "0/4", "5/4", "1", "a/b", "1/0", "-1/2", "1/1001", "0/0"] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }

    #[test]
    fn shards_deal_out_each_item_of_a_list_once() {
        let dealt = |index| Shard { index, count: 3 }.deal(0..7).collect::<Vec<_>>();
        assert_eq!([1, 2, 3].map(dealt), [vec![0, 3, 6], vec![1, 4], vec![2, 5]]);
    }

    #[test]
    fn every_problem_is_in_one_shard_and_stays_there() {
        let of = |problem: &str| -> Vec<u32> {
            let shards = (1..=4).map(|index| Shard { index, count: 4 });
            shards.filter(|shard| shard.has(problem)).map(|shard| shard.index).collect()
        };
        let problems: Vec<String> = (0..200).map(|n| format!("w/f/n{n}_f32")).collect();
        let mut sizes = [0; 4];
        for problem in &problems {
            let [only] = of(problem)[..] else { panic!("{problem}: {:?}", of(problem)) };
            sizes[only as usize - 1] += 1;
        }
        assert!(sizes.iter().all(|size| (25..=75).contains(size)), "{sizes:?}");
        // Recorded shards of several machines, and of several versions, must fit each other.
        let pinned = ["w/f/n0_f32", "w/f/n1_f32", "w/f/n2_f32"].map(|it| of(it)[0]);
        assert_eq!(pinned, [3, 1, 3]);
    }
}
