//! The share of the host's CPU time that other processes, and other guests of a virtual machine,
//! used during a measurement.

/// CPU times of the system since it booted, and of a process (the field `measured_process_ticks`)
/// since it started, in clock ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostCpuTimeTicks {
    /// CPU time of all cores, idle and busy, in clock ticks.
    all_cores_ticks: u64,
    /// CPU time during which cores were busy, including time stolen by other virtual machines, in
    /// clock ticks.
    busy_cores_ticks: u64,
    /// CPU time of the measured processes, in clock ticks: this process, or its finished child
    /// processes.
    measured_process_ticks: u64,
}

/// The processes that are measured, so that their CPU time does not count as contention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessesNotCountedAsContention {
    ThisProcess,
    FinishedChildProcesses,
}

impl HostCpuTimeTicks {
    /// Reads the present CPU times of the system and of this process; `None` if the system does not
    /// report them (not Linux).
    pub fn read_for_this_process() -> Option<HostCpuTimeTicks> {
        Self::read_from_proc(ProcessesNotCountedAsContention::ThisProcess)
    }

    /// Reads the present CPU times of the system and of the finished child processes of this
    /// process. CPU time of this process itself then counts as contention.
    pub fn read_for_finished_children() -> Option<HostCpuTimeTicks> {
        Self::read_from_proc(ProcessesNotCountedAsContention::FinishedChildProcesses)
    }

    #[expect(clippy::disallowed_methods, reason = "files of the system")]
    fn read_from_proc(own: ProcessesNotCountedAsContention) -> Option<HostCpuTimeTicks> {
        let read = |path| std::fs::read_to_string(path).ok();
        Self::parse_proc_stat_files(&read("/proc/stat")?, &read("/proc/self/stat")?, own)
    }

    fn parse_proc_stat_files(
        system: &str,
        process: &str,
        own: ProcessesNotCountedAsContention,
    ) -> Option<HostCpuTimeTicks> {
        // Columns of the line `cpu` in `/proc/stat`: user nice system idle iowait irq softirq
        // steal; later columns are already part of user.
        let line = system.lines().next()?.strip_prefix("cpu ")?;
        let ticks = line
            .split_whitespace()
            .take(8)
            .map(|field| field.parse().ok())
            .collect::<Option<Vec<u64>>>()?;
        let [user, nice, kernel, idle, wait, irq, soft_irq, steal] = ticks[..] else { return None };
        let busy = user + nice + kernel + irq + soft_irq + steal;
        // Fields 14 and 15 of `/proc/self/stat` are user and kernel time, fields 16 and 17 those of
        // finished children; the name in field 2 ends with the last parenthesis.
        let first = if own == ProcessesNotCountedAsContention::ThisProcess { 11 } else { 13 };
        let mut after_name = process.rsplit_once(')')?.1.split_whitespace().skip(first);
        let mut field = || after_name.next()?.parse::<u64>().ok();
        Some(Self {
            all_cores_ticks: busy + idle + wait,
            busy_cores_ticks: busy,
            measured_process_ticks: field()? + field()?,
        })
    }

    /// Returns the share of all CPU time since `earlier` that other processes used, 0 to 1; `None`
    /// if fewer than ten ticks have passed.
    pub fn cpu_share_of_other_processes_since(&self, earlier: &Self) -> Option<f64> {
        let total = self
            .all_cores_ticks
            .checked_sub(earlier.all_cores_ticks)
            .filter(|&ticks| ticks >= 10)?;
        let others = self.busy_cores_ticks.saturating_sub(earlier.busy_cores_ticks).saturating_sub(
            self.measured_process_ticks.saturating_sub(earlier.measured_process_ticks),
        );
        Some((others as f64 / total as f64).min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_contention_is_busy_time_of_other_processes() {
        let process =
            |user: u64| format!("7 (a) name) S 1 1 1 0 -1 0 0 0 0 0 {user} 10 3 4 20 0 1 0 5 0 0");
        let own = ProcessesNotCountedAsContention::ThisProcess;
        let earlier = HostCpuTimeTicks::parse_proc_stat_files(
            "cpu  100 0 50 800 10 5 5 30 99 0\ncpu0 1",
            &process(100),
            own,
        )
        .unwrap();
        assert_eq!(
            earlier,
            HostCpuTimeTicks {
                all_cores_ticks: 1000,
                busy_cores_ticks: 190,
                measured_process_ticks: 110
            }
        );
        let later = HostCpuTimeTicks::parse_proc_stat_files(
            "cpu  150 0 60 850 10 5 5 120 99 0\ncpu0 1",
            &process(150),
            own,
        )
        .unwrap();
        // In this example 150 of 200 clock ticks were busy, 50 of them by this process.
        assert_eq!(later.cpu_share_of_other_processes_since(&earlier), Some(0.5));
        assert_eq!(earlier.cpu_share_of_other_processes_since(&earlier), None);
        let system = "cpu  100 0 50 800 10 5 5 30";
        let children = HostCpuTimeTicks::parse_proc_stat_files(
            system,
            &process(100),
            ProcessesNotCountedAsContention::FinishedChildProcesses,
        );
        assert_eq!(children.map(|time| time.measured_process_ticks), Some(7));
        assert_eq!(HostCpuTimeTicks::parse_proc_stat_files("nonsense", &process(1), own), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn cpu_times_are_parsed_from_proc_stat_files() {
        assert!(
            HostCpuTimeTicks::read_for_this_process().is_some()
                && HostCpuTimeTicks::read_for_finished_children().is_some()
        );
    }
}
