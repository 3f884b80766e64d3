// SPDX-License-Identifier: MIT OR Apache-2.0
//! The images that Rewake writes in addition to CRIU's: which files are accepted, and the errors for the
//! others.

use std::path::PathBuf;

use crate::common::{Images, put};
use rewake_criu_images::ImageDir;
use rewake_criu_images::rewake::{
    BufferMetadata, BufferOwner, BufferUser, FreedMapping, FreedMappings, MAX_SUBMISSIONS, RenderFile,
    RenderImport, RenderState, SHARED_NAME, SecondFile, SharedBuffer, SharedImage, StablePstate, Submissions,
    Syncobj,
};

/// Reads a file of the fuzzers' corpus, which was written by hand and not by this crate.
fn seed(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/rewake-shared").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn read(bytes: &[u8]) -> rewake_criu_images::Result<SharedImage> {
    let images = Images::new();
    put(&images.path("a"), SHARED_NAME, bytes);
    Ok(ImageDir::open(images.path("a"))?.shared()?.expect("the file exists"))
}

#[test]
fn shared_objects_are_read_and_written_bytewise() {
    let user = |kfd, buffer| BufferUser { kfd, buffer };
    let image = SharedImage {
        buffers: vec![
            SharedBuffer { users: vec![user(6, 3), user(9, 0), user(6, 5)], dmabuf: None },
            SharedBuffer { users: vec![user(9, 2)], dmabuf: Some(300) },
        ],
        second_files: vec![SecondFile { id: 11, kfd: 6 }],
        ..SharedImage::default()
    };
    assert_eq!(read(&seed("good-shared")).unwrap(), image);
    assert_eq!(image.to_bytes(), seed("good-shared"));
    assert!(!image.is_empty());
    assert!(read(&seed("good-nothing")).unwrap().is_empty());
}

#[test]
fn render_nodes_are_read_and_written_bytewise() {
    let import = |buffer, owner| RenderImport { buffer, owner };
    let imports = vec![
        import(1, BufferOwner::Kfd(BufferUser { kfd: 6, buffer: 3 })),
        import(0, BufferOwner::Render { id: 300, buffer: 2 }),
    ];
    let render_files = vec![
        RenderFile { id: 12, kfd: Some(6), contexts: Vec::new(), imports, state: None },
        RenderFile { id: 300, kfd: None, contexts: vec![1, 2, 200], imports: Vec::new(), state: None },
    ];
    let image = SharedImage { render_files, ..SharedImage::default() };
    assert_eq!(read(&seed("good-render")).unwrap(), image);
    assert_eq!(image.to_bytes(), seed("good-render"));
    assert!(!image.is_empty());
}

#[test]
fn state_of_render_nodes_is_read_and_written_bytewise() {
    let syncobj = |handle, point| Syncobj { handle, point };
    let submissions = |context, ring, count| Submissions { context, engine: 2, ring, count };
    let state = RenderState {
        syncobjs: vec![syncobj(1, None), syncobj(2, Some(0)), syncobj(300, Some(7))],
        metadata: vec![BufferMetadata { handle: 3, tiling_info: 5, flags: 6, data: vec![1, 2, 3] }],
        submissions: vec![submissions(1, 0, 70), submissions(3, 1, MAX_SUBMISSIONS - 70)],
        pstate: Some(StablePstate { context: 3, state: 4 }),
    };
    let file =
        RenderFile { id: 12, contexts: vec![1, 3], state: Some(state.clone()), ..RenderFile::default() };
    let image = SharedImage { render_files: vec![file], ..SharedImage::default() };
    assert_eq!(read(&seed("good-state")).unwrap(), image);
    assert_eq!(image.to_bytes(), seed("good-state"));
    assert!(!state.is_empty());
    // An image of an earlier version says nothing of state; one of this version may say that there is none.
    assert_eq!(read(&seed("good-render")).unwrap().render_files[1].state, None);
}

#[test]
fn mappings_without_buffers_are_read_and_written_bytewise() {
    let mappings = [
        FreedMapping { minor: 128, address: 0x7f00_0020_0000, offset: 0x1_0000_1000 },
        FreedMapping { minor: 129, address: 0x1000, offset: 0 },
    ];
    let none = FreedMappings { kfd: 9, ..FreedMappings::default() };
    let bare = vec![FreedMappings { kfd: 6, mappings: mappings.into() }, none];
    let image = SharedImage { freed_mappings: bare, ..SharedImage::default() };
    assert_eq!(read(&seed("good-bare")).unwrap(), image);
    assert_eq!(image.to_bytes(), seed("good-bare"));
    assert!(!image.is_empty());
}

#[test]
fn an_image_without_shared_objects_has_no_such_file() {
    let images = Images::new();
    put(&images.path("a"), "inventory.img", &[]);
    assert_eq!(ImageDir::open(images.path("a")).unwrap().shared().unwrap(), None);
}

#[test]
fn damage_is_named() {
    for (name, found) in [
        ("bad-twice", "buffer 3 of /dev/kfd 6 twice"),
        ("bad-no-users", "one without users"),
        ("bad-user", "a buffer's user with the field buffer"),
        ("bad-second-file", "a second file with the field id"),
        ("bad-render-twice", "file 300 twice"),
        ("bad-import-twice", "buffer 1 of file 12 twice"),
        ("bad-import-owner", "none, or two"),
        ("bad-contexts", "[2, 2]"),
        ("bad-syncobj", "syncobj 1048577"),
        ("bad-state-order", "another order"),
        ("bad-submissions", "found 100001"),
        ("bad-submissions-in-all", "found 100070"),
        ("bad-state-context", "state of context 2"),
        ("bad-pstate", "Some(5) of context Some(1)"),
        ("bad-metadata", "257 bytes of buffer 3"),
        ("bad-bare-process", "/dev/kfd 6 twice"),
        ("bad-bare-twice", "one of /dev/kfd 6 twice"),
        ("bad-bare-offset", "a mapping without a buffer with the field offset"),
        ("bad-short", "bytes to the end"),
    ] {
        let error = read(&seed(name)).unwrap_err().to_string();
        assert!(error.contains(SHARED_NAME) && error.contains(found), "{name}: {error}");
    }
}
