// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signed images: `--sign` and `--signers` of each command, with keys of `ssh-keygen`.

use std::fs;
use std::path::Path;
use std::process::Command;

use rewake_tests::commands::{done, refused};
use rewake_tests::daemon::{has_namespaces, restore, timeline};
use rewake_tests::export::seal;
use rewake_tests::node_cache::{StoredScene, said};
use rewake_tests::node_etc::NodeEtc;
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Scene, Verdict, need, skip};

/// Keys `ann` and `bob`, and a file that permits each.
struct Keys(tempfile::TempDir);

impl Keys {
    /// None without `ssh-keygen`.
    fn new() -> anyhow::Result<Self> {
        let keys = Self(tempfile::tempdir()?);
        for name in ["ann", "bob"] {
            let mut command = Command::new("ssh-keygen");
            command.args(["-q", "-t", "ed25519", "-N", "", "-C", "", "-f"]).arg(keys.0.path().join(name));
            anyhow::ensure!(command.status()?.success(), "ssh-keygen failed");
            let public = fs::read_to_string(keys.0.path().join(format!("{name}.pub")))?;
            fs::write(keys.0.path().join(format!("{name}.signers")), format!("{name}@example.com {public}"))?;
        }
        Ok(keys)
    }

    fn at(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }
}

/// Restores an image by a streamer of the command's own. Returns why it is refused, if it is.
fn restored(scene: &Scene, images: &Path, signers: &str) -> Option<String> {
    let mut command = restore(scene.criu(), images).unwrap();
    command.args(["--signers", signers]);
    let output = command.arg("-W").arg(scene.work()).args(["--", "-d"]).output().unwrap();
    if !output.status.success() {
        return Some(said(&output));
    }
    timeline(&output).unwrap();
    None
}

#[test]
fn an_image_is_restored_if_a_signer_has_signed_it() {
    let criu = need!(Criu::main());
    let keys = need!(Keys::new());
    let scene = Scene::dumped(&criu, "plain", 8).unwrap();
    let images = scene.images();
    let path = images.to_str().unwrap().to_owned();
    let ann = keys.at("ann.signers");
    let refusal = |expected: &str| {
        let reason = restored(&scene, &images, &ann).unwrap();
        assert!(reason.contains(expected), "{reason}");
    };
    refusal("the image is not sealed");
    seal(&scene).unwrap();
    refusal("is not signed");
    done(&["seal", &path, "--sign", &keys.at("bob")]);
    refusal("has no line with this key");
    assert!(done(&["seal", &path, "--sign", &keys.at("ann")]).contains("is signed by SHA256:"));
    assert!(done(&["verify", &path]).contains("; signed by SHA256:"));

    // Another manifest, with its own right hashes, and a file of the image.
    let at = |name: &str| images.join(name);
    let signed = fs::read(at("rewake-manifest")).unwrap();
    fs::remove_file(at("rewake-manifest")).unwrap();
    fs::write(at("extra.img"), "x").unwrap();
    done(&["seal", &path]);
    refusal("the manifest or the signature was replaced");
    fs::write(at("rewake-manifest"), &signed).unwrap();
    refusal("extra.img");
    fs::remove_file(at("extra.img")).unwrap();
    // A working set is an order, and no part of what is signed.
    fs::write(at("rewake-working-set.json"), "{}").unwrap();
    scene.go().unwrap();
    assert_eq!(restored(&scene, &images, &ann), None);
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

/// Restores as [`restored`] does, without `--signers`, on a node whose administrator requires signatures.
fn restored_on(node: &NodeEtc, scene: &Scene) -> Option<String> {
    let mut command = restore(scene.criu(), &scene.images()).unwrap();
    command.arg("-W").arg(scene.work()).args(["--", "-d"]);
    let output = node.around(&command).output().unwrap();
    if !output.status.success() {
        return Some(said(&output));
    }
    timeline(&output).unwrap();
    None
}

#[test]
fn a_node_with_signers_restores_no_other_image() {
    let criu = need!(Criu::main());
    let keys = need!(Keys::new());
    if !has_namespaces() {
        skip!("this machine makes no namespaces");
    }
    let scene = Scene::dumped(&criu, "plain", 8).unwrap();
    let signers = fs::read_to_string(keys.at("ann.signers")).unwrap();
    let node = NodeEtc::with(&[("signers", &signers)]).unwrap();
    seal(&scene).unwrap();
    let reason = restored_on(&node, &scene).unwrap();
    assert!(reason.contains("is not signed") && reason.contains("/etc/rewake/signers"), "{reason}");
    let path = scene.images().display().to_string();
    done(&["seal", &path, "--sign", &keys.at("bob")]);
    let reason = restored_on(&node, &scene).unwrap();
    assert!(reason.contains("/etc/rewake/signers has no line with this key"), "{reason}");
    done(&["seal", &path, "--sign", &keys.at("ann")]);
    scene.go().unwrap();
    assert_eq!(restored_on(&node, &scene), None);
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);

    let node = NodeEtc::with(&[("signers", "ann@example.com no-key\n")]).unwrap();
    let reason = restored_on(&node, &scene).unwrap();
    assert!(reason.contains("/etc/rewake/signers line 1: "), "{reason}");
}

#[test]
fn a_signature_travels_with_its_image() {
    let criu = need!(Criu::main());
    let keys = need!(Keys::new());
    let stored = StoredScene::new(&criu, "plain", 8).unwrap();
    let (ann, bob) = (keys.at("ann.signers"), keys.at("bob.signers"));
    let folder = tempfile::tempdir().unwrap();
    let copy = |name: &str| folder.path().join(name).display().to_string();

    assert!(refused(&["pull", &stored.url, &copy("none"), "--signers", &ann]).contains("is not signed"));
    let (succeeded, text) = stored.cache(&["warm", &stored.url, "--signers", &ann]).unwrap();
    assert!(!succeeded && text.contains("is not signed"), "{text}");
    assert!(!folder.path().join("none").exists());

    // The image is stored already: its signature is all that is written.
    done(&["pull", &stored.url, &copy("a")]);
    done(&["push", &copy("a"), &stored.url, "--sign", &keys.at("ann")]);
    done(&["pull", &stored.url, &copy("b"), "--signers", &ann]);
    let signature = |name: &str| fs::read(folder.path().join(name).join("rewake-signature")).unwrap();
    assert_eq!(signature("a"), signature("b"));
    assert!(
        refused(&["pull", &stored.url, &copy("c"), "--signers", &bob]).contains("has no line with this key")
    );

    let refusal = said(&stored.restore(&["--signers", &bob]).unwrap().output().unwrap());
    assert!(refusal.contains("has no line with this key"), "{refusal}");
    stored.scene.go().unwrap();
    timeline(&stored.restore(&["--signers", &ann]).unwrap().output().unwrap()).unwrap();
    stored.scene.stop().unwrap();
    assert_eq!(stored.scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", stored.daemon.logs());
}
