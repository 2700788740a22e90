//! Finds reasons for missing records in the messages that a recorder wrote about its own work.

use super::super::super::finding::FindingEvidence;

const MAX_LISTED_RECORDER_MESSAGES: usize = 8;

/// Reason why records are missing, and advice, derived from a recorder's message.
pub(super) struct ReasonForMissingRecords {
    pub reason_text: String,
    pub advice: String,
}

/// Parts of recorder messages, with the reason for missing records that they show, and advice.
const REASONS_BY_MESSAGE_PART: &[(&[&str], &str, &str)] = &[
    (
        &["ERR_NVGPUCTRPERM", "INSUFFICIENT_PRIVILEGES", "privilege", "permission"],
        "the recorder was not allowed to",
        "allow it: as root, or with the driver's option NVreg_RestrictProfilingToAdminUsers=0",
    ),
    (
        &["MULTIPLE_SUBSCRIBERS", "nother profiler", "nother tool"],
        "another profiler was attached to the process",
        "record without the other profiler: one at a time",
    ),
    (
        &["HARDWARE_BUSY"],
        "another profiler, such as DCGM, held the device's counters",
        "stop it while you record",
    ),
    (
        &["OUT_OF_MEMORY", "out of memory"],
        "the recorder ran out of memory",
        "record a shorter time, or leave it more memory",
    ),
    (
        &["Not all CUDA events might", "CUPTI events might be missing"],
        "the recorder may have lost events of CUDA",
        "let the program run until it quits, or call cudaProfilerStop before it does; record again",
    ),
];

/// Further parts of recorder messages with reason and advice, used only if nothing was recorded,
/// because processes that do not use CUDA cause the same messages.
const REASONS_IF_NOTHING_RECORDED: &[(&[&str], &str, &str)] = &[
    (
        &["driver version is insufficient", "requires a newer driver", "INSUFFICIENT_DRIVER"],
        "the driver is older than the recorder needs",
        "update the driver, or record with a version of Nsight Systems of the driver's time",
    ),
    (
        &["CUPTI_ERROR", "initialize CUPTI", "CUPTI could not"],
        "CUPTI failed in the recorder",
        "record with the Nsight Systems that comes with the driver's version of CUDA, and without \
         another profiler; the evidence has its error",
    ),
    (
        &["No CUDA events collected", "CUDA profiling might have not been started correctly"],
        "the recorder saw no event of CUDA",
        "record the process that uses the GPU: start it under the recorder, with its children, and \
         let it run until it quits",
    ),
];

/// Returns the first reason for missing records that any of the messages shows.
pub(super) fn reason_for_missing_records(
    messages: &[String],
    any_recorded: bool,
) -> Option<ReasonForMissingRecords> {
    if let Some(reason) = messages.iter().find_map(|message| reason_if_driver_is_too_new(message)) {
        return Some(reason);
    }
    let given = |parts: &[&str]| {
        messages.iter().any(|message| parts.iter().any(|part| message.contains(part)))
    };
    let further = if any_recorded { &[][..] } else { REASONS_IF_NOTHING_RECORDED };
    let mut reasons = REASONS_BY_MESSAGE_PART.iter().chain(further);
    let (_, words, advice) = reasons.find(|(parts, ..)| given(parts))?;
    Some(ReasonForMissingRecords { reason_text: (*words).to_owned(), advice: (*advice).to_owned() })
}

/// Recognises messages such as "Installed CUDA driver version (13.3) is not supported by this build
/// of Nsight Systems."
fn reason_if_driver_is_too_new(message: &str) -> Option<ReasonForMissingRecords> {
    let (before, _) = message.split_once("is not supported by this build of Nsight Systems")?;
    let version = before.rsplit_once('(').and_then(|(_, rest)| rest.split_once(')'));
    let driver = version
        .map_or("the driver".to_owned(), |(version, _)| format!("the driver (CUDA {version})"));
    Some(ReasonForMissingRecords {
        reason_text: format!("{driver} is newer than this Nsight Systems"),
        advice: "update Nsight Systems to a version that supports the driver, and record again"
            .to_owned(),
    })
}

/// Converts recorder messages to evidence; messages about CUDA, CUPTI or all events come first.
pub(super) fn recorder_messages_as_evidence(messages: &[String]) -> Vec<FindingEvidence> {
    let mut texts: Vec<String> =
        messages.iter().map(|text| text.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    texts.sort_unstable();
    let mut evidence: Vec<FindingEvidence> = texts
        .chunk_by(|a, b| a == b)
        .map(|same| FindingEvidence {
            kernel_call_or_copy_name: same[0].clone(),
            covered_count: same.len(),
            ..FindingEvidence::default()
        })
        .collect();
    evidence.sort_by_key(|evidence| {
        let general = ["CUDA", "CUPTI", "Not all"]
            .iter()
            .any(|part| evidence.kernel_call_or_copy_name.contains(part));
        (!general, evidence.kernel_call_or_copy_name.clone())
    });
    evidence.truncate(MAX_LISTED_RECORDER_MESSAGES);
    evidence
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_too_new_driver_is_reported_before_its_consequences() {
        let lost = "Not all CUDA events might have been collected.".to_owned();
        let driver = "Installed CUDA driver version (13.3) is not supported by this build of \
                      Nsight Systems. CUDA trace will be collected using libraries for 12.9";
        let both = [lost.clone(), driver.to_owned()];
        let words =
            |messages: &[String]| reason_for_missing_records(messages, false).unwrap().reason_text;
        assert_eq!(words(&both), "the driver (CUDA 13.3) is newer than this Nsight Systems");
        assert_eq!(words(&[lost]), "the recorder may have lost events of CUDA");
        assert!(reason_for_missing_records(&["libfoo was not found".to_owned()], false).is_none());
        // A shell that was traced together with the program has no CUDA events, so this message
        // alone does not explain missing records.
        let failed = ["ActivityFlushAll returned 15: CUPTI_ERROR_NOT_INITIALIZED".to_owned()];
        assert_eq!(words(&failed), "CUPTI failed in the recorder");
        assert!(reason_for_missing_records(&failed, true).is_none());
        let shell = ["No CUDA events collected. Does the process use CUDA?".to_owned()];
        assert!(reason_for_missing_records(&shell, true).is_none());
        assert_eq!(words(&shell), "the recorder saw no event of CUDA");
    }
}
