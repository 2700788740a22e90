//! Compiles the C library of `benches/c_library.rs`.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=kernels/axpy.c");
    let library = Path::new(&std::env::var_os("OUT_DIR").unwrap()).join("libaxpy.so");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let compiled = Command::new(compiler)
        .args(["-O2", "-shared", "-fPIC", "kernels/axpy.c", "-o"])
        .arg(&library)
        .status()
        .expect("a C compiler");
    assert!(compiled.success());
    println!("cargo::rustc-env=AXPY_LIBRARY={}", library.display());
}
