// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the report as tables.

use std::io::{self, Write};

use rewake_criu_images::PAGE;
use rewake_process::names;

use super::{InspectReport, Pages, TaskReport, Verdict, VmaReport, gpu};
use rewake_streamer::units;

/// Levels of the tree that are indented; deeper ones are indented as the last.
const MAX_INDENT: usize = 16;

/// Writes the tables, with the mappings if `vmas`.
///
/// # Errors
/// A write to `out` fails.
pub fn write(report: &InspectReport, vmas: bool, out: &mut impl Write) -> io::Result<()> {
    header(report, out)?;
    tasks(report, out)?;
    if vmas {
        report.tasks.iter().try_for_each(|task| mappings(task, out))?;
    }
    gpu::text::write(&report.gpu, out)?;
    files(report, out)?;
    for damage in &report.damage {
        writeln!(out, "damage: {}", printable(damage))?;
    }
    Ok(())
}

/// The most parents that are shown.
const MOST_PARENTS: usize = 8;

fn header(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "image:   {}", printable(&report.images_dir))?;
    // The nearest ones and the last one say which image lacks something.
    let parents = &report.parent_dirs;
    let shown = if parents.len() > MOST_PARENTS { MOST_PARENTS - 1 } else { parents.len() };
    for parent in &parents[..shown] {
        writeln!(out, "parent:  {}", printable(parent))?;
    }
    if let Some(last) = parents.last().filter(|_| shown < parents.len()) {
        writeln!(out, "         ... and {} more", parents.len() - MOST_PARENTS)?;
        writeln!(out, "parent:  {}", printable(last))?;
    }
    if let Some(id) = &report.image_id {
        writeln!(out, "image:   {id}")?;
    }
    if let Some(signed_by) = &report.signed_by {
        writeln!(out, "signed:  {}", printable(signed_by))?;
    }
    if let Some(run_id) = &report.run_id {
        writeln!(out, "run id:  {}", printable(run_id))?;
    }
    if !report.plugins.is_empty() {
        writeln!(out, "plugins: {}", printable(&report.plugins.join(", ")))?;
    }
    let pages = &report.totals.pages;
    let answer = match report.lazy.verdict {
        Verdict::Yes => "yes",
        Verdict::NeedsPageServer => "with a page server only",
        Verdict::NotHere => "not on this machine",
        Verdict::No => "no",
    };
    write!(out, "lazily:  {answer}")?;
    match &report.lazy.reason {
        Some(reason) => writeln!(out, ": {reason}")?,
        None => {
            writeln!(out, ": {} of {} are loaded while the tasks run", size(pages.lazy), size(pages.total))?;
        }
    }
    writeln!(out)
}

fn tasks(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "{:>10}  {:<10} {:>7} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}  COMMAND",
        "PID", "STATE", "THREADS", "MAPPED", "DUMPED", "LAZY", "EAGER", "PRESENT", "PARENT", "REMOTE", "ZERO"
    )?;
    for task in &report.tasks {
        let without = if task.state.as_deref() == Some("zombie") { "-" } else { "?" };
        let mapped = task.mapped_bytes.map_or_else(|| without.into(), cell);
        write!(out, "{:>10}  ", task.pid)?;
        write!(out, "{:<10} ", task.state.as_deref().unwrap_or("?"))?;
        row(task.threads.len(), &mapped, task.pages.as_ref(), without, out)?;
        let indent = 2 * task.depth.min(MAX_INDENT);
        writeln!(out, "  {:indent$}{}", "", printable(task.comm.as_deref().unwrap_or("?")))?;
    }
    let totals = &report.totals;
    write!(out, "{:>10}  {:<10} ", "total", format!("{} tasks", totals.tasks))?;
    row(totals.threads, &cell(totals.mapped_bytes), Some(&totals.pages), "?", out)?;
    writeln!(out, "\n")
}

/// Writes the columns that tasks and totals share.
fn row(
    threads: usize,
    mapped: &str,
    pages: Option<&Pages>,
    without: &str,
    out: &mut impl Write,
) -> io::Result<()> {
    write!(out, "{threads:>7} {mapped:>10}")?;
    let Some(pages) = pages else { return (0..7).try_for_each(|_| write!(out, " {without:>10}")) };
    let Pages { total, lazy, eager, present, parent, remote, zero } = *pages;
    for pages in [total, lazy, eager, present, parent, remote].map(Some).into_iter().chain([zero]) {
        write!(out, " {:>10}", pages.map_or_else(|| "?".into(), size))?;
    }
    Ok(())
}

fn mappings(task: &TaskReport, out: &mut impl Write) -> io::Result<()> {
    let Some(vmas) = &task.vmas else { return Ok(()) };
    writeln!(out, "mappings of {} ({})", task.pid, printable(task.comm.as_deref().unwrap_or("?")))?;
    writeln!(
        out,
        "{:>16}-{:<16} {:>10}  {:<12} PROT  {:<9} {:>10} {:>10}",
        "START", "END", "SIZE", "KIND", "LAZY-ABLE", "DUMPED", "LAZY"
    )?;
    for vma in vmas {
        let VmaReport { start, end, bytes, kind, prot, lazy_able, pages, lazy_pages } = vma;
        let (length, prot) = (units::bytes(*bytes), protection(*prot));
        let lazy_able = if *lazy_able { "yes" } else { "no" };
        let (pages, lazy) = (size(*pages), size(*lazy_pages));
        writeln!(
            out,
            "{start:>16x}-{end:<16x} {length:>10}  {kind:<12} {prot:<4}  {lazy_able:<9} {pages:>10} \
             {lazy:>10}"
        )?;
    }
    writeln!(out)
}

/// Writes a line for each pages file, and one for all other files.
fn files(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    let (pages, others): (Vec<_>, Vec<_>) =
        report.files.iter().partition(|file| file.name.starts_with("pages-"));
    for file in pages {
        let owner = file.task.map_or_else(String::new, |pid| format!("  task {pid}"));
        writeln!(out, "{:>10}  {}{owner}", units::bytes(file.bytes), printable(&file.name))?;
    }
    let bytes = others.iter().fold(0, |sum, file| u64::saturating_add(sum, file.bytes));
    writeln!(out, "{:>10}  {} other image files", cell(bytes), others.len())
}

/// Formats PROT_* flags as `rwx`.
#[must_use]
pub fn protection(prot: u32) -> String {
    [(1, 'r'), (2, 'w'), (4, 'x')]
        .map(|(bit, letter)| if prot & bit == 0 { '-' } else { letter })
        .iter()
        .collect()
}

/// Formats a number of pages as bytes.
fn size(pages: u64) -> String {
    cell(pages.saturating_mul(PAGE))
}

/// Formats bytes for a column of sizes. Zero has no unit, so that it is easy to see.
pub(super) fn cell(bytes: u64) -> String {
    if bytes == 0 { "0".into() } else { units::bytes(bytes) }
}

/// Escapes control characters in text of an image or a path: it must not move the terminal's cursor.
fn printable(text: &str) -> String {
    names::printable(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_an_image_do_not_reach_the_terminal() {
        assert_eq!(printable("a\u{1b}[2J\nb é"), "a\\u{1b}[2J\\nb é");
    }

    #[test]
    fn protection_is_three_letters() {
        assert_eq!([0, 1, 3, 5, 7].map(protection), ["---", "r--", "rw-", "r-x", "rwx"]);
    }
}
