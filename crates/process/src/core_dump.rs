// SPDX-License-Identifier: MIT OR Apache-2.0
//! Core dumps.

use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::capabilities;

/// Has this process leave no core dump: it may have keys, and memory of programs. Programs that it starts
/// leave them as before.
///
/// A process that may not trace others limits core dumps to no byte instead, which programs that it starts
/// inherit: the kernel would hide its files in `/proc` from other processes of its user.
pub fn leave_no_core() {
    // A kernel that refuses one of these has no core dumps, or leaves them: neither is a reason to end.
    if capabilities::has(capabilities::SYS_PTRACE).unwrap_or(false) {
        let _ = prctl::set_dumpable(false);
    } else if let Ok((_, most)) = getrlimit(Resource::RLIMIT_CORE) {
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, most);
    }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "the tests fork")]
mod tests {
    use nix::sys::signal::Signal;
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, chdir, fork};
    use rewake_skip::skip;

    use super::*;

    /// Whether a process that SIGABRT ends leaves a core dump, after what it does `before`.
    fn leaves_core(before: fn()) -> bool {
        // The kernel may write it into the process's folder.
        let folder = tempfile::tempdir().unwrap();
        // SAFETY: the child makes system calls and allocates, which glibc permits after a fork.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let (_, most) = getrlimit(Resource::RLIMIT_CORE).unwrap();
                setrlimit(Resource::RLIMIT_CORE, most, most).unwrap();
                chdir(folder.path()).unwrap();
                before();
                std::process::abort()
            }
            ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
                WaitStatus::Signaled(_, Signal::SIGABRT, leaves_core) => leaves_core,
                other => panic!("{other:?}"),
            },
        }
    }

    #[test]
    fn a_process_leaves_no_core_dump() {
        if !leaves_core(|| ()) {
            skip!("no process leaves core dumps here");
        }
        assert!(!leaves_core(leave_no_core));
    }
}
