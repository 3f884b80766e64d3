// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU image formats: read, write, validate; never trusts a length
