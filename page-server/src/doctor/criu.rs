// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes verdicts about CRIU from its answers.

use std::fmt;

use super::Check;
use super::program::{Answer, CriuProgram};

/// The oldest CRIU that Rewake is tested with.
pub const OLDEST: Version = Version([4, 1, 1]);
/// How to get a newer CRIU.
const SETUP: &str = "`cargo xtask setup` in Rewake's source tree unpacks a newer one without a change of the \
                     system; or install CRIU 4.1.1 or newer and name it in the environment variable CRIU";

/// A release of CRIU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub [u32; 3]);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [major, minor, 0] => write!(f, "{major}.{minor}"),
            [major, minor, patch] => write!(f, "{major}.{minor}.{patch}"),
        }
    }
}

/// Parses the release in the output of `criu --version`: `Version: 4.2.1` at the start of a line.
#[must_use]
pub fn parse_version(text: &str) -> Option<Version> {
    let number = text.lines().find_map(|line| line.strip_prefix("Version:"))?.trim();
    let mut parts = number.split('.');
    let mut leading = |required: bool| -> Option<u32> {
        let part = match parts.next() {
            Some(part) => part,
            None => return (!required).then_some(0),
        };
        let end = part.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(part.len());
        part[..end].parse().ok()
    };
    Some(Version([leading(true)?, leading(true)?, leading(false)?]))
}

/// Checks the version, `criu check`, and incremental dumps; the last two only if the version is supported.
#[must_use]
pub fn verdicts(criu: &Result<CriuProgram, String>, is_root: bool) -> Vec<Check> {
    let criu = match criu {
        Ok(criu) => criu,
        Err(reason) => return vec![Check::failed("criu", reason, SETUP)],
    };
    match version(criu) {
        Ok(good) => vec![good, check(&criu.check, is_root), incremental(&criu.dirty_tracking, is_root)],
        Err(bad) => vec![bad],
    }
}

fn version(criu: &CriuProgram) -> Result<Check, Check> {
    let path = criu.path.display();
    let text =
        criu.version.as_ref().map_err(|error| Check::failed("criu", format!("{path}: {error}"), SETUP))?;
    let Some(version) = parse_version(&text.text) else {
        let line = text.text.lines().next().unwrap_or("nothing");
        return Err(Check::failed("criu", format!("{path} --version prints no version but: {line}"), SETUP));
    };
    if version >= OLDEST {
        return Ok(Check::ok("criu", format!("CRIU {version}, {path}")));
    }
    let mut found = format!("CRIU {version}, {path}: {OLDEST} or newer is needed");
    if version < Version([4, 0, 0]) {
        found.push_str(
            "; 3.17.1 of Debian bookworm, for one, fails on kernels like 6.18 with \"Unexpected rt vDSO area \
             bounds\"",
        );
    }
    Err(Check::failed("criu", found, SETUP))
}

fn check(answer: &Result<Answer, String>, is_root: bool) -> Check {
    let name = "criu check";
    match answer {
        Ok(answer) if answer.success => Check::ok(name, last_line(&answer.text)),
        _ if !is_root => {
            Check::warning(name, "not known: `criu check` needs root", "run `rewake doctor` as root")
        }
        Ok(answer) => {
            let advice = "the message names what the kernel or the container's profile lacks; `criu check \
                          --all` prints more";
            Check::failed(name, reason(&answer.text), advice)
        }
        Err(error) => Check::failed(name, error, "run `criu check -v4` by hand to see where it stops"),
    }
}

fn incremental(answer: &Result<Answer, String>, is_root: bool) -> Check {
    let name = "incremental dumps";
    match answer {
        Ok(answer) if answer.success => Check::ok(name, "the kernel tracks changed pages"),
        _ if !is_root => Check::info(name, "not known: `criu check` needs root"),
        _ => Check::info(
            name,
            "not possible here: the kernel does not track changed pages (CONFIG_MEM_SOFT_DIRTY)",
        ),
    }
}

/// Returns the first error that CRIU wrote, or else its last line.
fn reason(text: &str) -> &str {
    text.lines().map(str::trim).find(|line| line.starts_with("Error")).unwrap_or_else(|| last_line(text))
}

fn last_line(text: &str) -> &str {
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::super::CheckVerdict;
    use super::*;

    fn answer(success: bool, text: &str) -> Result<Answer, String> {
        Ok(Answer { success, text: text.into() })
    }

    fn criu(version: &str) -> CriuProgram {
        CriuProgram {
            path: "/usr/sbin/criu".into(),
            version: answer(true, &format!("Version: {version}\nGitID: x\n")),
            check: answer(true, "Looks good.\n"),
            dirty_tracking: answer(true, ""),
        }
    }

    fn outcome(criu: CriuProgram, is_root: bool) -> Vec<(&'static str, CheckVerdict)> {
        verdicts(&Ok(criu), is_root).iter().map(|check| (check.name, check.verdict)).collect()
    }

    #[test]
    fn versions_are_read_and_ordered() {
        let parse = |text| parse_version(text).unwrap();
        assert_eq!(parse("Version: 4.2.1\nGitID: v4.2.1\n"), Version([4, 2, 1]));
        assert_eq!(parse("Version: 4.2\n"), Version([4, 2, 0]));
        assert_eq!(parse("Warn: something\nVersion: 4.1.1-dev\n"), OLDEST);
        assert_eq!(parse("Version: 4.2-rc1\n"), Version([4, 2, 0]));
        assert!(parse("Version: 4.10\n") > parse("Version: 4.2.1\n"));
        assert!(parse("Version: 3.17.1\n") < OLDEST);
        assert_eq!(Version([4, 2, 0]).to_string(), "4.2");
        for other in
            ["criu: not found", "", "Version:", "Version: 4", "Version: x.y", "Version: 99999999999.0"]
        {
            assert_eq!(parse_version(other), None, "{other}");
        }
    }

    #[test]
    fn a_good_criu_passes_every_check() {
        let ok = CheckVerdict::Ok;
        let all = [("criu", ok), ("criu check", ok), ("incremental dumps", ok)];
        assert_eq!(outcome(criu("4.1.1"), true), all);
        assert_eq!(outcome(criu("5.0"), true), all);
    }

    #[test]
    fn bookworms_criu_fails_with_its_known_message_and_its_advice() {
        let checks = verdicts(&Ok(criu("3.17.1")), true);
        assert_eq!(checks.len(), 1);
        assert_eq!(checks[0].verdict, CheckVerdict::Failed);
        assert!(
            checks[0].found.starts_with("CRIU 3.17.1, /usr/sbin/criu: 4.1.1 or newer is needed"),
            "{checks:?}"
        );
        assert!(checks[0].found.contains("Unexpected rt vDSO area bounds"), "{checks:?}");
        assert!(checks[0].advice.as_ref().unwrap().contains("cargo xtask setup"), "{checks:?}");
    }

    #[test]
    fn a_criu_just_too_old_fails_without_the_older_release_s_message() {
        let checks = verdicts(&Ok(criu("4.1")), true);
        assert_eq!(checks[0].verdict, CheckVerdict::Failed);
        assert!(!checks[0].found.contains("vDSO"), "{checks:?}");
    }

    #[test]
    fn no_criu_or_one_without_a_version_fails() {
        let checks = verdicts(&Err("no `criu` on the path".into()), true);
        assert_eq!((checks.len(), checks[0].verdict), (1, CheckVerdict::Failed));
        let silent = CriuProgram { version: answer(true, "hello\n"), ..criu("4.2") };
        assert_eq!(outcome(silent, true), [("criu", CheckVerdict::Failed)]);
        let stuck = CriuProgram { version: Err("no answer within 10 s".into()), ..criu("4.2") };
        assert_eq!(outcome(stuck, true), [("criu", CheckVerdict::Failed)]);
    }

    #[test]
    fn a_failed_criu_check_shows_criu_s_first_error() {
        let text = "Warn  (a.c:1): x\nError (b.c:2): Kernel lacks it\nError (c.c:3): more\n";
        let failed = CriuProgram { check: answer(false, text), ..criu("4.2.1") };
        let checks = verdicts(&Ok(failed), true);
        assert_eq!(
            (checks[1].verdict, checks[1].found.as_str()),
            (CheckVerdict::Failed, "Error (b.c:2): Kernel lacks it")
        );
    }

    #[test]
    fn without_root_an_unknown_answer_is_no_failure() {
        let refused = answer(false, "Error (a.c:1): You need to be root\n");
        let criu = CriuProgram { check: refused.clone(), dirty_tracking: refused, ..criu("4.2.1") };
        let checks = [
            ("criu", CheckVerdict::Ok),
            ("criu check", CheckVerdict::Warning),
            ("incremental dumps", CheckVerdict::Info),
        ];
        assert_eq!(outcome(criu, false), checks);
    }

    #[test]
    fn a_kernel_without_dirty_tracking_is_information_only() {
        let criu = CriuProgram { dirty_tracking: answer(false, "Warn (a.c:1): OFF\n"), ..criu("4.2.1") };
        assert_eq!(outcome(criu, true)[2], ("incremental dumps", CheckVerdict::Info));
    }
}
