// SPDX-License-Identifier: MIT OR Apache-2.0
//! `inventory.img`: general data of a dump.

use std::io::Read;

use crate::error::{ImageError, Result};
use crate::frame::Records;
use crate::generated::InventoryEntry;

/// The version of the image format that every CRIU since 1.0 writes ("1.1"). All files except the inventory
/// start with a common magic number, and mappings are part of `mm-PID.img`.
pub const IMAGE_VERSION: u32 = 2;

/// The version of images with compressed pages (`criu dump --compress`, CRIU 4.3). Read as version 2, they
/// would give wrong bytes.
const COMPRESSED: u32 = 3;

/// General data of a dump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// Always [`IMAGE_VERSION`].
    pub version: u32,
    /// CRIU plugins that the dump used and the restore needs.
    pub plugins: Vec<Vec<u8>>,
    /// Identity of the dump (CRIU 4.1 and later).
    pub run_id: Option<Vec<u8>>,
}

pub(crate) fn parse<R: Read>(records: Records<R>) -> Result<Inventory> {
    let file = records.file().to_path_buf();
    let entry: InventoryEntry = records.single()?;
    if entry.img_version == Some(COMPRESSED) {
        return Err(ImageError::Compressed { file });
    }
    if entry.img_version != Some(IMAGE_VERSION) {
        let found = entry.img_version.map_or_else(|| "none".into(), |version| version.to_string());
        return Err(ImageError::Unsupported {
            file,
            expected: format!("image version {IMAGE_VERSION}"),
            found,
        });
    }
    Ok(Inventory {
        version: IMAGE_VERSION,
        plugins: entry.plugins_entry.map_or_else(Vec::new, |entry| entry.plugins),
        run_id: entry.dump_criu_run_id,
    })
}
