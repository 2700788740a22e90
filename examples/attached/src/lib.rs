//! What the benches beside this have in common: `out = 2.5 x + y`, what is right, and the PTX.

use kernelgate::attach::{AxisError, Definition, Dtype, Expected, Point};

pub const A: f32 = 2.5;

/// NUL at its end, as the driver wants it.
pub const PTX: &str = concat!(include_str!("../kernels/axpy.ptx"), "\0");

pub fn axpy(point: &Point) -> Result<Definition, AxisError> {
    let n = point.number("n")?;
    let tensors = Definition::new().input("x", [n], Dtype::F32).input("y", [n], Dtype::F32);
    Ok(tensors.output("out", [n], Dtype::F32).code(move |inputs| {
        let pairs = inputs.f32("x").iter().zip(inputs.f32("y"));
        let out = pairs.map(|(&x, &y)| f64::from(A) * f64::from(x) + f64::from(y));
        vec![Expected::all("out", [n], out.collect::<Vec<f64>>())]
    }))
}
