// SPDX-License-Identifier: MIT OR Apache-2.0
//! Assigns GPUs of this machine to the GPUs of an image.
//!
//! A GPU can take a place if it matches in what programs, saved queues and save areas depend on. The rules
//! are those of CRIU's stock plugin: most properties must be equal, others (VRAM, firmware, caches, GWS) at
//! least as large. Some of these checks can be switched off ([`Checks`]). All GPUs that the image uses must
//! get different places, so that
//!
//! * linked GPUs are linked again: XGMI may replace PCIe, and a two-way link a one-way link;
//! * GPUs of one hive are in one hive;
//! * each link to a CPU has an equivalent. With [`Switch::Numa`], GPUs that shared a CPU share one again, and
//!   others do not.
//!
//! The stock plugin checks links between GPUs only by hives, and needs as many GPUs as the image has. Here a
//! machine may have more. But the kernel restores a process only where it *sees* exactly its GPUs
//! (`kfd_chardev.c`, criu_restore_devices).
//!
//! If possible, a GPU keeps its own id.

mod compat;
mod links;
mod matching;
mod node;
mod property;
mod reason;
mod search;
mod set;

use std::collections::HashSet;

pub use node::{Link, Node};
pub use property::Difference;
pub use reason::{BadNodes, Mismatch, NoCompatibleGpu, NoMapping, NodeName};

use compat::Compatibility;
use rewake_criu_images::amdgpu::settings::{Checks, Switch};
use search::{Failure, Problem, STEPS};
use set::{CAPACITY, Set};

/// A GPU of the image, and the GPU that takes its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The gpu id in the image.
    pub old: u32,
    /// The gpu id on this machine.
    pub new: u32,
    /// The N of `/dev/dri/renderDN` on this machine.
    pub render_minor: u32,
}

/// A different place for every GPU in use.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mapping {
    pairs: Vec<Pair>,
}

impl Mapping {
    /// Finds places among `machine` for the GPUs `used`: gpu ids of all processes that are restored together,
    /// in any order, repeated or not. Other nodes of `image` matter only if they are linked to these.
    ///
    /// # Errors
    /// No mapping exists: see [`NoMapping`].
    pub fn find(image: &[Node], used: &[u32], machine: &[Node], checks: Checks) -> Result<Self, NoMapping> {
        check("this machine", machine)?;
        check("the image", image)?;
        let used: HashSet<u32> = used.iter().copied().collect();
        let known: HashSet<u32> = gpus(image).map(|gpu| gpu.gpu_id).collect();
        if let Some(unknown) = used.difference(&known).min() {
            return Err(NoMapping::Nodes(BadNodes::Unknown(*unknown)));
        }
        let wanted: Vec<&Node> = gpus(image).filter(|gpu| used.contains(&gpu.gpu_id)).collect();
        let likeness = Compatibility::new(image, machine, checks);
        let fits: Vec<Set> = wanted.iter().map(|gpu| likeness.fits(gpu)).collect();
        let misfits = wanted.iter().zip(&fits).filter(|(_, fits)| fits.is_empty());
        let misfits: Vec<NoCompatibleGpu> = misfits.map(|(gpu, fits)| likeness.closest(gpu, fits)).collect();
        if !misfits.is_empty() {
            return Err(NoMapping::NoCompatibleGpu(misfits));
        }
        let answer = place(image, &wanted, machine, &fits, checks.has(Switch::Numa));
        answer.map_err(|mut reason| {
            let numa = checks.has(Switch::Numa) && place(image, &wanted, machine, &fits, false).is_ok();
            if let NoMapping::NotEnoughGpus { numa: helps, .. } | NoMapping::Links { numa: helps, .. } =
                &mut reason
            {
                *helps = numa;
            }
            if let NoMapping::NotEnoughGpus { items, closest, .. } = &mut reason {
                let crowd = wanted.iter().zip(&fits).filter(|(gpu, _)| items.contains(&name(gpu)));
                let others = crowd.map(|(gpu, fits)| likeness.closest(gpu, fits));
                let others = others.filter(|misfit| misfit.closest.is_some());
                *closest = others
                    .min_by_key(|misfit| misfit.closest.as_ref().map(|(_, mismatches)| mismatches.len()));
            }
            reason
        })
    }

    /// Returns the GPU that takes the place of the image's GPU `old`.
    #[must_use]
    pub fn get(&self, old: u32) -> Option<&Pair> {
        self.pairs.iter().find(|pair| pair.old == old)
    }

    /// Returns all pairs in the image's order.
    #[must_use]
    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }
}

fn name(node: &Node) -> NodeName {
    match node.gpu_id {
        0 => NodeName::Cpu(node.node_id),
        id => NodeName::Gpu(id),
    }
}

fn gpus(nodes: &[Node]) -> impl Iterator<Item = &Node> {
    nodes.iter().filter(|node| node.gpu_id != 0)
}

/// Checks that numbers and ids are unique, and that the nodes are not too many.
fn check(whose: &'static str, nodes: &[Node]) -> Result<(), NoMapping> {
    let (mut numbers, mut names) = (HashSet::new(), HashSet::new());
    let bad = nodes.iter().find_map(|node| match node {
        _ if !numbers.insert(node.node_id) => Some(BadNodes::SameNode(whose, node.node_id)),
        _ if node.gpu_id != 0 && !names.insert(node.gpu_id) => Some(BadNodes::SameGpu(whose, node.gpu_id)),
        _ => None,
    });
    let many = (nodes.len() > CAPACITY).then_some(BadNodes::TooMany(whose, nodes.len()));
    many.or(bad).map_or(Ok(()), |bad| Err(NoMapping::Nodes(bad)))
}

/// Places all GPUs, and with `numa` the CPUs that they are linked to.
fn place(
    image: &[Node],
    wanted: &[&Node],
    machine: &[Node],
    fits: &[Set],
    numa: bool,
) -> Result<Mapping, NoMapping> {
    let mut items = wanted.to_vec();
    let mut domains = fits.to_vec();
    if numa {
        let cpus: Set = (0..machine.len()).filter(|place| machine[*place].gpu_id == 0).collect();
        let near = image.iter().filter(|node| links::is_cpu_of(node, wanted));
        items.extend(near);
        domains.resize(items.len(), cpus);
    }
    let problem = Problem {
        domains,
        preferred: items
            .iter()
            .map(|item| machine.iter().position(|node| name(node) == name(item)))
            .collect(),
        wanted: links::relations(&items),
        offered: links::offers(links::relations(&machine.iter().collect::<Vec<_>>())),
    };
    let places = problem.solve(STEPS).map_err(|failure| explain(failure, &problem, &items, machine))?;
    let pair = |(gpu, place): (&&Node, usize)| {
        let Node { gpu_id, drm_render_minor, .. } = machine[place];
        Pair { old: gpu.gpu_id, new: gpu_id, render_minor: drm_render_minor }
    };
    Ok(Mapping { pairs: wanted.iter().zip(places).map(pair).collect() })
}

/// Explains a failure with the names of nodes.
fn explain(failure: Failure, problem: &Problem, items: &[&Node], machine: &[Node]) -> NoMapping {
    match failure {
        Failure::Crowded(mut crowd) => {
            crowd.sort_unstable();
            let fits = |place: &usize| crowd.iter().any(|item| problem.domains[*item].contains(*place));
            let places = (0..machine.len()).filter(fits);
            NoMapping::NotEnoughGpus {
                places: places.map(|place| name(&machine[place])).collect(),
                items: crowd.iter().map(|item| name(items[*item])).collect(),
                numa: false,
                closest: None,
            }
        }
        Failure::Unrelated(dead) => {
            let link = |other: usize| (links::name(problem.wanted[dead.item][other]), name(items[other]));
            NoMapping::Links {
                item: name(items[dead.item]),
                link: dead.other.map(link),
                placed: dead.placed,
                all: items.len(),
                numa: false,
            }
        }
        Failure::Steps => NoMapping::Steps,
    }
}
