// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake verify`: compares an image and its parents, or an image of a store, with their manifests.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, bail};
use rewake_criu_images::{Digest, ImageDir, MAX_PARENTS};
use rewake_image_signature::{ImageSignature, SignatureError, Signers};
use rewake_image_store::{ImageStore, ImageUrl, StoreVerifyReport};
use rewake_manifest::{MANIFEST_NAME, ManifestReader, ManifestRecord, SealedParent, VerifyReport, verify};
use rewake_streamer::planner::confine_to_images;
use rewake_streamer::units;

use super::{print, store_runtime};
use crate::cli::{SealedPlace, VerifyArgs};
use crate::logging;

/// Differences of one directory that are shown.
const SHOWN: u64 = 50;

/// Runs the command; gives the exit code.
///
/// # Errors
/// The image or a parent is not sealed, cannot be read, or is not as it was sealed: the differences were
/// shown.
pub fn run(options: &VerifyArgs) -> anyhow::Result<u8> {
    let images_dir = match &options.image {
        SealedPlace::Directory(images_dir) => images_dir,
        SealedPlace::Store(image) => return stored(image),
    };
    let image = ImageDir::open(images_dir)?;
    let parents = image.ancestors();
    let all: Vec<&ImageDir> = std::iter::once(&image).chain(&parents).collect();
    confine_to_images(&all).with_context(|| format!("{}: confining this process", images_dir.display()))?;
    let mut wrong = directory(images_dir)?;
    for parent in &parents {
        wrong += directory(parent.path())?;
    }
    if wrong > 0 {
        bail!("{}: not as sealed: use another copy of it, or dump again", images_dir.display());
    }
    Ok(0)
}

/// Verifies an image of a store.
fn stored(image: &ImageUrl) -> anyhow::Result<u8> {
    logging::start(None, 2)?;
    let start = Instant::now();
    let runtime = store_runtime()?;
    let store = ImageStore::open(&image.store)?;
    let mut shown = 0;
    let report = runtime.block_on(rewake_image_store::verify(&store, &image.name, |wrong| {
        shown += 1;
        if shown <= SHOWN {
            print::done(format!("{image}/{wrong}"));
        }
    }))?;
    let StoreVerifyReport { id, files, bytes, read, wrong } = report;
    if wrong > 0 {
        bail!(
            "{image}: {wrong} chunks are not as sealed: `rewake push` of another copy of the image stores \
             them again; images that share them need that, too"
        );
    }
    let ([bytes, read], time) = ([bytes, read].map(units::bytes), units::seconds(start.elapsed()));
    print::done(format!(
        "{image}: as sealed: {files} files, {bytes}; {read} were read in {time}; image {id}"
    ));
    Ok(0)
}

/// Verifies one directory, and returns the number of differences.
fn directory(images: &Path) -> anyhow::Result<u64> {
    let start = Instant::now();
    let mut shown = 0;
    let report = verify(images, |difference| {
        shown += 1;
        if shown <= SHOWN {
            print::done(format!("{}/{difference}", images.display()));
        }
    })?;
    let VerifyReport { id, files, bytes, differences } = report;
    if differences > SHOWN {
        print::done(format!("{}: {} differences more", images.display(), differences - SHOWN));
    } else if differences == 0 {
        let (bytes, time) = (units::bytes(bytes), units::seconds(start.elapsed()));
        let signer = signed_by(&ImageDir::open(images)?, id);
        let signer = signer.map_or_else(String::new, |signer| format!("; signed by {signer}"));
        let images = images.display();
        print::done(format!("{images}: as sealed: {files} files, {bytes} in {time}; image {id}{signer}"));
    }
    Ok(differences)
}

/// The signer of an image, for a report: the fingerprint of a key that has made the signature, which need not
/// be one that this node accepts, or what is wrong with the signature. `None` if the image is not signed.
pub fn signed_by(images: &ImageDir, id: Digest) -> Option<String> {
    let read = || {
        let Some(bytes) = ImageSignature::read(images)? else { return Ok(None) };
        let signature = ImageSignature::parse(id, &bytes)?;
        signature.check().map(|()| Some(signature.fingerprint()))
    };
    read().unwrap_or_else(|error: SignatureError| Some(error.to_string()))
}

/// Compares a sealed image, and the images that it is based on, with their manifests: CRIU is to load all of
/// its memory itself, and compares nothing. An image without a manifest is not compared.
///
/// # Errors
/// A file is not as sealed, or cannot be read.
pub fn expect_as_sealed(images: &Path, signers: &[PathBuf]) -> anyhow::Result<()> {
    let signers = Signers::all(signers)?;
    let mut directory = images.to_owned();
    // Of the image itself, and whether each child names the id of its parent.
    let (mut id, mut covers_parents) = (None, true);
    for _ in 0..=MAX_PARENTS {
        if !directory.join(MANIFEST_NAME).exists() {
            break;
        }
        covers_parents &= names_parent(&directory)?;
        let mut first = None;
        let report = verify(&directory, |difference| {
            first.get_or_insert_with(|| difference.to_string());
        })?;
        id = id.or(Some(report.id));
        if let Some(difference) = first {
            bail!("{}/{difference}; nothing was started", directory.display());
        }
        directory.push("parent");
    }
    Ok(Signers::check_image(&signers, &ImageDir::open(images)?, id, covers_parents)?)
}

/// Whether the manifest of a directory names the id of its parent, if there is one.
fn names_parent(directory: &Path) -> anyhow::Result<bool> {
    let first = ManifestReader::open(&ImageDir::open(directory)?)?.next_record()?;
    Ok(!matches!(first, Some(ManifestRecord::Parent(SealedParent { id: None, .. }))))
}
