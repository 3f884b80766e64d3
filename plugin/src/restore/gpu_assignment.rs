// SPDX-License-Identifier: MIT OR Apache-2.0
//! Assigns a GPU of this machine to each GPU of the image. Images identify a GPU by its node: its id may
//! differ between processes if some of them were restored before.

use std::path::Path;

use rewake_amdgpu_uapi::criu::queues::QueueSupport;
use rewake_amdgpu_uapi::topology::{Node, Topology};
use rewake_criu_images::amdgpu::settings::Checks;
use rewake_criu_images::amdgpu::{self as image, KfdImage, Properties, RenderImage, kfd_name, render_name};
use rewake_criu_plugin::{Answer, Host};

use crate::device::CLASS;
use crate::image::Images;
use crate::placement::{NoPlacement, Placement};
use crate::topology::to_image;

/// A GPU of this machine that is assigned to one of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AssignedGpu {
    /// The node number in the dumped machine.
    pub(crate) node: u32,
    /// The GPU's id in this machine.
    pub(crate) actual: u32,
    /// The N of its `/dev/dri/renderDN` in this machine.
    pub(crate) minor: u32,
    /// What the driver does with its queues.
    pub(crate) queues: QueueSupport,
    /// The compute dies (XCCs) that each of its queues is spread over.
    pub(crate) xccs: u64,
}

/// All assigned GPUs.
#[derive(Debug)]
pub(crate) struct GpuAssignment {
    assigned: Vec<AssignedGpu>,
    /// GPU ids that processes use, and their nodes.
    names: Vec<(u32, u32)>,
    /// All GPUs of this machine, for render nodes of processes that do not compute.
    machine: Vec<AssignedGpu>,
}

/// A GPU of the image cannot be assigned.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AssignmentError {
    #[error(
        "{0}: GPU state, and this machine has no AMD GPU: {CLASS} does not exist; is the amdgpu driver \
         loaded?"
    )]
    NoDriver(String),
    #[error("the image's GPUs cannot be assigned to GPUs of this machine")]
    Placement(#[source] NoPlacement),
    #[error("no GPU of this machine is assigned to GPU {0:#x} of the image")]
    Missing(u32),
    #[error(
        "an open render node of GPU {0:#x}: the image does not describe that GPU, and no GPU of this machine \
         has that id"
    )]
    Unknown(u32),
}

impl GpuAssignment {
    /// Assigns GPUs to the GPUs of all processes.
    pub(crate) fn find(host: &Host, images: &Images) -> Answer<Self> {
        if !Path::new(CLASS).exists() {
            let kfd = images.kfd.first().map(|(id, _)| kfd_name(*id));
            let render = || images.render.keys().next().map(|id| render_name(*id));
            return Err(AssignmentError::NoDriver(kfd.or_else(render).unwrap_or_default()).into());
        }
        let machine = Topology::read()?;
        let mut nodes: Vec<image::NodeImage> = Vec::new();
        let mut names = Vec::new();
        for (_, image) in &images.kfd {
            names.extend(gpus(image).map(|gpu| (gpu.gpu_id, gpu.node_id)));
            // All processes were dumped on one machine. The search uses the GPU's id in the first image that
            // has it.
            for node in &image.nodes {
                let number = node.properties.node_id;
                match nodes.iter().position(|known| known.properties.node_id == number) {
                    Some(index) if nodes[index].properties.gpu_id == 0 => nodes[index] = node.clone(),
                    Some(_) => {}
                    None => nodes.push(node.clone()),
                }
            }
        }
        let ids = nodes.iter().map(|node| node.properties.gpu_id);
        let used: Vec<u32> = ids.filter(|gpu_id| *gpu_id != 0).collect();
        let here: Vec<image::NodeImage> = machine.nodes.iter().map(to_image).collect();
        let found = Placement::find(&nodes, &used, &here, Checks::from_environment()?);
        let found = found.map_err(AssignmentError::Placement)?;
        let mut assigned = Vec::new();
        for node in nodes.iter().map(|node| &node.properties).filter(|node| node.gpu_id != 0) {
            let pair = found.get(node.gpu_id).ok_or(AssignmentError::Missing(node.gpu_id))?;
            host.info(format_args!("GPU {:#x} of the image is GPU {:#x} here", pair.old, pair.new));
            let gpu = machine.gpus().find(|gpu| gpu.gpu_id == pair.new);
            assigned.push(assigned_gpu(node.node_id, gpu.ok_or(AssignmentError::Missing(node.gpu_id))?));
        }
        let machine = machine.gpus().map(|gpu| assigned_gpu(gpu.number, gpu)).collect();
        Ok(Self { assigned, names, machine })
    }

    /// Returns the GPU that is assigned to a process's GPU.
    pub(crate) fn of(&self, gpu: &Properties) -> Answer<AssignedGpu> {
        let assigned = self.assigned.iter().find(|assigned| assigned.node == gpu.node_id);
        Ok(*assigned.ok_or(AssignmentError::Missing(gpu.gpu_id))?)
    }

    /// The numbers of all render nodes of this machine.
    pub(crate) fn minors(&self) -> impl Iterator<Item = u32> {
        self.machine.iter().map(|gpu| gpu.minor)
    }

    /// Returns a GPU of this machine by its id.
    pub(crate) fn here(&self, actual: u32) -> Option<AssignedGpu> {
        self.machine.iter().find(|gpu| gpu.actual == actual).copied()
    }

    /// Returns the GPU for an open render node.
    pub(crate) fn of_render(&self, image: &RenderImage) -> Result<AssignedGpu, AssignmentError> {
        let node = self.names.iter().find(|(name, _)| *name == image.gpu_id).map(|(_, node)| *node);
        let gpu = match node {
            Some(node) => self.assigned.iter().find(|gpu| gpu.node == node),
            None => self.machine.iter().find(|gpu| gpu.actual == image.gpu_id),
        };
        gpu.copied().ok_or(AssignmentError::Unknown(image.gpu_id))
    }
}

/// Returns a process's GPUs in the image's order.
pub(crate) fn gpus(image: &KfdImage) -> impl Iterator<Item = &Properties> {
    image.nodes.iter().map(|node| &node.properties).filter(|properties| properties.gpu_id != 0)
}

fn assigned_gpu(node: u32, gpu: &Node) -> AssignedGpu {
    let (actual, minor) = (gpu.gpu_id, gpu.render_minor());
    AssignedGpu { node, actual, minor, queues: QueueSupport::here(gpu), xccs: gpu.property("num_xcc") }
}
