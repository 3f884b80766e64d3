// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds mappings of render nodes that have no buffer: ROCm's library frees a buffer before it unmaps it.
//! With this list a restore distinguishes a mapping of a freed buffer from a damaged image.

use std::collections::BTreeSet;
use std::{fs, io};

use rewake_criu_images::amdgpu::KfdImage;
use rewake_criu_images::rewake::{FreedMapping, MAX_SHARED};

use crate::buffers::{Buffers, gpu_of_minor};
use crate::device::DeviceFile;

/// Finds the mappings without a buffer in stopped tasks that have the `/dev/kfd` of `image` open. Returns
/// none if an image cannot hold so many.
pub(super) fn find(tasks: &[i32], image: &KfdImage) -> io::Result<Option<BTreeSet<FreedMapping>>> {
    let buffers = Buffers::of(image);
    let mut found = BTreeSet::new();
    for task in tasks {
        let maps = String::from_utf8_lossy(&fs::read(format!("/proc/{task}/maps"))?).into_owned();
        found.extend(maps.lines().filter_map(render_node_mapping).filter(|mapping| {
            let gpu = gpu_of_minor(image, mapping.minor);
            gpu.is_some_and(|(_, gpu_id)| buffers.at(gpu_id, mapping.offset).is_none())
        }));
    }
    Ok(Some(found).filter(|found| found.len() <= MAX_SHARED))
}

/// Parses a line of `/proc/PID/maps`. Its path is the one that CRIU passes to the plugin in a restore.
fn render_node_mapping(line: &str) -> Option<FreedMapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, _) = fields.next()?.split_once('-')?;
    let offset = fields.nth(1)?;
    let Some(DeviceFile::Render(minor)) = DeviceFile::of_path(fields.nth(2)?.trim_start()) else {
        return None;
    };
    let hex = |text| u64::from_str_radix(text, 16).ok();
    Some(FreedMapping { minor, address: hex(start)?, offset: hex(offset)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_render_nodes_are_known_by_their_paths() {
        let of = |path: &str| {
            render_node_mapping(&format!(
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
