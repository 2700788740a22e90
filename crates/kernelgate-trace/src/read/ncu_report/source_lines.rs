//! Finds source lines of a compiled kernel's instructions in the debug line table of its cubin.

use gimli::{DebugLine, DebugLineOffset, EndianSlice, LittleEndian};
use hashbrown::HashMap;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget};

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SourceFileAndLine {
    pub source_file: String,
    pub line_number: u32,
}

/// Source lines of the instructions of all kernels in a cubin.
#[derive(Debug, Default)]
pub(super) struct CubinSourceLines {
    /// For each kernel, instruction offsets in ascending order, each with the source line that
    /// begins at this offset.
    source_lines_by_kernel: HashMap<String, Vec<(u64, SourceFileAndLine)>>,
}

impl CubinSourceLines {
    /// Reads the source lines of a cubin; empty if the cubin was compiled without `-lineinfo` or is
    /// damaged.
    pub fn from_cubin_or_empty(binary: &[u8]) -> CubinSourceLines {
        parse_cubin_line_table(binary).unwrap_or_default()
    }

    pub fn source_line_at_instruction_offset(
        &self,
        kernel: &str,
        offset: u64,
    ) -> Option<&SourceFileAndLine> {
        let lines = self.source_lines_by_kernel.get(kernel)?;
        let behind = lines.partition_point(|(start, _)| *start <= offset);
        lines.get(behind.checked_sub(1)?).map(|(_, line)| line)
    }
}

/// Addresses in the patched line table contain the number of the kernel above this bit.
const KERNEL_NUMBER_FIRST_BIT: u32 = 40;

fn parse_cubin_line_table(binary: &[u8]) -> Option<CubinSourceLines> {
    let file = object::File::parse(binary).ok()?;
    let section = file.section_by_name(".debug_line")?;
    let mut table = section.data().ok()?.to_vec();
    // Every sequence of the line table begins at the address of a kernel, which only the linker
    // fills in. The reader writes the number of the kernel in place of the kernel's unknown
    // address.
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
        let number = u64::try_from(kernels.len()).ok()? << KERNEL_NUMBER_FIRST_BIT;
        let address = number.wrapping_add_signed(relocation.addend());
        let at = usize::try_from(at).ok()?;
        table.get_mut(at..at + 8)?.copy_from_slice(&address.to_le_bytes());
    }
    let mut lines = CubinSourceLines::default();
    let mut offset = 0;
    while offset < table.len() {
        let unit = DebugLine::new(&table, LittleEndian);
        let program = unit.program(DebugLineOffset(offset), 8, None, None).ok()?;
        let header = program.header().clone();
        add_source_lines_of_line_program(program, &kernels, &mut lines);
        // The length of a DWARF unit excludes the four bytes of the length itself.
        offset += header.unit_length() + 4;
    }
    for of_kernel in lines.source_lines_by_kernel.values_mut() {
        of_kernel.sort_by_key(|(start, _)| *start);
    }
    Some(lines)
}

type DwarfLineProgram<'a> = gimli::IncompleteLineProgram<EndianSlice<'a, LittleEndian>>;

fn add_source_lines_of_line_program(
    program: DwarfLineProgram<'_>,
    kernels: &[String],
    lines: &mut CubinSourceLines,
) {
    let mut rows = program.rows();
    while let Ok(Some((header, row))) = rows.next_row() {
        let (Some(line), false) = (row.line(), row.end_sequence()) else { continue };
        let number = usize::try_from(row.address() >> KERNEL_NUMBER_FIRST_BIT).unwrap_or(0);
        let Some(kernel) = number.checked_sub(1).and_then(|at| kernels.get(at)) else { continue };
        let text = |value: gimli::AttributeValue<EndianSlice<'_, LittleEndian>>| match value {
            gimli::AttributeValue::String(text) => Some(text.to_string_lossy().into_owned()),
            _ => None,
        };
        let Some(file) = row.file(header) else { continue };
        let name = text(file.path_name()).unwrap_or_default();
        let folder = file.directory(header).and_then(text).filter(|_| !name.starts_with('/'));
        let file = folder.map_or(name.clone(), |folder| format!("{folder}/{name}"));
        let offset = row.address() & ((1 << KERNEL_NUMBER_FIRST_BIT) - 1);
        let line = u32::try_from(line.get()).unwrap_or(u32::MAX);
        let of_kernel = lines.source_lines_by_kernel.entry(kernel.clone()).or_default();
        of_kernel.push((offset, SourceFileAndLine { source_file: file, line_number: line }));
    }
}
