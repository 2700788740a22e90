//! Tests of the selections of cases in all workload families: Criterion must be able to store the
//! case ids as folder names, and the default selection must have few enough cases for a person to
//! survey.

use std::collections::BTreeSet;

use kernelgate::backend::BackendKind;
use kernelgate::harness::backend_choice::ChosenBackend;
use kernelgate::harness::cases::select_cases;
use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::workload::BenchEffort;

use super::suites_of_all_families;

const BACKENDS_OF_TESTED_SELECTIONS: [BackendKind; 2] = [BackendKind::Cpu, BackendKind::Cuda];

fn chosen_backend_of_kind(kind: BackendKind) -> ChosenBackend {
    ChosenBackend {
        kind,
        reason_against_other_backend: "elsewhere".to_owned(),
        l2_bytes: 0,
        gpu_count: 2,
    }
}

#[test]
fn every_case_id_is_unique_and_short_enough_for_criterion() {
    let suites = suites_of_all_families();
    for kind in BACKENDS_OF_TESTED_SELECTIONS {
        let selection = select_cases(
            suites.iter(),
            BenchEffort::Thorough,
            &chosen_backend_of_kind(kind),
            &[],
            &CaseIdFilter::AllCases,
        )
        .unwrap();
        assert!(selection.runnable_case_count() > 100);
        let mut folders = BTreeSet::new();
        for group in &selection.problems_with_cases {
            assert!(
                group.workload_and_problem_id().len() <= 64,
                "Criterion cuts folder names at 64: {}",
                group.workload_and_problem_id()
            );
            assert!(
                folders.insert(group.workload_and_problem_id().replace('/', "_")),
                "{}",
                group.workload_and_problem_id()
            );
        }
    }
}

#[test]
fn default_cases_are_few_and_part_of_the_thorough_selection() {
    let suites = suites_of_all_families();
    let ids = |effort, kind| -> BTreeSet<String> {
        let selection = select_cases(
            suites.iter(),
            effort,
            &chosen_backend_of_kind(kind),
            &[],
            &CaseIdFilter::AllCases,
        )
        .unwrap();
        selection
            .problems_with_cases
            .iter()
            .flat_map(|group| group.cases.iter().map(|case| case.case_id.clone()))
            .collect()
    };
    for kind in BACKENDS_OF_TESTED_SELECTIONS {
        let default = ids(BenchEffort::Default, kind);
        let allowed = 5..=20 * suites.len();
        assert!(allowed.contains(&default.len()), "{}: {default:?}", default.len());
        assert!(default.is_subset(&ids(BenchEffort::Thorough, kind)));
    }
}

/// On a GPU, the default selection scans one axis at a time around a central case, with the best
/// row and one comparison; overriding an axis selects every row.
#[test]
fn every_axis_scan_belongs_to_the_default_selection_on_a_gpu() {
    let suites = suites_of_all_families();
    let ids = |effort, overrides: &[&str]| -> Vec<String> {
        let overrides: Vec<_> = overrides.iter().map(|text| text.parse().unwrap()).collect();
        let suites = suites.iter();
        let place = chosen_backend_of_kind(BackendKind::Cuda);
        let selection =
            select_cases(suites, effort, &place, &overrides, &CaseIdFilter::AllCases).unwrap();
        selection
            .problems_with_cases
            .into_iter()
            .flat_map(|group| group.cases)
            .map(|case| case.case_id)
            .collect()
    };
    let rows_of = |ids: &[String], problem: &str| {
        ids.iter().filter(|id| id.contains(problem) && id.ends_with("/hot")).count()
    };
    let default = ids(BenchEffort::Default, &[]);
    for problem in [
        "st_bif/forward/conv1_b8_t8_level8_f32_int8",
        "st_bif/forward/conv1_b32_t16_level8_f32_int8",
        "st_bif/backward/conv1_b32_t8_level16_f32",
        "attention/forward/s512_d128_causal_bf16",
        "attention/backward/s8192_d128_causal_bf16",
        "attention/forward/s256_d128_full_bf16",
        "attention/forward/s4096_d64_full_bf16",
        "attention/forward/s4096_d128_causal_bf16_b1_h64_h_kv8",
        "denoise/loop/pi05_s50_p968_steps5_bf16",
        "denoise/loop/pi05_s10_p712_steps10_bf16",
        "denoise/step/pi05_s10_p712_bf16",
    ] {
        assert_eq!(rows_of(&default, problem), 2, "{problem}");
        assert!(rows_of(&ids(BenchEffort::Thorough, &[]), problem) >= 2, "{problem}");
    }
    let decode = "attention/forward/s1_d128_full_bf16_b8_h32_h_kv8_keys8192";
    assert_eq!(rows_of(&default, decode), 3, "one row more for few queries");
    let central = "st_bif/forward/conv1_b32_t8_level8_f32_int8";
    assert_eq!(rows_of(&default, central), 3, "every row of the central problem");
    let chosen = ids(BenchEffort::Default, &["steps=5"]);
    assert_eq!(rows_of(&chosen, "denoise/loop/pi05_s50_p968_steps5_bf16"), 6);
}
