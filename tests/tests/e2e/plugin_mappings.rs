// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mappings of one device of which a plugin restores some as placeholders, and the userfaultfd that watches
//! those: the basis of `docs/decisions/0010-placeholders.md`.

use std::fs::{self, File};
use std::io::{IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::unistd::Pid;
use rewake_tests::pattern::{BASE, PAGE};
use rewake_tests::plugins::{Rig, placeholders};
use rewake_tests::{Criu, Verdict, need};
use rewake_uffd::abi::{self, Api, FEATURES_CRIU, UFFD_API};
use rewake_uffd::{FillPort, Message, RawMessage, Uffd, address_space_ended};

/// Pages of each mapping of the target.
const PAGES: usize = 8;
/// Mappings of the target, in the order of their offsets.
const COUNT: usize = 10;
/// The mapping that forks do not inherit.
const NOT_FOR_CHILDREN: usize = 4;
/// Offset of the device's first byte in the placeholders' file.
const SHIFT: u64 = 16 << 20;

/// One mapping: a line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    start: u64,
    end: u64,
    rights: String,
    offset: u64,
    name: String,
}

impl Line {
    fn parse(line: &str) -> Self {
        let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let mut words = line.split_whitespace();
        let (start, end) = words.next().unwrap().split_once('-').unwrap();
        let (rights, offset) = (words.next().unwrap().to_owned(), hex(words.next().unwrap()));
        let name = words.nth(2).unwrap_or_default().to_owned();
        Self { start: hex(start), end: hex(end), rights, offset, name }
    }

    fn is_placeholder(&self) -> bool {
        self.name.starts_with("/memfd:placeholders")
    }
}

/// All mappings of a process.
fn maps(pid: Pid) -> Vec<Line> {
    fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().map(Line::parse).collect()
}

/// The target's mappings of its device.
fn of_the_device(maps: &[Line]) -> Vec<Line> {
    let places = BASE as u64 + (1 << 36)..BASE as u64 + ((COUNT as u64 + 1) << 36);
    maps.iter().filter(|line| places.contains(&line.start)).cloned().collect()
}

/// The open files of a process, sorted by name.
fn open_files(pid: Pid) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let mut files: Vec<_> = entries.map(|entry| fs::read_link(entry.unwrap().path()).unwrap()).collect();
    files.sort();
    files
}

/// Whether `fork` leaves out the mapping that starts at `start`.
fn is_not_for_children(pid: Pid, start: u64) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut lines = text.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-")));
    let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
    flags.split(' ').any(|flag| flag == "dc")
}

/// What the server of one restore saw until the target ended.
#[derive(Debug)]
struct Seen {
    /// All mappings when the placeholders were registered: before CRIU resumed the task.
    late: Vec<Line>,
    faults: usize,
    events: Vec<Message>,
}

/// Receives the userfaultfd that the plugin made in the task, and initialises it. Registers the placeholders
/// when the plugin asks for that in CRIU's main process; then fills accessed pages with the device's bytes.
fn serve(listener: &UnixListener, device: &File) -> Seen {
    let uffd = userfaultfd_of(&listener.accept().unwrap().0);
    let mut wanted = Api { api: UFFD_API, features: FEATURES_CRIU, ioctls: 0 };
    abi::api(uffd.as_fd(), &mut wanted).expect("events of fork, mremap, madvise and munmap");
    let uffd = Uffd::adopt(uffd).unwrap();

    let mut socket = listener.accept().unwrap().0;
    let mut message = [0; 5];
    socket.read_exact(&mut message).unwrap();
    assert_eq!(message[0], b'l');
    let late = maps(Pid::from_raw(i32::from_ne_bytes(message[1..].try_into().unwrap())));
    for line in late.iter().filter(|line| line.is_placeholder()) {
        uffd.register_missing(line.start, line.end - line.start).unwrap();
    }
    socket.write_all(b"\n").unwrap();

    let mut seen = Seen { late, faults: 0, events: Vec::new() };
    while !address_space_ended(uffd.as_fd()) {
        let mut slots = [RawMessage::default(); 16];
        let count = uffd.read(&mut slots).unwrap();
        for message in slots[..count].iter().filter_map(RawMessage::decode) {
            match message {
                Message::Fault { address } => {
                    fill(&uffd, address, &seen.late, device);
                    seen.faults += 1;
                }
                event => seen.events.push(event),
            }
        }
        thread::sleep(Duration::from_micros(200));
    }
    seen
}

fn fill(uffd: &Uffd, address: u64, maps: &[Line], device: &File) {
    let line = maps.iter().find(|line| (line.start..line.end).contains(&address)).unwrap();
    let mut page = [0; PAGE];
    device.read_exact_at(&mut page, address - line.start + line.offset - SHIFT).unwrap();
    assert!(uffd.copy(address, &page).complete(PAGE as u64));
}

fn userfaultfd_of(socket: &UnixStream) -> OwnedFd {
    let (mut byte, mut space) = ([0], nix::cmsg_space!(i32));
    let mut parts = [IoSliceMut::new(&mut byte)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let got = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags).unwrap();
    let fd = got.cmsgs().unwrap().find_map(|message| match message {
        ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
        _ => None,
    });
    // SAFETY: the kernel has made this descriptor for the message, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd.expect("a descriptor")) }
}

/// Restores with placeholders for the mappings in the set `chosen`, and lets the target read everything.
fn restored_with(rig: &Rig, chosen: usize, before: &[Line]) {
    for name in ["server", "files/go", "files/verdict"] {
        let _ = fs::remove_file(rig.path(name));
    }
    let socket = rig.path("server");
    let listener = UnixListener::bind(&socket).unwrap();
    let device = File::open(rig.device()).unwrap();
    let server = thread::spawn(move || serve(&listener, &device));
    let (set, socket) = (chosen.to_string(), socket.display().to_string());
    rig.restore(&[("PLACEHOLDERS", &set), ("PLACEHOLDERS_SERVER", &socket)]).unwrap();

    let all = maps(rig.pid());
    let wanted = before.iter().enumerate().map(|(number, line)| match chosen >> number & 1 {
        1 => Line { offset: SHIFT + line.offset, name: "/memfd:placeholders".to_owned(), ..line.clone() },
        _ => line.clone(),
    });
    assert_eq!(of_the_device(&all), wanted.collect::<Vec<_>>(), "placeholders {chosen:#b}");
    assert!(is_not_for_children(rig.pid(), before[NOT_FOR_CHILDREN].start));
    let null = Path::new("/dev/null");
    assert_eq!(open_files(rig.pid()), [rig.device(), null, null, null], "nothing of the plugin's stays open");

    assert_eq!(rig.verdict().unwrap(), Verdict::Ok);
    let seen = server.join().unwrap();
    assert_eq!(seen.late, all, "no mapping changes after RESUME_DEVICES_LATE");
    assert_eq!(seen.faults, chosen.count_ones() as usize * PAGES);
    assert_eq!(seen.events, []);
}

fn any_mix_of_placeholders(criu: Result<Criu, String>) {
    let criu = need!(criu);
    let mut rig = need!(Rig::new(&criu, "mappings", &[placeholders().unwrap()]).unwrap());
    let before = of_the_device(&maps(rig.pid()));
    assert_eq!(before.len(), COUNT);
    rig.dump(&[]).unwrap();
    for chosen in [0b11_1111_1111, 0b01_0101_0101, 0b10_1010_1010, 0b00_0100_0000] {
        restored_with(&rig, chosen, &before);
    }
}

#[test]
fn each_mapping_of_a_device_gets_its_own_file() {
    any_mix_of_placeholders(Criu::main());
}

#[test]
fn each_mapping_of_a_device_gets_its_own_file_in_another_criu() {
    any_mix_of_placeholders(Criu::alternative());
}
