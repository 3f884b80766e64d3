// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process's GPU state with the bytes of its BOs, moved between processes by a file: a checkpoint without
//! CRIU, for tests of the operations themselves.

use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom, Write};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use gpu_app::kfd::Device;
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::abi::memory::{Mapping, PAGE};
use rewake_amdgpu_uapi::abi::{
    KFD_IOC_ALLOC_MEM_FLAGS_USERPTR, call, kfd_criu_bo_bucket, kfd_criu_device_bucket,
};
use rewake_amdgpu_uapi::criu::{self, Checkpoint};
use rewake_amdgpu_uapi::render::Render;
use rewake_amdgpu_uapi::topology::Topology;

/// What the file holds.
#[derive(Debug)]
pub struct Snapshot {
    /// The kernel's data.
    pub image: Checkpoint,
    /// Bytes of each exported BO.
    pub contents: Vec<Option<Vec<u8>>>,
    /// Address and bytes of the program's memory that GPUs can access.
    pub memory: Vec<(u64, Vec<u8>)>,
}

impl Snapshot {
    /// Reads the bytes of this process: of every exported BO, and of its own memory that GPUs can access.
    ///
    /// # Errors
    /// A BO cannot be mapped, or the kernel's data is malformed.
    pub fn of(image: Checkpoint) -> anyhow::Result<Self> {
        let mut contents = Vec::new();
        for (bo, dmabuf) in image.bos.iter().zip(&image.dmabufs) {
            contents.push(match dmabuf {
                Some(fd) => {
                    let mut bytes = vec![0; usize::try_from(bo.size)?];
                    Mapping::shared(fd.as_fd(), 0, bo.size).context("map a BO")?.read(0, &mut bytes);
                    Some(bytes)
                }
                None => None,
            });
        }
        let private = image.private()?;
        let mut memory = Vec::new();
        for (bo, private) in image.bos.iter().zip(private.bos()) {
            if bo.alloc_flags & KFD_IOC_ALLOC_MEM_FLAGS_USERPTR != 0 {
                memory.push((private.user_address, own_memory(private.user_address, bo.size)?));
            }
        }
        for range in private.ranges() {
            memory.push((range.page * PAGE, own_memory(range.page * PAGE, range.pages * PAGE)?));
        }
        Ok(Self { image, contents, memory })
    }

    /// Maps the program's memory at its old addresses, which must be free.
    ///
    /// # Errors
    /// An address is in use.
    pub fn put_memory(&self) -> anyhow::Result<Vec<Mapping>> {
        let mut all = Vec::new();
        for (address, bytes) in &self.memory {
            let memory = Mapping::anonymous_at(*address, bytes.len() as u64)
                .with_context(|| format!("memory at {address:#x}"))?;
            memory.write(0, bytes);
            all.push(memory);
        }
        Ok(all)
    }

    /// Has the kernel make all objects again, on the GPUs of the same names; nothing is loaded yet.
    ///
    /// # Errors
    /// The operation failed, or a GPU is missing.
    pub fn restore(&mut self, kfd: &Arc<Kfd>) -> anyhow::Result<Vec<Arc<Device>>> {
        let topology = Topology::read()?;
        let mut renders = Vec::new();
        for device in &mut self.image.devices {
            let node = topology.gpus().find(|node| node.gpu_id == device.user_gpu_id);
            let node = node.with_context(|| format!("no GPU {:#x}", device.user_gpu_id))?;
            let render = Render::open(node.render_minor())?;
            device.drm_fd = call::number(render.as_fd());
            renders.push((render, node));
        }
        criu::restore(kfd.as_fd(), &mut self.image)?;
        let mut devices = Vec::new();
        for (render, node) in renders {
            devices.push(Device::with(kfd, render, node)?);
        }
        Ok(devices)
    }

    /// A view of the whole BO at an address, and the address's offset in it.
    ///
    /// # Errors
    /// No exported BO has this address.
    pub fn view(&self, address: u64) -> anyhow::Result<(Mapping, u64)> {
        let inside = |bo: &kfd_criu_bo_bucket| (bo.addr..bo.addr + bo.size).contains(&address);
        let mut all = self.image.bos.iter().zip(&self.image.dmabufs);
        let found = all.find(|(bo, dmabuf)| inside(bo) && dmabuf.is_some());
        let (bo, dmabuf) = found.with_context(|| format!("no exported buffer at {address:#x}"))?;
        let dmabuf = dmabuf.as_ref().context("an exported buffer")?;
        Ok((Mapping::shared(dmabuf.as_fd(), 0, bo.size)?, address - bo.addr))
    }

    /// Writes bytes back into the BOs of a restored process; `wanted` chooses by index in the list.
    ///
    /// # Errors
    /// A BO cannot be mapped.
    pub fn load(&self, wanted: impl Fn(usize) -> bool) -> anyhow::Result<()> {
        for (index, (bo, dmabuf)) in self.image.bos.iter().zip(&self.image.dmabufs).enumerate() {
            if let (Some(fd), Some(bytes), true) = (dmabuf, &self.contents[index], wanted(index)) {
                Mapping::shared(fd.as_fd(), 0, bo.size).context("map a BO")?.write(0, bytes);
            }
        }
        Ok(())
    }

    /// Writes the snapshot to a file.
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
        file.write_all(&image.private).context("write a snapshot")?;
        put(&mut file, self.memory.len() as u64)?;
        for (address, bytes) in &self.memory {
            put(&mut file, *address)?;
            put(&mut file, bytes.len() as u64)?;
            file.write_all(bytes)?;
        }
        Ok(())
    }

    /// Reads what [`Snapshot::write`] wrote.
    ///
    /// # Errors
    /// The file cannot be read, or is no snapshot.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let mut file = File::open(path).with_context(|| format!("open {}", path.display()))?;
        let mut next = || get(&mut file);
        let (devices, bos, objects, private) = (next()?, next()?, next()?, next()?);
        ensure!(devices <= 64 && bos <= 1 << 16, "{} is no snapshot", path.display());
        let mut image = Checkpoint {
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
        let mut memory = Vec::new();
        for _ in 0..get(&mut file)? {
            let address = get(&mut file)?;
            let mut bytes = vec![0; usize::try_from(get(&mut file)?)?];
            file.read_exact(&mut bytes)?;
            memory.push((address, bytes));
        }
        Ok(Self { image, contents, memory })
    }
}

fn own_memory(address: u64, length: u64) -> anyhow::Result<Vec<u8>> {
    let mut file = File::open("/proc/self/mem").context("open this process's memory")?;
    file.seek(SeekFrom::Start(address))?;
    let mut bytes = vec![0; usize::try_from(length)?];
    file.read_exact(&mut bytes).with_context(|| format!("read {length:#x} bytes at {address:#x}"))?;
    Ok(bytes)
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
