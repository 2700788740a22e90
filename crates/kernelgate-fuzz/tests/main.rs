//! Mutated inputs of every reader of files that others may have written: no panic, no hang, no
//! memory without end.
//!
//! Mutations are deterministic: input N of a reader is the same on every machine. 10^5 inputs are
//! read, in CI 10^6 (`MUTATED_INPUTS=1000000`), and `MUTATED_READER` names a single reader. An
//! input on which a reader fails is kept in `target/tmp`; the fix adds it to `corpus/`, whose files
//! are read unchanged and mutated.

#![allow(clippy::unwrap_used)]

mod mutate;
mod readers;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use mutate::{FuzzInputSyntax, FuzzSeedFile};
use readers::ALL_FUZZED_READERS;

/// Inputs of all readers together, where `MUTATED_INPUTS` sets no other number.
const TOTAL_FUZZ_INPUTS: u64 = 100_000;
/// Inputs of all readers together of which each reader's share is a part.
const TOTAL_OF_READER_SHARES: u64 = 1_000_000;
/// An input that takes longer is a hang, also on a loaded machine.
const MAX_INPUT_DURATION: Duration = Duration::from_secs(120);
/// Memory that all readers may take at once, KiB.
const MAX_MEMORY_KIB: u64 = 1 << 20;

/// A reader of files that is fuzzed, with its corpus and its share of the inputs.
pub struct FuzzedReader {
    /// Name of the folder with the reader's corpus of input files.
    pub corpus_folder_name: &'static str,
    /// Syntax of the reader's input files.
    pub syntax: FuzzInputSyntax,
    /// Number of inputs that this reader gets, out of a million inputs of all readers.
    pub inputs_per_million: u64,
    /// Reads an input of that number, and uses it if it is accepted; returns whether it was.
    pub read_and_use_input: fn(&Path, u64) -> bool,
}

/// Number and start of the input that each reader reads now.
static INPUTS_BEING_READ: Mutex<BTreeMap<&str, (u64, Instant)>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// Whether a reader is reading a fuzz input on this thread now.
    static THREAD_READS_INPUT: Cell<bool> = const { Cell::new(false) };
}

/// Ends the process, with a message, when an input takes too long.
fn end_process_at_slow_input() {
    static WATCHDOG_STARTED: Once = Once::new();
    WATCHDOG_STARTED.call_once(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_secs(5));
                for (name, (number, started)) in &*INPUTS_BEING_READ.lock().unwrap() {
                    if started.elapsed() > MAX_INPUT_DURATION {
                        eprintln!(
                            "{name}: input {number} takes longer than {MAX_INPUT_DURATION:?}"
                        );
                        std::process::exit(101);
                    }
                }
            }
        });
        let usual = std::panic::take_hook();
        // A reader's panic is reported with its input.
        std::panic::set_hook(Box::new(move |panic| {
            if !THREAD_READS_INPUT.get() {
                usual(panic);
            }
        }));
    });
}

/// Peak memory of this process, KiB; 0 if the system does not report it.
fn peak_memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0)
}

fn read_corpus_files(reader: &FuzzedReader) -> Vec<FuzzSeedFile> {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(reader.corpus_folder_name);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|_| panic!("no {}", folder.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seed = |path: &std::path::PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        FuzzSeedFile::new(name, reader.syntax, std::fs::read(path).unwrap())
    };
    paths.iter().map(seed).collect()
}

/// Result of reading a reader's corpus and mutations.
struct FuzzOutcome {
    input_count: u64,
    accepted_inputs: u64,
    /// Inputs that panicked, with the message.
    panicked_inputs: Vec<String>,
}

/// Reads the corpus of a reader and its mutations.
fn check_reader(reader: &FuzzedReader, inputs: u64, folder: &Path) -> FuzzOutcome {
    let seeds = read_corpus_files(reader);
    assert!(!seeds.is_empty(), "{} has no corpus", reader.corpus_folder_name);
    let mut outcome =
        FuzzOutcome { input_count: inputs, accepted_inputs: 0, panicked_inputs: Vec::new() };
    let mut read = |number: u64, name: &str, bytes: &[u8]| {
        INPUTS_BEING_READ
            .lock()
            .unwrap()
            .insert(reader.corpus_folder_name, (number, Instant::now()));
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        THREAD_READS_INPUT.set(true);
        let read = catch_unwind(AssertUnwindSafe(|| (reader.read_and_use_input)(&path, number)));
        THREAD_READS_INPUT.set(false);
        match read {
            Ok(accepted) => outcome.accepted_inputs += u64::from(accepted),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                let kept = format!("{}-{number}-{name}", reader.corpus_folder_name);
                let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(kept);
                std::fs::write(&kept, bytes).unwrap();
                let text = text.unwrap_or_default();
                outcome.panicked_inputs.push(format!("{}: {text}", kept.display()));
            }
        }
    };
    for seed in &seeds {
        read(0, &seed.corpus_file_name, seed.content_bytes());
    }
    for number in 1..=inputs {
        let seed = &seeds[number as usize % seeds.len()];
        read(number, &seed.corpus_file_name, &seed.mutated_bytes(number));
        if number % 4096 == 0 {
            let peak = peak_memory_kib();
            assert!(
                peak < MAX_MEMORY_KIB,
                "{}: {peak} KiB by input {number}",
                reader.corpus_folder_name
            );
        }
    }
    INPUTS_BEING_READ.lock().unwrap().remove(reader.corpus_folder_name);
    outcome
}

#[test]
fn no_reader_panics_on_mutated_files() {
    end_process_at_slow_input();
    let requested =
        std::env::var("MUTATED_INPUTS").map_or(TOTAL_FUZZ_INPUTS, |text| text.parse().unwrap());
    let only = std::env::var("MUTATED_READER").ok();
    let chosen =
        |reader: &&FuzzedReader| only.as_ref().is_none_or(|only| only == reader.corpus_folder_name);
    let queue = Mutex::new(ALL_FUZZED_READERS.iter().filter(chosen));
    let (total, failed) = (Mutex::new(0), Mutex::new(Vec::new()));
    // The mutated files lie in memory if the system has such a folder, because the test exercises
    // readers, not disks.
    let memory = Path::new("/dev/shm");
    let new_folder = || match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    };
    let work = || {
        while let Some(reader) = { queue.lock().unwrap().next() } {
            let folder = new_folder().unwrap();
            let (inputs, started) =
                (reader.inputs_per_million * requested / TOTAL_OF_READER_SHARES, Instant::now());
            let FuzzOutcome {
                input_count: inputs,
                accepted_inputs: accepted,
                panicked_inputs: panics,
            } = check_reader(reader, inputs, folder.path());
            let (name, count, s) =
                (reader.corpus_folder_name, panics.len(), started.elapsed().as_secs_f64());
            println!("{name}: {inputs} inputs, {accepted} accepted, {count} panics, {s:.1} s");
            assert!(accepted > 0, "{name}: nothing is accepted, not even its corpus");
            *total.lock().unwrap() += inputs;
            failed.lock().unwrap().extend(panics);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(2);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
    println!("{} inputs, peak {} KiB", total.lock().unwrap(), peak_memory_kib());
    let failed = failed.into_inner().unwrap();
    failed.iter().for_each(|line| println!("{line}"));
    assert_eq!(failed.len(), 0, "panics");
}
