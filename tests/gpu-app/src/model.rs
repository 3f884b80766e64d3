// SPDX-License-Identifier: MIT OR Apache-2.0
//! The server's answers, computed without any GPU.
//!
//! One step takes a token: its embedding goes through all layers (`out = W x`, then `x += 3 out`). Every
//! layer's result is hashed, whole. The activation is kept in the cache, and all of the used cache is hashed;
//! a list in host memory is followed. The next token is made of the two hashes and of the end of that chase.
//! The first step begins with a hash of all small buffers and some of the program's own memory. Hashes and
//! odd multipliers lose nothing, so one changed bit of any weight changes the following tokens.

use crate::kernel::{axpy, dot, hash, longs, pairs, words};
use crate::shape::{LINKS, Mode, Shape, VOCABULARY, WIDTH};
use crate::{own, weights};

/// The factor of a layer's result before it is added.
pub const RESIDUAL: u32 = 3;
/// Bytes of a small buffer.
pub const SMALL: usize = 4096;

/// The server's memory, and the hash that goes from step to step.
#[derive(Debug)]
pub struct Model {
    shape: Shape,
    layers: Vec<Vec<u32>>,
    embeddings: Vec<u32>,
    links: Vec<u64>,
    /// The hash that an answer begins with.
    start: u64,
}

/// The seed of the cache's hash, and the start of an answer without small buffers.
#[must_use]
pub fn first_hash(shape: &Shape) -> u64 {
    hash([shape.seed, shape.layers, shape.layer_kib], 0x5eed)
}

/// The first step's seed: all small buffers, by the hash of each.
#[must_use]
pub fn start(shape: &Shape, small: impl IntoIterator<Item = u64>) -> u64 {
    hash(small, first_hash(shape))
}

/// The hash of a small buffer.
#[must_use]
pub fn small_hash(shape: &Shape, buffer: u64) -> u64 {
    let mut bytes = [0; SMALL];
    weights::small(shape.seed, buffer, &mut bytes);
    hash(longs(&bytes), buffer)
}

/// Where a chase begins and how far it goes.
#[must_use]
pub fn chase(token: u32, step: u64) -> (u64, u64) {
    (u64::from(token).wrapping_mul(7).wrapping_add(step) % LINKS, 16 + u64::from(token % 32))
}

/// Hash for the next step, and the next token.
#[must_use]
pub fn next(layers: u64, cache: u64, chased: u64) -> (u64, u32) {
    let hash = layers.rotate_left(1) ^ cache;
    let low = u32::try_from(hash & 0xffff_ffff).unwrap_or(0);
    (hash, low ^ u32::try_from(chased).unwrap_or(0))
}

/// Words of an activation that a layer's result is added to.
#[must_use]
pub fn residual_words(shape: &Shape) -> u64 {
    shape.rows().min(WIDTH)
}

impl Model {
    /// The memory of a server of this shape.
    #[must_use]
    pub fn new(shape: &Shape) -> Self {
        let layer = |layer| {
            let mut bytes = vec![0; usize::try_from(shape.layer_bytes()).unwrap_or(0)];
            weights::layer(shape, layer, 0, &mut bytes);
            words(&bytes).collect()
        };
        Self {
            layers: (0..shape.layers).map(layer).collect(),
            embeddings: words(&weights::embeddings(shape.seed)).collect(),
            links: weights::links(shape.seed),
            start: own::start(
                shape,
                start(shape, (0..shape.small_bos).map(|buffer| small_hash(shape, buffer))),
            ),
            shape: shape.clone(),
        }
    }

    /// Changes one bit of a weight, to see that answers change.
    pub fn flip(&mut self, layer: usize, word: usize, bit: u32) {
        self.layers[layer][word] ^= 1 << bit;
    }

    /// The answer: `count` tokens after `prompt`.
    #[must_use]
    pub fn generate(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut state = State { hash: self.start, x: Vec::new(), cache: Vec::new(), step: 0 };
        let mut token = 0;
        let mut answer = Vec::new();
        // An empty prompt is one of token 0.
        for given in if prompt.is_empty() { &[0] } else { prompt } {
            token = self.step(&mut state, *given, true);
        }
        let feed = self.shape.mode != Mode::Graph;
        while answer.len() < count {
            answer.push(token);
            token = self.step(&mut state, if feed { token } else { 0 }, feed);
        }
        answer
    }

    /// One step; without `embed` the activation is used unchanged.
    fn step(&self, state: &mut State, token: u32, embed: bool) -> u32 {
        if embed {
            let width = usize::try_from(WIDTH).unwrap_or(0);
            let row = usize::try_from(u64::from(token) % VOCABULARY).unwrap_or(0);
            state.x = self.embeddings[row * width..(row + 1) * width].to_vec();
        }
        let (start, steps) = chase(token, state.step);
        let mut at = start;
        for _ in 0..steps {
            at = self.links[usize::try_from(at).unwrap_or(0)];
        }
        let seed = if self.shape.mode == Mode::Graph { self.start } else { state.hash };
        let mut layers = seed;
        for layer in &self.layers {
            let out: Vec<u32> = layer.chunks(state.x.len()).map(|row| dot(row, &state.x)).collect();
            axpy(&mut state.x, &out, RESIDUAL);
            layers = hash(pairs(&out), layers);
        }
        let rows = usize::try_from(self.shape.cache_rows()).unwrap_or(usize::MAX);
        let row = usize::try_from(state.step).unwrap_or(0) % rows;
        if row == state.cache.len() {
            state.cache.push(state.x.clone());
        } else {
            state.cache[row].clone_from(&state.x);
        }
        let cache = hash(state.cache.iter().flat_map(|row| pairs(row)), first_hash(&self.shape));
        state.step += 1;
        let (hash, token) = next(layers, cache, at);
        state.hash = hash;
        token
    }
}

#[derive(Debug)]
struct State {
    hash: u64,
    x: Vec<u32>,
    cache: Vec<Vec<u32>>,
    step: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape { layers: 3, layer_kib: 8, ..Shape::small() }
    }

    #[test]
    fn answers_repeat_and_a_longer_one_begins_with_a_shorter_one() {
        let model = Model::new(&shape());
        let answer = model.generate(&[1, 2, 3], 8);
        assert_eq!(answer, Model::new(&shape()).generate(&[1, 2, 3], 8));
        assert_eq!(answer[..5], model.generate(&[1, 2, 3], 5));
        assert_ne!(answer, model.generate(&[1, 2, 4], 8));
        assert_ne!(answer, Model::new(&Shape { mode: Mode::Graph, ..shape() }).generate(&[1, 2, 3], 8));
    }

    #[test]
    fn the_number_of_processes_and_queues_changes_no_answer() {
        let other = Shape { processes: 3, queues: 5, gpus: 2, cache_mib: 1, ..shape() };
        assert_eq!(Model::new(&shape()).generate(&[9], 4), Model::new(&other).generate(&[9], 4));
    }

    #[test]
    fn small_buffers_own_memory_and_zeros_change_answers() {
        let answer = |shape: &Shape| Model::new(shape).generate(&[4], 2);
        let small = |small_bos| Shape { small_bos, ..shape() };
        assert_ne!(answer(&shape()), answer(&small(1)));
        assert_ne!(answer(&small(2)), answer(&small(1)));
        assert_ne!(answer(&shape()), answer(&Shape { own_mib: 1, ..shape() }));
        assert_ne!(answer(&shape()), answer(&Shape { zero_share: 50, ..shape() }));
    }

    #[test]
    fn one_changed_bit_of_any_weight_changes_the_first_token() {
        let right = Model::new(&shape()).generate(&[5], 1);
        for (layer, word, bit) in [(0, 0, 0), (1, 777, 31), (2, 8 * 256 - 1, 0), (0, 2047, 31), (2, 0, 7)] {
            let mut model = Model::new(&shape());
            model.flip(layer, word, bit);
            assert_ne!(model.generate(&[5], 1), right, "bit {bit} of word {word} of layer {layer}");
        }
    }
}
