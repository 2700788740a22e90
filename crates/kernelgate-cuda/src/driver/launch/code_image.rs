//! Machine code and PTX that other tools made: cubin, fatbin, PTX, from a file or from memory.
//!
//! The driver decides which images of a file it loads. This module reads only the facts of a kernel
//! image that messages need: its kind and its architectures. This module does not handle source
//! code ([`crate::compiler`] does).

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::sys::CUresult as R;
use cudarc::driver::{CudaModule, CudaStream, DriverError};
use cudarc::nvrtc::Ptx;

use super::kernel::Kernel;
use crate::BackendError;
use crate::driver::device::Device;
use crate::driver::driver_error::{describe, failed};
use crate::regular_file;

/// Reasons why bytes are not a kernel image.
#[derive(Debug, thiserror::Error)]
pub enum KernelImageError {
    /// The image file cannot be read.
    #[error("failed to read {path}: {cause}")]
    Io {
        /// Path of the image file.
        path: PathBuf,
        /// Error of the operating system.
        cause: std::io::Error,
    },
    /// The driver does not load this kind of content.
    #[error("{name}: {problem}")]
    Unknown {
        /// Path or name that the caller gave the image.
        name: String,
        /// The kind of content found instead of an image, or the defect of the image.
        problem: &'static str,
    },
    /// The image is shorter than its headers declare, so the driver would read beyond its end.
    #[error("{name}: is cut short: it has {bytes} bytes, and its headers declare {declared}")]
    CutShort {
        /// Path or name that the caller gave the image.
        name: String,
        /// Length of the given image, bytes.
        bytes: usize,
        /// Image size that the headers declare, bytes.
        declared: u64,
    },
}

impl From<KernelImageError> for BackendError {
    fn from(error: KernelImageError) -> Self {
        Self::Compile(error.to_string())
    }
}

/// Content of a kernel image, with the architectures that it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelImageKind {
    /// Machine code for one architecture, if the file names it: "sm_90".
    Cubin(Option<String>),
    /// An image with several kernel codes, by name: "sm_80", "PTX for compute_80".
    Fatbin(Vec<String>),
    /// Text (PTX) that the driver compiles for this architecture and later ones: "sm_80".
    Ptx(Option<String>),
}

impl fmt::Display for KernelImageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cubin(Some(arch)) => write!(f, "a cubin for {arch}"),
            Self::Cubin(None) => f.write_str("a cubin"),
            Self::Fatbin(images) if images.is_empty() => f.write_str("a fatbin without an image"),
            Self::Fatbin(images) => write!(f, "a fatbin with {}", images.join(", ")),
            Self::Ptx(Some(arch)) => write!(f, "PTX for {arch} and later"),
            Self::Ptx(None) => f.write_str("PTX"),
        }
    }
}

/// A loadable kernel image: a cubin, a fatbin or PTX.
#[derive(Debug, Clone)]
pub struct KernelImage {
    name: String,
    bytes: Vec<u8>,
    kind: KernelImageKind,
}

impl KernelImage {
    /// Reads an image from a file; its path is the image's name in messages.
    pub fn from_file(path: impl AsRef<Path>) -> Result<KernelImage, KernelImageError> {
        let path = path.as_ref();
        let io = |cause| KernelImageError::Io { path: path.to_owned(), cause };
        let bytes = regular_file::read_regular_file(path).map_err(io)?;
        Self::from_bytes(path.display().to_string(), bytes)
    }

    /// Makes a kernel image from bytes in memory: `include_bytes!`, or the output of another
    /// compiler.
    ///
    /// # Errors
    /// Fails if the bytes are not a kernel image.
    pub fn from_bytes(
        name: impl Into<String>,
        bytes: impl Into<Vec<u8>>,
    ) -> Result<KernelImage, KernelImageError> {
        let (name, mut bytes) = (name.into(), bytes.into());
        match image_kind_of_bytes(&bytes) {
            Ok(kind) => {
                let declared = match kind {
                    KernelImageKind::Cubin(_) => declared_cubin_bytes(&bytes),
                    KernelImageKind::Fatbin(_) => declared_fatbin_bytes(&bytes),
                    KernelImageKind::Ptx(_) => 0,
                };
                if declared > bytes.len() as u64 {
                    return Err(KernelImageError::CutShort { name, bytes: bytes.len(), declared });
                }
                if matches!(kind, KernelImageKind::Ptx(_)) && bytes.last() != Some(&0) {
                    // The NUL byte marks the end of the PTX text for the driver.
                    bytes.push(0);
                }
                Ok(Self { name, bytes, kind })
            }
            Err(problem) => Err(KernelImageError::Unknown { name, problem }),
        }
    }

    /// Returns whether the image is a cubin, a fatbin or PTX, with its architectures.
    pub const fn image_kind(&self) -> &KernelImageKind {
        &self.kind
    }
}

/// A kernel image that is loaded into a context.
pub struct LoadedModule {
    module: Arc<CudaModule>,
    stream: Arc<CudaStream>,
    name: String,
}

impl LoadedModule {
    /// A kernel of the module, for launches on the device's stream.
    ///
    /// # Errors
    /// Fails if the module has no kernel of that name.
    pub fn kernel_of_symbol(&self, symbol: &str) -> Result<Kernel, BackendError> {
        let function = self
            .module
            .load_function(symbol)
            .map_err(|error| failed(&format!("find {symbol} in {}", self.name), &error))?;
        // The kernel has no name in records, because nothing checks whether it was launched.
        Kernel::new(function, &self.stream, symbol, (Arc::default(), Arc::default()))
    }
}

impl Device {
    /// Loads a kernel image into the context.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`], which skips the case, if it holds no code for this GPU;
    /// others when it is invalid. The errors name the image and its kind.
    pub fn load_module(&self, image: &KernelImage) -> Result<LoadedModule, BackendError> {
        let ptx = match image.kind {
            KernelImageKind::Ptx(_) => {
                let text = String::from_utf8_lossy(&image.bytes[..image.bytes.len() - 1]);
                if text.contains('\0') {
                    let broken = format!("{}: PTX with a NUL in it", image.name);
                    return Err(BackendError::Compile(broken));
                }
                Ptx::from_src(text)
            }
            KernelImageKind::Cubin(_) | KernelImageKind::Fatbin(_) => {
                Ptx::from_binary(image.bytes.clone())
            }
        };
        let module = self
            .context()
            .load_module(ptx)
            .map_err(|error| refused_image_error(image, self, &error))?;
        Ok(LoadedModule { module, stream: Arc::clone(self.stream()), name: image.name.clone() })
    }
}

/// Returns the error for an image that the driver refused to load.
fn refused_image_error(image: &KernelImage, device: &Device, error: &DriverError) -> BackendError {
    let (name, kind, arch) = (&image.name, &image.kind, &device.facts().arch);
    let text = format!("failed to load {name}, {kind}, on {arch}: {}", describe(error));
    match error.0 {
        // The image is intact, but built for other GPUs.
        R::CUDA_ERROR_NO_BINARY_FOR_GPU | R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            BackendError::Unsupported(text)
        }
        _ => BackendError::Compile(text),
    }
}

const ELF: &[u8] = b"\x7fELF";
const FATBIN_MAGIC: u32 = 0xba55_ed50;
/// Magic number of the wrapper around a fatbin in an object file, which holds addresses.
const FATBIN_WRAPPER_MAGIC: u32 = 0x4662_43b1;
const LTO_IR_MAGIC: u32 = 0x7f4e_43ed;

/// The kind of an image, by its first bytes.
fn image_kind_of_bytes(bytes: &[u8]) -> Result<KernelImageKind, &'static str> {
    if bytes.is_empty() {
        return Err("is empty");
    }
    if bytes.starts_with(ELF) {
        return cubin_kind(bytes).ok_or("is an ELF file, and no cubin");
    }
    match u32_at(bytes, 0) {
        Some(FATBIN_MAGIC) => return Ok(KernelImageKind::Fatbin(images_in_fatbin(bytes))),
        Some(FATBIN_WRAPPER_MAGIC) => {
            return Err(
                "is the wrapper of a fatbin, which holds addresses: pass the fatbin itself",
            );
        }
        Some(LTO_IR_MAGIC) => return Err("is LTO-IR, which has to be linked first (nvJitLink)"),
        _ => {}
    }
    let text = std::str::from_utf8(bytes).map_err(|_| "is neither cubin, fatbin nor PTX")?;
    // A PTX text begins with comments, which the version follows.
    let code = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    if !code().any(|line| line.starts_with(".version")) {
        return Err("is text without `.version`, and no PTX; source goes through `Source`");
    }
    let target = code().find_map(|line| line.strip_prefix(".target"));
    let arch =
        target.and_then(|target| target.split(',').next()).map(|arch| arch.trim().to_owned());
    Ok(KernelImageKind::Ptx(arch))
}

/// A cubin's architecture, from the flags of its header: in the lowest byte, and since ABI 8 in the
/// second.
fn cubin_kind(bytes: &[u8]) -> Option<KernelImageKind> {
    const CUDA_ELF_MACHINE: u16 = 190;
    const ELF_FLAGS_OFFSET: usize = 48;
    let machine = u16::from_le_bytes(bytes.get(18..20)?.try_into().ok()?);
    if machine != CUDA_ELF_MACHINE {
        return None;
    }
    let shift = if *bytes.get(8)? >= 8 { 8 } else { 0 };
    let number = u32_at(bytes, ELF_FLAGS_OFFSET)? >> shift & 0xff;
    Some(KernelImageKind::Cubin((number > 0).then(|| format!("sm_{number}"))))
}

/// Number of bytes that the headers of a cubin declare: its tables of sections and segments, and
/// their contents. The driver gets no length of the image, so its headers are checked first.
fn declared_cubin_bytes(bytes: &[u8]) -> u64 {
    const ELF_HEADER_BYTES: u64 = 64;
    /// Section types of the ELF standard with content in the file. NVIDIA's ELF section types,
    /// which may lack content, are outside of this range.
    const SECTION_TYPES_WITH_CONTENT: std::ops::Range<u32> = 1..8;
    let at = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
    // Start of a table, size of its entries, and their number.
    let table = |start: usize, size: usize| {
        Some((
            read_long(bytes, start)?,
            read_half_word(bytes, size)?,
            read_half_word(bytes, size + 2)?,
        ))
    };
    let (Some(segments), Some(sections)) = (table(32, 54), table(40, 58)) else {
        return ELF_HEADER_BYTES;
    };
    let end = |(start, size, count): (u64, u64, u64)| match count {
        0 => 0,
        count => start.saturating_add(size * count),
    };
    let each = |(start, size, count): (u64, u64, u64)| {
        (0..count).map_while(move |i| bytes.get(at(start.saturating_add(size * i))..))
    };
    let section = |entry: &[u8]| {
        let kind = u32_at(entry, 4).filter(|kind| SECTION_TYPES_WITH_CONTENT.contains(kind));
        Some(read_long(entry, 24)?.saturating_add(kind.and_then(|_| read_long(entry, 32))?))
    };
    let segment = |entry: &[u8]| Some(read_long(entry, 8)?.saturating_add(read_long(entry, 32)?));
    let sections_end = each(sections).filter_map(section).max().unwrap_or_default();
    let segments_end = each(segments).filter_map(segment).max().unwrap_or_default();
    [ELF_HEADER_BYTES, end(sections), end(segments), sections_end, segments_end]
        .into_iter()
        .fold(0, u64::max)
}

/// Size that the header of a fatbin declares, bytes: the header and the data behind it.
fn declared_fatbin_bytes(bytes: &[u8]) -> u64 {
    match (read_half_word(bytes, 6), read_long(bytes, 8)) {
        (Some(header), Some(payload)) => payload.saturating_add(header),
        _ => 16,
    }
}

/// The readable images of a fatbin: a header of 16 bytes, then an entry for each image with its
/// kind, the sizes of its header and payload, and its architecture.
fn images_in_fatbin(bytes: &[u8]) -> Vec<String> {
    const PTX: u16 = 1;
    let mut images = Vec::new();
    let mut at = u32_at(bytes, 4).map_or(usize::MAX, |word| (word >> 16) as usize);
    while let Some(entry) = bytes.get(at..).filter(|entry| entry.len() >= 32) {
        let kind = u16::from_le_bytes([entry[0], entry[1]]);
        let (Some(header), Some(payload)) = (u32_at(entry, 4), u32_at(entry, 8)) else { break };
        let Some(arch) = u32_at(entry, 28) else { break };
        images.push(match kind {
            PTX => format!("PTX for compute_{arch}"),
            _ => format!("sm_{arch}"),
        });
        let next = at.checked_add(header as usize + payload as usize);
        match next.filter(|_| header > 0) {
            Some(next) => at = next,
            None => break,
        }
    }
    images
}

fn read_half_word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn read_long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;
    use crate::compiler::nvrtc;
    use crate::testing::lock_first_gpu;

    fn kind_of_image(bytes: &[u8]) -> Result<String, String> {
        let image = KernelImage::from_bytes("mine", bytes);
        image.map(|image| image.image_kind().to_string()).map_err(|error| error.to_string())
    }

    /// Makes a fatbin for tests that consists only of headers.
    fn fake_fatbin(entries: &[(u16, u32)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(FATBIN_MAGIC.to_le_bytes());
        bytes.extend([1, 0, 16, 0]);
        bytes.extend((entries.len() as u64 * 72).to_le_bytes());
        for (kind, arch) in entries {
            let mut entry = [0; 72];
            entry[..2].copy_from_slice(&kind.to_le_bytes());
            entry[4] = 64;
            entry[8] = 8;
            entry[28..32].copy_from_slice(&arch.to_le_bytes());
            bytes.extend(entry);
        }
        bytes
    }

    /// A cubin's header alone.
    fn fake_cubin(abi: u8, flags: u32) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..4].copy_from_slice(ELF);
        bytes[8] = abi;
        bytes[18] = 190;
        bytes[48..52].copy_from_slice(&flags.to_le_bytes());
        bytes
    }

    #[test]
    fn kernel_images_are_recognised_by_their_first_bytes() {
        let ptx = "//\n// Generated\n//\n.version 7.0\n.target sm_80, debug\n.address_size 64\n";
        assert_eq!(kind_of_image(ptx.as_bytes()).unwrap(), "PTX for sm_80 and later");
        assert_eq!(
            kind_of_image(&fake_fatbin(&[(2, 80), (1, 90)])).unwrap(),
            "a fatbin with sm_80, PTX for compute_90"
        );
        assert_eq!(kind_of_image(&fake_fatbin(&[])).unwrap(), "a fatbin without an image");
        // Headers of cubins that NVRTC 12.8 writes for sm_90a and sm_100a.
        assert_eq!(kind_of_image(&fake_cubin(7, 0x005a_0d5a)).unwrap(), "a cubin for sm_90");
        assert_eq!(kind_of_image(&fake_cubin(8, 0x0600_640a)).unwrap(), "a cubin for sm_100");
    }

    #[test]
    fn bytes_that_are_no_kernel_image_are_refused() {
        for (bytes, words) in [
            (&b""[..], "mine: is empty"),
            (
                b"extern \"C\" __global__ void k() {}",
                "mine: is text without `.version`, and no PTX; source goes through `Source`",
            ),
            (b"\xff\xfe\xfd\xfc\xfb", "mine: is neither cubin, fatbin nor PTX"),
            (
                &FATBIN_WRAPPER_MAGIC.to_le_bytes(),
                "mine: is the wrapper of a fatbin, which holds addresses: pass the fatbin itself",
            ),
            (
                &LTO_IR_MAGIC.to_le_bytes(),
                "mine: is LTO-IR, which has to be linked first (nvJitLink)",
            ),
            (b"\x7fELF\x02\x01\x01", "mine: is an ELF file, and no cubin"),
        ] {
            let text = kind_of_image(bytes).unwrap_or_else(|error| error);
            assert_eq!(text, words);
        }
        let error = KernelImage::from_file("/no/such/kernel.cubin").unwrap_err().to_string();
        assert_eq!(
            error,
            "failed to read /no/such/kernel.cubin: No such file or directory (os error 2)"
        );
        let error = KernelImage::from_file("/dev/zero").unwrap_err().to_string();
        assert_eq!(
            error,
            "failed to read /dev/zero: it is no file but a device, a pipe or a socket"
        );
        // Cut anywhere, nothing panics.
        for whole in [fake_fatbin(&[(2, 80), (1, 90)]), fake_cubin(8, 0x640a)] {
            (0..whole.len()).for_each(|end| drop(kind_of_image(&whole[..end])));
        }
    }

    #[test]
    fn a_truncated_image_is_refused_with_both_lengths() {
        let whole = fake_fatbin(&[(2, 80), (1, 90)]);
        // A table of two sections, the second with bytes behind it, then a table of one segment.
        let mut elf = fake_cubin(8, 0x640a);
        let mut put = |at: usize, value: u64, size: usize| {
            elf.resize(elf.len().max(at + size), 0);
            elf[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        };
        for (at, value, size) in
            [(32, 208, 8), (40, 64, 8), (54, 56, 2), (56, 1, 2), (58, 64, 2), (60, 2, 2)]
        {
            put(at, value, size);
        }
        // Shared memory takes no bytes of the file, for any size.
        for (at, value) in [(68, 8), (96, 1 << 40), (132, 1), (152, 192), (160, 16)] {
            put(at, value, 8);
        }
        for (at, value) in [(208, 1), (216, 192), (240, 16), (256, 0)] {
            put(at, value, 8);
        }
        for (bytes, kind, len) in [(whole, "a fatbin with", 160), (elf, "a cubin for sm_100", 264)]
        {
            assert_eq!(bytes.len(), len);
            assert!(kind_of_image(&bytes).unwrap().starts_with(kind));
            for end in [64, len / 2, len - 1] {
                let error = kind_of_image(&bytes[..end]).unwrap_err();
                let lengths =
                    format!("mine: is cut short: it has {end} bytes, and its headers declare");
                assert!(error.starts_with(&lengths), "{error}");
            }
        }
        let of_section = {
            let mut bytes = fake_cubin(8, 0x640a);
            bytes[40..48].copy_from_slice(&64_u64.to_le_bytes());
            bytes[58..62].copy_from_slice(&[64, 0, 1, 0]);
            bytes.resize(128, 0);
            bytes[68] = 1;
            bytes[88..104].copy_from_slice(&[0xff; 16]);
            kind_of_image(&bytes).unwrap_err()
        };
        assert!(of_section.ends_with(&format!("declare {}", u64::MAX)), "{of_section}");
        let magic = kind_of_image(&FATBIN_MAGIC.to_le_bytes()).unwrap_err();
        assert_eq!(magic, "mine: is cut short: it has 4 bytes, and its headers declare 16");
        // The driver must accept an image that a compiler made.
        let path = "../../examples/attached/kernels/axpy.sm_90.cubin";
        let axpy = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
        assert_eq!(kind_of_image(&axpy).unwrap(), "a cubin for sm_90");
        assert_eq!(
            kind_of_image(&axpy[..axpy.len() - 1]).unwrap_err(),
            "mine: is cut short: it has 3031 bytes, and its headers declare 3032"
        );
    }

    #[test]
    fn a_cubin_for_another_architecture_skips_the_case_naming_both() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let source = Source::new("mine", "extern \"C\" __global__ void mine(float* x) { *x = 1; }");
        let compile = |arch| nvrtc::compile_to_cubin(&source.build(&[]), arch).unwrap().cubin;
        let own = KernelImage::from_bytes("own", compile(&device.facts().arch)).unwrap();
        device.load_module(&own).unwrap().kernel_of_symbol("mine").unwrap();
        let missing = device.load_module(&own).unwrap().kernel_of_symbol("yours").err().unwrap();
        let BackendError::Driver { action, status } = missing else { panic!("{missing}") };
        assert_eq!((&*action, &*status.name), ("find yours in own", "CUDA_ERROR_NOT_FOUND"));
        // Code for sm_75 runs on Turing GPUs only, which are older than all supported GPUs.
        let other = KernelImage::from_bytes("turing.cubin", compile("sm_75")).unwrap();
        match device.load_module(&other).err().unwrap() {
            BackendError::Unsupported(why) => {
                eprintln!("{why}");
                let gpu = &device.facts().arch;
                let start = format!("failed to load turing.cubin, a cubin for sm_75, on {gpu}: ");
                assert!(why.starts_with(&start), "{why}");
            }
            error => panic!("{error}"),
        }
        let later = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k() { ret; }\n";
        let ptx = KernelImage::from_bytes("text", later.as_bytes()).unwrap();
        device.load_module(&ptx).unwrap().kernel_of_symbol("k").unwrap();
        let broken =
            KernelImage::from_bytes("text", &b".version 7.0\n.target sm_80\nnonsense\n"[..]);
        let error = device.load_module(&broken.unwrap()).err().unwrap();
        let start = "failed to load text, PTX for sm_80 and later, on ";
        assert!(matches!(&error, BackendError::Compile(why) if why.starts_with(start)), "{error}");
        for empty in [fake_fatbin(&[]), fake_fatbin(&[(2, 30)])] {
            let image = KernelImage::from_bytes("old.fatbin", empty).unwrap();
            let start = format!("failed to load old.fatbin, {}, on ", image.kind);
            let error = device.load_module(&image).err().unwrap().to_string();
            eprintln!("{error}");
            assert!(error.starts_with(&start), "{error}");
        }
    }
}
