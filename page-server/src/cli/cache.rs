// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options of the commands for the node agent's cache.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use rewake_image_store::ImageUrl;

use super::store::image_id;

/// Options of `rewake cache`.
#[derive(Debug, Args)]
pub struct CacheArgs {
    /// Control socket [default: as for `rewake serve`]
    #[arg(long, value_name = "PATH", global = true)]
    pub socket: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub act: CacheAct,
}

/// What `rewake cache` does.
#[derive(Debug, Subcommand)]
pub enum CacheAct {
    /// Brings an image of a store, and returns when the cache has all of it
    Warm {
        /// The image: s3://BUCKET/FOLDER/NAME or file:///DIRECTORY/NAME
        #[arg(value_name = "URL")]
        image: ImageUrl,
        /// Refuse any other image than the one with this id, or whose id begins with these digits, 32 at
        /// least
        #[arg(long, value_name = "ID", value_parser = image_id)]
        id: Option<String>,
        /// Refuse an image without a valid signature of one of the signers in this file: as of `rewake pull`
        #[arg(long, value_name = "FILE")]
        signers: Option<PathBuf>,
    },
    /// Lists the images, the one that was used last first
    Ls,
    /// Removes an image that no restore uses
    Rm {
        /// Its id, as `rewake cache ls` shows it, or the first digits of the id, 32 at least
        #[arg(value_name = "ID", value_parser = image_id)]
        id: String,
    },
}

/// Reads a number of bytes.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let shift = match text.bytes().last() {
        Some(b'K') => 10,
        Some(b'M') => 20,
        Some(b'G') => 30,
        Some(b'T') => 40,
        _ => 0,
    };
    let digits = if shift > 0 { &text[..text.len() - 1] } else { text };
    let number: Option<u64> = digits.parse().ok();
    number
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| "expected a number of bytes, such as 20G".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_may_have_a_unit() {
        let read = ["4096", "3K", "20G", "1T"].map(|text| bytes(text).unwrap());
        assert_eq!(read, [4096, 3 << 10, 20 << 30, 1 << 40]);
        for wrong in ["", "G", "-1", "1.5G", "20GB", "99999999T"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
