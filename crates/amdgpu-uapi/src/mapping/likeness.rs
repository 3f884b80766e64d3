// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which GPUs of the machine are like a GPU of the image.

use super::links;
use super::node::Node;
use super::property::differences;
use super::reason::{Lack, Misfit};
use super::set::Set;
use crate::settings::Checks;

/// Compares GPUs of the image with those of the machine, each by itself.
pub(super) struct Likeness<'a> {
    image: &'a [Node],
    machine: &'a [Node],
    checks: Checks,
    /// Of each node of the machine.
    cpu_links: Vec<Vec<u8>>,
}

impl<'a> Likeness<'a> {
    pub(super) fn new(image: &'a [Node], machine: &'a [Node], checks: Checks) -> Self {
        let cpu_links = machine.iter().map(|gpu| links::to_cpus(gpu, machine)).collect();
        Self { image, machine, checks, cpu_links }
    }

    /// The GPUs of the machine that can take its place, by their place among all nodes.
    pub(super) fn fits(&self, gpu: &Node) -> Set {
        self.gpus().filter(|place| self.lacks(gpu, *place).is_empty()).collect()
    }

    /// The GPU of the machine outside `fits` that is most like it, and what it lacks.
    pub(super) fn closest(&self, gpu: &Node, fits: &Set) -> Misfit {
        let others = self.gpus().filter(|place| !fits.contains(*place));
        let lacks = others.map(|place| (self.machine[place].gpu_id, self.lacks(gpu, place)));
        Misfit { gpu: gpu.gpu_id, closest: lacks.min_by_key(|(_, lacks)| lacks.len()) }
    }

    fn gpus(&self) -> impl Iterator<Item = usize> {
        (0..self.machine.len()).filter(|place| self.machine[*place].gpu_id != 0)
    }

    fn lacks(&self, gpu: &Node, place: usize) -> Vec<Lack> {
        let wanted = links::to_cpus(gpu, self.image);
        let link = links::missing(&wanted, &self.cpu_links[place]).map(Lack::CpuLink);
        let properties = differences(gpu, &self.machine[place], self.checks);
        properties.into_iter().map(Lack::Property).chain(link).collect()
    }
}
