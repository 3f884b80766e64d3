// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares GPUs of the machine with a GPU of the image.

use super::links;
use super::node::Node;
use super::property::differences;
use super::reason::{Mismatch, NoCompatibleGpu};
use super::set::Set;
use rewake_criu_images::amdgpu::settings::Checks;

/// Compares single GPUs of the image with those of the machine.
pub(super) struct Compatibility<'a> {
    image: &'a [Node],
    machine: &'a [Node],
    checks: Checks,
    /// The links to CPUs of each node of the machine.
    cpu_links: Vec<Vec<u8>>,
}

impl<'a> Compatibility<'a> {
    pub(super) fn new(image: &'a [Node], machine: &'a [Node], checks: Checks) -> Self {
        let cpu_links = machine.iter().map(|gpu| links::to_cpus(gpu, machine)).collect();
        Self { image, machine, checks, cpu_links }
    }

    /// Returns the GPUs of the machine that can take a GPU's place, by index among all nodes.
    pub(super) fn fits(&self, gpu: &Node) -> Set {
        self.gpus().filter(|place| self.mismatches(gpu, *place).is_empty()).collect()
    }

    /// Returns the most similar GPU of the machine outside `fits`, and its mismatches.
    pub(super) fn closest(&self, gpu: &Node, fits: &Set) -> NoCompatibleGpu {
        let others = self.gpus().filter(|place| !fits.contains(*place));
        let mismatches = others.map(|place| (self.machine[place].gpu_id, self.mismatches(gpu, place)));
        NoCompatibleGpu {
            gpu: gpu.gpu_id,
            closest: mismatches.min_by_key(|(_, mismatches)| mismatches.len()),
        }
    }

    fn gpus(&self) -> impl Iterator<Item = usize> {
        (0..self.machine.len()).filter(|place| self.machine[*place].gpu_id != 0)
    }

    fn mismatches(&self, gpu: &Node, place: usize) -> Vec<Mismatch> {
        let wanted = links::to_cpus(gpu, self.image);
        let link = links::missing(&wanted, &self.cpu_links[place]).map(Mismatch::CpuLink);
        let properties = differences(gpu, &self.machine[place], self.checks);
        properties.into_iter().map(Mismatch::Property).chain(link).collect()
    }
}
