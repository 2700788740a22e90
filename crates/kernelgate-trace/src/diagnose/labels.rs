//! Names of kernels for people: without return type, parameters, namespaces and casts.

use crate::analyze::classes::OpenBrackets;

/// A name for people. For example, `void at::native::vectorized_elementwise_kernel<(int)4,
/// at::native::CUDAFunctor_add<float>>(int, T2)` becomes `vectorized_elementwise_kernel<4,
/// CUDAFunctor_add<float>>`.
pub fn readable_name(name: &str) -> String {
    let name = without_return_type(name_without_parameters(name));
    let mut short = String::with_capacity(name.len());
    // Start in `short` of the word that is being copied.
    let mut word = 0;
    let mut rest = name;
    while let Some(c) = rest.chars().next() {
        if let Some(after) = text_after_cast(rest) {
            rest = after;
        } else if let Some(after) = rest.strip_prefix("<unnamed>::") {
            rest = after;
        } else if let Some(after) = rest.strip_prefix("::") {
            // The last word before the name is a return type, unless it closed brackets.
            short.truncate(word);
            rest = after;
        } else {
            short.push(c);
            rest = &rest[c.len_utf8()..];
            if !(c.is_alphanumeric() || c == '_') {
                word = short.len();
            }
        }
    }
    short
}

/// A function's name without the type before it, which is a template or in a namespace.
fn without_return_type(name: &str) -> &str {
    let name = name.strip_prefix("void ").unwrap_or(name);
    let mut brackets = OpenBrackets::default();
    let space = name.char_indices().filter(|&(_, c)| brackets.is_outside(c) && c == ' ').last();
    let Some(at) = space.map(|(at, _)| at) else { return name };
    let function = &name[at + 1..];
    // Names with operators may close more brackets than they open.
    let count = |bracket| function.matches(bracket).count();
    let is_whole = !function.starts_with('(') && count('<') == count('>');
    if is_whole && name[..at].contains("::") { function } else { name }
}

/// The text behind `(int)`, `(bool)` or another cast of a template argument.
fn text_after_cast(text: &str) -> Option<&str> {
    let casts = ["(int)", "(bool)", "(unsigned int)", "(unsigned long)", "(long)", "(short)"];
    casts.iter().find_map(|cast| text.strip_prefix(cast))
}

/// A function's name without the parameters at its end.
fn name_without_parameters(name: &str) -> &str {
    if !name.ends_with(')') {
        return name;
    }
    let mut depth = 0usize;
    for (index, c) in name.char_indices().rev() {
        match c {
            ')' => depth += 1,
            '(' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return if index == 0 { name } else { &name[..index] };
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::readable_name;

    #[test]
    fn words_shared_by_all_kernel_names_are_dropped() {
        assert_eq!(
            readable_name(
                "void at::native::vectorized_elementwise_kernel<(int)4, \
                 at::native::CUDAFunctor_add<float>, std::array<char *, (unsigned long)3>>(int, T2)"
            ),
            "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, array<char *, 3>>"
        );
        assert_eq!(readable_name("ampere_sgemm_128x64_tn"), "ampere_sgemm_128x64_tn");
        assert_eq!(
            readable_name("ncclDevKernel_SendRecv(ncclStorage<(unsigned long)4096>)"),
            "ncclDevKernel_SendRecv"
        );
        assert_eq!(readable_name("void <unnamed>::softmax<float>(float *)"), "softmax<float>");
        assert_eq!(readable_name("[CUDA memcpy Host-to-Device]"), "[CUDA memcpy Host-to-Device]");
        assert_eq!(
            readable_name(
                "std::enable_if<(((8)>(0)))&&T<B>::exists, void>::type v::norm<B, 8>(B *)"
            ),
            "norm<B, 8>"
        );
        assert_eq!(
            readable_name(
                "void at::native::<unnamed>::apply<at::native::<unnamed>::List<(int)2>, \
                 at::native::Copy<long, long>>(T1, T2)"
            ),
            "apply<List<2>, Copy<long, long>>"
        );
        assert_eq!(readable_name("(odd)"), "(odd)");
        assert_eq!(readable_name(""), "");
        assert_eq!(readable_name("a::b))) (()"), "b))) (");
    }
}
