//! Build script: compiles the C library of `benches/c_library.rs`, and links it with the CUDA
//! driver library. Linking needs no installed driver: a library of the same name without functions
//! suffices, such as the one in `lib64/stubs` of the CUDA toolkit.

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
