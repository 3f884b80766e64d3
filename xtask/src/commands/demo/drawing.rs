// SPDX-License-Identifier: MIT OR Apache-2.0
//! Extracts the drawing from a timeline's page.

use anyhow::Context as _;

/// The `svg` element of a page, with the page's colours, as a file of its own.
///
/// # Errors
/// The page has none.
pub(super) fn drawing(page: &str) -> anyhow::Result<String> {
    let style = between(page, "<style>", "</style>").context("the timeline has no <style>")?;
    let svg = between(page, "<svg ", "</svg>").context("the timeline has no <svg>")?;
    let (attributes, shapes) = svg.split_once('>').context("the timeline's <svg> has no end")?;
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" {attributes}>\n<style>{style}</style>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"var(--back)\"/>{shapes}</svg>\n"
    ))
}

fn between<'a>(text: &'a str, begin: &str, end: &str) -> Option<&'a str> {
    text.split_once(begin)?.1.split_once(end).map(|(inside, _)| inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawing_has_the_colours_of_its_page() {
        let page = "<html><style>:root{--back:#fff}</style><svg viewBox=\"0 0 8 4\">\n<line/>\n</svg></html>";
        let svg = drawing(page).unwrap();
        assert!(
            svg.starts_with("<svg xmlns=") && svg.contains("viewBox=\"0 0 8 4\">\n<style>:root{--back:#fff}")
        );
        assert!(svg.ends_with("<line/>\n</svg>\n"), "{svg}");
        assert!(drawing("<html></html>").is_err());
    }
}
