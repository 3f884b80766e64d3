// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake push`, `pull`, `ls`, `verify`, `rm` and `gc`, with a store in a directory: images go through it,
//! and are restored.

use std::fs;
use std::path::Path;
use std::process::Command;

use rewake_testkit::programs::rewake;
use rewake_tests::commands::{done, refused, run};
use rewake_tests::daemon::{restore, timeline};
use rewake_tests::export::{
    ImageExport, assert_same, messages, restore_from, seal, streamer_ended, verify, with_messages_in_file,
};
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Scene, Verdict, need};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn an_image_goes_through_a_store_and_is_restored() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::dumped(&criu, "plain", 32).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let store = format!("file://{}/store", folder.path().display());
        let url = format!("{store}/web");
        let (images, copy) = (scene.images(), folder.path().join("copy"));

        assert!(refused(&["push", text(&images), &url]).contains("run `rewake seal`"));
        seal(&scene).unwrap();
        assert!(done(&["push", text(&images), &url]).contains("were written; "));
        assert!(done(&["push", text(&images), &url]).contains("the store has image "));
        assert!(done(&["ls", &store]).starts_with("web  "));
        assert!(done(&["verify", &url]).contains("as sealed: "));
        assert!(done(&["pull", &url, text(&copy)]).contains(" were sent, 0 B were here; image "));
        assert!(done(&["pull", &url, text(&copy)]).contains("it has image "));
        assert_same(&images, &copy);

        fs::remove_dir_all(&images).unwrap();
        scene.go().unwrap();
        let mut command = restore(&criu, &copy).unwrap();
        timeline(&command.arg("-W").arg(scene.work()).args(["--", "-d"]).output().unwrap()).unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    }
}

#[test]
fn a_program_runs_while_its_memory_arrives_from_a_store() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 32).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = format!("file://{}/store", folder.path().display());
    let name = seal(&scene).unwrap();
    done(&["push", text(&scene.images()), &format!("{store}/{name}")]);
    fs::remove_dir_all(scene.images()).unwrap();

    let server = ImageExport::start(Path::new(&store), &[]).unwrap();
    let copy = scene.files().join("copy");
    let mut command = restore_from(&criu, &scene, server.port(), &copy, &["--wait", "alive"]).unwrap();
    with_messages_in_file(&mut command, &scene).unwrap();
    assert!(command.status().unwrap().success(), "{}{}", messages(&scene), scene.logs());
    scene.go().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    streamer_ended(&scene).unwrap();
    verify(&copy).unwrap();
}

#[test]
fn a_second_image_takes_the_space_of_what_differs() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 32).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = format!("file://{}/store", folder.path().display());
    let [first, second] = ["first", "second"].map(|name| format!("{store}/{name}"));
    seal(&scene).unwrap();
    done(&["push", text(&scene.images()), &first]);
    let packs = folder.path().join("store/packs");
    let size =
        || fs::read_dir(&packs).unwrap().map(|pack| pack.unwrap().metadata().unwrap().len()).sum::<u64>();
    let before = size();
    done(&["push", text(&scene.images()), &second]);
    assert_eq!(size(), before);

    done(&["rm", &first]);
    assert!(refused(&["rm", &first]).contains("no image of this name"));
    assert!(done(&["gc", &store]).contains("removed 0 images and 0 packs"));
    assert!(done(&["gc", "--now", &store]).contains("removed 1 images and 0 packs"));
    done(&["verify", &second]);
    done(&["rm", &second]);
    assert!(done(&["gc", "--now", &store]).contains("removed 1 images and "));
    assert_eq!(size(), 0);
    assert_eq!(done(&["ls", &store]), "");
}

#[test]
fn wrong_bytes_in_a_store_are_named_and_never_restored() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 8).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}/store/web", folder.path().display());
    seal(&scene).unwrap();
    done(&["push", text(&scene.images()), &url]);
    let pack = fs::read_dir(folder.path().join("store/packs")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&pack).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    fs::write(&pack, bytes).unwrap();

    let (succeeded, said) = run(&["verify", &url]);
    assert!(!succeeded && said.contains(&format!("file://{}: damaged: ", pack.display())), "{said}");
    let copy = folder.path().join("copy");
    assert!(refused(&["pull", &url, text(&copy)]).contains(&format!("file://{}: damaged: ", pack.display())));
    assert!(!copy.join("rewake-manifest").exists());
    assert!(
        restore(&criu, &copy)
            .unwrap()
            .args(["--", "-d"])
            .output()
            .is_ok_and(|output| !output.status.success())
    );
}

#[test]
fn a_store_without_the_name_of_an_image_is_asked_for_the_name() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (images, store) = (scene.images(), format!("file://{}/srv/store", folder.path().display()));
    seal(&scene).unwrap();
    done(&["push", text(&images), &format!("{store}/web")]);
    let copy = folder.path().join("copy");
    let asks = format!("rewake: {store} is a store: add the image's name: {store}/NAME\n");
    for arguments in [
        &["push", text(&images), &store][..],
        &["pull", &store, text(&copy)],
        &["verify", &store],
        &["rm", &store],
    ] {
        let said = refused(arguments);
        assert!(said.ends_with(asks.strip_prefix("rewake: ").unwrap()), "{arguments:?}: {said}");
    }
    let inside = format!("{store}/models/web");
    assert!(refused(&["push", text(&images), &inside]).contains("no store is made inside another one"));
    let names: Vec<_> =
        fs::read_dir(folder.path().join("srv")).unwrap().map(|of| of.unwrap().file_name()).collect();
    assert_eq!(names, ["store"]);
    assert!(done(&["rm", &format!("{store}/web")]).contains("/srv/store/web: removed image "));
}

#[test]
fn bad_input_gets_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let (dir, none) = (text(folder.path()), format!("file://{}/none", folder.path().display()));
    assert!(refused(&["ls", &none]).contains("no such directory: `rewake push` makes it"));
    assert!(refused(&["pull", &format!("file://{dir}/web"), dir]).contains("no image of this name"));
    // A directory with files of others is no store: nothing is listed or removed.
    let (store, packs) = (format!("file://{dir}"), folder.path().join("packs"));
    fs::create_dir(&packs).unwrap();
    let pack = packs.join("0123456789abcdef0123456789abcdef-0123456789abcdef");
    fs::write(&pack, "x").unwrap();
    for arguments in [&["gc", "--now", &store][..], &["ls", &store], &["rm", &format!("{store}/web")]] {
        assert!(refused(arguments).contains("no store of images: it lacks the object `rewake-store`"));
    }
    assert!(pack.exists());
    assert!(
        refused(&["pull", "--tls", &format!("file://{dir}/web"), dir]).contains("--tls is for HOST:IMAGE")
    );
    for url in ["web", "s3://bucket", "http://host/web", "s3://bucket/../web"] {
        let (succeeded, said) = run(&["push", dir, url]);
        assert!(
            !succeeded && said.contains("expected s3://BUCKET/..., file:///DIRECTORY/... or oci://"),
            "{said}"
        );
    }
    let mut command = Command::new(rewake().unwrap());
    command.args(["ls", "s3://bucket"]).env_clear().env("AWS_EC2_METADATA_DISABLED", "true");
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(said.starts_with("rewake: s3://bucket: no credentials: ") && said.lines().count() == 1, "{said}");
    command.env("AWS_ACCESS_KEY_ID", "ID").env("AWS_SECRET_ACCESS_KEY", "a-secret");
    command.env("AWS_ENDPOINT_URL", "http://192.0.2.1");
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(said.contains("memory would travel unencrypted") && !said.contains("a-secret"), "{said}");
}
