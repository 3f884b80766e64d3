// SPDX-License-Identifier: MIT OR Apache-2.0
//! The properties that a GPU must share with the one whose place it takes. They are compared as in CRIU's
//! stock plugin, plus GDS.

use std::fmt;

use rewake_criu_images::amdgpu::Properties;
use rewake_criu_images::amdgpu::settings::{Checks, Switch};

/// A property and its rule.
struct Property {
    name: &'static str,
    of: fn(&Properties) -> u64,
    unit: Unit,
    rule: Requirement,
    switch: Option<Switch>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Number,
    Hexadecimal,
    KiB,
    Bytes,
    YesOrNo,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Requirement {
    Equal,
    AtLeast,
}

/// A property whose value does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Difference {
    /// The property's name, for messages.
    pub property: &'static str,
    /// The image's value.
    pub wanted: u64,
    /// The machine's value.
    pub found: u64,
    /// The switch of the check, if any.
    pub switch: Option<Switch>,
    unit: Unit,
}

macro_rules! properties {
    ($($name:literal $field:ident $unit:ident $rule:ident $(unless $switch:ident)?;)*) => {
        &[$(Property {
            name: $name,
            of: |gpu| gpu.$field.into(),
            unit: Unit::$unit,
            rule: Requirement::$rule,
            switch: properties!(@ $($switch)?),
        },)*]
    };
    (@) => { None };
    (@ $switch:ident) => { Some(Switch::$switch) };
}

/// In the order of messages: what a chip is, then what it has, then what software gives it.
const PROPERTIES: &[Property] = properties! {
    "PCI vendor" vendor_id Hexadecimal Equal;
    "PCI device" device_id Hexadecimal Equal;
    "SIMD units" simd_count Number Equal;
    "shader arrays" array_count Number Equal;
    "shader arrays of an engine" simd_arrays_per_engine Number Equal;
    "compute units of a shader array" cu_per_simd_array Number Equal;
    "SIMD units of a compute unit" simd_per_cu Number Equal;
    "threads of a wave" wave_front_size Number Equal;
    "waves of a SIMD unit" max_waves_per_simd Number Equal;
    "scratch waves of a compute unit" max_slots_scratch_cu Number Equal;
    "local data share" lds_size_in_kb KiB Equal;
    "global data share" gds_size_in_kb KiB AtLeast;
    "memory banks" mem_banks_count Number Equal;
    "VRAM" vram_size Bytes AtLeast unless Vram;
    "all VRAM in reach of the CPU" vram_public YesOrNo Equal;
    "copy engines" num_sdma_engines Number Equal;
    "copy engines for XGMI" num_sdma_xgmi_engines Number Equal;
    "queues of a copy engine" num_sdma_queues_per_engine Number Equal;
    "compute queues" num_cp_queues Number Equal;
    "links to other nodes" io_links_count Number Equal;
    "caches" caches_count Number AtLeast unless Caches;
    "global wave sync resources" num_gws Number AtLeast unless Gws;
    "capability bits" capability Hexadecimal Equal unless Capability;
    "compute firmware version" fw_version Number AtLeast unless Firmware;
    "copy engine firmware version" sdma_fw_version Number AtLeast unless SdmaFirmware;
};

/// Returns all properties that keep `machine` from the place of `image`.
pub(super) fn differences(image: &Properties, machine: &Properties, checks: Checks) -> Vec<Difference> {
    let checked =
        PROPERTIES.iter().filter(|property| property.switch.is_none_or(|switch| checks.has(switch)));
    let difference = |property: &Property| {
        let (wanted, found) = ((property.of)(image), (property.of)(machine));
        let fits = wanted == found || property.rule == Requirement::AtLeast && wanted < found;
        let Property { name, unit, switch, .. } = *property;
        (!fits).then_some(Difference { property: name, wanted, found, switch, unit })
    };
    checked.filter_map(difference).collect()
}

impl Difference {
    /// Returns the expected value, for messages.
    pub(super) fn wanted(&self) -> impl fmt::Display {
        self.value(self.wanted)
    }

    /// Returns the machine's value, for messages.
    pub(super) fn found(&self) -> impl fmt::Display {
        self.value(self.found)
    }

    fn value(&self, value: u64) -> String {
        const MIB: u64 = 1 << 20;
        match self.unit {
            Unit::Number => value.to_string(),
            Unit::Hexadecimal => format!("{value:#x}"),
            Unit::KiB => format!("{value} KiB"),
            Unit::Bytes if self.wanted / MIB == self.found / MIB => format!("{value} bytes"),
            Unit::Bytes => format!("{} MiB", value / MIB),
            Unit::YesOrNo => if value == 0 { "no" } else { "yes" }.to_owned(),
        }
    }
}
