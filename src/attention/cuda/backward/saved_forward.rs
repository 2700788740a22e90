//! GPU inputs of an attention backward, with the output and log-sum-exp that a forward pass saved
//! for it.
//!
//! The forward pass is kernelgate's fastest one that the device supports; it runs once while a case
//! is prepared. The saved forward pass cannot be chosen: all backward implementations, the
//! library's too, start from equal numbers.

use std::sync::Arc;

use crate::attention::cuda::call::{AttentionForwardAddresses, AttentionGemmTechnique};
use crate::attention::cuda::launch::{
    AttentionExtents, allocate_uninitialised_scratch, upload_named_inputs,
};
use crate::attention::cuda::launches::AttentionForwardCall;
use crate::attention::cuda::layout::{AttentionForwardLayout, AttentionShape};
use crate::attention::definition::AttentionParameters;
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{self, DeviceInput};
use kernelgate::workload::Tensors;
use kernelgate_cuda::{Device, DeviceBuffer};

/// Device buffers of the tensors that an attention backward reads.
pub struct AttentionBackwardInputs {
    pub q: DeviceBuffer,
    pub k: DeviceBuffer,
    pub v: DeviceBuffer,
    pub grad_out: DeviceBuffer,
    pub out: DeviceBuffer,
    /// Log-sum-exp of the scores: fp32, natural logarithm, one number for each query row.
    pub lse: DeviceBuffer,
}

impl AttentionBackwardInputs {
    /// The only input of an attention backward that the harness may replace between launches:
    /// grad_out. The saved output and log-sum-exp depend on q, k and v, so the harness does not
    /// replace q, k or v between launches.
    pub fn output_gradient_as_replaceable_input(&self) -> [DeviceInput; 1] {
        cuda::named_inputs([("grad_out", &self.grad_out)])
    }

    /// Uploads q, k, v and grad_out, and allocates the buffers `out` and `lse` without writing
    /// them.
    fn upload_inputs_without_forward(
        extents: &AttentionExtents,
        inputs: &Tensors,
        device: &Arc<Device>,
    ) -> Result<Self, BackendError> {
        let [q, k, v, grad_out] = upload_named_inputs(device, inputs, ["q", "k", "v", "grad_out"])?;
        let out = allocate_uninitialised_scratch(device, extents.query_tensor_bytes())?;
        let lse = allocate_uninitialised_scratch(device, 4 * extents.queries_of_all_heads())?;
        Ok(Self { q, k, v, grad_out, out, lse })
    }

    /// Runs the attention forward, which writes the buffers `out` and `lse`, and waits for it.
    fn run_forward_and_wait(
        &self,
        attention: &AttentionParameters,
        technique: AttentionGemmTechnique,
        device: &Arc<Device>,
    ) -> Result<(), BackendError> {
        let shape = AttentionShape::from(attention);
        let forward = AttentionForwardCall::compile_and_load_attention_forward(
            device,
            &shape,
            &AttentionForwardLayout::forward_layout_dense_bhsd(&shape),
            technique,
        )?;
        let launches = forward.prepare_forward_launch_at_addresses(&AttentionForwardAddresses {
            q_address: self.q.device_address(),
            k_address: self.k.device_address(),
            v_address: self.v.device_address(),
            out_address: self.out.device_address(),
            lse_address: Some(self.lse.device_address()),
        })?;
        launches.enqueue_all_launches()?;
        // Waits for the forward kernel, because its lists of tiles are freed on return.
        device.synchronize()
    }
}

/// Uploads the inputs of an attention backward and runs the forward pass, which is not part of the
/// timed problem.
pub fn upload_inputs_and_run_forward(
    attention: &AttentionParameters,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<AttentionBackwardInputs, BackendError> {
    let saved = AttentionBackwardInputs::upload_inputs_without_forward(
        &AttentionExtents::from(attention),
        inputs,
        device,
    )?;
    let technique = AttentionGemmTechnique::fastest_technique_on_device(
        device,
        &AttentionShape::from(attention),
    )?;
    saved.run_forward_and_wait(attention, technique, device)?;
    Ok(saved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::definition::AttentionInputsByHead;
    use crate::gpu_tests::lock_first_gpu;
    use kernelgate::workload::Dtype;

    /// Computes the reference log-sum-exp, `ln Σ exp(q kᵀ / sqrt(d))` in fp64, of every query row
    /// over the keys that the row sees.
    fn reference_log_sum_exps(attention: &AttentionParameters, inputs: &Tensors) -> Vec<f64> {
        let AttentionParameters {
            batch_size: b, query_heads: h, queries_per_head: s, causal, ..
        } = *attention;
        let heads = AttentionInputsByHead { attention, inputs };
        let of_head = |head| {
            let [q, k] = ["q", "k"].map(|name| heads.read_first_positions_of_head(name, head, s));
            let scores = attention.single_head_parameters().scaled_attention_scores(&q, &k);
            let of_row = |(row, scores): (usize, &[f64])| {
                let seen = &scores[..if causal { row + 1 } else { s }];
                let top = seen.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                top + seen.iter().map(|score| (score - top).exp()).sum::<f64>().ln()
            };
            scores.chunks(s).enumerate().map(of_row).collect::<Vec<_>>()
        };
        (0..b * h).flat_map(of_head).collect()
    }

    /// Returns the maximum of |found - expected| / (1 + |expected|), infinite if a found value is
    /// NaN. The denominator adds 1 because a log-sum-exp near zero carries the rounding errors of
    /// larger scores.
    fn largest_log_sum_exp_error(found: &[f32], expected: &[f64]) -> f64 {
        assert_eq!(found.len(), expected.len());
        let error = |(found, expected): (&f32, &f64)| {
            let error = (f64::from(*found) - expected).abs() / (1.0 + expected.abs());
            if error.is_nan() { f64::INFINITY } else { error }
        };
        found.iter().zip(expected).map(error).fold(0.0, f64::max)
    }

    /// Bound of the log-sum-exp error: above fp32's rounding, and below the effect of one extra or
    /// missing key on a row of 1000 keys.
    const MAX_LOG_SUM_EXP_ERROR: f64 = 5e-5;

    #[test]
    fn both_flash_forward_techniques_save_the_reference_log_sum_exp() {
        let Some((device, _alone)) = lock_first_gpu() else { return };
        // Test cases with the numbers of query heads, key heads and queries: a single row, edges of
        // tiles and key blocks, several tiles for each multiprocessor.
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
                    let attention = AttentionParameters {
                        batch_size: 2,
                        query_heads: h,
                        key_value_heads: h_kv,
                        queries_per_head: s,
                        keys_per_head: s,
                        head_dim: d,
                        causal,
                        dtype,
                        adds_input_outliers: outliers,
                    };
                    let inputs = attention.draw_named_inputs(25, &["q", "k", "v", "grad_out"]);
                    let expected = reference_log_sum_exps(&attention, &inputs);
                    let extents = AttentionExtents::from(&attention);
                    let saved = AttentionBackwardInputs::upload_inputs_without_forward(
                        &extents, &inputs, &device,
                    )
                    .unwrap();
                    let check = |technique| {
                        // Every element of lse starts as NaN, so that a row that the forward did
                        // not write fails the test.
                        saved.lse.fill_all_bytes(0xff).unwrap();
                        saved.run_forward_and_wait(&attention, technique, &device).unwrap();
                        let mut found = vec![0f32; expected.len()];
                        saved
                            .lse
                            .download_first_bytes(bytemuck::cast_slice_mut(&mut found))
                            .unwrap();
                        let error = largest_log_sum_exp_error(&found, &expected);
                        assert!(
                            error <= MAX_LOG_SUM_EXP_ERROR,
                            "{technique:?}, {attention:?}: {error:.1e}"
                        );
                    };
                    check(AttentionGemmTechnique::FlashMma);
                    if device.gpu_properties().kernel_architecture == "sm_90a" {
                        check(AttentionGemmTechnique::FlashWgmma);
                    }
                }
            }
        }
    }

    #[test]
    fn an_unwritten_log_sum_exp_row_exceeds_the_error_bound() {
        assert!(largest_log_sum_exp_error(&[1.0, 2.0], &[1.0, 2.0]) <= MAX_LOG_SUM_EXP_ERROR);
        assert!(largest_log_sum_exp_error(&[1.0, 2.001], &[1.0, 2.0]) > MAX_LOG_SUM_EXP_ERROR);
        assert!(largest_log_sum_exp_error(&[f32::NAN, 2.0], &[1.0, 2.0]) > MAX_LOG_SUM_EXP_ERROR);
    }
}
