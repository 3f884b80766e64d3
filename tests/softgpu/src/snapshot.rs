// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process's GPU state with the bytes of its buffers, from one process to another through a file: a checkpoint
//! without CRIU, for tests of the operations themselves.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd as _;
use std::path::Path;

use anyhow::{Context as _, ensure};
use rewake_kfd::abi::memory::Mapping;
use rewake_kfd::abi::{kfd_criu_bo_bucket, kfd_criu_device_bucket};
use rewake_kfd::criu::{Counts, Image};

/// What is written and read.
#[derive(Debug)]
pub struct Snapshot {
    /// What the kernel told.
    pub image: Image,
    /// Bytes of each buffer that has some of its own.
    pub contents: Vec<Option<Vec<u8>>>,
}

impl Snapshot {
    /// Takes the bytes of every buffer that was exported, through the CPU.
    ///
    /// # Errors
    /// A buffer cannot be mapped.
    pub fn of(image: Image) -> anyhow::Result<Self> {
        let mut contents = Vec::new();
        for (bo, dmabuf) in image.bos.iter().zip(&image.dmabufs) {
            contents.push(match dmabuf {
                Some(fd) => {
                    let mut bytes = vec![0; usize::try_from(bo.size)?];
                    Mapping::shared(fd.as_fd(), 0, bo.size).context("map a buffer")?.read(0, &mut bytes);
                    Some(bytes)
                }
                None => None,
            });
        }
        Ok(Self { image, contents })
    }

    /// Writes bytes back into the buffers of a restored process; `wanted` chooses by place in the list.
    ///
    /// # Errors
    /// A buffer cannot be mapped.
    pub fn load(&self, wanted: impl Fn(usize) -> bool) -> anyhow::Result<()> {
        for (index, (bo, dmabuf)) in self.image.bos.iter().zip(&self.image.dmabufs).enumerate() {
            if let (Some(fd), Some(bytes), true) = (dmabuf, &self.contents[index], wanted(index)) {
                Mapping::shared(fd.as_fd(), 0, bo.size).context("map a buffer")?.write(0, bytes);
            }
        }
        Ok(())
    }

    /// Writes all to a file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut file = File::create(path).with_context(|| format!("create {}", path.display()))?;
        let image = &self.image;
        let counts = [image.devices.len(), image.bos.len(), image.objects as usize, image.private.len()];
        for count in counts {
            put(&mut file, count as u64)?;
        }
        for device in &image.devices {
            put(&mut file, u64::from(device.user_gpu_id))?;
            put(&mut file, u64::from(device.actual_gpu_id))?;
        }
        for (bo, bytes) in image.bos.iter().zip(&self.contents) {
            for value in [bo.addr, bo.size, bo.offset, u64::from(bo.gpu_id), u64::from(bo.alloc_flags)] {
                put(&mut file, value)?;
            }
            put(&mut file, u64::from(bytes.is_some()))?;
            file.write_all(bytes.as_deref().unwrap_or_default())?;
        }
        file.write_all(&image.private).context("write a snapshot")
    }

    /// Reads what [`Snapshot::write`] wrote.
    ///
    /// # Errors
    /// The file cannot be read or is something else.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let mut file = File::open(path).with_context(|| format!("open {}", path.display()))?;
        let mut next = || get(&mut file);
        let (devices, bos, objects, private) = (next()?, next()?, next()?, next()?);
        ensure!(devices <= 64 && bos <= 1 << 16, "{} is no snapshot", path.display());
        let mut image = Image {
            devices: Vec::new(),
            bos: Vec::new(),
            private: vec![0; usize::try_from(private)?],
            objects: u32::try_from(objects)?,
            dmabufs: Vec::new(),
        };
        for _ in 0..devices {
            let (user_gpu_id, actual_gpu_id) = (get32(&mut file)?, get32(&mut file)?);
            image.devices.push(kfd_criu_device_bucket { user_gpu_id, actual_gpu_id, drm_fd: 0, pad: 0 });
        }
        let mut contents = Vec::new();
        for _ in 0..bos {
            let bo = kfd_criu_bo_bucket {
                addr: get(&mut file)?,
                size: get(&mut file)?,
                offset: get(&mut file)?,
                restored_offset: 0,
                gpu_id: get32(&mut file)?,
                alloc_flags: get32(&mut file)?,
                dmabuf_fd: 0,
                pad: 0,
            };
            let mut bytes = vec![0; if get(&mut file)? == 1 { usize::try_from(bo.size)? } else { 0 }];
            file.read_exact(&mut bytes)?;
            contents.push((!bytes.is_empty()).then_some(bytes));
            image.bos.push(bo);
        }
        file.read_exact(&mut image.private)?;
        Ok(Self { image, contents })
    }

    /// The counts that the kernel would tell.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts {
            pid: 0,
            devices: u32::try_from(self.image.devices.len()).unwrap_or(u32::MAX),
            bos: u32::try_from(self.image.bos.len()).unwrap_or(u32::MAX),
            objects: self.image.objects,
            private: self.image.private.len() as u64,
        }
    }
}

fn put(file: &mut impl Write, value: u64) -> io::Result<()> {
    file.write_all(&value.to_le_bytes())
}

fn get(file: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn get32(file: &mut impl Read) -> anyhow::Result<u32> {
    Ok(u32::try_from(get(file)?)?)
}
