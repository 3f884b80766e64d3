// SPDX-License-Identifier: MIT OR Apache-2.0
//! The reasons why GPUs of this machine cannot take the places of an image's.

use std::fmt;

use super::property::Difference;
use super::search::{MAX_NODES, MAX_STEPS};

/// The reason why no placement exists. Every variant says what is missing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoPlacement {
    /// The nodes are not valid.
    #[error("{0}")]
    Nodes(BadNodes),
    /// GPUs that no GPU of this machine is compatible with.
    #[error("{}", join(.0, "; "))]
    NoCompatibleGpu(Vec<NoCompatibleGpu>),
    /// More GPUs than compatible places.
    #[error("{} of the image can only take the place of {}{}", join(.gpus, ", \
        "), listed(.places), also(.closest.as_ref()))]
    NotEnoughGpus {
        /// The GPUs of the image.
        gpus: Vec<NodeName>,
        /// The compatible GPUs of the machine.
        places: Vec<NodeName>,
        /// The most similar GPU outside these places.
        closest: Option<NoCompatibleGpu>,
    },
    /// Links between GPUs, or between GPUs and CPUs, do not fit.
    #[error(
        "no choice of this machine's GPUs is linked as the image's are: with {place} here in the place of \
         {other}, no place remains for {node} of the image{}{}",
        linked(*.link, *.other),
        hint(*.numa)
    )]
    Links {
        /// The first node of the image for which the search found no place.
        node: NodeName,
        /// The node of the image that had got a place before.
        other: NodeName,
        /// Its place on this machine.
        place: NodeName,
        /// The link between both nodes, if any.
        link: Option<&'static str>,
        /// Whether a placement exists without the NUMA check.
        numa: bool,
    },
    /// The search was ended. A placement may exist.
    #[error(
        "no choice of this machine's GPUs that is linked as the image's are was found in {MAX_STEPS} steps"
    )]
    Steps,
}

/// The name of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeName {
    /// A GPU's id.
    Gpu(u32),
    /// A CPU's number.
    Cpu(u32),
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(id) => write!(f, "GPU {id:#x}"),
            Self::Cpu(number) => write!(f, "CPU node {number}"),
        }
    }
}

/// Nodes that are not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadNodes {
    /// Two nodes have one number.
    #[error("{0} has two nodes of the number {1}")]
    SameNode(&'static str, u32),
    /// Two GPUs have one id.
    #[error("{0} has two GPUs {1:#x}")]
    SameGpu(&'static str, u32),
    /// A GPU that is used is not among the nodes.
    #[error("the image uses GPU {0:#x} and does not describe it")]
    Unknown(u32),
    /// The nodes are too many.
    #[error("{0} has {1} nodes, at most {MAX_NODES} are supported")]
    TooMany(&'static str, usize),
}

/// A GPU that no GPU of this machine is compatible with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoCompatibleGpu {
    /// Its gpu id in the image.
    pub gpu: u32,
    /// The most similar GPU of this machine with its mismatches, at least one. None without GPUs.
    pub closest: Option<(u32, Vec<Mismatch>)>,
}

/// A reason why a GPU cannot take a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mismatch {
    /// A property does not fit.
    Property(Difference),
    /// A link of this kind to a CPU is missing.
    CpuLink(&'static str),
    /// The GPU of the image has a link of this kind with more GPUs.
    GpuLinks {
        /// The kind.
        link: &'static str,
        /// The number of GPUs in the image.
        wanted: usize,
        /// The number of GPUs here.
        found: usize,
    },
}

impl fmt::Display for NoCompatibleGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {:#x} of the image: ", self.gpu)?;
        let Some((closest, mismatches)) = &self.closest else {
            return f.write_str("this machine has no GPU that this process can use");
        };
        match mismatches.first() {
            Some(Mismatch::Property(difference)) => {
                let (wanted, found) = (difference.wanted(), difference.found());
                write!(f, "{} {wanted} wanted, GPU {closest:#x} has {found}", difference.property)?;
            }
            Some(Mismatch::CpuLink(link)) => write!(f, "{link} to a CPU wanted, GPU {closest:#x} has none")?,
            Some(Mismatch::GpuLinks { link, wanted, found }) => {
                write!(f, "{link} with other GPUs: {wanted} wanted, GPU {closest:#x} has {found}")?;
            }
            None => {}
        }
        let switches = mismatches.iter().map(|mismatch| match mismatch {
            Mismatch::Property(difference) => difference.switch,
            Mismatch::CpuLink(_) | Mismatch::GpuLinks { .. } => None,
        });
        match switches.collect::<Option<Vec<_>>>() {
            Some(switches) => {
                let settings: Vec<_> =
                    switches.iter().map(|switch| format!("{}=0", switch.variable())).collect();
                write!(f, ": set {} to accept", join(&settings, " and "))
            }
            None if mismatches.len() > 1 => write!(f, " (and {} more)", mismatches.len() - 1),
            None => Ok(()),
        }
    }
}

fn join<T: fmt::Display>(parts: &[T], between: &str) -> String {
    parts.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}

fn listed(places: &[NodeName]) -> String {
    if places.is_empty() { "nothing here".to_owned() } else { join(places, ", ") + " here" }
}

fn also(closest: Option<&NoCompatibleGpu>) -> String {
    closest.map_or_else(String::new, |misfit| format!("; {misfit}"))
}

fn linked(link: Option<&'static str>, other: NodeName) -> String {
    link.map_or_else(String::new, |link| format!(", which has {link} with {other}"))
}

fn hint(numa: bool) -> &'static str {
    if numa { ": set KFD_NUMA_CHECK=0 to accept other CPUs" } else { "" }
}
