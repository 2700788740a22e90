//! Parts that the benches beside this file share: the definition `out = 2.5 x + y`, its reference,
//! and the PTX.

use std::ffi::{c_int, c_void};

use kernelgate::attach::{
    AxisError, Dtype, Expected, OutputReference, Point, ProblemDefinition, TensorSpec, Tolerances,
};

pub const A: f32 = 2.5;

/// PTX with a NUL at its end, as the driver requires.
pub const PTX: &str = concat!(include_str!("../kernels/axpy.ptx"), "\0");

/// `axpy_load` of the library in C: of the text of a module, its kernel.
pub type Load = unsafe extern "C" fn(*const u8) -> *mut c_void;

/// `axpy` of that library: kernel, stream, a, the addresses of x, y and out, their length; an error
/// of the driver, or 0.
pub type Axpy = unsafe extern "C" fn(*mut c_void, *mut c_void, f32, u64, u64, u64, u32) -> c_int;

pub fn axpy(point: &Point) -> Result<ProblemDefinition, AxisError> {
    let n = point.number("n")?;
    let [x, y, out] = ["x", "y", "out"].map(|name| TensorSpec::new(name, [n], Dtype::F32));
    let (inputs, outputs) = (vec![x, y], vec![out]);
    let reference = OutputReference::from_function(move |inputs| {
        let pairs = inputs.f32("x").iter().zip(inputs.f32("y"));
        let out = pairs.map(|(&x, &y)| f64::from(A) * f64::from(x) + f64::from(y));
        vec![Expected::all("out", [n], out.collect::<Vec<f64>>())]
    });
    let (work, tolerance) =
        (ProblemDefinition::traffic_work(&inputs, &outputs), Tolerances::by_dtype());
    Ok(ProblemDefinition { inputs, outputs, reference, work, tolerance })
}
