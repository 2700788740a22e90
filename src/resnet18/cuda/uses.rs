//! What the regions of a sequence are for: the rows of a table of device memory.

use super::sequence::Sequence;
use kernelgate::backend::cuda::Output;
use kernelgate_cuda::libraries::gemm::WORKSPACE_BYTES;

/// Uses, in the order of the table.
const USES: [&str; 6] =
    ["weights", "momentum", "activations", "gradients", "workspace", "inputs and outputs"];

/// Bytes of each use of a sequence that writes these outputs.
pub fn of(sequence: &Sequence, outputs: &[Output]) -> Vec<(&'static str, u64)> {
    let regions = sequence.memory().regions().map(|(name, bytes)| (use_of(name), bytes));
    let outputs = outputs.iter().map(|output| ("inputs and outputs", output.bytes()));
    let all: Vec<_> = regions.chain(outputs).chain([("workspace", WORKSPACE_BYTES)]).collect();
    let bytes =
        |of: &str| all.iter().filter(|(known, _)| *known == of).map(|(_, bytes)| bytes).sum();
    USES.into_iter()
        .map(|of| (of, bytes(of)))
        .filter(|(_, bytes): &(_, usize)| *bytes > 0)
        .map(|(of, bytes)| (of, bytes as u64))
        .collect()
}

/// What a region is for.
fn use_of(region: &str) -> &'static str {
    let starts = |with: &[&str]| with.iter().any(|with| region.starts_with(with));
    match region {
        "images" | "labels" => "inputs and outputs",
        "momentum" => "momentum",
        "parameters" => "weights",
        // Gradients of a layer's operand live for its GEMM only.
        "gathered_gradient" | "frames" => "workspace",
        _ if region.contains("gradient") && !region.starts_with("gradients_") => "gradients",
        _ if region.ends_with(".parts") => "gradients",
        _ if [".weight", ".bias", ".tiles", ".fragments"]
            .iter()
            .any(|end| region.ends_with(end)) =>
        {
            "weights"
        }
        _ if starts(&["spikes", "currents", "pooled", "membranes", "tracers", "features"]) => {
            "activations"
        }
        // Gathered operands, rounded copies, partial sums, lists of jobs.
        _ => "workspace",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_counted_where_they_belong() {
        for (region, of) in [
            ("layer1.0.conv1.weight", "weights"),
            ("layer1.0.conv1.tiles", "weights"),
            ("best_stem.fragments", "weights"),
            ("fc.weight_gradient", "gradients"),
            ("layer1.0.conv1.parts", "gradients"),
            ("gradient3", "gradients"),
            ("gradients_jobs", "workspace"),
            ("spikes_gradient", "gradients"),
            ("spikes3", "activations"),
            ("pooled_sources", "activations"),
            ("operand", "workspace"),
            ("images", "inputs and outputs"),
        ] {
            assert_eq!(use_of(region), of, "{region}");
        }
    }
}
