//! Kernel images that other compilers made: cubin, fatbin or PTX, from a file or from memory.
//!
//! The driver decides which machine code of an image it loads. This module reads from a kernel
//! image only what messages need: its kind and its architectures. This module does not compile
//! source code (the module [`crate::compiler`] does).

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::sys::CUresult as R;
use cudarc::driver::{CudaModule, CudaStream, DriverError};
use cudarc::nvrtc::Ptx;

use super::kernel::Kernel;
use crate::BackendError;
use crate::driver::device::Device;
use crate::driver::driver_error::{driver_error_text, error_for_failed_action};
use crate::regular_file;

/// The reasons why a file or bytes are not a usable kernel image.
#[derive(Debug, thiserror::Error)]
pub enum UnusableKernelImage {
    /// The kernel image file cannot be read.
    #[error("failed to read {image_file}: {cause}")]
    UnreadableFile {
        /// Path of the kernel image file.
        image_file: PathBuf,
        /// Error of the operating system.
        cause: std::io::Error,
    },
    /// The driver does not load content of this kind.
    #[error("{image_name}: {found_content_or_defect}")]
    NotLoadableByDriver {
        /// Path or name of the image that the caller gave.
        image_name: String,
        /// The kind of content that was found instead of a kernel image, or the defect of the
        /// image.
        found_content_or_defect: &'static str,
    },
    /// The image is shorter than its headers declare, so the driver would read beyond the end of
    /// the bytes.
    #[error(
        "{image_name}: is cut short: it has {given_bytes} bytes, and its headers declare {declared_bytes}"
    )]
    ShorterThanDeclared {
        /// Path or name of the image that the caller gave.
        image_name: String,
        /// Length of the given kernel image in bytes.
        given_bytes: usize,
        /// Size of the image in bytes that its headers declare.
        declared_bytes: u64,
    },
}

impl From<UnusableKernelImage> for BackendError {
    fn from(error: UnusableKernelImage) -> Self {
        Self::CompilationFailed(error.to_string())
    }
}

/// Kind of a kernel image (cubin, fatbin or PTX), with the architectures for which it has code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelImageKind {
    /// Machine code for one architecture, such as "sm_90", if the header states the architecture.
    Cubin(Option<String>),
    /// An image with code for several architectures, such as "sm_80" and "PTX for compute_80".
    Fatbin(Vec<String>),
    /// PTX text that the driver compiles for this architecture, such as "sm_80", and later ones.
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

/// A kernel image that the driver can load: a cubin, a fatbin or PTX, with its name in messages.
#[derive(Debug, Clone)]
pub struct KernelImage {
    image_name: String,
    image_bytes: Vec<u8>,
    kind: KernelImageKind,
}

impl KernelImage {
    /// Reads a kernel image from a file, whose path becomes the image's name in messages.
    pub fn from_file(path: impl AsRef<Path>) -> Result<KernelImage, UnusableKernelImage> {
        let path = path.as_ref();
        let io = |cause| UnusableKernelImage::UnreadableFile { image_file: path.to_owned(), cause };
        let bytes = regular_file::read_file_unless_device_or_pipe(path).map_err(io)?;
        Self::from_bytes(path.display().to_string(), bytes)
    }

    /// Makes a kernel image from bytes in memory, such as `include_bytes!` or the output of another
    /// compiler.
    ///
    /// # Errors
    /// Fails if the bytes are not a kernel image.
    pub fn from_bytes(
        name: impl Into<String>,
        bytes: impl Into<Vec<u8>>,
    ) -> Result<KernelImage, UnusableKernelImage> {
        let (name, mut bytes) = (name.into(), bytes.into());
        match detect_image_kind(&bytes) {
            Ok(kind) => {
                let declared = match kind {
                    KernelImageKind::Cubin(_) => size_declared_by_cubin_headers(&bytes),
                    KernelImageKind::Fatbin(_) => size_declared_by_fatbin_header(&bytes),
                    KernelImageKind::Ptx(_) => 0,
                };
                if declared > bytes.len() as u64 {
                    return Err(UnusableKernelImage::ShorterThanDeclared {
                        image_name: name,
                        given_bytes: bytes.len(),
                        declared_bytes: declared,
                    });
                }
                if matches!(kind, KernelImageKind::Ptx(_)) && bytes.last() != Some(&0) {
                    // The driver expects a NUL byte at the end of PTX text.
                    bytes.push(0);
                }
                Ok(Self { image_name: name, image_bytes: bytes, kind })
            }
            Err(problem) => Err(UnusableKernelImage::NotLoadableByDriver {
                image_name: name,
                found_content_or_defect: problem,
            }),
        }
    }

    /// Kind of the image (cubin, fatbin or PTX), with its architectures.
    pub const fn image_kind_with_architectures(&self) -> &KernelImageKind {
        &self.kind
    }
}

/// The module of a kernel image that is loaded into the device's CUDA context.
pub struct LoadedImageModule {
    module: Arc<CudaModule>,
    stream: Arc<CudaStream>,
    image_name: String,
}

impl LoadedImageModule {
    /// Returns a kernel of the module by its symbol, for launches on the device's stream.
    ///
    /// # Errors
    /// Fails if the module has no kernel with this symbol.
    pub fn kernel_by_symbol(&self, symbol: &str) -> Result<Kernel, BackendError> {
        let function = self.module.load_function(symbol).map_err(|error| {
            error_for_failed_action(&format!("find {symbol} in {}", self.image_name), &error)
        })?;
        // The kernel gets no name in records, because records only list kernels that were compiled
        // from a [`Source`](crate::Source).
        Kernel::for_launches_on_stream(
            function,
            &self.stream,
            symbol,
            (Arc::default(), Arc::default()),
        )
    }
}

impl Device {
    /// Loads a kernel image into the device's CUDA context.
    ///
    /// # Errors
    /// Fails with [`BackendError::Unsupported`], which skips the case, if the image has no code for
    /// this GPU; with another error if the image is invalid. The errors name the image and its
    /// kind.
    pub fn load_kernel_image(
        &self,
        image: &KernelImage,
    ) -> Result<LoadedImageModule, BackendError> {
        let ptx = match image.kind {
            KernelImageKind::Ptx(_) => {
                let text =
                    String::from_utf8_lossy(&image.image_bytes[..image.image_bytes.len() - 1]);
                if text.contains('\0') {
                    let broken = format!("{}: PTX with a NUL in it", image.image_name);
                    return Err(BackendError::CompilationFailed(broken));
                }
                Ptx::from_src(text)
            }
            KernelImageKind::Cubin(_) | KernelImageKind::Fatbin(_) => {
                Ptx::from_binary(image.image_bytes.clone())
            }
        };
        let module = self
            .context()
            .load_module(ptx)
            .map_err(|error| error_for_refused_image(image, self, &error))?;
        Ok(LoadedImageModule {
            module,
            stream: Arc::clone(self.stream()),
            image_name: image.image_name.clone(),
        })
    }
}

/// The error for a kernel image that the driver refused to load.
fn error_for_refused_image(
    image: &KernelImage,
    device: &Device,
    error: &DriverError,
) -> BackendError {
    let (name, kind, arch) =
        (&image.image_name, &image.kind, &device.gpu_properties().kernel_architecture);
    let text = format!("failed to load {name}, {kind}, on {arch}: {}", driver_error_text(error));
    match error.0 {
        // The image is valid, but has no code for this GPU.
        R::CUDA_ERROR_NO_BINARY_FOR_GPU | R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            BackendError::Unsupported(text)
        }
        _ => BackendError::CompilationFailed(text),
    }
}

const ELF_MAGIC: &[u8] = b"\x7fELF";
const FATBIN_MAGIC_NUMBER: u32 = 0xba55_ed50;
/// Magic number of the wrapper of a fatbin in an object file, which contains addresses instead of
/// the fatbin itself.
const FATBIN_WRAPPER_MAGIC: u32 = 0x4662_43b1;
const LTO_IR_MAGIC: u32 = 0x7f4e_43ed;

/// Determines the kind of a kernel image from its first bytes.
fn detect_image_kind(bytes: &[u8]) -> Result<KernelImageKind, &'static str> {
    if bytes.is_empty() {
        return Err("is empty");
    }
    if bytes.starts_with(ELF_MAGIC) {
        return cubin_kind_with_architecture(bytes).ok_or("is an ELF file, and no cubin");
    }
    match read_u32_at(bytes, 0) {
        Some(FATBIN_MAGIC_NUMBER) => {
            return Ok(KernelImageKind::Fatbin(list_images_in_fatbin(bytes)));
        }
        Some(FATBIN_WRAPPER_MAGIC) => {
            return Err(
                "is the wrapper of a fatbin, which holds addresses: pass the fatbin itself",
            );
        }
        Some(LTO_IR_MAGIC) => return Err("is LTO-IR, which has to be linked first (nvJitLink)"),
        _ => {}
    }
    let text = std::str::from_utf8(bytes).map_err(|_| "is neither cubin, fatbin nor PTX")?;
    // PTX text begins with comments, followed by the directive `.version`.
    let code = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    if !code().any(|line| line.starts_with(".version")) {
        return Err("is text without `.version`, and no PTX; source goes through `Source`");
    }
    let target = code().find_map(|line| line.strip_prefix(".target"));
    let arch =
        target.and_then(|target| target.split(',').next()).map(|arch| arch.trim().to_owned());
    Ok(KernelImageKind::Ptx(arch))
}

/// Reads the architecture of a cubin from the flags in its ELF header: the lowest byte, or the
/// second byte since ABI version 8.
fn cubin_kind_with_architecture(bytes: &[u8]) -> Option<KernelImageKind> {
    const CUDA_ELF_MACHINE: u16 = 190;
    const ELF_FLAGS_OFFSET: usize = 48;
    let machine = u16::from_le_bytes(bytes.get(18..20)?.try_into().ok()?);
    if machine != CUDA_ELF_MACHINE {
        return None;
    }
    let shift = if *bytes.get(8)? >= 8 { 8 } else { 0 };
    let number = read_u32_at(bytes, ELF_FLAGS_OFFSET)? >> shift & 0xff;
    Some(KernelImageKind::Cubin((number > 0).then(|| format!("sm_{number}"))))
}

/// Smallest size of a cubin in bytes that its ELF headers declare: section and segment tables, and
/// their contents. The driver gets no length of the image, so a cubin that was cut short must be
/// found here.
fn size_declared_by_cubin_headers(bytes: &[u8]) -> u64 {
    const ELF_HEADER_BYTES: u64 = 64;
    /// Section types of the ELF standard that have content in the file. NVIDIA's own ELF section
    /// types, which may lack content, lie outside this range.
    const SECTION_TYPES_WITH_FILE_CONTENT: std::ops::Range<u32> = 1..8;
    let at = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
    // Reads the start offset of an ELF table, the size of an entry and the number of entries.
    let table = |start: usize, size: usize| {
        Some((read_u64_at(bytes, start)?, read_u16_at(bytes, size)?, read_u16_at(bytes, size + 2)?))
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
        let kind =
            read_u32_at(entry, 4).filter(|kind| SECTION_TYPES_WITH_FILE_CONTENT.contains(kind));
        Some(read_u64_at(entry, 24)?.saturating_add(kind.and_then(|_| read_u64_at(entry, 32))?))
    };
    let segment =
        |entry: &[u8]| Some(read_u64_at(entry, 8)?.saturating_add(read_u64_at(entry, 32)?));
    let sections_end = each(sections).filter_map(section).max().unwrap_or_default();
    let segments_end = each(segments).filter_map(segment).max().unwrap_or_default();
    [ELF_HEADER_BYTES, end(sections), end(segments), sections_end, segments_end]
        .into_iter()
        .fold(0, u64::max)
}

/// Size of a fatbin in bytes that its header declares: the header and the images behind it.
fn size_declared_by_fatbin_header(bytes: &[u8]) -> u64 {
    match (read_u16_at(bytes, 6), read_u64_at(bytes, 8)) {
        (Some(header), Some(payload)) => payload.saturating_add(header),
        _ => 16,
    }
}

/// Lists the images in a fatbin, such as "sm_80" or "PTX for compute_80", from the header of each
/// image.
fn list_images_in_fatbin(bytes: &[u8]) -> Vec<String> {
    const FATBIN_ENTRY_KIND_PTX: u16 = 1;
    let mut images = Vec::new();
    let mut at = read_u32_at(bytes, 4).map_or(usize::MAX, |word| (word >> 16) as usize);
    while let Some(entry) = bytes.get(at..).filter(|entry| entry.len() >= 32) {
        let kind = u16::from_le_bytes([entry[0], entry[1]]);
        let (Some(header), Some(payload)) = (read_u32_at(entry, 4), read_u32_at(entry, 8)) else {
            break;
        };
        let Some(arch) = read_u32_at(entry, 28) else { break };
        images.push(match kind {
            FATBIN_ENTRY_KIND_PTX => format!("PTX for compute_{arch}"),
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

fn read_u16_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn read_u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn read_u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;
    use crate::compiler::nvrtc;
    use crate::testing::lock_first_gpu;

    fn detected_kind_or_error(bytes: &[u8]) -> Result<String, String> {
        let image = KernelImage::from_bytes("mine", bytes);
        image
            .map(|image| image.image_kind_with_architectures().to_string())
            .map_err(|error| error.to_string())
    }

    /// Makes a fatbin for tests that has image headers but no machine code.
    fn fatbin_of_headers_for_test(entries: &[(u16, u32)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(FATBIN_MAGIC_NUMBER.to_le_bytes());
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

    /// Makes the ELF header of a cubin, without the sections.
    fn cubin_header_for_test(abi: u8, flags: u32) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..4].copy_from_slice(ELF_MAGIC);
        bytes[8] = abi;
        bytes[18] = 190;
        bytes[48..52].copy_from_slice(&flags.to_le_bytes());
        bytes
    }

    #[test]
    fn image_kinds_are_recognised_by_the_first_bytes() {
        let ptx = "//\n// Generated\n//\n.version 7.0\n.target sm_80, debug\n.address_size 64\n";
        assert_eq!(detected_kind_or_error(ptx.as_bytes()).unwrap(), "PTX for sm_80 and later");
        assert_eq!(
            detected_kind_or_error(&fatbin_of_headers_for_test(&[(2, 80), (1, 90)])).unwrap(),
            "a fatbin with sm_80, PTX for compute_90"
        );
        assert_eq!(
            detected_kind_or_error(&fatbin_of_headers_for_test(&[])).unwrap(),
            "a fatbin without an image"
        );
        // These are the ELF versions and flags of cubins that NVRTC 12.8 writes for sm_90a and
        // sm_100a.
        assert_eq!(
            detected_kind_or_error(&cubin_header_for_test(7, 0x005a_0d5a)).unwrap(),
            "a cubin for sm_90"
        );
        assert_eq!(
            detected_kind_or_error(&cubin_header_for_test(8, 0x0600_640a)).unwrap(),
            "a cubin for sm_100"
        );
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
            let text = detected_kind_or_error(bytes).unwrap_or_else(|error| error);
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
        // Truncating a kernel image at any byte causes no panic.
        for whole in
            [fatbin_of_headers_for_test(&[(2, 80), (1, 90)]), cubin_header_for_test(8, 0x640a)]
        {
            (0..whole.len()).for_each(|end| drop(detected_kind_or_error(&whole[..end])));
        }
    }

    #[test]
    fn a_truncated_image_is_refused_with_both_lengths() {
        let whole = fatbin_of_headers_for_test(&[(2, 80), (1, 90)]);
        // The test image has a table of two ELF sections, the content of the second section, and a
        // table of one segment.
        let mut elf = cubin_header_for_test(8, 0x640a);
        let mut put = |at: usize, value: u64, size: usize| {
            elf.resize(elf.len().max(at + size), 0);
            elf[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
        };
        for (at, value, size) in
            [(32, 208, 8), (40, 64, 8), (54, 56, 2), (56, 1, 2), (58, 64, 2), (60, 2, 2)]
        {
            put(at, value, size);
        }
        // A section for shared memory takes no bytes of the file, whatever its size.
        for (at, value) in [(68, 8), (96, 1 << 40), (132, 1), (152, 192), (160, 16)] {
            put(at, value, 8);
        }
        for (at, value) in [(208, 1), (216, 192), (240, 16), (256, 0)] {
            put(at, value, 8);
        }
        for (bytes, kind, len) in [(whole, "a fatbin with", 160), (elf, "a cubin for sm_100", 264)]
        {
            assert_eq!(bytes.len(), len);
            assert!(detected_kind_or_error(&bytes).unwrap().starts_with(kind));
            for end in [64, len / 2, len - 1] {
                let error = detected_kind_or_error(&bytes[..end]).unwrap_err();
                let lengths =
                    format!("mine: is cut short: it has {end} bytes, and its headers declare");
                assert!(error.starts_with(&lengths), "{error}");
            }
        }
        let of_section = {
            let mut bytes = cubin_header_for_test(8, 0x640a);
            bytes[40..48].copy_from_slice(&64_u64.to_le_bytes());
            bytes[58..62].copy_from_slice(&[64, 0, 1, 0]);
            bytes.resize(128, 0);
            bytes[68] = 1;
            bytes[88..104].copy_from_slice(&[0xff; 16]);
            detected_kind_or_error(&bytes).unwrap_err()
        };
        assert!(of_section.ends_with(&format!("declare {}", u64::MAX)), "{of_section}");
        let magic = detected_kind_or_error(&FATBIN_MAGIC_NUMBER.to_le_bytes()).unwrap_err();
        assert_eq!(magic, "mine: is cut short: it has 4 bytes, and its headers declare 16");
        // A complete image that a compiler made must be accepted.
        let path = "../../examples/attached/kernels/axpy.sm_90.cubin";
        let axpy = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
        assert_eq!(detected_kind_or_error(&axpy).unwrap(), "a cubin for sm_90");
        assert_eq!(
            detected_kind_or_error(&axpy[..axpy.len() - 1]).unwrap_err(),
            "mine: is cut short: it has 3031 bytes, and its headers declare 3032"
        );
    }

    #[test]
    fn a_cubin_for_another_architecture_skips_the_case_naming_both() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        let source = Source::new("mine", "extern \"C\" __global__ void mine(float* x) { *x = 1; }");
        let compile = |arch| {
            nvrtc::compile_to_cubin_or_ptx(&source.with_macros(&[]), arch).unwrap().cubin_or_ptx
        };
        let own =
            KernelImage::from_bytes("own", compile(&device.gpu_properties().kernel_architecture))
                .unwrap();
        device.load_kernel_image(&own).unwrap().kernel_by_symbol("mine").unwrap();
        let missing =
            device.load_kernel_image(&own).unwrap().kernel_by_symbol("yours").err().unwrap();
        let BackendError::DriverCallFailed { failed_action: action, status } = missing else {
            panic!("{missing}")
        };
        assert_eq!(
            (&*action, &*status.error_code_name),
            ("find yours in own", "CUDA_ERROR_NOT_FOUND")
        );
        // Code for sm_75 runs only on Turing GPUs, which kernelgate does not support.
        let other = KernelImage::from_bytes("turing.cubin", compile("sm_75")).unwrap();
        match device.load_kernel_image(&other).err().unwrap() {
            BackendError::Unsupported(why) => {
                eprintln!("{why}");
                let gpu = &device.gpu_properties().kernel_architecture;
                let start = format!("failed to load turing.cubin, a cubin for sm_75, on {gpu}: ");
                assert!(why.starts_with(&start), "{why}");
            }
            error => panic!("{error}"),
        }
        let later = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k() { ret; }\n";
        let ptx = KernelImage::from_bytes("text", later.as_bytes()).unwrap();
        device.load_kernel_image(&ptx).unwrap().kernel_by_symbol("k").unwrap();
        let broken =
            KernelImage::from_bytes("text", &b".version 7.0\n.target sm_80\nnonsense\n"[..]);
        let error = device.load_kernel_image(&broken.unwrap()).err().unwrap();
        let start = "failed to load text, PTX for sm_80 and later, on ";
        assert!(
            matches!(&error, BackendError::CompilationFailed(why) if why.starts_with(start)),
            "{error}"
        );
        for empty in [fatbin_of_headers_for_test(&[]), fatbin_of_headers_for_test(&[(2, 30)])] {
            let image = KernelImage::from_bytes("old.fatbin", empty).unwrap();
            let start = format!("failed to load old.fatbin, {}, on ", image.kind);
            let error = device.load_kernel_image(&image).err().unwrap().to_string();
            eprintln!("{error}");
            assert!(error.starts_with(&start), "{error}");
        }
    }
}
