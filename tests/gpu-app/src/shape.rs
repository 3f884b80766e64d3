// SPDX-License-Identifier: MIT OR Apache-2.0
//! How large the server is, and what it does besides answering.

use std::ops::Range;

use anyhow::ensure;

/// Words of an activation, and columns of every layer's matrix.
pub const WIDTH: u64 = 256;
/// Rows of the table of embeddings.
pub const VOCABULARY: u64 = 256;
/// Entries of the list that a step follows.
pub const LINKS: u64 = 2048;

/// The most small buffers, as a bound on dispatches at once.
pub const SMALL_BOS: u64 = 8000;

/// Options that determine the server's answers, or its memory.
#[derive(Debug, Clone, clap::Args)]
pub struct Shape {
    /// GPUs that every process uses.
    #[arg(long, default_value_t = 1)]
    pub gpus: usize,
    /// Layers, each a buffer in VRAM.
    #[arg(long, default_value_t = 4)]
    pub layers: u64,
    /// KiB of a layer's weights; a row is 1 KiB.
    #[arg(long, default_value_t = 256)]
    pub layer_kib: u64,
    /// MiB of the cache, of which little is used.
    #[arg(long, default_value_t = 8)]
    pub cache_mib: u64,
    /// Compute queues on every GPU.
    #[arg(long, default_value_t = 2)]
    pub queues: usize,
    /// Processes, which share the layers among them.
    #[arg(long, default_value_t = 1)]
    pub processes: u64,
    /// The seed of all weights.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Percent of every layer, at its end, that is zeros.
    #[arg(long, default_value_t = 0)]
    pub zero_share: u64,
    /// Buffers of one page each, in VRAM that the CPU can access or in host memory, in the first process.
    #[arg(long, default_value_t = 0)]
    pub small_bos: u64,
    /// MiB of the first process's own memory, all random, that no GPU can access.
    #[arg(long, default_value_t = 0)]
    pub own_mib: u64,
    /// Destroys queues of copy engines when weights are loaded: the driver restores them by number, for one
    /// process of a GPU only.
    #[arg(long)]
    pub no_copiers: bool,
    /// Other work during answers.
    #[arg(long, value_enum, default_value_t = Mode::Idle)]
    pub mode: Mode,
}

/// Other work during answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Nothing.
    Idle,
    /// Long dispatches, one after the other, whose result shows lost or repeated work.
    MidDispatch,
    /// The CPU reads weights through their mappings and compares.
    CpuReads,
    /// Processes pass activations to each other in one buffer, shared by dma-buf.
    SharedBo,
    /// Buffers are allocated, used and freed.
    Allocating,
    /// All tokens of an answer are dispatched at once, and no result is read in between.
    Graph,
    /// Weights are in registered memory of the program; in more of it, CPU and GPUs change numbers
    /// alternately.
    Userptr,
    /// CPU and GPUs change numbers alternately, in host memory that the driver allocates.
    Gtt,
    /// The same in memory of the program that has SVM attributes (Linux 7).
    Svm,
    /// Weights are mapped without access for the CPU, as ROCm's library does where it needs none.
    NoAccess,
    /// One more process has render nodes only: buffers, submissions, no compute.
    RenderOnly,
}

impl Mode {
    /// Whether other work is counted in rounds.
    #[must_use]
    pub fn has_rounds(self) -> bool {
        match self {
            Self::Idle | Self::SharedBo | Self::Graph | Self::NoAccess | Self::RenderOnly => false,
            Self::MidDispatch | Self::CpuReads | Self::Allocating | Self::Userptr | Self::Gtt | Self::Svm => {
                true
            }
        }
    }
}

impl Shape {
    /// A shape with everything at its default.
    #[must_use]
    pub fn small() -> Self {
        Self {
            gpus: 1,
            layers: 4,
            layer_kib: 256,
            cache_mib: 8,
            queues: 2,
            processes: 1,
            seed: 1,
            zero_share: 0,
            small_bos: 0,
            own_mib: 0,
            no_copiers: false,
            mode: Mode::Idle,
        }
    }

    /// Refuses invalid combinations.
    ///
    /// # Errors
    /// Which option, and its valid values.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!((1..=64).contains(&self.gpus), "--gpus {}: 1 to 64", self.gpus);
        ensure!((1..=64).contains(&self.queues), "--queues {}: 1 to 64", self.queues);
        ensure!((1..=4096).contains(&self.layers), "--layers {}: 1 to 4096", self.layers);
        ensure!((1..=1 << 20).contains(&self.layer_kib), "--layer-kib {}: 1 to 1048576", self.layer_kib);
        ensure!((1..=1 << 20).contains(&self.cache_mib), "--cache-mib {}: 1 to 1048576", self.cache_mib);
        ensure!(self.zero_share <= 100, "--zero-share {}: 0 to 100 percent", self.zero_share);
        ensure!(self.small_bos <= SMALL_BOS, "--small-bos {}: 0 to {SMALL_BOS}", self.small_bos);
        ensure!(self.own_mib <= 1 << 20, "--own-mib {}: 0 to 1048576", self.own_mib);
        ensure!(
            (1..=self.layers).contains(&self.processes),
            "--processes {}: 1 to the number of layers",
            self.processes
        );
        ensure!(
            self.mode != Mode::SharedBo || self.processes > 1,
            "--mode shared-bo needs --processes of 2 or more"
        );
        ensure!(
            self.mode != Mode::Graph || self.processes == 1,
            "--mode graph is for one process: nothing may wait for another between tokens"
        );
        Ok(())
    }

    /// The options that make this shape.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        use clap::ValueEnum as _;
        let mode = self.mode.to_possible_value();
        let options = [
            ("--gpus", self.gpus.to_string()),
            ("--layers", self.layers.to_string()),
            ("--layer-kib", self.layer_kib.to_string()),
            ("--cache-mib", self.cache_mib.to_string()),
            ("--queues", self.queues.to_string()),
            ("--processes", self.processes.to_string()),
            ("--seed", self.seed.to_string()),
            ("--zero-share", self.zero_share.to_string()),
            ("--small-bos", self.small_bos.to_string()),
            ("--own-mib", self.own_mib.to_string()),
            ("--mode", mode.map_or_else(String::new, |mode| mode.get_name().to_owned())),
        ];
        let options = options.into_iter().flat_map(|(name, value)| [name.to_owned(), value]);
        options.chain(self.no_copiers.then(|| "--no-copiers".to_owned())).collect()
    }

    /// Rows of a layer's matrix.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.layer_kib
    }

    /// Bytes of a layer's weights.
    #[must_use]
    pub fn layer_bytes(&self) -> u64 {
        self.layer_kib * 1024
    }

    /// Bytes of a layer's weights that are not zeros; whole rows.
    #[must_use]
    pub fn dense_bytes(&self) -> u64 {
        (self.rows() - self.rows() * self.zero_share / 100) * WIDTH * 4
    }

    /// Bytes of a layer's result: whole 64-bit words.
    #[must_use]
    pub fn output_bytes(&self) -> u64 {
        (self.rows() * 4).next_multiple_of(8)
    }

    /// Activations that the cache holds.
    #[must_use]
    pub fn cache_rows(&self) -> u64 {
        self.cache_mib * 1024 * 1024 / (WIDTH * 4)
    }

    /// Layers of one process.
    #[must_use]
    pub fn layers_of(&self, process: u64) -> Range<u64> {
        self.layers * process / self.processes..self.layers * (process + 1) / self.processes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_belongs_to_one_process() {
        let shape = Shape { layers: 7, processes: 3, ..Shape::small() };
        let all: Vec<u64> = (0..3).flat_map(|process| shape.layers_of(process)).collect();
        assert_eq!(all, (0..7).collect::<Vec<_>>());
    }

    #[test]
    fn invalid_options_are_refused_by_name() {
        let refused = |shape: Shape| shape.check().unwrap_err().to_string();
        assert!(refused(Shape { layers: 0, ..Shape::small() }).contains("--layers 0"));
        assert!(refused(Shape { processes: 5, ..Shape::small() }).contains("--processes 5"));
        assert!(refused(Shape { zero_share: 101, ..Shape::small() }).contains("--zero-share 101"));
        assert!(refused(Shape { small_bos: 8001, ..Shape::small() }).contains("--small-bos 8001"));
        assert!(refused(Shape { own_mib: 1 << 21, ..Shape::small() }).contains("--own-mib 2097152"));
        assert!(refused(Shape { mode: Mode::SharedBo, ..Shape::small() }).contains("shared-bo"));
        assert!(Shape::small().check().is_ok());
    }
}
