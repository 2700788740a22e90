//! Tests that an Nsight Systems export as parquet files reads like the SQLite export from which it
//! was converted.

use crate::fixture::NsysExport;
use crate::fixture::reason_in_message;
use kernelgate_trace::read::{self, WantedTraceParts};

#[cfg(not(feature = "parquet"))]
#[test]
fn a_build_without_parquet_names_the_feature() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("StringIds.parquet"), b"PAR1").unwrap();
    let message =
        read::open_trace_file(folder.path(), &WantedTraceParts::ALL).unwrap_err().to_string();
    insta::assert_snapshot!(reason_in_message(&message), @"it is a parquet export of Nsight Systems, which this build does not read: build with `--features parquet`, or export with: nsys export --type sqlite --output trace.sqlite REPORT.nsys-rep");
}

#[test]
fn a_folder_without_tables_is_refused() {
    let export = NsysExport::new();
    let message = read::open_trace_file(export.folder.path(), &WantedTraceParts::ALL)
        .unwrap_err()
        .to_string();
    insta::assert_snapshot!(reason_in_message(&message), @"it is a folder without the tables of a parquet export of Nsight Systems");
}

#[cfg(feature = "parquet")]
#[path = "../../../examples/parquetdir/tables.rs"]
mod tables;

#[cfg(feature = "parquet")]
mod with_parquet {
    use std::path::{Path, PathBuf};

    use kernelgate_trace::diagnose::{diagnose_export_while_reading, diagnose_trace_in_memory};
    use kernelgate_trace::stats::{self, StatsReport};
    use tempfile::TempDir;

    use super::*;

    /// Number of rows per parquet row group, small so that even small tables have several row
    /// groups.
    const ROWS_PER_ROW_GROUP: usize = 1000;

    /// Writes the tables of an SQLite export to a folder of parquet files.
    fn convert_sqlite_to_parquet(sqlite: &Path) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let layout = tables::ParquetFileSettings { group_rows: ROWS_PER_ROW_GROUP, plain: false };
        tables::write_tables_as_parquet_files(sqlite, folder.path(), &layout).unwrap();
        folder
    }

    fn assert_parquet_gives_same_trace(sqlite: &Path) {
        let folder = convert_sqlite_to_parquet(sqlite);
        let [ours, theirs] = [folder.path(), sqlite]
            .map(|path| read::open_trace_file(path, &WantedTraceParts::ALL).unwrap());
        for report in StatsReport::ALL_REPORTS {
            let [ours, theirs] = [&ours, &theirs].map(|it| stats::make_table(it, report).to_csv());
            assert_eq!(ours, theirs, "{} of {}", report.nsys_report_name(), sqlite.display());
        }
        assert_eq!(
            diagnose_trace_in_memory(&ours).diagnosis_to_json(),
            diagnose_trace_in_memory(&theirs).diagnosis_to_json()
        );
        let [ours, theirs] = [folder.path(), sqlite]
            .map(|path| diagnose_export_while_reading(path).unwrap().unwrap().diagnosis_to_json());
        assert_eq!(ours, theirs, "{}", sqlite.display());
    }

    fn export_of_steps(steps: i64) -> NsysExport {
        let mut export = NsysExport::new();
        for step in 0..steps {
            let start = 1_000 + step * 10_000;
            export.add_nvtx_range(
                start,
                (step != 1).then_some(start + 9_000),
                59,
                &format!("step {step}"),
            );
            export.add_launch(
                (start + 10, start + 20),
                (start + 50, start + 500),
                step + 1,
                "kernel",
            );
        }
        export
    }

    #[test]
    fn a_parquet_export_reads_as_its_sqlite_twin() {
        assert_parquet_gives_same_trace(&export_of_steps(2500).sqlite_path());
    }

    #[test]
    fn rows_out_of_order_are_sorted() {
        let mut export = export_of_steps(3);
        let name = export.add_text("cudaEventQuery_v3020");
        export.execute_sql(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40000)
             INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME
             SELECT 2000000 - i * 10, 2000001 - i * 10, {}, 0, {name} FROM n;",
            crate::fixture::global_id_of_process(7) | 7
        ));
        assert_parquet_gives_same_trace(&export.sqlite_path());
    }

    #[test]
    fn missing_columns_and_broken_files_are_reported() {
        let export = export_of_steps(5);
        export.execute_sql("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN correlationId;");
        export.execute_sql("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN globalTid;");
        let folder = convert_sqlite_to_parquet(&export.sqlite_path());
        std::fs::remove_file(folder.path().join("StringIds.parquet")).unwrap();
        std::fs::write(folder.path().join("NVTX_EVENTS.parquet"), b"PAR1 and no more").unwrap();
        let trace = read::open_trace_file(folder.path(), &WantedTraceParts::ALL).unwrap();
        assert_eq!((trace.kernels.on_gpu.operation_count(), trace.ranges.range_count()), (5, 0));
        let streamed =
            diagnose_export_while_reading(folder.path()).unwrap().unwrap().diagnosis_to_text();
        for missing in [
            "CUPTI_ACTIVITY_KIND_KERNEL.correlationId",
            "CUPTI_ACTIVITY_KIND_RUNTIME.globalTid",
            "StringIds",
        ] {
            let missing = missing.to_owned();
            assert!(
                trace.quality.missing_tables_or_fields.contains(&missing),
                "{:?}",
                trace.quality.missing_tables_or_fields
            );
            assert!(streamed.contains(&missing), "{streamed}");
        }
        assert!(
            trace.quality.unreadable_parts[0].starts_with("NVTX_EVENTS: "),
            "{:?}",
            trace.quality
        );
    }

    #[test]
    fn real_exports_read_as_their_sqlite_twins() {
        let Some(folder) = std::env::var_os("REAL_TRACES") else {
            eprintln!("skipped: REAL_TRACES does not name a folder with real traces");
            return;
        };
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let exports: Vec<PathBuf> =
            entries.map(|path| path.join("trace.sqlite")).filter(|path| path.is_file()).collect();
        assert!(!exports.is_empty());
        exports.iter().for_each(|export| assert_parquet_gives_same_trace(export));
    }
}
