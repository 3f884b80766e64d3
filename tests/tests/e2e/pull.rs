// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake export` and `rewake pull`: an image is copied to another directory, and restored there. With TLS a
//! client reads what its certificate permits.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use rewake_criu_images::{Inventory, write};
use rewake_testkit::authority::{Authority, Issued};
use rewake_testkit::programs::rewake;
use rewake_tests::daemon::{restore, timeline};
use rewake_tests::export::{ImageExport, pull, seal, verify};
use rewake_tests::page_server::tls_options;
use rewake_tests::relay::SlowLink;
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Scene, Verdict, need};

const HOST: &str = "127.0.0.1";

#[test]
fn a_copied_image_is_restored() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 32).unwrap();
    let server = ImageExport::start(scene.images().parent().unwrap(), &[]).unwrap();
    let copies = tempfile::tempdir().unwrap();
    let copy = copies.path().join("copy");

    let (copied, message) = pull(server.port(), "images", &copy, &[]).unwrap();
    assert!(!copied && message.contains("run `rewake seal"), "{message}");
    let name = seal(&scene).unwrap();
    let (copied, message) = pull(server.port(), &name, &copy, &[]).unwrap();
    assert!(copied && message.contains(" were sent, 0 B were here; image "), "{message}");
    verify(&copy).unwrap();

    fs::remove_dir_all(scene.images()).unwrap();
    scene.go().unwrap();
    let mut command = restore(&criu, &copy).unwrap();
    timeline(&command.arg("-W").arg(scene.work()).args(["--", "-d"]).output().unwrap()).unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn over_a_slow_link_data_travels_compressed() {
    const MIB: u64 = 64;
    let images = Images::new();
    let image = images.root().join("web/1");
    // Each chunk has other bytes: a duplicate is not sent.
    let pages: Vec<u8> = (0..MIB << 17).flat_map(|n| (n / 64).to_le_bytes()).collect();
    fs::write(image.join("pages-1.img"), pages).unwrap();
    fs::remove_file(image.join("rewake-manifest")).unwrap();
    let sealed = Command::new(rewake().unwrap()).arg("seal").arg(&image).output().unwrap();
    assert!(sealed.status.success(), "{sealed:?}");
    let server = ImageExport::start(&images.root(), &[]).unwrap();
    let link = SlowLink::to(server.port(), 30 << 20).unwrap();
    let (copied, message) = pull(link.port(), "web/1", &images.copy(), &[]).unwrap();
    assert!(copied, "{message}");
    verify(&images.copy()).unwrap();
    let passed = link.passed() >> 20;
    assert!((8..MIB / 2).contains(&passed), "{passed} MiB: {message}");
}

#[test]
fn addresses_of_other_hosts_need_a_word() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(rewake().unwrap());
    let output = command.arg("export").arg(dir.path()).args(["--address", "0.0.0.0"]).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && message.contains("add --insecure"), "{message}");
}

/// A directory with the sealed images `web/1` and `db/1`, and a place for a copy.
struct Images {
    authority: Authority,
    folder: tempfile::TempDir,
}

impl Images {
    fn new() -> Self {
        let images = Self { authority: Authority::new(), folder: tempfile::tempdir().unwrap() };
        for name in ["web/1", "db/1"] {
            let image = images.root().join(name);
            fs::create_dir_all(&image).unwrap();
            let run_id = Some(name.into());
            write::inventory(&image, &Inventory { version: 2, plugins: Vec::new(), run_id }).unwrap();
            fs::write(image.join("pages-1.img"), name.repeat(4096)).unwrap();
            let sealed = Command::new(rewake().unwrap()).arg("seal").arg(&image).output().unwrap();
            assert!(sealed.status.success(), "{sealed:?}");
        }
        images
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("images")
    }

    fn copy(&self) -> PathBuf {
        self.folder.path().join("copy")
    }

    fn named(&self, name: &str) -> Issued {
        self.authority.issue(|request| request.address(name))
    }

    fn options(&self, own: &Issued) -> Vec<String> {
        tls_options(&self.authority, own)
    }

    /// A server with a certificate of this name, with these options.
    fn server(&self, name: &str, options: &[&str]) -> ImageExport {
        let mut all = self.options(&self.named(name));
        all.extend(options.iter().map(|option| (*option).to_owned()));
        ImageExport::start(&self.root(), &all).unwrap()
    }

    /// A client with these options is refused: it says this in its one line, and has no byte.
    fn refused(&self, server: &ImageExport, image: &str, options: &[String], reason: &str) {
        let start = Instant::now();
        let (copied, message) = pull(server.port(), image, &self.copy(), options).unwrap();
        assert!(!copied && message.lines().count() == 1 && message.contains(reason), "{message}");
        assert!(!self.copy().exists() && start.elapsed().as_secs() < 20);
    }
}

#[test]
fn a_client_reads_the_images_that_its_certificate_permits() {
    let images = Images::new();
    let mut server = images.server(HOST, &["--allow", "host-b=web", "--allow", "host-c"]);
    let [host_b, host_c, host_d] =
        ["host-b", "host-c", "host-d"].map(|name| images.options(&images.named(name)));
    for image in ["db/1", "none/1", "webs/1"] {
        let reason = format!(
            "image {image}: this server's --allow permits this client's certificate to read web only"
        );
        images.refused(&server, image, &host_b, &reason);
        assert!(server.said().unwrap().contains(&reason));
    }
    images.refused(&server, "web/1", &host_d, "its --allow names none of this certificate: ");
    let said = server.said().unwrap();
    assert!(
        said.contains("not admitted: --allow names none of its certificate: ") && said.contains("host-d"),
        "{said}"
    );
    for (image, options) in [("web/1", &host_b), ("db/1", &host_c)] {
        let (copied, message) = pull(server.port(), image, &images.copy(), options).unwrap();
        assert!(copied, "{message}");
        let pages = fs::read(images.copy().join("pages-1.img")).unwrap();
        assert!(pages == image.repeat(4096).as_bytes());
        fs::remove_dir_all(images.copy()).unwrap();
    }
}

#[test]
fn a_client_that_the_ca_does_not_know_is_refused() {
    let images = Images::new();
    let mut server = images.server(HOST, &[]);
    let other = Authority::named("Other CA");
    let stranger = images.options(&other.issue(|request| request.address(HOST)));
    images.refused(
        &server,
        "web/1",
        &stranger,
        "the peer does not accept this side's certificate (UnknownCA)",
    );
    let said = server.said().unwrap();
    assert!(said.contains("the peer's certificate is of no CA in --tls-cacert"), "{said}");
    // Without a certificate, and without TLS at all.
    images.refused(&server, "web/1", &[], "or one with --tls?");
    let said = server.said().unwrap();
    assert!(said.contains("the peer does not use TLS: start it with --tls, too"), "{said}");
}

#[test]
fn a_server_that_is_not_the_named_host_is_refused() {
    let images = Images::new();
    let mut server = images.server("host-a", &[]);
    let client = images.options(&images.named(HOST));
    images.refused(
        &server,
        "web/1",
        &client,
        "host-a\"): expected 127.0.0.1, the address that this side was given",
    );
    let said = server.said().unwrap();
    assert!(said.contains("the peer does not accept this side's certificate"), "{said}");
    let in_clear = ImageExport::start(&images.root(), &[]).unwrap();
    images.refused(&in_clear, "web/1", &client, "the peer closed the connection during the TLS handshake");
}

#[test]
fn rights_need_tls_and_names() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |options: &[&str], reason: &str| {
        let mut command = Command::new(rewake().unwrap());
        let output = command.arg("export").arg(folder.path()).args(options).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && message.contains(reason), "{message}");
    };
    refused(&["--allow", "host-b"], "--tls");
    refused(&["--tls", "--insecure"], "cannot be used with");
    refused(&["--tls", "--allow", "host-b=../other"], "expected NAME=FOLDER");
    refused(&["--tls", "--tls-no-cn-verify"], "name the clients with --allow");
}
