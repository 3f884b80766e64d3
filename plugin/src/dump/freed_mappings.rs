// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds mappings of render nodes that have no buffer: ROCm's library frees a buffer before it unmaps it.
//! With this list a restore distinguishes a mapping of a freed buffer from a damaged image.

use std::collections::BTreeSet;
use std::{fs, io};

use rewake_criu_images::amdgpu::KfdImage;
use rewake_criu_images::rewake::{FreedMapping, MAX_SHARED};
use rewake_process::maps::Mapping;
use rewake_process::names::lines;

use crate::buffers::{Buffers, gpu_of_minor};
use crate::device::DeviceFile;

/// Finds the mappings without a buffer in stopped tasks that have the `/dev/kfd` of `image` open. Returns
/// `None` if there are more of them than an image can hold.
pub(super) fn find(tasks: &[i32], image: &KfdImage) -> io::Result<Option<BTreeSet<FreedMapping>>> {
    let buffers = Buffers::of(image);
    let mut found = BTreeSet::new();
    for task in tasks {
        let maps = fs::read(format!("/proc/{task}/maps"))?;
        found.extend(lines(&maps).filter_map(render_node_mapping).filter(|mapping| {
            let gpu = gpu_of_minor(image, mapping.minor);
            gpu.is_some_and(|(_, gpu_id)| buffers.at(gpu_id, mapping.offset).is_none())
        }));
    }
    Ok(Some(found).filter(|found| found.len() <= MAX_SHARED))
}

/// Parses a line of `/proc/PID/maps`. Its path is the one that CRIU passes to the plugin in a restore.
fn render_node_mapping(line: &[u8]) -> Option<FreedMapping> {
    let mapping = Mapping::parse(line)?;
    let Some(DeviceFile::Render(minor)) = DeviceFile::of_path(mapping.name) else { return None };
    Some(FreedMapping { minor, address: mapping.start, offset: mapping.offset })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_render_nodes_are_known_by_their_paths() {
        let of = |path: &[u8]| {
            let rest = b"7f0000200000-7f0000400000 rw-s 100001000 00:06 345                ";
            render_node_mapping(&[&rest[..], path].concat())
        };
        let mapping = FreedMapping { minor: 129, address: 0x7f00_0020_0000, offset: 0x1_0000_1000 };
        assert_eq!(of(b"/dev/dri/renderD129"), Some(mapping));
        assert_eq!(of(b"/jail/dev/dri/renderD129"), Some(mapping));
        assert_eq!(of(b"/srv/my \xff jail/dev/dri/renderD129"), Some(mapping));
        for other in ["/dev/kfd", "/dev/dri/card0", "[heap]", ""] {
            assert_eq!(of(other.as_bytes()), None, "{other}");
        }
    }
}
