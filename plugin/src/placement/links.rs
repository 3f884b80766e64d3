// SPDX-License-Identifier: MIT OR Apache-2.0
//! The links between nodes. Links between CPUs and links of other kinds than PCIe and XGMI do not count: the
//! stock plugin ignores them.

use rewake_amdgpu_uapi::abi::{HSA_IOLINK_TYPE_PCIEXPRESS, HSA_IOLINK_TYPE_XGMI};
use rewake_criu_images::amdgpu::NodeImage;

/// Links of a pair of nodes: PCIe to the other and from it, XGMI to and from it, and a common hive.
const PCIE_TO: u8 = 1;
const PCIE_FROM: u8 = 2;
const XGMI_TO: u8 = 4;
const XGMI_FROM: u8 = 8;
const HIVE: u8 = 16;

/// Returns the links that `node` has with `other`.
pub(super) fn between(node: &NodeImage, other: &NodeImage) -> u8 {
    let (a, b) = (&node.properties, &other.properties);
    if a.node_id == b.node_id || a.gpu_id == 0 && b.gpu_id == 0 {
        return 0;
    }
    let has = |from: &NodeImage, kind, to_node| {
        from.links.iter().any(|link| link.kind == kind && link.to_node == to_node)
    };
    let links = [
        (PCIE_TO, has(node, HSA_IOLINK_TYPE_PCIEXPRESS, b.node_id)),
        (PCIE_FROM, has(other, HSA_IOLINK_TYPE_PCIEXPRESS, a.node_id)),
        (XGMI_TO, has(node, HSA_IOLINK_TYPE_XGMI, b.node_id)),
        (XGMI_FROM, has(other, HSA_IOLINK_TYPE_XGMI, a.node_id)),
        (HIVE, a.gpu_id != 0 && b.gpu_id != 0 && a.hive_id == b.hive_id && a.hive_id != 0),
    ];
    links.iter().filter(|(_, has)| *has).map(|(bit, _)| bit).sum()
}

/// Returns the links of a node with each of `others`.
pub(super) fn with<'a>(node: &NodeImage, others: impl IntoIterator<Item = &'a NodeImage>) -> Vec<u8> {
    others.into_iter().map(|other| between(node, other)).collect()
}

/// Returns whether a pair with the links `found` can replace one with the links `wanted`. XGMI replaces PCIe.
pub(super) fn replaces(found: u8, wanted: u8) -> bool {
    let pcie =
        if found & XGMI_TO == 0 { 0 } else { PCIE_TO } | if found & XGMI_FROM == 0 { 0 } else { PCIE_FROM };
    wanted & !(found | pcie) == 0
}

/// Returns the name of the strongest link, for messages.
pub(super) fn name(bits: u8) -> &'static str {
    match bits {
        _ if bits & (XGMI_TO | XGMI_FROM) != 0 => "an XGMI link",
        _ if bits & (PCIE_TO | PCIE_FROM) != 0 => "a PCIe link",
        _ => "a common XGMI hive",
    }
}

/// Returns a link to a node that none of `found` can replace, if any.
pub(super) fn missing(wanted: &[u8], found: &[u8]) -> Option<u8> {
    wanted.iter().copied().find(|wanted| found.iter().all(|found| !replaces(*found, *wanted)))
}

/// Returns a link that one GPU has with more GPUs than another, and both numbers.
pub(super) fn fewer(wanted: &[u8], found: &[u8]) -> Option<(u8, usize, usize)> {
    let count = |links: &[u8], bit| links.iter().filter(|links| replaces(**links, bit)).count();
    let kinds = [XGMI_TO, XGMI_FROM, PCIE_TO, PCIE_FROM, HIVE];
    let mut numbers = kinds.map(|bit| (bit, count(wanted, bit), count(found, bit))).into_iter();
    numbers.find(|(_, wanted, found)| wanted > found)
}
