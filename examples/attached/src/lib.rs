//! Code that the benches of this package share: the definition of `out = 2.5 x + y`, its reference,
//! and the kernel's PTX.

use std::ffi::{c_int, c_void};

use kernelgate::attach::{
    AxisError, Dtype, Expected, OutputReference, Point, ProblemDefinition, TensorSpec, Tolerances,
};

pub const A: f32 = 2.5;

/// PTX of the kernel with a NUL byte at its end, which the CUDA driver requires.
pub const AXPY_PTX: &str = concat!(include_str!("../kernels/axpy.ptx"), "\0");

/// Type of the C library's function `axpy_load`: it takes the text of a PTX module, and returns the
/// kernel.
pub type AxpyLoadFunction = unsafe extern "C" fn(*const u8) -> *mut c_void;

/// Type of the C library's function `axpy`: kernel, stream, a, addresses of x, y and out, their
/// length; it returns a CUDA driver error or 0.
pub type AxpyLaunchFunction =
    unsafe extern "C" fn(*mut c_void, *mut c_void, f32, u64, u64, u64, u32) -> c_int;

pub fn axpy_problem_at_point(point: &Point) -> Result<ProblemDefinition, AxisError> {
    let n = point.number("n")?;
    let [x, y, out] = ["x", "y", "out"].map(|name| TensorSpec::new(name, [n], Dtype::F32));
    let (inputs, outputs) = (vec![x, y], vec![out]);
    let reference = OutputReference::from_function(move |inputs| {
        let pairs = inputs.f32_elements("x").iter().zip(inputs.f32_elements("y"));
        let out = pairs.map(|(&x, &y)| f64::from(A) * f64::from(x) + f64::from(y));
        vec![Expected::all("out", [n], out.collect::<Vec<f64>>())]
    });
    let (work, tolerance) =
        (ProblemDefinition::traffic_work(&inputs, &outputs), Tolerances::by_dtype());
    Ok(ProblemDefinition { inputs, outputs, reference, work, tolerance })
}
