//! Tests of prepared launches with every kind of argument and attribute, and of launches that a GPU
//! cannot run.

use super::*;
use crate::Source;
use crate::testing::lock_first_gpu;

const LAUNCH_TEST_KERNELS_SOURCE: &str = r#"
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
__device__ void tell_cluster(unsigned* out) {
  unsigned rank, count;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  if (threadIdx.x == 0) out[blockIdx.x] = 100 * count + rank;
}
extern "C" __global__ void clustered(unsigned* out) { tell_cluster(out); }
extern "C" __global__ void __cluster_dims__(2, 1, 1) compiled_in_pairs(unsigned* out) {
  tell_cluster(out);
}
#endif
"#;

#[test]
fn launches_with_every_kind_of_attribute_run() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let names: Vec<String> = (0..100).map(|i| format!("float a{i}")).collect();
    let sum: Vec<String> = (0..100).map(|i| format!("a{i}")).collect();
    let defines = [format!("MANY={}", names.join(",")), format!("SUM={}", sum.join("+"))];
    let build = Source::new("prepared", LAUNCH_TEST_KERNELS_SOURCE)
        .with_macros(&[&defines[0], &defines[1]]);
    let prepare = |symbol, dims, parameters| {
        PreparedLaunch::check_and_prepare(
            &device,
            device.load_kernel(&build, symbol).unwrap(),
            dims,
            parameters,
        )
    };
    let multiprocessors = device.gpu_properties().multiprocessor_count;
    let words = |buffer: &crate::DeviceBuffer| {
        let mut bytes = vec![0; buffer.size_in_bytes()];
        buffer.download_first_bytes(&mut bytes).unwrap();
        bytes
    };
    let one = Launch::new([1, 1, 1], [1, 1, 1]);

    let out = device.allocate(4).unwrap();
    let many = (0..100)
        .fold(KernelArgumentList::new().with_address(out.device_address()), |parameters, i| {
            parameters.with_value(i as f32)
        });
    prepare("many", one, many).unwrap().enqueue().unwrap();
    assert_eq!(f32::from_ne_bytes(words(&out).try_into().unwrap()), 4950.0);

    let out = device.allocate(128).unwrap();
    let map: Vec<u8> = (1..=16u64).flat_map(u64::to_ne_bytes).collect();
    let mapped =
        KernelArgumentList::new().with_struct_bytes(&map).with_address(out.device_address());
    let dims = Launch::new([2, 3, 2], [4, 2, 2]);
    prepare("mapped", dims, mapped).unwrap().enqueue().unwrap();
    assert_eq!(words(&out), map);

    let dims = Launch { cooperative: true, ..Launch::new([multiprocessors, 1, 1], [32, 1, 1]) };
    let (count, out) =
        (device.upload(&[0; 4]).unwrap(), device.allocate(4 * multiprocessors as usize).unwrap());
    let meeting = KernelArgumentList::new()
        .with_address(count.device_address())
        .with_address(out.device_address());
    prepare("meeting", dims, meeting.clone()).unwrap().enqueue().unwrap();
    device.synchronize().unwrap();
    assert!(words(&out).chunks(4).all(|word| word == [1, 0, 0, 0]));
    let crowd = Launch { grid: [1 << 20, 1, 1], ..dims };
    let refused = prepare("meeting", crowd, meeting).err();
    assert!(matches!(refused, Some(BackendError::Unsupported(_))), "{refused:?}");

    if device.supports_thread_block_clusters().unwrap() {
        let out = device.allocate(16).unwrap();
        let dims = Launch {
            cluster: Some([2, 1, 1]),
            programmatic_dependent_launch: true,
            ..Launch::new([4, 1, 1], [32, 1, 1])
        };
        let clustered = || KernelArgumentList::new().with_address(out.device_address());
        let ranks = |launch: PreparedLaunch| {
            out.overwrite_first_bytes_from_host(&[0; 16]).unwrap();
            launch.enqueue().unwrap();
            let written = words(&out);
            let rank = |word: &[u8]| u32::from_ne_bytes(word.try_into().unwrap());
            written.chunks(4).map(rank).collect::<Vec<u32>>()
        };
        let pairs = [200, 201, 200, 201];
        assert_eq!(ranks(prepare("clustered", dims, clustered()).unwrap()), pairs);
        // A kernel that was compiled for clusters runs whether or not the launch states the same
        // cluster size.
        for cluster in [None, dims.cluster] {
            let dims = Launch { cluster, ..dims };
            let launch = prepare("compiled_in_pairs", dims, clustered()).unwrap();
            assert_eq!(ranks(launch), pairs, "{cluster:?}");
        }
        let refused = |dims, words: &str| {
            let error = prepare("compiled_in_pairs", dims, clustered()).err();
            assert!(
                matches!(&error, Some(BackendError::ComputationFailed(why)) if why.contains(words)),
                "{error:?}"
            );
        };
        let others = Launch { cluster: Some([4, 1, 1]), ..dims };
        refused(others, "it was compiled for clusters of [2, 1, 1] blocks");
        let odd = Launch { cluster: None, grid: [3, 1, 1], ..dims };
        refused(odd, "clusters of [2, 1, 1] do not divide a grid of [3, 1, 1]");
    }
}

#[test]
fn launches_that_the_gpu_cannot_run_are_reported_as_unsupported() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let build =
        Source::new("prepared", LAUNCH_TEST_KERNELS_SOURCE).with_macros(&["MANY=int a", "SUM=a"]);
    let prepare = |symbol, dims, parameters| {
        PreparedLaunch::check_and_prepare(
            &device,
            device.load_kernel(&build, symbol).unwrap(),
            dims,
            parameters,
        )
    };
    let unsupported = |launch: Result<PreparedLaunch, BackendError>, words: &str| {
        let error = launch.err();
        assert!(
            matches!(&error, Some(BackendError::Unsupported(why)) if why.contains(words)),
            "{error:?}"
        );
    };
    let mapped = || KernelArgumentList::new().with_struct_bytes(&[0; 128]).with_address(0);
    let one = Launch::new([1, 1, 1], [32, 1, 1]);
    let greedy = Launch { dynamic_shared_bytes: 1 << 20, ..one };
    unsupported(prepare("mapped", greedy, mapped()), "bytes of shared memory a block");
    let in_clusters = |blocks: u32, grid: u32| Launch {
        cluster: Some([blocks, 1, 1]),
        ..Launch::new([grid, 1, 1], [256, 1, 1])
    };
    if !device.supports_thread_block_clusters().unwrap() {
        unsupported(prepare("mapped", in_clusters(2, 2), mapped()), "needs clusters");
        return;
    }
    let out = device.allocate(4 * 1024).unwrap();
    let clustered = || KernelArgumentList::new().with_address(out.device_address());
    // No GPU supports clusters of 64 blocks.
    unsupported(prepare("clustered", in_clusters(64, 64), clustered()), "runs no clusters of 64");
    if device.gpu_properties().kernel_architecture != "sm_90a" {
        return;
    }
    let dims = in_clusters(16, 32);
    prepare("clustered", dims, clustered()).unwrap().enqueue().unwrap();
    let mut ranks = vec![0; out.size_in_bytes()];
    out.download_first_bytes(&mut ranks).unwrap();
    let rank = |block: usize| u32::from_ne_bytes(ranks[4 * block..][..4].try_into().unwrap());
    assert_eq!([rank(0), rank(15), rank(16), rank(31)], [1600, 1615, 1600, 1615]);
    // The largest number of clusters that the driver reports can wait for each other; one cluster
    // more is refused.
    let meeting = |address| KernelArgumentList::new().with_address(address).with_address(address);
    let launch = prepare("meeting", dims, meeting(0)).unwrap();
    let held = launch.kernel.max_clusters_at_once(&launch.launch, [16, 1, 1]).unwrap() as u32;
    eprintln!("{held} clusters of 16 blocks of 256 threads at once");
    assert!(held > 0);
    let together = |grid| Launch { cooperative: true, ..in_clusters(16, grid) };
    unsupported(
        prepare("meeting", together(16 * (held + 1)), meeting(0)),
        "clusters of 16 blocks have to run at once",
    );
    let (count, met) =
        (device.upload(&[0; 4]).unwrap(), device.allocate(4 * 16 * held as usize).unwrap());
    let meeting = KernelArgumentList::new()
        .with_address(count.device_address())
        .with_address(met.device_address());
    prepare("meeting", together(16 * held), meeting).unwrap().enqueue().unwrap();
    device.synchronize().unwrap();
    let mut words = vec![0; met.size_in_bytes()];
    met.download_first_bytes(&mut words).unwrap();
    assert!(words.chunks(4).all(|word| word == [1, 0, 0, 0]));
}
