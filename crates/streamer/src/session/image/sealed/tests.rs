// SPDX-License-Identifier: MIT OR Apache-2.0
//! A successor serves a sealed plan from the same open files, whatever the image's path has by then. It
//! refuses any other plan or file.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use crate::fetch_peer::{FetchPeer, FetchedImage};
use crate::gpu::fetched_files::{ArrivalLimit, FetchedGpuFiles};
use crate::session::WorkingSetPart;
use crate::session::image::plan_file::{SEALS, memory_file, seal};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use rewake_criu_images::{
    Generation, ImageDir, Inventory, Mm, PageFlags, Pagemap, Task, TaskState, Vma, add_arriving_file, write,
};
use rewake_fetcher::plan::{FetchedMemory, PagePeer, SparseFile};
use rewake_image_io::{BLOCK, FetchReader, PresenceWriter, read_now};
use rewake_manifest::{MANIFEST_NAME, ManifestError, PARTIAL_NAME, read_chain, read_partial_checksums};
use rewake_process::wake_socket::WakeSocket;

use super::*;

const PAGE: usize = 4096;
const PAGES: u64 = 3;
const LAZY: PageFlags = PageFlags(6);

/// Writes an image of a zombie and two processes of three pages each, with the bytes `byte` and `byte + 1`.
fn write_image(dir: &Path, byte: u8) {
    fs::create_dir_all(dir).unwrap();
    let task = |pid, state| Task {
        pid,
        ppid: if pid == 7 { 0 } else { 7 },
        pgid: 7,
        sid: 7,
        threads: vec![pid],
        state,
        comm: "program".into(),
    };
    let tasks = [task(7, TaskState::Alive), task(8, TaskState::Alive), task(9, TaskState::Dead)];
    write::tasks(dir, &tasks).unwrap();
    write::inventory(dir, &Inventory { version: 2, plugins: Vec::new(), run_id: None }).unwrap();
    for (pid, id, byte) in [(7, 1, byte), (8, 2, byte + 1)] {
        let start = 0x10_0000 * u64::from(pid);
        let vma = Vma {
            start,
            end: start + PAGES * PAGE as u64,
            prot: 3,
            flags: 0x22,
            status: 1 << 9 | 1,
            offset: 0,
            object: 0,
            advice: 0,
        };
        write::mm(dir, pid, &Mm { vmas: vec![vma], guards: Vec::new() }).unwrap();
        let map = Pagemap::new(id, Generation::Wide, [(start, PAGES, LAZY)]);
        write::pagemap(dir, pid, &map).unwrap();
        write::pages(dir, id, &vec![byte; usize::try_from(PAGES).unwrap() * PAGE]).unwrap();
    }
}

fn opened() -> (tempfile::TempDir, Image) {
    let root = tempfile::tempdir().unwrap();
    write_image(&root.path().join("image"), 1);
    rewake_manifest::seal(&root.path().join("image")).unwrap();
    let mut draft = draft(&root.path().join("image"));
    // These ranges normally come from GPU images, which this image lacks.
    if let Some(Some(task)) = draft.tasks.get_mut(&8) {
        task.first = vec![0x80_0000..0x80_1000, 0x80_2000..0x80_3000];
        task.working_set = vec![Prefetch { addresses: 0x80_4000..0x80_5000, rank: 9 }];
    }
    (root, planned(draft))
}

fn draft(images: &Path) -> Draft {
    Draft::read(&ImageDir::open(images).unwrap()).unwrap()
}

/// Returns the image of a draft, as its first worker reads it.
fn planned(draft: Draft) -> Image {
    let memory = memory_file().unwrap();
    draft.write(&memory).unwrap();
    seal(&memory).unwrap();
    let leases = draft.leases.into_iter().map(OwnedFd::from);
    let files = draft.files.into_iter().map(|file| file.file.into()).chain(leases).collect();
    Image::unseal(memory.as_fd(), files).unwrap()
}

fn unseal(plan: &OwnedFd, files: Vec<OwnedFd>) -> anyhow::Result<Image> {
    Image::unseal(plan.as_fd(), files)
}

fn plan_and_files(image: &Image) -> (OwnedFd, Vec<OwnedFd>) {
    let (plan, files) = image.seal().unwrap();
    (plan, files.iter().map(|file| file.try_clone_to_owned().unwrap()).collect())
}

/// Returns a sealed memory file with these bytes.
fn sealed(bytes: &[u8]) -> OwnedFd {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let memory = File::from(memfd_create(c"test", flags).unwrap());
    memory.write_all_at(bytes, 0).unwrap();
    fcntl(&memory, FcntlArg::F_ADD_SEALS(SEALS)).unwrap();
    memory.into()
}

fn bytes_of(plan: &OwnedFd) -> Vec<u8> {
    let mut bytes = Vec::new();
    let memory = File::from(plan.try_clone().unwrap());
    At { memory: &memory, offset: 0 }.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Everything of a task that a session uses: pid, extents, ranges that are loaded first, the working set and
/// file names.
type Content = (u32, Vec<Extent>, Vec<std::ops::Range<u64>>, Vec<Prefetch>, Vec<PathBuf>);

fn content(image: &Image) -> Vec<Content> {
    let of = |(pid, plan): (&u32, &Option<TaskPlan>)| {
        let plan = plan.as_ref()?;
        let names = plan.files.iter().map(|file| file.name().to_owned()).collect();
        Some((*pid, plan.plan.extents().to_vec(), plan.first.clone(), plan.working_set.clone(), names))
    };
    image.plans.iter().filter_map(of).collect()
}

#[test]
fn runs_of_a_working_set_that_overlap_are_refused() {
    let refusal = |runs: &[(u64, u64, u32)]| -> Option<String> {
        let root = tempfile::tempdir().unwrap();
        write_image(root.path(), 1);
        let mut draft = draft(root.path());
        let runs = runs.iter().map(|&(first, end, rank)| Prefetch {
            addresses: first << 12..end << 12,
            rank: REGISTERED + rank,
        });
        draft.tasks.get_mut(&8).unwrap().as_mut().unwrap().working_set = runs.collect();
        let memory = memory_file().unwrap();
        draft.write(&memory).unwrap();
        seal(&memory).unwrap();
        let leases = draft.leases.into_iter().map(OwnedFd::from);
        let files = draft.files.into_iter().map(|file| file.file.into()).chain(leases).collect();
        format!("{:#}", Image::unseal(memory.as_fd(), files).err()?).into()
    };
    assert_eq!(refusal(&[(20, 30, 1), (10, 20, 2), (30, 31, 3)]), None);
    assert!(refusal(&[(20, 30, 1), (10, 21, 2)]).unwrap().contains("overlap"));
    assert!(refusal(&[(20, 30, 1), (22, 23, 2)]).unwrap().contains("overlap"));
    assert!(refusal(&[(20, 30, 0)]).unwrap().contains("rank 0 is not one of a working set"));
    let many: Vec<_> = (0..=MOST_RUNS as u64).map(|at| (2 * at, 2 * at + 1, 1)).collect();
    assert!(refusal(&many).unwrap().contains("32769 runs of a working set"));
}

#[test]
fn a_successor_serves_the_same_plans_from_the_same_files() {
    let (_root, image) = opened();
    let (plan, files) = plan_and_files(&image);
    assert_eq!(files.len(), 3, "two pages files and a lease");
    let successor = unseal(&plan, files).unwrap();
    assert_eq!(content(&successor), content(&image));
    assert_eq!(
        (successor.tasks(), successor.lazy_pages(), successor.digest()),
        (3, 2 * PAGES, image.digest())
    );
    assert!(successor.has_task(9) && successor.plan(9).is_none(), "a zombie has no memory");
    assert_eq!(successor.plan(8).unwrap().first.len(), 2);
    assert_eq!(successor.working_set_parts(), [WorkingSetPart::Cpus]);
    assert!(successor.plan(7).unwrap().working_set.is_empty());
    let again = bytes_of(&successor.seal().unwrap().0);
    assert_eq!(again, bytes_of(&plan), "a third process gets the same");
}

#[test]
fn a_successor_does_not_depend_on_the_path() {
    for replaced in [false, true] {
        let (root, image) = opened();
        let (plan, files) = plan_and_files(&image);
        drop(image);
        std::thread::sleep(Duration::from_millis(20)); // longer than the resolution of change times
        fs::remove_dir_all(root.path().join("image")).unwrap();
        if replaced {
            write_image(&root.path().join("image"), 9);
        }
        let successor = unseal(&plan, files).unwrap();
        let mut page = [0; PAGE];
        read_now(&successor.plan(8).unwrap().files[0], 0, &mut page).unwrap();
        assert_eq!(page, [2; PAGE], "the bytes of the image that the session opened");
    }
}

/// The bytes of a task's first page, if the page cache has them and they are those that were sealed.
fn first_page(image: &Image, pid: u32) -> Vec<u8> {
    let file = &image.plan(pid).unwrap().files[0];
    assert!(file.is_sealed());
    let mut buffer = vec![0; PAGE + 2 * rewake_image_io::BLOCK];
    let read = file.read_verified(0..PAGE as u64, &mut buffer, false).unwrap();
    buffer[read].to_vec()
}

#[test]
fn a_successor_checks_blocks_with_the_checksums_of_each_file() {
    let (root, image) = opened();
    let (plan, files) = plan_and_files(&image);
    let successor = unseal(&plan, files).unwrap();
    for (pid, byte) in [(7, 1), (8, 2)] {
        assert_eq!(first_page(&image, pid), [byte; PAGE]);
        assert_eq!(first_page(&successor, pid), [byte; PAGE]);
    }
    drop((image, successor));
    fs::write(root.path().join("image/pages-2.img"), [3; 3 * PAGE]).unwrap();
    let wrong = planned(draft(&root.path().join("image")));
    assert_eq!(first_page(&wrong, 7), [1; PAGE]);
    assert_eq!(first_page(&wrong, 8), [0; 0], "a byte that was not sealed is not given");
}

#[test]
fn a_pages_file_that_the_manifest_does_not_have_is_refused() {
    let (root, image) = opened();
    drop(image);
    let images = ImageDir::open(root.path().join("image")).unwrap();
    let chain = [&images];
    // The file is replaced between the read of the manifest and the open.
    let checksums = read_chain(&chain).unwrap();
    let (pages, other) = (root.path().join("image/pages-2.img"), root.path().join("other"));
    fs::copy(&pages, &other).unwrap();
    fs::rename(other, &pages).unwrap();
    let mut draft = Draft::of(&images).unwrap().tasks(&images).unwrap();
    let error = draft.add_checksums_of(&chain, checksums).unwrap_err().to_string();
    assert!(error.contains("pages-2.img: the image's manifest has another file"), "{error}");
}

#[test]
fn an_image_without_a_manifest_is_served_unchecked() {
    let root = tempfile::tempdir().unwrap();
    write_image(root.path(), 1);
    let image = planned(draft(root.path()));
    assert!(image.files().iter().all(|file| !file.is_sealed()));
}

#[test]
fn a_plan_and_its_successors_lease_the_image() {
    let (root, image) = opened();
    let is_leased = || File::open(root.path().join("image/inventory.img")).unwrap().try_lock().is_err();
    let (plan, files) = plan_and_files(&image);
    drop(image);
    assert!(is_leased(), "by the descriptors for a successor");
    let successor = unseal(&plan, files).unwrap();
    assert!(is_leased());
    drop(successor);
    assert!(!is_leased());
    let removing = File::open(root.path().join("image/inventory.img")).unwrap();
    removing.lock().unwrap();
    let error = Draft::read(&ImageDir::open(root.path().join("image")).unwrap()).unwrap_err().to_string();
    assert!(error.contains("another image is taking its place"), "{error}");
}

#[test]
fn a_file_that_two_tasks_share_is_passed_once() {
    let root = tempfile::tempdir().unwrap();
    write_image(root.path(), 1);
    fs::remove_file(root.path().join("pages-2.img")).unwrap();
    fs::hard_link(root.path().join("pages-1.img"), root.path().join("pages-2.img")).unwrap();
    let image = planned(draft(root.path()));
    let (plan, files) = plan_and_files(&image);
    assert_eq!(files.len(), 2, "a pages file and a lease");
    let successor = unseal(&plan, files).unwrap();
    assert!(Arc::ptr_eq(&successor.plan(7).unwrap().files[0], &successor.plan(8).unwrap().files[0]));
}

#[test]
fn descriptors_of_other_files_are_refused_by_name() {
    let (root, image) = opened();
    let refused = |files: Vec<OwnedFd>| format!("{:#}", unseal(&image.seal().unwrap().0, files).unwrap_err());
    let (_, mut files) = plan_and_files(&image);
    files.swap(0, 1);
    let error = refused(files);
    assert!(error.contains("pages-1.img: it is another file"), "{error}");
    assert!(error.contains("restore the image again"), "{error}");
    assert!(refused(Vec::new()).contains("expected 2 pages files and 1 leases, found 0 descriptors"));

    std::thread::sleep(Duration::from_millis(20));
    let (_, files) = plan_and_files(&image);
    let file = fs::OpenOptions::new().write(true).open(root.path().join("image/pages-2.img")).unwrap();
    file.write_all_at(&[7], 100).unwrap();
    let error = refused(files);
    assert!(error.contains("pages-2.img: it was written to"), "{error}");
}

#[test]
fn a_plan_that_may_still_be_written_is_refused() {
    let (_root, image) = opened();
    let (plan, files) = plan_and_files(&image);
    let memory = memfd_create(c"test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
    File::from(memory.try_clone().unwrap()).write_all_at(&bytes_of(&plan), 0).unwrap();
    let error = unseal(&memory, files).unwrap_err().to_string();
    assert!(error.contains("is not sealed"), "{error}");
    assert!(File::from(plan).write_all_at(&[1], 0).is_err(), "the plan of `seal` is sealed");
}

#[test]
fn a_plan_of_another_version_says_so() {
    let (_root, image) = opened();
    let (plan, files) = plan_and_files(&image);
    let mut bytes = bytes_of(&plan);
    bytes[8] = 1;
    let error = format!("{:#}", unseal(&sealed(&bytes), files).unwrap_err());
    assert!(error.contains("expected version 7, found 1: another `rewake` made it"), "{error}");
}

#[test]
fn in_a_cache_file_each_task_has_blocks_of_its_own() {
    let root = tempfile::tempdir().unwrap();
    write_image(&root.path().join("image"), 1);
    let memory = memory_file().unwrap();
    let draft = Draft::read_remote(&ImageDir::open(root.path().join("image")).unwrap()).unwrap();
    draft.write(&memory).unwrap();
    seal(&memory).unwrap();
    let leases =
        || draft.leases.iter().map(|lease| lease.try_clone().unwrap().into()).collect::<Vec<OwnedFd>>();
    let error = format!("{:#}", Image::unseal(memory.as_fd(), leases()).unwrap_err());
    assert!(error.contains("has no presence map"), "{error}");
    let create = |of: DraftRemote| RemoteMemory::create(root.path(), of);
    let image = Image::unseal_with(memory.as_fd(), leases(), create).unwrap();
    let remote = image.remote().unwrap();
    let server = FetchPeer { peer: PagePeer::Connected, tls: None, connected: None, image: None };
    let plan = image.fetch_plan(remote, &server).unwrap();
    let FetchedMemory::Pages { extents, .. } = &plan.memory else { panic!("{plan:?}") };
    let extents = extents.iter().map(|of| (of.first, of.vaddr, of.pages, of.pid));
    assert_eq!(extents.collect::<Vec<_>>(), [(0, 0x70_0000, 3, 7), (16, 0x80_0000, 3, 8)]);
    assert_eq!((plan.len, remote.cache().unwrap().len()), (32 * PAGE_SIZE, 32 * PAGE_SIZE));
    // Pages that are no task's are never requested.
    let absent = (0..32).filter(|page| !remote.source.presence().has_page(*page));
    assert_eq!(absent.collect::<Vec<_>>(), [0, 1, 2, 16, 17, 18]);
}

#[test]
fn files_that_arrive_are_after_the_cache_file() {
    let root = tempfile::tempdir().unwrap();
    let images = root.path().join("image");
    write_image(&images, 1);
    let (name, len) = ("amdgpu-pages-9-00ab.img", 16 * PAGE_SIZE + 8);
    File::create(images.join(name)).unwrap().set_len(len).unwrap();
    add_arriving_file(&images, name).unwrap();
    let error = Draft::read(&ImageDir::open(&images).unwrap()).unwrap_err().to_string();
    assert!(error.contains("only the migration can restore it"), "{error}");
    let memory = memory_file().unwrap();
    let draft = Draft::read_remote(&ImageDir::open(&images).unwrap()).unwrap();
    draft.write(&memory).unwrap();
    seal(&memory).unwrap();
    let leases = draft.leases.into_iter().map(OwnedFd::from);
    let files: Vec<OwnedFd> = draft.files.into_iter().map(|file| file.file.into()).chain(leases).collect();
    let create = |of: DraftRemote| RemoteMemory::create(root.path(), of);
    let image = Image::unseal_with(memory.as_fd(), files, create).unwrap();
    let remote = image.remote().unwrap();
    let server = FetchPeer { peer: PagePeer::Connected, tls: None, connected: None, image: None };
    let plan = image.fetch_plan(remote, &server).unwrap();
    let FetchedMemory::Pages { extents, files, .. } = &plan.memory else { panic!("{plan:?}") };
    assert_eq!(extents.iter().map(|of| of.first).collect::<Vec<_>>(), [0, 16]);
    assert_eq!(files.as_slice(), [SparseFile { first: 32, len, number: 0 }]);
    let lens = (plan.len, remote.cache().unwrap().len(), image.files_to_write().unwrap().len());
    assert_eq!(lens, (64 * PAGE_SIZE, 32 * PAGE_SIZE, 2));
    let absent = (0..64).filter(|page| !remote.source.presence().has_page(*page));
    assert_eq!(
        absent.collect::<Vec<_>>(),
        [0, 1, 2, 16, 17, 18].into_iter().chain(32..49).collect::<Vec<_>>()
    );
    // Tasks have the cache file, not the first file.
    let task = image.plan(7).unwrap();
    assert_eq!(task.files[0].len(), 32 * PAGE_SIZE);
    let arrives = &image.files()[0];
    assert!(!arrives.has(0, PAGE) && arrives.source().is_some());
}

#[test]
fn a_plan_of_any_other_length_is_refused() {
    let (_root, image) = opened();
    let (plan, _) = plan_and_files(&image);
    let mut bytes = bytes_of(&plan);
    bytes.push(0);
    for len in (0..=bytes.len()).filter(|len| *len != bytes.len() - 1) {
        let (_, files) = plan_and_files(&image);
        let error = format!("{:#}", unseal(&sealed(&bytes[..len]), files).unwrap_err());
        assert!(error.contains("the sealed plan of an image"), "{error}");
    }
}

#[test]
fn hostile_bytes_are_refused_or_harmless_at_every_offset() {
    let (_root, image) = opened();
    let (plan, _) = plan_and_files(&image);
    let bytes = bytes_of(&plan);
    let mut refused = 0;
    for at in 0..bytes.len() {
        for value in [0, 0x7f, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            let (_, files) = plan_and_files(&image);
            let Ok(successor) = unseal(&sealed(&bytes), files) else {
                refused += 1;
                continue;
            };
            // A changed byte may change addresses. It must not cause reads beyond a file, or use more memory.
            for task in successor.plans.values().flatten() {
                assert!(task.plan.pages() <= PAGES && task.files.len() <= 2);
            }
        }
    }
    assert!(refused > bytes.len(), "{refused} of {} were refused", 3 * bytes.len());
}

#[test]
fn counts_beyond_the_end_are_refused_before_allocation() {
    let (_root, image) = opened();
    let (plan, _) = plan_and_files(&image);
    let bytes = bytes_of(&plan);
    // The last task's counts of ranges and extents, at offsets from the end: the zombie has 8 bytes, and two
    // blocks have checksums.
    let extents = bytes.len() - 2 * 8 - 8 - usize::try_from(EXTENT).unwrap() - 8;
    let working_set = extents - usize::try_from(RANKED).unwrap() - 4;
    let ranges = working_set - 2 * usize::try_from(RANGE).unwrap() - 4;
    for (at, len) in [(extents, 8), (working_set, 4), (ranges, 4)] {
        let mut bytes = bytes.clone();
        bytes[at..at + len].fill(0xff);
        let (_, files) = plan_and_files(&image);
        let error = format!("{:#}", unseal(&sealed(&bytes), files).unwrap_err());
        assert!(error.contains("records where"), "{error}");
    }
}

#[test]
fn a_planner_may_return_only_files_of_the_directories_that_it_opened() {
    let (root, image) = opened();
    let directory = |path: &Path| OwnedFd::from(File::open(path).unwrap());
    let (own, other) = (root.path().join("image"), root.path().join("other"));
    write_image(&other, 1);
    let check = |opened: &[&Path]| {
        let opened: Vec<OwnedFd> = opened.iter().copied().map(directory).collect();
        crate::planner::check_places(&image, &opened).map_err(|error| error.to_string())
    };
    assert_eq!(check(&[&own]), Ok(()));
    assert_eq!(check(&[&own, &other]), Ok(()));
    assert_eq!(check(&[&other, &own]), Err("it is not of the image directory".into()));
    assert_eq!(check(&[]), Err("no directory was opened".into()));
    fs::rename(own.join("pages-2.img"), root.path().join("pages-2.img")).unwrap();
    assert!(check(&[&own, &other]).unwrap_err().contains("pages-2.img is not a file of the image"));
    std::os::unix::fs::symlink(root.path().join("pages-2.img"), own.join("pages-2.img")).unwrap();
    assert_eq!(check(&[&own, &other]), Ok(()), "a view of an image in another place");
    fs::remove_file(own.join("pages-2.img")).unwrap();
    std::os::unix::fs::symlink(other.join("pages-2.img"), own.join("pages-2.img")).unwrap();
    assert!(check(&[&own]).unwrap_err().contains("pages-2.img is not a file of the image"));
}

/// A sealed image whose manifest is partial, with the bytes `byte` and `byte + 1`: no byte of this pages file
/// has arrived.
fn partial(byte: u8, absent: &str) -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let images = root.path().join("image");
    write_image(&images, byte);
    rewake_manifest::seal(&images).unwrap();
    fs::rename(images.join(MANIFEST_NAME), images.join(PARTIAL_NAME)).unwrap();
    let file = File::options().write(true).truncate(true).open(images.join(absent)).unwrap();
    file.set_len(PAGES * PAGE_SIZE).unwrap();
    (root, images)
}

fn partial_image(images: &Path) -> anyhow::Result<Image> {
    let memory = memory_file()?;
    let draft = Draft::read_partial(&ImageDir::open(images)?)?;
    draft.write(&memory)?;
    seal(&memory)?;
    let leases = draft.leases.into_iter().map(OwnedFd::from);
    let files = draft.files.into_iter().map(|file| file.file.into()).chain(leases).collect();
    let image = Image::unseal_with(memory.as_fd(), files, |of| RemoteMemory::create(images, of))?;
    image.note_arrived()?;
    Ok(image)
}

#[test]
fn of_a_partial_image_right_blocks_count_as_arrived() {
    let (_root, images) = partial(1, "pages-1.img");
    let image = partial_image(&images).unwrap();
    let peer = PagePeer::Tcp(Vec::new());
    let id = read_partial_checksums(&ImageDir::open(&images).unwrap()).unwrap().id.to_string();
    let served = |id: &str| Some(FetchedImage { name: "web/1".into(), id: id.into() });
    let mut peer = FetchPeer { peer, tls: None, connected: None, image: served("0123") };
    let error = image.fetch_plan(image.remote().unwrap(), &peer).unwrap_err().to_string();
    assert!(error.contains("did another program write into the directory?"), "{error}");
    peer.image = served(&id);
    let plan = image.fetch_plan(image.remote().unwrap(), &peer).unwrap();
    let FetchedMemory::Files { image: name, files, .. } = &plan.memory else { panic!("{plan:?}") };
    let files: Vec<_> = files.iter().map(|file| (file.first, file.len, file.number)).collect();
    // The names before: core-7, core-8, core-9, inventory, mm-7, mm-8, pagemap-7, pagemap-8.
    assert_eq!((&**name, files), (Path::new("web/1"), vec![(0, 3 * PAGE_SIZE, 9), (16, 3 * PAGE_SIZE, 10)]));
    assert_eq!(plan.len, 32 * PAGE_SIZE);
    assert_eq!(arrived(&image), [false, true]);
    let remote = image.remote().unwrap();
    let presence = PresenceWriter::open(remote.presence.as_fd(), remote.len).unwrap();
    presence.set(0, 1);
    assert_eq!(arrived(&image), [false, true], "a part of a block cannot be checked");
    presence.set(1, 2);
    assert_eq!(arrived(&image), [true, true]);
    assert_eq!(image.files_to_write().unwrap().len(), 2);
}

/// Whether the first page of each file has arrived.
fn arrived(image: &Image) -> Vec<bool> {
    image.files().iter().map(|file| file.has(0, PAGE)).collect()
}

#[test]
fn of_a_partial_image_sealed_zeros_are_here_and_wrong_bytes_are_not() {
    let (_root, images) = partial(0, "pages-1.img");
    assert_eq!(arrived(&partial_image(&images).unwrap()), [true, true]);
    let (_root, images) = partial(0, "pages-2.img");
    assert_eq!(arrived(&partial_image(&images).unwrap()), [true, false]);
    fs::write(images.join("pages-2.img"), vec![7; 3 * PAGE]).unwrap();
    assert_eq!(arrived(&partial_image(&images).unwrap()), [true, false]);
}

#[test]
fn files_of_gpu_memory_are_in_the_presence_map_of_a_partial_image() {
    let (_root, images) = partial(1, "pages-1.img");
    fs::remove_file(images.join(PARTIAL_NAME)).unwrap();
    // Two blocks and a bit. A render node's file is copied as a whole, and is not among them.
    let (gpu, length) = (images.join("amdgpu-pages-3-0007.img"), 2 * BLOCK + 8);
    fs::write(&gpu, vec![7; length]).unwrap();
    fs::write(images.join("amdgpu-drm-pages-3-0080-0000.img"), [7; PAGE]).unwrap();
    rewake_manifest::seal(&images).unwrap();
    fs::rename(images.join(MANIFEST_NAME), images.join(PARTIAL_NAME)).unwrap();
    let file = File::options().write(true).truncate(true).open(&gpu).unwrap();
    file.set_len(length as u64).unwrap();
    file.write_all_at(&[7; BLOCK], BLOCK as u64).unwrap();
    let image = partial_image(&images).unwrap();
    assert_eq!(arrived(&image), [true, true, false]);
    let found: Vec<bool> = (0..3).map(|block| image.files()[2].has((block * BLOCK) as u64, 1)).collect();
    assert_eq!(found, [false, true, false]);
    let reader = FetchReader { number: 8, waker: WakeSocket::new().unwrap() };
    let files = FetchedGpuFiles::new(&image, reader, ArrivalLimit::of(None));
    let file = files.file("amdgpu-pages-3-0007.img").unwrap();
    // Two pages files of a block each are before it.
    assert!(file.is_sealed() && file.source().unwrap().page(0) == 32);
    assert!(files.file("pages-1.img").is_none());
}

#[test]
fn a_partial_image_is_refused_also_as_a_parent_or_sealed() {
    let (root, images) = partial(1, "pages-1.img");
    let child = root.path().join("child");
    write_image(&child, 1);
    std::os::unix::fs::symlink(&images, child.join("parent")).unwrap();
    let refused = |directory: &Path| {
        let error = Draft::read(&ImageDir::open(directory).unwrap()).unwrap_err();
        matches!(error.downcast_ref(), Some(ManifestError::Partial { .. }))
    };
    assert!(refused(&images) && refused(&child));
    fs::copy(images.join(PARTIAL_NAME), images.join(MANIFEST_NAME)).unwrap();
    assert!(refused(&images) && refused(&child));
}

#[test]
fn a_partial_image_has_one_session_and_is_not_restored_without_its_server() {
    let (_root, images) = partial(1, "pages-1.img");
    let error = Draft::read(&ImageDir::open(&images).unwrap()).unwrap_err().to_string();
    assert!(error.contains("is not complete"), "{error}");
    let image = partial_image(&images).unwrap();
    let error = partial_image(&images).unwrap_err().to_string();
    assert!(error.contains("another program writes an image into it"), "{error}");
    drop(image);
    partial_image(&images).unwrap();
}
