//! Shortens demangled kernel names for readers: without return type, parameters, namespaces and
//! casts.

use crate::analyze::classes::OpenNameBrackets;

/// Shortens a kernel name for human readers. For example, `void
/// at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>(int, T2)`
/// becomes `vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>`.
pub fn shortened_kernel_name_for_readers(name: &str) -> String {
    let name = name_without_return_type(name_without_parameter_list(name));
    let mut short = String::with_capacity(name.len());
    // Start, in the shortened name, of the word that is being copied.
    let mut word = 0;
    let mut rest = name;
    while let Some(c) = rest.chars().next() {
        if let Some(after) = text_after_leading_cast(rest) {
            rest = after;
        } else if let Some(after) = rest.strip_prefix("<unnamed>::") {
            rest = after;
        } else if let Some(after) = rest.strip_prefix("::") {
            // The word before the function name is a return type and is dropped, unless the word
            // closed brackets.
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

/// Returns a demangled function name without its return type, which may be a template or in a
/// namespace.
fn name_without_return_type(name: &str) -> &str {
    let name = name.strip_prefix("void ").unwrap_or(name);
    let mut brackets = OpenNameBrackets::default();
    let space = name
        .char_indices()
        .filter(|&(_, c)| brackets.take_character_and_check_outside(c) && c == ' ')
        .last();
    let Some(at) = space.map(|(at, _)| at) else { return name };
    let function = &name[at + 1..];
    // Names of operators such as `operator>` may close more brackets than they open.
    let count = |bracket| function.matches(bracket).count();
    let is_whole = !function.starts_with('(') && count('<') == count('>');
    if is_whole && name[..at].contains("::") { function } else { name }
}

/// Returns the text after `(int)`, `(bool)` or another cast of a template argument; `None` if the
/// text does not begin with a cast.
fn text_after_leading_cast(text: &str) -> Option<&str> {
    let casts = ["(int)", "(bool)", "(unsigned int)", "(unsigned long)", "(long)", "(short)"];
    casts.iter().find_map(|cast| text.strip_prefix(cast))
}

/// Returns a demangled function name without the list of parameters at its end.
fn name_without_parameter_list(name: &str) -> &str {
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
    use super::shortened_kernel_name_for_readers;

    #[test]
    fn kernel_names_are_shortened_for_readers() {
        assert_eq!(
            shortened_kernel_name_for_readers(
                "void at::native::vectorized_elementwise_kernel<(int)4, \
                 at::native::CUDAFunctor_add<float>, std::array<char *, (unsigned long)3>>(int, T2)"
            ),
            "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, array<char *, 3>>"
        );
        assert_eq!(
            shortened_kernel_name_for_readers("ampere_sgemm_128x64_tn"),
            "ampere_sgemm_128x64_tn"
        );
        assert_eq!(
            shortened_kernel_name_for_readers(
                "ncclDevKernel_SendRecv(ncclStorage<(unsigned long)4096>)"
            ),
            "ncclDevKernel_SendRecv"
        );
        assert_eq!(
            shortened_kernel_name_for_readers("void <unnamed>::softmax<float>(float *)"),
            "softmax<float>"
        );
        assert_eq!(
            shortened_kernel_name_for_readers("[CUDA memcpy Host-to-Device]"),
            "[CUDA memcpy Host-to-Device]"
        );
        assert_eq!(
            shortened_kernel_name_for_readers(
                "std::enable_if<(((8)>(0)))&&T<B>::exists, void>::type v::norm<B, 8>(B *)"
            ),
            "norm<B, 8>"
        );
        assert_eq!(
            shortened_kernel_name_for_readers(
                "void at::native::<unnamed>::apply<at::native::<unnamed>::List<(int)2>, \
                 at::native::Copy<long, long>>(T1, T2)"
            ),
            "apply<List<2>, Copy<long, long>>"
        );
        assert_eq!(shortened_kernel_name_for_readers("(odd)"), "(odd)");
        assert_eq!(shortened_kernel_name_for_readers(""), "");
        assert_eq!(shortened_kernel_name_for_readers("a::b))) (()"), "b))) (");
    }
}
