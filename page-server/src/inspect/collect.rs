// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads an image directory: all that can be read, and a message for all that cannot.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use rewake_criu_images::{
    ImageDir, ImageError, LazyMappings, Mm, Overcommit, PAGE, PageFlags, Pagemap, Task, TaskState, Vma,
};
use rewake_manifest::ManifestReader;

use super::{FileReport, InspectReport, Lazy, Pages, TaskReport, Totals, Verdict, VmaReport, gpu};
use crate::commands::verify::signed_by;

/// Reads the directory.
///
/// # Errors
/// The directory cannot be opened. All other errors are in [`InspectReport::damage`].
pub fn collect(path: &Path) -> Result<InspectReport, ImageError> {
    let mut reader = ImageReader {
        image: ImageDir::open(path)?,
        damage: Damage::default(),
        owners: BTreeMap::new(),
        mappings: LazyMappings::default(),
    };
    let parents = reader.parents();
    let inventory = reader.image.inventory();
    let inventory = reader.damage.value_or_note(inventory);
    let tree = reader.image.tree();
    let tree = in_tree_order(reader.damage.value_or_note(tree).unwrap_or_default());
    let tasks: Vec<_> =
        tree.into_iter().map(|(task, depth)| reader.task(task, depth, parents.first())).collect();
    let files = reader.files();
    let gpu =
        gpu::collect::collect(&reader.image, files.iter().map(|file| file.name.as_str()), &mut reader.damage);
    // An image that is not sealed, or whose manifest is damaged, has none: `rewake verify` says why.
    let id = ManifestReader::open(&reader.image).ok().map(|manifest| manifest.id());
    let signed_by = id.and_then(|id| signed_by(&reader.image, id));
    let totals = Totals::of(&tasks, &files);
    let damage = reader.damage.messages;
    // Where the kernel does not say what it permits, only the image decides.
    let overcommit = Overcommit::now().unwrap_or(Overcommit::Always);
    let refusal = reader.image.userfaultfd_refusal().or_else(|| overcommit.refusal(&reader.mappings));
    Ok(InspectReport {
        images_dir: path.display().to_string(),
        parent_dirs: parents.iter().map(real_path).collect(),
        image_version: inventory.as_ref().map(|inventory| inventory.version),
        image_id: id.map(|id| id.to_string()),
        signed_by,
        run_id: inventory.as_ref().and_then(|inventory| inventory.run_id.as_deref().map(text)),
        plugins: inventory.map_or_else(Vec::new, |of| of.plugins.iter().map(|name| text(name)).collect()),
        page_bytes: PAGE,
        lazy: verdict(&totals.pages, &damage, refusal),
        tasks,
        gpu,
        totals,
        files,
        damage,
    })
}

/// The messages, each once.
#[derive(Debug, Default)]
pub(super) struct Damage {
    messages: Vec<String>,
    seen: HashSet<String>,
}

impl Damage {
    pub(super) fn value_or_note<T>(&mut self, result: Result<T, impl std::fmt::Display>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.note(&error.to_string());
                None
            }
        }
    }

    fn note(&mut self, message: &str) {
        if self.seen.insert(message.into()) {
            self.messages.push(message.into());
        }
    }
}

struct ImageReader {
    image: ImageDir,
    damage: Damage,
    /// The owner of each pages file, by the number in the file's name.
    owners: BTreeMap<u32, u32>,
    mappings: LazyMappings,
}

impl ImageReader {
    /// Returns the chain of parent images as far as it can be followed.
    fn parents(&mut self) -> Vec<ImageDir> {
        let mut parents: Vec<ImageDir> = Vec::new();
        while let Some(parent) =
            self.damage.value_or_note(parents.last().unwrap_or(&self.image).parent()).flatten()
        {
            parents.push(parent);
        }
        parents
    }

    fn task(&mut self, task: Task, depth: usize, parent: Option<&ImageDir>) -> TaskReport {
        let core = self.damage.value_or_note(self.image.core(task.pid));
        let (mm, pages) = match &core {
            Some((state, _)) if !state.has_memory() => (None, None),
            _ => self.memory(task.pid, core.is_some(), parent),
        };
        mm.iter().for_each(|mm| self.mappings.add(task.pid, mm));
        let map = pages.as_ref().map(|(map, _)| map);
        let (state, comm) =
            core.map_or((None, None), |(state, comm)| (Some(state_name(state)), Some(text(&comm))));
        TaskReport {
            pid: task.pid,
            ppid: task.ppid,
            pgid: task.pgid,
            sid: task.sid,
            depth,
            state,
            comm,
            threads: task.threads,
            mapped_bytes: mm.as_ref().map(|mm| bytes(&mm.vmas, |_| true)),
            lazy_able_bytes: mm.as_ref().map(|mm| bytes(&mm.vmas, Vma::can_be_lazy)),
            vmas: mm.map(|mm| vma_reports(&mm, map)),
            pages: pages.map(|(_, pages)| pages),
        }
    }

    /// Reads the memory of a task. Unless it is `certain` that the task has memory, missing files are no
    /// damage.
    fn memory(
        &mut self,
        pid: u32,
        certain: bool,
        parent: Option<&ImageDir>,
    ) -> (Option<Mm>, Option<(Pagemap, Pages)>) {
        let mm = match self.image.mm(pid) {
            Err(ImageError::Missing { .. }) if !certain => return (None, None),
            other => self.damage.value_or_note(other),
        };
        let Some(map) = self.damage.value_or_note(self.image.pagemap(pid)) else { return (mm, None) };
        if mm.is_some() && self.damage.value_or_note(self.image.lazy_plan(pid)).is_some() {
            self.check_parent(pid, map.as_ref(), parent);
        }
        let Some(map) = map else { return (mm, None) };
        self.owners.insert(map.pages_id, pid);
        let zero = self.damage.value_or_note(self.image.zero_pages(pid));
        let pages = Pages::new(&map.stats(), zero);
        (mm, Some((map, pages)))
    }

    /// Checks the pages that `criu restore` reads from the parent. The lazy plan has checked the lazy ones.
    fn check_parent(&mut self, pid: u32, map: Option<&Pagemap>, parent: Option<&ImageDir>) {
        let in_parent = |entry: &&rewake_criu_images::PagemapEntry| entry.flags.has(PageFlags::PARENT);
        let Some(first) = map.and_then(|map| map.entries.iter().find(in_parent)) else { return };
        let found = match parent.map(|parent| parent.pagemap(pid)).transpose() {
            Ok(found) => found.flatten(),
            Err(error) => return self.damage.note(&error.to_string()),
        };
        if found.is_none() {
            let here = self.image.path();
            let error = ImageError::NotInParent {
                file: here.join(format!("pagemap-{pid}.img")),
                vaddr: first.vaddr,
                pages: first.pages,
                parent: here.join("parent"),
            };
            self.damage.note(&error.to_string());
        }
    }

    /// Returns all `*.img` files of the directory.
    fn files(&mut self) -> Vec<FileReport> {
        let here = self.image.path().to_path_buf();
        let named = |error: std::io::Error| format!("{}: cannot list it: {error}", here.display());
        let Some(entries) = self.damage.value_or_note(std::fs::read_dir(&here).map_err(named)) else {
            return Vec::new();
        };
        let mut files = Vec::new();
        for entry in entries {
            let Some(entry) = self.damage.value_or_note(entry.map_err(named)) else { break };
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.ends_with(".img") {
                continue;
            }
            let stat =
                entry.path().metadata().map_err(|error| format!("{}: {error}", entry.path().display()));
            let Some(stat) = self.damage.value_or_note(stat) else { continue };
            let number = name.strip_prefix("pages-").and_then(|rest| rest.strip_suffix(".img"));
            let owner = number.and_then(|number| self.owners.get(&number.parse().ok()?));
            files.push(FileReport { bytes: stat.len(), task: owner.copied(), name });
        }
        files.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        files
    }
}

fn verdict(pages: &Pages, damage: &[String], not_here: Option<String>) -> Lazy {
    if !damage.is_empty() {
        return Lazy { verdict: Verdict::No, reason: Some("the image is damaged".into()) };
    }
    if pages.remote > 0 {
        let reason = format!(
            "{} pages are only with the page server of the `criu dump --lazy-pages` that made the image",
            pages.remote
        );
        return Lazy { verdict: Verdict::NeedsPageServer, reason: Some(reason) };
    }
    let verdict = if not_here.is_some() { Verdict::NotHere } else { Verdict::Yes };
    Lazy { verdict, reason: not_here }
}

fn state_name(state: TaskState) -> String {
    match state {
        TaskState::Alive => "alive".into(),
        TaskState::Stopped => "stopped".into(),
        // CRIU has two numbers for this state.
        TaskState::Zombie | TaskState::Dead => "zombie".into(),
        TaskState::Unknown(number) => format!("unknown {number}"),
    }
}

/// A name of an image, which may have any bytes, as text.
fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

fn real_path(image: &ImageDir) -> String {
    let path = image.path();
    path.canonicalize().unwrap_or_else(|_| path.to_path_buf()).display().to_string()
}

fn bytes(vmas: &[Vma], wanted: impl Fn(&Vma) -> bool) -> u64 {
    // Cannot overflow: mappings do not overlap.
    vmas.iter().filter(|vma| wanted(vma)).map(|vma| vma.end - vma.start).sum()
}

/// Returns the mappings with their pages, then the guards inside them.
fn vma_reports(mm: &Mm, map: Option<&Pagemap>) -> Vec<VmaReport> {
    let mut entries = map.map_or(&[][..], |map| &map.entries);
    let report = |vma: &Vma, lazy_able, pages, lazy_pages| VmaReport {
        start: vma.start,
        end: vma.end,
        bytes: vma.end - vma.start,
        kind: vma.kind(),
        prot: vma.prot,
        lazy_able,
        pages,
        lazy_pages,
    };
    let with_pages = |vma: &Vma| {
        let (mut pages, mut lazy_pages) = (0, 0);
        while let Some((entry, rest)) = entries.split_first() {
            let (start, end) = (entry.vaddr.max(vma.start), entry.end().min(vma.end));
            if start < end {
                pages += (end - start) / PAGE;
                lazy_pages += if entry.flags.has(PageFlags::LAZY) { (end - start) / PAGE } else { 0 };
            }
            if entry.end() > vma.end {
                break;
            }
            entries = rest;
        }
        report(vma, vma.can_be_lazy(), pages, lazy_pages)
    };
    let mut reports: Vec<_> = mm.vmas.iter().map(with_pages).collect();
    reports.extend(mm.guards.iter().map(|guard| report(guard, false, 0, 0)));
    reports
}

/// Returns each task after its parent, with its depth. Tasks that descend from themselves are last: only a
/// damaged image has such tasks.
fn in_tree_order(tasks: Vec<Task>) -> Vec<(Task, usize)> {
    let index: HashMap<u32, usize> = tasks.iter().enumerate().map(|(at, task)| (task.pid, at)).collect();
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); tasks.len()];
    let mut roots = Vec::new();
    for (at, task) in tasks.iter().enumerate() {
        match index.get(&task.ppid) {
            Some(parent) => children[*parent].push(at),
            None => roots.push(at),
        }
    }
    let mut tasks: Vec<_> = tasks.into_iter().map(Some).collect();
    let mut ordered = Vec::with_capacity(tasks.len());
    let mut stack: Vec<_> = roots.into_iter().rev().map(|at| (at, 0)).collect();
    while let Some((at, depth)) = stack.pop() {
        ordered.extend(tasks[at].take().map(|task| (task, depth)));
        stack.extend(children[at].iter().rev().map(|child| (*child, depth + 1)));
    }
    ordered.extend(tasks.into_iter().flatten().map(|task| (task, 0)));
    ordered
}
