// SPDX-License-Identifier: MIT OR Apache-2.0
//! Images whose authors have chosen hostile links: no copy is made that reads another image, and a server
//! gives out no image of another folder.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rewake_criu_images::Digest;
use rewake_image_transfer::pull::pull;
use rewake_image_transfer::server::exports::{Exports, ImageDirectory, PeerRights};
use rewake_manifest::{seal, verify};

use crate::scene::{Scene, inventory};

/// A sealed image with this link to its parent.
fn image(at: &Path, run: u8, parent: Option<&Path>) -> Digest {
    fs::create_dir_all(at).unwrap();
    inventory(at, run);
    if let Some(parent) = parent {
        symlink(parent, at.join("parent")).unwrap();
    }
    seal(at).unwrap().id
}

/// Pulls the image `web/2`, whose parent is in `target`, into `copies/2`. Returns why that is refused.
fn refusal(scene: &Scene, target: &Path) -> String {
    let child = scene.dir.path().join("exports/web/2");
    let _ = fs::remove_dir_all(&child);
    image(&child, 2, Some(target));
    let copy = scene.dir.path().join("copies/2");
    let error = pull(&mut scene.source("web/2", usize::MAX).unwrap().0, &copy, None, &[]).unwrap_err();
    assert!(copy.join("parent").symlink_metadata().is_err(), "a link is left: {error:#}");
    assert!(!copy.join("rewake-manifest").exists());
    fs::remove_dir_all(&copy).unwrap();
    format!("{error:#}")
}

#[test]
fn a_parent_is_copied_beside_its_child_or_it_is_refused() {
    let scene = Scene::new();
    let at = |name: &str| scene.dir.path().join(name);
    // What the author wants read: it is where the link leads, seen from the copy as well.
    let private = at("private");
    image(&private, 9, None);
    image(&at("b/secret"), 9, None);
    image(&at("exports/b/secret"), 9, None);
    fs::create_dir(at("copies")).unwrap();
    for target in [Path::new("../../b/secret"), Path::new(".././../b/secret"), &private] {
        let error = refusal(&scene, target);
        assert!(error.contains("only a directory beside the image itself is followed"), "{error}");
    }
    // A neighbour that is a link, or has one on the way.
    image(&at("exports/web/near"), 9, None);
    symlink(&private, at("copies/near")).unwrap();
    let error = refusal(&scene, Path::new("../near"));
    assert!(error.contains("copy the parent image to"), "{error}");
    image(&at("exports/web/links/secret"), 9, None);
    symlink("../b", at("copies/links")).unwrap();
    let error = refusal(&scene, Path::new("../links/secret"));
    assert!(error.contains("copy the parent image to"), "{error}");
    // Another image where the parent was.
    image(&at("copies/1"), 3, None);
    let error = refusal(&scene, Path::new("../1"));
    assert!(error.contains("expected image") && error.contains("copy the parent image to"), "{error}");
    // The same image as a true neighbour.
    fs::remove_file(at("copies/near")).unwrap();
    fs::rename(&private, at("copies/near")).unwrap();
    let child = at("exports/web/2");
    fs::remove_dir_all(&child).unwrap();
    image(&child, 2, Some(Path::new("../near")));
    pull(&mut scene.source("web/2", usize::MAX).unwrap().0, &at("copies/2"), None, &[]).unwrap();
    verify(&at("copies/2"), |difference| panic!("{difference}")).unwrap();
}

#[test]
fn a_parent_without_an_id_is_refused() {
    let scene = Scene::new();
    for exports in ["exports/web", "copies"] {
        let parent = scene.dir.path().join(exports).join("0");
        fs::create_dir_all(&parent).unwrap();
        inventory(&parent, 9);
    }
    let error = refusal(&scene, Path::new("../0"));
    assert!(error.contains("no id names that image"), "{error}");
    // Sealed by now, so that there is an image: which one the child was made with is still not known.
    seal(&scene.dir.path().join("copies/0")).unwrap();
    let error = refusal(&scene, Path::new("../0"));
    assert!(error.contains("no id names that image"), "{error}");
}

/// Images of two tenants, `a` and `b`. A client may read the images of `a`.
struct Tenants {
    dir: tempfile::TempDir,
    exports: Exports,
}

impl Tenants {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        image(&dir.path().join("private"), 9, None);
        image(&root.join("b/secret"), 8, None);
        image(&root.join("a/base"), 7, None);
        image(&root.join("a/child"), 6, Some(Path::new("../base")));
        let exports = Exports::new(Arc::new(ImageDirectory::new(&root).unwrap()));
        Self { dir, exports: exports.permitted(PeerRights::Folders(vec!["a".into()])) }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join("root").join(name)
    }

    fn open(&self, name: &str, ancestor: u32) -> Result<Digest, String> {
        self.exports.open(name, ancestor).map(|image| image.id()).map_err(|error| format!("{error:#}"))
    }

    fn everything(&self) -> Exports {
        self.exports.permitted(PeerRights::All)
    }
}

#[test]
fn a_link_gives_no_right_to_the_image_that_it_leads_to() {
    let tenants = Tenants::new();
    let base = tenants.open("a/base", 0).unwrap();
    assert_eq!(tenants.open("a/child", 1).unwrap(), base);
    assert_eq!(tenants.open("a/child/parent", 0).unwrap(), base);
    let private = tenants.dir.path().join("private");
    symlink("../b/secret", tenants.at("a/alias")).unwrap();
    let targets =
        [Path::new("../../b/secret"), Path::new("../../b/nothing"), Path::new("../alias"), &private];
    for (number, target) in targets.into_iter().enumerate() {
        let name = format!("a/evil{number}");
        image(&tenants.at(&name), 5, Some(target));
        tenants.open(&name, 0).unwrap();
        assert_eq!(
            tenants.open(&name, 1).unwrap_err(),
            format!("image {name}: it has no ancestor 1 that this client may read")
        );
        let through = format!("{name}/parent");
        let refused = tenants.open(&through, 0).unwrap_err();
        assert!(refused.ends_with("permits this client's certificate to read a only"), "{refused}");
    }
    // A client of all images does not leave the directory either.
    let everything = tenants.everything();
    everything.open("a/evil0", 1).unwrap();
    everything.open("a/evil0/parent", 0).unwrap();
    for (name, ancestor) in [("a/evil3", 1), ("a/evil3/parent", 0)] {
        let refused = format!("{:#}", everything.open(name, ancestor).err().unwrap());
        assert!(refused.contains("leads out of the directory with the images"), "{refused}");
    }
}

#[test]
fn a_parent_that_another_image_has_replaced_is_not_served() {
    let tenants = Tenants::new();
    fs::remove_dir_all(tenants.at("a/base")).unwrap();
    let other = image(&tenants.at("a/base"), 4, None);
    assert_eq!(tenants.open("a/base", 0).unwrap(), other);
    tenants.open("a/child", 1).unwrap_err();
    let refused = format!("{:#}", tenants.everything().open("a/child", 1).err().unwrap());
    assert!(refused.contains(&format!("its parent is image {other}, expected ")), "{refused}");
}

#[test]
fn a_file_that_is_a_link_is_read_where_the_client_may_read() {
    let tenants = Tenants::new();
    for name in ["a/base", "b/secret"] {
        fs::remove_file(tenants.at(name).join("rewake-manifest")).unwrap();
        fs::write(tenants.at(name).join("pages-1.img"), [7; 4096]).unwrap();
        seal(&tenants.at(name)).unwrap();
    }
    let pages = tenants.at("a/base/pages-1.img");
    let read = |target: &Path| {
        fs::remove_file(&pages).unwrap();
        symlink(target, &pages).unwrap();
        let begin = |exports: &Exports| exports.open("a/base", 0)?.begin(2, 0..1);
        (begin(&tenants.exports).is_ok(), begin(&tenants.everything()).is_ok())
    };
    fs::write(tenants.at("a/stored"), [7; 4096]).unwrap();
    assert_eq!(read(Path::new("../stored")), (true, true));
    assert_eq!(read(Path::new("../../b/secret/pages-1.img")), (false, true));
    let outside = tenants.dir.path().join("outside");
    fs::write(&outside, [7; 4096]).unwrap();
    assert_eq!(read(&outside), (false, false));
}

#[test]
fn a_parent_that_is_exchanged_all_the_time_is_never_another_tenants() {
    /// Requests that were answered with the parent, and that were refused.
    const ANSWERED: usize = 50;
    let tenants = Tenants::new();
    let base = tenants.open("a/base", 0).unwrap();
    let is_done = AtomicBool::new(false);
    let (link, new) = (tenants.at("a/child/parent"), tenants.at("a/new"));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                for target in ["../base", "../../b/secret"] {
                    symlink(target, &new).unwrap();
                    fs::rename(&new, &link).unwrap();
                }
            }
        });
        let (mut answered, mut refused, mut wrong) = (0, 0, None);
        while wrong.is_none() && (answered < ANSWERED || refused < ANSWERED) {
            for (name, ancestor) in [("a/child", 1), ("a/child/parent", 0)] {
                match tenants.open(name, ancestor) {
                    Ok(id) if id == base => answered += 1,
                    Ok(id) => wrong = Some(id),
                    Err(_) => refused += 1,
                }
            }
        }
        // The other thread ends before this one asserts anything.
        is_done.store(true, Ordering::Relaxed);
        assert_eq!(wrong, None);
    });
}

#[test]
fn the_folder_of_a_right_may_be_a_link() {
    let tenants = Tenants::new();
    symlink("a", tenants.at("current")).unwrap();
    let exports = tenants.exports.permitted(PeerRights::Folders(vec!["current".into()]));
    exports.open("current/base", 0).unwrap();
    exports.open("current/child", 1).unwrap();
    assert!(exports.open("a/base", 0).is_err());
}
