//! Tests that exported timelines can be displayed: spans of one viewer track nest or follow each
//! other.

use std::collections::BTreeMap;

use crate::fixture::kineto::{A100_FILLING_KERNEL, KinetoTrace};
use serde_json::Value;

#[test]
fn operations_of_one_stream_that_overlap_are_on_tracks_of_their_own() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..50 {
        // Each kernel overlaps the next two kernels, as in branches of a CUDA graph.
        let start = f64::from(step) * 10.0;
        trace.add_launch(start, (start + 20.0, 25.0), &format!("k{step}"), A100_FILLING_KERNEL);
    }
    let trace = trace.read_as_trace();
    let mut file = Vec::new();
    kernelgate_trace::export::write_perfetto_json(&trace, &mut file).unwrap();
    let written: Value = serde_json::from_slice(&file).unwrap();
    let events = written["traceEvents"].as_array().unwrap();
    let mut tracks: BTreeMap<(i64, i64), Vec<(f64, f64)>> = BTreeMap::new();
    let mut shown = Vec::new();
    for event in events.iter().filter(|event| event["cat"] == "kernel") {
        let number = |name: &str| event[name].as_f64().unwrap();
        let track = (event["pid"].as_i64().unwrap(), event["tid"].as_i64().unwrap());
        let (start, length) = (number("ts"), number("dur"));
        tracks.entry(track).or_default().push((start, start + length));
        shown.push(event["args"]["stream"].clone());
    }
    assert_eq!((tracks.len(), shown.len()), (3, 50));
    assert!(shown.iter().all(|stream| *stream == 7), "the stream stays the same");
    for (track, spans) in &mut tracks {
        spans.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert!(spans.is_sorted_by(|a, b| a.1 <= b.0), "{track:?}: {spans:?}");
        let named = events.iter().any(|event| {
            event["name"] == "thread_name"
                && (event["pid"].as_i64(), event["tid"].as_i64()) == (Some(track.0), Some(track.1))
        });
        assert!(named, "{track:?}");
    }
    let arrows = events.iter().filter(|event| event["ph"] == "f");
    assert!(arrows.clone().all(|event| {
        tracks.contains_key(&(event["pid"].as_i64().unwrap(), event["tid"].as_i64().unwrap()))
    }));
    assert_eq!(arrows.count(), 50);
}
