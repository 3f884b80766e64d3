// SPDX-License-Identifier: MIT OR Apache-2.0
//! Layer 0: the files of an image that other tools read, as a tar with the paths of a container engine's
//! archive.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};

use rewake_criu_images::ImageDir;
use rewake_manifest::{MANIFEST_NAME, ManifestReader, ManifestRecord};
use tar::{Builder, EntryType, Header};

use crate::error::{ImageStoreError, Result};

/// The folder of CRIU's files in an archive.
const FOLDER: &str = "checkpoint/";
/// The longest file of the layer. Longer ones are memory, or contents of file systems.
const MAX_FILE: u64 = 16 << 20;

/// Writes the layer into a temporary file. Its bytes depend on the image alone.
pub(super) fn write(images: &ImageDir, mut manifest: ManifestReader) -> Result<(File, u64)> {
    let failed = |reason| ImageStoreError::File { file: "a temporary file".to_owned(), reason };
    let mut tar = Builder::new(tempfile::tempfile().map_err(failed)?);
    let mut folder = header(EntryType::Directory, 0);
    tar.append_data(&mut folder, FOLDER, io::empty()).map_err(failed)?;
    let mut names = vec![MANIFEST_NAME.to_owned()];
    while let Some(record) = manifest.next_record()? {
        match record {
            ManifestRecord::File(file) if !file.memory && file.length <= MAX_FILE => names.push(file.name),
            _ => {}
        }
    }
    for name in names {
        let Some((path, file, length)) = images.file(&name)? else { continue };
        if length > MAX_FILE {
            continue;
        }
        // An image that changes is refused when its chunks are read: here the length must be that of the
        // header.
        let bytes = io::BufReader::new(file.take(length)).chain(io::repeat(0)).take(length);
        let added =
            tar.append_data(&mut header(EntryType::Regular, length), format!("{FOLDER}{name}"), bytes);
        added.map_err(|reason| ImageStoreError::File { file: path.display().to_string(), reason })?;
    }
    let mut file = tar.into_inner().map_err(failed)?;
    let length = file.seek(SeekFrom::End(0)).map_err(failed)?;
    Ok((file, length))
}

/// A header without owner or time: equal images have equal layers.
fn header(kind: EntryType, length: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(length);
    header.set_mode(if kind == EntryType::Directory { 0o700 } else { 0o600 });
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}
