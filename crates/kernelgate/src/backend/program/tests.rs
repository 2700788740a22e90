//! Tests the planning of programs without a GPU: declared bytes, reuse of memory, order of lanes,
//! and mistakes. One test runs a program with every kind of step on a GPU, both on streams and as a
//! CUDA graph.

use super::*;
use crate::backend::LaunchableProblem;
use crate::workload::{Dtype, Tensors};
use kernelgate_cuda::libraries::gemm::{DEFAULT_GEMM_WORKSPACE_BYTES, GemmMatrixDtype, GemmSpec};
use kernelgate_cuda::testing::lock_first_gpu;
use kernelgate_cuda::{BackendError, KernelArgument, KernelSpec, Source};

const BLOCK_THREADS: usize = 128;

/// The kernel computes `out[i] = factor·x[i] + y[i]`; y may be null.
const SAXPY_KERNEL: KernelSpec<usize> = KernelSpec::new(
    Source::new(
        "program_saxpy",
        r#"
extern "C" __global__ void program_saxpy(const float* x, const float* y, float* out, float factor,
                                         long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = factor * x[i] + (y ? y[i] : 0.0f);
}"#,
    ),
    "program_saxpy",
    BLOCK_THREADS,
    |n| [n.div_ceil(BLOCK_THREADS), 1, 1],
);

/// The test kernel reads element `i` from the address `table[0] + i·table[1]`; the table contains
/// an address and a stride in bytes.
const STRIDED_GATHER_KERNEL: KernelSpec<usize> = KernelSpec::new(
    Source::new(
        "program_gather",
        r#"
extern "C" __global__ void program_gather(const unsigned long long* table, float* out) {
    const char* base = reinterpret_cast<const char*>(table[0]);
    out[threadIdx.x] = *reinterpret_cast<const float*>(base + threadIdx.x * table[1]);
}"#,
    ),
    "program_gather",
    4,
    |_| [1, 1, 1],
);

fn add_saxpy_launch(
    program: &mut LaunchProgram,
    lane: ProgramLane,
    n: usize,
    matrices: impl LaunchArgumentList,
    factor: f32,
) {
    let launch = program.make_kernel_launch(&SAXPY_KERNEL, &n, (matrices, factor, long_operand(n)));
    program.add_prepared_launch(launch.moved_to_lane(lane));
}

/// Adds a kernel launch to the lane that reads and writes one region.
fn add_launch_that_updates_region(
    program: &mut LaunchProgram,
    lane: ProgramLane,
    pointer: RegionPointer,
) {
    add_saxpy_launch(program, lane, 1, (pointer, NULL, pointer), 1.0);
}

const SMALL_GEMM: GemmSpec = GemmSpec::new(8, 8, 8, GemmMatrixDtype::Bf16, GemmMatrixDtype::F32);

#[test]
fn device_bytes_count_regions_and_gemm_workspaces() {
    let mut program = LaunchProgram::new();
    let x = program.add_input("x", MemoryPurpose::Inputs, 128);
    let w = program.add_packed_from_inputs("w", MemoryPurpose::Weights, 128, |_| vec![0; 128]);
    let y = program.add_scratch("y", MemoryPurpose::Activations, 256);
    program.add_table_of_numbers_and_addresses(
        "list",
        MemoryPurpose::Workspace,
        vec![TableNumberOrAddress::Number(1), x.into()],
    );
    program.add_output("out", [3, 5], Dtype::F32);
    assert_eq!(program.device_bytes(), 128 + 128 + 256 + 16 + 60);
    let side = program.add_lane();
    assert_eq!(program.device_bytes(), 588, "a lane without GEMMs needs no workspace");
    program.add_gemm(ProgramLane::MAIN_LANE, SMALL_GEMM, [x, w, y]);
    program.make_lane_wait_for_lane(side, ProgramLane::MAIN_LANE);
    program.add_gemm(side, SMALL_GEMM, [x, w, y]);
    program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, side);
    assert_eq!(program.check(), Ok(()));
    let workspaces = 2 * DEFAULT_GEMM_WORKSPACE_BYTES as u64;
    assert_eq!(program.device_bytes(), 588 + workspaces);
    let table = [
        ("weights", 128),
        ("activations", 256),
        ("workspace", 16 + workspaces),
        ("inputs and outputs", 188),
    ];
    assert_eq!(program.device_bytes_by_purpose_label(), table);
}

#[test]
fn scratch_reuses_the_smallest_freed_memory_of_its_purpose() {
    let mut program = LaunchProgram::new();
    let large = program.add_scratch("large", MemoryPurpose::Workspace, 1000);
    let small = program.add_scratch("small", MemoryPurpose::Workspace, 100);
    program.add_scratch("kept", MemoryPurpose::Workspace, 10);
    add_launch_that_updates_region(&mut program, ProgramLane::MAIN_LANE, large);
    program.free_scratch(large);
    program.free_scratch(small);
    program.add_scratch("next", MemoryPurpose::Workspace, 90);
    assert_eq!(program.device_bytes(), 1110, "90 bytes fit into 100");
    program.add_scratch("other use", MemoryPurpose::Activations, 50);
    assert_eq!(program.device_bytes(), 1160);
    program.add_scratch("too large", MemoryPurpose::Workspace, 2000);
    assert_eq!(program.device_bytes(), 3160);
    let again = program.add_scratch("large", MemoryPurpose::Workspace, 1000);
    add_launch_that_updates_region(&mut program, ProgramLane::MAIN_LANE, again);
    assert_eq!(program.device_bytes(), 3160, "a freed name and its memory are there again");
    assert_eq!(program.check(), Ok(()));
}

#[test]
fn reuse_of_memory_by_an_unordered_lane_is_an_error() {
    let write = |ordered: bool| {
        let mut program = LaunchProgram::new();
        let side = program.add_lane();
        let first = program.add_scratch("first", MemoryPurpose::Workspace, 64);
        program.make_lane_wait_for_lane(side, ProgramLane::MAIN_LANE);
        add_launch_that_updates_region(&mut program, side, first);
        program.free_scratch(first);
        if ordered {
            program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, side);
        }
        let second = program.add_scratch("second", MemoryPurpose::Workspace, 64);
        add_launch_that_updates_region(&mut program, ProgramLane::MAIN_LANE, second);
        program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, side);
        assert_eq!(program.device_bytes(), 64);
        program.check()
    };
    assert_eq!(write(true), Ok(()));
    let region = "second".to_owned();
    assert_eq!(write(false), Err(LaunchListError::UnorderedMemoryReuse { region, lane_number: 1 }));
}

#[test]
fn using_a_freed_region_is_an_error() {
    let mut program = LaunchProgram::new();
    let region = program.add_scratch("hidden", MemoryPurpose::Activations, 64);
    add_launch_that_updates_region(&mut program, ProgramLane::MAIN_LANE, region);
    program.free_scratch(region);
    add_launch_that_updates_region(&mut program, ProgramLane::MAIN_LANE, region);
    let region = "hidden".to_owned();
    assert_eq!(program.check(), Err(LaunchListError::RegionUsedAfterFree { region }));
}

#[test]
fn a_pointer_past_the_end_of_its_region_is_an_error() {
    let mut program = LaunchProgram::new();
    let region = program.add_scratch("hidden", MemoryPurpose::Activations, 64);
    add_launch_that_updates_region(
        &mut program,
        ProgramLane::MAIN_LANE,
        region.offset_by(63).moved_back_by(1000),
    );
    assert_eq!(program.check(), Ok(()), "skipped elements may lie before the region");
    add_launch_that_updates_region(&mut program, ProgramLane::MAIN_LANE, region.offset_by(64));
    let outside = LaunchListError::PointerOutsideRegion {
        region_name: "hidden".to_owned(),
        offset_bytes: 64,
        region_bytes: 64,
    };
    assert_eq!(program.check(), Err(outside));
}

#[test]
fn a_copy_or_a_fill_past_the_end_of_its_region_is_an_error() {
    let mistake = |write: fn(&mut LaunchProgram, RegionPointer, RegionPointer)| {
        let mut program = LaunchProgram::new();
        let from = program.add_scratch("from", MemoryPurpose::Workspace, 64);
        let to = program.add_scratch("to", MemoryPurpose::Workspace, 32);
        write(&mut program, from, to);
        program.check().is_err()
    };
    assert!(!mistake(|program, from, to| program.add_device_copy(
        ProgramLane::MAIN_LANE,
        from.offset_by(32),
        to,
        32
    )));
    assert!(mistake(|program, from, to| program.add_device_copy(
        ProgramLane::MAIN_LANE,
        from,
        to,
        33
    )));
    assert!(!mistake(|program, _, to| program.add_byte_fill(ProgramLane::MAIN_LANE, to, 32, 0)));
    assert!(mistake(|program, _, to| program.add_byte_fill(
        ProgramLane::MAIN_LANE,
        to.offset_by(1),
        32,
        0
    )));
}

#[test]
fn unknown_and_repeated_region_names_are_errors() {
    let mut program = LaunchProgram::new();
    program.add_scratch("a", MemoryPurpose::Workspace, 4);
    program.add_scratch("a", MemoryPurpose::Workspace, 4);
    assert_eq!(
        program.check(),
        Err(LaunchListError::DuplicateRegion { region_name: "a".to_owned() })
    );
    let mut program = LaunchProgram::new();
    let pointer = program.pointer_to("b");
    add_launch_that_updates_region(&mut program, ProgramLane::MAIN_LANE, pointer);
    assert_eq!(
        program.check(),
        Err(LaunchListError::UnknownRegion { region_name: "b".to_owned() })
    );
    assert_eq!(program.pointer_if_declared("b"), None);
}

#[test]
fn only_scratch_that_no_table_points_into_is_freed() {
    let freed = |declare: fn(&mut LaunchProgram) -> RegionPointer| {
        let mut program = LaunchProgram::new();
        let pointer = declare(&mut program);
        program.free_scratch(pointer);
        program.check().is_ok()
    };
    let scratch =
        |program: &mut LaunchProgram| program.add_scratch("a", MemoryPurpose::Workspace, 8);
    assert!(freed(scratch));
    assert!(!freed(|program| program.add_input("a", MemoryPurpose::Inputs, 8)));
    assert!(!freed(|program| program.add_output("a", [2], Dtype::F32)));
    assert!(!freed(|program| {
        let pointer = program.add_scratch("a", MemoryPurpose::Workspace, 8);
        program.add_table_of_numbers_and_addresses(
            "list",
            MemoryPurpose::Workspace,
            vec![pointer.into()],
        );
        pointer
    }));
}

#[test]
fn side_lanes_must_wait_for_the_first_lane_and_be_awaited() {
    let write = |fork: bool, join: bool| {
        let mut program = LaunchProgram::new();
        let side = program.add_lane();
        let region = program.add_scratch("a", MemoryPurpose::Workspace, 4);
        if fork {
            program.make_lane_wait_for_lane(side, ProgramLane::MAIN_LANE);
        }
        add_launch_that_updates_region(&mut program, side, region);
        if join {
            program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, side);
        }
        program.check()
    };
    assert_eq!(write(true, true), Ok(()));
    assert_eq!(write(false, true), Err(LaunchListError::LaneNotForked { lane: 1 }));
    assert_eq!(write(true, false), Err(LaunchListError::LaneNotJoined { lane: 1 }));
}

#[test]
fn named_ranges_of_a_program_must_nest() {
    let mut program = LaunchProgram::new();
    program.add_steps_in_named_range("outer", |program| {
        program.add_steps_in_named_range("inner", |_| {})
    });
    assert_eq!(program.check(), Ok(()));
    program.begin_named_range("open");
    assert_eq!(
        program.check(),
        Err(LaunchListError::RangeNotEnded { range_name: "open".to_owned() })
    );
    program.end_innermost_range();
    program.end_innermost_range();
    assert_eq!(program.check(), Err(LaunchListError::NoOpenRange));
}

#[test]
fn a_gemm_that_writes_uploaded_contents_is_an_error() {
    let mut program = LaunchProgram::new();
    let [x, y] = ["x", "y"].map(|name| program.add_input(name, MemoryPurpose::Inputs, 256));
    program.add_gemm(ProgramLane::MAIN_LANE, SMALL_GEMM, [x, x, y]);
    let region = "y".to_owned();
    assert_eq!(program.check(), Err(LaunchListError::GemmOverwritesContents { region }));
}

#[test]
fn keeping_l2_lines_without_a_declared_range_is_an_error() {
    let mut program = LaunchProgram::new();
    let x = program.add_scratch("x", MemoryPurpose::Workspace, 64);
    let launch = |program: &LaunchProgram| {
        let launch = program.make_kernel_launch(
            &SAXPY_KERNEL,
            &1,
            ("x", NULL, "x", 1.0f32, long_operand(1)),
        );
        launch.with_kept_or_released_l2_lines(KeepOrReleaseL2Lines::MarkL2LinesPersisting)
    };
    program.keep_range_in_l2(x, 64);
    program.add_prepared_launch(launch(&program));
    assert_eq!(program.check(), Ok(()));
    let mut program = LaunchProgram::new();
    program.add_scratch("x", MemoryPurpose::Workspace, 64);
    program.add_prepared_launch(launch(&program));
    let symbol = "program_saxpy";
    assert_eq!(program.check(), Err(LaunchListError::NoRangeKeptInL2 { kernel_symbol: symbol }));
}

#[test]
fn packed_contents_must_have_the_declared_size() {
    let inputs = Tensors::new().with_tensor("x", [2], vec![1.0f32, 2.0]);
    let mut program = LaunchProgram::new();
    let x = program.add_input("x", MemoryPurpose::Inputs, 8);
    let w = program.add_packed_from_inputs("w", MemoryPurpose::Weights, 2, |inputs| {
        inputs.f32_elements("x").iter().map(|value| *value as u8).collect()
    });
    let short = program.add_packed_from_inputs("short", MemoryPurpose::Weights, 3, |_| vec![0; 2]);
    let scratch = program.add_scratch("scratch", MemoryPurpose::Workspace, 8);
    assert_eq!(program.initial_bytes_of_region(x, &inputs).unwrap().unwrap().len(), 8);
    assert_eq!(&*program.initial_bytes_of_region(w, &inputs).unwrap().unwrap(), [1, 2]);
    assert_eq!(program.initial_bytes_of_region(scratch, &inputs), Ok(None));
    let region = "short".to_owned();
    let mistake =
        LaunchListError::ContentsSizeMismatch { region, declared_bytes: 3, found_bytes: 2 };
    assert_eq!(program.initial_bytes_of_region(short, &inputs), Err(mistake));
}

/// Writes a test program with every kind of step except GEMMs: it computes `out = 2·x + 3·x` with
/// the second term in a side lane, copies the result, and gathers every second element by a table.
fn program_of_every_step(n: usize) -> LaunchProgram {
    let mut program = LaunchProgram::new();
    let bytes = 4 * n;
    let x = program.add_input("x", MemoryPurpose::Inputs, bytes);
    let [double, triple, copied] = ["double", "triple", "copied"]
        .map(|name| program.add_scratch(name, MemoryPurpose::Activations, bytes));
    let sum = program.add_output("sum", [n], Dtype::F32);
    let few = program.add_output("few", [4], Dtype::F32);
    let table = vec![triple.into(), TableNumberOrAddress::Number(8)];
    let table =
        program.add_table_of_numbers_and_addresses("table", MemoryPurpose::Workspace, table);
    let side = program.add_lane();
    program.make_lane_wait_for_lane(side, ProgramLane::MAIN_LANE);
    program.add_steps_in_named_range("Terms", |program| {
        add_saxpy_launch(program, ProgramLane::MAIN_LANE, n, (x, NULL, double), 2.0);
        add_saxpy_launch(program, side, n, (x, NULL, triple), 3.0);
        program.add_device_copy(side, triple, copied, bytes);
    });
    program.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, side);
    let call = [double, copied, sum];
    program.add_launch_of_other_code(
        ProgramLane::MAIN_LANE,
        &call,
        move |DeviceStreamAndAddresses { device, stream, device_addresses: addresses }| {
            let kernel =
                SAXPY_KERNEL.compile_and_load(device, &n)?.clone_launching_on_stream(stream);
            let [x, y, out] =
                [0, 1, 2].map(|index| KernelArgument::DeviceAddress(addresses[index]));
            let arguments = [x, y, out, KernelArgument::F32(1.0), KernelArgument::I64(n as i64)];
            Ok(Box::new(move || kernel.launch_with(&arguments)))
        },
    );
    program.add_launch(&STRIDED_GATHER_KERNEL, &4, (table, few));
    program.add_byte_fill(ProgramLane::MAIN_LANE, few.offset_by(4), 4, 0);
    program
}

#[test]
fn every_step_runs_on_streams_and_as_a_graph() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let n = 1000;
    let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let inputs = Tensors::new().with_tensor("x", [n], x.clone());
    for capture in [ProgramLaunchMode::StepByStep, ProgramLaunchMode::CapturedGraph] {
        let mut task = program_of_every_step(n).into_task(&device, &inputs, capture).unwrap();
        assert_eq!(task.names_of_inputs_read_by_launches(), ["x"]);
        for _ in 0..2 {
            task.poison_outputs().unwrap();
            task.launch_once().unwrap();
            task.wait_for_launches().unwrap();
            let outputs = task.outputs_on_host().unwrap();
            let sum: Vec<f32> = x.iter().map(|x| 5.0 * x).collect();
            assert_eq!(outputs.f32_elements("sum"), sum, "{capture:?}");
            assert_eq!(outputs.f32_elements("few"), [0.0, 0.0, 12.0, 18.0], "{capture:?}");
        }
    }
}

/// Each launch of the test program computes `x = 2·x + copy` and then `copy = x`.
fn program_that_updates_a_state(n: usize) -> LaunchProgram {
    let mut program = LaunchProgram::new();
    let x =
        program.add_state_updated_in_place("x", "next", MemoryPurpose::Weights, [n], Dtype::F32);
    let copy = program.add_packed_from_inputs("copy", MemoryPurpose::Weights, 4 * n, |inputs| {
        inputs.tensor("x").as_bytes().to_vec()
    });
    program.mark_packed_contents_updated(copy);
    add_saxpy_launch(&mut program, ProgramLane::MAIN_LANE, n, (x, copy, x), 2.0);
    program.add_device_copy(ProgramLane::MAIN_LANE, x, copy, 4 * n);
    program
}

#[test]
fn a_state_and_its_output_share_memory() {
    let program = program_that_updates_a_state(6);
    assert_eq!(program.check(), Ok(()));
    assert_eq!(program.device_bytes_by_purpose_label(), [("weights", 48)]);
    let inputs = Tensors::new().with_tensor("x", [6], vec![1.0f32; 6]);
    for name in ["x", "copy"] {
        assert!(
            program.initial_bytes_of_region(program.pointer_to(name), &inputs).unwrap().is_some()
        );
    }
}

#[test]
fn launches_continue_the_state_until_outputs_are_poisoned() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let inputs = Tensors::new().with_tensor("x", [1000], x.clone());
    for capture in [ProgramLaunchMode::StepByStep, ProgramLaunchMode::CapturedGraph] {
        let mut task =
            program_that_updates_a_state(1000).into_task(&device, &inputs, capture).unwrap();
        assert!(task.launches_carry_state() && task.names_of_inputs_read_by_launches().is_empty());
        for _ in 0..2 {
            task.poison_outputs().unwrap();
            for factor in [3.0, 9.0] {
                task.reset_state().unwrap();
                task.launch_once().unwrap();
                task.wait_for_launches().unwrap();
                let expected: Vec<f32> = x.iter().map(|x| factor * x).collect();
                assert_eq!(
                    task.outputs_on_host().unwrap().f32_elements("next"),
                    expected,
                    "{capture:?}"
                );
            }
        }
    }
}

#[test]
fn a_mistake_is_reported_before_memory_is_allocated() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let mut program = program_of_every_step(8);
    program.begin_named_range("open");
    let refused = program.into_task(&device, &Tensors::new(), ProgramLaunchMode::StepByStep).err();
    let expected = "launch failed: range `open` does not end";
    assert_eq!(refused.map(|error: BackendError| error.to_string()).as_deref(), Some(expected));
}
