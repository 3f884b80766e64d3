// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shows the timeline as one page without scripts, fonts or other files.

use std::fmt::Write as _;
use std::time::Duration;

use super::model::{Process, ProcessMemory, Record, State};
use super::plot::{COLOURS, class, plot};
use super::text::{millis, moments};
use crate::units;

/// Faults in the page's table. The JSON has all of them.
const FAULTS: usize = 20;

/// Colours of Open Color, which are visible on white and on near-black.
const STYLE: &str = "\
:root{color-scheme:light dark;--text:#1c1e21;--back:#fff;--soft:#687078;--grid:#dfe3e7;--fault:#e03131;--gate:#2b8a3e;--set:#0c8599}
@media(prefers-color-scheme:dark){:root{--text:#e4e7ea;--back:#15181b;--soft:#98a2ab;--grid:#343a40;--fault:#ff8787;\
--gate:#69db7c;--set:#66d9e8}}
body{margin:0 auto;max-width:60rem;padding:1rem;font:1rem/1.5 system-ui,sans-serif;color:var(--text);background:var(--back)}
h1{font-size:1.3rem;margin:0}h2{font-size:1.05rem;margin:1.5rem 0 .3rem}p{margin:.2rem 0;color:var(--soft)}
.bad{color:var(--fault);font-weight:600;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto;margin:1rem 0 0}text{font-size:15px;fill:var(--soft)}
.end{text-anchor:end}.middle{text-anchor:middle}text.gate{fill:var(--gate)}
.grid{stroke:var(--grid)}line.runs{stroke:var(--soft);stroke-dasharray:2 4}line.gate{stroke:var(--gate);stroke-width:2}
.memory{fill:none;stroke-width:2.5;stroke-linejoin:round}.cpus{stroke-dasharray:8 4}.count{fill:none;stroke:var(--soft);stroke-width:1}
.fault{stroke:var(--fault);stroke-width:3}
.load{fill:none;stroke-width:1.5}.by-fault{stroke:var(--fault)}.by-set{stroke:var(--set)}line.by-set{stroke-width:2}
tspan.by-fault{stroke:none;fill:var(--fault)}tspan.by-set{stroke:none;fill:var(--set)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem .25rem 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
th{font-weight:500;color:var(--soft)}th:first-child,td:first-child{text-align:left}
i{display:inline-block;width:.75em;height:.75em;margin-right:.5em;border-radius:2px}i.cpus{height:.25em;vertical-align:.25em}
@media(max-width:40rem){text{font-size:24px}text.legend{font-size:18px}.memory{stroke-width:5}.fault{stroke-width:6}}
";

/// Colours of lines in the plot and their marks in the table; the last is for all other lines.
const PALETTE: [&str; COLOURS + 1] =
    ["#339af0", "#f76707", "#37b24d", "#ae3ec9", "#f59f00", "#1098ad", "#f06595", "#868e96"];

/// The page.
#[must_use]
pub fn html(record: &Record) -> String {
    let mut page = String::from("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n");
    page.push_str("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n");
    page.push_str("<title>Rewake: memory loaded while the processes run</title>\n<style>\n");
    page.push_str(STYLE);
    for (number, colour) in PALETTE.iter().enumerate() {
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(page, ".c{number}{{stroke:{colour}}}i.c{number}{{background:{colour}}}");
    }
    page.push_str("</style>\n</head>\n<body>\n");
    head(&mut page, record);
    page.push_str(&plot(record));
    memory(&mut page, record);
    processes(&mut page, record);
    faults(&mut page, record);
    page.push_str("</body>\n</html>\n");
    page
}

/// Text, made safe between tags and in attributes.
pub(super) fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            char if char.is_control() => safe.push('?'),
            char => safe.push(char),
        }
    }
    safe
}

fn head(page: &mut String, record: &Record) {
    let (all, there) = record.totals();
    let _ = writeln!(page, "<h1>Memory loaded while the processes run</h1>");
    if let Some(failure) = record.failure() {
        let what = if record.state == State::Failed { "Failed" } else { "Ended early" };
        let _ = writeln!(page, "<p class=\"bad\">{what}: {}</p>", escaped(&failure.reason));
    }
    let _ = writeln!(
        page,
        "<p>{} of {} in {:.1} ms. Times count from the handoff of GPU memory, or from the start of the load of CPU \
         memory.</p>",
        units::bytes(there),
        units::bytes(all),
        millis(record.elapsed_us),
    );
    for (at, what) in moments(record) {
        let _ = writeln!(page, "<p>{:.1} ms: {}</p>", millis(at), escaped(&what));
    }
}

/// A table; `rows` are its cells, escaped.
fn table(page: &mut String, title: &str, columns: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    let _ = write!(page, "<h2>{title}</h2>\n<div class=\"scroll\"><table>\n<tr>");
    for column in columns {
        let _ = write!(page, "<th>{column}</th>");
    }
    page.push_str("</tr>\n");
    for row in rows {
        page.push_str("<tr>");
        for cell in row {
            let _ = write!(page, "<td>{cell}</td>");
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table></div>\n");
}

fn memory(page: &mut String, record: &Record) {
    let row = |(place, of): (usize, &ProcessMemory)| {
        let label = record.process_of(of).map(Process::label).unwrap_or_default();
        let took =
            of.resident_us.unwrap_or(record.elapsed_us).saturating_sub(record.began_us(of.minor.is_none()));
        vec![
            format!("<i class=\"{}\"></i>{}", class(place, of), escaped(&label)),
            of.whose(),
            units::bytes(of.bytes),
            of.resident_us.map_or_else(|| format!("{} %", of.percent()), milliseconds),
            units::rate(of.resident, took.saturating_mul(1000)),
        ]
    };
    let columns = ["process", "memory of", "bytes", "resident after", "rate"];
    table(page, "Memory", &columns, record.memory.iter().enumerate().map(row));
}

fn processes(page: &mut String, record: &Record) {
    let when = |at: Option<u64>| at.map_or_else(|| "-".to_owned(), milliseconds);
    let row = |of: &Process| {
        vec![
            escaped(&of.label()),
            when(of.runs_us),
            of.gone_us.map_or_else(|| when(of.gate_open_us), |at| format!("ended, {}", milliseconds(at))),
            of.faults.to_string(),
            latency(of.longest_fault_us),
            of.page_faults.to_string(),
            latency(of.longest_page_fault_us),
            of.swaps.to_string(),
            latency(of.stopped_us),
        ]
    };
    let columns = [
        "process",
        "runs",
        "gate open",
        "faults in GPU memory",
        "longest",
        "in CPU memory",
        "longest",
        "buffers swapped",
        "stopped for",
    ];
    table(page, "Processes", &columns, record.processes.iter().map(row));
}

fn faults(page: &mut String, record: &Record) {
    if record.longest_faults.is_empty() {
        return;
    }
    let mut longest = record.longest_faults.clone();
    longest.sort_by_key(|fault| std::cmp::Reverse(fault.waited_us));
    let row = |fault: &super::model::Fault| {
        let label = record.processes.get(fault.process).map(Process::label).unwrap_or_default();
        vec![
            escaped(&label),
            latency(fault.waited_us),
            milliseconds(fault.at_us),
            fault.buffer.to_string(),
            format!("{:#x}", fault.address),
        ]
    };
    let columns = ["process", "waited", "at", "buffer", "address"];
    table(page, "Longest faults in GPU memory", &columns, longest.iter().take(FAULTS).map(row));
}

fn milliseconds(micros: u64) -> String {
    format!("{:.1} ms", millis(micros))
}

fn latency(micros: u64) -> String {
    if micros == 0 { "-".to_owned() } else { units::latency(Duration::from_micros(micros)) }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::process::{Command, Stdio};

    use rewake_skip::need;

    use super::super::example;
    use super::*;

    /// Elements of the page that are not closed in their order, or closed without being open.
    fn unbalanced(page: &str) -> Vec<String> {
        let mut open: Vec<String> = Vec::new();
        let mut bad = Vec::new();
        for tag in page.split('<').skip(1).map(|rest| rest.split('>').next().unwrap()) {
            let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap().to_owned();
            if tag.starts_with('!') || tag.ends_with('/') {
            } else if !tag.starts_with('/') {
                open.push(name);
            } else if open.pop() != Some(name) {
                bad.push(tag.to_owned());
            }
        }
        bad.extend(open);
        bad
    }

    #[test]
    fn every_element_is_closed_and_every_character_is_meant() {
        let page = html(&example::record());
        assert_eq!(unbalanced(&page), Vec::<String>::new());
        assert_eq!(page.matches('<').count(), page.matches('>').count());
        assert_eq!(unbalanced("<p><b></p>"), ["/p", "p"], "the check finds unbalanced tags");
    }

    #[test]
    fn it_needs_nothing_else() {
        let page = html(&example::record());
        for other in ["http", "<script", "src=", "href=", "@import", "url("] {
            assert!(!page.contains(other), "{other}");
        }
    }

    #[test]
    fn names_are_names_and_nothing_more() {
        let page = html(&example::record());
        assert!(!page.contains("<b>") && page.contains("4712 &lt;b&gt;&quot;rank&quot; &amp; 1"), "{page}");
        assert_eq!(escaped("a'\u{1b}\""), "a&#39;?&quot;");
    }

    #[test]
    fn a_failure_is_at_the_top() {
        let mut record = example::record();
        (record.state, record.reason) = (State::Failed, Some("EIO <at> 5".to_owned()));
        let page = html(&record);
        assert!(page.contains("<p class=\"bad\">Failed: EIO &lt;at&gt; 5</p>"), "{page}");
        assert_eq!(unbalanced(&page), Vec::<String>::new());
    }

    /// Where Debian, Ubuntu and Fedora have a browser that draws without a display.
    fn browser() -> Option<PathBuf> {
        let names = ["chromium", "chromium-browser", "google-chrome"];
        let folders = ["/usr/bin", "/usr/local/bin", "/snap/bin"];
        let paths = folders.iter().flat_map(|folder| names.map(|name| Path::new(folder).join(name)));
        paths.into_iter().find(|path| path.is_file())
    }

    /// Shows a page in a window of this width, and returns the texts that leave the drawing.
    fn outside(browser: &Path, page: &str, width: u32) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.html");
        let script = "<script>const s=document.querySelector('svg').getBoundingClientRect();\
            document.title='OUTSIDE '+[...document.querySelectorAll('svg text')].filter(t=>{\
            const b=t.getBoundingClientRect();\
            return b.left<s.left||b.right>s.right||b.top<s.top||b.bottom>s.bottom}).map(t=>t.textContent).join('; ')\
            +' OF '+document.querySelectorAll('svg text').length</script></body>";
        std::fs::write(&path, page.replace("</body>", script)).unwrap();
        let mut command = Command::new(browser);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]);
        command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
        command.args(["--virtual-time-budget=1000", "--dump-dom", &format!("--window-size={width},900")]);
        command.arg(format!("--user-data-dir={}", folder.path().join("profile").display()));
        command.arg(format!("file://{}", path.display())).stdin(Stdio::null()).stderr(Stdio::null());
        let shown = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let title = shown.split_once("<title>OUTSIDE ").and_then(|(_, rest)| rest.split_once("</title>"));
        title.unwrap_or_else(|| panic!("the browser has not run the page: {shown}")).0.to_owned()
    }

    #[test]
    fn no_text_leaves_the_drawing_in_a_browser() {
        let browser = need!(browser(), "there is no Chromium");
        let page = html(&example::record());
        let texts = page.matches("<text").count();
        for width in [1200, 500] {
            assert_eq!(outside(&browser, &page, width), format!(" OF {texts}"), "{width} wide");
        }
        let long =
            page.replace("in the background", "in the background of a drawing that is not as wide as that");
        assert!(
            outside(&browser, &long, 500).contains("128.0 MiB working set"),
            "the check finds what is cut"
        );
    }

    #[test]
    fn memory_faults_and_gates_are_all_in_it() {
        let page = html(&example::record());
        for part in [
            "renderD129",
            "<td>CPUs</td>",
            "5.2 GiB of 5.2 GiB",
            "2952.0 ms",
            "1400.0 ms</td>",
            "43.2 ms",
            "85 µs",
            "0x7f00",
        ] {
            assert!(page.contains(part), "{part}");
        }
        assert!(!html(&Record::default()).contains("Longest faults"));
    }
}
