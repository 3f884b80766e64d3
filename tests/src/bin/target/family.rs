// SPDX-License-Identifier: MIT OR Apache-2.0
//! Several threads or processes.

use anyhow::{Context, ensure};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use rewake_tests::Random;
use rewake_tests::pattern::{BASE, Pattern};

use crate::memory::{Expect, Region, fork};
use crate::stage::Stage;

/// Threads that check regions of their own, and one region together.
pub(crate) fn threads(stage: &Stage) -> anyhow::Result<()> {
    let shared = stage.filled()?;
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for number in 1..=4 {
            workers.push(scope.spawn(move || own_region(stage, number, shared)));
        }
        while std::fs::read_dir(&stage.dir)?.count() < workers.len() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        stage.ready_then_go()?;
        shared.check_all(stage);
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|_| panic!("a thread died")))
    })
}

/// The first thread ends, and another one reads the memory: the process lives on, and its first thread is a
/// zombie.
pub(crate) fn first_thread_ends(stage: &'static Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    stage.ready_then_go()?;
    std::thread::spawn(move || {
        region.check_all(stage);
        stage.end(Ok(()));
        std::process::exit(stage.status().into());
    });
    // SAFETY: it ends this thread alone; its stack stays mapped.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    unreachable!("the thread has ended")
}

fn own_region(stage: &Stage, number: usize, shared: Region) -> anyhow::Result<()> {
    let seed = stage.seed + number as u64;
    let own = Region::map(BASE + (number << 36), stage.pages / 4, Pattern::new(seed))?;
    own.fill_all();
    std::fs::File::create(stage.dir.join(format!("thread-{number}")))?;
    stage.wait_for_go();
    let mut random = Random::new(seed);
    for page in random.shuffled(shared.pages) {
        shared.check(stage, page, Expect::Of(shared.pattern, page));
        own.check(stage, page % own.pages, Expect::Of(own.pattern, page % own.pages));
    }
    Ok(())
}

/// A parent, three children, and a grandchild each; every process has written to memory of its own.
pub(crate) fn tree(stage: &Stage) -> anyhow::Result<()> {
    let inherited = stage.filled()?;
    let mut children = Vec::new();
    for number in 1..=3 {
        children.push(fork(|| {
            let child = fork(|| tree_member(stage, number + 10, inherited));
            let status = tree_member(stage, number, inherited);
            child.map_or(2, |child| collect(stage, &[child], 0)).max(status)
        })?);
    }
    while std::fs::read_dir(&stage.dir)?.count() < 6 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    stage.ready_then_go()?;
    inherited.check_all(stage);
    expect_all(stage, &children)
}

fn tree_member(stage: &Stage, number: u64, inherited: Region) -> u8 {
    let own = Region { pattern: Pattern::new(stage.seed + number), pages: inherited.pages / 2, ..inherited };
    own.fill_all();
    if std::fs::File::create(stage.dir.join(format!("member-{number}"))).is_err() {
        return 2;
    }
    stage.wait_for_go();
    own.check_all(stage);
    inherited.check_from(stage, own.pages, own.pages, inherited.pages - own.pages);
    stage.status()
}

/// A child that is dead before the dump and collected only after the restore.
pub(crate) fn zombies(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    let children = [fork(|| 41)?, fork(|| 42)?];
    for child in children {
        while !is_zombie(child)? {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    stage.ready_then_go()?;
    region.check_all(stage);
    for (child, status) in children.into_iter().zip([41, 42]) {
        let found = waitpid(child, None).context("collect a restored zombie")?;
        ensure!(found == WaitStatus::Exited(child, status), "the zombie says {found:?}");
    }
    Ok(())
}

fn is_zombie(pid: Pid) -> anyhow::Result<bool> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    Ok(stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')))
}

/// Child and grandchild are born while pages are missing; each must see the bytes of the time of its birth,
/// whatever the others write meanwhile.
pub(crate) fn fork_missing(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    stage.ready_then_go()?;
    let third = region.pages / 3;
    let child = fork(|| {
        let grandchild = fork(|| {
            for page in Random::new(stage.seed + 1).shuffled(region.pages) {
                region.check(stage, page, Expect::Of(region.pattern, page));
            }
            stage.status()
        });
        (0..third).for_each(|page| region.write(page, region.pattern.at(1)));
        for page in Random::new(stage.seed).shuffled(region.pages) {
            let generation = u64::from(page < third);
            region.check(stage, page, Expect::Of(region.pattern.at(generation), page));
        }
        grandchild.map_or(2, |grandchild| collect(stage, &[grandchild], 0)).max(stage.status())
    })?;
    for page in third..2 * third {
        region.write(page, region.pattern.at(2));
    }
    for page in 0..region.pages {
        let generation = if (third..2 * third).contains(&page) { 2 } else { 0 };
        region.check(stage, page, Expect::Of(region.pattern.at(generation), page));
    }
    expect_all(stage, &[child])
}

/// Forks children without end, until the test says "stop"; each reads some pages and lives until then.
pub(crate) fn forks_without_end(stage: &Stage) -> anyhow::Result<()> {
    /// More than a streamer has descriptors for, by the test's limit; fewer than fill this machine.
    const CHILDREN: u64 = 7;
    const GLANCES: usize = 16;
    let region = stage.filled()?;
    stage.ready_then_go()?;
    let mut children = Vec::new();
    for number in 0..CHILDREN {
        children.push(fork(|| {
            for page in Random::new(stage.seed + number).shuffled(region.pages).into_iter().take(GLANCES) {
                region.check(stage, page, Expect::Of(region.pattern, page));
            }
            stage.wait_for_stop();
            stage.status()
        })?);
    }
    region.check_all(stage);
    stage.wait_for_stop();
    expect_all(stage, &children)
}

/// Waits for children; the worst of their statuses. A child that was killed counts as lost.
pub(crate) fn collect(stage: &Stage, children: &[Pid], known: u8) -> u8 {
    children.iter().fold(known, |worst, child| match waitpid(*child, None) {
        Ok(WaitStatus::Exited(_, status)) => worst.max(u8::try_from(status).unwrap_or(2)),
        Ok(WaitStatus::Signaled(_, signal @ (Signal::SIGKILL | Signal::SIGBUS), _)) => {
            stage.lost(&format!("child {child} killed by {signal}"));
            worst.max(3)
        }
        // Another signal: wrong bytes in its own memory are the likely cause.
        Ok(WaitStatus::Signaled(_, signal, _)) => {
            stage.bad(&format!("child {child} killed by {signal}"));
            worst.max(1)
        }
        _ => worst.max(2),
    })
}

/// Waits for children that report to the verdict file themselves.
pub(crate) fn expect_all(stage: &Stage, children: &[Pid]) -> anyhow::Result<()> {
    match collect(stage, children, 0) {
        0 => Ok(()),
        1 => {
            stage.bad("a child saw wrong bytes");
            Ok(())
        }
        3 => {
            stage.lost("below a child");
            Ok(())
        }
        status => anyhow::bail!("a child ended with status {status}"),
    }
}
