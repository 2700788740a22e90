//! Assignment of query tiles to the thread blocks of a persistent kernel.
//!
//! Each multiprocessor runs one thread block, and each block processes a list of tiles that is made
//! while a case is prepared. The heaviest tiles are assigned first, each to the block with the
//! least work so far. Heads whose tensors fit into L2 together are neighbours in the order. The
//! light tiles of long sequences come last and balance the blocks. Lists that change while the
//! kernel runs are excluded on purpose.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Number of queries of a warpgroup, and of a tensor-copy box of its queries.
pub const GROUP_ROWS: usize = 64;
/// Number of warpgroups that compute.
pub const COMPUTE_WARPGROUPS: usize = 3;
/// Cost of a tile besides its key blocks, in units of 64 queries times one key block.
const TILE_COST: usize = 4;
/// Bytes of L2 that heads processed together may occupy with queries, keys, values and output.
const L2_BYTES: usize = 20 << 20;
/// Maximum number of tiles of two warpgroups that are tried for a head.
const MAX_NARROW_GROUPS: usize = 24;
/// Number of queries up to which a head counts as short. Thread blocks then have so many tiles that
/// one more or less hardly matters. Light tiles of short heads are not moved to the end, because
/// their keys would be read from memory again.
const MAX_QUERIES_OF_SHORT_HEAD: usize = 1024;

/// A tile of queries of one head that a block computes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryTile {
    /// Index of the head of the queries.
    pub head: usize,
    /// First query of the tile, a multiple of 64.
    pub row: usize,
    /// Number of parts of 64 queries, one for each warpgroup.
    pub groups: usize,
}

/// Attention shape that is divided into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryTiling {
    /// Number of query heads of all sequences, b·h.
    pub heads: usize,
    /// Number of query heads that read the same keys.
    pub share: usize,
    /// Number of queries of a head.
    pub s: usize,
    /// Number of keys of a head.
    pub keys: usize,
    pub key_bytes: usize,
    /// Whether the mask is causal: the last query sees all keys, and each earlier query one key
    /// less than the next.
    pub causal: bool,
    /// Number of keys in a key block.
    pub block_keys: usize,
}

impl QueryTiling {
    /// Makes a list of tiles for each of `blocks` blocks; together the lists hold every query once.
    pub fn tile_lists(&self, blocks: usize) -> Vec<Vec<QueryTile>> {
        // Without a causal mask all query rows have equal cost. Tiles of two warpgroups are mixed
        // with tiles of three, so that no thread block has a whole tile more than the others. With
        // a causal mask the costs differ enough, but two tiles of two warpgroups are better than
        // one of three and one of one.
        let most = if !self.causal {
            MAX_NARROW_GROUPS.min(self.s / (2 * GROUP_ROWS))
        } else if self.s <= MAX_QUERIES_OF_SHORT_HEAD {
            2
        } else {
            0
        };
        let best = (0..=most)
            .map(|narrow| self.lists_with_narrow_tiles(narrow, blocks))
            .min_by_key(|best| best.0);
        best.expect("no narrow tile is a way too").1
    }

    /// Makes the lists where each head ends with `narrow` tiles of two warpgroups. Also returns the
    /// cost of the most expensive list.
    fn lists_with_narrow_tiles(
        &self,
        narrow: usize,
        blocks: usize,
    ) -> (usize, Vec<Vec<QueryTile>>) {
        let mut lists = vec![Vec::new(); blocks];
        let mut least: BinaryHeap<_> = (0..blocks).map(|block| Reverse((0, block))).collect();
        for tile in self.tiles_in_order_of_assignment(&self.tiles_of_head(narrow)) {
            let Reverse((cost, block)) = least.pop().expect("a block at least");
            least.push(Reverse((cost + self.tile_cost(tile.row, tile.groups), block)));
            lists[block].push(tile);
        }
        (least.into_iter().map(|Reverse((cost, _))| cost).max().unwrap_or(0), lists)
    }

    /// First row and number of warpgroups of each tile of a head, the heaviest tile first.
    fn tiles_of_head(&self, narrow: usize) -> Vec<(usize, usize)> {
        let (mut tiles, mut row, mut narrow) = (Vec::new(), 0, narrow);
        while row < self.s {
            let left = (self.s - row).div_ceil(GROUP_ROWS);
            let groups =
                if narrow > 0 && left <= 2 * narrow { 2 } else { COMPUTE_WARPGROUPS }.min(left);
            narrow = narrow.saturating_sub(usize::from(left <= 2 * narrow));
            tiles.push((row, groups));
            row += groups * GROUP_ROWS;
        }
        tiles.sort_by_key(|&(row, groups)| Reverse(self.tile_cost(row, groups)));
        tiles
    }

    /// Tiles of all heads in the order of their assignment.
    fn tiles_in_order_of_assignment(&self, tiles_of_head: &[(usize, usize)]) -> Vec<QueryTile> {
        let heaviest =
            tiles_of_head.first().map_or(0, |&(row, groups)| self.tile_cost(row, groups));
        let light = |&&(row, groups): &&(usize, usize)| {
            let (part, of) = if self.causal { (1, 2) } else { (9, 10) };
            of * self.tile_cost(row, groups) < part * heaviest
        };
        let (last, first): (Vec<_>, Vec<_>) = tiles_of_head
            .iter()
            .partition(|tile| self.s > MAX_QUERIES_OF_SHORT_HEAD && light(tile));
        // Returns the bytes of query heads that read the same keys, with these keys.
        let bytes = 2 * (self.keys + self.share * self.s) * self.key_bytes;
        let together = (L2_BYTES / bytes).max(1) * self.share;
        let all = |heads: std::ops::Range<usize>, tiles: &[(usize, usize)]| -> Vec<QueryTile> {
            let of_heads =
                |&(row, groups)| heads.clone().map(move |head| QueryTile { head, row, groups });
            tiles.iter().flat_map(of_heads).collect()
        };
        (0..self.heads)
            .step_by(together)
            .flat_map(|head| all(head..self.heads.min(head + together), &first))
            .chain(all(0..self.heads, &last))
            .collect()
    }

    /// Cost of a tile. With two warpgroups the tensor cores are idle for a tenth of the time in
    /// which three keep them busy, with one warpgroup for more.
    fn tile_cost(&self, row: usize, groups: usize) -> usize {
        let blocks = |group| {
            let end = self.s.min(row + (group + 1) * GROUP_ROWS);
            if self.causal { end + self.keys - self.s } else { self.keys }.div_ceil(self.block_keys)
        };
        let tenths = [16, 11, 10][groups - 1];
        (0..groups).map(blocks).sum::<usize>() * tenths + 10 * TILE_COST
    }
}

/// Writes the lists in the kernel's format: the first tile of every block, then the second ones,
/// and so on. A tile consists of its row, its number of warpgroups, its head within the sequence,
/// and the sequence. Zeros end each list.
pub fn tile_table(lists: &[Vec<QueryTile>], heads_a_batch: usize) -> Vec<i32> {
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    let entry = |tile: Option<&QueryTile>| {
        tile.map_or([0; 4], |tile| {
            [tile.row, tile.groups, tile.head % heads_a_batch, tile.head / heads_a_batch]
                .map(|number| number as i32)
        })
    };
    (0..=longest)
        .flat_map(|index| lists.iter().flat_map(move |list| entry(list.get(index))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: QueryTiling = QueryTiling {
        heads: 5,
        share: 1,
        s: 1000,
        keys: 1000,
        key_bytes: 256,
        causal: true,
        block_keys: 80,
    };

    fn list_cost(tiling: &QueryTiling, list: &[QueryTile]) -> usize {
        list.iter().map(|tile| tiling.tile_cost(tile.row, tile.groups)).sum()
    }

    #[test]
    fn every_query_belongs_to_exactly_one_tile() {
        for s in [1, 63, 64, 127, 129, 192, 193, 777, 1000, 4096] {
            for causal in [false, true] {
                let tiling = QueryTiling { s, keys: s + 77, causal, ..SMALL };
                let mut groups: Vec<_> = (tiling.tile_lists(7).into_iter().flatten())
                    .flat_map(|tile| {
                        (0..tile.groups).map(move |group| (tile.head, tile.row / 64 + group))
                    })
                    .collect();
                groups.sort_unstable();
                let expected: Vec<_> = (0..5)
                    .flat_map(|head| (0..s.div_ceil(64)).map(move |group| (head, group)))
                    .collect();
                assert_eq!(groups, expected, "{tiling:?}");
            }
        }
    }

    #[test]
    fn the_tile_lists_of_all_blocks_cost_about_the_same() {
        for (s, d, block_keys) in [(4096, 128, 80), (16_384, 128, 80), (4096, 64, 128)] {
            for causal in [false, true] {
                let heads = 16_384 * 2048 / (s * d);
                let tiling = QueryTiling {
                    heads,
                    s,
                    keys: s,
                    key_bytes: 2 * d,
                    causal,
                    block_keys,
                    ..SMALL
                };
                let costs: Vec<_> =
                    tiling.tile_lists(132).iter().map(|list| list_cost(&tiling, list)).collect();
                let (most, sum) = (*costs.iter().max().unwrap(), costs.iter().sum::<usize>());
                // Without tiles of two warpgroups the longest list would have a twentieth more
                // work; with tiles dealt to blocks in rotation, a fifth.
                assert!(most * 132 * 100 <= sum * 104, "{tiling:?}: {most} of {sum}");
            }
        }
    }

    #[test]
    fn heavy_tiles_come_first_and_heads_that_fit_into_l2_stay_together() {
        let tiling = QueryTiling { heads: 16, s: 4096, keys: 4096, ..SMALL };
        // The tensors of a head take 4 MiB.
        let order = tiling.tiles_in_order_of_assignment(&tiling.tiles_of_head(0));
        let heads: Vec<_> = order.iter().take(11).map(|tile| tile.head).collect();
        assert_eq!(heads, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]);
        assert_eq!((order[0].row, order[0].groups), (4096 - 256, 3));
        let last = order.last().unwrap();
        assert_eq!((last.row, last.head), (0, 15));
        // Four query heads read the same keys and values: together they take 10 MiB.
        let grouped = QueryTiling { share: 4, ..tiling };
        let order = grouped.tiles_in_order_of_assignment(&grouped.tiles_of_head(0));
        assert!(order[..9].iter().map(|tile| tile.head).eq((0..8).chain([0])));
        // The heads take more than L2 holds: the groups of heads with the same keys come one after
        // the other.
        let long = QueryTiling { s: 16_384, keys: 16_384, ..grouped };
        let order = long.tiles_in_order_of_assignment(&long.tiles_of_head(0));
        assert!(order[..5].iter().map(|tile| tile.head).eq((0..4).chain([0])));
    }

    #[test]
    fn tiles_of_a_short_head_are_processed_soon_after_each_other() {
        let tiling = QueryTiling { heads: 1024, s: 256, keys: 256, ..SMALL };
        let lists = tiling.tile_lists(132);
        // Each head is cut into two tiles of two warpgroups, not into one of three and one of one.
        assert!(lists.iter().flatten().all(|tile| tile.groups == 2));
        let order = tiling.tiles_in_order_of_assignment(&tiling.tiles_of_head(2));
        let place = |head, row| order.iter().position(|it| (it.head, it.row) == (head, row));
        for head in 0..1024 {
            let (first, second) = (place(head, 0).unwrap(), place(head, 128).unwrap());
            assert!(first.abs_diff(second) <= 80, "{head}: {first}, {second}");
        }
    }

    #[test]
    fn the_table_of_tiles_has_the_order_that_the_kernel_reads() {
        let tile = |head, row, groups| QueryTile { head, row, groups };
        let lists = [vec![tile(4, 192, 3), tile(2, 64, 1)], vec![tile(7, 0, 2)]];
        let first = [192, 3, 1, 1, 0, 2, 1, 2];
        let second = [64, 1, 2, 0, 0, 0, 0, 0];
        assert_eq!(tile_table(&lists, 3), [first, second, [0; 8]].concat());
    }
}
