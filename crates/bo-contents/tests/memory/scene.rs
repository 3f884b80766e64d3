// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image of a process, and memory to load it into.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use rewake_bo_contents::{BackgroundLoad, GpuPagesFile, LoadEvent, MemoryDevice, ProcessBuffers, Report};
use rewake_criu_images::amdgpu::{KfdBuffer, KfdImage, NodeImage, Properties, kfd_name, pages_name};
use rewake_criu_images::{ImageDir, Inventory, write};
use rewake_image_io::io_budget::IoBudget;
use rewake_manifest::read_checksums;

pub(crate) const CHUNK: usize = 2 << 20;
const HEADER: u64 = 8;

/// A process with buffers on GPUs 7 and 8, its files, and memory for them.
pub(crate) struct Scene {
    folder: tempfile::TempDir,
    pub(crate) image: KfdImage,
    pub(crate) memfds: Vec<Option<OwnedFd>>,
    pub(crate) device: Arc<MemoryDevice>,
}

pub(crate) fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| u8::try_from((index / 4096 * 13 + index + seed * 29) % 251).unwrap() + 1).collect()
}

impl Scene {
    /// Creates buffers of these sizes, alternating between the GPUs. Their memory is not zero before a load,
    /// and their files are holes.
    pub(crate) fn new(sizes: &[usize]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let buffer = |(index, size): (usize, &usize)| KfdBuffer {
            size: *size as u64,
            gpu_id: 7 + u32::try_from(index % 2).unwrap(),
            alloc_flags: 1,
            ..KfdBuffer::default()
        };
        let node = |gpu_id| NodeImage {
            properties: Properties { gpu_id, ..Properties::default() },
            links: Vec::new(),
        };
        let image = KfdImage {
            gpus: 2,
            nodes: vec![node(7), node(8)],
            buffers: sizes.iter().enumerate().map(buffer).collect(),
            ..KfdImage::default()
        };
        for gpu in [7, 8] {
            let (_, length) = image.pages(gpu);
            let file = File::create(folder.path().join(pages_name(3, gpu))).unwrap();
            file.set_len(length).unwrap();
            file.write_all_at(&(length - HEADER).to_le_bytes(), 0).unwrap();
        }
        let memfd = |size: &usize| {
            let memfd = File::from(memfd_create(c"bo", MFdFlags::MFD_CLOEXEC).unwrap());
            memfd.write_all_at(&vec![0xee; *size], 0).unwrap();
            OwnedFd::from(memfd)
        };
        let memfds: Vec<OwnedFd> = sizes.iter().map(memfd).collect();
        let device = MemoryDevice::new(memfds.iter().map(|memfd| memfd.as_fd())).unwrap();
        Self { folder, image, memfds: memfds.into_iter().map(Some).collect(), device }
    }

    /// Writes bytes of a buffer to its file.
    pub(crate) fn put(&self, buffer: usize, at: usize, bytes: &[u8]) {
        let (file, offset) = self.place(buffer);
        file.write_all_at(bytes, offset + at as u64).unwrap();
    }

    /// Writes the files to the disk.
    pub(crate) fn sync(&self) {
        for gpu in [7, 8] {
            File::open(self.folder.path().join(pages_name(3, gpu))).unwrap().sync_all().unwrap();
        }
    }

    /// Writes the files to the disk and drops them from the page cache.
    pub(crate) fn chill(&self) {
        self.sync();
        for gpu in [7, 8] {
            let file = File::open(self.folder.path().join(pages_name(3, gpu))).unwrap();
            let all = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
            nix::fcntl::posix_fadvise(&file, 0, 0, all).unwrap();
        }
    }

    pub(crate) fn files(&self) -> [GpuPagesFile; 2] {
        let folder = File::open(self.folder.path()).unwrap();
        let sealed = read_checksums(&ImageDir::open(self.folder.path()).unwrap()).unwrap();
        let file = |gpu| {
            let file = GpuPagesFile::open(folder.as_fd(), 3, &self.image, gpu, 120 + gpu).unwrap();
            sealed.iter().for_each(|sealed| file.verify_with(sealed).unwrap());
            file
        };
        [file(7), file(8)]
    }

    /// The file of a GPU.
    pub(crate) fn path(&self, gpu: u32) -> PathBuf {
        self.folder.path().join(pages_name(3, gpu))
    }

    /// The directory of the image.
    pub(crate) fn images(&self) -> ImageDir {
        ImageDir::open(self.folder.path()).unwrap()
    }

    /// Seals the image: a load checks each block from now on.
    pub(crate) fn seal(&self) {
        let inventory = Inventory { version: 2, plugins: Vec::new(), run_id: None };
        write::inventory(self.folder.path(), &inventory).unwrap();
        // It says where buffers begin.
        std::fs::write(self.folder.path().join(kfd_name(3)), self.image.to_bytes()).unwrap();
        rewake_manifest::seal(self.folder.path()).unwrap();
    }

    /// Makes holes of some bytes of a buffer's file.
    pub(crate) fn punch(&self, buffer: usize, at: usize, bytes: usize) {
        let (file, offset) = self.place(buffer);
        let how = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let offset = (offset + at as u64).cast_signed();
        fallocate(file, how, offset, i64::try_from(bytes).unwrap()).unwrap();
    }

    /// The first byte of a buffer, from `at` on, that is the first of a block of its file.
    pub(crate) fn block_border(&self, buffer: usize, at: usize) -> usize {
        let (_, offset) = self.place(buffer);
        let border = (offset + at as u64).next_multiple_of(65536) - offset;
        usize::try_from(border).unwrap()
    }

    /// The file of a buffer, and its first byte there.
    fn place(&self, buffer: usize) -> (File, u64) {
        let gpu = self.image.buffers[buffer].gpu_id;
        let (stretches, _) = self.image.pages(gpu);
        let offset = stretches.iter().find(|stretch| stretch.buffer == buffer).unwrap().file_offset;
        (File::options().write(true).open(self.folder.path().join(pages_name(3, gpu))).unwrap(), offset)
    }

    /// Loads an image with a wrong byte. Returns the buffers that became resident, and the error.
    pub(crate) fn load_damaged(&self) -> (Vec<usize>, String) {
        self.load_fails(|_| {})
    }

    /// Loads an image, which fails. `resident` is called with each buffer that becomes resident; returns all
    /// of them, and the error.
    pub(crate) fn load_fails(&self, mut resident: impl FnMut(usize) + Send) -> (Vec<usize>, String) {
        let files = self.files();
        let processes = [ProcessBuffers { files: &files, dmabufs: &self.memfds }];
        let loading = BackgroundLoad::into_memory(&processes, &self.device, None).unwrap();
        let mut whole = Vec::new();
        let buffer = |of| match of {
            LoadEvent::Buffer { number, .. } => {
                whole.push(number);
                resident(number);
            }
            LoadEvent::Process { .. } => panic!("the process is resident"),
        };
        let error = loading.run(buffer).unwrap_err();
        (whole, error.to_string())
    }

    /// Loads all buffers. Returns them in the order in which they became resident.
    pub(crate) fn load(&self, demanded: &[usize]) -> (Report, Vec<usize>) {
        let mut whole = Vec::new();
        let report = self.load_with_budget(None, demanded, |buffer| whole.push(buffer));
        (report, whole)
    }

    pub(crate) fn load_with_budget(
        &self,
        budget: Option<Arc<IoBudget>>,
        demanded: &[usize],
        whole: impl FnMut(usize) + Send,
    ) -> Report {
        self.load_with(budget, demanded, &[], whole)
    }

    /// Loads with these sets of buffers listed as duplicates.
    pub(crate) fn load_with(
        &self,
        budget: Option<Arc<IoBudget>>,
        demanded: &[usize],
        duplicates: &[&[usize]],
        mut whole: impl FnMut(usize) + Send,
    ) -> Report {
        let files = self.files();
        let processes = [ProcessBuffers { files: &files, dmabufs: &self.memfds }];
        let loading = BackgroundLoad::into_memory(&processes, &self.device, budget).unwrap();
        let sets = duplicates.iter().map(|set| set.iter().map(|buffer| (0, *buffer)).collect());
        let loading = loading.duplicates(sets.collect());
        let handle = loading.handle();
        demanded.iter().for_each(|buffer| handle.demand(0, *buffer));
        let buffer = |of| {
            if let LoadEvent::Buffer { number, .. } = of {
                whole(number);
            }
        };
        let report = loading.run(buffer).unwrap().unwrap();
        for progress in handle.progress() {
            assert_eq!(progress.resident, progress.all, "{progress:?}");
        }
        report
    }

    /// Loads three processes: the first two share the buffers, and the third has none. Returns the events.
    pub(crate) fn load_as_three(&self) -> Vec<LoadEvent> {
        let files = self.files();
        let of = |process: usize| {
            let own = |number: usize| (process < 2 && number % 2 == process).then(|| &self.memfds[number]);
            let memfds = (0..self.memfds.len()).map(own);
            memfds.map(|memfd| memfd?.as_ref()?.try_clone().ok()).collect::<Vec<_>>()
        };
        let dmabufs = [0, 1, 2].map(of);
        let processes = dmabufs.each_ref().map(|dmabufs| ProcessBuffers { files: &files, dmabufs });
        let mut events = Vec::new();
        let loading = BackgroundLoad::into_memory(&processes, &self.device, None).unwrap();
        loading.run(|whole| events.push(whole)).unwrap().unwrap();
        events
    }

    pub(crate) fn memory(&self, buffer: usize) -> Vec<u8> {
        let size = usize::try_from(self.image.buffers[buffer].size).unwrap();
        let mut bytes = vec![0; size];
        let memfd = self.memfds[buffer].as_ref().unwrap();
        // Opens it by number: reads need a file, and the scene owns the descriptor.
        let file = File::open(format!("/proc/self/fd/{}", memfd.as_raw_fd())).unwrap();
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }
}
