// SPDX-License-Identifier: MIT OR Apache-2.0
//! The symbols of a CRIU after 4.2 that a plugin reads while it is loaded and in `RESTORE_EXT_FILE`.

/// `cr_plugin_ctl`: a list head, and one more for each of 15 hooks.
#[unsafe(no_mangle)]
pub static cr_plugin_ctl: [[u64; 2]; 16] = [[0; 2]; 16];

/// The folder of the images.
///
/// # Panics
/// There is none.
#[unsafe(no_mangle)]
pub extern "C" fn criu_get_image_dir() -> i32 {
    use std::os::fd::IntoRawFd;
    let path = std::env::var_os("LATER_CRIU_IMAGES").expect("the folder of the images");
    std::fs::File::open(path).expect("a folder").into_raw_fd()
}
