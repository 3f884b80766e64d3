// SPDX-License-Identifier: MIT OR Apache-2.0
//! How nodes are linked.

use std::collections::HashMap;

use super::node::Node;
use crate::abi::{HSA_IOLINK_TYPE_PCIEXPRESS, HSA_IOLINK_TYPE_XGMI};

/// A link of PCIe to the other, from it; the same of XGMI; and GPUs of one hive.
const PCIE_TO: u8 = 1;
const PCIE_FROM: u8 = 2;
const XGMI_TO: u8 = 4;
const XGMI_FROM: u8 = 8;
const HIVE: u8 = 16;

/// By node and node, how the first sees the other. Links to other nodes than these do not count, nor do links between
/// CPUs, nor links of other kinds: stock's plugin does not look at them.
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

/// What relations can stand for: XGMI does what PCIe does.
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

/// The strongest part of a relation, for people.
pub(super) fn name(bits: u8) -> &'static str {
    match bits {
        _ if bits & (XGMI_TO | XGMI_FROM) != 0 => "an XGMI link",
        _ if bits & (PCIE_TO | PCIE_FROM) != 0 => "a PCIe link",
        _ => "a common XGMI hive",
    }
}

/// How a GPU is linked to each CPU among `nodes` that it is linked to.
pub(super) fn to_cpus(gpu: &Node, nodes: &[Node]) -> Vec<u8> {
    let cpus = nodes.iter().filter(|node| node.gpu_id == 0);
    let both: Vec<&Node> = std::iter::once(gpu).chain(cpus).collect();
    relations(&both).swap_remove(0).into_iter().filter(|bits| *bits != 0).collect()
}

/// The name of a link to a CPU that none of `found` can stand for, if there is one.
pub(super) fn missing(wanted: &[u8], found: &[u8]) -> Option<&'static str> {
    let found = offers(vec![found.to_vec()]).swap_remove(0);
    let lacks = |bits: &&u8| found.iter().all(|offered| **bits & !offered != 0);
    wanted.iter().find(lacks).map(|bits| name(*bits))
}

/// Whether the node is a CPU that one of the GPUs is linked to.
pub(super) fn is_cpu_of(node: &Node, gpus: &[&Node]) -> bool {
    let all: Vec<&Node> = std::iter::once(node).chain(gpus.iter().copied()).collect();
    node.gpu_id == 0 && relations(&all)[0].iter().any(|bits| *bits != 0)
}
