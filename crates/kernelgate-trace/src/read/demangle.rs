//! Demangles C++ names and makes them readable.

use std::borrow::Cow;

use cpp_demangle::{DemangleOptions, Symbol};

/// Returns a readable form of a kernel's name; names that are not mangled are unchanged.
pub(super) fn readable_kernel_name(name: &str) -> Cow<'_, str> {
    // AMD's recorders name the descriptor of a kernel.
    let symbol = name.strip_suffix(".kd").unwrap_or(name);
    if !symbol.starts_with("_Z") {
        return Cow::Borrowed(symbol);
    }
    let demangled = Symbol::new(symbol)
        .ok()
        .and_then(|symbol| symbol.demangle_with_options(&DemangleOptions::new()).ok());
    demangled.or_else(|| demangle_nested_name(symbol)).map_or(Cow::Borrowed(symbol), Cow::Owned)
}

/// The namespaces and the name of a function whose parameters are of a newer form.
fn demangle_nested_name(symbol: &str) -> Option<String> {
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
    use super::readable_kernel_name;

    #[test]
    fn mangled_function_names_are_demangled_and_others_are_unchanged() {
        assert_eq!(readable_kernel_name("_Z3addPfS_"), "add(float*, float*)");
        assert_eq!(readable_kernel_name("_ZN3ops4gemmILi4EEEvPf.kd"), "void ops::gemm<4>(float*)");
        assert_eq!(readable_kernel_name("attn_fwd.kd"), "attn_fwd");
        assert_eq!(readable_kernel_name("_Znot a symbol"), "_Znot a symbol");
        // A constrained template parameter.
        assert_eq!(
            readable_kernel_name(
                "_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16TnPFfRKT_EXadEEvPS2_"
            ),
            "sgl_hip::activation::act_and_mul_kernel"
        );
        assert_eq!(readable_kernel_name("void add<float>(float *)"), "void add<float>(float *)");
    }
}
