//! Demangles C++ names of kernels.

use std::borrow::Cow;

use cpp_demangle::{DemangleOptions, Symbol};

/// Returns the demangled name of a kernel; a name that is not mangled is returned without its `.kd`
/// suffix.
pub(super) fn demangle_kernel_name(name: &str) -> Cow<'_, str> {
    // AMD's profilers write the name of the kernel descriptor: the kernel's name with the suffix
    // `.kd`.
    let symbol = name.strip_suffix(".kd").unwrap_or(name);
    if !symbol.starts_with("_Z") {
        return Cow::Borrowed(symbol);
    }
    let demangled = Symbol::new(symbol)
        .ok()
        .and_then(|symbol| symbol.demangle_with_options(&DemangleOptions::new()).ok());
    demangled
        .or_else(|| demangle_without_parameters(symbol))
        .map_or(Cow::Borrowed(symbol), Cow::Owned)
}

/// Demangles only namespaces and function name, for symbols with parameters that the demangler does
/// not know.
fn demangle_without_parameters(symbol: &str) -> Option<String> {
    let mut rest = symbol.strip_prefix("_Z")?;
    rest = rest.strip_prefix('N').unwrap_or(rest).trim_start_matches(['K', 'V', 'r']);
    let mut parts = Vec::new();
    loop {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let Ok(length) = rest[..digits].parse::<usize>() else { break };
        let part = rest.get(digits..digits.checked_add(length)?)?;
        let anonymous = part.starts_with("_GLOBAL__N_");
        parts.push(if anonymous { "(anonymous namespace)" } else { part });
        rest = &rest[digits + length..];
    }
    (!parts.is_empty()).then(|| parts.join("::"))
}

#[cfg(test)]
mod tests {
    use super::demangle_kernel_name;

    #[test]
    fn mangled_names_are_demangled_and_others_kept() {
        assert_eq!(demangle_kernel_name("_Z3addPfS_"), "add(float*, float*)");
        assert_eq!(demangle_kernel_name("_ZN3ops4gemmILi4EEEvPf.kd"), "void ops::gemm<4>(float*)");
        assert_eq!(demangle_kernel_name("attn_fwd.kd"), "attn_fwd");
        assert_eq!(demangle_kernel_name("_Znot a symbol"), "_Znot a symbol");
        // The symbol has a constrained template parameter.
        assert_eq!(
            demangle_kernel_name(
                "_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16TnPFfRKT_EXadEEvPS2_"
            ),
            "sgl_hip::activation::act_and_mul_kernel"
        );
        assert_eq!(demangle_kernel_name("void add<float>(float *)"), "void add<float>(float *)");
    }
}
