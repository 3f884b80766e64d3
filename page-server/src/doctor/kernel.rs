// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes verdicts from facts about the kernel and its limits.

use std::io;

use super::Check;
use rewake_streamer::ledger::MAX_SPACES;

/// The oldest kernel with all that a streamer requires. Linux 5.11 has CLOSE_RANGE_CLOEXEC. Before 5.15 two
/// concurrent changes of one address space hid each other from UFFDIO_COPY (commit a759a909d42d), so that a
/// stale page was possible.
const OLDEST: [u32; 2] = [5, 15];
/// The features that CRIU requests of a userfaultfd (`include/uapi/linux/userfaultfd.h`).
pub const FEATURES: [(u64, &str); 4] =
    [(0x2, "fork events"), (0x4, "remap events"), (0x8, "remove events"), (0x40, "unmap events")];
/// `UFFD_FEATURE_POISON`, Linux 6.6.
pub const FEATURE_POISON: u64 = 1 << 14;
/// The size in bytes of the pipes that CRIU's page server requests.
const PIPE_BYTES: u64 = 4 << 20;

const CAP_SYS_PTRACE: u64 = 1 << 19;
const CAP_SYS_RESOURCE: u64 = 1 << 24;

/// What the kernel reports about itself.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The release, as `uname -r` prints it.
    pub release: String,
    /// The architecture that this program was built for.
    pub machine: &'static str,
    /// The size of a page in bytes.
    pub page_bytes: u64,
}

/// Parses the first two numbers of a release such as `6.18.44-cloud-amd64`.
#[must_use]
pub fn parse_release(release: &str) -> Option<[u32; 2]> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    Some([numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?])
}

/// Checks that the kernel is new enough and has pages of 4 KiB.
#[must_use]
pub fn version(kernel: &Kernel) -> Check {
    let Kernel { release, machine, page_bytes } = kernel;
    let found = format!("Linux {release} on {machine}, pages of {page_bytes} bytes");
    let [major, minor] = OLDEST;
    if *page_bytes != rewake_uffd::PAGE_SIZE {
        return Check::failed(
            "kernel",
            found,
            "use a kernel with pages of 4096 bytes: others are not supported",
        );
    }
    match parse_release(release) {
        Some(version) if version >= OLDEST => Check::ok("kernel", found),
        Some(_) => Check::failed(
            "kernel",
            found,
            format!("use Linux {major}.{minor} or newer; 6.6 or newer is best"),
        ),
        None => {
            Check::warning("kernel", found, format!("make sure that it is Linux {major}.{minor} or newer"))
        }
    }
}

/// Checks that userfaultfd works with all features that CRIU requests.
#[must_use]
pub fn userfaultfd(outcome: &io::Result<Vec<&'static str>>, capabilities: u64) -> Check {
    let name = "userfaultfd";
    let privileged = capabilities & CAP_SYS_PTRACE != 0;
    let missing = match outcome {
        Ok(missing) => missing,
        Err(error) => {
            let advice = match error.raw_os_error() {
                Some(libc::ENOSYS) => "use a kernel built with CONFIG_USERFAULTFD",
                Some(libc::EPERM) if privileged => {
                    "a seccomp filter or a security module forbids it: allow userfaultfd(2) in the \
                     container's profile"
                }
                // With vm.unprivileged_userfaultfd=1 the open would succeed, but without fork events.
                Some(libc::EPERM) => "run as root, or with CAP_SYS_PTRACE",
                _ => {
                    "make sure that this process may open descriptors, and that its sandbox allows \
                     userfaultfd(2)"
                }
            };
            return Check::failed(name, format!("cannot be used: {error}"), advice);
        }
    };
    if missing.is_empty() {
        return Check::ok(name, "usable, with fork, remap, remove and unmap events");
    }
    let found = format!("usable, without {}: `criu restore --lazy-pages` needs them", missing.join(", "));
    let advice = if privileged {
        "use Linux 4.11 or newer"
    } else {
        "run as root, or with CAP_SYS_PTRACE: vm.unprivileged_userfaultfd=1 does not allow fork events"
    };
    Check::failed(name, found, advice)
}

/// Checks whether lost pages can raise SIGBUS.
#[must_use]
pub fn poison(works: bool) -> Check {
    let name = "userfaultfd poison";
    if works {
        return Check::ok(name, "pages that are lost for good can raise SIGBUS");
    }
    let found = "not available: if an image becomes unreadable, a process that cannot be found and killed \
                 waits without end instead";
    Check::warning(name, found, "use Linux 6.6 or newer, with userfaultfd allowed")
}

/// Checks how files are read.
#[must_use]
pub fn io_uring(outcome: Result<Option<String>, String>) -> Check {
    let name = "io_uring";
    match outcome {
        Ok(None) => Check::ok(name, "usable"),
        Ok(Some(note)) => {
            let advice = "only reads are slower; to change that use Linux 6.1 or newer, sysctl -w \
                          kernel.io_uring_disabled=0, and allow io_uring in the container's seccomp profile";
            Check::warning(name, note, advice)
        }
        Err(error) => Check::failed(name, error, "free some memory, or raise this process's limits"),
    }
}

/// Checks whether cached files can be recognised, which decides how a file is read.
#[must_use]
pub fn cachestat(works: bool) -> Check {
    let name = "cachestat";
    if works {
        return Check::ok(name, "usable: images that are not in the page cache are read past it");
    }
    let found = "cannot be used: all images are read through the page cache";
    Check::warning(
        name,
        found,
        "use Linux 6.5 or newer, and allow cachestat(2) in the container's seccomp profile",
    )
}

/// Checks the limit of open files against the descriptors of restored processes.
#[must_use]
pub fn open_files(limit: u64) -> Check {
    // A userfaultfd and a pidfd for each address space that the daemon can serve, and some for files and
    // sockets.
    let wanted = 2 * MAX_SPACES as u64 + 1024;
    if limit >= wanted {
        return Check::ok("open files", amount(limit));
    }
    let found = format!("at most {limit}: each restored process takes two");
    let advice = format!("ulimit -n {wanted}, or LimitNOFILE={wanted} in the unit");
    Check::warning("open files", found, advice)
}

/// Checks the size of pipes for CRIU's page server.
#[must_use]
pub fn pipe_size(bytes: u64, capabilities: u64) -> Check {
    let name = "pipe size";
    if bytes >= PIPE_BYTES {
        return Check::ok(name, format!("fs.pipe-max-size is {bytes}"));
    }
    if capabilities & CAP_SYS_RESOURCE != 0 {
        return Check::ok(name, format!("fs.pipe-max-size is {bytes}, and CAP_SYS_RESOURCE lifts it"));
    }
    let found = format!(
        "fs.pipe-max-size is {bytes}: too little for `criu dump --lazy-pages` and `criu page-server \
         --lazy-pages` only"
    );
    Check::warning(name, found, format!("sysctl -w fs.pipe-max-size={PIPE_BYTES}"))
}

/// Formats a limit. The largest number is no limit.
fn amount(limit: u64) -> String {
    if limit == u64::MAX { "unlimited".into() } else { limit.to_string() }
}

#[cfg(test)]
mod tests {
    use super::super::CheckVerdict;
    use super::*;

    fn linux(release: &str) -> Check {
        version(&Kernel { release: release.into(), machine: "x86_64", page_bytes: 4096 })
    }

    #[test]
    fn releases_of_all_kinds_are_read() {
        assert_eq!(parse_release("6.18.44-cloud-amd64"), Some([6, 18]));
        assert_eq!(parse_release("5.10"), Some([5, 10]));
        assert_eq!(parse_release("6.1-rc3"), Some([6, 1]));
        assert_eq!(parse_release(""), None);
        assert_eq!(parse_release("mine"), None);
    }

    #[test]
    fn kernels_on_which_a_stale_page_is_possible_fail() {
        assert_eq!(linux("5.15.0").verdict, CheckVerdict::Ok);
        assert_eq!(linux("6.18.44").verdict, CheckVerdict::Ok);
        assert_eq!(linux("5.14.21").verdict, CheckVerdict::Failed);
        assert_eq!(linux("4.19.0").verdict, CheckVerdict::Failed);
        assert_eq!(linux("mine").verdict, CheckVerdict::Warning);
    }

    #[test]
    fn large_pages_fail() {
        let kernel = Kernel { release: "6.18.44".into(), machine: "aarch64", page_bytes: 65536 };
        assert_eq!(version(&kernel).verdict, CheckVerdict::Failed);
    }

    #[test]
    fn the_features_are_crius() {
        assert_eq!(FEATURES.iter().fold(0, |bits, (bit, _)| bits | bit), rewake_uffd::abi::FEATURES_CRIU);
    }

    #[test]
    fn a_userfaultfd_with_everything_passes() {
        assert_eq!(userfaultfd(&Ok(vec![]), CAP_SYS_PTRACE).verdict, CheckVerdict::Ok);
    }

    #[test]
    fn a_refused_userfaultfd_fails_and_the_advice_fits_the_reason() {
        let refused = |errno, capabilities| {
            let check = userfaultfd(&Err(io::Error::from_raw_os_error(errno)), capabilities);
            assert_eq!(check.verdict, CheckVerdict::Failed);
            check.advice.unwrap()
        };
        assert!(refused(libc::EPERM, 0).contains("CAP_SYS_PTRACE"));
        assert!(refused(libc::EPERM, CAP_SYS_PTRACE).contains("seccomp"));
        assert!(refused(libc::ENOSYS, CAP_SYS_PTRACE).contains("CONFIG_USERFAULTFD"));
    }

    #[test]
    fn every_event_that_criu_requests_is_needed() {
        let check = userfaultfd(&Ok(vec!["fork events"]), 0);
        assert_eq!(check.verdict, CheckVerdict::Failed);
        assert!(check.found.contains("without fork events"));
        assert!(check.advice.unwrap().contains("CAP_SYS_PTRACE"));
    }

    #[test]
    fn io_uring_is_optional_and_reading_is_not() {
        assert_eq!(io_uring(Ok(None)).verdict, CheckVerdict::Ok);
        let slow = io_uring(Ok(Some("reading with threads instead".into())));
        assert_eq!(
            (slow.verdict, slow.found.as_str()),
            (CheckVerdict::Warning, "reading with threads instead")
        );
        assert_eq!(io_uring(Err("no memory".into())).verdict, CheckVerdict::Failed);
    }

    #[test]
    fn small_pipes_matter_only_without_the_capability() {
        assert_eq!(pipe_size(PIPE_BYTES, 0).verdict, CheckVerdict::Ok);
        assert_eq!(pipe_size(1 << 20, CAP_SYS_RESOURCE).verdict, CheckVerdict::Ok);
        let check = pipe_size(1 << 20, 0);
        assert_eq!(check.verdict, CheckVerdict::Warning);
        assert_eq!(check.advice.unwrap(), "sysctl -w fs.pipe-max-size=4194304");
    }

    #[test]
    fn low_limits_are_warnings() {
        assert_eq!(open_files(1 << 20).verdict, CheckVerdict::Ok);
        assert_eq!(open_files(u64::MAX).found, "unlimited");
        assert_eq!(open_files(1024).verdict, CheckVerdict::Warning);
    }

    #[test]
    fn poison_and_cachestat_are_optional() {
        assert_eq!([poison(true).verdict, cachestat(true).verdict], [CheckVerdict::Ok; 2]);
        assert_eq!([poison(false).verdict, cachestat(false).verdict], [CheckVerdict::Warning; 2]);
    }
}
