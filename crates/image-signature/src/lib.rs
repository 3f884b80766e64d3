// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signatures of images, with OpenSSH's keys and in OpenSSH's format (SSHSIG).
//!
//! What is signed is the image id, as 64 hexadecimal digits and a newline, in the namespace [`NAMESPACE`].
//! The id is the hash of the manifest, which has the hash of every file and the id of the parent, so the
//! signature covers them all. `ssh-keygen -Y sign` and `ssh-keygen -Y verify` make and accept the same
//! signatures.
//!
//! * [`ImageSignature`]: reads one, makes one.
//! * [`Signers`]: a file of OpenSSH's allowed signers, and the check of an image's signature against it.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]
#![forbid(unsafe_code)]

mod error;
mod options;
mod signature;
mod signers;

pub use error::{Result, SignatureError};
pub use signature::{ImageSignature, MAX_SIGNATURE, NAMESPACE, SIGNATURE_NAME};
pub use signers::{NODE_SIGNERS, Signers};
