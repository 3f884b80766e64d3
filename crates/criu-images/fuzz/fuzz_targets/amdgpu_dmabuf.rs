// SPDX-License-Identifier: MIT OR Apache-2.0
#![no_main]

use rewake_criu_images::fuzz::{FuzzKind, fuzz_one};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    fuzz_one(FuzzKind::AmdgpuDmabuf, bytes);
});
