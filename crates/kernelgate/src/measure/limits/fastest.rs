//! The time of a pass at its best: what a ceiling on the host is made of.

use std::time::Instant;

/// Repetitions of each pass, of which the fastest counts: a ceiling is what the device can do, not
/// what it does on average.
const REPEATS: usize = 5;
/// Time that one repetition should last at least, so that small working sets are passed over many
/// times.
const REPEAT_S: f64 = 0.01;

/// Seconds of the fastest repetition, after one that does not count.
pub fn fastest_s(mut pass: impl FnMut()) -> f64 {
    pass();
    let start = Instant::now();
    pass();
    let passes = (REPEAT_S / start.elapsed().as_secs_f64().max(1e-9)).ceil() as usize;
    let mut repetition = || {
        let start = Instant::now();
        (0..passes).for_each(|_| pass());
        start.elapsed().as_secs_f64() / passes as f64
    };
    (0..REPEATS).map(|_| repetition()).fold(f64::INFINITY, f64::min)
}
