use super::super::convolution::convolve_frames_in_f64;
use super::super::network::{
    CLASSIFIER_CLASS_COUNT, ConvolutionLayer, FeatureMapExtents, ResNetBlock, ResNetSizes,
    ResNetStem,
};
use super::super::plain::TapeResNet;
use super::*;

/// Sizes of a network that is small enough to be computed on an autodiff tape of scalars.
const TINY_RESNET_SIZES: ResNetSizes = ResNetSizes {
    stem: ResNetStem::ImageNetStem,
    first_stage_channels: 4,
    blocks_per_stage: 1,
    image_side_pixels: 8,
};

fn dyadic_f32_network_shape(
    sizes: ResNetSizes,
    b: usize,
    t: usize,
    level: usize,
) -> ResNetParameters {
    ResNetParameters {
        sizes,
        batch_size: b,
        time_steps: t,
        quantisation_level: level,
        weight_and_image_source: WeightAndImageSource::DyadicSamples,
        dtype: Dtype::Bf16,
    }
}

fn draw_training_step_inputs(shape: ResNetParameters, seed: u64) -> Tensors {
    ResNetTrainingStep { shape }.inputs(seed)
}

fn relative_l2_distance(a: &[f64], b: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

#[test]
fn fewer_time_steps_than_the_encoding_needs_give_a_remark() {
    let sizes = ResNetSizes {
        stem: ResNetStem::ImageNetStem,
        first_stage_channels: 64,
        blocks_per_stage: 2,
        image_side_pixels: 32,
    };
    let remark =
        |t, level| ResNetInference { shape: dyadic_f32_network_shape(sizes, 8, t, level) }.remark();
    assert_eq!((remark(7, 16), remark(4, 8)), (None, None));
    assert_eq!(
        remark(4, 16).unwrap(),
        "t=4 is below the 7 steps of the encoding: only its time means anything"
    );
}

/// If the weights file of `weights=file` cannot be read, every case fails with an error.
#[test]
fn a_missing_weights_file_fails_every_case() {
    let sizes = ResNetSizes {
        stem: ResNetStem::ImageNetStem,
        first_stage_channels: 64,
        blocks_per_stage: 2,
        image_side_pixels: 32,
    };
    let shape = ResNetParameters {
        weight_and_image_source: WeightAndImageSource::WeightsFile,
        ..dyadic_f32_network_shape(sizes, 1, 4, 8)
    };
    if std::env::var_os("RESNET18_WEIGHTS").is_none() {
        let error = ResNetInference { shape }.check_can_be_computed().unwrap_err();
        assert_eq!(error, "weights=file: RESNET18_WEIGHTS names no file");
    }
}

#[test]
fn layer_sizes_equal_the_published_ones_of_resnet18() {
    let sizes = ResNetSizes {
        stem: ResNetStem::ImageNetStem,
        first_stage_channels: 64,
        blocks_per_stage: 2,
        image_side_pixels: 32,
    };
    let network = sizes.build_resnet18_layers();
    assert_eq!(
        (network.extents_of_neuron_layers().len(), network.neurons_per_image()),
        (17, 47_104)
    );
    let weights: usize = network.all_convolutions().map(ConvolutionLayer::elements_of_weight).sum();
    assert_eq!(weights, 11_166_912);
    assert_eq!(network.last_feature_map().side_pixels, 1);
    let padded: usize = network
        .all_convolutions()
        .map(|conv| conv.elements_of_weight() * conv.window.output_extents.pixels_per_frame())
        .sum();
    let read: u64 = network.all_convolutions().map(ConvolutionLayer::multiply_adds_per_frame).sum();
    let classifier = CLASSIFIER_CLASS_COUNT * network.last_feature_map().channels;
    assert_eq!((padded + classifier, read), (37_016_576, 21_662_464));
    let cifar = ResNetSizes { stem: ResNetStem::CifarStem, ..sizes }.build_resnet18_layers();
    assert_eq!(cifar.extents_of_neuron_layers()[0].side_pixels, 32);
    assert_eq!(cifar.last_feature_map().side_pixels, 4);
}

#[test]
fn parameter_tensors_are_stored_one_after_the_other_without_gaps() {
    let network = TINY_RESNET_SIZES.build_resnet18_layers();
    let mut next = 0;
    for (name, first, len) in network.names_and_ranges_of_parameters() {
        assert_eq!((first, first % TINY_RESNET_SIZES.first_stage_channels), (next, 0), "{name}");
        next = first + len;
    }
    assert_eq!(
        network.padded_parameter_count,
        next.next_multiple_of(TINY_RESNET_SIZES.first_stage_channels)
    );
}

#[test]
fn the_resnet_reference_and_its_gradient_equal_an_autodiff_tape() {
    for (stem, t, level) in [
        (ResNetStem::ImageNetStem, 4, 8),
        (ResNetStem::CifarStem, 5, 4),
        (ResNetStem::ImageNetStem, 3, 16),
    ] {
        let shape =
            dyadic_f32_network_shape(ResNetSizes { stem, ..TINY_RESNET_SIZES }, 2, t, level);
        let inputs = draw_training_step_inputs(shape, 3);
        let plain = TapeResNet::run_on_inputs(&shape, &inputs);
        let reference = ResNetReference::with_parameters_of_inputs(&shape, &inputs);
        let forward = reference.run_reference_forward_pass(&inputs);
        for (layer, tracers) in forward.layers.iter().zip(&plain.spike_sums_by_layer) {
            assert_eq!(&spike_sums_over_time(&shape, &layer.spikes), tracers);
        }
        assert!(relative_l2_distance(&forward.logits, &plain.logits) < 1e-12);
        let (loss, gradient) = reference.loss_and_parameter_gradients(&inputs, &forward);
        assert!((loss - plain.mean_loss).abs() < 1e-12);
        for (name, first, len) in reference.network.names_and_ranges_of_parameters() {
            let (ours, taped) =
                (&gradient[first..][..len], &plain.parameter_gradient[first..][..len]);
            assert!(taped.iter().any(|g| *g != 0.0), "{stem:?} level {level}: {name} matters");
            let apart = relative_l2_distance(ours, taped);
            assert!(apart < 1e-11, "{stem:?} level {level} {name}: {apart:e}");
        }
    }
}

/// Sum of each neuron's spikes over all time steps, which equals the neuron's tracer.
fn spike_sums_over_time(shape: &ResNetParameters, spikes: &[i8]) -> Vec<f64> {
    let n = spikes.len() / shape.time_steps;
    (0..n).map(|i| spikes[i..].iter().step_by(n).map(|&s| f64::from(s)).sum()).collect()
}

/// Activations of every layer of the quantised network before its conversion to a spiking network,
/// as integers: The quantised network replaces x by `clamp(floor(x/θ + 1/2), 0, steps)`.
fn activations_of_quantised_network(shape: &ResNetParameters, inputs: &Tensors) -> Vec<Vec<f64>> {
    let reference = ResNetReference::with_parameters_of_inputs(shape, inputs);
    let network = &reference.network;
    let theta = shape.neuron_parameters().firing_threshold;
    let top = shape.time_steps_to_spread_image() as f64;
    let quantise = |x: Vec<f64>| -> Vec<f64> {
        x.into_iter().map(|x| (x / theta + 0.5).floor().clamp(0.0, top)).collect()
    };
    let layer = |conv: &ConvolutionLayer, input: &[f64], factor: f64| {
        let mut y =
            convolve_frames_in_f64(conv, reference.weight_of_convolution(conv), input, factor);
        let channels = conv.window.output_extents.channels;
        let bias = &reference.parameters[conv.index_of_first_bias()..][..channels];
        y.iter_mut().enumerate().for_each(|(i, y)| *y += bias[i % channels]);
        y
    };
    let images = inputs.tensor("images");
    let images = images.elements_to_f64(0, images.len());
    let mut layers = vec![quantise(layer(&network.stem, &images, 1.0))];
    let mut x = layers[0].clone();
    if let Some(pool) = &network.pool {
        let sums: Vec<i8> = x.iter().map(|&x| x as i8).collect();
        x = super::super::reference::indices_of_first_maxima(pool, &sums).map(|at| x[at]).collect();
    }
    for ResNetBlock { first, second, shortcut } in &network.blocks {
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
fn with_enough_time_steps_spike_sums_equal_quantised_activations() {
    let levels = [
        (ResNetStem::ImageNetStem, 4),
        (ResNetStem::ImageNetStem, 8),
        (ResNetStem::CifarStem, 8),
        (ResNetStem::ImageNetStem, 16),
    ];
    for (stem, level) in levels {
        let shape = dyadic_f32_network_shape(
            ResNetSizes {
                stem,
                first_stage_channels: 8,
                blocks_per_stage: 2,
                image_side_pixels: 16,
            },
            2,
            64,
            level,
        );
        let inputs = draw_training_step_inputs(shape, 1);
        let forward = ResNetReference::with_parameters_of_inputs(&shape, &inputs)
            .run_reference_forward_pass(&inputs);
        let layers = activations_of_quantised_network(&shape, &inputs);
        for (number, (layer, activations)) in forward.layers.iter().zip(&layers).enumerate() {
            let tracers = spike_sums_over_time(&shape, &layer.spikes);
            let wrong = tracers.iter().zip(activations).filter(|(a, b)| a != b).count();
            assert_eq!(wrong, 0, "{stem:?} level {level} layer {number} of {}", tracers.len());
        }
    }
}

/// With few time steps only some neurons' spike sums equal the quantised activations: most near the
/// images, and all once the last layer has had enough steps.
#[test]
fn with_few_time_steps_some_spike_sums_equal_quantised_activations() {
    let sizes = ResNetSizes {
        stem: ResNetStem::ImageNetStem,
        first_stage_channels: 64,
        blocks_per_stage: 2,
        image_side_pixels: 32,
    };
    for level in [4, 8, 16] {
        let mut before = 0.0;
        for t in [4, 8, 16] {
            let shape = dyadic_f32_network_shape(sizes, 1, t, level);
            let inputs = draw_training_step_inputs(shape, 1);
            let forward = ResNetReference::with_parameters_of_inputs(&shape, &inputs)
                .run_reference_forward_pass(&inputs);
            let layers =
                forward.layers.iter().zip(activations_of_quantised_network(&shape, &inputs));
            let shares: Vec<(usize, usize)> = layers
                .map(|(layer, activations)| {
                    let tracers = spike_sums_over_time(&shape, &layer.spikes);
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

/// Counts the tiles without a spike and all tiles. An element of `tiles` lists indices of frames of
/// `[T, B]`; 16 channels of these frames at one pixel form a tile.
fn count_tiles_without_spikes_and_all_tiles(
    shape: &ResNetParameters,
    (spikes, map): (&[i8], FeatureMapExtents),
    tiles: &[Vec<usize>],
) -> (usize, usize) {
    let (mut silent, mut all) = (0, 0);
    debug_assert_eq!(spikes.len(), shape.frames_over_all_time_steps() * map.elements_per_frame());
    for rows in tiles {
        for first in (0..map.elements_per_frame()).step_by(16) {
            let zero = |row: &usize| {
                spikes[row * map.elements_per_frame() + first..][..16]
                    .iter()
                    .all(|&spike| spike == 0)
            };
            silent += usize::from(rows.iter().all(zero));
            all += 1;
        }
    }
    (silent, all)
}

/// The test shows why no kernel skips operand tiles without spikes: such tiles are rare. The kernel
/// of `cuda/best` multiplies fragments of 16 rows (all steps of two images at a pixel) by 16
/// channels; docs/results/resnet18.md has the fractions of fragments without spikes.
#[test]
fn few_operand_tiles_of_the_layers_have_no_spike() {
    let sizes = ResNetSizes {
        stem: ResNetStem::ImageNetStem,
        first_stage_channels: 64,
        blocks_per_stage: 2,
        image_side_pixels: 32,
    };
    let shape = dyadic_f32_network_shape(sizes, 8, 8, 8);
    let inputs = draw_training_step_inputs(shape, 1);
    let forward = ResNetReference::with_parameters_of_inputs(&shape, &inputs)
        .run_reference_forward_pass(&inputs);
    let maps = sizes.build_resnet18_layers().extents_of_neuron_layers();
    let pairs: Vec<Vec<usize>> = (0..shape.batch_size / 2)
        .map(|pair| {
            (0..shape.time_steps)
                .flat_map(|t| [0, 1].map(|i| t * shape.batch_size + 2 * pair + i))
                .collect()
        })
        .collect();
    let mut sums = vec![(0, 0); shape.time_steps + 1];
    for (number, (layer, map)) in forward.layers.iter().zip(maps).enumerate().skip(1) {
        let silent_share = |tiles: &[Vec<usize>]| {
            count_tiles_without_spikes_and_all_tiles(&shape, (&layer.spikes, map), tiles)
        };
        let whole = silent_share(&pairs);
        let steps = (0..shape.time_steps)
            .map(|t| silent_share(&[(t * shape.batch_size..(t + 1) * shape.batch_size).collect()]));
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
fn neurons_of_every_layer_fire_with_drawn_weights() {
    for (stem, level) in
        [(ResNetStem::ImageNetStem, 8), (ResNetStem::CifarStem, 8), (ResNetStem::ImageNetStem, 16)]
    {
        let shape = dyadic_f32_network_shape(
            ResNetSizes {
                stem,
                first_stage_channels: 16,
                blocks_per_stage: 2,
                image_side_pixels: 32,
            },
            2,
            16,
            level,
        );
        let inputs = draw_training_step_inputs(shape, 1);
        let forward = ResNetReference::with_parameters_of_inputs(&shape, &inputs)
            .run_reference_forward_pass(&inputs);
        for (number, layer) in forward.layers.iter().enumerate() {
            let tracers = spike_sums_over_time(&shape, &layer.spikes);
            let mean = tracers.iter().sum::<f64>()
                / tracers.len() as f64
                / shape.time_steps_to_spread_image() as f64;
            let spikes =
                layer.spikes.iter().filter(|&&s| s != 0).count() as f64 / layer.spikes.len() as f64;
            eprintln!("{stem:?} level {level} layer {number}: {mean:.3} of the range, {spikes:.3}");
            assert!((0.1..0.8).contains(&mean), "{stem:?} level {level} layer {number}: {mean}");
        }
    }
}

#[test]
fn mean_gradient_of_single_images_equals_the_batch_gradient() {
    let whole = dyadic_f32_network_shape(
        ResNetSizes { first_stage_channels: 8, ..TINY_RESNET_SIZES },
        3,
        4,
        8,
    );
    let all = draw_training_step_inputs(whole, 5);
    let gradient = |shape: &ResNetParameters, inputs: &Tensors| {
        let reference = ResNetReference::with_parameters_of_inputs(shape, inputs);
        reference
            .loss_and_parameter_gradients(inputs, &reference.run_reference_forward_pass(inputs))
    };
    let (loss, together) = gradient(&whole, &all);
    let (mut losses, mut sum) = (0.0, vec![0.0; together.len()]);
    let one = ResNetParameters { batch_size: 1, ..whole };
    for image in 0..3 {
        let len = whole.sizes.image_extents().elements_per_frame();
        let pixels = all.f32_elements("images")[image * len..][..len].to_vec();
        let label = vec![all.tensor("labels").elements_to_f64(image, 1)[0] as i8];
        let inputs = all.clone().with_tensor("images", [1, 8, 8, 3], pixels).with_tensor(
            "labels",
            [1],
            label,
        );
        let (loss, gradient) = gradient(&one, &inputs);
        losses += loss / 3.0;
        sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g / 3.0);
    }
    assert!((loss - losses).abs() < 1e-12 && relative_l2_distance(&sum, &together) < 1e-12);
}

#[test]
fn dyadic_weights_and_images_are_exact_in_bf16() {
    for level in [4, 8, 16] {
        let shape = dyadic_f32_network_shape(
            ResNetSizes { first_stage_channels: 8, ..TINY_RESNET_SIZES },
            2,
            1,
            level,
        );
        let inputs = draw_training_step_inputs(shape, 1);
        let exact = |x: &f32| half::bf16::from_f32(*x).to_f32() == *x;
        assert!(inputs.f32_elements("images").iter().all(exact), "level {level}");
        let network = shape.sizes.build_resnet18_layers();
        for conv in network.all_convolutions() {
            let weight = &inputs.f32_elements("parameters")
                [conv.first_weight_index..conv.index_of_first_bias()];
            assert!(weight.iter().all(exact), "level {level} {}", conv.layer_name);
            assert!(weight.iter().any(|x| *x != 0.0));
        }
    }
}
