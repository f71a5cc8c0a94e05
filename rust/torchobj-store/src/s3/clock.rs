//! The time of the store: that of this machine, plus the clock skew that responses show. All signatures use it, those of the
//! SDK included.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime};

use aws_smithy_async::time::TimeSource;

use crate::http::date::skew_s;

/// Seconds by which the clock of the store is ahead of this machine's; 0 if unknown. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock(Arc<AtomicI64>);

impl Clock {
    /// The clock skew in seconds.
    pub(super) fn skew_s(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Updates the clock skew from the `Date` of a response. Returns whether it differs from that of the request.
    pub(super) fn update(&self, date: Option<&str>, used_skew_s: i64) -> bool {
        const NOTICED_S: u64 = 60;
        let Some(skew_s) = date.and_then(skew_s) else { return false };
        if self.0.swap(skew_s, Ordering::Relaxed).abs_diff(skew_s) > NOTICED_S {
            log::warn!(
                "the clock of this machine differs by {skew_s} s from the store's: requests are signed with the store's time"
            );
        }
        used_skew_s.abs_diff(skew_s) > NOTICED_S
    }
}

/// Returns whether AWS refuses the time of a signature: it differs by 15 minutes or more from the `Date` of the response.
pub(super) fn is_skewed(date: Option<&str>, used_skew_s: i64) -> bool {
    const ALLOWED_S: u64 = 15 * 60;
    date.and_then(skew_s).is_some_and(|skew_s| used_skew_s.abs_diff(skew_s) >= ALLOWED_S)
}

impl TimeSource for Clock {
    fn now(&self) -> SystemTime {
        let skew_s = self.skew_s();
        let now = SystemTime::now();
        let by = Duration::from_secs(skew_s.unsigned_abs());
        if skew_s >= 0 { now + by } else { now - by }
    }
}
