//! Writes a synthetic SQLite export of Nsight Systems, for benchmarks: each kernel has one launch,
//! 0.87 other calls and 4.78 ranges that nest five deep, on one device and two threads.
//!
//! `cargo run --release -p kernelgate-trace --example synthetic -- OUT [KERNELS] [unique]`
//!
//! With `unique`, every third range has its own text, as ranges of PyTorch's `emit_nvtx` do.

use std::process::ExitCode;

use rusqlite::{Connection, Statement, params};

/// Global id of process 100, as Nsight Systems encodes it; the ids of its threads are counted from
/// there.
const SYNTHETIC_PROCESS_GLOBAL_ID: i64 = 100 << 24;
const SYNTHETIC_HOST_THREAD_COUNT: i64 = 2;
/// Number of kernels of one training step of the synthetic trace.
const KERNELS_PER_TRAINING_STEP: i64 = 1000;
const DISTINCT_KERNEL_FUNCTIONS: i64 = 60;
const FIRST_RANGE_NAME_ID: i64 = 1000;
const DISTINCT_RANGE_NAMES: i64 = 400;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let kernels = arguments.get(1).map_or(Ok(1_000_000), |count| count.parse());
    let (Some(path), Ok(kernels)) = (arguments.first(), kernels) else {
        eprintln!("usage: synthetic OUT [KERNELS] [unique]");
        return ExitCode::from(2);
    };
    let unique = arguments.get(2).is_some_and(|word| word == "unique");
    match write_synthetic_sqlite_export(path, kernels, unique) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: failed to write {path}: {error}");
            ExitCode::from(2)
        }
    }
}

fn write_synthetic_sqlite_export(path: &str, kernels: i64, unique: bool) -> rusqlite::Result<()> {
    let mut connection = Connection::open(path)?;
    connection.pragma_update(None, "journal_mode", "OFF")?;
    connection.pragma_update(None, "synchronous", "OFF")?;
    connection.execute_batch(SQLITE_EXPORT_SCHEMA)?;
    let transaction = connection.transaction()?;
    {
        let mut text = transaction.prepare("INSERT INTO StringIds VALUES (?1, ?2)")?;
        for (id, name) in ["cudaLaunchKernel_v7000", "cudaEventRecord_v3020"].iter().enumerate() {
            text.execute(params![i64::try_from(id).unwrap_or(0) + 1, name])?;
        }
        for id in 0..DISTINCT_KERNEL_FUNCTIONS {
            text.execute(params![id + 100, format!("void synthetic::kernel<(int){id}>(float *)")])?;
        }
        for id in 0..DISTINCT_RANGE_NAMES {
            text.execute(params![FIRST_RANGE_NAME_ID + id, format!("range {id}")])?;
        }
        let mut tables = ExportInsertStatements {
            insert_kernel: transaction.prepare(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES \
                 (?1, ?2, 0, 1, ?3, ?4, ?5, ?6, ?6, 32, ?7, 1, 1, 128, 1, 1, 0, 0, 0, NULL)",
            )?,
            insert_host_call: transaction.prepare(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?1, ?2, 0, ?3, ?4, ?5, 0)",
            )?,
            insert_range: transaction
                .prepare("INSERT INTO NVTX_EVENTS VALUES (?1, ?2, 59, NULL, ?3, ?4, ?5, 0)")?,
            every_third_range_unique: unique,
            inserted_range_count: 0,
        };
        for first in (0..kernels).step_by(usize::try_from(KERNELS_PER_TRAINING_STEP).unwrap_or(1)) {
            tables.insert_step_of_nested_ranges_and_kernels(
                first,
                KERNELS_PER_TRAINING_STEP.min(kernels - first),
            )?;
        }
    }
    transaction.commit()
}

const SQLITE_EXPORT_SCHEMA: &str = "
    CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
    CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
        contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER,
        demangledName INTEGER, shortName INTEGER, registersPerThread INTEGER, gridX INTEGER,
        gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER,
        staticSharedMemory INTEGER, dynamicSharedMemory INTEGER, localMemoryPerThread INTEGER,
        graphNodeId INTEGER);
    CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER,
        globalTid INTEGER, correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
    CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, rangeId INTEGER,
        text TEXT, textId INTEGER, globalTid INTEGER, domainId INTEGER);";

struct ExportInsertStatements<'a> {
    insert_kernel: Statement<'a>,
    insert_host_call: Statement<'a>,
    insert_range: Statement<'a>,
    every_third_range_unique: bool,
    inserted_range_count: i64,
}

impl ExportInsertStatements<'_> {
    /// Inserts one step: a range around layers of ten kernels, in each layer modules of two
    /// kernels, each kernel in an operator with parts; 4.78 ranges for each kernel.
    fn insert_step_of_nested_ranges_and_kernels(
        &mut self,
        first: i64,
        kernels: i64,
    ) -> rusqlite::Result<()> {
        let thread = SYNTHETIC_PROCESS_GLOBAL_ID
            | (100 + first / KERNELS_PER_TRAINING_STEP % SYNTHETIC_HOST_THREAD_COUNT);
        let time = |kernel: i64| kernel * 10_000;
        self.insert_nvtx_range_row(time(first), time(first + kernels), 0, thread)?;
        for kernel in first..first + kernels {
            let start = time(kernel);
            if kernel % 10 == 0 {
                self.insert_nvtx_range_row(
                    start,
                    time(kernel + 10) - 1,
                    1 + kernel / 10 % 32,
                    thread,
                )?;
            }
            if kernel % 2 == 0 {
                self.insert_nvtx_range_row(
                    start + 1,
                    time(kernel + 2) - 2,
                    40 + kernel / 2 % 100,
                    thread,
                )?;
            }
            let name = 150 + kernel % 200;
            self.insert_nvtx_range_row(start + 10, start + 9000, name, thread)?;
            self.insert_nvtx_range_row(start + 20, start + 1000, name + 1, thread)?;
            self.insert_nvtx_range_row(start + 2000, start + 6000, name + 2, thread)?;
            self.insert_nvtx_range_row(start + 6500, start + 8000, name + 3, thread)?;
            if kernel % 100 < 18 {
                self.insert_nvtx_range_row(start + 8100, start + 8200, name + 4, thread)?;
            }
            self.insert_host_call.execute(params![
                start + 2500,
                start + 5500,
                thread,
                kernel + 1,
                1
            ])?;
            if kernel % 100 < 87 {
                self.insert_host_call.execute(params![start + 6600, start + 7000, thread, 0, 2])?;
            }
            let length = 4000 + kernel * 7919 % 3000;
            let (begin, function) = (start + 20_000, 100 + kernel % DISTINCT_KERNEL_FUNCTIONS);
            self.insert_kernel.execute(params![
                begin,
                begin + length,
                7,
                kernel + 1,
                SYNTHETIC_PROCESS_GLOBAL_ID,
                function,
                64 + kernel % 4
            ])?;
        }
        Ok(())
    }

    fn insert_nvtx_range_row(
        &mut self,
        start: i64,
        end: i64,
        name: i64,
        thread: i64,
    ) -> rusqlite::Result<()> {
        self.inserted_range_count += 1;
        let own = self.every_third_range_unique && self.inserted_range_count % 3 == 0;
        let text = own.then(|| format!("range {name}, op_id = {}", self.inserted_range_count));
        let id = (!own).then_some(FIRST_RANGE_NAME_ID + name);
        self.insert_range.execute(params![start, end, text, id, thread])?;
        Ok(())
    }
}
