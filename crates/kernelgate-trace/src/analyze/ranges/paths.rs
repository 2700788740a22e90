//! The path of a range through the ranges around it: `step/layer_0/attention`.

use hashbrown::HashMap;

use crate::analyze::ranges::range_sweep::RowsByThread;
use crate::model::Trace;
use crate::model::interned_names::NameId;

/// A path: an index into the paths of a trace.
pub type RangePathId = u32;

/// No range encloses it.
pub const ROOT_PATH: RangePathId = 0;

/// Paths of ranges. Ranges with equal names inside one enclosing path share a path.
#[derive(Debug, Clone)]
pub struct RangePathTree {
    /// Parent and last name of each path; the first path is [`ROOT_PATH`], which has no name.
    nodes: Vec<(RangePathId, NameId)>,
    known: HashMap<(RangePathId, NameId), RangePathId>,
}

impl Default for RangePathTree {
    fn default() -> Self {
        Self { nodes: vec![(ROOT_PATH, NameId::default())], known: HashMap::new() }
    }
}

/// The path of every range of a trace in memory.
#[derive(Debug, Clone, Default)]
pub struct PathOfEachRange {
    pub paths: RangePathTree,
    /// Path of each range, with its own name last.
    pub of_range: Vec<RangePathId>,
}

impl PathOfEachRange {
    pub fn new(trace: &Trace) -> Self {
        let ranges = &trace.ranges;
        let mut all =
            Self { paths: RangePathTree::default(), of_range: vec![ROOT_PATH; ranges.len()] };
        let by_thread = RowsByThread::group_ranges_by_thread(trace);
        let mut open: Vec<u32> = Vec::new();
        for thread in 0..trace.threads.len() {
            open.clear();
            for &range in by_thread.rows_of_thread(thread) {
                let (start, end) = (ranges.start[range as usize], ranges.end[range as usize]);
                while open.last().is_some_and(|&last| ranges.end[last as usize] < start) {
                    open.pop();
                }
                let parent = open.iter().rev().find(|&&outer| ranges.end[outer as usize] >= end);
                let parent = parent.map_or(ROOT_PATH, |&outer| all.of_range[outer as usize]);
                let path = all.paths.path_inside(parent, ranges.name[range as usize]);
                all.of_range[range as usize] = path;
                open.push(range);
            }
        }
        all
    }
}

impl RangePathTree {
    pub fn path_inside(&mut self, parent: RangePathId, name: NameId) -> RangePathId {
        let new = u32::try_from(self.nodes.len()).expect("fewer than 2^32 paths");
        *self.known.entry((parent, name)).or_insert_with(|| {
            self.nodes.push((parent, name));
            new
        })
    }

    /// Number of range paths, including [`ROOT_PATH`].
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns whether there is no path except the root.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    /// Replaces the names in the paths; returns the new paths and the new number of each old path.
    pub(crate) fn renamed(&self, name_of: impl Fn(NameId) -> NameId) -> (Self, Vec<RangePathId>) {
        let (mut renamed, mut now) = (Self::default(), vec![ROOT_PATH]);
        // A path has a larger number than its parent path.
        for &(parent, name) in &self.nodes[1..] {
            now.push(renamed.path_inside(now[parent as usize], name_of(name)));
        }
        (renamed, now)
    }

    /// The innermost path that is, or is around, two paths.
    pub fn innermost_common_path(&self, mut a: RangePathId, mut b: RangePathId) -> RangePathId {
        // A path has a larger number than the path around it.
        while a != b {
            let inner = if a > b { &mut a } else { &mut b };
            *inner = self.parent_path(*inner);
        }
        a
    }

    pub fn parent_path(&self, path: RangePathId) -> RangePathId {
        self.nodes[path as usize].0
    }

    /// A path and the paths around it, without the root.
    pub fn path_and_parents(&self, path: RangePathId) -> impl Iterator<Item = RangePathId> {
        let below_root = |path: RangePathId| (path != ROOT_PATH).then_some(path);
        std::iter::successors(below_root(path), move |&path| below_root(self.parent_path(path)))
    }

    /// The last name of a path.
    pub fn name(&self, path: RangePathId) -> NameId {
        self.nodes[path as usize].1
    }

    /// Returns the names of a path from the outermost to the innermost, separated by `/`; empty for
    /// [`ROOT_PATH`].
    pub fn text(&self, trace: &Trace, path: RangePathId) -> String {
        let names = self.path_and_parents(path).map(|path| trace.names.text(self.name(path)));
        let mut names: Vec<&str> = names.collect();
        names.reverse();
        names.join("/")
    }
}
