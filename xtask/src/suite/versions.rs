// SPDX-License-Identifier: MIT OR Apache-2.0
//! Versions that the tests were written for. Debian moves: a newer CRIU or kernel runs the same tests, and
//! the run says which version is new to them, so that a failure is not searched for elsewhere.

/// Releases of CRIU.
pub(crate) const CRIU: Known = Known { of: "CRIU", releases: &["4.1", "4.2"] };
/// Kernels of the virtual machines.
pub(crate) const KERNEL: Known = Known { of: "Linux in the virtual machines", releases: &["6.12", "7.2"] };

/// Releases of one program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known {
    of: &'static str,
    releases: &'static [&'static str],
}

impl Known {
    /// What to say of a version that the tests do not know, or `None` if they do.
    pub(crate) fn unknown(self, version: &str) -> Option<String> {
        let is_of = |release: &&str| {
            let rest = version.strip_prefix(*release);
            rest.is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_digit()))
        };
        (!self.releases.iter().any(is_of)).then(|| {
            let Self { of, releases } = self;
            format!(
                "{of} {version}: no test was written for this version ({} are known): a test that fails may \
                 have found what changed in it",
                releases.join(" and ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_that_the_tests_do_not_know_is_named() {
        for known in ["4.1.1", "4.2", "4.2.1-dev"] {
            assert_eq!(CRIU.unknown(known), None, "{known}");
        }
        for known in ["6.12.117+deb13-amd64", "7.2.13+deb14-amd64"] {
            assert_eq!(KERNEL.unknown(known), None, "{known}");
        }
        let said = CRIU.unknown("4.3").unwrap();
        assert!(
            said.starts_with("CRIU 4.3: no test was written for this version (4.1 and 4.2 are known)"),
            "{said}"
        );
        assert!(CRIU.unknown("4.20").is_some() && KERNEL.unknown("7.3.1+deb14-amd64").is_some());
    }
}
