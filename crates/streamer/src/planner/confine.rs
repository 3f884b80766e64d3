// SPDX-License-Identifier: MIT OR Apache-2.0
//! Confines the planner before it reads the first byte of an image (decision 16).
//!
//! * Limits ([`super`]): address space, CPU time, length of the plan; no core file.
//! * Landlock, where the kernel has it: it may read files below the image's directories, the files that
//!   symbolic links there lead to, and nothing else.
//! * seccomp: it may open files for reading, read, write to what it has open, and use memory.
//!
//! Both also forbid new privileges.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;

use nix::sys::resource::Resource;
use rewake_criu_images::ImageDir;
use rewake_process::sandbox::{self, Readable, SystemCalls, limit};

use super::{MEMORY, PLAN, TIME_LIMIT, failed};

/// System calls that a planner may make with any arguments, in addition to the calls of a confined process
/// that reads files.
///
/// It has no descriptor that they could harm: the socket, the memory files, and files of the image that are
/// open for reading.
const ALLOWED: &[libc::c_long] = &[libc::SYS_flock];

/// Confines this process, for good.
///
/// # Errors
/// The kernel refuses a limit or has no seccomp filters: then no image is parsed.
pub(super) fn confine(directories: &[&ImageDir]) -> io::Result<()> {
    limit(Resource::RLIMIT_AS, MEMORY)?;
    limit(Resource::RLIMIT_CPU, TIME_LIMIT.as_secs())?;
    limit(Resource::RLIMIT_FSIZE, PLAN)?;
    limit(Resource::RLIMIT_CORE, 0)?;
    // A kernel without Landlock does not enforce it. The streamer's check of the pages files remains.
    allow_images(directories)?;
    SystemCalls::for_reading(ALLOWED)?.confine()
}

/// Confines this process, for good, before it reads images. It may read files of these directories, start
/// threads, and write to what it has open.
///
/// # Errors
/// The kernel has no seccomp filters, or a directory cannot be listed.
pub fn confine_to_images(directories: &[&ImageDir]) -> io::Result<()> {
    allow_images(directories)?;
    SystemCalls::for_reading(&[])?.with_threads().confine()
}

fn allow_images(directories: &[&ImageDir]) -> io::Result<()> {
    let linked = directories.iter().map(|directory| directory.linked_files());
    let linked = linked.collect::<Result<Vec<_>, _>>().map_err(|error| failed("symbolic links", error))?;
    allow_reading(directories, &linked.into_iter().flatten().collect::<Vec<File>>()).map(drop)
}

/// Restricts this thread to the files below these directories, and to these other files. Returns whether the
/// kernel has Landlock.
fn allow_reading(directories: &[&ImageDir], linked: &[File]) -> io::Result<bool> {
    let below = directories.iter().map(|directory| Readable::Folder(directory.as_fd()));
    let files = linked.iter().map(|file| Readable::File(file.as_fd()));
    sandbox::allow_reading(below.chain(files))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::thread;

    use nix::sys::signal::Signal;
    use rewake_skip::skip;
    use rewake_testkit::confined::signal_of;

    use super::*;

    #[test]
    fn files_below_the_directories_can_be_read_and_no_others() {
        let [own, parent, store] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        for name in ["pages-1.img", "linked"] {
            [&own, &parent, &store].iter().for_each(|it| fs::write(it.path().join(name), "pages").unwrap());
        }
        symlink(store.path().join("linked"), own.path().join("pages-2.img")).unwrap();
        let read = |folder: &tempfile::TempDir, name| fs::read_to_string(folder.path().join(name));
        let open = [&own, &parent].map(|folder| ImageDir::open(folder.path()).unwrap());
        let linked: Vec<File> = open[0].linked_files().unwrap().collect();
        // Landlock restricts the thread that asks for it.
        let confined = || {
            let is_enforced = allow_reading(&open.each_ref(), &linked).unwrap();
            let linked = open[0].file("pages-2.img").map(|found| found.is_some());
            let pages = [&own, &parent, &store].map(|folder| read(folder, "pages-1.img"));
            (is_enforced, pages, linked, fs::write(own.path().join("new"), ""))
        };
        let (is_enforced, [of_own, of_parent, of_store], linked, written) =
            thread::scope(|scope| scope.spawn(confined).join()).unwrap();
        if !is_enforced {
            skip!("this kernel has no Landlock");
        }
        assert_eq!([of_own.unwrap(), of_parent.unwrap()], ["pages", "pages"]);
        assert!(linked.unwrap(), "the file that a link leads to");
        assert_eq!(of_store.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    /// The filter permits signals to this process only, so the child makes the filter.
    fn planner() -> io::Result<()> {
        SystemCalls::for_reading(ALLOWED)?.confine()
    }

    fn reader() -> io::Result<()> {
        confine_to_images(&[])
    }

    #[test]
    fn a_call_that_reads_no_image_ends_the_process() {
        let other = nix::unistd::getppid().as_raw();
        // SAFETY: no call has an effect on memory.
        let calls: [(&str, &dyn Fn() -> i64); 10] = unsafe {
            [
                ("socket", &|| libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0).into()),
                ("kill", &|| libc::kill(other, 0).into()),
                ("tgkill", &|| libc::syscall(libc::SYS_tgkill, other, other, 0)),
                ("fork", &|| libc::syscall(libc::SYS_clone, libc::SIGCHLD)),
                ("execve", &|| libc::syscall(libc::SYS_execve, c"/bin/true".as_ptr(), 0, 0)),
                ("connect", &|| libc::connect(0, std::ptr::null(), 0).into()),
                ("unlink", &|| libc::unlink(c"/nowhere".as_ptr()).into()),
                ("open for writing", &|| libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY).into()),
                ("F_SETFL", &|| libc::fcntl(0, libc::F_SETFL, 0).into()),
                ("ptrace", &|| libc::ptrace(libc::PTRACE_TRACEME)),
            ]
        };
        for (what, call) in calls {
            assert_eq!(signal_of(planner, call), Some(Signal::SIGSYS), "{what}");
            // It starts threads by the same call as processes, which are confined, too.
            let may = what == "fork";
            assert_eq!(signal_of(reader, call), (!may).then_some(Signal::SIGSYS), "{what}");
        }
        let itself = || {
            // SAFETY: signal 0 has no effect.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::getpid(), 0) }
        };
        assert_eq!(signal_of(planner, itself), None);
        assert_eq!(signal_of(planner, thread), Some(Signal::SIGSYS));
        assert_eq!(signal_of(reader, thread), None);
    }

    /// Starts a thread.
    fn thread() -> i64 {
        thread::spawn(|| 0).join().unwrap()
    }
}
