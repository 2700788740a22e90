//! Weights of a trained network, from the safetensors file that [`WEIGHTS_FILE_VARIABLE`] names.
//!
//! The file has each parameter under the network's name for it (`conv1.weight`,
//! `layer1.0.conv2.bias`, `layer2.0.downsample.weight`, `fc.bias` …). Weights are in PyTorch's
//! layout, `[out, in, rows, columns]`, in any float type. BatchNorm is folded into the weights and
//! biases. Other naming schemes, and statistics to fold, are excluded on purpose.

use std::path::{Path, PathBuf};

use super::network::{CLASS_COUNT, ResNet18};
use kernelgate::attach::safetensors::SafeTensorsFile;
use kernelgate::workload::Dtype;

/// Environment variable that contains the path of the weights file.
pub(super) const WEIGHTS_FILE_VARIABLE: &str = "RESNET18_WEIGHTS";

/// Path of the weights file, from the environment.
pub(super) fn weights_file_path() -> Result<PathBuf, String> {
    let path = std::env::var_os(WEIGHTS_FILE_VARIABLE).filter(|path| !path.is_empty());
    path.map(PathBuf::from)
        .ok_or_else(|| format!("weights=file: {WEIGHTS_FILE_VARIABLE} names no file"))
}

/// Reads the network's parameters, and reorders weights to channels innermost.
///
/// # Errors
/// The error is a fragment of a message that names the file: it is not a safetensors file, is
/// truncated, lacks a parameter, holds another tensor, or one of another shape or dtype, or a
/// number that is not a finite f32.
pub(super) fn read_weights(path: &Path, network: &ResNet18) -> Result<Vec<f32>, String> {
    let of_file = |why: String| format!("weights {}: {why}", path.display());
    let file = SafeTensorsFile::read(path).map_err(of_file)?;
    let shapes = parameter_shapes(network);
    let is_other = |name: &&str| shapes.iter().all(|(parameter, ..)| parameter != name);
    if let Some(other) = file.names().find(is_other) {
        return Err(of_file(format!(
            "`{other}` is not a parameter of the network (BatchNorm is folded into weights and biases)"
        )));
    }
    let mut parameters = vec![0.0; network.parameters];
    for (name, shape, first) in shapes {
        let tensor = file.tensor(&name, &shape).map_err(of_file)?;
        if tensor.dtype() == Dtype::I8 {
            return Err(of_file(format!("`{name}` is i8, a parameter is a float")));
        }
        let values = tensor.to_f64(0, tensor.len());
        if let Some(at) = values.iter().position(|&value| !(value as f32).is_finite()) {
            let value = values[at];
            return Err(of_file(format!(
                "`{name}` holds {value:e} at element {at}, no finite f32"
            )));
        }
        // Reorders [out, in, rows · columns] to [out, rows · columns, in].
        let inputs = shape.get(1).copied().unwrap_or(1);
        let taps: usize = shape.iter().skip(2).product();
        for (i, value) in values.into_iter().enumerate() {
            let (filter, input, tap) = (i / (inputs * taps), i / taps % inputs, i % taps);
            parameters[first + (filter * taps + tap) * inputs + input] = value as f32;
        }
    }
    Ok(parameters)
}

/// Name, shape in the file and index of the first element of each parameter.
fn parameter_shapes(network: &ResNet18) -> Vec<(String, Vec<usize>, usize)> {
    let mut shapes = Vec::new();
    for conv in network.block_convolutions() {
        let (window, filters) = (conv.window, conv.window.output.channels);
        let weight = vec![filters, window.input.channels, window.kernel, window.kernel];
        shapes.push((format!("{}.weight", conv.name), weight, conv.weight));
        shapes.push((format!("{}.bias", conv.name), vec![filters], conv.first_bias_element()));
    }
    let features = network.last_map().channels;
    shapes.push(("fc.weight".to_owned(), vec![CLASS_COUNT, features], network.classifier));
    let bias = network.classifier + CLASS_COUNT * features;
    shapes.push(("fc.bias".to_owned(), vec![CLASS_COUNT], bias));
    shapes
}

#[cfg(test)]
mod tests {
    use super::super::network::{NetworkSizes, NetworkStem};
    use super::*;
    use safetensors::Dtype as Stored;
    use safetensors::tensor::TensorView;

    type StoredParameters = Vec<(String, Stored, Vec<usize>, Vec<u8>)>;

    fn small_test_network() -> ResNet18 {
        NetworkSizes { stem: NetworkStem::Cifar, width: 8, blocks: 1, side: 8 }.build_network()
    }

    /// Test weights in which the elements of each parameter are numbered.
    fn numbered_parameters(network: &ResNet18) -> StoredParameters {
        let store = |(name, shape, _): (String, Vec<usize>, usize)| {
            let count = shape.iter().product::<usize>();
            let bytes = (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect();
            (name, Stored::F32, shape, bytes)
        };
        parameter_shapes(network).into_iter().map(store).collect()
    }

    fn write_safetensors(path: &Path, stores: &StoredParameters) {
        let views = stores.iter().map(|(name, dtype, shape, bytes)| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    #[test]
    fn parameters_are_read_by_name_and_stored_with_channels_innermost() {
        let folder = tempfile::tempdir().unwrap();
        let (path, network) = (folder.path().join("weights.safetensors"), small_test_network());
        write_safetensors(&path, &numbered_parameters(&network));
        let read = read_weights(&path, &network).unwrap();
        assert_eq!(read.len(), network.parameters);
        // The element of conv1 [8, 3, 3, 3] is filter 1, tap 4 (row 1, column 1), color 2.
        let at = |filter: usize, color: usize, tap: usize| (filter * 3 + color) * 9 + tap;
        assert_eq!(read[network.stem.weight + (9 + 4) * 3 + 2], at(1, 2, 4) as f32);
        assert_eq!(read[network.stem.first_bias_element() + 5], 5.0);
        let features = network.last_map().channels;
        assert_eq!(read[network.classifier + features + 3], (features + 3) as f32);
    }

    #[test]
    fn a_file_without_the_networks_parameters_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (path, network) = (folder.path().join("weights.safetensors"), small_test_network());
        let whole = numbered_parameters(&network);
        let refused = |change: &dyn Fn(&mut StoredParameters), words: &str| {
            let mut stores = whole.clone();
            change(&mut stores);
            write_safetensors(&path, &stores);
            let error = read_weights(&path, &network).unwrap_err();
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
        let beyond = |all: &mut StoredParameters| {
            all[1].1 = Stored::F64;
            all[1].3 = [1e300_f64; 8].iter().flat_map(|value| value.to_le_bytes()).collect();
        };
        refused(&beyond, "`conv1.bias` holds 1e300 at element 0, no finite f32");
        let narrow = |dtype| {
            move |all: &mut StoredParameters| {
                all[1].1 = dtype;
                all[1].3.truncate(8);
            }
        };
        refused(&narrow(Stored::I8), "`conv1.bias` is i8, a parameter is a float");
        refused(&narrow(Stored::U8), "`conv1.bias` is U8, which no row computes");
        write_safetensors(&path, &whole);
        let bytes = std::fs::read(&path).unwrap();
        let cut = [0, 7, 100, bytes.len() / 2, bytes.len() - 1].map(|end| {
            std::fs::write(&path, &bytes[..end]).unwrap();
            let why = read_weights(&path, &network).unwrap_err();
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
            read_weights(&folder.path().join("none"), &network).unwrap_err().contains("none: ")
        );
    }
}
