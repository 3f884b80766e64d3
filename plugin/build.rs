// SPDX-License-Identifier: MIT OR Apache-2.0
//! The plugin exports its own symbols only: libraries that it links may have others for C programs.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-cdylib=-Wl,--exclude-libs,ALL");
}
