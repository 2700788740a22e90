//! Launches that are settled before anything is timed: dimensions, attributes and parameters, of
//! any number and size.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::device::Device;
use super::kernel::Kernel;
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
    /// When the dimensions are none that a launch can have, the parameters are not the kernel's, or
    /// the device has less shared memory; [`BackendError::Unsupported`] where blocks that wait for
    /// each other are more than the device holds.
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
        if dims.shared_bytes > 0 {
            kernel.allow_shared(dims.shared_bytes)?;
        }
        if dims.cooperative {
            let threads = LaunchDims::count(dims.block) as u32;
            let a_multiprocessor = kernel.blocks_held(threads, dims.shared_bytes)?;
            let held = a_multiprocessor as u64 * u64::from(device.facts().multiprocessors);
            let needed = LaunchDims::count(dims.grid);
            if needed > held {
                return Err(BackendError::Unsupported(format!(
                    "its {needed} blocks have to run at once, this GPU runs {held}"
                )));
            }
        }
        Ok(Self { kernel, dims, parameters })
    }

    /// Enqueues it; returns before it has run.
    ///
    /// # Errors
    /// When the driver refuses; the error names the kernel.
    pub fn launch(&self) -> Result<(), BackendError> {
        let LaunchDims { grid, block, shared_bytes, cluster, cooperative, programmatic } =
            self.dims;
        self.kernel.note_launch();
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let cluster = cluster.map(|[x, y, z]| {
            let dims = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attribute(id, sys::CUlaunchAttributeValue { clusterDim: dims })
        });
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
        let config = sys::CUlaunchConfig {
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
        };
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

        if device.facts().arch.starts_with("sm_9") || device.facts().arch.starts_with("sm_1") {
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
}
