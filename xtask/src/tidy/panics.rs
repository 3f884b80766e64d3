// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lints at the root of each crate that keep it from a panic over bytes from outside. Clippy decides what
//! is one; here is checked that it is asked to.
//!
//! Clippy sees `unwrap`, `expect`, `panic!` and `unreachable!` in code of ours that is not compiled for
//! tests. It does not see an index out of bounds, a count that overflows, or a dependency that panics:
//! property tests of what reads such bytes are for those.

use super::{Document, Finding};

/// Of every crate: an `expect` says at least why it holds.
const NO_UNWRAP: &str = "#![cfg_attr(not(test), deny(clippy::unwrap_used))]";
/// Of a crate that reads bytes of a peer, a store, a registry, an archive, an image or a command line.
const NO_PANIC: &str = "#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, \
    clippy::unreachable))]";
/// Those crates.
const READERS: [&str; 15] = [
    "crates/checkpoint-archive",
    "crates/criu-images",
    "crates/criu-tls",
    "crates/fetcher",
    "crates/image-signature",
    "crates/image-transfer",
    "crates/image-store",
    "crates/manifest",
    "crates/migration",
    "crates/migration-agent",
    "crates/node-cache",
    "crates/page-protocol",
    "crates/peer-stream",
    "crates/plugin-protocol",
    "page-server",
];

/// Of a crate that reads such bytes in a process that is not confined: `pull`, `push`, `receive` and the node
/// agent. Its mistakes are wrong answers and panics, and never other code.
const NO_UNSAFE: &str = "#![forbid(unsafe_code)]";
/// The others: the fetcher is confined, and the two are read in part by root alone.
const WITH_UNSAFE: [&str; 3] = ["crates/fetcher", "crates/plugin-protocol", "page-server"];

pub(super) fn check(document: &Document) -> Option<Finding> {
    let package = ["/src/lib.rs", "/src/main.rs"].iter().find_map(|root| document.path.strip_suffix(root))?;
    let is_product = package.starts_with("crates/") || package == "page-server" || package == "plugin";
    if !is_product {
        return None;
    }
    let is_reader = READERS.contains(&package);
    let no_panic = if is_reader { NO_PANIC } else { NO_UNWRAP };
    let no_unsafe = (is_reader && !WITH_UNSAFE.contains(&package)).then_some(NO_UNSAFE);
    let is_missing = |wanted: &&str| !document.text.lines().any(|line| line == *wanted);
    let missing = [no_panic].into_iter().chain(no_unsafe).find(is_missing)?;
    Some(document.finding(0, "panics", format!("add `{missing}` below the words about the crate")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_found(path: &str, text: &str) -> bool {
        check(&Document { path: path.to_owned(), text: text.to_owned() }).is_some()
    }

    #[test]
    fn a_crate_that_reads_bytes_of_peers_panics_over_none() {
        let both = format!("//! Words.\n{NO_PANIC}\n");
        for root in ["page-server/src/lib.rs", "page-server/src/main.rs"] {
            assert!(is_found(root, "//! Words.\n") && is_found(root, NO_UNWRAP), "{root}");
            assert!(!is_found(root, &both), "{root}");
        }
        let images = "crates/criu-images/src/lib.rs";
        assert!(is_found(images, &both) && !is_found(images, &format!("{both}{NO_UNSAFE}\n")));
        assert!(is_found("crates/uffd/src/lib.rs", "") && !is_found("crates/uffd/src/lib.rs", NO_UNWRAP));
        for other in
            ["crates/uffd/src/abi.rs", "xtask/src/main.rs", "tests/src/lib.rs", "crates/a/src/bin/main.rs"]
        {
            assert!(!is_found(other, ""), "{other}");
        }
    }
}
