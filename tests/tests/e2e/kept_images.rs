// SPDX-License-Identifier: MIT OR Apache-2.0
//! Images as people keep them: directories of symbolic links, a parent that is a directory, a lower layer of
//! overlayfs. And one that CRIU cannot restore lazily.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::{lchown, symlink};
use std::path::Path;
use std::process::{Command, Output};

use rewake_tests::daemon::{Daemon, restore, timeline};
use rewake_tests::images::{LAZY, PARENT, split};
use rewake_tests::scene::ACT;
use rewake_tests::server::rewake;
use rewake_tests::{Criu, Scene, Verdict, need, skip};

const MIB: usize = 16;
/// A user that neither runs these tests nor owns their files.
const OTHER: u32 = 65_533;

fn run(act: &[&OsStr]) -> Output {
    Command::new(rewake().unwrap()).args(act).output().unwrap()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Runs `rewake seal` or `verify`.
fn done(act: &str, images: &Path) {
    let output = run(&[OsStr::new(act), images.as_os_str()]);
    assert!(output.status.success(), "{act}: {}", said(&output));
}

/// The files of a directory with their bytes.
fn files(of: &Path) -> Vec<(OsString, Vec<u8>)> {
    let entries = fs::read_dir(of).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file());
    let mut files: Vec<_> = entries.map(|it| (it.file_name(), fs::read(it.path()).unwrap())).collect();
    files.sort();
    files
}

/// Moves the files of an image to `store`, and leaves links to them.
fn make_view(images: &Path, store: &Path) {
    fs::rename(images, store).unwrap();
    fs::create_dir(images).unwrap();
    for (name, _) in files(store).into_iter().filter(|(name, _)| name.as_encoded_bytes().ends_with(b".img")) {
        symlink(store.join(&name), images.join(&name)).unwrap();
    }
}

/// Dumps a program that this process starts into a directory, and ends it.
fn dump(criu: &Criu, into: &Path) -> Output {
    let mut target =
        Command::new("setsid").args(["sleep", "1000"]).stdin(std::process::Stdio::null()).spawn().unwrap();
    let name = format!("/proc/{}/comm", target.id());
    assert!(rewake_tests::process::soon(|| fs::read(&name).is_ok_and(|name| name == b"sleep\n")));
    let mut command = Command::new(rewake().unwrap());
    command.args(["dump", "-t", &target.id().to_string(), "-D"]).arg(into).env("CRIU", criu);
    let output = command.output().unwrap();
    let _ = target.kill();
    target.wait().unwrap();
    output
}

#[test]
fn a_view_is_served_and_sealed_but_no_link_of_another_user() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut scene = Scene::dumped(&criu, "plain", MIB).unwrap();
        let (images, store) = (scene.images(), scene.files().join("store"));
        make_view(&images, &store);
        let before = files(&store);
        scene.play().unwrap();
        scene.next_round().unwrap();
        done("seal", &images);
        done("verify", &images);
        scene.play().unwrap();
        assert!(files(&store) == before, "nothing is written through a link");
        scene.next_round().unwrap();
        lchown(images.join("pages-1.img"), Some(OTHER), None).unwrap();
        let refusal = scene.setup().unwrap().start().unwrap().unwrap_err();
        assert!(
            refusal.line_with(&["pages-1.img: is a symbolic link of user 65533", "replace it"]),
            "{refusal:?}"
        );
    }
}

#[test]
fn a_dump_over_a_view_leaves_what_its_links_lead_to() {
    let criu = need!(Criu::main());
    let dir = tempfile::tempdir().unwrap();
    let (images, store) = (dir.path().join("images"), dir.path().join("store"));
    fs::create_dir(&images).unwrap();
    assert!(dump(&criu, &images).status.success());
    make_view(&images, &store);
    let before = files(&store);
    let output = dump(&criu, &images);
    assert!(output.status.success(), "{}", said(&output));
    assert!(files(&store) == before, "it is another image's");
    done("verify", &images);
    done("verify", &store);
    assert!(images.join("inventory.img").symlink_metadata().unwrap().is_file());
}

#[test]
fn a_parent_that_is_a_directory_is_sealed_and_restored() {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "plain", MIB).unwrap();
    let images = scene.images();
    split(&images, "before", scene.pid(), PARENT | LAZY, false).unwrap();
    done("seal", &images.join("before"));
    done("seal", &images);
    // As a copy leaves them that follows links.
    fs::remove_file(images.join("parent")).unwrap();
    fs::rename(images.join("before"), images.join("parent")).unwrap();
    done("verify", &images);
    scene.play().unwrap();
    scene.next_round().unwrap();
    fs::remove_file(images.join("rewake-manifest")).unwrap();
    done("seal", &images);
    done("verify", &images);
    scene.play().unwrap();
}

/// A mount that ends with this.
struct Overlay<'a>(&'a Path);

impl<'a> Overlay<'a> {
    fn new(lower: &Path, upper: &Path, work: &Path, at: &'a Path) -> Option<Self> {
        let options = [("lowerdir", lower), ("upperdir", upper), ("workdir", work)];
        let options = options.map(|(name, path)| format!("{name}={}", path.display())).join(",");
        let mut mount = Command::new("mount");
        mount.args(["-t", "overlay", "none", "-o", &options]).arg(at);
        mount.status().unwrap().success().then_some(Self(at))
    }
}

impl Drop for Overlay<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

#[test]
fn a_dump_replaces_an_image_of_a_lower_overlay_layer() {
    let criu = need!(Criu::main());
    let dir = tempfile::tempdir().unwrap();
    let [lower, upper, work, merged] = ["lower", "upper", "work", "merged"].map(|name| dir.path().join(name));
    [&lower, &upper, &work, &merged].into_iter().for_each(|of| fs::create_dir(of).unwrap());
    let image = lower.join("images");
    fs::create_dir(&image).unwrap();
    fs::write(image.join("notes"), "kept").unwrap();
    assert!(dump(&criu, &image).status.success());
    let before = files(&image);
    let Some(_mount) = Overlay::new(&lower, &upper, &work, &merged) else { skip!("no overlayfs here") };
    // The second one replaces an image of the upper layer.
    for _ in 0..2 {
        let output = dump(&criu, &merged.join("images"));
        assert!(output.status.success(), "{}", said(&output));
        done("verify", &merged.join("images"));
        assert_eq!(fs::read(merged.join("images/notes")).unwrap(), b"kept");
        assert_eq!(fs::read_dir(&merged).unwrap().count(), 1, "nothing is left beside it");
    }
    assert!(files(&image) == before);
}

/// A program with a reservation of 4 TiB; none where this machine permits a lazy restore to map that.
fn reserved(criu: &Criu) -> Result<Scene, String> {
    let mode = fs::read("/proc/sys/vm/overcommit_memory").unwrap();
    if mode.trim_ascii() != b"0" {
        return Err("vm.overcommit_memory is not 0".to_owned());
    }
    Ok(Scene::dumped(criu, "reserved", MIB).unwrap())
}

#[test]
fn what_cannot_be_restored_lazily_is_restored_eagerly() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut scene = need!(reserved(&criu));
        let output = run(&[OsStr::new("inspect"), scene.images().as_os_str()]);
        assert!(output.status.success(), "{}", said(&output));
        let expected = "lazily:  not on this machine: process ";
        assert!(said(&output).lines().any(|line| line.starts_with(expected)), "{}", said(&output));
        let line = "all CPU memory is loaded before the processes run: ";
        for agent in [None, Some(Daemon::start().unwrap())] {
            let command = |option: &[&str]| {
                let mut command = match &agent {
                    Some(agent) => agent.restore(&criu, &scene.images()).unwrap(),
                    None => restore(&criu, &scene.images()).unwrap(),
                };
                command.arg("-W").arg(scene.work()).args(option).args(["--", "-d", "-v4"]);
                command.output().unwrap()
            };
            for option in ["--record", "--on-demand-only=1"] {
                let refused = command(&[option]);
                let text = said(&refused);
                let reason = "this image cannot be restored lazily on this machine: process ";
                assert!(!refused.status.success() && text.contains(reason), "{text}");
            }
            scene.go().unwrap();
            let restored = command(&[]);
            assert_eq!(said(&restored).matches(line).count(), 1, "{}", said(&restored));
            timeline(&restored).unwrap();
            assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
            scene.next_round().unwrap();
        }
    }
}
