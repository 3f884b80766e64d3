// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares single GPUs of the machine with a GPU of the image.

use rewake_criu_images::amdgpu::NodeImage;
use rewake_criu_images::amdgpu::settings::Checks;

use super::property::differences;
use super::reason::{Mismatch, NoCompatibleGpu};
use super::search::{Places, contains, places};
use super::{gpus, is_cpu, links};

/// GPUs of the image, and the machine.
pub(super) struct Compatibility<'a> {
    wanted: Vec<Linked<'a>>,
    machine: Vec<Linked<'a>>,
    checks: Checks,
}

/// A node, with its links to CPUs and to GPUs.
struct Linked<'a> {
    node: &'a NodeImage,
    cpus: Vec<u8>,
    gpus: Vec<u8>,
}

impl<'a> Compatibility<'a> {
    /// Prepares the comparison of `wanted`, which are GPUs of `image`.
    pub(super) fn new(
        image: &'a [NodeImage],
        wanted: &[&'a NodeImage],
        machine: &'a [NodeImage],
        checks: Checks,
    ) -> Self {
        let of_image = |gpu: &&'a NodeImage| Linked {
            node: gpu,
            cpus: links::with(gpu, cpus(image)),
            gpus: links::with(gpu, wanted.iter().copied()),
        };
        let of_machine = |node: &'a NodeImage| Linked {
            node,
            cpus: links::with(node, cpus(machine)),
            gpus: links::with(node, gpus(machine)),
        };
        Self {
            wanted: wanted.iter().map(of_image).collect(),
            machine: machine.iter().map(of_machine).collect(),
            checks,
        }
    }

    /// Returns the GPUs of the machine that can take the place of GPU number `gpu`.
    pub(super) fn fits(&self, gpu: usize) -> Places {
        let fits = |place: &Linked| is_gpu(place) && self.mismatches(gpu, place).is_empty();
        places(self.machine.iter().map(fits))
    }

    /// Returns the most similar GPU of the machine outside `fits`, and its mismatches.
    pub(super) fn closest(&self, gpu: usize, fits: Places) -> NoCompatibleGpu {
        let others =
            self.machine.iter().zip(0..).filter(|(place, number)| is_gpu(place) && !contains(fits, *number));
        let mismatches = others.map(|(place, _)| (place.node.properties.gpu_id, self.mismatches(gpu, place)));
        NoCompatibleGpu {
            gpu: self.wanted[gpu].node.properties.gpu_id,
            closest: mismatches.min_by_key(|(_, mismatches)| mismatches.len()),
        }
    }

    fn mismatches(&self, gpu: usize, place: &Linked) -> Vec<Mismatch> {
        let gpu = &self.wanted[gpu];
        let properties = differences(&gpu.node.properties, &place.node.properties, self.checks);
        let cpu = links::missing(&gpu.cpus, &place.cpus).map(|link| Mismatch::CpuLink(links::name(link)));
        let fewer = links::fewer(&gpu.gpus, &place.gpus).map(|(link, wanted, found)| Mismatch::GpuLinks {
            link: links::name(link),
            wanted,
            found,
        });
        properties.into_iter().map(Mismatch::Property).chain(cpu).chain(fewer).collect()
    }
}

fn is_gpu(linked: &Linked) -> bool {
    linked.node.properties.gpu_id != 0
}

fn cpus(nodes: &[NodeImage]) -> impl Iterator<Item = &NodeImage> {
    nodes.iter().filter(|node| is_cpu(node))
}
