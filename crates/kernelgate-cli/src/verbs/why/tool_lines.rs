//! Command lines with which a user measures a case with Nsight Systems or Nsight Compute, and reads
//! the result with kernelgate.

use std::collections::BTreeMap;

use crate::benches::cargo::BenchExecutable;

use crate::fleet::job_commands::shell_quoted_if_necessary;

/// Sections of Nsight Compute that show whether memory or arithmetic bounds a kernel, what limits
/// its occupancy, and why its warps stall.
const NCU_SECTIONS_TO_COLLECT: [&str; 6] = [
    "SpeedOfLight",
    "LaunchStats",
    "Occupancy",
    "SchedulerStats",
    "WarpStateStats",
    "MemoryWorkloadAnalysis",
];
/// Largest number of kernels that Nsight Compute measures; the kernels with the most time come
/// first.
const MAX_KERNELS_FOR_NSIGHT_COMPUTE: usize = 3;
/// Number of launches of each kernel that Nsight Compute measures.
const LAUNCHES_PER_KERNEL_FOR_NCU: usize = 5;

/// Longest line of a printed command after wrapping, in columns.
const WRAPPED_COMMAND_COLUMNS: usize = 96;

/// The command lines for Nsight Systems and for Nsight Compute, each followed by the kernelgate
/// command that reads its report. `kernels` are the kernels of the case, those with the most time
/// first; without any, kernels whose names begin with the workload family are measured.
pub fn nsight_command_lines(
    executable: &BenchExecutable,
    settings: &BTreeMap<String, String>,
    case: &str,
    kernels: &[&str],
) -> [Vec<String>; 2] {
    let name = case.replace('/', "_");
    let line = |tool: &str, options: Vec<String>, then: [String; 2]| {
        let variables = settings
            .iter()
            .map(|(name, value)| format!("{name}={}", shell_quoted_if_necessary(value)));
        let mut line: Vec<String> = variables.collect();
        line.extend(tool.split(' ').map(str::to_owned));
        line.extend(options);
        line.push(shell_quoted_if_necessary(&executable.executable_path.to_string_lossy()));
        line.extend(["--bench", "--noplot", "--profile-time 1"].map(str::to_owned));
        line.push(shell_quoted_if_necessary(&format!("^{}$", regex::escape(case))));
        line.extend(then);
        line
    };
    let sections = NCU_SECTIONS_TO_COLLECT.map(|section| format!("--section {section}"));
    let kernels = [
        format!(
            "-k {}",
            shell_quoted_if_necessary(&format!("regex:{}", ncu_kernel_name_filter(case, kernels)))
        ),
        format!("--launch-count {LAUNCHES_PER_KERNEL_FOR_NCU}"),
    ];
    [
        line(
            "nsys profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node",
            vec![format!("--output {name}")],
            ["&& kernelgate diagnose".to_owned(), format!("{name}.nsys-rep")],
        ),
        line(
            "ncu --csv --page details --clock-control none",
            sections.into_iter().chain(kernels).collect(),
            [format!("> {name}.csv"), format!("&& kernelgate diagnose {name}.csv")],
        ),
    ]
}

/// Joins the words of a command line, wrapped for a terminal with backslashes at line ends.
pub fn wrapped_command_line(words: &[String]) -> String {
    let (mut text, mut column) = (String::new(), 0);
    for word in words {
        let length = word.chars().count() + 1;
        if column > 0 && column + length > WRAPPED_COMMAND_COLUMNS {
            text += " \\\n  ";
            column = 2;
        } else if column > 0 {
            text.push(' ');
        }
        text += word;
        column += length;
    }
    text
}

/// A regular expression for the names of the kernels that Nsight Compute measures.
fn ncu_kernel_name_filter(case: &str, kernels: &[&str]) -> String {
    let own = kernels.iter().filter_map(|name| function_name_of_symbol(name));
    let mut names: Vec<String> =
        own.take(MAX_KERNELS_FOR_NSIGHT_COMPUTE).map(regex::escape).collect();
    names.dedup();
    if names.is_empty() {
        let family = case.split('/').next().unwrap_or_default();
        return format!("^{}", regex::escape(family));
    }
    format!("^({})$", names.join("|"))
}

/// The function name by which Nsight Compute filters kernels: for a mangled symbol
/// (`_ZN3lib4gemmI…`) the last of the nested names at its start, here `gemm`. Returns `None` if a
/// mangled symbol cannot be parsed.
fn function_name_of_symbol(symbol: &str) -> Option<&str> {
    let Some(mangled) = symbol.strip_prefix("_Z") else {
        return Some(symbol).filter(|name| !name.is_empty());
    };
    let mut rest = mangled.strip_prefix('N').unwrap_or(mangled);
    let mut own = None;
    loop {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let Ok(length) = rest[..digits].parse::<usize>() else { return own };
        let Some(name) = rest.get(digits..digits.saturating_add(length)) else { return own };
        own = Some(name);
        rest = &rest[digits + length..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profiler_commands_measure_only_the_case_and_name_a_viewer() {
        let executable = BenchExecutable {
            bench_name: "st_bif".to_owned(),
            executable_path: "/a b/st_bif-1".into(),
            package_root: "/".into(),
        };
        let settings = BTreeMap::from([("KERNELGATE_SEED".to_owned(), "7".to_owned())]);
        let kernels = ["k_1", "_Zfoo", "_ZN7cutlass7Kernel2I4gemmEEvv"];
        let [nsys, ncu] =
            nsight_command_lines(&executable, &settings, "f/op/n8/cuda/x/hot", &kernels).map(
                |words| {
                    let broken = wrapped_command_line(&words);
                    assert!(broken.lines().all(|line| line.chars().count() <= 100), "{broken}");
                    assert_eq!(broken.replace(" \\\n  ", " "), words.join(" "));
                    words.join(" ")
                },
            );
        insta::assert_snapshot!(nsys, @"KERNELGATE_SEED=7 nsys profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node --output f_op_n8_cuda_x_hot '/a b/st_bif-1' --bench --noplot --profile-time 1 '^f/op/n8/cuda/x/hot$' && kernelgate diagnose f_op_n8_cuda_x_hot.nsys-rep");
        insta::assert_snapshot!(ncu, @"KERNELGATE_SEED=7 ncu --csv --page details --clock-control none --section SpeedOfLight --section LaunchStats --section Occupancy --section SchedulerStats --section WarpStateStats --section MemoryWorkloadAnalysis -k 'regex:^(k_1|Kernel2)$' --launch-count 5 '/a b/st_bif-1' --bench --noplot --profile-time 1 '^f/op/n8/cuda/x/hot$' > f_op_n8_cuda_x_hot.csv && kernelgate diagnose f_op_n8_cuda_x_hot.csv");
        assert_eq!(ncu_kernel_name_filter("f/op", &[]), "^f");
        assert_eq!(function_name_of_symbol("_Z4gemmPf"), Some("gemm"));
        assert_eq!(function_name_of_symbol("_Z99gemm"), None, "cut short");
        assert_eq!(ncu_kernel_name_filter("f/op", &["a", "b", "c", "d"]), "^(a|b|c)$");
    }
}
