// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake seal`: writes the manifest of an image.

use std::path::Path;
use std::time::Instant;

use anyhow::bail;
use rewake_criu_images::Digest;
use rewake_image_signature::ImageSignature;
use rewake_image_transfer::pull::keep_signature;
use rewake_manifest::{MANIFEST_NAME, ManifestError, SealReport, VerifyReport, seal, verify_files};
use rewake_process::file_lock::DirectoryLock;
use rewake_streamer::units;

use super::print;
use crate::cli::SealArgs;

/// Runs the command; gives the exit code.
///
/// # Errors
/// The image cannot be sealed: it has no manifest then. Or it has one, and differs from it.
pub fn run(options: &SealArgs) -> anyhow::Result<u8> {
    let start = Instant::now();
    let lock = match DirectoryLock::take(&options.images_dir) {
        Ok(None) => bail!(
            "{}: a dump, a copy or a restore writes into it: seal it when that has ended",
            options.images_dir.display()
        ),
        // Remote file systems may have no locks of directories.
        lock => lock.ok().flatten(),
    };
    let sealed = match seal(&options.images_dir) {
        Err(ManifestError::AlreadySealed { .. }) => return sealed_already(options),
        sealed => sealed?,
    };
    drop(lock);
    let SealReport { id, files, bytes, zero_bytes, duplicate_bytes, manifest_bytes, .. } = sealed;
    let [all, zeros, duplicates, manifest] =
        [bytes, zero_bytes, duplicate_bytes, manifest_bytes].map(units::bytes);
    let time = units::seconds(start.elapsed());
    print::done(format!(
        "sealed {files} files, {all} in {time}: {zeros} of zeros, {duplicates} of duplicates; \
         {MANIFEST_NAME} has {manifest}; image {id}"
    ));
    sign(&options.images_dir, id, options.sign.as_deref())?;
    if sealed.has_unsealed_parent {
        let parent = options.images_dir.join("parent");
        print::say(format!("{} is not sealed: run `rewake seal` on it too", parent.display()));
    }
    Ok(0)
}

/// Reports an image that has a manifest: its files are those that were sealed, by name and length.
///
/// # Errors
/// The manifest is damaged, or a file is missing, was added, or has another length.
fn sealed_already(options: &SealArgs) -> anyhow::Result<u8> {
    let images = &*options.images_dir;
    let mut first = None;
    let report = verify_files(images, |difference| {
        first.get_or_insert_with(|| difference.clone());
    })?;
    let directory = images.to_owned();
    if let Some(difference) = first {
        return Err(ManifestError::Differs { directory, difference }.into());
    }
    let VerifyReport { id, files, bytes, .. } = report;
    print::done(format!(
        "{}: sealed already: {files} files, {}; image {id}; `rewake verify` compares every byte",
        images.display(),
        units::bytes(bytes)
    ));
    sign(images, id, options.sign.as_deref())?;
    Ok(0)
}

/// Signs a sealed image, if there is a key.
///
/// # Errors
/// The key cannot sign, or the image directory cannot be written.
pub(super) fn sign(images: &Path, id: Digest, key: Option<&Path>) -> anyhow::Result<()> {
    let Some(key) = key else { return Ok(()) };
    let signature = ImageSignature::sign(id, key)?;
    keep_signature(images, id, Some(signature.as_bytes()))?;
    let signer = ImageSignature::parse(id, signature.as_bytes())?.fingerprint();
    print::done(format!("{}: image {id} is signed by {signer}", images.display()));
    Ok(())
}
