//! Simulation of the protocols of our own sums, with threads instead of GPUs, for numbers of GPUs
//! that were not available. Each simulated GPU runs launch after launch without any other
//! synchronisation.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const SIMULATED_LAUNCHES: u32 = 200;
const PACKETS_PER_MESSAGE: usize = 24;

/// Value of a word of a message in a launch; small integers, so that sums are exact.
const fn message_word(rank: usize, launch: u32, packet: usize) -> u32 {
    rank as u32 + 3 * launch + 7 * packet as u32
}

fn expected_sum(gpus: usize, launch: u32, packet: usize) -> u32 {
    (0..gpus).map(|rank| message_word(rank, launch, packet)).sum()
}

/// Delays a thread at random, so that threads drift apart.
fn stall_randomly(rank: usize, launch: u32) {
    if (rank as u32 * 5 + launch).is_multiple_of(7) {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
}

/// Runs `each` on one thread for each simulated GPU.
fn run_thread_per_gpu(gpus: usize, each: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        (0..gpus).for_each(|rank| {
            drop(scope.spawn({
                let each = &each;
                move || each(rank)
            }))
        });
    });
}

/// Simulates `all_reduce_one_shot`: a word and its flag arrive together, and halves of the buffer
/// alternate.
fn simulate_one_shot(gpus: usize) {
    let memory = || (0..2 * gpus * PACKETS_PER_MESSAGE).map(|_| AtomicU64::new(0)).collect();
    let staging: Vec<Vec<AtomicU64>> = (0..gpus).map(|_| memory()).collect();
    run_thread_per_gpu(gpus, |rank| {
        for flag in 1..=SIMULATED_LAUNCHES {
            stall_randomly(rank, flag);
            let at = |from: usize, packet| {
                ((flag as usize & 1) * gpus + from) * PACKETS_PER_MESSAGE + packet
            };
            for peer in (1..gpus).map(|step| (rank + step) % gpus) {
                for packet in 0..PACKETS_PER_MESSAGE {
                    let both = u64::from(message_word(rank, flag, packet)) | u64::from(flag) << 32;
                    staging[peer][at(rank, packet)].store(both, Ordering::Relaxed);
                }
            }
            for packet in 0..PACKETS_PER_MESSAGE {
                let received = |peer: usize| loop {
                    let both = staging[rank][at(peer, packet)].load(Ordering::Relaxed);
                    if both >> 32 == u64::from(flag) {
                        break both as u32;
                    }
                    std::thread::yield_now();
                };
                let own = message_word(rank, flag, packet);
                let sum: u32 =
                    (0..gpus).map(|peer| if peer == rank { own } else { received(peer) }).sum();
                assert_eq!(sum, expected_sum(gpus, flag, packet), "rank {rank} of {gpus}");
            }
        }
    });
}

/// Simulates `all_reduce_two_shot`: a launch waits twice, and a message is overwritten right after
/// the second wait.
fn simulate_two_shot(gpus: usize) {
    let words = |count: usize| (0..count).map(|_| AtomicU32::new(0)).collect::<Vec<_>>();
    let of_each = |count| (0..gpus).map(|_| words(count)).collect::<Vec<_>>();
    let (x, y, flags) =
        (of_each(PACKETS_PER_MESSAGE), of_each(PACKETS_PER_MESSAGE), of_each(2 * gpus));
    let wait = |rank: usize, which: usize, epoch: u32| {
        for flags in &flags {
            flags[which * gpus + rank].store(epoch, Ordering::Release);
        }
        for peer in 0..gpus {
            let flag = &flags[rank][which * gpus + peer];
            while (flag.load(Ordering::Acquire).wrapping_sub(epoch) as i32) < 0 {
                std::thread::yield_now();
            }
        }
    };
    run_thread_per_gpu(gpus, |rank| {
        let part = PACKETS_PER_MESSAGE / gpus;
        for epoch in 1..=SIMULATED_LAUNCHES {
            stall_randomly(rank, epoch);
            (0..PACKETS_PER_MESSAGE)
                .for_each(|i| x[rank][i].store(message_word(rank, epoch, i), Ordering::Relaxed));
            wait(rank, 0, epoch);
            for i in rank * part..(rank + 1) * part {
                let sum = x.iter().map(|x| x[i].load(Ordering::Relaxed)).sum();
                y.iter().for_each(|y| y[i].store(sum, Ordering::Relaxed));
            }
            wait(rank, 1, epoch);
            for (i, y) in y[rank].iter().enumerate() {
                let found = y.load(Ordering::Relaxed);
                assert_eq!(found, expected_sum(gpus, epoch, i), "rank {rank} of {gpus}");
            }
        }
    });
}

#[test]
fn simulated_sums_of_two_to_eight_drifting_gpus_are_correct() {
    for gpus in [2, 3, 4, 8] {
        simulate_one_shot(gpus);
        simulate_two_shot(gpus);
    }
}
