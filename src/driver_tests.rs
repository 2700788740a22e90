//! Tests that a program which links the suite calls only functions of CUDA 12.4, the oldest
//! supported driver. No such driver is available for tests, so the functions are read from its
//! header, and the calls from the symbols of this executable.

use std::collections::BTreeSet;

/// Names of the functions whose bindings are linked: cudarc has a function of the name each, in its
/// module `driver::sys`, with a static that holds the address once it was looked up.
fn linked_driver_functions(executable: &[u8]) -> BTreeSet<String> {
    const DRIVER_MODULE_SYMBOL: &[u8] = b"6driver3sys";
    let mut names = BTreeSet::new();
    let places = executable.windows(DRIVER_MODULE_SYMBOL.len()).enumerate();
    for (at, _) in places.filter(|(_, bytes)| *bytes == DRIVER_MODULE_SYMBOL) {
        let rest = &executable[at + DRIVER_MODULE_SYMBOL.len()..];
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
fn every_driver_function_that_is_called_is_in_cuda_12_4() {
    let available: BTreeSet<&str> = include_str!("driver-12.4.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(str::split_whitespace)
        .collect();
    assert!(
        available.contains("cuFuncGetParamInfo") && !available.contains("cuEventElapsedTime_v2")
    );
    // The reference links all code that a bench uses.
    std::hint::black_box(crate::run_bench as *const ());
    let executable = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    // The mangled name of this test is assembled at run time; as a constant it would be found in
    // the executable.
    let [module, test] = std::hint::black_box([12, 52]);
    let mangled = format!("{module}driver_tests{test}every_driver").into_bytes();
    if !executable.windows(mangled.len()).any(|bytes| bytes == mangled) {
        eprintln!("skipped: the symbols of this executable were stripped");
        return;
    }
    let linked = linked_driver_functions(&executable);
    for expected in ["cuLaunchKernelEx", "cuGraphLaunch", "cuModuleLoadData"] {
        assert!(linked.contains(expected), "{expected} is not seen among {linked:?}");
    }
    let unknown: Vec<_> = linked.iter().filter(|name| !available.contains(name.as_str())).collect();
    assert!(unknown.is_empty(), "CUDA 12.4 has no {unknown:?}");
}
