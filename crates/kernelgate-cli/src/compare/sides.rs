//! Both sides made ready: sources checked out, executables built and asked, the cases that both
//! have.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::folder::{self, Folder};
use super::git::{Repository, Revision};
use super::install::{InstalledBenches, install};
use super::progress::ComparisonProgress;
use super::seed::seed;
use super::{CompareError, ComparisonRequest, SideSource};
use crate::benches::cargo::{self, BuildTargets};
use crate::benches::child::Running;
use crate::benches::prebuilt::prebuilt;
use crate::gate::Refusal;
use crate::gate::paired::Arm;
use kernelgate::record::Run;

/// A side with its executables.
pub struct Side {
    /// "main (1a2b3c4d)".
    pub label: String,
    /// Commit for the runs' provenance.
    pub commit: String,
    /// Folder of the package: below the slot, or that of the user.
    pub package: PathBuf,
    /// What can run.
    pub executables: InstalledBenches,
}

/// Both sides. Revisions are looked up before anything is built.
///
/// # Errors
/// When a revision does not exist or does not build, or an executable knows no trials.
pub fn prepare(
    request: &ComparisonRequest,
    folder: &Folder,
    (progress, running): (&ComparisonProgress, &Running),
) -> Result<[Side; 2], CompareError> {
    let both = [(Arm::Base, &request.base), (Arm::Head, &request.head)];
    let needs_git = both.iter().any(|(_, source)| !matches!(source, SideSource::Folder(_)));
    let repository = needs_git.then(|| Repository::around(&request.package)).transpose()?;
    let mut revisions = Vec::new();
    for (arm, source) in both {
        revisions.push(match (source, &repository) {
            (SideSource::Revision(name), Some(repository)) => Some(repository.resolve(name)?),
            (SideSource::WorkTree, Some(repository)) => {
                let objects = repository.checkout_folder(&folder.side(arm).join("src"))?;
                Some(repository.snapshot(&objects, &request.target)?)
            }
            _ => None,
        });
    }
    let mut sides = Vec::new();
    for ((arm, source), revision) in both.into_iter().zip(revisions) {
        sides.push(match (source, revision, &repository) {
            (SideSource::Folder(path), _, _) => from_folder(request, folder, arm, path)?,
            (_, Some(revision), Some(repository)) => {
                from_revision(request, folder, arm, (&revision, repository), (progress, running))?
            }
            _ => return Err(CompareError::Usage("no repository".to_owned())),
        });
    }
    for ((arm, _), side) in both.into_iter().zip(&sides) {
        for (bench, reason) in &side.executables.foreign {
            progress.say(&format!("left alone: {bench} of the {}: {reason}", folder::name(arm)));
        }
    }
    let [base, head]: [Side; 2] =
        sides.try_into().map_err(|_| CompareError::Usage("two sides are needed".to_owned()))?;
    for bench in &request.benches {
        let known: BTreeSet<&String> =
            base.executables.names.iter().chain(&head.executables.names).collect();
        if !known.contains(bench) {
            let known = known.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(CompareError::Usage(format!(
                "--bench {bench}: neither side has it; there are {known}"
            )));
        }
    }
    Ok([base, head])
}

/// One side twice: the base, and a copy of its executables as head. Where the base has sources, the
/// head's are a link to them.
///
/// # Errors
/// As [`prepare()`].
pub fn prepare_twins(
    request: &ComparisonRequest,
    folder: &Folder,
    tools: (&ComparisonProgress, &Running),
) -> Result<[Side; 2], CompareError> {
    // Executables of an earlier build that this one does not have.
    for arm in [Arm::Base, Arm::Head] {
        let _ = std::fs::remove_dir_all(folder.side(arm).join("bin"));
    }
    let same = ComparisonRequest {
        head: SideSource::Folder(folder.side(Arm::Base).join("bin")),
        ..request.clone()
    };
    let [base, head] = prepare(&same, folder, tools)?;
    for bench in head.executables.ours.keys() {
        // A file of its own, as after a build.
        let (from, to) = (
            folder.side(Arm::Base).join("bin").join(bench),
            folder.side(Arm::Head).join("bin").join(bench),
        );
        let copied = std::fs::remove_file(&to).and_then(|()| std::fs::copy(&from, &to));
        copied.map_err(|cause| CompareError::io("write", &to, &cause))?;
    }
    #[cfg(unix)]
    {
        let sources = folder.side(Arm::Head).join("src");
        if std::fs::symlink_metadata(&sources).is_err()
            && folder.side(Arm::Base).join("src").is_dir()
        {
            let linked = std::os::unix::fs::symlink(
                Path::new("..").join(folder::name(Arm::Base)).join("src"),
                &sources,
            );
            linked.map_err(|cause| CompareError::io("link", &sources, &cause))?;
        }
    }
    let head = Side {
        label: base.label.clone(),
        commit: base.commit.clone(),
        package: base.package.clone(),
        ..head
    };
    Ok([base, head])
}

fn from_folder(
    request: &ComparisonRequest,
    folder: &Folder,
    arm: Arm,
    path: &Path,
) -> Result<Side, CompareError> {
    let label = path.display().to_string();
    let found = prebuilt(path).map_err(|cause| CompareError::io("read", path, &cause))?;
    let executables = install(&folder.side(arm), &found, &label, &request.benches)?;
    if executables.ours.is_empty() && executables.foreign.is_empty() {
        return Err(CompareError::Usage(format!("no bench executable in {label}")));
    }
    Ok(Side {
        label,
        commit: format!("prebuilt-{}", folder::name(arm)),
        package: request.package.clone(),
        executables,
    })
}

fn from_revision(
    request: &ComparisonRequest,
    folder: &Folder,
    arm: Arm,
    (revision, repository): (&Revision, &Repository),
    (progress, running): (&ComparisonProgress, &Running),
) -> Result<Side, CompareError> {
    let side_name = folder::name(arm);
    let label = revision.label();
    let source = folder.side(arm).join("src");
    repository.checkout_folder(&source)?;
    repository.check_out(revision, &source)?;
    progress.now(&format!("building {side_name}: {label}"));
    if arm == Arm::Head && seed(&folder.side(Arm::Base), &folder.side(arm)).is_err() {
        // A full disk, say: cargo then builds the dependencies once more, or says what is wrong.
        let _ = std::fs::remove_dir_all(folder.side(arm).join("target.partial"));
    }
    let package = &repository.package;
    let wanted =
        BuildTargets { benches: &request.benches, package: None, profile: &request.profile };
    let build = |wanted: BuildTargets<'_>| {
        folder.in_slot(arm, |slot| {
            let manifest = slot.join("src").join(package).join("Cargo.toml");
            if !manifest.is_file() {
                let name = package.join("Cargo.toml");
                return Err(CompareError::Usage(format!(
                    "{side_name} {label} has no {}",
                    name.display()
                )));
            }
            let mut command = cargo::command(wanted);
            command
                .arg("--manifest-path")
                .arg(&manifest)
                .current_dir(manifest.parent().unwrap_or(slot));
            command.env("CARGO_TARGET_DIR", slot.join("target"));
            let said = |line: &str| progress.passing(&format!("building {side_name}: {line}"));
            cargo::build(&mut command, running, said)
                .map_err(|why| CompareError::Usage(format!("{side_name} {label} {why}")))
        })
    };
    // A bench that one side lacks is no failure of the build: cargo is asked for what there is.
    let built = match build(wanted) {
        Err(CompareError::Usage(text))
            if !request.benches.is_empty() && text.contains("no bench target named") =>
        {
            build(BuildTargets { benches: &[], ..wanted })?
        }
        other => other?,
    };
    let relocated = |path: PathBuf| match path.strip_prefix(folder.slot()) {
        Ok(below) => folder.side(arm).join(below),
        Err(_) => path,
    };
    let built: BTreeMap<String, PathBuf> =
        built.into_iter().map(|built| (built.bench, relocated(built.path))).collect();
    let executables =
        install(&folder.side(arm), &built, &format!("{side_name} {label}"), &request.benches)?;
    let package = folder.slot().join("src").join(&repository.package);
    Ok(Side { label, commit: revision.commit.clone(), package, executables })
}

/// What the runs that verified both sides of a bench say together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Matched {
    /// Cases to compare.
    pub judged: BTreeSet<String>,
    /// Differences that forbid it.
    pub refused: BTreeMap<(String, String, String), BTreeSet<String>>,
    /// Only in the head.
    pub new: Vec<String>,
    /// Only in the base.
    pub removed: Vec<String>,
    /// In the base, skipped in the head.
    pub skipped: BTreeMap<String, String>,
    /// Failed in the head.
    pub failed: BTreeMap<String, String>,
    /// Failed in the base only, and verified or absent in the head.
    pub failed_in_base: BTreeMap<String, String>,
    /// Asked for, and lacking on one side what a comparison takes, with the reason: skipped in the
    /// base, or of a bench that failed.
    pub unmeasured: BTreeMap<String, String>,
}

impl Matched {
    /// Sorts the cases of a bench; a side without the bench has no run.
    pub fn add(&mut self, base: Option<&Run>, head: Option<&Run>) {
        let ids = |run: Option<&Run>| {
            run.into_iter().flat_map(|run| run.cases.keys().cloned()).collect::<BTreeSet<String>>()
        };
        let (base_ids, head_ids) = (ids(base), ids(head));
        let failed = |run: Option<&Run>| run.map(|run| run.failed.clone()).unwrap_or_default();
        let (base_failed, head_failed) = (failed(base), failed(head));
        let skipped = |id: &String| head.and_then(|run| run.skipped.get(id)).cloned();
        for (id, error) in base_failed.iter().filter(|(id, _)| !head_failed.contains_key(*id)) {
            match skipped(id) {
                Some(reason) => {
                    let why = format!("failed in the base: {error}; skipped in the head: {reason}");
                    self.unmeasured.insert(id.clone(), why);
                }
                None => drop(self.failed_in_base.insert(id.clone(), error.clone())),
            }
        }
        for id in
            head_ids.iter().filter(|id| !base_ids.contains(*id) && !base_failed.contains_key(*id))
        {
            // What the base could not compute on any machine is new, as what it did not have.
            let skip = base
                .filter(|run| !run.unsupported.contains(id))
                .and_then(|run| run.skipped.get(id));
            match skip {
                Some(reason) => drop(
                    self.unmeasured.insert(id.clone(), format!("skipped in the base: {reason}")),
                ),
                None => self.new.push(id.clone()),
            }
        }
        for id in
            base_ids.iter().filter(|id| !head_ids.contains(*id) && !head_failed.contains_key(*id))
        {
            match skipped(id) {
                Some(reason) => drop(self.skipped.insert(id.clone(), reason)),
                None => self.removed.push(id.clone()),
            }
        }
        self.failed.extend(head_failed);
        if let (Some(base), Some(head)) = (base, head) {
            for id in base_ids.intersection(&head_ids) {
                let differing = differences(base, head, id);
                if differing.is_empty() {
                    self.judged.insert(id.clone());
                }
                for key in differing {
                    self.refused.entry(key).or_default().insert(id.clone());
                }
            }
        }
    }

    /// Adds a bench that failed while it was verified, as far as the other side tells its cases.
    pub fn abandon(&mut self, base: Option<&Run>, head: Option<&Run>, why: &str) {
        for run in base.iter().chain(&head) {
            self.unmeasured.extend(run.cases.keys().map(|id| (id.clone(), why.to_owned())));
        }
        self.failed_in_base.extend(base.into_iter().flat_map(|run| run.failed.clone()));
        self.failed.extend(head.into_iter().flat_map(|run| run.failed.clone()));
    }

    /// The refusals, by field.
    pub fn refusals(&self) -> Vec<Refusal> {
        let refusal =
            |((field, base, head), cases): (&(String, String, String), &BTreeSet<String>)| {
                Refusal {
                    field: field.clone(),
                    base: base.clone(),
                    head: head.clone(),
                    cases: cases.iter().cloned().collect(),
                }
            };
        self.refused.iter().map(refusal).collect()
    }
}

/// Fields of a case's definition and environment that differ, with both values.
fn differences(base: &Run, head: &Run, id: &str) -> Vec<(String, String, String)> {
    let (a, b) = (&base.cases[id], &head.cases[id]);
    let fields = [
        ("revision", a.revision.to_string(), b.revision.to_string()),
        ("work", a.work.to_string(), b.work.to_string()),
        ("axes", format!("{:?}", a.problem), format!("{:?}", b.problem)),
        ("seed", base.seed.to_string(), head.seed.to_string()),
    ];
    let own =
        fields.into_iter().filter(|(_, a, b)| a != b).map(|(field, a, b)| (field.to_owned(), a, b));
    let around = head.environment.mismatches(&base.environment);
    own.chain(
        around
            .into_iter()
            .map(|mismatch| (mismatch.field.to_owned(), mismatch.base, mismatch.head)),
    )
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::{CaseRecord, Environment, Provenance};

    fn run(cases: &[&str], failed: &[&str], skipped: &[&str]) -> Run {
        let reasons =
            |ids: &[&str]| ids.iter().map(|id| ((*id).to_owned(), "why".to_owned())).collect();
        Run {
            complete: true,
            cases: cases
                .iter()
                .map(|id| ((*id).to_owned(), CaseRecord::of_samples(vec![1.0])))
                .collect(),
            skipped: reasons(skipped),
            failed: reasons(failed),
            ..Run::start("b", "verify", Environment::cpu(), Provenance::default())
        }
    }

    #[test]
    fn every_case_goes_where_it_belongs() {
        let mut matched = Matched::default();
        let base = run(&["both", "gone", "skips", "breaks"], &["mended", "wrong"], &[]);
        let head = run(&["both", "new", "mended"], &["breaks", "wrong"], &["skips"]);
        matched.add(Some(&base), Some(&head));
        assert_eq!(matched.judged.iter().collect::<Vec<_>>(), ["both"]);
        assert_eq!(
            (&matched.new[..], &matched.removed[..]),
            (&["new".to_owned()][..], &["gone".to_owned()][..])
        );
        assert_eq!(matched.failed.keys().collect::<Vec<_>>(), ["breaks", "wrong"]);
        assert_eq!(matched.failed_in_base.keys().collect::<Vec<_>>(), ["mended"]);
        assert_eq!(matched.skipped.keys().collect::<Vec<_>>(), ["skips"]);
        assert!(matched.unmeasured.is_empty());
        matched.add(None, Some(&run(&["of a new bench"], &[], &[])));
        assert_eq!(matched.new, ["new", "of a new bench"]);
        assert_eq!(matched.refusals(), []);
    }

    #[test]
    fn support_that_the_head_adds_is_new_and_memory_that_the_base_lacked_is_not() {
        let mut matched = Matched::default();
        let base = run(&[], &[], &["supported now", "too large before"]);
        let base = Run { unsupported: ["supported now".to_owned()].into(), ..base };
        matched.add(Some(&base), Some(&run(&["supported now", "too large before"], &[], &[])));
        assert_eq!(matched.new, ["supported now"]);
        assert_eq!(matched.unmeasured.keys().collect::<Vec<_>>(), ["too large before"]);
    }

    #[test]
    fn a_case_that_one_side_cannot_judge_keeps_its_reason() {
        let mut matched = Matched::default();
        let base = run(&[], &["worse"], &["large", "nowhere"]);
        matched.add(Some(&base), Some(&run(&["large"], &[], &["worse", "nowhere"])));
        assert_eq!(matched.unmeasured["large"], "skipped in the base: why");
        assert_eq!(
            matched.unmeasured["worse"],
            "failed in the base: why; skipped in the head: why"
        );
        matched.abandon(None, Some(&run(&["left"], &["wrong"], &[])), "the base broke");
        assert_eq!(matched.unmeasured["left"], "the base broke");
        assert_eq!(matched.unmeasured.len(), 3);
        assert_eq!(matched.failed.keys().collect::<Vec<_>>(), ["wrong"]);
        assert!(
            matched.new.is_empty()
                && matched.failed_in_base.is_empty()
                && matched.judged.is_empty()
        );
    }

    #[test]
    fn another_definition_or_environment_is_refused_with_the_field() {
        let mut matched = Matched::default();
        let (base, mut head) = (run(&["a", "b"], &[], &[]), run(&["a", "b"], &[], &[]));
        head.cases.get_mut("a").unwrap().work.read_bytes = 9;
        matched.add(Some(&base), Some(&head));
        assert_eq!(matched.judged.iter().collect::<Vec<_>>(), ["b"]);
        let refusal = &matched.refusals()[0];
        assert_eq!((refusal.field.as_str(), &refusal.cases[..]), ("work", &["a".to_owned()][..]));
        head.seed = 2;
        let mut matched = Matched::default();
        matched.add(Some(&base), Some(&head));
        assert!(matched.judged.is_empty());
        assert_eq!(
            matched.refusals().iter().map(|refusal| refusal.field.as_str()).collect::<Vec<_>>(),
            ["seed", "work"]
        );
    }
}
