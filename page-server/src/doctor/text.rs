// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the report for users.

use std::io::{self, Write};

use super::{CheckVerdict, DoctorReport};

/// Writes one line for each check, and its advice below it.
///
/// # Errors
/// A write to `out` fails.
pub fn write(report: &DoctorReport, out: &mut impl Write) -> io::Result<()> {
    for check in &report.checks {
        writeln!(out, "{:<8} {:<19} {}", word(check.verdict), check.name, check.found)?;
        if let Some(advice) = &check.advice {
            writeln!(out, "{:<8} {:<19} -> {advice}", "", "")?;
        }
    }
    let count = |verdict| report.checks.iter().filter(|check| check.verdict == verdict).count();
    let (failed, warnings) = (count(CheckVerdict::Failed), count(CheckVerdict::Warning));
    match (failed, warnings) {
        (0, 0) => writeln!(out, "Rewake can work here."),
        (0, _) => writeln!(out, "Rewake can work here; warnings: {warnings}."),
        _ => writeln!(out, "Rewake cannot work here: {failed} of {} checks failed.", report.checks.len()),
    }
}

fn word(verdict: CheckVerdict) -> &'static str {
    match verdict {
        CheckVerdict::Ok => "ok",
        CheckVerdict::Info => "info",
        CheckVerdict::Warning => "warning",
        CheckVerdict::Failed => "FAILED",
    }
}

#[cfg(test)]
mod tests {
    use super::super::Check;
    use super::*;

    fn shown(checks: Vec<Check>) -> String {
        let mut out = Vec::new();
        write(&DoctorReport::new(checks), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn each_check_has_a_line_and_each_advice_another() {
        let text = shown(vec![
            Check::ok("kernel", "Linux 6.18"),
            Check::info("gpu", "none"),
            Check::warning("cachestat", "missing", "newer kernel"),
            Check::failed("criu", "too old", "newer CRIU"),
        ]);
        let expected = "\
ok       kernel              Linux 6.18
info     gpu                 none
warning  cachestat           missing
                             -> newer kernel
FAILED   criu                too old
                             -> newer CRIU
Rewake cannot work here: 1 of 4 checks failed.
";
        assert_eq!(text, expected);
    }

    #[test]
    fn the_last_line_says_whether_rewake_can_work() {
        assert!(shown(vec![Check::ok("a", "")]).ends_with("Rewake can work here.\n"));
        let warned = shown(vec![Check::ok("a", ""), Check::warning("b", "", "")]);
        assert!(warned.ends_with("Rewake can work here; warnings: 1.\n"), "{warned}");
    }
}
