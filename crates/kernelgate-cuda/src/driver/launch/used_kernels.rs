//! Kernels that a row has loaded, with their code, launch shapes and stages, by which two builds of
//! a case are compared.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::shape::Launch;
use super::stage_times::StageClockedKernel;
use crate::compiler::code::{self, KernelMachineCode};

/// A kernel that was loaded for a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UsedKernel {
    /// Machine code of the used kernel; absent if it cannot be read.
    pub code: Option<KernelMachineCode>,
    /// Launch shapes for which the kernel was loaded, each once; empty if its launcher chooses them
    /// later.
    #[serde(default)]
    pub shapes: Vec<Launch>,
}

/// Kernels that a case loaded, by name of build and symbol.
pub type UsedKernels = BTreeMap<String, UsedKernel>;

/// Kernels that were loaded through one view of a device ([`Device::recording_view`]). Launching a
/// row adds the kernels that it loads meanwhile.
///
/// [`Device::recording_view`]: crate::driver::device::Device::recording_view
#[derive(Clone, Default)]
pub struct LoadedKernels(Arc<Mutex<LoadedKernelList>>);

#[derive(Default)]
struct LoadedKernelList {
    kernels: BTreeMap<String, LoadedKernelCode>,
    staged: Vec<Arc<StageClockedKernel>>,
}

struct LoadedKernelCode {
    image: Arc<[u8]>,
    symbol: String,
    shapes: Vec<Launch>,
    launched: Arc<AtomicBool>,
}

impl LoadedKernels {
    /// Adds a kernel by build and symbol, and returns the flag that its launches set.
    pub(crate) fn add(&self, name: String, symbol: &str, image: &Arc<[u8]>) -> Arc<AtomicBool> {
        let mut loaded = self.lock_list();
        let kernel = loaded.kernels.entry(name).or_insert_with(|| LoadedKernelCode {
            image: Arc::clone(image),
            symbol: symbol.to_owned(),
            shapes: Vec::new(),
            launched: Arc::default(),
        });
        Arc::clone(&kernel.launched)
    }

    pub(crate) fn add_launch_shape(&self, name: &str, shape: Launch) {
        let mut loaded = self.lock_list();
        let kernel = loaded.kernels.get_mut(name).filter(|it| !it.shapes.contains(&shape));
        if let Some(kernel) = kernel {
            kernel.shapes.push(shape);
        }
    }

    /// Adds a kernel with named stages, unless its build was added before.
    pub(crate) fn add_stage_clocked(&self, kernel: StageClockedKernel) {
        let mut loaded = self.lock_list();
        if !loaded.staged.iter().any(|known| known.is_same_build(&kernel)) {
            loaded.staged.push(Arc::new(kernel));
        }
    }

    /// The loaded kernels whose specification names stages.
    pub fn stage_clocked_kernels(&self) -> Vec<Arc<StageClockedKernel>> {
        self.lock_list().staged.clone()
    }

    /// Build and symbol of kernels that were launched, or recorded into a graph.
    pub fn launched_kernels(&self) -> Vec<String> {
        let loaded = self.lock_list();
        let launched =
            loaded.kernels.iter().filter(|(_, kernel)| kernel.launched.load(Ordering::Relaxed));
        launched.map(|(name, _)| name.clone()).collect()
    }

    /// Reads the machine code of the used kernels, which takes milliseconds for each kernel.
    pub fn describe_used_kernels(&self) -> UsedKernels {
        let described = |kernel: &LoadedKernelCode| UsedKernel {
            code: code::machine_code_in_image(&kernel.image, &kernel.symbol),
            shapes: kernel.shapes.clone(),
        };
        let loaded = self.lock_list();
        loaded.kernels.iter().map(|(name, kernel)| (name.clone(), described(kernel))).collect()
    }

    /// Bytes of local memory of a thread, by symbol, for each of its builds in machine code.
    pub fn local_bytes_by_kernel(&self) -> BTreeMap<String, BTreeSet<u32>> {
        let mut all: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
        for LoadedKernelCode { image, symbol, .. } in self.lock_list().kernels.values() {
            if let Some(facts) =
                code::machine_code_in_image(image, symbol).and_then(|code| code.facts)
            {
                all.entry(symbol.clone()).or_default().insert(facts.stack_bytes);
            }
        }
        all
    }

    fn lock_list(&self) -> MutexGuard<'_, LoadedKernelList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiler::source::Source;
    use crate::testing::lock_first_gpu;

    #[test]
    fn a_view_records_the_machine_code_of_kernels_loaded_through_it() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let load = |factor: u32| {
            let text = format!(
                "extern \"C\" __global__ void used(unsigned* x) {{ x[threadIdx.x] *= {factor}; }}"
            );
            let build = Source::new("used", Box::leak(text.into_boxed_str())).build(&[]);
            let (view, loaded) = device.recording_view();
            view.kernel(&build, "used").unwrap();
            let shape = Launch::new([1, 1, 1], [32, 1, 1]);
            view.record_used_kernel("used", shape, None);
            loaded.describe_used_kernels()
        };
        let [three, five, again] = [3, 5, 3].map(load);
        let code = |used: &UsedKernels| used["used"].code.clone().unwrap();
        assert_eq!(three.keys().collect::<Vec<_>>(), ["used"]);
        assert_eq!(three["used"].shapes.len(), 1);
        assert_ne!(code(&three).hash, code(&five).hash);
        assert_eq!(three, again);
    }

    #[test]
    fn a_view_records_which_of_its_kernels_were_launched() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let text = "extern \"C\" __global__ void one() {} extern \"C\" __global__ void two() {}";
        let build = Source::new("both", text).build(&[]);
        let (view, loaded) = device.recording_view();
        let [one, _two] = ["one", "two"].map(|symbol| view.kernel(&build, symbol).unwrap());
        let (_other, others) = device.recording_view();
        assert!(loaded.launched_kernels().is_empty());
        one.launch(Launch::new([1, 1, 1], [32, 1, 1]), &[]).unwrap();
        device.synchronize().unwrap();
        assert_eq!(loaded.launched_kernels(), ["both: one"]);
        assert!(others.describe_used_kernels().is_empty());
    }

    #[test]
    fn a_kernel_loaded_for_two_launch_shapes_is_recorded_once_with_both() {
        let image: Arc<[u8]> = Arc::from(&b".entry k { ret; }"[..]);
        let shape = |blocks| Launch::new([blocks, 1, 1], [128, 1, 1]);
        let loaded = LoadedKernels::default();
        let mut launched = Vec::new();
        for blocks in [8, 16, 8] {
            launched.push(loaded.add("f X=1: k".to_owned(), "k", &image));
            loaded.add_launch_shape("f X=1: k", shape(blocks));
        }
        loaded.add_launch_shape("unknown", shape(1));
        let used = loaded.describe_used_kernels();
        assert_eq!(used.len(), 1);
        assert_eq!(used["f X=1: k"].shapes, [shape(8), shape(16)]);
        assert!(used["f X=1: k"].code.is_some());
        assert!(loaded.local_bytes_by_kernel().is_empty(), "PTX does not report it");
        loaded.add("f X=2: k".to_owned(), "k", &image);
        assert!(loaded.launched_kernels().is_empty());
        launched[2].store(true, Ordering::Relaxed);
        assert_eq!(loaded.launched_kernels(), ["f X=1: k"]);
    }
}
