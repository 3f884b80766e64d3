// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names the limit of this process that an error has reached, so that its user knows what to raise.

use std::io;

use nix::errno::Errno;
use nix::libc;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

/// Returns the error with its causes, and the limit that they are about, if this process has it.
#[must_use]
pub fn explained(error: &anyhow::Error) -> String {
    let limited = error.chain().find_map(errno).and_then(limit);
    let now =
        limited.and_then(|(resource, ..)| getrlimit(resource).ok()).filter(|(now, _)| *now != RLIM_INFINITY);
    match (limited, now) {
        (Some((_, what, option)), Some((now, _))) => {
            format!("{error:#}: the limit of this process is {now} {what} (`ulimit {option}`): raise it")
        }
        _ => format!("{error:#}"),
    }
}

fn errno(cause: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let of_kernel = || cause.downcast_ref::<Errno>().map(|errno| *errno as i32);
    cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error).or_else(of_kernel)
}

/// The limit whose end an error number says, what it counts, and the shell's option for it.
fn limit(errno: i32) -> Option<(Resource, &'static str, &'static str)> {
    match errno {
        libc::EMFILE | libc::ETOOMANYREFS => Some((Resource::RLIMIT_NOFILE, "open files", "-n")),
        libc::EFBIG => Some((Resource::RLIMIT_FSIZE, "bytes in a file", "-f")),
        libc::ENOMEM => Some((Resource::RLIMIT_AS, "bytes of address space", "-v")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn an_error_at_a_limit_names_it_and_the_way_out() {
        let (files, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        for error in [io::Error::from_raw_os_error(libc::EMFILE).into(), anyhow::Error::from(Errno::EMFILE)] {
            let text = explained(&Err::<(), _>(error).context("opening /a").unwrap_err());
            assert!(text.starts_with("opening /a: "), "{text}");
            let way_out =
                format!(": the limit of this process is {files} open files (`ulimit -n`): raise it");
            assert!(text.ends_with(&way_out), "{text}");
        }
        let text = explained(&anyhow::Error::from(Errno::EPERM).context("opening /a"));
        assert_eq!(text, "opening /a: EPERM: Operation not permitted");
    }
}
