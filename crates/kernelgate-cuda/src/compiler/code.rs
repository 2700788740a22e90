//! Identity of a kernel's machine code: a hash by which the kernels of two builds are compared, and
//! facts read from the machine code.
//!
//! The hash covers all that the GPU executes and reads: instructions, constants and their
//! addresses, and the sizes of shared and global memory. The hash excludes symbol tables, notes,
//! debug sections and the other kernels of the cubin.

use std::collections::{BTreeMap, BTreeSet};

use object::elf::SHF_ALLOC;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionFlags};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use super::cubin::{self, CompiledKernelResources, CubinReadError};

/// Identity of a kernel's machine code (hash), and facts that were read from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineCodeOfKernel {
    /// Hexadecimal hash of the kernel's machine code, or of its PTX if it was compiled to PTX.
    #[serde(rename = "hash")]
    pub machine_code_hash: String,
    /// Facts read from the machine code (registers, stack), without those that only the assembler
    /// reports (spills, static shared memory); `None` for PTX.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<CompiledKernelResources>,
}

/// The hash and the facts of one kernel in a cubin or in PTX; `None` if the image cannot be read or
/// lacks the kernel.
pub fn machine_code_of_kernel_in_image(image: &[u8], symbol: &str) -> Option<MachineCodeOfKernel> {
    if image.starts_with(b"\x7fELF") {
        let hash = machine_code_hashes_of_cubin(image).ok()?.remove(symbol)?;
        let facts = cubin::resources_of_kernels_in_cubin(image, "").ok()?.remove(symbol)?;
        return Some(MachineCodeOfKernel { machine_code_hash: hash, facts: Some(facts) });
    }
    let text = String::from_utf8_lossy(image);
    let mut hasher = Xxh3Default::new();
    // Comments of the PTX are ignored, because they contain the build number of the compiler.
    let lines = text.lines().filter(|line| !line.starts_with("//"));
    lines.for_each(|line| hash_length_and_bytes(&mut hasher, line.as_bytes()));
    text.contains(symbol).then(|| MachineCodeOfKernel {
        machine_code_hash: hash_as_hexadecimal(&hasher),
        facts: None,
    })
}

/// The hash of the machine code of every kernel in a cubin, by symbol.
///
/// # Errors
/// Fails if the given bytes are not a cubin.
pub fn machine_code_hashes_of_cubin(
    cubin: &[u8],
) -> Result<BTreeMap<String, String>, CubinReadError> {
    let failed = |error: object::Error| CubinReadError::InvalidElf(error.to_string());
    let elf = object::File::parse(cubin).map_err(failed)?;
    let mut sections = Vec::new();
    for section in elf.sections() {
        let name = section.name().map_err(failed)?.to_owned();
        // Only ELF sections that are loaded onto the GPU influence the execution.
        if is_section_loaded_onto_gpu(&section) {
            sections.push((name, section));
        }
    }
    sections.sort_by(|a, b| a.0.cmp(&b.0));
    let kernels: BTreeSet<&str> =
        sections.iter().filter_map(|(name, _)| name.strip_prefix(".text.")).collect();
    let owner = |name: &str| {
        kernels.iter().copied().find(|kernel| {
            name.strip_suffix(kernel).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
        })
    };
    let mut hashes = BTreeMap::new();
    for kernel in &kernels {
        let mut hasher = Xxh3Default::new();
        for (name, section) in &sections {
            // ELF sections that belong to the whole module count for each of its kernels.
            if owner(name).is_some_and(|owner| owner != *kernel) {
                continue;
            }
            hash_length_and_bytes(&mut hasher, name.as_bytes());
            hash_length_and_bytes(&mut hasher, &section.size().to_le_bytes());
            hash_length_and_bytes(&mut hasher, section.data().map_err(failed)?);
            for (offset, relocation) in section.relocations() {
                hash_length_and_bytes(&mut hasher, &offset.to_le_bytes());
                hash_length_and_bytes(&mut hasher, &relocation.addend().to_le_bytes());
                if let RelocationTarget::Symbol(index) = relocation.target() {
                    let symbol = elf.symbol_by_index(index).map_err(failed)?;
                    hash_length_and_bytes(&mut hasher, symbol.name().map_err(failed)?.as_bytes());
                }
            }
        }
        hashes.insert((*kernel).to_owned(), hash_as_hexadecimal(&hasher));
    }
    Ok(hashes)
}

/// Whether an ELF section is loaded onto the GPU.
fn is_section_loaded_onto_gpu<'data>(section: &impl ObjectSection<'data>) -> bool {
    let SectionFlags::Elf { sh_flags, .. } = section.flags() else { return false };
    sh_flags.0 & SHF_ALLOC.0 != 0
}

/// Adds the length and the bytes to the hash, so that adjacent byte strings cannot be confused.
fn hash_length_and_bytes(hasher: &mut Xxh3Default, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

fn hash_as_hexadecimal(hasher: &Xxh3Default) -> String {
    format!("{:032x}", hasher.digest128())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiler::nvrtc::{self, KernelCompileError};

    const TWO_TEST_KERNELS_SOURCE: &str = r#"
        __constant__ float table[4] = {1, 2, 3, 4};
        __device__ __noinline__ float helper(float x) { return x * table[(int)x & 3]; }
        extern "C" __global__ void reads(float* x) { x[threadIdx.x] = helper(x[threadIdx.x]); }
        extern "C" __global__ void other(float* x) { x[0] = 2 * x[0]; }
    "#;

    /// Compiles a source text with the two kernels `reads` and `other`; `None` without NVRTC.
    fn compile_two_test_kernels(text: &str, name: &str) -> Option<[MachineCodeOfKernel; 2]> {
        let options = ["--gpu-architecture=sm_90a".to_owned()];
        match nvrtc::compile_source_text_with_nvrtc(name, text, &[], &options, "sm_90a") {
            Ok(compiled) => Some(
                ["reads", "other"]
                    .map(|it| machine_code_of_kernel_in_image(&compiled.cubin_or_ptx, it).unwrap()),
            ),
            Err(KernelCompileError::NvrtcNotFound) => {
                println!("skipped: NVRTC is missing");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn the_machine_code_hash_covers_only_what_the_gpu_executes() {
        let Some([reads, other]) = compile_two_test_kernels(TWO_TEST_KERNELS_SOURCE, "a") else {
            return;
        };
        let facts = reads.facts.as_ref().unwrap();
        assert!(facts.registers_per_thread > 0 && facts.instruction_count > 0, "{facts:?}");
        let commented = compile_two_test_kernels(
            &format!("// a comment\n\n{TWO_TEST_KERNELS_SOURCE}"),
            "renamed",
        )
        .unwrap();
        assert_eq!(commented, [reads.clone(), other.clone()]);
        let [changed, same] = compile_two_test_kernels(
            &TWO_TEST_KERNELS_SOURCE.replace("x * table", "3 * x * table"),
            "a",
        )
        .unwrap();
        assert_ne!(changed.machine_code_hash, reads.machine_code_hash, "a function that it calls");
        assert_eq!(same, other);
        // A cubin does not state which kernel reads a constant of the module, so all kernels of the
        // module count as changed.
        let [changed, _] =
            compile_two_test_kernels(&TWO_TEST_KERNELS_SOURCE.replace("{1, 2", "{1, 7"), "a")
                .unwrap();
        assert_ne!(changed.machine_code_hash, reads.machine_code_hash, "a constant that it reads");
        assert_eq!(changed.facts, reads.facts);
    }

    #[test]
    fn the_ptx_hash_ignores_comments() {
        let code = |text: &str| machine_code_of_kernel_in_image(text.as_bytes(), "reads");
        let ptx = code("// Compiler Build ID: 1\n.entry reads { ret; }\n").unwrap();
        assert_eq!(code("// Compiler Build ID: 2\n.entry reads { ret; }\n"), Some(ptx.clone()));
        assert_ne!(
            code(".entry reads { bar.sync 0; ret; }\n").unwrap().machine_code_hash,
            ptx.machine_code_hash
        );
        assert_eq!(code(".entry other { ret; }"), None);
        assert_eq!(machine_code_of_kernel_in_image(b"\x7fELF and no more", "reads"), None);
    }
}
