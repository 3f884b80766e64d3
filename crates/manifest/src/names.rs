// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names in an image directory.

/// The name of the manifest in an image directory.
pub const MANIFEST_NAME: &str = "rewake-manifest";

/// The parent image: a symbolic link to it, or its directory.
pub const PARENT: &str = "parent";

/// The name of the manifest in a directory that an image is being copied into: it has not all bytes yet.
pub const PARTIAL_NAME: &str = "rewake-manifest.partial";

/// The name of the recorded working set in an image directory. It is recorded after the image was sealed, and
/// no manifest names it: it determines the order of a restore, and no bytes.
pub const WORKING_SET_NAME: &str = "rewake-working-set.json";

/// The most bytes of a working set.
pub const MAX_WORKING_SET: u64 = 2 << 20;
