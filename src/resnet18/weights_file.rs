//! Reads the weights of a trained network from the safetensors file whose path the environment
//! variable [`WEIGHTS_FILE_VARIABLE`] contains.
//!
//! The weights file has each parameter tensor under its name in PyTorch's ResNet (`conv1.weight`,
//! `layer1.0.conv2.bias`, `layer2.0.downsample.weight`, `fc.bias` …). The weights in the file have
//! PyTorch's layout, `[out, in, rows, columns]`, in any float type. The weights file must have
//! BatchNorm folded into weights and biases. The reader supports no other naming schemes, and no
//! BatchNorm statistics.

use std::path::{Path, PathBuf};

use super::network::{CLASSIFIER_CLASS_COUNT, ResNet18Layers};
use kernelgate::attach::safetensors::SafeTensorsFile;
use kernelgate::workload::Dtype;

/// Name of the environment variable that contains the path of the safetensors file with trained
/// weights.
pub(super) const WEIGHTS_FILE_VARIABLE: &str = "RESNET18_WEIGHTS";

/// Path of the trained weights' file, from the environment variable.
pub(super) fn weights_path_from_environment() -> Result<PathBuf, String> {
    let path = std::env::var_os(WEIGHTS_FILE_VARIABLE).filter(|path| !path.is_empty());
    path.map(PathBuf::from)
        .ok_or_else(|| format!("weights=file: {WEIGHTS_FILE_VARIABLE} names no file"))
}

/// Reads all parameters of the network from a safetensors file and reorders weights to channels
/// innermost.
///
/// # Errors
/// Fails if the file is not a complete safetensors file, lacks a parameter, or has another tensor,
/// shape, dtype, or a number that is not a finite f32. The error text contains the path of the
/// weights file.
pub(super) fn read_and_reorder_weights(
    path: &Path,
    network: &ResNet18Layers,
) -> Result<Vec<f32>, String> {
    let of_file = |why: String| format!("weights {}: {why}", path.display());
    let file = SafeTensorsFile::read_and_check(path).map_err(of_file)?;
    let shapes = parameters_expected_in_file(network);
    let is_other = |name: &&str| shapes.iter().all(|(parameter, ..)| parameter != name);
    if let Some(other) = file.tensor_names().find(is_other) {
        return Err(of_file(format!(
            "`{other}` is not a parameter of the network (BatchNorm is folded into weights and biases)"
        )));
    }
    let mut parameters = vec![0.0; network.padded_parameter_count];
    for (name, shape, first) in shapes {
        let tensor = file.tensor_with_name_and_shape(&name, &shape).map_err(of_file)?;
        if tensor.dtype() == Dtype::I8 {
            return Err(of_file(format!("`{name}` is i8, a parameter is a float")));
        }
        let values = tensor.elements_to_f64(0, tensor.len());
        if let Some(at) = values.iter().position(|&value| !(value as f32).is_finite()) {
            let value = values[at];
            return Err(of_file(format!(
                "`{name}` holds {value:e} at element {at}, no finite f32"
            )));
        }
        // Reorders a weight [out, in, rows · columns] to channels innermost, [out, rows · columns,
        // in].
        let inputs = shape.get(1).copied().unwrap_or(1);
        let taps: usize = shape.iter().skip(2).product();
        for (i, value) in values.into_iter().enumerate() {
            let (filter, input, tap) = (i / (inputs * taps), i / taps % inputs, i % taps);
            parameters[first + (filter * taps + tap) * inputs + input] = value as f32;
        }
    }
    Ok(parameters)
}

/// Name, shape in the weights file, and index of the first element of each parameter tensor.
fn parameters_expected_in_file(network: &ResNet18Layers) -> Vec<(String, Vec<usize>, usize)> {
    let mut shapes = Vec::new();
    for conv in network.all_convolutions() {
        let (window, filters) = (conv.window, conv.window.output_extents.channels);
        let weight =
            vec![filters, window.input_extents.channels, window.window_side, window.window_side];
        shapes.push((format!("{}.weight", conv.layer_name), weight, conv.first_weight_index));
        shapes.push((
            format!("{}.bias", conv.layer_name),
            vec![filters],
            conv.index_of_first_bias(),
        ));
    }
    let features = network.last_feature_map().channels;
    shapes.push((
        "fc.weight".to_owned(),
        vec![CLASSIFIER_CLASS_COUNT, features],
        network.first_classifier_weight_index,
    ));
    let bias = network.first_classifier_weight_index + CLASSIFIER_CLASS_COUNT * features;
    shapes.push(("fc.bias".to_owned(), vec![CLASSIFIER_CLASS_COUNT], bias));
    shapes
}

#[cfg(test)]
mod tests {
    use super::super::network::{ResNetSizes, ResNetStem};
    use super::*;
    use safetensors::Dtype as Stored;
    use safetensors::tensor::TensorView;

    type StoredParameterTensors = Vec<(String, Stored, Vec<usize>, Vec<u8>)>;

    fn small_cifar_network() -> ResNet18Layers {
        ResNetSizes {
            stem: ResNetStem::CifarStem,
            first_stage_channels: 8,
            blocks_per_stage: 1,
            image_side_pixels: 8,
        }
        .build_resnet18_layers()
    }

    /// Test weights in which the elements of each parameter tensor are their own indices.
    fn parameters_whose_elements_are_their_indices(
        network: &ResNet18Layers,
    ) -> StoredParameterTensors {
        let store = |(name, shape, _): (String, Vec<usize>, usize)| {
            let count = shape.iter().product::<usize>();
            let bytes = (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect();
            (name, Stored::F32, shape, bytes)
        };
        parameters_expected_in_file(network).into_iter().map(store).collect()
    }

    fn write_safetensors_file(path: &Path, stores: &StoredParameterTensors) {
        let views = stores.iter().map(|(name, dtype, shape, bytes)| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    #[test]
    fn weights_are_read_by_name_and_reordered_to_channels_innermost() {
        let folder = tempfile::tempdir().unwrap();
        let (path, network) = (folder.path().join("weights.safetensors"), small_cifar_network());
        write_safetensors_file(&path, &parameters_whose_elements_are_their_indices(&network));
        let read = read_and_reorder_weights(&path, &network).unwrap();
        assert_eq!(read.len(), network.padded_parameter_count);
        // The tested element of conv1 [8, 3, 3, 3] belongs to filter 1, tap 4 (row 1, column 1),
        // color 2.
        let at = |filter: usize, color: usize, tap: usize| (filter * 3 + color) * 9 + tap;
        assert_eq!(read[network.stem.first_weight_index + (9 + 4) * 3 + 2], at(1, 2, 4) as f32);
        assert_eq!(read[network.stem.index_of_first_bias() + 5], 5.0);
        let features = network.last_feature_map().channels;
        assert_eq!(
            read[network.first_classifier_weight_index + features + 3],
            (features + 3) as f32
        );
    }

    #[test]
    fn a_file_without_the_networks_parameters_is_refused_with_a_reason() {
        let folder = tempfile::tempdir().unwrap();
        let (path, network) = (folder.path().join("weights.safetensors"), small_cifar_network());
        let whole = parameters_whose_elements_are_their_indices(&network);
        let refused = |change: &dyn Fn(&mut StoredParameterTensors), words: &str| {
            let mut stores = whole.clone();
            change(&mut stores);
            write_safetensors_file(&path, &stores);
            let error = read_and_reorder_weights(&path, &network).unwrap_err();
            assert_eq!(error, format!("weights {}: {words}", path.display()));
        };
        refused(&|all| all.truncate(3), "no tensor `layer1.0.conv1.bias`");
        refused(
            &|all| all[0].2 = vec![8, 3, 9],
            "`conv1.weight` has the shape [8, 3, 9], not [8, 3, 3, 3]",
        );
        refused(
            &|all| all[0].0 = "bn1.weight".to_owned(),
            "`bn1.weight` is not a parameter of the network (BatchNorm is folded into weights and biases)",
        );
        refused(
            &|all| all[1].3[..4].fill(0xff),
            "`conv1.bias` holds NaN at element 0, no finite f32",
        );
        let beyond = |all: &mut StoredParameterTensors| {
            all[1].1 = Stored::F64;
            all[1].3 = [1e300_f64; 8].iter().flat_map(|value| value.to_le_bytes()).collect();
        };
        refused(&beyond, "`conv1.bias` holds 1e300 at element 0, no finite f32");
        let narrow = |dtype| {
            move |all: &mut StoredParameterTensors| {
                all[1].1 = dtype;
                all[1].3.truncate(8);
            }
        };
        refused(&narrow(Stored::I8), "`conv1.bias` is i8, a parameter is a float");
        refused(&narrow(Stored::U8), "`conv1.bias` is U8, which no row computes");
        write_safetensors_file(&path, &whole);
        let bytes = std::fs::read(&path).unwrap();
        let cut = [0, 7, 100, bytes.len() / 2, bytes.len() - 1].map(|end| {
            std::fs::write(&path, &bytes[..end]).unwrap();
            let why = read_and_reorder_weights(&path, &network).unwrap_err();
            let reason = why.strip_prefix(&format!("weights {}: ", path.display()));
            reason.unwrap_or_else(|| panic!("{why}")).to_owned()
        });
        let reasons = [
            "it is too short",
            "it is too short",
            "its header is longer than the file",
            "its elements are 154204 bytes, and its tensor `layer4.0.conv1.weight` ends at 154408",
            "its elements are 310567 bytes, and its tensor `layer4.0.downsample.weight` ends at 310568",
        ];
        assert_eq!(cut, reasons.map(|reason| format!("no safetensors file ({reason})")));
        assert!(
            read_and_reorder_weights(&folder.path().join("none"), &network)
                .unwrap_err()
                .contains("none: ")
        );
    }
}
