// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why no GPUs of this machine can take the places of those of an image.

use std::fmt;

use super::property::Difference;
use super::search::STEPS;
use super::set::CAPACITY;

/// Why there is no mapping, for people: every variant says what is missing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoMapping {
    /// The nodes themselves make no sense.
    #[error("{0}")]
    Nodes(BadNodes),
    /// GPUs that fit nowhere.
    #[error("{}", join(.0, "; "))]
    Misfits(Vec<Misfit>),
    /// More than the places that they fit.
    #[error("{} of the image can only take the place of {}{}{}", join(.items, ", "), listed(.places), also(.closest.as_ref()), hint(*.numa))]
    Crowded {
        /// These of the image.
        items: Vec<Place>,
        /// All that they fit.
        places: Vec<Place>,
        /// What is most like one of them and is not among the places.
        closest: Option<Misfit>,
        /// Whether there would be a mapping without the check of NUMA.
        numa: bool,
    },
    /// Links between GPUs, or between GPUs and CPUs.
    #[error("no choice of this machine's GPUs is linked as the image's are: with {placed} of {all} placed, nothing was left for {item} of the image{}{}", linked(.link.as_ref()), hint(*.numa))]
    Links {
        /// Found no place.
        item: Place,
        /// What it is linked to, and how.
        link: Option<(&'static str, Place)>,
        /// How many had one then.
        placed: usize,
        /// Of how many.
        all: usize,
        /// Whether there would be a mapping without the check of NUMA.
        numa: bool,
    },
    /// There may be a mapping.
    #[error("no choice of this machine's GPUs that is linked as the image's are was found in {STEPS} steps")]
    Steps,
}

/// A node, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A GPU's gpu id.
    Gpu(u32),
    /// A CPU's number.
    Cpu(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(id) => write!(f, "GPU {id:#x}"),
            Self::Cpu(number) => write!(f, "CPU node {number}"),
        }
    }
}

/// Nodes that make no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadNodes {
    /// Two nodes of one number.
    #[error("{0} has two nodes of the number {1}")]
    SameNode(&'static str, u32),
    /// Two GPUs of one name.
    #[error("{0} has two GPUs {1:#x}")]
    SameGpu(&'static str, u32),
    /// A GPU that is used and not among the nodes.
    #[error("the image uses GPU {0:#x} and does not tell what it is")]
    Unknown(u32),
    /// More than can be.
    #[error("{0} has {1} nodes, at most {CAPACITY} are mapped")]
    TooMany(&'static str, usize),
}

/// A GPU that fits nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misfit {
    /// Its gpu id in the image.
    pub gpu: u32,
    /// The GPU of this machine that is most like it, with what keeps it away, at least one thing; None without GPUs.
    pub closest: Option<(u32, Vec<Lack>)>,
}

/// What keeps a GPU from taking a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lack {
    /// A property.
    Property(Difference),
    /// A link like this to a CPU.
    CpuLink(&'static str),
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {:#x} of the image: ", self.gpu)?;
        let Some((closest, lacks)) = &self.closest else {
            return f.write_str("this machine has no GPU that this process can use");
        };
        match lacks.first() {
            Some(Lack::Property(difference)) => {
                let (wanted, found) = (difference.wanted(), difference.found());
                write!(f, "{} {wanted} wanted, GPU {closest:#x} has {found}", difference.property)?;
            }
            Some(Lack::CpuLink(link)) => write!(f, "{link} to a CPU wanted, GPU {closest:#x} has none")?,
            None => {}
        }
        let switches = lacks.iter().map(|lack| match lack {
            Lack::Property(difference) => difference.switch,
            Lack::CpuLink(_) => None,
        });
        match switches.collect::<Option<Vec<_>>>() {
            Some(switches) => {
                let settings: Vec<_> =
                    switches.iter().map(|switch| format!("{}=0", switch.variable())).collect();
                write!(f, ": set {} to accept", join(&settings, " and "))
            }
            None if lacks.len() > 1 => write!(f, " (and {} more)", lacks.len() - 1),
            None => Ok(()),
        }
    }
}

fn join<T: fmt::Display>(parts: &[T], between: &str) -> String {
    parts.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}

fn listed(places: &[Place]) -> String {
    if places.is_empty() { "nothing here".to_owned() } else { join(places, ", ") + " here" }
}

fn also(closest: Option<&Misfit>) -> String {
    closest.map_or_else(String::new, |misfit| format!("; {misfit}"))
}

fn linked(link: Option<&(&'static str, Place)>) -> String {
    link.map_or_else(String::new, |(name, other)| format!(", which has {name} with {other}"))
}

fn hint(numa: bool) -> &'static str {
    if numa { ": set KFD_NUMA_CHECK=0 to accept other CPUs" } else { "" }
}
