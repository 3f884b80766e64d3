// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that a machine with a GPU does not run.

/// Ends the test where there is a GPU: such a machine has tests of its own.
#[macro_export]
macro_rules! need_no_gpu {
    () => {
        if std::path::Path::new("/sys/class/kfd").exists() {
            $crate::skip!("/sys/class/kfd: this machine has an AMD GPU");
        }
    };
}
