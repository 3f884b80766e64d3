// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of one process on its GPUs, and its computations: its layers, and in the first process the two
//! ends of a step.

use std::ops::Range;
use std::sync::Arc;

use anyhow::ensure;

use crate::chain::{Lane, SLOTS, Step};
use crate::gpu::{Gpus, Memory, Uploader};
use crate::kernel::Kernel;
use crate::kfd::{Buffer, Userptr};
use crate::model::{self, RESIDUAL};
use crate::shape::{Mode, Shape, VOCABULARY, WIDTH};
use crate::weights;

/// Bytes of an activation.
pub const ACTIVATION: u64 = WIDTH * 4;
/// Results of one step: hash of layers, hash of the cache, end of the chase.
const RESULTS: u64 = 3;

/// The layers of one process.
#[derive(Debug)]
pub struct Stage {
    shape: Shape,
    layers: Range<u64>,
    lane: Lane,
    _uploaders: Vec<Uploader>,
    weights: Vec<Arc<Memory>>,
    x: Buffer,
    outputs: Buffer,
    results: Buffer,
}

/// The two ends of a step: the first process alone has them.
#[derive(Debug)]
pub struct Ends {
    embeddings: Userptr,
    links: Userptr,
    cache: Buffer,
}

/// Memory for the weights of one layer.
fn place(shape: &Shape, gpus: &Gpus, gpu: usize) -> anyhow::Result<Memory> {
    let bytes = shape.layer_bytes();
    Ok(match shape.mode {
        Mode::Userptr => Memory::Registered(gpus.registered(&vec![0; usize::try_from(bytes)?])?),
        Mode::NoAccess => Memory::Buffer(gpus.local_without_access(gpu, bytes)?),
        _ => Memory::Buffer(gpus.local(gpu, bytes)?),
    })
}

impl Stage {
    /// Loads the layers of process `process`; `x` is the activation that it shares with others, or its own.
    ///
    /// # Errors
    /// The driver refuses, or a copy does not end.
    pub fn load(shape: &Shape, process: u64, gpus: &Arc<Gpus>, x: Buffer) -> anyhow::Result<Self> {
        let layers = shape.layers_of(process);
        let mut uploaders = Vec::new();
        for gpu in 0..gpus.count() {
            uploaders.push(Uploader::new(gpus, gpu)?);
        }
        let mut weights = Vec::new();
        for (index, layer) in layers.clone().enumerate() {
            let gpu = index % gpus.count();
            let memory = place(shape, gpus, gpu)?;
            let numbers = |at, part: &mut [u8]| weights::layer(shape, layer, at, part);
            uploaders[gpu].write(&memory, shape.layer_bytes(), numbers)?;
            weights.push(Arc::new(memory));
        }
        if shape.no_copiers {
            uploaders.clear();
        }
        let count = weights.len() as u64;
        Ok(Self {
            lane: Lane::new(gpus, gpus.count(), shape.queues)?,
            shape: shape.clone(),
            layers,
            _uploaders: uploaders,
            weights,
            x,
            outputs: gpus.host(count * shape.output_bytes())?,
            results: gpus.host(SLOTS * 8)?,
        })
    }

    /// The lane that computes answers.
    pub fn lane(&mut self) -> &mut Lane {
        &mut self.lane
    }

    /// This process's layers.
    #[must_use]
    pub fn layers(&self) -> Range<u64> {
        self.layers.clone()
    }

    /// Their weights.
    #[must_use]
    pub fn weights(&self) -> &[Arc<Memory>] {
        &self.weights
    }

    /// The activation.
    #[must_use]
    pub fn activation(&self) -> &Buffer {
        &self.x
    }

    /// A step through all layers, and the hash of their results, to the results of step `slot`.
    #[must_use]
    pub fn layer_steps(&self, seed: u64, slot: u64) -> Vec<Step> {
        let gpus = self.lane.gpus().count();
        let mut steps = Vec::new();
        let (mut gpu, mut queue) = (0, 0);
        for (index, weights) in self.weights.iter().enumerate() {
            (gpu, queue) = (index % gpus, index / gpus % self.shape.queues);
            let out = self.outputs.address() + index as u64 * self.shape.output_bytes();
            let product = Kernel::MatVec {
                out,
                weights: weights.address(),
                input: self.x.address(),
                rows: self.shape.rows(),
                columns: WIDTH,
            };
            let sum = Kernel::Axpy {
                y: self.x.address(),
                x: out,
                words: model::residual_words(&self.shape),
                a: RESIDUAL,
            };
            steps.extend([product, sum].map(|kernel| Step { gpu, queue, kernel }));
        }
        let kernel = Kernel::Hash {
            out: self.result_address(slot, 0),
            from: self.outputs.address(),
            bytes: self.weights.len() as u64 * self.shape.output_bytes(),
            seed,
        };
        steps.push(Step { gpu, queue, kernel });
        steps
    }

    fn result_address(&self, slot: u64, which: u64) -> u64 {
        self.results.address() + (slot * RESULTS + which) * 8
    }

    /// A result of step `slot`: the hash of layers (0), that of the cache (1), the end of the chase (2).
    #[must_use]
    pub fn result(&self, slot: u64, which: u64) -> u64 {
        self.results.cpu().load64((slot * RESULTS + which) * 8)
    }
}

impl Ends {
    /// Makes the tables and the cache.
    ///
    /// # Errors
    /// The driver refuses, or a copy does not end.
    pub fn load(shape: &Shape, gpus: &Arc<Gpus>) -> anyhow::Result<Self> {
        let cache = gpus.local(0, shape.cache_mib * 1024 * 1024)?;
        Uploader::new(gpus, 0)?.zero(&cache)?;
        let next = weights::links(shape.seed);
        let links = gpus.registered(&vec![0; next.len() * 8])?;
        for (entry, next) in (0_u64..).zip(next) {
            links.cpu().store64(entry * 8, links.address() + next * 8);
        }
        Ok(Self { embeddings: gpus.registered(&weights::embeddings(shape.seed))?, links, cache })
    }

    /// The work before the layers: the chase, and with `embed` the token's activation.
    #[must_use]
    pub fn before(&self, stage: &Stage, (token, step): (u32, u64), embed: bool, slot: u64) -> Vec<Step> {
        let (start, steps) = model::chase(token, step);
        let chase = Kernel::Chase {
            out: stage.result_address(slot, 2),
            start: self.links.address() + start * 8,
            steps,
        };
        let copy = Kernel::Copy {
            to: stage.x.address(),
            from: self.embeddings.address() + u64::from(token) % VOCABULARY * ACTIVATION,
            bytes: ACTIVATION,
        };
        let kernels = if embed { vec![chase, copy] } else { vec![chase] };
        kernels.into_iter().map(|kernel| Step { gpu: 0, queue: 0, kernel }).collect()
    }

    /// The work after the layers: the activation into the cache, and the cache's hash.
    #[must_use]
    pub fn after(&self, stage: &Stage, step: u64, slot: u64) -> Vec<Step> {
        let rows = stage.shape.cache_rows();
        let copy = Kernel::Copy {
            to: self.cache.address() + step % rows * ACTIVATION,
            from: stage.x.address(),
            bytes: ACTIVATION,
        };
        let hash = Kernel::Hash {
            out: stage.result_address(slot, 1),
            from: self.cache.address(),
            bytes: (step + 1).min(rows) * ACTIVATION,
            seed: model::first_hash(&stage.shape),
        };
        [copy, hash].map(|kernel| Step { gpu: 0, queue: 0, kernel }).to_vec()
    }

    /// The end of a chase, as an entry of the list.
    ///
    /// # Errors
    /// It ended outside of the list.
    pub fn chased(&self, address: u64) -> anyhow::Result<u64> {
        let offset = address.checked_sub(self.links.address());
        let inside = offset.filter(|offset| *offset < self.links.cpu().len() && offset.is_multiple_of(8));
        ensure!(
            inside.is_some(),
            "a chase ended at {address:#x}, not in its list at {:#x}",
            self.links.address()
        );
        Ok(inside.unwrap_or(0) / 8)
    }
}
