//! Which kernels were asked for, with their code and launch shapes: what a case's builds are
//! compared by.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use super::kernel::LaunchShape;
use crate::compiler::code::{self, KernelCode};

/// A kernel that was loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedKernel {
    /// Its machine code; absent where it cannot be read.
    pub code: Option<KernelCode>,
    /// The shapes that it was loaded for, each once; empty where its launcher chooses them later.
    #[serde(default)]
    pub shapes: Vec<LaunchShape>,
}

/// Kernels by build and symbol.
pub type UsedKernels = BTreeMap<String, UsedKernel>;

/// Kernels that were asked for, their code not looked into yet.
#[derive(Debug, Clone, Default)]
pub struct AskedKernels(BTreeMap<String, AskedKernel>);

#[derive(Debug, Clone)]
struct AskedKernel {
    image: Arc<[u8]>,
    symbol: String,
    shapes: Vec<LaunchShape>,
    launched: Arc<AtomicBool>,
}

impl AskedKernels {
    /// Adds one, by build and symbol; what its launches set is given back.
    pub(super) fn add(&mut self, name: String, symbol: &str, image: &Arc<[u8]>) -> Arc<AtomicBool> {
        let kernel = self.0.entry(name).or_insert_with(|| AskedKernel {
            image: Arc::clone(image),
            symbol: symbol.to_owned(),
            shapes: Vec::new(),
            launched: Arc::default(),
        });
        Arc::clone(&kernel.launched)
    }

    /// Those of them that were launched by now, or recorded into a graph, by build and symbol: what
    /// is only loaded is none.
    pub fn launched(&self) -> Vec<String> {
        let launched = self.0.iter().filter(|(_, kernel)| kernel.launched.load(Ordering::Relaxed));
        launched.map(|(name, _)| name.clone()).collect()
    }

    /// Adds a shape that one is loaded for.
    pub(super) fn add_shape(&mut self, name: &str, shape: LaunchShape) {
        if let Some(kernel) = self.0.get_mut(name).filter(|it| !it.shapes.contains(&shape)) {
            kernel.shapes.push(shape);
        }
    }

    /// Looks into their code: milliseconds a kernel.
    pub fn describe(&self) -> UsedKernels {
        let described = |kernel: &AskedKernel| UsedKernel {
            code: code::of_image(&kernel.image, &kernel.symbol),
            shapes: kernel.shapes.clone(),
        };
        self.0.iter().map(|(name, kernel)| (name.clone(), described(kernel))).collect()
    }

    /// Bytes of local memory of a thread by symbol, of each build of it whose machine code tells.
    pub fn local_bytes(&self) -> BTreeMap<&str, BTreeSet<u32>> {
        let mut all: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
        for AskedKernel { image, symbol, .. } in self.0.values() {
            if let Some(facts) = code::of_image(image, symbol).and_then(|code| code.facts) {
                all.entry(symbol).or_default().insert(facts.stack_bytes);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiler::source::Source;
    use crate::testing::gpu;

    #[test]
    fn a_device_tells_the_code_of_what_was_asked_for_once() {
        let Some((device, _alone)) = gpu() else { return };
        let ask = |factor: u32| {
            let text = format!(
                "extern \"C\" __global__ void used(unsigned* x) {{ x[threadIdx.x] *= {factor}; }}"
            );
            let build = Source::new("used", Box::leak(text.into_boxed_str())).build(&[]);
            device.kernel(&build, "used").unwrap();
            device.note_shape("used", LaunchShape { grid: (1, 1, 1), block: 32, shared_bytes: 0 });
            device.take_asked().describe()
        };
        drop(device.take_asked());
        let [three, five, again] = [3, 5, 3].map(ask);
        let code = |used: &UsedKernels| used["used"].code.clone().unwrap();
        assert_eq!(three.keys().collect::<Vec<_>>(), ["used"]);
        assert_eq!(three["used"].shapes.len(), 1);
        assert_ne!(code(&three).hash, code(&five).hash);
        assert_eq!(three, again);
        assert!(device.take_asked().describe().is_empty());
    }

    #[test]
    fn a_device_tells_what_was_launched_of_what_was_asked_for() {
        let Some((device, _alone)) = gpu() else { return };
        let text = "extern \"C\" __global__ void one() {} extern \"C\" __global__ void two() {}";
        let build = Source::new("both", text).build(&[]);
        drop(device.take_asked());
        let [one, _two] = ["one", "two"].map(|symbol| device.kernel(&build, symbol).unwrap());
        let asked = device.take_asked();
        assert!(asked.launched().is_empty());
        one.launch(LaunchShape { grid: (1, 1, 1), block: 32, shared_bytes: 0 }, &[]).unwrap();
        device.synchronize().unwrap();
        assert_eq!(asked.launched(), ["both: one"]);
    }

    #[test]
    fn a_kernel_that_is_asked_for_twice_is_one_with_both_shapes() {
        let image: Arc<[u8]> = Arc::from(&b".entry k { ret; }"[..]);
        let shape = |blocks| LaunchShape { grid: (blocks, 1, 1), block: 128, shared_bytes: 0 };
        let mut asked = AskedKernels::default();
        let mut launched = Vec::new();
        for blocks in [8, 16, 8] {
            launched.push(asked.add("f X=1: k".to_owned(), "k", &image));
            asked.add_shape("f X=1: k", shape(blocks));
        }
        asked.add_shape("unknown", shape(1));
        let used = asked.describe();
        assert_eq!(used.len(), 1);
        assert_eq!(used["f X=1: k"].shapes, [shape(8), shape(16)]);
        assert!(used["f X=1: k"].code.is_some());
        assert!(asked.local_bytes().is_empty(), "PTX does not tell");
        asked.add("f X=2: k".to_owned(), "k", &image);
        assert!(asked.launched().is_empty());
        launched[2].store(true, Ordering::Relaxed);
        assert_eq!(asked.launched(), ["f X=1: k"]);
    }
}
