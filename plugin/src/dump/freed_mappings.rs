// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mappings of render nodes that show no buffer: ROCm's library frees a buffer first, and unmaps it then. A restore knows by them what had
//! been freed from what is damaged.

use std::collections::BTreeSet;
use std::{fs, io};

use rewake_criu_images::amdgpu::KfdImage;
use rewake_criu_images::rewake::{FreedMapping, MAX_SHARED};

use crate::buffers::{Buffers, gpu_of_minor};
use crate::device::Gpu;

/// Those of stopped tasks, which have the `/dev/kfd` that `image` is of. None if there are more than an image may have.
pub(super) fn mappings(tasks: &[i32], image: &KfdImage) -> io::Result<Option<BTreeSet<FreedMapping>>> {
    let buffers = Buffers::of(image);
    let mut found = BTreeSet::new();
    for task in tasks {
        let maps = String::from_utf8_lossy(&fs::read(format!("/proc/{task}/maps"))?).into_owned();
        found.extend(maps.lines().filter_map(of_render_node).filter(|mapping| {
            let gpu = gpu_of_minor(image, mapping.minor);
            gpu.is_some_and(|(_, gpu_id)| buffers.at(gpu_id, mapping.offset).is_none())
        }));
    }
    Ok(Some(found).filter(|found| found.len() <= MAX_SHARED))
}

/// By a line of `/proc/PID/maps`; its path is the one that a restore hears.
fn of_render_node(line: &str) -> Option<FreedMapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, _) = fields.next()?.split_once('-')?;
    let offset = fields.nth(1)?;
    let Some(Gpu::Render(minor)) = Gpu::of_path(fields.nth(2)?.trim_start()) else { return None };
    let hex = |text| u64::from_str_radix(text, 16).ok();
    Some(FreedMapping { minor, address: hex(start)?, offset: hex(offset)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_render_nodes_are_known_by_their_paths() {
        let of = |path: &str| {
            of_render_node(&format!(
                "7f0000200000-7f0000400000 rw-s 100001000 00:06 345                {path}"
            ))
        };
        let mapping = FreedMapping { minor: 129, address: 0x7f00_0020_0000, offset: 0x1_0000_1000 };
        assert_eq!(of("/dev/dri/renderD129"), Some(mapping));
        assert_eq!(of("/jail/dev/dri/renderD129"), Some(mapping));
        assert_eq!(of("/srv/my jail/dev/dri/renderD129"), Some(mapping));
        for other in ["/dev/kfd", "/dev/dri/card0", "[heap]", ""] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
