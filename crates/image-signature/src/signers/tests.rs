// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signatures of this crate and of `ssh-keygen`, each checked by the other.

use std::process::{Command, Output, Stdio};

use rewake_skip::skip;

use super::*;
use crate::signature::NAMESPACE;

const ID: Digest = Digest([7; 32]);

/// Keys of `ssh-keygen`.
struct Keys(tempfile::TempDir);

impl Keys {
    /// Makes the keys `ann` and `bob`; none without `ssh-keygen`.
    fn new() -> Option<Self> {
        let keys = Self(tempfile::tempdir().unwrap());
        let make =
            |name: &str| keygen(&["-q", "-t", "ed25519", "-N", "", "-C", name, "-f"], &keys.at(name), "");
        let made = make("ann").and_then(|_| make("bob"));
        made.is_some().then_some(keys)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn public(&self, name: &str) -> String {
        fs::read_to_string(self.at(&format!("{name}.pub"))).unwrap().trim().to_owned()
    }

    /// A file with these lines; `ANN` and `BOB` are the public keys.
    fn signers(&self, lines: &str) -> PathBuf {
        let text = lines.replace("ANN", &self.public("ann")).replace("BOB", &self.public("bob"));
        fs::write(self.at("signers"), text).unwrap();
        self.at("signers")
    }

    /// Has `ssh-keygen` sign.
    fn signed(&self, name: &str, namespace: &str, text: &str) -> Vec<u8> {
        keygen(&["-Y", "sign", "-n", namespace, "-f"], &self.at(name), text).unwrap().stdout
    }
}

/// Runs `ssh-keygen`; none without it.
fn keygen(options: &[&str], file: &Path, input: &str) -> Option<Output> {
    use std::io::Write as _;
    let mut command = Command::new("ssh-keygen");
    command.args(options).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().ok()?;
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    Some(child.wait_with_output().unwrap())
}

fn refusal(signers: &Path, signature: Option<&[u8]>) -> SignatureError {
    Signers::read(signers).unwrap().check(ID, signature).unwrap_err()
}

macro_rules! keys {
    () => {
        match Keys::new() {
            Some(keys) => keys,
            None => skip!("no ssh-keygen"),
        }
    };
}

#[test]
fn ssh_keygen_accepts_our_signature_and_we_its() {
    let keys = keys!();
    let signers = keys.signers("# team\n\nann@example.com,ann2 namespaces=\"rewake-image\" ANN\nbob BOB\n");
    let ours = ImageSignature::sign(ID, &keys.at("ann")).unwrap();
    let theirs = keys.signed("ann", NAMESPACE, &format!("{ID}\n"));
    let all = Signers::read(&signers).unwrap();
    for signature in [ours.as_bytes(), &theirs] {
        assert_eq!(all.check(ID, Some(signature)).unwrap(), "ann@example.com,ann2");
    }
    fs::write(keys.at("signature"), &ours).unwrap();
    let (signature, signers) = (keys.at("signature"), signers.display().to_string());
    let options = ["-Y", "verify", "-f", &signers, "-I", "ann2", "-n", NAMESPACE, "-s"];
    let verified = keygen(&options, &signature, &format!("{ID}\n")).unwrap();
    assert!(verified.status.success(), "{verified:?}");
    let other = keygen(&options, &signature, &format!("{}\n", Digest([8; 32]))).unwrap();
    assert!(!other.status.success());
}

#[test]
fn what_no_listed_signer_has_signed_of_this_image_is_refused() {
    let keys = keys!();
    let signers = keys.signers("bob BOB\n");
    let text = format!("{ID}\n");
    assert!(matches!(refusal(&signers, None), SignatureError::Unsigned { .. }));
    let stranger = refusal(&signers, Some(&keys.signed("ann", NAMESPACE, &text)));
    assert!(matches!(stranger, SignatureError::Stranger { .. }), "{stranger}");
    let namespace = refusal(&signers, Some(&keys.signed("bob", "git", &text)));
    assert!(matches!(namespace, SignatureError::Namespace { .. }), "{namespace}");
    let other = refusal(&signers, Some(&keys.signed("bob", NAMESPACE, &format!("{}\n", Digest([8; 32])))));
    assert!(matches!(other, SignatureError::AnotherImage { .. }), "{other}");
    let good = keys.signed("bob", NAMESPACE, &text);
    Signers::read(&signers).unwrap().check(ID, Some(&good)).unwrap();
    for wrong in [&good[..good.len() / 2], b"", b"text", &vec![b'x'; 9000]] {
        let damaged = refusal(&signers, Some(wrong));
        assert!(matches!(damaged, SignatureError::Damaged { .. }), "{damaged}");
        assert_eq!(damaged.to_string().lines().count(), 1);
    }
    // The key of another signer in a signature that it has not made.
    let [ours, ann] = ["bob", "ann"].map(|name| SshSigText::of(&keys.signed(name, NAMESPACE, &text)));
    let forged = ann.with_key_of(&ours);
    assert!(matches!(refusal(&signers, Some(&forged)), SignatureError::AnotherImage { .. }));
}

/// A signature whose key can be exchanged.
struct SshSigText(ssh_key::SshSig);

impl SshSigText {
    fn of(text: &[u8]) -> Self {
        Self(ssh_key::SshSig::from_pem(text).unwrap())
    }

    fn with_key_of(&self, other: &Self) -> Vec<u8> {
        let (key, signature) = (other.0.public_key().clone(), self.0.signature().clone());
        let forged = ssh_key::SshSig::new(key, NAMESPACE, self.0.hash_alg(), signature).unwrap();
        forged.to_pem(ssh_key::LineEnding::LF).unwrap().into_bytes()
    }
}

#[test]
fn a_line_permits_its_namespaces_in_its_time() {
    let keys = keys!();
    let signature = keys.signed("ann", NAMESPACE, &format!("{ID}\n"));
    let check = |lines: &str| {
        let all = Signers::read(&keys.signers(lines))?;
        all.check(ID, Some(&signature)).map(str::to_owned)
    };
    for (lines, expected) in [
        ("ann valid-before=\"20200101\" ANN", "not valid any more"),
        ("ann valid-after=\"20990101Z\" ANN", "not valid yet"),
        ("ann namespaces=\"git,file\" ANN", "has no rewake-image"),
    ] {
        let error = check(lines).unwrap_err();
        assert!(matches!(error, SignatureError::NotPermitted { line: 1, .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    // Another line has the same key.
    assert_eq!(check("old valid-before=\"20200101\" ANN\nnew ANN").unwrap(), "new");
    assert_eq!(
        check("\"ann smith\" namespaces=\"rewake-*\",valid-after=\"20200101\" ANN note").unwrap(),
        "ann smith"
    );
    for (lines, expected) in [
        ("bob BOB\nann cert-authority ANN", "line 2: cert-authority"),
        ("ann", "expected principals"),
        ("ann ssh-ed25519 AAAA", "the key is damaged"),
        ("ann some-option ANN", "is not known"),
    ] {
        let error = check(lines).unwrap_err();
        assert!(matches!(error, SignatureError::Signers { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_key_that_cannot_sign_is_refused_with_what_to_do() {
    let keys = keys!();
    let make = |name: &str, options: &[&str]| {
        let file = keys.at(name);
        let _ = fs::remove_file(&file);
        keygen(&[options, &["-q", "-f"]].concat(), &file, "").unwrap();
        ImageSignature::sign(ID, &file).unwrap_err().to_string()
    };
    let error = make("locked", &["-t", "ed25519", "-N", "passphrase"]);
    assert!(error.contains("has a passphrase") && error.contains("ssh-keygen -Y sign"), "{error}");
    let error = make("rsa", &["-t", "rsa", "-b", "2048", "-N", ""]);
    assert!(error.contains("ssh-keygen -t ed25519"), "{error}");
    let error = ImageSignature::sign(ID, &keys.at("ann.pub")).unwrap_err().to_string();
    assert!(error.contains("a public key"), "{error}");
    let error = ImageSignature::sign(ID, &keys.at("none")).unwrap_err();
    assert!(matches!(error, SignatureError::Io { .. }), "{error}");
}
