// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names are bytes: the kernel cuts that of a command in the middle of a character, and files may be in
//! Latin-1.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rewake_process::proc;
use rewake_tests::daemon::{restore, timeline};
use rewake_tests::export::{ImageExport, pull, verify};
use rewake_tests::process::{output, wait_pid};
use rewake_tests::scene::{ACT, ODD_NAME};
use rewake_tests::server::rewake;
use rewake_tests::{Criu, Scene, Verdict, need};

/// The name of an image, in Latin-1.
const IMAGE: &[u8] = b"m\xe9moire";

/// Makes a directory below `parent`.
fn made(parent: &Path, name: &[u8]) -> PathBuf {
    let path = parent.join(OsStr::from_bytes(name));
    fs::create_dir(&path).unwrap();
    path
}

/// What `rewake` writes for these words and an image.
fn said(words: &[&str], image: &Path) -> String {
    output(Command::new(rewake().unwrap()).args(words).arg(image)).unwrap()
}

#[test]
fn names_that_are_not_utf_8_are_dumped_shown_and_restored() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::started(&criu, "odd-names", 32).unwrap();
        assert_eq!(proc::name(scene.pid().as_raw()), ODD_NAME);
        let image = made(&scene.work(), IMAGE);
        let mut dump = Command::new(rewake().unwrap());
        dump.args(["dump", "-t", &scene.pid().to_string(), "-D"]).arg(&image).env("CRIU", &criu);
        output(&mut dump).unwrap();
        wait_pid(scene.pid(), ACT).unwrap();

        let shown = said(&["inspect"], &image);
        assert!(shown.contains("serveur-élév\u{fffd}\n") && !shown.contains("damage"), "{shown}");
        assert!(said(&["verify"], &image).contains(": as sealed: "));
        let server = ImageExport::start(&scene.work(), &[]).unwrap();
        let copy = scene.work().join(OsStr::from_bytes(b"copie de m\xe9moire"));
        let (copied, message) = pull(server.port(), OsStr::from_bytes(IMAGE), &copy, &[]).unwrap();
        assert!(copied, "{message}");
        verify(&copy).unwrap();

        scene.go().unwrap();
        let mut command = restore(&criu, &copy).unwrap();
        command.arg("-W").arg(made(&scene.work(), b"d\xe9p\xf4t")).args(["--", "-d"]);
        timeline(&command.output().unwrap()).unwrap();
        assert_eq!(proc::name(scene.pid().as_raw()), ODD_NAME);
        scene.stop().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    }
}
