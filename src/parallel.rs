//! Runs tasks on all CPU cores, with a parallel loop that is compiled only once.
//!
//! Rayon's parallel iterators would be compiled anew for every closure and task type; such copies
//! were half of the benchmark suite's machine code. The module `parallel` has one loop over task
//! numbers, which calls closures through a pointer.
//!
//! The module deliberately does not support short tasks well; each task of a parallel loop should
//! take at least some microseconds.

use std::sync::{Mutex, OnceLock, PoisonError};

use rayon::prelude::*;

/// Calls `f(number, task)` for each task in parallel, on all CPU cores, and waits for all tasks.
pub fn run_tasks_in_parallel<T: Send>(tasks: Vec<T>, f: &(dyn Fn(usize, T) + Sync)) {
    run_tasks_in_parallel_with_scratch(tasks, &|_, number, task| f(number, task));
}

/// Runs tasks in parallel with scratch vectors that are passed on from task to task: a task finds
/// the content that an earlier task left.
pub fn run_tasks_in_parallel_with_scratch<T: Send>(
    tasks: Vec<T>,
    f: &(dyn Fn(&mut Vec<f32>, usize, T) + Sync),
) {
    let tasks: Vec<Mutex<Option<T>>> =
        tasks.into_iter().map(|task| Mutex::new(Some(task))).collect();
    call_for_numbers_in_parallel(tasks.len(), &|scratch, number| {
        let task = tasks[number].lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            f(scratch, number, task);
        }
    });
}

/// Calls `f(number, chunk)` in parallel for chunks of `len` elements of a slice; the last chunk may
/// be shorter.
pub fn process_chunks_in_parallel<T: Send>(
    values: &mut [T],
    len: usize,
    f: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    run_tasks_in_parallel(values.chunks_mut(len).collect(), &|number, chunk: &mut [T]| {
        f(number, chunk)
    });
}

/// Computes `f(0)` to `f(count - 1)` in parallel and returns the results in this order.
pub fn map_numbers_in_parallel<T: Send + Sync>(
    count: usize,
    f: &(dyn Fn(usize) -> T + Sync),
) -> Vec<T> {
    let results: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    call_for_numbers_in_parallel(count, &|_, number| {
        results[number].get_or_init(|| f(number));
    });
    results.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// Number of CPU threads that run parallel tasks at the same time.
pub fn parallel_thread_count() -> usize {
    rayon::current_num_threads()
}

fn call_for_numbers_in_parallel(count: usize, f: &(dyn Fn(&mut Vec<f32>, usize) + Sync)) {
    (0..count).into_par_iter().for_each_init(Vec::new, f);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parallel_task_runs_once_and_gets_its_own_number() {
        let mut values = vec![0; 1000];
        process_chunks_in_parallel(&mut values, 7, &|number, chunk| {
            chunk.iter_mut().for_each(|x| *x += number)
        });
        assert!(values.iter().enumerate().all(|(i, &x)| x == i / 7));
        run_tasks_in_parallel(values.chunks_mut(10).collect(), &|number, chunk: &mut [usize]| {
            chunk[0] = number
        });
        run_tasks_in_parallel_with_scratch(
            values.chunks_mut(10).collect(),
            &|scratch, number, chunk| {
                scratch.resize(1, 0.0);
                assert_eq!(chunk[0], number);
                chunk[0] += 1;
            },
        );
        assert!(values.iter().step_by(10).enumerate().all(|(i, &x)| x == i + 1));
        assert_eq!(map_numbers_in_parallel(4, &|i| i * i), [0, 1, 4, 9]);
    }
}
