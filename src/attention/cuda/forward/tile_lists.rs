//! Assignment of query tiles to the thread blocks of the persistent kernel `forward_flash_wgmma`.
//!
//! The kernel runs one thread block on each multiprocessor; each thread block processes a list of
//! query tiles made on the host while a case is prepared. The heaviest query tiles are assigned
//! first, each to the thread block with the least work so far. Query heads whose tensors fit into
//! L2 together are adjacent in the order of assignment. The light tiles of long sequences are
//! assigned last, to balance the work of the thread blocks. Tile lists that change while the kernel
//! runs are excluded on purpose.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Number of queries that a warpgroup computes at a time, and number of rows in a tensor-copy box
/// of queries.
pub const QUERIES_PER_FORWARD_WARPGROUP: usize = 64;
/// Number of compute warpgroups of a thread block of `forward_flash_wgmma`.
pub const COMPUTE_WARPGROUPS_PER_FORWARD_BLOCK: usize = 3;
/// Cost of a query tile besides that of its key blocks; one unit is the cost of 64 queries times
/// one key block.
const FIXED_COST_OF_QUERY_TILE: usize = 4;
/// Bytes of L2 that the heads processed at the same time may occupy with queries, keys, values and
/// output.
const L2_BYTES_FOR_CONCURRENT_HEADS: usize = 20 << 20;
/// Maximum number of two-warpgroup tiles of a head that the search for the best tile lists tries.
const MAX_TWO_WARPGROUP_TILES_PER_HEAD: usize = 24;
/// Number of queries up to which a head counts as short. With short heads, a thread block has so
/// many tiles that one more or less hardly matters. The light tiles of short heads are not assigned
/// last, because their keys would have left L2 by then.
const MAX_QUERIES_OF_SHORT_HEAD: usize = 1024;

/// Consecutive queries of one head that a thread block of `forward_flash_wgmma` computes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryTile {
    /// Index of the query head among the heads of all sequences.
    pub query_head_index: usize,
    /// First query of the tile, a multiple of 64.
    pub first_query: usize,
    /// Number of 64-query parts of the tile, each computed by one warpgroup.
    pub parts_of_64_queries: usize,
}

/// Extents of an attention forward whose queries are divided into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryTilingShape {
    /// Number of query heads of all sequences, b·h.
    pub total_query_heads: usize,
    /// Number of query heads that read the same keys.
    pub query_heads_per_key_head: usize,
    /// Number of queries of a head.
    pub queries_per_head: usize,
    /// Number of keys of a head.
    pub keys_per_head: usize,
    pub bytes_per_key: usize,
    /// Whether the mask is causal: the last query sees all keys, and each earlier query one key
    /// less than the next.
    pub causal: bool,
    /// Number of keys in a key block.
    pub keys_per_block: usize,
}

impl QueryTilingShape {
    /// Returns a list of query tiles for each of `blocks` thread blocks; together the lists contain
    /// every query of every head once.
    pub fn assign_query_tiles_to_blocks(&self, blocks: usize) -> Vec<Vec<QueryTile>> {
        // Without a causal mask all query rows see the same number of keys, so they have equal
        // cost. Without a causal mask, tiles of two warpgroups are mixed with tiles of three, so
        // that no thread block has a whole tile more than the others. With a causal mask the tile
        // costs differ enough by themselves, but two tiles of two warpgroups are better than one of
        // three and one of one.
        let most = if !self.causal {
            MAX_TWO_WARPGROUP_TILES_PER_HEAD
                .min(self.queries_per_head / (2 * QUERIES_PER_FORWARD_WARPGROUP))
        } else if self.queries_per_head <= MAX_QUERIES_OF_SHORT_HEAD {
            2
        } else {
            0
        };
        let best = (0..=most)
            .map(|narrow| self.tile_lists_with_two_warpgroup_tiles(narrow, blocks))
            .min_by_key(|best| best.0);
        best.expect("no narrow tile is a way too").1
    }

    /// Makes the tile lists in which the last `narrow` tiles of each head have two warpgroups
    /// instead of three. Besides the tile lists, `tile_lists_with_two_warpgroup_tiles` returns the
    /// cost of the most expensive list.
    fn tile_lists_with_two_warpgroup_tiles(
        &self,
        narrow: usize,
        blocks: usize,
    ) -> (usize, Vec<Vec<QueryTile>>) {
        let mut lists = vec![Vec::new(); blocks];
        let mut least: BinaryHeap<_> = (0..blocks).map(|block| Reverse((0, block))).collect();
        for tile in
            self.all_tiles_in_order_of_assignment(&self.tiles_of_head_by_descending_cost(narrow))
        {
            let Reverse((cost, block)) = least.pop().expect("a block at least");
            least.push(Reverse((
                cost + self.query_tile_cost(tile.first_query, tile.parts_of_64_queries),
                block,
            )));
            lists[block].push(tile);
        }
        (least.into_iter().map(|Reverse((cost, _))| cost).max().unwrap_or(0), lists)
    }

    /// Returns the first query and the number of warpgroups of each tile of a head, the most
    /// expensive tile first.
    fn tiles_of_head_by_descending_cost(&self, two_warpgroup_tiles: usize) -> Vec<(usize, usize)> {
        let (mut tiles, mut row, mut narrow) = (Vec::new(), 0, two_warpgroup_tiles);
        while row < self.queries_per_head {
            let left = (self.queries_per_head - row).div_ceil(QUERIES_PER_FORWARD_WARPGROUP);
            let groups = if narrow > 0 && left <= 2 * narrow {
                2
            } else {
                COMPUTE_WARPGROUPS_PER_FORWARD_BLOCK
            }
            .min(left);
            narrow = narrow.saturating_sub(usize::from(left <= 2 * narrow));
            tiles.push((row, groups));
            row += groups * QUERIES_PER_FORWARD_WARPGROUP;
        }
        tiles.sort_by_key(|&(row, groups)| Reverse(self.query_tile_cost(row, groups)));
        tiles
    }

    /// Returns the query tiles of all heads in the order in which they are assigned to thread
    /// blocks.
    fn all_tiles_in_order_of_assignment(&self, tiles_of_head: &[(usize, usize)]) -> Vec<QueryTile> {
        let heaviest =
            tiles_of_head.first().map_or(0, |&(row, groups)| self.query_tile_cost(row, groups));
        let light = |&&(row, groups): &&(usize, usize)| {
            let (part, of) = if self.causal { (1, 2) } else { (9, 10) };
            of * self.query_tile_cost(row, groups) < part * heaviest
        };
        let (last, first): (Vec<_>, Vec<_>) = tiles_of_head
            .iter()
            .partition(|tile| self.queries_per_head > MAX_QUERIES_OF_SHORT_HEAD && light(tile));
        // Bytes of the q, k, v and output rows of a group of query heads that share keys.
        let bytes = 2
            * (self.keys_per_head + self.query_heads_per_key_head * self.queries_per_head)
            * self.bytes_per_key;
        let together =
            (L2_BYTES_FOR_CONCURRENT_HEADS / bytes).max(1) * self.query_heads_per_key_head;
        let all = |heads: std::ops::Range<usize>, tiles: &[(usize, usize)]| -> Vec<QueryTile> {
            let of_heads = |&(row, groups)| {
                heads.clone().map(move |head| QueryTile {
                    query_head_index: head,
                    first_query: row,
                    parts_of_64_queries: groups,
                })
            };
            tiles.iter().flat_map(of_heads).collect()
        };
        (0..self.total_query_heads)
            .step_by(together)
            .flat_map(|head| all(head..self.total_query_heads.min(head + together), &first))
            .chain(all(0..self.total_query_heads, &last))
            .collect()
    }

    /// Cost of a query tile, by which tiles are distributed over the thread blocks. The cost of a
    /// query tile accounts for tensor cores that idle a tenth of the time with two warpgroups
    /// instead of three, and longer with one.
    fn query_tile_cost(&self, first_query: usize, warpgroups: usize) -> usize {
        let blocks = |group| {
            let end = self
                .queries_per_head
                .min(first_query + (group + 1) * QUERIES_PER_FORWARD_WARPGROUP);
            if self.causal {
                end + self.keys_per_head - self.queries_per_head
            } else {
                self.keys_per_head
            }
            .div_ceil(self.keys_per_block)
        };
        let tenths = [16, 11, 10][warpgroups - 1];
        (0..warpgroups).map(blocks).sum::<usize>() * tenths + 10 * FIXED_COST_OF_QUERY_TILE
    }
}

/// Writes the tile lists in the kernel's format: the first tile of every thread block, then the
/// second tile of every thread block, and so on. A tile of the table has four numbers: its first
/// query, its number of warpgroups, its head within the sequence, and the sequence. Zeros end each
/// thread block's list of query tiles.
pub fn tile_lists_as_kernel_table(
    lists: &[Vec<QueryTile>],
    query_heads_per_sequence: usize,
) -> Vec<i32> {
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    let entry = |tile: Option<&QueryTile>| {
        tile.map_or([0; 4], |tile| {
            [
                tile.first_query,
                tile.parts_of_64_queries,
                tile.query_head_index % query_heads_per_sequence,
                tile.query_head_index / query_heads_per_sequence,
            ]
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

    const FIVE_CAUSAL_HEADS_OF_1000_QUERIES: QueryTilingShape = QueryTilingShape {
        total_query_heads: 5,
        query_heads_per_key_head: 1,
        queries_per_head: 1000,
        keys_per_head: 1000,
        bytes_per_key: 256,
        causal: true,
        keys_per_block: 80,
    };

    fn cost_of_tile_list(tiling: &QueryTilingShape, list: &[QueryTile]) -> usize {
        list.iter()
            .map(|tile| tiling.query_tile_cost(tile.first_query, tile.parts_of_64_queries))
            .sum()
    }

    #[test]
    fn every_query_belongs_to_exactly_one_query_tile() {
        for s in [1, 63, 64, 127, 129, 192, 193, 777, 1000, 4096] {
            for causal in [false, true] {
                let tiling = QueryTilingShape {
                    queries_per_head: s,
                    keys_per_head: s + 77,
                    causal,
                    ..FIVE_CAUSAL_HEADS_OF_1000_QUERIES
                };
                let mut groups: Vec<_> =
                    (tiling.assign_query_tiles_to_blocks(7).into_iter().flatten())
                        .flat_map(|tile| {
                            (0..tile.parts_of_64_queries).map(move |group| {
                                (tile.query_head_index, tile.first_query / 64 + group)
                            })
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
                let tiling = QueryTilingShape {
                    total_query_heads: heads,
                    queries_per_head: s,
                    keys_per_head: s,
                    bytes_per_key: 2 * d,
                    causal,
                    keys_per_block: block_keys,
                    ..FIVE_CAUSAL_HEADS_OF_1000_QUERIES
                };
                let costs: Vec<_> = tiling
                    .assign_query_tiles_to_blocks(132)
                    .iter()
                    .map(|list| cost_of_tile_list(&tiling, list))
                    .collect();
                let (most, sum) = (*costs.iter().max().unwrap(), costs.iter().sum::<usize>());
                // If every tile had three warpgroups, the longest tile list would have a twentieth
                // more work; with tiles dealt to thread blocks in rotation, a fifth.
                assert!(most * 132 * 100 <= sum * 104, "{tiling:?}: {most} of {sum}");
            }
        }
    }

    #[test]
    fn heavy_query_tiles_come_first_and_heads_fitting_l2_are_adjacent() {
        let tiling = QueryTilingShape {
            total_query_heads: 16,
            queries_per_head: 4096,
            keys_per_head: 4096,
            ..FIVE_CAUSAL_HEADS_OF_1000_QUERIES
        };
        // In this test q, k, v and out of one head take 4 MiB.
        let order =
            tiling.all_tiles_in_order_of_assignment(&tiling.tiles_of_head_by_descending_cost(0));
        let heads: Vec<_> = order.iter().take(11).map(|tile| tile.query_head_index).collect();
        assert_eq!(heads, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]);
        assert_eq!((order[0].first_query, order[0].parts_of_64_queries), (4096 - 256, 3));
        let last = order.last().unwrap();
        assert_eq!((last.first_query, last.query_head_index), (0, 15));
        // In this test, four query heads and the keys and values that they share take 10 MiB.
        let grouped = QueryTilingShape { query_heads_per_key_head: 4, ..tiling };
        let order =
            grouped.all_tiles_in_order_of_assignment(&grouped.tiles_of_head_by_descending_cost(0));
        assert!(order[..9].iter().map(|tile| tile.query_head_index).eq((0..8).chain([0])));
        // In this test case, the keys of one head group exceed the L2 budget, so the head groups
        // come one after the other.
        let long = QueryTilingShape { queries_per_head: 16_384, keys_per_head: 16_384, ..grouped };
        let order =
            long.all_tiles_in_order_of_assignment(&long.tiles_of_head_by_descending_cost(0));
        assert!(order[..5].iter().map(|tile| tile.query_head_index).eq((0..4).chain([0])));
    }

    #[test]
    fn tiles_of_a_short_head_are_close_in_the_order_of_assignment() {
        let tiling = QueryTilingShape {
            total_query_heads: 1024,
            queries_per_head: 256,
            keys_per_head: 256,
            ..FIVE_CAUSAL_HEADS_OF_1000_QUERIES
        };
        let lists = tiling.assign_query_tiles_to_blocks(132);
        // Each head of 256 queries is cut into two tiles of two warpgroups, not into one of three
        // and one of one.
        assert!(lists.iter().flatten().all(|tile| tile.parts_of_64_queries == 2));
        let order =
            tiling.all_tiles_in_order_of_assignment(&tiling.tiles_of_head_by_descending_cost(2));
        let place = |head, row| {
            order.iter().position(|it| (it.query_head_index, it.first_query) == (head, row))
        };
        for head in 0..1024 {
            let (first, second) = (place(head, 0).unwrap(), place(head, 128).unwrap());
            assert!(first.abs_diff(second) <= 80, "{head}: {first}, {second}");
        }
    }

    #[test]
    fn the_table_of_tiles_has_the_order_that_the_kernel_reads() {
        let tile = |head, row, groups| QueryTile {
            query_head_index: head,
            first_query: row,
            parts_of_64_queries: groups,
        };
        let lists = [vec![tile(4, 192, 3), tile(2, 64, 1)], vec![tile(7, 0, 2)]];
        let first = [192, 3, 1, 1, 0, 2, 1, 2];
        let second = [64, 1, 2, 0, 0, 0, 0, 0];
        assert_eq!(tile_lists_as_kernel_table(&lists, 3), [first, second, [0; 8]].concat());
    }
}
