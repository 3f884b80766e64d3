// SPDX-License-Identifier: MIT OR Apache-2.0
//! Images in a registry, as other tools see them, and archives of container engines. The registry is Debian's
//! `docker-registry`, and `skopeo` copies.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rewake_criu_images::{Inventory, write};
use rewake_testkit::programs::rewake;
use rewake_tests::daemon::{DaemonOptions, restore, timeline};
use rewake_tests::export::{assert_same, messages, seal, streamer_ended, verify, with_messages_in_file};
use rewake_tests::node_cache::StoredScene;
use rewake_tests::proxy::CachingProxy;
use rewake_tests::registry::{PASSWORD, RegistryServer};
use rewake_tests::relay::SlowLink;
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Random, Scene, Verdict, need};
use serde_json::Value;

const PLAIN: &str = "--src-tls-verify=false";

fn said(output: &Output) -> String {
    let said = String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap();
    assert!(!said.contains(PASSWORD), "{said}");
    said
}

/// Runs `rewake` with these arguments: it succeeds. Returns what it wrote.
fn done(server: &RegistryServer, arguments: &[&str]) -> String {
    let output = server.rewake(arguments).unwrap().output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", said(&output));
    said(&output)
}

/// Runs it: it fails. Returns its one line.
fn refused(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = said(&output);
    assert!(!output.status.success() && said.lines().count() == 1, "{said}");
    said
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A sealed image with `bytes` random bytes of memory.
fn image(folder: &Path, name: &str, bytes: usize) -> PathBuf {
    let image = folder.join(name);
    fs::create_dir(&image).unwrap();
    let inventory = Inventory { version: 2, plugins: Vec::new(), run_id: Some(name.into()) };
    write::inventory(&image, &inventory).unwrap();
    let mut random = Random::new(bytes as u64);
    let memory: Vec<u8> = (0..bytes / 8).flat_map(|_| random.number().to_le_bytes()).collect();
    fs::write(image.join("pages-1.img"), memory).unwrap();
    let sealed = Command::new(rewake().unwrap()).arg("seal").arg(&image).output().unwrap();
    assert!(sealed.status.success(), "{sealed:?}");
    image
}

/// Reads the index or manifest that an address names.
fn raw(server: &RegistryServer, image: &str) -> Value {
    let bytes = server.skopeo(&["inspect", "--raw", "--tls-verify=false", &server.address(image)]).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

/// The manifest that the index of a tag names.
fn manifest(server: &RegistryServer, repository: &str, tag: &str) -> Value {
    let index = raw(server, &format!("{repository}:{tag}"));
    let digest = index["manifests"][0]["digest"].as_str().unwrap();
    raw(server, &format!("{repository}@{digest}"))
}

/// Restores a copy of a scene's image.
fn restored(criu: &Criu, scene: &Scene, copy: &Path) {
    fs::remove_dir_all(scene.images()).unwrap();
    scene.go().unwrap();
    let mut command = restore(criu, copy).unwrap();
    timeline(&command.arg("-W").arg(scene.work()).args(["--", "-d"]).output().unwrap()).unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn an_image_goes_through_a_registry_and_is_restored() {
    let program = need!(RegistryServer::program());
    let criu = need!(Criu::main());
    let server = RegistryServer::start(&program).unwrap();
    let scene = Scene::dumped(&criu, "plain", 64).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (images, copy) = (scene.images(), folder.path().join("copy"));
    let (repository, url) = (server.url("a/web"), format!("{}:v1", server.url("a/web")));
    seal(&scene).unwrap();
    assert!(done(&server, &["push", text(&images), &url]).contains(" were written; "));
    assert!(done(&server, &["push", text(&images), &url]).contains("the store has image "));

    // What other tools read: annotations of index and manifest, and the files of layer 0.
    let (index, manifest) = (raw(&server, "a/web:v1"), manifest(&server, "a/web", "v1"));
    assert_eq!(index["artifactType"], "application/vnd.rewake.checkpoint.v1");
    assert_eq!(manifest["artifactType"], index["artifactType"]);
    assert_eq!(manifest["annotations"], index["annotations"]);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(manifest["annotations"]["org.criu.checkpoint.host.kernel"], kernel.trim());
    assert_eq!(manifest["annotations"]["org.criu.checkpoint.host.arch"], "amd64");
    assert!(manifest["annotations"]["org.criu.checkpoint.criu.version"].as_str().unwrap().starts_with("4."));
    assert_eq!(manifest["layers"][0]["mediaType"], "application/vnd.oci.image.layer.v1.tar");
    let layer = server.blob(manifest["layers"][0]["digest"].as_str().unwrap());
    let status = Command::new("tar").arg("-xf").arg(&layer).arg("-C").arg(folder.path()).status().unwrap();
    assert!(status.success());
    for name in ["inventory.img", "pstree.img", "rewake-manifest"] {
        let extracted = fs::read(folder.path().join("checkpoint").join(name)).unwrap();
        assert!(extracted == fs::read(images.join(name)).unwrap(), "{name}");
    }
    assert!(!folder.path().join("checkpoint/pages-1.img").exists());

    // A copy by another program, out of the registry and into it.
    let layout = format!("oci:{}:web", folder.path().join("layout").display());
    server.skopeo(&["copy", PLAIN, &server.address("a/web:v1"), &layout]).unwrap();
    server.skopeo(&["copy", "--dest-tls-verify=false", &layout, &server.address("a/web:copied")]).unwrap();
    let listed = done(&server, &["ls", &repository]);
    assert!(listed.starts_with("copied  ") && listed.contains("\nv1  "), "{listed}");
    let copied = format!("{repository}:copied");
    assert!(done(&server, &["verify", &copied]).contains("as sealed: "));
    assert!(done(&server, &["pull", &copied, text(&copy)]).contains(" were sent, 0 B were here; image "));
    assert_same(&images, &copy);
    restored(&criu, &scene, &copy);
}

#[test]
fn a_program_runs_while_its_memory_arrives_from_a_registry() {
    let program = need!(RegistryServer::program());
    let criu = need!(Criu::main());
    let server = RegistryServer::start(&program).unwrap();
    let auth = ("REGISTRY_AUTH_FILE".to_owned(), text(&server.auth_file()).to_owned());
    let options = DaemonOptions { environment: vec![auth.clone()], ..DaemonOptions::default() };
    let push = |mut command: Command| {
        command.envs([auth]);
        command
    };
    let folder = tempfile::Builder::new().prefix("rewake-cache-").tempdir().unwrap();
    let place = (folder, format!("{}:v1", server.url("web")));
    let stored = StoredScene::with(&criu, "plain", 32, place, push, options).unwrap();
    let scene = &stored.scene;
    let mut command = stored.restore(&["--wait", "alive"]).unwrap();
    with_messages_in_file(&mut command, scene).unwrap();
    assert!(command.status().unwrap().success(), "{}{}", messages(scene), stored.daemon.logs());
    scene.go().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", stored.daemon.logs());
    streamer_ended(scene).unwrap();
}

/// The proxy is what hosts have in common: each of them reads other ranges, at other times.
#[test]
fn hosts_behind_a_caching_proxy_read_a_registry_once() {
    let program = need!(RegistryServer::program());
    let nginx = need!(CachingProxy::program());
    let criu = need!(Criu::main());
    let server = RegistryServer::start(&program).unwrap();
    let link = SlowLink::to(server.port(), 1 << 30).unwrap();
    let proxy = CachingProxy::start(&nginx, link.port()).unwrap();
    let auth_file = server.auth_file_at(proxy.port()).unwrap();
    let auth = ("REGISTRY_AUTH_FILE".to_owned(), text(&auth_file).to_owned());
    let options = DaemonOptions { environment: vec![auth.clone()], ..DaemonOptions::default() };
    let push = |mut command: Command| {
        command.envs([auth.clone()]);
        command
    };
    let folder = tempfile::Builder::new().prefix("rewake-cache-").tempdir().unwrap();
    let place = (folder, format!("oci://127.0.0.1:{}/web:v1", proxy.port()));
    let stored = StoredScene::with(&criu, "random", 32, place, push, options).unwrap();

    let before = link.passed();
    let mut command = stored.restore(&["--wait", "alive"]).unwrap();
    with_messages_in_file(&mut command, &stored.scene).unwrap();
    assert!(command.status().unwrap().success(), "{}", messages(&stored.scene));
    stored.scene.go().unwrap();
    stored.is_complete().unwrap();
    let first = link.passed() - before;
    // The proxy has some slices since the push, which looked for blobs.
    let expected = stored.bytes / 2..stored.bytes * 11 / 10;
    assert!(expected.contains(&first), "{first} bytes for an image of {}", stored.bytes);

    let mut pull = Command::new(rewake().unwrap());
    pull.args(["pull", &stored.url]).arg(stored.folder().join("other")).envs([auth]);
    let output = pull.output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let both = link.passed() - before;
    assert!(both - first < first / 50, "{first} bytes for one host, {both} for two");
    verify(&stored.folder().join("other")).unwrap();
    stored.scene.stop().unwrap();
    assert_eq!(stored.scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", stored.daemon.logs());
}

#[test]
fn a_second_push_writes_what_differs() {
    let server = RegistryServer::start(&need!(RegistryServer::program())).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (image(folder.path(), "one", 40 << 20), image(folder.path(), "two", 40 << 20));
    let url = format!("{}:latest", server.url("web"));
    assert!(done(&server, &["push", text(&first), &url]).contains("what the store had: 0 B"));
    // The memory is the same, so its packs stay.
    let pushed = done(&server, &["push", text(&second), &url]);
    assert!(
        pushed.contains("what the store had: 40.0 MiB") || pushed.contains("what the store had: 40 MiB"),
        "{pushed}"
    );
    done(&server, &["verify", &url]);
    let copy = folder.path().join("copy");
    // A registry of this host is reached without a proxy: at this address is none.
    let mut pull = server.rewake(&["pull", &url, text(&copy)]).unwrap();
    let output = pull
        .envs(["HTTP_PROXY", "ALL_PROXY", "http_proxy"].map(|name| (name, "http://127.0.0.1:1")))
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(fs::read(copy.join("pages-1.img")).unwrap() == fs::read(second.join("pages-1.img")).unwrap());
    for command in [["rm", &url], ["gc", &server.url("web")]] {
        let said = refused(&mut server.rewake(&command).unwrap());
        assert!(said.contains("a registry removes images itself"), "{said}");
    }
}

#[test]
fn a_push_stores_again_what_the_registry_has_lost() {
    let server = RegistryServer::start(&need!(RegistryServer::program())).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), "one", 3 << 20);
    let (url, copy) = (format!("{}:1", server.url("web")), folder.path().join("copy"));
    done(&server, &["push", text(&image), &url]);
    // The files of layer 0, the manifest, the index and the pack: each is lost once.
    for lost in 0..4 {
        let digest = manifest(&server, "web", "1")["layers"][lost]["digest"].as_str().unwrap().to_owned();
        fs::remove_file(server.blob(&digest)).unwrap();
        let said = done(&server, &["push", text(&image), &url]);
        // Nothing that `rewake` reads is in layer 0, and each push writes it.
        assert_eq!(said.contains("the store has image "), lost == 0, "{said}");
        done(&server, &["verify", &url]);
        done(&server, &["pull", &url, text(&copy)]);
        fs::remove_dir_all(&copy).unwrap();
    }
    assert!(done(&server, &["push", text(&image), &url]).contains("the store has image "));
}

#[test]
fn wrong_blobs_of_a_registry_are_named_and_never_copied() {
    let server = RegistryServer::start(&need!(RegistryServer::program())).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), "one", 3 << 20);
    let url = format!("{}:1", server.url("web"));
    done(&server, &["push", text(&image), &url]);
    let manifest = manifest(&server, "web", "1");
    let layers = manifest["layers"].as_array().unwrap();
    // Each blob that a copy reads: the configuration, the manifest, the index and the pack.
    let blobs = layers[1..].iter().chain([&manifest["config"]]);
    for blob in blobs.map(|layer| layer["digest"].as_str().unwrap()) {
        let bytes = fs::read(server.blob(blob)).unwrap();
        let mut other = bytes.clone();
        other[bytes.len() / 2] ^= 0x10;
        for damaged in [&other, &bytes[..bytes.len() / 2]] {
            server.replace(blob, damaged).unwrap();
            let copy = folder.path().join("copy");
            let said = refused(&mut server.rewake(&["pull", &url, text(&copy)]).unwrap());
            assert!(said.contains("oci://127.0.0.1:"), "{said}");
            assert!(!copy.join("rewake-manifest").exists());
            let _ = fs::remove_dir_all(&copy);
        }
        server.replace(blob, &bytes).unwrap();
    }
    done(&server, &["verify", &url]);
}

#[test]
fn a_registry_is_used_with_the_files_of_podman_and_docker() {
    let server = RegistryServer::start(&need!(RegistryServer::program())).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), "one", 1 << 20);
    let url = format!("{}:1", server.url("web"));
    let push = |auth: &Path| {
        let mut command = Command::new(rewake().unwrap());
        command.args(["push", text(&image), &url]).env("HOME", auth).env_remove("REGISTRY_AUTH_FILE");
        command.env_remove("XDG_RUNTIME_DIR").env_remove("DOCKER_CONFIG");
        command
    };
    let refusal = refused(&mut push(folder.path()));
    assert!(refusal.contains("401 Unauthorized") && refusal.contains("skopeo login"), "{refusal}");
    let docker = folder.path().join(".docker");
    fs::create_dir(&docker).unwrap();
    let login = fs::read_to_string(server.auth_file()).unwrap();
    fs::write(docker.join("config.json"), login.replace("dXNlcjph", "dXNlcjpi")).unwrap();
    assert!(refused(&mut push(folder.path())).contains("401 Unauthorized"));
    fs::write(docker.join("config.json"), login).unwrap();
    assert!(push(folder.path()).output().unwrap().status.success());

    let missing = format!("{}:2", server.url("web"));
    let refusal = refused(&mut server.rewake(&["verify", &missing]).unwrap());
    assert!(refusal.contains(&format!("{missing}: no image of this name")), "{refusal}");
    let output = server.rewake(&["pull", "oci://host/web", "x"]).unwrap().output().unwrap();
    assert!(
        !output.status.success() && said(&output).contains("\"oci://host/web\": it has no tag: expected ")
    );
}

#[test]
fn an_archive_of_a_container_engine_is_restored() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let container = folder.path().join("container");
    fs::create_dir(&container).unwrap();
    for name in ["config.dump", "spec.dump", "stats-dump"] {
        fs::write(container.join(name), "{}").unwrap();
    }
    let moved = Command::new("cp").arg("-a").arg(scene.images()).arg(container.join("checkpoint")).status();
    assert!(moved.unwrap().success());
    fs::remove_file(container.join("checkpoint/dump.log")).unwrap();
    let mut copy = PathBuf::new();
    for (archive, option) in [("a.tar", "-cf"), ("checkpoint-a_b-c-2026-11-26T12:00:00Z.tar.gz", "-czf")] {
        let path = folder.path().join(archive);
        let made = Command::new("tar").arg(option).arg(&path).arg("-C").arg(&container).arg(".").status();
        assert!(made.unwrap().success());
        copy = folder.path().join(format!("{archive}.image"));
        let output = Command::new(rewake().unwrap()).arg("pull").args([&path, &copy]).output().unwrap();
        let said = said(&output);
        assert!(output.status.success() && said.contains("; sealed as image "), "{said}");
        verify(&copy).unwrap();
    }
    // Its end is missing.
    let tar = fs::read(folder.path().join("a.tar")).unwrap();
    let cut = folder.path().join("cut.tar");
    fs::write(&cut, &tar[..tar.len() / 2]).unwrap();
    let none = folder.path().join("none");
    let said = refused(Command::new(rewake().unwrap()).arg("pull").args([&cut, &none]));
    assert!(said.contains(&format!("{}: ", cut.display())) && !none.exists(), "{said}");
    restored(&criu, &scene, &copy);
}
