// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks the kernel's messages of a run: a test that passes while the kernel reports an oops has not passed.

/// Texts by which a kernel (or softgpu) reports an error.
const TROUBLE: [&str; 14] = [
    "BUG:",
    "WARNING:",
    "Oops",
    "KASAN",
    "KFENCE",
    "UBSAN",
    "refcount_t",
    "general protection fault",
    "Kernel panic",
    "leak",
    "blocked for more than",
    "detected stall",
    "possible recursive locking",
    "Out of memory",
];

/// Lines of a healthy boot that look like trouble.
const HARMLESS: [&str; 0] = [];

/// The first line that reports an error.
pub(super) fn trouble(console: &str) -> Option<&str> {
    let bad = |line: &&str| {
        TROUBLE.iter().any(|mark| line.contains(mark)) && !HARMLESS.iter().any(|fine| line.contains(fine))
    };
    console.lines().find(bad).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_among_other_lines_is_found() {
        let console = "[ 1.0] softgpu: 2 GPUs\r\n[ 2.0] WARNING: CPU: 0 PID: 9 at bo.c:1 f+0x1\r\n[ 2.1] \
            Call Trace:\r\n";
        assert_eq!(trouble(console), Some("[ 2.0] WARNING: CPU: 0 PID: 9 at bo.c:1 f+0x1"));
    }

    #[test]
    fn every_kind_of_trouble_counts() {
        for line in [
            "BUG: kernel NULL pointer dereference, address: 0000000000000008",
            "Oops: Oops: 0002 [#1] PREEMPT SMP NOPTI",
            "refcount_t: underflow; use-after-free.",
            "softgpu: leak: 1 buffer of process 7",
            "INFO: task gpu-app:212 blocked for more than 120 seconds.",
            "rcu: INFO: rcu_preempt self-detected stall on CPU",
            "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
        ] {
            assert_eq!(trouble(line), Some(line));
        }
    }

    #[test]
    fn an_ordinary_boot_is_fine() {
        let console = "softgpu: loading out-of-tree module taints kernel.\nvda: detected capacity \
            change\nreboot: Power down\n";
        assert_eq!(trouble(console), None);
    }
}
