// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image as an OCI artifact: an image manifest, and an index that the tag names.
//!
//! Layer 0 is a tar of small files, for other tools. The next layers are the objects of a store: the manifest
//! of the image, its index and its packs. Their titles are the objects' names.

use std::collections::BTreeMap;
use std::io::Read;

use rewake_criu_images::{Digest, ImageDir};

use super::document::{Descriptor, Document, INDEX, Index, LAYER, MANIFEST, Manifest};
use crate::names::{INDEXES, MANIFESTS, PACKS, WORKING_SETS, is_object};

/// The type of the artifact.
const ARTIFACT: &str = "application/vnd.rewake.checkpoint.v1";
/// The type of its configuration: the object of a store that names an image.
const CONFIG: &str = "application/vnd.rewake.image.v1";
/// The annotation that says which object of a store a layer is.
const TITLE: &str = "org.opencontainers.image.title";
/// The annotation with the image id.
const IMAGE_ID: &str = "rewake.image.id";
/// The log of CRIU in an image directory, and how much of it is read: what is wanted is at its beginning.
const LOG: &str = "dump.log";
const MAX_LOG: u64 = 16 << 10;

/// A blob of a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blob {
    /// `sha256:` and 64 digits.
    pub(super) digest: String,
    pub(super) length: u64,
}

/// What a manifest of a registry says, if it is one of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Artifact {
    pub(super) config: Blob,
    /// The objects of a store, by their names.
    pub(super) objects: Vec<(String, Blob)>,
}

/// What a tag names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Tagged {
    /// An index with the manifest of this digest.
    Index(String),
    /// An image.
    Artifact(Artifact),
    /// Something else, of this type.
    Other(String),
}

/// Returns the bytes of the manifest.
pub(super) fn manifest(
    config: &Blob,
    files: &Blob,
    objects: &[(String, Blob)],
    annotations: &BTreeMap<String, String>,
) -> serde_json::Result<Vec<u8>> {
    let mut layers = vec![descriptor(LAYER, files, None)];
    layers.extend(objects.iter().map(|(name, blob)| {
        let title = BTreeMap::from([(TITLE.to_owned(), name.clone())]);
        descriptor(media_type(name), blob, Some(title))
    }));
    serde_json::to_vec(&Manifest {
        schema_version: 2,
        media_type: Some(MANIFEST.to_owned()),
        config: descriptor(CONFIG, config, None),
        layers,
        artifact_type: Some(ARTIFACT.to_owned()),
        annotations: Some(annotations.clone()),
    })
}

/// Returns the bytes of the index: containerd reads annotations in it, and checkpointctl in the manifest.
pub(super) fn index(manifest: &Blob, annotations: &BTreeMap<String, String>) -> serde_json::Result<Vec<u8>> {
    let entry = descriptor(MANIFEST, manifest, None);
    serde_json::to_vec(&Index {
        schema_version: 2,
        media_type: Some(INDEX.to_owned()),
        manifests: vec![Descriptor { artifact_type: Some(ARTIFACT.to_owned()), ..entry }],
        artifact_type: Some(ARTIFACT.to_owned()),
        annotations: Some(annotations.clone()),
    })
}

/// Reads an index or a manifest of a registry.
pub(super) fn parse(bytes: &[u8]) -> Result<Tagged, String> {
    let found = match serde_json::from_slice(bytes) {
        // Another kind of manifest, such as Docker's first one.
        Err(error) if error.is_data() => return Ok(Tagged::Other("no manifest of OCI".to_owned())),
        found => found.map_err(|error| format!("no manifest of OCI: {error}"))?,
    };
    let manifest = match found {
        Document::Index(index) => {
            let is_image = |entry: &&Descriptor| entry.media_type == MANIFEST;
            let entries: Vec<_> = index.manifests.iter().filter(is_image).collect();
            // One entry: copies may have lost its type.
            return Ok(match *entries {
                [entry] => Tagged::Index(checked(&entry.digest)?),
                _ => Tagged::Other(format!("an index of {} images", entries.len())),
            });
        }
        Document::Manifest(manifest) => manifest,
    };
    // A program that does not know the artifact's type may lose it, and keeps this one.
    if manifest.config.media_type != CONFIG {
        return Ok(Tagged::Other(manifest.artifact_type.unwrap_or(manifest.config.media_type)));
    }
    let mut objects = Vec::new();
    for layer in &manifest.layers {
        let title = layer.annotations.as_ref().and_then(|annotations| annotations.get(TITLE));
        let Some(name) = title.filter(|title| is_stored(title)) else { continue };
        objects.push((name.clone(), blob(layer)?));
    }
    Ok(Tagged::Artifact(Artifact { config: blob(&manifest.config)?, objects }))
}

/// Whether a layer's title is the name of an object that images have.
fn is_stored(title: &str) -> bool {
    let parts = title.split_once('/');
    parts.is_some_and(|(folder, name)| {
        [PACKS, INDEXES, MANIFESTS, WORKING_SETS].contains(&folder) && is_object(folder, name)
    })
}

/// What is known about the dump, by the names that container engines use. Nothing is guessed: what CRIU's log
/// does not say is left out.
pub(super) fn annotations(id: Digest, images: &ImageDir) -> BTreeMap<String, String> {
    let mut found = BTreeMap::from([(IMAGE_ID.to_owned(), id.to_string())]);
    let mut log = Vec::new();
    if let Ok(Some((_, file, _))) = images.file(LOG) {
        // Without the log, or a part of it, there are fewer annotations.
        let _ = file.take(MAX_LOG).read_to_end(&mut log);
    }
    found.extend(
        said_by(&String::from_utf8_lossy(&log))
            .map(|(key, value)| (format!("org.criu.checkpoint.{key}"), value.to_owned())),
    );
    found
}

/// What CRIU's log says: its own version, and that of the kernel.
fn said_by(log: &str) -> impl Iterator<Item = (&'static str, &str)> {
    let after = |words: &str| {
        log.lines().find_map(|line| {
            // "(00.000235) Version: 4.2.1 (gitid 0)"
            let (_, said) = line.strip_prefix('(')?.split_once(") ")?;
            said.strip_prefix(words)
        })
    };
    let version = after("Version: ").and_then(|rest| rest.split_whitespace().next());
    // "Running on HOST Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC x86_64": as uname(2) has it.
    let system = after("Running on ").map(|rest| rest.split_whitespace().collect::<Vec<_>>());
    let (kernel, machine) = match system.as_deref() {
        Some([_, "Linux", kernel, .., machine]) => (Some(*kernel), Some(*machine)),
        _ => (None, None),
    };
    // Engines name an architecture as Go does.
    let architecture = machine.and_then(|machine| match machine {
        "x86_64" => Some("amd64"),
        "aarch64" => Some("arm64"),
        _ => None,
    });
    let all = [("criu.version", version), ("host.kernel", kernel), ("host.arch", architecture)];
    all.into_iter().filter_map(|(key, value)| Some((key, value?)))
}

fn media_type(object: &str) -> &'static str {
    match object.split_once('/') {
        Some((MANIFESTS, _)) => "application/vnd.rewake.manifest.v1",
        Some((WORKING_SETS, _)) => "application/vnd.rewake.working-set.v1+json",
        Some((INDEXES, _)) => "application/vnd.rewake.index.v1",
        _ => "application/vnd.rewake.pack.v1",
    }
}

fn descriptor(media_type: &str, blob: &Blob, annotations: Option<BTreeMap<String, String>>) -> Descriptor {
    // No file has more bytes.
    let (digest, size) = (blob.digest.clone(), i64::try_from(blob.length).unwrap_or(i64::MAX));
    Descriptor { media_type: media_type.to_owned(), digest, size, annotations, artifact_type: None }
}

fn blob(descriptor: &Descriptor) -> Result<Blob, String> {
    let Descriptor { digest, size, .. } = descriptor;
    let length = u64::try_from(*size).map_err(|_| format!("a blob of {size} bytes"))?;
    Ok(Blob { digest: checked(digest)?, length })
}

/// Returns a digest that may be a part of an address.
fn checked(digest: &str) -> Result<String, String> {
    let digits = digest.strip_prefix("sha256:").unwrap_or_default();
    if digits.len() != 64 || !digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(format!("the digest {digest:.80?}, expected sha256 and 64 digits"));
    }
    Ok(digest.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: &str = "0123456789abcdef0123456789abcdef-0123456789abcdef";
    const LOG_OF_CRIU: &str = "(00.000000) CRIU run id = 885090a9\n(00.000235) Version: 4.2.1 (gitid 0)\n\
                               (00.000241) Running on host Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC x86_64\n";

    fn blob(digit: char, length: u64) -> Blob {
        Blob { digest: format!("sha256:{}", digit.to_string().repeat(64)), length }
    }

    fn objects() -> Vec<(String, Blob)> {
        let names = [MANIFESTS, INDEXES, PACKS].map(|folder| format!("{folder}/{VERSION}"));
        names.into_iter().zip([blob('3', 30), blob('4', 40), blob('5', 50)]).collect()
    }

    fn annotated() -> BTreeMap<String, String> {
        BTreeMap::from([("org.criu.checkpoint.host.arch".to_owned(), "amd64".to_owned())])
    }

    fn digits(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    #[test]
    fn the_manifest_has_these_bytes() {
        let manifest = manifest(&blob('1', 10), &blob('2', 20), &objects(), &annotated()).unwrap();
        let expected = format!(
            concat!(
                r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","#,
                r#""config":{{"mediaType":"application/vnd.rewake.image.v1","digest":"sha256:{}","size":10}},"#,
                r#""layers":[{{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"sha256:{}","size":20}},"#,
                r#"{{"mediaType":"application/vnd.rewake.manifest.v1","digest":"sha256:{}","size":30,"#,
                r#""annotations":{{"org.opencontainers.image.title":"manifests/{v}"}}}},"#,
                r#"{{"mediaType":"application/vnd.rewake.index.v1","digest":"sha256:{}","size":40,"#,
                r#""annotations":{{"org.opencontainers.image.title":"indexes/{v}"}}}},"#,
                r#"{{"mediaType":"application/vnd.rewake.pack.v1","digest":"sha256:{}","size":50,"#,
                r#""annotations":{{"org.opencontainers.image.title":"packs/{v}"}}}}],"#,
                r#""artifactType":"application/vnd.rewake.checkpoint.v1","#,
                r#""annotations":{{"org.criu.checkpoint.host.arch":"amd64"}}}}"#
            ),
            digits('1'),
            digits('2'),
            digits('3'),
            digits('4'),
            digits('5'),
            v = VERSION
        );
        assert_eq!(String::from_utf8(manifest.clone()).unwrap(), expected);
        let artifact = Artifact { config: blob('1', 10), objects: objects() };
        assert_eq!(parse(&manifest), Ok(Tagged::Artifact(artifact)));
    }

    #[test]
    fn the_index_has_the_same_annotations_and_these_bytes() {
        let index = index(&blob('6', 60), &annotated()).unwrap();
        let expected = format!(
            concat!(
                r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{{"#,
                r#""mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:{}","size":60,"#,
                r#""artifactType":"application/vnd.rewake.checkpoint.v1"}}],"#,
                r#""artifactType":"application/vnd.rewake.checkpoint.v1","#,
                r#""annotations":{{"org.criu.checkpoint.host.arch":"amd64"}}}}"#
            ),
            digits('6')
        );
        assert_eq!(String::from_utf8(index.clone()).unwrap(), expected);
        assert_eq!(parse(&index), Ok(Tagged::Index(format!("sha256:{}", digits('6')))));
    }

    #[test]
    fn other_manifests_are_named_and_wrong_ones_refused() {
        let manifest = manifest(&blob('1', 10), &blob('2', 20), &objects(), &annotated()).unwrap();
        let text = String::from_utf8(manifest).unwrap();
        let image = text.replace("vnd.rewake.image.v1", "vnd.oci.image.config.v1+json");
        let found = parse(image.as_bytes());
        assert_eq!(found, Ok(Tagged::Other("application/vnd.rewake.checkpoint.v1".to_owned())));
        // A digest is a part of an address.
        let digest = text.replace(&digits('5'), "../../other");
        assert!(parse(digest.as_bytes()).unwrap_err().contains("expected sha256 and 64 digits"));
        assert!(parse(text.replace(":50", ":-50").as_bytes()).unwrap_err().contains("a blob of -50 bytes"));
        assert!(parse(b"{\"schema").unwrap_err().contains("no manifest of OCI"));
        // Docker's manifests.
        for (docker, found) in [
            (r#"{"schemaVersion":1,"name":"a","fsLayers":[]}"#, "no manifest of OCI"),
            (
                r#"{"schemaVersion":2,"config":{"mediaType":"a","digest":"sha256:1","size":1},"layers":[]}"#,
                "a",
            ),
            (
                r#"{"schemaVersion":2,"manifests":[{"mediaType":"a","digest":"sha256:1","size":1}]}"#,
                "an index of 0 images",
            ),
        ] {
            assert_eq!(parse(docker.as_bytes()), Ok(Tagged::Other(found.to_owned())), "{docker}");
        }
        // A layer with another title is not an object.
        let title = text.replace("packs/", "../packs/");
        let Ok(Tagged::Artifact(artifact)) = parse(title.as_bytes()) else { panic!("{title}") };
        assert_eq!(artifact.objects, objects()[..2]);
    }

    #[test]
    fn annotations_say_what_criu_has_logged_and_no_more() {
        let all = |log: &'static str| said_by(log).collect::<Vec<_>>();
        assert_eq!(
            all(LOG_OF_CRIU),
            [("criu.version", "4.2.1"), ("host.kernel", "6.18.44"), ("host.arch", "amd64")]
        );
        assert_eq!(all(""), []);
        assert_eq!(all("(00.1) Running on host Linux\nVersion: 1\n"), []);
        assert_eq!(all("(00.1) Running on host Linux 6.1 #1 SMP riscv64\n"), [("host.kernel", "6.1")]);
    }
}
