// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sealed images: `rewake seal`, `rewake verify`, and what a dump leaves when it fails or is killed.
//!
//! `REWAKE_DUMP_KILLS` is the number of killed dumps, `REWAKE_SEED` repeats the moments of another run.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rewake_tests::daemon::{restore, timeline};
use rewake_tests::process::{adopt_orphans, soon, wait_child, write_program};
use rewake_tests::random::{count, moment, seed};
use rewake_tests::scene::ACT;
use rewake_tests::server::rewake;
use rewake_tests::{Criu, Random, Scene, need};
use tempfile::TempDir;

/// Dumps that are killed in the suite.
const KILLS: u32 = 6;

/// Of this many killed dumps, at least [`LEAST`] have replaced the image before, and at least as many have
/// not: the moments of their deaths are even over a dump, and CRIU finishes every second one.
const ENOUGH: u32 = 50;
const LEAST: u32 = 5;

/// A directory for images, `2` the one that dumps go to, and a program to dump.
struct Site {
    dir: TempDir,
    criu: Criu,
    target: Child,
}

impl Site {
    fn new(criu: &Criu) -> Self {
        adopt_orphans().unwrap();
        let dir = tempfile::Builder::new().prefix("rewake-seal-").tempdir().unwrap();
        fs::create_dir(dir.path().join("2")).unwrap();
        Self { dir, criu: criu.clone(), target: target() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn images(&self) -> PathBuf {
        self.path("2")
    }

    /// `rewake dump` of the target into `2`, not yet started.
    fn dump(&self) -> Command {
        self.dump_into("2")
    }

    fn dump_into(&self, name: &str) -> Command {
        let mut command = Command::new(rewake().unwrap());
        command.args(["dump", "-t", &self.target.id().to_string(), "-D"]).arg(self.path(name));
        command.env("CRIU", &self.criu).stdin(Stdio::null());
        command
    }

    /// Dumps with these options of CRIU, and starts another target.
    fn dumped(&mut self, options: &[&str]) -> Output {
        let output = self.dump().arg("--").args(options).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        self.replace_target();
        output
    }

    fn replace_target(&mut self) {
        let _ = self.target.kill();
        self.target.wait().unwrap();
        self.target = target();
    }

    fn target_runs(&mut self) -> bool {
        self.target.try_wait().unwrap().is_none()
    }

    /// What is next to the images directory.
    fn others(&self) -> Vec<String> {
        let mut names = names(self.dir.path());
        names.retain(|name| name != "2");
        names
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.target.kill();
        let _ = self.target.wait();
    }
}

/// A program in a session of its own, as CRIU wants it.
fn target() -> Child {
    let mut command = Command::new("setsid");
    command.args(["sleep", "1000"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let target = command.spawn().unwrap();
    let session = || nix::unistd::getsid(Some(Pid::from_raw(target.id().cast_signed())));
    let runs =
        || fs::read_to_string(format!("/proc/{}/comm", target.id())).is_ok_and(|name| name == "sleep\n");
    assert!(soon(|| runs() && session().is_ok_and(|session| session.as_raw() == target.id().cast_signed())));
    target
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs `rewake seal` or `verify`: whether it succeeded, and its output.
fn run(act: &str, images: &Path) -> (bool, String) {
    let output = Command::new(rewake().unwrap()).arg(act).arg(images).output().unwrap();
    (output.status.success(), said(&output))
}

fn verified(images: &Path) {
    let (succeeded, said) = run("verify", images);
    assert!(succeeded && said.contains("as sealed"), "{said}");
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
}

/// Identifies the dump in a directory.
fn inventory(images: &Path) -> Vec<u8> {
    fs::read(images.join("inventory.img")).unwrap()
}

#[test]
fn an_image_of_criu_alone_is_sealed_on_request() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::dumped(&criu, "plain", 4).unwrap();
        let images = scene.images();
        let (succeeded, said) = run("verify", &images);
        assert!(!succeeded && said.contains("not sealed") && said.contains("`rewake seal`"), "{said}");
        let (succeeded, said) = run("seal", &images);
        assert!(succeeded && said.starts_with("sealed "), "{said}");
        verified(&images);
        let (succeeded, said) = run("seal", &images);
        assert!(succeeded && said.contains(": sealed already: ") && said.lines().count() == 1, "{said}");
        fs::OpenOptions::new().write(true).open(images.join("pages-1.img")).unwrap().set_len(5000).unwrap();
        let (succeeded, said) = run("seal", &images);
        assert!(!succeeded && said.contains("pages-1.img: truncated: 5000"), "{said}");
    }
}

#[test]
fn an_image_is_verified_by_a_confined_process() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    assert!(run("seal", &scene.images()).0);
    // It waits for room for its first line.
    let (reader, writer) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let full = nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_GETPIPE_SZ).unwrap();
    nix::unistd::write(&writer, &vec![b'\n'; full.cast_unsigned() as usize]).unwrap();
    let mut command = Command::new(rewake().unwrap());
    let mut verify = command.arg("verify").arg(scene.images()).stdout(writer).spawn().unwrap();
    drop(command);
    let is_confined = || {
        let status = fs::read_to_string(format!("/proc/{}/status", verify.id())).unwrap();
        status.contains("\nSeccomp:\t2\n") && status.contains("\nNoNewPrivs:\t1\n")
    };
    assert!(soon(is_confined));
    let text = std::io::read_to_string(File::from(reader)).unwrap();
    assert!(text.contains("as sealed") && verify.wait().unwrap().success(), "{text}");
}

#[test]
fn one_wrong_byte_in_any_file_is_named() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    let images = scene.images();
    assert!(run("seal", &images).0);
    let files: Vec<String> = names(&images).into_iter().filter(|name| name.ends_with(".img")).collect();
    assert!(files.len() > 8, "{files:?}");
    for name in files.iter().map(String::as_str).chain(["rewake-manifest"]) {
        let path = images.join(name);
        let middle = fs::metadata(&path).unwrap().len() / 2;
        flip(&path, middle);
        let (succeeded, said) = run("verify", &images);
        let line = format!("{}/{name}: ", images.display());
        assert!(!succeeded && said.contains(&line), "{name}: {said}");
        if name.starts_with("pages-") {
            assert!(said.contains(&format!("(process {}, address 0x", scene.pid())), "{said}");
        }
        flip(&path, middle);
    }
    let pages = OpenOptions::new().write(true).open(images.join("pages-1.img")).unwrap();
    pages.set_len(5000).unwrap();
    fs::write(images.join("pagemap-9.img"), "").unwrap();
    fs::remove_file(images.join("pstree.img")).unwrap();
    let (succeeded, said) = run("verify", &images);
    assert!(!succeeded, "{said}");
    for line in ["pages-1.img: truncated: 5000", "pagemap-9.img: not sealed", "pstree.img: missing"] {
        assert!(said.contains(line), "{said}");
    }
}

#[test]
fn a_dump_is_sealed_replaces_an_image_and_is_restored() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut site = Site::new(&criu);
        let output = site.dumped(&[]);
        let images = site.images();
        verified(&images);
        let said = run("verify", &images).1;
        let (_, id) = said.rsplit_once("; image ").unwrap();
        let shown = String::from_utf8(output.stdout).unwrap();
        let (begin, end) = (format!("{}: process ", images.display()), format!("; image {id}"));
        assert!(shown.starts_with(&begin) && shown.ends_with(&end) && shown.lines().count() == 1, "{shown}");
        fs::write(images.join("notes.txt"), "of the user").unwrap();
        let (first, inode) = (inventory(&images), fs::metadata(&images).unwrap().ino());
        let _ = fs::remove_file(images.join("seccomp.img"));
        fs::write(images.join("core-99999.img"), "of the old image only").unwrap();
        let pid = site.target.id();
        site.dumped(&["-v4"]);
        verified(&images);
        assert!(first != inventory(&images) && inode != fs::metadata(&images).unwrap().ino());
        assert_eq!(fs::read(images.join("notes.txt")).unwrap(), b"of the user");
        assert!(!images.join("core-99999.img").exists() && images.join("dump.log").exists());
        assert_eq!(site.others(), [""; 0]);
        let mut command = restore(&criu, &images).unwrap();
        timeline(&command.args(["--", "-d"]).output().unwrap()).unwrap();
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    }
}

#[test]
fn a_tree_that_is_left_running_is_sealed_too() {
    let criu = need!(Criu::main());
    let mut site = Site::new(&criu);
    for _ in 0..2 {
        let output = site.dump().args(["--", "-R"]).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        verified(&site.images());
        assert!(site.target_runs());
    }
    assert_eq!(site.others(), [""; 0]);
}

#[test]
fn a_dump_that_fails_at_its_end_leaves_image_and_tree() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut site = Site::new(&criu);
        site.dumped(&[]);
        let (images, script) = (site.images(), site.path("script"));
        let before = inventory(&images);
        let text = "#!/bin/sh\ntest \"$CRTOOLS_SCRIPT_ACTION\" != post-dump";
        write_program(&script, text).unwrap();
        let output = site.dump().args(["--", "--action-script"]).arg(&script).output().unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains("at post-dump") && said.contains(&format!("{}/dump.log", images.display())),
            "{said}"
        );
        verified(&images);
        assert!(site.target_runs() && before == inventory(&images));
        assert!(images.join("dump.log").exists());
        assert_eq!(site.others(), ["script"]);
        // The same script, now content, runs before the image is replaced.
        // It finds the new image where CRIU says, and in its working directory.
        let text = format!(
            "#!/bin/sh\ntest $CRTOOLS_SCRIPT_ACTION = post-dump || exit 0\n\
             cat $CRTOOLS_IMAGE_DIR/inventory.img > {0}/new && cmp inventory.img {0}/new\n",
            site.dir.path().display()
        );
        write_program(&script, &text).unwrap();
        site.dumped(&["--action-script", script.to_str().unwrap()]);
        let after = inventory(&images);
        assert!(before != after && fs::read(site.path("new")).unwrap() == after);
    }
}

#[test]
fn a_dump_that_fails_after_the_exchange_loses_no_image() {
    let criu = need!(Criu::main());
    let mut site = Site::new(&criu);
    site.dumped(&[]);
    let old = inventory(&site.images());
    // It dumps the tree, and fails when the new image is in its place.
    let fails = site.path("criu");
    write_program(&fails, "#!/bin/sh\n\"$REAL_CRIU\" \"$@\"\nexit 1").unwrap();
    let output = site.dump().env("REAL_CRIU", &criu).env("CRIU", &fails).output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("criu dump failed when the new image was complete"), "{said}");
    verified(&site.images());
    assert!(old != inventory(&site.images()));
    let others = site.others();
    let [beside] = &others[..others.len() - 1] else { panic!("{others:?}") };
    let beside = site.path(beside);
    verified(&beside);
    assert!(old == inventory(&beside));
}

#[test]
fn two_dumps_at_once_into_one_directory_are_refused() {
    let criu = need!(Criu::main());
    let mut site = Site::new(&criu);
    site.dumped(&[]);
    let script = site.path("script");
    let text = format!(
        "#!/bin/sh\ntest $CRTOOLS_SCRIPT_ACTION = post-dump || exit 0\ntouch {0}/waits\n\
         while test ! -e {0}/go; do sleep 0.01; done",
        site.dir.path().display()
    );
    write_program(&script, &text).unwrap();
    let mut first = site.dump().args(["--", "--action-script"]).arg(&script).spawn().unwrap();
    assert!(soon(|| site.path("waits").exists()));
    let second = site.dump().output().unwrap();
    let said = said(&second);
    assert!(second.status.code() == Some(1) && said.contains("another dump writes into it"), "{said}");
    fs::write(site.path("go"), "").unwrap();
    assert!(first.wait().unwrap().success());
    verified(&site.images());
}

#[test]
fn an_incremental_image_keeps_its_relative_parent() {
    let criu = need!(Criu::main());
    let mut site = Site::new(&criu);
    fs::create_dir(site.path("1")).unwrap();
    // Of another program: without soft-dirty bits CRIU takes no pages from a parent.
    let mut command = site.criu.command("dump");
    command.arg("-t").arg(site.target.id().to_string()).arg("-D").arg(site.path("1"));
    assert!(command.stderr(Stdio::null()).status().unwrap().success());
    site.replace_target();
    assert!(run("seal", &site.path("1")).0);
    for _ in 0..2 {
        site.dumped(&["--prev-images-dir", "../1"]);
        let link = fs::read_link(site.path("2/parent")).unwrap();
        assert_eq!(link, Path::new("../1"));
        let (succeeded, said) = run("verify", &site.images());
        assert!(succeeded && said.matches("as sealed").count() == 2, "{said}");
    }
    let output = site.dump_into("1").output().unwrap();
    let words = said(&output);
    assert!(
        !output.status.success() && words.contains(&format!("{} is incremental", site.images().display()))
    );
    assert!(site.target_runs());
    flip(&site.path("1/pages-1.img"), 9);
    let (succeeded, said) = run("verify", &site.images());
    assert!(!succeeded && said.contains("2/parent/pages-1.img: wrong bytes"), "{said}");
}

#[test]
fn what_a_new_image_cannot_replace_is_refused_before_the_dump() {
    let criu = need!(Criu::main());
    let mut site = Site::new(&criu);
    site.dumped(&[]);
    fs::create_dir(site.path("2/pre-dump")).unwrap();
    let output = site.dump().output().unwrap();
    assert!(
        !output.status.success() && said(&output).contains("the directory pre-dump"),
        "{}",
        said(&output)
    );
    let output = site.dump().args(["--", "--auto-dedup"]).output().unwrap();
    assert!(!output.status.success() && said(&output).contains("`criu dedup`"), "{}", said(&output));
    assert!(site.target_runs());
    verified(&site.images());
    assert_eq!(site.others(), [""; 0]);
}

#[test]
fn an_image_that_is_being_restored_is_kept_until_the_next_dump() {
    let criu = need!(Criu::main());
    let mut site = Site::new(&criu);
    site.dumped(&[]);
    let before = inventory(&site.images());
    let lease = File::open(site.images().join("inventory.img")).unwrap();
    lease.lock_shared().unwrap();
    let said = said(&site.dumped(&[]));
    assert!(said.contains("still being restored"), "{said}");
    let [kept] = &site.others()[..] else { panic!("{:?}", site.others()) };
    assert_eq!(inventory(&site.path(kept)), before);
    drop(lease);
    site.dumped(&[]);
    assert_eq!(site.others(), [""; 0]);
}

#[test]
fn a_killed_first_dump_leaves_an_image_unsealed_or_whole() {
    let criu = need!(Criu::main());
    let mut site = Site::new(&criu);
    let mut random = Random::new(seed());
    for _ in 0..10 {
        fs::remove_dir_all(site.images()).unwrap();
        fs::create_dir(site.images()).unwrap();
        let mut dump = site.dump().process_group(0).stderr(Stdio::null()).spawn().unwrap();
        moment(Duration::from_millis(60), &mut random);
        kill_group(&mut dump);
        let (succeeded, said) = run("verify", &site.images());
        assert!(succeeded || said.contains("not sealed"), "{said}");
        site.replace_target();
        site.dumped(&[]);
        verified(&site.images());
        assert_eq!(site.others(), [""; 0]);
    }
}

/// Kills a dump, CRIU and all that it runs, and waits for their end.
fn kill_group(dump: &mut Child) {
    let leader = Pid::from_raw(dump.id().cast_signed());
    let _ = killpg(leader, Signal::SIGKILL);
    dump.wait().unwrap();
    group_ended(leader);
}

/// Waits for the end of all processes of a group.
fn group_ended(leader: Pid) {
    let group = Pid::from_raw(-leader.as_raw());
    let has_ended = || {
        // This process collects those whose parent was killed.
        while waitpid(group, Some(WaitPidFlag::WNOHANG)).is_ok_and(|of| of != WaitStatus::StillAlive) {}
        killpg(leader, None).is_err()
    };
    assert!(soon(has_ended), "CRIU ends by itself");
}

#[test]
fn killed_dumps_leave_a_whole_image_and_are_cleaned_up() {
    let criu = need!(Criu::main());
    let mut site = Site::new(&criu);
    site.dumped(&[]);
    let start = Instant::now();
    site.dumped(&[]);
    let time = start.elapsed() + Duration::from_millis(20);
    let seed = seed();
    println!("REWAKE_SEED={seed}");
    let mut random = Random::new(seed);
    let mut replaced = 0;
    let kills = count("REWAKE_DUMP_KILLS", KILLS);
    for round in 0..kills {
        let before = inventory(&site.images());
        let mut dump = site.dump().process_group(0).stderr(Stdio::null()).spawn().unwrap();
        moment(time, &mut random);
        // Alternately the command alone, and with it CRIU and all that it runs.
        let alone = round % 2 == 0;
        if alone {
            dump.kill().unwrap();
            dump.wait().unwrap();
            group_ended(Pid::from_raw(dump.id().cast_signed()));
        } else {
            kill_group(&mut dump);
        }
        verified(&site.images());
        let is_new = before != inventory(&site.images());
        replaced += u32::from(is_new);
        if alone {
            // CRIU kills the tree at its end.
            let limit = if is_new { ACT } else { Duration::ZERO };
            let has_ended = wait_child(&mut site.target, limit).is_some();
            assert_eq!(has_ended, is_new, "round {round}: the program is in the image, or runs");
        }
        site.replace_target();
    }
    println!("{replaced} of {kills} killed dumps had replaced the image");
    assert!(kills < ENOUGH || (LEAST..=kills - LEAST).contains(&replaced), "{replaced} of {kills}");
    site.dumped(&[]);
    verified(&site.images());
    assert_eq!(site.others(), [""; 0]);
}
