// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a GPU must have in common with the one whose place it takes. The properties and how they compare are those of
//! CRIU's stock plugin, and GDS.

use std::fmt;

use super::node::Node;
use crate::settings::{Checks, Switch};

/// One property.
struct Property {
    name: &'static str,
    of: fn(&Node) -> u64,
    unit: Unit,
    rule: Rule,
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
enum Rule {
    Equal,
    AtLeast,
}

/// A property with another value than wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Difference {
    /// For people.
    pub property: &'static str,
    /// The image's value.
    pub wanted: u64,
    /// The machine's.
    pub found: u64,
    /// What switches the check off, if anything does.
    pub switch: Option<Switch>,
    unit: Unit,
}

macro_rules! properties {
    ($($name:literal $field:ident $unit:ident $rule:ident $(unless $switch:ident)?;)*) => {
        &[$(Property {
            name: $name,
            of: |node| node.$field.into(),
            unit: Unit::$unit,
            rule: Rule::$rule,
            switch: properties!(@ $($switch)?),
        },)*]
    };
    (@) => { None };
    (@ $switch:ident) => { Some(Switch::$switch) };
}

/// In the order in which they are told: what a chip is, then what it has, then what software gives it.
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

/// Everything for which `machine` cannot take the place of `image`.
pub(super) fn differences(image: &Node, machine: &Node, checks: Checks) -> Vec<Difference> {
    let checked =
        PROPERTIES.iter().filter(|property| property.switch.is_none_or(|switch| checks.has(switch)));
    let difference = |property: &Property| {
        let (wanted, found) = ((property.of)(image), (property.of)(machine));
        let fits = wanted == found || property.rule == Rule::AtLeast && wanted < found;
        let Property { name, unit, switch, .. } = *property;
        (!fits).then_some(Difference { property: name, wanted, found, switch, unit })
    };
    checked.filter_map(difference).collect()
}

impl Difference {
    /// What is wanted, for people.
    pub(super) fn wanted(&self) -> impl fmt::Display {
        self.value(self.wanted)
    }

    /// What there is, for people.
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
