// SPDX-License-Identifier: MIT OR Apache-2.0
//! The environment variables of CRIU's stock amdgpu plugin (CRIU's `Documentation/criu-amdgpu-plugin.txt`).

use std::ffi::{OsStr, OsString};
use std::fmt;

/// The variable that limits the staging memory for buffers.
const MAX_BUFFER_SIZE: &str = "KFD_MAX_BUFFER_SIZE";

/// A variable has an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={}: expected {expected}", value.display())]
pub struct BadSetting {
    /// The variable.
    pub variable: &'static str,
    /// Its value.
    pub value: OsString,
    /// The valid values.
    pub expected: &'static str,
}

/// A check of a GPU that the user may switch off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// The compute firmware is at least as new.
    Firmware,
    /// The copy engines' firmware is at least as new.
    SdmaFirmware,
    /// The GPU has at least as many caches.
    Caches,
    /// The GPU has at least as many global wave sync resources.
    Gws,
    /// The GPU has at least as much VRAM.
    Vram,
    /// GPUs that were near one CPU are near one CPU again.
    Numa,
    /// The capability bits are the same.
    Capability,
}

impl Switch {
    /// All switches.
    pub const ALL: [Self; 7] = [
        Self::Firmware,
        Self::SdmaFirmware,
        Self::Caches,
        Self::Gws,
        Self::Vram,
        Self::Numa,
        Self::Capability,
    ];

    /// Returns the environment variable.
    #[must_use]
    pub fn variable(self) -> &'static str {
        match self {
            Self::Firmware => "KFD_FW_VER_CHECK",
            Self::SdmaFirmware => "KFD_SDMA_FW_VER_CHECK",
            Self::Caches => "KFD_CACHES_COUNT_CHECK",
            Self::Gws => "KFD_NUM_GWS_CHECK",
            Self::Vram => "KFD_VRAM_SIZE_CHECK",
            Self::Numa => "KFD_NUMA_CHECK",
            Self::Capability => "KFD_CAPABILITY_CHECK",
        }
    }
}

/// The checks to make. By default all.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Checks {
    off: [bool; Switch::ALL.len()],
}

impl Checks {
    /// Reads the switches from this process's environment.
    ///
    /// # Errors
    /// The first [`BadSetting`].
    pub fn from_environment() -> Result<Self, BadSetting> {
        Self::from_lookup(|variable| std::env::var_os(variable))
    }

    /// Reads the switches with `lookup`, which returns the value of a variable.
    ///
    /// # Errors
    /// The first [`BadSetting`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, BadSetting> {
        let mut checks = Self::default();
        for switch in Switch::ALL {
            if let Some(value) = lookup(switch.variable()) {
                checks.off[switch as usize] = !on(switch.variable(), &value)?;
            }
        }
        Ok(checks)
    }

    /// Removes one check.
    #[must_use]
    pub fn without(mut self, switch: Switch) -> Self {
        self.off[switch as usize] = true;
        self
    }

    /// Returns whether a check is made.
    #[must_use]
    pub fn has(self, switch: Switch) -> bool {
        !self.off[switch as usize]
    }
}

impl fmt::Debug for Checks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(Switch::ALL.iter().filter(|switch| self.has(**switch))).finish()
    }
}

fn on(variable: &'static str, value: &OsStr) -> Result<bool, BadSetting> {
    match value.to_str().map(str::to_ascii_uppercase).as_deref() {
        Some("0" | "NO") => Ok(false),
        Some("1" | "YES") => Ok(true),
        _ => Err(BadSetting { variable, value: value.to_owned(), expected: "0, NO, 1 or YES" }),
    }
}

/// Returns the limit of the staging memory in bytes (`KFD_MAX_BUFFER_SIZE`), or None for no limit.
///
/// # Errors
/// [`BadSetting`].
pub fn max_buffer_size() -> Result<Option<u64>, BadSetting> {
    std::env::var_os(MAX_BUFFER_SIZE).map_or(Ok(None), |value| size(&value))
}

/// Parses a decimal or 0x number with an optional K, M or G. 0 means no limit, as in the stock plugin.
fn size(value: &OsStr) -> Result<Option<u64>, BadSetting> {
    let bytes = || {
        let text = value.to_str()?;
        let (number, shift) = match text.strip_suffix(['k', 'K', 'M', 'G']) {
            Some(number) if text.ends_with('G') => (number, 30),
            Some(number) if text.ends_with('M') => (number, 20),
            Some(number) => (number, 10),
            None => (text, 0),
        };
        let number = match number.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok()?,
            None => number.parse().ok()?,
        };
        number.checked_mul(1 << shift)
    };
    let expected = "a number of bytes below 2^64, which may end in k, K, M or G";
    let bytes =
        bytes().ok_or_else(|| BadSetting { variable: MAX_BUFFER_SIZE, value: value.to_owned(), expected })?;
    Ok(Some(bytes).filter(|bytes| *bytes != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variable: &str, value: &str) -> Result<Checks, BadSetting> {
        Checks::from_lookup(|name| (name == variable).then(|| value.into()))
    }

    #[test]
    fn each_check_is_made_unless_it_is_switched_off() {
        assert_eq!(Checks::from_lookup(|_| None).unwrap(), Checks::default());
        for switch in Switch::ALL {
            assert!(Checks::default().has(switch));
            for off in ["0", "NO", "no", "No"] {
                let checks = with(switch.variable(), off).unwrap();
                assert_eq!(checks, Checks::default().without(switch), "{off}");
                assert!(Switch::ALL.iter().all(|other| checks.has(*other) != (*other == switch)));
            }
            for on in ["1", "YES", "yes"] {
                assert_eq!(with(switch.variable(), on).unwrap(), Checks::default());
            }
        }
    }

    #[test]
    fn an_invalid_value_is_named_with_the_valid_ones() {
        for value in ["", "2", "off", "true", " 0"] {
            let error = with("KFD_NUMA_CHECK", value).unwrap_err();
            assert_eq!(error.to_string(), format!("KFD_NUMA_CHECK={value}: expected 0, NO, 1 or YES"));
        }
    }

    #[test]
    fn a_size_has_a_unit_or_none() {
        let size = |text: &str| size(OsStr::new(text)).map_err(|error| error.to_string());
        for (text, bytes) in [
            ("4096", 4096),
            ("0x1000", 4096),
            ("64k", 65_536),
            ("64K", 65_536),
            ("3M", 3 << 20),
            ("2G", 2 << 30),
            ("0x10M", 16 << 20),
        ] {
            assert_eq!(size(text), Ok(Some(bytes)), "{text}");
        }
        assert_eq!(size("0"), Ok(None));
        assert_eq!(size("0G"), Ok(None));
        for text in ["", "M", "-1", "1T", "1MB", "1 M", "17179869184G", "0x", "1.5G"] {
            let error = size(text).unwrap_err();
            let expected = "expected a number of bytes below 2^64, which may end in k, K, M or G";
            assert_eq!(error, format!("KFD_MAX_BUFFER_SIZE={text}: {expected}"));
        }
    }
}
