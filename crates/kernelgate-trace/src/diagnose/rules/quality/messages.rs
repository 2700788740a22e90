//! Messages of a recorder about its own work.

use super::super::super::finding::FindingEvidence;

const MAX_SHOWN_MESSAGES: usize = 8;

/// Why records are missing, as the recorder says.
pub(super) struct MissingRecordsReason {
    pub words: String,
    pub advice: String,
}

/// Profiler messages by the text that they contain, with the reason behind the message, and what to
/// do.
const MESSAGE_REASONS: &[(&[&str], &str, &str)] = &[
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

/// Message reasons that count only if nothing was recorded, because processes without CUDA print
/// such messages too.
const NOTHING_RECORDED_REASONS: &[(&[&str], &str, &str)] = &[
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

/// The first reason that a message gives for missing records.
pub(super) fn reason_in_messages(
    messages: &[String],
    any_recorded: bool,
) -> Option<MissingRecordsReason> {
    if let Some(reason) = messages.iter().find_map(|message| driver_too_new_reason(message)) {
        return Some(reason);
    }
    let given = |parts: &[&str]| {
        messages.iter().any(|message| parts.iter().any(|part| message.contains(part)))
    };
    let further = if any_recorded { &[][..] } else { NOTHING_RECORDED_REASONS };
    let mut reasons = MESSAGE_REASONS.iter().chain(further);
    let (_, words, advice) = reasons.find(|(parts, ..)| given(parts))?;
    Some(MissingRecordsReason { words: (*words).to_owned(), advice: (*advice).to_owned() })
}

/// "Installed CUDA driver version (13.3) is not supported by this build of Nsight Systems."
fn driver_too_new_reason(message: &str) -> Option<MissingRecordsReason> {
    let (before, _) = message.split_once("is not supported by this build of Nsight Systems")?;
    let version = before.rsplit_once('(').and_then(|(_, rest)| rest.split_once(')'));
    let driver = version
        .map_or("the driver".to_owned(), |(version, _)| format!("the driver (CUDA {version})"));
    Some(MissingRecordsReason {
        words: format!("{driver} is newer than this Nsight Systems"),
        advice: "update Nsight Systems to a version that supports the driver, and record again"
            .to_owned(),
    })
}

/// Profiler messages as evidence; messages that concern every rule come first.
pub(super) fn messages_as_evidence(messages: &[String]) -> Vec<FindingEvidence> {
    let mut texts: Vec<String> =
        messages.iter().map(|text| text.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    texts.sort_unstable();
    let mut evidence: Vec<FindingEvidence> = texts
        .chunk_by(|a, b| a == b)
        .map(|same| FindingEvidence {
            what: same[0].clone(),
            count: same.len(),
            ..FindingEvidence::default()
        })
        .collect();
    evidence.sort_by_key(|evidence| {
        let general = ["CUDA", "CUPTI", "Not all"].iter().any(|part| evidence.what.contains(part));
        (!general, evidence.what.clone())
    });
    evidence.truncate(MAX_SHOWN_MESSAGES);
    evidence
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_driver_that_is_too_new_is_reported_before_its_consequences() {
        let lost = "Not all CUDA events might have been collected.".to_owned();
        let driver = "Installed CUDA driver version (13.3) is not supported by this build of \
                      Nsight Systems. CUDA trace will be collected using libraries for 12.9";
        let both = [lost.clone(), driver.to_owned()];
        let words = |messages: &[String]| reason_in_messages(messages, false).unwrap().words;
        assert_eq!(words(&both), "the driver (CUDA 13.3) is newer than this Nsight Systems");
        assert_eq!(words(&[lost]), "the recorder may have lost events of CUDA");
        assert!(reason_in_messages(&["libfoo was not found".to_owned()], false).is_none());
        // A shell that was traced, too, has no events of CUDA.
        let failed = ["ActivityFlushAll returned 15: CUPTI_ERROR_NOT_INITIALIZED".to_owned()];
        assert_eq!(words(&failed), "CUPTI failed in the recorder");
        assert!(reason_in_messages(&failed, true).is_none());
        let shell = ["No CUDA events collected. Does the process use CUDA?".to_owned()];
        assert!(reason_in_messages(&shell, true).is_none());
        assert_eq!(words(&shell), "the recorder saw no event of CUDA");
    }
}
