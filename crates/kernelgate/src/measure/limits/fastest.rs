//! Best time of a pass, from which the host's ceilings are computed.

use std::time::Instant;

/// Repetitions of each pass, of which the fastest counts: a ceiling is the capability of the
/// device, not its average.
const REPEATS: usize = 5;
/// Time that one repetition should last at least, so that small working sets are passed over many
/// times.
const REPEAT_S: f64 = 0.01;

/// Seconds of the fastest repetition, after one that does not count.
pub fn fastest_s(pass: impl FnMut()) -> f64 {
    repeated_s(REPEATS, REPEAT_S, pass)
}

/// Seconds of the fastest of fewer and shorter repetitions, to choose among passes.
pub fn brief_s(pass: impl FnMut()) -> f64 {
    repeated_s(2, 0.1 * REPEAT_S, pass)
}

fn repeated_s(repeats: usize, repeat_s: f64, mut pass: impl FnMut()) -> f64 {
    pass();
    let start = Instant::now();
    pass();
    let passes = (repeat_s / start.elapsed().as_secs_f64().max(1e-9)).ceil() as usize;
    let mut repetition = || {
        let start = Instant::now();
        (0..passes).for_each(|_| pass());
        start.elapsed().as_secs_f64() / passes as f64
    };
    (0..repeats).map(|_| repetition()).fold(f64::INFINITY, f64::min)
}
