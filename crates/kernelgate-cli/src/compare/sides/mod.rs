//! Makes both sides ready: sources are checked out, executables are built and asked for their
//! versions.

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

use super::progress::{ComparisonProgress, duration};
use super::{CompareError, ComparisonRequest, SideSource};
use crate::benches::bench_requests::{self, RequestSettings};
use crate::benches::cargo::{
    self, BenchExecutable, BuildError, BuildOutput, BuildProgress, BuildTargets, CargoBuildOutput,
};
use crate::benches::child_process::ChildProcess;
use crate::benches::find::FoundBenches;
use crate::benches::package::unbuilt_benches;
use crate::benches::prebuilt::prebuilt_benches;
use crate::benches::versions;
use crate::gate::paired::Arm;
use checkout::SnapshotCheckout;
use comparison_folder::LockedFolder;
use copy_benches::{BenchDriver, InstalledBenches, SideInstaller, install_benches};
use git::{GitRepository, GitRevision};
use kernelgate::protocol::RequestedAction;
use kernelgate::record::file;
use neighbour_links::{PackageSurroundings, SIDE_SOURCES_FOLDER};
use seeded_builds::{copy_target_folder, seed_registry};
use snapshot::{SnapshotOptions, take_working_snapshot};

/// Longest lock file of cargo that is read, bytes.
const MAX_LOCK_FILE_BYTES: u64 = 64 << 20;

/// One side of a comparison (base or head) with its executables.
pub struct ComparisonSide {
    /// Name and commit of the compared side: "main (1a2b3c4d)".
    pub label: String,
    /// Commit that the run records of this side state.
    pub commit: String,
    /// Commit whose files the side's processes find, if they run in its checkout; `None` if they
    /// run in the user's package.
    pub sources: Option<String>,
    /// Folder of the side's package: below the slot that both sides use, or the user's own folder.
    pub package: PathBuf,
    /// Package folders in which the side's benches run, if cargo reported them.
    pub packages: BTreeMap<String, PathBuf>,
    /// Executables that can run.
    pub executables: InstalledBenches,
}

impl ComparisonSide {
    /// Folder in which the processes of a bench run.
    pub fn package_folder_of(&self, bench: &str) -> &PathBuf {
        self.packages.get(bench).unwrap_or(&self.package)
    }
}

/// Source of a side's executables: a folder or a revision.
enum SideExecutableSource<'a> {
    Folder(&'a Path),
    Revision(Box<CheckedOutRevision>),
}

/// A revision, and the checkout in which it is built.
struct CheckedOutRevision {
    revision: GitRevision,
    checkout: SnapshotCheckout,
    repository: GitRepository,
}

/// Builds and installs both sides of a comparison.
#[derive(Clone, Copy)]
pub struct SideBuilder<'a> {
    pub request: &'a ComparisonRequest,
    /// Folder that contains both sides.
    pub folder: &'a LockedFolder,
    /// Shows the progress.
    pub progress: &'a ComparisonProgress,
    /// Handle of the running build, which an interrupt ends.
    pub running: &'a ChildProcess,
}

impl<'a> SideBuilder<'a> {
    /// Makes both sides ready. All revisions are resolved before the first one is built.
    pub fn sides(self) -> Result<[ComparisonSide; 2], CompareError> {
        self.prepare_both_sides(false)
    }

    /// Makes both sides ready. With `twins`, the folder of the head holds executables that were
    /// built for the base.
    fn prepare_both_sides(self, twins: bool) -> Result<[ComparisonSide; 2], CompareError> {
        let Self { request, folder, progress, .. } = self;
        let find = |arm, source: &'a SideSource| {
            let name = match source {
                SideSource::Folder(path) => return Ok(SideExecutableSource::Folder(path)),
                SideSource::Revision(name) => Some(name),
                SideSource::WorkTree => None,
            };
            let repository = GitRepository::around_package(&request.package)?;
            let named = name.map(|name| repository.resolve(name)).transpose()?;
            let side = folder.side_folder_path(arm);
            let surroundings = PackageSurroundings::new(&repository.top);
            let copy = surroundings.make_folder_of_copy(&side)?;
            let checkout = SnapshotCheckout::open_or_create(&repository, &copy)?;
            surroundings.update_links(&side)?;
            let revision = match named {
                Some(revision) => revision,
                None => {
                    let say = |text: &str| progress.say(text);
                    let (target, leave_out) = (&request.target, &request.leave_out[..]);
                    take_working_snapshot(
                        &repository,
                        &checkout,
                        SnapshotOptions { target, leave_out, say: &say },
                    )?
                }
            };
            let found = CheckedOutRevision { revision, checkout, repository };
            Ok::<_, CompareError>(SideExecutableSource::Revision(Box::new(found)))
        };
        let sources = [find(Arm::Base, &request.base)?, find(Arm::Head, &request.head)?];
        let make = |arm, sources: &SideExecutableSource<'_>| match sources {
            SideExecutableSource::Folder(path) => {
                // If both sides are identical, the executables were checked when they were copied
                // into the base's folder.
                let built = twins && arm == Arm::Head;
                self.install_folder(arm, path, built)
            }
            SideExecutableSource::Revision(found) => self.install_revision(arm, found),
        };
        let base = make(Arm::Base, &sources[0])?;
        if matches!(sources[1], SideExecutableSource::Revision(_)) {
            self.check_case_filter(&base);
        }
        let head = make(Arm::Head, &sources[1])?;
        for (arm, side) in [(Arm::Base, &base), (Arm::Head, &head)] {
            for (bench, reason) in &side.executables.foreign {
                progress.say(&format!("left alone: {bench} of the {arm}: {reason}"));
            }
        }
        for bench in &request.benches {
            let names: BTreeSet<&String> =
                base.executables.names.iter().chain(&head.executables.names).collect();
            if !names.contains(bench) {
                let names = names.into_iter().cloned().collect();
                return Err(CompareError::NoBench { bench: bench.clone(), known: names });
            }
        }
        Ok([base, head])
    }

    /// States before the head is built that no case of the base matches the filter, which is often
    /// a typing error. A case that only the head has is still listed.
    fn check_case_filter(&self, base: &ComparisonSide) {
        let Self { request, folder, progress, running } = self;
        let driven = &base.executables.driven;
        if !driven.values().all(|bench| matches!(bench.driver, BenchDriver::Protocol(_))) {
            return;
        }
        let bin = folder.side_folder_path(Arm::Base).join("bin");
        let executable = |bench: &String| BenchExecutable {
            bench: bench.clone(),
            path: bin.join(bench),
            root: request.package.clone(),
        };
        let executables = driven.keys().map(executable).collect();
        let found = FoundBenches { executables, ..FoundBenches::default() };
        let asking = RequestSettings {
            settings: request.settings.clone(),
            filter: request.filter.as_deref(),
            timeout: request.wait.unwrap_or(versions::VERSION_TIMEOUT),
            running,
        };
        if request.filter.is_some()
            && let Err(error) =
                bench_requests::ask_all_benches(&found, &asking, &RequestedAction::List)
            && error.is::<bench_requests::NoMatchingCase>()
        {
            progress.say(&format!("in the base {error}"));
        }
    }

    /// Prepares two identical sides: the base, and a copy of its executables as head. If the base
    /// has sources, the head's sources are a link to the base's.
    pub fn prepare_identical_sides(self) -> Result<[ComparisonSide; 2], CompareError> {
        let folder = self.folder;
        // Removes executables of an earlier build that the new build does not have.
        for arm in [Arm::Base, Arm::Head] {
            let bin = folder.side_folder_path(arm).join("bin");
            leftover_files::remove_path(&bin).map_err(CompareError::io("remove", &bin))?;
        }
        let same = ComparisonRequest {
            head: SideSource::Folder(folder.side_folder_path(Arm::Base).join("bin")),
            ..self.request.clone()
        };
        let [base, head] = SideBuilder { request: &same, ..self }.prepare_both_sides(true)?;
        let sources = folder.side_folder_path(Arm::Head).join(SIDE_SOURCES_FOLDER);
        if std::fs::symlink_metadata(&sources).is_err()
            && folder.side_folder_path(Arm::Base).join(SIDE_SOURCES_FOLDER).is_dir()
        {
            let linked = std::os::unix::fs::symlink(
                Path::new("..").join(Arm::Base.name()).join(SIDE_SOURCES_FOLDER),
                &sources,
            );
            linked.map_err(CompareError::io("link", &sources))?;
        }
        let head = ComparisonSide {
            label: base.label.clone(),
            commit: base.commit.clone(),
            sources: base.sources.clone(),
            package: base.package.clone(),
            packages: base.packages.clone(),
            ..head
        };
        Ok([base, head])
    }

    fn side_installer(&self, built: bool) -> SideInstaller<'_> {
        let timeout = self.request.wait.unwrap_or(versions::VERSION_TIMEOUT);
        SideInstaller { wanted: &self.request.benches, built, timeout, running: self.running }
    }

    fn install_folder(
        self,
        arm: Arm,
        path: &Path,
        built: bool,
    ) -> Result<ComparisonSide, CompareError> {
        let label = path.display().to_string();
        let found = prebuilt_benches(path).map_err(CompareError::io("read", path))?;
        let at = self.folder.side_folder_path(arm);
        let executables = install_benches(&at, &found, &label, self.side_installer(built))?;
        if executables.driven.is_empty() && executables.foreign.is_empty() {
            return Err(CompareError::NoExecutable(label));
        }
        Ok(ComparisonSide {
            label,
            commit: format!("prebuilt-{arm}"),
            sources: None,
            package: self.request.package.clone(),
            packages: BTreeMap::new(),
            executables,
        })
    }

    /// Builds a revision and installs its executables.
    fn install_revision(
        self,
        arm: Arm,
        found: &CheckedOutRevision,
    ) -> Result<ComparisonSide, CompareError> {
        let Self { request, folder, progress, .. } = self;
        let CheckedOutRevision { revision, checkout, repository } = found;
        let side_name = arm.name();
        let label = revision.label();
        let surroundings = PackageSurroundings::new(&repository.top);
        let notes = checkout.check_out(revision)?;
        notes.iter().for_each(|note| progress.say(&format!("{side_name}: {note}")));
        progress.show_step(&format!("building {side_name}: {label}"));
        let started = Instant::now();
        let seeded = match arm {
            Arm::Head => copy_target_folder(
                &folder.side_folder_path(Arm::Base),
                &folder.side_folder_path(arm),
            ),
            Arm::Base => seed_from_user(request, repository, &folder.side_folder_path(arm)),
        };
        if seeded.is_err() {
            // Cargo then compiles the dependencies again; on a full disk it reports that.
            let _ =
                leftover_files::remove_path(&folder.side_folder_path(arm).join("target.partial"));
        }
        let (built, unbuilt) = self.build_side(arm, found, &notes)?;
        progress.show_step(&format!("built {side_name} in {}", duration(started.elapsed())));
        let relocated = |path: PathBuf| match path.strip_prefix(folder.slot_folder_path()) {
            Ok(below) => folder.side_folder_path(arm).join(below),
            Err(_) => path,
        };
        for outside in surroundings.outside(&folder.slot_folder_path(), &built.manifests) {
            progress.print_once(&format!(
                "{} lies outside of the repository: both sides use it as it is now",
                outside.display()
            ));
        }
        let packages = packages_of_benches(&built.benches, (arm, &label))?;
        let built: BTreeMap<String, PathBuf> =
            built.benches.into_iter().map(|built| (built.bench, relocated(built.path))).collect();
        let (at, name) = (folder.side_folder_path(arm), format!("{side_name} {label}"));
        let mut executables = install_benches(&at, &built, &name, self.side_installer(true))?;
        let is_selected =
            |bench: &String| request.benches.is_empty() || request.benches.contains(bench);
        let unbuilt = unbuilt.into_iter();
        let unbuilt = unbuilt.filter(|(bench, _)| is_selected(bench) && !built.contains_key(bench));
        executables.foreign.extend(unbuilt);
        let package =
            surroundings.folder_of_copy(&folder.slot_folder_path()).join(&repository.package);
        let commit = revision.commit.clone();
        Ok(ComparisonSide {
            label,
            sources: Some(commit.clone()),
            commit,
            package,
            packages,
            executables,
        })
    }

    /// Builds a checked-out revision. Returns the benches that were built, and the package's
    /// benches that were not, with the reason.
    fn build_side(
        self,
        arm: Arm,
        found: &CheckedOutRevision,
        notes: &[String],
    ) -> Result<(BuildOutput, BTreeMap<String, String>), CompareError> {
        let Self { request, folder, progress, .. } = self;
        let CheckedOutRevision { revision, repository, .. } = found;
        let (side_name, label, started) = (arm.name(), revision.label(), Instant::now());
        let surroundings = PackageSurroundings::new(&repository.top);
        let targets = BuildTargets {
            benches: &request.benches,
            package: request.member.as_deref(),
            profile: &request.profile,
            features: &request.features,
        };
        let build = |targets: BuildTargets<'_>| {
            folder.run_in_slot(arm, |slot| {
                let manifest =
                    surroundings.folder_of_copy(slot).join(&repository.package).join("Cargo.toml");
                if !manifest.is_file() {
                    let (label, manifest) = (label.clone(), repository.package.join("Cargo.toml"));
                    return Err(CompareError::NoManifest { side: arm, label, manifest });
                }
                let mut command = cargo::cargo_bench_command(targets);
                command
                    .arg("--manifest-path")
                    .arg(&manifest)
                    .current_dir(manifest.parent().unwrap_or(slot));
                command
                    .env("CARGO_TARGET_DIR", slot.join("target"))
                    .envs(cargo::CARGO_PROGRESS_VARIABLES);
                let show = |line: CargoBuildOutput<'_>| {
                    if let CargoBuildOutput::Progress(BuildProgress { done, all }) = line {
                        let elapsed = duration(started.elapsed());
                        progress.print_often(&format!(
                            "building {side_name}: {done} of {all} crates, {elapsed}"
                        ));
                    }
                };
                let built =
                    cargo::run_cargo_build(&mut command, (self.running, request.build_wait), show);
                let unbuilt = unbuilt_benches(manifest.parent().unwrap_or(slot));
                let not_built = |cause| {
                    let (label, notes, slot) = (label.clone(), notes.to_owned(), slot.to_owned());
                    CompareError::NotBuilt { side: arm, label, cause, notes, slot }
                };
                built.map(|built| (built, unbuilt)).map_err(not_built)
            })
        };
        // A bench that one side lacks does not fail the build: cargo is asked only for benches that
        // exist.
        match build(targets) {
            Err(CompareError::NotBuilt { cause: BuildError::Failed(lines), .. })
                if !request.benches.is_empty() && lines.contains("no bench target named") =>
            {
                build(BuildTargets { benches: &[], ..targets })
            }
            other => other,
        }
    }
}

/// Starts the first build of a side with the registry's crates that the user's own builds compiled.
fn seed_from_user(
    request: &ComparisonRequest,
    repository: &GitRepository,
    side: &Path,
) -> std::io::Result<()> {
    let profile = match request.profile.as_str() {
        "bench" | "release" => "release",
        "dev" | "test" => "debug",
        own => own,
    };
    let locks = [repository.top.clone(), repository.top.join(&repository.package)];
    let lock = locks
        .iter()
        .find_map(|it| file::read_untrusted_text(&it.join("Cargo.lock"), MAX_LOCK_FILE_BYTES).ok());
    let count = lock.map(|lock| seed_registry(&request.target, profile, side, &lock));
    count.transpose().map(drop)
}

/// Returns the package folder of each bench.
fn packages_of_benches(
    built: &[BenchExecutable],
    (side, label): (Arm, &str),
) -> Result<BTreeMap<String, PathBuf>, CompareError> {
    let mut packages: BTreeMap<String, PathBuf> = BTreeMap::new();
    for BenchExecutable { bench, root: folder, .. } in built {
        let recorded = packages.entry(bench.clone()).or_insert_with(|| folder.clone());
        if recorded != folder {
            let name = |folder: &Path| {
                folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
            };
            let (label, bench) = (label.to_owned(), bench.clone());
            let packages = [name(recorded), name(folder)];
            return Err(CompareError::OneBenchTwice { side, label, bench, packages });
        }
    }
    Ok(packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bench_runs_in_the_folder_of_its_package_and_names_do_not_collide() {
        let built = |bench: &str, root: &str| BenchExecutable {
            bench: bench.to_owned(),
            path: PathBuf::from("/t/x"),
            root: PathBuf::from(root),
        };
        let one = [built("a", "/w/one"), built("b", "/w/two")];
        let packages = packages_of_benches(&one, (Arm::Base, "main")).unwrap();
        assert_eq!(packages["b"], PathBuf::from("/w/two"));
        let both = [one[0].clone(), built("a", "/w/two")];
        let why = packages_of_benches(&both, (Arm::Base, "main")).unwrap_err().to_string();
        insta::assert_snapshot!(why, @"base main: the packages in one and two both have a bench `a`: compare in the folder of one of them");
    }
}
