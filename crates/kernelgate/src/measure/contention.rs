//! How much of the host's CPU time co-running work took while something was measured: other
//! processes, and other guests of a virtual machine.

/// CPU time since the system (or, for `own`, this process) started, in clock ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuTime {
    /// All cores, idle or not.
    total: u64,
    /// All cores at work, also for other guests.
    busy: u64,
    /// This process.
    own: u64,
}

impl CpuTime {
    /// Now, where the system tells (Linux).
    pub fn now() -> Option<Self> {
        let read = |path| std::fs::read_to_string(path).ok();
        Self::parse(&read("/proc/stat")?, &read("/proc/self/stat")?)
    }

    fn parse(system: &str, process: &str) -> Option<Self> {
        // user nice system idle iowait irq softirq steal; what follows is part of user.
        let line = system.lines().next()?.strip_prefix("cpu ")?;
        let ticks = line
            .split_whitespace()
            .take(8)
            .map(|field| field.parse().ok())
            .collect::<Option<Vec<u64>>>()?;
        let [user, nice, kernel, idle, wait, irq, soft_irq, steal] = ticks[..] else { return None };
        let busy = user + nice + kernel + irq + soft_irq + steal;
        // Fields 14 and 15, user and kernel time; field 2, the name, ends with the last
        // parenthesis.
        let mut after_name = process.rsplit_once(')')?.1.split_whitespace().skip(11);
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
    fn others_are_what_is_busy_beyond_this_process() {
        let process =
            |user: u64| format!("7 (a) name) S 1 1 1 0 -1 0 0 0 0 0 {user} 10 0 0 20 0 1 0 5 0 0");
        let earlier =
            CpuTime::parse("cpu  100 0 50 800 10 5 5 30 99 0\ncpu0 1", &process(100)).unwrap();
        assert_eq!(earlier, CpuTime { total: 1000, busy: 190, own: 110 });
        let later =
            CpuTime::parse("cpu  150 0 60 850 10 5 5 120 99 0\ncpu0 1", &process(150)).unwrap();
        // 150 of 200 busy, 50 of them ours.
        assert_eq!(later.taken_by_others_since(&earlier), Some(0.5));
        assert_eq!(earlier.taken_by_others_since(&earlier), None);
        assert_eq!(CpuTime::parse("nonsense", &process(1)), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_system_tells() {
        assert!(CpuTime::now().is_some());
    }
}
