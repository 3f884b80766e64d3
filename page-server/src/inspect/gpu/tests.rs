// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests the reports of GPU state that is made here. The complete expected texts are in `../testdata/`.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rewake_criu_images::amdgpu::{
    DmabufImage, KfdBuffer, KfdImage, Mapping, NodeImage, Properties, RenderBuffer, RenderContents,
    RenderImage, dmabuf_name, drm_pages_name, kfd_name, pages_name, render_name,
};
use rewake_criu_images::{IMAGE_VERSION, Inventory, Task, TaskState, write};

use super::super::{InspectReport, Verdict, collect, text};
use super::{BufferKind, KindReport};

const MIB: u64 = 1 << 20;
/// The address of the buffer with the queues' pointers.
const POINTERS: u64 = 0x7f00_0040_0000;
/// The image's GPUs.
const FIRST: u32 = 0x1234;
const SECOND: u32 = 0xab;

fn node(gpu_id: u32, device_id: u32, drm_render_minor: u32, vram_size: u64) -> NodeImage {
    let properties = Properties { gpu_id, device_id, drm_render_minor, vram_size, ..Properties::default() };
    NodeImage { properties, links: Vec::new() }
}

fn buffer(address: u64, size: u64, alloc_flags: u32, gpu_id: u32) -> KfdBuffer {
    KfdBuffer { address, size, alloc_flags, gpu_id, ..KfdBuffer::default() }
}

/// Returns `length` bytes with these little-endian words at their offsets.
fn record(length: usize, words: &[(usize, u64)]) -> Vec<u8> {
    let mut bytes = vec![0; length];
    for (at, word) in words {
        let word = word.to_le_bytes();
        // Most fields have 4 bytes; the next field overwrites the rest.
        let end = (at + word.len()).min(length);
        bytes[*at..end].copy_from_slice(&word[..end - at]);
    }
    bytes
}

/// A queue's record (`struct kfd_criu_queue_priv_data`) with 16 bytes of MQD and 8 of control stack.
fn queue(id: u64, gpu: u32, (kind, format): (u64, u64), percent: u64, pointers: u64) -> Vec<u8> {
    let words = [
        (8, 0x7f00_0050_0000),
        (16, 65536),
        (24, pointers),
        (32, pointers + 8),
        (64, gpu.into()),
        (68, kind),
        (72, format),
        (76, id),
        (80, 7),
        (84, percent),
        (108, 8),
        (112, 16),
    ];
    record(120 + 24, &words)
}

/// Private data of two GPUs: three queues, two events, one range.
fn private(buffers: &[KfdBuffer]) -> Vec<u8> {
    let mut bytes = record(8, &[(0, 1), (4, 1)]);
    bytes.extend([0; 16]);
    for buffer in buffers {
        // One in VRAM is mapped on both GPUs.
        let both = if buffer.size == 4 * MIB { SECOND } else { 0 };
        bytes.extend(record(272, &[(12, buffer.gpu_id.into()), (16, both.into())]));
    }
    bytes.extend(queue(1, FIRST, (0, 1), 100, POINTERS));
    bytes.extend(queue(2, FIRST, (1, 0), 0, POINTERS + 16));
    bytes.extend(queue(3, SECOND, (3, 0), 50, 0x1000));
    bytes.extend(record(64, &[(0, 1), (16, 1), (28, 1)]));
    bytes.extend(record(64, &[(0, 1), (16, 2)]));
    bytes.extend(record(24 + 6 * 8, &[(0, 2), (8, 0x7f11_2233), (16, 256)]));
    bytes
}

/// Returns a process with every kind of buffer on one GPU, and a doorbell on a second one.
fn image() -> KfdImage {
    let buffers = vec![
        buffer(0x7f00_0000_0000, 4 * MIB, 0xd000_0001, FIRST),
        buffer(POINTERS, 4096, 0xd400_0002, FIRST),
        buffer(0x7f00_0050_0000, 2 * MIB, 0xd000_0004, FIRST),
        buffer(0x7f00_0080_0000, 8192, 8, FIRST),
        buffer(0x7f00_0090_0000, 4096, 16, FIRST),
        buffer(0x7f00_00a0_0000, 8192, 8, SECOND),
    ];
    KfdImage {
        pid: 77,
        gpus: 2,
        nodes: vec![
            node(SECOND, 0x740c, 129, 64 << 30),
            node(FIRST, 0x740f, 128, 32 << 30),
            NodeImage::default(),
        ],
        objects: 6,
        shared_memory_size: 4 * MIB,
        shared_memory_magic: 0,
        private: private(&buffers),
        buffers,
    }
}

/// Writes the contents of the first GPU: a page that is not zero, a hole, and the page of the queues'
/// pointers.
fn put_pages(dir: &Path, image: &KfdImage) {
    let (stretches, end) = image.pages(FIRST);
    let file = File::create(dir.join(pages_name(27, FIRST))).unwrap();
    file.set_len(end).unwrap();
    file.write_all_at(&(end - 8).to_le_bytes(), 0).unwrap();
    file.write_all_at(&[5; 4096], stretches[0].file_offset + MIB).unwrap();
    // Packets 3 to 10 of the first queue, bytes 100 to 164 of the second.
    for (at, word) in [(0, 3_u64), (8, 10), (16, 100), (24, 164)] {
        file.write_all_at(&word.to_le_bytes(), stretches[1].file_offset + at).unwrap();
    }
}

fn gpu_image() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let dir = dir(&root);
    fs::create_dir(&dir).unwrap();
    let inventory = Inventory { version: IMAGE_VERSION, plugins: vec!["amdgpu_plugin".into()], run_id: None };
    write::inventory(&dir, &inventory).unwrap();
    let task = Task {
        pid: 77,
        ppid: 0,
        pgid: 77,
        sid: 77,
        threads: vec![77],
        state: TaskState::Zombie,
        comm: "model".into(),
    };
    write::tasks(&dir, &[task]).unwrap();
    let image = image();
    put_pages(&dir, &image);
    fs::write(dir.join(kfd_name(27)), image.to_bytes()).unwrap();
    put_render_nodes(&dir);
    root
}

fn put_render_nodes(dir: &Path) {
    let mapping = Mapping { address: 0x1000, size: 8192, ..Mapping::default() };
    let with = |handle, preferred_domains, mappings: usize, is_import| RenderBuffer {
        handle,
        preferred_domains,
        size: 8192,
        is_import,
        mappings: vec![mapping; mappings],
        ..RenderBuffer::default()
    };
    let buffers = vec![with(1, 4, 2, false), with(2, 2, 0, false), with(3, 2, 1, true)];
    let contents = RenderContents { id: 30, minor: 128, buffers };
    let nodes = [
        (28, RenderImage { gpu_id: FIRST, contents: None }),
        (30, RenderImage { gpu_id: FIRST, contents: Some(contents) }),
    ];
    for (id, node) in nodes {
        fs::write(dir.join(render_name(id)), node.to_bytes()).unwrap();
    }
    // A restore does not read the headers.
    fs::write(dir.join(drm_pages_name(30, 128, 0)), [&[0xff; 8][..], &[0; 4096], &[1; 4096]].concat())
        .unwrap();
    fs::write(dir.join(drm_pages_name(30, 128, 2)), [0; 8200]).unwrap();
    fs::write(dir.join(dmabuf_name(31)), DmabufImage { handle: 3 }.to_bytes()).unwrap();
}

fn dir(root: &tempfile::TempDir) -> PathBuf {
    root.path().join("img")
}

fn read(root: &tempfile::TempDir) -> InspectReport {
    collect::collect(&dir(root)).unwrap()
}

fn compare(root: &tempfile::TempDir, shown: &str, expected: &str) {
    let shown = shown.replace(root.path().to_str().unwrap(), "/images");
    assert!(shown == expected, "shown:\n{shown}\nexpected:\n{expected}");
}

/// Changes one thing in the image. Returns the damage, which must be one line, and the report.
fn damaged(change: impl FnOnce(&Path)) -> (String, InspectReport) {
    let root = gpu_image();
    change(&dir(&root));
    let report = read(&root);
    assert_eq!(report.damage.len(), 1, "{:#?}", report.damage);
    assert_eq!(report.lazy.verdict, Verdict::No);
    assert!(!report.damage[0].contains('\n'), "{:?}", report.damage);
    (report.damage[0].clone(), report)
}

fn write_image(change: impl FnOnce(&mut KfdImage)) -> impl FnOnce(&Path) {
    |dir| {
        let mut image = image();
        change(&mut image);
        fs::write(dir.join(kfd_name(27)), image.to_bytes()).unwrap();
    }
}

#[test]
fn gpu_state_is_shown_with_its_buffers_queues_and_render_nodes() {
    let root = gpu_image();
    let report = read(&root);
    assert_eq!(report.damage, [""; 0]);
    let mut out = Vec::new();
    text::write(&report, false, &mut out).unwrap();
    compare(&root, &String::from_utf8(out).unwrap(), include_str!("../testdata/gpu.txt"));
}

#[test]
fn json_has_the_documented_shape() {
    let root = gpu_image();
    let json = serde_json::to_string_pretty(&read(&root).gpu).unwrap() + "\n";
    compare(&root, &json, include_str!("../testdata/gpu.json"));
}

#[test]
fn kinds_are_the_driver_s_flags() {
    assert_eq!(
        [1, 2, 4, 8, 16].map(BufferKind::of),
        [BufferKind::Vram, BufferKind::Gtt, BufferKind::Userptr, BufferKind::Doorbell, BufferKind::Mmio]
    );
    assert_eq!(BufferKind::of(0xd000_0001), BufferKind::Vram);
    assert_eq!([0, 0x8000_0000].map(BufferKind::of), [BufferKind::Other; 2]);
}

#[test]
fn pages_files_that_differ_from_the_image_are_damage() {
    let name = pages_name(27, FIRST);
    let (said, report) = damaged(|dir| fs::remove_file(dir.join(&name)).unwrap());
    assert!(said.contains("amdgpu-pages-27-1234.img: expected the contents of buffers"), "{said}");
    let gpus = &report.gpu.processes[0].gpus;
    assert_eq!((gpus[1].zero_bytes, &gpus[1].pages_file), (None, &None));
    assert_eq!((gpus[0].zero_bytes, &gpus[0].pages_file), (Some(0), &None), "it needs none");
    let (said, _) = damaged(|dir| {
        File::options().write(true).open(dir.join(&name)).unwrap().set_len(9 * 4096).unwrap();
    });
    assert!(said.contains("amdgpu-pages-27-1234.img: 36864 bytes, expected 4198408"), "{said}");
    let (said, report) = damaged(write_image(|image| image.buffers[0].size -= 4096));
    assert!(
        said.contains("amdgpu-pages-27-1234.img: at byte 0: expected contents of 4194304 bytes"),
        "{said}"
    );
    let kinds = &report.gpu.processes[0].kinds;
    assert_eq!(
        kinds[0],
        KindReport { kind: BufferKind::Vram, buffers: 1, bytes: 4 * MIB - 4096, zero_bytes: None }
    );
}

#[test]
fn invalid_private_data_is_damage_and_the_rest_is_shown() {
    let (said, report) = damaged(write_image(|image| image.private.truncate(2000)));
    assert!(said.contains("amdgpu-kfd-27.img: checkpoint data of 2000 bytes: at"), "{said}");
    let process = &report.gpu.processes[0];
    assert!(process.kernel.is_none() && process.buffers[0].mapped_on.is_none());
    assert_eq!(process.gpus[1].zero_bytes, Some(4 * MIB - 4096));
    let mut out = Vec::new();
    text::write(&report, false, &mut out).unwrap();
    assert!(String::from_utf8(out).unwrap().contains("queues, events and ranges: ?"));
    let (said, _) = damaged(write_image(|image| image.objects = 7));
    assert!(said.contains("amdgpu-kfd-27.img: checkpoint data of"), "{said}");
}

#[test]
fn each_other_damaged_file_is_one_line() {
    for name in [kfd_name(27), render_name(30), dmabuf_name(31)] {
        let (said, _) = damaged(|dir| fs::write(dir.join(&name), [9; 30]).unwrap());
        assert!(said.contains(&name), "{said}");
    }
    let name = drm_pages_name(30, 128, 0);
    let (said, report) = damaged(|dir| fs::write(dir.join(&name), [0; 100]).unwrap());
    assert!(said.contains(&format!("{name}: 100 bytes, expected 8200")), "{said}");
    assert_eq!(report.gpu.render_nodes[1].buffers.as_ref().unwrap()[0].zero_bytes, None);
}

#[test]
fn pending_work_of_queues_is_shown_if_their_pointers_are_in_the_image() {
    let pending = |report: &InspectReport| {
        let queues = &report.gpu.processes[0].kernel.as_ref().unwrap().queues;
        queues.iter().map(|queue| queue.pending_bytes).collect::<Vec<_>>()
    };
    let root = gpu_image();
    assert_eq!(pending(&read(&root)), [Some(7 * 64), Some(64), None], "packets, bytes, and elsewhere");
    // With the read pointer ahead the number of bytes is unknown.
    let image = image();
    let file = File::options().write(true).open(dir(&root).join(pages_name(27, FIRST))).unwrap();
    file.write_all_at(&11_u64.to_le_bytes(), image.pages(FIRST).0[1].file_offset).unwrap();
    assert_eq!(pending(&read(&root)), [None, Some(64), None]);
}

#[test]
fn sums_of_a_hostile_image_stay_in_range() {
    let (said, report) = damaged(write_image(|image| {
        for buffer in &mut image.buffers[2..] {
            (buffer.address, buffer.size) = (0, u64::MAX);
        }
        image.private.clear();
    }));
    assert!(said.contains("checkpoint data of 0 bytes"), "{said}");
    let doorbells = &report.gpu.processes[0].kinds[3];
    assert_eq!((doorbells.kind, doorbells.buffers, doorbells.bytes), (BufferKind::Doorbell, 2, u64::MAX));
    text::write(&report, false, &mut Vec::new()).unwrap();
}
