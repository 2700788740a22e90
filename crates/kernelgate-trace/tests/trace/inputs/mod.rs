//! Tests of the trace files that kernelgate reads: formats, damage and sizes.

mod chrome_and_ncu;
mod ncu_report;
mod nsys;
mod nsys_tables;
mod odd_inputs;
mod parquet;
mod recording;
mod schema;
mod streamed;
