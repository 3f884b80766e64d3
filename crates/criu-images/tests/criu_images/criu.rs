// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads images of the real CRIU, and has CRIU restore images after `split_into_parent`. It needs root and
//! CRIU (`CRIU` and `CRIU_ALT` name two versions); elsewhere it prints why it does not run.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::common::contents;
use rewake_criu_images::write::{PagePlace, split_into_parent};
use rewake_criu_images::{ImageDir, PAGE, Task, TaskState};
use rewake_skip::need;

/// Time limit for the target to start and to end.
const LIMIT: Duration = Duration::from_secs(60);

/// A shell with a zombie child: a parent that never waits, with its own memory.
const TARGET: &str = "true & exec sleep 1000";

fn criu(program: &OsString, arguments: &[&str], images: &Path) -> bool {
    let log = images.join("criu.log");
    let mut command = Command::new(program);
    command.args(arguments).arg("--images-dir").arg(images).arg("--log-file").arg(&log);
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Returns the CRIU that a variable names and that works here, or the reason why not.
fn program(variable: &str, fallback: Option<&str>) -> Result<OsString, String> {
    let named = std::env::var_os(variable).or_else(|| fallback.map(OsString::from));
    let program = named.ok_or_else(|| format!("{variable} names no CRIU"))?;
    if !nix::unistd::geteuid().is_root() {
        return Err("CRIU needs root".to_owned());
    }
    let check = Command::new(&program).arg("check").stdout(Stdio::null()).stderr(Stdio::null()).status();
    match check {
        Ok(status) if status.success() => Ok(program),
        other => Err(format!("{} check: {other:?}", program.display())),
    }
}

/// The target, which is killed at the end of the test, restored or not.
struct Target(Child);

impl Target {
    fn start() -> Self {
        let mut command = Command::new("sh");
        // Without such a locale its heap would have one page.
        command.env("LC_ALL", "C.UTF-8");
        command.args(["-c", TARGET]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: setsid only, which is async-signal-safe: CRIU dumps whole sessions.
        unsafe { command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(Into::into)) };
        let target = Self(command.spawn().expect("a shell"));
        let name = || std::fs::read_to_string(format!("/proc/{}/comm", target.pid())).unwrap_or_default();
        until("the target sleeps", || name() == "sleep\n" && state(target.pid()) == Some('S'));
        until("its child is a zombie", || target.child().and_then(state) == Some('Z'));
        target
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn child(&self) -> Option<u32> {
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.pid())).ok()?;
        children.split_whitespace().next()?.parse().ok()
    }
}

/// Returns the state letter of /proc/PID/stat.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

impl Drop for Target {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.pid()).expect("a pid"));
        // It fails when the target has ended already, which is as good.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        reap();
    }
}

/// Waits for all children, including orphans that this process got as their subreaper: a pid must be free
/// before CRIU can restore it.
fn reap() {
    while nix::sys::wait::wait().is_ok() {}
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LIMIT, "{what}: not after {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn every_second_page(vaddr: u64) -> PagePlace {
    if (vaddr / PAGE).is_multiple_of(2) { PagePlace::LazyParent } else { PagePlace::Here }
}

fn check_tasks(tasks: &[Task], pid: u32) {
    assert_eq!((tasks[0].pid, tasks[0].state, &tasks[0].comm[..]), (pid, TaskState::Alive, &b"sleep"[..]));
    assert_eq!(tasks[0].threads, [pid]);
    assert_eq!((tasks[1].ppid, tasks[1].state), (pid, TaskState::Dead));
}

#[test]
fn a_real_image_is_read_and_restored_after_a_split() {
    dump_split_and_restore(&need!(program("CRIU", Some("criu"))));
}

#[test]
fn another_criu_s_image_is_read_and_restored_after_a_split() {
    dump_split_and_restore(&need!(program("CRIU_ALT", None)));
}

/// [`reap`] waits for every child of this process: concurrent tests would reap each other's children.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn dump_split_and_restore(program: &OsString) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let (dir, parent) = (folder.path().join("images"), folder.path().join("before"));
    std::fs::create_dir(&dir).unwrap();
    nix::sys::prctl::set_child_subreaper(true).unwrap();
    let target = Target::start();
    let pid = target.pid();
    let dumped = criu(program, &["dump", "--tree", &pid.to_string()], &dir);
    assert!(dumped, "{}", std::fs::read_to_string(dir.join("criu.log")).unwrap_or_default());
    reap();

    let image = ImageDir::open(&dir).unwrap();
    image.inventory().unwrap();
    check_tasks(&image.tasks().unwrap(), pid);
    let stats = image.pagemap(pid).unwrap().unwrap().stats();
    let whole: BTreeMap<_, _> = contents(&image.lazy_plan(pid).unwrap()).into_iter().collect();
    assert!(stats.lazy > 0 && stats.eager > 0 && stats.present == stats.total, "{stats:?}");
    assert_eq!(whole.len() as u64, stats.lazy);

    split_into_parent(&dir, pid, &parent, |vaddr, _| every_second_page(vaddr)).unwrap();
    let plan = image.lazy_plan(pid).unwrap();
    assert_eq!(plan.files.len(), 2);
    let split: BTreeMap<_, _> = contents(&plan).into_iter().collect();
    assert_eq!(split, whole);

    let restored = criu(program, &["restore", "--restore-detached"], &dir);
    assert!(restored, "{}", std::fs::read_to_string(dir.join("criu.log")).unwrap_or_default());
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let mm = image.mm(pid).unwrap();
    let heap = mm.vmas.iter().find(|vma| vma.kind() == "heap").expect("the target has a heap");
    let mut compared = 0;
    for (number, wanted) in whole.range(heap.start / PAGE..heap.end / PAGE) {
        let mut bytes = vec![0; wanted.len()];
        memory.read_exact_at(&mut bytes, number * PAGE).unwrap();
        assert!(bytes == *wanted, "page {number:#x} of the heap differs after the restore");
        compared += 1;
    }
    assert!(compared > 1, "{compared} pages of the heap were compared");
}
