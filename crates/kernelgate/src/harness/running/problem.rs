//! A problem made ready: memory checked, inputs drawn, reference computed, implementations
//! verified. Panics become errors.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use super::case_error::CaseError;
use super::case_error::guard_panics;
use super::trial::BuildOutputs;
use crate::backend::{BackendError, BenchTarget, Executable, host_timeout};
use crate::display;
use crate::harness::auditing::changed_inputs::ChangedInputs;
use crate::harness::auditing::device_memory::CaseMemoryWatch;
use crate::harness::panic_guard;
use crate::harness::phase_timer;
use crate::harness::recording::kept_inputs;
use crate::harness::recording::kept_references::{self, StoredReferences};
use crate::harness::selection::cases::{ProblemGroup, SelectedCase};
use crate::harness::selection::names;
use crate::record::environment::available_host_memory;
use crate::record::numerics::CONSTANT_DATA_SET;
use crate::record::run::VerificationRecord;
use crate::record::tensors;
use crate::verify::{self, ErrorBounds, OutputComparison, VerifyError};
use crate::workload::{Expected, ReferenceSource, Tensors};
use kernelgate_cuda::CaseFailure;
use kernelgate_cuda::driver::launch::used_kernels::LoadedKernels;
use kernelgate_cuda::driver::memory::persistence;

/// A prepared problem: its inputs, its reference and the state that the checks of its rows share.
pub struct PreparedProblem {
    /// Inputs of all implementations.
    pub inputs: Arc<Tensors>,
    /// Expected outputs; empty until the reference is computed.
    pub expected: Vec<Expected>,
    has_reference: bool,
    one_data_set: bool,
    /// Outputs of the builds that are compared, if the problem has no reference.
    pub outputs: BuildOutputs,
    /// Device of the row that is the reference of other rows.
    target: BenchTarget,
    /// Tolerances. A declared precision adds a tolerance of its own once the reference is computed.
    pub bounds: ErrorBounds,
    /// Seed of the inputs.
    pub seed: u64,
    /// Folder of stored references; `None` if each reference is computed.
    pub references: Option<StoredReferences>,
    /// Kernels of the implementation that was prepared last; empty on the host.
    pub kernels: LoadedKernels,
    /// Inputs with changed values, for the check after timing.
    pub changed: Option<ChangedInputs>,
    /// Measurement of the implementation's device memory; inactive if it is not measured.
    pub memory: CaseMemoryWatch,
}

/// An executable whose outputs were found correct, with its verification record.
pub struct VerifiedExecutable {
    /// The implementation.
    pub executable: Box<dyn Executable>,
    /// Comparison of the outputs with the reference.
    pub record: VerificationRecord,
    /// Duration of one launch of the verified implementation, if it was measured.
    pub launch: Duration,
}

impl PreparedProblem {
    /// Draws the inputs and computes the reference, if both fit in memory.
    ///
    /// # Errors
    /// A skip when memory is short, a failure when the workload panics.
    pub fn new(
        group: &ProblemGroup<'_>,
        seed: u64,
        target: &BenchTarget,
    ) -> Result<Self, CaseError> {
        let mut ready = Self::draw_or_read_inputs(group, seed, None, target)?;
        ready.compute_reference_once(group)?;
        Ok(ready)
    }

    /// Draws the inputs of a problem, or reads them from the folder `kept`; refused if the memory
    /// that the problem needs does not fit. The reference is computed later, when a case needs it.
    pub fn draw_or_read_inputs(
        group: &ProblemGroup<'_>,
        seed: u64,
        kept: Option<&Path>,
        target: &BenchTarget,
    ) -> Result<Self, CaseError> {
        let problem = group.bound.problem();
        problem.check().map_err(CaseError::failed)?;
        let bounds = panic_guard::catch_panic(|| ErrorBounds::for_problem(problem))
            .map_err(CaseError::failed)?;
        bounds.check().map_err(CaseError::failed)?;
        // If the problem declares a precision, there are two references.
        let times = if problem.precision().is_some() { 2 } else { 1 };
        let needed =
            panic_guard::catch_panic(|| times * problem.host_bytes()).map_err(CaseError::failed)?;
        let available = available_host_memory();
        if needed > available {
            return Err(CaseError::Skip(format!(
                "needs {} of memory, {} are free",
                display::byte_text(needed),
                display::byte_text(available)
            )));
        }
        let _activity = phase_timer::start_activity("inputs");
        let prepared = panic_guard::catch_panic(|| {
            let kept = kept.filter(|_| !problem.reads_files());
            let path = kept.map(|folder| kept_inputs::kept_inputs_path(folder, group));
            let inputs = path.as_deref().and_then(tensors::read).unwrap_or_else(|| {
                let started = Instant::now();
                let drawn = problem.inputs(seed);
                path.iter().for_each(|path| {
                    kept_inputs::save_drawn_inputs(path, &drawn, started.elapsed())
                });
                drawn
            });
            Self {
                inputs: Arc::new(inputs),
                expected: Vec::new(),
                has_reference: false,
                one_data_set: problem.reads_files(),
                outputs: BuildOutputs::default(),
                target: target.clone(),
                bounds,
                seed,
                references: None,
                kernels: LoadedKernels::default(),
                changed: None,
                memory: CaseMemoryWatch::default(),
            }
        });
        let ready =
            prepared.map_err(|panic| CaseError::failed(format!("inputs or reference: {panic}")))?;
        names::check_tensor_names("input", ready.inputs.iter().map(|(name, _)| name))
            .map_err(CaseError::failed)?;
        Ok(ready)
    }

    /// Computes the reference, unless that was done.
    ///
    /// # Errors
    /// Fails if code of the workload panics.
    pub fn compute_reference_once(&mut self, group: &ProblemGroup<'_>) -> Result<(), CaseError> {
        if !self.has_reference {
            self.expected = self.reference(group, Arc::clone(&self.inputs))?;
            let outputs = self.expected.iter().map(|expected| expected.name.as_str());
            names::check_tensor_names("output", outputs).map_err(CaseError::failed)?;
            let kept = self.references.as_ref();
            let limit = panic_guard::catch_panic(|| {
                kept_references::error_limit_for_precision(
                    kept,
                    group,
                    &self.inputs,
                    &self.expected,
                )
            });
            self.bounds.check_outputs_exist(&self.expected).map_err(CaseError::failed)?;
            self.bounds.precision = limit.map_err(|panic| {
                let why = format!("reference of rounded inputs: {panic}");
                CaseError::failed(CaseFailure::from(panic).with_text(why))
            })?;
            self.has_reference = true;
        }
        Ok(())
    }

    /// The values that outputs for these inputs are compared with; empty if the workload has no
    /// reference.
    ///
    /// # Errors
    /// Fails if the workload panics, or the row that is the reference fails; a skip when that row
    /// cannot run here, including for lack of memory.
    pub fn reference(
        &self,
        group: &ProblemGroup<'_>,
        inputs: Arc<Tensors>,
    ) -> Result<Vec<Expected>, CaseError> {
        let computed = panic_guard::catch_panic(|| match group.bound.problem().reference_from() {
            ReferenceSource::Definition => {
                let kept = self.references.as_ref();
                Ok(kept_references::get(kept, group, &inputs))
            }
            ReferenceSource::Row(row) => self.outputs_of_row(group, row, inputs),
            ReferenceSource::Nothing => Ok(Vec::new()),
        });
        computed.map_err(|panic| {
            let why = format!("inputs or reference: {panic}");
            CaseError::failed(CaseFailure::from(panic).with_text(why))
        })?
    }

    /// Computes the expected outputs with another implementation.
    fn outputs_of_row(
        &self,
        group: &ProblemGroup<'_>,
        row: &str,
        inputs: Arc<Tensors>,
    ) -> Result<Vec<Expected>, CaseError> {
        let rows = group.suite.implementations();
        let index = rows.iter().position(|it| it.name == row).ok_or_else(|| {
            let why = format!("the reference is the row `{row}`, which does not exist");
            CaseError::failed(CaseFailure::new("no_reference_row", why).with_name("row", row))
        })?;
        let with_row = |why| format!("the row `{row}`, which is the reference: {why}");
        let of_reference = |error| match CaseError::from(error) {
            CaseError::Lost(why) => CaseError::Lost(why),
            CaseError::Skip(why) => CaseError::Skip(with_row(why)),
            CaseError::Fail(why) => {
                let text = with_row(why.text.clone());
                CaseError::Fail(why.with_text(text))
            }
        };
        // A case that is alive finds its own settings restored when it is launched next.
        let before = match &self.target {
            BenchTarget::Cuda(devices) => {
                let device = devices.first_device();
                Some((device, persistence::current_l2_settings(device)))
            }
            BenchTarget::Cpu => None,
        };
        let computed = group
            .bound
            .prepare_implementation(index, inputs, &self.target)
            .map_err(VerifyError::from)
            .and_then(|mut executable| {
                let launched = verify::launch_on_poisoned_outputs(executable.as_mut());
                leak_if_device_lost(executable, launched.map_err(VerifyError::from))
            })
            .and_then(|(mut executable, ())| {
                verify::check_finite_outputs(executable.outputs()?)?;
                Ok(verify::outputs_as_reference(executable.outputs()?))
            });
        // Restored even after a failure, because the case that is alive may be timed further.
        let brought_back = before.map_or(Ok(()), |(device, before)| {
            persistence::restore_l2_settings(device, &before).map_err(VerifyError::from)
        });
        computed.and_then(|it| brought_back.map(|()| it)).map_err(of_reference)
    }

    /// Returns whether no reference defines a case's outputs: the problem has none, or its
    /// reference is the case's own row.
    fn has_no_reference(&self, group: &ProblemGroup<'_>, case: &SelectedCase) -> bool {
        match group.bound.problem().reference_from() {
            ReferenceSource::Definition => false,
            ReferenceSource::Row(row) => case.row.name == row,
            ReferenceSource::Nothing => true,
        }
    }

    /// Compares the outputs of a case with the reference. Without a reference, the outputs become
    /// the expected outputs of the check after timing, which then shows that the timed graph
    /// computes the same as a launch.
    fn compare_outputs_of_case(
        &mut self,
        group: &ProblemGroup<'_>,
        case: &SelectedCase,
        outputs: &Tensors,
    ) -> Result<OutputComparison, VerifyError> {
        if !self.has_no_reference(group, case) {
            let _activity = phase_timer::start_activity("compare");
            let comparison = verify::compare_outputs(outputs, &self.expected, &self.bounds)?;
            self.outputs.save_verified_outputs(&case.id, outputs);
            return Ok(comparison);
        }
        let comparison = verify::check_finite_outputs(outputs)?;
        if self.expected.is_empty() || group.bound.problem().reference_from().is_without_reference()
        {
            self.expected = verify::outputs_as_reference(outputs);
        }
        self.outputs.save(&case.id, outputs);
        match self.outputs.base_outputs(&case.id) {
            Some(base) => {
                verify::compare_outputs(outputs, &verify::outputs_as_reference(&base), &self.bounds)
                    .map(|comparison| OutputComparison { with_base: true, ..comparison })
                    .map_err(|wrong| VerifyError::UnlikeBase(Box::new(wrong)))
            }
            None => Ok(comparison),
        }
    }

    /// Verifies a case of a trial: by the bits of its outputs if an earlier run of the same
    /// executable compared them with the reference, else by the reference. Verifies an
    /// implementation by the digest of known good outputs, and measures the time of one launch.
    pub fn verify_by_output_bits(
        &mut self,
        group: &ProblemGroup<'_>,
        case: &SelectedCase,
        target: &BenchTarget,
        known: Option<VerificationRecord>,
    ) -> Result<VerifiedExecutable, CaseError> {
        let known_digest = known.as_ref().and_then(|known| known.digest.as_deref());
        let _activity = phase_timer::start_activity("verify");
        let (mut executable, (digest, launch)) = guard_panics(|| {
            let mut executable = self.prepare_case(group, case, target)?;
            let outcome = output_digest_and_time(executable.as_mut(), known_digest);
            leak_if_device_lost(executable, outcome.map_err(VerifyError::from))
        })?;
        if group.bound.problem().reference_from().is_without_reference() {
            // The expected outputs that an earlier implementation computed do not apply to this
            // implementation.
            self.expected.clear();
        }
        if let Some(known) = known.filter(|known| known.digest.as_ref() == Some(&digest)) {
            return Ok(VerifiedExecutable { executable, record: known, launch });
        }
        self.compute_reference_once(group)?;
        let comparison = guard_panics(|| {
            self.compare_outputs_of_case(group, case, copy_outputs(executable.as_mut())?)
        })?;
        Ok(VerifiedExecutable {
            executable,
            record: self.record_of_verification(comparison, Some(digest)),
            launch,
        })
    }

    /// Verifies a case once by comparing its outputs with the reference.
    pub fn verify_case_once(
        &mut self,
        group: &ProblemGroup<'_>,
        case: &SelectedCase,
        target: &BenchTarget,
    ) -> Result<VerifiedExecutable, CaseError> {
        let (executable, comparison) = self.prepare_and_verify(group, case, target)?;
        let record = self.record_of_verification(comparison, None);
        Ok(VerifiedExecutable { executable, record, launch: Duration::ZERO })
    }

    /// Makes the record of a comparison with the reference.
    fn record_of_verification(
        &self,
        comparison: OutputComparison,
        digest: Option<String>,
    ) -> VerificationRecord {
        let is_identified = digest.is_some() || self.one_data_set;
        let data_set = is_identified.then(|| self.input_data_set_id());
        let allowed = Some((&self.bounds).into());
        VerificationRecord { digest, allowed, data_set, ..comparison.into() }
    }

    /// Identity of the inputs, which differs between seeds: a hash, or the constant of a problem
    /// with one data set.
    pub fn input_data_set_id(&self) -> String {
        match self.one_data_set {
            true => CONSTANT_DATA_SET.to_owned(),
            false => verify::digest_of_outputs(&self.inputs),
        }
    }

    /// Hash of a problem's inputs if they belong to one data set, such as golden tensors, for which
    /// [`Self::input_data_set_id`] returns nothing.
    pub fn inputs_of_one_data_set(&self) -> Option<String> {
        self.one_data_set.then(|| verify::digest_of_outputs(&self.inputs))
    }

    fn prepare_case(
        &mut self,
        group: &ProblemGroup<'_>,
        case: &SelectedCase,
        target: &BenchTarget,
    ) -> Result<Box<dyn Executable>, BackendError> {
        let _activity = phase_timer::start_activity("prepare");
        host_timeout::set_case_name(&case.id);
        let (target, kernels) = target.recording();
        self.kernels = kernels;
        let executable =
            group.bound.prepare_implementation(case.index, Arc::clone(&self.inputs), &target);
        if executable.is_ok() {
            self.memory.observe_memory();
        }
        executable
    }

    /// Prepares an implementation and verifies its outputs.
    ///
    /// # Errors
    /// Fails if the implementation panics, cannot launch, or computes wrong outputs.
    pub fn prepare_and_verify(
        &mut self,
        group: &ProblemGroup<'_>,
        case: &SelectedCase,
        target: &BenchTarget,
    ) -> Result<(Box<dyn Executable>, OutputComparison), CaseError> {
        let _activity = phase_timer::start_activity("verify");
        guard_panics(|| {
            let mut executable = self.prepare_case(group, case, target)?;
            let compared = verify::launch_on_poisoned_outputs(executable.as_mut())
                .and_then(|()| copy_outputs(executable.as_mut()))
                .map_err(VerifyError::from)
                .and_then(|outputs| self.compare_outputs_of_case(group, case, outputs));
            leak_if_device_lost(executable, compared)
        })
    }
}

/// Returns the digest of a launch's outputs, and the time of a launch. One launch on poisoned
/// outputs suffices if it gives the known bits; otherwise the outputs of a second launch are
/// compared, as in [`verify::launch_on_poisoned_outputs`].
fn output_digest_and_time(
    executable: &mut dyn Executable,
    known: Option<&str>,
) -> Result<(String, Duration), BackendError> {
    let mut launch_on_poison = || {
        let _watched = host_timeout::watch_host_launches();
        executable.poison_outputs()?;
        executable.reset()?;
        let started = Instant::now();
        executable.launch()?;
        executable.synchronize()?;
        let launch = started.elapsed();
        Ok((verify::digest_of_outputs(executable.outputs()?), launch))
    };
    let (digest, launch) = launch_on_poison()?;
    if Some(digest.as_str()) == known { Ok((digest, launch)) } else { launch_on_poison() }
}

/// The outputs of an executable, on the host.
///
/// # Errors
/// Fails if the outputs cannot be copied, or a launch failed.
pub fn copy_outputs(executable: &mut dyn Executable) -> Result<&Tensors, BackendError> {
    let _activity = phase_timer::start_activity("outputs");
    executable.outputs()
}

/// Passes a result on, but leaks its value if the device is lost: freeing memory that a hung kernel
/// uses would wait for the kernel.
fn leak_if_device_lost<T>(
    executable: Box<dyn Executable>,
    outcome: Result<T, VerifyError>,
) -> Result<(Box<dyn Executable>, T), VerifyError> {
    match outcome {
        Ok(value) => Ok((executable, value)),
        Err(error) => {
            if matches!(error, VerifyError::Backend(BackendError::Lost(_))) {
                std::mem::forget(executable);
            }
            Err(error)
        }
    }
}
