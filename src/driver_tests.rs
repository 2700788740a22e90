//! Tests that a program which links this benchmark suite calls only CUDA driver functions of
//! version 12.4, the oldest supported one. No CUDA 12.4 driver is available for tests, so its
//! functions are read from its header, and the called functions from the symbols of the test
//! executable.

use std::collections::BTreeSet;

/// Names of the CUDA driver functions whose cudarc bindings are linked: each binding leaves a
/// symbol with its name, in cudarc's module `driver::sys`.
fn driver_functions_in_executable_symbols(executable: &[u8]) -> BTreeSet<String> {
    const MANGLED_DRIVER_SYS_PATH: &[u8] = b"6driver3sys";
    let mut names = BTreeSet::new();
    let places = executable.windows(MANGLED_DRIVER_SYS_PATH.len()).enumerate();
    for (at, _) in places.filter(|(_, bytes)| *bytes == MANGLED_DRIVER_SYS_PATH) {
        let rest = &executable[at + MANGLED_DRIVER_SYS_PATH.len()..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let length = std::str::from_utf8(&rest[..digits]).unwrap().parse().unwrap_or(0);
        let name = rest.get(digits..digits + length).unwrap_or_default();
        let of_driver = name.starts_with(b"cu") && name.get(2).is_some_and(u8::is_ascii_uppercase);
        if of_driver {
            names.insert(String::from_utf8_lossy(name).into_owned());
        }
    }
    names
}

#[test]
fn every_linked_driver_function_exists_in_cuda_12_4() {
    let available: BTreeSet<&str> = include_str!("driver-12.4.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(str::split_whitespace)
        .collect();
    assert!(
        available.contains("cuFuncGetParamInfo") && !available.contains("cuEventElapsedTime_v2")
    );
    // The unused reference to `run_bench_of_family` links all code that a bench executable uses
    // into the test executable.
    std::hint::black_box(crate::run_bench_of_family as *const ());
    let executable = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    // The mangled name of this test function is assembled at run time, because a constant with the
    // name would itself be found in the executable.
    let [module, test] = std::hint::black_box([12, 52]);
    let mangled = format!("{module}driver_tests{test}every_driver").into_bytes();
    if !executable.windows(mangled.len()).any(|bytes| bytes == mangled) {
        eprintln!("skipped: the symbols of this executable were stripped");
        return;
    }
    let linked = driver_functions_in_executable_symbols(&executable);
    for expected in ["cuLaunchKernelEx", "cuGraphLaunch", "cuModuleLoadData"] {
        assert!(linked.contains(expected), "{expected} is not seen among {linked:?}");
    }
    let unknown: Vec<_> = linked.iter().filter(|name| !available.contains(name.as_str())).collect();
    assert!(unknown.is_empty(), "CUDA 12.4 has no {unknown:?}");
}
