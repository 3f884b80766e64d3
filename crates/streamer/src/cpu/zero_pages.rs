// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which pages of an image are zero.

use rewake_pager::PAGE_SIZE;

#[expect(clippy::cast_possible_truncation, reason = "4096")]
pub(super) const PAGE_LEN: usize = PAGE_SIZE as usize;

/// Returns whether the first page is zero, and the bytes of the leading whole pages that share this property.
pub(super) fn leading_stretch(bytes: &[u8]) -> (bool, usize) {
    let mut pages = bytes.chunks(PAGE_LEN);
    let zero = pages.next().is_some_and(is_zero);
    let more = pages.take_while(|page| is_zero(page) == zero).count();
    (zero, (more + 1) * PAGE_LEN)
}

/// Returns whether every byte is zero. Most other pages differ in the first words.
pub(super) fn is_zero(page: &[u8]) -> bool {
    page.iter().take(16).all(|byte| *byte == 0)
        && page.chunks(256).all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_with_one_byte_set_anywhere_is_not_zero() {
        let mut page = vec![0; PAGE_LEN];
        assert!(is_zero(&page));
        for at in [0, 15, 16, 255, 256, 2048, 4095] {
            page[at] = 1;
            assert!(!is_zero(&page), "{at}");
            page[at] = 0;
        }
    }

    #[test]
    fn leading_zero_and_other_pages_are_distinguished() {
        let mut bytes = vec![0; 5 * PAGE_LEN];
        bytes[2 * PAGE_LEN] = 1;
        bytes[4 * PAGE_LEN - 1] = 1;
        assert_eq!(leading_stretch(&bytes), (true, 2 * PAGE_LEN));
        assert_eq!(leading_stretch(&bytes[2 * PAGE_LEN..]), (false, 2 * PAGE_LEN));
        assert_eq!(leading_stretch(&bytes[4 * PAGE_LEN..]), (true, PAGE_LEN));
    }
}
