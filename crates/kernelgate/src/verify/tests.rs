use std::sync::Arc;

use half::bf16;

use super::*;
use crate::backend::cpu::CpuTask;

const LOOSE_TEST_TOLERANCE: Tolerance = Tolerance { max_error: 1e-3, relative_l2: 1e-3 };

fn compare_f32_values_with_reference(
    actual: Vec<f32>,
    expected: Vec<f64>,
) -> Result<ComparisonWithReference, OutputVerificationError> {
    let shape = [actual.len() / 2, 2];
    compare_outputs_with_reference(
        &Tensors::new().with_tensor("y", shape, actual),
        &[Expected::all("y", shape, expected)],
        LOOSE_TEST_TOLERANCE,
    )
}

#[test]
fn outputs_within_tolerance_pass_and_report_their_errors() {
    let comparison =
        compare_f32_values_with_reference(vec![1.0, 2.0, 3.0, 4.002], vec![1.0, 2.0, 3.0, 4.0])
            .unwrap();
    assert!((comparison.errors.max_error - 0.0005).abs() < 1e-6, "{comparison:?}");
    assert_eq!((comparison.compared_elements, comparison.all_elements), (4, 4));
}

/// Outputs whose terms cancel keep the rounding error of these terms, whatever the number of
/// elements.
#[test]
fn errors_for_a_reference_of_zeros_are_absolute() {
    for count in [4, 1 << 20] {
        let found = compare_f32_values_with_reference(vec![9e-4; count], vec![0.0; count]).unwrap();
        assert!((found.errors.max_error - 9e-4).abs() < 1e-9, "{found:?}");
        assert!((found.errors.relative_l2 - 9e-4).abs() < 1e-9, "{found:?}");
        assert!(compare_f32_values_with_reference(vec![1.1e-3; count], vec![0.0; count]).is_err());
    }
    let mut one = vec![0.0; 1 << 20];
    for wrong in [1.1e-3, f32::NAN] {
        one[7] = wrong;
        assert!(
            compare_f32_values_with_reference(one.clone(), vec![0.0; 1 << 20]).is_err(),
            "{wrong}"
        );
    }
}

#[test]
fn each_output_has_its_own_errors_tolerance_and_precision() {
    let outputs = |fine: f32, codes: i8| {
        let all = Tensors::new().with_tensor("fine", [1, 2], vec![fine, 2.0f32]);
        let coarse = vec![bf16::from_f32(1.01), bf16::from_f32(2.0)];
        all.with_tensor("coarse", [1, 2], TensorData::Bf16(coarse)).with_tensor(
            "codes",
            [1, 1],
            vec![codes],
        )
    };
    let expected = [
        Expected::all("fine", [1, 2], vec![1.0, 2.0]),
        Expected::all("coarse", [1, 2], vec![1.01, 2.0]),
        Expected::all("codes", [1, 1], vec![3i8]),
    ];
    let loose = Tolerance { max_error: 1e-2, relative_l2: 1e-2 };
    let found = compare_outputs_with_reference(&outputs(1.00002, 3), &expected, loose).unwrap();
    // Integer outputs must be equal to the reference, so the result contains no errors of them.
    assert_eq!(found.by_output.keys().collect::<Vec<_>>(), ["coarse", "fine"]);
    let [coarse, fine] = [found.by_output["coarse"], found.by_output["fine"]];
    assert!((fine.max_error - 1e-5).abs() < 1e-7 && coarse.max_error > 1e-3, "{found:?}");
    assert_eq!((fine.rounding_error, coarse.rounding_error), (0.5f64.powi(24), 0.5f64.powi(8)));
    assert_eq!(found.errors, coarse.larger_of_each_kind_of_error(fine));
    assert!(compare_outputs_with_reference(&outputs(1.00002, 4), &expected, loose).is_err());

    let tight = Tolerance { max_error: 1e-6, relative_l2: 1e-6 };
    let bounds =
        ErrorBoundsOfOutputs { by_output: [("fine".to_owned(), tight)].into(), ..loose.into() };
    assert!(compare_outputs_with_reference(&outputs(1.0, 3), &expected, &bounds).is_ok());
    let refused = compare_outputs_with_reference(&outputs(1.00002, 3), &expected, &bounds)
        .unwrap_err()
        .to_string();
    assert_eq!(
        refused,
        "output `fine`: max error 1.00e-5 (allowed 1e-6), relative L2 8.96e-6 (allowed 1e-6); worst at 0: 1.0000200271606445 against 1"
    );

    let relative_l2 = [("fine".to_owned(), 1e-6), ("coarse".to_owned(), 1e-2)].into();
    let precision =
        Some(PrecisionErrorLimits { declared: Dtype::F32, max_relative_l2_by_output: relative_l2 });
    let declared = ErrorBoundsOfOutputs { precision, ..loose.into() };
    assert!(compare_outputs_with_reference(&outputs(1.0, 3), &expected, &declared).is_ok());
    let lower = compare_outputs_with_reference(&outputs(1.00002, 3), &expected, &declared)
        .unwrap_err()
        .to_string();
    let prefix = "output `fine`: relative L2 8.96e-6 (the declared f32 allows 1.0e-6:";
    assert!(lower.starts_with(prefix), "{lower}");
}

#[test]
fn the_output_hash_depends_on_names_shapes_and_bits() {
    let outputs = |name: &str, shape: [usize; 2], values: [f32; 4]| {
        output_bits_hash_hex(&Tensors::new().with_tensor(name, shape, values.to_vec()))
    };
    let first = outputs("y", [2, 2], [1.0, 2.0, 3.0, 0.0]);
    assert_eq!(first, outputs("y", [2, 2], [1.0, 2.0, 3.0, 0.0]));
    assert_eq!(first.len(), 32);
    for other in [
        outputs("z", [2, 2], [1.0, 2.0, 3.0, 0.0]),
        outputs("y", [4, 1], [1.0, 2.0, 3.0, 0.0]),
        outputs("y", [2, 2], [1.0, 2.0, 3.0, -0.0]),
    ] {
        assert_ne!(first, other);
    }
}

#[test]
fn outputs_with_nan_or_infinity_are_refused() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error =
            compare_f32_values_with_reference(vec![1.0, 2.0, bad, 4.0], vec![1.0, 2.0, 3.0, 4.0])
                .unwrap_err();
        assert!(
            matches!(
                error,
                OutputVerificationError::NotFinite {
                    failing_elements: 1,
                    first_failing_index: 2,
                    ..
                }
            ),
            "{error}"
        );
    }
    // Outputs must not pass if the reference itself contains NaN.
    let error = compare_f32_values_with_reference(vec![1.0, 2.0], vec![1.0, f64::NAN]).unwrap_err();
    assert_eq!(error.to_string(), "reference of output `y`: value 1 is NaN");
}

#[test]
fn one_wrong_element_among_many_is_found_and_named() {
    let mut actual = vec![1.0f32; 10_000];
    actual[7777] = 1.01;
    let error = compare_f32_values_with_reference(actual, vec![1.0; 10_000]).unwrap_err();
    assert!(
        matches!(
            error,
            OutputVerificationError::ErrorsAboveTolerance { index_of_largest_error: 7777, .. }
        ),
        "{error}"
    );
}

#[test]
fn only_sampled_rows_are_compared_but_all_must_be_finite() {
    let sampled = |actual: Vec<f32>| {
        let expected = Expected::sampled_rows("y", [3, 2], vec![1], vec![3.0, 4.0]);
        compare_outputs_with_reference(
            &Tensors::new().with_tensor("y", [3, 2], actual),
            &[expected],
            LOOSE_TEST_TOLERANCE,
        )
    };
    let comparison = sampled(vec![9.0, 9.0, 3.0, 4.0, 9.0, 9.0]).unwrap();
    assert_eq!((comparison.compared_elements, comparison.all_elements), (2, 6));
    assert!(matches!(
        sampled(vec![9.0, 9.0, 3.0, 5.0, 9.0, 9.0]),
        Err(OutputVerificationError::ErrorsAboveTolerance { index_of_largest_error: 3, .. })
    ));
    assert!(matches!(
        sampled(vec![9.0, f32::NAN, 3.0, 4.0, 9.0, 9.0]),
        Err(OutputVerificationError::NotFinite { .. })
    ));
}

#[test]
fn elements_in_several_references_are_counted_once() {
    let outputs = Tensors::new().with_tensor("y", [2, 2], vec![1.0f32, 2.0, 3.0, 4.0]);
    let part =
        |row: usize, values: Vec<f64>| Expected::sampled_rows("y", [2, 2], vec![row], values);
    let comparison = compare_outputs_with_reference(
        &outputs,
        &[part(0, vec![1.0, 2.0]), part(1, vec![3.0, 4.0])],
        LOOSE_TEST_TOLERANCE,
    )
    .unwrap();
    assert_eq!((comparison.compared_elements, comparison.all_elements), (4, 4));
    assert!(
        compare_outputs_with_reference(
            &outputs,
            &[part(0, vec![1.0, 2.0]), part(1, vec![3.0, 5.0])],
            LOOSE_TEST_TOLERANCE
        )
        .is_err()
    );
}

#[test]
fn integer_outputs_must_be_equal_and_not_poison() {
    let spikes = |actual: Vec<i8>| {
        let expected = Expected::all("s", [1, 3], vec![0i8, 1, -1]);
        compare_outputs_with_reference(
            &Tensors::new().with_tensor("s", [1, 3], actual),
            &[expected],
            LOOSE_TEST_TOLERANCE,
        )
    };
    assert!(spikes(vec![0, 1, -1]).is_ok());
    let error = spikes(vec![0, 0x7f, -1]).unwrap_err();
    assert!(
        matches!(
            error,
            OutputVerificationError::IntegersDiffer {
                failing_elements: 1,
                first_failing_index: 1,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn missing_outputs_and_wrong_shapes_are_refused() {
    let expected = [Expected::all("y", [2, 1], vec![1.0, 2.0])];
    for outputs in [Tensors::new(), Tensors::new().with_tensor("y", [1, 2], vec![1.0f32, 2.0])] {
        assert!(matches!(
            compare_outputs_with_reference(&outputs, &expected, LOOSE_TEST_TOLERANCE),
            Err(OutputVerificationError::MissingOrOfWrongShape { .. })
        ));
    }
}
#[test]
fn outputs_of_another_kind_or_without_reference_are_refused() {
    let message = |outputs: Tensors, expected: Expected| {
        compare_outputs_with_reference(&outputs, &[expected], LOOSE_TEST_TOLERANCE)
            .unwrap_err()
            .to_string()
    };
    let floats = || Tensors::new().with_tensor("y", [1, 2], vec![1.0f32, 0.0]);
    let integers = || Tensors::new().with_tensor("y", [1, 2], vec![1i8, 0]);
    assert_eq!(
        message(floats(), Expected::all("y", [1, 2], vec![1i8, 0])),
        "output `y`: f32, expected i8"
    );
    assert_eq!(
        message(integers(), Expected::all("y", [1, 2], vec![1.0, 0.0])),
        "output `y`: i8, expected floats"
    );
    let more = floats().with_tensor("z", [1, 1], vec![1.0f32]);
    assert_eq!(
        message(more, Expected::all("y", [1, 2], vec![1.0, 0.0])),
        "output `z`: the reference does not hold it"
    );
}

#[test]
fn a_reference_with_missing_or_repeated_rows_is_refused() {
    let outputs = Tensors::new().with_tensor("y", [2, 2], vec![1.0f32, 2.0, 3.0, 4.0]);
    let message = |expected: &[Expected]| {
        compare_outputs_with_reference(&outputs, expected, LOOSE_TEST_TOLERANCE)
            .unwrap_err()
            .to_string()
    };
    let sampled =
        |rows: Vec<usize>, values: Vec<f64>| Expected::sampled_rows("y", [2, 2], rows, values);
    assert_eq!(
        compare_outputs_with_reference(&Tensors::new(), &[], LOOSE_TEST_TOLERANCE),
        Err(OutputVerificationError::NothingCompared)
    );
    assert_eq!(
        message(&[sampled(vec![], vec![])]),
        OutputVerificationError::NothingCompared.to_string()
    );
    assert_eq!(
        message(&[Expected::all("y", [2, 2], vec![1.0])]),
        "reference of output `y`: 1 values for 2 rows of 2"
    );
    assert_eq!(
        message(&[sampled(vec![0, 1], vec![1.0, 2.0])]),
        "reference of output `y`: 2 values for 2 rows of 2"
    );
    assert!(message(&[sampled(vec![2], vec![1.0, 2.0])]).ends_with("row 2 of 2"));
    assert_eq!(
        message(&[sampled(vec![0, 0], vec![1.0, 2.0, 1.0, 2.0])]),
        "reference of output `y`: a row is there twice"
    );
    let whole = || Expected::all("y", [2, 2], vec![1.0, 2.0, 3.0, 4.0]);
    assert_eq!(
        message(&[whole(), sampled(vec![0], vec![1.0, 2.0])]),
        "reference of output `y`: a row is there twice"
    );
    assert!(
        message(&[Expected::all("y", [2, 2], vec![1.0f32; 4])]).ends_with("neither f64 nor i8")
    );
}

#[test]
fn outputs_must_be_written_by_every_launch() {
    let expected = [Expected::all("y", [1, 2], vec![1.0, 2.0])];
    let outputs = || Tensors::new().with_output("y", [1, 2], Dtype::F32);
    let mut idle = CpuTask::new(Arc::default(), outputs(), |_, _| {});
    assert!(matches!(
        launch_twice_and_compare_with_reference(&mut idle, &expected, LOOSE_TEST_TOLERANCE),
        Err(OutputVerificationError::NotFinite { failing_elements: 2, .. })
    ));
    let mut launches = 0;
    let mut once = CpuTask::new(Arc::default(), outputs(), move |_, outputs| {
        launches += 1;
        if launches == 1 {
            outputs.f32_mut("y").copy_from_slice(&[1.0, 2.0]);
        }
    });
    assert!(matches!(
        launch_twice_and_compare_with_reference(&mut once, &expected, LOOSE_TEST_TOLERANCE),
        Err(OutputVerificationError::NotFinite { failing_elements: 2, .. })
    ));
    let mut sound = CpuTask::new(Arc::default(), outputs(), |_, outputs| {
        outputs.f32_mut("y").copy_from_slice(&[1.0, 2.0])
    });
    assert_eq!(
        launch_twice_and_compare_with_reference(&mut sound, &expected, LOOSE_TEST_TOLERANCE)
            .unwrap()
            .compared_elements,
        2
    );
}
