// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mappings without a buffer at the dump, so that a restore can distinguish them from damage.

use std::collections::BTreeSet;

use prost::Message;

use super::buffer_user::MAX_SHARED;
use crate::amdgpu::record::{Contents, MissingField, record};
use crate::error::Result;
use crate::generated::gpu as raw;

/// The mappings without a buffer of one process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FreedMappings {
    /// Id of its `/dev/kfd`: [`crate::amdgpu::kfd_name`] gives the name of its image.
    pub kfd: u32,
    /// The mappings, at most [`MAX_SHARED`].
    pub mappings: BTreeSet<FreedMapping>,
}

record! {
    /// A mapping of a render node whose buffer was freed before the dump, or never existed.
    #[derive(PartialOrd, Ord)]
    FreedMapping = raw::BareMapping {
        /// N of `/dev/dri/renderDN`.
        minor: u32,
        /// Its address in the process.
        address: u64,
        /// Its byte offset in the render node's file.
        offset: u64,
    }
}

impl FreedMappings {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mappings = self.mappings.iter().map(|mapping| mapping.to_raw().encode_to_vec()).collect();
        raw::BareMappings { kfd: Some(self.kfd), mappings }.encode_to_vec()
    }
}

pub(super) fn parse_all(contents: Contents<'_>, raw: &[Vec<u8>]) -> Result<Vec<FreedMappings>> {
    contents.limit("processes", raw.len(), ("MAX_SHARED", MAX_SHARED))?;
    let (mut known, mut all) = (BTreeSet::new(), Vec::new());
    for bytes in raw {
        let of = process(contents, bytes)?;
        if !known.insert(of.kfd) {
            return Err(contents.damaged("each process once", format!("/dev/kfd {} twice", of.kfd)));
        }
        all.push(of);
    }
    Ok(all)
}

fn process(contents: Contents<'_>, bytes: &[u8]) -> Result<FreedMappings> {
    let raw: raw::BareMappings = contents.decode("mappings without buffers", bytes)?;
    let kfd = contents.whole("mappings without buffers", raw.kfd.ok_or(MissingField("kfd")))?;
    contents.limit("mappings without buffers", raw.mappings.len(), ("MAX_SHARED", MAX_SHARED))?;
    let mapping = |bytes: &Vec<u8>| {
        let raw: raw::BareMapping = contents.decode("a mapping without a buffer", bytes)?;
        contents.whole("a mapping without a buffer", FreedMapping::from_raw(&raw))
    };
    let mappings: BTreeSet<FreedMapping> = raw.mappings.iter().map(mapping).collect::<Result<_>>()?;
    if mappings.len() != raw.mappings.len() {
        return Err(contents.damaged("each mapping once", format!("one of /dev/kfd {kfd} twice")));
    }
    Ok(FreedMappings { kfd, mappings })
}
