// SPDX-License-Identifier: MIT OR Apache-2.0
//! Skipping, never silently.

/// Ends the test as skipped, with a reason. Fails it when `CI` is set; `skip!(unable, ...)` does not: it is for a
/// probe that proved the machine unable, and the reason names that probe.
#[macro_export]
macro_rules! skip {
    (unable, $($reason:tt)*) => {{
        eprintln!("SKIPPED, the machine cannot: {}", format_args!($($reason)*));
        return;
    }};
    ($($reason:tt)*) => {{
        let reason = format!($($reason)*);
        assert!(std::env::var_os("CI").is_none(), "skipped in CI: {reason}");
        eprintln!("SKIPPED: {reason}");
        return;
    }};
}

/// The value of a `Result<_, String>`, or the test is skipped with the error as the reason.
#[macro_export]
macro_rules! need {
    ($wanted:expr) => {
        match $wanted {
            Ok(value) => value,
            Err(reason) => $crate::skip!("{reason}"),
        }
    };
}

/// Ends the test where there is a GPU: such a machine has tests of its own.
#[macro_export]
macro_rules! need_no_gpu {
    () => {
        if std::path::Path::new("/sys/class/kfd").exists() {
            $crate::skip!(unable, "/sys/class/kfd: this machine has an AMD GPU");
        }
    };
}
