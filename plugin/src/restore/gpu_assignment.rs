// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which GPU takes the place of which. A GPU of the dumped machine is known by its node; its name (gpu id) may differ from
//! process to process, when some of them were restored before.

use std::path::Path;

use rewake_amdgpu_uapi::mapping;
use rewake_amdgpu_uapi::settings::Checks;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_criu_images::amdgpu::{KfdImage, Properties, RenderImage, kfd_name, render_name};
use rewake_criu_plugin::{Answer, Host};

use crate::device::CLASS;
use crate::image::Images;
use crate::topology;

/// A GPU of this machine in the place of one of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AssignedGpu {
    /// The node at the dump.
    pub(crate) node: u32,
    /// The GPU's name here.
    pub(crate) actual: u32,
    /// The N of its `/dev/dri/renderDN` here.
    pub(crate) minor: u32,
    /// Whether a saved queue can be given to it.
    pub(crate) takes_queues: bool,
}

/// All places.
#[derive(Debug)]
pub(crate) struct GpuAssignment {
    places: Vec<AssignedGpu>,
    /// Names in the processes, and their nodes.
    names: Vec<(u32, u32)>,
    /// This machine's GPUs, for render nodes of processes that do not compute.
    machine: Vec<AssignedGpu>,
}

/// A GPU of the image has none.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoPlace {
    #[error(
        "{0}: GPU state, and this machine has no AMD GPU: {CLASS} is not there; is the amdgpu driver loaded?"
    )]
    NoDriver(String),
    #[error("no GPUs of this machine can take the places of the image's")]
    Mapping(#[source] mapping::NoMapping),
    #[error("GPU {0:#x} of the image has no place")]
    Missing(u32),
    #[error(
        "an open render node of GPU {0:#x}: the image does not tell what GPU that was, and none here is called so"
    )]
    Unknown(u32),
}

impl GpuAssignment {
    /// Finds places for the GPUs of all processes.
    pub(crate) fn find(host: &Host, images: &Images) -> Answer<Self> {
        if !Path::new(CLASS).exists() {
            let kfd = images.kfd.first().map(|(id, _)| kfd_name(*id));
            let render = || images.render.keys().next().map(|id| render_name(*id));
            return Err(NoPlace::NoDriver(kfd.or_else(render).unwrap_or_default()).into());
        }
        let machine = Topology::read()?;
        let mut nodes: Vec<mapping::Node> = Vec::new();
        let mut names = Vec::new();
        for (_, image) in &images.kfd {
            names.extend(gpus(image).map(|gpu| (gpu.gpu_id, gpu.node_id)));
            // All processes were dumped on one machine: what the first one's image calls a GPU is its name here.
            for node in image.nodes.iter().map(topology::of_image) {
                match nodes.iter().position(|known| known.node_id == node.node_id) {
                    Some(index) if nodes[index].gpu_id == 0 => nodes[index] = node,
                    Some(_) => {}
                    None => nodes.push(node),
                }
            }
        }
        let used: Vec<u32> = nodes.iter().map(|node| node.gpu_id).filter(|gpu_id| *gpu_id != 0).collect();
        let here: Vec<mapping::Node> = machine.nodes.iter().map(mapping::Node::from).collect();
        let found = mapping::Mapping::find(&nodes, &used, &here, Checks::from_environment()?);
        let found = found.map_err(NoPlace::Mapping)?;
        let mut places = Vec::new();
        for node in nodes.iter().filter(|node| node.gpu_id != 0) {
            let pair = found.get(node.gpu_id).ok_or(NoPlace::Missing(node.gpu_id))?;
            host.info(format_args!("GPU {:#x} of the image is GPU {:#x} here", pair.old, pair.new));
            let gpu = machine.gpus().find(|gpu| gpu.gpu_id == pair.new);
            places.push(place(node.node_id, gpu.ok_or(NoPlace::Missing(node.gpu_id))?));
        }
        let machine = machine.gpus().map(|gpu| place(gpu.number, gpu)).collect();
        Ok(Self { places, names, machine })
    }

    /// The place of a GPU of a process.
    pub(crate) fn of(&self, gpu: &Properties) -> Answer<AssignedGpu> {
        let place = self.places.iter().find(|place| place.node == gpu.node_id);
        Ok(*place.ok_or(NoPlace::Missing(gpu.gpu_id))?)
    }

    /// The GPU for an open render node.
    pub(crate) fn of_render(&self, image: &RenderImage) -> Result<AssignedGpu, NoPlace> {
        let node = self.names.iter().find(|(name, _)| *name == image.gpu_id).map(|(_, node)| *node);
        let place = match node {
            Some(node) => self.places.iter().find(|place| place.node == node),
            None => self.machine.iter().find(|place| place.actual == image.gpu_id),
        };
        place.copied().ok_or(NoPlace::Unknown(image.gpu_id))
    }
}

/// A process's GPUs, in the image's order.
pub(crate) fn gpus(image: &KfdImage) -> impl Iterator<Item = &Properties> {
    image.nodes.iter().map(|node| &node.properties).filter(|properties| properties.gpu_id != 0)
}

fn place(node: u32, gpu: &Node) -> AssignedGpu {
    let (actual, minor) = (gpu.gpu_id, gpu.render_minor());
    AssignedGpu { node, actual, minor, takes_queues: !gpu.has_mes() }
}
