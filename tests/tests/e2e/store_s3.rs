// SPDX-License-Identifier: MIT OR Apache-2.0
//! A store behind S3: SeaweedFS, with keys. `REWAKE_PUSH_KILLS` is the number of killed pushes, `REWAKE_SEED`
//! repeats the moments of another run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rewake_criu_images::{Inventory, write};
use rewake_testkit::programs::rewake;
use rewake_tests::daemon::{restore, timeline};
use rewake_tests::export::{seal, verify};
use rewake_tests::random::{count, moment, seed};
use rewake_tests::scene::ACT;
use rewake_tests::seaweedfs::{KEY, SeaweedServer};
use rewake_tests::{Criu, Random, Scene, Verdict, need};

/// Pushes that are killed in the suite. The moments of more of them are within a push for sure.
const KILLS: u32 = 4;

fn said(output: &Output) -> String {
    String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap()
}

/// Runs `rewake` with these arguments: it succeeds. Returns what it wrote.
fn done(server: &SeaweedServer, arguments: &[&str]) -> String {
    let output = server.rewake(arguments).unwrap().output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", said(&output));
    said(&output)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A sealed image of `mebibytes` MiB that do not compress. The first half is the same for all names.
fn image(folder: &Path, name: &str, mebibytes: usize) -> PathBuf {
    let image = folder.join(name);
    fs::create_dir(&image).unwrap();
    write::inventory(&image, &Inventory { version: 2, plugins: Vec::new(), run_id: Some(name.into()) })
        .unwrap();
    let half = |seed: u64| {
        let mut random = Random::new(seed);
        (0..mebibytes << 16).flat_map(move |_| random.number().to_le_bytes()).collect::<Vec<u8>>()
    };
    let own = name.bytes().fold(7, |seed, byte| seed * 31 + u64::from(byte));
    fs::write(image.join("pages-1.img"), [half(1), half(own)].concat()).unwrap();
    let sealed = Command::new(rewake().unwrap()).arg("seal").arg(&image).output().unwrap();
    assert!(sealed.status.success(), "{sealed:?}");
    image
}

#[test]
fn an_image_goes_through_s3_and_is_restored() {
    let program = need!(SeaweedServer::program());
    let criu = need!(Criu::main());
    let server = SeaweedServer::start(&program).unwrap();
    let scene = Scene::dumped(&criu, "plain", 64).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (images, copy, url) = (scene.images(), folder.path().join("copy"), "s3://bucket/a/folder/web");
    seal(&scene).unwrap();
    assert!(done(&server, &["push", text(&images), url]).contains(" were written; "));
    assert!(done(&server, &["ls", "s3://bucket/a/folder"]).starts_with("web  "));
    assert!(done(&server, &["verify", url]).contains("as sealed: "));
    assert!(done(&server, &["pull", url, text(&copy)]).contains(" were sent, 0 B were here; image "));
    verify(&copy).unwrap();
    // With the keys of a profile, whose files are below the home directory.
    let keys = format!("[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n", KEY[0], KEY[1]);
    fs::create_dir(folder.path().join(".aws")).unwrap();
    fs::write(folder.path().join(".aws/credentials"), keys).unwrap();
    let mut command = server.rewake(&["verify", url]).unwrap();
    command.env_remove("AWS_ACCESS_KEY_ID").env_remove("AWS_SECRET_ACCESS_KEY").env("HOME", folder.path());
    assert!(said(&command.output().unwrap()).contains("as sealed: "));

    fs::remove_dir_all(&images).unwrap();
    scene.go().unwrap();
    let mut command = restore(&criu, &copy).unwrap();
    timeline(&command.arg("-W").arg(scene.work()).args(["--", "-d"]).output().unwrap()).unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);

    done(&server, &["rm", url]);
    assert!(done(&server, &["gc", "s3://bucket/a/folder"]).contains("removed 0 images and 0 packs"));
    assert!(done(&server, &["gc", "--now", "s3://bucket/a/folder"]).contains("0 packs of 0 B are left"));
}

#[test]
fn pushes_and_gc_at_once_break_no_image() {
    let server = SeaweedServer::start(&need!(SeaweedServer::program())).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let images = ["one", "two", "three"].map(|name| (name, image(folder.path(), name, 20)));
    // The first push makes the store, without which gc has nothing to do.
    done(&server, &["push", text(&images[0].1), "s3://bucket/same"]);
    for _ in 0..3 {
        let push = |image: &Path, name: &str| -> Child {
            let url = format!("s3://bucket/{name}");
            server.rewake(&["push", text(image), &url]).unwrap().stdout(Stdio::null()).spawn().unwrap()
        };
        // Each under its own name, and all under one.
        let pushes = images.iter().flat_map(|(name, image)| [push(image, name), push(image, "same")]);
        let mut pushes: Vec<Child> = pushes.collect();
        while pushes.iter_mut().any(|push| push.try_wait().unwrap().is_none()) {
            done(&server, &["gc", "s3://bucket"]);
        }
        assert!(pushes.into_iter().all(|mut push| push.wait().unwrap().success()));
        for name in ["one", "two", "three", "same"] {
            assert!(done(&server, &["verify", &format!("s3://bucket/{name}")]).contains("as sealed: "));
        }
        // The next round stores all again.
        done(&server, &["rm", "s3://bucket/one"]);
        done(&server, &["gc", "--now", "s3://bucket"]);
        for name in ["two", "three", "same"] {
            done(&server, &["verify", &format!("s3://bucket/{name}")]);
            done(&server, &["rm", &format!("s3://bucket/{name}")]);
        }
        assert!(done(&server, &["gc", "--now", "s3://bucket"]).contains("; 0 packs of 0 B are left"));
    }
}

#[test]
fn killed_pushes_leave_no_broken_image() {
    let server = SeaweedServer::start(&need!(SeaweedServer::program())).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), "one", 20);
    let push =
        |name: &str| server.rewake(&["push", text(&image), &format!("s3://bucket/{name}/one")]).unwrap();
    let start = Instant::now();
    assert!(push("whole").output().unwrap().status.success());
    let (whole, mut random) = (start.elapsed(), Random::new(seed()));
    let (mut complete, mut cut) = (0, 0);
    let kills = count("REWAKE_PUSH_KILLS", KILLS);
    for kill in 0..kills {
        let (store, url) = (format!("s3://bucket/{kill}"), format!("s3://bucket/{kill}/one"));
        let mut child = push(&kill.to_string()).stdout(Stdio::null()).spawn().unwrap();
        moment(whole, &mut random);
        child.kill().unwrap();
        child.wait().unwrap();
        let ls = server.rewake(&["ls", &store]).unwrap().output().unwrap();
        if ls.stdout.is_empty() {
            // Before its first write there is no store.
            assert!(ls.status.success() || said(&ls).contains("no store of images"), "{ls:?}");
            cut += 1;
        } else {
            complete += 1;
            assert!(done(&server, &["verify", &url]).contains("as sealed: "));
        }
        assert!(push(&kill.to_string()).output().unwrap().status.success());
        assert!(done(&server, &["verify", &url]).contains("as sealed: "));
    }
    println!("{cut} pushes were cut, {complete} had ended");
    assert!(kills <= KILLS || cut > 0);
}

#[test]
fn wrong_keys_and_lost_servers_are_one_line() {
    let mut server = SeaweedServer::start(&need!(SeaweedServer::program())).unwrap();
    let refused = |command: &mut Command| {
        let start = Instant::now();
        let output = command.output().unwrap();
        let said = said(&output);
        assert!(!output.status.success() && said.lines().count() == 1, "{said}");
        assert!(KEY.iter().all(|key| !said.contains(key)), "{said}");
        assert!(start.elapsed() < Duration::from_secs(150), "{said}");
        said
    };
    let ls = || server.rewake(&["ls", "s3://bucket"]).unwrap();
    assert!(
        refused(ls().env("AWS_SECRET_ACCESS_KEY", "other")).contains("403 Forbidden: SignatureDoesNotMatch")
    );
    assert!(refused(ls().env("AWS_ACCESS_KEY_ID", "other")).contains("403 Forbidden: InvalidAccessKeyId"));
    assert!(refused(&mut server.rewake(&["ls", "s3://none"]).unwrap()).contains("NoSuchBucket"));
    let mut ls = ls();
    server.kill();
    assert!(refused(&mut ls).contains("cannot read it: "));
}
