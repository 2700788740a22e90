//! A definition as the harness sees it.

use std::collections::BTreeMap;

use half::{bf16, f16};

use super::definition::{Declared, Definition, Reference};
use super::golden;
use crate::workload::{
    Data, Dtype, Expected, Problem, ReferenceFrom, Tensors, Tolerance, Work, random,
};

/// A definition with what its golden file holds.
pub(super) struct Bound {
    pub definition: Definition,
    /// Inputs and outputs of the golden file; empty where there is none.
    golden: Result<(Tensors, Tensors), String>,
}

impl Bound {
    pub fn new(definition: Definition) -> Self {
        let golden = match &definition.reference {
            Reference::Golden(path) => golden::read(path, &definition.inputs, &definition.outputs),
            _ => Ok(Default::default()),
        };
        Self { definition, golden }
    }

    fn golden(&self) -> Option<&(Tensors, Tensors)> {
        self.golden.as_ref().ok()
    }

    /// Device memory of inputs and outputs.
    pub fn device_bytes(&self) -> u64 {
        let Definition { inputs, outputs, .. } = &self.definition;
        inputs.iter().chain(outputs).map(|declared| declared.bytes() as u64).sum()
    }
}

fn draw(declared: &Declared, seed: u64) -> Data {
    let (name, len) = (declared.name, declared.len());
    let spread = |x: f32| (32.0 * x).round().clamp(-128.0, 127.0) as i8;
    match declared.dtype {
        Dtype::F64 => Data::F64(random::map_normal(seed, name, len, f64::from)),
        Dtype::F32 => Data::F32(random::normal(seed, name, len)),
        Dtype::F16 => Data::F16(random::map_normal(seed, name, len, f16::from_f32)),
        Dtype::Bf16 => Data::Bf16(random::map_normal(seed, name, len, bf16::from_f32)),
        Dtype::Fp8 => Data::I8(random::map_normal(seed, name, len, |x| code(x) as i8)),
        Dtype::I8 => Data::I8(random::map_normal(seed, name, len, spread)),
    }
}

/// A code of e4m3 by the bits of a number: its sign, and magnitudes from 2^-3 to 2^1 without a NaN
/// among them.
const fn code(x: f32) -> u8 {
    let bits = x.to_bits();
    (bits >> 31 << 7) as u8 | (0x20 + (bits >> 8 & 0x1f)) as u8
}

impl Problem for Bound {
    fn inputs(&self, seed: u64) -> Tensors {
        let mut inputs = Tensors::new();
        for declared in &self.definition.inputs {
            let kept = self.golden().and_then(|(inputs, _)| inputs.get(declared.name));
            match kept {
                Some(tensor) => inputs.insert(declared.name, tensor.clone()),
                None => {
                    let drawn = draw(declared, seed);
                    inputs = inputs.with(declared.name, declared.shape.clone(), drawn);
                }
            }
        }
        inputs
    }

    /// Golden outputs are of their inputs alone.
    fn redraw(&self, names: &[&str], seed: u64) -> Tensors {
        match self.definition.reference {
            Reference::Golden(_) => Tensors::new(),
            _ => self.inputs(seed).only(names),
        }
    }

    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        match &self.definition.reference {
            Reference::Code(compute) => compute(inputs),
            Reference::Golden(_) => self.golden().map_or(Vec::new(), |(_, outputs)| {
                let each = outputs.iter().map(|(name, tensor)| {
                    let values = match tensor.data() {
                        Data::I8(values) => Data::I8(values.clone()),
                        _ => Data::F64(tensor.to_f64(0, tensor.len())),
                    };
                    Expected::all(name, tensor.shape().to_vec(), values)
                });
                each.collect()
            }),
            Reference::None | Reference::Row(_) => Vec::new(),
        }
    }

    fn check(&self) -> Result<(), String> {
        let fp8 = self.definition.outputs.iter().find(|output| output.dtype == Dtype::Fp8);
        if let Some(Declared { name, .. }) = fp8 {
            return Err(format!(
                "output `{name}` is in fp8, which nothing here compares: declare it as i8, whose \
                 bytes are compared exactly, or a wider float that the row converts it to"
            ));
        }
        let is_output = |name: &&str| self.definition.outputs.iter().any(|it| it.name == *name);
        if let Some(name) = self.definition.tolerances.keys().find(|name| !is_output(name)) {
            return Err(format!("a tolerance of output `{name}`, which is not declared"));
        }
        self.golden.as_ref().map(drop).map_err(Clone::clone)
    }

    fn reads_files(&self) -> bool {
        matches!(self.definition.reference, Reference::Golden(_))
    }

    /// Golden outputs are of one seed, that of the golden inputs or of those that were drawn for
    /// them.
    fn one_data_set(&self) -> bool {
        matches!(self.definition.reference, Reference::Golden(_))
    }

    fn reference_from(&self) -> ReferenceFrom {
        match self.definition.reference {
            Reference::None => ReferenceFrom::Nothing,
            Reference::Row(row) => ReferenceFrom::Row(row),
            Reference::Code(_) | Reference::Golden(_) => ReferenceFrom::Definition,
        }
    }

    fn work(&self) -> Work {
        let bytes = |all: &[Declared]| all.iter().map(|it| it.bytes() as u64).sum();
        let Definition { inputs, outputs, work, .. } = &self.definition;
        work.clone().unwrap_or_else(|| Work::bytes(bytes(inputs), bytes(outputs)))
    }

    /// That of the output which is allowed the most.
    fn tolerance(&self) -> Tolerance {
        let none = Tolerance { max_error: 0.0, relative_l2: 0.0 };
        self.tolerances().into_values().fold(none, |most, of| Tolerance {
            max_error: most.max_error.max(of.max_error),
            relative_l2: most.relative_l2.max(of.relative_l2),
        })
    }

    fn tolerances(&self) -> BTreeMap<String, Tolerance> {
        let outputs = self.definition.outputs.iter();
        outputs.map(|it| (it.name.to_owned(), self.definition.allowed(it))).collect()
    }

    /// Inputs twice, because others replace them, outputs, and both in fp64.
    fn host_bytes(&self) -> u64 {
        let Definition { inputs, outputs, .. } = &self.definition;
        let elements: usize = inputs.iter().chain(outputs).map(Declared::len).sum();
        2 * self.device_bytes() + 8 * elements as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify;

    #[test]
    fn inputs_in_fp8_are_numbers_and_outputs_in_it_are_refused() {
        let fp8 = Definition::new().input("x", [1 << 16], Dtype::Fp8);
        let bound = Bound::new(fp8.clone());
        assert_eq!(bound.check(), Ok(()));
        let inputs = bound.inputs(7);
        let codes: Vec<u8> = inputs.tensor("x").as_bytes().to_vec();
        assert!(codes.iter().all(|code| (0x20..0x40).contains(&(code & 0x7f))));
        let negative = codes.iter().filter(|&&code| code & 0x80 != 0).count();
        assert!((1 << 14..3 << 14).contains(&negative), "{negative} of {}", codes.len());
        let refused = Bound::new(fp8.output("y", [4], Dtype::Fp8)).check().unwrap_err();
        assert!(refused.contains("output `y` is in fp8"), "{refused}");
    }

    #[test]
    fn golden_tensors_are_read_anew() {
        let golden = Definition::new().golden("nowhere.safetensors");
        assert!(Bound::new(golden).reads_files());
        assert!(!Bound::new(Definition::new().code(|_| Vec::new())).reads_files());
    }

    fn outputs(dtypes: &[Dtype]) -> Definition {
        let names = ["y", "z"].into_iter().zip(dtypes);
        names.fold(Definition::new(), |all, (name, dtype)| all.output(name, [4], *dtype))
    }

    #[test]
    fn an_undeclared_tolerance_is_of_the_outputs_dtype_and_a_declared_one_stays() {
        let allowed = |definition: Definition| {
            let Tolerance { max_error, relative_l2 } = Bound::new(definition).tolerance();
            (max_error, relative_l2)
        };
        for (dtypes, error) in [
            (&[Dtype::F64][..], 1e-5),
            (&[Dtype::F32], 1e-5),
            (&[Dtype::F16], 4.0 * 0.5f64.powi(11)),
            (&[Dtype::Bf16], 4.0 * 0.5f64.powi(8)),
            (&[Dtype::F32, Dtype::Bf16], 4.0 * 0.5f64.powi(8)),
            (&[Dtype::F32, Dtype::Fp8], 1e-5),
        ] {
            assert_eq!(allowed(outputs(dtypes)), (error, error), "{dtypes:?}");
        }
        assert_eq!(allowed(outputs(&[Dtype::Bf16]).tolerance(1e-3, 1e-4)), (1e-3, 1e-4));
    }

    #[test]
    fn each_output_is_held_to_its_own_tolerance() {
        let each = |definition: Definition| {
            let all = Bound::new(definition).tolerances();
            ["y", "z"].map(|name| all[name].max_error)
        };
        let mixed = outputs(&[Dtype::Bf16, Dtype::F32]);
        assert_eq!(each(mixed.clone()), [4.0 * 0.5f64.powi(8), 1e-5]);
        assert_eq!(each(mixed.clone().tolerance(1e-3, 1e-3)), [1e-3; 2]);
        let one = mixed.clone().tolerance_of("z", 2e-4, 1e-4);
        assert_eq!(each(one.clone()), [4.0 * 0.5f64.powi(8), 2e-4]);
        assert_eq!(each(one.tolerance(1e-3, 1e-3)), [1e-3, 2e-4]);
        let unknown = Bound::new(mixed.tolerance_of("x", 1.0, 1.0)).check().unwrap_err();
        assert_eq!(unknown, "a tolerance of output `x`, which is not declared");
    }

    #[test]
    fn golden_tensors_are_one_data_set_whatever_the_seed() {
        let one = |definition: Definition| Bound::new(definition).one_data_set();
        assert!(one(outputs(&[Dtype::F32]).golden("none.safetensors")));
        assert!(!one(outputs(&[Dtype::F32])) && !one(outputs(&[Dtype::F32]).like_row("x")));
        assert!(!one(outputs(&[Dtype::F32]).code(|_| Vec::new())));
    }

    /// What `compare` does with a row without a reference.
    #[test]
    fn outputs_one_unit_in_the_last_place_apart_are_alike() {
        let ys = |bits: u16| {
            let y = vec![bf16::from_bits(bits), bf16::from_f32(0.5)];
            Tensors::new().with("y", [2], Data::Bf16(y))
        };
        // 1 and its neighbours: 2^-7 above, where units are widest.
        let base = verify::as_expected(&ys(0x3f80));
        let tolerance = Bound::new(outputs(&[Dtype::Bf16])).tolerance();
        assert!(verify::compare(&ys(0x3f81), &base, tolerance).is_ok());
        assert!(verify::compare(&ys(0x3f84), &base, tolerance).is_err());
    }
}
