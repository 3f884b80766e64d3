// SPDX-License-Identifier: MIT OR Apache-2.0
//! userfaultfd: exact outcomes, every operation that lazy restore needs, decoded events
