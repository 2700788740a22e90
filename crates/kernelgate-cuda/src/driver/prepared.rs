//! Launches that are settled before anything is timed: dimensions, attributes and parameters, of
//! any number and size.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::device::Device;
use super::kernel::{Kernel, MAX_PORTABLE_CLUSTER, cluster_attribute};
use super::status::failed;
use crate::BackendError;

/// How a kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchDims {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory a block, bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster in x, y, z, where the launch says so and not `__cluster_dims__`.
    pub cluster: Option<[u32; 3]>,
    /// Whether its blocks wait for each other (`cooperative_groups`), so that all of them have to
    /// be resident at once.
    pub cooperative: bool,
    /// Whether its blocks may start while the kernel before it on the stream still runs
    /// (programmatic dependent launch).
    pub programmatic: bool,
}

/// Most threads of a block, and of a block in x, y, z: the same for every architecture.
const MAX_THREADS: u64 = 1024;
const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
/// Most blocks in x, y, z.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// What a GPU has for a block.
#[derive(Debug, Clone, Copy)]
struct Offered {
    /// Shared memory, bytes.
    shared_bytes: u32,
    /// Whether there are clusters.
    clusters: bool,
}

impl LaunchDims {
    /// So many blocks of so many threads, and nothing special.
    pub const fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self {
            grid,
            block,
            shared_bytes: 0,
            cluster: None,
            cooperative: false,
            programmatic: false,
        }
    }

    fn count(of: [u32; 3]) -> u64 {
        of.into_iter().map(u64::from).product()
    }

    /// Whether a launch can have them.
    fn check(&self) -> Result<(), String> {
        let Self { grid, block, cluster, .. } = *self;
        for (what, given, most) in [("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)] {
            if given.iter().zip(most).any(|(&given, most)| given == 0 || given > most) {
                return Err(format!("a {what} of {given:?}: each is 1 to {most:?}"));
            }
        }
        if Self::count(block) > MAX_THREADS {
            return Err(format!("a block of {block:?}: it has at most {MAX_THREADS} threads"));
        }
        if let Some(cluster) = cluster
            && grid.iter().zip(cluster).any(|(&grid, of)| of == 0 || grid % of != 0)
        {
            return Err(format!("clusters of {cluster:?} do not divide a grid of {grid:?}"));
        }
        Ok(())
    }
}

impl LaunchDims {
    /// What keeps a GPU from running a kernel with so much shared memory of its own and such
    /// clusters: a fragment.
    fn unmet(&self, static_shared: u32, cluster: Option<[u32; 3]>, has: Offered) -> Option<String> {
        if cluster.is_some() && !has.clusters {
            return Some("needs clusters, which this GPU has not".to_owned());
        }
        let needed = u64::from(static_shared) + u64::from(self.shared_bytes);
        (needed > u64::from(has.shared_bytes)).then(|| {
            let has = has.shared_bytes;
            format!("needs {needed} bytes of shared memory a block, this GPU has {has}")
        })
    }
}

/// Bytes as aligned as any parameter asks for: a tensor map (`CUtensorMap`) for 64.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Aligned([u8; 64]);

/// Parameters of a kernel by value, in order.
#[derive(Clone, Default)]
pub struct Parameters {
    /// Of each its bytes, and how many.
    each: Vec<(Vec<Aligned>, usize)>,
}

impl Parameters {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an address on the device.
    pub fn address(self, address: u64) -> Self {
        self.bytes(&address.to_ne_bytes())
    }

    /// Adds a number, or a struct without padding.
    pub fn value<T: bytemuck::NoUninit>(self, value: T) -> Self {
        self.bytes(bytemuck::bytes_of(&value))
    }

    /// Adds a struct by its bytes, such as a tensor map that the driver encoded.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        let mut stored = vec![Aligned([0; 64]); bytes.len().div_ceil(64).max(1)];
        for (chunk, from) in stored.iter_mut().zip(bytes.chunks(64)) {
            chunk.0[..from.len()].copy_from_slice(from);
        }
        self.each.push((stored, bytes.len()));
        self
    }

    /// Bytes of each.
    pub fn sizes(&self) -> Vec<usize> {
        self.each.iter().map(|(_, bytes)| *bytes).collect()
    }

    /// Whether there is one of the right size for each parameter of a kernel.
    fn check(&self, expected: &[usize]) -> Result<(), String> {
        if self.each.len() != expected.len() {
            let (given, takes) = (self.each.len(), expected.len());
            return Err(format!("takes {takes} arguments, {given} were given"));
        }
        let pairs = self.each.iter().map(|(_, bytes)| *bytes).zip(expected);
        match pairs.enumerate().find(|(_, (given, bytes))| given != *bytes) {
            Some((index, (given, bytes))) => {
                Err(format!("argument {index} has {given} bytes, the parameter {bytes}"))
            }
            None => Ok(()),
        }
    }
}

/// A launch of which everything is settled.
pub struct PreparedLaunch {
    kernel: Kernel,
    dims: LaunchDims,
    parameters: Parameters,
}

impl PreparedLaunch {
    /// Settles a launch of a kernel on its stream.
    ///
    /// # Errors
    /// When the dimensions are none that a launch can have, or the parameters are not the kernel's;
    /// [`BackendError::Unsupported`] where the GPU has less shared memory a block, no clusters or
    /// none as large, or holds fewer blocks at once than wait for each other.
    pub fn new(
        device: &Device,
        kernel: Kernel,
        dims: LaunchDims,
        parameters: Parameters,
    ) -> Result<Self, BackendError> {
        let of_kernel =
            |problem: String| BackendError::Launch(format!("{}: {problem}", kernel.name()));
        dims.check().map_err(of_kernel)?;
        parameters.check(kernel.parameter_bytes()).map_err(of_kernel)?;
        let has =
            Offered { shared_bytes: device.shared_bytes_a_block()?, clusters: device.clusters()? };
        // What the launch says, else what the kernel was compiled for.
        let cluster = match dims.cluster {
            None if has.clusters => kernel.compiled_cluster()?,
            said => said,
        };
        if let Some(unmet) = dims.unmet(kernel.static_shared_bytes()?, cluster, has) {
            return Err(BackendError::Unsupported(unmet));
        }
        if dims.shared_bytes > 0 {
            kernel.allow_shared(dims.shared_bytes)?;
        }
        let launch = Self { kernel, dims, parameters };
        launch.check_residency(device, cluster)?;
        Ok(launch)
    }

    /// Whether the GPU runs a cluster of it at all, and all of its blocks at once where they wait
    /// for each other.
    fn check_residency(
        &self,
        device: &Device,
        cluster: Option<[u32; 3]>,
    ) -> Result<(), BackendError> {
        let Self { kernel, dims, .. } = self;
        let blocks = LaunchDims::count(dims.grid);
        let (needed, held, what) = match cluster {
            Some(cluster) => {
                let size = LaunchDims::count(cluster);
                if size > MAX_PORTABLE_CLUSTER {
                    kernel.allow_large_clusters()?;
                }
                let mut attribute = cluster_attribute(cluster);
                let config = self.config(std::slice::from_mut(&mut attribute));
                let held = kernel.clusters_of(&config)? as u64;
                let needed = if dims.cooperative { blocks.div_ceil(size) } else { 1 };
                (needed, held, format!("clusters of {size} blocks"))
            }
            None if dims.cooperative => {
                let threads = LaunchDims::count(dims.block) as u32;
                let a_multiprocessor = kernel.blocks_held(threads, dims.shared_bytes)? as u64;
                let held = a_multiprocessor * u64::from(device.facts().multiprocessors);
                (blocks, held, "blocks".to_owned())
            }
            None => return Ok(()),
        };
        if needed <= held {
            return Ok(());
        }
        Err(BackendError::Unsupported(if dims.cooperative {
            format!("its {needed} {what} have to run at once, this GPU runs {held}")
        } else {
            format!("this GPU runs no {what} of it")
        }))
    }

    /// The launch, with these attributes.
    fn config(&self, attributes: &mut [sys::CUlaunchAttribute]) -> sys::CUlaunchConfig {
        let LaunchDims { grid, block, shared_bytes, .. } = self.dims;
        sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared_bytes,
            hStream: self.kernel.stream().cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        }
    }

    /// Enqueues it; returns before it has run.
    ///
    /// # Errors
    /// When the driver refuses; the error names the kernel.
    pub fn launch(&self) -> Result<(), BackendError> {
        let LaunchDims { cluster, cooperative, programmatic, .. } = self.dims;
        self.kernel.note_launch();
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let cluster = cluster.map(cluster_attribute);
        let cooperative = cooperative.then(|| {
            let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
            attribute(id, sys::CUlaunchAttributeValue { cooperative: 1 })
        });
        let programmatic = programmatic.then(|| {
            let id =
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
            attribute(id, value)
        });
        let mut attributes: Vec<_> =
            cluster.into_iter().chain(cooperative).chain(programmatic).collect();
        let config = self.config(&mut attributes);
        let mut pointers: Vec<*mut c_void> = self
            .parameters
            .each
            .iter()
            .map(|(stored, _)| stored.as_ptr().cast_mut().cast::<c_void>())
            .collect();
        // SAFETY: the pointers are to values that outlive the call, which copies them; there is one
        // of the right size for each parameter; what the kernel does with them happens on the
        // device. The attributes outlive the call too.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.kernel.function(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|error| failed(&format!("launch {}", self.kernel.name()), &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;
    use crate::testing::gpu;

    #[test]
    fn dimensions_have_bounds() {
        let check = |grid, block| LaunchDims::new(grid, block).check();
        assert_eq!(check([7, 65_535, 1], [8, 8, 16]), Ok(()));
        for (grid, block, words) in [
            ([0, 1, 1], [1, 1, 1], "a grid of [0, 1, 1]"),
            ([1, 1, 70_000], [1, 1, 1], "a grid of"),
            ([1, 1, 1], [1, 1, 65], "a block of [1, 1, 65]"),
            ([1, 1, 1], [33, 32, 1], "at most 1024 threads"),
        ] {
            assert!(check(grid, block).unwrap_err().contains(words));
        }
        let clusters = |cluster| {
            LaunchDims { cluster: Some(cluster), ..LaunchDims::new([8, 6, 1], [32, 1, 1]) }.check()
        };
        assert_eq!(clusters([4, 2, 1]), Ok(()));
        assert!(clusters([3, 1, 1]).unwrap_err().contains("do not divide"));
        assert!(clusters([0, 1, 1]).is_err());
    }

    #[test]
    fn what_a_gpu_lacks_for_a_launch_is_told() {
        let dims = LaunchDims { shared_bytes: 90_000, ..LaunchDims::new([16, 1, 1], [32, 1, 1]) };
        let ampere = Offered { shared_bytes: 101_376, clusters: false };
        assert_eq!(dims.unmet(11_376, None, ampere), None);
        assert_eq!(
            dims.unmet(11_377, None, ampere).unwrap(),
            "needs 101377 bytes of shared memory a block, this GPU has 101376"
        );
        let cluster = Some([2, 1, 1]);
        assert!(dims.unmet(0, cluster, ampere).unwrap().contains("needs clusters"));
        assert_eq!(dims.unmet(0, cluster, Offered { clusters: true, ..ampere }), None);
    }

    #[test]
    fn parameters_are_checked_by_number_and_size() {
        let parameters = Parameters::new().address(8).value(1.5f32).bytes(&[7; 128]);
        assert_eq!(parameters.check(&[8, 4, 128]), Ok(()));
        assert_eq!(parameters.check(&[8, 4]).unwrap_err(), "takes 2 arguments, 3 were given");
        assert_eq!(
            parameters.check(&[8, 8, 128]).unwrap_err(),
            "argument 1 has 4 bytes, the parameter 8"
        );
        let (stored, bytes) = &parameters.each[2];
        assert_eq!((stored.as_ptr() as usize % 64, *bytes, stored[1].0), (0, 128, [7; 64]));
        assert_eq!(Parameters::new().bytes(&[]).check(&[0]), Ok(()));
    }

    const KERNELS: &str = r#"
struct __align__(64) Map { unsigned long long words[16]; };
extern "C" __global__ void many(float* out, MANY) { out[0] = SUM; }
extern "C" __global__ void mapped(const __grid_constant__ Map map, unsigned long long* out) {
  const int i = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0 && i < 16)
    out[i] = map.words[i] + ((unsigned long long)&map) % 64;
}
extern "C" __global__ void meeting(unsigned* count, unsigned* out) {
  if (threadIdx.x == 0) {
    atomicAdd(count, 1);
    while (atomicAdd(count, 0) < gridDim.x) {}
    out[blockIdx.x] = 1;
  }
}
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void clustered(unsigned* out) {
  unsigned rank, count;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  if (threadIdx.x == 0) out[blockIdx.x] = 100 * count + rank;
}
#endif
"#;

    #[test]
    fn launches_of_every_kind_reach_the_device() {
        let Some((device, _alone)) = gpu() else { return };
        let names: Vec<String> = (0..100).map(|i| format!("float a{i}")).collect();
        let sum: Vec<String> = (0..100).map(|i| format!("a{i}")).collect();
        let defines = [format!("MANY={}", names.join(",")), format!("SUM={}", sum.join("+"))];
        let build = Source::new("prepared", KERNELS).build(&[&defines[0], &defines[1]]);
        let prepare = |symbol, dims, parameters| {
            PreparedLaunch::new(&device, device.kernel(&build, symbol).unwrap(), dims, parameters)
        };
        let multiprocessors = device.facts().multiprocessors;
        let words = |buffer: &crate::Buffer| {
            let mut bytes = vec![0; buffer.bytes()];
            buffer.download(&mut bytes).unwrap();
            bytes
        };
        let one = LaunchDims::new([1, 1, 1], [1, 1, 1]);

        let out = device.allocate(4).unwrap();
        let many = (0..100).fold(Parameters::new().address(out.address()), |parameters, i| {
            parameters.value(i as f32)
        });
        prepare("many", one, many).unwrap().launch().unwrap();
        assert_eq!(f32::from_ne_bytes(words(&out).try_into().unwrap()), 4950.0);

        let out = device.allocate(128).unwrap();
        let map: Vec<u8> = (1..=16u64).flat_map(u64::to_ne_bytes).collect();
        let mapped = Parameters::new().bytes(&map).address(out.address());
        let dims = LaunchDims::new([2, 3, 2], [4, 2, 2]);
        prepare("mapped", dims, mapped).unwrap().launch().unwrap();
        assert_eq!(words(&out), map);

        let dims = LaunchDims {
            cooperative: true,
            ..LaunchDims::new([multiprocessors, 1, 1], [32, 1, 1])
        };
        let (count, out) = (
            device.upload(&[0; 4]).unwrap(),
            device.allocate(4 * multiprocessors as usize).unwrap(),
        );
        let meeting = Parameters::new().address(count.address()).address(out.address());
        prepare("meeting", dims, meeting.clone()).unwrap().launch().unwrap();
        device.synchronize().unwrap();
        assert!(words(&out).chunks(4).all(|word| word == [1, 0, 0, 0]));
        let crowd = LaunchDims { grid: [1 << 20, 1, 1], ..dims };
        let refused = prepare("meeting", crowd, meeting).err();
        assert!(matches!(refused, Some(BackendError::Unsupported(_))), "{refused:?}");

        if device.clusters().unwrap() {
            let out = device.allocate(16).unwrap();
            let dims = LaunchDims {
                cluster: Some([2, 1, 1]),
                programmatic: true,
                ..LaunchDims::new([4, 1, 1], [32, 1, 1])
            };
            let clustered = Parameters::new().address(out.address());
            prepare("clustered", dims, clustered).unwrap().launch().unwrap();
            let ranks: Vec<u32> = words(&out)
                .chunks(4)
                .map(|word| u32::from_ne_bytes(word.try_into().unwrap()))
                .collect();
            assert_eq!(ranks, [200, 201, 200, 201]);
        }
    }

    #[test]
    fn what_a_gpu_does_not_hold_is_unsupported() {
        let Some((device, _alone)) = gpu() else { return };
        let build = Source::new("prepared", KERNELS).build(&["MANY=int a", "SUM=a"]);
        let prepare = |symbol, dims, parameters| {
            PreparedLaunch::new(&device, device.kernel(&build, symbol).unwrap(), dims, parameters)
        };
        let unsupported = |launch: Result<PreparedLaunch, BackendError>, words: &str| {
            let told = launch.err();
            assert!(
                matches!(&told, Some(BackendError::Unsupported(why)) if why.contains(words)),
                "{told:?}"
            );
        };
        let mapped = || Parameters::new().bytes(&[0; 128]).address(0);
        let one = LaunchDims::new([1, 1, 1], [32, 1, 1]);
        let greedy = LaunchDims { shared_bytes: 1 << 20, ..one };
        unsupported(prepare("mapped", greedy, mapped()), "bytes of shared memory a block");
        let in_clusters = |blocks: u32, grid: u32| LaunchDims {
            cluster: Some([blocks, 1, 1]),
            ..LaunchDims::new([grid, 1, 1], [256, 1, 1])
        };
        if !device.clusters().unwrap() {
            unsupported(prepare("mapped", in_clusters(2, 2), mapped()), "needs clusters");
            return;
        }
        let out = device.allocate(4 * 1024).unwrap();
        let clustered = || Parameters::new().address(out.address());
        // No GPU has clusters of 64.
        unsupported(
            prepare("clustered", in_clusters(64, 64), clustered()),
            "runs no clusters of 64",
        );
        if device.facts().arch != "sm_90a" {
            return;
        }
        let dims = in_clusters(16, 32);
        prepare("clustered", dims, clustered()).unwrap().launch().unwrap();
        let mut ranks = vec![0; out.bytes()];
        out.download(&mut ranks).unwrap();
        let rank = |block: usize| u32::from_ne_bytes(ranks[4 * block..][..4].try_into().unwrap());
        assert_eq!([rank(0), rank(15), rank(16), rank(31)], [1600, 1615, 1600, 1615]);
        // Clusters that wait for each other: as many as the driver says, and one more.
        let meeting = |address| Parameters::new().address(address).address(address);
        let launch = prepare("meeting", dims, meeting(0)).unwrap();
        let mut attribute = cluster_attribute([16, 1, 1]);
        let config = launch.config(std::slice::from_mut(&mut attribute));
        let held = launch.kernel.clusters_of(&config).unwrap() as u32;
        eprintln!("{held} clusters of 16 blocks of 256 threads at once");
        assert!(held > 0);
        let together = |grid| LaunchDims { cooperative: true, ..in_clusters(16, grid) };
        unsupported(
            prepare("meeting", together(16 * (held + 1)), meeting(0)),
            "clusters of 16 blocks have to run at once",
        );
        let (count, met) =
            (device.upload(&[0; 4]).unwrap(), device.allocate(4 * 16 * held as usize).unwrap());
        let meeting = Parameters::new().address(count.address()).address(met.address());
        prepare("meeting", together(16 * held), meeting).unwrap().launch().unwrap();
        device.synchronize().unwrap();
        let mut words = vec![0; met.bytes()];
        met.download(&mut words).unwrap();
        assert!(words.chunks(4).all(|word| word == [1, 0, 0, 0]));
    }
}
