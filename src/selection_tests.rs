//! The selections of all families together: ids that Criterion can store, defaults that a person
//! would look at.

use std::collections::BTreeSet;

use kernelgate::backend::BackendKind;
use kernelgate::harness::cases::select;
use kernelgate::harness::filter::Filter;
use kernelgate::harness::place::Place;
use kernelgate::workload::Effort;

use super::all;

const PLACES: [BackendKind; 2] = [BackendKind::Cpu, BackendKind::Cuda];

fn place(kind: BackendKind) -> Place {
    Place { kind, otherwise: "elsewhere".to_owned(), l2_bytes: 0 }
}

#[test]
fn every_id_is_unique_and_fits_criterions_folders() {
    let suites = all();
    for kind in PLACES {
        let selection = select(
            suites.iter().map(AsRef::as_ref),
            Effort::Thorough,
            &place(kind),
            &[],
            &Filter::All,
        )
        .unwrap();
        assert!(selection.count() > 100);
        let mut folders = BTreeSet::new();
        for group in &selection.groups {
            assert!(group.id().len() <= 64, "Criterion cuts folder names at 64: {}", group.id());
            assert!(folders.insert(group.id().replace('/', "_")), "{}", group.id());
        }
    }
}

#[test]
fn default_cases_are_a_handful_and_part_of_the_sweep() {
    let suites = all();
    let ids = |effort, kind| -> BTreeSet<String> {
        let selection =
            select(suites.iter().map(AsRef::as_ref), effort, &place(kind), &[], &Filter::All)
                .unwrap();
        selection
            .groups
            .iter()
            .flat_map(|group| group.cases.iter().map(|case| case.id.clone()))
            .collect()
    };
    for kind in PLACES {
        let default = ids(Effort::Default, kind);
        assert!((5..=120).contains(&default.len()), "{}: {default:?}", default.len());
        assert!(default.is_subset(&ids(Effort::Thorough, kind)));
    }
}
