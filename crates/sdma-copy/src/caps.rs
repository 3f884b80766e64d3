// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a GPU offers for copies.

use rewake_amdgpu_uapi::abi::AMDGPU_HW_IP_DMA;
use rewake_amdgpu_uapi::packet::CountEncoding;
use rewake_amdgpu_uapi::render::Render;

use crate::Error;

/// The copy rings that a GPU offers.
#[derive(Debug)]
pub(crate) enum SdmaCaps {
    /// Rings that Rewake can use: a bit for each.
    Rings { mask: u32, version: (u32, u32), encoding: CountEncoding },
    /// No usable rings, and the reason.
    None(String),
}

impl SdmaCaps {
    pub(crate) fn of(render: &Render) -> Result<Self, Error> {
        let kernel = |source| Error::Kernel { minor: render.minor(), source };
        let info = render.engine_info(AMDGPU_HW_IP_DMA).map_err(kernel)?;
        let version = (info.hw_ip_version_major, info.hw_ip_version_minor);
        Ok(match (info.available_rings, CountEncoding::of(version.0)) {
            (0, _) => Self::None("the driver offers no copy ring".to_owned()),
            (_, None) => Self::None(format!("SDMA version {}.{} is not supported", version.0, version.1)),
            (mask, Some(encoding)) => Self::Rings { mask, version, encoding },
        })
    }
}
