// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a destination waits for a lost connection.

use std::time::Duration;

use crate::host::HostOffer;
use crate::{source, source_options};

/// Time without a connection before GRANT is asked for, of a source without `--give-up-after`.
pub(crate) const LOST_LIMIT: Duration = source_options::LOST_LIMIT.saturating_add(NOTICE_LIMIT);
/// Time without a connection after which missing memory is given up, or GRANT, which the source may have
/// written, or the confirmation of an answer. It is longer than the source's limit by the time in which a
/// lost connection is noticed.
pub(crate) const GIVE_UP_LIMIT: Duration = source::GIVE_UP_LIMIT.saturating_add(NOTICE_LIMIT);
/// The most of it that a source may want.
const LONGEST_LOST_LIMIT: Duration = Duration::from_secs(3600);
/// Time in which a source notices that a connection is lost: 20 s, and 5 s for an attempt to connect. Its own
/// limit begins then, and passes first, so it decides. A destination cannot wait for less: a connection that
/// the peer has closed looks the same if the source is killed and if a proxy between them was restarted.
const NOTICE_LIMIT: Duration = Duration::from_secs(30);

/// Time without a connection before GRANT is asked for, longer than the limit that the offer's source has.
pub(crate) fn lost_limit(offer: &str) -> Duration {
    let source = HostOffer::read(offer).map_or(0, |offer| offer.give_up_after);
    LOST_LIMIT.max(Duration::from_secs(source).min(LONGEST_LOST_LIMIT) + NOTICE_LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_waits_longer_than_its_source() {
        let offer = |seconds: u64| {
            format!(
                r#"{{"architecture":"","cpu_features":[],"criu":[4,2],"pids":[],"files":{{}},"gpus":[],
                    "terminals":[],"sockets":[],"size":{{"resident":0,"anonymous":0}},"has_users":false,
                    "mappings":{{"longest":null,"total":0,"extra":0}},"huge_pages":{{}},
                    "give_up_after":{seconds}}}"#
            )
        };
        for (source, limit) in [(0, 35), (5, 35), (60, 90), (600, 630), (u64::MAX, 3630)] {
            assert_eq!(lost_limit(&offer(source)), Duration::from_secs(limit));
        }
        assert_eq!(lost_limit(""), LOST_LIMIT);
    }
}
