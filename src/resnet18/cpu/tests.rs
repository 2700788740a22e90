use std::sync::Arc;

use super::*;
use crate::resnet18::network::{NetworkSizes, NetworkStem};
use crate::resnet18::reference::NetworkReference;
use crate::resnet18::{DrawDistribution, NetworkShape};
use kernelgate::backend::Executable;
use kernelgate::verify::{compare_outputs, launch_and_verify};
use kernelgate::workload::{Expected, Problem};

/// A small test network with every kind of layer.
fn shape(stem: NetworkStem, b: usize, t: usize, level: usize) -> NetworkShape {
    let sizes = NetworkSizes { stem, width: 8, blocks: 1, side: 16 };
    NetworkShape { sizes, b, t, level, draw: DrawDistribution::Dyadic, dtype: Dtype::F32 }
}

const TEST_SHAPES: [(NetworkStem, usize, usize, usize); 4] = [
    (NetworkStem::ImageNet, 3, 5, 8),
    (NetworkStem::Cifar, 2, 4, 4),
    (NetworkStem::ImageNet, 1, 4, 16),
    (NetworkStem::Cifar, 5, 1, 8),
];

fn cpu_task<P: Problem>(
    implementation: &Implementation<P>,
    problem: &P,
    inputs: Tensors,
) -> CpuTask {
    let Prepare::Cpu(prepare) = implementation.prepare else { panic!("a CPU row") };
    prepare(problem, Arc::new(inputs))
}

#[test]
fn spikes_of_every_layer_equal_those_of_the_reference() {
    for (stem, b, t, level) in TEST_SHAPES {
        let shape = shape(stem, b, t, level);
        let inputs = Inference { shape }.inputs(2);
        let expected = NetworkReference::new(&shape, &inputs).compute_forward_pass(&inputs);
        let mut network = CpuNetwork::new(&shape);
        network.compute_logits(&inputs, &mut vec![0.0; 10 * b]);
        for (number, layer) in expected.layers.iter().enumerate() {
            assert!(network.spikes[number] == layer.spikes, "{stem:?} b={b} t={t} layer {number}");
        }
    }
}

/// Basis of the tolerance with normal weights: the number of spikes that a rounding moves, and the
/// effect of moved spikes on logits. Images are changed by a factor of 1 ± 1e-5, a hundred times
/// the rounding of fp32, so that some spikes move. With 1e-4 the logits move by 0.18, which is
/// beyond the tolerance.
#[test]
fn with_normal_weights_few_spikes_differ_and_logits_are_within_the_tolerance() {
    let sizes = NetworkSizes { stem: NetworkStem::ImageNet, width: 16, blocks: 2, side: 32 };
    let shape = NetworkShape {
        sizes,
        draw: DrawDistribution::Normal,
        ..shape(NetworkStem::ImageNet, 4, 8, 8)
    };
    let problem = Inference { shape };
    let (mut by_rounding, mut by_nudging, mut all) = (0, 0, 0);
    for seed in 1..=4 {
        let inputs = problem.inputs(seed);
        let expected = NetworkReference::new(&shape, &inputs).compute_forward_pass(&inputs);
        let moved = |inputs: &Tensors| {
            let mut network = CpuNetwork::new(&shape);
            let mut logits = vec![0.0; shape.b * 10];
            network.compute_logits(inputs, &mut logits);
            let outputs = Tensors::new().with("logits", shape.logits_shape(), logits);
            let reference =
                vec![Expected::all("logits", shape.logits_shape(), expected.logits.clone())];
            let comparison = compare_outputs(&outputs, &reference, problem.tolerance()).unwrap();
            let layers = expected.layers.iter().zip(&network.spikes);
            let moved = layers
                .map(|(layer, spikes)| {
                    layer.spikes.iter().zip(spikes).filter(|(a, b)| a != b).count()
                })
                .sum::<usize>();
            eprintln!("seed {seed}: {moved} spikes moved: {comparison:?}");
            moved
        };
        by_rounding += moved(&inputs);
        let images = inputs.f32("images");
        let signs = [1.0, -1.0, -1.0, 1.0, -1.0];
        let nudged = images.iter().zip(signs.iter().cycle()).map(|(x, s)| x * (1.0 + s * 1e-5));
        let nudged = nudged.collect::<Vec<f32>>();
        let shape = inputs.tensor("images").shape().to_vec();
        by_nudging += moved(&inputs.clone().with("images", shape, nudged));
        all += expected.layers.iter().map(|layer| layer.spikes.len()).sum::<usize>();
    }
    eprintln!("of {all} spikes {by_rounding} moved by rounding, {by_nudging} by nudging");
    assert!(by_rounding * 100_000 < all && by_nudging > 0 && by_nudging * 1000 < all);
}

/// Prints how many spikes of each layer are equal in fp32 and fp64 (with `--nocapture`). The
/// weights are those of the file in RESNET18_WEIGHTS, otherwise seeded ones.
#[test]
fn prints_how_many_spikes_of_each_layer_agree_with_the_reference() {
    let named = std::env::var_os("RESNET18_WEIGHTS").is_some();
    let (width, draw) =
        if named { (64, DrawDistribution::File) } else { (8, DrawDistribution::Normal) };
    let sizes = NetworkSizes { stem: NetworkStem::ImageNet, width, blocks: 2, side: 32 };
    let shape = NetworkShape { sizes, draw, ..shape(NetworkStem::ImageNet, 2, 8, 8) };
    let problem = Inference { shape };
    problem.check().unwrap();
    let inputs = problem.inputs(1);
    let reference = NetworkReference::new(&shape, &inputs);
    let expected = reference.compute_forward_pass(&inputs);
    let mut network = CpuNetwork::new(&shape);
    network.compute_logits(&inputs, &mut vec![0.0; shape.b * 10]);
    let blocks = reference.network.blocks.iter();
    let names = blocks.flat_map(|block| [&*block.first.name, &*block.second.name]);
    let names = std::iter::once("conv1").chain(names);
    let (mut agreeing, mut all) = (0, 0);
    for ((name, layer), spikes) in names.zip(&expected.layers).zip(&network.spikes) {
        let same = layer.spikes.iter().zip(spikes).filter(|(a, b)| a == b).count();
        eprintln!("{name}: {:.4} % of {} spikes", percentage(same, spikes.len()), spikes.len());
        (agreeing, all) = (agreeing + same, all + spikes.len());
    }
    eprintln!("all: {:.4} % of {all} spikes", percentage(agreeing, all));
    assert_eq!(network.spikes.len(), 17);
    assert!(percentage(agreeing, all) > 99.9);
}

fn percentage(part: usize, of: usize) -> f64 {
    100.0 * part as f64 / of as f64
}

#[test]
fn cpu_logits_and_training_steps_agree_with_the_reference() {
    for (stem, b, t, level) in TEST_SHAPES {
        let inference = Inference { shape: shape(stem, b, t, level) };
        let inputs = inference.inputs(2);
        let expected = inference.reference(&inputs);
        launch_and_verify(
            &mut cpu_task(&INFERENCE[0], &inference, inputs),
            &expected,
            inference.tolerance(),
        )
        .unwrap_or_else(|error| panic!("{stem:?} b={b} t={t}: {error}"));

        let step = TrainStep { shape: inference.shape };
        let inputs = step.inputs(2);
        let expected = step.reference(&inputs);
        let comparison = launch_and_verify(
            &mut cpu_task(&TRAIN_STEP[0], &step, inputs),
            &expected,
            step.tolerance(),
        );
        let comparison = comparison.unwrap_or_else(|error| panic!("{stem:?} b={b} t={t}: {error}"));
        eprintln!("{stem:?} b={b} t={t}: {comparison:?}");
    }
}

/// Basis of the tolerance of gradients with weights that are not dyadic. Rounding moves no spike,
/// and the gradients are as close as with dyadic weights. If inputs change by 1e-5, one or two
/// spikes move in time and the gradients stay within the tolerance; if more neurons end with
/// another spike count, the gradients do not.
#[test]
fn with_normal_weights_gradients_are_within_the_tolerance_if_units_end_alike() {
    let sizes = NetworkSizes { stem: NetworkStem::ImageNet, width: 16, blocks: 2, side: 32 };
    let shape = NetworkShape {
        sizes,
        draw: DrawDistribution::Normal,
        ..shape(NetworkStem::ImageNet, 4, 8, 8)
    };
    let step = TrainStep { shape };
    assert_eq!(step.is_comparable_with_reference(), Ok(()));
    for (seed, nudge, fits) in [(1, 0.0, true), (3, 1e-5, true), (1, 1e-4, false)] {
        let inputs = step.inputs(seed);
        let expected = step.reference(&inputs);
        let signs = [1.0, -1.0, -1.0, 1.0, -1.0].iter().cycle();
        let nudged = inputs.f32("images").iter().zip(signs).map(|(x, s)| x * (1.0 + s * nudge));
        let nudged = nudged.collect::<Vec<f32>>();
        let images = inputs.tensor("images").shape().to_vec();
        let mut launched = cpu_task(&TRAIN_STEP[0], &step, inputs.with("images", images, nudged));
        let found = launch_and_verify(&mut launched, &expected, step.tolerance());
        eprintln!("seed {seed}, nudged by {nudge:e}: {found:?}");
        assert_eq!(found.is_ok(), fits, "seed {seed}, nudged by {nudge:e}: {found:?}");
    }
}

/// A gradient with a missing part exceeds every tolerance that is wider than fp32's rounding.
#[test]
fn the_tolerance_of_a_training_step_rejects_every_wrong_gradient() {
    let step = TrainStep { shape: shape(NetworkStem::ImageNet, 3, 5, 8) };
    let inputs = step.inputs(2);
    let expected = step.reference(&inputs);
    let bf16 = NetworkShape { dtype: Dtype::Bf16, ..step.shape };
    let normal = NetworkShape { draw: DrawDistribution::Normal, ..step.shape };
    let tolerances = [bf16, normal].map(|shape| TrainStep { shape }.tolerance());
    let mut launched = cpu_task(&TRAIN_STEP[0], &step, inputs.clone());
    let layout = step.shape.sizes.build_network().parameter_layout();
    for (name, first, len) in layout {
        launched.launch().unwrap();
        let mut outputs = launched.outputs().unwrap().clone();
        assert!(
            tolerances.iter().all(|&loose| compare_outputs(&outputs, &expected, loose).is_ok())
        );
        let old = &inputs.f32("momentum")[first..][..len];
        let new = &mut outputs.f32_mut("new_momentum")[first..][..len];
        // The gradient is halved, which is as small as the effect of a lost time step or image can
        // be.
        new.iter_mut().zip(old).for_each(|(new, m)| *new = 0.5 * (*new + 0.9 * m));
        for &loose in &tolerances {
            assert!(compare_outputs(&outputs, &expected, loose).is_err(), "{name}");
        }
    }
}
