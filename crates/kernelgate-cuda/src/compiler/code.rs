//! Identity of a kernel's machine code: a hash by which two builds are compared, and the facts in
//! the code.
//!
//! The hash covers everything that the hardware executes and reads: instructions, constants and
//! their addresses, sizes of shared and global memory. The hash excludes symbol tables, notes,
//! debug sections and the file's other kernels.

use std::collections::{BTreeMap, BTreeSet};

use object::elf::SHF_ALLOC;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionFlags};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use super::cubin::{self, CompiledKernelFacts, CubinError};

/// A kernel's machine code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelMachineCode {
    /// Hexadecimal hash of the machine code, or of the PTX for an architecture without a cubin.
    pub hash: String,
    /// Facts read from the machine code (registers, stack), without the facts that only the
    /// assembler reports (spills, static shared memory); absent for PTX.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<CompiledKernelFacts>,
}

/// Code of a kernel in a cubin or in PTX; `None` if the image cannot be read or lacks the kernel.
pub fn machine_code_in_image(image: &[u8], symbol: &str) -> Option<KernelMachineCode> {
    if image.starts_with(b"\x7fELF") {
        let hash = machine_code_hashes(image).ok()?.remove(symbol)?;
        let facts = cubin::kernel_facts(image, "").ok()?.remove(symbol)?;
        return Some(KernelMachineCode { hash, facts: Some(facts) });
    }
    let text = String::from_utf8_lossy(image);
    let mut hasher = Xxh3Default::new();
    // Comments of machine code hold the compiler's build number, so comparisons ignore them.
    let lines = text.lines().filter(|line| !line.starts_with("//"));
    lines.for_each(|line| add(&mut hasher, line.as_bytes()));
    text.contains(symbol).then(|| KernelMachineCode { hash: hex_digest(&hasher), facts: None })
}

/// The hash of every kernel in a cubin, by symbol.
///
/// # Errors
/// Fails if the given bytes are not a cubin.
pub fn machine_code_hashes(cubin: &[u8]) -> Result<BTreeMap<String, String>, CubinError> {
    let failed = |error: object::Error| CubinError::Elf(error.to_string());
    let elf = object::File::parse(cubin).map_err(failed)?;
    let mut sections = Vec::new();
    for section in elf.sections() {
        let name = section.name().map_err(failed)?.to_owned();
        // Only sections that are loaded onto the device can be executed.
        if is_loaded_section(&section) {
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
            // ELF sections without an owning kernel belong to the whole module, so they count for
            // each of its kernels.
            if owner(name).is_some_and(|owner| owner != *kernel) {
                continue;
            }
            add(&mut hasher, name.as_bytes());
            add(&mut hasher, &section.size().to_le_bytes());
            add(&mut hasher, section.data().map_err(failed)?);
            for (offset, relocation) in section.relocations() {
                add(&mut hasher, &offset.to_le_bytes());
                add(&mut hasher, &relocation.addend().to_le_bytes());
                if let RelocationTarget::Symbol(index) = relocation.target() {
                    let symbol = elf.symbol_by_index(index).map_err(failed)?;
                    add(&mut hasher, symbol.name().map_err(failed)?.as_bytes());
                }
            }
        }
        hashes.insert((*kernel).to_owned(), hex_digest(&hasher));
    }
    Ok(hashes)
}

/// Whether a section goes to the device.
fn is_loaded_section<'data>(section: &impl ObjectSection<'data>) -> bool {
    let SectionFlags::Elf { sh_flags, .. } = section.flags() else { return false };
    sh_flags.0 & SHF_ALLOC.0 != 0
}

/// Adds bytes with their length, so that they cannot be confused with the bytes that follow.
fn add(hasher: &mut Xxh3Default, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

fn hex_digest(hasher: &Xxh3Default) -> String {
    format!("{:032x}", hasher.digest128())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiler::nvrtc::{self, CompileError};

    const CODE_TEST_KERNELS: &str = r#"
        __constant__ float table[4] = {1, 2, 3, 4};
        __device__ __noinline__ float helper(float x) { return x * table[(int)x & 3]; }
        extern "C" __global__ void reads(float* x) { x[threadIdx.x] = helper(x[threadIdx.x]); }
        extern "C" __global__ void other(float* x) { x[0] = 2 * x[0]; }
    "#;

    /// Compiles both test kernels of a source text; `None` without NVRTC.
    fn compile_both(text: &str, name: &str) -> Option<[KernelMachineCode; 2]> {
        let options = ["--gpu-architecture=sm_90a".to_owned()];
        match nvrtc::compile_source_text(name, text, &[], &options, "sm_90a") {
            Ok(compiled) => Some(
                ["reads", "other"].map(|it| machine_code_in_image(&compiled.cubin, it).unwrap()),
            ),
            Err(CompileError::Missing) => {
                println!("skipped: NVRTC is missing");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn the_code_hash_covers_only_what_the_gpu_executes() {
        let Some([reads, other]) = compile_both(CODE_TEST_KERNELS, "a") else { return };
        let facts = reads.facts.as_ref().unwrap();
        assert!(facts.registers > 0 && facts.instructions > 0, "{facts:?}");
        let commented =
            compile_both(&format!("// a comment\n\n{CODE_TEST_KERNELS}"), "renamed").unwrap();
        assert_eq!(commented, [reads.clone(), other.clone()]);
        let [changed, same] =
            compile_both(&CODE_TEST_KERNELS.replace("x * table", "3 * x * table"), "a").unwrap();
        assert_ne!(changed.hash, reads.hash, "a function that it calls");
        assert_eq!(same, other);
        // The cubin does not state which kernel reads a constant of the module, so all its kernels
        // count as changed.
        let [changed, _] = compile_both(&CODE_TEST_KERNELS.replace("{1, 2", "{1, 7"), "a").unwrap();
        assert_ne!(changed.hash, reads.hash, "a constant that it reads");
        assert_eq!(changed.facts, reads.facts);
    }

    #[test]
    fn the_ptx_hash_ignores_comments() {
        let code = |text: &str| machine_code_in_image(text.as_bytes(), "reads");
        let ptx = code("// Compiler Build ID: 1\n.entry reads { ret; }\n").unwrap();
        assert_eq!(code("// Compiler Build ID: 2\n.entry reads { ret; }\n"), Some(ptx.clone()));
        assert_ne!(code(".entry reads { bar.sync 0; ret; }\n").unwrap().hash, ptx.hash);
        assert_eq!(code(".entry other { ret; }"), None);
        assert_eq!(machine_code_in_image(b"\x7fELF and no more", "reads"), None);
    }
}
