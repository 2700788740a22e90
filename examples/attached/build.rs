//! Compiles the C library of `benches/c_library.rs`, linked with the driver as such libraries are. To
//! link takes no driver: a library of its name without a function will do, as the CUDA toolkit has
//! one in `lib64/stubs`.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=kernels/axpy.c");
    let folder = std::env::var_os("OUT_DIR").unwrap();
    let (stub, library) =
        (Path::new(&folder).join("libcuda.so.1"), Path::new(&folder).join("libaxpy.so"));
    let compile = |arguments: &[&str], to: &Path| {
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let mut command = Command::new(compiler);
        let compiled = command.args(["-O2", "-shared", "-fPIC"]).args(arguments).arg("-o").arg(to);
        assert!(compiled.status().expect("a C compiler").success());
    };
    compile(&["-Wl,-soname,libcuda.so.1", "-xc", "/dev/null"], &stub);
    let stub = stub.to_str().unwrap();
    compile(&["kernels/axpy.c", "-Wl,--no-as-needed", stub], &library);
    println!("cargo::rustc-env=AXPY_LIBRARY={}", library.display());
}
