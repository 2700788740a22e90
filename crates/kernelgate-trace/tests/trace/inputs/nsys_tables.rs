//! Tests of Nsight Systems tables that few exports have: page faults, kinds of streams, payloads of
//! NCCL.

use crate::fixture::{NsysExport, finding_with_id, global_id_of_process};
use kernelgate_trace::diagnose::{
    FindingSeverity, IdleCauseKind, TraceDiagnosis, diagnose_trace_in_memory,
};

fn diagnose_export(export: &NsysExport) -> TraceDiagnosis {
    diagnose_trace_in_memory(&export.read_as_trace().unwrap())
}

/// Export with tables of page faults: one group of faults of the device, and two faults of the
/// host.
fn export_with_page_faults() -> NsysExport {
    let export = NsysExport::new();
    export.execute_sql(&format!(
        "CREATE TABLE CUDA_UM_GPU_PAGE_FAULT_EVENTS (start INTEGER, end INTEGER, globalPid INTEGER,
             deviceId INTEGER, address INTEGER, numberOfPageFaults INTEGER);
         CREATE TABLE CUDA_UM_CPU_PAGE_FAULT_EVENTS (start INTEGER, globalPid INTEGER,
             address INTEGER);
         INSERT INTO CUDA_UM_GPU_PAGE_FAULT_EVENTS VALUES (15000, 400000, {0}, 0, 4096, 100);
         INSERT INTO CUDA_UM_CPU_PAGE_FAULT_EVENTS VALUES (1, {0}, 4096), (2, {0}, 8192);",
        global_id_of_process(7)
    ));
    export
}

#[test]
fn finding_of_page_migrations_counts_page_faults() {
    let mut export = export_with_page_faults();
    export.add_launch((0, 5_000), (10_000, 1_010_000), 1, "k");
    export.add_memory_copy((20_000, 420_000), 0, (11, 4, 4));
    let found = diagnose_export(&export);
    let found = finding_with_id(&found, "page-migration").unwrap();
    let words = "1.0 MB of managed memory migrated in 1 pieces: 1 while kernels ran, 0 between \
                 them; 100 page faults of the device, 2 of the host";
    assert_eq!(found.finding_title, words);
    assert_eq!(found.max_recoverable_ns, Some(400_000));
    assert_eq!(
        found.evidence[0].kernel_call_or_copy_name,
        "groups of page faults of the device: 100 faults"
    );
}

#[test]
fn page_faults_without_migrations_are_found() {
    let mut export = export_with_page_faults();
    export.add_launch((0, 5_000), (10_000, 1_010_000), 1, "k");
    let found = diagnose_export(&export);
    let found = finding_with_id(&found, "page-migration").unwrap();
    assert_eq!(
        (found.max_recoverable_ns, found.severity),
        (Some(385_000), FindingSeverity::Severe)
    );
}

#[test]
fn the_legacy_default_stream_waits_for_what_another_stream_waits_for() {
    let mut export = NsysExport::new();
    export.execute_sql(&format!(
        "ALTER TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION ADD COLUMN streamId INTEGER;
         ALTER TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION ADD COLUMN correlationId INTEGER;
         CREATE TABLE TARGET_INFO_CUDA_STREAM (streamId INTEGER, processId INTEGER, flag INTEGER);
         INSERT INTO TARGET_INFO_CUDA_STREAM VALUES (7, 7, 3), (13, 7, 1), (14, 7, 2);
         INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (20000, 25000, {0}, 2, 13, 50);",
        global_id_of_process(7)
    ));
    export.add_launch((0, 5_000), (10_000, 100_000), 1, "a");
    export.add_api_call(7, (20_000, 25_000), 50, "cudaStreamWaitEvent_v3020");
    export.add_launch((30_000, 35_000), (600_000, 700_000), 2, "b");
    let causes = |export: &NsysExport| {
        let found = diagnose_export(export);
        found.gpu_use_by_process[0]
            .idle_gaps
            .idle_time_by_cause
            .iter()
            .map(|of| (of.kind, of.total_idle_ns))
            .collect::<Vec<_>>()
    };
    assert_eq!(causes(&export), [(IdleCauseKind::StreamWaitedForDefaultStream, 500_000)]);
    // Stream 14 is non-blocking, so the default stream does not wait for it.
    export.execute_sql("UPDATE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION SET streamId = 14");
    assert_eq!(causes(&export), [(IdleCauseKind::UnknownDelayAfterLaunch, 500_000)]);
}

#[test]
fn nccl_sizes_come_from_the_payloads_of_its_ranges() {
    let mut export = NsysExport::new();
    export.execute_sql("ALTER TABLE NVTX_EVENTS ADD COLUMN jsonText TEXT");
    let range = |start: i64, end: i64, name: &str, json: &str| {
        let thread = global_id_of_process(7) | 7;
        export.execute_sql(&format!(
            "INSERT INTO NVTX_EVENTS VALUES ({start}, {end}, 59, '{name}', NULL, {thread}, 1, '{json}')"
        ));
    };
    let id = r#""NCCL communicator ID": 77"#;
    range(0, 5, "ncclCommInitRank", &format!(r#"{{{id}, "No. of ranks": 8, "Rank": 0}}"#));
    range(10, 40, "ncclAllReduce", &format!(r#"{{{id}, "Message size [bytes]": 4096}}"#));
    range(100, 140, "ncclAllGather", &format!(r#"{{{id}, "Message size [bytes]": 512}}"#));
    export.add_launch((20, 30), (1_000, 2_000), 1, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)");
    export.add_launch((110, 130), (2_000, 2_500), 2, "ncclDevKernel_AllGather_RING_LL(x)");
    let diagnosis = diagnose_export(&export);
    let transfers: Vec<_> = diagnosis.gpu_use_by_process[0]
        .account
        .transfers
        .iter()
        .map(|of| {
            (of.transfer_label.as_str(), of.recorded_transfer_bytes, of.collective_bus_gb_per_s)
        })
        .collect();
    // The all-reduce moves 2 · 7/8 of 4096 bytes in 1 µs; the all-gather moves 7/8 of 8 · 512 bytes
    // in 0.5 µs.
    let expected =
        [("NCCL/RCCL all-reduce", 4096, Some(7.168)), ("NCCL/RCCL all-gather", 4096, Some(7.168))];
    assert_eq!(transfers, expected);
}
