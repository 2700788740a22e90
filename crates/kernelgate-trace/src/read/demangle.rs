//! Mangled C++ names as a person reads them.

use std::borrow::Cow;

use cpp_demangle::{DemangleOptions, Symbol};

/// The name of a kernel in a readable form; names that are not mangled stay as they are.
pub(super) fn readable(name: &str) -> Cow<'_, str> {
    // AMD's recorders name the descriptor of a kernel.
    let symbol = name.strip_suffix(".kd").unwrap_or(name);
    if !symbol.starts_with("_Z") {
        return Cow::Borrowed(symbol);
    }
    let demangled = Symbol::new(symbol)
        .ok()
        .and_then(|symbol| symbol.demangle_with_options(&DemangleOptions::new()).ok());
    demangled.map_or(Cow::Borrowed(symbol), Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::readable;

    #[test]
    fn mangled_names_are_readable_and_others_stay() {
        assert_eq!(readable("_Z3addPfS_"), "add(float*, float*)");
        assert_eq!(readable("_ZN3ops4gemmILi4EEEvPf.kd"), "void ops::gemm<4>(float*)");
        assert_eq!(readable("attn_fwd.kd"), "attn_fwd");
        assert_eq!(readable("_Znot a symbol"), "_Znot a symbol");
        assert_eq!(readable("void add<float>(float *)"), "void add<float>(float *)");
    }
}
