//! Runs work on all CPU cores, with code that is compiled once.
//!
//! Rayon's iterators are compiled anew, some twenty functions deep, for every closure and every
//! type of task that are given to them: they were half of this package's machine code. This module
//! has one loop over task numbers that calls closures through a pointer.
//!
//! Deliberately absent: short tasks. Each task should take at least some microseconds.

use std::sync::{Mutex, OnceLock, PoisonError};

use rayon::prelude::*;

/// Calls `f(number, task)` for each task, on all cores.
pub fn for_each_task<T: Send>(tasks: Vec<T>, f: &(dyn Fn(usize, T) + Sync)) {
    for_each_task_with_scratch(tasks, &|_, number, task| f(number, task));
}

/// Runs tasks in parallel with scratch memory that is passed from task to task: a task gets the
/// content that another left.
pub fn for_each_task_with_scratch<T: Send>(
    tasks: Vec<T>,
    f: &(dyn Fn(&mut Vec<f32>, usize, T) + Sync),
) {
    let tasks: Vec<Mutex<Option<T>>> =
        tasks.into_iter().map(|task| Mutex::new(Some(task))).collect();
    parallel_numbers(tasks.len(), &|scratch, number| {
        let task = tasks[number].lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            f(scratch, number, task);
        }
    });
}

/// Calls `f(number, chunk)` for chunks of `len` elements, at least one; the last may be shorter.
pub fn for_each_chunk<T: Send>(values: &mut [T], len: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
    for_each_task(values.chunks_mut(len).collect(), &|number, chunk: &mut [T]| f(number, chunk));
}

/// The results of `f` for `0..count`, in that order.
pub fn parallel_map<T: Send + Sync>(count: usize, f: &(dyn Fn(usize) -> T + Sync)) -> Vec<T> {
    let results: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    parallel_numbers(count, &|_, number| {
        results[number].get_or_init(|| f(number));
    });
    results.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// Number of threads that work at the same time.
pub fn worker_threads() -> usize {
    rayon::current_num_threads()
}

fn parallel_numbers(count: usize, f: &(dyn Fn(&mut Vec<f32>, usize) + Sync)) {
    (0..count).into_par_iter().for_each_init(Vec::new, f);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parallel_task_runs_once_and_gets_its_number() {
        let mut values = vec![0; 1000];
        for_each_chunk(&mut values, 7, &|number, chunk| {
            chunk.iter_mut().for_each(|x| *x += number)
        });
        assert!(values.iter().enumerate().all(|(i, &x)| x == i / 7));
        for_each_task(values.chunks_mut(10).collect(), &|number, chunk: &mut [usize]| {
            chunk[0] = number
        });
        for_each_task_with_scratch(values.chunks_mut(10).collect(), &|scratch, number, chunk| {
            scratch.resize(1, 0.0);
            assert_eq!(chunk[0], number);
            chunk[0] += 1;
        });
        assert!(values.iter().step_by(10).enumerate().all(|(i, &x)| x == i + 1));
        assert_eq!(parallel_map(4, &|i| i * i), [0, 1, 4, 9]);
    }
}
