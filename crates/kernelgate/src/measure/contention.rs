//! How much of the host's CPU time co-running work took while something was measured: other
//! processes, and other guests of a virtual machine.

/// CPU time since the system (or, for `own`, a process) started, in clock ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuTimeTicks {
    /// Time of all cores, idle or busy, in clock ticks.
    total: u64,
    /// Time in which cores worked, also for other virtual machines, in clock ticks.
    busy: u64,
    /// CPU time of the processes that are measured: this process, or its child processes.
    own: u64,
}

/// Processes whose CPU time does not count as contention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OwnProcesses {
    This,
    Children,
}

impl CpuTimeTicks {
    /// Current CPU times, if the system reports them (Linux).
    pub fn now() -> Option<CpuTimeTicks> {
        Self::read(OwnProcesses::This)
    }

    /// Current CPU times of the system and of this process' finished children. CPU times of child
    /// processes; the time of this process itself counts as other load.
    pub fn for_children() -> Option<CpuTimeTicks> {
        Self::read(OwnProcesses::Children)
    }

    #[expect(clippy::disallowed_methods, reason = "files of the system")]
    fn read(own: OwnProcesses) -> Option<CpuTimeTicks> {
        let read = |path| std::fs::read_to_string(path).ok();
        Self::parse(&read("/proc/stat")?, &read("/proc/self/stat")?, own)
    }

    fn parse(system: &str, process: &str, own: OwnProcesses) -> Option<CpuTimeTicks> {
        // user nice system idle iowait irq softirq steal; the later columns are part of user.
        let line = system.lines().next()?.strip_prefix("cpu ")?;
        let ticks = line
            .split_whitespace()
            .take(8)
            .map(|field| field.parse().ok())
            .collect::<Option<Vec<u64>>>()?;
        let [user, nice, kernel, idle, wait, irq, soft_irq, steal] = ticks[..] else { return None };
        let busy = user + nice + kernel + irq + soft_irq + steal;
        // Fields 14 and 15 are user and kernel time, fields 16 and 17 those of the children that
        // were waited for; field 2, the name, ends with the last parenthesis.
        let first = if own == OwnProcesses::This { 11 } else { 13 };
        let mut after_name = process.rsplit_once(')')?.1.split_whitespace().skip(first);
        let mut field = || after_name.next()?.parse::<u64>().ok();
        Some(Self { total: busy + idle + wait, busy, own: field()? + field()? })
    }

    /// Share of the CPU time since `earlier` that co-running processes took, 0 to 1; none while
    /// fewer than ten ticks have passed.
    pub fn taken_by_others_since(&self, earlier: &Self) -> Option<f64> {
        let total = self.total.checked_sub(earlier.total).filter(|&ticks| ticks >= 10)?;
        let others = self
            .busy
            .saturating_sub(earlier.busy)
            .saturating_sub(self.own.saturating_sub(earlier.own));
        Some((others as f64 / total as f64).min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_contention_is_what_is_busy_beyond_this_process() {
        let process =
            |user: u64| format!("7 (a) name) S 1 1 1 0 -1 0 0 0 0 0 {user} 10 3 4 20 0 1 0 5 0 0");
        let own = OwnProcesses::This;
        let earlier =
            CpuTimeTicks::parse("cpu  100 0 50 800 10 5 5 30 99 0\ncpu0 1", &process(100), own)
                .unwrap();
        assert_eq!(earlier, CpuTimeTicks { total: 1000, busy: 190, own: 110 });
        let later =
            CpuTimeTicks::parse("cpu  150 0 60 850 10 5 5 120 99 0\ncpu0 1", &process(150), own)
                .unwrap();
        // In this example 150 of 200 ticks were busy, 50 of them by this process.
        assert_eq!(later.taken_by_others_since(&earlier), Some(0.5));
        assert_eq!(earlier.taken_by_others_since(&earlier), None);
        let system = "cpu  100 0 50 800 10 5 5 30";
        let children = CpuTimeTicks::parse(system, &process(100), OwnProcesses::Children);
        assert_eq!(children.map(|time| time.own), Some(7));
        assert_eq!(CpuTimeTicks::parse("nonsense", &process(1), own), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn cpu_times_are_parsed_from_proc_files() {
        assert!(CpuTimeTicks::now().is_some() && CpuTimeTicks::for_children().is_some());
    }
}
