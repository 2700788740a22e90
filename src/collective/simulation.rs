//! Simulates the synchronisation of kernelgate's all-reduce kernels with CPU threads in place of
//! GPUs, for up to eight GPUs on any machine. Each thread that simulates a GPU runs launch after
//! launch, synchronised only by the flags of the simulated all-reduce.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const SIMULATED_LAUNCHES_PER_GPU: u32 = 200;
const PACKETS_PER_SIMULATED_MESSAGE: usize = 24;

/// Value of one packet of a simulated message; values are small integers, so that sums are exact.
const fn simulated_packet_value(rank: usize, launch: u32, packet: usize) -> u32 {
    rank as u32 + 3 * launch + 7 * packet as u32
}

fn expected_sum_of_simulated_packets(gpus: usize, launch: u32, packet: usize) -> u32 {
    (0..gpus).map(|rank| simulated_packet_value(rank, launch, packet)).sum()
}

/// Delays the thread of a simulated GPU in every seventh launch, at different launches for
/// different ranks, so that the threads drift apart.
fn delay_every_seventh_launch(rank: usize, launch: u32) {
    if (rank as u32 * 5 + launch).is_multiple_of(7) {
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
}

/// Runs `each(rank)` on one thread for each simulated GPU, and waits for all threads.
fn run_one_thread_per_simulated_gpu(gpus: usize, each: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        (0..gpus).for_each(|rank| {
            drop(scope.spawn({
                let each = &each;
                move || each(rank)
            }))
        });
    });
}

/// Simulates the kernel `all_reduce_one_shot` with threads: a value and its flag arrive in one
/// 64-bit store, and the halves of the buffer alternate.
fn simulate_one_shot_all_reduce(gpus: usize) {
    let memory =
        || (0..2 * gpus * PACKETS_PER_SIMULATED_MESSAGE).map(|_| AtomicU64::new(0)).collect();
    let staging: Vec<Vec<AtomicU64>> = (0..gpus).map(|_| memory()).collect();
    run_one_thread_per_simulated_gpu(gpus, |rank| {
        for flag in 1..=SIMULATED_LAUNCHES_PER_GPU {
            delay_every_seventh_launch(rank, flag);
            let at = |from: usize, packet| {
                ((flag as usize & 1) * gpus + from) * PACKETS_PER_SIMULATED_MESSAGE + packet
            };
            for peer in (1..gpus).map(|step| (rank + step) % gpus) {
                for packet in 0..PACKETS_PER_SIMULATED_MESSAGE {
                    let both = u64::from(simulated_packet_value(rank, flag, packet))
                        | u64::from(flag) << 32;
                    staging[peer][at(rank, packet)].store(both, Ordering::Relaxed);
                }
            }
            for packet in 0..PACKETS_PER_SIMULATED_MESSAGE {
                let received = |peer: usize| loop {
                    let both = staging[rank][at(peer, packet)].load(Ordering::Relaxed);
                    if both >> 32 == u64::from(flag) {
                        break both as u32;
                    }
                    std::thread::yield_now();
                };
                let own = simulated_packet_value(rank, flag, packet);
                let sum: u32 =
                    (0..gpus).map(|peer| if peer == rank { own } else { received(peer) }).sum();
                assert_eq!(
                    sum,
                    expected_sum_of_simulated_packets(gpus, flag, packet),
                    "rank {rank} of {gpus}"
                );
            }
        }
    });
}

/// Simulates the kernel `all_reduce_two_shot` with threads: a launch waits twice for its peers, and
/// overwrites its message right after the second wait.
fn simulate_two_shot_all_reduce(gpus: usize) {
    let words = |count: usize| (0..count).map(|_| AtomicU32::new(0)).collect::<Vec<_>>();
    let of_each = |count| (0..gpus).map(|_| words(count)).collect::<Vec<_>>();
    let (x, y, flags) = (
        of_each(PACKETS_PER_SIMULATED_MESSAGE),
        of_each(PACKETS_PER_SIMULATED_MESSAGE),
        of_each(2 * gpus),
    );
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
    run_one_thread_per_simulated_gpu(gpus, |rank| {
        let part = PACKETS_PER_SIMULATED_MESSAGE / gpus;
        for epoch in 1..=SIMULATED_LAUNCHES_PER_GPU {
            delay_every_seventh_launch(rank, epoch);
            (0..PACKETS_PER_SIMULATED_MESSAGE).for_each(|i| {
                x[rank][i].store(simulated_packet_value(rank, epoch, i), Ordering::Relaxed)
            });
            wait(rank, 0, epoch);
            for i in rank * part..(rank + 1) * part {
                let sum = x.iter().map(|x| x[i].load(Ordering::Relaxed)).sum();
                y.iter().for_each(|y| y[i].store(sum, Ordering::Relaxed));
            }
            wait(rank, 1, epoch);
            for (i, y) in y[rank].iter().enumerate() {
                let found = y.load(Ordering::Relaxed);
                assert_eq!(
                    found,
                    expected_sum_of_simulated_packets(gpus, epoch, i),
                    "rank {rank} of {gpus}"
                );
            }
        }
    });
}

#[test]
fn simulated_all_reduces_of_two_to_eight_drifting_threads_are_correct() {
    for gpus in [2, 3, 4, 8] {
        simulate_one_shot_all_reduce(gpus);
        simulate_two_shot_all_reduce(gpus);
    }
}
