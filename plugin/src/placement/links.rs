// SPDX-License-Identifier: MIT OR Apache-2.0
//! The links between nodes.

use std::collections::HashMap;

use super::node::Node;
use rewake_amdgpu_uapi::abi::{HSA_IOLINK_TYPE_PCIEXPRESS, HSA_IOLINK_TYPE_XGMI};

/// Links of a pair of nodes: PCIe to the other and from it, XGMI to and from it, and a common hive.
const PCIE_TO: u8 = 1;
const PCIE_FROM: u8 = 2;
const XGMI_TO: u8 = 4;
const XGMI_FROM: u8 = 8;
const HIVE: u8 = 16;

/// Returns, for each pair of nodes, the links that the first sees to the second. Links to other nodes, links
/// between CPUs and links of other kinds do not count: the stock plugin ignores them.
pub(super) fn relations(nodes: &[&Node]) -> Vec<Vec<u8>> {
    let places: HashMap<u32, usize> = nodes.iter().map(|node| node.node_id).zip(0..).collect();
    let mut relations = vec![vec![0; nodes.len()]; nodes.len()];
    for (from, node) in nodes.iter().enumerate() {
        for link in &node.links {
            let Some(to) = places.get(&link.to_node).copied().filter(|to| *to != from) else { continue };
            let (there, back) = match link.kind {
                HSA_IOLINK_TYPE_XGMI => (XGMI_TO, XGMI_FROM),
                HSA_IOLINK_TYPE_PCIEXPRESS => (PCIE_TO, PCIE_FROM),
                _ => continue,
            };
            if node.gpu_id != 0 || nodes[to].gpu_id != 0 {
                relations[from][to] |= there;
                relations[to][from] |= back;
            }
        }
        for (to, other) in nodes.iter().enumerate() {
            if to != from && node.gpu_id != 0 && other.gpu_id != 0 && node.hive_id == other.hive_id {
                relations[from][to] |= if node.hive_id == 0 { 0 } else { HIVE };
            }
        }
    }
    relations
}

/// Adds the links that these links can replace: XGMI replaces PCIe.
pub(super) fn offers(mut relations: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    for bits in relations.iter_mut().flatten() {
        if *bits & XGMI_TO != 0 {
            *bits |= PCIE_TO;
        }
        if *bits & XGMI_FROM != 0 {
            *bits |= PCIE_FROM;
        }
    }
    relations
}

/// Returns the name of the strongest link, for messages.
pub(super) fn name(bits: u8) -> &'static str {
    match bits {
        _ if bits & (XGMI_TO | XGMI_FROM) != 0 => "an XGMI link",
        _ if bits & (PCIE_TO | PCIE_FROM) != 0 => "a PCIe link",
        _ => "a common XGMI hive",
    }
}

/// Returns a GPU's links to each CPU among `nodes` that it is linked to.
pub(super) fn to_cpus(gpu: &Node, nodes: &[Node]) -> Vec<u8> {
    let cpus = nodes.iter().filter(|node| node.gpu_id == 0);
    let both: Vec<&Node> = std::iter::once(gpu).chain(cpus).collect();
    relations(&both).swap_remove(0).into_iter().filter(|bits| *bits != 0).collect()
}

/// Returns the name of a link to a CPU that none of `found` can replace, if any.
pub(super) fn missing(wanted: &[u8], found: &[u8]) -> Option<&'static str> {
    let found = offers(vec![found.to_vec()]).swap_remove(0);
    let mismatches = |bits: &&u8| found.iter().all(|offered| **bits & !offered != 0);
    wanted.iter().find(mismatches).map(|bits| name(*bits))
}

/// Returns whether the node is a CPU that one of the GPUs is linked to.
pub(super) fn is_cpu_of(node: &Node, gpus: &[&Node]) -> bool {
    let all: Vec<&Node> = std::iter::once(node).chain(gpus.iter().copied()).collect();
    node.gpu_id == 0 && relations(&all)[0].iter().any(|bits| *bits != 0)
}
