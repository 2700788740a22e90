//! Where a range stands among the ranges around it: `step/layer_0/attention`.

use hashbrown::HashMap;

use super::launches::NONE;
use super::sweep::ByThread;
use crate::model::Trace;
use crate::model::names::Name;

/// A path: an index into the paths of a trace.
pub type PathId = u32;

/// No range encloses it.
pub const ROOT: PathId = 0;

/// The path of every range. Ranges of the same name at the same place share one.
#[derive(Debug, Clone)]
pub struct Paths {
    /// The path of each range, its own name last.
    pub of_range: Vec<PathId>,
    /// The innermost range around each range, or [`NONE`].
    pub around: Vec<u32>,
    /// The parent and the last name of each path; the first is [`ROOT`], without a name.
    nodes: Vec<(PathId, Name)>,
    known: HashMap<(PathId, Name), PathId>,
}

impl Paths {
    /// The paths of a trace.
    pub fn of(trace: &Trace) -> Self {
        let ranges = &trace.ranges;
        let mut paths = Self {
            of_range: vec![ROOT; ranges.len()],
            around: vec![NONE; ranges.len()],
            nodes: vec![(ROOT, Name::default())],
            known: HashMap::new(),
        };
        let by_thread = ByThread::ranges(trace);
        let mut open: Vec<u32> = Vec::new();
        for thread in 0..trace.threads.len() {
            open.clear();
            for &range in by_thread.of(thread) {
                let (start, end) = (ranges.start[range as usize], ranges.end[range as usize]);
                while open.last().is_some_and(|&last| ranges.end[last as usize] < start) {
                    open.pop();
                }
                let parent = open.iter().rev().find(|&&outer| ranges.end[outer as usize] >= end);
                paths.around[range as usize] = parent.copied().unwrap_or(NONE);
                let parent = parent.map_or(ROOT, |&outer| paths.of_range[outer as usize]);
                let path = paths.inside(parent, ranges.name[range as usize]);
                paths.of_range[range as usize] = path;
                open.push(range);
            }
        }
        paths
    }

    /// The path of a name inside a path.
    pub fn inside(&mut self, parent: PathId, name: Name) -> PathId {
        let new = u32::try_from(self.nodes.len()).expect("fewer than 2^32 paths");
        *self.known.entry((parent, name)).or_insert_with(|| {
            self.nodes.push((parent, name));
            new
        })
    }

    /// How many there are, [`ROOT`] among them.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there is no range.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    /// The path around a path.
    pub fn parent(&self, path: PathId) -> PathId {
        self.nodes[path as usize].0
    }

    /// The last name of a path.
    pub fn name(&self, path: PathId) -> Name {
        self.nodes[path as usize].1
    }

    /// The names from the outermost to the innermost, with `/` between them; empty for [`ROOT`].
    pub fn text(&self, trace: &Trace, mut path: PathId) -> String {
        let mut names = Vec::new();
        while path != ROOT {
            let (parent, name) = self.nodes[path as usize];
            names.push(trace.names.text(name));
            path = parent;
        }
        names.reverse();
        names.join("/")
    }
}
