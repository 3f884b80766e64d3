// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many buffers of one page each: every answer begins with the hash of all of them.

use std::sync::Arc;

use anyhow::Context as _;

use crate::chain::{Lane, Step};
use crate::gpu::Gpus;
use crate::kernel::Kernel;
use crate::kfd::Buffer;
use crate::model::{self, SMALL};
use crate::shape::Shape;
use crate::weights;

/// The buffers, an equal share on each GPU.
#[derive(Debug)]
pub struct Small {
    shape: Shape,
    buffers: Vec<Buffer>,
    hashes: Buffer,
}

/// Which kind of memory a buffer is in.
fn gpu_of(shape: &Shape, gpus: &Gpus, number: u64) -> usize {
    usize::try_from(number * gpus.count() as u64 / shape.small_bos).unwrap_or(0)
}

impl Small {
    /// Makes the shape's number of them.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn load(shape: &Shape, gpus: &Arc<Gpus>) -> anyhow::Result<Self> {
        let mut buffers = Vec::new();
        for number in 0..shape.small_bos {
            let gpu = gpu_of(shape, gpus, number);
            let large = gpus.device(gpu).node().has_large_bar();
            let place = || if large { gpus.local(gpu, SMALL as u64) } else { gpus.host(SMALL as u64) };
            let buffer = place().with_context(|| format!("small buffer {number}"))?;
            let mut bytes = [0; SMALL];
            weights::small(shape.seed, number, &mut bytes);
            buffer.cpu().write(0, &bytes);
            buffers.push(buffer);
        }
        Ok(Self { shape: shape.clone(), buffers, hashes: gpus.host((shape.small_bos * 8).max(8))? })
    }

    /// The seed of an answer, computed by the GPUs.
    ///
    /// # Errors
    /// A GPU faults or does not finish.
    pub fn start(&self, lane: &mut Lane) -> anyhow::Result<u64> {
        let gpus = Arc::clone(lane.gpus());
        let steps: Vec<Step> = (0_u64..)
            .zip(&self.buffers)
            .map(|(number, buffer)| {
                let out = self.hashes.address() + number * 8;
                let kernel = Kernel::Hash { out, from: buffer.address(), bytes: SMALL as u64, seed: number };
                Step { gpu: gpu_of(&self.shape, &gpus, number), queue: 0, kernel }
            })
            .collect();
        lane.run(&steps)?;
        let hashes = (0..self.shape.small_bos).map(|number| self.hashes.cpu().load64(number * 8));
        Ok(model::start(&self.shape, hashes))
    }
}
