use super::super::convolution::convolve;
use super::super::network::{
    CLASS_COUNT, ConvolutionLayer, FeatureMap, NetworkSizes, NetworkStem, ResidualBlock,
};
use super::super::plain::TapeNetwork;
use super::*;

/// A network small enough to be computed on a tape of scalars.
const TINY_NETWORK: NetworkSizes =
    NetworkSizes { stem: NetworkStem::ImageNet, width: 4, blocks: 1, side: 8 };

fn shape(sizes: NetworkSizes, b: usize, t: usize, level: usize) -> NetworkShape {
    NetworkShape { sizes, b, t, level, draw: DrawDistribution::Dyadic, dtype: Dtype::Bf16 }
}

fn network_inputs(shape: NetworkShape, seed: u64) -> Tensors {
    TrainStep { shape }.inputs(seed)
}

fn relative_l2_distance(a: &[f64], b: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

#[test]
fn too_few_time_steps_for_the_encoding_give_a_remark() {
    let sizes = NetworkSizes { stem: NetworkStem::ImageNet, width: 64, blocks: 2, side: 32 };
    let remark = |t, level| Inference { shape: shape(sizes, 8, t, level) }.remark();
    assert_eq!((remark(7, 16), remark(4, 8)), (None, None));
    assert_eq!(
        remark(4, 16).unwrap(),
        "t=4 is below the 7 steps of the encoding: only its time means anything"
    );
}

/// Without a readable file of weights every case fails with an error.
#[test]
fn a_missing_weights_file_is_an_error() {
    let sizes = NetworkSizes { stem: NetworkStem::ImageNet, width: 64, blocks: 2, side: 32 };
    let shape = NetworkShape { draw: DrawDistribution::File, ..shape(sizes, 1, 4, 8) };
    if std::env::var_os("RESNET18_WEIGHTS").is_none() {
        let error = Inference { shape }.check().unwrap_err();
        assert_eq!(error, "weights=file: RESNET18_WEIGHTS names no file");
    }
}

#[test]
fn layer_sizes_equal_those_of_resnet18() {
    let sizes = NetworkSizes { stem: NetworkStem::ImageNet, width: 64, blocks: 2, side: 32 };
    let network = sizes.build_network();
    assert_eq!((network.neuron_layer_extents().len(), network.neuron_count()), (17, 47_104));
    let weights: usize = network.block_convolutions().map(ConvolutionLayer::weight_elements).sum();
    assert_eq!(weights, 11_166_912);
    assert_eq!(network.last_map().side, 1);
    let padded: usize = network
        .block_convolutions()
        .map(|conv| conv.weight_elements() * conv.window.output.pixel_count())
        .sum();
    let read: u64 = network.block_convolutions().map(ConvolutionLayer::multiply_adds).sum();
    let classifier = CLASS_COUNT * network.last_map().channels;
    assert_eq!((padded + classifier, read), (37_016_576, 21_662_464));
    let cifar = NetworkSizes { stem: NetworkStem::Cifar, ..sizes }.build_network();
    assert_eq!(cifar.neuron_layer_extents()[0].side, 32);
    assert_eq!(cifar.last_map().side, 4);
}

#[test]
fn parameters_are_stored_contiguously() {
    let network = TINY_NETWORK.build_network();
    let mut next = 0;
    for (name, first, len) in network.parameter_layout() {
        assert_eq!((first, first % TINY_NETWORK.width), (next, 0), "{name}");
        next = first + len;
    }
    assert_eq!(network.parameters, next.next_multiple_of(TINY_NETWORK.width));
}

#[test]
fn the_reference_and_its_gradient_equal_those_of_an_autodiff_tape() {
    for (stem, t, level) in
        [(NetworkStem::ImageNet, 4, 8), (NetworkStem::Cifar, 5, 4), (NetworkStem::ImageNet, 3, 16)]
    {
        let shape = shape(NetworkSizes { stem, ..TINY_NETWORK }, 2, t, level);
        let inputs = network_inputs(shape, 3);
        let plain = TapeNetwork::new(&shape, &inputs);
        let reference = NetworkReference::new(&shape, &inputs);
        let forward = reference.compute_forward_pass(&inputs);
        for (layer, tracers) in forward.layers.iter().zip(&plain.tracers) {
            assert_eq!(&spike_sums(&shape, &layer.spikes), tracers);
        }
        assert!(relative_l2_distance(&forward.logits, &plain.logits) < 1e-12);
        let (loss, gradient) = reference.loss_and_gradient(&inputs, &forward);
        assert!((loss - plain.loss).abs() < 1e-12);
        for (name, first, len) in reference.network.parameter_layout() {
            let (ours, taped) = (&gradient[first..][..len], &plain.gradient[first..][..len]);
            assert!(taped.iter().any(|g| *g != 0.0), "{stem:?} level {level}: {name} matters");
            let apart = relative_l2_distance(ours, taped);
            assert!(apart < 1e-11, "{stem:?} level {level} {name}: {apart:e}");
        }
    }
}

/// Sums of each neuron's spikes over time, which are the tracers.
fn spike_sums(shape: &NetworkShape, spikes: &[i8]) -> Vec<f64> {
    let n = spikes.len() / shape.t;
    (0..n).map(|i| spikes[i..].iter().step_by(n).map(|&s| f64::from(s)).sum()).collect()
}

/// Activations of every layer of the quantised network, before its conversion: Quantises x to
/// `clamp(floor(x/θ + 1/2), 0, steps)`, in whole numbers.
fn quantised_activations(shape: &NetworkShape, inputs: &Tensors) -> Vec<Vec<f64>> {
    let reference = NetworkReference::new(shape, inputs);
    let network = &reference.network;
    let theta = shape.neuron().threshold;
    let top = shape.spread_steps() as f64;
    let quantise = |x: Vec<f64>| -> Vec<f64> {
        x.into_iter().map(|x| (x / theta + 0.5).floor().clamp(0.0, top)).collect()
    };
    let layer = |conv: &ConvolutionLayer, input: &[f64], factor: f64| {
        let mut y = convolve(conv, reference.weight(conv), input, factor);
        let channels = conv.window.output.channels;
        let bias = &reference.parameters[conv.first_bias_element()..][..channels];
        y.iter_mut().enumerate().for_each(|(i, y)| *y += bias[i % channels]);
        y
    };
    let images = inputs.tensor("images");
    let images = images.to_f64(0, images.len());
    let mut layers = vec![quantise(layer(&network.stem, &images, 1.0))];
    let mut x = layers[0].clone();
    if let Some(pool) = &network.pool {
        let sums: Vec<i8> = x.iter().map(|&x| x as i8).collect();
        x = super::super::reference::first_maxima(pool, &sums).map(|at| x[at]).collect();
    }
    for ResidualBlock { first, second, shortcut } in &network.blocks {
        let hidden = quantise(layer(first, &x, theta));
        let mut y = layer(second, &hidden, theta);
        match shortcut {
            Some(conv) => {
                y.iter_mut().zip(layer(conv, &x, theta)).for_each(|(y, x)| *y += x);
            }
            None => y.iter_mut().zip(&x).for_each(|(y, x)| *y += theta * x),
        }
        x = quantise(y);
        layers.extend([hidden, x.clone()]);
    }
    layers
}

#[test]
fn with_enough_time_steps_every_unit_equals_the_quantised_network() {
    let levels = [
        (NetworkStem::ImageNet, 4),
        (NetworkStem::ImageNet, 8),
        (NetworkStem::Cifar, 8),
        (NetworkStem::ImageNet, 16),
    ];
    for (stem, level) in levels {
        let shape = shape(NetworkSizes { stem, width: 8, blocks: 2, side: 16 }, 2, 64, level);
        let inputs = network_inputs(shape, 1);
        let forward = NetworkReference::new(&shape, &inputs).compute_forward_pass(&inputs);
        let layers = quantised_activations(&shape, &inputs);
        for (number, (layer, activations)) in forward.layers.iter().zip(&layers).enumerate() {
            let tracers = spike_sums(&shape, &layer.spikes);
            let wrong = tracers.iter().zip(activations).filter(|(a, b)| a != b).count();
            assert_eq!(wrong, 0, "{stem:?} level {level} layer {number} of {}", tracers.len());
        }
    }
}

/// With few time steps only some neurons end at the quantised network's value: most of those near
/// the images, and all once the last layer has had enough time. docs/results/resnet18.md has the
/// fractions.
#[test]
fn with_few_time_steps_some_units_equal_the_quantised_network() {
    let sizes = NetworkSizes { stem: NetworkStem::ImageNet, width: 64, blocks: 2, side: 32 };
    for level in [4, 8, 16] {
        let mut before = 0.0;
        for t in [4, 8, 16] {
            let shape = shape(sizes, 1, t, level);
            let inputs = network_inputs(shape, 1);
            let forward = NetworkReference::new(&shape, &inputs).compute_forward_pass(&inputs);
            let layers = forward.layers.iter().zip(quantised_activations(&shape, &inputs));
            let shares: Vec<(usize, usize)> = layers
                .map(|(layer, activations)| {
                    let tracers = spike_sums(&shape, &layer.spikes);
                    let same = tracers.iter().zip(&activations).filter(|(a, b)| a == b).count();
                    (same, tracers.len())
                })
                .collect();
            let share = |of: &[(usize, usize)]| {
                let sum = |part: fn(&(usize, usize)) -> usize| of.iter().map(part).sum::<usize>();
                sum(|of| of.0) as f64 / sum(|of| of.1) as f64
            };
            let (all, last) = (share(&shares), share(&shares[shares.len() - 1..]));
            eprintln!("level {level} t {t}: {all:.3} of all units, {last:.3} of the last layer's");
            assert!(all >= before && last <= all, "level {level} t {t}: {shares:?}");
            before = all;
        }
        assert_eq!(before, 1.0, "level {level}");
    }
}

/// Fraction of the tiles of 16 channels in whose rows no spike occurs. `rows` are frames of `[T,
/// B]` by index, at one pixel.
fn silent_tile_share(
    shape: &NetworkShape,
    (spikes, map): (&[i8], FeatureMap),
    tiles: &[Vec<usize>],
) -> (usize, usize) {
    let (mut silent, mut all) = (0, 0);
    debug_assert_eq!(spikes.len(), shape.frame_count() * map.elements());
    for rows in tiles {
        for first in (0..map.elements()).step_by(16) {
            let zero = |row: &usize| {
                spikes[row * map.elements() + first..][..16].iter().all(|&spike| spike == 0)
            };
            silent += usize::from(rows.iter().all(zero));
            all += 1;
        }
    }
    (silent, all)
}

/// Reason why no row skips operands without a spike. `cuda/best` multiplies fragments of 16 rows,
/// all steps of two images at one pixel, by 16 channels; a layout with one step in a tile would
/// multiply eight images of that step. docs/results/resnet18.md has the fractions.
#[test]
fn few_operands_of_the_layers_lack_a_spike() {
    let sizes = NetworkSizes { stem: NetworkStem::ImageNet, width: 64, blocks: 2, side: 32 };
    let shape = shape(sizes, 8, 8, 8);
    let inputs = network_inputs(shape, 1);
    let forward = NetworkReference::new(&shape, &inputs).compute_forward_pass(&inputs);
    let maps = sizes.build_network().neuron_layer_extents();
    let pairs: Vec<Vec<usize>> = (0..shape.b / 2)
        .map(|pair| (0..shape.t).flat_map(|t| [0, 1].map(|i| t * shape.b + 2 * pair + i)).collect())
        .collect();
    let mut sums = vec![(0, 0); shape.t + 1];
    for (number, (layer, map)) in forward.layers.iter().zip(maps).enumerate().skip(1) {
        let silent_share =
            |tiles: &[Vec<usize>]| silent_tile_share(&shape, (&layer.spikes, map), tiles);
        let whole = silent_share(&pairs);
        let steps =
            (0..shape.t).map(|t| silent_share(&[(t * shape.b..(t + 1) * shape.b).collect()]));
        let shares: Vec<(usize, usize)> = std::iter::once(whole).chain(steps).collect();
        let percent: Vec<String> =
            shares.iter().map(|of| format!("{:.2}", 100.0 * of.0 as f64 / of.1 as f64)).collect();
        eprintln!("layer {number}: {} % of fragments, by step {:?}", percent[0], &percent[1..]);
        sums.iter_mut().zip(shares).for_each(|(sum, of)| *sum = (sum.0 + of.0, sum.1 + of.1));
    }
    let shares: Vec<f64> = sums.iter().map(|of| of.0 as f64 / of.1 as f64).collect();
    eprintln!("all layers: {shares:.4?}");
    assert!(shares[0] < 0.05, "{shares:?}");
}

#[test]
fn neurons_of_every_layer_fire() {
    for (stem, level) in
        [(NetworkStem::ImageNet, 8), (NetworkStem::Cifar, 8), (NetworkStem::ImageNet, 16)]
    {
        let shape = shape(NetworkSizes { stem, width: 16, blocks: 2, side: 32 }, 2, 16, level);
        let inputs = network_inputs(shape, 1);
        let forward = NetworkReference::new(&shape, &inputs).compute_forward_pass(&inputs);
        for (number, layer) in forward.layers.iter().enumerate() {
            let tracers = spike_sums(&shape, &layer.spikes);
            let mean =
                tracers.iter().sum::<f64>() / tracers.len() as f64 / shape.spread_steps() as f64;
            let spikes =
                layer.spikes.iter().filter(|&&s| s != 0).count() as f64 / layer.spikes.len() as f64;
            eprintln!("{stem:?} level {level} layer {number}: {mean:.3} of the range, {spikes:.3}");
            assert!((0.1..0.8).contains(&mean), "{stem:?} level {level} layer {number}: {mean}");
        }
    }
}

#[test]
fn gradients_of_single_images_add_up_to_the_batchs_gradient() {
    let whole = shape(NetworkSizes { width: 8, ..TINY_NETWORK }, 3, 4, 8);
    let all = network_inputs(whole, 5);
    let gradient = |shape: &NetworkShape, inputs: &Tensors| {
        let reference = NetworkReference::new(shape, inputs);
        reference.loss_and_gradient(inputs, &reference.compute_forward_pass(inputs))
    };
    let (loss, together) = gradient(&whole, &all);
    let (mut losses, mut sum) = (0.0, vec![0.0; together.len()]);
    let one = NetworkShape { b: 1, ..whole };
    for image in 0..3 {
        let len = whole.sizes.image().elements();
        let pixels = all.f32("images")[image * len..][..len].to_vec();
        let label = vec![all.tensor("labels").to_f64(image, 1)[0] as i8];
        let inputs = all.clone().with("images", [1, 8, 8, 3], pixels).with("labels", [1], label);
        let (loss, gradient) = gradient(&one, &inputs);
        losses += loss / 3.0;
        sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g / 3.0);
    }
    assert!((loss - losses).abs() < 1e-12 && relative_l2_distance(&sum, &together) < 1e-12);
}

#[test]
fn dyadic_test_inputs_are_exact_in_bf16() {
    for level in [4, 8, 16] {
        let shape = shape(NetworkSizes { width: 8, ..TINY_NETWORK }, 2, 1, level);
        let inputs = network_inputs(shape, 1);
        let exact = |x: &f32| half::bf16::from_f32(*x).to_f32() == *x;
        assert!(inputs.f32("images").iter().all(exact), "level {level}");
        let network = shape.sizes.build_network();
        for conv in network.block_convolutions() {
            let weight = &inputs.f32("parameters")[conv.weight..conv.first_bias_element()];
            assert!(weight.iter().all(exact), "level {level} {}", conv.name);
            assert!(weight.iter().any(|x| *x != 0.0));
        }
    }
}
