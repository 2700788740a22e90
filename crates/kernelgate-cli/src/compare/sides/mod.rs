//! Prepares both sides of a comparison: checks out their sources, builds the executables, copies
//! them and queries their protocol versions.

pub mod checkout;
pub mod comparison_folder;
pub mod copy_benches;
pub mod git;
pub mod leftover_files;
pub mod neighbour_links;
pub mod seeded_builds;
pub mod snapshot;
pub mod submodules;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::progress::{ComparisonProgressDisplay, duration};
use super::{BuildComparisonRequest, CompareError, ComparedSideSource};
use crate::benches::bench_requests::{self, BenchRequestSettings};
use crate::benches::cargo::{
    self, BenchBuildTargets, BenchExecutable, BuiltBenchExecutables, CargoBuildError,
    CargoBuildProgress, CargoStderrLine,
};
use crate::benches::child_process::SharedChildProcess;
use crate::benches::find::UsableAndUnusableBenches;
use crate::benches::package::benches_that_need_features;
use crate::benches::prebuilt::prebuilt_benches_in_folder;
use crate::benches::versions;
use crate::gate::paired::ComparedArm;
use checkout::SideCheckout;
use comparison_folder::LockedComparisonFolder;
use copy_benches::{
    BenchControlMethod, BenchCopySettings, CopiedBenchesOfSide, copy_and_query_benches,
};
use git::{GitRepository, NamedGitRevision};
use kernelgate::protocol::RequestedBenchAction;
use kernelgate::record::file;
use neighbour_links::{CopiedRepositoryPaths, SIDE_SOURCES_FOLDER};
use seeded_builds::{copy_compiled_registry_crates, copy_target_folder_of_other_side};
use snapshot::{WorkTreeSnapshotOptions, commit_working_tree_snapshot};

/// Largest `Cargo.lock` that is read, bytes.
const MAX_CARGO_LOCK_BYTES: u64 = 64 << 20;

/// One side of a comparison (base or head) with its sources and executables.
pub struct ComparisonSideWithExecutables {
    /// Revision name and short commit of this side: "main (1a2b3c4d)".
    pub revision_label: String,
    /// Id of the commit that this side's run records state.
    pub recorded_commit: String,
    /// Commit of the checkout in which the side's processes run; `None` if they run in the user's
    /// own package folder.
    pub checkout_commit: Option<String>,
    /// Folder of the side's package: in the slot, which both sides use one after the other, or the
    /// user's own folder.
    pub package_folder: PathBuf,
    /// For each bench, the package folder in which its processes run, as far as cargo reported it.
    pub package_folder_by_bench: BTreeMap<String, PathBuf>,
    /// Bench executables of the side that kernelgate can run.
    pub executables: CopiedBenchesOfSide,
}

impl ComparisonSideWithExecutables {
    /// Returns the package folder in which the processes of a bench run.
    pub fn package_folder_of_bench(&self, bench: &str) -> &PathBuf {
        self.package_folder_by_bench.get(bench).unwrap_or(&self.package_folder)
    }
}

/// Source of a side's executables: a folder of prebuilt ones, or a revision that is built.
enum ExecutablesFolderOrRevision<'a> {
    PrebuiltFolder(&'a Path),
    Revision(Box<RevisionWithCheckout>),
}

/// A revision that is to be built, with the checkout in which it is built.
struct RevisionWithCheckout {
    revision: NamedGitRevision,
    checkout: SideCheckout,
    repository: GitRepository,
}

/// Builds both sides of a comparison and copies their bench executables.
#[derive(Clone, Copy)]
pub struct SideBuilder<'a> {
    pub request: &'a BuildComparisonRequest,
    /// Locked folder that contains the folders of base and head.
    pub folder: &'a LockedComparisonFolder,
    /// Display that shows the progress of the build.
    pub progress: &'a ComparisonProgressDisplay,
    /// Handle of the running cargo build, which Ctrl-C kills.
    pub running_child: &'a SharedChildProcess,
}

impl<'a> SideBuilder<'a> {
    /// Makes both sides ready. Prepares base and head of a comparison; all revisions are resolved
    /// before the first one is built.
    pub fn build_base_and_head(self) -> Result<[ComparisonSideWithExecutables; 2], CompareError> {
        self.prepare_both_sides(false)
    }

    /// Prepares base and head of a comparison; with `twins`, the head's source is the folder of
    /// executables that were built for the base.
    fn prepare_both_sides(
        self,
        twins: bool,
    ) -> Result<[ComparisonSideWithExecutables; 2], CompareError> {
        let Self { request, folder, progress, .. } = self;
        let find = |arm, source: &'a ComparedSideSource| {
            let name = match source {
                ComparedSideSource::PrebuiltFolder(path) => {
                    return Ok(ExecutablesFolderOrRevision::PrebuiltFolder(path));
                }
                ComparedSideSource::GitRevision(name) => Some(name),
                ComparedSideSource::WorkTree => None,
            };
            let repository = GitRepository::open_around_package(&request.package_root)?;
            let named = name.map(|name| repository.resolve_revision(name)).transpose()?;
            let side = folder.side_folder_path(arm);
            let surroundings = CopiedRepositoryPaths::for_repository(&repository.work_tree_root);
            let copy = surroundings.make_repository_copy_folder(&side)?;
            let checkout = SideCheckout::open_or_create_checkout(&repository, &copy)?;
            surroundings.link_files_beside_repository(&side)?;
            let revision = match named {
                Some(revision) => revision,
                None => {
                    let say = |text: &str| progress.print_line(text);
                    let (target, leave_out) =
                        (&request.cargo_target_folder, &request.paths_excluded_from_snapshot[..]);
                    commit_working_tree_snapshot(
                        &repository,
                        &checkout,
                        WorkTreeSnapshotOptions {
                            cargo_target_folder: target,
                            paths_excluded_from_snapshot: leave_out,
                            print_note: &say,
                        },
                    )?
                }
            };
            let found = RevisionWithCheckout { revision, checkout, repository };
            Ok::<_, CompareError>(ExecutablesFolderOrRevision::Revision(Box::new(found)))
        };
        let sources = [
            find(ComparedArm::BaseBuild, &request.base)?,
            find(ComparedArm::HeadBuild, &request.head)?,
        ];
        let make = |arm, sources: &ExecutablesFolderOrRevision<'_>| match sources {
            ExecutablesFolderOrRevision::PrebuiltFolder(path) => {
                // If the head gets copies of the base's executables, these were already checked
                // when they were copied into the base's folder.
                let built = twins && arm == ComparedArm::HeadBuild;
                self.prepare_side_from_folder(arm, path, built)
            }
            ExecutablesFolderOrRevision::Revision(found) => {
                self.prepare_side_from_revision(arm, found)
            }
        };
        let base = make(ComparedArm::BaseBuild, &sources[0])?;
        if matches!(sources[1], ExecutablesFolderOrRevision::Revision(_)) {
            self.print_note_if_filter_matches_no_base_case(&base);
        }
        let head = make(ComparedArm::HeadBuild, &sources[1])?;
        for (arm, side) in [(ComparedArm::BaseBuild, &base), (ComparedArm::HeadBuild, &head)] {
            for (bench, reason) in &side.executables.benches_not_run {
                progress.print_line(&format!("left alone: {bench} of the {arm}: {reason}"));
            }
        }
        for bench in &request.bench_names {
            let names: BTreeSet<&String> = base
                .executables
                .names_of_all_benches
                .iter()
                .chain(&head.executables.names_of_all_benches)
                .collect();
            if !names.contains(bench) {
                let names = names.into_iter().cloned().collect();
                return Err(CompareError::UnknownBench { bench: bench.clone(), known: names });
            }
        }
        Ok([base, head])
    }

    /// Before the head is built, prints a note if no case of the base matches the filter, which is
    /// often a typing error. The note is not an error, because the head may have a matching case.
    fn print_note_if_filter_matches_no_base_case(&self, base: &ComparisonSideWithExecutables) {
        let Self { request, folder, progress, running_child } = self;
        let driven = &base.executables.runnable_benches;
        if !driven
            .values()
            .all(|bench| matches!(bench.control_method, BenchControlMethod::ProtocolVersion(_)))
        {
            return;
        }
        let bin = folder.side_folder_path(ComparedArm::BaseBuild).join("bin");
        let executable = |bench: &String| BenchExecutable {
            bench_name: bench.clone(),
            executable_path: bin.join(bench),
            package_root: request.package_root.clone(),
        };
        let executables = driven.keys().map(executable).collect();
        let found = UsableAndUnusableBenches {
            usable_executables: executables,
            ..UsableAndUnusableBenches::default()
        };
        let asking = BenchRequestSettings {
            bench_variables: request.bench_variables.clone(),
            criterion_filter: request.criterion_filter.as_deref(),
            response_timeout: request
                .process_timeout
                .unwrap_or(versions::PROTOCOL_VERSION_QUERY_TIMEOUT),
            running_child,
        };
        if request.criterion_filter.is_some()
            && let Err(error) = bench_requests::request_from_all_benches(
                &found,
                &asking,
                &RequestedBenchAction::ListCases,
            )
            && error.is::<bench_requests::NoMatchingCaseError>()
        {
            progress.print_line(&format!("in the base {error}"));
        }
    }

    /// Prepares two identical sides for a calibration: the base, and as head a copy of the base's
    /// executables. If the base has checked-out sources, the head's folder `sources` is a link to
    /// them.
    pub fn prepare_identical_sides(
        self,
    ) -> Result<[ComparisonSideWithExecutables; 2], CompareError> {
        let folder = self.folder;
        // Executables of an earlier build are removed first, so that only benches of the new build
        // remain.
        for arm in [ComparedArm::BaseBuild, ComparedArm::HeadBuild] {
            let bin = folder.side_folder_path(arm).join("bin");
            leftover_files::remove_file_or_folder_if_present(&bin)
                .map_err(CompareError::file_error("remove", &bin))?;
        }
        let same = BuildComparisonRequest {
            head: ComparedSideSource::PrebuiltFolder(
                folder.side_folder_path(ComparedArm::BaseBuild).join("bin"),
            ),
            ..self.request.clone()
        };
        let [base, head] = SideBuilder { request: &same, ..self }.prepare_both_sides(true)?;
        let sources = folder.side_folder_path(ComparedArm::HeadBuild).join(SIDE_SOURCES_FOLDER);
        if std::fs::symlink_metadata(&sources).is_err()
            && folder.side_folder_path(ComparedArm::BaseBuild).join(SIDE_SOURCES_FOLDER).is_dir()
        {
            let linked = std::os::unix::fs::symlink(
                Path::new("..").join(ComparedArm::BaseBuild.arm_name()).join(SIDE_SOURCES_FOLDER),
                &sources,
            );
            linked.map_err(CompareError::file_error("link", &sources))?;
        }
        let head = ComparisonSideWithExecutables {
            revision_label: base.revision_label.clone(),
            recorded_commit: base.recorded_commit.clone(),
            checkout_commit: base.checkout_commit.clone(),
            package_folder: base.package_folder.clone(),
            package_folder_by_bench: base.package_folder_by_bench.clone(),
            ..head
        };
        Ok([base, head])
    }

    fn bench_copy_settings(&self, built: bool) -> BenchCopySettings<'_> {
        let timeout =
            self.request.process_timeout.unwrap_or(versions::PROTOCOL_VERSION_QUERY_TIMEOUT);
        BenchCopySettings {
            wanted_benches: &self.request.bench_names,
            built_by_kernelgate: built,
            version_query_timeout: timeout,
            running_child: self.running_child,
        }
    }

    fn prepare_side_from_folder(
        self,
        arm: ComparedArm,
        path: &Path,
        built: bool,
    ) -> Result<ComparisonSideWithExecutables, CompareError> {
        let label = path.display().to_string();
        let found =
            prebuilt_benches_in_folder(path).map_err(CompareError::file_error("read", path))?;
        let at = self.folder.side_folder_path(arm);
        let executables =
            copy_and_query_benches(&at, &found, &label, self.bench_copy_settings(built))?;
        if executables.runnable_benches.is_empty() && executables.benches_not_run.is_empty() {
            return Err(CompareError::NoBenchExecutableInFolder(label));
        }
        Ok(ComparisonSideWithExecutables {
            revision_label: label,
            recorded_commit: format!("prebuilt-{arm}"),
            checkout_commit: None,
            package_folder: self.request.package_root.clone(),
            package_folder_by_bench: BTreeMap::new(),
            executables,
        })
    }

    /// Builds a revision of the user's repository and copies its bench executables into the side's
    /// folder.
    fn prepare_side_from_revision(
        self,
        arm: ComparedArm,
        found: &RevisionWithCheckout,
    ) -> Result<ComparisonSideWithExecutables, CompareError> {
        let Self { request, folder, progress, .. } = self;
        let RevisionWithCheckout { revision, checkout, repository } = found;
        let side_name = arm.arm_name();
        let label = revision.name_and_short_commit();
        let surroundings = CopiedRepositoryPaths::for_repository(&repository.work_tree_root);
        let notes = checkout.check_out_revision(revision)?;
        notes.iter().for_each(|note| progress.print_line(&format!("{side_name}: {note}")));
        progress.show_current_step(&format!("building {side_name}: {label}"));
        let started = Instant::now();
        let seeded = match arm {
            ComparedArm::HeadBuild => copy_target_folder_of_other_side(
                &folder.side_folder_path(ComparedArm::BaseBuild),
                &folder.side_folder_path(arm),
            ),
            ComparedArm::BaseBuild => seed_build_from_users_target_folder(
                request,
                repository,
                &folder.side_folder_path(arm),
            ),
        };
        if seeded.is_err() {
            // If copying compiled crates failed, cargo compiles the dependencies again, and reports
            // a full disk itself.
            let _ = leftover_files::remove_file_or_folder_if_present(
                &folder.side_folder_path(arm).join("target.partial"),
            );
        }
        let (built, unbuilt) = self.build_checked_out_revision(arm, found, &notes)?;
        progress
            .show_current_step(&format!("built {side_name} in {}", duration(started.elapsed())));
        let relocated = |path: PathBuf| match path.strip_prefix(folder.slot_folder_path()) {
            Ok(below) => folder.side_folder_path(arm).join(below),
            Err(_) => path,
        };
        for outside in surroundings.packages_outside_repository(
            &folder.slot_folder_path(),
            &built.compiled_package_manifests,
        ) {
            progress.print_line_once(&format!(
                "{} lies outside of the repository: both sides use it as it is now",
                outside.display()
            ));
        }
        let packages = package_folder_of_each_bench(&built.benches, (arm, &label))?;
        let built: BTreeMap<String, PathBuf> = built
            .benches
            .into_iter()
            .map(|built| (built.bench_name, relocated(built.executable_path)))
            .collect();
        let (at, name) = (folder.side_folder_path(arm), format!("{side_name} {label}"));
        let mut executables =
            copy_and_query_benches(&at, &built, &name, self.bench_copy_settings(true))?;
        let is_selected =
            |bench: &String| request.bench_names.is_empty() || request.bench_names.contains(bench);
        let unbuilt = unbuilt.into_iter();
        let unbuilt = unbuilt.filter(|(bench, _)| is_selected(bench) && !built.contains_key(bench));
        executables.benches_not_run.extend(unbuilt);
        let package = surroundings
            .repository_copy_folder(&folder.slot_folder_path())
            .join(&repository.package_path_in_tree);
        let commit = revision.full_commit_id.clone();
        Ok(ComparisonSideWithExecutables {
            revision_label: label,
            checkout_commit: Some(commit.clone()),
            recorded_commit: commit,
            package_folder: package,
            package_folder_by_bench: packages,
            executables,
        })
    }

    /// Builds a checked-out revision, and returns the built benches, and the benches that cargo
    /// skipped, each with the reason.
    fn build_checked_out_revision(
        self,
        arm: ComparedArm,
        found: &RevisionWithCheckout,
        notes: &[String],
    ) -> Result<(BuiltBenchExecutables, BTreeMap<String, String>), CompareError> {
        let Self { request, folder, progress, .. } = self;
        let RevisionWithCheckout { revision, repository, .. } = found;
        let (side_name, label, started) =
            (arm.arm_name(), revision.name_and_short_commit(), Instant::now());
        let surroundings = CopiedRepositoryPaths::for_repository(&repository.work_tree_root);
        let targets = BenchBuildTargets {
            bench_names: &request.bench_names,
            only_package: request.workspace_member.as_deref(),
            cargo_profile: &request.build_profile,
            cargo_features: &request.cargo_features,
        };
        let build = |targets: BenchBuildTargets<'_>| {
            folder.run_with_side_in_slot(arm, |slot| {
                let manifest = surroundings
                    .repository_copy_folder(slot)
                    .join(&repository.package_path_in_tree)
                    .join("Cargo.toml");
                if !manifest.is_file() {
                    let (label, manifest) =
                        (label.clone(), repository.package_path_in_tree.join("Cargo.toml"));
                    return Err(CompareError::NoCargoManifestInRevision {
                        side: arm,
                        revision_label: label,
                        missing_manifest: manifest,
                    });
                }
                let mut command = cargo::cargo_bench_build_command(targets);
                command
                    .arg("--manifest-path")
                    .arg(&manifest)
                    .current_dir(manifest.parent().unwrap_or(slot));
                command
                    .env("CARGO_TARGET_DIR", slot.join("target"))
                    .envs(cargo::CARGO_PROGRESS_VARIABLES);
                let show = |line: CargoStderrLine<'_>| {
                    if let CargoStderrLine::Progress(CargoBuildProgress {
                        built_crates: done,
                        total_crates: all,
                    }) = line
                    {
                        let elapsed = duration(started.elapsed());
                        progress.show_frequent_step(&format!(
                            "building {side_name}: {done} of {all} crates, {elapsed}"
                        ));
                    }
                };
                let built = cargo::run_cargo_bench_build(
                    &mut command,
                    (self.running_child, request.build_timeout),
                    show,
                );
                let unbuilt = benches_that_need_features(manifest.parent().unwrap_or(slot));
                let not_built = |cause| {
                    let (label, notes, slot) = (label.clone(), notes.to_owned(), slot.to_owned());
                    CompareError::BenchBuildFailed {
                        side: arm,
                        revision_label: label,
                        cause,
                        missing_file_notes: notes,
                        slot_folder: slot,
                    }
                };
                built.map(|built| (built, unbuilt)).map_err(not_built)
            })
        };
        // If cargo reports that a requested bench does not exist on this side, all benches are
        // built, so that the missing one does not fail the build.
        match build(targets) {
            Err(CompareError::BenchBuildFailed {
                cause: CargoBuildError::BuildFailed(lines),
                ..
            }) if !request.bench_names.is_empty() && lines.contains("no bench target named") => {
                build(BenchBuildTargets { bench_names: &[], ..targets })
            }
            other => other,
        }
    }
}

/// Copies compiled registry crates from the user's target folder into the side's empty target
/// folder, before the side's first build.
fn seed_build_from_users_target_folder(
    request: &BuildComparisonRequest,
    repository: &GitRepository,
    side: &Path,
) -> std::io::Result<()> {
    let profile = match request.build_profile.as_str() {
        "bench" | "release" => "release",
        "dev" | "test" => "debug",
        own => own,
    };
    let locks = [
        repository.work_tree_root.clone(),
        repository.work_tree_root.join(&repository.package_path_in_tree),
    ];
    let lock = locks.iter().find_map(|it| {
        file::read_untrusted_text_up_to(&it.join("Cargo.lock"), MAX_CARGO_LOCK_BYTES).ok()
    });
    let count = lock.map(|lock| {
        copy_compiled_registry_crates(&request.cargo_target_folder, profile, side, &lock)
    });
    count.transpose().map(drop)
}

/// Returns, for each bench, the package folder in which its processes run; two packages with a
/// bench of one name are an error.
fn package_folder_of_each_bench(
    built: &[BenchExecutable],
    (side, label): (ComparedArm, &str),
) -> Result<BTreeMap<String, PathBuf>, CompareError> {
    let mut packages: BTreeMap<String, PathBuf> = BTreeMap::new();
    for BenchExecutable { bench_name: bench, package_root: folder, .. } in built {
        let recorded = packages.entry(bench.clone()).or_insert_with(|| folder.clone());
        if recorded != folder {
            let name = |folder: &Path| {
                folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
            };
            let (label, bench) = (label.to_owned(), bench.clone());
            let packages = [name(recorded), name(folder)];
            return Err(CompareError::BenchNameInTwoPackages {
                side,
                label,
                bench_name: bench,
                packages,
            });
        }
    }
    Ok(packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bench_runs_in_its_package_folder_and_equal_names_are_refused() {
        let built = |bench: &str, root: &str| BenchExecutable {
            bench_name: bench.to_owned(),
            executable_path: PathBuf::from("/t/x"),
            package_root: PathBuf::from(root),
        };
        let one = [built("a", "/w/one"), built("b", "/w/two")];
        let packages =
            package_folder_of_each_bench(&one, (ComparedArm::BaseBuild, "main")).unwrap();
        assert_eq!(packages["b"], PathBuf::from("/w/two"));
        let both = [one[0].clone(), built("a", "/w/two")];
        let why = package_folder_of_each_bench(&both, (ComparedArm::BaseBuild, "main"))
            .unwrap_err()
            .to_string();
        insta::assert_snapshot!(why, @"base main: the packages in one and two both have a bench `a`: compare in the folder of one of them");
    }
}
