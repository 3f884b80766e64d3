// SPDX-License-Identifier: MIT OR Apache-2.0
//! A CPU or GPU. Names of properties are the driver's (`kfd_topology.c`).

use std::fmt;
use std::path::Path;

use super::sysfs::{self, Properties};
use crate::Error;
use crate::abi::memory::PAGE;
use crate::abi::{
    HSA_CAP_SVMAPI_SUPPORTED, HSA_IOLINK_TYPE_XGMI, HSA_MEM_HEAP_TYPE_FB_PRIVATE, HSA_MEM_HEAP_TYPE_FB_PUBLIC,
};

/// A CPU or GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The number in the topology.
    pub number: u32,
    /// The GPU's id in the driver's calls, or 0 for a CPU.
    pub gpu_id: u32,
    /// The driver's display name, such as `arcturus`.
    pub name: String,
    properties: Properties,
    /// Memory banks.
    pub banks: Vec<Bank>,
    /// Caches.
    pub caches: Vec<Cache>,
    /// Links to other nodes.
    pub links: Vec<Link>,
}

/// A memory bank of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bank(Properties);

/// A cache of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache(Properties);

/// A link to another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link(Properties);

/// `gfx90a` is 9.0.10.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GfxVersion {
    /// Generation.
    pub major: u32,
    /// Variant.
    pub minor: u32,
    /// Stepping.
    pub step: u32,
}

impl fmt::Display for GfxVersion {
    /// As in `gfx90a`: the stepping is hexadecimal.
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "gfx{}{}{:x}", self.major, self.minor, self.step)
    }
}

/// The sizes of a compute queue's areas for interrupted work. The driver refuses other sizes. Source:
/// `kfd_queue.c` (`kfd_queue_ctx_save_restore_size`) of Linux 7.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveArea {
    /// Bytes of the control stack, for CREATE_QUEUE.
    pub control_stack: u32,
    /// Bytes of the area of one XCC, for CREATE_QUEUE.
    pub area: u32,
    /// Bytes to allocate: the areas of all XCCs, each with room for the debugger.
    pub total: u64,
}

fn get(properties: &Properties, name: &str) -> u64 {
    properties.get(name).copied().unwrap_or(0)
}

fn get32(properties: &Properties, name: &str) -> u32 {
    u32::try_from(get(properties, name)).unwrap_or(0)
}

impl Node {
    /// Reads a node. Returns `None` if it is hidden from this process.
    pub(super) fn read(number: u32, folder: &Path) -> Result<Option<Self>, Error> {
        let id = folder.join("gpu_id");
        let Some(text) = sysfs::text(&id)? else { return Ok(None) };
        let gpu_id = text
            .trim()
            .parse()
            .map_err(|_| Error::Topology { path: id, reason: format!("{:?} is no GPU id", text.trim()) })?;
        let Some(properties) = sysfs::properties(&folder.join("properties"))? else { return Ok(None) };
        let name = sysfs::text(&folder.join("name"))?.unwrap_or_default();
        Ok(Some(Self {
            number,
            gpu_id,
            name: name.trim().to_owned(),
            properties,
            banks: sysfs::numbered(&folder.join("mem_banks"))?.into_iter().map(Bank).collect(),
            caches: sysfs::numbered(&folder.join("caches"))?.into_iter().map(Cache).collect(),
            links: sysfs::numbered(&folder.join("io_links"))?.into_iter().map(Link).collect(),
        }))
    }

    /// Returns a property by the driver's name, or 0 if it does not exist.
    #[must_use]
    pub fn property(&self, name: &str) -> u64 {
        get(&self.properties, name)
    }

    fn property32(&self, name: &str) -> u32 {
        get32(&self.properties, name)
    }

    /// Returns whether it has compute units.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        self.gpu_id != 0
    }

    /// Returns the N of `/dev/dri/renderDN`.
    #[must_use]
    pub fn render_minor(&self) -> u32 {
        self.property32("drm_render_minor")
    }

    /// Returns the version of the instruction set.
    #[must_use]
    pub fn gfx_version(&self) -> GfxVersion {
        let version = self.property32("gfx_target_version");
        GfxVersion { major: version / 10_000, minor: version / 100 % 100, step: version % 100 }
    }

    /// Returns whether it can share ordinary memory by attributes of ranges.
    #[must_use]
    pub fn has_svm(&self) -> bool {
        self.property("capability") & u64::from(HSA_CAP_SVMAPI_SUPPORTED) != 0
    }

    /// Returns whether the CPU can access all of its memory.
    #[must_use]
    pub fn has_large_bar(&self) -> bool {
        self.banks.iter().any(|bank| bank.heap() == HSA_MEM_HEAP_TYPE_FB_PUBLIC)
    }

    /// Returns the bytes of its own memory.
    #[must_use]
    pub fn vram(&self) -> u64 {
        let own = [HSA_MEM_HEAP_TYPE_FB_PUBLIC, HSA_MEM_HEAP_TYPE_FB_PRIVATE];
        let banks = self.banks.iter().filter(|bank| own.contains(&bank.heap()));
        banks.fold(0, |sum: u64, bank| sum.saturating_add(bank.size()))
    }

    /// Returns the sizes of a compute queue's areas for interrupted work, or `None` if the properties are not
    /// valid.
    #[must_use]
    pub fn save_area(&self) -> Option<SaveArea> {
        let version = self.property32("gfx_target_version");
        let xccs = self.property32("num_xcc").max(1);
        let units = self.property32("simd_count").checked_div(self.property32("simd_per_cu"))? / xccs;
        let engines =
            self.property32("array_count").checked_div(self.property32("simd_arrays_per_engine"))?;
        let waves = if version < 100_100 {
            units.checked_mul(40)?.min(engines.checked_mul(512)?)
        } else {
            units.checked_mul(if version < 120_500 { 32 } else { 64 })?
        };
        let stack_bytes = waves.checked_mul(if version < 100_100 { 8 } else { 12 })?.checked_add(8 + 40)?;
        let mut control_stack = page_up(stack_bytes)?;
        if version / 10_000 == 10 {
            control_stack = control_stack.min(0x7000);
        }
        let groups = page_up(units.checked_mul(self.unit_state(version)?)?)?;
        let area = page_up(control_stack.checked_add(groups)?)?;
        let debugger = waves.checked_mul(32)?.checked_next_multiple_of(64)?;
        let total = (u64::from(area) + u64::from(debugger)) * u64::from(xccs);
        Some(SaveArea { control_stack, area, total: total.next_multiple_of(PAGE) })
    }

    /// Returns the bytes of registers and local memory of one compute unit.
    fn unit_state(&self, version: u32) -> Option<u32> {
        let vector = match version {
            90_008 | 90_010 | 90_402 | 90_500 | 120_500 | 120_501 => 0x8_0000,
            110_000 | 110_001 | 110_501 | 120_000 | 120_001 => 0x6_0000,
            _ => 0x4_0000,
        };
        let (scalar, hardware) = if version >= 120_500 { (0x8000, 0x8000) } else { (0x4000, 0x1000) };
        let local = match version {
            90_500 | 120_500 | 120_501 => self.property32("lds_size_in_kb").checked_mul(1024)?,
            _ => 0x1_0000,
        };
        local.checked_add(vector + scalar + hardware)
    }
}

fn page_up(bytes: u32) -> Option<u32> {
    bytes.checked_next_multiple_of(4096)
}

impl Bank {
    /// Returns the `HSA_MEM_HEAP_TYPE_*`.
    #[must_use]
    pub fn heap(&self) -> u32 {
        get32(&self.0, "heap_type")
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        get(&self.0, "size_in_bytes")
    }
}

impl Cache {
    /// Returns the level: 1, 2 or 3.
    #[must_use]
    pub fn level(&self) -> u32 {
        get32(&self.0, "level")
    }

    /// Returns the size in KiB.
    #[must_use]
    pub fn size(&self) -> u64 {
        get(&self.0, "size")
    }
}

impl Link {
    /// Returns the number of the node at the other end.
    #[must_use]
    pub fn to(&self) -> u32 {
        get32(&self.0, "node_to")
    }

    /// Returns the number of the node at this end.
    #[must_use]
    pub fn from(&self) -> u32 {
        get32(&self.0, "node_from")
    }

    /// Returns the `HSA_IOLINK_TYPE_*`: 2 is PCIe, 11 is XGMI.
    #[must_use]
    pub fn kind(&self) -> u32 {
        get32(&self.0, "type")
    }

    /// Returns whether it is a link between GPUs only.
    #[must_use]
    pub fn is_xgmi(&self) -> bool {
        self.kind() == HSA_IOLINK_TYPE_XGMI
    }
}
