//! Source lines of the instructions of a compiled kernel, from the line table of its cubin.

use gimli::{DebugLine, DebugLineOffset, EndianSlice, LittleEndian};
use hashbrown::HashMap;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget};

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SourceFileLine {
    pub file: String,
    pub line: u32,
}

/// The lines of the kernels of a cubin.
#[derive(Debug, Default)]
pub(super) struct CubinLines {
    /// For each kernel, offsets of instructions with the source line that begins there, in order.
    kernels: HashMap<String, Vec<(u64, SourceFileLine)>>,
}

impl CubinLines {
    /// The lines of a cubin; empty where it was compiled without `-lineinfo`, or is damaged.
    pub fn from_cubin(binary: &[u8]) -> CubinLines {
        read_cubin_lines(binary).unwrap_or_default()
    }

    pub fn source_line_of_instruction(&self, kernel: &str, offset: u64) -> Option<&SourceFileLine> {
        let lines = self.kernels.get(kernel)?;
        let behind = lines.partition_point(|(start, _)| *start <= offset);
        lines.get(behind.checked_sub(1)?).map(|(_, line)| line)
    }
}

/// Addresses of the patched table hold the number of a kernel above these bits.
const KERNEL_NUMBER_SHIFT: u32 = 40;

fn read_cubin_lines(binary: &[u8]) -> Option<CubinLines> {
    let file = object::File::parse(binary).ok()?;
    let section = file.section_by_name(".debug_line")?;
    let mut table = section.data().ok()?.to_vec();
    // Every sequence begins at the address of a kernel, which the linker would fill in. A number of
    // the kernel replaces that address.
    let mut kernels: Vec<String> = Vec::new();
    for (at, relocation) in section.relocations() {
        let RelocationTarget::Symbol(symbol) = relocation.target() else { continue };
        let symbol = file.symbol_by_index(symbol).ok()?;
        let name = match symbol.name().unwrap_or_default() {
            "" => {
                let index = symbol.section_index();
                let section = index.and_then(|index| file.section_by_index(index).ok());
                section
                    .and_then(|section| section.name().ok().map(str::to_owned))
                    .unwrap_or_default()
            }
            name => name.to_owned(),
        };
        let name = name.strip_prefix(".text.").unwrap_or(&name).to_owned();
        kernels.push(name);
        let number = u64::try_from(kernels.len()).ok()? << KERNEL_NUMBER_SHIFT;
        let address = number.wrapping_add_signed(relocation.addend());
        let at = usize::try_from(at).ok()?;
        table.get_mut(at..at + 8)?.copy_from_slice(&address.to_le_bytes());
    }
    let mut lines = CubinLines::default();
    let mut offset = 0;
    while offset < table.len() {
        let unit = DebugLine::new(&table, LittleEndian);
        let program = unit.program(DebugLineOffset(offset), 8, None, None).ok()?;
        let header = program.header().clone();
        add_line_rows(program, &kernels, &mut lines);
        // The length of a unit excludes its own four bytes.
        offset += header.unit_length() + 4;
    }
    for of_kernel in lines.kernels.values_mut() {
        of_kernel.sort_by_key(|(start, _)| *start);
    }
    Some(lines)
}

type LineProgram<'a> = gimli::IncompleteLineProgram<EndianSlice<'a, LittleEndian>>;

fn add_line_rows(program: LineProgram<'_>, kernels: &[String], lines: &mut CubinLines) {
    let mut rows = program.rows();
    while let Ok(Some((header, row))) = rows.next_row() {
        let (Some(line), false) = (row.line(), row.end_sequence()) else { continue };
        let number = usize::try_from(row.address() >> KERNEL_NUMBER_SHIFT).unwrap_or(0);
        let Some(kernel) = number.checked_sub(1).and_then(|at| kernels.get(at)) else { continue };
        let text = |value: gimli::AttributeValue<EndianSlice<'_, LittleEndian>>| match value {
            gimli::AttributeValue::String(text) => Some(text.to_string_lossy().into_owned()),
            _ => None,
        };
        let Some(file) = row.file(header) else { continue };
        let name = text(file.path_name()).unwrap_or_default();
        let folder = file.directory(header).and_then(text).filter(|_| !name.starts_with('/'));
        let file = folder.map_or(name.clone(), |folder| format!("{folder}/{name}"));
        let offset = row.address() & ((1 << KERNEL_NUMBER_SHIFT) - 1);
        let line = u32::try_from(line.get()).unwrap_or(u32::MAX);
        let of_kernel = lines.kernels.entry(kernel.clone()).or_default();
        of_kernel.push((offset, SourceFileLine { file, line }));
    }
}
