// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks whether this machine has what Rewake needs, and advises what to do otherwise. `docs/diagnose.md`
//! describes checks and limits.
//!
//! * [`machine`], [`gpu_machine`]: read facts. [`program`]: gets facts from CRIU.
//! * [`kernel`], [`gpu`], [`criu`], [`plugin`]: make verdicts, from facts only.
//! * [`text`]: writes the report for users.

pub mod criu;
pub mod gpu;
pub mod gpu_machine;
pub mod kernel;
pub mod machine;
pub mod plugin;
pub mod program;
pub mod text;

use serde::Serialize;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckVerdict {
    /// Rewake has what it needs.
    Ok,
    /// A fact that users may want to know; nothing is missing.
    Info,
    /// Rewake works, but slower or with fewer features than possible.
    Warning,
    /// Rewake cannot work.
    Failed,
}

/// One check with its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was checked. Stable: scripts may look for it.
    pub name: &'static str,
    /// The result.
    pub verdict: CheckVerdict,
    /// What was found, and what follows from it.
    pub found: String,
    /// What to do about a warning or a failure.
    pub advice: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: CheckVerdict::Ok, found: found.into(), advice: None }
    }

    fn info(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: CheckVerdict::Info, found: found.into(), advice: None }
    }

    fn warning(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name, verdict: CheckVerdict::Warning, found: found.into(), advice: Some(advice.into()) }
    }

    fn failed(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name, verdict: CheckVerdict::Failed, found: found.into(), advice: Some(advice.into()) }
    }
}

/// All checks. As JSON it is the stable shape of `rewake doctor --json`.
#[derive(Debug, Serialize)]
pub struct DoctorReport {
    /// The worst verdict.
    pub verdict: CheckVerdict,
    /// Every check, the kernel's first.
    pub checks: Vec<Check>,
}

impl DoctorReport {
    fn new(checks: Vec<Check>) -> Self {
        let verdict = checks.iter().map(|check| check.verdict).max().unwrap_or(CheckVerdict::Ok);
        Self { verdict, checks }
    }
}

/// Runs all checks on this machine.
#[must_use]
pub fn examine() -> DoctorReport {
    let capabilities = machine::capabilities();
    let is_root = nix::unistd::geteuid().is_root();
    let mut checks = vec![
        kernel::version(&machine::kernel()),
        kernel::userfaultfd(&machine::userfaultfd(), capabilities),
        kernel::poison(machine::userfaultfd_feature(kernel::FEATURE_POISON)),
        kernel::io_uring(machine::io_uring()),
        kernel::cachestat(machine::cachestat()),
        kernel::open_files(machine::open_files()),
        kernel::pipe_size(machine::pipe_max_size(), capabilities),
    ];
    checks.extend(gpu::verdicts(gpu_machine::facts(capabilities).as_ref()));
    checks.extend(criu::verdicts(&program::examine(), is_root));
    checks.push(plugin::verdict(&machine::criu_plugins()));
    DoctorReport::new(checks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_the_worst_check_s_verdict() {
        let ok = Check::ok("a", "");
        let info = Check::info("b", "");
        let warning = Check::warning("c", "", "");
        let failed = Check::failed("d", "", "");
        let worst = |checks: &[&Check]| {
            DoctorReport::new(checks.iter().map(|check| (*check).clone()).collect()).verdict
        };
        assert_eq!(worst(&[&ok]), CheckVerdict::Ok);
        assert_eq!(worst(&[&info, &ok]), CheckVerdict::Info);
        assert_eq!(worst(&[&warning, &info]), CheckVerdict::Warning);
        assert_eq!(worst(&[&failed, &warning, &ok]), CheckVerdict::Failed);
    }

    #[test]
    fn json_has_the_documented_shape() {
        let report = DoctorReport::new(vec![
            Check::ok("kernel", "Linux 6.18"),
            Check::warning("criu", "old", "newer"),
        ]);
        let expected = r#"{"verdict":"warning","checks":[{"name":"kernel","verdict":"ok","found":"Linux 6.18","advice":null},{"name":"criu","verdict":"warning","found":"old","advice":"newer"}]}"#;
        assert_eq!(serde_json::to_string(&report).unwrap(), expected);
    }

    #[test]
    fn on_any_machine_each_check_has_a_text_and_bad_ones_have_advice() {
        for check in examine().checks {
            assert!(!check.found.is_empty(), "{check:?}");
            assert_eq!(check.advice.is_some(), check.verdict >= CheckVerdict::Warning, "{check:?}");
        }
    }
}
