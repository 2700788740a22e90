//! Inputs of an attention backward, with the output and log-sum-exp that a forward pass saved for
//! it.
//!
//! The forward pass is our fastest one that the device can run; it runs once while a case is
//! prepared. The forward pass cannot be chosen by row: all rows, the library's too, start from
//! equal numbers.

use std::sync::Arc;

use crate::attention::cuda::call::{AttentionTechnique, ForwardAddresses};
use crate::attention::cuda::launch::{Extents, allocate_scratch, upload_inputs};
use crate::attention::cuda::launches::ForwardCall;
use crate::attention::cuda::layout::{AttentionShape, ForwardLayout};
use crate::attention::definition::Attention;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{self, Input};
use kernelgate::workload::Tensors;
use kernelgate_cuda::{Device, DeviceBuffer};

/// Tensors that an attention backward reads.
pub struct BackwardInputs {
    pub q: DeviceBuffer,
    pub k: DeviceBuffer,
    pub v: DeviceBuffer,
    pub grad_out: DeviceBuffer,
    pub out: DeviceBuffer,
    /// Log-sum-exp of the rows: fp32, natural logarithm, one for each row.
    pub lse: DeviceBuffer,
}

impl BackwardInputs {
    /// The only input that the harness may replace between launches: grad_out. The saved output and
    /// normalisers depend on q, k and v, so these three inputs are not replaced.
    pub fn inputs_of_every_launch(&self) -> [Input; 1] {
        cuda::named_inputs([("grad_out", &self.grad_out)])
    }

    /// Uploads the inputs; the saved outputs of the forward pass hold arbitrary values.
    fn upload_with_arbitrary_outputs(
        extents: &Extents,
        inputs: &Tensors,
        device: &Arc<Device>,
    ) -> Result<Self, BackendError> {
        let [q, k, v, grad_out] = upload_inputs(device, inputs, ["q", "k", "v", "grad_out"])?;
        let out = allocate_scratch(device, extents.vector_bytes())?;
        let lse = allocate_scratch(device, 4 * extents.query_rows())?;
        Ok(Self { q, k, v, grad_out, out, lse })
    }

    /// Runs the forward pass, which writes `out` and `lse`.
    fn save_forward_outputs(
        &self,
        attention: &Attention,
        technique: AttentionTechnique,
        device: &Arc<Device>,
    ) -> Result<(), BackendError> {
        let shape = AttentionShape::from(attention);
        let forward =
            ForwardCall::new(device, &shape, &ForwardLayout::strides_of_bhsd(&shape), technique)?;
        let launches = forward.prepare_launches(&ForwardAddresses {
            q: self.q.address(),
            k: self.k.address(),
            v: self.v.address(),
            out: self.out.address(),
            lse: Some(self.lse.address()),
        })?;
        launches.launch()?;
        // Waits for the kernel, because the lists of tiles are freed on return.
        device.synchronize()
    }
}

/// Uploads the inputs and runs the forward pass, which is not part of the timed problem.
pub fn save_forward_outputs(
    attention: &Attention,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<BackwardInputs, BackendError> {
    let saved =
        BackwardInputs::upload_with_arbitrary_outputs(&Extents::from(attention), inputs, device)?;
    let technique =
        AttentionTechnique::fastest_on_device(device, &AttentionShape::from(attention))?;
    saved.save_forward_outputs(attention, technique, device)?;
    Ok(saved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::definition::HeadTensors;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::workload::Dtype;

    /// Computes `ln Σ exp(q kᵀ / sqrt(d))` in fp64 for every row, over the keys that the row sees.
    fn log_sum_exps(attention: &Attention, inputs: &Tensors) -> Vec<f64> {
        let Attention { b, h, s, causal, .. } = *attention;
        let heads = HeadTensors { attention, inputs };
        let of_head = |head| {
            let [q, k] = ["q", "k"].map(|name| heads.first_positions(name, head, s));
            let scores = attention.head().scaled_scores(&q, &k);
            let of_row = |(row, scores): (usize, &[f64])| {
                let seen = &scores[..if causal { row + 1 } else { s }];
                let top = seen.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                top + seen.iter().map(|score| (score - top).exp()).sum::<f64>().ln()
            };
            scores.chunks(s).enumerate().map(of_row).collect::<Vec<_>>()
        };
        (0..b * h).flat_map(of_head).collect()
    }

    /// Maximum of |found - expected| / (1 + |expected|). The 1 is added because values near zero
    /// carry the rounding errors of larger scores.
    fn largest_relative_error(found: &[f32], expected: &[f64]) -> f64 {
        assert_eq!(found.len(), expected.len());
        let error = |(found, expected): (&f32, &f64)| {
            let error = (f64::from(*found) - expected).abs() / (1.0 + expected.abs());
            if error.is_nan() { f64::INFINITY } else { error }
        };
        found.iter().zip(expected).map(error).fold(0.0, f64::max)
    }

    /// Bound that is above fp32's rounding, and below the effect of one extra or missing key on a
    /// row of 1000 keys.
    const MAX_TEST_ERROR: f64 = 5e-5;

    #[test]
    fn both_forward_kernels_save_the_log_sum_exp_of_the_reference() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        // The numbers of query heads, key heads and queries: a single row, edges of tiles and of
        // key blocks, several tiles for each multiprocessor.
        for (h, h_kv, s) in [
            (3, 3, 1),
            (3, 3, 63),
            (3, 3, 127),
            (6, 2, 129),
            (3, 3, 193),
            (70, 70, 321),
            (4, 1, 1000),
        ] {
            for (d, causal) in [(64, false), (64, true), (128, false), (128, true)] {
                for (dtype, outliers) in
                    [(Dtype::Bf16, false), (Dtype::F16, false), (Dtype::Bf16, true)]
                {
                    let attention =
                        Attention { b: 2, h, h_kv, s, keys: s, d, causal, dtype, outliers };
                    let inputs = attention.inputs(25, &["q", "k", "v", "grad_out"]);
                    let expected = log_sum_exps(&attention, &inputs);
                    let extents = Extents::from(&attention);
                    let saved =
                        BackwardInputs::upload_with_arbitrary_outputs(&extents, &inputs, &device)
                            .unwrap();
                    let check = |technique| {
                        // In this test every row of lse starts as NaN.
                        saved.lse.fill(0xff).unwrap();
                        saved.save_forward_outputs(&attention, technique, &device).unwrap();
                        let mut found = vec![0f32; expected.len()];
                        saved.lse.download(bytemuck::cast_slice_mut(&mut found)).unwrap();
                        let error = largest_relative_error(&found, &expected);
                        assert!(
                            error <= MAX_TEST_ERROR,
                            "{technique:?}, {attention:?}: {error:.1e}"
                        );
                    };
                    check(AttentionTechnique::FlashMma);
                    if device.facts().arch == "sm_90a" {
                        check(AttentionTechnique::FlashWgmma);
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_of_lse_that_was_not_written_is_an_error() {
        assert!(largest_relative_error(&[1.0, 2.0], &[1.0, 2.0]) <= MAX_TEST_ERROR);
        assert!(largest_relative_error(&[1.0, 2.001], &[1.0, 2.0]) > MAX_TEST_ERROR);
        assert!(largest_relative_error(&[f32::NAN, 2.0], &[1.0, 2.0]) > MAX_TEST_ERROR);
    }
}
