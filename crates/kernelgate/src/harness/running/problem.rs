//! Prepares a problem: checks free memory, draws inputs, computes the reference, and verifies
//! implementations. Panics become errors.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use super::case_error::WhyCaseHasNoResult;
use super::case_error::run_with_panics_as_case_failures;
use super::trial::OutputsExchangedBetweenBuilds;
use crate::backend::{BackendError, BenchDevices, LaunchableProblem, host_timeout};
use crate::display;
use crate::harness::auditing::changed_inputs::ChangedInputsAndReference;
use crate::harness::auditing::device_memory::PeakDeviceMemoryWatch;
use crate::harness::panic_guard;
use crate::harness::phase_timer;
use crate::harness::recording::kept_inputs;
use crate::harness::recording::kept_references::{self, StoredReferenceFolder};
use crate::harness::selection::cases::{SelectedCase, SelectedProblem};
use crate::harness::selection::names;
use crate::record::environment::available_host_memory_bytes;
use crate::record::numerics::DATA_SET_EQUAL_FOR_ALL_SEEDS;
use crate::record::run::OutputVerificationRecord;
use crate::record::tensors;
use crate::verify::{self, ComparisonWithReference, ErrorBoundsOfOutputs, OutputVerificationError};
use crate::workload::{Expected, SourceOfExpectedOutputs, Tensors};
use kernelgate_cuda::CaseFailureReason;
use kernelgate_cuda::driver::launch::used_kernels::LoadedKernelsRecord;
use kernelgate_cuda::driver::memory::persistence;

/// A prepared problem: its inputs, its reference, and state that the checks of its implementations
/// share.
pub struct PreparedProblem {
    /// Inputs of the problem, which all implementations read.
    pub inputs: Arc<Tensors>,
    /// Expected outputs; empty until the reference is computed, or if the problem has none.
    pub expected: Vec<Expected>,
    has_reference: bool,
    has_single_input_data_set: bool,
    /// Outputs of base and head in a comparison, if the problem has no reference.
    pub exchanged_outputs: OutputsExchangedBetweenBuilds,
    /// The target on which an implementation that serves as the reference runs.
    reference_device: BenchDevices,
    /// Tolerances. If the problem declares a precision, a further tolerance is added when the
    /// reference is computed.
    pub error_bounds: ErrorBoundsOfOutputs,
    /// Seed of the inputs.
    pub input_seed: u64,
    /// Folder of stored references; `None` if every reference is computed.
    pub references: Option<StoredReferenceFolder>,
    /// Kernels that the last prepared implementation loaded; empty on the host.
    pub kernels: LoadedKernelsRecord,
    /// Changed inputs with their expected outputs, for the check after timing.
    pub changed_inputs: Option<ChangedInputsAndReference>,
    /// Measurement of the prepared implementation's device memory; inactive if it is not requested.
    pub memory: PeakDeviceMemoryWatch,
}

/// A prepared implementation whose outputs were verified, with the record of the verification.
pub struct VerifiedImplementation {
    /// The prepared implementation, which can be launched.
    pub executable: Box<dyn LaunchableProblem>,
    /// Record of the comparison of the outputs with the reference.
    pub record: OutputVerificationRecord,
    /// Wall time of one launch of the verified implementation; zero if it was not measured.
    pub earlier_launch_wall_time: Duration,
}

impl PreparedProblem {
    /// Draws the inputs and computes the reference.
    ///
    /// # Errors
    /// A skip if host memory is insufficient, a failure if the workload panics.
    pub fn with_inputs_and_reference(
        group: &SelectedProblem<'_>,
        seed: u64,
        target: &BenchDevices,
    ) -> Result<Self, WhyCaseHasNoResult> {
        let mut ready = Self::with_inputs_only(group, seed, None, target)?;
        ready.compute_reference_once(group)?;
        Ok(ready)
    }

    /// Draws a problem's inputs, or reads them from the folder `kept`; fails if the problem needs
    /// more host memory than is free. The reference is computed later, when a case needs it.
    pub fn with_inputs_only(
        group: &SelectedProblem<'_>,
        seed: u64,
        kept: Option<&Path>,
        target: &BenchDevices,
    ) -> Result<Self, WhyCaseHasNoResult> {
        let problem = group.problem.problem();
        problem.check_can_be_computed().map_err(WhyCaseHasNoResult::failed_with)?;
        let bounds =
            panic_guard::catch_panic(|| ErrorBoundsOfOutputs::from_tolerances_of_problem(problem))
                .map_err(WhyCaseHasNoResult::failed_with)?;
        bounds.check_tolerances_are_valid().map_err(WhyCaseHasNoResult::failed_with)?;
        // A problem with a declared precision needs memory for two references.
        let times = if problem.required_precision().is_some() { 2 } else { 1 };
        let needed = panic_guard::catch_panic(|| times * problem.host_memory_bytes())
            .map_err(WhyCaseHasNoResult::failed_with)?;
        let available = available_host_memory_bytes();
        if needed > available {
            return Err(WhyCaseHasNoResult::Skipped(format!(
                "needs {} of memory, {} are free",
                display::decimal_byte_size_text(needed),
                display::decimal_byte_size_text(available)
            )));
        }
        let _activity = phase_timer::start_timed_activity("inputs");
        let prepared = panic_guard::catch_panic(|| {
            let kept = kept.filter(|_| !problem.reads_files());
            let path = kept.map(|folder| kept_inputs::stored_inputs_path(folder, group));
            let inputs = path.as_deref().and_then(tensors::read_tensor_file).unwrap_or_else(|| {
                let started = Instant::now();
                let drawn = problem.inputs(seed);
                path.iter().for_each(|path| {
                    kept_inputs::store_inputs_that_were_slow_to_draw(
                        path,
                        &drawn,
                        started.elapsed(),
                    )
                });
                drawn
            });
            Self {
                inputs: Arc::new(inputs),
                expected: Vec::new(),
                has_reference: false,
                has_single_input_data_set: problem.reads_files(),
                exchanged_outputs: OutputsExchangedBetweenBuilds::default(),
                reference_device: target.clone(),
                error_bounds: bounds,
                input_seed: seed,
                references: None,
                kernels: LoadedKernelsRecord::default(),
                changed_inputs: None,
                memory: PeakDeviceMemoryWatch::default(),
            }
        });
        let ready = prepared.map_err(|panic| {
            WhyCaseHasNoResult::failed_with(format!("inputs or reference: {panic}"))
        })?;
        names::check_characters_of_tensor_names("input", ready.inputs.iter().map(|(name, _)| name))
            .map_err(WhyCaseHasNoResult::failed_with)?;
        Ok(ready)
    }

    /// Computes the reference, unless it was computed before.
    ///
    /// # Errors
    /// Fails if code of the workload panics.
    pub fn compute_reference_once(
        &mut self,
        group: &SelectedProblem<'_>,
    ) -> Result<(), WhyCaseHasNoResult> {
        if !self.has_reference {
            self.expected = self.expected_outputs_for_inputs(group, Arc::clone(&self.inputs))?;
            let outputs = self.expected.iter().map(|expected| expected.output_name.as_str());
            names::check_characters_of_tensor_names("output", outputs)
                .map_err(WhyCaseHasNoResult::failed_with)?;
            let kept = self.references.as_ref();
            let limit = panic_guard::catch_panic(|| {
                kept_references::read_or_compute_precision_error_limit(
                    kept,
                    group,
                    &self.inputs,
                    &self.expected,
                )
            });
            self.error_bounds
                .check_outputs_with_tolerance_exist(&self.expected)
                .map_err(WhyCaseHasNoResult::failed_with)?;
            self.error_bounds.precision = limit.map_err(|panic| {
                let why = format!("reference of rounded inputs: {panic}");
                WhyCaseHasNoResult::failed_with(
                    CaseFailureReason::from(panic).with_failure_sentence(why),
                )
            })?;
            self.has_reference = true;
        }
        Ok(())
    }

    /// Computes or reads the expected outputs for the given inputs; empty if the problem has no
    /// reference.
    ///
    /// # Errors
    /// Fails if the workload panics, or the row that is the reference fails; a skip if that row
    /// cannot run here.
    pub fn expected_outputs_for_inputs(
        &self,
        group: &SelectedProblem<'_>,
        inputs: Arc<Tensors>,
    ) -> Result<Vec<Expected>, WhyCaseHasNoResult> {
        let computed = panic_guard::catch_panic(|| {
            match group.problem.problem().source_of_expected_outputs() {
                SourceOfExpectedOutputs::ProblemReference => {
                    let kept = self.references.as_ref();
                    Ok(kept_references::read_or_compute_reference(kept, group, &inputs))
                }
                SourceOfExpectedOutputs::OutputsOfImplementation(row) => {
                    self.expected_outputs_from_implementation(group, row, inputs)
                }
                SourceOfExpectedOutputs::NotCompared => Ok(Vec::new()),
            }
        });
        computed.map_err(|panic| {
            let why = format!("inputs or reference: {panic}");
            WhyCaseHasNoResult::failed_with(
                CaseFailureReason::from(panic).with_failure_sentence(why),
            )
        })?
    }

    /// Computes the expected outputs with the implementation that serves as the reference.
    fn expected_outputs_from_implementation(
        &self,
        group: &SelectedProblem<'_>,
        row: &str,
        inputs: Arc<Tensors>,
    ) -> Result<Vec<Expected>, WhyCaseHasNoResult> {
        let rows = group.suite.implementations_of_workload();
        let index = rows.iter().position(|it| it.name == row).ok_or_else(|| {
            let why = format!("the reference is the row `{row}`, which does not exist");
            WhyCaseHasNoResult::failed_with(
                CaseFailureReason::failure_with_kind_and_sentence("no_reference_row", why)
                    .with_name_fact("row", row),
            )
        })?;
        let with_row = |why| format!("the row `{row}`, which is the reference: {why}");
        let of_reference = |error| match WhyCaseHasNoResult::from(error) {
            WhyCaseHasNoResult::GpuLost(why) => WhyCaseHasNoResult::GpuLost(why),
            WhyCaseHasNoResult::Skipped(why) => WhyCaseHasNoResult::Skipped(with_row(why)),
            WhyCaseHasNoResult::Failed(why) => {
                let text = with_row(why.failure_sentence.clone());
                WhyCaseHasNoResult::Failed(why.with_failure_sentence(text))
            }
        };
        // A prepared case that stays alive sets its own L2 settings again at its next launch.
        let before = match &self.reference_device {
            BenchDevices::Cuda(devices) => {
                let device = devices.first_device();
                Some((device, persistence::read_context_stream_and_l2_settings(device)))
            }
            BenchDevices::Cpu => None,
        };
        let computed = group
            .problem
            .prepare_implementation(index, inputs, &self.reference_device)
            .map_err(OutputVerificationError::from)
            .and_then(|mut executable| {
                let launched = verify::launch_again_on_poisoned_outputs(executable.as_mut());
                leak_implementation_if_gpu_lost(
                    executable,
                    launched.map_err(OutputVerificationError::from),
                )
            })
            .and_then(|(mut executable, ())| {
                verify::check_outputs_without_reference(executable.outputs_on_host()?)?;
                Ok(verify::reference_from_outputs(executable.outputs_on_host()?))
            });
        // The context's L2 and stream settings are restored even after a failure, because the case
        // that stays alive may be timed further.
        let brought_back = before.map_or(Ok(()), |(device, before)| {
            persistence::restore_context_stream_and_l2_settings(device, &before)
                .map_err(OutputVerificationError::from)
        });
        computed.and_then(|it| brought_back.map(|()| it)).map_err(of_reference)
    }

    /// Whether no reference defines the outputs of a case: the problem has none, or the case's own
    /// implementation is the reference.
    fn is_case_without_reference(&self, group: &SelectedProblem<'_>, case: &SelectedCase) -> bool {
        match group.problem.problem().source_of_expected_outputs() {
            SourceOfExpectedOutputs::ProblemReference => false,
            SourceOfExpectedOutputs::OutputsOfImplementation(row) => {
                case.implementation.name == row
            }
            SourceOfExpectedOutputs::NotCompared => true,
        }
    }

    /// Compares the outputs of a case with the reference, or without a reference with the base's
    /// outputs. Without a reference, the outputs of this launch become the expected outputs of the
    /// check after timing, which then compares the timed graph with a launch.
    fn compare_outputs_with_reference_or_base(
        &mut self,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
        outputs: &Tensors,
    ) -> Result<ComparisonWithReference, OutputVerificationError> {
        if !self.is_case_without_reference(group, case) {
            let _activity = phase_timer::start_timed_activity("compare");
            let comparison = verify::compare_outputs_with_reference(
                outputs,
                &self.expected,
                &self.error_bounds,
            )?;
            self.exchanged_outputs.save_verified_outputs_if_needed(&case.case_id, outputs);
            return Ok(comparison);
        }
        let comparison = verify::check_outputs_without_reference(outputs)?;
        if self.expected.is_empty()
            || group.problem.problem().source_of_expected_outputs().has_no_reference_to_compare()
        {
            self.expected = verify::reference_from_outputs(outputs);
        }
        self.exchanged_outputs.save_outputs_if_needed(&case.case_id, outputs);
        match self.exchanged_outputs.read_base_outputs(&case.case_id) {
            Some(base) => verify::compare_outputs_with_reference(
                outputs,
                &verify::reference_from_outputs(&base),
                &self.error_bounds,
            )
            .map(|comparison| ComparisonWithReference { compared_with_base: true, ..comparison })
            .map_err(|wrong| OutputVerificationError::DiffersFromBaseBuild(Box::new(wrong))),
            None => Ok(comparison),
        }
    }

    /// Verifies a case of a trial by the digest of its outputs, if an earlier run of the same
    /// executable verified equal bits; else by the reference. Also measures the wall time of one
    /// launch.
    pub fn verify_by_known_digest_or_reference(
        &mut self,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
        target: &BenchDevices,
        known: Option<OutputVerificationRecord>,
    ) -> Result<VerifiedImplementation, WhyCaseHasNoResult> {
        let known_digest = known.as_ref().and_then(|known| known.output_bits_hash.as_deref());
        let _activity = phase_timer::start_timed_activity("verify");
        let (mut executable, (digest, launch)) = run_with_panics_as_case_failures(|| {
            let mut executable = self.prepare_implementation_of_case(group, case, target)?;
            let outcome = digest_of_outputs_and_launch_time(executable.as_mut(), known_digest);
            leak_implementation_if_gpu_lost(
                executable,
                outcome.map_err(OutputVerificationError::from),
            )
        })?;
        if group.problem.problem().source_of_expected_outputs().has_no_reference_to_compare() {
            // Expected outputs that came from another implementation do not apply to this
            // implementation.
            self.expected.clear();
        }
        if let Some(known) = known.filter(|known| known.output_bits_hash.as_ref() == Some(&digest))
        {
            return Ok(VerifiedImplementation {
                executable,
                record: known,
                earlier_launch_wall_time: launch,
            });
        }
        self.compute_reference_once(group)?;
        let comparison = run_with_panics_as_case_failures(|| {
            self.compare_outputs_with_reference_or_base(
                group,
                case,
                copy_outputs_to_host(executable.as_mut())?,
            )
        })?;
        Ok(VerifiedImplementation {
            executable,
            record: self.verification_record_of_comparison(comparison, Some(digest)),
            earlier_launch_wall_time: launch,
        })
    }

    /// Verifies a case by comparing its outputs with the reference.
    pub fn verify_by_reference(
        &mut self,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
        target: &BenchDevices,
    ) -> Result<VerifiedImplementation, WhyCaseHasNoResult> {
        let (executable, comparison) = self.prepare_and_verify_case(group, case, target)?;
        let record = self.verification_record_of_comparison(comparison, None);
        Ok(VerifiedImplementation { executable, record, earlier_launch_wall_time: Duration::ZERO })
    }

    /// Makes the verification record of a comparison with the reference.
    fn verification_record_of_comparison(
        &self,
        comparison: ComparisonWithReference,
        digest: Option<String>,
    ) -> OutputVerificationRecord {
        let is_identified = digest.is_some() || self.has_single_input_data_set;
        let data_set = is_identified.then(|| self.input_data_set_id());
        let allowed = Some((&self.error_bounds).into());
        OutputVerificationRecord {
            output_bits_hash: digest,
            allowed,
            verified_data_set: data_set,
            ..comparison.into()
        }
    }

    /// Identifies the inputs: a hash that differs between seeds, or a constant if the problem has a
    /// single data set.
    pub fn input_data_set_id(&self) -> String {
        match self.has_single_input_data_set {
            true => DATA_SET_EQUAL_FOR_ALL_SEEDS.to_owned(),
            false => verify::output_bits_hash_hex(&self.inputs),
        }
    }

    /// Hash of the inputs if the problem has a single data set, such as golden tensors, for which
    /// [`Self::input_data_set_id`] returns a constant.
    pub fn hash_of_single_data_set(&self) -> Option<String> {
        self.has_single_input_data_set.then(|| verify::output_bits_hash_hex(&self.inputs))
    }

    fn prepare_implementation_of_case(
        &mut self,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
        target: &BenchDevices,
    ) -> Result<Box<dyn LaunchableProblem>, BackendError> {
        let _activity = phase_timer::start_timed_activity("prepare");
        host_timeout::set_case_name_for_watchdog(&case.case_id);
        let (target, kernels) = target.with_record_of_loaded_kernels();
        self.kernels = kernels;
        let executable = group.problem.prepare_implementation(
            case.implementation_index,
            Arc::clone(&self.inputs),
            &target,
        );
        if executable.is_ok() {
            self.memory.update_peak_from_memory_in_use();
        }
        executable
    }

    /// Prepares an implementation and verifies its outputs.
    ///
    /// # Errors
    /// Fails if the implementation panics, cannot be launched, or computes wrong outputs.
    pub fn prepare_and_verify_case(
        &mut self,
        group: &SelectedProblem<'_>,
        case: &SelectedCase,
        target: &BenchDevices,
    ) -> Result<(Box<dyn LaunchableProblem>, ComparisonWithReference), WhyCaseHasNoResult> {
        let _activity = phase_timer::start_timed_activity("verify");
        run_with_panics_as_case_failures(|| {
            let mut executable = self.prepare_implementation_of_case(group, case, target)?;
            let compared = verify::launch_again_on_poisoned_outputs(executable.as_mut())
                .and_then(|()| copy_outputs_to_host(executable.as_mut()))
                .map_err(OutputVerificationError::from)
                .and_then(|outputs| {
                    self.compare_outputs_with_reference_or_base(group, case, outputs)
                });
            leak_implementation_if_gpu_lost(executable, compared)
        })
    }
}

/// Launches on poisoned outputs, and returns the digest of the outputs and the wall time of a
/// launch. If the first launch gives the known digest, one launch suffices; otherwise a second
/// launch is compared, as in [`verify::launch_again_on_poisoned_outputs`].
fn digest_of_outputs_and_launch_time(
    executable: &mut dyn LaunchableProblem,
    known: Option<&str>,
) -> Result<(String, Duration), BackendError> {
    let mut launch_on_poison = || {
        let _watched = host_timeout::start_timeout_of_host_launches();
        executable.poison_outputs()?;
        executable.reset_state()?;
        let started = Instant::now();
        executable.launch_once()?;
        executable.wait_for_launches()?;
        let launch = started.elapsed();
        Ok((verify::output_bits_hash_hex(executable.outputs_on_host()?), launch))
    };
    let (digest, launch) = launch_on_poison()?;
    if Some(digest.as_str()) == known { Ok((digest, launch)) } else { launch_on_poison() }
}

/// Copies an implementation's outputs to the host.
///
/// # Errors
/// Fails if copying fails, or if a launch failed.
pub fn copy_outputs_to_host(
    executable: &mut dyn LaunchableProblem,
) -> Result<&Tensors, BackendError> {
    let _activity = phase_timer::start_timed_activity("outputs");
    executable.outputs_on_host()
}

/// Passes a result on, but leaks the prepared implementation if the GPU is lost, because freeing
/// memory that a hung kernel uses would wait forever.
fn leak_implementation_if_gpu_lost<T>(
    executable: Box<dyn LaunchableProblem>,
    outcome: Result<T, OutputVerificationError>,
) -> Result<(Box<dyn LaunchableProblem>, T), OutputVerificationError> {
    match outcome {
        Ok(value) => Ok((executable, value)),
        Err(error) => {
            if matches!(error, OutputVerificationError::Backend(BackendError::DeviceLost(_))) {
                std::mem::forget(executable);
            }
            Err(error)
        }
    }
}
