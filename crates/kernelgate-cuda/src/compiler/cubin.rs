//! Reads the registers, spills, stack, shared memory and instruction mix of a kernel from its cubin
//! (an ELF file) and from the log of the assembler ptxas. Reading these facts needs no tool of the
//! CUDA toolkit.

use std::collections::BTreeMap;

use object::{Object, ObjectSection, ObjectSymbol};
use serde::{Deserialize, Serialize};

/// Static facts of one compiled kernel: registers, stack, spills, shared memory and instructions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompiledKernelResources {
    /// Registers a thread.
    #[serde(rename = "registers")]
    pub registers_per_thread: u32,
    /// Bytes of local memory that a thread uses as its stack.
    #[serde(rename = "stack_bytes")]
    pub stack_bytes_per_thread: u32,
    /// Bytes that a thread writes to local memory because registers do not suffice.
    pub spill_store_bytes: u32,
    /// Bytes that a thread reads back from local memory because registers did not suffice.
    pub spill_load_bytes: u32,
    /// Bytes of static shared memory of a thread block.
    #[serde(rename = "shared_bytes")]
    pub static_shared_bytes: u32,
    /// Instructions, padding not counted.
    #[serde(rename = "instructions")]
    pub instruction_count: u32,
    /// Number of instructions of each class, such as "fp32" or "load_global"; classes without
    /// instructions are absent.
    #[serde(rename = "mix")]
    pub instruction_count_by_class: BTreeMap<String, u32>,
    /// The performance loss that the assembler reports with its reason, such as serialised tensor
    /// instructions (`wgmma`); `None` if it reports none. With serialised tensor instructions, the
    /// kernel's results are correct but the kernel is several times slower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "performance_loss")]
    pub performance_loss_warning: Option<String>,
}

/// The reason why the facts of a cubin's kernels cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CubinReadError {
    /// The bytes are not an ELF file that can be parsed.
    #[error("unreadable cubin: {0}")]
    InvalidElf(String),
    /// The cubin lacks the machine code or the register count of a kernel that it lists.
    #[error("cubin holds no {missing_part} of kernel {kernel_symbol}")]
    MissingPartOfKernel {
        /// The part that the cubin lacks: "code" or "register count".
        missing_part: &'static str,
        /// Symbol of the kernel.
        kernel_symbol: String,
    },
}

/// Numbers of two attributes in the cubin's section `.nv.info`: registers and frame size (stack) of
/// a function, by symbol index.
const NV_INFO_REGISTER_COUNT_ATTRIBUTE: u8 = 0x2f;
const NV_INFO_FRAME_SIZE_ATTRIBUTE: u8 = 0x11;
/// Format byte of the attributes in a cubin's section `.nv.info` whose payload has a stated size.
const NV_INFO_SIZED_ATTRIBUTE_FORMAT: u8 = 0x04;
/// Size in bytes of a machine instruction on GPUs since Volta.
const MACHINE_INSTRUCTION_BYTES: usize = 16;

/// The resources of every kernel in a cubin, by symbol. `log` is the log of NVRTC with the report
/// of the assembler.
///
/// # Errors
/// Fails if the bytes are not a cubin, or if the code or the register count of a kernel is missing.
pub fn resources_of_kernels_in_cubin(
    cubin: &[u8],
    log: &str,
) -> Result<BTreeMap<String, CompiledKernelResources>, CubinReadError> {
    let elf = object::File::parse(cubin)
        .map_err(|error| CubinReadError::InvalidElf(error.to_string()))?;
    let names: BTreeMap<u32, String> = elf
        .symbols()
        .filter_map(|symbol| Some((symbol.index().0 as u32, symbol.name().ok()?.to_owned())))
        .collect();
    let mut registers = BTreeMap::new();
    let mut frames = BTreeMap::new();
    if let Some(info) = elf.section_by_name(".nv.info").and_then(|section| section.data().ok()) {
        for (attribute, symbol, value) in parse_two_word_attributes(info) {
            let Some(name) = names.get(&symbol) else { continue };
            match attribute {
                NV_INFO_REGISTER_COUNT_ATTRIBUTE => drop(registers.insert(name.clone(), value)),
                NV_INFO_FRAME_SIZE_ATTRIBUTE => drop(frames.insert(name.clone(), value)),
                _ => {}
            }
        }
    }
    let mut facts = BTreeMap::new();
    for section in elf.sections() {
        let Some(kernel) =
            section.name().ok().and_then(|name| name.strip_prefix(".text.")).map(ToOwned::to_owned)
        else {
            continue;
        };
        let missing = |what| CubinReadError::MissingPartOfKernel {
            missing_part: what,
            kernel_symbol: kernel.clone(),
        };
        let code = section.data().map_err(|_| missing("code"))?;
        let mix = count_machine_instructions_by_class(code);
        facts.insert(
            kernel.clone(),
            CompiledKernelResources {
                registers_per_thread: *registers
                    .get(&kernel)
                    .ok_or_else(|| missing("register count"))?,
                stack_bytes_per_thread: frames.get(&kernel).copied().unwrap_or(0),
                spill_store_bytes: bytes_in_assembler_log(log, &kernel, " bytes spill stores"),
                spill_load_bytes: bytes_in_assembler_log(log, &kernel, " bytes spill loads"),
                static_shared_bytes: bytes_in_assembler_log(log, &kernel, " bytes smem"),
                instruction_count: mix.values().sum(),
                instruction_count_by_class: mix,
                performance_loss_warning: performance_loss_in_assembler_log(log, &kernel),
            },
        );
    }
    if facts.is_empty() {
        Err(CubinReadError::InvalidElf("no kernel in it".to_owned()))
    } else {
        Ok(facts)
    }
}

/// Returns (attribute, symbol index, value) for every attribute of `.nv.info` whose payload has two
/// words.
fn parse_two_word_attributes(mut info: &[u8]) -> Vec<(u8, u32, u32)> {
    let mut found = Vec::new();
    while let [format, attribute, low, high, rest @ ..] = info {
        let size = if *format == NV_INFO_SIZED_ATTRIBUTE_FORMAT {
            usize::from(u16::from_le_bytes([*low, *high]))
        } else {
            0
        };
        let Some((payload, rest)) = rest.split_at_checked(size) else { break };
        if let Some(words) = payload.first_chunk::<8>() {
            let word = |at: usize| {
                u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]])
            };
            found.push((*attribute, word(0), word(4)));
        }
        info = rest;
    }
    found
}

/// The number of bytes that the assembler's log reports before `words` for this kernel; 0 if the
/// log has no such line.
fn bytes_in_assembler_log(log: &str, kernel: &str, words: &str) -> u32 {
    let entry = format!("'{kernel}'");
    let is_entry = |line: &&str| line.contains("Compiling entry function");
    let report = log
        .lines()
        .skip_while(|line| !(is_entry(line) && line.contains(&entry)))
        .skip(1)
        .take_while(|line| !is_entry(line));
    let number = |line: &str| line.split(words).next()?.rsplit([' ', ',']).next()?.parse().ok();
    report.filter(|line| line.contains(words)).find_map(number).unwrap_or(0)
}

/// The performance loss that the assembler reports for a kernel, such as "wgmma.mma_async
/// instructions are serialized due to …".
fn performance_loss_in_assembler_log(log: &str, kernel: &str) -> Option<String> {
    let of_kernel = [format!(" in the function '{kernel}'"), format!(" in function '{kernel}'")];
    log.lines().find_map(|line| {
        let (_, loss) = line.split_once("Potential Performance Loss: ")?;
        let end = of_kernel.iter().find_map(|place| loss.find(place.as_str()))?;
        Some(loss[..end].to_owned())
    })
}

fn count_machine_instructions_by_class(code: &[u8]) -> BTreeMap<String, u32> {
    let mut mix = BTreeMap::new();
    for instruction in code.chunks_exact(MACHINE_INSTRUCTION_BYTES) {
        let opcode = u16::from_le_bytes([instruction[0], instruction[1]]) & 0x1ff;
        if let Some(class) = instruction_class_of_opcode(opcode) {
            *mix.entry(class.to_owned()).or_insert(0) += 1;
        }
    }
    mix
}

/// Class of a machine instruction, from the low nine bits of its encoding, which name the operation
/// (Volta to Blackwell); `None` for padding.
fn instruction_class_of_opcode(opcode: u16) -> Option<&'static str> {
    Some(match opcode {
        0x118 => return None,                      // NOP
        0x03c | 0x03f | 0x1f0..=0x1f7 => "tensor", // HMMA, DMMA, warpgroup MMA
        0x020 | 0x021 | 0x023 | 0x008 | 0x009 | 0x00a | 0x00b => "fp32",
        0x030 | 0x031 | 0x032 | 0x035 | 0x034 => "fp16",
        0x028..=0x02c => "fp64",
        0x108 => "special", // MUFU
        0x03e | 0x045 | 0x104 | 0x105 | 0x106 | 0x111 | 0x112 | 0x116 => "convert",
        0x002 | 0x003 | 0x004 | 0x005 | 0x007 | 0x016 | 0x082 | 0x087 | 0x0ca | 0x119 | 0x1c3 => {
            "move"
        }
        0x00c..=0x013
        | 0x019
        | 0x01c
        | 0x024..=0x027
        | 0x036
        | 0x046..=0x048
        | 0x08c..=0x099
        | 0x0a4
        | 0x0a5 => "integer",
        0x181 => "load_global",
        0x186 => "store_global",
        0x1ae | 0x1af | 0x1b2..=0x1b7 => "copy_async", // LDGSTS and bulk copies
        0x184 | 0x03b => "load_shared",                // LDS, LDSM
        0x188 | 0x044 => "store_shared",               // STS, STSM
        0x183 => "load_local",
        0x187 => "store_local",
        0x182 | 0x0b9 => "load_constant",
        0x1a6 | 0x1a8..=0x1aa | 0x18e => "atomic",
        0x189 | 0x006 | 0x086 => "warp", // SHFL, VOTE
        0x11d | 0x11a | 0x192 | 0x148 => "synchronise",
        0x141..=0x150 | 0x11b => "control",
        _ => "other",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiler::nvrtc;

    #[test]
    fn the_assemblers_log_is_read_for_the_right_kernel() {
        let log = "ptxas info    : Compiling entry function 'a' for 'sm_90a'\nptxas info    : \
                   Function properties for a\n    24 bytes stack frame, 16 bytes spill stores, 20 \
                   bytes spill loads\nptxas info    : Used 255 registers, used 1 barriers, 17408 \
                   bytes smem\nptxas info    : Compiling entry function 'b' for 'sm_90a'\n    0 \
                   bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n";
        let read = |kernel| {
            [" bytes spill stores", " bytes spill loads", " bytes smem"]
                .map(|words| bytes_in_assembler_log(log, kernel, words))
        };
        assert_eq!(read("a"), [16, 20, 17408]);
        assert_eq!(read("b"), [0, 0, 0]);
        assert_eq!(read("c"), [0, 0, 0]);
    }

    #[test]
    fn a_warning_about_serialised_wgmma_instructions_is_found() {
        let source = r#"
            extern "C" __global__ void serial(float* out, unsigned long long w, unsigned x) {
              float d[4] = {};
              for (int i = 0; i < 2; ++i) {
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                asm volatile(
                    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, "
                    "{%4,%4,%4,%4}, %5, 1, 1, 1, 0;"
                    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                    : "r"(x), "l"(w));
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            #ifdef BETWEEN
                d[0] += 1.f;  // needs the sums, of which the compiler waits for each
            #endif
              }
              asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
              out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
            }"#;
        let loss = |defined: &[&str]| {
            let options = ["--gpu-architecture=sm_90a", "--ptxas-options=-v"];
            let options: Vec<String> =
                options.iter().chain(defined).map(|&option| option.to_owned()).collect();
            match nvrtc::compile_source_text_with_nvrtc("serial", source, &[], &options, "sm_90a") {
                Err(nvrtc::KernelCompileError::NvrtcNotFound) => None,
                compiled => {
                    let compiled = compiled.unwrap();
                    let facts = resources_of_kernels_in_cubin(
                        &compiled.cubin_or_ptx,
                        &compiled.compiler_log,
                    )
                    .unwrap();
                    Some(facts["serial"].performance_loss_warning.clone())
                }
            }
        };
        let Some(warning) = loss(&["-DBETWEEN"]) else {
            eprintln!("skipped: NVRTC is missing");
            return;
        };
        let warning = warning.unwrap();
        assert!(
            warning.starts_with("wgmma.mma_async instructions are serialized due to"),
            "{warning}"
        );
        assert_eq!(loss(&[]).unwrap(), None);
    }

    #[test]
    fn unknown_attributes_of_a_cubin_are_skipped() {
        let mut info = vec![
            0x01,
            0x3f,
            0,
            0,
            NV_INFO_SIZED_ATTRIBUTE_FORMAT,
            NV_INFO_REGISTER_COUNT_ATTRIBUTE,
            8,
            0,
        ];
        info.extend([7, 0, 0, 0, 64, 0, 0, 0]);
        info.extend([NV_INFO_SIZED_ATTRIBUTE_FORMAT, NV_INFO_FRAME_SIZE_ATTRIBUTE, 8, 0, 1]);
        assert_eq!(parse_two_word_attributes(&info), [(NV_INFO_REGISTER_COUNT_ATTRIBUTE, 7, 64)]);
    }

    #[test]
    fn a_broken_cubin_is_an_error() {
        assert!(matches!(
            resources_of_kernels_in_cubin(b"not an elf file", ""),
            Err(CubinReadError::InvalidElf(_))
        ));
        assert!(matches!(
            resources_of_kernels_in_cubin(&[], ""),
            Err(CubinReadError::InvalidElf(_))
        ));
    }
}
