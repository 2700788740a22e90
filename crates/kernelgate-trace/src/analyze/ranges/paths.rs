//! Path of an NVTX range through the ranges around it, such as `step/layer_0/attention`.

use hashbrown::HashMap;

use crate::analyze::ranges::range_sweep::TableRowsByThread;
use crate::model::Trace;
use crate::model::interned_names::InternedNameId;

/// Path of nested NVTX range names: an index into [`RangePathTree`].
pub type RangePathId = u32;

/// Id of the root of all range paths, which stands for outside all ranges.
pub const ROOT_RANGE_PATH: RangePathId = 0;

/// Paths of ranges. Ranges with equal names inside the same enclosing path share one path.
#[derive(Debug, Clone)]
pub struct RangePathTree {
    /// Enclosing path and last name of each path; entry 0 is [`ROOT_RANGE_PATH`], which has no
    /// name.
    parent_and_name_of_path: Vec<(RangePathId, InternedNameId)>,
    path_of_parent_and_name: HashMap<(RangePathId, InternedNameId), RangePathId>,
}

impl Default for RangePathTree {
    fn default() -> Self {
        Self {
            parent_and_name_of_path: vec![(ROOT_RANGE_PATH, InternedNameId::default())],
            path_of_parent_and_name: HashMap::new(),
        }
    }
}

/// The path of every NVTX range of a trace that is in memory.
#[derive(Debug, Clone, Default)]
pub struct PathOfEachRange {
    pub paths: RangePathTree,
    /// Path of each range of the trace; the range's own name comes last.
    pub path_of_range: Vec<RangePathId>,
}

impl PathOfEachRange {
    pub fn find_path_of_each_range(trace: &Trace) -> Self {
        let ranges = &trace.ranges;
        let mut all = Self {
            paths: RangePathTree::default(),
            path_of_range: vec![ROOT_RANGE_PATH; ranges.range_count()],
        };
        let by_thread = TableRowsByThread::group_ranges_by_thread(trace);
        let mut open: Vec<u32> = Vec::new();
        for thread in 0..trace.threads.len() {
            open.clear();
            for &range in by_thread.rows_of_thread(thread) {
                let (start, end) = (ranges.start_ns[range as usize], ranges.end_ns[range as usize]);
                while open.last().is_some_and(|&last| ranges.end_ns[last as usize] < start) {
                    open.pop();
                }
                let parent = open.iter().rev().find(|&&outer| ranges.end_ns[outer as usize] >= end);
                let parent =
                    parent.map_or(ROOT_RANGE_PATH, |&outer| all.path_of_range[outer as usize]);
                let path =
                    all.paths.path_of_name_inside_parent(parent, ranges.range_name[range as usize]);
                all.path_of_range[range as usize] = path;
                open.push(range);
            }
        }
        all
    }
}

impl RangePathTree {
    pub fn path_of_name_inside_parent(
        &mut self,
        parent: RangePathId,
        name: InternedNameId,
    ) -> RangePathId {
        let new = u32::try_from(self.parent_and_name_of_path.len()).expect("fewer than 2^32 paths");
        *self.path_of_parent_and_name.entry((parent, name)).or_insert_with(|| {
            self.parent_and_name_of_path.push((parent, name));
            new
        })
    }

    /// Number of range paths, including [`ROOT_RANGE_PATH`].
    pub fn len(&self) -> usize {
        self.parent_and_name_of_path.len()
    }

    /// Returns whether the tree contains no range path except the root.
    pub fn is_empty(&self) -> bool {
        self.parent_and_name_of_path.len() == 1
    }

    /// Replaces the names in the paths; returns the new paths, and for each old path the number of
    /// its new path.
    pub(crate) fn with_replaced_range_names(
        &self,
        name_of: impl Fn(InternedNameId) -> InternedNameId,
    ) -> (Self, Vec<RangePathId>) {
        let (mut renamed, mut now) = (Self::default(), vec![ROOT_RANGE_PATH]);
        // A path has a larger number than its parent path, so parents are renamed first.
        for &(parent, name) in &self.parent_and_name_of_path[1..] {
            now.push(renamed.path_of_name_inside_parent(now[parent as usize], name_of(name)));
        }
        (renamed, now)
    }

    /// Returns the innermost path that equals or encloses each of two paths.
    pub fn innermost_common_path(&self, mut a: RangePathId, mut b: RangePathId) -> RangePathId {
        // A path has a larger number than the path that encloses it, so the larger number is
        // replaced by its parent.
        while a != b {
            let inner = if a > b { &mut a } else { &mut b };
            *inner = self.parent_of_range_path(*inner);
        }
        a
    }

    pub fn parent_of_range_path(&self, path: RangePathId) -> RangePathId {
        self.parent_and_name_of_path[path as usize].0
    }

    /// Iterates over a path and the paths that enclose it, innermost first, without the root.
    pub fn path_and_enclosing_paths(&self, path: RangePathId) -> impl Iterator<Item = RangePathId> {
        let below_root = |path: RangePathId| (path != ROOT_RANGE_PATH).then_some(path);
        std::iter::successors(below_root(path), move |&path| {
            below_root(self.parent_of_range_path(path))
        })
    }

    /// Returns the last (innermost) name of a path.
    pub fn last_name_of_path(&self, path: RangePathId) -> InternedNameId {
        self.parent_and_name_of_path[path as usize].1
    }

    /// Returns the names of a path from the outermost to the innermost, separated by `/`; empty for
    /// [`ROOT_RANGE_PATH`].
    pub fn path_text_with_slashes(&self, trace: &Trace, path: RangePathId) -> String {
        let names = self
            .path_and_enclosing_paths(path)
            .map(|path| trace.names.text_of_name(self.last_name_of_path(path)));
        let mut names: Vec<&str> = names.collect();
        names.reverse();
        names.join("/")
    }
}
