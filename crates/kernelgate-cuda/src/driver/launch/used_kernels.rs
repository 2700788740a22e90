//! Records the kernels that an implementation loaded, with their machine code, launch shapes and
//! stages; comparisons of two builds use the record.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::shape::Launch;
use super::stage_times::KernelWithStages;
use crate::compiler::code::{self, MachineCodeOfKernel};

/// Machine code and launch shapes of a kernel that was loaded for a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelLoadedForCase {
    /// Machine code of the kernel; `None` if it cannot be read.
    pub code: Option<MachineCodeOfKernel>,
    /// Launch shapes for which the kernel was loaded, without repetitions; empty if the
    /// implementation chooses the shape at each launch.
    #[serde(default)]
    #[serde(rename = "shapes")]
    pub launch_shapes: Vec<Launch>,
}

/// The kernels that were loaded for a case, by name of build and symbol.
pub type KernelsLoadedForCase = BTreeMap<String, KernelLoadedForCase>;

/// The record of all kernels that were loaded through one view of a device
/// ([`Device::view_recording_kernels`]). Kernels that an implementation loads only when it is
/// launched are recorded too.
///
/// [`Device::view_recording_kernels`]: crate::driver::device::Device::view_recording_kernels
#[derive(Clone, Default)]
pub struct LoadedKernelsRecord(Arc<Mutex<RecordedKernelList>>);

#[derive(Default)]
struct RecordedKernelList {
    kernels: BTreeMap<String, RecordedKernelImage>,
    kernels_with_stages: Vec<Arc<KernelWithStages>>,
}

struct RecordedKernelImage {
    kernel_image: Arc<[u8]>,
    kernel_symbol: String,
    launch_shapes: Vec<Launch>,
    was_launched: Arc<AtomicBool>,
}

impl LoadedKernelsRecord {
    /// Adds a kernel by name of build and symbol, and returns the flag that launches of the kernel
    /// set.
    pub(crate) fn add_loaded_kernel(
        &self,
        name: String,
        symbol: &str,
        image: &Arc<[u8]>,
    ) -> Arc<AtomicBool> {
        let mut loaded = self.lock_recorded_kernels();
        let kernel = loaded.kernels.entry(name).or_insert_with(|| RecordedKernelImage {
            kernel_image: Arc::clone(image),
            kernel_symbol: symbol.to_owned(),
            launch_shapes: Vec::new(),
            was_launched: Arc::default(),
        });
        Arc::clone(&kernel.was_launched)
    }

    pub(crate) fn add_shape_of_kernel(&self, name: &str, shape: Launch) {
        let mut loaded = self.lock_recorded_kernels();
        let kernel = loaded.kernels.get_mut(name).filter(|it| !it.launch_shapes.contains(&shape));
        if let Some(kernel) = kernel {
            kernel.launch_shapes.push(shape);
        }
    }

    /// Adds a kernel whose implementation names stages, unless the same kernel was added before.
    pub(crate) fn add_kernel_with_stages(&self, kernel: KernelWithStages) {
        let mut loaded = self.lock_recorded_kernels();
        if !loaded
            .kernels_with_stages
            .iter()
            .any(|known| known.is_same_kernel_of_same_module(&kernel))
        {
            loaded.kernels_with_stages.push(Arc::new(kernel));
        }
    }

    /// All recorded kernels whose implementations name stages.
    pub fn kernels_with_stages(&self) -> Vec<Arc<KernelWithStages>> {
        self.lock_recorded_kernels().kernels_with_stages.clone()
    }

    /// Names (build and symbol) of the recorded kernels that were launched or captured into a
    /// graph.
    pub fn names_of_launched_kernels(&self) -> Vec<String> {
        let loaded = self.lock_recorded_kernels();
        let launched =
            loaded.kernels.iter().filter(|(_, kernel)| kernel.was_launched.load(Ordering::Relaxed));
        launched.map(|(name, _)| name.clone()).collect()
    }

    /// Reads the hash and the facts of the machine code of every recorded kernel, which takes
    /// milliseconds per kernel.
    pub fn read_machine_code_of_all(&self) -> KernelsLoadedForCase {
        let described = |kernel: &RecordedKernelImage| KernelLoadedForCase {
            code: code::machine_code_of_kernel_in_image(
                &kernel.kernel_image,
                &kernel.kernel_symbol,
            ),
            launch_shapes: kernel.launch_shapes.clone(),
        };
        let loaded = self.lock_recorded_kernels();
        loaded.kernels.iter().map(|(name, kernel)| (name.clone(), described(kernel))).collect()
    }

    /// For each kernel symbol, the bytes of local memory (stack) per thread in each of its loaded
    /// builds.
    pub fn stack_bytes_per_thread_by_symbol(&self) -> BTreeMap<String, BTreeSet<u32>> {
        let mut all: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
        for RecordedKernelImage { kernel_image: image, kernel_symbol: symbol, .. } in
            self.lock_recorded_kernels().kernels.values()
        {
            if let Some(facts) =
                code::machine_code_of_kernel_in_image(image, symbol).and_then(|code| code.facts)
            {
                all.entry(symbol.clone()).or_default().insert(facts.stack_bytes_per_thread);
            }
        }
        all
    }

    fn lock_recorded_kernels(&self) -> MutexGuard<'_, RecordedKernelList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiler::source::Source;
    use crate::testing::lock_first_gpu;

    #[test]
    fn a_view_records_the_machine_code_of_kernels_it_loads() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let load = |factor: u32| {
            let text = format!(
                "extern \"C\" __global__ void used(unsigned* x) {{ x[threadIdx.x] *= {factor}; }}"
            );
            let build = Source::new("used", Box::leak(text.into_boxed_str())).with_macros(&[]);
            let (view, loaded) = device.view_recording_kernels();
            view.load_kernel(&build, "used").unwrap();
            let shape = Launch::new([1, 1, 1], [32, 1, 1]);
            view.record_shape_and_stages_of_kernel("used", shape, None);
            loaded.read_machine_code_of_all()
        };
        let [three, five, again] = [3, 5, 3].map(load);
        let code = |used: &KernelsLoadedForCase| used["used"].code.clone().unwrap();
        assert_eq!(three.keys().collect::<Vec<_>>(), ["used"]);
        assert_eq!(three["used"].launch_shapes.len(), 1);
        assert_ne!(code(&three).machine_code_hash, code(&five).machine_code_hash);
        assert_eq!(three, again);
    }

    #[test]
    fn a_view_records_which_kernels_were_launched() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let text = "extern \"C\" __global__ void one() {} extern \"C\" __global__ void two() {}";
        let build = Source::new("both", text).with_macros(&[]);
        let (view, loaded) = device.view_recording_kernels();
        let [one, _two] = ["one", "two"].map(|symbol| view.load_kernel(&build, symbol).unwrap());
        let (_other, others) = device.view_recording_kernels();
        assert!(loaded.names_of_launched_kernels().is_empty());
        one.launch(Launch::new([1, 1, 1], [32, 1, 1]), &[]).unwrap();
        device.synchronize().unwrap();
        assert_eq!(loaded.names_of_launched_kernels(), ["both: one"]);
        assert!(others.read_machine_code_of_all().is_empty());
    }

    #[test]
    fn a_kernel_loaded_for_two_launch_shapes_is_recorded_once_with_both() {
        let image: Arc<[u8]> = Arc::from(&b".entry k { ret; }"[..]);
        let shape = |blocks| Launch::new([blocks, 1, 1], [128, 1, 1]);
        let loaded = LoadedKernelsRecord::default();
        let mut launched = Vec::new();
        for blocks in [8, 16, 8] {
            launched.push(loaded.add_loaded_kernel("f X=1: k".to_owned(), "k", &image));
            loaded.add_shape_of_kernel("f X=1: k", shape(blocks));
        }
        loaded.add_shape_of_kernel("unknown", shape(1));
        let used = loaded.read_machine_code_of_all();
        assert_eq!(used.len(), 1);
        assert_eq!(used["f X=1: k"].launch_shapes, [shape(8), shape(16)]);
        assert!(used["f X=1: k"].code.is_some());
        assert!(loaded.stack_bytes_per_thread_by_symbol().is_empty(), "PTX does not report it");
        loaded.add_loaded_kernel("f X=2: k".to_owned(), "k", &image);
        assert!(loaded.names_of_launched_kernels().is_empty());
        launched[2].store(true, Ordering::Relaxed);
        assert_eq!(loaded.names_of_launched_kernels(), ["f X=1: k"]);
    }
}
