// SPDX-License-Identifier: MIT OR Apache-2.0
//! Assigns GPUs of this machine to the GPUs of an image.
//!
//! A GPU can take a place if it matches in what programs, saved queues and save areas depend on. The rules
//! are the same as in CRIU's stock plugin: most properties must be equal, others (VRAM, firmware, caches,
//! GWS) at least as large. Some of these checks can be switched off ([`Checks`]). All GPUs that the image
//! uses must get different places, so that
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
mod property;
mod reason;
mod search;

use std::collections::HashSet;

use rewake_criu_images::amdgpu::NodeImage;
use rewake_criu_images::amdgpu::settings::{Checks, Switch};

use compat::Compatibility;
pub use property::Difference;
pub use reason::{BadNodes, Mismatch, NoCompatibleGpu, NoPlacement, NodeName};
use search::{Failure, MAX_NODES, Places, Problem, contains, crowd, places};

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
pub struct Placement {
    pairs: Vec<Pair>,
}

impl Placement {
    /// Finds places among `machine` for the GPUs `used`: gpu ids of all processes that are restored together,
    /// in any order, repeated or not. Other nodes of `image` matter only if they are linked to these.
    ///
    /// # Errors
    /// No placement exists: see [`NoPlacement`].
    pub fn find(
        image: &[NodeImage],
        used: &[u32],
        machine: &[NodeImage],
        checks: Checks,
    ) -> Result<Self, NoPlacement> {
        check("this machine", machine)?;
        check("the image", image)?;
        let is_used = |gpu: &&NodeImage| used.contains(&gpu.properties.gpu_id);
        if let Some(unknown) =
            used.iter().filter(|id| gpus(image).all(|gpu| gpu.properties.gpu_id != **id)).min()
        {
            return Err(NoPlacement::Nodes(BadNodes::Unknown(*unknown)));
        }
        let wanted: Vec<&NodeImage> = gpus(image).filter(is_used).collect();
        let compatibility = Compatibility::new(image, &wanted, machine, checks);
        let fits: Vec<Places> = (0..wanted.len()).map(|gpu| compatibility.fits(gpu)).collect();
        let closest = |gpu: usize| compatibility.closest(gpu, fits[gpu]);
        let misfits: Vec<NoCompatibleGpu> =
            (0..wanted.len()).filter(|gpu| fits[*gpu] == 0).map(closest).collect();
        if !misfits.is_empty() {
            return Err(NoPlacement::NoCompatibleGpu(misfits));
        }
        if let Some(crowd) = crowd(&fits) {
            let others = crowd.iter().map(|gpu| closest(*gpu)).filter(|misfit| misfit.closest.is_some());
            let here = machine.iter().zip(0..).filter(|(_, place)| contains(fits[crowd[0]], *place));
            return Err(NoPlacement::NotEnoughGpus {
                closest: others.min_by_key(|misfit| misfit.closest.as_ref().map(|(_, all)| all.len())),
                places: here.map(|(node, _)| name(node)).collect(),
                gpus: crowd.iter().map(|gpu| name(wanted[*gpu])).collect(),
            });
        }
        let answer = place(image, &wanted, machine, &fits, checks.has(Switch::Numa));
        answer.map_err(|mut reason| {
            if let NoPlacement::Links { numa, .. } = &mut reason {
                *numa = checks.has(Switch::Numa) && place(image, &wanted, machine, &fits, false).is_ok();
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

fn name(node: &NodeImage) -> NodeName {
    match node.properties.gpu_id {
        0 => NodeName::Cpu(node.properties.node_id),
        id => NodeName::Gpu(id),
    }
}

/// Whether a node is a CPU. A GPU that the image's processes do not use has no id in it, and compute units.
fn is_cpu(node: &NodeImage) -> bool {
    node.properties.gpu_id == 0 && node.properties.simd_count == 0
}

fn gpus(nodes: &[NodeImage]) -> impl Iterator<Item = &NodeImage> {
    nodes.iter().filter(|node| node.properties.gpu_id != 0)
}

/// Checks that numbers and ids are unique, and that the nodes are not too many.
fn check(whose: &'static str, nodes: &[NodeImage]) -> Result<(), NoPlacement> {
    let (mut numbers, mut names) = (HashSet::new(), HashSet::new());
    let bad = nodes.iter().map(|node| &node.properties).find_map(|node| match node {
        _ if !numbers.insert(node.node_id) => Some(BadNodes::SameNode(whose, node.node_id)),
        _ if node.gpu_id != 0 && !names.insert(node.gpu_id) => Some(BadNodes::SameGpu(whose, node.gpu_id)),
        _ => None,
    });
    let many = (nodes.len() > MAX_NODES).then_some(BadNodes::TooMany(whose, nodes.len()));
    many.or(bad).map_or(Ok(()), |bad| Err(NoPlacement::Nodes(bad)))
}

/// Places all GPUs, and with `numa` the CPUs that they are linked to.
fn place(
    image: &[NodeImage],
    wanted: &[&NodeImage],
    machine: &[NodeImage],
    fits: &[Places],
    numa: bool,
) -> Result<Placement, NoPlacement> {
    let mut items = wanted.to_vec();
    let mut candidates = fits.to_vec();
    if numa {
        let linked =
            |node: &&NodeImage| is_cpu(node) && wanted.iter().any(|gpu| links::between(node, gpu) != 0);
        items.extend(image.iter().filter(linked));
        let cpus = places(machine.iter().map(is_cpu));
        candidates.resize(items.len(), cpus);
    }
    let same = |item: &&NodeImage| machine.iter().position(|node| name(node) == name(item));
    let problem = Problem {
        candidates,
        preferred: items.iter().map(same).collect(),
        wanted: items.iter().map(|item| links::with(item, items.iter().copied())).collect(),
        offered: machine.iter().map(|node| links::with(node, machine)).collect(),
    };
    let places = problem.solve().map_err(|failure| explain(failure, &problem, &items, machine))?;
    let pair = |(gpu, place): (&&NodeImage, usize)| {
        let (old, new) = (&gpu.properties, &machine[place].properties);
        Pair { old: old.gpu_id, new: new.gpu_id, render_minor: new.drm_render_minor }
    };
    Ok(Placement { pairs: wanted.iter().zip(places).map(pair).collect() })
}

/// Explains a failure with the names of nodes.
fn explain(failure: Failure, problem: &Problem, items: &[&NodeImage], machine: &[NodeImage]) -> NoPlacement {
    let Failure::Links(dead) = failure else { return NoPlacement::Steps };
    let link = problem.wanted[dead.item][dead.last];
    NoPlacement::Links {
        node: name(items[dead.item]),
        other: name(items[dead.last]),
        place: name(&machine[dead.place]),
        link: (link != 0).then(|| links::name(link)),
        numa: false,
    }
}
