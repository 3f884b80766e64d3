// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake export` and `rewake pull`: an image is copied to another directory, and restored there. With TLS a client
//! reads what its certificate permits.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Instant;

use rewake_criu_images::{Inventory, write};
use rewake_testkit::authority::{Authority, Issued};
use rewake_testkit::programs::rewake;
use rewake_tests::daemon::{restore, timeline};
use rewake_tests::page_server::tls_options;
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Scene, Verdict, need};

const HOST: &str = "127.0.0.1";

/// `rewake export`; ended when dropped.
struct Server {
    child: Child,
    port: String,
    said: BufReader<ChildStderr>,
}

impl Server {
    fn start(root: &Path, options: &[String]) -> Self {
        let mut command = Command::new(rewake().unwrap());
        command.arg("export").arg(root).args(["--port", "0"]).args(options).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        said.read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("rewake: listening on 127.0.0.1:");
        let port = port.unwrap_or_else(|| panic!("{line}")).to_owned();
        Self { child, port, said }
    }

    /// Runs `rewake pull`. Returns whether it succeeded, and what it wrote.
    fn pull(&self, image: &str, to: &Path, options: &[String]) -> (bool, String) {
        let mut command = Command::new(rewake().unwrap());
        command.args(["pull", "--port", &self.port, &format!("{HOST}:{image}")]).arg(to).args(options);
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    }

    /// The next line that it logs.
    fn said(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_copied_image_is_restored() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 32).unwrap();
    let server = Server::start(scene.images().parent().unwrap(), &[]);
    let name = scene.images().file_name().unwrap().to_str().unwrap().to_owned();
    let copies = tempfile::tempdir().unwrap();
    let copy = copies.path().join("copy");

    let (copied, message) = server.pull(&name, &copy, &[]);
    assert!(!copied && message.contains("run `rewake seal"), "{message}");
    let sealed = Command::new(rewake().unwrap()).arg("seal").arg(scene.images()).output().unwrap();
    assert!(sealed.status.success(), "{sealed:?}");
    let (copied, message) = server.pull(&name, &copy, &[]);
    assert!(copied && message.contains(" were sent, 0 B were here; image "), "{message}");
    let verified = Command::new(rewake().unwrap()).arg("verify").arg(&copy).output().unwrap();
    assert!(verified.status.success(), "{verified:?}");

    fs::remove_dir_all(scene.images()).unwrap();
    scene.go().unwrap();
    let mut command = restore(&criu, &copy).unwrap();
    timeline(&command.arg("-W").arg(scene.work()).args(["--", "-d"]).output().unwrap()).unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
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
            let run_id = Some(name.to_owned());
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
    fn server(&self, name: &str, options: &[&str]) -> Server {
        let mut all = self.options(&self.named(name));
        all.extend(options.iter().map(|option| (*option).to_owned()));
        Server::start(&self.root(), &all)
    }

    /// A client with these options is refused: it says this in its one line, and has no byte.
    fn refused(&self, server: &Server, image: &str, options: &[String], reason: &str) {
        let start = Instant::now();
        let (copied, message) = server.pull(image, &self.copy(), options);
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
        assert!(server.said().contains(&reason));
    }
    images.refused(&server, "web/1", &host_d, "its --allow names none of this certificate: ");
    let said = server.said();
    assert!(
        said.contains("not admitted: --allow names none of its certificate: ") && said.contains("host-d"),
        "{said}"
    );
    for (image, options) in [("web/1", &host_b), ("db/1", &host_c)] {
        let (copied, message) = server.pull(image, &images.copy(), options);
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
    let said = server.said();
    assert!(said.contains("the peer's certificate is of no CA in --tls-cacert"), "{said}");
    // Without a certificate, and without TLS at all.
    images.refused(&server, "web/1", &[], "or one with --tls?");
    let said = server.said();
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
    let said = server.said();
    assert!(said.contains("the peer does not accept this side's certificate"), "{said}");
    let in_clear = Server::start(&images.root(), &[]);
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
