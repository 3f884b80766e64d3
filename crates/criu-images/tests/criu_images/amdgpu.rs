// SPDX-License-Identifier: MIT OR Apache-2.0
//! The images of CRIU's amdgpu plugin: which files are accepted, and the errors for the others.

use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use crate::common::{Images, put, refusal};
use proptest::prelude::*;
use rewake_criu_images::amdgpu::{
    ContentsRange, DmabufImage, GpuFile, KfdBuffer, KfdImage, Link, Mapping, NodeImage, Properties,
    RenderBuffer, RenderContents, RenderImage, dmabuf_name, drm_pages_name, kfd_name, pages_name,
    render_name,
};
use rewake_criu_images::{ImageDir, PagesFile};

/// Reads a file of the fuzzers' corpus, which was written by hand and not by this crate.
fn seed(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn read_kfd(bytes: &[u8]) -> rewake_criu_images::Result<KfdImage> {
    let images = Images::new();
    put(&images.path("a"), &kfd_name(7), bytes);
    Ok(ImageDir::open(images.path("a"))?.kfd(7)?.expect("the file exists"))
}

fn read_render(bytes: &[u8]) -> rewake_criu_images::Result<RenderImage> {
    let images = Images::new();
    put(&images.path("a"), &render_name(8), bytes);
    Ok(ImageDir::open(images.path("a"))?.render_node(8)?.expect("the file exists"))
}

fn read_dmabuf(bytes: &[u8]) -> rewake_criu_images::Result<DmabufImage> {
    let images = Images::new();
    put(&images.path("a"), &dmabuf_name(9), bytes);
    Ok(ImageDir::open(images.path("a"))?.dmabuf(9)?.expect("the file exists"))
}

#[test]
fn files_are_named_as_by_criu_s_plugin() {
    assert_eq!(kfd_name(10), "amdgpu-kfd-10.img");
    assert_eq!(render_name(11), "amdgpu-renderD-11.img");
    assert_eq!(pages_name(10, 0xab), "amdgpu-pages-10-00ab.img");
    assert_eq!(pages_name(10, 0x1_2345), "amdgpu-pages-10-12345.img");
    assert_eq!(dmabuf_name(12), "amdgpu-dmabuf_12.img");
    assert_eq!(drm_pages_name(11, 128, 0x1f), "amdgpu-drm-pages-11-128-001f.img");
}

#[test]
fn only_files_with_these_names_are_recognised() {
    let known = |name: &str| GpuFile::of_name(name);
    assert_eq!(known("amdgpu-kfd-10.img"), Some(GpuFile::Kfd(10)));
    assert_eq!(known("amdgpu-renderD-11.img"), Some(GpuFile::Render(11)));
    assert_eq!(known("amdgpu-dmabuf_12.img"), Some(GpuFile::Dmabuf(12)));
    for other in [
        "amdgpu-pages-10-00ab.img",
        "amdgpu-pages-10-1111.img",
        "amdgpu-drm-pages-11-128-0001.img",
        "amdgpu-kfd-010.img",
        "amdgpu-abc-10.img",
        "amdgpu-kfd--1.img",
        "amdgpu-kfd-.img",
        "amdgpu-kfd-4294967296.img",
        "kfd-10.img",
        "pages-1.img",
    ] {
        assert_eq!(known(other), None, "{other}");
    }
}

#[test]
fn a_process_without_a_gpu_has_none_of_the_files() {
    let images = Images::new();
    put(&images.path("a"), "inventory.img", &[]);
    let dir = ImageDir::open(images.path("a")).unwrap();
    assert_eq!(dir.kfd(7).unwrap(), None);
    assert_eq!(dir.render_node(7).unwrap(), None);
    assert_eq!(dir.dmabuf(7).unwrap(), None);
}

#[test]
fn the_state_of_both_versions_is_read_and_written_bytewise() {
    for (name, handle) in [("amdgpu-kfd/good-4.2", None), ("amdgpu-kfd/good-dev", Some(1))] {
        let bytes = seed(name);
        let image = read_kfd(&bytes).unwrap();
        assert_eq!((image.pid, image.gpus, image.objects), (77, 2, 2));
        let nodes: Vec<_> = image.nodes.iter().map(|node| node.properties).collect();
        let ids: Vec<_> = nodes.iter().map(|node| (node.node_id, node.gpu_id)).collect();
        assert_eq!(ids, [(0, 0), (1, 0x1234), (2, 0xab)]);
        assert_eq!(
            (nodes[1].device_id, nodes[1].drm_render_minor, nodes[1].vram_size),
            (0x740c, 129, 64 << 30)
        );
        assert_eq!(image.nodes[1].links, [Link { kind: 11, to_node: 0 }]);
        let first = KfdBuffer {
            address: 0x7f00_0000_0000,
            size: 2 << 20,
            offset: 1 << 32,
            alloc_flags: 0xd000_0001,
            gpu_id: 0x1234,
            handle,
        };
        assert_eq!(image.buffers[0], first);
        assert_eq!(image.private.len(), 304);
        assert_eq!(image.to_bytes(), bytes, "{name}");
    }
}

#[test]
fn images_of_criu_s_plugin_are_read_and_written_bytewise() {
    // From gpu-app on one soft GPU, dumped by CRIU 4.2.1 and its plugin.
    let bytes = seed("amdgpu-kfd/good-stock-4.2.1");
    let image = read_kfd(&bytes).unwrap();
    assert_eq!((image.gpus, image.nodes.len()), (1, 2));
    // GPU and CPU, in the plugin's order: the last node first.
    let ids: Vec<_> =
        image.nodes.iter().map(|node| (node.properties.node_id, node.properties.gpu_id)).collect();
    assert_eq!(ids, [(1, 0x30e1), (0, 0)]);
    assert_eq!(image.nodes[0].properties.drm_render_minor, 128);
    assert_eq!(image.nodes[0].links, [Link { kind: 2, to_node: 0 }]);
    // The length of amdgpu-pages-27-30e1.img.
    assert_eq!(image.pages(0x30e1).1, 4_550_664);
    assert_eq!(image.to_bytes(), bytes);
    let bytes = seed("amdgpu-render/good-stock-4.2.1");
    assert_eq!(read_render(&bytes).unwrap(), RenderImage { gpu_id: 0x30e1, contents: None });
    assert_eq!(read_render(&bytes).unwrap().to_bytes(), bytes);
}

#[test]
fn bytes_after_the_contents_are_ignored() {
    assert_eq!(
        read_kfd(&seed("amdgpu-kfd/good-longer-before")).unwrap(),
        read_kfd(&seed("amdgpu-kfd/good-dev")).unwrap()
    );
}

#[test]
fn a_pages_file_has_one_gpu_s_contents_without_gaps() {
    let image = read_kfd(&seed("amdgpu-kfd/good-dev")).unwrap();
    assert_eq!(
        image.pages(0x1234),
        (vec![ContentsRange { buffer: 0, file_offset: 8 }], 8 + (2 << 20)),
        "no doorbells"
    );
    assert_eq!(image.pages(0xab), (vec![ContentsRange { buffer: 1, file_offset: 8 }], 8 + 4096));
    assert_eq!(image.pages(0x99), (vec![], 8));
    let buffer = |size, alloc_flags| KfdBuffer { size, alloc_flags, gpu_id: 1, ..KfdBuffer::default() };
    let buffers = vec![buffer(4096, 1), buffer(100, 4), buffer(8192, 2), buffer(4096, 3)];
    let image = KfdImage { buffers, ..KfdImage::default() };
    let range = |buffer, file_offset| ContentsRange { buffer, file_offset };
    assert_eq!(image.pages(1), (vec![range(0, 8), range(2, 4104), range(3, 12296)], 16392));
}

#[test]
fn render_nodes_of_both_versions_are_read_and_written_bytewise() {
    let old = seed("amdgpu-render/good-4.2");
    assert_eq!(read_render(&old).unwrap(), RenderImage { gpu_id: 0x1234, contents: None });
    let new = seed("amdgpu-render/good-dev");
    let contents = read_render(&new).unwrap().contents.unwrap();
    assert_eq!((contents.id, contents.minor, contents.buffers.len()), (9, 128, 2));
    let second = Mapping { address: 0x7e00_0000_2000, size: 4096, offset: 4096, flags: 6 };
    assert_eq!(contents.buffers[0].mappings[1], second);
    assert!(contents.buffers[0].is_import && !contents.buffers[1].is_import);
    for bytes in [old, new] {
        assert_eq!(read_render(&bytes).unwrap().to_bytes(), bytes);
    }
}

#[test]
fn a_dma_buf_is_read_and_written_bytewise() {
    for (name, handle) in [("good-dev", 5), ("good-largest", u32::MAX)] {
        let bytes = seed(&format!("amdgpu-dmabuf/{name}"));
        assert_eq!(read_dmabuf(&bytes).unwrap(), DmabufImage { handle });
        assert_eq!(read_dmabuf(&bytes).unwrap().to_bytes(), bytes);
    }
    let error = refusal(read_dmabuf(&seed("amdgpu-dmabuf/bad-nothing")));
    assert!(
        error.contains("amdgpu-dmabuf_9.img") && error.contains("a dma-buf with the field handle"),
        "{error}"
    );
}

/// Two buffers with contents on GPU 0xab, of 8192 and 6000 bytes, and a file for them.
fn with_pages(file: &[u8]) -> (Images, KfdImage) {
    let buffer = |size| KfdBuffer { size, alloc_flags: 1, gpu_id: 0xab, ..KfdBuffer::default() };
    let image = KfdImage { buffers: vec![buffer(8192), buffer(6000)], ..KfdImage::default() };
    let images = Images::new();
    put(&images.path("a"), &pages_name(7, 0xab), file);
    (images, image)
}

fn open_pages((images, image): &(Images, KfdImage)) -> rewake_criu_images::Result<PagesFile> {
    ImageDir::open(images.path("a"))?.gpu_pages(7, image, 0xab)
}

#[test]
fn contents_of_a_gpu_must_have_the_length_in_the_image() {
    let file = |claimed: u64, len: usize| [&claimed.to_le_bytes()[..], &vec![1; len]].concat();
    assert_eq!(open_pages(&with_pages(&file(14_192, 14_192))).unwrap().len, 14_200);
    assert!(open_pages(&with_pages(&file(14_192, 14_193))).is_ok(), "the file was longer before");
    let error = |file: &[u8]| refusal(open_pages(&with_pages(file)));
    assert!(error(&file(14_192, 14_191)).contains("14199 bytes, expected 14200"));
    assert!(error(&[]).contains("0 bytes, expected 14200"));
    let other = error(&file(14_191, 14_192));
    assert!(other.contains("contents of 14192 bytes, as in amdgpu-kfd-7.img, found 14191 bytes"), "{other}");
    let (images, image) = with_pages(&[]);
    std::fs::remove_file(images.path("a").join(pages_name(7, 0xab))).unwrap();
    let missing = refusal(open_pages(&(images, image)));
    assert!(missing.contains("amdgpu-pages-7-00ab.img: expected the contents of buffers"), "{missing}");
}

#[test]
fn a_render_node_s_contents_have_a_meaningless_header() {
    let buffer = RenderBuffer { size: 4096, ..RenderBuffer::default() };
    let contents = RenderContents { id: 11, minor: 128, buffers: vec![buffer.clone(), buffer] };
    let images = Images::new();
    put(&images.path("a"), &drm_pages_name(11, 128, 1), &[0xaa; 4104]);
    put(&images.path("a"), &drm_pages_name(11, 128, 0), &[0; 4103]);
    let dir = ImageDir::open(images.path("a")).unwrap();
    assert_eq!(dir.render_pages(&contents, 1).unwrap().len, 4104);
    assert!(refusal(dir.render_pages(&contents, 0)).contains("4103 bytes, expected 4104"));
}

#[test]
fn a_restore_reads_contents_of_mapped_buffers_in_vram_and_gtt() {
    let buffer = |preferred_domains, mappings: usize| RenderBuffer {
        preferred_domains,
        mappings: vec![Mapping::default(); mappings],
        ..RenderBuffer::default()
    };
    assert!(buffer(4, 1).has_contents() && buffer(2, 2).has_contents() && buffer(6, 1).has_contents());
    assert!(!buffer(4, 0).has_contents() && !buffer(1, 1).has_contents() && !buffer(0x38, 1).has_contents());
}

#[test]
fn zero_pages_are_counted_from_any_offset_and_in_holes() {
    let images = Images::new();
    let path = images.path("a");
    // The header; then a page of zeros, one of other bytes, a hole of 4 MiB that ends inside a page, and 100
    // bytes.
    let hole = 4 << 20;
    put(&path, "pages", &[&[1; 8][..], &[0; 4096], &[0, 7].repeat(2048)].concat());
    let file = std::fs::File::options().read(true).write(true).open(path.join("pages")).unwrap();
    let end = 8 + 8192 + hole;
    file.write_all_at(&[9], end - 1).unwrap();
    file.set_len(end + 100).unwrap();
    let pages = PagesFile { path: path.join("pages"), file, len: end + 100 };
    assert_eq!(pages.zero_bytes(8, 8 + 8192).unwrap(), 4096);
    assert_eq!(pages.zero_bytes(8, end).unwrap(), 4096 + hole - 4096);
    assert_eq!(pages.zero_bytes(8, end + 100).unwrap(), 4096 + hole - 4096 + 100);
    assert_eq!(pages.zero_bytes(end, end + 100).unwrap(), 100, "shorter than a page");
    assert_eq!(pages.zero_bytes(0, 8).unwrap(), 0);
    assert_eq!(pages.zero_bytes(8, 8).unwrap(), 0);
    assert!(refusal(pages.zero_bytes(8, end + 101)).contains("pages: cannot read it"));
}

#[test]
fn damage_is_reported_with_what_was_expected_and_found() {
    let error = |name: &str| refusal(read_kfd(&seed(&format!("amdgpu-kfd/{name}"))));
    for (name, parts) in [
        ("bad-count", ["as many buffers as the image counts (9)", "found 3"]),
        ("bad-foreign-gpu", ["buffers of the GPUs of its topology", "one of GPU 0x99 at 0x1000"]),
        ("bad-empty-buffer", ["a buffer inside the address space", "0 bytes at 0x1000"]),
        (
            "bad-sum",
            ["contents of less than 2^63 bytes for one GPU", "more with the 9223372036854775807 bytes"],
        ),
        ("bad-length", ["1099511627776 bytes of contents", "CONTENTS_LIMIT"]),
        ("bad-short", ["contents of", "bytes to the end"]),
    ] {
        let error = error(name);
        assert!(
            parts.iter().all(|part| error.contains(part)) && error.contains("amdgpu-kfd-7.img"),
            "{error}"
        );
    }
    let error = refusal(read_render(&seed("amdgpu-render/bad-half")));
    assert!(error.contains("no count of them"), "{error}");
}

#[test]
fn a_missing_field_is_named() {
    // A state whose only buffer has an address and no other field.
    let contents = crate::common::hex("08 01 10 00 18 00 28 01 32 02 08 05 38 00 40 00 48 00 52 00");
    let file = [&20_u64.to_le_bytes()[..], &contents].concat();
    assert!(refusal(read_kfd(&file)).contains("expected a buffer with the field size"));
    // The same without a buffer, and then without the private data.
    let file = |contents: &[u8]| [&(contents.len() as u64).to_le_bytes()[..], contents].concat();
    let contents = crate::common::hex("08 01 10 00 18 00 28 00 38 00 40 00 48 00 52 00");
    assert!(read_kfd(&file(&contents)).is_ok());
    assert!(refusal(read_kfd(&file(&contents[..14]))).contains("the field priv_data"));
}

/// Reads one kind of file of a directory.
type Read = fn(&ImageDir) -> rewake_criu_images::Result<bool>;

#[test]
fn a_truncated_file_is_read_or_refused_in_one_line() {
    let kinds: [(&str, String, Read); 3] = [
        ("amdgpu-kfd/good-dev", kfd_name(7), |dir| dir.kfd(7).map(|image| image.is_some())),
        ("amdgpu-render/good-dev", render_name(8), |dir| dir.render_node(8).map(|image| image.is_some())),
        ("amdgpu-dmabuf/good-largest", dmabuf_name(9), |dir| dir.dmabuf(9).map(|image| image.is_some())),
    ];
    let images = Images::new();
    put(&images.path("a"), "inventory.img", &[]);
    let dir = ImageDir::open(images.path("a")).unwrap();
    for (name, file, read) in kinds {
        let whole = seed(name);
        let read = |bytes: &[u8]| {
            // A new file: some file systems flush a file that is truncated and written again.
            let _ = std::fs::remove_file(images.path("a").join(&file));
            put(&images.path("a"), &file, bytes);
            read(&dir)
        };
        for cut in 0..whole.len() {
            let mut refused = vec![read(&whole[..cut]).expect_err("the file is truncated")];
            // The same with a correct length: the message ends between two fields, or inside one.
            if let Some(contents) = whole[..cut].get(8..) {
                refused.extend(read(&[&(contents.len() as u64).to_le_bytes(), contents].concat()).err());
            }
            for error in refused.iter().map(ToString::to_string) {
                let one_line = !error.contains('\n') && error.len() < 400;
                assert!(error.contains(&file) && one_line, "{name} cut at {cut}: {error}");
            }
        }
    }
}

prop_compose! {
    fn node()(
        gpu_id in 0_u32..4,
        numbers: [u32; 4],
        vram_size: u64,
        links in proptest::collection::vec(any::<(u32, u32)>(), 0..4),
    ) -> NodeImage {
        let [node_id, capability, fw_version, domain] = numbers;
        let mut properties = Properties { node_id, gpu_id, vram_size, ..Properties::default() };
        (properties.capability, properties.fw_version, properties.domain) = (capability, fw_version, domain);
        let links = links.into_iter().map(|(kind, to_node)| Link { kind, to_node }).collect();
        NodeImage { properties, links }
    }
}

prop_compose! {
    fn buffer()(
        address in 0_u64..1 << 48,
        size in 1_u64..1 << 40,
        offset: u64,
        alloc_flags: u32,
        gpu_id in 0_u32..4,
        handle: Option<u32>,
    ) -> KfdBuffer {
        KfdBuffer { address, size, offset, alloc_flags, gpu_id, handle }
    }
}

proptest! {
    #[test]
    fn a_state_is_read_as_written(
        nodes in proptest::collection::vec(node(), 0..8),
        buffers in proptest::collection::vec(buffer(), 0..50),
        private in proptest::collection::vec(any::<u8>(), 0..400),
        numbers: (u32, u32, u64, u32),
    ) {
        let known = |gpu_id| gpu_id != 0 && nodes.iter().any(|node| node.properties.gpu_id == gpu_id);
        let buffers = buffers.into_iter().filter(|buffer| known(buffer.gpu_id)).collect();
        let (pid, objects, shared_memory_size, shared_memory_magic) = numbers;
        let gpus = u32::try_from(nodes.len() / 2).unwrap();
        let image =
            KfdImage { pid, gpus, nodes, buffers, objects, shared_memory_size, shared_memory_magic, private };
        prop_assert_eq!(read_kfd(&image.to_bytes()).unwrap(), image);
    }

    #[test]
    fn a_render_node_is_read_as_written(
        gpu_id: u32,
        contents: Option<(u32, u32)>,
        buffers in proptest::collection::vec(
            (
                1_u64..,
                any::<[u32; 3]>(),
                any::<bool>(),
                proptest::collection::vec(any::<[u64; 4]>(), 0..4),
            ),
            0..20,
        ),
    ) {
        let mapping = |[address, size, offset, flags]: [u64; 4]| Mapping { address, size, offset, flags };
        let buffers = buffers
            .into_iter()
            .map(|(size, [preferred_domains, handle, flags], is_import, mappings)| RenderBuffer {
                size,
                preferred_domains,
                handle,
                is_import,
                alloc_flags: flags.into(),
                mappings: mappings.into_iter().map(mapping).collect(),
                ..RenderBuffer::default()
            })
            .collect();
        let contents = contents.map(|(id, minor)| RenderContents { id, minor, buffers });
        let image = RenderImage { gpu_id, contents };
        prop_assert_eq!(read_render(&image.to_bytes()).unwrap(), image);
    }

    #[test]
    fn a_dma_buf_is_read_as_written(handle: u32) {
        prop_assert_eq!(read_dmabuf(&DmabufImage { handle }.to_bytes()).unwrap(), DmabufImage { handle });
    }

    #[test]
    fn no_bytes_make_a_parser_panic(
        contents in proptest::collection::vec(any::<u8>(), 0..200),
        cut in 0_usize..208,
    ) {
        let mut file = [&(contents.len() as u64).to_le_bytes()[..], &contents].concat();
        let _ = (read_kfd(&file), read_render(&file), read_dmabuf(&file));
        file.truncate(cut);
        let _ = (read_kfd(&file), read_render(&file), read_dmabuf(&file));
    }
}
