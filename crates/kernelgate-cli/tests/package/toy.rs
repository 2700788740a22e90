//! A toy bench executable that runs a shell script of a test, but looks like one of this harness.

use std::path::PathBuf;
use std::process::Command;

use kernelgate::protocol::{self, BenchResponseFile, ResponseToBenchAction};
use kernelgate::record::{
    BenchProcessRun, CaseRecordWithSamples, CommitAndChanges, RunEnvironment, file,
};

use super::{ProcessOutcome, TempPackage};

/// Name of the toy's bench.
pub const TOY_BENCH_NAME: &str = "toy";
pub const TOY_CASE_ID: &str = "toy/scale/n1/cpu/hot";

/// A test package with a folder `benches` that holds the toy bench, a shell script that looks like
/// a bench executable.
pub struct ToyPackage {
    pub package: TempPackage,
}

/// Script that writes the prepared response.
pub const SCRIPT_THAT_COPIES_RESPONSE: &str = "cp \"$ROOT/answer.json\" \"$RESPONSE\"";
/// Script that writes the prepared record of a trial.
pub const SCRIPT_THAT_WRITES_TRIAL_RECORD: &str = r#"mkdir -p "$(dirname "$RECORD")"
sed "s/SESSION/$SESSION/; s/COMMIT/$KERNELGATE_COMMIT/" "$ROOT/run.json" > "$RECORD"
cp "$ROOT/trial.json" "$RESPONSE""#;

impl ToyPackage {
    /// Makes a toy bench that answers every request with this response.
    pub fn new(answer: ResponseToBenchAction) -> Self {
        let toy = Self { package: TempPackage::new() };
        let root = toy.package.folder.path().display().to_string();
        let mark = protocol::BENCH_EXECUTABLE_MARK.trim_matches('\0');
        let source = format!(
            "#include <unistd.h>\nvolatile const char mark[] = \"\\0{mark}\";\nint main(void) {{ \
             return mark[0] + execl(\"/bin/sh\", \"sh\", \"{root}/behaviour.sh\", (char *)0); }}\n"
        );
        std::fs::write(toy.package.package_path("toy.c"), source).unwrap();
        std::fs::create_dir(toy.package.package_path("benches")).unwrap();
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let mut compiler = Command::new(compiler);
        compiler.arg("-o").arg(toy.path_of_toy_bench()).arg(toy.package.package_path("toy.c"));
        assert!(compiler.status().unwrap().success());
        toy.prepare_response(answer);
        toy.write_response_file(
            &toy.package.package_path("trial.json"),
            ResponseToBenchAction::TrialEnded,
        );
        toy.set_script_after_request(SCRIPT_THAT_COPIES_RESPONSE);
        toy
    }

    pub fn path_of_toy_bench(&self) -> PathBuf {
        self.package.package_path("benches").join(TOY_BENCH_NAME)
    }

    fn write_response_file(&self, path: &std::path::Path, answer: ResponseToBenchAction) {
        file::write_record_atomically(
            path,
            &BenchResponseFile { bench_name: TOY_BENCH_NAME.to_owned(), answer },
        )
        .unwrap();
    }

    /// Prepares a response.
    pub fn prepare_response(&self, answer: ResponseToBenchAction) {
        self.write_response_file(&self.package.package_path("answer.json"), answer);
    }

    /// Prepares a response that the library would not write, by replacing a text in it.
    pub fn replace_text_in_response(&self, from: &str, to: &str) {
        let path = self.package.package_path("answer.json");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{from}: {text}");
        std::fs::write(path, text.replace(from, to)).unwrap();
    }

    /// Sets the script that runs once the request is known: shell lines that may use ROOT, REQUEST,
    /// RESPONSE, RECORD and SESSION.
    pub fn set_script_after_request(&self, script: &str) {
        let root = self.package.folder.path().display();
        let answer = protocol::protocol_version_answer_line();
        let value = |name: &str| {
            format!("$(sed -n 's/.*\"{name}\": *\"\\([^\"]*\\)\".*/\\1/p' \"$REQUEST\")")
        };
        let script = format!(
            "[ \"$KERNELGATE_REQUEST\" = protocol ] && echo '{answer}' && exit 0\nROOT='{root}'\n\
             REQUEST=\"$KERNELGATE_REQUEST\"\nRESPONSE=\"{}\"\nRECORD=\"{}\"\nSESSION=\"{}\"\n\
             {script}\n",
            value("response"),
            value("record"),
            value("session")
        );
        std::fs::write(self.package.package_path("behaviour.sh"), script).unwrap();
    }

    /// Prepares the record that every trial of the toy bench writes, after `change` has edited it.
    pub fn prepare_trial_record(&self, change: impl FnOnce(&mut serde_json::Value)) {
        let provenance = CommitAndChanges { commit: Some("COMMIT".to_owned()), dirty: false };
        let run = BenchProcessRun {
            ended_normally: true,
            executable_hash: Some(file::file_content_hash_hex(&self.path_of_toy_bench()).unwrap()),
            cases: [(
                TOY_CASE_ID.to_owned(),
                CaseRecordWithSamples::example_with_sample_times(vec![2e5; 4]),
            )]
            .into(),
            ..BenchProcessRun::empty_run_starting_now(
                TOY_BENCH_NAME,
                "SESSION",
                RunEnvironment::environment_of_process_on_cpu(),
                provenance,
            )
        };
        let mut value: serde_json::Value =
            serde_json::from_str(&file::json_text_of_record(&run)).unwrap();
        change(&mut value);
        std::fs::write(self.package.package_path("run.json"), value.to_string()).unwrap();
    }

    pub fn run_kernelgate(&self, line: &str) -> ProcessOutcome {
        self.package.run_kernelgate(line)
    }

    /// Compares the toy with itself.
    pub fn compare_with_itself(&self) -> ProcessOutcome {
        self.run_kernelgate(
            "compare --base-dir benches --head-dir benches --time-identical --max-blocks 1 \
             --wait 5s",
        )
    }
}
