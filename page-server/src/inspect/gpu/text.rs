// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the GPU part as tables.

use std::io::{self, Write};

use super::super::text::cell;
use super::{BufferReport, GpuReport, KernelReport, ProcessReport, RenderBufferReport, RenderReport};

/// How many buffers of a process are shown: the largest ones.
const LARGEST: usize = 8;

/// Writes the tables, or nothing if the image has no GPU part.
///
/// # Errors
/// A write to `out` fails.
pub(in crate::inspect) fn write(report: &GpuReport, out: &mut impl Write) -> io::Result<()> {
    if report.is_empty() {
        return Ok(());
    }
    for process in &report.processes {
        writeln!(out, "GPU state of {} ({})", process.pid, process.file)?;
        gpus(process, out)?;
        kinds(process, out)?;
        largest(process, out)?;
        match &process.kernel {
            Some(kernel) => of_kernel(process, kernel, out)?,
            None => writeln!(out, "queues, events and ranges: ?")?,
        }
        writeln!(out)?;
    }
    report.render_nodes.iter().try_for_each(|node| render_node(node, out))?;
    for dmabuf in &report.dmabufs {
        writeln!(out, "dma-buf of {}: buffer {}", dmabuf.file, dmabuf.handle)?;
    }
    if report.processes.is_empty() || !report.render_nodes.is_empty() || !report.dmabufs.is_empty() {
        writeln!(out)?;
    }
    Ok(())
}

fn gpus(process: &ProcessReport, out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "{:>10} {:>8} {:>8} {:>10} {:>8} {:>10} {:>10}",
        "GPU", "DEVICE", "RENDER", "VRAM", "BUFFERS", "CONTENTS", "ZERO"
    )?;
    for gpu in &process.gpus {
        let (id, device) = (format!("{:#x}", gpu.gpu_id), format!("{:#x}", gpu.device_id));
        let (vram, contents, zero) =
            (cell(gpu.vram_bytes), cell(gpu.content_bytes), known(gpu.zero_bytes, "?"));
        writeln!(
            out,
            "{id:>10} {device:>8} {:>8} {vram:>10} {:>8} {contents:>10} {zero:>10}",
            gpu.render_minor, gpu.buffers
        )?;
    }
    Ok(())
}

fn kinds(process: &ProcessReport, out: &mut impl Write) -> io::Result<()> {
    if process.kinds.is_empty() {
        return Ok(());
    }
    writeln!(out, "{:>10} {:>8} {:>10} {:>10}", "KIND", "BUFFERS", "SIZE", "ZERO")?;
    for sum in &process.kinds {
        let zero = known(sum.zero_bytes, "-");
        writeln!(out, "{:>10} {:>8} {:>10} {zero:>10}", sum.kind.name(), sum.buffers, cell(sum.bytes))?;
    }
    Ok(())
}

fn largest(process: &ProcessReport, out: &mut impl Write) -> io::Result<()> {
    let mut buffers: Vec<&BufferReport> = process.buffers.iter().collect();
    // A stable sort: buffers of one size keep the image's order.
    buffers.sort_by_key(|buffer| std::cmp::Reverse(buffer.bytes));
    buffers.truncate(LARGEST);
    if buffers.is_empty() {
        return Ok(());
    }
    let title = if process.buffers.len() > LARGEST { "LARGEST" } else { "BUFFERS" };
    writeln!(out, "{title:>10} {:>8} {:>10} {:>10}  ADDRESS", "GPU", "SIZE", "ZERO")?;
    for buffer in buffers {
        let (gpu, size, zero) =
            (format!("{:#x}", buffer.gpu_id), cell(buffer.bytes), known(buffer.zero_bytes, "-"));
        writeln!(out, "{:>10} {gpu:>8} {size:>10} {zero:>10}  {:#x}", buffer.kind.name(), buffer.address)?;
    }
    Ok(())
}

fn of_kernel(process: &ProcessReport, kernel: &KernelReport, out: &mut impl Write) -> io::Result<()> {
    if !kernel.queues.is_empty() {
        writeln!(
            out,
            "{:>10} {:>8} {:>12} {:>10} {:>8} {:>8} {:>10}",
            "QUEUE", "GPU", "KIND", "RING", "PERCENT", "PRIORITY", "PENDING"
        )?;
    }
    for queue in &kernel.queues {
        let (gpu, ring) = (format!("{:#x}", queue.gpu_id), cell(queue.ring_bytes));
        writeln!(
            out,
            "{:>10} {gpu:>8} {:>12} {ring:>10} {:>8} {:>8} {:>10}",
            queue.id,
            queue.kind,
            queue.percent,
            queue.priority,
            known(queue.pending_bytes, "?")
        )?;
    }
    let ranges = kernel.svm_ranges.iter().fold(0, |sum, range| u64::saturating_add(sum, range.bytes));
    writeln!(
        out,
        "events: {}, {} signalled; SVM ranges: {}, {}; shared memory: {}; retried page faults: {}",
        kernel.events,
        kernel.events_signalled,
        kernel.svm_ranges.len(),
        cell(ranges),
        cell(process.shared_memory_bytes),
        if kernel.xnack { "yes" } else { "no" }
    )
}

fn render_node(node: &RenderReport, out: &mut impl Write) -> io::Result<()> {
    write!(out, "render node of {}: GPU {:#x}", node.file, node.gpu_id)?;
    let (Some(minor), Some(buffers)) = (node.minor, &node.buffers) else {
        return writeln!(out, "; the image has no other state of it");
    };
    writeln!(out, ", /dev/dri/renderD{minor}; buffers: {}", buffers.len())?;
    buffers.iter().try_for_each(|buffer| render_buffer(buffer, out))
}

fn render_buffer(buffer: &RenderBufferReport, out: &mut impl Write) -> io::Result<()> {
    let (size, zero) = (cell(buffer.bytes), known(buffer.zero_bytes, "-"));
    let imported = if buffer.imported { ", imported" } else { "" };
    writeln!(
        out,
        "{:>10} {:>8} {size:>10} {zero:>10}  mapped {} times{imported}",
        buffer.kind.name(),
        buffer.handle,
        buffer.mappings
    )
}

/// Formats a number of bytes, or the mark for an unknown one.
fn known(bytes: Option<u64>, unknown: &str) -> String {
    bytes.map_or_else(|| unknown.to_owned(), cell)
}
